"""W8A8 for decoding: 1 to 8 tokens times int8 weights, activations quantized in the same launch.

    s_x[m] = max_k |x[m, k]| / 127      x_q[m, k] = round(x[m, k] / s_x[m])
    y[m, n] = (sum_k x_q[m, k] * w_q[n, k]) * s_x[m] * s_w[n]

x: fp16 or bf16 [M, K], M = 1..8. w_q: int8 [N, K] row-major, the layout that `w8a8_gemm` reads too; s_w: float32 [N].
y: [M, N] like x. The sum is exact in int32 (K up to 133,000). Bytes moved: N K + 4 N + 2 M (K + N); operations 2 M N K.

One token: the Triton kernel below. A program asks for the token, then for its few rows of weights, and quantizes the
token while they are under way; many small programs on a multiprocessor hide each other's latency. Four products are
one `dp4a`.

More tokens: CUDA C++ (`w8a8_gemv.cu`), for quantizing M tokens in every small program would cost more than reading the
weights. The programs of a cluster quantize one token each and hand the codes to one another through shared memory;
weights go to the integer matrix unit in their stored order, through a ring of 16-byte loads in registers.
"""

from math import ceil
from pathlib import Path

import torch
import triton
import triton.language as tl

from repro.kernels import nvrtc
from repro.kernels import quantize_activation as quantizer
from repro.kernels.launch_config import lacks, launch_config
from repro.kernels.quantize_activation import code_bits, inverse_scale

SOURCE = Path(__file__).with_suffix(".cu")
MAX_TOKENS = 8
MAX_COLUMNS = 133_000  # 127 * 127 * K stays below 2^31

