"""W2A2 for decoding: 1 to 4 tokens times 2-bit weights in groups of 32, activations quantized in the same launch.

    y[m, n] = f[n] sum_g s_w[n, g] s_x[m, g] sum_{k in g} (q_w[n, k] - z_w[n, g]) (q_x[m, k] - z_x[m, g])

x: fp16, bf16 or float32 [M, K], K a multiple of 32, quantized as by `quantize_2bit.py`; the weight in the format of
`w2a2_format.py`; y: [M, N] like x. With `index` x is [M, K'] and column k is x's column index[k], or 0 where that is
K': a layer whose channels are split. The inner sum is

    sum q_w q_x - z_w sum q_x - z_x sum q_w + 32 z_w z_x,      sum q_w = |w0| + 2 |w1|

and exact in integers; of real zeros the same in float32, which is exact as well where they have few bits. x has to be
finite: on a GPU a NaN counts as the least code, while the reference carries it to y. Bytes moved:
9.25 N K / 32 (11 with real zeros) and the vectors.

Bit planes are multiplied on the tensor cores, 8 rows times 8 groups an instruction, and nothing is unpacked. A thread
block has a range of rows, and each of its warps a share of the columns. That share of x is quantized once, while
weights are on their way, and stays in registers. Weights are loaded straight to registers, or come in bulk copies to
shared memory (compute capability 9.0 and later), which are requested before x is quantized, as many as fit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from repro.kernels import nvrtc, quantize_2bit
from repro.kernels import w2a2_format as form
from repro.kernels.launch_config import lacks, launch_config, processors
from repro.kernels.operators import FLOATS, VECTOR, Argument, operator
from repro.kernels.w2a2_format import FACTORS, UNITS

CASES = [  # tokens, output and input channels (ragged ones; Llama 3 8B and 70B), dtype, seed
    {"M": 3, "N": 19, "K": 352, "dtype": "float32", "seed": 0},
    {"M": 1, "N": 7, "K": 1056, "dtype": "float16", "seed": 1},
    {"M": 2, "N": 19, "K": 352, "dtype": "float32", "seed": 6, "real": True},
    {"M": 2, "N": 19, "K": 352, "dtype": "float32", "seed": 7, "split": 30},
    {"M": 1, "N": 4096, "K": 4096, "dtype": "bfloat16", "seed": 2},
    {"M": 1, "N": 14336, "K": 4096, "dtype": "bfloat16", "seed": 3},
    {"M": 4, "N": 4096, "K": 14336, "dtype": "bfloat16", "seed": 4},
    {"M": 1, "N": 28672, "K": 8192, "dtype": "bfloat16", "seed": 5},
]
SOURCE = Path(__file__).with_suffix(".cu")
TYPES = (torch.float16, torch.bfloat16, torch.float32)  # macro X
REGISTERS, MOST_REGISTERS = 512, 255  # of a thread that has a warp for itself on its part of an SM, and at most
TOKEN, OTHERS = 20, 50  # registers of a thread for a unit of a token, and for everything else
SHARED_TOKEN = 320  # bytes of a unit of x in shared memory
STATIC = 1024  # bytes of shared memory of a block for its mbarriers and the system
MOST_WARPS = 32  # of an SM that multiply
SPACE = []  # warps of a thread block; tiles of 8 rows in a copy, or on their way to registers; blocks of an SM
for warps in (4, 6, 7, 8, 9, 14, 16, 18, 28, 31):
    for tiles in (1, 2, 3, 4):
        for blocks in (1, 2, 3, 4, 5):
            if warps * blocks <= MOST_WARPS:
                SPACE.append({"warps": warps, "tiles": tiles, "blocks": blocks, "bulk": False})
        if tiles < 4:
            SPACE.append({"warps": warps, "tiles": tiles, "blocks": 1, "bulk": True})
CHECKED = [  # that tests on a GPU and the sanitizer run, too
    {"warps": 4, "tiles": 2, "blocks": 1, "bulk": True},
    {"warps": 4, "tiles": 3, "blocks": 2, "bulk": False},
]


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator; of a case that splits some channels its K columns are those of fewer inputs."""
    made = {**quantize_2bit.make_inputs(case, device), **form.make_weight(case, device)}
    if "split" in case:
        inputs = case["K"] - case["split"]
        index = torch.arange(case["K"]) * (inputs + 1) // case["K"]  # some twice, the last ones read 0
        made |= {"x": made["x"][:, :inputs].contiguous(), "index": index.int().to(device)}
    return made


def reference(x: Tensor, units: Tensor, factors: Tensor, index: Tensor | None = None) -> Tensor:
    """y [M, N] in the dtype of x, computed in float64 with both sides dequantized."""
    wide = x if index is None else torch.nn.functional.pad(x, (0, 1))[:, index.long()]
    return product(*quantize_2bit.reference(wide), units, factors).to(x.dtype)


