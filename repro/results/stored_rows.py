"""Accepted results of a cell: its own row, one of the same declared inputs in another table, or its operands' rows.

A measurement is made and accepted once, in whichever table, and every cell that declares the same inputs at the same
scale uses it, with its interval, status, origin and staleness. All declared inputs must be equal; one seed of a row
with several stands for a cell of that seed. A derived cell is composed from the accepted rows of its operands, seed by
seed.

Rows are tried in this order: the cell's own, rows of equal inputs (last folder name first), the composed one. The first
that is not stale is used; if all are stale, the first.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

from repro.core.errors import UserError
from repro.papers.cell import Cell
from repro.results.measured import Measured
from repro.stats.quantity import Quantity, compose
from repro.stats.statistics import Interval
from repro.store import accepted, observations
from repro.store.job import Job
from repro.store.measurement import MEASURED, Measurement
from repro.store.stored_row import text
from repro.workflow import versions
from repro.workflow.workflow import Workflow

ORIGIN = ("device", "device_class", "commit", "environment")
JOIN = " + "  # between the origins of a cell with several jobs
OF_CELL = ("paper", "kind", "number", "row", "col", "model", "metric", "printed", "unit", "stand_in")


def find(flow: Workflow, cell: Cell) -> Measured | None:
    """The accepted result of a cell under its own key: the first that is not stale, else the first; else None.

    Raises:
        UserError: results/ is damaged, or a stored value differs from the one that its observations give.
    """
    return flow.once(("stored", *cell.identity), lambda: _first(chain(_own(flow, cell), _equal(flow, cell))))


def stands(flow: Workflow, cell: Cell) -> bool:
    """Whether a cell or an operand has an accepted result that is current.

    No value is recomputed for that; showing the row does it, and raises if the value does not fit.
    """
    row = accepted.find(flow.scale.name, cell)
    if row is not None and row.status != "stale" and "status" not in standing(flow, with_seeds_of(cell, row), row):
        return True
    if not flow.jobs(cell):
        return False
    for row in accepted.equal(flow.scale.name, flow.inputs_hash(cell)):
        if row.status != "stale" and "status" not in standing(flow, cell, row):
            return True
    composed = find(flow, cell) if flow.operands(cell) else None
    return composed is not None and composed.measurement.status != "stale"


def _first(candidates: Iterable[Measured]) -> Measured | None:
    stale = None
    for candidate in candidates:
        if candidate.measurement.status != "stale":
            return candidate
        stale = stale or candidate
    return stale


def _own(flow: Workflow, cell: Cell) -> Iterator[Measured]:
    """The row of the cell's own key."""
    if (row := accepted.find(flow.scale.name, cell)) is not None:
        yield _shown(flow, cell, with_seeds_of(cell, row), row)


def _equal(flow: Workflow, cell: Cell) -> Iterator[Measured]:
    """The rows of equal inputs under any key, then the cell composed from its operands."""
    if not flow.jobs(cell):
        return
    for row in accepted.equal(flow.scale.name, flow.inputs_hash(cell)):
        yield _shown(flow, cell, cell, row)
    if operands := _operands(flow, cell):
        yield _composed(flow, cell, operands)


def _operands(flow: Workflow, cell: Cell) -> dict[str, Measured]:
    """The accepted result of each operand of a cell by name; empty if one has none."""
    by_name = {}
    for name, operand in flow.operands(cell).items():
        if (accepted_operand := _first(_equal(flow, operand))) is None:
            return {}
        by_name[name] = accepted_operand
    return by_name


def _shown(flow: Workflow, cell: Cell, of_row: Cell, row: Measurement) -> Measured:
    """A row under a cell's key, with the quantity from which its value is computed.

    Args:
        of_row: the cell with the row's seeds (`with_seeds_of`).
    """
    measurement = replace(row, **of_cell(cell), **standing(flow, of_row, row))
    measured = Measured(cell, measurement, cache(lambda: _quantity(flow, of_row, row)))
    return measured if measurement.status == "stale" else measured.marked(**_recomputed(row, measured.load_quantity()))


def _quantity(flow: Workflow, cell: Cell, row: Measurement) -> Quantity | None:
    """The quantity of a row from its accepted series; None if none are stored."""
    seeds = accepted.series(row)
    return flow.of_series(cell, seeds) if seeds else None


