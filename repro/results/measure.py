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
    """Every cell by its key, in order, with its measurement and all that verdicts, tables, figures and pages need.

    A cell is stored if an accepted measurement of it, or of the same declared inputs in another table, still stands;
    else fresh if it was measured here; else its status says why there is no measurement. For a workflow that measures
    everything itself, what was measured here comes first.
    """
    return {cell.cell_key: one_measured(flow, cell) for cell in cells}


def one_measured(flow: Workflow, cell: Cell) -> Measured:
    """As `measured`, of one cell."""
    return flow.once(("cell", *cell.identity), lambda: _with_full(flow, cell, _judged_by_table(flow, cell)))


def measurement_of(flow: Workflow, cell: Cell) -> Measurement:
    """The measurement of one cell."""
    return one_measured(flow, cell).measurement


def _with_full(flow: Workflow, cell: Cell, compressed: Measured) -> Measured:
    """Add full precision to a cell if its metric compares with it and both are measured on the same units."""
    m = compressed.measurement
    if m.status not in MEASURED or not metric_of(cell).against:
        return compressed
    full = _full_precision(flow, cell)
    if cell.recipe == full.recipe:
        return compressed
    reference = _own(flow, full) if m.source in FRESH else one_measured(flow, full)
    same_units = (reference.measurement.source in FRESH) == (m.source in FRESH)
    if reference.measurement.status not in MEASURED or not same_units:
        return compressed
    return replace(compressed, full=reference)


def _full_precision(flow: Workflow, cell: Cell) -> Cell:
    """The full-precision cell to compare with: of the cell's own table if it has one, else the same measure."""
    full = flow.full_precision(cell)
    for peer in flow.peers(cell):
        if peer.recipe == full.recipe:
            return peer
    return full


def _judged_by_table(flow: Workflow, cell: Cell) -> Measured:
    """A cell; it is at chance if full precision is no better than the fewest bits of its table."""
    by_itself = _by_itself(flow, cell)
    if by_itself.measurement.status == "ok" and _at_chance(flow, cell):
        return by_itself.marked(status="at_chance", note=NO_BETTER)
    return by_itself


def _at_chance(flow: Workflow, cell: Cell) -> bool:
    """Whether a cell's task cannot tell full precision from the fewest bits of its table."""
    fewest_bits = metric_of(cell).fewest_bits
    if fewest_bits is None:
        return False
    fewest = fewest_bits(cell, flow.peers(cell))
    if fewest is None:
        return False
    quantities = {}
    for name, compared in (("f", _full_precision(flow, cell)), ("l", fewest)):
        by_itself = _by_itself(flow, compared)
        quantities[name] = by_itself.quantity if by_itself.measurement.status in MEASURED else None
    if None in quantities.values():
        return False
    gain = compose("f - l", quantities).interval()
    return gain.lo is not None and gain.lo <= 0


def _by_itself(flow: Workflow, cell: Cell) -> Measured:
    """A cell's measurement, regardless of other rows."""
    return flow.once(("cell by itself", *cell.identity), lambda: _computed(flow, cell))


def _computed(flow: Workflow, cell: Cell) -> Measured:
    """As `_by_itself`, without the cache."""
    blank = _blank(flow, cell)
    if flow.is_external(cell):
        return external(flow, cell)
    if cell.model and (not cell.stand_in or metric_of(cell).PUBLIC):
        status = blank.status if cell.stand_in else "no_stand_in"
        wants = "" if flow.is_measured(cell) else "spec"
        return Measured(cell, arithmetic(cell, blank) or replace(blank, status=status), wants=wants)
    if not flow.is_measured(cell):
        return Measured(cell, blank, wants="spec")
    if (
        flow.waits_for_baseline(cell)
        and (full := measurement_of(flow, flow.full_precision(cell))).status == "at_chance"
    ):
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
        built_here = _own(flow, cell)
        return built_here if built_here.measurement.source or not stored else stored
    built_here = _own(flow, cell)
    return built_here if built_here.measurement.source else stored_rows.find(flow, cell) or built_here


def _own(flow: Workflow, cell: Cell) -> Measured:
    """A cell as it was measured here; `partial` if on its first windows or items only, or with one seed of several."""
    if flow.stored_only:
        note = f"scale {flow.scale.name} takes it from accepted results, and there is none"
        return Measured(cell, replace(_blank(flow, cell), note=note))
    if not flow.stored_first:
        return _fresh(flow, cell)
    of_build = _fresh(flow.brief, cell)
    if of_build.measurement.source and of_build.measurement.inputs != stored_rows.declared(flow, cell)["inputs"]:
        return of_build.marked(source="partial")
    return of_build


def _fresh(flow: Workflow, cell: Cell) -> Measured:
    """A cell from the files that its jobs built here, with its quantity."""
    return Measured(cell, fresh(flow, cell), lambda: flow.quantity(cell))


def arithmetic(cell: Cell, blank: Measurement) -> Measurement | None:
    """The measurement of a cell by arithmetic on its model's public shape; None if its metric has none.

    Args:
        blank: the measurement without a value.
    """
    shape = scale.shape(cell.model)
    if not (cell.recipe and shape):
        return None
    value = metric_of(cell).exact(recipe.parse(cell.recipe).steps, shape)
    facts = {"status": "ok", "grade": "D", "source": "arithmetic", "recipe": cell.recipe, "stand_in": ""}
    return None if value is None else replace(blank, value=value, **facts)


