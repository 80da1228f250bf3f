"""Coverage of the five papers at a scale: one line per printed table and data figure, nothing left out.

A table's line counts its printed cells (blanks and dashes are none), those possible at this scale (the model has a
stand-in, and the scale has a protocol for what measures the metric, whether or not a spec asks for it yet) and those
measured (status ok or at_chance, once each; neither rows and columns of your own count nor arithmetic on shapes). A
figure prints no cells: its line counts measured points against those that its spec declares. What is missing is
counted by what would have to come.

    fresh          at least 80 % of the possible cells are measured here
    stored         at least 80 %, stored measurements that still stand included
    partial        fewer, but some
    missing        none
    no_stand_in    none, because no printed cell (no model that a figure names) has a stand-in at this scale
    other_device   none, because the cells name machines on which nothing runs here (papers/<paper>/other_devices.yaml)
"""

import csv
import io
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from repro import papers
from repro.core.errors import UserError, unknown
from repro.core.files import ROOT
from repro.core.strict import load_yaml
from repro.papers.cell import Cell, table_name
from repro.results import measure
from repro.results.measured import Measured
from repro.specs import figures, tables
from repro.specs.scale import Scale, hub_models
from repro.store.measurement import GRADES, MEASURED, Measurement
from repro.workflow.workflow import Workflow

HEADER = ("paper", "kind", "number", "status", "measured", "printed")
TABLE_STATUSES = ("fresh", "stored", "partial", "missing", "no_stand_in", "other_device")
ORIGINS = ("fresh", "stored")
NOTHING = ("", "-", "–", "—")  # printed where a paper has no value


@dataclass(frozen=True)
class Line:
    """The coverage of one table or data figure.

    Attributes:
        measured: how many of its cells or points are measured, whatever their origin.
        printed: cells of a table with a printed value; 0 for a figure.
        possible: cells that this scale can measure; of a figure the points that its spec declares.
        origins: measured cells by `fresh`, `stored`.
        grades: measured cells by grade.
        wanted: what would have to come for the others to be measured, and for how many of them.
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
    wanted: Mapping[str, int] = field(default_factory=dict)


def coverage(flow: Workflow) -> list[Line]:
    """One line per printed table and data figure of every paper, in the papers' order.

    Args:
        flow: the scale whose measurements count, built here or accepted; those of other scales never do.

    Raises:
        UserError: built or accepted files that are damaged.
    """
    lines = []
    for paper in papers.PAPERS:
        for number in papers.tables(paper):
            cells = [cell for cell in flow.cells(paper, number) if cell.printed not in NOTHING]
            due = list(measure.measured(flow, cells).values())
            lines.append(line_of(flow.scale, paper, "table", number, due, [one.cell.model for one in due]))
        for drawn in papers.data_figures(paper):
            parts = [n for n in (drawn.number, *drawn.parts) if figures.path_of(paper, n).is_file()]
            due = []
            for number in parts:
                due += measure.measured(flow, flow.cells(paper, number, "figure")).values()
            lines.append(line_of(flow.scale, paper, "figure", drawn.number, due, _models(drawn)))
    return lines


def summary(lines: Collection[Line]) -> str:
    """What is measured, in one sentence; the lines are those of one scale."""
    counts = Counter((line.kind, line.status in ("fresh", "stored")) for line in lines)
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
    """The lines as an aligned table, lines by status, then what each line that is not fully measured waits for."""
    lines = list(lines)
    head = (*HEADER[:5], *ORIGINS, "possible", "printed", *GRADES)
    body = [(line.paper, line.kind, line.number, line.status, *map(str, _counts([line]))) for line in lines]
    body.append(("total", "", "", "", *map(str, _counts(lines))))
    wide = [max(map(len, column)) for column in zip(head, *body)]
    text = ["  ".join(_pad(cell, i, w) for i, (cell, w) in enumerate(zip(row, wide))).rstrip() for row in (head, *body)]
    for kind in ("table", "figure"):
        count = Counter(line.status for line in lines if line.kind == kind)
        text.append(f"{sum(count.values())} {kind}s: " + ", ".join(f"{count[s]} {s}" for s in TABLE_STATUSES))
    text.append("What would have to come, and for how many cells:")
    for line in (line for line in lines if line.wanted):
        wanted = "; ".join(f"{what} ({n})" if n else what for what, n in line.wanted.items())
        text.append(f"  {table_name(line.paper, line.kind, line.number)}: {wanted}")
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


def _possible(scale: Scale, one: Measured) -> bool:
    """Whether the cell's model has a stand-in and this scale a protocol for every kind behind its metric."""
    cell = one.cell
    if one.external:  # a time of a shape, which needs neither
        return True
    if cell.model and not cell.stand_in:
        return False
    if cell.kind == "figure":
        return True
    asked = tables.measures(cell.paper).get(cell.metric, {})
    kinds = [part["kind"] for part in (asked, asked.get("of", {})) if "kind" in part]
    return bool(kinds) and all(scale.protocols.get(kind, True) is not None for kind in kinds)


