"""Accepted results: `results/<device>/<paper>-<table>.csv.xz`, their series beside them, and the only way in.

`accept` takes a table that was built here (or whose job folders `repro run` made on another machine and that were
brought here), recomputes every value from the observations in those folders, and merges it. The file of measurements
only names the table and the scale: no number and no path in it is trusted.

    results/<device>/spear-table1.csv.xz       a line a cell, with a digest of all its fields
    results/<device>/kernels.csv.xz            a line a kernel time (`kernel_rows`), which has no series and no inputs
    results/<device>/rows.json                 which rows each file has: a digest of their keys
    results/<device>/observations/spear-table1-<kind>-<hash>.parquet   a row per cell, seed and unit; split at 1 MB
    results/<device>/inputs.json.xz            what the hashes of declared inputs stand for

Files of observations are named by their content and never rewritten, and a row names its series by digest: whenever
writing is interrupted, the rows that are there have their series. Of several processes that write, one at a time reads,
merges and writes.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from repro.core.errors import UserError
from repro.core.files import atomic, one_at_a_time, read_text, write_text
from repro.papers.cell import Cell, CellKey
from repro.store import folded, measurement, observations, row_list
from repro.store.measurement import Measurement, from_csv
from repro.store.observations import Series
from repro.store.stored_row import ENDING, StoredRow

RESULTS = measurement.RESULTS
OF_CELLS = f"*-*{ENDING}"  # of measurements; kernel times, which `repro.store.kernel_rows` reads, have no dash
RowId = tuple[Path, tuple[Any, ...]]  # the file of a row (`stored_as`), and its key
INPUTS = "inputs.json.xz"  # spells out the hashes of declared inputs of a device's rows


def path_of(row: StoredRow) -> Path:
    """The file of an accepted row."""
    return RESULTS / row.stored_as


def _stem(path: Path) -> str:
    """The name of a file of rows without its ending, with which the names of its observation files begin."""
    return path.name.removesuffix(ENDING)


@cache
def _rows(results: Path, name: str) -> dict[tuple[CellKey, str], Measurement]:
    """Cell key and scale to the row, of one table; if several devices have a cell, the last by folder name."""
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
    """The accepted measurements of a hash of declared inputs, of all tables; the last by folder name first.

    Whole rows come before single seeds of rows with several. A single seed has no value; it follows from its series.
    """
    return _by_inputs(RESULTS).get((scale, inputs), ())


@cache
def _by_inputs(results: Path) -> dict[tuple[str, str], list[Measurement]]:
    """Scale and hash of declared inputs to rows, and to single seeds of rows, of all tables and devices."""
    rows = list(reversed(every()))
    by_inputs: dict[tuple[str, str], list[Measurement]] = {}
    for row in chain(rows, *map(_seeds, rows)):
        by_inputs.setdefault((row.scale, row.inputs), []).append(row)
    return by_inputs


def _seeds(row: Measurement) -> Iterator[Measurement]:
    """Each seed of a row with several seeds as a row of its own, with its inputs and series but no value."""
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
    """The files of measurements of all devices, listed files that are missing included."""
    return list(chain(*map(_files, sorted(RESULTS.glob("*/")))))


def _files(folder: Path) -> list[Path]:
    """The files of measurements in a device's folder; it also holds files of other kinds, such as kernel times."""
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
        by_digest |= {observations.digest(of_cell): of_cell for of_cell in series_by_cell.values()}
    return by_digest


def _packs(folder: Path, name: str) -> list[Path]:
    """A table's files of observations."""
    ours = re.compile(re.escape(name) + r"-\w+-[0-9a-f]{8}\.parquet")
    return [path for path in sorted(folder.glob("observations/*.parquet")) if ours.fullmatch(path.name)]


def series(row: Measurement) -> list[dict[str, Series]]:
    """The series of an accepted row, one mapping per seed; empty if none are stored.

    Raises:
        UserError: a file that does not match its checksum, or without the series of the row.
    """
    for read_rows in _recordings:
        read_rows.add((row.stored_as, row.key))
    path = path_of(row)
    digests = row.observations.split()
    by_digest = _packed(path.parent, _stem(path))
    if not by_digest.keys() >= set(digests):
        raise UserError(
            f"{path}: the observations of {row.where_stored} are not in {path.parent / 'observations'}; "
            "check both out again"
        )
    return [by_digest[digest] for digest in digests]


