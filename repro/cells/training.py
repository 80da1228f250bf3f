"""What a method was trained on and how it went: tokens that it saw, and where its loss ended."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from repro.jobs import compress
from repro.jobs.job import Job
from repro.jobs.target import Target
from repro.record.observations import Observations, Series

TOKENS, LOSS = "training/tokens", "training/loss"
LAST = 1 / 16  # the share of a loss curve whose mean is where it ended


@dataclass(frozen=True)
class Ask:
    """`tokens`: all that the model was trained on, a sequence once an epoch whatever the number of blocks; 0 where
    nothing was trained. `loss`: the mean of the last sixteenth of the curve, that of the last blocks where blocks are
    trained one by one."""  # fmt: skip

    show: Literal["tokens", "loss"] = "tokens"
    unit: str = "tokens"


def jobs(ask: Ask, target: Target) -> dict[str, Job]:
    """The job that compresses the model trains it."""
    return {"training": compress.job(target)}


def series(ask: Ask, found: Mapping[str, Observations], target: Target) -> dict[str, Series]:
    """The count, or the end of the curve; none where a curve is asked for and nothing was trained."""
    held = found["training"].series
    if ask.show == "loss":
        if LOSS not in held:
            return {}
        values = held[LOSS].values
        return {LOSS: Series(values[-math.ceil(len(values) * LAST) :], held[LOSS].units)}
    return {TOKENS: held.get(TOKENS, Series(np.zeros(1), "layers"))}


def value(ask: Ask, mean: Mapping[str, Any]) -> Any:
    """The count, or the mean of what `series` kept of the curve."""
    return mean[TOKENS] if ask.show == "tokens" else mean[LOSS]
