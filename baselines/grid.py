"""The uniform grid that quantizers share: `w ≈ (code - zero) · scale` with codes in `0 … 2^bits - 1`.

It is the min-max grid of Frantar et al. 2023 (section 5, setup), with the options of the authors' code.

Asymmetric: the range [min, max] is widened to include 0, scale = (max - min) / (2^b - 1), zero = round(-min / scale).
Symmetric: the range is [-m, m] with m = max|w|, scale = 2m / (2^b - 1), zero = 2^(b-1). An all-zero row takes [-1, 1].
MSE clipping shrinks the range by p = 1 - i/100, i = 0 … 79, and keeps the p with the least Σ|error|^2.4.

A scale is rounded as it is stored before zero and codes are computed, so that they fit the scale that will be read.
A scale below the smallest normal number, 2^-14 in half precision, becomes that number: coarser, but never 0.

Rounding to nearest is right for a range that ends at the extreme weights. A range clipped to [-m, m] is different:
both its ends lie (2^b - 1)/2 steps from 0, a tie. With the scale rounded up they lie just inside that tie, so that both
round inwards and one end code, 0 or 2^b - 1, is never used; with the scale rounded down they saturate and all 2^b codes
are used. A quantizer that clips weights this way sets `SCALE_ROUNDS_DOWN`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from repro.core.errors import UserError
from repro.models.lowbit import in_layer
from repro.models.quantized import QuantizedWeight


@dataclass(frozen=True)
class Grid:
    """A uniform quantization grid; the defaults are 4 bits per channel, as in the papers' "pc" rows.

    Attributes:
        bits: width of a code, 2 to 8.
        group: input columns that share a scale; 0 is per channel, one scale a row.
        symmetric: the zero point is the constant 2^(bits-1) and is not stored.
        clip: "mse" searches the range with the least error, "none" keeps min and max.
        scale_dtype: how a scale is stored.
        SCALE_ROUNDS_DOWN: a half-precision scale is at most range / (2^bits - 1) instead of the nearest half. This is
            set by the quantizer and is not an option of a recipe.
    """

    SCALE_ROUNDS_DOWN: ClassVar[bool] = False

    bits: int = 4
    group: int = 0
    symmetric: bool = False
    clip: Literal["none", "mse"] = "none"
    scale_dtype: Literal["float16", "float32"] = "float16"

    def __post_init__(self) -> None:
        if not 1 < self.bits <= 8:
            raise UserError(f"bits is {self.bits}; a uniform grid has 2 to 8")
        if self.group < 0:
            raise UserError(f"group is {self.group}; give the columns per group, or 0 for one scale a row")


def fit(weight: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Scale and zero point, float32 `[..., 1]`, of each row of `weight` `[..., n]`; the scale is rounded as stored."""
    low = weight.amin(-1, keepdim=True).clamp(max=0)
    high = weight.amax(-1, keepdim=True).clamp(min=0)
    if grid.symmetric:
        high = torch.maximum(-low, high)
        low = -high
    empty = low == high
    low = low.masked_fill(empty, -1)
    high = high.masked_fill(empty, 1)
    if grid.clip == "none":
        return _steps(low, high, grid)

    best = torch.full_like(low, torch.inf)
    scale = torch.ones_like(low)
    zero = torch.zeros_like(low)
    for i in range(80):
        p = 1 - i / 100
        s, z = _steps(p * low, p * high, grid)
        error = (dequantize(quantize(weight, s, z, grid.bits), s, z) - weight).abs().pow(2.4).sum(-1, keepdim=True)
        better = error < best
        best, scale, zero = (torch.where(better, new, old) for new, old in ((error, best), (s, scale), (z, zero)))
    return scale, zero


