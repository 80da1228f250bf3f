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

from collections.abc import Iterable, Iterator, Sequence
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
        columns: likewise; empty means every printed column. Of a question of our own: a column of `sweep`, such as
            `share 1/4`, to variables.
        absent: printed columns, labels or patterns, that are not measured, to what is missing for it, in words.
        recipe: template of the recipe over the variables of row, column and model.
        of_models: further variables by the paper's model, such as a rank.
        extra_rows: rows of your own at the end of the table; the label is the recipe, or maps to it or to variables.
        extra_models: models that the paper does not print, a column of our own each, for all rows.
        tuned_by: the spec of our own whose selected rows give variables to recipes; until rows are selected, these
            recipes are not run.
        extra_columns: label to what is measured, with the row's recipe; `seeds` where they are others than the
            row's.
        seeds: seeds of calibration text, initialization and order, whose mean is shown. Or a mapping from label or
            pattern, of a row or of `row | model`, to seeds: the first match counts, all other rows have one seed.
        notes: sentences under the table, and on the paper's page where it is a printed one.
        claims: what the paper says about this table, judged under it; their `table` is this one.
        models: of a question of our own: the papers' models whose stand-ins are measured.
        sweep: of a question of our own: variable to values; a column is one combination of them.
        measure: metric to what is measured: of a question of our own, or where one printed table has its own.
        row_measures: of a printed table: row label or pattern to metric to what is measured there instead.
        printed: of a question of our own: variable to `table | row | column | model`, whose printed number it is.
        scales: of a question of our own: the scales that measure it; empty means every scale.
        selected: of a question of our own: the row that is the answer, once it is known, or several rows that give
            different variables.
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
        """The measure of a metric in a row by the first entry of `row_measures` that matches; None if none does."""
        for label, by_metric in self.row_measures.items():
            if metric in by_metric and bind(label, row) is not None:
                return by_metric[metric]
        return None

    def seeds_of(self, row: str, model: str = "") -> tuple[int, ...]:
        """The seeds of a row on a model."""
        if not isinstance(self.seeds, dict):
            return self.seeds
        for label, seeds in self.seeds.items():
            if _matches_any(label, (row, f"{row} | {model}")):
                return seeds
        return (0,)


# --- specs -----------------------------------------------------------------------------------------------------------


@cache
def table(paper: str, number: str) -> Spec:
    """The spec of a table; one without rows if it is not written yet.

    Raises:
        UserError: no such table, an unknown key, a wrong value, or a label that the paper did not print.
    """
    split(f"{paper}/{number}")
    path = path_of(paper, number)
    where = str(path.relative_to(HOME))
    if not path.exists():
        return Spec(papers.index(paper)[number]["caption"])
    data = load_yaml(path)
    if isinstance(data, dict) and isinstance(data.get("claims"), list):
        for claim in data["claims"]:
            if isinstance(claim, dict):
                claim.setdefault("table", f"{paper}/{number}")
    spec = build(Spec, data, where)
    for claim in spec.claims:
        for name in (claim.table, *claim.more):
            split(name)
    if number.isdecimal():
        _check_printed_table(spec, papers.printed(paper, number), where)
    else:
        _check_own_spec(spec, where)
    for name in spec.scales:
        if name not in scale.names():
            raise UserError(f"{where}: scales: {unknown('scale', name, scale.names())}")
    return spec


def _check_own_spec(spec: Spec, where: str) -> None:
    """Raise if a spec of our own lacks a key, or has one of a printed table."""
    for name in ("absent", "row_measures"):
        if getattr(spec, name):
            raise UserError(f"{where}: {name} belongs to a printed table, not to a spec of our own")
    if not (spec.models and spec.measure and spec.rows):
        raise UserError(f"{where}: a spec of our own needs rows, models and measure")


def _check_printed_table(spec: Spec, cells: Sequence[papers.Printed], where: str) -> None:
    """Raise if a printed table's spec has a key of a spec of our own, or a label that the paper did not print."""
    for name in ("models", "sweep", "printed", "scales", "selected"):
        if getattr(spec, name):
            raise UserError(f"{where}: {name} belongs to a spec of our own, not to a printed table")
    _check_metrics(spec, cells, where)
    _check_labels(spec, cells, where)
    _check_absent(spec, cells, where)
    _check_seed_rows(spec, cells, where)
    _check_models(spec, cells, where)


def _check_metrics(spec: Spec, cells: Sequence[papers.Printed], where: str) -> None:
    """Raise unless `measure` and `row_measures` name metrics that the paper printed."""
    printed_metrics = {cell.metric for cell in cells}
    if odd := spec.measure.keys() - printed_metrics:
        raise UserError(f"{where}: measure: {unknown('printed metric', min(odd), printed_metrics)}")
    if odd := set(chain.from_iterable(spec.row_measures.values())) - printed_metrics:
        raise UserError(f"{where}: row_measures: {unknown('printed metric', min(odd), printed_metrics)}")


