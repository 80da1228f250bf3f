"""Products of Bit-by-Bit's models: grouped weights with E4M3 scales, 2-bit inputs, split or unsplit channels.

On a GPU up to four tokens with both in 2 bits and groups of 32 go through `w2a2_gemv`, which quantizes them; weights
alone in 2, 4 or 8 bits through the kernels of packed weights. More tokens, and everything that no kernel takes, are
quantized as they run and multiplied with the dequantized weight: the same codes, more bytes. A weight's zero point may
be any number that 16 bits hold; inputs have whole ones, since their ranges include 0.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repro.core.errors import UserError
from repro.kernels import packing, w2a2_gemv
from repro.kernels import w2a2_format as form
from repro.models.attachments import Attachment, module_of
from repro.models.groups import inputs, quantizer
from repro.models.groups.columns import Columns
from repro.models.groups.quantizer import GroupGrid
from repro.models.groups.weight import GroupWeight, WideWeight

BITS = 2


class Inputs:
    """How the inputs of a layer are quantized: their grid, and the columns of its groups where channels are split."""

    def __init__(self, grid: GroupGrid, columns: Columns | None) -> None:
        self.grid, self.columns = grid, columns

    @property
    def key(self) -> tuple:
        """Equal for layers whose quantized inputs are the same."""
        index = None if self.columns is None else self.columns.index.cpu().numpy().tobytes()
        return self.grid.bits, self.grid.group, self.grid.include_zero, index

    def __call__(self, x: Tensor) -> Tensor:
        return inputs.quantized(x, self.grid, self.columns)


class OnQuantized(nn.Module):
    """A product of inputs `[T, K]` that are quantized as they come."""

    def __init__(self, product: nn.Module, quantized_inputs: Inputs) -> None:
        super().__init__()
        self.product, self.taken = product, quantized_inputs

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.taken(x))

    __call__ = forward  # a module's own looks for hooks


class W2A2(nn.Module):
    """A product, x `[T, K]` to y `[T, N]`, with weights and inputs in 2 bits; tensors as of `w2a2_format`.

    Args:
        units: of the weight.
        factors: of its rows.
        groups: G.
        taken: how inputs are quantized; with columns, `index` names the input of each.
        bias: `[N]`.
    """

    def __init__(
        self, units: Tensor, factors: Tensor, groups: int, quantized_inputs: Inputs, bias: Tensor | None
    ) -> None:
        super().__init__()
        self.groups, self.taken = groups, quantized_inputs
        self.register_buffer("units", units)
        self.register_buffer("factors", factors)
        index = (
            None if quantized_inputs.columns is None else quantized_inputs.columns.index.to(units.device, torch.int32)
        )
        self.register_buffer("index", index)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > form.MOST_TOKENS:
            return F.linear(self.taken(x), self.weight(x.dtype), self.bias)
        y = w2a2_gemv.w2a2_gemv(x, self.units, self.factors, self.index)
        return y if self.bias is None else y + self.bias

    __call__ = forward

    @property
    def outputs(self) -> int:
        """N."""
        return len(self.factors)

    def into(self, x: Tensor, y: Tensor) -> None:
        """Write the product of one token into y `[1, N]`, a slice of a longer row."""
        w2a2_gemv.into(y, x, self.units, self.factors, self.index)
        if self.bias is not None:
            y += self.bias

    def weight(self, dtype: torch.dtype) -> Tensor:
        """`[N, K]`, dequantized; of a split channel the sum of its columns."""
        columns = self.taken.columns
        dense = form.dequantize(self.units, self.factors, self.groups)
        return (dense if columns is None else columns.joined(dense)).to(dtype)

    def expanded(self, tokens: int, dtype: torch.dtype) -> nn.Module:
        """The product for many calls of so many tokens, without dequantizing at each."""
        if tokens <= form.MOST_TOKENS:
            return self
        return OnQuantized(_dense(self.weight(dtype), self.bias), self.taken)


def can_join(products: Sequence[nn.Module]) -> bool:
    """Whether `w2a2_gemv` takes products of one input as one launch, each with columns of its own, but as many."""
    if len(products) > w2a2_gemv.MOST_LAYERS or not all(isinstance(product, W2A2) for product in products):
        return False
    if any(product.index is None for product in products):
        return False
    alike = {(product.units.shape[1:], product.groups, product.bias is None) for product in products}
    return len(alike) == 1 and all(product.outputs % form.ROWS == 0 for product in products[:-1])


def merged_buffer(products: Sequence[nn.Module], name: str) -> Tensor:
    """A buffer of all products, one after another in one tensor, of which theirs become parts."""
    parts = [getattr(product, name) for product in products]
    merged = torch.cat(parts)
    for product, part in zip(products, merged.split([len(part) for part in parts])):
        setattr(product, name, part)
    return merged


class Wide(nn.Module):
    """A product with a packed weight whose split channels have two columns: inputs are gathered, 0 for empty ones."""

    def __init__(self, product: nn.Module, index: Tensor) -> None:
        super().__init__()
        self.product = product
        self.register_buffer("index", index)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(F.pad(x, (0, 1))[:, self.index])

    __call__ = forward

    def expanded(self, tokens: int, dtype: torch.dtype) -> nn.Module:
        """The product on a dense weight, if its weight would be dequantized at each call."""
        if not hasattr(self.product, "expanded"):
            return self
        return Wide(self.product.expanded(tokens, dtype), self.index)


def _dense(weight: Tensor, bias: Tensor | None) -> nn.Module:
    from repro.engine.weights import Dense  # which imports this module

    return Dense(weight, bias)


def taken_by(attached: dict[str, Attachment], linear: nn.Linear) -> Inputs | None:
    """How a layer's inputs are quantized, None if they are not; removes that attachment from `attached`."""
    for kind, attachment in attached.items():
        if getattr(module_of(attachment.step), "attached", None) is inputs.attached and "bits" in attachment.numbers:
            grid = inputs.grid_of(attachment.numbers)
            columns = None
            if "index" in attachment.tensors:
                columns = Columns.of(attachment.tensors["index"], linear.in_features, grid.group)
            del attached[kind]
            return Inputs(grid, columns)
    return None