CASES = [  # tokens, output channels, input channels (Llama 3.2 1B, 3.1 8B, 2 13B and ragged ones), dtype, seed
    {"M": 1, "N": 4096, "K": 4096, "dtype": "bfloat16", "seed": 0},
    {"M": 4, "N": 14336, "K": 4096, "dtype": "float16", "seed": 1},
    {"M": 8, "N": 4096, "K": 14336, "dtype": "bfloat16", "seed": 2},
    {"M": 1, "N": 512, "K": 2048, "dtype": "float16", "seed": 3},
    {"M": 6, "N": 1003, "K": 2064, "dtype": "bfloat16", "seed": 4},
    {"M": 3, "N": 129, "K": 127, "dtype": "float16", "seed": 5},
    {"M": 1, "N": 7, "K": 1001, "dtype": "bfloat16", "seed": 6},
    {"M": 1, "N": 1003, "K": 2064, "dtype": "float16", "seed": 7},
]
ONE_TOKEN = [  # rows of a program, words of 4 codes that its threads load at once from a row, warps
    {"rows": rows, "chunk": chunk, "warps": warps}
    for rows in (2, 4, 8)
    for chunk, warps in ((512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (2048, 16))
]
FEW_TOKENS = [  # warps of a program, programs on a multiprocessor, 8-row tiles, loads in flight per tile, cluster
    {"warps": warps, "resident": resident, "tiles": tiles, "depth": depth, "cluster": cluster}
    for warps, resident, pairs in [
        (8, 2, [(1, 8), (2, 4), (2, 6), (4, 2)]),
        (8, 3, [(1, 4), (2, 2)]),
        (16, 1, [(1, 8), (2, 4), (2, 6), (4, 2), (4, 4)]),
        (16, 2, [(1, 4), (2, 2)]),
        (32, 1, [(1, 4), (2, 2)]),
    ]
    for tiles, depth in pairs
    for cluster in (1, 2, 4, 8)
]
SPACE = ONE_TOKEN + FEW_TOKENS


def make_inputs(case: dict, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, w_q, s_w): random tokens of different sizes, codes and scales of one case."""
    x = quantizer.make_inputs(case, device)
    generator = torch.Generator().manual_seed(case["seed"] + 1)
    w_q = torch.randint(-127, 128, (case["N"], case["K"]), dtype=torch.int8, generator=generator)
    s_w = torch.rand(case["N"], generator=generator) * 0.001 + 0.0001
    return x, w_q.to(device), s_w.to(device)


def reference(x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor) -> torch.Tensor:
    """y [M, N] in float32: quantize the tokens, dequantize both sides, multiply."""
    x_q, s_x = quantizer.reference(x)
    return (x_q.float() * s_x[:, None]) @ (w_q.float() * s_w[:, None]).T


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None where it can."""
    return lacks("w8a8_gemv", device) or nvrtc.unavailable()


@triton.jit
def dp4a(a, b, c, PLAIN: tl.constexpr):  # noqa: ANN001, ANN201
    """c + the four products of the bytes of a and b; PLAIN in ordinary arithmetic, for the interpreter."""
    if PLAIN:
        for byte in tl.static_range(4):
            c += ((a << (24 - 8 * byte)) >> 24) * ((b << (24 - 8 * byte)) >> 24)
        return c
    else:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def w8a8_gemv_kernel(  # noqa: ANN201
    x, w, s_w, y, N, K16,  # noqa: ANN001
    ROWS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    words = K16 * 4  # of 4 codes, in a row; said so that 16-byte loads are seen to be aligned
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    byte = tl.arange(0, 4)
    token, tiles = (), ()
    for c in tl.static_range(CHUNKS):
        k = c * CHUNK + tl.arange(0, CHUNK)
        at = x + k[:, None] * 4 + byte[None, :]
        if EVEN or c < CHUNKS - 1:
            token += (tl.load(at),)
        else:
            token += (tl.load(at, mask=(k < words)[:, None], other=0.0),)
    for c in tl.static_range(CHUNKS):
        k = c * CHUNK + tl.arange(0, CHUNK)
        mask = (row < N)[:, None]
        if c == CHUNKS - 1 and not EVEN:
            mask = mask & (k < words)[None, :]
        at = row[:, None].to(tl.int64) * words + k[None, :]
        tiles += (tl.load(w + at, mask=mask, other=0, eviction_policy="evict_first"),)
    scale = tl.load(s_w + row, mask=row < N, other=0.0)

    size = tl.zeros((CHUNK, 4), dtype=tl.float32)
    for c in tl.static_range(CHUNKS):
        size = tl.maximum(size, tl.abs(token[c].to(tl.float32)))
    largest = tl.max(tl.max(size, axis=1), axis=0)
    inverse = tl.zeros((CHUNK, 4), dtype=tl.float32) + inverse_scale(largest)
    acc = tl.zeros((ROWS, CHUNK), dtype=tl.int32)
    for c in tl.static_range(CHUNKS):
        code = code_bits(token[c].to(tl.float32), inverse) & 255
        packed = tl.sum(code << (8 * byte)[None, :], axis=1)
        acc = dp4a(tiles[c], packed[None, :], acc, PLAIN)
    total = tl.sum(acc, axis=1).to(tl.float32) * scale * (largest / 127.0)
    tl.store(y + row, total.to(y.dtype.element_ty), mask=row < N)


def tuning_key(case: dict) -> str:
    """The key of a case's shape among the recorded configurations: M rounded up to 1, 2, 4, 8, then N and K."""
    return f"{1 << (case['M'] - 1).bit_length()}x{case['N']}x{case['K']}"


def heuristic(m: int, k: int) -> dict:
    """A configuration for a shape without a recorded one: like the recorded ones of the same K on an H200."""
    if m == 1 and k <= 12288:
        return {"rows": 4, "chunk": 512, "warps": 4} if k <= 4096 else {"rows": 4, "chunk": 1024, "warps": 8}
    cluster = min(1 << (m - 1).bit_length(), 8)
    if k <= 8192:
        return {"warps": 8, "resident": 2, "tiles": 2, "depth": 4, "cluster": cluster}
    return {"warps": 16, "resident": 1, "tiles": 1, "depth": 8, "cluster": min(cluster, 2)}


def configuration(x: torch.Tensor, w_q: torch.Tensor) -> dict:
    """The configuration recorded for the shape, or a heuristic. The Triton kernel takes aligned rows only."""
    m, (n, k) = x.shape[0], w_q.shape
    config = launch_config("w8a8_gemv", tuning_key({"M": m, "N": n, "K": k}), x.device) or heuristic(m, k)
    return config if "cluster" in config or quantizer.aligned(x, w_q) else heuristic(2, k)


def launch(x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor, config: dict) -> torch.Tensor:
    """y [M, N] with one configuration of SPACE; arguments as in the operator, not checked again.

    Raises ValueError when the configuration cannot run this shape.
    """
    y = torch.empty((x.shape[0], w_q.shape[0]), dtype=x.dtype, device=x.device)
    (launch_few if "cluster" in config else launch_one)(x, w_q, s_w, y, config)
    return y


def launch_one(x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor, y: torch.Tensor, config: dict) -> None:
    """The Triton kernel: y [1, N], rows that begin at multiples of 16 bytes."""
    (m, k), n, chunk = x.shape, w_q.shape[0], config["chunk"]
    held = ceil(k / 4 / chunk) * chunk * config["rows"] // (32 * config["warps"])
    if m != 1 or not quantizer.aligned(x, w_q) or held > 128:
        raise ValueError(f"w8a8_gemv: {config} is not for x {tuple(x.shape)} and w_q {tuple(w_q.shape)}")
    w8a8_gemv_kernel[(ceil(n / config["rows"]),)](
        x, w_q.view(torch.int32), s_w, y, n, k // 16, ROWS=config["rows"], CHUNK=chunk, CHUNKS=ceil(k / 4 / chunk),
        EVEN=k // 4 % chunk == 0, PLAIN=not x.is_cuda, num_warps=config["warps"],
    )  # fmt: skip


def macros(m: int, k: int, dtype: torch.dtype, config: dict, aligned: bool) -> dict[str, int]:
    """What one compilation of the .cu file defines; `aligned`: every row begins at a multiple of 16 bytes."""
    named = {name.upper(): config[name] for name in ("warps", "resident", "tiles", "depth", "cluster")}
    vectors = ceil(ceil(k / 8) / (32 * config["warps"]))
    return {"BF16": int(dtype == torch.bfloat16), "TOKENS": m, "VECTORS": vectors, "ALIGNED": int(aligned), **named}


def programs(n: int, config: dict, multiprocessors: int) -> int:
    """The grid: whole clusters, no more than fit at once, each program with the same number of row groups."""
    groups, cluster = ceil(n / (8 * config["tiles"])), config["cluster"]
    most = multiprocessors * config["resident"] // cluster * cluster
    return ceil(ceil(groups / ceil(groups / most)) / cluster) * cluster


def tokens_that_fit(k: int, config: dict, shared: int) -> int:
    """How many tokens of k columns a program holds in `shared` bytes of shared memory."""
    return (shared - 4 * config["warps"] - 16) // (padded(k) + 64 * config["tiles"] + 8)


def padded(k: int) -> int:
    """Bytes of a token's codes in shared memory: token_stride in the .cu file."""
    return ceil(k / 128) * 128 + 64


def launch_few(x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor, y: torch.Tensor, config: dict) -> None:
    """The CUDA kernel: y [M, N] for M = 1..8, in several launches where shared memory holds fewer tokens."""
    (m, k), n = x.shape, w_q.shape[0]
    device = torch.cuda.get_device_properties(x.device)
    most = tokens_that_fit(k, config, device.shared_memory_per_block_optin)
    if most < 1 or 8 * config["tiles"] * min(m, most) > 32 * config["warps"]:
        raise ValueError(f"w8a8_gemv: {config} is not for x {tuple(x.shape)} on {device.name}")
    if m > most:
        launch_few(x[:most], w_q, s_w, y[:most], config)
        return launch_few(x[most:], w_q, s_w, y[most:], config)
    if device.major < 9:
        config = config | {"cluster": 1}
    defines = macros(m, k, x.dtype, config, quantizer.aligned(x, w_q))
    kernel = nvrtc.load(SOURCE, "w8a8_gemv", defines, x.device, m * padded(k))
    grid = programs(n, config, device.multi_processor_count)
    kernel(grid, 32 * config["warps"], x, w_q, s_w, y, n, k)


def check(x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor) -> None:
    """ValueError, with the shapes, unless the operands fit together."""
    quantizer.check(x)
    shapes = f"x {tuple(x.shape)}, w_q {w_q.dtype} {tuple(w_q.shape)}, s_w {s_w.dtype} {tuple(s_w.shape)}"
    if w_q.dim() != 2 or w_q.shape[1] != x.shape[1] or s_w.shape != w_q.shape[:1] or w_q.numel() == 0:
        raise ValueError(f"w8a8: x must be [M, K], w_q [N, K] and s_w [N]: {shapes}")
    if w_q.dtype != torch.int8 or s_w.dtype != torch.float32 or not w_q.is_contiguous() or not s_w.is_contiguous():
        raise ValueError(f"w8a8: w_q must be int8, s_w float32, both contiguous: {shapes}")
    if x.shape[1] > MAX_COLUMNS:
        raise ValueError(f"w8a8: sums of more than {MAX_COLUMNS} products may leave int32: {shapes}")
    if len({x.device, w_q.device, s_w.device}) > 1:
        raise ValueError(f"w8a8: tensors on {x.device}, {w_q.device}, {s_w.device}: {shapes}")


@torch.library.custom_op("lowbit::w8a8_gemv", mutates_args=())
def w8a8_gemv(x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor) -> torch.Tensor:
    """y [M, N] like x of fp16 or bf16 tokens x [M, K] (M = 1..8), int8 codes w_q [N, K], float32 scales s_w [N].

    Raises ValueError when shapes or dtypes do not fit.
    """
    check_few(x, w_q, s_w)
    return launch(x, w_q, s_w, configuration(x, w_q))


def check_few(x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor) -> None:
    """`check`, and no more tokens than the kernel takes."""
    check(x, w_q, s_w)
    if x.shape[0] > MAX_TOKENS:
        raise ValueError(f"w8a8_gemv: x {tuple(x.shape)} has more than {MAX_TOKENS} tokens; see w8a8.py")


@w8a8_gemv.register_fake
def _(x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0], w_q.shape[0]))


@w8a8_gemv.register_kernel("cpu")
def _(x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor) -> torch.Tensor:
    check_few(x, w_q, s_w)
    return reference(x, w_q, s_w).to(x.dtype)
