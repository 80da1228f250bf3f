"""Table specs, a few lines each: templates over printed rows and columns, without logic.

    tables/spear/table1.yaml    rows: {RTN pc: rtn-w4-pc, …}
    tables/spear/table15.yaml   recipe: "rtn-w3-pc + spear(tau={tau})"   rows: ["{size}"]   columns: ["tau={tau}"]
    tables/spear/memory.yaml    a question of our own: rows, a `sweep`, `models`, `seeds`, and what is measured
    tables/spear/rates.yaml     likewise, a tuning: its `selected` row gives variables to specs that are `tuned_by` it

A label is the printed one, or a pattern whose `{name}`s match parts of printed labels and become variables. Rows and
columns give variables to the template of the recipe; a variable `calibration` names the text of calibrated steps. What
is measured follows from the metric that the paper printed, by one map per paper (`repro/papers/<paper>/measures.yaml`).
A printed cell without recipe or measure is shown as not run: nothing is dropped.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, product
from typing import Any

from repro import papers
from repro.core.errors import UserError, unknown
from repro.core.files import HOME
from repro.core.strict import build, load_yaml
from repro.papers.cell import Cell, check_seeds
from repro.specs import scale
from repro.specs.claims import ClaimSpec, HeadlineSpec
from repro.specs.names import FOLDERS, pages  # noqa: F401  names are asked for here too
from repro.specs.names import own_tables as own  # noqa: F401
from repro.specs.names import specified_tables as specified  # noqa: F401
from repro.specs.names import split_table as split
from repro.specs.names import table_spec as path_of
from repro.specs.names import tables as names  # noqa: F401
from repro.specs.templates import (
    Labels,
    Value,
    Variables,
    bind,
    bound,
    check_pattern,
    fill_in,
    filled,
    log_probabilities,
    measures,
    params_of,
    plain,
    variables,
)


@dataclass(frozen=True)
class Spec:
    """One table: a printed one, or a question of our own.

    Attributes:
        rows: label or pattern to a recipe, or to variables of the templates.
        columns: likewise; none is every printed column. Of a question of our own, `share 1/4` of `sweep` to variables.
        absent: printed columns, labels or patterns, that are not measured: what would have to come for it, in words.
        recipe: template of the recipe over the variables of row, column and model.
        of_models: further variables by the paper's model, such as a rank.
        extra_rows: rows of your own at the end of the table; the label is the recipe, or maps to it or to variables.
        extra_models: models that the paper does not print, a column of our own each, for all rows.
        tuned_by: the spec of our own whose selected rows give variables to recipes, which are not run until then.
        extra_columns: label to what is measured, with the row's recipe; `seeds` where they are others than the
            row's.
        seeds: draws of calibration text, initialization and order, whose mean is shown; or those of some rows by label
            or pattern, or by `row | model`, of which the first that matches counts; all others have one.
        notes: sentences under the table, and on the paper's page where it is a printed one.
        claims: what the paper says about this table, judged under it; their `table` is this one.
        models: of a question of our own: the papers' models whose stand-ins are measured.
        sweep: of a question of our own: variable to values; a column is one combination of them.
        measure: metric to what is measured: of a question of our own, or where one printed table has its own.
        row_measures: of a printed table: row label or pattern, to metric, to what is measured there instead.
        printed: of a question of our own: variable to `table | row | column | model`, whose printed number it is.
        scales: of a question of our own: the scales that measure it; none is every scale.
        selected: of a question of our own: the row that is the answer, once it is known, or several of other variables.
    """

    title: str
    rows: Labels = field(default_factory=dict)
    columns: Labels = ()
    absent: dict[str, str] = field(default_factory=dict)
    recipe: str = "{recipe}"
    of_models: dict[str, Variables] = field(default_factory=dict)
    extra_rows: Labels = ()
    extra_models: tuple[str, ...] = ()
    tuned_by: str = ""
    extra_columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    seeds: dict[str, tuple[int, ...]] | tuple[int, ...] = (0,)
    notes: tuple[str, ...] = ()
    claims: tuple[ClaimSpec, ...] = ()
    models: tuple[str, ...] = ()
    sweep: dict[str, tuple[Value, ...]] = field(default_factory=dict)
    measure: dict[str, dict[str, Any]] = field(default_factory=dict)
    row_measures: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    printed: dict[str, str] = field(default_factory=dict)
    scales: tuple[str, ...] = ()
    selected: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for seeds in self.seeds.values() if isinstance(self.seeds, dict) else [self.seeds]:
            check_seeds(seeds)
        if odd := [row for row in self.selected_rows if row not in self.rows]:
            raise UserError(f"selected: {unknown('row', odd[0], self.rows)}")
        if empty := [name for name, values in self.sweep.items() if not values]:
            raise UserError(f"sweep: {empty[0]} has no values; name at least one")

    @property
    def selected_rows(self) -> tuple[str, ...]:
        """The selected rows."""
        return tuple(filter(None, (self.selected,) if isinstance(self.selected, str) else self.selected))

    def measure_of(self, row: str, metric: str) -> dict[str, Any] | None:
        """What the first of `row_measures` that matches measures for a metric in a row; None where none does."""
        for label, by_metric in self.row_measures.items():
            if metric in by_metric and bind(label, row) is not None:
                return by_metric[metric]
        return None

    def seeds_of(self, row: str, model: str = "") -> tuple[int, ...]:
        """The seeds of a row on a model."""
        if not isinstance(self.seeds, dict):
            return self.seeds
        both = (row, f"{row} | {model}")
        return next((s for label, s in self.seeds.items() if any(bind(label, text) is not None for text in both)), (0,))


# --- specs -----------------------------------------------------------------------------------------------------------


@cache
def table(paper: str, number: str) -> Spec:
    """The spec of a table; one without rows where nobody wrote it yet.

    Raises:
        UserError: no such table, a key or value that a spec does not have, or a label that the paper did not print.
    """
    split(f"{paper}/{number}")
    path = path_of(paper, number)
    where = str(path.relative_to(HOME))
    if not path.exists():
        return Spec(papers.index(paper)[number]["caption"])
    data = load_yaml(path)
    if isinstance(data, dict) and isinstance(data.get("claims"), list):
        data["claims"] = [{"table": f"{paper}/{number}"} | c if isinstance(c, dict) else c for c in data["claims"]]
    spec = build(Spec, data, where)
    for claim in spec.claims:
        for name in (claim.table, *claim.more):
            split(name)
    if number.isdecimal():
        cells = papers.printed(paper, number)
        for name in ("models", "sweep", "printed", "scales", "selected"):
            if getattr(spec, name):
                raise UserError(f"{where}: {name} belongs to a spec of our own, not to a printed table")
        known_metrics = {cell.metric for cell in cells}
        if odd := spec.measure.keys() - known_metrics:
            raise UserError(f"{where}: measure: {unknown('printed metric', min(odd), known_metrics)}")
        if odd := set(chain.from_iterable(spec.row_measures.values())) - known_metrics:
            raise UserError(f"{where}: row_measures: {unknown('printed metric', min(odd), known_metrics)}")
        known_columns = {cell.col for cell in cells}
        for kind, labels, known in (
            ("row", spec.rows, {cell.row for cell in cells}),
            ("row", spec.row_measures, {cell.row for cell in cells}),
            ("column", spec.columns, known_columns),
            ("column", spec.absent, known_columns),
        ):
            for label in labels:
                check_pattern(label, where)
                if not any(bind(label, other) is not None for other in known):
                    hint = " (rows of your own go under `extra_rows`)" if kind == "row" else ""
                    raise UserError(f"{where}: {unknown(f'printed {kind}', label, known)}{hint}")
        for col in sorted(known_columns):
            if absent_reason(spec, col) and (not spec.columns or variables(spec.columns, col) is not None):
                raise UserError(f"{where}: absent: column {col!r} is one of `columns`, so that it is measured")
        rows = {cell.row for cell in cells} | {*spec.extra_rows}
        shown = {cell.model for cell in cells} | {*spec.extra_models}
        both = {f"{row} | {model}" for row, model in product(rows, shown)}
        for label in spec.seeds if isinstance(spec.seeds, dict) else ():
            if not any(bind(label, text) is not None for text in rows | both):
                raise UserError(f"{where}: seeds: {unknown('row', label, both if ' | ' in label else rows)}")
        known = scale.pins().keys() - {cell.model for cell in cells}
        if odd := set(spec.extra_models) - known:
            raise UserError(f"{where}: extra_models: {unknown('model that is not printed', min(odd), known)}")
        if odd := spec.of_models.keys() - {cell.model for cell in cells}:
            raise UserError(f"{where}: of_models: {unknown('printed model', min(odd), {cell.model for cell in cells})}")
    elif spec.absent or spec.row_measures:
        name = "absent" if spec.absent else "row_measures"
        raise UserError(f"{where}: {name} belongs to a printed table, not to a spec of our own")
    elif not (spec.models and spec.measure and spec.rows):
        raise UserError(f"{where}: a spec of our own needs rows, models and measure")
    for name in spec.scales:
        if name not in scale.names():
            raise UserError(f"{where}: scales: {unknown('scale', name, scale.names())}")
    return spec


def absent_reason(spec: Spec, col: str) -> str:
    """What would have to come for a printed column to be measured, by its spec; empty where that names nothing."""
    return next((why for label, why in spec.absent.items() if bind(label, col) is not None), "")


def behind(paper: str, number: str) -> list[tuple[str, str]]:
    """Paper and number of a table and of the further ones that its claims name."""
    named = {(paper, number): None}
    for claim in table(paper, number).claims:
        named |= dict.fromkeys(map(split, claim.more))
    return list(named)


def headline() -> HeadlineSpec:
    """The spec of tables/table1.

    Raises:
        UserError: a key or value that it does not have.
    """
    spec = build(HeadlineSpec, load_yaml(HOME / "tables" / "table1.yaml"), "tables/table1.yaml")
    for claim in spec.claims:
        split(claim.table)
    return spec


def headline_claims() -> list[ClaimSpec]:
    """Every claim of tables/table1, those of tables' own specs first.

    Raises:
        UserError: as `headline`, or `measured` names a table or claim that there is not.
    """
    head = headline()
    claims = []
    for named in head.measured:
        name, _, wanted = named.partition(": ")
        known = {claim.claim: claim for claim in reversed(table(*split(name)).claims)}
        if wanted not in known:
            raise UserError(f"tables/table1.yaml: measured: {unknown(f'claim of {name}', wanted, known)}")
        claims.append(known[wanted])
    return [*claims, *head.claims]


# --- cells ------------------------------------------------------------------------------------------------------------


def cells(paper: str, number: str) -> list[Cell]:
    """Every cell of a table: the printed ones in the paper's order, extra rows, then extra columns.

    Raises:
        UserError: as `table`, `params_of` and `parse` say.
    """
    spec = table(paper, number)
    if not number.isdecimal():
        return list(_own(paper, number, spec))
    printed = list(_printed(paper, number, spec))
    return [*printed, *chain.from_iterable(map(_log_probability, printed))]


def _printed(paper: str, number: str, spec: Spec) -> Iterator[Cell]:
    where = str(path_of(paper, number).relative_to(HOME))
    printed = papers.printed(paper, number)
    kinds = measures(paper) | spec.measure
    first_column = [c for c in printed if c.col == printed[0].col]
    for model in spec.extra_models:
        printed = [*printed, *(replace(c, col=f"{model} (ours)", model=model, value="") for c in first_column)]
    columns = {c.col: variables(spec.columns, c.col) if spec.columns else {} for c in printed}
    one_a_row: dict[tuple[str, str], Cell] = {}

    def cell(row: str, c: papers.Printed, values: Variables | None, value: str) -> Cell:
        bare = Cell(paper, "table", number, row, c.col, c.model, c.metric, value, c.unit)
        measure = spec.measure_of(row, c.metric) or kinds.get(c.metric)
        if values is None or columns[c.col] is None or measure is None:
            return bare
        template = "{recipe}" if row in spec.extra_rows else spec.recipe
        given = spec.of_models.get(c.model, {}) | values | columns[c.col]
        made = fill_in(bare, template, given, measure, spec.seeds_of(row, c.model), where)
        one_a_row.setdefault((row, c.model), made)
        return made

    tuned = selected_values(spec.tuned_by)
    for c in printed:
        values = variables(spec.rows, c.row)
        yield cell(c.row, c, None if values is None else bound(values, spec.recipe, tuned), c.value)
    for label in spec.extra_rows:
        given = spec.extra_rows[label] if isinstance(spec.extra_rows, dict) else label
        values = bound({"recipe": given} if isinstance(given, str) else dict(given), spec.recipe, tuned)
        for c in {(c.col, c.model, c.metric): c for c in printed}.values():
            yield cell(label, c, values, "")
    for made in list(one_a_row.values()):
        yield from _extra_columns(made, spec, where)


def selected_values(name: str) -> dict[str, Value | None]:
    """The variables of a spec's selected rows, None for one that no selected row gives; empty without a spec."""
    if not name:
        return {}
    other = table(*split(name))
    rows = {label: variables(other.rows, label) or {} for label in other.rows}
    values: dict[str, Value | None] = {}
    for row in rows.values():
        values |= dict.fromkeys(row)
    for label in other.selected_rows:
        values |= rows[label]
    return values


