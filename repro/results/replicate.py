"""Replication: what a build measures itself, and whether it agrees with what is stored.

A stored cell is measured again on its first windows or items, and compared with the stored observations unit by unit.
It agrees if the mean difference of a unit is within a bound, which depends on what the recipe does and on what a unit
is. The bounds were fixed before the comparisons that they judge:

- A recipe that only rounds gives the same weights on every device; only the order of summation differs. Windows that
  were measured on two cores then differ from an H200's by about 1e-6 nats a token. A scale that is off by 1 % changes
  them by more than 1e-3. The bound of 1e-4 lies between.
- Calibration and training amplify such differences, through the Cholesky factor of a Hessian or thousands of steps.
  GPTQ with its whole calibration on two cores differed from an H200's by 0.0009 nats (WikiText-2) and 0.0015 (C4),
  SPEAR's whole training by 0.0004 and 0.0008. The bound of 3e-3 is twice the largest.
- Top-1 agreement and answers are counts: one token of a thousand, or one item of a hundred, may be a tie.
- Stored bits are exact, unless training decides how many bits each layer gets.
- A bin's share of the weights, in percent, changes if a weight lies at the edge of the bin.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from repro.core.errors import NotMeasurable
from repro.jobs import data
from repro.metrics import metric_of
from repro.papers.cell import Cell, CellKey
from repro.recipes import recipe
from repro.results import measure, stored_rows
from repro.results.measured import Measured
from repro.specs.names import LEADERBOARD
from repro.store.job import Job, distinct
from repro.store.measurement import MEASURED
from repro.store.observations import Series
from repro.workflow import runner
from repro.workflow.workflow import Workflow

COMPARED = ("perplexity", "zeroshot", "storage", "surface", "histogram")  # metrics with the same units on all machines
OVERVIEWS = ("table2", LEADERBOARD)  # they show the cells of all tables
OF_TEXTS = ("tokens", "compress", "perplexity")  # jobs that take seconds on the first windows of a text
SHARES = ("weights", "codes", "bins", "levels", "values", "groups")  # series of a histogram
BOUNDS = {  # unit to the bound for recipes that only round, and for recipes that calibrate or train
    "nats": (1e-4, 3e-3),
    "tokens": (1e-3, 1e-2),
    "items": (1e-2, 5e-2),
    "bits": (0.0, 1e-2),  # of their number
    "shares": (1e-3, 1e-2),
}


@dataclass(frozen=True)
class Replica:
    """A stored cell that was measured again here.

    Attributes:
        units: number of windows, items or numbers that were compared.
        difference: mean absolute difference of a unit; of several series that of the one furthest above its bound.
        bound: the bound on `difference`.
        identical: whether every unit is bit-identical.
        stored: the cell's value on these units, from the stored observations.
        here: the cell's value on these units, as measured here.
    """

    units: int
    difference: float
    bound: float
    identical: bool
    stored: float
    here: float

    @property
    def agrees(self) -> bool:
        """Whether it is within the bound."""
        return self.difference <= self.bound


def unit_of(name: str) -> str:
    """The unit of a series, a key of `BOUNDS`."""
    if name.startswith("bits/"):
        return "bits"
    if name.endswith("/correct"):
        return "items"
    if name in SHARES:
        return "shares"
    return "tokens" if name == "top1" else "nats"


def bound(name: str, text: str) -> float:
    """The bound on a series' mean difference for a recipe."""
    parsed = recipe.parse(text)
    return BOUNDS[unit_of(name)][parsed.seeded]


def difference(name: str, stored: np.ndarray, again: np.ndarray) -> float:
    """The mean absolute difference of the first units of a series; of stored bits the largest relative difference.

    Infinite if fewer units are stored than were measured again.
    """
    first = stored[: len(again)]
    if len(first) < len(again):
        return float("inf")
    apart = np.abs(first - again)
    if unit_of(name) == "bits":
        return float(np.max(apart / np.maximum(np.abs(first), 1e-300), initial=0.0)) if apart.any() else 0.0
    return float(np.mean(apart))


