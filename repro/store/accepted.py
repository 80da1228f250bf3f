"""Accepted results: `results/<device>/<paper>-<table>.csv.xz`, their series beside them, and the only way in.

`accept` takes a table that was built here (or whose job folders `repro run` made on another machine and that were
brought here), recomputes every value from the observations in those folders, and merges it. The file of measurements
only says which table and scale are meant: no number and no path in it is believed.

    results/<device>/spear-table1.csv.xz       a line a cell, with a digest of all its fields
    results/<device>/kernels.csv.xz            a line a kernel time (`kernel_rows`), which has no series and no inputs
    results/<device>/rows.json                 which rows each file has: a digest of their keys
    results/<device>/observations/spear-table1-<kind>-<hash>.parquet   a row per cell, seed and unit; split at 1 MB
    results/<device>/inputs.json.xz            what the hashes of declared inputs stand for

Files of observations are named by their content and never rewritten, and a row names its series by digest: whenever
writing is interrupted, the rows that are there have their series.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from repro.core.errors import UserError
from repro.core.files import atomic, read_text, write_text
from repro.papers.cell import Cell, CellKey
from repro.store import folded, measurement, observations, row_list
from repro.store.measurement import Measurement, from_csv
from repro.store.observations import Series
from repro.store.stored_row import ENDING, StoredRow

RESULTS = measurement.RESULTS
OF_CELLS = f"*-*{ENDING}"  # of measurements; kernel times, which `repro.store.kernel_rows` reads, have no dash
INPUTS = "inputs.json.xz"  # spells out the hashes of declared inputs of a device's rows


def path_of(row: StoredRow) -> Path:
    """The file that an accepted row is in; of one that several cards measured it is the first one's."""
    return RESULTS / row.stored_as


def _stem(path: Path) -> str:
    """The name of a file of rows without its ending; those of its observations begin with it."""
    return path.name.removesuffix(ENDING)


@cache
def _rows(results: Path, name: str) -> dict[tuple[CellKey, str], Measurement]:
    """CellKey and scale to its row, of one table; where several devices have a cell, the last by the folder's name."""
    rows = {}
    for folder in sorted(results.glob("*/")):
        path = folder / f"{name}{ENDING}"
        if row_list.is_stored(path):
            rows |= {(row.cell_key, row.scale): row for row in row_list.read(path, Measurement)}
    return rows


def find(scale: str, cell: Cell | Measurement) -> Measurement | None:
    """The accepted measurement of a cell at a scale."""
    return _rows(RESULTS, cell.table.replace("/", "-")).get((cell.cell_key, scale))


def equal(scale: str, inputs: str) -> Sequence[Measurement]:
    """The accepted measurements of a hash of declared inputs, of all tables; the last by the folder's name first.

    After whole rows come single seeds of rows with several, without a value: it is that of their series.
    """
    return _by_inputs(RESULTS).get((scale, inputs), ())


@cache
def _by_inputs(results: Path) -> dict[tuple[str, str], list[Measurement]]:
    """Scale and hash of declared inputs to rows, and to single seeds of rows, of all tables and devices."""
    rows = list(reversed(every()))
    by_inputs: dict[tuple[str, str], list[Measurement]] = {}
    for one in chain(rows, *map(_seeds, rows)):
        by_inputs.setdefault((one.scale, one.inputs), []).append(one)
    return by_inputs


def _seeds(row: Measurement) -> Iterator[Measurement]:
    """Each seed of a row with several as a row of its own: its inputs and its series."""
    seeds, digests = row.seeds.split(), row.observations.split()
    declared = inputs_of(row) if len(digests) > 1 else None
    for i, (seed, digest) in enumerate(zip(seeds, digests) if declared else ()):
        hash = measurement.inputs_hash(declared | {name: declared[name][i : i + 1] for name in ("recipe", "jobs")})
        yield replace(row, seeds=seed, observations=digest, inputs=hash, value=None, lo=None, hi=None, n=None)


def of_table(table: str) -> list[Measurement]:
    """The accepted measurements of one table, of all devices and scales.

    Raises:
        UserError: its file is damaged.
    """
    return list(_rows(RESULTS, table.replace("/", "-")).values())


def every() -> list[Measurement]:
    """All accepted measurements of cells, of all devices."""
    return list(chain(*(row_list.read(path, Measurement) for path in files())))


