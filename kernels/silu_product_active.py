"""SiLU of the gate times the up projection of one token, and the list of its large outputs, in one launch (SpQt).

    y[f] = silu(x[f]) x[F + f]      active = [n, the f with |y[f]| > threshold]

As `silu_product.py` for one token, and as `active_inputs.py`, whose source it runs and whose ordered list it gives: the
thread blocks of a cluster have a segment each and send each other how many outputs it lists. Bytes moved: those of
`silu_product`, and 4 (F + 1).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from repro.kernels import active_inputs, nvrtc, silu_product
from repro.kernels.launch_config import lacks
from repro.kernels.operators import FLOATS, Argument, operator
from repro.kernels.prepared import blank

CASES = [  # outputs, threshold, dtype, seed
    {"F": 1301, "threshold": 3.0, "dtype": "float32", "seed": 0},
    {"F": 129, "threshold": 3.0, "dtype": "float16", "seed": 1},
    {"F": 14336, "threshold": 3.0, "dtype": "bfloat16", "seed": 2},
    {"F": 28672, "threshold": 3.0, "dtype": "bfloat16", "seed": 3},
]


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator."""
    return silu_product.make_inputs({**case, "T": 1}, device) | {"threshold": case["threshold"]}


def reference(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """y [1, F] in the dtype of x and active int32 [F + 1], in order."""
    y = silu_product.reference(x)
    return y, active_inputs.reference(y, threshold)


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("silu_product_active", device) or nvrtc.unavailable()


def launch(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """(y, active) of the operator, computed by the kernel; `x` is not checked."""
    return prepare(x, threshold)(x)


def prepare(x: Tensor, threshold: float) -> Callable[..., tuple[Tensor, Tensor]]:
    """The launch of the operator for calls like this one."""
    size = x.shape[1] // 2
    fill = active_inputs.prepared(active_inputs.GATED, size, threshold, x)
    allocate, allocate_list = blank(x.dtype, 1, size), blank(torch.int32, size + 1)

    def launch(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        y, active = allocate(x), allocate_list(x)
        fill(active, x, y)
        return y, active

    return launch


def limit(x: Tensor, threshold: float) -> str | None:
    """What is wrong with checked arguments, or None."""
    if x.shape[1] % 2 or x.shape[1] > 2 * active_inputs.MOST:
        return f"x has {x.shape[1]} columns; it takes an even number up to {2 * active_inputs.MOST}"
    return None if threshold >= 0 else f"threshold is {threshold}; magnitudes are compared with 0 or more"


def empty(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Results of the right shapes."""
    size = x.shape[1] // 2
    return x.new_empty(1, size), torch.empty(size + 1, dtype=torch.int32, device=x.device)


silu_product_active = operator(
    "silu_product_active",
    reference,
    launch,
    {"x": Argument(FLOATS, "1 2F")},
    empty=empty,
    limit=limit,
    prepare=prepare,
)
