"""Rebuild recorded cells in a clean folder and say per cell how the new value compares with results/."""

from collections import Counter
from pathlib import Path

from repro.errors import UserError, unknown
from repro.jobs.job import built_under, distinct
from repro.jobs.workers import pool
from repro.record import accepted, measure, recorded, replicate
from repro.record.measurement import Measurement, inputs_hash
from repro.spec import figures, tables
from repro.spec.cell import Cell, table_name
from repro.spec.workflow import Workflow, has_cuda

FOLDER = Path("build/verify")
VERDICTS = ("identical", "within", "differs", "absent")


def compare(old: Measurement, new: Measurement | None) -> str:
    """`identical` in 7 digits (or in status), `within` the recorded interval, `differs`, or `absent`: not rebuilt."""
    if new is None or new.live != "live":
        return "absent"
    if old.value is None or new.value is None:
        return "identical" if old.value == new.value and old.status == new.status else "differs"
    if f"{new.value:.7g}" == f"{old.value:.7g}":
        return "identical"
    inside = old.lo is not None and old.hi is not None and old.lo <= new.value <= old.hi
    return "within" if inside else "differs"


def judged(flow: Workflow, old: Measurement, cell: Cell, new: Measurement) -> str:
    """As `compare`, but unit by unit and by the bounds of a build's own replication where a metric has such units.

    Raises:
        UserError: results/ without the stored series.
    """
    stored = accepted.series(old) if cell.measure in replicate.COMPARED else []
    rebuilt = flow.quantity(cell) if stored and new.live == "live" and new.value is not None else None
    if rebuilt is None or len(rebuilt.seeds) != len(stored):
        return compare(old, new)
    found = [replicate.compare(cell, dict(a), dict(b)) for a, b in zip(stored, rebuilt.seeds)]
    if all(one.identical for one in found):
        return "identical"
    return "within" if all(one.agrees for one in found) else "differs"


def verify(flow: Workflow, names: list[str]) -> int:
    """Rebuild the recorded cells of tables and figures from nothing under build/verify, and compare.

    Args:
        flow: the scale whose recorded cells are rebuilt, on the device that the scale names for them.
        names: such as `spear/table1` or `spear/figure13`; none is everything recorded at this scale.

    Returns:
        1 when a cell differs, else 2 when a job failed, else 0.

    Raises:
        UserError: an unknown table, nothing recorded for one, or no recorded cell can be rebuilt on this machine.
    """
    rows = _recorded(flow, [_name(name) for name in names])
    cells = {row.key: cell for row in rows if (cell := measure.asked(flow, row)) and flow.jobs(cell)}
    here = {
        key: cell
        for key, cell in cells.items()
        if has_cuda() or all(target.scale.device != "cuda" for target in flow.targets(cell))
    }
    if not here:
        why = "need a CUDA device, and this machine has none" if cells else "are in no spec any more"
        raise UserError(f"verify: the recorded cells of scale {flow.scale.name} {why}")
    failed = pool.rebuild(distinct([job for cell in here.values() for job in recorded.jobs(flow, cell)]), FOLDER)
    with built_under(FOLDER):
        new = {key: measure.live(flow, cell) for key, cell in here.items()}
        found = {row.key: judged(flow, row, here[row.key], new[row.key]) for row in rows if row.key in here}
    verdicts: Counter[str] = Counter()
    for row in rows:
        fresh, cell = new.get(row.key), cells.get(row.key)
        verdict = found.get(row.key, "absent")
        verdicts[verdict] += 1
        changed = cell is not None and inputs_hash(flow.inputs(cell)) != row.inputs
        print(
            f"{verdict:10} {row.table} | {row.row} | {row.col} | {row.model} | {row.metric}: "
            f"recorded {_shown(row)}, now {_shown(fresh)}{'; its declared inputs have changed' * changed}"
        )
    print(f"{verdicts.total()} cells: " + ", ".join(f"{verdicts[word]} {word}" for word in VERDICTS))
    return 1 if verdicts["differs"] else 2 if failed else 0


def _name(text: str) -> str:
    """The canonical name of a table or figure with a spec.

    Raises:
        UserError: there is none.
    """
    if figures.is_figure(text):
        paper, number = figures.split(text)
        return table_name(paper, "figure", number)
    paper, number = tables.split(text)
    if (paper, number) not in tables.specified():
        raise unknown("table with a spec", text, [table_name(p, "table", n) for p, n in tables.specified()])
    return table_name(paper, "table", number)


def _recorded(flow: Workflow, chosen: list[str]) -> list[Measurement]:
    """The rows of this scale in results/, of the chosen tables and figures or of all.

    Raises:
        UserError: there are none.
    """
    found = [row for row in accepted.every() if row.scale == flow.scale.name]
    if bare := [name for name in chosen if name not in {row.table for row in found}]:
        raise UserError(f"nothing is recorded for {bare[0]} at scale {flow.scale.name}; build it and accept its .csv")
    if not found:
        raise UserError(f"nothing is recorded at scale {flow.scale.name}; build a table and accept its .csv")
    return [row for row in found if not chosen or row.table in chosen]


def _shown(m: Measurement | None) -> str:
    if m is None:
        return "–"
    return m.status if m.value is None else f"{m.value:.7g}"
