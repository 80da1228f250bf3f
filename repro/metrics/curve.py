"""The loss curve of a training, and how many spikes it has by a rule that the spec gives (Bit-by-Bit, Figure 2a).

    A point is a spike where it is more than `factor` times the median of the `window` points before it in its block.

A curve of block-wise training is that of one block after the other, pass after pass, `POINTS` means of equal stretches
of steps each; a spike is looked for within one block of one pass, since the next block has a loss of its own. Passes of
different length have stretches of different length: `merged` points are averaged first, so that those of two trainings
are equally long (a pass of two epochs against one of six: `merged: 3`). Its tokens are a question of `training`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from repro.core.errors import UserError
from repro.jobs.target import Target
from repro.metrics.metric import Metric
from repro.metrics.training import LOSS, Training
from repro.store.observations import Observations, Series
from repro.train.blocks import POINTS


@dataclass(frozen=True)
class Curve(Metric):
    """Of the last step's curve: the number of `spikes`; for a figure its `loss` and the `place` of each point in
    percent of the training. `factor` and `window` are the rule's."""  # fmt: skip

    VERSION = 1
    jobs = Training.jobs

    show: Literal["spikes", "loss", "place"] = "spikes"
    merged: int = 1
    factor: float = 1.25
    window: int = 8
    unit: str = ""

    def __post_init__(self) -> None:
        for name in ("merged", "window"):
            if getattr(self, name) < 1:
                raise UserError(f"curve: {name} is {getattr(self, name)}; it must be 1 or more")
        if not 1 < self.factor < math.inf:
            raise UserError(f"curve: factor is {self.factor}; it must be above 1, as a spike rises")

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """The series of what is shown of the last step's curve; empty if nothing was trained.

        Raises:
            UserError: a curve that is not made of whole blocks.
        """
        curve = observed["step 0"].series.get(LOSS)
        if curve is None or not len(curve.values):
            return {}
        blocks = [merged(block, self.merged) for block in pieces(curve.values, stretches(target))]
        if self.show == "spikes":
            count = sum(spikes(block, self.factor, self.window) for block in blocks)
            return {"spikes": Series(np.asarray([count], float), "model")}
        loss = np.concatenate(blocks)
        place = 100 * (np.arange(len(loss)) + 0.5) / len(loss)
        return {self.show: Series(loss if self.show == "loss" else place, "points")}

    def value(self, mean: Mapping[str, Any]) -> Any:
        """The count, or the mean of what is drawn."""
        return mean[self.show]


def stretches(target: Target) -> int:
    """Points of one block's curve in one pass; 0 where the last step trains all blocks at once."""
    config = target.recipe.steps[-1].config
    if not hasattr(config, "streams"):  # of hidden states, between blocks
        return 0
    sequences = config.tokens // target.scale.calibration.length
    return min(POINTS, config.epochs * (sequences // config.batch))


def pieces(curve: np.ndarray, length: int) -> list[np.ndarray]:
    """A curve block by block, `length` points each; 0 is one piece.

    Raises:
        UserError: it is not made of whole blocks.
    """
    if not length:
        return [curve]
    if len(curve) % length:
        raise UserError(f"a loss curve of {len(curve)} points is not made of blocks of {length}; train it again")
    return np.split(curve, len(curve) // length)


def merged(points: np.ndarray, count: int) -> np.ndarray:
    """Means of `count` neighbours; where they do not divide, a few have one more."""
    return np.asarray([part.mean() for part in np.array_split(points, max(1, len(points) // count))])


def spikes(points: np.ndarray, factor: float, window: int) -> int:
    """How many of the points are more than `factor` times the median of the `window` before them."""
    before = [float(np.median(points[i - window : i])) for i in range(window, len(points))]
    return sum(bool(point > factor * median) for point, median in zip(points[window:], before))
