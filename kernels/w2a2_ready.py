"""W2A2 for decoding with activations that `quantize_2bit` has quantized beforehand; else as `w2a2_gemv.py`.

x_codes: int32 [M, 2, G]; x_scales: float32 [M, G]; x_zeros: int32 [M, G]; y: float32 [M, N].
"""

from collections.abc import Callable

import torch
from torch import Tensor

from repro.kernels import nvrtc, quantize_2bit, w2a2_gemv
from repro.kernels import w2a2_format as form
from repro.kernels.launch_config import lacks
from repro.kernels.operators import Argument, operator
from repro.kernels.prepared import blank
from repro.kernels.w2a2_format import FACTORS, UNITS

CASES = [case for case in w2a2_gemv.CASES if "split" not in case]  # columns are gathered before
SPACE, CHECKED = w2a2_gemv.SPACE, w2a2_gemv.CHECKED


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator."""
    inputs = w2a2_gemv.make_inputs(case, device)
    x_codes, x_scales, x_zeros = quantize_2bit.reference(inputs.pop("x"))
    return {"x_codes": x_codes, "x_scales": x_scales, "x_zeros": x_zeros, **inputs}


def reference(x_codes: Tensor, x_scales: Tensor, x_zeros: Tensor, units: Tensor, factors: Tensor) -> Tensor:
    """y [M, N], computed in float64 with both sides dequantized."""
    return w2a2_gemv.product(x_codes, x_scales, x_zeros, units, factors).float()


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("w2a2_ready", device) or nvrtc.unavailable()


def launch(
    x_codes: Tensor, x_scales: Tensor, x_zeros: Tensor, units: Tensor, factors: Tensor, config: dict | None = None
) -> Tensor:
    """y of the operator by the kernel, with one configuration of SPACE; its tensors are not checked."""
    inputs = x_codes, x_scales, x_zeros, units, factors
    return prepare(*inputs, config)(*inputs)


def prepare(
    x_codes: Tensor, x_scales: Tensor, x_zeros: Tensor, units: Tensor, factors: Tensor, config: dict | None = None
) -> Callable[..., Tensor]:
    """The launch of the operator for calls like this one, with one configuration of SPACE or the tuned one."""
    m, groups = x_scales.shape
    rows = len(factors)
    config = config or w2a2_gemv.configuration("w2a2_ready", m, rows, form.GROUP * groups, units.device)
    fill = w2a2_gemv.runner(m, rows, (None, None, x_codes, x_scales, x_zeros), units, config)
    allocate = blank(torch.float32, m, rows)

    def launch(x_codes: Tensor, x_scales: Tensor, x_zeros: Tensor, units: Tensor, factors: Tensor) -> Tensor:
        return fill(allocate(x_scales), (None, None, x_codes, x_scales, x_zeros), units, factors)

    return launch


def on_cuda(x_codes: Tensor, x_scales: Tensor, x_zeros: Tensor, units: Tensor, factors: Tensor) -> Tensor:
    """y of the operator by the kernel, with its tuned configuration."""
    return launch(x_codes, x_scales, x_zeros, units, factors)


def limit(x_codes: Tensor, x_scales: Tensor, x_zeros: Tensor, units: Tensor, factors: Tensor) -> str | None:
    """What is wrong with checked arguments, or None."""
    return form.misfit(*x_scales.shape, units, factors)


w2a2_ready = operator(
    "w2a2_ready",
    reference,
    on_cuda,
    {
        "x_codes": Argument((torch.int32,), "M 2 G"),
        "x_scales": Argument((torch.float32,), "M G"),
        "x_zeros": Argument((torch.int32,), "M G"),
        "units": UNITS,
        "factors": FACTORS,
    },
    empty=lambda x_codes, x_scales, x_zeros, units, factors: x_scales.new_empty(x_scales.shape[0], len(factors)),
    limit=limit,
    prepare=prepare,
)