def files() -> list[Path]:
    """The files of measurements of cells, of all devices; those that are missing, too."""
    return list(chain(*map(_files, sorted(RESULTS.glob("*/")))))


def _files(folder: Path) -> list[Path]:
    """Those in a device's folder; kernel times, peers' times and sanitizer results are others."""
    paths = {folder / name for name in row_list.listed(folder) if fnmatchcase(name, OF_CELLS)}
    for path in folder.glob(OF_CELLS):
        if path not in paths and read_text(path).startswith("paper,kind,number,row,"):
            paths.add(path)
    return sorted(paths)


# --- series -----------------------------------------------------------------------------------------------------------


@cache
def _packed(folder: Path, name: str) -> dict[str, dict[str, Series]]:
    """The series of a table's cells and seeds by their digest."""
    by_digest = {}
    for path in _packs(folder, name):
        series_by_cell, digest = observations.unpack(path)
        if not path.stem.endswith(digest[:8]):
            raise UserError(f"{path}: its name is not that of its contents; check it out again")
        by_digest |= {observations.digest(one): one for one in series_by_cell.values()}
    return by_digest


def _packs(folder: Path, name: str) -> list[Path]:
    """A table's files of observations."""
    ours = re.compile(re.escape(name) + r"-\w+-[0-9a-f]{8}\.parquet")
    return [path for path in sorted(folder.glob("observations/*.parquet")) if ours.fullmatch(path.name)]


def series(row: Measurement) -> list[dict[str, Series]]:
    """The series of an accepted row, a mapping a seed; empty where none are kept.

    Raises:
        UserError: a file that does not match its checksum, or without the series of the row.
    """
    path, wanted = path_of(row), row.observations.split()
    by_digest = _packed(path.parent, _stem(path))
    if not by_digest.keys() >= set(wanted):
        raise UserError(
            f"{path}: the observations of {row.where_stored} are not in {path.parent / 'observations'}; "
            "check both out again"
        )
    return [by_digest[digest] for digest in wanted]


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class AcceptedRow:
    """A checked row with all that is kept of it.

    Attributes:
        row: a measurement, or a kernel time, which is all that is kept of it.
        seeds: its series, a mapping a seed; none where it could not be done.
        inputs: its declared inputs, whose hash is the row's.
    """

    row: Any
    seeds: Sequence[Mapping[str, Series]] = ()
    inputs: Mapping[str, Any] = field(default_factory=dict)


def write(accepted_rows: Iterable[AcceptedRow]) -> dict[str, int]:
    """Merge rows into results/: data before rows, nothing that a row needs is ever rewritten.

    Returns:
        Number of rows by file that was written.

    Raises:
        UserError: what is there already is damaged; nothing is written then.
    """
    new: dict[Path, dict[tuple[Any, ...], AcceptedRow]] = {}
    for one in accepted_rows:
        new.setdefault(path_of(one.row), {})[one.row.key] = one
    whole = {}
    for path, rows in new.items():
        of = type(next(iter(rows.values())).row)
        whole[path] = _others(path, of, rows) | rows
    for path, rows in whole.items():  # all that is there was read and checked
        _write(path, [rows[key] for key in sorted(rows)])
    forget()
    return {str(path): len(rows) for path, rows in new.items()}


def _others(path: Path, of: type[StoredRow], new: Collection[tuple[Any, ...]]) -> dict[tuple[Any, ...], AcceptedRow]:
    """The rows of a class that a file holds already besides the keys `new`, by key."""
    by_key = {}
    for row in row_list.read(path, of) if row_list.is_stored(path) else []:
        if row.key not in new:
            kept = [series(row), inputs_of(row) or {}] if isinstance(row, Measurement) else []
            by_key[row.key] = AcceptedRow(row, *kept)
    return by_key


def _write(path: Path, rows: Sequence[AcceptedRow]) -> None:
    """Write a file with all that its rows need; only then remove what they do not need any more."""
    packs = _write_series(path, rows)
    if not rows or any(one.inputs for one in rows):  # a kernel time has none
        _write_inputs(path, rows)
    store(path, [one.row for one in rows])
    for pack in set(_packs(path.parent, _stem(path))) - packs:
        pack.unlink()