def _check_labels(spec: Spec, cells: Sequence[papers.Printed], where: str) -> None:
    """Raise unless every label or pattern of rows and columns matches a printed one."""
    printed_rows = {cell.row for cell in cells}
    printed_columns = {cell.col for cell in cells}
    for label in (*spec.rows, *spec.row_measures):
        check_pattern(label, where)
        if not _matches_any(label, printed_rows):
            hint = "(rows of your own go under `extra_rows`)"
            raise UserError(f"{where}: {unknown('printed row', label, printed_rows)} {hint}")
    for label in (*spec.columns, *spec.absent):
        check_pattern(label, where)
        if not _matches_any(label, printed_columns):
            raise UserError(f"{where}: {unknown('printed column', label, printed_columns)}")


def _check_absent(spec: Spec, cells: Sequence[papers.Printed], where: str) -> None:
    """Raise if a column is both absent and measured."""
    for col in sorted({cell.col for cell in cells}):
        measured = not spec.columns or variables(spec.columns, col) is not None
        if measured and absent_reason(spec, col):
            raise UserError(f"{where}: absent: column {col!r} is one of `columns`, so that it is measured")


def _check_seed_rows(spec: Spec, cells: Sequence[papers.Printed], where: str) -> None:
    """Raise unless every label of `seeds` matches a row, or a row on a model."""
    if not isinstance(spec.seeds, dict):
        return
    rows = {cell.row for cell in cells} | {*spec.extra_rows}
    models = {cell.model for cell in cells} | {*spec.extra_models}
    rows_on_models = {f"{row} | {model}" for row, model in product(rows, models)}
    for label in spec.seeds:
        if not _matches_any(label, rows | rows_on_models):
            raise UserError(f"{where}: seeds: {unknown('row', label, rows_on_models if ' | ' in label else rows)}")


def _check_models(spec: Spec, cells: Sequence[papers.Printed], where: str) -> None:
    """Raise unless `extra_models` are known models that the paper did not print, and `of_models` are printed ones."""
    printed_models = {cell.model for cell in cells}
    other_models = scale.pins().keys() - printed_models
    if odd := set(spec.extra_models) - other_models:
        raise UserError(f"{where}: extra_models: {unknown('model that is not printed', min(odd), other_models)}")
    if odd := spec.of_models.keys() - printed_models:
        raise UserError(f"{where}: of_models: {unknown('printed model', min(odd), printed_models)}")


def _matches_any(label: str, texts: Iterable[str]) -> bool:
    """Whether a label, or a pattern with `{name}`s, is one of some texts."""
    return any(bind(label, text) is not None for text in texts)


def absent_reason(spec: Spec, col: str) -> str:
    """What is missing for a printed column to be measured, as its spec says; empty if the spec names nothing."""
    return next((why for label, why in spec.absent.items() if bind(label, col) is not None), "")


def behind(paper: str, number: str) -> list[tuple[str, str]]:
    """Paper and number of a table and of the other tables that its claims name."""
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
        UserError: as `headline`, or `measured` names an unknown table or claim.
    """
    head = headline()
    claims = []
    for reference in head.measured:
        name, _, claim_id = reference.partition(": ")
        by_id = {claim.claim: claim for claim in reversed(table(*split(name)).claims)}  # the first one of an id counts
        if claim_id not in by_id:
            raise UserError(f"tables/table1.yaml: measured: {unknown(f'claim of {name}', claim_id, by_id)}")
        claims.append(by_id[claim_id])
    return [*claims, *head.claims]


# --- cells ------------------------------------------------------------------------------------------------------------


def cells(paper: str, number: str) -> list[Cell]:
    """Every cell of a table: the printed ones in the paper's order, extra rows, then extra columns.

    Raises:
        UserError: as `table`, `params_of` and `parse` say.
    """
    spec = table(paper, number)
    if not number.isdecimal():
        return list(_cells_of_own_spec(paper, number, spec))
    printed = list(_cells_of_printed_table(paper, number, spec))
    return [*printed, *chain.from_iterable(map(_log_probability, printed))]


def _cells_of_printed_table(paper: str, number: str, spec: Spec) -> Iterator[Cell]:
    where = str(path_of(paper, number).relative_to(HOME))
    printed = papers.printed(paper, number)
    measure_of_metric = measures(paper) | spec.measure
    first_column = [c for c in printed if c.col == printed[0].col]
    for model in spec.extra_models:
        printed = [*printed, *(replace(c, col=f"{model} (ours)", model=model, value="") for c in first_column)]
    columns = {c.col: variables(spec.columns, c.col) if spec.columns else {} for c in printed}
    first_of_row: dict[tuple[str, str], Cell] = {}  # by row and model

    def cell(row: str, c: papers.Printed, of_row: Variables | None, value: str) -> Cell:
        bare = Cell(paper, "table", number, row, c.col, c.model, c.metric, value, c.unit)
        measure = spec.measure_of(row, c.metric) or measure_of_metric.get(c.metric)
        if of_row is None or columns[c.col] is None or measure is None:
            return bare
        template = "{recipe}" if row in spec.extra_rows else spec.recipe
        values = spec.of_models.get(c.model, {}) | of_row | columns[c.col]
        measured = fill_in(bare, template, values, measure, spec.seeds_of(row, c.model), where)
        first_of_row.setdefault((row, c.model), measured)
        return measured

    tuned = selected_values(spec.tuned_by)
    for c in printed:
        of_row = variables(spec.rows, c.row)
        yield cell(c.row, c, None if of_row is None else bound(of_row, spec.recipe, tuned), c.value)
    each_column_once = {(c.col, c.model, c.metric): c for c in printed}.values()
    for label in spec.extra_rows:
        of_row = bound(_variables_of_extra_row(spec, label), spec.recipe, tuned)
        for c in each_column_once:
            yield cell(label, c, of_row, "")
    for measured in list(first_of_row.values()):
        yield from _extra_columns(measured, spec, where)


def _variables_of_extra_row(spec: Spec, label: str) -> Variables:
    """The variables of an extra row, whose label is its recipe or maps to it or to variables."""
    values = spec.extra_rows[label] if isinstance(spec.extra_rows, dict) else label
    return {"recipe": values} if isinstance(values, str) else dict(values)


def selected_values(name: str) -> dict[str, Value | None]:
    """The variables that a spec's selected rows give, None for one that only other rows give; empty without a name."""
    if not name:
        return {}
    spec = table(*split(name))
    rows = {label: variables(spec.rows, label) or {} for label in spec.rows}
    values: dict[str, Value | None] = {}
    for row in rows.values():
        values |= dict.fromkeys(row)
    for label in spec.selected_rows:
        values |= rows[label]
    return values


