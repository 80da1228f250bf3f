"""Replication: what a build measures itself, and whether it agrees with what is stored.

A stored cell is measured again on its first windows or items, and compared with the stored observations of the same
units, one by one. It agrees where the mean difference of a unit is within a bound that depends on what the recipe does
and on what a unit is. The bounds were fixed before the comparisons that they judge:

- What only rounds has the same weights on every device; only sums differ in their order. On two cores windows then
  differ from an H200's by about 1e-6 nats a token, and a scale that is off by 1 % by more than 1e-3. 1e-4 is between.
- What calibrates or trains adds up such differences: through a Cholesky factor of a Hessian, or through thousands of
  steps. GPTQ with its whole calibration on two cores differed from an H200's by 0.0009 nats (WikiText-2) and 0.0015
  (C4), SPEAR's whole training by 0.0004 and 0.0008. 3e-3 is twice the largest.
- Top-1 agreement and answers are counts: one token of a thousand, or one item of a hundred, may lie at a tie.
- Stored bits are exact, except where a training decides which layers get how much.
- A bin's share of the weights, in percent, moves where a weight lies at the edge of a bin.
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

COMPARED = (
    "perplexity",
    "zeroshot",
    "storage",
    "surface",
    "histogram",
)  # kinds whose units are the same on every machine
OVERVIEWS = ("table2", LEADERBOARD)  # which show the cells of all tables
OF_TEXTS = ("tokens", "compress", "perplexity")  # kinds of jobs that take seconds on the first windows of a text
SHARES = ("weights", "codes", "bins", "levels", "values", "groups")  # series of a histogram
BOUNDS = {  # what a unit is: the bound for what only rounds, and for what calibrates or trains
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
        units: how many windows, items or numbers were compared.
        difference: the mean difference of a unit; of several series the largest.
        bound: that for its recipe.
        identical: whether every unit is equal to the last bit.
        stored, here: the cell's value on these units alone.
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
    """What a unit of a series is, key of `BOUNDS`."""
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


def difference(name: str, stored: np.ndarray, here: np.ndarray) -> float:
    """The mean difference of the first units of a series; of stored bits the share of their number."""
    first = stored[: len(here)]
    if len(first) < len(here):
        return float("inf")
    apart = np.abs(first - here)
    if unit_of(name) == "bits":
        return float(np.max(apart / np.maximum(np.abs(first), 1e-300), initial=0.0)) if apart.any() else 0.0
    return float(np.mean(apart))


def compare(cell: Cell, stored: dict[str, Series], here: dict[str, Series]) -> Replica:
    """A seed's stored series with those that were measured again."""
    names = sorted(stored.keys() & here.keys())
    if stored.keys() != here.keys() or not names:
        return Replica(0, float("inf"), 0.0, False, float("nan"), float("nan"))
    apart = {name: difference(name, stored[name].values, here[name].values) for name in names}
    worst = max(names, key=lambda name: apart[name] - bound(name, cell.recipe))
    same = all(np.array_equal(stored[name].values[: len(here[name].values)], here[name].values) for name in names)
    values = []
    for side in (stored, here):
        means = {name: side[name].values[: len(here[name].values)].mean() for name in names}
        values.append(float(metric_of(cell).value(means)))
    units = sum(len(here[name].values) for name in names)
    return Replica(units, apart[worst], bound(worst, cell.recipe), same, *values)


def replica(flow: Workflow, stored: Measured) -> Replica | None:
    """A stored cell as it was measured again here; None where that is not built, or its seed is not stored.

    Raises:
        UserError: damaged files.
    """
    cell = stored.cell
    jobs = stored_rows.jobs(flow.brief, cell)
    if not jobs or not all(map(runner.done, jobs)):
        return None
    try:
        here = flow.brief.quantity(cell)
    except NotMeasurable:
        return None
    kept = stored.load_quantity()
    if here is None or kept is None:
        return None
    drawn = flow.brief.targets(cell)[0].seed
    seeds = [int(seed) for seed in stored.measurement.seeds.split()] or [drawn]
    if drawn not in seeds or len(seeds) != len(kept.seeds):
        return None
    return compare(cell, dict(kept.seeds[seeds.index(drawn)]), dict(here.seeds[0]))


# --- which cells ------------------------------------------------------------------------------------------------------


def chosen(flow: Workflow, name: str) -> tuple[list[Cell], list[Cell]]:
    """The cells of a table or figure that a build measures itself: stored ones again, and those without a stored value.

    Of stored ones those that the scale names for the table; of any other table what only rounds, which takes minutes.
    An overview over all tables measures none of them again. What trains and has no stored value takes hours, and is
    left to `run`. A table that the scale names is one that everybody builds first: it waits for texts alone.
    """
    return flow.once(("replicated", name), lambda: _chosen(flow, name))