def product(x_codes: Tensor, x_scales: Tensor, x_zeros: Tensor, units: Tensor, factors: Tensor) -> Tensor:
    """float64 [M, N] of quantized tokens."""
    q = form.codes_of(x_codes).view(*x_scales.shape, form.GROUP).double()
    x = (q - x_zeros.double()[..., None]) * x_scales.double()[..., None]
    return x.flatten(1) @ form.dequantize(units, factors.double(), x_scales.shape[1]).T


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("w2a2_gemv", device) or nvrtc.unavailable()


def bulk_unsupported(device: torch.device | str) -> str | None:
    """Why `device` cannot run a configuration with bulk copies, or None if it can."""
    return lacks("w2a2_gemv (bulk copies)", device, (9, 0))


def configuration(kernel: str, m: int, rows: int, columns: int, device: torch.device | str) -> dict:
    """The configuration tuned for the shape, or that of `heuristic`."""
    tuned = launch_config(kernel, f"{m}x{rows}x{columns}", device)
    if tuned:
        return tuned
    bulk = bulk_unsupported(device) is None
    return heuristic(kernel == "w2a2_ready", m, rows, columns, bulk, processors(torch.device(device)))


def heuristic(ready: bool, m: int, rows: int, columns: int, bulk: bool = True, processors: int = 132) -> dict:
    """The configuration of an untuned shape: what was fastest of some on an H200.

    One token: loads, a warp for every unit of the columns up to 31 of them, and blocks that fill an SM with 32 warps.
    Several: bulk copies, which arrive while all of them are quantized.

    Args:
        ready: activations are quantized beforehand.
        m: tokens.
        rows: N.
        columns: K.
        bulk: the device has bulk copies.
        processors: its SMs.
    """
    units = -(-columns // (form.GROUP * form.GROUPS))
    own = -(-units // (MOST_WARPS - 1))
    warps = -(-units // own)
    if m > 1:
        return {"warps": warps, "tiles": 2 if bulk and warps < 16 else 1, "blocks": 1, "bulk": bulk}
    return {"warps": warps, "tiles": 2 if own == 1 else 1, "blocks": max(1, min(3, MOST_WARPS // warps)), "bulk": False}


@dataclass(frozen=True)
class LaunchPlan:
    """One launch.

    Attributes:
        grid: thread blocks.
        threads: of a block.
        each: tiles of 8 rows that every block has, at least.
        more: blocks that have one more.
        macros: of the source.
        shared: bytes of dynamic shared memory of a block.
    """

    grid: int
    threads: int
    each: int
    more: int
    macros: dict[str, int]
    shared: int


@cache
def plan(
    tokens: int, rows: int, groups: int, real: bool, x: torch.dtype | None, gather: bool, warps: int, tiles: int,
    blocks: int, bulk: bool, processors: int, most: int,
) -> LaunchPlan:  # fmt: skip
    """How a configuration partitions a shape: with bulk copies, as many as shared memory holds, or as a block needs.

    Args:
        tokens: M.
        rows: N.
        groups: G.
        real: zeros are float16.
        x: the type of x; None: activations are quantized.
        gather: columns of x are read by `index`.
        warps: of a thread block, that multiply.
        tiles: of 8 rows in a copy, or that a warp has on their way to its registers.
        blocks: of an SM.
        bulk: weights come in bulk copies.
        processors: SMs of the device.
        most: bytes of shared memory that a block may have that is alone on its SM.

    Raises:
        ValueError: not even one copy fits.
    """
    down, across = -(-rows // form.ROWS), -(-groups // form.GROUPS)
    grid = min(down, processors * blocks)
    each, more = divmod(down, grid)
    longest, own = each + (more > 0), -(-across // warps)
    copy = tiles * across * (form.REAL_UNIT if real else form.UNIT)
    sums, copies = longest * tokens * 4 * form.ROWS * (warps | 1), -(-longest // tiles)
    room = most // blocks - STATIC - sums
    whole = bulk and copies * copy <= room  # all weights of a block are in shared memory, and are gone through again
    threads = 32 * (warps + (bulk and not whole))
    registers = min(MOST_REGISTERS, REGISTERS // -(-threads * blocks // 128))  # four parts of an SM have their own
    counts = [count for count in (4, 3, 2, 1) if tokens % count == 0] if whole else [tokens]
    fitting = [count for count in counts if count * own == 1 or TOKEN * count * own + OTHERS <= registers]
    at_a_time = fitting[0] if fitting else tokens
    rest = 0 if fitting else tokens * own * warps * SHARED_TOKEN
    stages = min((room - rest) // copy, copies) if bulk else 0
    if bulk and stages < 1:
        raise ValueError(f"w2a2_gemv: {tokens} tokens of {groups} groups do not fit {most} bytes of shared memory")
    macros = {"G": groups, "TOKENS": tokens, "X": TYPES.index(x or torch.float32), "READY": int(x is None)}
    macros |= {"GATHER": int(gather), "REAL": int(real), "WARPS": warps, "BLOCKS": blocks, "STAGES": stages}
    macros |= {"TILES": tiles, "KEPT": int(bool(fitting)), "PASS": at_a_time, "MOST": longest}
    return LaunchPlan(grid, threads, each, more, macros, stages * copy + sums + rest)


def run(y: Tensor, given: tuple[Tensor | None, ...], units: Tensor, factors: Tensor, config: dict) -> Tensor:
    """Fill y [M, N] by the kernel; x and index that do not begin at a multiple of 16 bytes are copied.

    Args:
        y: like x, or float32.
        given: x [M, K] or None, its index or None, and codes, scales and zeros of x where these are ready.
        units: of the weight.
        factors: of its rows.
        config: one of SPACE.

    Raises:
        ValueError: the device has no bulk copies, or too little shared memory for them.
    """
    x, index, *quantized = given
    x, index = aligned(x), aligned(index)
    kernel, how = prepared(
        *y.shape, groups_of(*given), units.shape[2] == form.REAL_UNIT, None if x is None else x.dtype,
        index is not None, y.device, **config,
    )  # fmt: skip
    pointers = (0 if tensor is None else tensor for tensor in (x, index, *quantized))
    columns = 0 if x is None else x.shape[1]
    kernel(how.grid, how.threads, units, factors, *pointers, y, y.shape[1], columns, how.each, how.more)
    return y


def groups_of(x: Tensor | None, index: Tensor | None, *quantized: Tensor | None) -> int:
    """G of what `run` is given."""
    if x is None:
        return quantized[1].shape[1]
    return (x.shape[1] if index is None else len(index)) // form.GROUP


def aligned(tensor: Tensor | None) -> Tensor | None:
    """The tensor, or a copy of it that begins at a multiple of 16 bytes."""
    return tensor if tensor is None or tensor.data_ptr() % VECTOR == 0 else tensor.clone()


@cache
def prepared(
    tokens: int, rows: int, groups: int, real: bool, x: torch.dtype | None, gather: bool, device: torch.device,
    **config: int,
) -> tuple[Callable[..., None], LaunchPlan]:  # fmt: skip
    """The compiled source for a shape and a configuration, and how it is launched."""
    if config["bulk"] and (sentence := bulk_unsupported(device)):
        raise ValueError(sentence)
    facts = torch.cuda.get_device_properties(device)
    sizes = facts.multi_processor_count, facts.shared_memory_per_block_optin
    how = plan(tokens, rows, groups, real, x, gather, processors=sizes[0], most=sizes[1], **config)
    return nvrtc.load(SOURCE, "w2a2_gemv", how.macros, device, how.shared), how


def launch(
    x: Tensor, units: Tensor, factors: Tensor, index: Tensor | None = None, config: dict | None = None
) -> Tensor:
    """y of the operator by the kernel, with one configuration of SPACE; its tensors are not checked."""
    return into(x.new_empty(x.shape[0], len(factors)), x, units, factors, index, config)


def into(
    y: Tensor, x: Tensor, units: Tensor, factors: Tensor, index: Tensor | None = None, config: dict | None = None
) -> Tensor:
    """The same into y [M, N], contiguous, which may be a part of a longer row."""
    given = x, index, None, None, None
    shape = x.shape[0], len(factors), groups_of(*given) * form.GROUP
    return run(y, given, units, factors, config or configuration("w2a2_gemv", *shape, x.device))


def on_cuda(x: Tensor, units: Tensor, factors: Tensor, index: Tensor | None = None) -> Tensor:
    """y of the operator by the kernel, with its tuned configuration."""
    return launch(x, units, factors, index)


def limit(x: Tensor, units: Tensor, factors: Tensor, index: Tensor | None = None) -> str | None:
    """What is wrong with checked arguments, or None."""
    if index is None:
        return quantize_2bit.limit(x) or form.misfit(x.shape[0], x.shape[1] // form.GROUP, units, factors)
    if len(index) % form.GROUP:
        return f"index has {len(index)} columns, no multiple of {form.GROUP}"
    return form.misfit(x.shape[0], len(index) // form.GROUP, units, factors)


w2a2_gemv = operator(
    "w2a2_gemv",
    reference,
    on_cuda,
    {
        "x": Argument(FLOATS, "M K"),
        "units": UNITS,
        "factors": FACTORS,
        "index": Argument((torch.int32,), "C"),
    },
    empty=lambda x, units, factors, *rest: x.new_empty(x.shape[0], len(factors)),
    limit=limit,
)
