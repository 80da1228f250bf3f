"""Public shapes with random weights: their speed and memory are real, their texts mean nothing.

`offloaded` makes one under a memory budget, with SubSpec's draft or without, `with_own_draft` with a small model or
EAGLE-2's head as the draft, and `timed` decodes with it.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from repro.core.errors import UserError
from repro.core.strict import load_yaml
from repro.engine import budget, limits, weights
from repro.engine.core import Core
from repro.engine.decoding import Sampling
from repro.engine.drafts import Apart, Small, SpecExec
from repro.engine.eagle import Eagle2, EagleHead, FittedHead
from repro.engine.offload import Codes
from repro.engine.step import Decoder
from repro.engine.substitute import decoders
from repro.engine.traffic import Traffic
from repro.kernels.packing import TILE, PackedWeight, block_columns
from repro.methods import subspec

SHAPES: dict[str, dict[str, Any]] = load_yaml(Path(__file__).with_name("shapes.yaml"))


def random_weight(rows: int, columns: int, grid: Any, device: torch.device) -> PackedWeight:
    """A packed weight of uniform codes, whose standard deviation is that of a trained one: one over the root of K."""
    slot = weights.slot(grid.bits)
    tiles = -(-rows // TILE)
    shape = (tiles, -(-columns // block_columns(slot)), 32, 4)
    codes = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device)
    shape = (tiles, columns // grid.group if grid.group else 1, 8, 2, 2)
    scale_zero = torch.full(shape, 2.0 ** (slot - 1), dtype=torch.float16, device=device)
    scale_zero[..., 0] = (12 / columns) ** 0.5 / 2**slot
    scale_zero = scale_zero[..., 0].contiguous() if grid.symmetric else scale_zero
    try:
        return PackedWeight(codes, scale_zero, slot, grid.group, rows, columns, grid.symmetric)
    except ValueError as error:
        raise UserError(f"{error}; name another grid in the recipe") from None


# --- under a budget ---------------------------------------------------------------------------------------------------


class Random:
    """The products of a shape with random weights, made on the device."""

    def __init__(
        self, model: nn.Module, device: torch.device, dtype: torch.dtype, target: subspec.Config | None = None
    ) -> None:
        """`target` is the grid of a quantized target."""
        self.model, self.device, self.dtype, self.target = model, device, dtype, target

    def dense(self, weight: Tensor) -> Tensor:
        """An embedding, head or norm."""
        return self._random(tuple(weight.shape))

    def _random(self, shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        return torch.randn(shape, dtype=self.dtype, device=self.device).mul_(shape[1] ** -0.5)

    def _shape(self, names: Sequence[str]) -> tuple[int, int]:
        linears = [self.model.get_submodule(name) for name in names]
        return sum(linear.out_features for linear in linears), linears[0].in_features

    def _bias(self, names: Sequence[str]) -> Tensor | None:
        biased = self.model.get_submodule(names[0]).bias is not None
        return self._random(self._shape(names)[:1]) if biased else None

    def resident(self, names: Sequence[str]) -> nn.Module:
        """A product on the device."""
        if self.target is not None:
            return self.substitute(names, self.target)
        return weights.Dense(self._random(self._shape(names)), self._bias(names))

    def streamed(self, names: Sequence[str]) -> tuple[Tensor | Codes, Tensor | None]:
        """Weight and bias of a product."""
        if self.target is None:
            return self._random(self._shape(names)), self._bias(names)
        rows, columns = self._shape(names)
        codes = torch.randint(256, (rows, columns), dtype=torch.uint8, device=self.device)
        zeros = torch.full((rows, columns // self.target.group), 127.5, dtype=self.dtype, device=self.device)
        scales = torch.full_like(zeros, (12 / columns) ** 0.5 / 2**8)
        return Codes(codes, scales, zeros), self._bias(names)

    def substitute(self, names: Sequence[str], draft: subspec.Config) -> nn.Module:
        """A product of packed codes."""
        packed = random_weight(*self._shape(names), Format(draft), self.device)
        return weights.packed_product(packed, self._bias(names), self.dtype)


class Format:
    """The grid of a draft's codes, as `random_weight` reads it."""

    def __init__(self, draft: subspec.Config) -> None:
        self.bits, self.group, self.symmetric = draft.bits, draft.group, False


