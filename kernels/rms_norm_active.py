"""RMSNorm of one token and the list of its large outputs, in one launch (SpQt, section 4.2.3, fused into the producer).

    sum = x + residual      y = weight * sum / sqrt(mean(sum^2) + eps)      active = [n, the k with |y[k]| > threshold]

As `rms_norm.py` for one token, whose y and sum it gives bit for bit, and as `active_inputs.py`, whose ordered list it
gives: one program has all of the row, so that a prefix sum over it is the place of every index. A separate launch for
the list costs a launch more and reads y again. Bytes moved: those of `rms_norm`, and 4 (H + 1).
"""

import torch
from torch import Tensor

from repro.kernels import active_inputs, rms_norm
from repro.kernels.launch_config import lacks
from repro.kernels.operators import FLOATS, Argument, operator
from repro.kernels.triton_language import tl, triton

CASES = [  # columns, residual, threshold, dtype, seed
    {"H": 257, "residual": True, "threshold": 0.7, "dtype": "float32", "seed": 0},
    {"H": 64, "residual": False, "threshold": 0.7, "dtype": "float16", "seed": 1},
    {"H": 4096, "residual": True, "threshold": 0.7, "dtype": "bfloat16", "seed": 2},
    {"H": 8192, "residual": True, "threshold": 0.7, "dtype": "bfloat16", "seed": 3},
]
MOST = 32768  # columns of a program


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
def rms_norm_active_kernel(  # noqa: ANN201
    x, residual, weight, y, total, active, eps, threshold, H, BLOCK: tl.constexpr,  # noqa: ANN001
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < H
    value = tl.load(x + column, mask=inside, other=0.0)
    if residual is not None:
        value = value.to(tl.float32) + tl.load(residual + column, mask=inside, other=0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty)
    tl.store(total + column, value, mask=inside)
    wide = value.to(tl.float32)
    norm = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / H + eps)).to(x.dtype.element_ty)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    result = (scale * norm.to(tl.float32)).to(x.dtype.element_ty)
    tl.store(y + column, result, mask=inside)
    keep = (inside & ((tl.abs(result.to(tl.float32)) <= threshold) == 0)).to(tl.int32)
    before = tl.cumsum(keep, axis=0) - keep
    tl.store(active + 1 + before, column, mask=keep != 0)
    tl.store(active + H - (column - before), 0, mask=inside & (keep == 0))
    tl.store(active, tl.sum(keep, axis=0))


def launch(
    x: Tensor, weight: Tensor, eps: float, threshold: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, sum, active) of the operator, computed by the kernel; its tensors are not checked."""
    columns = x.shape[1]
    block = triton.next_power_of_2(columns)
    y, total = torch.empty_like(x), torch.empty_like(x)
    active = torch.empty(columns + 1, dtype=torch.int32, device=x.device)
    warps = min(max(block // 512, 1), 16)
    rms_norm_active_kernel[(1,)](
        x, residual, weight, y, total, active, eps, threshold, columns, BLOCK=block, num_warps=warps
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
