"""Accepted measurements: `results/<device>/<paper>-<table>.csv`, their series beside them, and the only way in.

`accept` takes a table that was built here (or whose job folders `repro run` made on another machine and that were
brought here), recomputes every value from the observations in those folders, and merges it. The file of measurements
only says which table and scale are meant: no number and no path in it is believed.

    results/<device>/spear-table1.csv          a line a cell
    results/<device>/observations/spear-table1-<kind>-<hash>.parquet   a row per cell, seed and unit; split at 1 MB
    results/<device>/inputs.json, units.json   what the hashes of declared inputs and of units of code stand for
    results/<device>/attested.csv              changes of code under which a replay was byte-equal

Files of observations are named by their content and never rewritten, and a row names its series by digest: whenever
writing is interrupted, the rows that are there have their series.
"""

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from repro.errors import UserError
from repro.files import atomic, write_text
from repro.record import measurement, observations, provenance
from repro.record.measurement import Measurement, from_csv, slug, to_csv
from repro.record.observations import Series
from repro.spec.cell import Cell

ATTESTED = ("before", "after", "device", "scale", "commit", "date", "replayed")
RESULTS = measurement.RESULTS
FACTS = {"inputs.json": "inputs", "units.json": "units"}  # file to the column whose hashes it spells out


def key(cell: Cell | Measurement, scale: str) -> str:
    """A cell of a scale as one text."""
    return json.dumps([*cell.place, scale], ensure_ascii=False)


def file_name(paper: str, kind: str, number: str) -> str:
    """The stem of a table's files in results/."""
    return f"{paper}-{kind if number.isdecimal() else ''}{number}"


def path_of(row: Measurement) -> Path:
    """The file that an accepted row is in."""
    return RESULTS / slug(row.device) / f"{file_name(row.paper, row.kind, row.number)}.csv"


@cache
def _rows(results: Path, name: str) -> dict[str, tuple[Path, Measurement]]:
    """Cell key to its file and row, of one table; where several devices have a cell, the last by the folder's name."""
    found = {}
    for path in sorted(results.glob(f"*/{name}.csv")):
        found |= {key(row, row.scale): (path, row) for row in _read(path)}
    return found


def _read(path: Path) -> list[Measurement]:
    """The rows of an accepted file.

    Raises:
        UserError: a row of another table or device, or one that is given twice.
    """
    rows, seen = from_csv(path), set()
    for row in rows:
        if path_of(row) != path:
            raise UserError(f"{path}: {row.where} on {row.device or 'no device'} does not belong there")
        if row.key in seen:
            raise UserError(f"{path}: {row.where} at scale {row.scale} is given twice; check the file out again")
        seen.add(row.key)
    return rows


def find(scale: str, cell: Cell) -> Measurement | None:
    """The accepted measurement of a cell at a scale."""
    found = _rows(RESULTS, file_name(cell.paper, cell.kind, cell.number)).get(key(cell, scale))
    return found[1] if found else None


def every() -> list[Measurement]:
    """All accepted measurements of cells, of all devices."""
    paths = sorted(path for path in RESULTS.glob("*/*.csv") if "-" in path.stem and is_ours(path))
    return [row for path in paths for row in _read(path)]


def is_ours(path: Path) -> bool:
    """Whether a file in results/ holds measurements of cells (peers' times and sanitizer results are others)."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.readline().startswith("paper,kind,number,row,")


# --- series -----------------------------------------------------------------------------------------------------------


@cache
def _packed(folder: Path, name: str) -> dict[tuple[str, int, str], dict[str, Series]]:
    """The series of a table by cell key, seed and digest."""
    found = {}
    for path in _files(folder, name):
        held, digest = observations.unpack(path)
        if not path.stem.endswith(digest[:8]):
            raise UserError(f"{path}: its name is not that of its contents; check it out again")
        found |= {(cell, seed, observations.digest(one)): one for (cell, seed), one in held.items()}
    return found


def _files(folder: Path, name: str) -> list[Path]:
    """A table's files of observations."""
    ours = re.compile(re.escape(name) + r"-\w+-[0-9a-f]{8}\.parquet")
    return [path for path in sorted(folder.glob("observations/*.parquet")) if ours.fullmatch(path.name)]


def series(scale: str, cell: Cell | Measurement) -> list[dict[str, Series]]:
    """The accepted series of a cell, a mapping a seed; empty where none are kept.

    Raises:
        UserError: a file that does not match its checksum, or without the series of the accepted row.
    """
    found = _rows(RESULTS, file_name(cell.paper, cell.kind, cell.number)).get(key(cell, scale))
    return _series(*found) if found else []


def _series(path: Path, row: Measurement) -> list[dict[str, Series]]:
    held = _packed(path.parent, path.stem)
    wanted = [(key(row, row.scale), seed, digest) for seed, digest in enumerate(row.observations.split())]
    if not all(place in held for place in wanted):
        raise UserError(
            f"{path}: the observations of {row.where} at scale {row.scale} are not in {path.parent / 'observations'}; "
            "check both out again"
        )
    return [held[place] for place in wanted]


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Taken:
    """A checked measurement with all that is kept of it.

    Attributes:
        row: the measurement.
        seeds: its series, a mapping a seed; none where it could not be done.
        inputs: its declared inputs, whose hash is the row's.
        units: module to unit of the code that made it, whose hash is the row's.
    """

    row: Measurement
    seeds: Sequence[Mapping[str, Series]]
    inputs: Mapping[str, Any]
    units: Mapping[str, str]


