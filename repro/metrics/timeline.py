"""When an offloaded model copies, drafts and verifies in one iteration at a public shape (SubSpec, Figure 5).

The paper draws three timelines as diagrams: plain offloading, speculation over it, and with copies before they are
needed. Here they are measured: events on the streams themselves, of one iteration after warm ones. The weights are
random; how many tokens are accepted changes no span. Times need a GPU; elsewhere a result is `unsupported`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from repro.core.errors import at_least, unknown
from repro.engine import budget
from repro.engine.limits import bound
from repro.engine.shapes import SHAPES, generation, traffic_of
from repro.engine.speculating import Speculating
from repro.engine.traffic import Copy, Traffic
from repro.jobs.target import Target
from repro.methods import subspec
from repro.metrics.metric import Metric
from repro.metrics.offload_time import engine_of, refuse_without_gpu
from repro.store import observations
from repro.store.job import Job, make
from repro.store.observations import Observations, Series

LANES = ("copies", "draft passes", "verification")
Spans = dict[str, list[tuple[float, float]]]  # lane to (begin, end) in milliseconds


@dataclass(frozen=True)
class Protocol:
    """The iteration after `warm` ones, after a random prompt that fills most of a context."""

    context: int = 1024
    warm: int = 3

    def __post_init__(self) -> None:
        at_least(self, context=64, warm=1)


@dataclass(frozen=True)
class Timeline(Metric):
    """Milliseconds: when the spans of a lane `begin`, counted from the iteration's own beginning, or their `length`.

    Attributes:
        shape: of `repro/engine/shapes.yaml`.
        memory: the budget, such as `8GiB`.
        lane: without a draft, `verification` is the step.
        draft: `subspec`, or `none`.
        prefetch: whether weights are copied before they are needed.
    """

    VERSION = 1
    TIMES = True
    SHAPED = True
    DEFAULT = {}
    PROTOCOL = Protocol

    shape: str
    memory: str
    lane: Literal["copies", "draft passes", "verification"]
    show: Literal["begin", "length"] = "length"
    draft: Literal["subspec", "none"] = "subspec"
    prefetch: bool = True
    unit: str = "ms"

    def __post_init__(self) -> None:
        if self.shape not in SHAPES:
            raise unknown("shape", self.shape, SHAPES)
        budget.parse_bytes(self.memory)

    def jobs(self, target: Target) -> dict[str, Job]:
        """One job a configuration, whatever the target."""
        rule = vars(target.scale.protocols["timeline"]) | {
            "shape": self.shape,
            "memory": budget.parse_bytes(self.memory),
        }
        rule |= {"prefetch": self.prefetch, "draft": vars(subspec.Config()) if self.draft == "subspec" else None}
        rule |= {"device": target.scale.device}
        label = f"{self.shape}/{self.draft}{'' if self.prefetch else '-sync'}"
        return {"spans": make("timeline", label, rule, rule, {}, ())}

    @staticmethod
    def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
        """Note the spans of one iteration.

        Raises:
            NotMeasurable: there is no GPU, or the budget is below the least that works.
        """
        options = job.parsed_options()
        device = torch.device(options["device"])
        refuse_without_gpu(device)
        group = f"{options['shape']}, {budget.shown(options['memory'])}, iteration {options['warm'] + 1}"
        series = {}
        for lane, spans in measured(options, device, torch.bfloat16).items():
            series[f"{lane} begin"] = Series(np.asarray([begin for begin, _ in spans]), "spans", group)
            series[f"{lane} length"] = Series(np.asarray([end - begin for begin, end in spans]), "spans", group)
        observations.save(folder / observations.FILE, series, origin)

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """The spans of a lane; none of a lane that a configuration does not have."""
        return observed["spans"].only(f"{self.lane} {self.show}")

    def value(self, mean: Mapping[str, Any]) -> Any:
        """The mean of what is drawn."""
        return mean[f"{self.lane} {self.show}"]

    @property
    def limits(self) -> tuple[float, float]:
        """A span has a length; one that reaches into the iteration begins before it."""
        return (0.0 if self.show == "length" else -math.inf, math.inf)


def measured(options: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Spans:
    """Lane to the (begin, end) of its spans in milliseconds, in order; a span reaches into the iteration.

    Raises:
        NotMeasurable: the budget is below the least that works.
    """
    engine, _ = engine_of(options, device, dtype)
    try:
        return spans_of(noted(engine, 2 * options["warm"] + 2), engine.draft, options["warm"])
    finally:
        bound(1.0, device)


def noted(engine: Speculating, count: int) -> dict[str, list[Copy]]:
    """Every span of a generation of so many iterations by lane, in seconds of one clock."""
    device = engine.model.device
    lanes = {"copies": traffic_of(engine), "draft passes": Traffic(device), "verification": Traffic(device)}
    batch = generation(engine, count)
    if engine.draft:
        batch.drafter.passes, batch.verifications = lanes["draft passes"], lanes["verification"]
    else:
        engine.steps.passes = lanes["verification"]
    for traffic in lanes.values():
        traffic.start()
    for _ in engine._run(batch):
        pass
    return {lane: traffic.stop() for lane, traffic in lanes.items()}


def spans_of(lanes: Mapping[str, Sequence[Copy]], draft: subspec.Config | None, number: int) -> Spans:
    """The spans of iteration `number`, counted from 0, in milliseconds since it began.

    It begins with its first draft pass, or without a draft where the step before ended, and ends with its verification.
    """
    passes = []
    if draft:
        passes = lanes["draft passes"][number * draft.depth : (number + 1) * draft.depth]
    verification = lanes["verification"][number]
    begin = passes[0].begin if draft else lanes["verification"][number - 1].end
    copies = [copy for copy in lanes["copies"] if begin < copy.end and copy.begin < verification.end]
    by_lane = {}
    for lane, spans in zip(LANES, (copies, passes, [verification])):
        by_lane[lane] = [(1e3 * (span.begin - begin), 1e3 * (span.end - begin)) for span in spans]
    return by_lane