def _own(paper: str, name: str, spec: Spec) -> Iterator[Cell]:
    where = str(path_of(paper, name).relative_to(HOME))
    points = [dict(zip(spec.sweep, values)) for values in product(*spec.sweep.values())]
    tuned = selected_values(spec.tuned_by)
    for model, row, point in product(spec.models, spec.rows, points):
        col = ", ".join(f"{key} {plain(value)}" for key, value in point.items())
        more = point | (variables(spec.columns, col) or {})
        values = bound(spec.of_models.get(model, {}) | (variables(spec.rows, row) or {}) | more, spec.recipe, tuned)
        if values is not None:
            values |= {key: _number(paper, filled(text, values), where) for key, text in spec.printed.items()}
        made = []
        for metric, measure in spec.measure.items():
            bare = Cell(paper, "table", name, row, col, model, metric, unit=str(measure.get("unit", "")))
            args = (spec.recipe, values, measure, spec.seeds_of(row, model), where)
            made.append(bare if values is None else fill_in(bare, *args))
        yield from made
        yield from _extra_columns(made[-1], spec, where) if values is not None else ()


def _number(paper: str, text: str, where: str) -> float:
    """The number that a paper printed at `table | row | column | model`.

    Raises:
        UserError: there is no such cell, or it holds no number.
    """
    number, *wanted = text.split(" | ")
    for cell in papers.printed(paper, number):
        if [cell.row, cell.col, cell.model] == wanted and cell.number is not None:
            return cell.number
    raise UserError(f"{where}: printed: {paper} has no number at {text!r}; write table | row | column | model")