def write(taken: Iterable[Taken]) -> dict[str, int]:
    """Merge measurements into results/: data before rows, nothing that a row needs is ever rewritten.

    Returns:
        Number of rows by file that was written.

    Raises:
        UserError: what is there already is damaged; nothing is written then.
    """
    by_file: dict[Path, list[Taken]] = {}
    for one in taken:
        by_file.setdefault(path_of(one.row), []).append(one)
    texts, packs, facts = {}, {}, {}
    for path, new in by_file.items():
        keys = {one.row.key for one in new}
        old = [row for row in (_read(path) if path.is_file() else []) if row.key not in keys]
        texts[path] = to_csv(sorted([*old, *(one.row for one in new)], key=lambda row: row.key))
        known = facts.setdefault(path.parent, {name: _facts(path.parent / name) for name in FACTS})
        known["inputs.json"] |= {one.row.inputs: one.inputs for one in new}
        known["units.json"] |= {one.row.units: one.units for one in new}
        held: dict[str, dict[tuple[str, int], Mapping[str, Series]]] = {}
        for row, seeds in [*((row, _series(path, row)) for row in old), *((one.row, one.seeds) for one in new)]:
            measure = known["inputs.json"].get(row.inputs, {}).get("measure", "other")
            held.setdefault(measure, {}).update({(key(row, row.scale), i): one for i, one in enumerate(seeds)})
        packs[path] = {
            f"{path.stem}-{measure}-{digest[:8]}.parquet": data
            for measure, one in held.items()
            for digest, data in observations.pack(one)
        }
    for path, files in packs.items():
        for name, data in files.items():
            if not (path.parent / "observations" / name).is_file():
                with atomic(path.parent / "observations" / name) as temporary:
                    temporary.write_bytes(data)
    for folder, known in facts.items():
        for name, found in known.items():
            _write_facts(folder / name, found)
    for path, rows in texts.items():
        write_text(path, rows)
    forget()
    for path, files in packs.items():
        for other in _files(path.parent, path.stem):
            if other.name not in files:
                other.unlink()
    for folder, known in facts.items():
        rows = [row for path in folder.glob("*.csv") if "-" in path.stem and is_ours(path) for row in from_csv(path)]
        for name, column in FACTS.items():
            used = {getattr(row, column) for row in rows}
            _write_facts(folder / name, {hash: found for hash, found in known[name].items() if hash in used})
    return {str(path): len(new) for path, new in by_file.items()}


def _facts(path: Path) -> dict[str, Any]:
    """What hashes stand for."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        return dict(found)
    except (ValueError, TypeError):
        raise UserError(f"{path}: not a JSON mapping; check it out again") from None


def _write_facts(path: Path, found: Mapping[str, Any]) -> None:
    """One line a hash."""
    lines = [f"{json.dumps(hash)}: {json.dumps(facts, sort_keys=True)}" for hash, facts in sorted(found.items())]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def units_of(row: Measurement) -> dict[str, str] | None:
    """The units of code that made an accepted row, module to hash; None where they are not known.

    Raises:
        UserError: results/<device>/units.json is damaged.
    """
    path = path_of(row).with_name("units.json")
    found = _facts(path).get(row.units)
    if found is not None and provenance.units_hash(found) != row.units:
        raise UserError(f"{path}: its entry {row.units} does not match its hash; check it out again")
    return found


def forget() -> None:
    """Read results/ anew at the next question."""
    _rows.cache_clear()
    _packed.cache_clear()
    attested.cache_clear()


# --- changes of code under which results stand ------------------------------------------------------------------------


@cache
def attested(results: Path) -> tuple[dict[str, str], ...]:
    """The lines of every device's attested.csv, each with its `folder`.

    Raises:
        UserError: a file with other columns, or a line that is cut short.
    """
    lines = []
    for path in sorted(results.glob("*/attested.csv")):
        with open(path, encoding="utf-8", newline="") as file:
            read = list(csv.reader(file))
        if not read or any(len(line) != len(ATTESTED) for line in read) or tuple(read[0]) != ATTESTED:
            raise UserError(f"{path}: not a file of attested changes; its columns are {', '.join(ATTESTED)}")
        lines += [dict(zip(ATTESTED, line)) | {"folder": path.parent.name} for line in read[1:]]
    return tuple(lines)


def carried(before: str, after: str, device: str, scale: str) -> bool:
    """Whether replays carry results of the units `before` on a device forward to `after`, in one step or several."""
    seen, todo = set(), [before]
    while todo:
        units = todo.pop()
        if units == after:
            return True
        seen.add(units)
        todo += [
            line["after"]
            for line in attested(RESULTS)
            if line["before"] == units
            and line["folder"] == slug(device)
            and line["scale"] in ("", scale)
            and line["after"] not in seen
        ]
    return False


def attest(line: Mapping[str, str]) -> Path:
    """Add a line to a device's attested.csv; returns the file."""
    path = RESULTS / slug(line["device"]) / "attested.csv"
    out = io.StringIO()
    writer = csv.DictWriter(out, ATTESTED, lineterminator="\n")
    if path.is_file():
        out.write(path.read_text(encoding="utf-8"))
        out.seek(0, io.SEEK_END)
    else:
        writer.writeheader()
    writer.writerow({name: line[name] for name in ATTESTED})
    write_text(path, out.getvalue())
    forget()
    return path
