"""Quantize activations to int8, one scale per token, symmetric.

    s[m] = max_k |x[m, k]| / 127          q[m, k] = round(x[m, k] / s[m])          x ~ s * q

x: fp16 or bf16 [M, K] row-major. q: int8 [M, K]. s: float32 [M]. Rounding is half to even; the quotient is the exact
product with 127 / max |x| in float32, in `w8a8_gemv` too, so that both compute the same codes. Tokens with max |x|
below 1e-30 quantize to zeros. A token with a NaN or an infinite activation has the scale NaN, and so NaN in every
product; its codes mean nothing. Bytes moved: 3 M K + 4 M. One Triton program quantizes one token, which stays in
registers between the two passes, in pieces of BLOCK columns.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from repro.kernels.launch_config import lacks
from repro.kernels.operators import HALVES, VECTOR, Argument, operator
from repro.kernels.prepared import Prepared, blank
from repro.kernels.triton_language import tl, triton

CASES = [  # tokens, columns (hidden and FFN sizes of Llama layers, then ragged ones), dtype, seed
    {"M": 1, "K": 4096, "dtype": "float16", "seed": 0},
    {"M": 8, "K": 14336, "dtype": "bfloat16", "seed": 1},
    {"M": 512, "K": 4096, "dtype": "bfloat16", "seed": 2},
    {"M": 3, "K": 127, "dtype": "float16", "seed": 3},
    {"M": 5, "K": 129, "dtype": "float16", "seed": 4},
    {"M": 2, "K": 28672, "dtype": "bfloat16", "seed": 5},
]

SIZES = [(1024, 4), (4096, 8), (16384, 16)]  # columns of a piece and warps; the first that needs at most 16 pieces


def make_inputs(case: dict, device: torch.device | str = "cpu") -> torch.Tensor:
    """Random activations [M, K] whose tokens differ by powers of ten, as real ones do."""
    generator = torch.Generator().manual_seed(case["seed"])
    size = 10.0 ** torch.randint(-2, 3, (case["M"], 1), generator=generator)
    return (torch.randn(case["M"], case["K"], generator=generator) * size).to(getattr(torch, case["dtype"])).to(device)


def reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes int8 [M, K], scales float32 [M]); the products in float64, where they are exact."""
    x = x.float()
    largest = x.abs().amax(dim=1)  # NaN if any is
    # Tensor / tensor: on a GPU torch computes number / tensor as a product with the reciprocal.
    inverse = torch.where(largest > 1e-30, torch.full_like(largest, 127) / largest, 0)
    codes = torch.round(x.double() * inverse.double()[:, None]).nan_to_num(0)
    return codes.to(torch.int8), torch.where(largest.isfinite(), largest / torch.full_like(largest, 127), torch.nan)


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("quantize_activation", device, (7, 0))


@triton.jit
def part_of(workspace, AT: tl.constexpr, KIND: tl.constexpr):  # noqa: ANN001, ANN201
    """A pointer to numbers of another type in a piece of memory, AT bytes from its beginning."""
    return (workspace + AT).to(tl.pointer_type(KIND), bitcast=True)


@triton.jit
def magnitude_bits(x):  # noqa: ANN001, ANN201
    """The bits of |x| of float32 as int32: ordered like |x|, with NaN above all, so that a maximum keeps it."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def activation_scale(largest):  # noqa: ANN001, ANN201
    """largest / 127; NaN where that is not a number."""
    return tl.where(largest < float("inf"), tl.div_rn(largest, 127.0), float("nan"))


@triton.jit
def inverse_scale(largest):  # noqa: ANN001, ANN201
    """127 / largest, correctly rounded: the fast quotient and one step of Newton's method; 0 below 1e-30."""
    quotient = 127.0 / largest
    rest = tl.fma(-quotient, largest, 127.0)
    return tl.where(largest > 1e-30, tl.fma(rest, quotient * (1 / 127), quotient), 0.0)


