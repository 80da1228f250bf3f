"""Products with compensators: what is added to them in launches of its own, or SPEAR's in the product's own kernel.

SPEAR (section 4.1) dispatches by phase. One token goes through `compensated_gemv`: down projections and gates run
beside the product, whose epilogue adds the up projections. More tokens, and everything that the kernel does not take,
are computed as the method does it, launch by launch. The paper overlaps these with the product, as batches that are
served do here (`engine/overlapped.py`); a prefill of `generate` does not.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from repro.kernels import compensated_gemv as kernel
from repro.methods import spear
from repro.methods.spear.compensator import Compensator, unpack
from repro.models.attachments import Attachment, module_of


class Corrected(nn.Module):
    """A product and modules whose outputs are added to it, each from an output on, in launches of their own."""

    def __init__(self, product: nn.Module, corrections: Sequence[tuple[int, nn.Module]]) -> None:
        super().__init__()
        self.product = product
        self.starts = [start for start, _ in corrections]
        self.layers = nn.ModuleList(layer for _, layer in corrections)

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x)
        for start, layer in zip(self.starts, self.layers):
            more = layer(x)
            y[:, start : start + more.shape[1]] += more.to(y.dtype)
        return y

    def expanded(self, tokens: int, dtype: torch.dtype) -> "Corrected":
        """The product on a dense weight, if its weight would be dequantized at each call."""
        return Corrected(expanded(self.product, tokens, dtype), list(zip(self.starts, self.layers)))


class Nothing(nn.Linear):
    """A layer whose output is 0, on which an attachment is built to have its output alone."""

    def __init__(self, like: nn.Linear, device: torch.device) -> None:
        super().__init__(like.in_features, like.out_features, bias=False, device="meta")
        self.weight = nn.Parameter(torch.empty(0, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), self.out_features)


class Compensated(nn.Module):
    """A packed 4-bit product, x `[T, K]` to y `[T, N]`, with SPEAR's compensators of its layers.

    Args:
        product: with a `PackedWeight`, whose columns are in order.
        compensators: in the kernel's layout.
    """

    def __init__(self, product: nn.Module, compensators: kernel.PackedCompensators) -> None:
        super().__init__()
        self.product, self.spans = product, compensators.spans
        for name in ("down", "gates", "scales", "up"):
            self.register_buffer(name, getattr(compensators, name))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 1:
            return self.separate(self.product)(x)
        packed = self.product.packed
        form = packed.bits, packed.group, packed.rows, packed.columns, packed.symmetric
        tensors = packed.codes, packed.scale_zero, self.down, self.scales, self.up
        y = kernel.compensated_gemv(x, *tensors, *form, *self.spans, self.gates)
        return y if self.product.bias is None else y + self.product.bias

    __call__ = forward  # a module's own looks for hooks

    def separate(self, product: nn.Module) -> Corrected:
        """A product of the same weight with these compensators, each a few launches of its own, in float32."""
        columns = self.product.packed.columns
        parts = kernel.parts(self.down, self.gates, self.scales, self.up, columns, self.spans)
        return Corrected(product, [(start, Compensator(tensors, 1.0)) for start, tensors in parts])

    def expanded(self, tokens: int, dtype: torch.dtype) -> nn.Module:
        """The product for many calls of so many tokens."""
        return self if tokens == 1 else self.separate(expanded(self.product, tokens, dtype))


def expanded(product: nn.Module, tokens: int, dtype: torch.dtype) -> nn.Module:
    """A product for many calls of so many tokens: with a dense weight where each call would dequantize it."""
    return product.expanded(tokens, dtype) if hasattr(product, "expanded") else product


def corrected(
    product: nn.Module, attached: Sequence[tuple[int, nn.Linear, Attachment]], device: torch.device
) -> nn.Module:
    """A product with what its layers have attached.

    Args:
        product: of layers that share their input.
        attached: the first output of a layer, the layer, and an attachment of it, in order.
        device: of the product.
    """
    starts, stored, alphas, others = [], [], [], []
    for start, linear, attachment in attached:
        if module_of(attachment.step) is not spear:
            others.append((start, attachment.build(Nothing(linear, device))))
            continue
        starts.append(start)
        stored.append({name: tensor.to(device) for name, tensor in attachment.tensors.items()})
        alphas.append(attachment.numbers["alpha"])
    if starts:
        product = compensated(product, starts, stored, alphas)
    return Corrected(product, others) if others else product


def compensated(
    product: nn.Module, starts: Sequence[int], stored: Sequence[dict[str, Tensor]], alphas: Sequence[float]
) -> nn.Module:
    """A product with SPEAR's compensators, by the kernel where it takes them.

    Args:
        product: of layers that share their input.
        starts: the first output of each layer that has a compensator, in order.
        stored: its tensors, as `methods.spear.compensator.pack` makes them, on the product's device.
        alphas: its α.
    """
    hidden = gate_width(stored)
    rank = max(len(tensors["A"]) for tensors in stored)
    if hidden is not None and kernel.fits(rank, hidden) and takes(product):
        return Compensated(product, kernel.pack(starts, stored, alphas, hidden))
    modules = [Compensator(unpack(tensors), alpha) for tensors, alpha in zip(stored, alphas)]
    return Corrected(product, list(zip(starts, modules)))


def gate_width(stored: Sequence[dict[str, Tensor]]) -> int | None:
    """Hidden width of the gates as a multiple of the rank, 0 without gates; None where they differ."""
    widths = set()
    for tensors in stored:
        widths.add(len(tensors["b1"]) // len(tensors["b2"]) if "b1" in tensors else 0)
    return widths.pop() if len(widths) == 1 else None


def takes(product: Any) -> bool:
    """Whether the kernel takes a product: 4 bits, columns in order, on a device that runs it."""
    packed = getattr(product, "packed", None)
    if packed is None or packed.bits != kernel.BITS or product.order is not None:
        return False
    return runs_kernel(packed.codes.device)


def runs_kernel(device: torch.device) -> bool:
    """Whether the kernel runs on a device; on `meta` a product is as on a GPU."""
    return device.type == "meta" or (device.type == "cuda" and kernel.unsupported(device) is None)
