"""Write figures: `.svg`, `.pdf`, a tidy `.csv` of what is drawn, and `.md` with what the paper prints about them."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from repro.core.errors import UserError, unknown
from repro.core.files import csv_text, write_text
from repro.engine.core import SHAPE
from repro.papers.cell import Cell, is_printed
from repro.render import content, plot, table_files
from repro.results.measured import Measured
from repro.specs import figures
from repro.specs.figures import FigureSpec
from repro.specs.names import canonical
from repro.specs.tables import FOLDERS
from repro.stats.quantity import Quantity
from repro.store.measurement import SHOWN, Measurement
from repro.store.stored_row import text
from repro.verdicts.table_results import table_results
from repro.workflow.workflow import Workflow

Points = list[tuple[float | str, float, float | None, float | None, str]]  # x, y, interval of y, value of `sweep`
Panels = dict[str, dict[str, Points]]  # by model and series
Drawn = tuple[Panels, Sequence[Measurement], str]
TIMES = {"us", "ms"}  # units of values that are not ratios
PLOTS: dict[str, Callable[..., None]] = {
    "lines": plot.lines,
    "scatter": plot.scatter,
    "semilog": plot.semilog,
    "loglog": plot.loglog,
    "surface": plot.surface,
    "bars": plot.bars,
    "roofline": plot.roofline,
    "timeline": plot.timeline,
}


def build(flow: Workflow, name: str, out: Path = Path("figures")) -> Panels:
    """Write one figure; returns its points by panel (model) and series.

    Raises:
        UserError: as `draw`.
    """
    stem = out / canonical(name)
    panels, measurements, text = draw(flow, name, [stem.with_suffix(form) for form in (".svg", ".pdf")])
    write_text(stem.with_suffix(".csv"), _csv(panels, measurements))
    write_text(stem.with_suffix(".md"), text)
    return panels


def draw(flow: Workflow, name: str, paths: Sequence[Path]) -> Drawn:
    """Draw one figure into files.

    Returns:
        Its points by panel and series, its measurements, and its text in Markdown.

    Raises:
        UserError: an unknown figure or plot, or an error in the spec.
    """
    if name == figures.LEADERBOARD:
        return _leaderboard(flow, paths)
    paper, number = figures.split(name)
    spec = figures.figure(paper, number)
    if spec.plot not in PLOTS:
        raise UserError(f"figures/{name}.yaml: {unknown('plot', spec.plot, PLOTS)}")
    results = table_results(flow, paper, number, "figure")
    by_key = results.by_key
    groups: dict[str, Panels] = {}  # by what else than its last variable a table's columns vary
    marked: dict[tuple[str, str], str] = {}
    across, point = spec.metrics
    named = _models_named(results.cells)
    for measured in by_key.values():
        cell, m = measured.cell, measured.measurement
        if cell.metric != point:
            continue
        group = cell.col.rpartition(", ")[0] if spec.table else ""
        panel = ", ".join(filter(None, (group, named[cell.model])))
        series = groups.setdefault(group, {}).setdefault(panel, {})
        series.setdefault(cell.row, []).extend(_points(spec, measured, by_key.get((*cell.cell_key[:3], across))))
        if m.value is not None and m.note:
            marked[cell.row, cell.col] = m.note
    panels = dict(chain.from_iterable(of_group.items() for of_group in groups.values()))
    extra: dict[str, Any] = {}
    if spec.plot == "bars":
        extra = {"marked": marked, "ratios": not TIMES & {cell.unit for cell in results.cells}}
    names = set(chain(*panels.values()))
    for label in spec.lead:
        if label not in names:
            raise UserError(f"figures/{name}.yaml: lead: {unknown('series', label, names)}")
    if spec.lead or spec.broken:
        extra |= {"lead": spec.lead, "broken": spec.broken}
    if spec.levels:
        levels = [m for m in results.measurements if m.metric == "level" and m.value is not None]
        extra["levels"] = {m.row: m.value for m in levels}
    figure_name = f"Figure {number}" if is_printed("figure", number) else number
    series = f". Scale {flow.scale.name}" * (paper not in FOLDERS)
    title = f"{paper}, {figure_name}: {spec.title}{series}"
    for path in paths:
        PLOTS[spec.plot](panels, title, spec.x, spec.y, path, **extra)
    return panels, results.measurements, _markdown(title, spec, results.measurements)


def _models_named(cells: Sequence[Cell]) -> dict[str, str]:
    """The name of each model's panel, with what the model is measured on here."""
    stand_ins: dict[str, dict[str, None]] = {}
    for cell in cells:
        stand_ins.setdefault(cell.model, {})[cell.stand_in] = None
    named = {}
    for model, on in stand_ins.items():
        if not model:
            named[model] = ""
        elif len(on) > 1 and all(name.startswith(SHAPE) for name in on):
            named[model] = "shapes with random weights"
        else:
            named[model] = f"{model}; here: {' and '.join(filter(None, on)) or 'no stand-in'}"
    return named


