"""The measurements of a table or figure: stored in results/, fresh from built files, or why there is none."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from repro.core.errors import NotMeasurable, UserError, unknown
from repro.metrics import metric_of
from repro.papers.cell import Cell, CellKey
from repro.recipes import recipe
from repro.results import stored_rows
from repro.results.measured import Measured
from repro.results.stored_rows import JOIN, ORIGIN
from repro.specs import figures, scale, tables
from repro.stats.quantity import compose
from repro.store import provenance
from repro.store.job import Job, distinct
from repro.store.measurement import MEASURED, Measurement
from repro.workflow import runner, versions
from repro.workflow.workflow import Workflow

FRESH = ("fresh", "partial")  # of `Measurement.source`: measured here
NO_BETTER = "full precision is not better than the fewest bits by more than its interval"  # judged by a whole table


def measured(flow: Workflow, cells: Iterable[Cell]) -> dict[CellKey, Measured]:
    """Every cell by its key, in order, with its measurement and all that verdict, table, figure and page take of it.

    A cell is stored when an accepted measurement of it, or of the same declared inputs in another table, stands; else
    fresh when it was measured here; else it carries the status that says why there is none. Where a workflow is to
    measure everything itself, what was measured here comes first.
    """
    return {cell.cell_key: one_measured(flow, cell) for cell in cells}


def one_measured(flow: Workflow, cell: Cell) -> Measured:
    """One cell likewise."""
    return flow.once(("cell", *cell.identity), lambda: _with_full(flow, cell, _judged_by_table(flow, cell)))


def one(flow: Workflow, cell: Cell) -> Measurement:
    """The measurement of one cell."""
    return one_measured(flow, cell).measurement


def _with_full(flow: Workflow, cell: Cell, one: Measured) -> Measured:
    """A cell with full precision, where its metric compares with it and both are measured on the same units."""
    m = one.measurement
    if m.status not in MEASURED or not metric_of(cell).against:
        return one
    full = _full_precision(flow, cell)
    if cell.recipe == full.recipe:
        return one
    reference = _own(flow, full) if m.source in FRESH else one_measured(flow, full)
    same_units = (reference.measurement.source in FRESH) == (m.source in FRESH)
    if reference.measurement.status not in MEASURED or not same_units:
        return one
    return replace(one, full=reference)


def _full_precision(flow: Workflow, cell: Cell) -> Cell:
    """The row of full precision in the cell's own table where it has one, else the same measure of no step."""
    full = flow.full_precision(cell)
    for peer in flow.peers(cell):
        if peer.recipe == full.recipe:
            return peer
    return full


def _judged_by_table(flow: Workflow, cell: Cell) -> Measured:
    """A cell, at chance where full precision is no better than the fewest bits of its table."""
    by_itself = _by_itself(flow, cell)
    if by_itself.measurement.status == "ok" and _at_chance(flow, cell):
        return by_itself.marked(status="at_chance", note=NO_BETTER)
    return by_itself


def _at_chance(flow: Workflow, cell: Cell) -> bool:
    """Whether the task of a cell does not tell full precision from the fewest bits of its table."""
    fewest_bits = metric_of(cell).fewest_bits
    if fewest_bits is None:
        return False
    fewest = fewest_bits(cell, flow.peers(cell))
    if fewest is None:
        return False
    quantities = {}
    for name, other in (("f", _full_precision(flow, cell)), ("l", fewest)):
        one = _by_itself(flow, other)
        quantities[name] = one.quantity if one.measurement.status in MEASURED else None
    if None in quantities.values():
        return False
    gain = compose("f - l", quantities).interval()
    return gain.lo is not None and gain.lo <= 0


def _by_itself(flow: Workflow, cell: Cell) -> Measured:
    """A cell's measurement, whatever those of other rows are."""
    return flow.once(("cell by itself", *cell.identity), lambda: _computed(flow, cell))