def offloaded(
    name: str,
    config: Any,
    amount: int,
    draft: subspec.Config | None,
    context: int,
    device: torch.device,
    dtype: torch.dtype,
    grid: subspec.Config | None = None,
) -> tuple[Decoder, Decoder | None, budget.MemoryPlan]:
    """A shape under a budget of `amount` bytes, which is enforced on a GPU: target, draft, and the memory plan.

    `grid` is that of a target in 8 bits; None is one in `dtype`.

    Raises:
        NotMeasurable: the budget is below the least that works, or the host has too little memory.
    """
    from transformers import AutoModelForCausalLM

    packed = device.type == "cpu" or dtype != torch.float32
    facts = limits.reserved(device), packed, device.type == "cuda"
    second = 0  # of the draft's own prefill: its cache, and a block that is dequantized
    if isinstance(draft, Apart):
        apart = budget.EngineMemory(config, context, dtype, draft)
        second = apart.cache_bytes + apart.block_bytes
    plan = budget.plan(name, config, context, dtype, amount - second, draft, *facts, target=grid)
    limits.check_host(name, plan.streamed_bytes)
    limits.limit(device, amount)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return *decoders(model, Random(model, device, dtype, grid), plan, context, draft), plan


def with_own_draft(
    name: str,
    config: Any,
    amount: int,
    draft: Small | SpecExec | Eagle2,
    small: Any,
    context: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Decoder, Decoder | FittedHead, budget.MemoryPlan]:
    """A shape under a budget with a draft of its own, all of which is on the device.

    Args:
        small: configuration of the small model, which gets the target's vocabulary; None for EAGLE-2, whose head is a
            block of the target's shape.

    Raises:
        NotMeasurable: as `offloaded`.
    """
    from transformers import AutoModelForCausalLM

    slots = context + draft.room
    if small is not None:
        small = copy.deepcopy(small)
        small.vocab_size = config.vocab_size
    draft_bytes = own_draft_bytes(config, draft, small, context, dtype)
    where = limits.reserved(device), True, device.type == "cuda"
    plan = budget.plan(name, config, slots, dtype, amount, None, *where, own_draft=draft_bytes)
    limits.check_host(name, plan.streamed_bytes)
    limits.limit(device, amount)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    target, _ = decoders(model, Random(model, device, dtype), plan, slots, None)
    if small is None:
        return target, FittedHead(EagleHead(model), target), plan
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small)
    source = Random(model, device, dtype)
    return target, weights.assemble(model, context + draft.slots, source.resident, source.dense), plan


def own_draft_bytes(config: Any, draft: Small | Eagle2, small: Any, context: int, dtype: torch.dtype) -> int:
    """Bytes on the device of a draft of its own with its cache and passes, and of the target's pass over its tree.

    Args:
        config, small: of the target and of the small model, None for EAGLE-2's head.
        draft, context, dtype: as of `with_own_draft`.
    """
    verifying = budget.pass_bytes(config, dtype, draft.nodes) - budget.pass_bytes(config, dtype)
    logits = draft.width * config.vocab_size * (dtype.itemsize + 12)
    if small is None:
        draft_config = copy.deepcopy(config)
        draft_config.num_hidden_layers = 1
        parts = budget.EngineMemory(draft_config, context + draft.room, dtype).parts(1)
        draft_bytes = parts["resident blocks"] + parts["cache"] + 2 * config.hidden_size**2 * dtype.itemsize
        return draft_bytes + verifying + logits
    layers = small.num_hidden_layers
    memory = budget.EngineMemory(small, context + draft.slots, dtype)
    return sum(memory.parts(layers).values()) + memory.overhead(layers) + verifying + logits


def set_prefetch(engine: Core, prefetch: bool) -> None:
    """Copy the weights of an engine before they are needed, or when they are."""
    for block in engine.model.blocks:
        for product in (block.qkv, block.out, block.gate_up, block.down):
            if hasattr(product, "lane"):
                product.lane.prefetch = prefetch


def traffic_of(engine: Core) -> Traffic:
    """A recorder of the copies of an engine with at least one streamed block.

    Raises:
        UserError: every block is resident.
    """
    for block in engine.model.blocks:
        if hasattr(block.down, "lane"):
            return block.down.lane.traffic
    raise UserError(f"{engine.name}: no block streams; give a smaller --memory")


def generation(engine: Core, new: int) -> Any:
    """A generation of so many iterations after a random prompt that fills most of the context, not yet begun."""
    prompt = min(engine.context - new - 2, 900)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(engine.model.config.vocab_size, (1, prompt), generator=generator).tolist()
    return engine._decoding(ids, new + 1, Sampling(), 0)


def timed(engine: Core, new: int) -> Any:
    """The batch of a `generation` that has ended."""
    batch = generation(engine, new)
    for _ in engine._run(batch):
        pass
    return batch
