"""The variance between seeds for results of which only one seed ran, pooled over methods that ran with three.

Calibration and training draw text, an initialization and an order at random. Over seeds, a compressed model's damage
varies in proportion to its size, whether damage is the loss against full precision (nats a token), the KL divergence or
the share of tokens with another top-1: its logarithm has about the same standard deviation for every model and
granularity. So this deviation is pooled over the accepted rows of `spear/seeds`: five calibrated settings and one that
only rounds, each with SPEAR at a quarter of its sequences, on three models and two texts, with three seeds.

The families, with the standard deviations of the logarithms of loss and of KL:

- a quantizer that is calibrated or trained: 0.031; 0.014
- a compensator on such a quantizer, given the quantizer's seed: 0.024; 0.011. In addition it keeps the share `follows`
  of the quantizer's deviation: 0.55; 0.32
- a compensator on a quantizer that draws nothing: 0.012; 0.006

(test_draws.py recomputes them.) A method without seeds of its own, such as a training at low bits, gets the deviation
of its family; the interval then says that it covers `pooled seeds`.

A stored row does not store its family or deviation: recipe and seeds decide the family, and the deviation changes as
seeds are accepted. The interval in a row is the one at acceptance; the interval that is shown is recomputed from the
row's series and today's pool (`stored_rows.find`).
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from repro.core.errors import NotMeasurable
from repro.papers.cell import Cell
from repro.recipes import recipe
from repro.stats.statistics import Draw
from repro.store import accepted
from repro.store.measurement import Measurement
from repro.store.observations import Series

if TYPE_CHECKING:
    from repro.workflow.workflow import Workflow

POOL = "spear/seeds"


@dataclass(frozen=True)
class Spread:
    """The pooled standard deviations of the logarithm of a damage over seeds.

    Attributes:
        quantizer: of a calibrated quantizer.
        compensator: of a compensator on a calibrated quantizer, given the quantizer's seed.
        follows: the share of the quantizer's deviation that remains after the compensator.
        alone: of a compensator on a quantizer that draws nothing.
        df: degrees of freedom of `quantizer` and `compensator`.
        df_alone: degrees of freedom of `alone`.
    """

    quantizer: float
    compensator: float
    follows: float
    alone: float
    df: int
    df_alone: int


def of(flow: "Workflow", cell: Cell, seeds: Sequence[Mapping[str, Series]]) -> dict[str, Draw]:
    """The random draws behind a cell of which one seed was measured; empty if nothing is drawn or no spread is known.

    Returns:
        Draws by the name of their source; two cells of one compressed model share them.
    """
    parsed = recipe.parse(cell.recipe)
    if len(seeds) != 1 or not parsed.seeded:
        return {}
    effects: dict[str, dict[str, float]] = {}
    freedom: dict[str, int] = {}
    for name, series in seeds[0].items():
        spread = _spread_of(name)
        damage = _damage(flow, cell, name, series) if spread else None
        if not damage:
            continue
        for source, deviation, df in _sources(cell, parsed, spread):
            effects.setdefault(source, {})[name] = deviation * damage
            freedom[source] = df
    return {source: Draw(effect, freedom[source]) for source, effect in effects.items()}


def _spread_of(name: str) -> Spread | None:
    """The pooled spread that holds for a series; None for series that are no loss, KL or top-1 agreement."""
    measure = name.rpartition("/")[2]
    if measure == "nll":
        return pooled("nll")
    return pooled("kl") if measure in ("kl", "top1") else None


def _sources(cell: Cell, parsed: recipe.Recipe, spread: Spread) -> Iterable[tuple[str, float, int]]:
    """The sources of randomness of a recipe: name, relative standard deviation of the damage, degrees of freedom."""
    attached = next((i for i, step in enumerate(parsed.steps) if step.attaches), len(parsed.steps))
    quantizer = recipe.Recipe(parsed.steps[:attached])
    compensated = attached < len(parsed.steps)
    facts = [cell.stand_in, cell.calibration, *map(str, cell.seeds[:1])]
    if quantizer.seeded:
        follows = spread.follows if compensated else 1.0
        yield json.dumps([*facts, quantizer.name]), follows * spread.quantizer, spread.df
    if compensated:
        deviation, df = (spread.compensator, spread.df) if quantizer.seeded else (spread.alone, spread.df_alone)
        yield json.dumps([*facts, parsed.name]), deviation, df


def _damage(flow: "Workflow", cell: Cell, name: str, series: Series) -> float | None:
    """The damage that a series measures, in its own unit and with its sign; None if full precision is unknown."""
    mean = float(series.values.mean())
    measure = name.rpartition("/")[2]
    if measure == "kl":
        return mean
    if measure == "top1":
        return mean - 1
    full = _full_precision(flow, cell, name, series.group)
    return None if full is None else mean - full


def _full_precision(flow: "Workflow", cell: Cell, name: str, group: str) -> float | None:
    """The mean of the same series of full precision, built here or accepted; None if neither is there."""
    full = flow.full_precision(cell)
    try:
        built = flow.quantity(full)
    except NotMeasurable:
        built = None
    seeds = [*built.seeds] if built else []
    if not seeds and flow.jobs(full):
        for row in accepted.equal(flow.scale.name, flow.inputs_hash(full)):
            seeds += accepted.series(row)[:1]
    for series in seeds:
        if name in series and series[name].group == group:
            return float(series[name].values.mean())
    return None


# --- the pool ---------------------------------------------------------------------------------------------------------


def pooled(measure: str) -> Spread | None:
    """The pooled spread of loss (`nll`) or `kl`; None if results/ lacks the rows of `POOL`.

    Raises:
        UserError: results/ is damaged.
    """
    return _pooled(accepted.RESULTS, measure)


@cache
def _pooled(results: Path, measure: str) -> Spread | None:
    rows = accepted.of_table(POOL)
    pairs, alone = deviations(rows, measure), deviations_alone(rows, measure)
    if not pairs or not alone:
        return None
    quantizer, compensated = np.concatenate(pairs, axis=1)
    df = sum(deviation.shape[1] - 1 for deviation in pairs)
    follows = float(quantizer @ compensated / (quantizer @ quantizer))
    remainder = compensated - follows * quantizer
    df_alone = sum(len(deviation) - 1 for deviation in alone)
    return Spread(
        quantizer=math.sqrt(quantizer @ quantizer / df),
        compensator=math.sqrt(remainder @ remainder / (df - 1)),
        follows=follows,
        alone=math.sqrt(sum(float(deviation @ deviation) for deviation in alone) / df_alone),
        df=df,
        df_alone=df_alone,
    )


def deviations(rows: Iterable[Measurement], measure: str) -> list[np.ndarray]:
    """The log damages of a calibrated quantizer and of SPEAR on it, minus their means: `[2, seeds]` for each row."""
    pairs = []
    for row in rows:
        seeds = accepted.series(row)
        if not all({f"b:{measure}", f"s:{measure}"} <= seed.keys() for seed in seeds):
            continue
        damages = []
        for role in ("b", "s"):
            full = np.array([_mean(seed, f"f:{measure}") for seed in seeds])
            damages.append(np.array([_mean(seed, f"{role}:{measure}") for seed in seeds]) - full)
        logs = np.log(np.stack(damages))
        pairs.append(logs - logs.mean(axis=1, keepdims=True))
    return pairs


def deviations_alone(rows: Sequence[Measurement], measure: str) -> list[np.ndarray]:
    """The log damages of SPEAR on a quantizer that draws nothing, minus their mean: `[seeds]` for each row."""
    full = {}
    for row in rows:
        first = accepted.series(row)[0]
        if f"f:{measure}" in first:
            full[row.stand_in, first[f"f:{measure}"].group] = _mean(first, f"f:{measure}")
    damages = []
    for row in rows:
        seeds = accepted.series(row)
        if measure not in seeds[0]:
            continue
        reference = 0.0 if measure == "kl" else full[row.stand_in, seeds[0][measure].group]
        logs = np.log(np.array([_mean(seed, measure) for seed in seeds]) - reference)
        damages.append(logs - logs.mean())
    return damages


def _mean(series: Mapping[str, Series], name: str) -> float:
    """The mean of a series; 0 if it is missing, as full precision's KL is."""
    return float(series[name].values.mean()) if name in series else 0.0
