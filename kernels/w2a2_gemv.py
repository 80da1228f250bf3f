"""W2A2 for decoding: 1 to 4 tokens times 2-bit weights in groups of 32, activations quantized in the same launch.

    y[m, n] = f[n] sum_g s_w[n, g] s_x[m, g] sum_{k in g} (q_w[n, k] - z_w[n, g]) (q_x[m, k] - z_x[m, g])

x: fp16, bf16 or float32 [M, K], K a multiple of 32, quantized as by `quantize_2bit.py`; the weight in the format of
`w2a2_format.py`; y: [M, N] like x. With `index` x is [M, K'] and column k is x's column index[k], or 0 where that is
K': a layer whose channels are split. The inner sum is

    sum q_w q_x - z_w sum q_x - z_x sum q_w + 32 z_w z_x,      sum q_w = |w0| + 2 |w1|

and exact in integers; of real zeros the same in float32, which is exact as well where they have few bits. A token with
a NaN or an infinity gets NaN. Bytes moved: 9.25 N K / 32 (11 with real zeros) and the vectors.

Bit planes are multiplied on the tensor cores, 8 rows times 8 groups an instruction, and nothing is unpacked. A thread
block has a range of rows, and each of its warps a share of the columns. That share of x is quantized once, while
weights are on their way, and stays in registers. Weights are loaded straight to registers, or come in bulk copies to
shared memory (compute capability 9.0 and later), which are requested before x is quantized, as many as fit.
"""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from repro.kernels import nvrtc, quantize_2bit
from repro.kernels import w2a2_format as form
from repro.kernels.launch_config import CLUSTERS, LaunchPlan, lacks, launch_config, processors, registers
from repro.kernels.operators import FLOATS, VECTOR, Argument, checked_once, operator, tensor_check
from repro.kernels.prepared import blank
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
TOKEN, OTHERS = 20, 48  # registers of a thread for a unit of a single token, and for everything else
PAIR, BESIDE_PAIRS = 32, 40  # the same of two tokens
SHARED_TOKEN = 320  # bytes of a unit of x in shared memory
WEIGHT_BYTES = 200_000  # bytes of weights that the shared memory of an SM holds beside sums
STATIC = 1024  # bytes of shared memory of a block for its mbarriers and the system
MOST_LAYERS = 3  # of a launch, each with columns of its own
MOST_WARPS = 32  # of an SM that multiply
# Warps of a thread block; tiles of 8 rows in a copy, or on their way to registers; blocks of an SM; of a cluster.
every = []
for warps in (4, 6, 7, 8, 9, 10, 14, 16, 17, 18, 28, 31, 32):
    for tiles in (1, 2, 3, 4):
        for blocks in (1, 2, 3, 4, 5):
            if warps * blocks <= MOST_WARPS:
                every.append({"warps": warps, "tiles": tiles, "blocks": blocks, "bulk": False})
        if tiles < 4:
            every.append({"warps": warps, "tiles": tiles, "blocks": 1, "bulk": True})
KEEPING = (6, 2), (7, 2), (8, 2), (8, 1), (9, 1), (14, 1), (15, 1), (16, 1)  # warps, blocks: registers hold four tokens
for warps, blocks in KEEPING:
    for tiles in (1, 2, 3):
        for split in (1, 2, 4):
            for bulk in (False, True):
                config = {"warps": warps, "tiles": tiles, "blocks": blocks, "bulk": bulk}
                every.append(config | {"split": split} if split > 1 else config)
SPACE = []
for config in every:
    if config not in SPACE:
        SPACE.append(config)
