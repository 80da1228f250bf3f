"""RMSNorm of one token and the list of its large outputs, in one launch (SpQt, section 4.2.3, fused into the producer).

    sum = x + residual      y = weight * sum / sqrt(mean(sum^2) + eps)      active = [n, the k with |y[k]| > threshold]

As `rms_norm.py` for one token, but for the order in which squares are added up, and as `active_inputs.py`, whose source
it runs and whose ordered list it gives: the thread blocks of a cluster have a segment each and send each other its sum
of squares, then how many outputs it lists. Bytes moved: those of `rms_norm`, and 4 (H + 1).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from repro.kernels import active_inputs, nvrtc, rms_norm
from repro.kernels.launch_config import lacks
from repro.kernels.operators import FLOATS, Argument, operator
from repro.kernels.prepared import blank

CASES = [  # columns, residual, threshold, dtype, seed
    {"H": 1301, "residual": True, "threshold": 0.7, "dtype": "float32", "seed": 0},
    {"H": 64, "residual": False, "threshold": 0.7, "dtype": "float16", "seed": 1},
    {"H": 4096, "residual": True, "threshold": 0.7, "dtype": "bfloat16", "seed": 2},
    {"H": 8192, "residual": True, "threshold": 0.7, "dtype": "bfloat16", "seed": 3},
]


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
    return lacks("rms_norm_active", device) or nvrtc.unavailable()


def launch(
    x: Tensor, weight: Tensor, eps: float, threshold: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, sum, active) of the operator, computed by the kernel; its tensors are not checked."""
    inputs = x, weight, eps, threshold, residual
    return prepare(*inputs)(*inputs)


def prepare(
    x: Tensor, weight: Tensor, eps: float, threshold: float, residual: Tensor | None = None
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The launch of the operator for calls like this one."""
    columns = x.shape[1]
    fill = active_inputs.prepared(active_inputs.NORM, columns, threshold, x, residual, weight, eps)
    allocate, allocate_list = blank(x.dtype, 1, columns), blank(torch.int32, columns + 1)

    def launch(
        x: Tensor, weight: Tensor, eps: float, threshold: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, total, active = allocate(x), allocate(x), allocate_list(x)
        fill(active, x, y, total, residual, weight)
        return y, total, active

    return launch


def empty(
    x: Tensor, weight: Tensor, eps: float, threshold: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Results of the right shapes."""
    active = torch.empty(x.shape[1] + 1, dtype=torch.int32, device=x.device)
    return torch.empty_like(x), torch.empty_like(x), active


def limit(x: Tensor, weight: Tensor, eps: float, threshold: float, residual: Tensor | None = None) -> str | None:
    """What is wrong with checked arguments, or None."""
    if sentence := rms_norm.limit(x, weight, eps):
        return sentence
    if x.shape[1] > active_inputs.MOST:
        return f"x has {x.shape[1]} columns; a list holds {active_inputs.MOST} at most"
    return None if threshold >= 0 else f"threshold is {threshold}; magnitudes are compared with 0 or more"


rms_norm_active = operator(
    "rms_norm_active",
    reference,
    launch,
    {"x": Argument(FLOATS, "1 H"), "weight": Argument("x", "H"), "residual": Argument("x", "1 H")},
    empty=empty,
    limit=limit,
    prepare=prepare,
)
