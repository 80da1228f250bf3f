"""W8A8 for decoding: 1 to 8 tokens times int8 weights, activations quantized in the same launch.

    s_x[m] = max_k |x[m, k]| / 127      x_q[m, k] = round(x[m, k] / s_x[m])
    y[m, n] = (sum_k x_q[m, k] * w_q[n, k]) * s_x[m] * s_w[n]

x: fp16 or bf16 [M, K], M = 1..8, K a multiple of 16. w_q: int8 [N, K] row-major, the same layout as for `w8a8_gemm`;
s_w: float32 [N]. y: [M, N] like x. The sum is exact in int32 (K up to 133,000). Bytes moved: N K + 4 N + 2 M (K + N);
operations 2 M N K.

One token and short rows: the Triton kernel below. A program loads the token, then its few rows of weights, and
quantizes the token while those are in flight; many small programs per SM hide each other's latency. One `dp4a` computes
four products.

More tokens, or long rows: CUDA C++ (`w8a8_gemv.cu`), because quantizing them in every small program would cost more
than reading the weights. One thread block per SM requests 64 KB of weights or more, quantizes while they arrive, and
feeds them through a ring in shared memory to the int8 tensor cores. Thread blocks of a cluster share rows and split K,
and each quantizes only its slice of the tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import torch

from repro.kernels import nvrtc
from repro.kernels import quantize_activation as quantizer
from repro.kernels.launch_config import lacks, launch_config
from repro.kernels.operators import HALVES, VECTOR, Argument, operator
from repro.kernels.prepared import Prepared, blank
from repro.kernels.quantize_activation import activation_scale, code_bits, inverse_scale, magnitude_bits
from repro.kernels.triton_language import tl, triton
from repro.kernels.w8a8_gemm import too_many_columns

SOURCE = Path(__file__).with_suffix(".cu")
MAX_TOKENS = 8

CASES = [  # tokens, output channels, input channels (Llama 3.2 1B, 3.1 8B, 2 13B and ragged ones), dtype, seed
    {"M": 1, "N": 4096, "K": 4096, "dtype": "bfloat16", "seed": 0},
    {"M": 4, "N": 14336, "K": 4096, "dtype": "float16", "seed": 1},
    {"M": 8, "N": 4096, "K": 14336, "dtype": "bfloat16", "seed": 2},
    {"M": 1, "N": 512, "K": 2048, "dtype": "float16", "seed": 3},
    {"M": 6, "N": 1003, "K": 2064, "dtype": "bfloat16", "seed": 4},
    {"M": 3, "N": 129, "K": 272, "dtype": "float16", "seed": 5},
    {"M": 7, "N": 7, "K": 1008, "dtype": "bfloat16", "seed": 6},
    {"M": 1, "N": 1003, "K": 2064, "dtype": "float16", "seed": 7},
]
ONE_TOKEN = []  # rows per program, words of 4 codes that its threads load at once from a row, warps
for rows in (2, 4, 8):
    for chunk, warps in ((512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8), (2048, 16)):
        ONE_TOKEN.append({"rows": rows, "chunk": chunk, "warps": warps})
STREAMED = []  # warps per thread block, columns of an 8-row piece, pieces in flight per warp, blocks per cluster
for warps, segment, stages in ((8, 512, 2), (8, 512, 3), (8, 1024, 2), (16, 512, 2)):
    for cluster in (1, 2, 4, 8):
        STREAMED.append({"warps": warps, "segment": segment, "stages": stages, "cluster": cluster})
SPACE = ONE_TOKEN + STREAMED


def make_inputs(case: dict, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, w_q, s_w): random tokens of different magnitudes, codes and scales of one case."""
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
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("w8a8_gemv", device) or nvrtc.unavailable()


