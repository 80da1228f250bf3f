"""y [1, N] = x [1, K] W^T in 16 bits: the uncompressed baseline of a product with one token.

x: fp16 or bf16 [1, K]; W: the same dtype [N, K], row-major; y: the same dtype, summed in float32. Bytes moved:
2 N K + 2 K + 2 N; operations: 2 N K. It is a comparison: the library's product of one token is far from the read floor
on small layers, and a 2-bit kernel is compared with the better of both.
A program has a few rows and walks along the columns; K is known when compiling, so that loads need a mask only where
the columns of a load do not divide it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from repro.kernels.launch_config import lacks, launch_config
from repro.kernels.operators import HALVES, Argument, operator
from repro.kernels.prepared import Prepared, blank
from repro.kernels.triton_language import tl, triton

CASES = [  # output and input channels (ragged ones; layers of Llama 3), dtype, seed
    {"N": 19, "K": 353, "dtype": "float16", "seed": 0},
    {"N": 1024, "K": 4096, "dtype": "bfloat16", "seed": 1},
    {"N": 14336, "K": 4096, "dtype": "bfloat16", "seed": 2},
    {"N": 4096, "K": 14336, "dtype": "float16", "seed": 3},
]
SPACE = []  # rows of a program, columns that it reads at a time, warps
for rows in (1, 2, 4, 8):
    for columns, warps in ((512, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8)):
        if rows * columns <= 8192:
            SPACE.append({"rows": rows, "columns": columns, "warps": warps})
SMALL = {"rows": 1, "columns": 2048, "warps": 4}  # 16 bytes a lane
LARGE = {"rows": 4, "columns": 1024, "warps": 4}  # 32 bytes a lane


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator."""
    generator = torch.Generator().manual_seed(case["seed"])
    weight = torch.randn(case["N"], case["K"], generator=generator) / case["K"] ** 0.5
    x = torch.randn(1, case["K"], generator=generator)
    dtype = getattr(torch, case["dtype"])
    return {"x": x.to(device, dtype), "w": weight.to(device, dtype)}


def reference(x: Tensor, w: Tensor) -> Tensor:
    """y [1, N] in the dtype of x, computed in float64."""
    return (x.double() @ w.double().T).to(x.dtype)


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("dense_gemv", device)


@triton.jit
def dense_gemv_kernel(  # noqa: ANN201
    x, w, y, N, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: ANN001
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, K, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        at = w + row[:, None] * K + column[None, :]
        if K % COLUMNS == 0:
            taken = tl.load(at, mask=(row < N)[:, None], other=0.0, eviction_policy="evict_first")
            value = tl.load(x + column)
        else:
            seen = (row < N)[:, None] & (column < K)[None, :]
            taken = tl.load(at, mask=seen, other=0.0, eviction_policy="evict_first")
            value = tl.load(x + column, mask=column < K, other=0.0)
        acc += taken.to(tl.float32) * value.to(tl.float32)[None, :]
    tl.store(y + row, tl.sum(acc, axis=1).to(y.dtype.element_ty), mask=row < N)


def configuration(rows: int, columns: int, device: torch.device | str) -> dict:
    """The configuration tuned for the shape, or one for small and one for large layers."""
    plain = SMALL if rows * columns < 1 << 24 else LARGE
    return launch_config("dense_gemv", f"{rows}x{columns}", device) or plain


def launch(x: Tensor, w: Tensor, config: dict | None = None) -> Tensor:
    """y of the operator by the kernel, with one configuration of SPACE; its tensors are not checked."""
    return prepare(x, w, config)(x, w)


def prepare(x: Tensor, w: Tensor, config: dict | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    """The launch of the operator for calls like this one, with one configuration of SPACE or the tuned one."""
    rows, columns = w.shape
    config = config or configuration(rows, columns, x.device)
    grid = (triton.cdiv(rows, config["rows"]),)
    kernel = Prepared(
        dense_gemv_kernel, grid, K=columns, ROWS=config["rows"], COLUMNS=config["columns"], num_warps=config["warps"]
    )
    allocate = blank(x.dtype, 1, rows)

    def launch(x: Tensor, w: Tensor) -> Tensor:
        y = allocate(x)
        kernel(x, w, y, rows)
        return y

    return launch


def on_cuda(x: Tensor, w: Tensor) -> Tensor:
    """y of the operator by the kernel, with its tuned configuration."""
    return launch(x, w)


dense_gemv = operator(
    "dense_gemv",
    reference,
    on_cuda,
    {"x": Argument(HALVES, "1 K"), "w": Argument("x", "N K")},
    empty=lambda x, w: x.new_empty(1, w.shape[0]),
    prepare=prepare,
)
