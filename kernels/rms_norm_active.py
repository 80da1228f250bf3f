"""RMSNorm of one token and the list of its large outputs, in one launch (SpQt, section 4.2.3, fused into the producer).

    sum = x + residual      y = weight * sum / sqrt(mean(sum^2) + eps)      active = [n, the k with |y[k]| > threshold]

As `rms_norm.py` for one token, whose y and sum it gives bit for bit, and as `active_inputs.py`, whose ordered list it
gives. Every program reads the whole row, which its sum needs, and so knows how many indices come before those of its
own segment, of which alone it writes y, sum and list. One program for all of it took 6 us more than `rms_norm` at
8,192 columns (H200), for its prefix sum and scattered stores. Bytes moved: those of `rms_norm`, and 4 (H + 1).
"""

import torch
from torch import Tensor

from repro.kernels import active_inputs, rms_norm
from repro.kernels.launch_config import lacks
from repro.kernels.operators import FLOATS, Argument, operator
from repro.kernels.triton_language import tl, triton

CASES = [  # columns, residual, threshold, dtype, seed
    {"H": 1301, "residual": True, "threshold": 0.7, "dtype": "float32", "seed": 0},
    {"H": 64, "residual": False, "threshold": 0.7, "dtype": "float16", "seed": 1},
    {"H": 4096, "residual": True, "threshold": 0.7, "dtype": "bfloat16", "seed": 2},
    {"H": 8192, "residual": True, "threshold": 0.7, "dtype": "bfloat16", "seed": 3},
]
MOST = 32768  # columns of a program
SEGMENT = 512  # of them that it writes


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator."""
    inputs = rms_norm.make_inputs({**case, "T": 1}, device)
    return inputs | {"threshold": case["threshold"]}


def reference(
    x: Tensor, weight: Tensor, eps: float, threshold: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, sum), both [1, H] in the dtype of x, and active int32 [H + 1]."""
    y, total = rms_norm.reference(x, weight, eps, residual)
    return y, total, active_inputs.reference(y, threshold)


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("rms_norm_active", device)


@triton.jit
def summed(x, residual, column, H):  # noqa: ANN001, ANN201
    """x + residual in the type of x; 0 beyond the last column."""
    value = tl.load(x + column, mask=column < H, other=0.0)
    if residual is not None:
        value = value.to(tl.float32) + tl.load(residual + column, mask=column < H, other=0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty)
    return value


@triton.jit
def scaled(value, factor, weight, column, H):  # noqa: ANN001, ANN201
    """weight * value * factor, rounded as `rms_norm` rounds."""
    norm = (value.to(tl.float32) * factor).to(value.dtype)
    scale = tl.load(weight + column, mask=column < H, other=0.0).to(tl.float32)
    return (scale * norm.to(tl.float32)).to(value.dtype)


@triton.jit
def rms_norm_active_kernel(  # noqa: ANN201
    x, residual, weight, y, total, active, eps, threshold, H,  # noqa: ANN001
    BLOCK: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    row, first = tl.arange(0, BLOCK), tl.program_id(0) * SEGMENT
    value = summed(x, residual, row, H)
    wide = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, axis=0) / H + eps)
    size = tl.abs(scaled(value, factor, weight, row, H).to(tl.float32))
    earlier = tl.sum(((row < first) & ((size <= threshold) == 0)).to(tl.int32), axis=0)
    column = first + tl.arange(0, SEGMENT)
    inside = column < H
    value = summed(x, residual, column, H)
    result = scaled(value, factor, weight, column, H)
    tl.store(total + column, value, mask=inside)
    tl.store(y + column, result, mask=inside)
    keep = (inside & ((tl.abs(result.to(tl.float32)) <= threshold) == 0)).to(tl.int32)
    before = earlier + tl.cumsum(keep, axis=0) - keep
    tl.store(active + 1 + before, column, mask=keep != 0)
    tl.store(active + H - (column - before), 0, mask=inside & (keep == 0))
    if first + SEGMENT >= H:
        tl.store(active, earlier + tl.sum(keep, axis=0))


def launch(
    x: Tensor, weight: Tensor, eps: float, threshold: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, sum, active) of the operator, computed by the kernel; its tensors are not checked."""
    columns = x.shape[1]
    block = triton.next_power_of_2(columns)
    y, total = torch.empty_like(x), torch.empty_like(x)
    active = torch.empty(columns + 1, dtype=torch.int32, device=x.device)
    warps, segment = min(max(block // 512, 1), 16), min(block, SEGMENT)
    rms_norm_active_kernel[(triton.cdiv(columns, segment),)](
        x, residual, weight, y, total, active, eps, threshold, columns, BLOCK=block, SEGMENT=segment, num_warps=warps
    )
    return y, total, active


def empty(
    x: Tensor, weight: Tensor, eps: float, threshold: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Results of the right shapes."""
    active = torch.empty(x.shape[1] + 1, dtype=torch.int32, device=x.device)
    return torch.empty_like(x), torch.empty_like(x), active


def limit(x: Tensor, weight: Tensor, eps: float, threshold: float, residual: Tensor | None = None) -> str | None:
    """What is wrong with checked arguments, or None."""
    if x.shape[1] > MOST:
        return f"x has {x.shape[1]} columns; a program holds {MOST}"
    return None if threshold >= 0 else f"threshold is {threshold}; magnitudes are compared with 0 or more"


rms_norm_active = operator(
    "rms_norm_active",
    reference,
    launch,
    {"x": Argument(FLOATS, "1 H"), "weight": Argument("x", "H"), "residual": Argument("x", "1 H")},
    empty=empty,
    limit=limit,
)
