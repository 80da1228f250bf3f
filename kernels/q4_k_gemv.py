"""Q4_K in rows times one token: the 4.5-bit baseline of SpQt, and llama.cpp's layout (arXiv 2511.04477, section 4.1).

    y[n] = sum over blocks b of 32 columns:  d s[n, b] (sum_{k in b} q[n, k] x[k]) - dmin m[n, b] (sum_{k in b} x[k])

x: fp16, bf16 or float32 [1, K]; codes and headers of the weight in two planes (`q4_k_planes.py`), K a multiple of 256;
y: [1, N] like x. Bytes moved: 144 N K / 256 + (K + N) sizes of x; operations 2 N K. A program has a few rows and walks
along them: 16 bytes of codes, 32 weights, are one load. Sums are float32 in a fixed order; one program has a whole row,
so that nothing is joined. A launch configuration with `"kernel": "cuda"` runs `q4_k_cuda.py` instead, of fp16 and bf16.
"""

import torch
from torch import Tensor

from repro.kernels import q4_k_cuda
from repro.kernels import q4_k_planes as planes
from repro.kernels.launch_config import lacks, launch_config
from repro.kernels.operators import HALVES, operator
from repro.kernels.q4_k_planes import CODES, HEADERS, X, header_factors, unit_code
from repro.kernels.triton_language import tl, triton

CASES = [  # output and input channels (ragged ones; Llama 3 8B, Llama 2 70B), dtype, seed
    {"N": 67, "K": 512, "dtype": "float32", "seed": 0},
    {"N": 5, "K": 2304, "dtype": "float16", "seed": 1},
    {"N": 4096, "K": 4096, "dtype": "bfloat16", "seed": 2},
    {"N": 14336, "K": 4096, "dtype": "bfloat16", "seed": 3},
    {"N": 8192, "K": 28672, "dtype": "bfloat16", "seed": 4},
]
SPACE = []  # rows of a program; groups of 64 columns that it reads at a time; warps
for rows in (2, 4):
    for groups, warps in ((32, 1), (64, 4)):
        SPACE.append({"rows": rows, "groups": groups, "warps": warps})
SPACE += q4_k_cuda.SPACE  # Triton's are few: they reach a tenth of the read floor
DEFAULT = {"rows": 4, "groups": 64, "warps": 4}


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator."""
    return planes.make_inputs(case, False, device)


def reference(x: Tensor, codes: Tensor, headers: Tensor) -> Tensor:
    """y [1, N] in the dtype of x, computed in float64 with the dequantized weight."""
    return (x.double() @ planes.dense(codes, headers, zigzag=False).T).to(x.dtype)


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("q4_k_gemv", device)


@triton.jit
def q4_k_gemv_kernel(x, words, headers, y, N, GROUPS_K, ROWS: tl.constexpr, GROUPS: tl.constexpr):  # noqa: ANN001, ANN201
    """`words` and `headers` are 32-bit; GROUPS_K is K / 64."""
    row, word = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, 8)
    acc = tl.zeros((ROWS, GROUPS, 8), tl.float32)
    for start in range(0, GROUPS_K, GROUPS):
        group = start + tl.arange(0, GROUPS)
        seen = (row < N)[:, None] & (group < GROUPS_K)[None, :]
        place = (row * GROUPS_K)[:, None] + group[None, :]
        code = tl.load(words + place[:, :, None] * 8 + word[None, None, :], mask=seen[:, :, None], other=0)
        header = (row * GROUPS_K)[:, None] + (group // 4 * 4)[None, :]  # four words for four groups
        for h in tl.static_range(2):
            total = tl.zeros((GROUPS, 8), tl.float32)
            product = tl.zeros((ROWS, GROUPS, 8), tl.float32)
            for b in tl.static_range(4):
                column = group[:, None] * 64 + 32 * h + 4 * word[None, :] + b
                value = tl.load(x + column, mask=(group < GROUPS_K)[:, None], other=0.0).to(tl.float32)
                total += value
                product += unit_code(code, 2 * b + h) * value[None, :, :]
            scale, minimum = header_factors(headers, header, (group % 4)[None, :], seen, h)
            acc += (128.0 * scale)[:, :, None] * (product - total[None, :, :])
            acc -= minimum[:, :, None] * total[None, :, :]
    result = tl.sum(tl.sum(acc, axis=2), axis=1)
    tl.store(y + row, result.to(y.dtype.element_ty), mask=row < N)


def configuration(rows: int, columns: int, device: torch.device | str) -> dict:
    """The configuration recorded for the shape, or one for all."""
    return launch_config("q4_k_gemv", f"{rows}x{columns}", device) or DEFAULT


def launch(x: Tensor, codes: Tensor, headers: Tensor, config: dict | None = None) -> Tensor:
    """y of the operator by the kernel, with one configuration of SPACE; its tensors are not checked."""
    rows, columns = codes.shape[0], x.shape[1]
    recorded = configuration(rows, columns, x.device)
    config = config or recorded
    if config.get("kernel") == "cuda" and x.dtype in HALVES:
        return q4_k_cuda.run(x, codes, headers, q4_k_cuda.complete(config, recorded, rows, columns, x.device))
    if "kernel" in config:
        config = DEFAULT
    y = x.new_empty(1, rows)
    q4_k_gemv_kernel[(triton.cdiv(rows, config["rows"]),)](
        x, codes.view(torch.int32), headers.view(torch.int32), y, rows, columns // 64,
        ROWS=config["rows"], GROUPS=config["groups"], num_warps=config["warps"],
    )  # fmt: skip
    return y


def on_cuda(x: Tensor, codes: Tensor, headers: Tensor) -> Tensor:
    """y of the operator by the kernel, with its recorded configuration."""
    return launch(x, codes, headers)


q4_k_gemv = operator(
    "q4_k_gemv",
    reference,
    on_cuda,
    {"x": X, "codes": CODES, "headers": HEADERS},
    empty=lambda x, codes, headers: x.new_empty(1, codes.shape[0]),
    limit=lambda x, codes, headers: planes.misfit(x, codes),
)
