"""Rebuild stored cells in a clean folder and compare each new value with results/."""

import random
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from repro.core.errors import UserError, unknown
from repro.jobs import data
from repro.papers.cell import Cell, table_name
from repro.results import measure, replicate, stored_rows
from repro.specs import figures, tables
from repro.store import accepted
from repro.store.job import Job, built_under, distinct
from repro.store.measurement import Measurement
from repro.workflow import pool, runner
from repro.workflow.workflow import Workflow, has_cuda

FOLDER = Path("build/verify")
VERDICTS = ("identical", "within", "differs", "absent")


def compare(old: Measurement, new: Measurement | None) -> str:
    """`identical` in 7 digits (or in status), `within` the stored interval, `differs`, or `absent`: not rebuilt."""
    if new is None or new.source != "fresh":
        return "absent"
    if old.value is None or new.value is None:
        return "identical" if old.value == new.value and old.status == new.status else "differs"
    if f"{new.value:.7g}" == f"{old.value:.7g}":
        return "identical"
    inside = old.lo is not None and old.hi is not None and old.lo <= new.value <= old.hi
    return "within" if inside else "differs"


def judged(flow: Workflow, old: Measurement, cell: Cell, new: Measurement) -> tuple[str, str]:
    """As `compare`, but unit by unit and with the bounds of `replicate` if the metric is one of its.

    Returns:
        The verdict, and a sentence on the units, empty if the metric has none to compare.

    Raises:
        UserError: results/ without the stored series.
    """
    stored = accepted.series(old) if cell.measure in replicate.COMPARED else []
    rebuilt = flow.quantity(cell) if stored and new.source == "fresh" and new.value is not None else None
    if rebuilt is None or len(rebuilt.seeds) != len(stored):
        return compare(old, new), ""
    seeds = [replicate.compare(cell, dict(a), dict(b)) for a, b in zip(stored, rebuilt.seeds)]
    units = sum(seed.units for seed in seeds)
    if all(seed.identical for seed in seeds):
        return "identical", f"{units} units to the last bit"
    worst = max(seeds, key=lambda seed: seed.difference - seed.bound)
    comparison = f"{units} units, mean difference {worst.difference:.2g}, bound {worst.bound:.0e}"
    return ("within" if all(seed.agrees for seed in seeds) else "differs"), comparison