def _composed(flow: Workflow, cell: Cell, operands: Mapping[str, Measured]) -> Measured:
    """A cell composed from its operands' accepted results; stale if one of them is, without a value if one has none."""
    rows = [operand.measurement for operand in operands.values()]
    origins = {}
    for name in (*ORIGIN, "artifacts"):
        words = chain.from_iterable(getattr(m, name).split(JOIN) for m in rows)
        origins[name] = JOIN.join(dict.fromkeys(words))
    unusable = [m for m in rows if m.value is None] + [m for m in rows if m.status == "stale"]
    facts = {"status": unusable[0].status, "note": unusable[0].note} if unusable else {"status": "ok"}
    facts |= {"source": "stored", "versions": _joined_versions(cell, rows)}
    facts |= {"scale": flow.scale.name, "grade": max(m.grade for m in rows)}
    quantities = {name: operand.load_quantity() for name, operand in operands.items()}
    composed = None if None in quantities.values() else compose(cell.params.quantity, quantities)  # type: ignore[arg-type]
    numbers = values(composed) if composed else {}
    measurement = Measurement(**of_cell(cell), **facts, **declared(flow, cell), **origins, **numbers)
    return Measured(cell, measurement, lambda: composed)


def _joined_versions(cell: Cell, operands: Iterable[Measurement]) -> str:
    """The versions of a cell's operands and of its own metric; where operands differ, all of them."""
    words = set(versions.text({cell.measure: versions.of(cell.measure)}).split())
    for operand in operands:
        words.update(operand.versions.split())
    return " ".join(sorted(words))


def standing(flow: Workflow, cell: Cell, old: Measurement) -> dict[str, Any]:
    """The fields that decide whether a stored row is current; it is stale if declared inputs or versions changed."""
    stale = {"source": "stored", "status": "stale"}
    if flow.inputs_hash(cell) != old.inputs:
        return stale | {"note": "its declared inputs have changed"}
    if old.grade != flow.grade(cell):
        return stale | {"note": f"it was accepted as grade {old.grade}, and scale {old.scale} is {flow.grade(cell)}"}
    if others := versions.changed(versions.read(old.versions), versions.of_cell(flow, cell)):
        return stale | {"note": f"other versions: {others}"}
    return {"source": "stored"}


def _recomputed(old: Measurement, quantity: Quantity | None) -> dict[str, Any]:
    """Value, interval and n of a stored row, recomputed from its accepted observations.

    Raises:
        UserError: the stored value differs, or there are no observations.
    """
    if quantity is None and old.status in MEASURED:
        raise UserError(f"{accepted.path_of(old)}: {old.where} has no observations, so its value is not shown")
    if quantity is None:
        return {}
    interval = quantity.interval()
    if old.value is not None and text(interval.value) != text(old.value):
        raise UserError(
            f"{accepted.path_of(old)}: the value of {old.where} is {text(old.value)}, but its observations give "
            f"{text(interval.value)}; check the file out again"
        )
    return numbers(interval)


# --- fields of a measurement from its cell and quantity ---------------------------------------------------------------


def of_cell(cell: Cell) -> dict[str, str]:
    """The fields of a measurement that come from its cell: its key, the printed value, the stand-in."""
    return {name: getattr(cell, name) for name in OF_CELL}


def with_seeds_of(cell: Cell, row: Measurement) -> Cell:
    """The cell with a row's seeds, if the row has only some of the seeds that the spec asks for."""
    seeds = tuple(map(int, row.seeds.split()))
    return replace(cell, seeds=seeds) if seeds and set(seeds) < set(cell.seeds) else cell


def declared(flow: Workflow, cell: Cell) -> dict[str, str]:
    """A cell's recipe, seeds, and hash of declared inputs."""
    targets = flow.targets(cell)
    seeds = " ".join(str(target.seed) for target in targets) if flow.is_drawn(cell) else ""
    return {"recipe": targets[0].recipe.name, "seeds": seeds, "inputs": flow.inputs_hash(cell)}


def numbers(interval: Interval) -> dict[str, Any]:
    """The fields of a value with its interval."""
    return {
        "value": interval.value,
        "lo": interval.lo,
        "hi": interval.hi,
        "covers": interval.covers,
        "n": interval.n or None,
    }


def values(quantity: Quantity) -> dict[str, Any]:
    """The fields of a quantity: value, interval, n, protocol, and digests of its series."""
    groups = {}
    for seed in quantity.seeds:
        groups |= dict.fromkeys(series.group for series in seed.values() if series.group)
    digests = [observations.digest(seed) for seed in quantity.seeds]
    return numbers(quantity.interval()) | {"protocol": "; ".join(groups), "observations": " ".join(digests)}


def jobs(flow: Workflow, cell: Cell) -> list[Job]:
    """The jobs of all seeds of a cell."""
    return list(chain.from_iterable(jobs_of_seed.values() for jobs_of_seed in flow.jobs(cell)))