CHECKED = [  # that tests on a GPU and the sanitizer run, too
    {"warps": 4, "tiles": 2, "blocks": 1, "bulk": True},
    {"warps": 4, "tiles": 3, "blocks": 2, "bulk": False},
]


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator; of a case that splits some channels its K columns are those of fewer inputs."""
    inputs_of_case = {**quantize_2bit.make_inputs(case, device), **form.make_weight(case, device)}
    if "split" in case:
        inputs = case["K"] - case["split"]
        index = torch.arange(case["K"]) * (inputs + 1) // case["K"]  # some twice, the last ones read 0
        inputs_of_case |= {"x": inputs_of_case["x"][:, :inputs].contiguous(), "index": index.int().to(device)}
    return inputs_of_case


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

    One token: loads, a warp for every unit of the columns up to 32 of them, and blocks that fill an SM with warps.
    Several: bulk copies, which arrive while all of them are quantized, and blocks of a cluster that share the columns
    where the registers of one do not hold what it needs of the tokens.

    Args:
        ready: activations are quantized beforehand.
        m: tokens.
        rows: N.
        columns: K.
        bulk: the device has bulk copies, and clusters.
        processors: its SMs.
    """
    units = -(-columns // (form.GROUP * form.GROUPS))
    own = -(-units // (MOST_WARPS if m == 1 else MOST_WARPS - 1))
    warps = -(-units // own)
    if m > 1 and bulk:
        return of_several(units, -(-rows // form.ROWS), processors)
    if m > 1 or own > 1:
        return {"warps": warps, "tiles": 1, "blocks": 1, "bulk": False}
    blocks = 3 if warps <= 8 else max(1, min(2, MOST_WARPS // warps))
    return {"warps": warps, "tiles": 3 if warps <= 10 else 2, "blocks": blocks, "bulk": False}


def of_several(units: int, tiles: int, processors: int) -> dict:
    """The configuration for 2 to 4 tokens, units of columns and tiles of rows of an untuned shape."""
    # All weights fit into shared memory, and no warp refills it.
    whole = tiles * units * form.UNIT <= processors * WEIGHT_BYTES
    # The registers of 16 warps and one that refills do not hold what is needed of four tokens.
    alone = 16 if whole else 15
    if units <= alone:
        split = 1
    else:
        split = 2 if units <= 32 else 4
    share = -(-units // split)
    warps = -(-share // -(-share // 16))
    if split == 1 and warps <= 8 and whole and tiles >= 6 * processors:  # three of each block
        return {"warps": warps, "tiles": 1, "blocks": 2, "bulk": True}
    config = {"warps": warps, "tiles": 2 if warps <= 8 else 1, "blocks": 1, "bulk": True}
    return config if split == 1 else config | {"split": split}


@cache
def plan(
    tokens: int, layers: tuple[int, ...], groups: int, real: bool, x: torch.dtype | None, gather: bool, warps: int,
    tiles: int, blocks: int, bulk: bool, processors: int, most: int, split: int = 1,
) -> LaunchPlan:  # fmt: skip
    """How a configuration partitions a shape: with bulk copies, as many as shared memory holds, or as a block needs.

    Args:
        tokens: M.
        layers: N, or the outputs of each layer that reads columns of its own.
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
        split: blocks of a cluster, which share the columns.

    Raises:
        ValueError: not even one copy fits, or a block of a cluster would have no columns.
    """
    down = [-(-rows // form.ROWS) for rows in layers]
    across = -(-groups // form.GROUPS)
    share = -(-across // split)  # of the units across, of a block
    if (split - 1) * share >= across:
        raise ValueError(f"w2a2_gemv: {split} thread blocks of a cluster for {across} units of columns")
    at_once = CLUSTERS[split] * processors // CLUSTERS[1] * blocks
    counts = shared_out(min(sum(down), max(1, at_once)), down)  # of blocks or clusters, by layer
    longest = max(-(-rows // count) for rows, count in zip(down, counts))
    own = -(-share // warps)
    copy = tiles * share * (form.REAL_UNIT if real else form.UNIT)
    sums = longest * tokens * 4 * form.ROWS * ((warps | 1) + split - 1)
    copies = -(-longest // tiles)
    room = most // blocks - STATIC - sums
    step = 1 if tokens * own == 1 else 2  # units of x that a warp quantizes at a time
    gathered = warps * step * form.GROUPS * form.GROUP * x.itemsize if gather else 0
    of_x = tokens * own * warps * SHARED_TOKEN  # of several tokens in any case
    room -= gathered + (of_x if tokens > 1 else 0)
    whole = bulk and copies * copy <= room  # all weights of a block are in shared memory, and are gone through again
    threads = 32 * (warps + (bulk and not whole))
    passes = [count for count in (4, 3, 2, 1) if tokens % count == 0] if whole else [tokens]
    per_thread = registers(threads // 32 * blocks)
    fitting = [count for count in passes if needed(tokens, count, own) <= per_thread]
    at_a_time = fitting[0] if fitting else tokens
    if not fitting and tokens == 1:
        room -= of_x
    in_memory = of_x if tokens > 1 or not fitting else 0
    stages = min(room // copy, copies) if bulk else 0
    if bulk and stages < 1:
        raise ValueError(f"w2a2_gemv: {tokens} tokens of {groups} groups do not fit {most} bytes of shared memory")
    macros = {"G": groups, "TOKENS": tokens, "X": TYPES.index(x or torch.float32), "READY": int(x is None)}
    macros |= {"GATHER": int(gather), "REAL": int(real), "WARPS": warps, "BLOCKS": blocks, "STAGES": stages}
    macros |= {"TILES": tiles, "KEPT": int(bool(fitting)), "PASS": at_a_time, "MOST": longest}
    macros |= {"LAYERS": len(layers), "LAYER_TILES": in_one(down), "LAYER_BLOCKS": in_one(counts), "SPLIT": split}
    return LaunchPlan(sum(counts) * split, threads, macros, stages * copy + sums + gathered + in_memory)


def needed(tokens: int, at_a_time: int, own: int) -> int:
    """Registers of a thread whose warp has so many units of the tokens that it multiplies at a time."""
    if tokens > 1:
        return PAIR * -(-at_a_time // 2) * own + BESIDE_PAIRS
    return TOKEN * own + OTHERS if own > 1 else 0


def shared_out(blocks: int, tiles: Sequence[int]) -> list[int]:
    """Thread blocks of each layer, so that the longest one has as few tiles as can be; one each at least."""
    shares = [1] * len(tiles)
    for _ in range(blocks - len(tiles)):
        longest = max(range(len(tiles)), key=lambda layer: tiles[layer] / shares[layer])
        shares[longest] += 1
    return shares


def in_one(numbers: Sequence[int]) -> int:
    """Numbers below 2^20 as one macro."""
    return sum(number << 20 * place for place, number in enumerate(numbers))


def run(
    y: Tensor,
    inputs: tuple[Tensor | None, ...],
    units: Tensor,
    factors: Tensor,
    config: dict,
    layers: tuple[int, ...] = (),
) -> Tensor:
    """Fill y [M, N] by the kernel; x and index that do not begin at a multiple of 16 bytes are copied.

    Args:
        y: like x, or float32.
        inputs: x [M, K] or None, its index or None, and codes, scales and zeros of x where these are ready.
        units: of the weight.
        factors: of its rows.
        config: one of SPACE.
        layers: outputs of each layer that reads columns of its own, whose indices follow one another in `index`.

    Raises:
        ValueError: the device has no bulk copies, or too little shared memory for them.
    """
    return runner(*y.shape, inputs, units, config, layers)(y, inputs, units, factors)


def runner(
    tokens: int,
    rows: int,
    inputs: tuple[Tensor | None, ...],
    units: Tensor,
    config: dict,
    layers: tuple[int, ...] = (),
) -> Callable[..., Tensor]:
    """What fills y [tokens, rows] as `run` does, for calls like this one; it takes y, inputs, units and factors."""
    x, index, *_ = inputs
    kernel, how = prepared(
        tokens, layers or (rows,), groups_of(*inputs, layers=len(layers) or 1), units.shape[2] == form.REAL_UNIT,
        None if x is None else x.dtype, index is not None, units.device, **config,
    )  # fmt: skip
    columns = 0 if x is None else x.shape[1]

    def fill(y: Tensor, inputs: tuple[Tensor | None, ...], units: Tensor, factors: Tensor) -> Tensor:
        x, index, *quantized = inputs
        pointers = [0 if tensor is None else tensor for tensor in (aligned(x), aligned(index), *quantized)]
        kernel(how.grid, how.threads, units, factors, *pointers, y, rows, columns)
        return y

    return fill


def groups_of(x: Tensor | None, index: Tensor | None, *quantized: Tensor | None, layers: int = 1) -> int:
    """G of what `run` is given, for so many layers with columns of their own."""
    if x is None:
        return quantized[1].shape[1]
    return (x.shape[1] if index is None else len(index) // layers) // form.GROUP


def aligned(tensor: Tensor | None) -> Tensor | None:
    """The tensor, or a copy of it that begins at a multiple of 16 bytes."""
    return tensor if tensor is None or tensor.data_ptr() % VECTOR == 0 else tensor.clone()


@cache
def prepared(
    tokens: int, layers: tuple[int, ...], groups: int, real: bool, x: torch.dtype | None, gather: bool,
    device: torch.device, **config: int,
) -> tuple[Callable[..., None], LaunchPlan]:  # fmt: skip
    """The compiled source for a shape and a configuration, and how it is launched."""
    if (config["bulk"] or config.get("split", 1) > 1) and (sentence := bulk_unsupported(device)):
        raise ValueError(sentence)
    facts = torch.cuda.get_device_properties(device)
    sizes = facts.multi_processor_count, facts.shared_memory_per_block_optin
    how = plan(tokens, layers, groups, real, x, gather, processors=sizes[0], most=sizes[1], **config)
    return nvrtc.load(SOURCE, "w2a2_gemv", how.macros, device, how.shared), how


def launch(
    x: Tensor, units: Tensor, factors: Tensor, index: Tensor | None = None, config: dict | None = None,
    layers: tuple[int, ...] = (),
) -> Tensor:  # fmt: skip
    """y of the operator by the kernel, with one configuration of SPACE; its tensors are not checked.

    Args:
        x: [M, K'].
        units, factors, index: as of the operator; of several layers one after the other.
        config: the tuned one where none is given.
        layers: outputs of each layer of x that reads columns of its own, at most three of as many columns; multiples
            of 8 except the last.
    """
    return fill(x.new_empty(x.shape[0], len(factors)), x, units, factors, index, config, layers)


def into(y: Tensor, x: Tensor, units: Tensor, factors: Tensor, index: Tensor | None = None) -> Tensor:
    """The operator into y [M, N], contiguous, which may be a part of a longer row.

    Raises:
        ValueError: tensors that do not fit together.
    """
    check_into((x.shape,), (x, units, factors, index, y))
    return fill(y, x, units, factors, index)


@checked_once
def check_into(_: tuple, tensors: tuple) -> None:
    """Raise ValueError unless the operator takes all tensors but the last, and that is what it is written to."""
    x, units, factors, index, y = tensors
    w2a2_gemv.check((x, units, factors, index))
    check_written(x, y, factors)


def fill(
    y: Tensor, x: Tensor, units: Tensor, factors: Tensor, index: Tensor | None = None, config: dict | None = None,
    layers: tuple[int, ...] = (),
) -> Tensor:  # fmt: skip
    """`launch` into y [M, N], which is not checked either."""
    inputs = x, index, None, None, None
    shape = x.shape[0], len(factors), groups_of(*inputs, layers=len(layers) or 1) * form.GROUP
    return run(y, inputs, units, factors, config or configuration("w2a2_gemv", *shape, x.device), layers)


def on_cuda(x: Tensor, units: Tensor, factors: Tensor, index: Tensor | None = None) -> Tensor:
    """y of the operator by the kernel, with its tuned configuration."""
    return launch(x, units, factors, index)


def prepare(x: Tensor, units: Tensor, factors: Tensor, index: Tensor | None = None) -> Callable[..., Tensor]:
    """The launch of the operator for calls like this one, with its tuned configuration."""
    tokens, rows, inputs = x.shape[0], len(factors), (x, index, None, None, None)
    config = configuration("w2a2_gemv", tokens, rows, groups_of(*inputs) * form.GROUP, x.device)
    fill, allocate = runner(tokens, rows, inputs, units, config), blank(x.dtype, tokens, rows)

    def launch(x: Tensor, units: Tensor, factors: Tensor, index: Tensor | None = None) -> Tensor:
        return fill(allocate(x), (x, index, None, None, None), units, factors)

    return launch


def limit(x: Tensor, units: Tensor, factors: Tensor, index: Tensor | None = None) -> str | None:
    """What is wrong with checked arguments, or None."""
    if index is None:
        return quantize_2bit.limit(x) or form.misfit(x.shape[0], x.shape[1] // form.GROUP, units, factors)
    if len(index) % form.GROUP:
        return f"index has {len(index)} columns, no multiple of {form.GROUP}"
    return form.misfit(x.shape[0], len(index) // form.GROUP, units, factors)


check_written = tensor_check("w2a2_gemv", {"x": Argument(FLOATS, "M K"), "y": Argument("x", "M N"), "factors": FACTORS})
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
    prepare=prepare,
)
