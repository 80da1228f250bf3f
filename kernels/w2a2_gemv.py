"""W2A2 for decoding: 1 to 4 tokens times 2-bit weights in groups of 32, activations quantized in the same launch.

    y[m, n] = f[n] sum_g s_w[n, g] s_x[m, g] sum_{k in g} (q_w[n, k] - z_w[n, g]) (q_x[m, k] - z_x[m, g])

x: fp16, bf16 or float32 [M, K], K a multiple of 32, quantized as by `quantize_2bit.py`; the weight in the format of
`w2a2_format.py`; y: [M, N] like x. With `index` x is [M, K'] and column k is x's column index[k], or 0 where that is
K': a layer whose channels are split. The inner sum is

    sum q_w q_x - z_w sum q_x - z_x sum q_w + 32 z_w z_x,      sum q_w = |w0| + 2 |w1|

and exact in integers; of real zeros the same in float32, which is exact as well where they have few bits. Bytes moved:
9.25 N K / 32 (11 with real zeros) and the vectors.

There are two kernels of this format. A Triton program does it with ANDs and bit counts, whose number bounds it at half
of the read floor or less; it has a few rows and quantizes its token again while it walks along them. w2a2_gemv.cu
multiplies bit planes on the tensor cores, 16 rows times 8 groups an instruction; every warp has a share of the columns,
whose weights are on their way while it quantizes x. It runs where a recorded configuration is one of its own, and
everywhere with `BY_SOURCE`, which is off while its results on a GPU are not accepted.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from repro.kernels import nvrtc, quantize_2bit
from repro.kernels import w2a2_format as form
from repro.kernels.launch_config import lacks, launch_config
from repro.kernels.operators import FLOATS, VECTOR, Argument, operator
from repro.kernels.triton_language import tl, triton
from repro.kernels.w2a2_format import CODES, FACTORS, SCALES, ZEROS, count_bits, from_e4m3, quantized_group

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
SPACE = []  # rows of a program, groups that it reads at a time, warps
for rows in (4, 8, 16, 32):
    for groups, warps in ((32, 1), (32, 2), (64, 2), (64, 4), (128, 4), (128, 8)):
        SPACE.append({"rows": rows, "groups": groups, "warps": warps})
DEFAULT = {"rows": 16, "groups": 64, "warps": 4}
SOURCE, CHUNK = Path(__file__).with_suffix(".cu"), 16  # groups that a warp of the source takes at a time
MOST_WARPS = 16  # of a block of the source
BY_SOURCE = False  # whether a shape without a record runs w2a2_gemv.cu
TYPES = (torch.float16, torch.bfloat16, torch.float32)  # macro X
for tiles in (1, 2, 4):
    for warps in (4, 6, 8, 9, 12, 14, 16):
        for blocks in (1, 2, 3, 4):
            if tiles * warps * blocks <= 32:
                SPACE.append({"tiles": tiles, "warps": warps, "blocks": blocks})


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
    return lacks("w2a2_gemv", device)


@triton.jit
def w2a2_kernel(  # noqa: ANN201
    x, index, x_codes, x_scales, x_zeros, codes, scales, zeros, factors, y, N, G, Z, K,  # noqa: ANN001
    READY: tl.constexpr, SPLIT: tl.constexpr, REAL: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """READY: codes, scales and zeros of a token are read, else x [M, K] is quantized; SPLIT: its columns by `index`."""
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, 32)
    acc = tl.zeros((ROWS, GROUPS), tl.float32)
    for start in range(0, G, GROUPS):
        group = start + tl.arange(0, GROUPS)
        inside = group < G
        seen = (row < N)[:, None] & inside[None, :]
        word = codes + (row * 2 * G)[:, None] + group[None, :]
        w0 = tl.load(word, mask=seen, other=0, eviction_policy="evict_first")
        w1 = tl.load(word + G, mask=seen, other=0, eviction_policy="evict_first")
        step = from_e4m3(tl.load(scales + (row * G)[:, None] + group[None, :], mask=seen, other=0))
        if REAL:
            w_zero = tl.load(zeros + (row * Z)[:, None] + group[None, :], mask=seen, other=0.0).to(tl.float32)
        else:
            four = tl.load(zeros + (row * Z)[:, None] + (group // 4)[None, :], mask=seen, other=0).to(tl.int32)
            w_zero = (four >> (2 * (group % 4))[None, :]) & 3
        if READY:
            first = x_codes + token * 2 * G + group
            x0, x1 = tl.load(first, mask=inside, other=0), tl.load(first + G, mask=inside, other=0)
            x_scale = tl.load(x_scales + token * G + group, mask=inside, other=0.0)
            x_zero = tl.load(x_zeros + token * G + group, mask=inside, other=0)
        else:
            column, known = group[:, None] * 32 + lane[None, :], inside[:, None]
            if SPLIT:
                column = tl.load(index + column, mask=known, other=K)
                known = column < K
            value = tl.load(x + token * K + column, mask=known, other=0.0).to(tl.float32)
            x0, x1, x_scale, x_zero = quantized_group(value, lane)
        x_sum = count_bits(x0, PLAIN) + 2 * count_bits(x1, PLAIN)
        w_sum = count_bits(w0, PLAIN) + 2 * count_bits(w1, PLAIN)
        a, b, zero = x0[None, :], x1[None, :], x_zero[None, :]
        dot = count_bits(w0 & a, PLAIN) + 4 * count_bits(w1 & b, PLAIN)
        dot += 2 * (count_bits(w0 & b, PLAIN) + count_bits(w1 & a, PLAIN))
        whole = (dot - zero * w_sum).to(tl.float32) + (w_zero * (32 * zero - x_sum[None, :])).to(tl.float32)
        acc += tl.where(seen, step * x_scale[None, :] * whole, 0.0)
    result = tl.sum(acc, axis=1) * tl.load(factors + row, mask=row < N, other=0.0)
    tl.store(y + token * N + row, result.to(y.dtype.element_ty), mask=row < N)


def configuration(kernel: str, m: int, rows: int, columns: int, device: torch.device | str) -> dict:
    """The configuration recorded for the shape; else Triton's, or the source's by rule where it is switched on."""
    recorded = launch_config(kernel, f"{m}x{rows}x{columns}", device)
    if recorded:
        return recorded
    return heuristic(m, rows, columns) if BY_SOURCE else DEFAULT


def heuristic(m: int, rows: int, columns: int) -> dict:
    """A configuration of the source: one chunk of columns a warp, or as few as `MOST_WARPS` allow, all alike."""
    chunks = -(-columns // (CHUNK * form.GROUP))
    warps = -(-chunks // -(-chunks // MOST_WARPS))
    tiles = 2 if rows >= 8192 else 1  # so many that every SM has some blocks
    threads = 1024 // 32 // tiles if m == 1 else 512 // 32 // tiles  # whose registers fit an SM, in warps
    return {"tiles": tiles, "warps": warps, "blocks": max(1, threads // warps)}


def run(y: Tensor, given: tuple[Tensor | None, ...], weight: tuple, config: dict) -> Tensor:
    """Fill y [M, N] by a kernel.

    Args:
        y: the result.
        given: x and its index, and codes, scales and zeros of x where these are ready.
        weight: codes, scales, zeros and factors.
        config: one of SPACE.
    """
    codes, scales, zeros, factors = weight
    (m, rows), groups = y.shape, codes.shape[2]
    x, index = given[:2]
    columns = groups * form.GROUP if x is None else x.shape[1]
    if "tiles" in config:
        return by_source(y, given, weight, columns, config)
    w2a2_kernel[(m, triton.cdiv(rows, config["rows"]))](
        *given, codes, scales, zeros, factors, y, rows, groups, zeros.shape[1], columns,
        READY=x is None, SPLIT=index is not None, REAL=zeros.dtype == torch.float16, ROWS=config["rows"],
        GROUPS=config["groups"], PLAIN=not y.is_cuda, num_warps=config["warps"],
    )  # fmt: skip
    return y


def by_source(y: Tensor, given: tuple[Tensor | None, ...], weight: tuple, columns: int, config: dict) -> Tensor:
    """The same by w2a2_gemv.cu, whose loads of 16 bytes need such addresses."""
    (m, rows), (codes, scales, zeros, factors) = y.shape, weight
    x, index = given[:2]
    if x is not None and x.data_ptr() % VECTOR:
        x = x.clone()
    codes, scales, zeros = (t if t.data_ptr() % VECTOR == 0 else t.clone() for t in (codes, scales, zeros))
    tensors = codes, scales, zeros, factors, x, index, *given[2:]
    groups, real = codes.shape[2], zeros.dtype == torch.float16
    kind = TYPES.index(y.dtype if x is None else x.dtype)
    function = source(groups, m, kind, x is None, index is not None, real, y.device, **config)
    blocks = -(-rows // (16 * config["tiles"]))
    absent = factors  # an address that is not read
    function(blocks, 32 * config["warps"], *(absent if t is None else t for t in tensors), y, rows, columns)
    return y


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
    """y of the operator by the kernel, with its recorded configuration."""
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
