"""Decode: y [M, N] = x [M, K] W^T for a few rows x and weights of 2, 4 or 8 bits, bound by reading the weights.

    y[m, n] = sum over groups G of s[n, G] * (sum_{k in G} q[n, k] x[m, k] - z[n, G] * sum_{k in G} x[m, k])

x: float16 or bfloat16, M = 1 ... 16. W: `PackedWeight`, symmetric or not, groups of 32, 64, 128 columns or a whole row.
Bytes moved: packed.nbytes + 2 K M + 2 N M. Operations: 2 M N K, on the tensor cores, whose operand has 8 columns.

Algorithm (wna16_gemv.cu): weights are operand A of `mma.m16n8k16`, stored in the order of its registers, so that one
16-byte load (evict_first, bypassing L1) gives a lane its share of 16 rows x KB columns. A code is masked into the
mantissa of a float16 subnormal, q * 2^-24, which the tensor core multiplies exactly: one AND for two codes, no
conversion; 2^24 is part of the row's last factor. Scale and zero are applied in float32, once per group; sum x comes
from one more mma with a constant A.

A single row of bfloat16 activations uses the same path: a warp converts its columns to float16, times a power of two
chosen by the largest of them, while its weights are in flight; this rounds values of about 2^-29 of the largest. For
several rows the conversion would cost more than it saves: they stay bfloat16, codes become 128 + q, and 128 is added to
the zero.

Zeros are subtracted from sums, not from codes: products with an outlier of x are rounded even where its code equals its
zero, and so are those that are added to them. Besides the rounding of y, an output is off by at most
G 2^-23 Q s max |x| for groups of G columns, Q = 2^bits, for several rows of bfloat16 128 + 2^bits: up to 7e-3 of y was
seen where one x is 1e4 and the others are about 1. `w4a16_gemm` and `dequantize` subtract from codes.

The warps of a thread block, and on sm_90 and later the blocks of a cluster (SPLITS), split the columns of a row tile
and synchronize once, at the end. Each warp copies its own activations to shared memory while its first weights are in
flight. The time of a small layer is that of the instructions around one memory access: there every warp has one chunk
and no loop, and the number of columns is a compile-time constant.
"""

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from repro.kernels import nvrtc
from repro.kernels.launch_config import lacks, launch_config
from repro.kernels.launches import Step, behind
from repro.kernels.operators import HALVES, VECTOR, Argument, checked_once, operator, tensor_check
from repro.kernels.packing import TENSORS, TILE, PackedWeight, dequantize, misfit, pack
from repro.kernels.prepared import blank

SOURCE = Path(__file__).with_suffix(".cu")
MAX_ROWS = 16
CASES = [  # layers of Llama 3.2 1B, Llama 3.1 8B and 70B, Llama 2 7B and 13B; ragged ones
    {"rows": 2048, "columns": 2048, "bits": 4, "group": 128, "symmetric": False, "m": 1, "seed": 0},
    {"rows": 1024, "columns": 4096, "bits": 4, "group": 128, "symmetric": False, "m": 1, "seed": 1},
    {"rows": 4096, "columns": 4096, "bits": 4, "group": 128, "symmetric": False, "m": 8, "seed": 2},
    {"rows": 14336, "columns": 4096, "bits": 4, "group": 64, "symmetric": True, "m": 1, "seed": 3},
    {"rows": 4096, "columns": 11008, "bits": 2, "group": 64, "symmetric": False, "m": 1, "seed": 4},
    {"rows": 5120, "columns": 5120, "bits": 8, "group": 0, "symmetric": True, "m": 1, "seed": 5},
    {"rows": 8192, "columns": 8192, "bits": 4, "group": 0, "symmetric": False, "m": 16, "seed": 6},
    {"rows": 129, "columns": 416, "bits": 4, "group": 32, "symmetric": False, "m": 6, "seed": 7},
    {"rows": 17, "columns": 203, "bits": 8, "group": 0, "symmetric": True, "m": 3, "seed": 8},
    {"rows": 127, "columns": 320, "bits": 2, "group": 64, "symmetric": False, "m": 13, "seed": 9},
    {"rows": 40, "columns": 1056, "bits": 4, "group": 32, "symmetric": False, "m": 1, "seed": 10},
]

TAIL = {  # of a second launch: it has few SMs or, after the first, all of them at once
    **{"warps": 8, "tiles": 2, "chunk": 128},
    **{"stages": 2, "splits": 1, "blocks": 2},
}
CHUNKS = ((128, 1), (128, 2), (128, 3), (128, 4), (256, 1), (256, 2), (512, 1))  # columns, and stages in flight
THREADS = (256, 384, 640, 1024)  # of all blocks of an SM
MOST = 8192  # columns that a block may have in flight


