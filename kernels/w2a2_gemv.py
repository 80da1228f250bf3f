"""W2A2 for decoding: 1 to 4 tokens times 2-bit weights in groups of 32, activations quantized in the same launch.

    y[m, n] = f[n] sum_g s_w[n, g] s_x[m, g] sum_{k in g} (q_w[n, k] - z_w[n, g]) (q_x[m, k] - z_x[m, g])

x: fp16, bf16 or float32 [M, K], K a multiple of 32, quantized as by `quantize_2bit.py`; the weight in the format of
`w2a2_format.py`; y: [M, N] like x. With `index` x is [M, K'] and column k is x's column index[k], or 0 where that is
K': a layer whose channels are split. The inner sum is

    sum q_w q_x - z_w sum q_x - z_x sum q_w + 32 z_w z_x,      sum q_w = |w0| + 2 |w1|

and exact in integers; of real zeros the same in float32, which is exact as well where they have few bits. Bytes moved:
9.25 N K / 32 (11 with real zeros) and the vectors.

Both kernels multiply bit planes on the tensor cores, 16 rows times 8 groups an instruction, and unpack nothing.
w2a2_gemv.cu loads weights straight into registers: every warp has a share of the columns, whose weights are on their
way while it quantizes that share of x, in every thread block anew. w2a2_streamed.cu (compute capability 9.0 and later)
has one thread block per SM, which requests as much of the weight as its shared memory holds, in bulk copies, and
quantizes all tokens meanwhile, once. A configuration with `"kernel": "streamed"` runs it; `heuristic` says when.
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
from repro.kernels.w2a2_format import CODES, FACTORS, SCALES, ZEROS

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
SOURCE, CHUNK = Path(__file__).with_suffix(".cu"), 16  # groups that a warp takes at a time
MOST_WARPS = 16  # of a thread block of w2a2_gemv.cu, by rule
TYPES = (torch.float16, torch.bfloat16, torch.float32)  # macro X
SPACE = [{"tiles": 2, "warps": 28, "blocks": 1}]  # tiles of 16 rows of a thread block, its warps, blocks of an SM
for tiles in (1, 2, 4):
    for warps in (4, 6, 8, 9, 12, 14, 16):
        for blocks in (1, 2, 3, 4):
            if tiles * warps * blocks <= 32:
                SPACE.append({"tiles": tiles, "warps": warps, "blocks": blocks})
STREAMED_SOURCE = SOURCE.with_name("w2a2_streamed.cu")
STREAMED = []  # of the streamed kernel: warps that multiply, tiles of 8 rows in a bulk copy
for warps in (8, 16):
    for tiles in (1, 2, 4):
        STREAMED.append({"kernel": "streamed", "warps": warps, "tiles": tiles})
SPACE += STREAMED
CHECKED = [{"tiles": 2, "warps": 8, "blocks": 2}, *STREAMED]  # that tests on a GPU and the sanitizer run, too
SHARED = 200_000  # bytes of a weight that stay in the shared memory of an SM beside x and sums
LONG = 80_000  # bytes of a stage of the streamed kernel at most, of which shared memory holds two and x


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator; of a case that splits some channels its K columns are those of fewer inputs."""
    made = {**quantize_2bit.make_inputs(case, device), **form.make_weight(case, device)}
    if "split" in case:
        inputs = case["K"] - case["split"]
        index = torch.arange(case["K"]) * (inputs + 1) // case["K"]  # some twice, the last ones read 0
        made |= {"x": made["x"][:, :inputs].contiguous(), "index": index.int().to(device)}
    return made


def reference(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, factors: Tensor, index: Tensor | None = None
) -> Tensor:
    """y [M, N] in the dtype of x, computed in float64 with both sides dequantized."""
    wide = x if index is None else torch.nn.functional.pad(x, (0, 1))[:, index.long()]
    return product(*quantize_2bit.reference(wide), codes, scales, zeros, factors).to(x.dtype)


def product(
    x_codes: Tensor, x_scales: Tensor, x_zeros: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, factors: Tensor
) -> Tensor:
    """float64 [M, N] of quantized tokens."""
    q = form.codes_of(x_codes).view(*x_scales.shape, form.GROUP).double()
    x = (q - x_zeros.double()[..., None]) * x_scales.double()[..., None]
    return x.flatten(1) @ form.dequantize(codes, scales, zeros, factors.double()).T


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("w2a2_gemv", device) or nvrtc.unavailable()


def configuration(kernel: str, m: int, rows: int, columns: int, device: torch.device | str) -> dict:
    """The configuration tuned for the shape, or that of `heuristic`."""
    tuned = launch_config(kernel, f"{m}x{rows}x{columns}", device)
    if tuned:
        return tuned
    streams = streamed_unsupported(device) is None
    return heuristic(kernel == "w2a2_ready", m, rows, columns, streams, processors(torch.device(device)))