@triton.jit
def dp4a(a, b, c, PLAIN: tl.constexpr):  # noqa: ANN001, ANN201
    """c + the four products of the bytes of a and b; PLAIN uses ordinary arithmetic, for Triton's interpreter."""
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
    words = K16 * 4  # of 4 codes, per row; as K16 * 4, so that Triton sees that 16-byte loads are aligned
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

    size = tl.zeros((CHUNK, 4), dtype=tl.int32)
    for c in tl.static_range(CHUNKS):
        size = tl.maximum(size, magnitude_bits(token[c].to(tl.float32)))
    largest = tl.max(tl.max(size, axis=1), axis=0).to(tl.float32, bitcast=True)
    inverse = tl.zeros((CHUNK, 4), dtype=tl.float32) + inverse_scale(largest)
    acc = tl.zeros((ROWS, CHUNK), dtype=tl.int32)
    for c in tl.static_range(CHUNKS):
        code = code_bits(token[c].to(tl.float32), inverse) & 255
        packed = tl.sum(code << (8 * byte)[None, :], axis=1)
        acc = dp4a(tiles[c], packed[None, :], acc, PLAIN)
    total = tl.sum(acc, axis=1).to(tl.float32) * scale * activation_scale(largest)
    tl.store(y + row, total.to(y.dtype.element_ty), mask=row < N)


def tuning_key(case: dict) -> str:
    """The key of a case's shape in the tuned configurations: M rounded up to 1, 2, 4, 8, then N and K."""
    return f"{1 << (case['M'] - 1).bit_length()}x{case['N']}x{case['K']}"


def heuristic(m: int, k: int) -> dict:
    """A configuration for a shape without a tuned one: similar to those tuned for this K on an H200."""
    if m == 1 and k <= 12288:
        return {"rows": 4, "chunk": 512, "warps": 4} if k <= 4096 else {"rows": 4, "chunk": 1024, "warps": 8}
    cluster = 1
    while cluster < 8 and m * k > 65536 * cluster:
        cluster *= 2
    return {"warps": 8, "segment": 512, "stages": 2, "cluster": cluster}


def configuration(m: int, n: int, k: int, device: torch.device | str) -> dict:
    """The configuration tuned for the shape, or a heuristic."""
    return launch_config("w8a8_gemv", tuning_key({"M": m, "N": n, "K": k}), device) or heuristic(m, k)


def launch(x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor, config: dict) -> torch.Tensor:
    """y [M, N] with one configuration of SPACE; arguments as in the operator, unchecked.

    Raises ValueError when the configuration cannot run this shape.
    """
    return prepared(x, w_q, s_w, config)(x, w_q, s_w)


def prepared(x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor, config: dict) -> Callable[..., torch.Tensor]:
    """The launch with one configuration for tensors like these.

    Raises ValueError when the configuration cannot run this shape.
    """
    if not quantizer.aligned(x, w_q):
        raise ValueError(
            f"w8a8_gemv: rows of x {tuple(x.shape)}, w_q {tuple(w_q.shape)} must begin at multiples of 16 bytes"
        )
    m, n = x.shape[0], w_q.shape[0]
    run = (prepare_streamed if "cluster" in config else prepare_one)(x, w_q, config)
    allocate = blank(x.dtype, m, n)

    def launch(x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor) -> torch.Tensor:
        y = allocate(x)
        run(x, w_q, s_w, y)
        return y

    return launch


