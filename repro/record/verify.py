"""Rebuild recorded cells in a clean folder and say per cell how the new value compares with results/."""

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from repro.build import gpus
from repro.errors import UserError, unknown
from repro.jobs import job as built
from repro.jobs import pool
from repro.record import accepted, measure
from repro.record.measurement import Measurement, inputs_hash
from repro.spec import figures, tables
from repro.spec.cell import Cell, Place, table_name
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


def verify(flow: Workflow, names: list[str], side_by_side: int | None = None) -> int:
    """Rebuild the recorded cells of tables and figures from nothing under build/verify, and compare.

    Args:
        flow: the scale whose recorded cells are rebuilt, on the device that the scale names for them.
        names: such as `spear/table1` or `spear/figure13`; none is everything recorded at this scale.
        side_by_side: worker processes; by default one a GPU, or as many as the cores hold.

    Returns:
        1 when a cell differs, else 2 when a job failed, else 0.

    Raises:
        UserError: an unknown table, nothing recorded for one, or no recorded cell can be rebuilt on this machine.
    """
    old = _recorded(flow, [_name(name) for name in names])
    cells = {name: _cells(flow, rows[0]) for name, rows in old.items()}
    wanted = [cells[name][row.place] for name, rows in old.items() for row in rows if row.place in cells[name]]
    here = [cell for cell in wanted if has_cuda() or all(t.scale.device != "cuda" for t in flow.targets(cell))]
    if not here:
        why = "need a CUDA device, and this machine has none" if wanted else "are in no spec any more"
        raise UserError(f"verify: the recorded cells of scale {flow.scale.name} {why}")
    jobs = built.distinct([job for cell in here for each in flow.jobs(cell) for job in each.values()])
    on_gpus = gpus() if any(job.given().get("device") == "cuda" for job in jobs) else 0
    workers = side_by_side or on_gpus or max(1, (os.cpu_count() or 1) // flow.scale.threads)
    with _under(FOLDER):
        left = pool.run_all(jobs, workers, on_gpus)
        new = {(cell.table, cell.place): measure.live(flow, cell) for cell in here}
    verdicts: Counter[str] = Counter()
    for name, rows in old.items():
        for row in rows:
            fresh, cell = new.get((name, row.place)), cells[name].get(row.place)
            verdict = compare(row, fresh)
            verdicts[verdict] += 1
            changed = cell is not None and inputs_hash(flow.inputs(cell)) != row.inputs
            print(
                f"{verdict:10} {name} | {row.row} | {row.col} | {row.model} | {row.metric}: "
                f"recorded {_shown(row)}, now {_shown(fresh)}{'; its declared inputs have changed' * changed}"
            )
    print(f"{verdicts.total()} cells: " + ", ".join(f"{verdicts[word]} {word}" for word in VERDICTS))
    return 1 if verdicts["differs"] else 2 if left else 0


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


def _recorded(flow: Workflow, chosen: list[str]) -> dict[str, list[Measurement]]:
    """The rows of this scale in results/, by the name of their table or figure.

    Raises:
        UserError: there are none.
    """
    found: dict[str, list[Measurement]] = {}
    for row in accepted.every():
        if row.scale == flow.scale.name:
            found.setdefault(table_name(row.paper, row.kind, row.number), []).append(row)
    if bare := [name for name in chosen if name not in found]:
        raise UserError(f"nothing is recorded for {bare[0]} at scale {flow.scale.name}; build it and accept its .csv")
    if not found:
        raise UserError(f"nothing is recorded at scale {flow.scale.name}; build a table and accept its .csv")
    return {name: rows for name, rows in found.items() if not chosen or name in chosen}


def _cells(flow: Workflow, row: Measurement) -> dict[Place, Cell]:
    """The cells of a row's table that this scale measures; a recorded row may have outlived its own."""
    specified = (tables if row.kind == "table" else figures).specified()
    found = flow.cells(row.paper, row.number, row.kind) if (row.paper, row.number) in specified else []
    return {cell.place: cell for cell in found if flow.is_measured(cell) and flow.jobs(cell)}


@contextlib.contextmanager
def _under(folder: Path) -> Iterator[None]:
    """Jobs have their folders in an empty `folder`; the workers that are forked inside inherit it."""
    shutil.rmtree(folder, ignore_errors=True)
    before, built.BUILD = built.BUILD, folder
    try:
        yield
    finally:
        built.BUILD = before


def _shown(m: Measurement | None) -> str:
    if m is None:
        return "–"
    return m.status if m.value is None else f"{m.value:.7g}"
