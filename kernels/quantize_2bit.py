"""Activations to 2 bits in groups of 32 channels, asymmetric, as `w2a2_ready.py` reads them (Bit-by-Bit, section 3.1).

    s = (max(x, 0) - min(x, 0)) / 3      z = round(-min(x, 0) / s)      q = clamp(round(x / s) + z, 0, 3)

x: fp16, bf16 or float32 [M, K], K a multiple of 32. Codes int32 [M, 2, G] in bit planes, scales float32 and zeros int32
[M, G] (`w2a2_format.py`). Rounding is half up, a group of zeros has scale 1.
Every range includes 0, so that z is a code. A group with a NaN has a scale of NaN; its codes mean nothing.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from repro.kernels import w2a2_format as form
from repro.kernels.launch_config import lacks
from repro.kernels.operators import FLOATS, Argument, operator
from repro.kernels.prepared import Prepared, blank
from repro.kernels.triton_language import tl, triton
from repro.kernels.w2a2_format import quantized_group

CASES = [  # tokens, channels, dtype, seed
    {"M": 3, "K": 352, "dtype": "float32", "seed": 0},
    {"M": 1, "K": 1056, "dtype": "float16", "seed": 1},
    {"M": 4, "K": 4096, "dtype": "bfloat16", "seed": 2},
    {"M": 1, "K": 28672, "dtype": "bfloat16", "seed": 3},
]
GROUPS = 32  # of a program


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator: tokens that differ by powers of two, a group of zeros, one of equal values."""
    generator = torch.Generator().manual_seed(case["seed"])
    x = torch.randn(case["M"], case["K"], generator=generator)
    x *= 2.0 ** torch.arange(case["M"])[:, None]
    x[0, 32:64], x[0, 64:96] = 0.0, -1.5
    return {"x": x.to(device, getattr(torch, case["dtype"]))}


def reference(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(codes int32 [M, 2, G], scales float32 [M, G], zeros int32 [M, G])."""
    groups = x.float().view(len(x), -1, form.GROUP)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = (high - low) / torch.full_like(high, 3)
    scale = torch.where(scale == 0, 1.0, scale)
    zero = rounded(-low / scale).clamp(0, 3)
    codes = (rounded(groups / scale[..., None]) + zero[..., None]).clamp(0, 3)
    return form.planes(codes.flatten(1)), scale, zero.int()


def rounded(u: Tensor) -> Tensor:
    """The nearest whole number, a half upwards."""
    below = u.floor()
    return below + (u - below >= 0.5)


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("quantize_2bit", device)


@triton.jit
def quantize_2bit_kernel(x, codes, scales, zeros, G, GROUPS: tl.constexpr):  # noqa: ANN001, ANN201
    token, group, lane = tl.program_id(0), tl.program_id(1) * GROUPS + tl.arange(0, GROUPS), tl.arange(0, 32)
    inside = group < G
    place = token.to(tl.int64) * G + group
    value = tl.load(x + place[:, None] * 32 + lane[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    plane0, plane1, scale, zero = quantized_group(value, lane)
    first = codes + token.to(tl.int64) * 2 * G + group
    tl.store(first, plane0, mask=inside)
    tl.store(first + G, plane1, mask=inside)
    tl.store(scales + place, scale, mask=inside)
    tl.store(zeros + place, zero, mask=inside)


def empty(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Results of the right shapes."""
    shape = (x.shape[0], x.shape[1] // form.GROUP)
    codes = torch.empty((shape[0], 2, shape[1]), dtype=torch.int32, device=x.device)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    return codes, scales, torch.empty(shape, dtype=torch.int32, device=x.device)


def launch(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The results of the operator, computed by the kernel; `x` is not checked."""
    return prepare(x)(x)


def prepare(x: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """The launch of the operator for calls like this one."""
    tokens, groups = len(x), x.shape[1] // form.GROUP
    kernel = Prepared(quantize_2bit_kernel, (tokens, triton.cdiv(groups, GROUPS)), GROUPS=GROUPS, num_warps=4)
    allocate_codes, allocate_zeros = blank(torch.int32, tokens, 2, groups), blank(torch.int32, tokens, groups)
    allocate_scales = blank(torch.float32, tokens, groups)

    def launch(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        codes, scales, zeros = allocate_codes(x), allocate_scales(x), allocate_zeros(x)
        kernel(x, codes, scales, zeros, groups)
        return codes, scales, zeros

    return launch


def limit(x: Tensor) -> str | None:
    """What is wrong with checked arguments, or None."""
    return f"x has {x.shape[1]} columns, no multiple of {form.GROUP}" if x.shape[1] % form.GROUP else None


quantize_2bit = operator(
    "quantize_2bit",
    reference,
    launch,
    {"x": Argument(FLOATS, "M K")},
    empty=empty,
    limit=limit,
    prepare=prepare,
)
