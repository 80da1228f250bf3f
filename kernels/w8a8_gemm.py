"""W8A8 GEMM for prefill: int8 weights and int8 activations on the int8 tensor cores, scales in the epilogue.

    y[m, n] = (sum_k x_q[m, k] * w_q[n, k]) * s_x[m] * s_w[n]

x_q: int8 [M, K], s_x: float32 [M] (one per token, from `quantize_activation`). w_q: int8 [N, K] row-major, s_w:
float32 [N] (one per output channel). y: fp16 or bf16 [M, N]. The sum is exact in int32. Operations: 2 M N K; bytes
moved at least N K + M K + 2 M N + 4 (M + N).

Tiles are loaded through tensor descriptors (TMA if the device has it) when K is a multiple of 16, otherwise through
masked pointers. With few tiles SPLIT programs split the K of one tile: int32 partial sums go to a workspace, and a
second kernel adds and scales them; the result does not depend on SPLIT. Behind the quantizer of `w8a8.py`, which sets
a counter to 0 for every tile, the program that comes last to a tile adds the others' sums to its own, and there is no
second kernel. With SWAP the weights are operand A, which wastes less of the tensor cores when M is small.
"""

from collections.abc import Callable

import torch

from repro.kernels import quantize_activation
from repro.kernels.launch_config import lacks, launch_config
from repro.kernels.operators import HALVES, VECTOR, Argument, operator, plain
from repro.kernels.prepared import InARow, Prepared, blank, scratch
from repro.kernels.quantize_activation import Workspace, aligned, part_of, workspace
from repro.kernels.triton_language import TensorDescriptor, tl, triton

MAX_COLUMNS = 133_000  # 127 * 127 * K stays below 2^31
MOST_JOINED = 6144  # sums that one program adds
ADDED = 1024  # channels of a program that adds the sums of the splits

CASES = [  # tokens, output channels, input channels (Llama 3.2 1B, 3.1 8B, 2 13B and ragged ones), dtype, seed
    {"M": 128, "N": 4096, "K": 4096, "dtype": "bfloat16", "seed": 0},
    {"M": 512, "N": 14336, "K": 4096, "dtype": "bfloat16", "seed": 1},
    {"M": 2048, "N": 4096, "K": 14336, "dtype": "float16", "seed": 2},
    {"M": 300, "N": 1000, "K": 2064, "dtype": "float16", "seed": 3},
    {"M": 17, "N": 129, "K": 127, "dtype": "bfloat16", "seed": 4},
    {"M": 65, "N": 127, "K": 1001, "dtype": "float16", "seed": 5},
]
TILES = [  # of a program: tokens, channels and columns, whether x is the second factor, warps, tiles in flight; splits
    (16, 64, 256, True, 4, 4, (1, 2, 4, 8)),
    (16, 64, 512, True, 4, 3, (1, 2, 4)),
    (32, 64, 256, True, 4, 4, (1, 2, 4, 8)),
    (64, 64, 256, True, 4, 4, (1, 2, 4, 8)),
    (64, 128, 128, True, 4, 5, (1, 2, 4)),
    (128, 64, 128, False, 4, 5, (1, 2, 4)),
    (128, 128, 256, False, 8, 3, (1, 2, 4)),
    (128, 128, 128, False, 4, 3, (1, 2)),
    (128, 128, 128, True, 4, 3, (1,)),
    (256, 128, 128, False, 8, 4, (1,)),
    (256, 128, 128, True, 8, 4, (1,)),
    (128, 256, 128, False, 8, 4, (1, 2)),
]
SPACE = []  # with the programs that split a tile's columns
for m, n, k, swap, warps, stages, splits in TILES:
    for split in splits:
        tile = {"m": m, "n": n, "k": k, "split": split, "swap": swap, "warps": warps, "stages": stages}
        SPACE.append(tile)


def make_inputs(case: dict, device: torch.device | str = "cpu") -> tuple[torch.Tensor, ...]:
    """(x_q, s_x, w_q, s_w): random codes and scales of one case."""
    generator = torch.Generator().manual_seed(case["seed"])
    m, n, k = case["M"], case["N"], case["K"]
    x_q = torch.randint(-127, 128, (m, k), dtype=torch.int8, generator=generator)
    w_q = torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=generator)
    s_x = torch.rand(m, generator=generator) * 0.05 + 0.001
    s_w = torch.rand(n, generator=generator) * 0.001 + 0.0001
    return x_q.to(device), s_x.to(device), w_q.to(device), s_w.to(device)


