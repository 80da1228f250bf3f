"""How much of the five papers is measured at a scale: one line per printed table and data figure, nothing left out.

A table's line counts its printed cells (blanks and dashes are none), those possible at this scale (the model has a
stand-in, and the scale has a protocol for what measures the metric, whether or not a spec asks for it yet) and those
measured (status ok or floor, once each; rows and columns of your own never count). A figure prints no cells: its line
counts measured points against those that its spec declares.

    live           at least 80 % of the possible cells are measured live
    recorded       at least 80 %, accepted measurements that still stand included (`carried`: by a replay)
    partial        fewer, but some
    missing        none
    no_stand_in    none, because no printed cell has a stand-in at this scale
    other_device   none, because the cells name machines on which nothing runs here (papers/<paper>/other_devices.yaml)
"""

import csv
import io
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from repro import papers
from repro.errors import UserError, unknown
from repro.files import ROOT
from repro.record import accepted, measure
from repro.record.measurement import GRADES, MEASURED, Measurement, from_csv
from repro.spec import figures, tables
from repro.spec.cell import Cell, Place
from repro.spec.workflow import Workflow
from repro.strict import load_yaml

HEADER = ("paper", "kind", "number", "status", "measured", "printed")
STATUSES = ("live", "recorded", "partial", "missing", "no_stand_in", "other_device")
ORIGINS = ("live", "recorded", "carried")
Found = dict[tuple[str, str, str], dict[Place, tuple[str, str]]]  # paper, kind, number; place; origin and grade


@dataclass(frozen=True)
class Line:
    """The coverage of one table or data figure.

    Attributes:
        measured: how many of its cells or points are measured, whatever their origin.
        printed: cells of a table with a printed value; 0 for a figure.
        possible: cells that this scale can measure; of a figure the points that its spec declares.
        origins: measured cells by `live`, `recorded`, `carried`.
        grades: measured cells by grade.
    """

    paper: str
    kind: str
    number: str
    scale: str
    status: str
    measured: int = 0
    printed: int = 0
    possible: int = 0
    origins: Mapping[str, int] = field(default_factory=dict)
    grades: Mapping[str, int] = field(default_factory=dict)


def coverage(flow: Workflow, built: Path = Path("tables")) -> list[Line]:
    """One line per printed table and data figure of every paper, in the papers' order.

    Args:
        flow: the scale whose measurements count; those of other scales never do.
        built: the folder of tables that were built here, whose live rows count while their inputs and code are today's.

    Raises:
        UserError: a built or accepted file that is damaged, or a measured row without grade.
    """
    found = _measured(flow, built)
    lines = []
    for paper in papers.PAPERS:
        for number in papers.tables(paper):
            due = [cell for cell in flow.cells(paper, number) if cell.printed]
            lines.append(_line(flow, paper, "table", number, due, found))
        for drawn in papers.data_figures(paper):
            has_spec = figures.path_of(paper, drawn.number).is_file()
            due = flow.cells(paper, drawn.number, "figure") if has_spec else []
            lines.append(_line(flow, paper, "figure", drawn.number, due, found))
    return lines


def summary(lines: Collection[Line]) -> str:
    """What is measured, in one sentence; the lines are those of one scale."""
    counts = Counter((line.kind, line.status in ("live", "recorded")) for line in lines)
    kinds = Counter(line.kind for line in lines)
    whole = " and ".join(f"{counts[kind, True]} of {kinds[kind]} {kind}s" for kind in ("table", "figure"))
    cells = [sum(getattr(line, name) for line in lines if line.kind == "table") for name in ("measured", "printed")]
    partial = sum(line.status == "partial" for line in lines)
    rest = f", and {partial} more in part" * bool(partial)
    scale = next(iter(lines)).scale
    return f"{whole} measured at scale {scale}{rest} ({cells[0]:,} of {cells[1]:,} printed cells)"