def _computed(flow: Workflow, cell: Cell) -> Measured:
    """The same, computed."""
    blank = _blank(flow, cell)
    if flow.is_external(cell):
        return external(flow, cell)
    if cell.model and (not cell.stand_in or metric_of(cell).PUBLIC):
        status = blank.status if cell.stand_in else "no_stand_in"
        wants = "" if flow.is_measured(cell) else "spec"
        return Measured(cell, arithmetic(cell, blank) or replace(blank, status=status), wants=wants)
    if not flow.is_measured(cell):
        return Measured(cell, blank, wants="spec")
    if flow.waits_for_baseline(cell) and (full := one(flow, flow.full_precision(cell))).status == "at_chance":
        facts = {name: getattr(full, name) for name in ("grade", "device", "commit")}
        facts |= {"status": "at_chance", "recipe": cell.recipe, "note": "full precision is at chance; not run"}
        return Measured(cell, replace(blank, **facts))
    if metric_of(cell).JOBLESS:
        return _fresh(flow, cell)
    if not flow.jobs(cell):
        note = f"scale {flow.scale.name} does not measure it"
        return Measured(cell, replace(blank, note=note), wants="protocol")
    if absent := flow.lacking(cell):
        return stored_rows.find(flow, cell) or Measured(cell, replace(blank, note=absent), lacking=absent)
    if flow.stored_first or flow.stored_only:
        stored = stored_rows.find(flow, cell)
        if stored and stored.measurement.status != "stale":
            return stored
        own = _own(flow, cell)
        return own if own.measurement.source or not stored else stored
    own = _own(flow, cell)
    return own if own.measurement.source else stored_rows.find(flow, cell) or own


def _own(flow: Workflow, cell: Cell) -> Measured:
    """A cell as it was measured here; `partial` where that was on its first windows or items, or with one seed."""
    if flow.stored_only:
        note = f"scale {flow.scale.name} takes it from accepted results, and there is none"
        return Measured(cell, replace(_blank(flow, cell), note=note))
    if not flow.stored_first:
        return _fresh(flow, cell)
    here = _fresh(flow.brief, cell)
    if here.measurement.source and here.measurement.inputs != stored_rows.declared(flow, cell)["inputs"]:
        return here.marked(source="partial")
    return here


def _fresh(flow: Workflow, cell: Cell) -> Measured:
    """A cell from the files that its jobs built here, with its quantity."""
    return Measured(cell, fresh(flow, cell), lambda: flow.quantity(cell))


def arithmetic(cell: Cell, blank: Measurement) -> Measurement | None:
    """A cell by arithmetic on public shapes: one without stand-in, or of a kind that always is, where it can be."""
    shape = scale.shape(cell.model)
    if not (cell.recipe and shape):
        return None
    value = metric_of(cell).exact(recipe.parse(cell.recipe).steps, shape)
    facts = {"status": "ok", "grade": "D", "source": "arithmetic", "recipe": cell.recipe, "stand_in": ""}
    return None if value is None else replace(blank, value=value, **facts)


def external(flow: Workflow, cell: Cell) -> Measured:
    """A cell from results of its metric's own, such as kernel times; the geometric mean of several numbers."""
    own, operands = flow.quantity(cell), flow.operands(cell)
    first = next(iter(operands.values()), cell)
    metric = metric_of(first)
    if own is None:
        note = metric.absent() or "no such time is accepted or built here"
        return Measured(cell, replace(_blank(flow, cell), note=note), external=True)
    shown = compose("geomean(x)", {"x": own}) if not operands and metric.several() else own
    facts = metric.origin([operand.params for operand in operands.values()] or [cell.params])
    m = replace(_blank(flow, cell), grade="B", **stored_rows.numbers(shown.interval()) | facts)
    return Measured(cell, m, lambda: own, external=True)


def cell_of(flow: Workflow, row: Measurement) -> Cell:
    """The cell of a row of a CSV.

    Raises:
        UserError: there is no such table, figure or cell with a recipe.
    """
    if row.kind not in ("table", "figure"):
        raise unknown("kind of result", row.kind, ("table", "figure"))
    given = tables.split(row.table) if row.kind == "table" else figures.split(row.table)
    for whole in flow.cells(*given, row.kind):
        of_it = row.cell_key[:3] == whole.cell_key[:3] and row.metric.startswith(f"{whole.metric}: ")
        for cell in [whole, *(flow.operands(whole).values() if of_it else ())]:
            if cell.cell_key == row.cell_key and (flow.is_measured(cell) or flow.is_external(cell)):
                return stored_rows.as_drawn(cell, row)
    raise UserError(f"{row.table} has no cell {' / '.join(row.cell_key)} that scale {flow.scale.name} measures")


def asked(flow: Workflow, row: Measurement) -> Cell | None:
    """The cell of an accepted row; None where the row has outlived its spec."""
    try:
        return cell_of(flow, row)
    except UserError:
        return None


def jobs_behind(flow: Workflow, cell: Cell) -> list[Job]:
    """The jobs of a cell; where full precision decides its status (`at_chance`), the jobs of that too."""
    more = stored_rows.jobs(flow, flow.full_precision(cell)) if metric_of(cell).status else []
    return stored_rows.jobs(flow, cell) + more