def reference(x_q: torch.Tensor, s_x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor) -> torch.Tensor:
    """y [M, N] in float32: dequantize, then multiply."""
    return (x_q.float() * s_x[:, None]) @ (w_q.float() * s_w[:, None]).T


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("w8a8_gemm", device)


@triton.jit
def tile(source, row, k, rows, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIPTOR: tl.constexpr):  # noqa: ANN001, ANN201
    """ROWS x COLUMNS codes from (row, k) on, 0 outside the matrix; `source` is a descriptor or a pointer."""
    if DESCRIPTOR:
        return source.load([row, k])
    else:
        r = row + tl.arange(0, ROWS)[:, None]
        c = k + tl.arange(0, COLUMNS)[None, :]
        return tl.load(source + r.to(tl.int64) * K + c, mask=(r < rows) & (c < K), other=0)


@triton.jit
def store_scaled(y, acc, s_x, s_w, row, column, M, N):  # noqa: ANN001, ANN201
    """y[row, column] = acc * s_x * s_w inside the matrix; `row` and `column` broadcast to acc's shape."""
    s_m = tl.load(s_x + row, mask=row < M, other=0.0)
    s_n = tl.load(s_w + column, mask=column < N, other=0.0)
    value = acc.to(tl.float32) * s_m * s_n
    tl.store(y + row.to(tl.int64) * N + column, value.to(y.dtype.element_ty), mask=(row < M) & (column < N))


@triton.jit
def w8a8_gemm_kernel(  # noqa: ANN201
    x_q, w_q, s_x, s_w, y, partial, M, N, K,  # noqa: ANN001
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLIT: tl.constexpr, SWAP: tl.constexpr, DESCRIPTOR: tl.constexpr,
    SCALES_AT: tl.constexpr, COUNTERS_AT: tl.constexpr, SUMS_AT: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    # Grouped order, so that concurrent programs share tiles in L2: all row tiles of eight column tiles at a time.
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    band = tl.program_id(0) // (8 * tiles_m)
    width = min(tiles_n - band * 8, 8)
    inside = tl.program_id(0) % (8 * tiles_m)
    row, column = inside // width * BM, (band * 8 + inside % width) * BN

    steps = tl.cdiv(tl.cdiv(K, BK), SPLIT)
    first = tl.program_id(1) * steps
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), dtype=tl.int32)
    for step in range(first, min(first + steps, tl.cdiv(K, BK))):
        a = tile(x_q, row, step * BK, M, K, BM, BK, DESCRIPTOR)
        b = tile(w_q, column, step * BK, N, K, BN, BK, DESCRIPTOR)
        if SWAP:
            acc = tl.dot(b, a.T, acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(a, b.T, acc, out_dtype=tl.int32)

    workspace = s_x
    if SCALES_AT > 0:
        s_x = part_of(workspace, SCALES_AT, tl.float32)
    m = row + (tl.arange(0, BM)[None, :] if SWAP else tl.arange(0, BM)[:, None])
    n = column + (tl.arange(0, BN)[:, None] if SWAP else tl.arange(0, BN)[None, :])
    if SPLIT == 1:
        store_scaled(y, acc, s_x, s_w, m, n, M, N)
    elif JOINED:
        # Whole tiles in the order of acc: nobody else reads them.
        place = tl.arange(0, acc.shape[0])[:, None] * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]
        sums = part_of(workspace, SUMS_AT, tl.int32) + tl.program_id(0).to(tl.int64) * SPLIT * BM * BN + place
        tl.store(sums + tl.program_id(1) * BM * BN, acc)
        tl.debug_barrier()  # every thread of this program has written
        counter = part_of(workspace, COUNTERS_AT, tl.int32) + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLIT - 1:
            for other in tl.static_range(SPLIT):
                acc += tl.load(sums + other * BM * BN, mask=tl.program_id(1) != other, other=0)
            store_scaled(y, acc, s_x, s_w, m, n, M, N)
    else:
        if SUMS_AT > 0:
            partial = part_of(workspace, SUMS_AT, tl.int32)
        share = tl.program_id(1).to(tl.int64) * M * N
        tl.store(partial + share + m.to(tl.int64) * N + n, acc, mask=(m < M) & (n < N))


