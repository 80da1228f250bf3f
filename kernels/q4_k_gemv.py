"""Q4_K in rows times one token: the 4.5-bit baseline of SpQt, and llama.cpp's layout (arXiv 2511.04477, section 4.1).

    y[n] = sum over blocks b of 32 columns:  d s[n, b] (sum_{k in b} q[n, k] x[k]) - dmin m[n, b] (sum_{k in b} x[k])

x: fp16 or bf16 [1, K], on a CPU float32 as well; codes and headers of the weight in two planes (`q4_k_planes.py`), K a
multiple of 256; y: [1, N] like x. Bytes moved: 144 N K / 256 + (K + N) sizes of x; operations 2 N K.

A warp reads a super-block of 16 rows at a time by asynchronous copies into a ring of its own, with its share of x.
Codes are operand A of `mma.m16n8k16` as they are, float16 subnormals; operand B has the inputs of sub-block n in column
n and zeros elsewhere, so that one product sums 16 rows for eight sub-blocks and all of its sums are used. Scales and
minima act in float32, once a sub-block. bf16 inputs become float16 by a power of two a super-block, which rounds those
below 2^-29 of the largest. The warps of a thread block divide the columns and add up once, in a fixed order; so do the
thread blocks of a `cluster` in the configuration, which send each other their sums (compute capability 9.0 and later).
"""

from pathlib import Path

import torch
from torch import Tensor

from repro.kernels import nvrtc
from repro.kernels import q4_k_planes as planes
from repro.kernels.launch_config import lacks, launch_config
from repro.kernels.operators import operator
from repro.kernels.q4_k_planes import CODES, HEADERS, SUPER, X

CASES = [  # output and input channels (ragged ones; Llama 3 8B, Llama 2 70B), dtype, seed
    {"N": 67, "K": 512, "dtype": "bfloat16", "seed": 0},
    {"N": 5, "K": 2304, "dtype": "float16", "seed": 1},
    {"N": 4096, "K": 4096, "dtype": "bfloat16", "seed": 2},
    {"N": 14336, "K": 4096, "dtype": "bfloat16", "seed": 3},
    {"N": 8192, "K": 28672, "dtype": "bfloat16", "seed": 4},
]
SOURCE = Path(__file__).with_suffix(".cu")
ROWS = 16  # of a tile
TILE = ROWS * (planes.LINE + planes.HEADER)  # bytes of a super-block of a tile
FORMS = (  # tiles of a block, super-blocks that a warp has in flight, threads of an SM
    (1, 1, 1024), (1, 2, 1024), (1, 2, 768), (1, 3, 768), (1, 3, 512), (1, 4, 512), (2, 1, 768), (2, 2, 512),
)  # fmt: skip
SPACE = []  # with warps of a block, and blocks of an SM
for warps in (2, 4, 8, 16):
    for tiles, stages, threads in FORMS:
        SPACE.append({"warps": warps, "tiles": tiles, "stages": stages, "blocks": threads // (32 * warps)})
SPACE += [config | {"cluster": 2} for config in SPACE]  # blocks that divide the columns (capability 9.0 and later)
DEFAULT = {"warps": 4, "tiles": 1, "stages": 2, "blocks": 6}  # without clusters the best in the mean of 18 shapes, H200


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator."""
    return planes.make_inputs(case, False, device)


def reference(x: Tensor, codes: Tensor, headers: Tensor) -> Tensor:
    """y [1, N] in the dtype of x, computed in float64 with the dequantized weight."""
    return (x.double() @ planes.dense(codes, headers, zigzag=False).T).to(x.dtype)


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("q4_k_gemv", device) or nvrtc.unavailable()


def launch(x: Tensor, codes: Tensor, headers: Tensor, config: dict | None = None) -> Tensor:
    """y of the operator by the kernel, with one configuration of SPACE; its tensors are not checked."""
    rows, supers = codes.shape[:2]
    config = config or launch_config("q4_k_gemv", f"{rows}x{x.shape[1]}", x.device) or DEFAULT
    if x.data_ptr() % 16:
        x = x.clone()
    y = x.new_empty(1, rows)
    function = nvrtc.load(SOURCE, "q4_k_rows", defines(x.dtype, config), x.device, shared_bytes(config))
    blocks = -(-rows // (ROWS * config["tiles"])) * config.get("cluster", 1)
    function(blocks, 32 * config["warps"], codes, headers, x, y, rows, supers)
    return y


def defines(dtype: torch.dtype, config: dict) -> dict[str, int]:
    """The macros of q4_k_gemv.cu."""
    macros = {"BF16": int(dtype == torch.bfloat16), "CLUSTER": 1}
    return macros | {name.upper(): value for name, value in config.items()}


def shared_bytes(config: dict) -> int:
    """Shared memory of a block: float32 sums and a ring of every warp."""
    tiles = config["tiles"]
    return config["warps"] * (4 * ROWS * tiles + config["stages"] * (tiles * TILE + 2 * SUPER))


def on_cuda(x: Tensor, codes: Tensor, headers: Tensor) -> Tensor:
    """y of the operator by the kernel, with its tuned configuration."""
    return launch(x, codes, headers)


q4_k_gemv = operator(
    "q4_k_gemv",
    reference,
    on_cuda,
    {"x": X, "codes": CODES, "headers": HEADERS},
    empty=lambda x, codes, headers: x.new_empty(1, codes.shape[0]),
    limit=lambda x, codes, headers: planes.misfit(x, codes),
)
