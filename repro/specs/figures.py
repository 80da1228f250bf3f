"""Figure specs, a few lines each like those of tables: series with recipes, what is measured, how it is drawn.

    figures/spear/figure13.yaml   series: {pc: {group: pc}, …}   recipe: "rtn-w4-{group} + spear(epochs1=0, epochs2=0)"

A point is the value of a cell at each value of `sweep`, or every unit (layer, window) of one cell's series. A figure
may instead draw the cells of a table, and then measures nothing itself:

    figures/spear/summary.yaml    table: spear/memory   metrics: [share, recovered]
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import Any, Literal

from repro import papers
from repro.core.errors import UserError, shortened, unknown
from repro.core.files import HOME
from repro.core.strict import build, load_yaml
from repro.papers.cell import Cell, check_seeds, table_name
from repro.specs import tables
from repro.specs.names import LEADERBOARD, is_figure  # noqa: F401  names are asked for here too
from repro.specs.names import figure_spec as path_of
from repro.specs.names import figures as names  # noqa: F401
from repro.specs.names import specified_figures as specified  # noqa: F401
from repro.specs.names import split_figure as split
from repro.specs.templates import bound, fill_in


@dataclass(frozen=True)
class FigureSpec:
    """One figure.

    Attributes:
        series: label to a recipe, or to variables of the template; the legend names every one.
        recipe: template of the recipe over the variables of series and `sweep`.
        models: the papers' models whose stand-ins are drawn, a panel each.
        measure: what is measured.
        points: `value`, a point at each value of `sweep`; `axis`, a point for each entry of one cell.
        sweep: one variable and its values, the x axis; of `axis`, the values that a series goes through.
        across: what is measured on the x axis if that is not the variable of `sweep`.
        levels: label to what is measured for a line across the plot, such as a ceiling.
        plot: how it is drawn, a key of `repro.render.figure_files.PLOTS`.
        tuned_by: as of a table: the spec whose selected rows give variables to recipes.
        table: instead of series, models and measure: the table whose rows are the series.
        metrics: its metrics on the x and on the y axis.
        lead: series in colour, the first one thick, while all others are grey; if empty, every series has a colour.
        broken: leave out the empty part of a y axis whose few lowest series lie far below all others.
        printed: what the paper prints about the figure in words or numbers, in our own words.
    """

    title: str
    x: str
    y: str
    series: dict[str, str | tables.Variables] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    measure: dict[str, Any] = field(default_factory=dict)
    recipe: str = "{recipe}"
    across: dict[str, Any] = field(default_factory=dict)
    levels: dict[str, dict[str, Any]] = field(default_factory=dict)
    points: Literal["value", "axis"] = "value"
    sweep: dict[str, tuple[tables.Value, ...]] = field(default_factory=dict)
    plot: str = "lines"
    tuned_by: str = ""
    seeds: tuple[int, ...] = (0,)
    lead: tuple[str, ...] = ()
    broken: bool = False
    printed: str = ""
    table: str = ""
    metrics: tuple[str, ...] = ("across", "point")

    def __post_init__(self) -> None:
        if len(self.metrics) != 2 or (self.table and (self.series or self.models or self.measure or self.sweep)):
            raise UserError("a figure of a table has `table` and two `metrics`, no series, models, measure or sweep")
        if self.table:
            return
        check_seeds(self.seeds)
        steps = list(chain.from_iterable(self.sweep.values()))
        if not self.series or not self.models or (self.sweep and not steps):
            raise UserError("series, models and `sweep` need at least one entry each")
        if self.points == "value" and self.plot != "bars":
            for step in steps:
                if isinstance(step, bool) or papers.number(str(step)) is None:
                    raise UserError(f"sweep: {shortened(step)!r} is not a number; only bars take names")
        if len(self.sweep) > 1 or (self.points == "value" and not self.sweep):
            raise UserError("a figure of values needs one variable in `sweep`, a figure of an axis at most one")


def figure(paper: str, number: str) -> FigureSpec:
    """The spec of a figure.

    Raises:
        UserError: no such spec, or a key or value that it does not have.
    """
    path = path_of(*split(table_name(paper, "figure", number)))
    return build(FigureSpec, load_yaml(path), str(path.relative_to(HOME)))


def cells(paper: str, number: str) -> list[Cell]:
    """A cell for each series, model and value of `sweep`, followed by its `across`; then one for each model and level.

    Raises:
        UserError: no such spec or table, or a metric that the table does not have.
    """
    spec = figure(paper, number)
    where = str(path_of(paper, number).relative_to(HOME))
    if spec.table:
        specified_cells = tables.cells(*tables.split(spec.table))
        for metric in spec.metrics:
            if metric not in (known := {cell.metric for cell in specified_cells}):
                raise UserError(f"{where}: {unknown(f'metric of {spec.table}', metric, known)}")
        return [cell for cell in specified_cells if cell.metric in spec.metrics]

    tuned = tables.selected_values(spec.tuned_by)

    def cell(metric: str, measure: Mapping[str, Any], label: str, step: object, free: tables.Variables) -> Cell:
        bare = Cell(paper, "figure", number, label, str(step), str(free["model"]), metric)
        values = bound(free, spec.recipe, tuned)
        if values is None:
            return bare
        measured = fill_in(bare, spec.recipe, values, measure, spec.seeds, where)
        return replace(measured, unit=measured.params.unit)

    specified_cells = []
    name, steps = next(iter(spec.sweep.items()), ("", ("",)))
    for model, label, step in product(spec.models, spec.series, steps):
        of_series = spec.series[label]
        values = {"recipe": of_series} if isinstance(of_series, str) else dict(of_series)
        values |= {name: step, "model": model} if name else {"model": model}
        specified_cells.append(cell("point", spec.measure, label, step, values))
        if spec.across:
            specified_cells.append(cell("across", spec.across, label, step, values))
    for model, label in product(spec.models, spec.levels):
        specified_cells.append(cell("level", spec.levels[label], label, "", {"model": model}))
    return specified_cells