@triton.jit
def add_partial_sums_kernel(  # noqa: ANN201
    partial, s_x, s_w, y, M, N,  # noqa: ANN001
    SPLIT: tl.constexpr, BLOCK: tl.constexpr, SCALES_AT: tl.constexpr, SUMS_AT: tl.constexpr,
):  # fmt: skip
    if SUMS_AT > 0:
        partial, s_x = part_of(s_x, SUMS_AT, tl.int32), part_of(s_x, SCALES_AT, tl.float32)
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), dtype=tl.int32)
    for split in tl.static_range(SPLIT):
        acc += tl.load(partial + (split * M + row).to(tl.int64) * N + column, mask=column < N, other=0)
    store_scaled(y, acc, s_x, s_w, row, column, M, N)


def heuristic(m: int, n: int, k: int) -> dict:
    """A configuration for a shape without a tuned one: tiles that hold m, split until about 128 programs run."""
    tile = next((rows for rows, most in ((16, 16), (32, 32), (64, 256)) if m <= most), 128)
    config = next(c for c in SPACE if c["m"] == tile and (tile < 128 or c["n"] == 128)) | {"split": 1}
    tiles = triton.cdiv(m, config["m"]) * triton.cdiv(n, config["n"])
    while config["split"] < 4 and tiles * config["split"] <= 64 and k // config["k"] >= 8 * config["split"]:
        config["split"] *= 2
    return config


def tuning_key(case: dict) -> str:
    """The key of a case's shape in the tuned configurations: M rounded up to 16, 32, ... 2048, then N and K."""
    bucket = min(max(16, triton.next_power_of_2(case["M"])), 2048)
    return f"{bucket}x{case['N']}x{case['K']}"


def configuration(m: int, n: int, k: int, device: torch.device | str) -> dict:
    """The configuration tuned for the shape, or a heuristic."""
    return launch_config("w8a8_gemm", tuning_key({"M": m, "N": n, "K": k}), device) or heuristic(m, n, k)


