"""The training of a method: tokens that it saw, and its final loss."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from repro.jobs import compress
from repro.jobs.target import Target
from repro.metrics.metric import Metric
from repro.store.job import Job
from repro.store.observations import Observations, Series

TOKENS, LOSS = "training/tokens", "training/loss"
LAST = 1 / 16  # the share of a loss curve whose mean is where it ended


@dataclass(frozen=True)
class Training(Metric):
    """`tokens`: all that the model was trained on, a sequence once an epoch; a pass that trains a half of the blocks
    counts a half; 0 where nothing was trained. `loss`: the mean of the last sixteenth of the last step's curve, that of
    the last blocks where blocks are trained one by one."""  # fmt: skip

    VERSION = 1

    show: Literal["tokens", "loss"] = "tokens"
    unit: str = "tokens"

    def jobs(self, target: Target) -> dict[str, Job]:
        """The jobs that compress the model train it: one for each step of the recipe, `step 0` the last."""
        jobs = {}
        job = compress.job(target)
        while job:
            jobs[f"step {len(jobs)}"] = job
            job = dict(job.needs).get("start")
        return jobs

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """The count of all steps, or the end of the last one's curve; none where it is asked for and there is none."""
        if self.show == "tokens":
            counts = [step.series[TOKENS].values.sum() for step in observed.values() if TOKENS in step.series]
            return {TOKENS: Series(np.asarray([sum(counts)], dtype=float), "model")}
        if (curve := observed["step 0"].series.get(LOSS)) is None:
            return {}
        return {LOSS: Series(curve.values[-math.ceil(len(curve.values) * LAST) :], curve.axis)}

    def value(self, mean: Mapping[str, Any]) -> Any:
        """The count, or the mean of what `series` kept of the curve."""
        return mean[TOKENS] if self.show == "tokens" else mean[LOSS]