def prepare_one(x: torch.Tensor, w_q: torch.Tensor, config: dict) -> Callable[..., None]:
    """The Triton kernel: takes x, w_q, s_w and y [1, N]."""
    m, k = x.shape
    n = w_q.shape[0]
    chunk = config["chunk"]
    registers = ceil(k / 4 / chunk) * chunk * config["rows"] // (32 * config["warps"])
    if m != 1 or registers > 128:
        raise ValueError(f"w8a8_gemv: {config} cannot run x {tuple(x.shape)} and w_q {tuple(w_q.shape)}")
    kernel = Prepared(
        w8a8_gemv_kernel, (ceil(n / config["rows"]),), ROWS=config["rows"], CHUNK=chunk, CHUNKS=ceil(k / 4 / chunk),
        EVEN=k // 4 % chunk == 0, PLAIN=not x.is_cuda, num_warps=config["warps"],
    )  # fmt: skip
    return lambda x, w_q, s_w, y: kernel(x, w_q.view(torch.int32), s_w, y, n, k // 16)


@dataclass(frozen=True)
class GemvPlan:
    """One launch of the CUDA kernel: grid, macros, the last two arguments, bytes of shared memory."""

    grid: int
    macros: dict[str, int]
    columns: int
    rows: int
    shared: int


def plan(m: int, n: int, k: int, dtype: torch.dtype, config: dict, sms: int) -> GemvPlan:
    """How a configuration of STREAMED partitions a shape: one thread block per SM, rows as evenly as possible.

    A thread block's columns are a multiple of 128; `rows`, a multiple of 8, is the largest number of a cluster.
    """
    warps, cluster = config["warps"], config["cluster"]
    columns = ceil(k / cluster / 128) * 128
    clusters = sms // cluster if cluster < 4 else sms * 10 // 11 // cluster  # that fit at once
    clusters = max(1, min(clusters, ceil(n / 8)))
    rows = ceil(ceil(n / clusters) / 8) * 8
    ring = warps * config["stages"] * 8 * (config["segment"] + 64)
    shared = ring + m * (columns + 64) + 4 * rows * (2 * m + 1 if cluster > 1 else m + 1)
    macros = {name.upper(): config[name] for name in ("warps", "segment", "stages", "cluster")}
    macros |= {"BF16": int(dtype == torch.bfloat16), "TOKENS": m, "PARTS": ceil(columns / (256 * warps))}
    return GemvPlan(clusters * cluster, macros, columns, rows, shared)


def fits(how: GemvPlan, device: torch.device | str) -> bool:
    """Whether a device has the shared memory, the registers and clusters for a plan."""
    properties = torch.cuda.get_device_properties(device)
    tokens = how.macros["TOKENS"] * how.macros["PARTS"] * 4 * 32 * how.macros["WARPS"]  # registers of all threads
    shared = properties.shared_memory_per_block_optin - 2048  # the source has static shared memory, too
    return how.shared <= shared and tokens <= 32768 and (properties.major >= 9 or how.macros["CLUSTER"] == 1)


def prepare_streamed(x: torch.Tensor, w_q: torch.Tensor, config: dict) -> Callable[..., None]:
    """The CUDA kernel: takes x, w_q, s_w and y [M, N]."""
    m, k = x.shape
    n = w_q.shape[0]
    how = plan(m, n, k, x.dtype, config, torch.cuda.get_device_properties(x.device).multi_processor_count)
    if not fits(how, x.device):
        raise ValueError(f"w8a8_gemv: {config} cannot run x {tuple(x.shape)} and w_q {tuple(w_q.shape)} here")
    kernel = nvrtc.load(SOURCE, "w8a8_gemv", how.macros, x.device, how.shared)
    threads = 32 * config["warps"]
    return lambda x, w_q, s_w, y: kernel(how.grid, threads, x, w_q, s_w, y, n, k, how.columns, how.rows)


def takes(m: int, n: int, k: int, device: torch.device) -> bool:
    """Whether `w8a8_gemv` supports m tokens and weights [n, k] on a device; `w8a8_gemm` supports every shape."""
    if m > MAX_TOKENS or k % 16:
        return False
    config = configuration(m, n, k, device)
    if device.type != "cuda" or "cluster" not in config:
        return True
    return fits(
        plan(m, n, k, torch.float16, config, torch.cuda.get_device_properties(device).multi_processor_count), device
    )


def on_cpu(x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor) -> torch.Tensor:
    """y [M, N] of the operator by the reference."""
    return reference(x, w_q, s_w).to(x.dtype)


def on_cuda(x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor) -> torch.Tensor:
    """y [M, N] of the operator by the kernel, with its tuned configuration."""
    return prepare(x, w_q, s_w)(x, w_q, s_w)


def prepare(x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor) -> Callable[..., torch.Tensor]:
    """The launch of the operator for calls like this one, with its tuned configuration."""
    return prepared(x, w_q, s_w, configuration(x.shape[0], *w_q.shape, x.device))


def limit(x: torch.Tensor, w_q: torch.Tensor, s_w: torch.Tensor) -> str | None:
    """What is wrong with checked arguments, or None."""
    m, k = x.shape
    rows = w_q.shape[0]
    if m > MAX_TOKENS or k % 16:
        most = f"x of 1 to {MAX_TOKENS} tokens and a multiple of 16 columns"
        return f"takes {most}, not x {[m, k]} for w_q {[rows, k]}; w8a8 takes any"
    return too_many_columns(k)


w8a8_gemv = operator(
    "w8a8_gemv",
    on_cpu,
    on_cuda,
    {
        "x": Argument(HALVES, "M K", VECTOR),
        "w_q": Argument((torch.int8,), "N K", VECTOR),
        "s_w": Argument((torch.float32,), "N"),
    },
    empty=lambda x, w_q, s_w: x.new_empty((x.shape[0], w_q.shape[0])),
    limit=limit,
    prepare=prepare,
)