def launch(
    x_q: torch.Tensor, s_x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor, config: dict,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:  # fmt: skip
    """y [M, N] in `dtype` with one configuration of SPACE; arguments as in the operator, unchecked."""
    return prepared(x_q, w_q, config, dtype)(x_q, s_x, w_q, s_w)


def prepared(x_q: torch.Tensor, w_q: torch.Tensor, config: dict, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """The launches with one configuration for tensors like these; they take x_q, s_x, w_q and s_w first."""
    m, k = x_q.shape
    n = w_q.shape[0]
    split = config["split"]
    kernel = prepared_product((m, k), w_q, config, aligned(x_q, w_q))
    make_y = blank(dtype, m, n)
    make_sums = blank(torch.int32, split, m, n)
    add = prepared_adding(m, n, split)

    def launch(
        x_q: torch.Tensor, s_x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor, *_: torch.dtype
    ) -> torch.Tensor:
        y = make_y(s_x)
        partial = make_sums(s_x) if split > 1 else None
        kernel(x_q, w_q, s_x, s_w, y, partial, m, n, k)
        if split > 1:
            add(partial, s_x, s_w, y, m, n)
        return y

    return launch


def prepared_adding(m: int, n: int, split: int, where: Workspace | None = None) -> Prepared:
    """The second kernel: takes the sums of the splits, s_x, s_w, y, M and N; with a workspace None and that first."""
    scales, sums = (where.scales, where.sums) if where else (0, 0)
    return Prepared(
        add_partial_sums_kernel, (m, triton.cdiv(n, ADDED)), SPLIT=split, BLOCK=ADDED, SCALES_AT=scales, SUMS_AT=sums
    )


def prepared_product(
    shape: tuple[int, int], w_q: torch.Tensor, config: dict, descriptor: bool, where: Workspace | None = None,
    joined: bool = False,
) -> Prepared:  # fmt: skip
    """The first kernel for codes of x of a shape: takes x_q, w_q, s_x, s_w, y, sums or None, M, N and K.

    With a workspace it takes that for x_q and s_x, and None for the sums; only then may tiles be joined.
    """
    m, k = shape
    n = w_q.shape[0]
    tiles = triton.cdiv(m, config["m"]) * triton.cdiv(n, config["n"])
    matrices = [described((m, k), config["m"], config["k"]), described((n, k), config["n"], config["k"])]
    scales, counters, sums = (where.scales, where.counters, where.sums) if where else (0, 0, 0)
    return Prepared(
        w8a8_gemm_kernel, (tiles, config["split"]), matrices if descriptor else (),
        BM=config["m"], BN=config["n"], BK=config["k"], SPLIT=config["split"], SWAP=config["swap"],
        DESCRIPTOR=descriptor, SCALES_AT=scales, COUNTERS_AT=counters, SUMS_AT=sums, JOINED=joined,
        num_warps=config["warps"], num_stages=config["stages"],
    )  # fmt: skip


def is_joined(config: dict) -> bool:
    """Whether, after a quantizer, no launch adds a tile's partial sums: its last program does, or there are none.

    On an H200 this takes the device at most 1.02 of the time of a launch for them up to 6,144 sums, 1.03 to 1.2 beyond.
    """
    return config["m"] * config["n"] * (config["split"] - 1) <= MOST_JOINED


def workspace_of(m: int, n: int, k: int, config: dict, joined: bool) -> Workspace:
    """The memory between the quantizer and a product, and between that and the launch that adds its sums."""
    tiles = triton.cdiv(m, config["m"]) * triton.cdiv(n, config["n"])
    split = config["split"]
    if split == 1:
        return workspace(m, k, 0, 0)
    if joined:
        return workspace(m, k, tiles, tiles * split * config["m"] * config["n"])
    return workspace(m, k, 0, split * m * n)


def behind_quantizer(
    x: torch.Tensor, w_q: torch.Tensor, config: dict, joined: bool | None = None
) -> Callable[..., torch.Tensor]:
    """Quantizer and product with a configuration, for tensors like these; they take x, w_q and s_w.

    Two launches with one piece of memory between them. Where K is split and tiles are not joined (by default
    `is_joined`) a third one adds their sums, from the same memory.
    """
    m, k = x.shape
    n = w_q.shape[0]
    split = config["split"]
    joined = is_joined(config) if joined is None else joined
    where = workspace_of(m, n, k, config, joined)
    descriptor = k % VECTOR == 0 and w_q.data_ptr() % VECTOR == 0
    quantize = quantize_activation.prepared(x, where)
    product = prepared_product((m, k), w_q, config, descriptor, where, joined)
    launches = [
        (quantize, ("x", "between", None, k)),
        (product, ("between", "w_q", "between", "s_w", "y", None, m, n, k)),
    ]
    if split > 1 and not joined:
        launches.append((prepared_adding(m, n, split, where), (None, "between", "s_w", "y", m, n)))
    row = InARow(("x", "between", "w_q", "s_w", "y"), launches)
    memory = scratch(torch.int8, where.nbytes)
    make_y = blank(x.dtype, m, n)

    def launch(x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor) -> torch.Tensor:
        between, y = memory.take(x), make_y(x)
        row.launch(x, between, w_q, s_w, y)
        memory.give_back(between)
        return y

    return launch


def described(shape: tuple[int, int], rows: int, columns: int) -> Callable[[torch.Tensor], TensorDescriptor]:
    """What gives the descriptors of matrices of a shape that are read in tiles of `rows` by `columns`."""
    return lambda matrix: TensorDescriptor(matrix, list(shape), [shape[1], 1], [rows, columns])


def on_cpu(
    x_q: torch.Tensor, s_x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """y [M, N] of the operator by the reference."""
    return reference(x_q, s_x, w_q, s_w).to(dtype)


def on_cuda(
    x_q: torch.Tensor, s_x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """y [M, N] of the operator by the kernel, with its tuned configuration."""
    return prepare(x_q, s_x, w_q, s_w, dtype)(x_q, s_x, w_q, s_w)


def prepare(
    x_q: torch.Tensor, s_x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor, dtype: torch.dtype
) -> Callable[..., torch.Tensor]:
    """The launches of the operator for calls like this one, with its tuned configuration."""
    return prepared(x_q, w_q, configuration(x_q.shape[0], *w_q.shape, x_q.device), dtype)


def limit(x_q: torch.Tensor, s_x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor, dtype: torch.dtype) -> str | None:
    """What is wrong with checked arguments, or None."""
    if dtype not in HALVES:
        return f"dtype is {plain(dtype)}; the output is float16 or bfloat16"
    return too_many_columns(x_q.shape[1])


def too_many_columns(columns: int) -> str | None:
    """Why int32 does not hold the sums of so many products, or None if it does."""
    return f"sums of {columns} products may leave int32; at most {MAX_COLUMNS}" if columns > MAX_COLUMNS else None


w8a8_gemm = operator(
    "w8a8_gemm",
    on_cpu,
    on_cuda,
    {
        "x_q": Argument((torch.int8,), "M K"),
        "s_x": Argument((torch.float32,), "M"),
        "w_q": Argument((torch.int8,), "N K"),
        "s_w": Argument((torch.float32,), "N"),
    },
    empty=lambda x_q, s_x, w_q, s_w, dtype: x_q.new_empty((x_q.shape[0], w_q.shape[0]), dtype=dtype),
    limit=limit,
    prepare=prepare,
)