_recordings: list[set[RowId]] = []


@contextmanager
def recorded() -> Iterator[set[RowId]]:
    """Yield a set of the rows whose series are read in the block, of which everything is made that is shown."""
    read_rows: set[RowId] = set()
    _recordings.append(read_rows)
    try:
        yield read_rows
    finally:
        _recordings.pop()


# --- writing ----------------------------------------------------------------------------------------------------------


@contextmanager
def _one_writer() -> Iterator[None]:
    """Let one process at a time read results/, change rows and write them; what was read before is read again."""
    with one_at_a_time(RESULTS / "of any device"):
        forget()
        yield
        forget()


@dataclass(frozen=True, eq=False)
class AcceptedRow:
    """A checked row with everything that is stored of it.

    Attributes:
        row: a measurement; or a kernel time, which has no series and no inputs.
        seeds: its series, one mapping per seed; empty if the job could not be done.
        inputs: its declared inputs, whose hash is in the row.
    """

    row: Any
    seeds: Sequence[Mapping[str, Series]] = ()
    inputs: Mapping[str, Any] = field(default_factory=dict)


@_one_writer()
def write(accepted_rows: Iterable[AcceptedRow]) -> dict[str, int]:
    """Merge rows into results/. Series and inputs are written before the rows that need them.

    Returns:
        Number of rows by file that was written.

    Raises:
        UserError: the stored files are damaged; nothing is written then.
    """
    new: dict[Path, dict[tuple[Any, ...], AcceptedRow]] = {}
    for accepted_row in accepted_rows:
        new.setdefault(path_of(accepted_row.row), {})[accepted_row.row.key] = accepted_row
    merged = {}
    for path, rows in new.items():
        of = type(next(iter(rows.values())).row)
        merged[path] = _others(path, of, rows) | rows
    for path, rows in merged.items():  # all that is there was read and checked
        _write(path, [rows[key] for key in sorted(rows)])
    return {str(path): len(rows) for path, rows in new.items()}


def _others(path: Path, of: type[StoredRow], new: Collection[tuple[Any, ...]]) -> dict[tuple[Any, ...], AcceptedRow]:
    """The rows of a class that a file already has, except those with a key in `new`, by key."""
    by_key = {}
    for row in row_list.read(path, of) if row_list.is_stored(path) else []:
        if row.key not in new:
            data = [series(row), inputs_of(row) or {}] if isinstance(row, Measurement) else []
            by_key[row.key] = AcceptedRow(row, *data)
    return by_key


def _write(path: Path, rows: Sequence[AcceptedRow]) -> None:
    """Write a file with the series and inputs of its rows; then remove series that no row needs any more."""
    packs = _write_series(path, rows)
    if not rows or any(accepted_row.inputs for accepted_row in rows):  # a kernel time has none
        _write_inputs(path.parent, rows)
    store(path, [accepted_row.row for accepted_row in rows])
    for pack in set(_packs(path.parent, _stem(path))) - packs:
        pack.unlink()


def _write_series(path: Path, rows: Sequence[AcceptedRow]) -> set[Path]:
    """Write the series of a file's rows that are not stored yet; return the files that hold them all."""
    by_measure: dict[str, dict[tuple[str, int], Mapping[str, Series]]] = {}
    for accepted_row in rows:
        if not accepted_row.seeds:
            continue
        cell = json.dumps([*accepted_row.row.cell_key, accepted_row.row.scale], ensure_ascii=False)
        of_kind = by_measure.setdefault(accepted_row.inputs.get("measure", "other"), {})
        of_kind |= {(cell, i): seed for i, seed in enumerate(accepted_row.seeds)}
    packs = {}
    for measure, by_cell in by_measure.items():
        for digest, data in observations.pack(by_cell):
            packs[path.parent / "observations" / f"{_stem(path)}-{measure}-{digest[:8]}.parquet"] = data
    for pack, data in packs.items():
        if not pack.is_file():
            with atomic(pack) as temporary:
                temporary.write_bytes(data)
    return set(packs)


