"""The group quantizer in closed form, as in Bit-by-Bit (arXiv 2604.07888, sections 3.1, 3.3 and 3.5, appendix B.4).

For a group G of neighbouring weights of a row, or of activations of a token, and b bits:

    s = (max G - min G) / (2^b - 1),   z = ⌊-min G / s⌉,   q = clip(⌊w/s⌉ + z, 0, 2^b - 1),   ŵ = s (q - z)

Nothing is learned or clipped; rounding passes gradients straight through (∂ŵ/∂w = 1), s and z are constants. ⌊u⌉ is
half up, ⌊u + 1/2⌋, which the identity of channel splitting needs. Codes of a b-bit master lose c low bits by a shift:

    ŵ = s (2^c (q >> c) + δ - z),   δ = 0 or the middle of what a shifted code stands for, (2^c - 1) / 2

SEQ levels (Liu et al. 2025, ParetoQ) are the odd multiples of s/2: z is the constant (2^b - 1)/2 and is not stored,
q = ⌊clip(w/a, ±0.99) 2^b/2 - 1/2⌉ + 2^b/2, a = max |G|, s = 2a / 2^b.

Scales are rounded as they are stored, before z and codes are computed: FP16, FP32, or E4M3 with one FP32 factor for the
tensor, max s / 448. Without that factor the steps of an 8-bit grid lie below E4M3's least number.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from repro.core.errors import UserError

Levels = Literal["asymmetric", "seq"]
Scale = Literal["e4m3", "float16", "float32"]
Offset = Literal["centred", "zero"]
LARGEST = 448.0  # of E4M3
LEAST = 2.0**-9  # of E4M3
SEQ_CLIP = 0.99  # of w/a; ParetoQ's code
FARTHEST = 2.0**14  # |w| in steps: a zero point stays within 16 bits


@dataclass(frozen=True)
class GroupGrid:
    """How groups of the last dimension are quantized.

    Attributes:
        bits: width of a code, 2 to 8.
        group: neighbours along the input dimension that share a scale.
        levels: the min-max grid, or SEQ's levels around 0.
        include_zero: every group's range includes 0, so that z is a code; SEQ has no zero point.
        scale: how a scale is stored.
    """

    bits: int = 8
    group: int = 32
    levels: Levels = "asymmetric"
    include_zero: bool = False
    scale: Scale = "float32"

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise UserError(f"bits is {self.bits}; a group quantizer has 2 to 8")
        if self.group < 1:
            raise UserError(f"group is {self.group}; it must be 1 or more")


def half_up(u: Tensor) -> Tensor:
    """⌊u + 1/2⌋, without the rounding of that sum, which makes 1 of the largest float32 below 1/2."""
    below = u.floor()
    return below + (u - below >= 0.5)


def split(x: Tensor, group: int) -> Tensor:
    """`[…, G, group]` view of `x` `[…, K]`.

    Raises:
        UserError: the group does not divide K.
    """
    if x.shape[-1] % group:
        raise UserError(f"{x.shape[-1]} input channels do not divide into groups of {group}; choose a divisor of it")
    return x.unflatten(-1, (-1, group))


def stored(s: Tensor, scale: Scale) -> tuple[Tensor, Tensor | None]:
    """Scales in the dtype that they are stored in, and the FP32 factor `[1]` of the tensor, which only E4M3 has."""
    if scale != "e4m3":
        dtype = getattr(torch, scale)
        return s.clamp(min=torch.finfo(dtype).tiny).to(dtype), None
    factor = s.amax().reshape(1) / LARGEST
    return (s / factor).clamp(LEAST, LARGEST).to(torch.float8_e4m3fn), factor


def restored(scales: Tensor, factor: Tensor | None) -> Tensor:
    """The float32 scales that stored ones stand for."""
    return scales.float() if factor is None else scales.float() * factor


def fit(groups: Tensor, grid: GroupGrid) -> tuple[Tensor, Tensor | None, Tensor]:
    """Stored scales `[…, G, 1]`, the tensor's factor, and z `[…, G, 1]` of float32 `groups` `[…, G, group]`."""
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    largest = torch.maximum(-low, high)
    if grid.levels == "seq":
        s = largest * 2 / 2**grid.bits
    else:
        if grid.include_zero:
            low, high = low.clamp(max=0), high.clamp(min=0)
        s = (high - low) / (2**grid.bits - 1)
    scales, factor = stored(usable(s, largest, grid), grid.scale)
    return scales, factor, zero_point(low, restored(scales, factor), grid)


