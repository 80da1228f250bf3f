"""How much of the five papers is measured: one line per printed table and data figure, nothing left out.

A table's line counts its printed cells, those possible in this profile (their model has a stand-in) and those measured
(status ok or floor; a cell counts once, the user's own rows never). A figure prints no cells: its line counts measured
points against the number that its spec declares.

    live      at least 80 % of the possible cells are measured live
    recorded  at least 80 %, when accepted recordings count too
    partial   fewer, but some
    missing   none
"""

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from repro import papers
from repro.errors import unknown
from repro.papers import Printed

HEADER = ("paper", "kind", "number", "status", "measured", "printed")
STATUSES = ("live", "recorded", "partial", "missing")
GRADES = ("A", "B", "C", "D")
MEASURED = ("ok", "floor")

Key = tuple[str, str, str, str]  # row, col, model, metric
Rows = list[tuple[str, str]]  # (live or recorded, grade) of every measurement of one cell
Possible = Mapping[str, Set[str]] | Callable[[Printed], bool]


@dataclass(frozen=True)
class Line:
    """The coverage of one table or data figure; `grades` counts its measured cells by their best grade."""

    paper: str
    kind: str
    number: str
    status: str
    measured: int
    printed: int
    possible: int = 0
    grades: Mapping[str, int] = field(default_factory=dict)


def coverage(
    cells: Iterable[Mapping[str, Any]], possible: Possible, points: Mapping[tuple[str, str], int] | None = None
) -> list[Line]:
    """One line per printed table and data figure of every paper, in the papers' order.

    Args:
        cells: measurements with paper, kind ('table' or 'figure'), number, row, col, model, metric, status, grade and
            live ('live' or 'recorded').
        possible: per paper the model labels that have a stand-in in this profile, or a predicate on a printed cell. The
            label '' stands for the cells that name no model (settings, devices).
        points: per (paper, figure) the number of points that its spec declares; a figure that declares none is at most
            partial.

    Raises:
        UserError: a measured cell has an unknown grade, or is neither live nor recorded.
    """
    can = possible if callable(possible) else lambda cell: cell.model in possible.get(cell.paper, ())
    found: dict[tuple[str, str, str], dict[Key, Rows]] = {}
    for cell in cells:
        if cell["status"] in MEASURED:
            if cell["grade"] not in GRADES:
                raise unknown("grade", cell["grade"], GRADES)
            if cell["live"] not in ("live", "recorded"):
                raise unknown("origin", cell["live"], ("live", "recorded"))
            number, key = str(cell["number"]), (cell["row"], cell["col"], cell["model"], cell["metric"])
            if cell["kind"] == "figure":
                part, number = number, number.rstrip("abcdefgh")
                key = (f"{part}/{key[0]}", *key[1:])
            place = found.setdefault((cell["paper"], cell["kind"], number), {})
            place.setdefault(key, []).append((cell["live"], cell["grade"]))
    lines = []
    for paper in papers.PAPERS:
        for number in papers.tables(paper):
            printed = {(cell.row, cell.col, cell.model, cell.metric): cell for cell in papers.printed(paper, number)}
            seen = found.get((paper, "table", number), {})
            seen = {key: rows for key, rows in seen.items() if key in printed}
            due = {key for key, cell in printed.items() if can(cell)}
            lines.append(_line(paper, "table", number, seen, due & seen.keys(), len(due), len(printed)))
        for figure in papers.data_figures(paper):
            seen = found.get((paper, "figure", figure.number), {})
            due = (points or {}).get((paper, figure.number), 0)
            lines.append(_line(paper, "figure", figure.number, seen, seen.keys(), due, 0))
    return lines


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
    head = (*HEADER[:5], "possible", "printed", *GRADES)
    body = [tuple(str(getattr(line, name)) for name in head[:7]) + _grades(line.grades) for line in lines]
    sums = tuple(str(sum(getattr(line, name) for line in lines)) for name in head[4:7])
    body.append(("total", "", "", "", *sums, *_grades(sum((Counter(line.grades) for line in lines), Counter()))))
    wide = [max(map(len, column)) for column in zip(head, *body)]
    text = ["  ".join(_pad(cell, i, w) for i, (cell, w) in enumerate(zip(row, wide))).rstrip() for row in (head, *body)]
    for kind in ("table", "figure"):
        count = Counter(line.status for line in lines if line.kind == kind)
        text.append(f"{sum(count.values())} {kind}s: " + ", ".join(f"{count[s]} {s}" for s in STATUSES))
    return "\n".join(text) + "\n"


def _line(
    paper: str, kind: str, number: str, seen: Mapping[Key, Rows], counted: Set[Key], due: int, printed: int
) -> Line:
    """One line: `seen` are the measured cells, `counted` those of them that are among the `due` ones."""
    live = sum(any(origin == "live" for origin, _ in seen[key]) for key in counted)
    grades = Counter(min(grade for _, grade in rows) for rows in seen.values())
    status = "partial" if seen else "missing"
    if due and 5 * len(counted) >= 4 * due:
        status = "live" if 5 * live >= 4 * due else "recorded"
    return Line(paper, kind, number, status, len(seen), printed, due, {grade: grades[grade] for grade in GRADES})


def _grades(grades: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(str(grades.get(grade, 0)) for grade in GRADES)


def _pad(cell: str, column: int, width: int) -> str:
    return cell.ljust(width) if column in (0, 1, 3) else cell.rjust(width)