def _write_inputs(folder: Path, rows: Sequence[AcceptedRow]) -> None:
    """Write the declared inputs of a device's rows by hash, with those of rows that will be written."""
    used = set()
    for file in _files(folder):
        if file.is_file():
            used |= {row.inputs for row in from_csv(file)}
    facts_of = {hash: facts for hash, facts in _facts(folder / INPUTS).items() if hash in used}
    for accepted_row in rows:
        if accepted_row.inputs:
            facts_of[accepted_row.row.inputs] = accepted_row.inputs
    entries = sorted(folded.fold(dict(sorted(facts_of.items()))).items())
    lines = [f"{json.dumps(hash)}: {folded.text(facts)}" for hash, facts in entries]
    write_text(folder / INPUTS, "{\n" + ",\n".join(lines) + "\n}\n")
    _facts_of.cache_clear()  # two writes within a tick of the clock have the same time


def store(path: Path, rows: Sequence[StoredRow]) -> None:
    """Write a file of rows with their digests, or remove it if there are none.

    File and list (`row_list`) agree whenever that is interrupted.
    """
    row_list.write(path, rows)


@_one_writer()
def rewrite(change: Callable[[AcceptedRow], AcceptedRow | None]) -> dict[str, int]:
    """Pass every stored row through a function and store what it returns, as when a scale is renamed.

    Args:
        change: maps a stored row with its series and declared inputs to its replacement; None removes it. Of a new
            object the hash of inputs and digests of series are recomputed; a file without one is not written.

    Returns:
        Number of rows by file afterwards, of the files that were written.

    Raises:
        UserError: what is there already is damaged, or two rows became one; nothing is written then.
    """
    new: dict[Path, dict[tuple[str, ...], AcceptedRow]] = {path: {} for path in files()}
    changed_files = set()
    for path in files():
        for old in _others(path, Measurement, ()).values():
            changed = change(old)
            if changed is not old:
                changed_files.add(path)
            if changed is None:
                continue
            if changed is not old:
                changed = _hashed_again(old, changed)
                changed_files.add(path_of(changed.row))
            rows = new.setdefault(path_of(changed.row), {})
            if changed.row.key in rows:
                raise UserError(f"{path_of(changed.row)}: {changed.row.where_stored} would be stored twice")
            rows[changed.row.key] = changed
    for path in sorted(changed_files):
        _write(path, [new[path][key] for key in sorted(new[path])])
    for folder in {path.parent for path in changed_files}:
        _write_inputs(folder, ())  # without those of rows that are gone
    return {str(path): len(new[path]) for path in sorted(changed_files)}


def _hashed_again(old: AcceptedRow, changed: AcceptedRow) -> AcceptedRow:
    """A changed row with the hash of its inputs and the digests of its series."""
    row = changed.row
    if changed.inputs != old.inputs:
        row = replace(row, inputs=measurement.inputs_hash(changed.inputs))
    row = replace(row, observations=" ".join(map(observations.digest, changed.seeds)))
    return replace(changed, row=row)


def _facts(path: Path) -> dict[str, Any]:
    """Hashes of declared inputs to the inputs, of a device."""
    return _facts_of(path, path.stat().st_mtime_ns) if path.is_file() else {}


@cache
def _facts_of(path: Path, stamp: int) -> dict[str, Any]:
    try:
        return folded.unfold(dict(json.loads(read_text(path))))
    except (ValueError, TypeError):
        raise UserError(f"{path}: not a JSON mapping; check it out again") from None


def inputs_of(row: Measurement) -> dict[str, Any] | None:
    """The declared inputs of an accepted row; None if they are not stored.

    Raises:
        UserError: results/<device>/inputs.json.xz has inputs that do not match the row's hash.
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
    """Clear the caches, so that results/ is read again."""
    _rows.cache_clear()
    _by_inputs.cache_clear()
    _facts_of.cache_clear()
    _checked_inputs.cache_clear()
    _packed.cache_clear()
