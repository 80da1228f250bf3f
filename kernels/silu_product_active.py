"""SiLU of the gate times the up projection of one token, and the list of its large outputs, in one launch (SpQt).

    y[f] = silu(x[f]) x[F + f]      active = [n, the f with |y[f]| > threshold]

As `silu_product.py` for one token, whose y it gives bit for bit, and as `active_inputs.py` without an order: a program
has a segment of at most 1024 outputs and reserves its part of the list by one atomic addition. An order would make a
program wait for those before it, or compute their outputs again. Bytes moved: those of `silu_product`, and 4 n.
"""

import torch
from torch import Tensor

from repro.kernels import active_inputs, silu_product
from repro.kernels import q4_k_planes as planes
from repro.kernels.launch_config import lacks
from repro.kernels.operators import FLOATS, Argument, operator
from repro.kernels.triton_language import tl, triton

CASES = [  # outputs, threshold, dtype, seed
    {"F": 1301, "threshold": 3.0, "dtype": "float32", "seed": 0},
    {"F": 129, "threshold": 3.0, "dtype": "float16", "seed": 1},
    {"F": 14336, "threshold": 3.0, "dtype": "bfloat16", "seed": 2},
    {"F": 28672, "threshold": 3.0, "dtype": "bfloat16", "seed": 3},
]
SEGMENT = 1024  # outputs of a program


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator."""
    return silu_product.make_inputs({**case, "T": 1}, device) | {"threshold": case["threshold"]}


def reference(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """y [1, F] in the dtype of x and active int32 [F + 1], in order."""
    y = silu_product.reference(x)
    return y, active_inputs.reference(y, threshold)


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("silu_product_active", device)


@triton.jit
def silu_product_active_kernel(  # noqa: ANN201
    x, y, active, state, F, threshold, SEGMENTS, SEGMENT: tl.constexpr,  # noqa: ANN001
):  # fmt: skip
    """`state`: one zeroed word, as of `active_inputs`."""
    column = tl.program_id(0) * SEGMENT + tl.arange(0, SEGMENT)
    inside = column < F
    gate = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + F + column, mask=inside, other=0.0).to(tl.float32)
    silu = tl.div_rn(gate, 1 + tl.exp(-gate)).to(x.dtype.element_ty)
    result = (silu.to(tl.float32) * up).to(x.dtype.element_ty)
    tl.store(y + column, result, mask=inside)
    keep = (inside & ((tl.abs(result.to(tl.float32)) <= threshold) == 0)).to(tl.int32)
    before, own = tl.cumsum(keep, axis=0) - keep, tl.sum(keep, axis=0)
    found = tl.atomic_add(state, own + (1 << 20))
    start = found & 0xFFFFF
    tl.store(active + 1 + start + before, column, mask=keep != 0)
    if (found >> 20) == SEGMENTS - 1:
        tl.store(active, start + own)
        tl.store(state, 0)


def launch(x: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """(y, active) of the operator, computed by the kernel; `x` is not checked."""
    size = x.shape[1] // 2
    y = x.new_empty(1, size)
    active = torch.empty(size + 1, dtype=torch.int32, device=x.device)
    segments = triton.cdiv(size, SEGMENT)
    state = planes.scratch("silu_product_active", 1, torch.int32, x.device)
    silu_product_active_kernel[(segments,)](
        x, y, active, state, size, threshold, segments, SEGMENT=SEGMENT, num_warps=8
    )
    return y, active


def limit(x: Tensor, threshold: float) -> str | None:
    """What is wrong with checked arguments, or None."""
    if x.shape[1] % 2 or x.shape[1] >= 2 * active_inputs.MOST:
        return f"x has {x.shape[1]} columns; it takes an even number below {2 * active_inputs.MOST}"
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
)