def missing(flow: Workflow, cells: Iterable[Cell]) -> list[Job]:
    """The jobs of cells that no accepted result stands for, with all that they need; of a cell's operands only such.

    Raises:
        UserError: results/ is damaged.
    """
    jobs: list[Job] = []
    for cell in cells:
        if not flow.is_measured(cell) or flow.lacking(cell):
            continue
        full = flow.full_precision(cell)
        if flow.waits_for_baseline(cell) and one(flow, full).status != "ok":
            cell = full
        if not stored_rows.stands(flow, cell):
            operands = [operand for operand in flow.operands(cell).values() if not stored_rows.stands(flow, operand)]
            for operand in operands or [cell]:
                jobs += jobs_behind(flow, operand)
    return distinct(jobs)


def fresh_operands(flow: Workflow, cells: Iterable[Cell]) -> list[Measurement]:
    """The operands built here of cells whose other operands are not, such as those that `missing` leaves out.

    Each has a cell key of its own, so that it can be accepted beside what is accepted of the others.

    Raises:
        UserError: as `built`.
    """
    if flow.stored_first:
        return []
    by_inputs: dict[str, Measurement] = {}
    for cell in filter(flow.is_measured_here, cells):
        inner = flow.operands(cell).values()
        if inner and not all(map(runner.origin, stored_rows.jobs(flow, cell))):
            rows = [fresh(flow, operand) for operand in inner if not stored_rows.stands(flow, operand)]
            by_inputs = {row.inputs: row for row in rows if row.source} | by_inputs
    return list(by_inputs.values())


def _blank(flow: Workflow, cell: Cell) -> Measurement:
    return Measurement(**stored_rows.of_cell(cell), scale=flow.scale.name)


def fresh(flow: Workflow, cell: Cell) -> Measurement:
    """A cell from the files that its jobs built here; stale if they were built under other versions than today's.

    Raises:
        UserError: as `built`.
    """
    measurement = built(flow, cell)
    if measurement.status in MEASURED:
        others = versions.changed(versions.read(measurement.versions), versions.of_cell(flow, cell))
        if others:
            return replace(measurement, status="stale", note=f"other versions: {others}")
    return measurement


def built(flow: Workflow, cell: Cell) -> Measurement:
    """A cell from the files of its jobs, with the versions that made them; its `source` is empty without files.

    Raises:
        UserError: damaged files, those of another job, or jobs that were built under different versions.
    """
    made = stored_rows.jobs(flow, cell)
    origins = [runner.origin(job) for job in made]
    try:
        for need in distinct(made):
            runner.check(need.folder)
        quantity = flow.quantity(cell)
    except NotMeasurable as refused:
        if flow.operands(cell) and not all(origins):
            return replace(_blank(flow, cell), note="not all of its operands are built")
        origins = [*filter(None, origins)] or [*filter(None, map(runner.origin, distinct(made)))]
        numbers: dict[str, Any] = {"status": refused.status, "note": str(refused)}
    else:
        if quantity is None or not all(origins):
            return replace(_blank(flow, cell), note="its observations are not built")
        numbers = {"status": _status(flow, cell)} | stored_rows.values(quantity)
    return replace(
        _blank(flow, cell),
        source="fresh",
        grade=flow.grade(cell),
        **stored_rows.declared(flow, cell),
        versions=versions.text(made_by(flow, cell, origins)),
        **numbers,
        **_joined(origins),
    )


def made_by(flow: Workflow, cell: Cell, origins: Iterable[Mapping[str, str]]) -> dict[str, int]:
    """The versions that made the results of jobs with these origins, with those of the metrics that read them today.

    Raises:
        UserError: two of them were made under different versions of the same thing.
    """
    made = versions.merged((origin["job"], origin["versions"]) for origin in origins)
    return versions.of_metrics(flow, cell) | made


def _status(flow: Workflow, cell: Cell) -> str:
    """`ok`, or what the kind says where full precision decides it."""
    decides = metric_of(cell).status
    full = flow.quantity(flow.full_precision(cell)) if decides else None
    return decides(full.seeds[0]) if full else "ok"


def _joined(origins: Collection[Mapping[str, str]]) -> dict[str, str]:
    """Where observations were made, several origins joined, and a hash of the files that their jobs read and made."""
    joined = {name: JOIN.join(dict.fromkeys(origin[name] for origin in origins)) for name in ORIGIN}
    files = [[origin["artifacts"], origin.get("made", "")] for origin in origins]
    return joined | {"artifacts": provenance.entry_hash({"files": files}) if files else ""}