def external(flow: Workflow, cell: Cell) -> Measured:
    """A cell from files of its metric's own, such as kernel times; of several numbers their geometric mean."""
    quantity, operands = flow.quantity(cell), flow.operands(cell)
    first = next(iter(operands.values()), cell)
    metric = metric_of(first)
    if quantity is None:
        note = metric.absent() or "no such time is accepted or built here"
        return Measured(cell, replace(_blank(flow, cell), note=note), external=True)
    displayed = compose("geomean(x)", {"x": quantity}) if not operands and metric.several() else quantity
    facts = metric.origin([operand.params for operand in operands.values()] or [cell.params])
    m = replace(_blank(flow, cell), grade="B", **stored_rows.numbers(displayed.interval()) | facts)
    return Measured(cell, m, lambda: quantity, external=True)


def cell_of(flow: Workflow, row: Measurement) -> Cell:
    """The cell of a row of a CSV.

    Raises:
        UserError: there is no such table, figure or cell with a recipe.
    """
    if row.kind not in ("table", "figure"):
        raise unknown("kind of result", row.kind, ("table", "figure"))
    paper, number = tables.split(row.table) if row.kind == "table" else figures.split(row.table)
    for cell in flow.cells(paper, number, row.kind):
        candidates = [cell]
        is_operand = row.cell_key[:3] == cell.cell_key[:3] and row.metric.startswith(f"{cell.metric}: ")
        if is_operand:
            candidates += flow.operands(cell).values()
        for candidate in candidates:
            if candidate.cell_key != row.cell_key:
                continue
            if flow.is_measured(candidate) or flow.is_external(candidate):
                return stored_rows.with_seeds_of(candidate, row)
    raise UserError(f"{row.table} has no cell {' / '.join(row.cell_key)} that scale {flow.scale.name} measures")


def cell_if_specified(flow: Workflow, row: Measurement) -> Cell | None:
    """The cell of an accepted row; None if no spec has it any more."""
    try:
        return cell_of(flow, row)
    except UserError:
        return None


def jobs_behind(flow: Workflow, cell: Cell) -> list[Job]:
    """The jobs of a cell, and those of full precision if that decides its status (`at_chance`)."""
    jobs_of_full = stored_rows.jobs(flow, flow.full_precision(cell)) if metric_of(cell).status else []
    return stored_rows.jobs(flow, cell) + jobs_of_full


def missing(flow: Workflow, cells: Iterable[Cell]) -> list[Job]:
    """The jobs, with their needs, of cells and operands without a current accepted result.

    Raises:
        UserError: results/ is damaged.
    """
    jobs: list[Job] = []
    for cell in cells:
        if not flow.is_measured(cell) or flow.lacking(cell):
            continue
        full = flow.full_precision(cell)
        if flow.waits_for_baseline(cell) and measurement_of(flow, full).status != "ok":
            cell = full
        if not stored_rows.stands(flow, cell):
            operands = [operand for operand in flow.operands(cell).values() if not stored_rows.stands(flow, operand)]
            for operand in operands or [cell]:
                jobs += jobs_behind(flow, operand)
    return distinct(jobs)


def fresh_operands(flow: Workflow, cells: Iterable[Cell]) -> list[Measurement]:
    """The operands that are built here of cells whose other operands are not, such as those that `missing` leaves out.

    Each has a cell key of its own, so it can be accepted next to the other operands' accepted rows.

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
    """The measurement of a cell from the files of its jobs; stale if they were built under other versions than today's.

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
    """The measurement of a cell from the files of its jobs, with the versions that made them.

    Its `source` is empty if files are missing.

    Raises:
        UserError: damaged files, those of another job, or jobs that were built under different versions.
    """
    jobs = stored_rows.jobs(flow, cell)
    origins = [runner.origin(job) for job in jobs]
    try:
        for job in distinct(jobs):
            runner.check(job.folder)
        quantity = flow.quantity(cell)
    except NotMeasurable as refused:
        if flow.operands(cell) and not all(origins):
            return replace(_blank(flow, cell), note="not all of its operands are built")
        origins = list(filter(None, origins)) or list(filter(None, map(runner.origin, distinct(jobs))))
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
    """The versions that a cell depends on: those of its jobs' results, and today's of the metrics that read them.

    Args:
        origins: of the jobs (`runner.origin`).

    Raises:
        UserError: two results were made under different versions of one name.
    """
    version_of = versions.merged((origin["job"], origin["versions"]) for origin in origins)
    return versions.of_metrics(flow, cell) | version_of


def _status(flow: Workflow, cell: Cell) -> str:
    """`ok`, or the status that the metric derives from full precision."""
    decides = metric_of(cell).status
    full = flow.quantity(flow.full_precision(cell)) if decides else None
    return decides(full.seeds[0]) if full else "ok"


def _joined(origins: Collection[Mapping[str, str]]) -> dict[str, str]:
    """The joined origins of a cell's jobs, and a hash of the files that they read and made."""
    joined = {name: JOIN.join(dict.fromkeys(origin[name] for origin in origins)) for name in ORIGIN}
    files = [[origin["artifacts"], origin.get("made", "")] for origin in origins]
    return joined | {"artifacts": provenance.entry_hash({"files": files}) if files else ""}
