"""The gated activation of a Llama FFN: SiLU of the gate times the up projection, in Transformers' order of roundings.

    y[t, f] = (gate[t, f] / (1 + exp(-gate[t, f]))) * up[t, f]

x: fp16, bf16 or float32 [T, 2F] row-major, a token's F gate values and then its F up values; y: the same dtype [T, F].
The SiLU is float32 and rounded to the dtype before the product. Bytes moved, of element size s: 3 s T F.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from repro.kernels.launch_config import lacks
from repro.kernels.operators import FLOATS, Argument, operator
from repro.kernels.prepared import Prepared, blank
from repro.kernels.triton_language import tl, triton

CASES = [  # tokens, FFN size, dtype, seed
    {"T": 3, "F": 129, "dtype": "float32", "seed": 0},
    {"T": 1, "F": 8192, "dtype": "bfloat16", "seed": 1},
    {"T": 1, "F": 14336, "dtype": "float16", "seed": 2},
    {"T": 64, "F": 14336, "dtype": "bfloat16", "seed": 3},
    {"T": 7, "F": 11008, "dtype": "bfloat16", "seed": 4},
    {"T": 5, "F": 1000, "dtype": "float16", "seed": 5},
]


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator: normal values of standard deviation 4, so that gates saturate on both sides."""
    generator = torch.Generator().manual_seed(case["seed"])
    x = torch.randn(case["T"], 2 * case["F"], generator=generator) * 4
    return {"x": x.to(device, getattr(torch, case["dtype"]))}


def reference(x: torch.Tensor) -> torch.Tensor:
    """y [T, F] in the dtype of x."""
    gate, up = x.chunk(2, dim=1)
    return F.silu(gate.float()).to(x.dtype) * up


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("silu_product", device)


@triton.jit
def silu_product_kernel(x, y, F, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + token * 2 * F + column, mask=column < F, other=0.0).to(tl.float32)
    up = tl.load(x + token * 2 * F + F + column, mask=column < F, other=0.0).to(tl.float32)
    silu = tl.div_rn(gate, 1 + tl.exp(-gate)).to(x.dtype.element_ty)
    tl.store(y + token * F + column, (silu.to(tl.float32) * up).to(x.dtype.element_ty), mask=column < F)


def launch(x: torch.Tensor) -> torch.Tensor:
    """y of the operator, computed by the kernel; `x` is not checked."""
    return prepare(x)(x)


def prepare(x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The launch of the operator for calls like this one."""
    count = x.shape[0]
    size = x.shape[1] // 2
    block = 256 if count * size < 1 << 18 else 1024  # few tokens: enough programs to fill the device
    grid = count, triton.cdiv(size, block)
    kernel = Prepared(silu_product_kernel, grid, BLOCK=block, num_warps=block // 128)

    allocate = blank(x.dtype, count, size)

    def launch(x: torch.Tensor) -> torch.Tensor:
        y = allocate(x)
        kernel(x, y, size)
        return y

    return launch


def limit(x: torch.Tensor) -> str | None:
    """What is wrong with checked arguments, or None."""
    return f"x has an odd number of columns, {x.shape[1]}" if x.shape[1] % 2 else None


silu_product = operator(
    "silu_product",
    reference,
    launch,
    {"x": Argument(FLOATS, "T 2F")},
    empty=lambda x: x.new_empty(x.shape[0], x.shape[1] // 2),
    limit=limit,
    prepare=prepare,
)
