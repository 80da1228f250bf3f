"""2-bit weights and activations in groups of 32: the format of the W2A2 kernels (Bit-by-Bit, 3.1).

    w = factor · s_w (q_w - z_w)      x = s_x (q_x - z_x)      q, z_x in 0 ... 3

A group of 32 codes is one word in each of two bit planes: bit j of plane p is bit p of the code of column 32 g + j, so
that a product of codes is ANDs and bit counts, and nothing is unpacked:

    sum q_w q_x = |w0 & x0| + 2 |w0 & x1| + 2 |w1 & x0| + 4 |w1 & x1|

A weight is units of 8 rows and 16 groups, each in one piece of memory and in the order in which a warp takes it: lane
4 r + t has row r and groups 4 t to 4 t + 3. What is past the last row or group is 0.

    units    uint8 [ceil(N / 8), ceil(G / 16), 1184]; of a unit
               1024 bytes are codes, int32 [2, r, t, 2, 2]: [i, r, t, j, p] is plane p of group 4 t + 2 i + j
                128 bytes are scales [r, group], the bytes of E4M3, above 0
                 32 bytes are zeros [r, t], 2 bits each, where every one is a code; else 256 bytes, float16 [r, group]
    factors  float32 [N], of the tensor that a row belongs to (layers that share their input are one weight)

Bytes a group: 8 + 1 + 1/4, 2.31 bits a weight; 2.75 with real zeros, which SEQ's levels (1.5) and a centred master that
is read at 2 bits have, such as (z - 31.5) / 64. Activations are plain planes with scales float32 and zeros int32.
Where channels are split, `index` int32 [32 G] names the input of each column, K where it reads 0.
"""

import torch
from torch import Tensor

from repro.kernels.operators import VECTOR, Argument
from repro.kernels.triton_language import tl, triton

GROUP, MOST_TOKENS = 32, 4
ROWS, GROUPS = 8, 16  # of a unit
PARTS = 1024, 128  # bytes of its codes and scales
UNIT, REAL_UNIT = sum(PARTS) + 32, sum(PARTS) + 256
UNITS = Argument((torch.uint8,), "T U B", VECTOR)
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


def pack(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The units of a weight.

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
    down, across = -(-rows // ROWS), -(-columns // (GROUP * GROUPS))

    def whole(tensor: Tensor) -> Tensor:  # with the rows and groups that units have
        padded = tensor.new_zeros(down * ROWS, *tensor.shape[1:-1], across * GROUPS)
        padded[:rows, ..., : tensor.shape[-1]] = tensor
        return padded

    def bytes_of(parts: Tensor) -> Tensor:
        return parts.contiguous().view(torch.uint8).reshape(down, across, -1)

    words = whole(planes(codes)).view(down, ROWS, 2, across, 4, 2, 2).permute(0, 3, 5, 1, 4, 6, 2)
    steps = whole(scales.view(torch.uint8)).view(down, ROWS, across, GROUPS).transpose(1, 2)
    z = whole(stored_zeros(zeros)).view(down, ROWS, across, GROUPS).transpose(1, 2)
    if z.dtype == torch.uint8:
        four = z.unflatten(-1, (4, 4))
        z = four[..., 0] | four[..., 1] << 2 | four[..., 2] << 4 | four[..., 3] << 6
    return torch.cat([bytes_of(words), bytes_of(steps), bytes_of(z)], -1)


def stored_zeros(zeros: Tensor) -> Tensor:
    """`[N, G]`: codes in uint8, or where one is none, float16.

    Raises:
        ValueError: float16 does not hold a zero.
    """
    if ((zeros == zeros.round()) & (zeros >= 0) & (zeros <= 3)).all():
        return zeros.to(torch.uint8)
    real = zeros.to(torch.float16)
    if not (real.double() == zeros.double()).all():
        off = zeros[real.double() != zeros.double()][0]
        raise ValueError(f"a zero is {off:g}; the kernel takes codes, or numbers that float16 holds")
    return real


def unpack(units: Tensor, rows: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """The unpacked codes uint8 `[N, K]`, scales float8_e4m3fn `[N, G]` and zeros `[N, G]` in uint8 or float16."""
    down, across, size = units.shape

    def by_row(part: Tensor) -> Tensor:  # [down, across, of a unit] to [N, G]
        return part.reshape(down, across, ROWS, -1).transpose(1, 2).reshape(down * ROWS, -1)[:rows, :groups]

    words, steps, z = (part.contiguous() for part in units.split((*PARTS, size - sum(PARTS)), -1))
    words = words.view(torch.int32).view(down, across, 2, ROWS, 4, 2, 2).permute(0, 3, 6, 1, 4, 2, 5)
    codes = codes_of(words.reshape(down * ROWS, 2, -1)[:rows, :, :groups])
    if size == REAL_UNIT:
        z = z.view(torch.float16)
    else:
        z = torch.stack([z >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    return codes, by_row(steps).contiguous().view(torch.float8_e4m3fn), by_row(z)


def dequantize(units: Tensor, factors: Tensor, groups: int) -> Tensor:
    """`[N, K]` in the dtype of `factors`, float32 or float64."""
    rows = len(factors)
    dtype = factors.dtype
    codes, scales, zeros = unpack(units, rows, groups)
    q = codes.view(rows, groups, GROUP).to(dtype)
    step = scales.to(dtype) * factors[:, None]
    return ((q - zeros.to(dtype)[..., None]) * step[..., None]).flatten(1)


def make_weight(case: dict, device: torch.device | str = "cpu") -> dict:
    """A random weight of a case: `units` and `factors`; real zeros where the case says so."""
    generator = torch.Generator().manual_seed(case["seed"])
    rows = case["N"]
    groups = case["K"] // GROUP
    codes = torch.randint(0, 4, (rows, case["K"]), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(rows, groups, generator=generator) * 400 + 0.002).to(torch.float8_e4m3fn)
    zeros = torch.randint(0, 4, (rows, groups), generator=generator)
    if case.get("real"):  # those of a centred master
        zeros = (64 * zeros - 31.5) / 64
    factors = (1 + torch.arange(rows) % 2) / (400 * case["K"] ** 0.5)  # of two layers
    return {"units": pack(codes, scales, zeros).to(device), "factors": factors.to(device)}


def misfit(tokens: int, groups: int, units: Tensor, factors: Tensor) -> str | None:
    """What is wrong with the sizes of checked tensors, or None."""
    down, across, size = units.shape
    if tokens > MOST_TOKENS:
        return f"x has {tokens} tokens; it takes 1 to {MOST_TOKENS}"
    if size not in (UNIT, REAL_UNIT):
        return f"units {list(units.shape)} must have {UNIT} bytes each, or {REAL_UNIT} with real zeros"
    expected = -(-len(factors) // ROWS), -(-groups // GROUPS)
    if (down, across) != expected:
        return f"units {list(units.shape)} must be {list(expected)} for {len(factors)} rows and {groups} groups"
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
    has_nan = tl.max((value != value).to(tl.int32), axis=1)  # which minimum and maximum leave out
    scale = tl.where(has_nan == 1, float("nan"), scale)
    return plane0, plane1, scale, zero.to(tl.int32)