@dataclass(frozen=True)
class Sample:
    """A random sample of stored cells.

    Attributes:
        cells: how many.
        seed: of the sample.
        minutes: start no job after that many, and leave out cells that are not rebuilt by then; 0 means no limit. Short
            jobs come first.
    """

    cells: int
    seed: int = 0
    minutes: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What became of a stored cell.

    Attributes:
        rebuilt: its measurement from the rebuilt jobs; None if it was not rebuilt.
        verdict: one of `VERDICTS`.
        comparison: a sentence on its units, empty if there are none to compare.
    """

    rebuilt: Measurement | None = None
    verdict: str = "absent"
    comparison: str = ""


def verify(flow: Workflow, names: list[str], sample: Sample | None = None) -> int:
    """Rebuild the stored cells of tables and figures from nothing under build/verify, and compare.

    Args:
        flow: the workflow of the scale whose stored cells are rebuilt.
        names: such as `spear/table1` or `spear/figure13`; empty means everything stored at this scale.
        sample: rebuild a sample only; None means all.

    Returns:
        1 if a cell differs, else 2 if a job failed, else 0.

    Raises:
        UserError: an unknown table, nothing stored for one, or no stored cell can be rebuilt on this machine.
    """
    rows = _stored(flow, [_name(name) for name in names])
    if sample is not None:
        rows = sampled(flow, rows, sample)
    cells = _cells_with_jobs(flow, rows)
    runnable = {key: cell for key, cell in cells.items() if _can_run(flow, cell)}
    if not runnable:
        raise UserError(
            f"verify: the stored cells of scale {flow.scale.name} {_why_none_can_run(flow, cells.values())}"
        )
    by_cell = {key: distinct(stored_rows.jobs(flow, cell)) for key, cell in runnable.items()}
    jobs = distinct(chain.from_iterable(by_cell.values()))
    minutes = sample.minutes if sample is not None else 0.0
    failed = pool.rebuild(jobs, FOLDER, minutes, _lightest_first(by_cell)) > 0
    with built_under(FOLDER):
        if failed and minutes:
            failed = any(job.folder.is_dir() and not runner.done(job) for job in jobs)  # one that was begun
            runnable = {key: cell for key, cell in runnable.items() if all(map(runner.done, by_cell[key]))}
            rows = [row for row in rows if row.key in runnable]
            print(f"{len(runnable)} of {len(by_cell)} cells were rebuilt in {minutes:g} minutes")
        outcomes = {}
        for row in rows:
            if row.key in runnable:
                cell = runnable[row.key]
                rebuilt = measure.fresh(flow, cell)
                outcomes[row.key] = Outcome(rebuilt, *judged(flow, row, cell, rebuilt))
    verdicts: Counter[str] = Counter()
    for row in rows:
        outcome = outcomes.get(row.key, Outcome())
        verdicts[outcome.verdict] += 1
        words = [f"stored {_value_text(row)}, now {_value_text(outcome.rebuilt)}", outcome.comparison]
        cell = cells.get(row.key)
        if cell is not None and flow.inputs_hash(cell) != row.inputs:
            words.append("its declared inputs have changed")
        where = f"{row.table} | {row.row} | {row.col} | {row.model} | {row.metric}"
        print(f"{outcome.verdict:10} {where}: {'; '.join(filter(None, words))}")
    print(f"{verdicts.total()} cells: " + ", ".join(f"{verdicts[word]} {word}" for word in VERDICTS))
    if verdicts["differs"]:
        return 1
    return 2 if failed else 0


def _cells_with_jobs(flow: Workflow, rows: Iterable[Measurement]) -> dict[tuple[str, ...], Cell]:
    """The cells of stored rows by the key of the row, of those that a spec still has and that jobs measure."""
    cells = {}
    for row in rows:
        cell = measure.cell_if_specified(flow, row)
        if cell is not None and flow.jobs(cell):
            cells[row.key] = cell
    return cells


def _why_none_can_run(flow: Workflow, cells: Collection[Cell]) -> str:
    """The end of the sentence with which `verify` refuses cells of which none can be rebuilt here."""
    for cell in cells:
        if absent := flow.lacking(cell):
            return f"cannot be rebuilt: {absent}"
    return "need a CUDA device, and this machine has none" if cells else "are in no spec any more"


def sampled(flow: Workflow, rows: list[Measurement], sample: Sample) -> list[Measurement]:
    """A random sample of the stored rows that this machine can rebuild and that are compared unit by unit.

    Rows are taken in an order that the seed decides; of rows with the same observations only the first.

    Raises:
        UserError: none can be taken.
    """
    order = sorted((row for row in rows if row.observations), key=lambda row: row.key)
    random.Random(sample.seed).shuffle(order)
    by_observations: dict[str, Measurement] = {}
    for row in order:
        if len(by_observations) == sample.cells:
            break
        cell = measure.cell_if_specified(flow, row)
        if row.observations not in by_observations and cell is not None and _compared_here(flow, cell, row):
            by_observations[row.observations] = row
    if not by_observations:
        raise UserError(f"verify: of {len(rows)} stored cells none can be rebuilt and compared on this machine")
    return list(by_observations.values())


def _lightest_first(by_cell: Mapping[tuple[str, ...], Sequence[Job]]) -> dict[str, int]:
    """Job id to its turn (`pool.run_all`), so that the cells with the lightest jobs are rebuilt first."""
    order = sorted(by_cell, key=lambda key: sum(map(pool.weight, by_cell[key])))
    turns: dict[str, int] = {}
    for position, key in enumerate(order):
        for job in by_cell[key]:
            turns.setdefault(job.id, position)
    return turns


def _compared_here(flow: Workflow, cell: Cell, row: Measurement) -> bool:
    """Whether this machine can rebuild a cell under the inputs that its row declares, and compare its units."""
    if cell.measure not in replicate.COMPARED or not flow.jobs(cell) or not _can_run(flow, cell):
        return False
    if data.lacking(distinct(stored_rows.jobs(flow, cell))):
        return False
    return flow.inputs_hash(cell) == row.inputs


def _can_run(flow: Workflow, cell: Cell) -> bool:
    if flow.lacking(cell):
        return False
    return has_cuda() or all(target.scale.device != "cuda" for target in flow.targets(cell))


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


def _stored(flow: Workflow, chosen: list[str]) -> list[Measurement]:
    """The rows of this scale in results/, of the chosen tables and figures; of all if none is chosen.

    Raises:
        UserError: there are none.
    """
    rows = [row for row in accepted.every() if row.scale == flow.scale.name]
    stored_tables = {row.table for row in rows}
    if bare := [name for name in chosen if name not in stored_tables]:
        raise UserError(f"nothing is stored for {bare[0]} at scale {flow.scale.name}; build it and accept its .csv")
    if not rows:
        raise UserError(f"nothing is stored at scale {flow.scale.name}; build a table and accept its .csv")
    return [row for row in rows if not chosen or row.table in chosen]


def _value_text(m: Measurement | None) -> str:
    """A value in 7 digits, else the status; a dash if it was not rebuilt."""
    if m is None:
        return "–"
    return m.status if m.value is None else f"{m.value:.7g}"
