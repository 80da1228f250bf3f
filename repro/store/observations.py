"""Observations of jobs: one value per series and unit, in Parquet with a checksum and provenance.

A series is a name (`wikitext2/nll`), the group whose axis it shares (a corpus under a protocol, a task), what that
axis counts (windows, items, layers, model), and values. Every number that is shown is computed from series. Files hold
whole numbers exactly and others in single precision (`as_kept`), which is what arithmetic on a device is worth.

The checksum covers values and metadata: it finds damage and slips of the hand, it is no signature.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from repro.core.errors import UserError
from repro.core.files import atomic, reading, sha256
from repro.store import provenance
from repro.store.job import Job

FILE = "observations.parquet"
ORIGIN = ("job", "inputs", "artifacts", "device", "device_class", "commit", "versions", "environment")
LARGEST = 900_000  # bytes of a packed file
TEXTS = ["cell", "name", "group", "units"]  # repeated in every row; read as dictionaries, which is 20 times as fast
WORDS = [*TEXTS, "seed"]
COUNTED = {"unit": "DELTA_BINARY_PACKED"}  # units count up from 0 in every series; saves a tenth of the bytes
WHOLE = 2**30  # page size in bytes and rows: a column is one page, as zstd finds repetitions only within a page
PACKING: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 19,
    "data_page_size": WHOLE,
    "max_rows_per_page": WHOLE,
    "dictionary_pagesize_limit": WHOLE,
    "write_page_checksum": True,
    "write_statistics": False,
    "store_schema": False,  # Arrow's own copy of the schema takes 1 kB a file
}
ENCODINGS: tuple[dict[str, Any], ...] = (  # for values that repeat, such as 0 and 1; for values whose first bytes do
    {"use_dictionary": [*WORDS, "whole", "value"], "column_encoding": COUNTED},
    {"use_dictionary": [*WORDS, "whole"], "column_encoding": COUNTED | {"value": "BYTE_STREAM_SPLIT"}},
)
SCHEMA = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("group", pa.string(), nullable=False),
        pa.field("units", pa.string(), nullable=False),
        pa.field("unit", pa.int32(), nullable=False),
        pa.field("value", pa.float64(), nullable=False),
    ]
)
KEYED = pa.schema([pa.field("cell", pa.string()), pa.field("seed", pa.int32()), *SCHEMA])  # `SCHEMA` of many cells


def _packed(values: pa.DataType, split: bool) -> pa.Schema:
    """The columns of a file in results/: those of `KEYED`, the last of a narrower type, or as two."""
    columns = list(KEYED)[:-1]
    if split:
        return pa.schema([*columns, pa.field("whole", pa.int64()), pa.field("value", values)])
    return pa.schema([*columns, pa.field("value", values, nullable=False)])


# Of these the one that takes the fewest bytes is written, single precision only where it is exact. Split, a series of
# whole numbers, such as the right answers of a task, has its values in `whole`, any other in `value`.
PACKED = tuple(_packed(*form) for form in product((pa.float64(), pa.float32()), (False, True)))


@dataclass(frozen=True, eq=False)
class Series:
    """Values `[n]`, what their axis counts, and the group of series that share it."""

    values: np.ndarray
    axis: str
    group: str = ""


@dataclass(frozen=True)
class Observations:
    """The series of a job by name, and its metadata."""

    series: Mapping[str, Series]
    meta: Mapping[str, str]

    @property
    def digest(self) -> str:
        """16 hex digits of all series."""
        return digest(self.series)

    def only(self, name: str) -> dict[str, Series]:
        """One of the series under its name; empty where there is none."""
        return {name: self.series[name]} if name in self.series else {}


def digest(series: Mapping[str, Series]) -> str:
    """16 hex digits of names, groups, units and the bytes of all values."""
    hashed = hashlib.sha256()
    for name, of_name in sorted(series.items()):
        hashed.update(f"{name}\0{of_name.group}\0{of_name.axis}\0{len(of_name.values)}\0".encode())
        hashed.update(np.ascontiguousarray(of_name.values, dtype="<f8").tobytes())
    return hashed.hexdigest()[:16]


def checksum(series: Mapping[str, Series], meta: Mapping[str, str]) -> str:
    """16 hex digits of all series and of the metadata beside them."""
    facts = {key: value for key, value in meta.items() if key != "checksum"}
    return hashlib.sha256(f"{digest(series)} {json.dumps(facts, sort_keys=True)}".encode()).hexdigest()[:16]


def origin(job: Job, versions: Mapping[str, int], folders: Mapping[str, Path] | None = None) -> dict[str, str]:
    """The metadata of a job's observations: job, device, commit, versions, environment, digests of what it read."""
    read = {}
    for role, folder in (folders or {}).items():
        read |= {f"{role}/{path.name}": sha256(path)[:16] for path in stored(folder)}
    device = job.parsed_options().get("device", "cpu")
    return {
        "job": job.id,
        "inputs": job.inputs,
        "artifacts": json.dumps(read, sort_keys=True),
        "device": provenance.device_name(device),
        "device_class": device,
        "commit": provenance.commit(),
        "versions": " ".join(f"{name}={version}" for name, version in sorted(versions.items())),
        "environment": provenance.environment(),
    }


