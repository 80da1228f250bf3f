"""Engines for models that are larger than the memory limit: offloaded, with SubSpec's draft.

engine = Limited.load("pocket-10m", memory="8GiB", draft="subspec")
for piece in engine.generate("Once upon", max_new_tokens=64):
    print(piece, end="")
print(engine.stats)

The budget is enforced on a GPU: PyTorch's allocator gets what the device's context leaves of it, and `Stats` show what
the driver says of the device's memory. On a CPU the same blocks stream, from memory to memory.
"""

from dataclasses import dataclass

import torch

from repro.engine import budget, weights
from repro.engine.core import needs_weights
from repro.engine.decoding import Decoding
from repro.engine.limits import check_host, limit, own_bytes, reserved
from repro.engine.speculating import DraftedStats, Speculating
from repro.engine.step import Decoder
from repro.engine.substitute import Loaded, decoders
from repro.generation import engine
from repro.jobs import compressed_folder
from repro.jobs.target import Target
from repro.methods import subspec
from repro.recipes.recipe_text import read_one
from repro.specs import scale as scales


@dataclass(frozen=True)
class LimitedStats(DraftedStats):
    """Stats of a generation under a memory limit; with a draft `ms_p50` and `ms_p99` are those of an iteration.

    Attributes:
        resident, blocks: blocks of the target that stay on the device, and all.
        streamed_bytes: copied from the host in every pass of the target.
        budget_bytes, planned_bytes: what may be used, and what the plan uses.
        device_bytes: used on the GPU after the generation (`limits.own_bytes`); 0 on a CPU.
    """

    resident: int = 0
    blocks: int = 0
    streamed_bytes: int = 0
    budget_bytes: int = 0
    planned_bytes: int = 0
    device_bytes: int = 0

    def __str__(self) -> str:
        limit = f"{budget.shown(self.planned_bytes)} planned of {budget.shown(self.budget_bytes)}"
        if self.device_bytes:
            peak, used = budget.shown(self.peak_bytes), budget.shown(self.device_bytes)
            limit = f"peak {peak}, {used} by the driver's count, {limit}"
        else:
            limit += " (a CPU does not enforce it)"
        return (
            f"{self.prompt_tokens} + {self.new_tokens} tokens | prefill {self.prefill_s:.3f} s | "
            f"{self.speed}{self.lengths} | {self.resident} of {self.blocks} blocks resident, "
            f"{budget.shown(self.streamed_bytes)} streamed a pass | {limit}"
        )


class Limited(Speculating):
    """An engine under a memory limit; `plan` says what lies where. With a draft it decodes one sequence at a time."""

    def __init__(
        self,
        name: str,
        target: Decoder,
        drafting: Decoder | None,
        draft: subspec.Config | None,
        plan: budget.MemoryPlan,
        hub: bool = False,
    ) -> None:
        super().__init__(name, target, drafting, draft, hub)
        self.plan, self.chunk = plan, budget.CHUNK

    @classmethod
    def load(
        cls,
        model: str,
        memory: str | int,
        recipe: str = "fp16",
        draft: str | subspec.Config | None = None,
        context: int | None = None,
        *,
        prefetch: bool = True,
        device: str | None = None,
        dtype: str | None = None,
        scale: str | None = None,
        seed: int = 0,
        build: bool = True,
    ) -> "Limited":
        """A model in a limited amount of memory.

        Args:
            model: a pocket model, a local folder, or `hub-id@revision`.
            memory: bytes, or text such as `8GiB`.
            recipe: of the target; only weights in full precision are streamed.
            draft: `subspec`, with options such as `subspec(bits=3, depth=32)`; None is offloading alone.
            context: prompt and new tokens of a sequence; by default the model's, at most 2048.
            prefetch: whether weights are copied before they are needed.
            device, dtype, scale, seed, build: as of `Engine.load`.

        UserError for what does not exist or fit; `NotMeasurable` for a context beyond the model's, a budget below the
        least that works (the sentence names it), or too little host memory.
        """
        needs_weights(model)
        model, recipe = compressed_folder.opened(model, recipe)
        target = Target(scales.load(name=scale).here(), model, recipe, seed)
        at = engine.device_of(device)
        draft_config = parse_draft(draft) if isinstance(draft, str) else draft
        amount = budget.parse_bytes(memory) if isinstance(memory, str) else memory
        config = engine.configuration(target)
        slots, kind = weights.check(model, config, context), engine.activations(config, at, dtype)
        packed = at.type == "cpu" or kind != torch.float32
        plan = budget.plan(model, config, slots, kind, amount, draft_config, reserved(at), packed, at.type == "cuda")
        check_host(model, plan.streamed_bytes)
        limit(at, amount)
        lm = engine.compressed(target, kind, build)
        loaded = decoders(lm.model, Loaded(lm, at, kind), plan, slots, draft_config, prefetch)
        return cls(model, *loaded, draft_config, plan, target.scale.hub)

    def _ended(self, batch: Decoding) -> LimitedStats:
        where = self.model.device
        return LimitedStats(
            **vars(super()._ended(batch)),
            resident=len(self.plan.resident),
            blocks=self.plan.blocks,
            streamed_bytes=self.plan.streamed_bytes,
            budget_bytes=self.plan.budget,
            planned_bytes=self.plan.used,
            device_bytes=own_bytes(where) if where.type == "cuda" else 0,
        )


# --- the draft by name ------------------------------------------------------------------------------------------------


def parse_draft(text: str) -> subspec.Config:
    """`subspec`, or with options `subspec(bits=3, depth=32)`.

    Raises:
        UserError: another draft, an option that there is not, or a value that does not fit.
    """
    return read_one(text, {"subspec": subspec.Config}, "draft")