def compare(cell: Cell, stored: dict[str, Series], again: dict[str, Series]) -> Replica:
    """Compare the stored series of a seed with those that were measured again."""
    names = sorted(stored.keys() & again.keys())
    if stored.keys() != again.keys() or not names:
        return Replica(0, float("inf"), 0.0, False, float("nan"), float("nan"))
    apart = {name: difference(name, stored[name].values, again[name].values) for name in names}
    worst = max(names, key=lambda name: apart[name] - bound(name, cell.recipe))
    identical = all(
        np.array_equal(stored[name].values[: len(again[name].values)], again[name].values) for name in names
    )
    values = []
    for series in (stored, again):
        means = {name: series[name].values[: len(again[name].values)].mean() for name in names}
        values.append(float(metric_of(cell).value(means)))
    units = sum(len(again[name].values) for name in names)
    return Replica(units, apart[worst], bound(worst, cell.recipe), identical, *values)


def replica(flow: Workflow, stored: Measured) -> Replica | None:
    """Compare a stored cell with its measurement here; None if that is not built, or its seed is not stored.

    Raises:
        UserError: damaged files.
    """
    cell = stored.cell
    jobs = stored_rows.jobs(flow.brief, cell)
    if not jobs or not all(map(runner.done, jobs)):
        return None
    try:
        again = flow.brief.quantity(cell)
    except NotMeasurable:
        return None
    stored_quantity = stored.load_quantity()
    if again is None or stored_quantity is None:
        return None
    seed_of_build = flow.brief.targets(cell)[0].seed
    seeds = [int(text) for text in stored.measurement.seeds.split()] or [seed_of_build]
    if seed_of_build not in seeds or len(seeds) != len(stored_quantity.seeds):
        return None
    return compare(cell, dict(stored_quantity.seeds[seeds.index(seed_of_build)]), dict(again.seeds[0]))


# --- which cells ------------------------------------------------------------------------------------------------------


def chosen(flow: Workflow, name: str) -> tuple[list[Cell], list[Cell]]:
    """The cells of a table or figure that a build measures itself: some stored cells again, and unstored cells.

    Of the stored cells it takes those that the scale names for the table (`scale.Replicate`). In any other table it
    takes those whose recipe only rounds, which needs minutes; in an overview of all tables, none. Of the cells without
    a stored value it leaves out those that train, which needs hours (`run` does it). In a table that the scale names,
    which everybody builds first, it also leaves out cells that need more than texts.
    """
    return flow.once(("replicated", name), lambda: _chosen(flow, name))


def _chosen(flow: Workflow, name: str) -> tuple[list[Cell], list[Cell]]:
    """As `chosen`, without the cache."""
    if flow.stored_only or not flow.stored_first:
        return [], []
    again: list[Cell] = []
    missing: list[Cell] = []
    first = name in flow.scale.replicate.tables
    for cell in flow.table_cells(name):
        if not _has_jobs(flow, cell):
            continue
        cell_jobs = distinct(stored_rows.jobs(flow.brief, cell))
        if not cell_jobs or data.lacking(cell_jobs):
            continue
        if stored_rows.stands(flow, cell):
            if first:
                replicated = _named(flow, cell)
            else:
                replicated = name not in OVERVIEWS and _only_rounds(cell)
            if replicated and cell.measure in COMPARED:
                again.append(cell)
            continue
        takes_long = first and any(job.kind not in OF_TEXTS for job in cell_jobs)
        if not trains(cell_jobs) and not takes_long:
            missing.append(cell)
    return again, missing


def jobs(flow: Workflow, name: str) -> list[Job]:
    """All jobs that a build of a table or figure runs, in an order in which they can run."""
    again, missing = chosen(flow, name)
    to_run: list[Job] = []
    for cell in again:
        to_run += stored_rows.jobs(flow.brief, cell)
    return distinct([*to_run, *flow.brief.every_job(missing)])


def trains(cell_jobs: Sequence[Job]) -> bool:
    """Whether one of the jobs trains a model."""
    for job in cell_jobs:
        text = job.parsed_options().get("recipe")
        if text and any(step.work is not None for step in recipe.parse(text).steps):
            return True
    return False