def heuristic(ready: bool, m: int, rows: int, columns: int, streams: bool = True, processors: int = 132) -> dict:
    """The configuration of an untuned shape: what was fastest of a few on nine shapes of one token on an H100.

    The streamed kernel wins with few rows, and where shared memory holds the weight and a token is long, which the
    blocks of the other kernel quantize again and again. Where 4 does not divide the groups, the other one's loads are
    short. Several tokens, and such groups, were not timed.

    Args:
        ready: activations are quantized beforehand.
        m: tokens.
        rows: N.
        columns: K.
        streams: the device runs the streamed kernel.
        processors: its SMs.
    """
    groups = -(-columns // form.GROUP)
    few, whole = rows < 16 * processors, rows * 9.25 * groups <= SHARED * processors
    wanted = groups % 4 or not ready and (m > 1 or few or whole and groups >= 256)
    if streams and wanted and (24 * m + 80) * groups <= SHARED:
        return streamed(m, rows, groups, processors)
    chunks = -(-groups // CHUNK)
    warps = -(-chunks // -(-chunks // MOST_WARPS))  # as many as chunks, or sharing them evenly
    if ready or m > 1:
        return {"tiles": 1, "warps": warps, "blocks": max(1, (32 if m == 1 else 16) // warps)}
    warps = min(8, chunks)
    return {"tiles": 2, "warps": warps, "blocks": min(8, 16 // warps)}


def streamed(m: int, rows: int, groups: int, processors: int = 132) -> dict:
    """The streamed kernel's configuration: the longest copies of which SMs have as many, two or more of them."""
    fitting = [1]
    for tiles in (2, 4):
        jobs = -(-rows // (8 * tiles))
        turns = -(-jobs // processors)
        if tiles * 74 * groups <= LONG and jobs >= 1.5 * processors and turns * processors <= 1.1 * jobs:
            fitting.append(tiles)
    short = fitting[-1] == 1 and groups > 128 or m > 1
    return {"kernel": "streamed", "warps": 16 if short else 8, "tiles": fitting[-1]}


@dataclass(frozen=True)
class LaunchPlan:
    """One launch of the streamed kernel: thread blocks and macros, bytes of shared memory among them."""

    grid: int
    macros: dict[str, int]


@cache
def plan(
    tokens: int, rows: int, groups: int, real: bool, x: torch.dtype | None, gather: bool, warps: int, tiles: int,
    processors: int, most: int,
) -> LaunchPlan:  # fmt: skip
    """How the streamed kernel partitions a shape: as many stages as shared memory holds, or as a thread block needs.

    Args:
        tokens: M.
        rows: N.
        groups: G.
        real: zeros are float16.
        x: the type of x; None: activations are quantized.
        gather: columns of x are read by `index`.
        warps: that multiply, a multiple of `tiles`.
        tiles: of 8 rows in a stage.
        processors: SMs of the device.
        most: bytes of dynamic shared memory that a thread block may have.

    Raises:
        ValueError: not even one stage fits.
    """
    high = 8 * tiles
    zeros = 2 * groups if real else -(-groups // 4)
    stage = high * 8 * groups + (high * groups + 47) // 16 * 16 + (high * zeros + 63) // 16 * 16
    sums = warps // tiles * tokens * high * 4  # of a stage
    quantized = tokens * -(-groups // 16) * 16 * 24
    jobs = -(-rows // high)
    grid = min(jobs, processors)
    stages = min((most - quantized) // (stage + sums), -(-jobs // grid))
    if stages < 1:
        raise ValueError(f"w2a2_gemv: {tokens} tokens of {groups} groups do not fit {most} bytes of shared memory")
    macros = {"G": groups, "TOKENS": tokens, "WARPS": warps, "TILES": tiles, "STAGES": stages, "REAL": int(real)}
    macros |= {"READY": int(x is None), "GATHER": int(gather), "FLOAT": int(x in (None, torch.float32))}
    macros |= {"BF16": int(x == torch.bfloat16), "SHARED": stages * (stage + sums) + quantized}
    return LaunchPlan(grid, macros)


def run(y: Tensor, given: tuple[Tensor | None, ...], weight: tuple[Tensor, ...], config: dict) -> Tensor:
    """Fill y [M, N] by a kernel, whose loads of 16 bytes need such addresses: what has others is copied.

    Args:
        y: like x, or float32.
        given: x [M, K] or None, its index or None, and codes, scales and zeros of x where these are ready.
        weight: codes, scales, zeros and factors.
        config: one of SPACE.

    Raises:
        ValueError: the device does not run the streamed kernel, or has too little shared memory for it.
    """
    x, index, *quantized = given
    given = aligned(x), aligned(index), *quantized
    weight = *(aligned(tensor) for tensor in weight[:3]), weight[3]
    (run_streamed if config.get("kernel") == "streamed" else run_direct)(y, given, weight, config)
    return y


def aligned(tensor: Tensor | None) -> Tensor | None:
    """The tensor, or a copy of it that begins at a multiple of 16 bytes."""
    return tensor if tensor is None or tensor.data_ptr() % VECTOR == 0 else tensor.clone()


def run_streamed(y: Tensor, given: tuple[Tensor | None, ...], weight: tuple[Tensor, ...], config: dict) -> None:
    """`run` by w2a2_streamed.cu."""
    if sentence := streamed_unsupported(y.device):
        raise ValueError(sentence)
    x, index = given[:2]
    codes, _, zeros, _ = weight
    (m, rows), groups = y.shape, codes.shape[2]
    device = torch.cuda.get_device_properties(y.device)
    how = plan(
        m, rows, groups, zeros.dtype == torch.float16, None if x is None else x.dtype, index is not None,
        config["warps"], config["tiles"], device.multi_processor_count,
        device.shared_memory_per_block_optin - 1024,  # the source has mbarriers in static shared memory
    )  # fmt: skip
    kernel = nvrtc.load(STREAMED_SOURCE, "w2a2_streamed", how.macros, y.device, how.macros["SHARED"])
    columns = groups * form.GROUP if x is None else x.shape[1]
    pointers = (0 if tensor is None else tensor for tensor in given)
    kernel(how.grid, 32 * config["warps"] + 32, *pointers, *weight, y, rows, columns)


def streamed_unsupported(device: torch.device | str) -> str | None:
    """Why the streamed kernel cannot run on `device`, or None if it can."""
    return lacks("w2a2_gemv (streamed)", device, (9, 0)) or nvrtc.unavailable()


def run_direct(y: Tensor, given: tuple[Tensor | None, ...], weight: tuple[Tensor, ...], config: dict) -> None:
    """`run` by w2a2_gemv.cu."""
    x, index = given[:2]
    codes, _, zeros, _ = weight
    (m, rows), groups = y.shape, codes.shape[2]
    kind = TYPES.index(y.dtype if x is None else x.dtype)
    real = zeros.dtype == torch.float16
    function = source(groups, m, kind, x is None, index is not None, real, y.device, **config)
    columns = groups * form.GROUP if x is None else x.shape[1]
    pointers = (0 if tensor is None else tensor for tensor in given)
    function(-(-rows // (16 * config["tiles"])), 32 * config["warps"], *weight, *pointers, y, rows, columns)


@cache
def source(
    groups: int, m: int, kind: int, ready: bool, split: bool, real: bool, device: torch.device, **config: int
) -> Callable[..., None]:
    """w2a2_gemv.cu, compiled for a number of groups and tokens, types, and a configuration."""
    macros = {"G": groups, "TOKENS": m, "X": kind, "READY": int(ready), "GATHER": int(split), "REAL": int(real)}
    macros |= {name.upper(): config[name] for name in ("warps", "tiles", "blocks")}
    return nvrtc.load(SOURCE, "w2a2_gemv", macros, device, 4 * config["warps"] * m * 16 * config["tiles"])


def launch(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, factors: Tensor, index: Tensor | None = None,
    config: dict | None = None,
) -> Tensor:  # fmt: skip
    """y of the operator by the kernel, with one configuration of SPACE; its tensors are not checked."""
    y = x.new_empty(x.shape[0], codes.shape[0])
    return into(y, x, codes, scales, zeros, factors, index, config)


def into(
    y: Tensor, x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, factors: Tensor, index: Tensor | None = None,
    config: dict | None = None,
) -> Tensor:  # fmt: skip
    """The same into y [M, N], contiguous, which may be a part of a longer row."""
    shape = x.shape[0], codes.shape[0], codes.shape[2] * form.GROUP
    config = config or configuration("w2a2_gemv", *shape, x.device)
    return run(y, (x, index, None, None, None), (codes, scales, zeros, factors), config)


def on_cuda(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, factors: Tensor, index: Tensor | None = None
) -> Tensor:
    """y of the operator by the kernel, with its tuned configuration."""
    return launch(x, codes, scales, zeros, factors, index)


def limit(
    x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, factors: Tensor, index: Tensor | None = None
) -> str | None:
    """What is wrong with checked arguments, or None."""
    if index is None:
        return quantize_2bit.limit(x) or form.misfit(x.shape[0], x.shape[1] // form.GROUP, codes, zeros)
    if len(index) != codes.shape[2] * form.GROUP:
        return f"index has {len(index)} columns, and codes {list(codes.shape)} have {codes.shape[2] * form.GROUP}"
    return form.misfit(x.shape[0], codes.shape[2], codes, zeros)


w2a2_gemv = operator(
    "w2a2_gemv",
    reference,
    on_cuda,
    {
        "x": Argument(FLOATS, "M K"),
        "codes": CODES,
        "scales": SCALES,
        "zeros": ZEROS,
        "factors": FACTORS,
        "index": Argument((torch.int32,), "C"),
    },
    empty=lambda x, codes, *rest: x.new_empty(x.shape[0], codes.shape[0]),
    limit=limit,
)
