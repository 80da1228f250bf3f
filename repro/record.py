"""Measurements: one tidy line each, in CSV, with everything that says where it came from.

Accepted measurements live in `results/<device>/<paper>-<kind><number>.csv`; `accept` is the only way in.
"""

import csv
import io
import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from repro import papers
from repro.errors import UserError, unknown
from repro.files import ROOT, atomic, sha256, write_text

STATUSES = ("ok", "floor", "too_long", "oom", "unsupported", "diverged", "stale", "no_stand_in", "not_run")
KINDS = ("table", "figure", "study")
GRADES = ("A", "B", "C", "D")
RESULTS = ROOT / "results"


@dataclass(frozen=True)
class Measurement:
    """One measured (or not measured: see `status`) cell of a table, a figure or a study.

    `lo` and `hi` bound the 95 % interval; `n` counts windows or items; `code` is the hash of the files that decided the
    value; `floor` is, for a time, the least that the device allows in the same unit; `scores` is the file of per-window
    scores behind a perplexity, in the build folder for a live one, in results/ for an accepted one.
    """

    paper: str
    kind: str
    number: str
    row: str
    col: str
    model: str
    metric: str
    printed: str = ""
    value: float | None = None
    lo: float | None = None
    hi: float | None = None
    n: int | None = None
    unit: str = ""
    status: str = "not_run"
    grade: str = ""
    live: str = ""
    stand_in: str = ""
    recipe: str = ""
    protocol: str = ""
    seed: str = ""
    profile: str = ""
    device: str = ""
    commit: str = ""
    code: str = ""
    environment: str = ""
    floor: float | None = None
    note: str = ""
    scores: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """What makes a cell: its place in the paper and the profile that measured it."""
        return (self.paper, self.kind, self.number, self.row, self.col, self.model, self.metric, self.profile)


COLUMNS = tuple(f.name for f in fields(Measurement))
NUMBERS = {"value": float, "lo": float, "hi": float, "n": int, "floor": float}
PROVENANCE = ("grade", "stand_in", "recipe", "protocol", "profile", "device", "commit", "code", "environment")


def to_csv(rows: Iterable[Measurement]) -> str:
    """Measurements as CSV text; numbers with 7 significant digits, missing ones empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([text(value) for value in asdict(row).values()])
    return out.getvalue()


def text(value: object) -> str:
    """A value as CSV text: 7 significant digits, empty for none; raises `UserError` for a number that is not finite."""
    if value is None:
        return ""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise UserError(f"a measurement is {value}; a number that is not finite is a status, never a value")
        return f"{value:.7g}"
    return str(value)


def from_csv(path: Path) -> list[Measurement]:
    """Read measurements, checked.

    Raises:
        UserError: the file is missing, has other columns, a value that is no finite number, or an unknown word.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            lines = list(csv.reader(file))
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(f"{path}: no such file") from None
    except (UnicodeDecodeError, csv.Error):
        raise UserError(f"{path}: not a CSV file") from None
    if not lines or tuple(lines[0]) != COLUMNS:
        odd = sorted(set(lines[0] if lines else ()) ^ set(COLUMNS))
        raise UserError(f"{path}: not a file of measurements; its columns differ in {', '.join(odd) or 'their order'}")
    return [_row(dict(zip(COLUMNS, line)), len(line), f"{path}, line {i}") for i, line in enumerate(lines[1:], start=2)]


def _row(line: Mapping[str, str], width: int, where: str) -> Measurement:
    if width != len(COLUMNS):
        raise UserError(f"{where}: {width} values for {len(COLUMNS)} columns; the file was cut short")
    values: dict[str, object] = dict(line)
    for name, kind in NUMBERS.items():
        try:
            values[name] = kind(line[name]) if line[name] else None
        except ValueError:
            raise UserError(f"{where}: {name} is {line[name]!r}, not a number") from None
        if values[name] is not None and not math.isfinite(values[name]):  # type: ignore[arg-type]
            raise UserError(f"{where}: {name} is {line[name]}; a number that is not finite is a status, never a value")
    if line["status"] not in STATUSES:
        raise UserError(f"{where}: {unknown('status', line['status'], STATUSES)}")
    return Measurement(**values)  # type: ignore[arg-type]


