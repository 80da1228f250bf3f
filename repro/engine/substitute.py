"""A target and the draft made from it: streamed blocks get HQQ substitutes, everything else is shared.

SubSpec, section 4.1. The two decoders have the same embedding, head, norms and resident blocks, and one cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from repro.baselines.hqq import Config as Quantizer
from repro.baselines.hqq import hqq
from repro.core.errors import UserError
from repro.engine import weights
from repro.engine.budget import MemoryPlan
from repro.engine.offload import Offload
from repro.engine.step import Block, Decoder
from repro.methods import subspec
from repro.models.lowbit import LowBitModel, blocks, in_layer

KINDS = {layers[0]: kind for kind, layers in weights.LAYERS.items()}  # product by its first layer


class Loaded:
    """The products of a loaded model; weights that have gone to the host are dropped from it."""

    def __init__(self, lm: LowBitModel, device: torch.device, dtype: torch.dtype) -> None:
        self.lm, self.device, self.dtype = lm, device, dtype

    def dense(self, weight: Tensor) -> Tensor:
        """An embedding, head or norm on the device."""
        return weight.data.to(self.device, self.dtype)

    def resident(self, names: Sequence[str]) -> nn.Module:
        """A product on the device."""
        return weights.product(self.lm, names, self.device, self.dtype)

    def substitute(self, names: Sequence[str], draft: subspec.Config) -> nn.Module:
        """The product with HQQ's codes."""
        quantizer = Quantizer(bits=draft.bits, group=draft.group)
        codes = {}
        for name in names:
            with in_layer(name):
                weight = self.lm.model.get_submodule(name).weight.data.to(self.device)
                codes[name] = hqq(weight, quantizer)
        compressed = replace(self.lm, weights=codes, attachments={})
        return weights.product(compressed, names, self.device, self.dtype)

    def streamed(self, names: Sequence[str]) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of a product, the weight on the CPU.

        Raises:
            UserError: the target's layers are quantized, or have attachments.
        """
        for name in names:
            if name in self.lm.weights or name in self.lm.attachments:
                raise UserError(f"{name}: only a target in full precision is offloaded; choose recipe fp16")
        linears = [self.lm.model.get_submodule(name) for name in names]
        weight = torch.cat([linear.weight.data for linear in linears]).to(self.dtype)
        bias = None
        if linears[0].bias is not None:
            bias = torch.cat([linear.bias.data for linear in linears]).to(self.device, self.dtype)
        for linear in linears:
            linear.weight.data = linear.weight.data.new_empty(0)
        return weight, bias


def decoders(
    model: nn.Module,
    source: Any,
    plan: MemoryPlan,
    context: int,
    draft: subspec.Config | None,
    prefetch: bool = True,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[Decoder, Decoder | None]:
    """The target, whose blocks stream unless the plan keeps them, and its draft.

    Both share embedding, head, norms and resident blocks. Substitutes are made first, while the device is empty: HQQ
    takes memory of its own.

    Args:
        model: Transformers' model, also on the device `meta`.
        source: of its products, such as `Loaded`.
        plan: which blocks stay.
        context: slots of the sequence.
        draft: None without one.
        prefetch: as of `Offload`.
        progress: is told of every block.
    """
    numbers = {name: number for number, name in enumerate(blocks(model))}
    substitutes: dict[int, dict[str, nn.Module]] = {}
    for name, number in numbers.items():
        if draft and (draft.EVERY or number not in plan.resident):
            layers = {kind: [f"{name}.{layer}" for layer in names] for kind, names in weights.LAYERS.items()}
            substitutes[number] = {kind: source.substitute(names, draft) for kind, names in layers.items()}
            release(source.device)
            progress(f"block {number + 1} of {plan.blocks} quantized for the draft")
    offload = Offload(source.device, prefetch)

    def product(names: Sequence[str]) -> nn.Module:
        name, _, layer = names[0].rpartition(".layers.")
        number, _, layer = layer.partition(".")
        if int(number) in plan.resident:
            return source.resident(names)
        streamed = offload.streamed(KINDS[layer], *source.streamed(names))
        release(source.device)
        return streamed

    slots = context + (draft.nodes if draft else 0)
    target = weights.assemble(model, slots, product, source.dense)
    target = replace(target, streams=len(plan.resident) < plan.blocks, stored_bytes=target.read_bytes)
    if not draft:
        return target, None
    drafting = list(target.blocks)
    for number, substitute in substitutes.items():
        drafting[number] = replace(target.blocks[number], **substitute)
    return target, replace(target, blocks=tuple(drafting), streams=False)


def release(device: torch.device) -> None:
    """Give memory that no tensor has back to a GPU.

    Else what a large intermediate tensor leaves is split for the next tensor that stays, and the rest of it is never
    given back: of a 7B shape's blocks that were 229 MiB.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


def draft_of(lm: LowBitModel, target: Decoder, config: subspec.Config) -> Decoder:
    """The draft of a target whose blocks all have substitutes, as the published recipes offload them."""
    source = Loaded(lm, target.device, target.embedding.dtype)
    drafting: list[Block] = []
    for name, block in zip(blocks(lm.model), target.blocks):
        substitutes = {}
        for kind, layers in weights.LAYERS.items():
            substitutes[kind] = source.substitute([f"{name}.{layer}" for layer in layers], config)
        drafting.append(replace(block, **substitutes))
    return replace(target, blocks=tuple(drafting))