def _cells_of_own_spec(paper: str, name: str, spec: Spec) -> Iterator[Cell]:
    where = str(path_of(paper, name).relative_to(HOME))
    points = [dict(zip(spec.sweep, values)) for values in product(*spec.sweep.values())]
    tuned = selected_values(spec.tuned_by)
    for model, row, point in product(spec.models, spec.rows, points):
        col = ", ".join(f"{key} {plain(value)}" for key, value in point.items())
        of_row = variables(spec.rows, row) or {}
        of_column = variables(spec.columns, col) or {}
        values = bound(spec.of_models.get(model, {}) | of_row | point | of_column, spec.recipe, tuned)
        if values is not None:
            values |= {key: _number(paper, filled(text, values), where) for key, text in spec.printed.items()}
        cells_of_row = []
        for metric, measure in spec.measure.items():
            bare = Cell(paper, "table", name, row, col, model, metric, unit=str(measure.get("unit", "")))
            if values is None:
                cells_of_row.append(bare)
            else:
                cells_of_row.append(fill_in(bare, spec.recipe, values, measure, spec.seeds_of(row, model), where))
        yield from cells_of_row
        if values is not None:
            yield from _extra_columns(cells_of_row[-1], spec, where)


def _number(paper: str, text: str, where: str) -> float:
    """The number that a paper printed at `table | row | column | model`.

    Raises:
        UserError: there is no such cell, or it holds no number.
    """
    number, *key = text.split(" | ")
    for cell in papers.printed(paper, number):
        if [cell.row, cell.col, cell.model] == key and cell.number is not None:
            return cell.number
    raise UserError(f"{where}: printed: {paper} has no number at {text!r}; write table | row | column | model")


def _extra_columns(cell: Cell, spec: Spec, where: str) -> Iterator[Cell]:
    """The cells of a spec's extra columns in the row of a cell."""
    for label, measure in spec.extra_columns.items():
        seeds = tuple(measure.get("seeds", cell.seeds))
        kind, params = params_of({k: v for k, v in measure.items() if k != "seeds"}, dict(cell.variables), where)
        col = f"{label}, {cell.col}" if spec.sweep else label
        facts = {"unit": params.unit, "measure": kind, "params": params, "seeds": seeds}
        yield replace(cell, col=col, metric=label, printed="", **facts)


# Ends the metric of the cell that is read next to an accuracy, under the same row, column and model.
LOG_PROBABILITY = ", log probability"


def _log_probability(accuracy: Cell) -> Iterator[Cell]:
    """The cell of the log probability next to an accuracy, with its first seed; nothing for other cells."""
    measure = log_probabilities(accuracy.paper).get(accuracy.metric)
    if measure and accuracy.measure:
        kind, params = params_of(measure, dict(accuracy.variables), f"{accuracy.table}: {accuracy.metric}")
        metric = accuracy.metric + LOG_PROBABILITY
        facts = {"printed": "", "unit": params.unit, "measure": kind, "params": params, "seeds": accuracy.seeds[:1]}
        yield replace(accuracy, metric=metric, **facts)