def _steps(low: Tensor, high: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    stored = getattr(torch, grid.scale_dtype)
    levels = 2**grid.bits - 1
    scale = ((high - low) / levels).to(stored)
    if grid.SCALE_ROUNDS_DOWN and stored == torch.float16:
        above = scale.float() * levels > high - low  # exact: 11 times 8 bits
        above &= torch.isfinite(scale)  # an overflow stays one, for `pack` to refuse
        scale = (scale.view(torch.int16) - above.to(torch.int16)).view(stored)  # the next smaller half
    scale = scale.float().clamp(min=torch.finfo(stored).tiny)
    zero = torch.full_like(scale, 2 ** (grid.bits - 1)) if grid.symmetric else torch.round(-low / scale)
    return scale, zero


def quantize(weight: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """uint8 codes of `weight`, whose shape `scale` and `zero` broadcast to; outside the range the code saturates."""
    return (torch.round(weight / scale) + zero).clamp(0, 2**bits - 1).to(torch.uint8)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The float32 weight of `codes`; `scale` and `zero` broadcast to them."""
    return (codes - zero) * scale


def rtn(weight: Tensor, grid: Grid) -> QuantizedWeight:
    """Round `weight` `[N, K]` to the nearest step of its own grid, per row and group.

    Raises:
        UserError: the group does not divide K, the weight holds NaN or Inf, or a scale does not fit its dtype.
    """
    groups = split(check(weight, grid), grid)
    scale, zero = fit(groups, grid)
    return pack(quantize(groups, scale, zero, grid.bits).flatten(1), scale, zero, grid)


def check(weight: Tensor, grid: Grid) -> Tensor:
    """`weight` `[N, K]` in float32, checked for quantization.

    Raises:
        UserError: the group does not divide K, or the weight holds NaN or Inf.
    """
    rows, columns = weight.shape
    if grid.group and columns % grid.group:
        raise UserError(f"the columns of a {rows}x{columns} weight do not divide into groups of {grid.group}")
    if not torch.isfinite(weight).all():
        raise UserError(f"a {rows}x{columns} weight holds NaN or Inf; the model is damaged")
    return weight.float()


def stack(names: Sequence[str], weights: Sequence[Tensor], grid: Grid) -> Tensor:
    """The rows of several weights with the same K, checked, as one tall weight: rows are quantized independently.

    Raises:
        UserError: as `check`; the message names the layer.
    """
    for name, weight in zip(names, weights, strict=True):
        with in_layer(name):
            check(weight, grid)
    return torch.cat(list(weights))


def split(weight: Tensor, grid: Grid) -> Tensor:
    """`[N, G, group]` view of `weight` `[N, K]`."""
    return weight.unflatten(1, (-1, grid.group or weight.shape[1]))


def check_scale(scale: Tensor, shape: Sequence[int], scale_dtype: str) -> None:
    """Raise where a scale overflowed when it was rounded as it is stored.

    Args:
        scale: scales of a weight `[N, K]`.
        shape: N and K.
        scale_dtype: `float16` or `float32`.

    Raises:
        UserError: it did; the message says what stores it.
    """
    if not torch.isfinite(scale).all():
        hint = "; scale_dtype=float32 in the recipe stores it" if scale_dtype == "float16" else ""
        raise UserError(f"a scale of a {shape[0]}x{shape[1]} weight is too large for {scale_dtype}{hint}")


def pack(codes: Tensor, scale: Tensor, zero: Tensor, grid: Grid, group_index: Tensor | None = None) -> QuantizedWeight:
    """Codes `[N, K]`, scale and zero `[N, G, 1]` as they are stored.

    Raises:
        UserError: a scale does not fit its dtype.
    """
    check_scale(scale, codes.shape, grid.scale_dtype)
    dtype = getattr(torch, grid.scale_dtype)
    return QuantizedWeight(
        codes,
        scale.squeeze(-1).to(dtype),
        zero.squeeze(-1).to(dtype),
        bits=grid.bits,
        group=grid.group,
        zero_bits=0 if grid.symmetric else grid.bits,
        scale_bits=torch.finfo(dtype).bits,
        group_index=group_index,
    )
