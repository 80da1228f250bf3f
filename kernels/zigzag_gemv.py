"""Q4_K in zigzag times one token, all of its inputs: SpQt's dense kernel (arXiv 2511.04477, section 4.2).

    y[256 R + r] = sum_k w[R, k, r] x[k],    r = 0 ... 255, of the bands R of 256 rows

x: fp16, bf16 or float32 [1, K]; codes and headers in zigzag and two planes (`q4_k_planes.py`), K any number; y: [1, N]
like x, N = `rows`, of which a last band may have fewer than 256. Bytes moved: 144 K ceil(N / 256) + (K + N) sizes of x;
operations 2 N K.

A band has only one vector of results, so that its columns are divided: `n1` programs (the paper's threadgroups) of `n2`
warps (its simdgroups), 32 and 2 unless a device's configurations say otherwise. Each program sums its columns in
float32; the last one that arrives at a band joins the sums of all. `ordered` keeps them apart in memory and adds them
up by their number, which gives the same bits at every run; without it every program adds to one vector by atomics.

`zigzag_sparse.py` and `zigzag_masked.py` run the same kernel over a part of the columns. A launch configuration with
`"kernel": "cuda"` runs all three by `zigzag_cuda.py` instead, of fp16 and bf16.
"""

import torch
from torch import Tensor

from repro.kernels import q4_k_planes as planes
from repro.kernels import zigzag_cuda
from repro.kernels.launch_config import lacks, launch_config
from repro.kernels.operators import HALVES, operator
from repro.kernels.q4_k_planes import CODES, HEADERS, SUPER, X, header_factors, unit_code
from repro.kernels.triton_language import tl, triton

CASES = [  # output and input channels (ragged ones; Llama 3 8B, Llama 2 70B), ordered sums, dtype, seed
    {"N": 300, "K": 333, "ordered": True, "dtype": "float32", "seed": 0},
    {"N": 512, "K": 97, "ordered": False, "dtype": "float16", "seed": 1},
    {"N": 4096, "K": 4096, "ordered": True, "dtype": "bfloat16", "seed": 2},
    {"N": 14336, "K": 4096, "ordered": True, "dtype": "bfloat16", "seed": 3},
    {"N": 28672, "K": 8192, "ordered": True, "dtype": "bfloat16", "seed": 4},
    {"N": 8192, "K": 28672, "ordered": True, "dtype": "bfloat16", "seed": 5},
]
SPACE = []  # programs of a band, warps of a program, columns that it reads at a time, batches of them in flight
for n1 in (16, 32, 64):
    for n2, columns in ((2, 16), (4, 32)):
        SPACE.append({"n1": n1, "n2": n2, "columns": columns, "stages": 2})
SPACE += zigzag_cuda.SPACE  # Triton's are few: they reach a third of the read floor
DEFAULT = {"n1": 32, "n2": 2, "columns": 16, "stages": 2}  # the paper's n1 and n2 (sections 4.2.2 and 6.3)
ALL, LISTED, MASKED = 0, 1, 2  # which columns are computed


def make_inputs(case: dict, device: torch.device | str = "cpu") -> dict:
    """Keywords of the operator."""
    return planes.make_inputs(case, True, device) | {"rows": case["N"], "ordered": case["ordered"]}


def reference(x: Tensor, codes: Tensor, headers: Tensor, rows: int, ordered: bool = True) -> Tensor:
    """y [1, N] in the dtype of x, computed in float64 with the dequantized weight."""
    return (x.double() @ planes.dense(codes, headers, zigzag=True)[:rows].T).to(x.dtype)


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("zigzag_gemv", device)


