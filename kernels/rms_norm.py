"""RMSNorm with the residual sum in front of it, in the order of roundings of Transformers' LlamaRMSNorm.

    sum[t, h] = x[t, h] + residual[t, h]          y[t, h] = weight[h] * (sum[t, h] / sqrt(mean_h sum[t, h]^2 + eps))

x, residual, y, sum: fp16, bf16 or float32 [T, H] row-major, H up to 65536; weight: the same dtype [H]. The sum is
rounded to that dtype first; the norm is float32 and rounded before it is multiplied with the weight. Without a
residual, sum is a copy of x. Bytes moved, of element size s: 4 s T H + s H; 3 s T H + s H without a residual. One
Triton program normalizes one token, which stays in registers.
"""

import math
from collections.abc import Callable

import torch

from repro.kernels.launch_config import lacks
from repro.kernels.operators import FLOATS, Argument, operator
from repro.kernels.prepared import Prepared, blank
from repro.kernels.triton_language import tl, triton

CASES = [  # tokens, hidden size, residual or not, dtype, seed
    {"T": 3, "H": 257, "residual": True, "dtype": "float32", "seed": 0},
    {"T": 1, "H": 2048, "residual": True, "dtype": "bfloat16", "seed": 1},
    {"T": 1, "H": 4096, "residual": True, "dtype": "float16", "seed": 2},
    {"T": 64, "H": 4096, "residual": True, "dtype": "bfloat16", "seed": 3},
    {"T": 7, "H": 3000, "residual": False, "dtype": "float16", "seed": 4},
    {"T": 5, "H": 8192, "residual": False, "dtype": "bfloat16", "seed": 5},
]


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator: tokens that differ by powers of ten, a weight around 1."""
    generator = torch.Generator().manual_seed(case["seed"])
    shape = (case["T"], case["H"])
    dtype = getattr(torch, case["dtype"])
    size = 10.0 ** torch.randint(-2, 2, (case["T"], 1), generator=generator)
    x, residual = (torch.randn(shape, generator=generator) * size for _ in range(2))
    weight = 1 + torch.randn(case["H"], generator=generator) / 4
    inputs = {"x": x.to(device, dtype), "weight": weight.to(device, dtype), "eps": 1e-5}
    return inputs | {"residual": residual.to(device, dtype) if case["residual"] else None}


def reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, sum), both [T, H] in the dtype of x."""
    total = x.clone() if residual is None else x + residual
    wide = total.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + eps)).to(x.dtype), total


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("rms_norm", device)


@triton.jit
def rms_norm_kernel(x, residual, weight, y, total, eps, H, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
    token = tl.program_id(0).to(tl.int64) * H
    column = tl.arange(0, BLOCK)
    value = tl.load(x + token + column, mask=column < H, other=0.0)
    if residual is not None:
        value = value.to(tl.float32) + tl.load(residual + token + column, mask=column < H, other=0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty)
    tl.store(total + token + column, value, mask=column < H)
    wide = value.to(tl.float32)
    norm = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / H + eps)).to(x.dtype.element_ty)
    scale = tl.load(weight + column, mask=column < H, other=0.0).to(tl.float32)
    tl.store(y + token + column, (scale * norm.to(tl.float32)).to(x.dtype.element_ty), mask=column < H)


def launch(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, sum) of the operator, computed by the kernel; its tensors are not checked."""
    return prepare(x, weight, eps, residual)(x, weight, eps, residual)


def prepare(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The launch of the operator for calls like this one."""
    tokens, columns = x.shape
    block = triton.next_power_of_2(columns)
    kernel = Prepared(rms_norm_kernel, (tokens,), BLOCK=block, num_warps=min(max(block // 512, 1), 16))

    allocate = blank(x.dtype, tokens, columns)

    def launch(
        x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, total = allocate(x), allocate(x)
        kernel(x, residual, weight, y, total, eps, columns)
        return y, total

    return launch


def limit(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> str | None:
    """What is wrong with checked arguments, or None."""
    if not 0 <= eps < math.inf:
        return f"eps is {eps}; it is a number of 0 or more"
    return f"x has {x.shape[1]} columns; a program holds 65536" if x.shape[1] > 65536 else None


rms_norm = operator(
    "rms_norm",
    reference,
    launch,
    {"x": Argument(FLOATS, "T H"), "weight": Argument("x", "H"), "residual": Argument("x", "T H")},
    empty=lambda x, weight, eps, residual=None: (torch.empty_like(x), torch.empty_like(x)),
    limit=limit,
    prepare=prepare,
)