def accept(path: Path, results: Path = RESULTS) -> dict[str, int]:
    """Validate a file of measurements and merge its measured rows into `results`, newest last; nothing is half-taken.

    Beside measured rows, those that were tried and are `unsupported` are taken with their reason.

    Returns:
        Number of rows by file that was written.

    Raises:
        UserError: schema, an unknown cell, a missing origin, a value outside its own interval, a time below the least
            that the device allows, or a commit with uncommitted changes.
    """
    rows = [row for row in from_csv(path) if row.status in ("ok", "floor", "unsupported") and row.live == "live"]
    if all(row.status == "unsupported" for row in rows):
        raise UserError(f"{path}: no measured row (status ok or floor, live) to accept")
    by_file: dict[Path, list[Measurement]] = {}
    for row in rows:
        where = f"{path}: {row.paper} {row.kind} {row.number} / {row.row} / {row.col} / {row.model}"
        if row.paper not in papers.PAPERS:
            raise UserError(f"{where}: {unknown('paper', row.paper, papers.PAPERS)}")
        if row.kind not in KINDS:
            raise UserError(f"{where}: {unknown('kind', row.kind, KINDS)}")
        _check_place(row, where)
        if row.kind == "table" and row.printed and row.printed not in _printed(row):
            raise UserError(f"{where}: the paper did not print {row.printed} there")
        if row.key in (other.key for other in by_file.get(_file(row, results), [])):
            raise UserError(f"{where}: given twice")
        if row.grade not in GRADES:
            raise UserError(f"{where}: {unknown('grade', row.grade, GRADES)}")
        if missing := [name for name in PROVENANCE if not getattr(row, name)]:
            raise UserError(f"{where}: {missing[0]} is empty; a number without its origin is not accepted")
        if row.commit == "unknown" or row.commit.endswith("+"):
            raise UserError(f"{where}: measured at commit {row.commit!r}; commit the code, then measure")
        if row.value is None and row.status != "unsupported":
            raise UserError(f"{where}: status {row.status} without a value")
        if row.lo is not None and row.hi is not None and not row.lo <= row.value <= row.hi:
            raise UserError(f"{where}: {row.value} lies outside its interval {row.lo} … {row.hi}")
        if row.floor is not None and row.value < row.floor:
            raise UserError(f"{where}: {row.value} is less than the {row.floor} that the device allows; measure again")
        by_file.setdefault(_file(row, results), []).append(row)
    merged, kept = {}, {}
    for file, new in by_file.items():
        new = [_with_scores(row, file, results, kept, path) for row in new]
        keys = {row.key for row in new}
        old = [row for row in (from_csv(file) if file.exists() else []) if row.key not in keys]
        merged[file] = sorted([*old, *new], key=lambda row: row.key)
    for target, source in kept.items():
        with atomic(target) as temporary:
            shutil.copyfile(source, temporary)
    for file, content in merged.items():
        write_text(file, to_csv(content))
    return {str(file): len(by_file[file]) for file in by_file}


def _check_place(row: Measurement, where: str) -> None:
    """Raise unless there is that table, figure or study, with that model and column; a table's row may be one's own."""
    from repro import spec, study  # these read records
    from repro.table import COMPANIONS

    figures = [figure.number for figure in papers.data_figures(row.paper)]
    studies = [name for paper, name in spec.studies() if paper == row.paper]
    numbers = {"table": papers.tables(row.paper), "figure": figures, "study": studies}[row.kind]
    if row.number not in numbers:
        raise UserError(f"{where}: {unknown(row.kind, row.number, numbers)}")
    if row.kind == "study":
        study.check(row, where)
    if row.kind != "table":
        return
    cells = papers.printed(row.paper, row.number)
    columns = {cell.col for cell in cells} | {label for label, *_ in COMPANIONS}
    for kind, name, known in (("model", row.model, {cell.model for cell in cells}), ("column", row.col, columns)):
        if name not in known:
            raise UserError(f"{where}: {unknown(kind, name, known)}")


def _with_scores(row: Measurement, file: Path, results: Path, kept: dict[Path, Path], where: Path) -> Measurement:
    """A row whose per-window scores are noted in `kept` to be copied beside its file, by their hash."""
    if not row.scores:
        return row
    source = RESULTS / row.scores if (RESULTS / row.scores).is_file() else Path(row.scores)  # accepted once, or built
    if not source.is_file():
        raise UserError(f"{where}: the scores {source} of {row.row} / {row.col} are not there; run it where they are")
    target = file.parent / "scores" / f"{sha256(source)[:12]}.parquet"
    kept[target] = source
    return replace(row, scores=str(target.relative_to(results)))


def _printed(row: Measurement) -> list[str]:
    """What the paper printed in the cell of a row."""
    place = (row.row, row.col, row.model, row.metric)
    cells = papers.printed(row.paper, row.number)
    return [cell.value for cell in cells if (cell.row, cell.col, cell.model, cell.metric) == place]


def _file(row: Measurement, results: Path) -> Path:
    """Where an accepted row lies."""
    slug = "".join(c if c.isalnum() else "-" for c in row.device.lower()).strip("-")
    return results / slug / f"{row.paper}-{row.kind}{'-' * (row.kind == 'study')}{row.number}.csv"


def accepted(paper: str = "*", kind: str = "*", number: str = "*", results: Path = RESULTS) -> list[Measurement]:
    """The accepted measurements of a table, figure or study, of all devices."""
    dash = "-" * (kind == "study")
    names = [f"{name}-{kind}{dash}{number}.csv".replace("**", "*") for name in papers.PAPERS if paper in ("*", name)]
    return [row for name in names for file in sorted(results.glob(f"*/{name}")) for row in from_csv(file)]