def data_lacking(flow: Workflow, cell: Cell) -> str:
    """A data file that is missing for a build's measurement of a cell; empty if none is."""
    return data.lacking(distinct(stored_rows.jobs(flow.brief, cell)))


def _has_jobs(flow: Workflow, cell: Cell) -> bool:
    return flow.is_measured_here(cell) and any(flow.jobs(cell))


def _only_rounds(cell: Cell) -> bool:
    """Whether a cell's recipe only rounds: nothing is calibrated, trained or random."""
    return not recipe.parse(cell.recipe).seeded


def _named(flow: Workflow, cell: Cell) -> bool:
    """Whether the scale's `replicate` names a cell: its recipe or row on its stand-in, scored on the scale's texts."""
    corpus = getattr(cell.params, "corpus", None)
    texts = {*flow.scale.corpora, *flow.scale.corpora.values()}
    if cell.measure == "zeroshot" or (corpus is not None and corpus not in texts):
        return False
    named = {recipe.parse(text).name: models for text, models in flow.scale.replicate.recipes.items()}
    rows = flow.scale.replicate.rows.get(cell.table, {})
    return cell.stand_in in {*named.get(recipe.parse(cell.recipe).name, ()), *rows.get(cell.row, ())}


# --- what a table says of it ------------------------------------------------------------------------------------------


def replicas(flow: Workflow, name: str) -> list[tuple[Measured, Replica]]:
    """The stored cells of a table that were measured again here, each with its comparison.

    Raises:
        UserError: damaged files.
    """
    compared = []
    for cell in chosen(flow, name)[0]:
        stored = measure.one_measured(flow, cell)
        again = replica(flow, stored) if stored.measurement.status in MEASURED else None
        if again is not None:
            compared.append((stored, again))
    return compared


def changes_and_notes(
    flow: Workflow, name: str, by_key: Mapping[CellKey, Measured]
) -> tuple[dict[CellKey, dict[str, Any]], list[str]]:
    """What a build's own measurements change in a table.

    Returns:
        By cell key, the changed fields of its measurement (its source, or why it was not measured); and the notes
        below the table.

    Raises:
        UserError: damaged files.
    """
    changes: dict[CellKey, dict[str, Any]] = {}
    again = replicas(flow, name)
    for stored, replicated in again:
        if replicated.agrees:
            changes[stored.cell.cell_key] = {"source": "replicated"}
        else:
            changes[stored.cell.cell_key] = {"source": "differs", "note": _difference_in_words(replicated)}
    for key, measured in by_key.items():
        if measured.measurement.status == "not_run" and flow.stored_first and _has_jobs(flow, measured.cell):
            cell_jobs = distinct(stored_rows.jobs(flow.brief, measured.cell))
            absent = data_lacking(flow, measured.cell)
            if absent:
                note = f"set REPRO_DATA to a folder that has {absent}, which is not carried by this repository"
                changes[key] = {"note": note}
            elif trains(cell_jobs):
                note = f"trains for long; python -m repro run {name} --missing measures it"
                changes[key] = {"status": "too_long", "note": note}
    return changes, sentences(again)


def sentences(compared: Sequence[tuple[Measured, Replica]]) -> list[str]:
    """A sentence on how many cells agree, then one for each that differs; empty if none was measured again."""
    if not compared:
        return []
    agree = sum(repeated.agrees for _, repeated in compared)
    bits = sum(repeated.identical for _, repeated in compared)
    text = f"replicated here: {agree} of {len(compared)} cells agree"
    lines = [f"{text}, {bits} of them to the last bit." if bits else f"{text}."]
    for stored, repeated in compared:
        cell = stored.cell
        if not repeated.agrees:
            where = " | ".join(filter(None, (cell.row, cell.col, cell.model)))
            lines.append(f"differs: {cell.table} | {where}: {_difference_in_words(repeated)}.")
    return lines


def _difference_in_words(repeated: Replica) -> str:
    return (
        f"stored {repeated.stored:.6g}, here {repeated.here:.6g} on the same units; "
        f"mean difference {repeated.difference:.2g}, bound {repeated.bound:.0e}"
    )
