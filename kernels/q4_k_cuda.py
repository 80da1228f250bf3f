"""Products with Q4_K in rows by CUDA C++ (`q4_k_cuda.cu`).

    y[n] = sum over blocks b of 32 columns:  d s[n, b] (sum_{k in b} q[n, k] x[k]) - dmin m[n, b] (sum_{k in b} x[k])

x: fp16 or bf16 [1, K], codes and headers as in `q4_k_gemv.py`, whose launch configurations choose this source by
`"kernel": "cuda"`. Bytes moved: those of `q4_k_gemv.py`.

A warp reads a super-block of 16 rows at a time by asynchronous copies into a ring of its own, with its share of x.
Codes are operand A of `mma.m16n8k16` as they are, float16 subnormals; operand B has the inputs of sub-block n in column
n and zeros elsewhere, so that one product sums 16 rows for eight sub-blocks and all of its sums are used. Scales and
minima act in float32, once a sub-block. bf16 inputs become float16 by a power of two a super-block, which rounds those
below 2^-29 of the largest. The warps of a thread block divide the columns and add up once, in a fixed order.
"""

from pathlib import Path

import torch
from torch import Tensor

from repro.kernels import nvrtc, q4_k_planes
from repro.kernels.launch_config import processors
from repro.kernels.q4_k_planes import SUPER

SOURCE = Path(__file__).with_suffix(".cu")
ROWS = 16  # of a tile
TILE = ROWS * (q4_k_planes.LINE + q4_k_planes.HEADER)  # bytes of a super-block of a tile
FORMS = (  # tiles of a block, super-blocks that a warp has in flight, threads of an SM
    (1, 1, 1024), (1, 2, 1024), (1, 2, 768), (1, 3, 768), (1, 3, 512), (1, 4, 512), (2, 1, 768), (2, 2, 512),
)  # fmt: skip
SPACE = []  # with warps of a block, and blocks of an SM
for warps in (2, 4, 8, 16):
    for tiles, stages, threads in FORMS:
        blocks = threads // (32 * warps)
        SPACE.append({"kernel": "cuda", "warps": warps, "tiles": tiles, "stages": stages, "blocks": blocks})


def heuristic(rows: int, columns: int, processors: int = 132) -> dict:
    """A configuration for an untuned shape: about 24 warps of an SM, two or more super-blocks a warp."""
    supers, tiles = columns // SUPER, -(-rows // ROWS)
    many = tiles > 8 * processors
    warps = 4 if many or supers <= 16 else 8
    return {"kernel": "cuda", "warps": warps, "tiles": 1, "stages": 2, "blocks": 24 // warps}


def run(x: Tensor, codes: Tensor, headers: Tensor, config: dict) -> Tensor:
    """y [1, N] with one configuration of SPACE."""
    if x.data_ptr() % 16:
        x = x.clone()
    rows, y = codes.shape[0], x.new_empty(1, codes.shape[0])
    function = nvrtc.load(SOURCE, "q4_k_rows", defines(x.dtype, config), x.device, shared_bytes(config))
    blocks = -(-rows // (ROWS * config["tiles"]))
    function(blocks, 32 * config["warps"], codes, headers, x, y, rows, codes.shape[1])
    return y


def complete(config: dict, recorded: dict, rows: int, columns: int, device: torch.device) -> dict:
    """A configuration with all options: what it lacks comes from the recorded one, if it is of this source."""
    like = recorded if recorded.get("kernel") == "cuda" else heuristic(rows, columns, processors(device))
    return like | config


def defines(dtype: torch.dtype, config: dict) -> dict[str, int]:
    """The macros of q4_k_cuda.cu."""
    launch = {name.upper(): config[name] for name in ("warps", "tiles", "stages", "blocks")}
    return {"BF16": int(dtype == torch.bfloat16), **launch}


def shared_bytes(config: dict) -> int:
    """Shared memory of a block: float32 sums and a ring of every warp."""
    tiles = config["tiles"]
    return config["warps"] * (4 * ROWS * tiles + config["stages"] * (tiles * TILE + 2 * SUPER))
