"""Coverage of the five papers at a scale: one line per printed table and data figure, nothing left out.

A table's line counts three kinds of cells. Printed cells are those that are not blank or a dash. Possible cells are
printed ones whose model has a stand-in at this scale and whose metric has a protocol, even if no spec names it yet.
Measured cells have the status ok or at_chance; rows and columns of your own and arithmetic on shapes do not count. A
figure prints no cells: its line counts measured points and those that its spec declares. Missing cells are counted by
cause.

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
NOTHING = ("", "-", "–", "—")  # what a paper prints for no value


@dataclass(frozen=True)
class Line:
    """The coverage of one table or data figure.

    Attributes:
        measured: measured cells or points of any origin.
        printed: cells of a table with a printed value; 0 for a figure.
        possible: cells that this scale can measure; of a figure the points that its spec declares.
        origins: measured cells by `fresh`, `stored`.
        grades: measured cells by grade.
        wanted: missing cells by cause, such as `a stand-in for X`.
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
            lines.append(line_of(flow.scale, paper, "table", number, due, [cell.model for cell in cells]))
        for figure in papers.data_figures(paper):
            parts = [n for n in (figure.number, *figure.parts) if figures.path_of(paper, n).is_file()]
            due = []
            for number in parts:
                due += measure.measured(flow, flow.cells(paper, number, "figure")).values()
            lines.append(line_of(flow.scale, paper, "figure", figure.number, due, _models(figure)))
    return lines


def summary(lines: Collection[Line]) -> str:
    """A sentence on how much is measured; all lines are of one scale."""
    counts = Counter((line.kind, line.status in ("fresh", "stored")) for line in lines)
    kinds = Counter(line.kind for line in lines)
    complete = " and ".join(f"{counts[kind, True]} of {kinds[kind]} {kind}s" for kind in ("table", "figure"))
    measured_cells = sum(line.measured for line in lines if line.kind == "table")
    printed_cells = sum(line.printed for line in lines if line.kind == "table")
    partial = sum(line.status == "partial" for line in lines)
    in_part = f", and {partial} more in part" * bool(partial)
    scale = next(iter(lines)).scale
    return f"{complete} measured at scale {scale}{in_part} ({measured_cells:,} of {printed_cells:,} printed cells)"


def to_csv(lines: Iterable[Line]) -> str:
    """The lines as CSV with exactly the columns of HEADER."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEADER)
    for line in lines:
        writer.writerow([getattr(line, name) for name in HEADER])
    return out.getvalue()


def to_text(lines: Iterable[Line]) -> str:
    """The lines as an aligned table, lines by status, then what each line that is not fully measured waits for."""
    lines = list(lines)
    head = (*HEADER[:5], *ORIGINS, "possible", "printed", *GRADES)
    body = [(line.paper, line.kind, line.number, line.status, *map(str, _counts([line]))) for line in lines]
    body.append(("total", "", "", "", *map(str, _counts(lines))))
    widths = [max(map(len, column)) for column in zip(head, *body)]
    text = []
    for row in (head, *body):
        padded = [_pad(cell, i, width) for i, (cell, width) in enumerate(zip(row, widths))]
        text.append("  ".join(padded).rstrip())
    for kind in ("table", "figure"):
        count = Counter(line.status for line in lines if line.kind == kind)
        text.append(f"{sum(count.values())} {kind}s: " + ", ".join(f"{count[s]} {s}" for s in TABLE_STATUSES))
    text.append("What would have to come, and for how many cells:")
    for line in lines:
        if not line.wanted:
            continue
        causes = "; ".join(f"{cause} ({cells})" if cells else cause for cause, cells in line.wanted.items())
        text.append(f"  {table_name(line.paper, line.kind, line.number)}: {causes}")
    return "\n".join([*text, summary(lines)]) + "\n"


def other_device(paper: str, kind: str, number: str) -> bool:
    """Whether the cells of a table or figure name machines on which nothing runs here.

    Raises:
        UserError: the paper's list names a table or figure that it does not have.
    """
    path = ROOT / "repro" / "papers" / paper / "other_devices.yaml"
    listed = load_yaml(path) if path.is_file() else {}
    printed = {"tables": papers.tables(paper), "figures": [figure.number for figure in papers.data_figures(paper)]}
    for name, numbers in listed.items():
        for listed_number in numbers:
            if name not in printed or listed_number not in printed[name]:
                raise UserError(f"{path}: {unknown(name, listed_number, printed.get(name, ()))}")
    return number in listed.get(f"{kind}s", ())


def _possible(scale: Scale, measured: Measured) -> bool:
    """Whether a cell's model has a stand-in and this scale a protocol for every metric behind it."""
    cell = measured.cell
    if measured.external:  # a time of a shape needs neither
        return True
    if cell.model and not cell.stand_in:
        return False
    if cell.kind == "figure":
        return True
    metric_params = tables.measures(cell.paper).get(cell.metric, {})
    kinds = [part["kind"] for part in (metric_params, metric_params.get("of", {})) if "kind" in part]
    return bool(kinds) and all(scale.protocols.get(kind, True) is not None for kind in kinds)


