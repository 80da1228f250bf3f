"""Q4_K in zigzag times the inputs above a threshold, without load balance: SpQt's second baseline (section 6.1).

    y[256 R + r] = sum over |x[k]| > threshold of w[R, k, r] x[k]

As `zigzag_gemv.py`. There is no list: every program of a band has the same number of columns, tests their inputs and
leaves out the loads of those that are too small. So it takes as long as its fullest program, and a batch of columns
takes a batch's instructions, however few of them are active. Bytes moved: those of the active columns.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from repro.kernels import nvrtc, zigzag_gemv
from repro.kernels import q4_k_planes as planes
from repro.kernels.launch_config import lacks
from repro.kernels.operators import operator
from repro.kernels.q4_k_planes import CODES, HEADERS, X

CASES = [case | {"share": share} for case, share in zip(zigzag_gemv.CASES, (0.5, 0.35, 0.5, 0.5, 0.5, 0.5))]
SPACE = zigzag_gemv.SPACE


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator, with the threshold of the largest inputs."""
    inputs = zigzag_gemv.make_inputs(case, device)
    return inputs | {"threshold": inputs["x"].abs().float().quantile(1 - case["share"]).item()}


def reference(x: Tensor, codes: Tensor, headers: Tensor, rows: int, threshold: float, ordered: bool = True) -> Tensor:
    """y [1, N] in the dtype of x, computed in float64 with the dequantized weight."""
    active = x.double().where(planes.kept(x, threshold), 0.0)
    return (active @ planes.dense(codes, headers, zigzag=True)[:rows].T).to(x.dtype)


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("zigzag_masked", device) or nvrtc.unavailable()


def launch(
    x: Tensor, codes: Tensor, headers: Tensor, rows: int, threshold: float, ordered: bool = True,
    config: dict | None = None,
) -> Tensor:  # fmt: skip
    """y of the operator by the kernel, with one configuration of SPACE; its tensors are not checked."""
    return prepare(x, codes, headers, rows, threshold, ordered, config)(x, codes, headers)


def on_cuda(x: Tensor, codes: Tensor, headers: Tensor, rows: int, threshold: float, ordered: bool = True) -> Tensor:
    """y of the operator by the kernel, with its tuned configuration."""
    return launch(x, codes, headers, rows, threshold, ordered)


def prepare(
    x: Tensor, codes: Tensor, headers: Tensor, rows: int, threshold: float, ordered: bool = True,
    config: dict | None = None,
) -> Callable[..., Tensor]:  # fmt: skip
    """The launch of the operator for calls like this one, with one configuration of SPACE or the tuned one."""
    return zigzag_gemv.prepared("zigzag_masked", zigzag_gemv.MASKED, x, codes, rows, ordered, threshold, config)


def limit(x: Tensor, codes: Tensor, headers: Tensor, rows: int, threshold: float, ordered: bool = True) -> str | None:
    """What is wrong with checked arguments, or None."""
    if not threshold >= 0:
        return f"threshold is {threshold}; magnitudes are compared with 0 or more"
    return planes.misfit(x, codes, rows)


zigzag_masked = operator(
    "zigzag_masked",
    reference,
    on_cuda,
    {"x": X, "codes": CODES, "headers": HEADERS},
    empty=lambda x, codes, headers, rows, *rest, **more: x.new_empty(1, rows),
    limit=limit,
    prepare=prepare,
)