def to_csv(lines: Iterable[Line]) -> str:
    """The lines as CSV with exactly the columns of HEADER."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEADER)
    writer.writerows([getattr(line, name) for name in HEADER] for line in lines)
    return out.getvalue()


def to_text(lines: Iterable[Line]) -> str:
    """The lines as an aligned table, then the totals: lines by status for tables and figures, cells by grade."""
    lines = list(lines)
    head = (*HEADER[:5], *ORIGINS, "possible", "printed", *GRADES)
    body = [(line.paper, line.kind, line.number, line.status, *map(str, _counts([line]))) for line in lines]
    body.append(("total", "", "", "", *map(str, _counts(lines))))
    wide = [max(map(len, column)) for column in zip(head, *body)]
    text = ["  ".join(_pad(cell, i, w) for i, (cell, w) in enumerate(zip(row, wide))).rstrip() for row in (head, *body)]
    for kind in ("table", "figure"):
        count = Counter(line.status for line in lines if line.kind == kind)
        text.append(f"{sum(count.values())} {kind}s: " + ", ".join(f"{count[s]} {s}" for s in STATUSES))
    return "\n".join([*text, summary(lines)]) + "\n"


def other_device(paper: str, kind: str, number: str) -> bool:
    """Whether the cells of a table or figure name machines on which nothing runs here.

    Raises:
        UserError: the paper's list names a table or figure that it does not have.
    """
    path = ROOT / "repro" / "papers" / paper / "other_devices.yaml"
    listed = load_yaml(path) if path.is_file() else {}
    known = {"tables": papers.tables(paper), "figures": [figure.number for figure in papers.data_figures(paper)]}
    for name, numbers in listed.items():
        for one in numbers:
            if name not in known or one not in known[name]:
                raise UserError(f"{path}: {unknown(name, one, known.get(name, ()))}")
    return number in listed.get(f"{kind}s", ())


def _measured(flow: Workflow, built: Path) -> Found:
    """Origin and grade of every measured cell of this scale: live rows of built tables, else accepted ones."""
    live = [row for path in sorted(built.glob("*/*.csv")) for row in from_csv(path) if row.live == "live"]
    found: Found = {}
    cells: dict[tuple[str, str, str], dict[Place, Cell]] = {}
    specified = {(p, "table", n) for p, n in tables.specified()} | {(p, "figure", n) for p, n in figures.specified()}
    for origin, rows in (("recorded", accepted.every()), ("live", live)):  # a live cell replaces its recorded one
        for row in rows:
            key = (row.paper, row.kind, row.number)
            if row.scale != flow.scale.name or row.status not in MEASURED or key not in specified:
                continue
            if row.grade not in GRADES:
                raise UserError(f"{row.where}: {unknown('grade', row.grade, GRADES)}")
            if key not in cells:
                cells[key] = {cell.place: cell for cell in flow.cells(row.paper, row.number, row.kind)}
            if here := _origin(flow, cells[key].get(row.place), row, origin):
                found.setdefault(key, {})[row.place] = (here, row.grade)
    for paper, number in figures.specified():  # a built figure has no rows of measurements; its jobs' files say it
        for cell in flow.cells(paper, number, "figure"):
            if flow.is_live(cell) and flow.jobs(cell) and measure.live(flow, cell).status in MEASURED:
                found.setdefault((paper, "figure", number), {})[cell.place] = ("live", flow.scale.grade)
    return found


def _origin(flow: Workflow, cell: Cell | None, row: Measurement, origin: str) -> str:
    """`live`, `recorded` or `carried`; empty where no cell asks for the row any more, or it is stale."""
    if cell is None or not flow.is_measured(cell):
        return ""
    stands = measure.standing(flow, cell, row)
    if stands.get("status") == "stale":
        return ""
    return origin if origin == "live" else stands["live"]


def _possible(flow: Workflow, cell: Cell) -> bool:
    """Whether the cell's model has a stand-in and this scale a protocol for every kind behind its metric."""
    if cell.model and not cell.stand_in:
        return False
    if cell.kind == "figure":
        return True
    asked = tables.measures(cell.paper).get(cell.metric, {})
    kinds = [part["kind"] for part in (asked, asked.get("of", {})) if "kind" in part]
    return bool(kinds) and all(flow.scale.protocols.get(kind, True) is not None for kind in kinds)


def _line(flow: Workflow, paper: str, kind: str, number: str, due: Collection[Cell], found: Found) -> Line:
    """One line; `due` are the printed cells, or the declared points."""
    held = found.get((paper, kind, number), {})
    seen = [held[cell.place] for cell in due if cell.place in held]
    possible = len(due) if kind == "figure" else sum(_possible(flow, cell) for cell in due)
    origins, grades = (Counter(column) for column in zip(*seen)) if seen else (Counter(), Counter())
    if seen:
        enough = 5 * len(seen) >= 4 * possible
        status = "partial" if not enough else "live" if 5 * origins["live"] >= 4 * possible else "recorded"
    elif other_device(paper, kind, number):
        status = "other_device"
    else:
        bare = [cell.model and not cell.stand_in for cell in due]
        status = "no_stand_in" if due and all(bare) else "missing"
    printed = len(due) if kind == "table" else 0
    return Line(paper, kind, number, flow.scale.name, status, len(seen), printed, possible, origins, grades)


def _counts(lines: Collection[Line]) -> list[int]:
    """Sums over lines: measured, by origin, possible, printed, by grade."""
    inner = [[line.origins.get(name, 0) for name in ORIGINS] for line in lines]
    grades = [[line.grades.get(name, 0) for name in GRADES] for line in lines]
    rows = [[li.measured, *o, li.possible, li.printed, *g] for li, o, g in zip(lines, inner, grades)]
    return [sum(column) for column in zip(*rows)]


def _pad(cell: str, column: int, width: int) -> str:
    return cell.ljust(width) if column in (0, 1, 3) else cell.rjust(width)
