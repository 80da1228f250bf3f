"""Q4_K in zigzag times the listed inputs of one token: SpQt's sparse kernel, with load balance (section 4.2.3).

    y[256 R + r] = sum over the listed k of w[R, k, r] x[k]

As `zigzag_gemv.py`, and `active`: int32 [K + 1] of `active_inputs`, one list for all products of an input. Every
program of a band takes as many of the n listed columns, about n / n1. Bytes moved: 144 n ceil(N / 256) + 4 n and the
vectors; a listed column is one line of 128 bytes and a header in every band.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from repro.kernels import nvrtc, zigzag_gemv
from repro.kernels import q4_k_planes as planes
from repro.kernels.launch_config import lacks
from repro.kernels.operators import operator
from repro.kernels.q4_k_naive_sparse import ACTIVE, only, with_list
from repro.kernels.q4_k_planes import CODES, HEADERS, X

CASES = [case | {"share": share} for case, share in zip(zigzag_gemv.CASES, (0.5, 0.35, 0.5, 0.5, 0.5, 0.5))]
SPACE = zigzag_gemv.SPACE


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator, with the list of the largest inputs."""
    return with_list(zigzag_gemv.make_inputs(case, device), case["share"])


def reference(x: Tensor, codes: Tensor, headers: Tensor, rows: int, active: Tensor, ordered: bool = True) -> Tensor:
    """y [1, N] in the dtype of x, computed in float64 with the dequantized weight."""
    return (only(x, active) @ planes.dense(codes, headers, zigzag=True)[:rows].T).to(x.dtype)


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("zigzag_sparse", device) or nvrtc.unavailable()


def launch(
    x: Tensor, codes: Tensor, headers: Tensor, rows: int, active: Tensor, ordered: bool = True,
    config: dict | None = None,
) -> Tensor:  # fmt: skip
    """y of the operator by the kernel, with one configuration of SPACE; its tensors are not checked."""
    return prepare(x, codes, headers, rows, active, ordered, config)(x, codes, headers, rows, active)


def on_cuda(x: Tensor, codes: Tensor, headers: Tensor, rows: int, active: Tensor, ordered: bool = True) -> Tensor:
    """y of the operator by the kernel, with its tuned configuration."""
    return launch(x, codes, headers, rows, active, ordered)


def prepare(
    x: Tensor, codes: Tensor, headers: Tensor, rows: int, active: Tensor, ordered: bool = True,
    config: dict | None = None,
) -> Callable[..., Tensor]:  # fmt: skip
    """The launch of the operator for calls like this one, with one configuration of SPACE or the tuned one."""
    return zigzag_gemv.prepared("zigzag_sparse", zigzag_gemv.LISTED, x, codes, rows, ordered, config=config)


def limit(x: Tensor, codes: Tensor, headers: Tensor, rows: int, active: Tensor, ordered: bool = True) -> str | None:
    """What is wrong with checked arguments, or None."""
    return planes.misfit(x, codes, rows) or planes.wrong_list(x, active)


zigzag_sparse = operator(
    "zigzag_sparse",
    reference,
    on_cuda,
    {"x": X, "codes": CODES, "headers": HEADERS, "active": ACTIVE},
    empty=lambda x, codes, headers, rows, *rest, **more: x.new_empty(1, rows),
    limit=limit,
    prepare=prepare,
)
