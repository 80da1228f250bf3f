"""Random numbers and exponentials that are identical on every device: in torch, and in Triton for kernels.

All are float32 operations that IEEE 754 rounds, or integers, in one order; a kernel that uses them is launched with
enable_fp_fusion=False, since a fused multiply-add rounds once. The torch functions are the reference of the others.

    philox         Philox4x32-10 (Salmon et al., SC 2011, section 4.2): four random words of a key and a counter
    exponential    -log(1 - u) of a random word, exponentially distributed
    weight         exp(x) for x up to 0
"""

import torch

from repro.kernels.triton_language import tl, triton

LOG2 = tl.constexpr(0.6931471805599453)
LOG2_HIGH = tl.constexpr(0.693359375)  # 10 bits: its product with an exponent is exact
LOG2_LOW = tl.constexpr(-2.1219444005469057e-4)
LEAST = tl.constexpr(-80.0)  # weights below exp(-80) are that: no subnormal numbers, which devices treat differently
UNIT = tl.constexpr(2.0**-32)


def philox(key: torch.Tensor, counter: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Four words of a 64-bit key and a counter of four words, all in int64 tensors that broadcast."""
    low = 0xFFFFFFFF
    a, b, c, d = counter
    k0, k1 = key & low, key >> 32 & low

    def product(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
        return ((x >> 16) * factor + ((x & 0xFFFF) * factor >> 16)) >> 16, x * factor & low

    for _ in range(10):
        high_a, low_a = product(a, 0xD2511F53)
        high_c, low_c = product(c, 0xCD9E8D57)
        a = high_c ^ b ^ k0
        b = low_c
        c = high_a ^ d ^ k1
        d = low_a
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    return [a, b, c, d]


def words(seeds: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [T, count]: word i % 4 of the counter (i // 4, 0, position) and the key seed, for int64 [T] of both."""
    position = positions[:, None]
    block = torch.arange(-(-count // 4), device=seeds.device)[None]
    four = philox(seeds[:, None], (block, torch.zeros_like(block), position & 0xFFFFFFFF, position >> 32 & 0xFFFFFFFF))
    return torch.stack(four, 2).flatten(1)[:, :count]


def exponential(bits: torch.Tensor) -> torch.Tensor:
    """float32 of 32 random bits in int64: u = (n + 1/2) / 2^32, n their last 31, or 1 minus that if the first is set.

    -log(1 - u) = k log 2 + 2 artanh(v / (2 - v)) with k = 0 and v = u, or, if the first bit is set, with
    n + 1/2 = m 2^(32 - k), m from 1/2 to 1, and v = 1 - m.
    """
    n = (bits & 0x7FFFFFFF).float() + 0.5
    m, exponent = torch.frexp(n)
    far = bits >> 31 == 1
    v = torch.where(far, 1 - m, n * UNIT.value)
    k = torch.where(far, 32 - exponent, 0).float()
    z = v / (2 - v)
    square = z * z
    series = torch.full_like(z, 1 / 15)
    for odd in (13, 11, 9, 7, 5, 3, 1):
        series = series * square + 1 / odd
    return k * LOG2.value + (z + z) * series


def weight(x: torch.Tensor) -> torch.Tensor:
    """exp(x) of float32 up to 0: 2^n times the series of the rest, which is at most log(2) / 2."""
    x = x.clamp(min=LEAST.value)
    n = torch.floor(x * (1 / LOG2.value) + 0.5)
    rest = (x - n * LOG2_HIGH.value) - n * LOG2_LOW.value
    series = torch.full_like(rest, 1 / 5040)
    for factor in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        series = series * rest + factor
    return series * (n.int() + 127 << 23).view(torch.float32)


@triton.jit
def words_block(seed, position, first, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
    """`words` of one seed and position for BLOCK tokens from `first` on, a multiple of 4, as uint32."""
    block = first // 4 + tl.arange(0, BLOCK // 4)
    high = tl.zeros_like(block) + (position >> 32).to(tl.int32)
    a, b, c, d = tl.philox(seed, block, tl.zeros_like(block), tl.zeros_like(block) + position.to(tl.int32), high)
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def exponential_block(bits):  # noqa: ANN001, ANN201
    """`exponential` of uint32."""
    n = (bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5
    pattern = n.to(tl.int32, bitcast=True)
    m = ((pattern & 0x7FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    far = (bits >> 31) == 1
    v = tl.where(far, 1.0 - m, n * UNIT)
    k = tl.where(far, 32 - ((pattern >> 23) - 126), 0).to(tl.float32)
    z = tl.div_rn(v, 2.0 - v)
    square, series = z * z, tl.full(z.shape, 1 / 15, tl.float32)
    for i in tl.static_range(7):
        series = series * square + 1 / (13 - 2 * i)
    return k * LOG2 + (z + z) * series


@triton.jit
def weight_block(x):  # noqa: ANN001, ANN201
    """`weight`."""
    x = tl.maximum(x, LEAST)
    n = tl.floor(x * (1 / LOG2) + 0.5)
    rest = (x - n * LOG2_HIGH) - n * LOG2_LOW
    series = tl.full(x.shape, 1 / 5040, tl.float32) * rest + 1 / 720
    series = series * rest + 1 / 120
    series = series * rest + 1 / 24
    series = series * rest + 1 / 6
    series = series * rest + 1 / 2
    series = (series * rest + 1.0) * rest + 1.0
    return series * (n.to(tl.int32) + 127 << 23).to(tl.float32, bitcast=True)
