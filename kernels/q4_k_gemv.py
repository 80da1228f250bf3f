"""Q4_K in rows times one token: the 4.5-bit baseline of SpQt, and llama.cpp's layout (arXiv 2511.04477, section 4.1).

    y[n] = sum over blocks b of 32 columns:  d s[n, b] (sum_{k in b} q[n, k] x[k]) - dmin m[n, b] (sum_{k in b} x[k])

x: fp16 or bf16 [1, K], on a CPU float32 as well; codes and headers of the weight in two planes (`q4_k_planes.py`), K a
multiple of 256; y: [1, N] like x. Bytes moved: 144 N K / 256 + (K + N) sizes of x; operations 2 N K.

A thread block has a range of rows, eight at a time, and each of its warps a share of the columns. That share of x is
prepared once, while the first weights are on their way, and stays in the warp's registers, or in shared memory where
there are too few; weights are loaded straight to registers. Codes are operand A of `mma.m16n8k16` as they are, float16
subnormals, with high nibbles as rows of their own; operand B has the inputs of sub-block n in column n, so that one
product sums eight rows for four sub-blocks. Scales and minima act in float32, once a sub-block. bf16 inputs become
float16 by a power of two a warp, which rounds those below 2^-29 of its largest. The warps of a thread block add up
once, in a fixed order.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from repro.kernels import nvrtc
from repro.kernels import q4_k_planes as planes
from repro.kernels.launch_config import LaunchPlan, lacks, launch_config, processors, registers
from repro.kernels.operators import VECTOR, operator
from repro.kernels.prepared import blank
from repro.kernels.q4_k_planes import CODES, HEADERS, SUPER, X

CASES = [  # output and input channels (ragged ones; Llama 3 8B, Llama 2 70B), dtype, seed
    {"N": 67, "K": 512, "dtype": "bfloat16", "seed": 0},
    {"N": 5, "K": 2304, "dtype": "float16", "seed": 1},
    {"N": 4096, "K": 4096, "dtype": "bfloat16", "seed": 2},
    {"N": 14336, "K": 4096, "dtype": "bfloat16", "seed": 3},
    {"N": 8192, "K": 28672, "dtype": "bfloat16", "seed": 4},
]
SOURCE = Path(__file__).with_suffix(".cu")
ROWS = 8  # of a tile
UNIT = ROWS * (planes.LINE + planes.HEADER)  # bytes of a super-block of a tile
MOST_WARPS, MOST_SHARES = 32, 8  # of an SM; super-blocks of a row that a warp has, worth trying
OF_UNIT, OF_X, OTHERS = 12, 10, 26  # registers of a thread for a unit on its way, for a super-block of x, and the rest
SHARE = 2 * SUPER + 4 * planes.BLOCKS  # bytes of a super-block of x in shared memory
DELIVERED = 40_000  # bytes that memory delivers to an SM in a microsecond
ON_THEIR_WAY = (28_000, 160_000)  # bytes of an SM that are loaded at once: the range that is worth trying
SPACE = []  # warps of a thread block; blocks of an SM; units that a warp has on their way to its registers
for warps in range(2, 29):
    for blocks in (1, 2, 3, 4, 8):
        if 14 <= warps * blocks <= MOST_WARPS:
            SPACE += [{"warps": warps, "blocks": blocks, "ahead": ahead} for ahead in (1, 2, 3, 4, 6)]
CHECKED = [  # that tests on a GPU and the sanitizer run, too
    {"warps": 3, "blocks": 2, "ahead": 4},
    {"warps": 2, "blocks": 8, "ahead": 1},
]


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator."""
    return planes.make_inputs(case, False, device)


def reference(x: Tensor, codes: Tensor, headers: Tensor) -> Tensor:
    """y [1, N] in the dtype of x, computed in float64 with the dequantized weight."""
    return (x.double() @ planes.dense(codes, headers, zigzag=False).T).to(x.dtype)


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("q4_k_gemv", device) or nvrtc.unavailable()