def _space() -> list[dict[str, int]]:
    """Launch configurations that `python -m repro tune` tries; `configuration` explains them."""
    space = []
    for warps, tiles, (chunk, stages) in itertools.product((4, 6, 8, 16), (1, 2, 4), CHUNKS):
        if warps * tiles * stages * chunk > MOST:
            continue
        blocks_of_an_sm = sorted({threads // (32 * warps) for threads in THREADS} - {0})
        for splits, blocks in itertools.product((1, 2), blocks_of_an_sm):
            config = {"warps": warps, "tiles": tiles, "chunk": chunk, "stages": stages}
            space.append(config | {"splits": splits, "blocks": blocks})
    return space


SPACE = _space()
SPACE += [  # fastest at some shape of an H200 in an earlier sweep
    dict(zip(("warps", "tiles", "chunk", "stages", "splits", "blocks"), values))
    for values in (
        (2, 1, 512, 1, 2, 8), (2, 1, 768, 1, 2, 8), (4, 1, 128, 2, 1, 6), (4, 1, 128, 2, 2, 4), (4, 1, 128, 2, 2, 6),
        (4, 1, 128, 2, 2, 7), (4, 2, 128, 2, 1, 4), (4, 2, 128, 2, 2, 4), (4, 2, 128, 3, 1, 4), (4, 2, 256, 2, 1, 4),
        (8, 1, 128, 2, 1, 3), (8, 1, 128, 2, 2, 3), (8, 1, 256, 1, 1, 3), (8, 1, 256, 2, 1, 3), (8, 1, 384, 1, 1, 2),
        (12, 1, 256, 1, 1, 1),
    )
]  # fmt: skip


def make_inputs(
    case: dict, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float16
) -> tuple[Tensor, PackedWeight]:
    """Random activations x `[m, columns]` and a packed weight `[rows, columns]` of one case."""
    rng = torch.Generator().manual_seed(case["seed"])
    shape = (case["rows"], case["columns"])
    groups = shape[1] // case["group"] if case["group"] else 1
    codes = torch.randint(0, 1 << case["bits"], shape, generator=rng, dtype=torch.uint8)
    scales = torch.rand(shape[0], groups, generator=rng) * 0.01 + 0.005
    zeros = None if case["symmetric"] else torch.randint(0, 1 << case["bits"], scales.shape, generator=rng)
    x = torch.randn(case["m"], shape[1], generator=rng).to(dtype)
    tensors = [t if t is None else t.to(device) for t in (codes, scales, zeros)]
    return x.to(device), pack(*tensors, case["bits"], case["group"])


def reference(x: Tensor, packed: PackedWeight) -> Tensor:
    """float32 `[M, N]`, computed with the dequantized weight."""
    return x.float() @ dequantize(packed).T


def unsupported(device: torch.device | str) -> str | None:
    """Why the kernel cannot run on `device`, or None if it can; the operator falls back to `reference` on a CPU."""
    return lacks("wna16_gemv", device) or nvrtc.unavailable()


def configuration(rows: int, columns: int, bits: int, m: int, device: torch.device | str) -> dict[str, int]:
    """The launch configuration: tuned for this device and shape, or a heuristic.

    Returns:
        warps per thread block, tiles of 16 rows per warp, chunk (columns of a load), stages (chunks in flight), splits
        (thread blocks that split a tile's columns), blocks per SM.
    """
    batch = batch_columns(m)
    return launch_config("wna16_gemv", f"w{bits} m{batch} {rows}x{columns}", device) or heuristic(
        rows, columns, bits, batch, *_device_facts(torch.device(device))
    )


def batch_columns(m: int) -> int:
    """Columns of the tensor core's operand B that hold activations: 1, 8 or 16."""
    if m == 1:
        return 1
    return 8 if m <= 8 else 16


def _device_facts(device: torch.device) -> tuple[int, bool]:
    """(number of SMs, whether the device has thread block clusters)."""
    if device.type != "cuda":
        return 132, True
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major >= 9


def heuristic(
    rows: int, columns: int, bits: int, batch: int, processors: int = 132, clusters: bool = True
) -> dict[str, int]:
    """A configuration for an untuned shape: similar to the fastest ones of similar shapes on an H200."""
    tiles = -(-rows // TILE)
    chunks = columns // 256
    most = 12 if batch == 1 else 8
    splits = 2 if clusters and chunks > most else 1
    if batch <= 8 and rows * columns < 1 << 24 and columns % 256 == 0 and chunks <= most * splits:  # one chunk a warp
        warps = -(-chunks // splits)
        return {"warps": warps, "tiles": 1, "chunk": 256, "stages": 1, "splits": splits, "blocks": max(1, 16 // warps)}
    many = tiles >= 3 * processors  # enough for two tiles per warp, which share its activations
    warps = 4 if many or batch == 16 or batch * bits >= 64 else 8
    two = many or (batch > 1 and tiles >= 2 * processors)
    chunk = 256 if bits == 2 and batch == 1 and not two and columns % 256 == 0 else 128
    splits = 2 if clusters and 2 * tiles <= processors and columns >= 256 * warps else 1
    if batch == 1:  # threads per SM, as many as their registers allow
        threads = 768 if chunk == 128 and not two else 640
    else:
        threads = 384 if two else 512
    return {
        "warps": warps,
        "tiles": 1 + two,
        "chunk": chunk,
        "stages": 2,
        "splits": splits,
        "blocks": threads // (32 * warps),
    }


def defines(
    bits: int, group: int, columns: int, symmetric: bool, dtype: torch.dtype, m: int, config: dict[str, int]
) -> dict[str, int]:
    """The macros of wna16_gemv.cu for one weight format, activation type, number of rows and launch configuration."""
    return {
        "BITS": bits,
        "GROUP": group,
        "SYMMETRIC": int(symmetric),
        "BF16": int(dtype == torch.bfloat16),
        "COLUMNS": batch_columns(m),
        "K": columns + -columns % 8,
        **{name.upper(): config[name] for name in ("warps", "tiles", "chunk", "stages", "splits", "blocks")},
    }


def shared_bytes(macros: dict[str, int]) -> int:
    """Shared memory of a thread block: float32 partial sums of the cluster's warps and its own warps' rings."""
    bits, group, tiles, chunk = (macros[name] for name in ("BITS", "GROUP", "TILES", "CHUNK"))
    scales = 0
    if group:
        scales = chunk // group * (32 if macros["SYMMETRIC"] else 64)
    slot = tiles * (chunk * bits * 2 + scales) + macros["COLUMNS"] * chunk * 2
    partial = macros["SPLITS"] * macros["WARPS"] * tiles * TILE * macros["COLUMNS"] * 4
    return partial + macros["WARPS"] * macros["STAGES"] * slot


def launch(x: Tensor, packed: PackedWeight, config: dict[str, int]) -> Tensor:
    """Run the kernel on a CUDA device with one configuration; arguments and result as in the operator."""
    return _run(x, packed.codes, packed.scale_zero, _plan(_form(packed), x.dtype, x.shape[0], x.device, **config))


def _form(packed: PackedWeight) -> tuple:
    return packed.bits, packed.group, packed.rows, packed.columns, packed.symmetric


@cache
def _plan(form: tuple, dtype: torch.dtype, m: int, device: torch.device, part: str = "", **config: int) -> tuple:
    """(loaded kernel, grid, block, rows, padded columns) for calls of one shape, with `config` or the tuned one.

    `part` is "TAIL" for the second of two launches that run beside each other (beside.cuh).
    """
    if sentence := unsupported(device):
        raise RuntimeError(sentence)
    bits, group, rows, columns, symmetric = form
    config = config or configuration(rows, columns, bits, m, device)
    macros = defines(bits, group, columns, symmetric, dtype, m, config) | ({part: 1} if part else {})
    function = nvrtc.load(SOURCE, "wna16_gemv", macros, device, shared_bytes(macros))
    tiles = -(-rows // TILE)
    return function, -(-tiles // config["tiles"]) * config["splits"], 32 * config["warps"], rows, columns + -columns % 8


def into(x: Tensor, packed: PackedWeight, y: Tensor) -> None:
    """Write x W^T of one row into y.

    Args:
        x: float16 or bfloat16 `[1, K]`, contiguous, on a CUDA device.
        packed: the weight `[N, K]` there.
        y: `[1, N]` of x's type, as a slice of a longer row.

    Raises:
        ValueError: shapes, types or devices that do not fit together.
    """
    check_into(x, packed, y)
    _run(x, packed.codes, packed.scale_zero, _plan(_form(packed), x.dtype, 1, x.device), y)


def check_into(x: Tensor, packed: PackedWeight, y: Tensor) -> None:
    """Raise ValueError unless x, a weight and what its product is written to fit together."""
    check_tensors((x.shape, *_form(packed)), (x, packed.codes, packed.scale_zero, y))


@checked_once
def check_tensors(numbers: tuple, tensors: tuple) -> None:
    """`check_into` by the sizes of x and the weight's form, and by x, codes, scale_zero and y."""
    _, *form = numbers
    *inputs, y = tensors
    OPERATOR.check((*inputs, *form))
    check_written(inputs[0], y)
    rows = form[2]
    if y.shape[1] != rows:
        raise ValueError(f"wna16_gemv: y is {list(y.shape)}, expected [1, {rows}]")


check_written = tensor_check("wna16_gemv", {"x": Argument(HALVES, "1 K"), "y": Argument("x", "1 N")})


def prepare(
    x: Tensor, codes: Tensor, scale_zero: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool
) -> Callable[..., Tensor]:
    """The launch of the operator for calls like this one, with its tuned configuration."""
    count = x.shape[0]
    plan = _plan((bits, group, rows, columns, symmetric), x.dtype, count, x.device)
    function, grid, block, _, padded = plan
    if padded != columns or x.data_ptr() % VECTOR:
        return lambda x, codes, scale_zero, *_: _run(x, codes, scale_zero, plan)
    step = function.step(grid, block, ("codes", "scale_zero", "x", "y", rows, count))
    write = function.in_a_row(("x", "codes", "scale_zero", "y"), (step,))
    allocate = blank(x.dtype, count, rows)

    def launch(x: Tensor, codes: Tensor, scale_zero: Tensor, *_: object) -> Tensor:
        y = allocate(x)
        write(x, codes, scale_zero, y)
        return y

    return launch


def tail(x: Tensor, before: int, bits: int, group: int, rows: int, columns: int, symmetric: bool) -> Step:
    """The launch for the tokens of x from `before` on, which may overlap the first; takes x, codes, scale_zero, y.

    Rows of x are aligned to 16 bytes.
    """
    form = (bits, group, rows, columns, symmetric)
    count = x.shape[0] - before
    function, grid, block, *_ = _plan(form, x.dtype, count, x.device, "TAIL", **TAIL)
    tokens, y = (behind(name, before * width * x.element_size()) for name, width in (("x", columns), ("y", rows)))
    return function.step(grid, block, ("codes", "scale_zero", tokens, y, rows, count), beside=True)


def _run(x: Tensor, codes: Tensor, scale_zero: Tensor, plan: tuple, y: Tensor | None = None) -> Tensor:
    function, grid, block, rows, columns = plan
    if columns != x.shape[1]:
        x = pad(x, (0, columns - x.shape[1]))
    elif x.data_ptr() % VECTOR:
        x = x.clone()
    y = x.new_empty(x.shape[0], rows) if y is None else y
    function(grid, block, codes, scale_zero, x, y, rows, x.shape[0])
    return y


def on_cpu(
    x: Tensor, codes: Tensor, scale_zero: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool
) -> Tensor:
    """y [M, N] of the operator by the reference."""
    return reference(x, PackedWeight(codes, scale_zero, bits, group, rows, columns, symmetric)).to(x.dtype)


def on_cuda(
    x: Tensor, codes: Tensor, scale_zero: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool
) -> Tensor:
    """y [M, N] of the operator by the kernel, with its tuned configuration."""
    return _run(x, codes, scale_zero, _plan((bits, group, rows, columns, symmetric), x.dtype, x.shape[0], x.device))


def limit(
    x: Tensor, codes: Tensor, scale_zero: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool
) -> str | None:
    """What is wrong with checked arguments, or None."""
    if x.shape[1] != columns or x.shape[0] > MAX_ROWS:
        return f"x is {list(x.shape)}, expected [1 to {MAX_ROWS}, {columns}]"
    return misfit(codes.shape, scale_zero.shape, bits, group, rows, columns, symmetric)


OPERATOR = operator(
    "wna16_gemv",
    on_cpu,
    on_cuda,
    {"x": Argument(HALVES, "M K"), **TENSORS},
    empty=lambda x, codes, scale_zero, bits, group, rows, *_: x.new_empty(x.shape[0], rows),
    limit=limit,
    prepare=prepare,
)


def wna16_gemv(x: Tensor, packed: PackedWeight) -> Tensor:
    """x W^T for at most 16 rows.

    Args:
        x: float16 or bfloat16 `[M, K]`, M = 1 ... 16, contiguous.
        packed: the weight `[N, K]`, on the device of x.

    Returns:
        `[M, N]` of x's type. On a CPU it is computed with the dequantized weight.

    Raises:
        ValueError: shapes, types or devices that do not fit together.
    """
    return OPERATOR(x, packed.codes, packed.scale_zero, *_form(packed))