def _models(drawn: papers.Figure) -> list[str]:
    """The models that a figure names, those that have a name on the hub."""
    pins, alias = hub_models()
    names = [name.partition(" (")[0].strip() for name in re.split("[;,]", drawn.models)]
    return [name for name in names if name in pins or name in alias]


def line_of(
    scale: Scale, paper: str, kind: str, number: str, due: Collection[Measured], models: Collection[str]
) -> Line:
    """One line of what was looked up.

    Args:
        due: the printed cells of a table, or the declared points of a figure.
        models: what they are of.
    """
    seen = [one.measurement for one in due if _ran(one.measurement)]
    possible = len(due) if kind == "figure" else sum(_possible(scale, one) for one in due)
    origins = Counter(m.source if m.source in ORIGINS else "stored" for m in seen)
    wanted = Counter(_wanted(scale, one) for one in due if not _ran(one.measurement))
    if not due:
        wanted = {"a spec": 0} | {f"a stand-in for {name}": 0 for name in models if not scale.stand_in(name)}
    if seen:
        enough = 5 * len(seen) >= 4 * possible
        status = "partial" if not enough else "fresh" if 5 * origins["fresh"] >= 4 * possible else "stored"
    elif other_device(paper, kind, number):
        status = "other_device"
        wanted = {"the machines that it names": len(due)}
    else:
        bare = models and all(name and not scale.stand_in(name) for name in models)
        status = "no_stand_in" if bare else "missing"
    printed = len(due) if kind == "table" else 0
    grades = Counter(m.grade for m in seen)
    return Line(paper, kind, number, scale.name, status, len(seen), printed, possible, origins, grades, wanted)


def _ran(m: Measurement) -> bool:
    return m.status in MEASURED and m.source != "arithmetic"


def _wanted(scale: Scale, one: Measured) -> str:
    """What would have to come for a cell to be measured: a stand-in, a spec, a protocol, a device, a run."""
    cell, m = one.cell, one.measurement
    if one.external:
        return "times of python -m repro bench"
    if m.status == "no_stand_in" or m.source == "arithmetic":
        return f"a stand-in for {cell.model}"
    if one.wants == "spec":
        return _wanted_of_spec(cell)
    if one.wants == "protocol":
        return f"a protocol for {cell.measure}"
    if m.status not in ("not_run", "stale"):
        return f"another outcome than {m.status}"
    return "a run" if scale.device == "any" else f"a run on {scale.device}"


def _wanted_of_spec(cell: Cell) -> str:
    """What would have to come for a cell that no spec measures: what its metric or its column lacks, or a spec."""
    if cell.metric in papers.unmeasured(cell.paper):
        return papers.unmeasured(cell.paper)[cell.metric]
    if cell.kind == "figure":
        return "a spec"
    if why := tables.absent_reason(tables.table(cell.paper, cell.number), cell.col):
        return why
    return "a spec" if cell.metric in tables.measures(cell.paper) else "a kind and a spec"


def _counts(lines: Collection[Line]) -> list[int]:
    """Sums over lines: measured, by origin, possible, printed, by grade."""
    inner = [[line.origins.get(name, 0) for name in ORIGINS] for line in lines]
    grades = [[line.grades.get(name, 0) for name in GRADES] for line in lines]
    rows = [[li.measured, *o, li.possible, li.printed, *g] for li, o, g in zip(lines, inner, grades)]
    return [sum(column) for column in zip(*rows)]


def _pad(cell: str, column: int, width: int) -> str:
    return cell.ljust(width) if column in (0, 1, 3) else cell.rjust(width)
