"""Estimate what a memory budget allows, before anything is loaded: bytes by part, and tokens/s at this machine's rates.

A step of an offloaded model takes the time of what it copies over the bus, or of what it reads on the device, whichever
is longer: both run at once with prefetching. An iteration with a draft takes `depth` draft passes and one such step, in
which the prefetched first block is already there (equation 2 of SubSpec with gamma = 1).
"""

import math
from dataclasses import dataclass

import torch

from repro.engine import budget, limits, weights
from repro.engine.output import read_rate as fastest_read
from repro.engine.traffic import bus_rate
from repro.generation import engine
from repro.jobs.target import Target
from repro.methods import subspec
from repro.specs import scale as scales

READ = 2**30  # bytes at which the read rate of a device is asked for
STEP_SHARE = 0.5  # of it that a decode step reaches: 0.46 to 0.55 with 4-bit weights, 0.66 to 0.75 in 16 bits


@dataclass(frozen=True)
class Fit:
    """A plan and what it gives.

    Attributes:
        plan: what lies where.
        plain: the same without a draft, which leaves room for more blocks.
        bus: bytes per second from the host to the device; NaN where it was not measured.
        read: bytes per second that a decode step reads on the device; NaN likewise.
        draft_bytes: weights that a draft pass reads.
        depth: draft passes in an iteration.
        acceptance: tokens of an iteration that are assumed.
    """

    plan: budget.MemoryPlan
    plain: budget.MemoryPlan
    bus: float
    read: float
    draft_bytes: int
    depth: int
    acceptance: float

    @property
    def step_s(self) -> float:
        """Seconds of a step without speculation."""
        return self._pass_s(self.plain)

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration with speculation."""
        return self.depth * self.draft_bytes / self.read + self._pass_s(self.plan)

    def _pass_s(self, plan: budget.MemoryPlan) -> float:
        """Seconds of a pass of the target."""
        on_device = plan.parts["resident blocks"] + plan.parts["embedding and head"]
        return plan.streamed_bytes / self.bus + on_device / self.read

    def __str__(self) -> str:
        plan = self.plan
        lines = [f"  {name:<30} {budget.shown(count):>12}" for name, count in plan.parts.items()]
        lines.append(f"  {'together':<30} {budget.shown(plan.used):>12}  of {budget.shown(plan.budget)}")
        streamed = budget.shown(plan.streamed_bytes)
        lines.append(f"{len(plan.resident)} of {plan.blocks} blocks resident; {streamed} in pinned host memory")
        if math.isnan(self.bus + self.read):
            lines.append("no GPU here: give --bus and --read in GB/s for the expected tokens/s")
            return "\n".join(lines)
        speed = f"{1 / self.step_s:.2f} tokens/s without speculation"
        more = len(self.plain.resident) - len(plan.resident)
        room = f" and its draft, with {more} more resident" if more else ""
        lines.append(f"bus {self.bus / 1e9:.1f} GB/s: {speed}{room} (calculated)")
        if self.draft_bytes and not plan.streamed_bytes:
            lines.append("it fits whole: SubSpec's draft would be the model itself; leave out --draft")
        elif self.draft_bytes:
            speed = self.acceptance / self.iteration_s
            estimate = f"{speed:.2f} tokens/s at an acceptance length of {self.acceptance:g}"
            lines.append(f"with speculation {estimate}, {1e3 * self.iteration_s:.0f} ms an iteration (calculated)")
        return "\n".join(lines)


def of(
    model: str,
    memory: str | int,
    draft: subspec.Config | None,
    context: int | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    scale: str | None = None,
    acceptance: float = 25.0,
    bus: float | None = None,
    read: float | None = None,
) -> Fit:
    """What a budget gives for a model, whose weights are not read.

    Args:
        model, memory, draft, context, device, dtype, scale: as of `Limited.load`; the model may be a shape, and without
            a device the dtype is a GPU's.
        acceptance: tokens of an iteration that are assumed.
        bus, read: bytes per second; by default measured on the device for a second.

    Raises:
        UserError: as `Limited.load`; `NotMeasurable` for a budget below the least that works.
    """
    target = Target(scales.load(name=scale), model, "fp16")
    at = engine.device_of(device)
    config = engine.configuration(target)
    slots = weights.check(model, config, context)
    kind = engine.activations(config, torch.device(device or "cuda"), dtype)
    amount = budget.parse_bytes(memory) if isinstance(memory, str) else memory
    packed = at.type == "cpu" or kind != torch.float32
    of_model = (model, config, slots, kind, amount)
    of_device = (limits.reserved(at), packed, at.type == "cuda")
    plan = budget.plan(*of_model, draft, *of_device)
    plain = budget.plan(*of_model, None, *of_device)
    draft_bytes = 0
    if draft:
        tables = plan.parts["embedding and head"] // (1 if config.tie_word_embeddings else 2)
        draft_bytes = plan.parts["draft"] + plan.parts["resident blocks"] + tables
    rates = bus or bus_rate(at), read or read_rate(at)
    return Fit(plan, plain, *rates, draft_bytes, draft.depth if draft else 0, acceptance)


def read_rate(device: torch.device) -> float:
    """Bytes per second that a decode step reads on a GPU, about: a share of what its fastest reader reads."""
    return STEP_SHARE * fastest_read(device, READ) if device.type == "cuda" else math.nan