def key_of(weight: Any) -> tuple | None:
    """The key of weights whose rows can be joined in one product; None for other formats."""
    if not isinstance(weight, GroupWeight):
        return None
    index = weight.index.cpu().numpy().tobytes() if isinstance(weight, WideWeight) else None
    return weight.bits, weight.shift, weight.delta, weight.group, index


def product_of(
    weights: Sequence[Any],
    quantized_inputs: Inputs | None,
    bias: Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
) -> nn.Module | None:
    """The product of layers that share their input by a kernel; None where none takes their formats.

    Raises:
        UserError: weights or inputs in 2 bits whose zeros the kernel does not take.
    """
    if not runs_kernels(device, dtype) or key_of(weights[0]) is None:
        return None
    first = weights[0]
    if quantized_inputs is None:
        return packed_weights(weights, bias, device, dtype)
    in_two_bits = (
        first.bits == quantized_inputs.grid.bits == BITS and first.group == quantized_inputs.grid.group == form.GROUP
    )
    if not in_two_bits or first.scales.dtype != torch.float8_e4m3fn:
        return None
    if not quantized_inputs.grid.include_zero:
        raise UserError(
            "zero points of its 2-bit inputs are no codes, which the kernel takes; include_zero=true has such"
        )
    if (quantized_inputs.columns is None) == isinstance(first, WideWeight):
        raise UserError("its inputs and its weight differ in which channels are split")
    zeros = torch.cat([zeros_of(weight) for weight in weights])
    codes = torch.cat([weight.codes for weight in weights])
    scales = torch.cat([weight.scales for weight in weights])
    try:
        units = form.pack(codes, scales, zeros).to(device)
    except ValueError as error:
        raise UserError(f"{error}; quantize it with levels seq or a range that includes 0") from None
    factors = [(weight.factor * 2**weight.shift).expand(len(weight.codes)) for weight in weights]
    if quantized_inputs.columns is not None:
        quantized_inputs = Inputs(quantized_inputs.grid, quantized_inputs.columns.to(device))
    return W2A2(units, torch.cat(factors).to(device), scales.shape[1], quantized_inputs, bias)


