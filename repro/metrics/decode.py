"""Decode speed of the engine, end to end: milliseconds a token, tokens per second, bytes. Times differ between runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from repro.core.errors import at_least
from repro.engine import weights
from repro.engine.core import Core
from repro.jobs import compress
from repro.jobs.target import Target
from repro.metrics.metric import Metric
from repro.store import observations
from repro.store.job import Job, make
from repro.store.observations import Observations, Series

SHOWN = {
    "tokens/s": "tokens_per_s",
    "ms": "ms_p50",
    "ms at p99": "ms_p99",
    "MBU": "mbu",
    "stored MB": "stored_bytes",
    "read MB": "read_bytes",
}  # to the field of `Stats`


@dataclass(frozen=True)
class Protocol:
    """`new` greedy tokens after `prompt` random ones, for `batch` sequences; one round of warm-up is dropped."""

    prompt: int = 128
    new: int = 64
    batch: int = 1
    rounds: int = 5

    def __post_init__(self) -> None:
        at_least(self, prompt=1, new=2, batch=1, rounds=1)


@dataclass(frozen=True)
class Decode(Metric):
    """A number of `repro.engine.output.Stats`, the mean over rounds; milliseconds are those of a step."""

    VERSION = 2  # MBU is a share of the read rate; it was one of a copy timed on the host (0.97 for a true 0.75)
    TIMES = True
    DEFAULT = {}
    PROTOCOL = Protocol

    show: Literal["tokens/s", "ms", "ms at p99", "MBU", "stored MB", "read MB"]
    unit: str = ""

    def jobs(self, target: Target) -> dict[str, Job] | None:
        """One job times a model under a recipe."""
        protocol = target.scale.protocols["decode"]
        if protocol is None:
            return None
        rule = vars(protocol)
        needs = {"weights": compress.job(target)} if target.recipe.steps else {}
        inputs = target.inputs() | {"calibration": compress.job(target).parsed_inputs().get("calibration")} | rule
        return {"rounds": make("decode", target.label, inputs, target.options() | rule, needs, target.steps)}

    @staticmethod
    def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
        """Time the rounds; a series a number, one value a round.

        Raises:
            UserError: damaged inputs, a model or format that the engine does not run; `NotMeasurable` beyond the
                context.
        """
        options = job.parsed_options()
        lm = compress.load(options | {"device": "cpu"}, folders.get("weights"))
        context = weights.check(options["model"], lm.model.config, options["prompt"] + options["new"])
        dtype = getattr(torch, options["dtype"])
        device = torch.device(options["device"])
        core = Core(options["model"], weights.decoder(lm, context, device, dtype))
        size = options["prompt"], options["new"], options["batch"]
        rounds = [core.time(*size) for _ in range(1 + options["rounds"])][1:]
        group = f"decode {size[0]}+{size[1]} x{size[2]}, {options['dtype']}"
        series = {}
        for label, name in SHOWN.items():
            values = [getattr(stats, name) for stats in rounds]
            series[label] = Series(np.asarray(values, float), "items", group)
        observations.save(folder / observations.FILE, series, origin)

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """The rounds of one number."""
        return {self.show: observed["rounds"].series[self.show]}

    def value(self, mean: Mapping[str, Any]) -> Any:
        """The mean round."""
        return mean[self.show] / (1e6 if self.show.endswith("MB") else 1)