def _extra_columns(made: Cell, spec: Spec, where: str) -> Iterator[Cell]:
    for label, measure in spec.extra_columns.items():
        seeds = tuple(measure.get("seeds", made.seeds))
        kind, params = params_of({k: v for k, v in measure.items() if k != "seeds"}, dict(made.variables), where)
        col = f"{label}, {made.col}" if spec.sweep else label
        facts = {"unit": params.unit, "measure": kind, "params": params, "seeds": seeds}
        yield replace(made, col=col, metric=label, printed="", **facts)


LOG_PROBABILITY = (
    ", log probability"  # ends the metric of what is read next to an accuracy, under the same row, column and model
)


def _log_probability(accuracy: Cell) -> Iterator[Cell]:
    """What is read next to an accuracy, with the first of its seeds; nothing for other cells."""
    measure = log_probabilities(accuracy.paper).get(accuracy.metric)
    if measure and accuracy.measure:
        kind, params = params_of(measure, dict(accuracy.variables), f"{accuracy.table}: {accuracy.metric}")
        metric = accuracy.metric + LOG_PROBABILITY
        facts = {"printed": "", "unit": params.unit, "measure": kind, "params": params, "seeds": accuracy.seeds[:1]}
        yield replace(accuracy, metric=metric, **facts)