def _models(figure: papers.Figure) -> list[str]:
    """The models that a figure names and that are on the hub."""
    pins, alias = hub_models()
    names = [name.partition(" (")[0].strip() for name in re.split("[;,]", figure.models)]
    return [name for name in names if name in pins or name in alias]


def line_of(
    scale: Scale, paper: str, kind: str, number: str, due: Collection[Measured], models: Collection[str]
) -> Line:
    """The line of a table or figure.

    Args:
        due: the printed cells of a table, or the declared points of a figure.
        models: the models of these cells, or those that the figure names.
    """
    done = [cell.measurement for cell in due if _ran(cell.measurement)]
    possible = len(due) if kind == "figure" else sum(_possible(scale, cell) for cell in due)
    origins = Counter(m.source if m.source in ORIGINS else "stored" for m in done)
    missing = Counter(_wanted(scale, cell) for cell in due if not _ran(cell.measurement))
    if not due:
        missing = {"a spec": 0} | {f"a stand-in for {name}": 0 for name in models if not scale.stand_in(name)}
    if done:
        if 5 * len(done) < 4 * possible:
            status = "partial"
        elif 5 * origins["fresh"] >= 4 * possible:
            status = "fresh"
        else:
            status = "stored"
    elif other_device(paper, kind, number):
        status = "other_device"
        missing = {"the machines that it names": len(due)}
    else:
        bare = models and all(name and not scale.stand_in(name) for name in models)
        status = "no_stand_in" if bare else "missing"
    printed = len(due) if kind == "table" else 0
    grades = Counter(m.grade for m in done)
    return Line(paper, kind, number, scale.name, status, len(done), printed, possible, origins, grades, missing)


def _ran(m: Measurement) -> bool:
    return m.status in MEASURED and m.source != "arithmetic"


def _wanted(scale: Scale, measured: Measured) -> str:
    """Why a cell is not measured: it lacks a stand-in, a spec, a protocol, a device or a run."""
    cell, m = measured.cell, measured.measurement
    if measured.external:
        return "times of python -m repro bench"
    if m.status == "no_stand_in" or m.source == "arithmetic":
        return f"a stand-in for {cell.model}"
    if measured.wants == "spec":
        return _wanted_of_spec(cell)
    if measured.wants == "protocol":
        return f"a protocol for {cell.measure}"
    if m.status not in ("not_run", "stale"):
        return f"another outcome than {m.status}"
    return "a run" if scale.device == "any" else f"a run on {scale.device}"


def _wanted_of_spec(cell: Cell) -> str:
    """What a cell that no spec measures lacks: what its metric or its column says, or a spec."""
    if cell.metric in papers.unmeasured(cell.paper):
        return papers.unmeasured(cell.paper)[cell.metric]
    if cell.kind == "figure":
        return "a spec"
    if why := tables.absent_reason(tables.table(cell.paper, cell.number), cell.col):
        return why
    return "a spec" if cell.metric in tables.measures(cell.paper) else "a kind and a spec"


def _counts(lines: Collection[Line]) -> list[int]:
    """Sums over lines: measured, by origin, possible, printed, by grade."""
    rows = []
    for line in lines:
        by_origin = [line.origins.get(name, 0) for name in ORIGINS]
        by_grade = [line.grades.get(name, 0) for name in GRADES]
        rows.append([line.measured, *by_origin, line.possible, line.printed, *by_grade])
    return [sum(column) for column in zip(*rows)]


def _pad(cell: str, column: int, width: int) -> str:
    return cell.ljust(width) if column in (0, 1, 3) else cell.rjust(width)