@triton.jit
def zigzag_kernel(  # noqa: ANN201, PLR0915  the eight sums stay in registers, each by its name
    x, words, headers, active, y, parts, tickets, N, K, threshold,  # noqa: ANN001
    MODE: tl.constexpr, ORDERED: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`words` and `headers` are 32-bit. `parts`: sums by band, of every program if ORDERED; `tickets`: zeros, a band.

    MODE: 0 all columns; 1 the listed ones, of which every program gets as many; 2 those above the threshold among the
    columns of each program, all of which have as many.
    """
    band, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane, group, word = tl.arange(0, COLUMNS), tl.arange(0, 4), tl.arange(0, 8)
    count = K
    if MODE == 1:
        count = tl.load(active)
    start = (count.to(tl.int64) * part // SPLITS).to(tl.int32)
    end = (count.to(tl.int64) * (part + 1) // SPLITS).to(tl.int32)

    zero = tl.zeros((COLUMNS, 4, 8), tl.float32)
    a0, a1, a2, a3, a4, a5, a6, a7 = zero, zero, zero, zero, zero, zero, zero, zero
    base0, base1 = tl.zeros((COLUMNS, 4), tl.float32), tl.zeros((COLUMNS, 4), tl.float32)
    for position in tl.range(start, end, COLUMNS, num_stages=STAGES):
        here = position + lane < end
        column = position + lane
        if MODE == 1:
            column = tl.load(active + 1 + position + lane, mask=here, other=0)
        value = tl.load(x + column, mask=here, other=0.0).to(tl.float32)
        if MODE == 2:
            here = here & ((tl.abs(value) <= threshold) == 0)
            value = tl.where(here, value, 0.0)
        place = band * K + column
        at = (place * 32)[:, None, None] + (8 * group)[None, :, None] + word[None, None, :]
        code = tl.load(words + at, mask=here[:, None, None], other=0, eviction_policy="evict_first")
        scale0, minimum0 = header_factors(headers, (place * 4)[:, None], group[None, :], here[:, None], 0)
        scale1, minimum1 = header_factors(headers, (place * 4)[:, None], group[None, :], here[:, None], 1)
        scale0, scale1 = scale0 * value[:, None], scale1 * value[:, None]
        base0 += scale0 + minimum0 * value[:, None] * 0.0078125
        base1 += scale1 + minimum1 * value[:, None] * 0.0078125
        even, odd = scale0[:, :, None], scale1[:, :, None]
        a0 += even * unit_code(code, 0)
        a1 += odd * unit_code(code, 1)
        a2 += even * unit_code(code, 2)
        a3 += odd * unit_code(code, 3)
        a4 += even * unit_code(code, 4)
        a5 += odd * unit_code(code, 5)
        a6 += even * unit_code(code, 6)
        a7 += odd * unit_code(code, 7)

    row = (64 * group)[:, None] + 4 * word[None, :]  # of code 0; the others are 32 (j % 2) + j // 2 after it
    out = parts + band * 256 + row
    if ORDERED:
        out = parts + (band * SPLITS + part) * 256 + row
    keep_sum(out, a0, base0, 0, ORDERED)
    keep_sum(out, a1, base1, 1, ORDERED)
    keep_sum(out, a2, base0, 2, ORDERED)
    keep_sum(out, a3, base1, 3, ORDERED)
    keep_sum(out, a4, base0, 4, ORDERED)
    keep_sum(out, a5, base1, 5, ORDERED)
    keep_sum(out, a6, base0, 6, ORDERED)
    keep_sum(out, a7, base1, 7, ORDERED)

    tl.debug_barrier()  # every thread's sums are there before the program arrives
    arrived = tl.atomic_add(tickets + band, 1, sem="acq_rel")
    if arrived == SPLITS - 1:
        tl.debug_barrier()
        join_parts(parts, y, band, N, ORDERED, SPLITS)
        tl.store(tickets + band, 0)


@triton.jit
def join_parts(parts, y, band, N, ORDERED: tl.constexpr, SPLITS: tl.constexpr):  # noqa: ANN001, ANN201
    """The results of a band from the sums of its programs; what atomics add to is left as zeros."""
    row = tl.arange(0, 256)
    total = tl.zeros((256,), tl.float32)
    if ORDERED:
        for part in range(SPLITS):
            total += tl.load(parts + (band * SPLITS + part) * 256 + row, cache_modifier=".cg")
    else:
        total = tl.load(parts + band * 256 + row, cache_modifier=".cg")
        tl.store(parts + band * 256 + row, tl.zeros((256,), tl.float32))
    tl.store(y + band * 256 + row, total.to(y.dtype.element_ty), mask=band * 256 + row < N)


@triton.jit
def keep_sum(out, acc, base, J: tl.constexpr, ORDERED: tl.constexpr):  # noqa: ANN001, ANN201
    """Write or add the sums over the columns of a program for code J of every word."""
    total = 128.0 * tl.sum(acc - base[:, :, None], axis=0)
    at = out + 32 * (J % 2) + J // 2
    if ORDERED:
        tl.store(at, total)
    else:
        tl.atomic_add(at, total, sem="relaxed")


def configuration(kernel: str, rows: int, columns: int, device: torch.device | str) -> dict:
    """The configuration recorded for the shape, or the paper's n1 and n2."""
    return launch_config(kernel, f"{rows}x{columns}", device) or DEFAULT


def run(
    kernel: str, mode: int, x: Tensor, codes: Tensor, headers: Tensor, rows: int, ordered: bool,
    active: Tensor | None = None, threshold: float = 0.0, config: dict | None = None,
) -> Tensor:  # fmt: skip
    """y [1, N] of one of the three zigzag kernels, with a configuration of SPACE or that recorded for `kernel`."""
    bands, columns = codes.shape[:2]
    recorded = configuration(kernel, rows, columns, x.device)
    config = config or recorded
    by_cuda = config.get("kernel") == "cuda" and x.dtype in HALVES
    if by_cuda:
        config = zigzag_cuda.complete(config, recorded, bands, columns, x.device)
    elif "kernel" in config:
        config = DEFAULT
    splits, name = config["n1"], "zigzag ordered" if ordered else "zigzag"
    parts = scratch_parts(name, bands * SUPER * (splits if ordered else 1), x.device)
    tickets = planes.scratch("zigzag tickets", bands, torch.int32, x.device)
    if by_cuda:
        return zigzag_cuda.run(mode, x, codes, headers, rows, ordered, active, threshold, config, parts, tickets)
    y = x.new_empty(1, rows)
    zigzag_kernel[(bands, splits)](
        x, codes.view(torch.int32), headers.view(torch.int32), active, y, parts, tickets, rows, columns, threshold,
        MODE=mode, ORDERED=ordered, SPLITS=splits, COLUMNS=config["columns"], STAGES=config["stages"],
        num_warps=config["n2"],
    )  # fmt: skip
    return y


def scratch_parts(name: str, count: int, device: torch.device) -> Tensor:
    """float32 memory for the sums of programs."""
    return planes.scratch(name, count, torch.float32, device)


def launch(
    x: Tensor, codes: Tensor, headers: Tensor, rows: int, ordered: bool = True, config: dict | None = None
) -> Tensor:
    """y of the operator by the kernel, with one configuration of SPACE; its tensors are not checked."""
    return run("zigzag_gemv", ALL, x, codes, headers, rows, ordered, config=config)


def on_cuda(x: Tensor, codes: Tensor, headers: Tensor, rows: int, ordered: bool = True) -> Tensor:
    """y of the operator by the kernel, with its recorded configuration."""
    return launch(x, codes, headers, rows, ordered)


zigzag_gemv = operator(
    "zigzag_gemv",
    reference,
    on_cuda,
    {"x": X, "codes": CODES, "headers": HEADERS},
    empty=lambda x, codes, headers, rows, *_, **more: x.new_empty(1, rows),
    limit=lambda x, codes, headers, rows, ordered=True: planes.misfit(x, codes, rows),
)
