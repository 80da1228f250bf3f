"""Q4_K in two planes, in rows and in zigzag: the weight format of the 4.5-bit kernels here (SpQt, section 4.1).

A super-block is 256 weights, ggml's 144 bytes (`methods/spqt/q4_k.py`): a header of 16 and 128 bytes of codes. Stored
one after the other they straddle what memory delivers, so the codes lie in one plane, an aligned line of 128 bytes a
super-block, and the headers in another:

    w = d · scale · q - dmin · minimum        header: d 2 | dmin 2 | scales and minima of 8 blocks of 32 weights 12

    rows        codes uint8 [N, K/256, 128]     header [N, K/256, 16]     256 neighbours of a row
    zigzag      codes uint8 [N/256, K, 128]     header [N/256, K, 16]     256 neighbours of a column

The 256 weights are four groups of 64. Byte l of group i holds weight 64 i + l in its low four bits and 64 i + 32 + l in
its high ones, so that the eight codes of a 32-bit word belong to two blocks: code j of word w of a group is weight
64 i + 32 (j % 2) + 4 w + j // 2.
"""

import torch
from torch import Tensor

from repro.kernels.operators import FLOATS, VECTOR, Argument
from repro.kernels.triton_language import tl, triton

SUPER = 256
LINE = 128
HEADER = 16
BLOCKS = 8
X = Argument(FLOATS, "1 K")
CODES = Argument((torch.uint8,), "A B 128", VECTOR)
HEADERS = Argument((torch.uint8,), "A B 16", VECTOR)


def make_planes(rows: int, columns: int, zigzag: bool, seed: int, device: torch.device | str = "cpu") -> dict:
    """Random `codes` and `headers` of a weight `[rows, columns]` of about unit variance over `columns`."""
    shape = (-(-rows // SUPER), columns) if zigzag else (rows, columns // SUPER)
    generator = torch.Generator(device).manual_seed(seed)
    planes = {
        name: torch.randint(0, 256, (*shape, size), generator=generator, dtype=torch.uint8, device=device)
        for name, size in (("codes", LINE), ("headers", HEADER))
    }
    # Codes and 6-bit scales are about half their range on average: 7.5 * 31.5 * d is about 32 * dmin * 31.5 / 4.3.
    factors = torch.rand(*shape, 2, generator=generator, device=device) * 0.5 + 0.75
    factors *= torch.tensor([1.0, 7.5], device=device) / (150 * columns**0.5)
    planes["headers"][..., :4] = factors.half().view(torch.uint8)
    return planes


def make_inputs(case: dict, zigzag: bool, device: torch.device | str = "cpu") -> dict:
    """`x` `[1, K]`, normal, and the planes of a random weight `[N, K]`."""
    generator = torch.Generator(device).manual_seed(case["seed"] + 1)
    x = torch.randn(1, case["K"], generator=generator, device=device).to(getattr(torch, case["dtype"]))
    return {"x": x, **make_planes(case["N"], case["K"], zigzag, case["seed"], device)}


def dequantize(codes: Tensor, headers: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """`[A, B, 256]`: the weights of super-blocks `[A, B]`, one block of 32 after the other, slow on purpose."""
    d, dmin = headers[..., :4].contiguous().view(torch.float16).to(dtype).unbind(-1)
    packed = headers[..., 4:].int()
    weights = torch.empty(*codes.shape[:2], SUPER, dtype=dtype, device=codes.device)
    for block in range(BLOCKS):
        low, mid, high = (packed[..., 4 * part + block % 4] for part in range(3))
        if block < 4:
            scale, minimum = low & 63, mid & 63
        else:
            scale = high & 15 | low >> 6 << 4
            minimum = high >> 4 | mid >> 6 << 4
        line = codes[..., 32 * (block // 2) : 32 * (block // 2 + 1)]
        q = (line >> 4 if block % 2 else line & 15).to(dtype)
        part = (d * scale)[..., None] * q - (dmin * minimum)[..., None]
        weights[..., 32 * block : 32 * (block + 1)] = part
    return weights


def dense(codes: Tensor, headers: Tensor, zigzag: bool, dtype: torch.dtype = torch.float64) -> Tensor:
    """`[N, K]`, of zigzag with the rows that fill its last band."""
    weights = dequantize(codes, headers, dtype)
    return weights.transpose(1, 2).flatten(0, 1) if zigzag else weights.flatten(1)


def kept(x: Tensor, threshold: float) -> Tensor:
    """bool `[1, K]`: the inputs above a threshold, and those that are NaN."""
    return ~(x.abs().float() <= threshold)


def misfit(x: Tensor, codes: Tensor, rows: int | None = None) -> str | None:
    """What is wrong with checked x and planes, of a zigzag weight if `rows` are given; None if nothing."""
    columns = x.shape[1]
    if x.is_cuda and x.dtype == torch.float32:  # which has more bits than the operands of the tensor cores
        return "x is float32; on a GPU products with Q4_K take float16 and bfloat16"
    if rows is None:
        if columns != SUPER * codes.shape[1]:
            return f"codes {list(codes.shape)} are of {SUPER * codes.shape[1]} columns, and x has {columns}"
        return None
    if columns != codes.shape[1]:
        return f"codes {list(codes.shape)} are of {codes.shape[1]} columns, and x has {columns}"
    most = SUPER * codes.shape[0]
    if not most - SUPER < rows <= most:
        return f"rows is {rows}, but {codes.shape[0]} bands hold {most - SUPER + 1} to {most}"
    return None


def wrong_list(x: Tensor, active: Tensor) -> str | None:
    """What is wrong with the size of a list of `active_inputs`, or None."""
    if active.shape[0] != x.shape[1] + 1:
        return f"active has {active.shape[0]} entries; a count and {x.shape[1]} indices are {x.shape[1] + 1}"
    return None


SCRATCH: dict[tuple, Tensor] = {}


def scratch(name: str, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros `[count]` or more that a kernel leaves as zeros: one launch at a time uses them.

    They are kept for the process, of every power of two, because captured graphs hold their addresses.

    Raises:
        RuntimeError: they would be made inside a CUDA graph capture, whose memory is the graph's own.
    """
    size = 1 << (count - 1).bit_length()
    key = (name, size, dtype, device)
    if key not in SCRATCH:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{name}: no scratch memory of this size before the capture")
        SCRATCH[key] = torch.zeros(size, dtype=dtype, device=device)
    return SCRATCH[key]


@triton.jit
def header_factors(headers, at, group, mask, H: tl.constexpr):  # noqa: ANN001, ANN201
    """d * scale and dmin * minimum of block 2 `group` + H: float32 in the shape of `at` and `group` together.

    `headers` are 32-bit words, four a super-block; `at` is a super-block's first.
    """
    factors = tl.load(headers + at, mask=mask, other=0)
    scales = tl.load(headers + at + 1, mask=mask, other=0)
    minima = tl.load(headers + at + 2, mask=mask, other=0)
    rest = tl.load(headers + at + 3, mask=mask, other=0)
    shift = 16 * (group % 2) + 8 * H
    low, mid, high = (scales >> shift) & 255, (minima >> shift) & 255, (rest >> shift) & 255
    first = group < 2
    scale = tl.where(first, low & 63, (high & 15) | ((low >> 6) << 4))
    minimum = tl.where(first, mid & 63, (high >> 4) | ((mid >> 6) << 4))
    d = (factors & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    dmin = ((factors >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return d * scale.to(tl.float32), dmin * minimum.to(tl.float32)