def _leaderboard(flow: Workflow, paths: Sequence[Path]) -> Drawn:
    """The leaderboard's recipes by bits and ratio; its numbers are those of tables/table2."""
    panels = table_files.scattered(flow)
    title = f"Every recipe of scale {flow.scale.name}; paired 95 % intervals"
    for path in paths:
        plot.scatter(panels, title, "stored bits per block weight", "perplexity / full precision", path)
    lines = []
    for panel, series in panels.items():
        for points in series.values():
            lines += [f"- {panel}, {p[4]}: ×{p[1]:.3f}" for p in points]
    return panels, [], "\n".join([f"**{title}**", "", *(lines or ["Nothing is measured yet."]), ""])


def _points(spec: FigureSpec, measured: Measured, across: Measured | None) -> Points:
    """The points of a cell.

    A point is the cell's value at the value of `sweep`; or one for each unit of its series (layer, window), at the
    unit's number or at its value of `across`; in a figure of a table, the cell's value at that of `across`.
    """
    cell, m = measured.cell, measured.measurement
    if m.status not in SHOWN or m.value is None:
        return []
    if spec.table:
        x = across.measurement.value if across else None
        return [(x, m.value, m.lo, m.hi, cell.col)] if x is not None else []
    if spec.points == "value":
        return [(cell.col if spec.plot == "bars" else float(cell.col), m.value, m.lo, m.hi, cell.col)]
    heights = _each(measured.quantity)
    xs = _each(across.quantity) if across else range(len(heights))
    return [(float(x), float(y), None, None, cell.col) for x, y in zip(xs, heights)]


def _each(quantity: Quantity | None) -> Sequence[float]:
    """The values of a cell's units: its first series, or without series the values it is composed of (layers)."""
    if quantity is None or not quantity.seeds:
        return ()
    if quantity.seeds[0]:
        return next(iter(quantity.seeds[0].values())).values
    known = {name: interval.value for name, interval in (quantity.known or {}).items()}
    return np.atleast_1d(quantity.value(known))


def _csv(panels: Mapping[str, Mapping[str, Points]], measurements: Sequence[Measurement]) -> str:
    lines: list[list[str]] = [["panel", "series", "x", "y", "lo", "hi", "at"]]
    for panel, series in panels.items():
        for label, points in series.items():
            lines += [[panel, label, *map(text, point)] for point in points]
    for m in measurements:
        if m.metric == "level":
            lines.append(["", m.row, "", text(m.value), text(m.lo), text(m.hi), "level"])
    return csv_text(lines)


def _markdown(title: str, spec: FigureSpec, measurements: Sequence[Measurement]) -> str:
    lines = [f"**{title}**", "", f"Printed: {spec.printed or 'no numbers'}.", ""]
    for m in measurements:
        where = ", ".join(filter(None, (m.row, m.model, m.col)))
        unit = m.unit if m.value is not None else ""
        lines.append(f"- {where}: {content.measured_text(m)} {unit}".rstrip())
    return "\n".join([*lines, "", measured_on(measurements), ""])


def measured_on(measurements: Sequence[Measurement]) -> str:
    """The devices and commits of the measured cells of a figure, as a sentence."""
    measured = [m for m in measurements if m.source and m.device]
    return f"Measured on {'; '.join(content.origins(measured)) or 'nothing yet'}."