@triton.jit
def code_bits(x, inverse):  # noqa: ANN001, ANN201
    """Codes of float32 activations in the low bytes of int32, where adding 1.5 * 2^23 (half to even) leaves them."""
    return tl.fma(x, inverse, 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def quantize_activation_kernel(  # noqa: ANN201
    x, q, s, K,  # noqa: ANN001
    BLOCK: tl.constexpr, PIECES: tl.constexpr, SCALES_AT: tl.constexpr, COUNTERS_AT: tl.constexpr,
    COUNTERS: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    if s is None:
        s = part_of(q, SCALES_AT, tl.float32)
        if COUNTERS > 0:
            counter = token * SHARE + tl.arange(0, SHARE)
            tl.store(part_of(q, COUNTERS_AT, tl.int32) + counter, 0, mask=counter < COUNTERS)
    block = tl.arange(0, BLOCK)
    pieces = ()
    for i in tl.static_range(PIECES):
        pieces += (tl.load(x + token * K + i * BLOCK + block, mask=i * BLOCK + block < K, other=0.0),)
    size = tl.zeros((BLOCK,), dtype=tl.int32)
    for i in tl.static_range(PIECES):
        size = tl.maximum(size, magnitude_bits(pieces[i].to(tl.float32)))
    largest = tl.max(size, axis=0).to(tl.float32, bitcast=True)
    inverse = tl.zeros((BLOCK,), dtype=tl.float32) + inverse_scale(largest)
    for i in tl.static_range(PIECES):
        codes = code_bits(pieces[i].to(tl.float32), inverse).to(tl.int8)
        tl.store(q + token * K + i * BLOCK + block, codes, mask=i * BLOCK + block < K)
    tl.store(s + token, activation_scale(largest))


def launch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of the operator, computed by the kernel; `x` is not checked."""
    return prepare(x)(x)


def prepare(x: torch.Tensor) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """The launch of the operator for calls like this one."""
    m, k = x.shape
    kernel = prepared(x, None)
    make_codes = blank(torch.int8, m, k)
    make_scales = blank(torch.float32, m)

    def launch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, s = make_codes(x), make_scales(x)
        kernel(x, q, s, k)
        return q, s

    return launch


@dataclass(frozen=True)
class Workspace:
    """One piece of memory for all that lies between two launches: codes [M, K], and from these bytes on what follows.

    Memory that is made in one piece costs the host 1.3 us, in five pieces five times as much.

    Attributes:
        scales: float32 [M].
        counters: int32 [count], which the quantizer sets to 0.
        sums: int32 of the kernel after it.
    """

    scales: int
    counters: int
    count: int
    sums: int
    nbytes: int


def workspace(m: int, k: int, count: int, sums: int) -> Workspace:
    """The workspace of [m, k] activations, `count` counters and so many sums; every part begins at 16 bytes."""
    ends = list(itertools.accumulate(-(-nbytes // VECTOR) * VECTOR for nbytes in (m * k, 4 * m, 4 * count, 4 * sums)))
    return Workspace(ends[0], ends[1], count, ends[2], ends[3])


def prepared(x: torch.Tensor, where: Workspace | None) -> Prepared:
    """The kernel for tensors like this one: takes x, codes, scales and K; with a workspace x, that, None and K."""
    m, k = x.shape
    block, warps = next((block, warps) for block, warps in SIZES if k <= 16 * block or block == SIZES[-1][0])
    scales, counters, count = (where.scales, where.counters, where.count) if where else (0, 0, 0)
    return Prepared(
        quantize_activation_kernel, (m,), BLOCK=block, PIECES=triton.cdiv(k, block), SCALES_AT=scales,
        COUNTERS_AT=counters, COUNTERS=count, SHARE=triton.next_power_of_2(triton.cdiv(max(count, 1), m)),
        num_warps=warps,
    )  # fmt: skip


quantize_activation = operator(
    "quantize_activation",
    reference,
    launch,
    {"x": Argument(HALVES, "M K")},
    empty=lambda x: (torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[0], dtype=torch.float32)),
    prepare=prepare,
)


def aligned(*matrices: torch.Tensor) -> bool:
    """Whether every row of these matrices, of int8 or a wider type, begins at a multiple of 16 bytes."""
    return all(matrix.data_ptr() % 16 == 0 and matrix.shape[1] % 16 == 0 for matrix in matrices)