def stored(folder: Path) -> list[Path]:
    """The tensors of a job's folder, sorted; a temporary file that a killed process left is none of them."""
    return [path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith(".")]


def save(path: Path, series: Mapping[str, Series], meta: Mapping[str, str]) -> None:
    """Write series and metadata atomically, after the job's other results have been written to the same folder.

    The metadata gets `made`, the digests of these results, and `checksum`. A series without values is left out, since a
    file has only rows.

    Raises:
        UserError: a value that is not finite.
    """
    for name, of_name in series.items():
        if not np.isfinite(of_name.values).all():
            raise UserError(f"{path}: {name} has values that are not finite; a result without a number is a status")
    series = {name: as_kept(of_name) for name, of_name in series.items() if len(of_name.values)}
    made = {file.name: sha256(file)[:16] for file in stored(path.parent)}
    meta = {**meta, "made": json.dumps(made)}
    table = to_table(series).replace_schema_metadata({**meta, "checksum": checksum(series, meta)})
    with atomic(path) as temporary:
        pq.write_table(table, temporary, write_page_checksum=True)


def as_kept(series: Series) -> Series:
    """A series as files store it: whole numbers exactly, others in single precision (1 part in 17 million).

    The further digits of a double differ between cards.
    """
    values = np.asarray(series.values, dtype=float)
    single = values.astype(np.float32).astype(float)
    return replace(series, values=np.where(values == np.rint(values), values, single))


def to_table(series: Mapping[str, Series]) -> pa.Table:
    """The long form: a row per series and unit."""
    return _long([((), series)], SCHEMA)


def _long(keyed: Iterable[tuple[tuple[str | int, ...], Mapping[str, Series]]], schema: pa.Schema) -> pa.Table:
    """The long form of the series of several keys; the columns of the keys come first in `schema`."""
    words, values = [], []
    for key, series in keyed:
        for name, of_name in series.items():
            words.append((*key, name, of_name.group, of_name.axis))
            values.append(np.asarray(of_name.values, dtype=float))
    lengths = [len(of_series) for of_series in values]
    owner = np.repeat(np.arange(len(values)), lengths)
    columns = []
    for i in range(len(schema) - 2):
        column = pa.array([row[i] for row in words], schema.field(i).type)
        columns.append(column.take(owner))
    units = [np.arange(length, dtype=np.int32) for length in lengths]
    columns += [np.concatenate(units or [np.zeros(0, np.int32)]), np.concatenate(values or [np.zeros(0)])]
    return pa.table(columns, schema=schema)


def from_table(table: pa.Table, key: Sequence[str] = ()) -> dict[tuple[Any, ...], dict[str, Series]]:
    """The series of a table in the long form by its `key` columns, in the order in which they were written.

    Raises:
        ValueError: a series in two groups or keys, or with a unit that is missing, given twice or out of order.
    """
    by_key: dict[tuple[Any, ...], dict[str, Series]] = {}
    columns = [table[name].combine_chunks().dictionary_encode() for name in (*key, "name", "group", "units")]
    codes = np.stack([column.indices.to_numpy() for column in columns])
    words = [column.dictionary.to_pylist() for column in columns]
    unit, value = table["unit"].to_numpy(), table["value"].to_numpy()
    edges = [0, *(np.flatnonzero((codes[:, 1:] != codes[:, :-1]).any(0)) + 1).tolist(), len(unit)]
    for start, end in pairwise(edges) if len(unit) else ():
        *where, name, group, units = (dictionary[i] for dictionary, i in zip(words, codes[:, start]))
        series = by_key.setdefault(tuple(where), {})
        if name in series or not np.array_equal(unit[start:end], np.arange(end - start)):
            raise ValueError(f"the series {name!r} is not one value per unit")
        series[name] = Series(value[start:end].copy(), units, group)
    return by_key


def read(path: Path, *schemas: pa.Schema) -> tuple[pa.Table, dict[str, str]]:
    """A Parquet file as a table, and its metadata.

    Args:
        path: the file.
        schemas: the columns that it may have.

    Raises:
        UserError: the file is missing, cannot be read, is damaged or cut short, or has other columns.
    """
    try:
        with reading(path):
            footer = pq.read_metadata(path)
            texts = [name for name in TEXTS if name in footer.schema.names]
            with pq.ParquetFile(path, metadata=footer, read_dictionary=texts, page_checksum_verification=True) as file:
                table = file.read()
        meta = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; build it again") from None
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        first = " ".join(str(error).split())[:150]
        raise UserError(
            f"{path}: an incomplete or damaged Parquet file ({first}); delete it and build it again"
        ) from None
    plain = pa.schema([field.with_type(getattr(field.type, "value_type", field.type)) for field in table.schema])
    if plain not in schemas:
        raise UserError(f"{path}: its columns are not those of observations; delete it and build it again")
    return table, meta


