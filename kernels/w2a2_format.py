"""2-bit weights and activations in groups of 32: the format of the W2A2 kernels (Bit-by-Bit, 3.1).

    w = factor · s_w (q_w - z_w)      x = s_x (q_x - z_x)      q, z_x in 0 ... 3

A group of 32 codes is one word in each of two bit planes: bit j of plane p is bit p of the code of column 32 g + j, so
that a product of codes is ANDs and bit counts, and nothing is unpacked:

    sum q_w q_x = |w0 & x0| + 2 |w0 & x1| + 2 |w1 & x0| + 4 |w1 & x1|

    codes    int32 [N, 2, G]            scales   uint8 [N, G], the bytes of E4M3, above 0
    zeros    uint8 [N, ceil(G / 4)], 2 bits each, where every one is a code; else float16 [N, G]
    factors  float32 [N], of the tensor that a row belongs to (layers that share their input are one weight)

Bytes a group: 8 + 1 + 1/4, 2.31 bits a weight; 2.75 with real zeros, which SEQ's levels (1.5) and a centred master that
is read at 2 bits have, such as (z - 31.5) / 64. Activations are the same planes with scales float32 and zeros int32.
Where channels are split, `index` int32 [32 G] names the input of each column, K where it reads 0.
"""

import torch
from torch import Tensor

from repro.kernels.operators import Argument
from repro.kernels.triton_language import tl, triton

GROUP, MOST_TOKENS = 32, 4
CODES = Argument((torch.int32,), "N 2 G")
SCALES, ZEROS = Argument((torch.uint8,), "N G"), Argument((torch.uint8, torch.float16), "N Z")
FACTORS = Argument((torch.float32,), "N")


def planes(codes: Tensor) -> Tensor:
    """int32 `[A, 2, G]` of codes `[A, K]` from 0 to 3."""
    lane = torch.arange(GROUP, device=codes.device)
    groups = codes.view(len(codes), 1, -1, GROUP).long()
    plane = torch.arange(2, device=codes.device)[:, None, None]
    words = ((groups >> plane & 1) << lane).sum(-1)
    return words.to(torch.int32)  # which keeps the low 32 bits


def codes_of(words: Tensor) -> Tensor:
    """uint8 `[A, K]` of planes int32 `[A, 2, G]`."""
    lane = torch.arange(GROUP, dtype=torch.int32, device=words.device)
    bits = words[..., None] >> lane & 1
    return (bits[:, 0] + 2 * bits[:, 1]).flatten(1).to(torch.uint8)


def pack(codes: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros of a weight in the format.

    Args:
        codes: uint8 `[N, K]` from 0 to 3.
        scales: float8_e4m3fn `[N, G]`, above 0.
        zeros: `[N, G]`, whole numbers from 0 to 3, or any that 16 bits hold.

    Raises:
        ValueError: K is no multiple of 32, or a code or zero does not fit.
    """
    rows, columns = codes.shape
    if columns % GROUP:
        raise ValueError(f"{columns} columns do not divide into groups of {GROUP}")
    if int(codes.max()) > 3:
        raise ValueError(f"codes reach {int(codes.max())}; 2 bits hold 0 to 3")
    if not ((zeros == zeros.round()) & (zeros >= 0) & (zeros <= 3)).all():
        real = zeros.to(torch.float16)
        if not (real.double() == zeros.double()).all():
            off = zeros[real.double() != zeros.double()][0]
            raise ValueError(f"a zero is {off:g}; the kernel takes codes, or numbers that float16 holds")
        return planes(codes), scales.view(torch.uint8), real
    groups = columns // GROUP
    padded = torch.nn.functional.pad(zeros.to(torch.uint8), (0, -groups % 4)).view(rows, -1, 4)
    packed = padded[..., 0] | padded[..., 1] << 2 | padded[..., 2] << 4 | padded[..., 3] << 6
    return planes(codes), scales.view(torch.uint8), packed


def dequantize(codes: Tensor, scales: Tensor, zeros: Tensor, factors: Tensor) -> Tensor:
    """`[N, K]` in the dtype of `factors`, float32 or float64."""
    groups, z, dtype = codes.shape[2], zeros, factors.dtype
    if zeros.dtype == torch.uint8:
        z = torch.stack([zeros >> shift & 3 for shift in (0, 2, 4, 6)], -1).flatten(1)[:, :groups]
    q = codes_of(codes).view(len(codes), groups, GROUP).to(dtype)
    step = scales.view(torch.float8_e4m3fn).to(dtype) * factors[:, None]
    return ((q - z.to(dtype)[..., None]) * step[..., None]).flatten(1)


def make_weight(case: dict, device: torch.device | str = "cpu") -> dict:
    """A random weight of a case: `codes`, `scales`, `zeros`, `factors`; real zeros where the case says so."""
    generator = torch.Generator().manual_seed(case["seed"])
    rows, groups = case["N"], case["K"] // GROUP
    codes = torch.randint(0, 4, (rows, case["K"]), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(rows, groups, generator=generator) * 400 + 0.002).to(torch.float8_e4m3fn)
    zeros = torch.randint(0, 4, (rows, groups), generator=generator)
    if case.get("real"):  # those of a centred master
        zeros = (64 * zeros - 31.5) / 64
    factors = (1 + torch.arange(rows) % 2) / (400 * case["K"] ** 0.5)  # of two layers
    made = dict(zip(("codes", "scales", "zeros"), pack(codes, scales, zeros))) | {"factors": factors}
    return {name: tensor.to(device) for name, tensor in made.items()}


def misfit(tokens: int, groups: int, codes: Tensor, zeros: Tensor) -> str | None:
    """What is wrong with the sizes of checked tensors, or None."""
    if tokens > MOST_TOKENS:
        return f"x has {tokens} tokens; it takes 1 to {MOST_TOKENS}"
    if groups != codes.shape[2]:
        return f"codes {list(codes.shape)} are of {codes.shape[2]} groups, and x has {groups}"
    if zeros.dtype == torch.uint8 and zeros.shape[1] != -(-groups // 4):
        return f"zeros {list(zeros.shape)} must have {-(-groups // 4)} bytes a row, four groups each"
    if zeros.dtype == torch.float16 and zeros.shape[1] != groups:
        return f"zeros {list(zeros.shape)} must have {groups} numbers a row, one a group"
    return None


@triton.jit
def half_up(u):  # noqa: ANN001, ANN201
    """The nearest whole number, a half upwards, without the rounding of u + 1/2."""
    below = tl.floor(u)
    return below + ((u - below) >= 0.5).to(tl.float32)


@triton.jit
def quantized_group(value, lane):  # noqa: ANN001, ANN201
    """(plane 0, plane 1, scale, zero) `[G]` of float32 inputs `[G, 32]`, on the min-max grid that includes 0."""
    low = tl.minimum(tl.min(value, axis=1), 0.0)
    high = tl.maximum(tl.max(value, axis=1), 0.0)
    scale = tl.div_rn(high - low, tl.full(low.shape, 3.0, tl.float32))
    scale = tl.where(scale == 0, 1.0, scale)
    zero = tl.minimum(tl.maximum(half_up(tl.div_rn(-low, scale)), 0.0), 3.0)
    steps = tl.div_rn(value, tl.broadcast_to(scale[:, None], value.shape))
    code = tl.minimum(tl.maximum(half_up(steps) + zero[:, None], 0.0), 3.0).to(tl.int32)
    plane0 = tl.sum((code & 1) << lane[None, :], axis=1)
    plane1 = tl.sum((code >> 1) << lane[None, :], axis=1)
    return plane0, plane1, scale, zero.to(tl.int32)