def usable(s: Tensor, largest: Tensor, grid: GroupGrid) -> Tensor:
    """Steps that can be divided by, from those of a formula and the largest |w| of each group."""
    if grid.levels == "seq":
        return s.clamp(min=torch.finfo(s.dtype).tiny)
    # A group of one value c takes the step |c|; one nearly so a step that keeps its zero point within 16 bits.
    return torch.where(s == 0, torch.where(largest == 0, 1.0, largest), torch.maximum(s, largest / FARTHEST))


def zero_point(low: Tensor, s: Tensor, grid: GroupGrid) -> Tensor:
    """z of groups whose least value is `low`, on the steps `s` as they are stored."""
    if grid.levels == "seq":
        return torch.full_like(s, (2**grid.bits - 1) / 2)
    z = half_up(-low / s)
    return z.clamp(0, 2**grid.bits - 1) if grid.include_zero else z


def encode(groups: Tensor, s: Tensor, z: Tensor, grid: GroupGrid) -> Tensor:
    """Codes, still float32, of `groups` `[…, G, group]` on the steps `s` and zero points `z` `[…, G, 1]`."""
    if grid.levels == "seq":
        half = 2**grid.bits / 2
        ratio = (groups / (s * half)).clamp(-SEQ_CLIP, SEQ_CLIP)
        return (half_up(ratio * half - 0.5) + half).clamp(0, 2**grid.bits - 1)
    return (half_up(groups / s) + z).clamp(0, 2**grid.bits - 1)


def shifted(codes: Tensor, shift: int) -> Tensor:
    """Codes without their `shift` low bits, for integer and float codes."""
    return (codes / 2**shift).floor() if codes.is_floating_point() else codes >> shift


def offset(shift: int, delta: Offset) -> float:
    """δ in steps of the master."""
    return (2**shift - 1) / 2 if delta == "centred" else 0.0


def decode(codes: Tensor, s: Tensor, z: Tensor, shift: int = 0, delta: Offset = "centred") -> Tensor:
    """ŵ of codes that `shifted` has shifted; `s` and `z` are those of the master."""
    return s * (codes * 2**shift + offset(shift, delta) - z)


def fake_quantize(x: Tensor, grid: GroupGrid, shift: int = 0, delta: Offset = "centred") -> Tensor:
    """ŵ `[…, K]` of `x` in its dtype, on the grid fitted to x, with the gradient of x.

    Args:
        x: weights `[N, K]` or activations `[…, K]`; computed in float32 (in float64 where x is).
        grid: of the master.
        shift: low bits that are dropped from the master's codes.
        delta: where in what a shifted code stands for its value lies.

    Raises:
        UserError: the group does not divide K.
    """
    with torch.no_grad():
        groups = split(x.to(torch.promote_types(x.dtype, torch.float32)), grid.group)
        scales, factor, z = fit(groups, grid)
        s = restored(scales, factor).to(groups.dtype)
        rounded = decode(shifted(encode(groups, s, z, grid), shift), s, z, shift, delta).flatten(-2).to(x.dtype)
    return StraightThrough.apply(x, rounded)


class StraightThrough(torch.autograd.Function):
    """The second argument, with the gradient of the first: exactly, where x + (rounded - x) would round again."""

    @staticmethod
    def forward(ctx: object, x: Tensor, rounded: Tensor) -> Tensor:
        """`rounded`"""
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        """∂ŵ/∂w = 1"""
        return gradient, None
