"""Seconds of an iteration of an offloaded model at a public shape under a memory budget, its phases apart (SubSpec).

The weights are random: times and bytes are real, texts and acceptance are not, so that tokens a second are calculated:
accepted tokens of a stand-in (`acceptance`) over these seconds. The verification of random weights accepts about one
token, which changes no time but that of moving accepted slots.
A model without a draft is `none`: its iteration is a step. `alone` is a step of the draft's own format with all blocks
on the device, which is what a standalone 4-bit model takes here, whatever its quantizer. `small` and `specexec` draft
with a smaller shape in 16 bits with the target's vocabulary, `eagle2` with a head of one block, all on the device as a
whole; where more than the root is accepted, EAGLE-2 takes one pass of its head more, which these times leave out. How
many passes SpecExec's tree takes follows from the text, and random weights have none: a pass and the verification are
shown apart, and `acceptance` counts the passes of a stand-in. Times need a GPU; elsewhere a result is `unsupported`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from repro.core.errors import NotMeasurable, UserError, at_least, unknown
from repro.engine import budget
from repro.engine.core import Core
from repro.engine.drafts import Apart, Small, SpecExec, Whole
from repro.engine.eagle import Eagle2
from repro.engine.limits import bound
from repro.engine.shapes import SHAPES, offloaded, set_prefetch, timed, with_own_draft
from repro.engine.speculating import Speculating
from repro.engine.traffic import bus_rate
from repro.jobs.target import Target
from repro.methods import subspec
from repro.metrics.metric import Metric, check_gpu
from repro.store import observations
from repro.store.job import Job, make
from repro.store.observations import Observations, Series

OWN = {"small": Small, "specexec": SpecExec, "eagle2": Eagle2}  # drafts that are models of their own
OF_TARGET = {"apart": Apart, "whole": Whole}  # drafts that are made of the target otherwise than SubSpec's
NAMED = OWN | OF_TARGET  # drafts that a job names
EIGHT = subspec.Config(bits=8, group=128)  # the grid of an 8-bit target, as of SubSpec's Table 7 here
MODELS = ("small", "specexec")  # those whose model is named
SHOWN = {"ms an iteration": "iteration", "ms drafting": "draft", "ms verifying": "verify", "GB": "peak"}


@dataclass(frozen=True)
class Protocol:
    """`timed` iterations after `warm` ones, after a random prompt that fills most of a context."""

    context: int = 1024
    warm: int = 3
    timed: int = 20

    def __post_init__(self) -> None:
        at_least(self, context=64, warm=1, timed=2)


@dataclass(frozen=True)
class OffloadTime(Metric):
    """Milliseconds or gigabytes of one configuration.

    Attributes:
        shape: of `repro/engine/shapes.yaml`.
        memory: the budget, such as `8GiB`.
        draft: what drafts; `apart` is SubSpec's with a cache of its own, `whole` with a substitute of every block.
        draft_model: the shape of a `small` draft, or of SpecExec's.
        group: of the codes of `alone` and `subspec`.
        prefetch: whether weights are copied before they are needed.
        depth: of the draft's tree; 0 is the paper's.
        target_bits: of the target's blocks; 8 are codes in groups of 128, of `subspec` and `none` alone.
        budget: nodes that SpecExec verifies after the root; 0 is its default.
        bus: another rate of the bus in GB/s, for which the time of the streamed bytes is calculated; 0 is the measured.
        show: what.
    """

    VERSION = 1
    TIMES = True
    SHAPED = True
    DEFAULT = {}
    LATER = {"budget": 0, "target_bits": 16}
    PROTOCOL = Protocol

    shape: str
    memory: str
    draft: Literal["subspec", "apart", "whole", "none", "alone", "small", "specexec", "eagle2"] = "subspec"
    draft_model: str = ""
    group: int = 64
    prefetch: bool = True
    depth: int = 0
    budget: int = 0
    target_bits: Literal[16, 8] = 16
    bus: float = 0.0
    show: Literal["ms an iteration", "ms drafting", "ms verifying", "ms a draft pass", "share drafting", "GB"] = (
        "ms an iteration"
    )
    unit: str = "ms"

    def __post_init__(self) -> None:
        for shape in (self.shape, self.draft_model or self.shape):
            if shape not in SHAPES:
                raise unknown("shape", shape, SHAPES)
        if self.draft in MODELS and not self.draft_model:
            raise UserError(f"offload_time: draft {self.draft} needs a draft_model, such as Qwen2.5-1.5B")
        if self.draft == "specexec" and self.depth:
            raise UserError("offload_time: draft specexec has no depth; give its budget of nodes")
        if self.target_bits == 8 and self.draft not in ("subspec", "none"):
            raise UserError(f"offload_time: draft {self.draft} is timed with a target of 16 bits alone")
        if self.draft != "specexec" and self.budget:
            raise UserError(f"offload_time: draft {self.draft} has no budget of nodes; leave budget out")
        budget.parse_bytes(self.memory)
        if self.bus < 0:
            raise UserError(f"bus is {self.bus}; give GB/s above 0, or 0 for the measured rate")
        self.config  # noqa: B018  checks depth and budget

    @property
    def config(self) -> subspec.Config | Small | SpecExec | Eagle2 | None:
        """The draft's configuration."""
        depth = {"depth": self.depth} if self.depth else {}
        if self.draft == "none":
            return None
        if self.draft == "specexec":
            return SpecExec(budget=self.budget) if self.budget else SpecExec()
        if self.draft in OWN:
            return OWN[self.draft](**depth)
        return OF_TARGET.get(self.draft, subspec.Config)(group=self.group, **depth)

    def jobs(self, target: Target) -> dict[str, Job] | None:
        """One job times a configuration, whatever the target."""
        protocol = target.scale.protocols["offload_time"]
        if protocol is None:
            return None
        rule = vars(protocol) | {
            "shape": self.shape,
            "memory": budget.parse_bytes(self.memory),
            "prefetch": self.prefetch,
        }
        rule |= {"draft": vars(self.config) if self.config else None, "alone": self.draft == "alone"}
        if self.target_bits != 16:
            rule["target_bits"] = self.target_bits
        if self.draft in NAMED:
            rule |= {"of": self.draft, "draft_model": self.draft_model if self.draft in MODELS else ""}
        where = {"device": target.scale.device}
        depth = self.config.depth if self.config else 0
        label = f"{self.shape}/{self.draft}{'' if self.prefetch else '-sync'}-{depth}"
        return {"times": make("offload_time", label, rule | where, rule | where, {}, ())}

    @staticmethod
    def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
        """Time the iterations; a value each, in seconds.

        Raises:
            NotMeasurable: there is no GPU, or the budget is below the least that works.
        """
        options = job.parsed_options()
        device = torch.device(options["device"])
        refuse_without_gpu(device)
        measured = times(options, device, torch.bfloat16)
        group = f"{options['shape']}, {budget.shown(options['memory'])}, {options['timed']} iterations"
        series = {name: Series(np.asarray(values, dtype=float), "items", group) for name, values in measured.items()}
        observations.save(folder / observations.FILE, series, origin)

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """The series of the value. Facts of a whole run, such as the rate of its bus, have no spread."""
        recorded = observed["times"].series
        if self.bus:
            names = ("iteration", "streamed", "block", "bus", "draft")
        elif self.show == "share drafting":
            names = ("draft", "verify")
        elif self.show == "ms a draft pass":
            names = ("draft", "passes")
        else:
            names = (SHOWN[self.show],)
        return {
            name: recorded[name] if len(recorded[name].values) > 1 else replace(recorded[name], axis="runs")
            for name in names
        }

    def value(self, mean: Mapping[str, Any]) -> Any:
        """Milliseconds, gigabytes or a share.

        At another rate of the bus a verification takes as much longer as its streamed bytes, less the block that comes
        while the draft computes, take on that bus than on the measured one: it was bound by the bus.
        """
        if self.show == "share drafting":
            return mean["draft"] / (mean["draft"] + mean["verify"])
        if self.show == "ms a draft pass":
            return 1e3 * mean["draft"] / mean["passes"]
        if self.bus:
            waiting = mean["streamed"] - (mean["block"] if self.draft != "none" else 0.0)
            return 1e3 * (mean["iteration"] + waiting * (1e-9 / self.bus - 1 / mean["bus"]))
        return mean[SHOWN[self.show]] * (1e-9 if self.show == "GB" else 1e3)

    @property
    def limits(self) -> tuple[float, float]:
        """Times are positive, a share is one."""
        return (0.0, 1.0) if self.show == "share drafting" else (0.0, math.inf)


