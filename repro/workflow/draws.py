"""Variance between draws where only one seed ran, pooled over what has three seeds.

Whoever calibrates or trains draws text, an initialization, an order. Over seeds the loss of a compressed model varies
in proportion to its damage: the logarithm of what it loses against full precision (nats a token), of its KL divergence,
or of the tokens on which it disagrees, has about the same standard deviation at every model and granularity. So it is
pooled over the accepted rows of `spear/seeds`: five calibrated settings and one that only rounds, each with SPEAR at a
quarter of its sequences, three models, three seeds, two texts. Families, with the standard deviation of loss; of KL:

- a quantizer that is calibrated or trained: 0.031; 0.014
- a compensator on such a quantizer, given the draw beneath it: 0.024; 0.011, and `follows` of that draw: 0.55; 0.32
- a compensator on a quantizer that draws nothing: 0.012; 0.006

(test_draws.py computes them anew.) Where a method has no seeds there, such as a training at low bits, it gets
those of its family; an interval that rests on them covers `pooled seeds`.

A stored row names no family, since its recipe and seeds decide which one it has, and since the variance is that of all
accepted seeds of today: a number kept in each row would be another fact to contradict them. So the interval in a row is
what was known when it was accepted; what is shown is computed anew from its series and this pool (`stored_rows.find`).
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
MEASURES = ("nll", "kl")  # of what the pool has seeds; top-1 disagreement takes those of KL


@dataclass(frozen=True)
class Spread:
    """The pooled standard deviations of the logarithm of a damage over seeds.

    Attributes:
        quantizer: of a calibrated quantizer.
        compensator: of a compensator on one, given the quantizer's draw.
        follows: the share of the quantizer's deviation that is left behind the compensator.
        alone: of a compensator on a quantizer that draws nothing.
        df, df_alone: degrees of freedom of the first two, and of the last.
    """

    quantizer: float
    compensator: float
    follows: float
    alone: float
    df: int
    df_alone: int


def of(flow: "Workflow", cell: Cell, seeds: Sequence[Mapping[str, Series]]) -> dict[str, Draw]:
    """The draws behind the series of a cell that one seed gave; none where nothing is drawn, or nothing is known.

    Returns:
        Draws by what was drawn: two cells of one compressed model share them.
    """
    parsed = recipe.parse(cell.recipe)
    if len(seeds) != 1 or not parsed.seeded:
        return {}
    effects: dict[str, dict[str, float]] = {}
    freedom: dict[str, int] = {}
    for name, one in seeds[0].items():
        measure = name.rpartition("/")[2]
        spread = pooled("nll" if measure == "nll" else "kl") if measure in (*MEASURES, "top1") else None
        damage = _damage(flow, cell, name, one) if spread else None
        for drawn, deviation, df in _sources(cell, parsed, spread) if damage else ():
            effects.setdefault(drawn, {})[name] = deviation * damage
            freedom[drawn] = df
    return {drawn: Draw(effect, freedom[drawn]) for drawn, effect in effects.items()}


def _sources(cell: Cell, parsed: recipe.Recipe, spread: Spread) -> Iterable[tuple[str, float, int]]:
    """What is drawn for a recipe, as a name, the relative deviation of its damage, and degrees of freedom."""
    first = next((i for i, step in enumerate(parsed.steps) if step.attaches), len(parsed.steps))
    quantizer = recipe.Recipe(parsed.steps[:first])
    compensated = first < len(parsed.steps)
    drawn = [cell.stand_in, cell.calibration, *map(str, cell.seeds[:1])]
    if quantizer.seeded:
        follows = spread.follows if compensated else 1.0
        yield json.dumps([*drawn, quantizer.name]), follows * spread.quantizer, spread.df
    if compensated:
        deviation, df = (spread.compensator, spread.df) if quantizer.seeded else (spread.alone, spread.df_alone)
        yield json.dumps([*drawn, parsed.name]), deviation, df


def _damage(flow: "Workflow", cell: Cell, name: str, one: Series) -> float | None:
    """What a series says that was lost, in its own unit and with its sign; None where full precision is not known."""
    mean, measure = float(one.values.mean()), name.rpartition("/")[2]
    if measure == "kl":
        return mean
    if measure == "top1":
        return mean - 1
    full = _full_precision(flow, cell, name, one.group)
    return None if full is None else mean - full


def _full_precision(flow: "Workflow", cell: Cell, name: str, group: str) -> float | None:
    """The mean of the same series of full precision, built here or accepted."""
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
    """The pooled spread of loss (`nll`) or `kl`; None where results/ lacks the pool.

    Raises:
        UserError: results/ is damaged.
    """
    return _pooled(accepted.RESULTS, measure)


@cache
def _pooled(results: Path, measure: str) -> Spread | None:
    rows = accepted.of_table(POOL)
    both, alone = deviations(rows, measure), deviations_alone(rows, measure)
    if not both or not alone:
        return None
    quantizer, compensated = np.concatenate(both, axis=1)
    df = sum(each.shape[1] - 1 for each in both)
    follows = float(quantizer @ compensated / (quantizer @ quantizer))
    rest = compensated - follows * quantizer
    df_alone = sum(len(each) - 1 for each in alone)
    return Spread(
        quantizer=math.sqrt(quantizer @ quantizer / df),
        compensator=math.sqrt(rest @ rest / (df - 1)),
        follows=follows,
        alone=math.sqrt(sum(float(each @ each) for each in alone) / df_alone),
        df=df,
        df_alone=df_alone,
    )


def deviations(rows: Iterable[Measurement], measure: str) -> list[np.ndarray]:
    """Per row of a calibrated quantizer and SPEAR on it: both log damages `[2, seeds]` without their means."""
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
    """Per row of SPEAR on a quantizer that draws nothing: log damages `[seeds]` without their mean."""
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
    """The mean of a series; 0 of full precision's KL, which has none."""
    return float(series[name].values.mean()) if name in series else 0.0