def zeros_of(weight: GroupWeight) -> Tensor:
    """float64 `[N, G]`: zero points in steps of the codes that are stored, ŵ = 2^shift s (q - z)."""
    if weight.zeros is None:
        zeros = torch.full(weight.scales.shape, (2**weight.master - 1) / 2, dtype=torch.float64)
    else:
        zeros = weight.zeros.double()
    return (zeros - quantizer.offset(weight.shift, weight.delta)) / 2**weight.shift


def packed_weights(
    weights: Sequence[GroupWeight], bias: Tensor | None, device: torch.device, dtype: torch.dtype
) -> nn.Module | None:
    """A product with 16-bit inputs, whose scales and zeros are rounded to 16 bits."""
    from repro.engine.weights import Packed

    first = weights[0]
    if first.bits not in packing.BITS or first.group not in packing.GROUPS:
        return None
    codes = torch.cat([weight.codes for weight in weights])
    zeros = torch.cat([zeros_of(weight) for weight in weights])
    scales = torch.cat([quantizer.restored(weight.scales, weight.factor) * 2**weight.shift for weight in weights])
    try:
        packed = packing.pack(codes.to(device), scales.to(device), zeros.to(device), first.bits, first.group)
    except ValueError as error:
        raise UserError(f"{error}; its scales are beyond what 16 bits hold") from None
    product = Packed(packed, bias, None)
    return Wide(product, first.columns.index.to(device)) if isinstance(first, WideWeight) else product


def runs_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels run: on a GPU, in 16 bits, as those of other formats."""
    return device.type == "cuda" and dtype != torch.float32 and w2a2_gemv.unsupported(device) is None


# --- shapes -----------------------------------------------------------------------------------------------------------


def random(
    rows: int,
    columns: int,
    split: Columns | None,
    act_bits: int,
    bias: Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
) -> nn.Module:
    """A product of a shape with random codes on a device, which can be `meta`; inputs of 2 or of 16 bits."""
    split = None if split is None else split.to(device)
    width = columns if split is None else len(split.index)
    if act_bits != BITS:
        from repro.engine.shapes import random_weight
        from repro.engine.weights import packed_product

        product = packed_product(random_weight(rows, width, Asymmetric, device), bias, dtype)
        return product if split is None else Wide(product, split.index)
    groups = width // form.GROUP
    units = random_units(rows, groups, device)
    factors = torch.full((rows,), 1 / (64 * columns**0.5), device=device)
    quantized_inputs = Inputs(GroupGrid(BITS, form.GROUP, include_zero=True), split)
    made_here = W2A2(units, factors, groups, quantized_inputs, bias)
    if device.type == "meta" or runs_kernels(device, dtype):
        return made_here
    return made_here.expanded(form.MOST_TOKENS + 1, dtype)


def random_units(rows: int, groups: int, device: torch.device) -> Tensor:
    """Units of random codes, scales of 2 to 448, and zeros 2, 1, 2, 1."""
    down, across = -(-rows // form.ROWS), -(-groups // form.GROUPS)
    codes, scales = form.PARTS
    units = torch.randint(0, 256, (down, across, form.UNIT), dtype=torch.uint8, device=device)
    units[..., codes : codes + scales] = units[..., codes : codes + scales] % 63 + 64  # the bytes of E4M3
    units[..., codes + scales :] = 0b01100110
    return units


class Asymmetric:
    """The grid of 2-bit codes in groups of 32, as `random_weight` reads it."""

    bits, group, symmetric = BITS, form.GROUP, False