def _chosen(flow: Workflow, name: str) -> tuple[list[Cell], list[Cell]]:
    """The same, computed."""
    if flow.stored_only or not flow.stored_first:
        return [], []
    again: list[Cell] = []
    missing: list[Cell] = []
    first = name in flow.scale.replicate.tables
    for cell in flow.table_cells(name):
        if not _has_jobs(flow, cell):
            continue
        made = distinct(stored_rows.jobs(flow.brief, cell))
        if not made or data.lacking(made):
            continue
        if stored_rows.stands(flow, cell):
            wanted = _named(flow, cell) if first else name not in OVERVIEWS and _only_rounds(cell)
            if wanted and cell.measure in COMPARED:
                again.append(cell)
        elif not trains(made) and not (first and any(job.kind not in OF_TEXTS for job in made)):
            missing.append(cell)
    return again, missing


def jobs(flow: Workflow, name: str) -> list[Job]:
    """All jobs that a build of a table or figure runs, in an order in which they can run."""
    again, missing = chosen(flow, name)
    wanted: list[Job] = []
    for cell in again:
        wanted += stored_rows.jobs(flow.brief, cell)
    return distinct([*wanted, *flow.brief.every_job(missing)])


def trains(made: Sequence[Job]) -> bool:
    """Whether one of the jobs trains a model."""
    for job in made:
        steps = recipe.parse(job.parsed_options()["recipe"]).steps if job.parsed_options().get("recipe") else ()
        if any(step.work is not None for step in steps):
            return True
    return False


def data_lacking(flow: Workflow, cell: Cell) -> str:
    """A data file that a build's own measurement of a cell reads and that is not here; empty if all are."""
    return data.lacking(distinct(stored_rows.jobs(flow.brief, cell)))


def _has_jobs(flow: Workflow, cell: Cell) -> bool:
    return flow.is_measured_here(cell) and any(flow.jobs(cell))


def _only_rounds(cell: Cell) -> bool:
    """Whether a cell's recipe rounds to nearest without a draw or a calibration."""
    return not recipe.parse(cell.recipe).seeded


def _named(flow: Workflow, cell: Cell) -> bool:
    """Whether the scale names a cell's recipe or row, and stand-in: bits, and the texts that are scored together."""
    corpus = getattr(cell.params, "corpus", None)
    texts = {*flow.scale.corpora, *flow.scale.corpora.values()}
    if cell.measure == "zeroshot" or (corpus is not None and corpus not in texts):
        return False
    named = {recipe.parse(text).name: models for text, models in flow.scale.replicate.recipes.items()}
    rows = flow.scale.replicate.rows.get(cell.table, {})
    return cell.stand_in in {*named.get(recipe.parse(cell.recipe).name, ()), *rows.get(cell.row, ())}


# --- what a table says of it ------------------------------------------------------------------------------------------


def replicas(flow: Workflow, name: str) -> list[tuple[Measured, Replica]]:
    """The stored cells of a table that were measured again here, each with what is stored of it.

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


def shown(
    flow: Workflow, name: str, by_key: Mapping[CellKey, Measured]
) -> tuple[dict[CellKey, dict[str, Any]], list[str]]:
    """What a build's own measurements change in those of a table.

    Returns:
        By cell key the fields that are others: where a cell comes from, or why it was not measured; and what is to be
        said below the table.

    Raises:
        UserError: damaged files.
    """
    changes: dict[CellKey, dict[str, Any]] = {}
    again = replicas(flow, name)
    for stored, replicated in again:
        if replicated.agrees:
            changes[stored.cell.cell_key] = {"source": "replicated"}
        else:
            changes[stored.cell.cell_key] = {"source": "differs", "note": _apart(replicated)}
    for key, one in by_key.items():
        if one.measurement.status == "not_run" and flow.stored_first and _has_jobs(flow, one.cell):
            made = distinct(stored_rows.jobs(flow.brief, one.cell))
            absent = data_lacking(flow, one.cell)
            if absent:
                note = f"set REPRO_DATA to a folder that has {absent}, which is not carried by this repository"
                changes[key] = {"note": note}
            elif trains(made):
                note = f"trains for long; python -m repro run {name} --missing measures it"
                changes[key] = {"status": "too_long", "note": note}
    return changes, said(again)


def said(compared: Sequence[tuple[Measured, Replica]]) -> list[str]:
    """How many cells agree, in a sentence, and a sentence for each that does not; nothing where none was measured."""
    if not compared:
        return []
    agree = sum(one.agrees for _, one in compared)
    bits = sum(one.identical for _, one in compared)
    text = f"replicated here: {agree} of {len(compared)} cells agree"
    lines = [f"{text}, {bits} of them to the last bit." if bits else f"{text}."]
    for stored, one in compared:
        cell = stored.cell
        if not one.agrees:
            where = " | ".join(filter(None, (cell.row, cell.col, cell.model)))
            lines.append(f"differs: {cell.table} | {where}: {_apart(one)}.")
    return lines


def _apart(one: Replica) -> str:
    return (
        f"stored {one.stored:.6g}, here {one.here:.6g} on the same units; "
        f"mean difference {one.difference:.2g}, bound {one.bound:.0e}"
    )