def _write_series(path: Path, rows: Sequence[AcceptedRow]) -> set[Path]:
    """Write the series of a file's rows that are not there yet; the files that hold them."""
    by_measure: dict[str, dict[tuple[str, int], Mapping[str, Series]]] = {}
    for one in rows:
        if not one.seeds:
            continue
        cell = json.dumps([*one.row.cell_key, one.row.scale], ensure_ascii=False)
        of_kind = by_measure.setdefault(one.inputs.get("measure", "other"), {})
        of_kind |= {(cell, i): seed for i, seed in enumerate(one.seeds)}
    packs = {}
    for measure, by_cell in by_measure.items():
        for digest, data in observations.pack(by_cell):
            packs[path.parent / "observations" / f"{_stem(path)}-{measure}-{digest[:8]}.parquet"] = data
    for pack, data in packs.items():
        if not pack.is_file():
            with atomic(pack) as temporary:
                temporary.write_bytes(data)
    return set(packs)


def _write_inputs(path: Path, rows: Sequence[AcceptedRow]) -> None:
    """Write what the hashes of a device's declared inputs stand for, with those of a file's new rows."""
    used = set()
    for file in _files(path.parent):
        if file.is_file():
            used |= {row.inputs for row in from_csv(file)}
    known = {hash: facts for hash, facts in _facts(path.with_name(INPUTS)).items() if hash in used}
    known |= {one.row.inputs: one.inputs for one in rows if one.inputs}
    said = sorted(folded.fold(dict(sorted(known.items()))).items())
    lines = [f"{json.dumps(hash)}: {folded.text(facts)}" for hash, facts in said]
    write_text(path.with_name(INPUTS), "{\n" + ",\n".join(lines) + "\n}\n")
    _facts_of.cache_clear()  # a file that was written twice within a tick of the clock has one time


def store(path: Path, rows: Sequence[StoredRow]) -> None:
    """Write a file of signed rows; without rows it goes. Whenever that is interrupted, the file and its keys agree."""
    row_list.write(path, rows)


def rewrite(change: Callable[[AcceptedRow], AcceptedRow | None]) -> dict[str, int]:
    """Rewrite every stored row through a function and sign them anew, as when a scale gets another name.

    Args:
        change: from a stored row with its series and declared inputs to what replaces it; None removes it.
            The hashes of inputs and the digests of series are made anew.

    Returns:
        Number of rows by file afterwards.

    Raises:
        UserError: what is there already is damaged, or two rows became one; nothing is written then.
    """
    new: dict[Path, dict[tuple[str, ...], AcceptedRow]] = {path: {} for path in files()}
    for path in files():
        for old in _others(path, Measurement, ()).values():
            changed = change(old)
            if changed is None:
                continue
            row = changed.row
            if changed.inputs != old.inputs:
                row = replace(row, inputs=measurement.inputs_hash(changed.inputs))
            row = replace(row, observations=" ".join(map(observations.digest, changed.seeds)))
            rows = new.setdefault(path_of(row), {})
            if row.key in rows:
                raise UserError(f"{path_of(row)}: {row.where_stored} would be stored twice")
            rows[row.key] = replace(changed, row=row)
    for path, rows in new.items():
        _write(path, [rows[key] for key in sorted(rows)])
    forget()
    return {str(path): len(rows) for path, rows in new.items()}


def _facts(path: Path) -> dict[str, Any]:
    """What hashes stand for."""
    return _facts_of(path, path.stat().st_mtime_ns) if path.is_file() else {}


@cache
def _facts_of(path: Path, stamp: int) -> dict[str, Any]:
    try:
        return folded.unfold(dict(json.loads(read_text(path))))
    except (ValueError, TypeError):
        raise UserError(f"{path}: not a JSON mapping; check it out again") from None


def inputs_of(row: Measurement) -> dict[str, Any] | None:
    """The declared inputs of an accepted row; None where they are not known.

    Raises:
        UserError: results/<device>/inputs.json.xz says others than the row's hash.
    """
    path = path_of(row).with_name(INPUTS)
    return _checked_inputs(path, path.stat().st_mtime_ns, row.inputs) if path.is_file() else None


@cache
def _checked_inputs(path: Path, stamp: int, hash: str) -> dict[str, Any] | None:
    inputs = _facts_of(path, stamp).get(hash)
    if inputs is not None and measurement.inputs_hash(inputs) != hash:
        raise UserError(f"{path}: its entry {hash} does not match its hash; check it out again")
    return inputs


def forget() -> None:
    """Read results/ anew at the next question."""
    _rows.cache_clear()
    _by_inputs.cache_clear()
    _facts_of.cache_clear()
    _checked_inputs.cache_clear()
    _packed.cache_clear()