def refuse_without_gpu(device: torch.device) -> None:
    """Raise where times would be those of a CPU.

    Raises:
        NotMeasurable: the device is no GPU.
    """
    check_gpu(device.type, "times of offloading")


def times(options: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, list[float]]:
    """Seconds of every iteration and of its phases, and as one value each: peak, streamed bytes, rate of the bus.

    Raises:
        NotMeasurable: the budget is below the least that works, or so large that SubSpec has no block to substitute.
    """
    rate = bus_rate(device)  # before memory is limited
    engine, plan = engine_of(options, device, dtype)
    shares_resident = options["draft"] and options.get("of") not in (*OWN, "whole")
    if shares_resident and not plan.streamed_bytes:
        problem = f"{budget.shown(options['memory'])} hold all of {options['shape']}"
        raise NotMeasurable(
            "unsupported", f"{problem}: no block has a substitute, so that SubSpec's draft is the target itself"
        )
    warm = options["warm"]
    count = options["warm"] + options["timed"]
    try:
        if options["alone"]:
            return {"iteration": alone(engine, options, device)}
        # Without a draft the next step is launched before a token is fetched. Where copies block the host, the seconds
        # of a token are those of the next one's step, and the last token has none.
        iteration = timed(engine, count if engine.draft else count + 1).seconds[warm:count]
        numbers = {"iteration": iteration, "streamed": [float(plan.streamed_bytes)], "bus": [rate]}
        numbers |= {"draft": [0.0], "verify": iteration, "block": [float(plan.block_bytes)]}
        if engine.draft:
            engine.phases = True
            batch = timed(engine, count)
            numbers |= {"draft": batch.draft_s[warm:], "verify": batch.verify_s[warm:], "passes": batch.passes[warm:]}
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else math.nan
        return numbers | {"peak": [float(peak)]}
    finally:
        bound(1.0, device)


