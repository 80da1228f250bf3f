"""Rounding-aware channel splitting: both branches of a split channel on one stored step (section 3.4, appendix C).

    W_i⁻ = W_i/2 - Δ/4,    W_i⁺ = W_i/2 + Δ/4,    Q(W_i⁻) + Q(W_i⁺) = Q(W_i),    Q(w) = Δ ⌊w/Δ⌉

on an unclipped quantizer of the step Δ after the split, half up: with u = W/Δ and v = u/2 + 1/4 the left side is
⌊v⌋ + ⌊v + 1/2⌋ = ⌊2v⌋ = ⌊u + 1/2⌋ steps (Hermite). A zero point is a whole number of steps and cancels. The naive split
has both branches at W_i/2 and twice the error: ε = 2Δ (⌊u/2⌉ - u/2).

Δ is the step that is stored, so that it stands on both sides of its own formula: the offsets widen the range of a
group. Its range is the largest of four straight lines in Δ (an end belongs to a branch or to another column), whose
slopes are below 2^b - 1, and so Δ is the largest of the four steps that each line alone has; a group whose ends both
belong to split channels has Δ = R/2 / (2^b - 1.5). Rounding Δ as it is stored comes after, then offsets, z and codes.
A step rounded down clips end codes as elsewhere, and there the identity ends.

On SEQ levels, whose values lie half a step beside, the same branches add up to whole steps: ⌊u + 1/2⌋ again. A master
of b bits that is read at l has steps of 2^(b - l) Δ there, on which branches that lie φ steps apart (modulo 1) have the
mean squared error 1/3 - φ (1 - φ): naive ones at φ = 0, aware ones at 1/2. Offsets that are the sum of a quarter of
each width's step lie near 1/2 at all of them: at 8, 4 and 2 bits φ is 0.5, 0.53 and 0.63, and the error 1, 1.01 and
1.21 times that of aware branches.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from repro.models.groups import quantizer
from repro.models.groups.columns import Columns
from repro.models.groups.quantizer import GroupGrid, Offset, StraightThrough
from repro.models.groups.weight import WideWeight, check_finite, packed

Branches = Literal["rounding_aware", "naive"]
QUARTER = 0.25  # of a step: the offset of a branch


@dataclass(frozen=True)
class Rounding:
    """How a split weight is rounded.

    Attributes:
        grid: width, levels and scales of its columns.
        branches: with offsets, or both the half.
        offset: of a branch from the half, in steps.
    """

    grid: GroupGrid
    branches: Branches = "rounding_aware"
    offset: float = QUARTER


def fit(weight: Tensor, columns: Columns, rounding: Rounding) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """The columns of a split weight and their grid.

    Args:
        weight: `[N, K]`, float32 or float64.
        columns: its columns.
        rounding: the grid, and what branches are.

    Returns:
        Groups `[N, G, group]`, and of `quantizer.fit` stored scales, the tensor's factor, and zero points.
    """
    grid = rounding.grid
    sign = columns.sign.to(weight.dtype)
    halves = quantizer.split(columns.gather(weight) * (1 - sign.abs() / 2), grid.group)
    if rounding.branches == "naive":
        return halves, *quantizer.fit(halves, grid)
    sign = quantizer.split(sign, grid.group)
    s = step(halves, sign != 0, grid, rounding.offset)
    scales, factor = quantizer.stored(s, grid.scale)
    s = quantizer.restored(scales, factor).to(weight.dtype)
    groups = halves + rounding.offset * s * sign
    low = groups.amin(-1, keepdim=True)
    return groups, scales, factor, quantizer.zero_point(low.clamp(max=0) if grid.include_zero else low, s, grid)


def step(halves: Tensor, branch: Tensor, grid: GroupGrid, offset: float = QUARTER) -> Tensor:
    """Δ `[N, G, 1]` before it is rounded.

    Args:
        halves: `[N, G, group]`: W of single columns, W/2 of branches.
        branch: bool `[G, group]`: which columns are branches.
        grid: width and levels.
        offset: of a branch, in steps.
    """
    far = torch.inf
    low = halves.masked_fill(branch, far)
    high = halves.masked_fill(branch, -far)
    low, high = low.amin(-1, keepdim=True), high.amax(-1, keepdim=True)
    low_branch = halves.masked_fill(~branch, far)
    high_branch = halves.masked_fill(~branch, -far)
    low_branch = low_branch.amin(-1, keepdim=True)
    high_branch = high_branch.amax(-1, keepdim=True)
    largest = halves.abs().amax(-1, keepdim=True)
    if grid.levels == "seq":
        share = 2 / 2**grid.bits
        single, pair = torch.maximum(-low, high), torch.maximum(-low_branch, high_branch)
        s = torch.maximum(single * share, pair * share / (1 - offset * share))
        return quantizer.usable(s, largest, grid)
    if grid.include_zero:
        low, high = low.clamp(max=0), high.clamp(min=0)
    levels = 2**grid.bits - 1
    s = torch.maximum((high - low) / levels, (high_branch - low_branch) / (levels - 2 * offset))
    step_size = torch.maximum(high_branch - low, high - low_branch) / (levels - offset)
    return quantizer.usable(torch.maximum(s, step_size), largest, grid)


def fake_quantize(
    weight: Tensor, columns: Columns, rounding: Rounding, shift: int = 0, delta: Offset = "centred"
) -> Tensor:
    """Ŵ `[N, K]` of a split weight, what its columns add up to, with the gradient of `weight`.

    `shift` low bits are dropped from the codes of the grid, as in `quantizer.fake_quantize`.
    """
    with torch.no_grad():
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        groups, scales, factor, z = fit(wide, columns, rounding)
        s = quantizer.restored(scales, factor).to(wide.dtype)
        codes = quantizer.shifted(quantizer.encode(groups, s, z, rounding.grid), shift)
        rounded = columns.joined(quantizer.decode(codes, s, z, shift, delta).flatten(-2)).to(weight.dtype)
    return StraightThrough.apply(weight, rounded)


def pack(weight: Tensor, columns: Columns, rounding: Rounding, delta: Offset = "centred") -> WideWeight:
    """`weight` `[N, K]` split and rounded, as it is stored.

    Raises:
        UserError: the weight holds NaN or Inf.
    """
    check_finite(weight)
    wide = packed(*fit(weight.float(), columns, rounding), rounding.grid, delta)
    parts = {name: getattr(wide, name) for name in (*wide.TENSORS, *wide.NUMBERS)}
    return WideWeight(**parts, index=columns.stored(), channels=len(columns.first))