def load(path: Path) -> Observations:
    """Read what `save` wrote.

    Raises:
        UserError: the file is missing, cut short, has other columns, or is not what its checksum says.
    """
    table, meta = read(path, SCHEMA)
    try:
        series = from_table(table).get((), {})
    except ValueError as error:
        raise UserError(f"{path}: {error}; delete it and build it again") from None
    if meta.get("checksum") != checksum(series, meta):
        raise UserError(f"{path}: its contents do not match its checksum; delete it and build it again")
    return Observations(series, meta)


def once(path: Path, stamp: int) -> Observations:
    """As `load`, cached for each version of the file; `stamp` is its modification time in ns."""
    return _once(path, Path.cwd(), stamp, path.stat().st_ino)


@cache
def _once(path: Path, working: Path, stamp: int, inode: int) -> Observations:
    return load(path)


# --- the series of many cells, packed for results/ --------------------------------------------------------------------

SeriesByCell = Mapping[tuple[str, int], Mapping[str, Series]]  # by cell key and seed


def pack(series_by_cell: SeriesByCell) -> list[tuple[str, bytes]]:
    """Digest and content of Parquet files with a row per cell, seed, series and unit, each below 1 MB.

    Cells and seeds with the same series, such as two numbers of one job, are stored once, with the first of them.
    """
    once: dict[str, tuple[tuple[str, int], Mapping[str, Series]]] = {}
    for key, seed in sorted(series_by_cell.items()):
        once.setdefault(digest(seed), (key, seed))
    return _files(list(once.values()))


def _files(keyed: Sequence[tuple[tuple[str, int], Mapping[str, Series]]]) -> list[tuple[str, bytes]]:
    """Digest and content of as many files as keep each below `LARGEST`."""
    if not keyed:
        return []
    of_all = packed_digest(dict(keyed))
    data = b""
    for table in _packed_tables(keyed):
        table = table.replace_schema_metadata({"digest": of_all})
        for encoding in ENCODINGS:
            written = _written(table, encoding)
            if not data or len(written) < len(data):
                data = written
    if len(data) <= LARGEST or len(keyed) == 1:
        return [(of_all, data)]
    middle = len(keyed) // 2
    return _files(keyed[:middle]) + _files(keyed[middle:])


def _packed_tables(keyed: Sequence[tuple[tuple[str, int], Mapping[str, Series]]]) -> list[pa.Table]:
    """The series in every form of `PACKED` that is exact."""
    long = _long(keyed, KEYED)
    keys, values = long.columns[:-1], long["value"].to_numpy()
    flags, lengths = [], []
    for _, series in keyed:
        for of_name in series.values():
            flags.append(_has_only_whole_numbers(of_name.values))
            lengths.append(len(of_name.values))
    is_whole = np.repeat(np.array(flags, bool), lengths)
    whole = pa.array(np.where(is_whole, values, 0).astype(np.int64), mask=~is_whole)
    tables = []
    for schema in PACKED:
        with np.errstate(over="ignore"):  # what single precision cannot hold becomes infinite, and is no exact form
            narrow = values.astype(schema.field("value").type.to_pandas_dtype())
        if "whole" in schema.names:
            if np.array_equal(values[~is_whole], narrow[~is_whole]):
                tables.append(pa.table([*keys, whole, pa.array(narrow, mask=is_whole)], schema=schema))
        elif np.array_equal(values, narrow):
            tables.append(pa.table([*keys, narrow], schema=schema))
    return tables


def _has_only_whole_numbers(values: np.ndarray) -> bool:
    """Whether integers hold values exactly; they have no -0.0, and doubles beyond 2**53 are not all whole numbers."""
    values = np.asarray(values, dtype=float)
    negative_zeros = np.signbit(values) & (values == 0)
    return bool(np.array_equal(values, np.rint(values)) and (abs(values) < 2**53).all() and not negative_zeros.any())


def _written(table: pa.Table, encoding: Mapping[str, Any]) -> bytes:
    out = pa.BufferOutputStream()
    with pq.ParquetWriter(out, table.schema, **PACKING, **encoding) as file:
        file.write_table(table, row_group_size=WHOLE)
        file.add_key_value_metadata(table.schema.metadata)
    return out.getvalue().to_pybytes()


def unpack(path: Path) -> tuple[dict[tuple[str, int], dict[str, Series]], str]:
    """The series of a packed file by cell key and seed, and their digest.

    Raises:
        UserError: the file is damaged or does not match its checksum.
    """
    table, meta = read(path, *PACKED)
    value = table["value"].cast(pa.float64())
    if "whole" in table.schema.names:
        value = pc.coalesce(value, table["whole"].cast(pa.float64()))
    try:
        by_cell = from_table(table.drop_columns("value").append_column("value", value), ("cell", "seed"))
    except ValueError as error:
        raise UserError(f"{path}: {error}; check it out again") from None
    if meta.get("digest") != packed_digest(by_cell):
        raise UserError(f"{path}: its values do not match its checksum; check it out again")
    return by_cell, meta["digest"]


def packed_digest(series_by_cell: SeriesByCell) -> str:
    """16 hex digits of cells, seeds and their series."""
    series = {}
    for (cell, seed), of_cell in series_by_cell.items():
        series |= {f"{cell}\0{seed}\0{name}": values_of for name, values_of in of_cell.items()}
    return digest(series)