def heuristic(columns: int) -> dict:
    """The configuration of an untuned shape: what was fastest of some on an H200.

    Warps that have one super-block of a tile each, or two, or up to sixteen that have an even number; blocks for 32 of
    them on an SM if they have one; and units on their way that are an SM's share of what memory delivers in a
    microsecond.
    """
    supers = columns // SUPER
    splits = 2 * -(-supers // 32)
    if supers <= 20:
        splits = 1
    elif supers <= 56:
        splits = 2
    warps = max(2, -(-supers // splits))
    blocks = next(blocks for blocks in (8, 4, 3, 2, 1) if warps * blocks * splits <= MOST_WARPS or blocks == 1)
    return {"warps": warps, "blocks": blocks, "ahead": max(1, round(DELIVERED / (warps * blocks * UNIT)))}


def shares(config: dict, supers: int) -> int:
    """Super-blocks of a row per warp, rounded up to whole batches of loads, so the last one may be loaded twice."""
    mean = -(-supers // config["warps"])
    return -(-mean // config["ahead"]) * config["ahead"] if config["ahead"] < mean else mean


def kept(config: dict, supers: int) -> bool:
    """Whether a warp's share of x stays in its registers."""
    needed = OTHERS + OF_UNIT * config["ahead"] + OF_X * shares(config, supers)
    return needed <= registers(config["warps"] * config["blocks"])


def worth_trying(config: dict, columns: int) -> bool:
    """Whether a configuration of SPACE shares so many columns evenly, and registers hold what is on its way."""
    supers = columns // SUPER
    own = shares(config, supers)
    ahead = config["ahead"]
    if own > MOST_SHARES or own * config["warps"] > max(1.08 * supers, 4) or (own % ahead and ahead % own):
        return False
    few, many = ON_THEIR_WAY
    fits = OTHERS + OF_UNIT * ahead <= registers(config["warps"] * config["blocks"])
    return fits and few <= config["warps"] * config["blocks"] * ahead * UNIT <= many


def plan(rows: int, columns: int, dtype: torch.dtype, config: dict, processors: int) -> LaunchPlan:
    """The partition of a weight [N, K] on a device with so many SMs."""
    supers = columns // SUPER
    tiles = -(-rows // ROWS)
    grid = min(tiles, processors * config["blocks"])
    per_program, more = divmod(tiles, grid)
    longest = per_program + (more > 0)
    in_registers = kept(config, supers)
    macros = {"BF16": int(dtype == torch.bfloat16), "SUPERS": supers, "RAGGED": int(rows % ROWS > 0)}
    macros |= {name.upper(): value for name, value in config.items()}
    macros |= {"KEPT": int(in_registers), "EACH": per_program, "MORE": more}
    shared = longest * 4 * ROWS * (config["warps"] | 1)
    if not in_registers:
        shared += config["warps"] * shares(config, supers) * SHARE
    return LaunchPlan(grid, 32 * config["warps"], macros, shared)


def launch(x: Tensor, codes: Tensor, headers: Tensor, config: dict | None = None) -> Tensor:
    """y of the operator by the kernel, with one configuration of SPACE; its tensors are not checked."""
    return prepare(x, codes, headers, config)(x, codes, headers)


def prepare(x: Tensor, codes: Tensor, headers: Tensor, config: dict | None = None) -> Callable[..., Tensor]:
    """The launch of the operator for calls like this one, with one configuration of SPACE or the tuned one."""
    rows, columns = codes.shape[0], x.shape[1]
    config = config or launch_config("q4_k_gemv", f"{rows}x{columns}", x.device) or heuristic(columns)
    kernel, how = prepared(rows, columns, x.dtype, x.device, **config)
    step = kernel.step(how.grid, how.threads, ("codes", "headers", "x", "y", rows))
    write = kernel.in_a_row(("codes", "headers", "x", "y"), (step,))
    allocate = blank(x.dtype, 1, rows)

    def launch(x: Tensor, codes: Tensor, headers: Tensor) -> Tensor:
        if x.data_ptr() % VECTOR:
            x = x.clone()
        y = allocate(x)
        write(codes, headers, x, y)
        return y

    return launch


@cache
def prepared(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device, **config: int
) -> tuple[Callable[..., None], LaunchPlan]:
    """The compiled source for a shape and a configuration, and how it is launched."""
    how = plan(rows, columns, dtype, config, processors(device))
    return nvrtc.load(SOURCE, "q4_k_rows", how.macros, device, how.shared), how


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
    prepare=prepare,
)