def engine_of(
    options: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> tuple[Speculating, budget.MemoryPlan]:
    """The engine of a job's shape, memory, draft and prefetching, and its memory plan.

    Raises:
        NotMeasurable: the budget is below the least that works.
    """
    from transformers import AutoConfig  # takes seconds

    draft = NAMED.get(options.get("of"), subspec.Config)(**options["draft"]) if options["draft"] else None
    name = f"shape/{options['shape']}"
    config = AutoConfig.for_model(**SHAPES[options["shape"]])
    budgeted = (name, config, options["memory"], draft)
    where = (options["context"], device, dtype)
    if options.get("of") in OWN:
        small = AutoConfig.for_model(**SHAPES[options["draft_model"]]) if options["draft_model"] else None
        *models, plan = with_own_draft(*budgeted, small, *where)
    else:
        *models, plan = offloaded(*budgeted, *where, EIGHT if options.get("target_bits") == 8 else None)
    engine = Speculating(name, *models, draft)
    set_prefetch(engine, options["prefetch"])
    return engine, plan


def alone(engine: Speculating, options: Mapping[str, Any], device: torch.device) -> list[float]:
    """Seconds of the steps of a draft by itself, beyond the budget by a cache of its own."""
    bound(1.0, device)
    core = Core(engine.name, engine._drafting)
    core.RATED = False
    return timed(core, options["warm"] + options["timed"]).seconds[options["warm"] :]
