"""Q4_K in rows times the listed inputs of one token: SpQt's first baseline, naive sparse in the original layout (6.1).

    y[n] = sum over the listed k of w[n, k] x[k]

x: fp16, bf16 or float32 [1, K]; codes and headers in rows and two planes (`q4_k_planes.py`); active: int32 [K + 1] of
`active_inputs`; y: [1, N] like x. In rows, listed columns lie scattered in super-blocks, whose header and codes every
row gathers: what is skipped is arithmetic and hardly a byte, because a memory sector holds 64 columns of a row.
Bytes moved: all of the planes unless fewer than one of 64 columns is listed. The paper does not print its kernel, which
branches on every weight; this one does the listed ones alone, one after the other.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from repro.kernels import q4_k_gemv
from repro.kernels import q4_k_planes as planes
from repro.kernels.active_inputs import reference as listed
from repro.kernels.launch_config import lacks, launch_config
from repro.kernels.operators import Argument, operator
from repro.kernels.prepared import Prepared, blank
from repro.kernels.q4_k_planes import CODES, HEADERS, X, header_factors
from repro.kernels.triton_language import tl, triton

CASES = [case | {"share": share} for case, share in zip(q4_k_gemv.CASES, (0.5, 0.35, 0.5, 0.5, 0.5))]
SPACE = []  # rows of a program, listed columns that it reads at a time, warps
for rows in (2, 4, 8):
    for columns, warps in ((64, 2), (128, 4), (256, 8)):
        SPACE.append({"rows": rows, "columns": columns, "warps": warps})
DEFAULT = {"rows": 4, "columns": 128, "warps": 4}
ACTIVE = Argument((torch.int32,), "count")


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator, with the list of the largest inputs."""
    return with_list(q4_k_gemv.make_inputs(case, device), case["share"])


def with_list(inputs: dict, share: float) -> dict:
    """Inputs of a dense product and the list of the `share` of x that is largest."""
    threshold = inputs["x"].abs().float().quantile(1 - share).item()
    return inputs | {"active": listed(inputs["x"], threshold)}


def only(x: Tensor, active: Tensor) -> Tensor:
    """float64 `[1, K]`: x where it is listed, else 0."""
    indices = active[1 : 1 + int(active[0])].long()
    return torch.zeros_like(x, dtype=torch.float64).index_copy(1, indices, x.double()[:, indices])


def reference(x: Tensor, codes: Tensor, headers: Tensor, active: Tensor) -> Tensor:
    """y [1, N] in the dtype of x, computed in float64 with the dequantized weight."""
    return (only(x, active) @ planes.dense(codes, headers, zigzag=False).T).to(x.dtype)


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("q4_k_naive_sparse", device)


@triton.jit
def q4_k_naive_sparse_kernel(  # noqa: ANN201
    x, codes, headers, active, y, N, SUPERS, ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: ANN001
):  # fmt: skip
    """`codes` are bytes, `headers` 32-bit words; SUPERS is K / 256."""
    row, lane = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    count = tl.load(active)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, count, COLUMNS):
        here = start + lane < count
        column = tl.load(active + 1 + start + lane, mask=here, other=0)
        value = tl.load(x + column, mask=here, other=0.0).to(tl.float32)
        inside = column % 256
        group, second = inside // 64, (inside // 32) % 2
        seen = (row < N)[:, None] & here[None, :]
        place = (row * SUPERS)[:, None] + (column // 256)[None, :]
        byte = tl.load(codes + place * 128 + (32 * group + column % 32)[None, :], mask=seen, other=0).to(tl.int32)
        q = ((byte >> (4 * second)[None, :]) & 15).to(tl.float32)
        even, even_min = header_factors(headers, place * 4, group[None, :], seen, 0)
        odd, odd_min = header_factors(headers, place * 4, group[None, :], seen, 1)
        is_odd = (second == 1)[None, :]
        acc += (tl.where(is_odd, odd, even) * q - tl.where(is_odd, odd_min, even_min)) * value[None, :]
    tl.store(y + row, tl.sum(acc, axis=1).to(y.dtype.element_ty), mask=row < N)


def launch(x: Tensor, codes: Tensor, headers: Tensor, active: Tensor, config: dict | None = None) -> Tensor:
    """y of the operator by the kernel, with one configuration of SPACE; its tensors are not checked."""
    inputs = x, codes, headers, active
    return prepare(*inputs, config)(*inputs)


def prepare(
    x: Tensor, codes: Tensor, headers: Tensor, active: Tensor, config: dict | None = None
) -> Callable[..., Tensor]:
    """The launch of the operator for calls like this one, with one configuration of SPACE or the tuned one."""
    rows, columns = codes.shape[0], x.shape[1]
    config = config or launch_config("q4_k_naive_sparse", f"{rows}x{columns}", x.device) or DEFAULT
    grid = (triton.cdiv(rows, config["rows"]),)
    kernel = Prepared(
        q4_k_naive_sparse_kernel, grid, ROWS=config["rows"], COLUMNS=config["columns"], num_warps=config["warps"]
    )
    allocate = blank(x.dtype, 1, rows)

    def launch(x: Tensor, codes: Tensor, headers: Tensor, active: Tensor) -> Tensor:
        y = allocate(x)
        kernel(x, codes, headers.view(torch.int32), active, y, rows, columns // planes.SUPER)
        return y

    return launch


def on_cuda(x: Tensor, codes: Tensor, headers: Tensor, active: Tensor) -> Tensor:
    """y of the operator by the kernel, with its tuned configuration."""
    return launch(x, codes, headers, active)


q4_k_naive_sparse = operator(
    "q4_k_naive_sparse",
    reference,
    on_cuda,
    {"x": X, "codes": CODES, "headers": HEADERS, "active": ACTIVE},
    empty=lambda x, codes, *rest: x.new_empty(1, codes.shape[0]),
    limit=lambda x, codes, headers, active: planes.misfit(x, codes) or planes.wrong_list(x, active),
    prepare=prepare,
)
