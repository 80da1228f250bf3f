"""Q4_K, llama.cpp's 4.5-bit format that SpQt quantizes with (section 4.1.1): bytes and values exactly as ggml's.

A super-block holds 256 weights in 144 bytes: 8 blocks of 32 codes q of 4 bits, each block with a scale and a minimum of
6 bits, and two half-precision factors for these:

    w = d · scale · q - dmin · min        bytes: d 2 | dmin 2 | scales and minima 12 | codes 128

The encoder repeats ggml's search (the generic build, without fused multiply-add) in float32 and in ggml's order of
operations, because the bytes depend on both: `sum` adds one term after the other, every product is rounded before it is
added, rounding is `_nearest`. It runs on many super-blocks at once, on the weight's device. Some float32 operations of
PyTorch are not correctly rounded: `number / tensor`, on a GPU also `tensor / number`, and `sqrt` (`_over`, `_root`).
"""

import numpy as np
import torch
from torch import Tensor

from repro.core.errors import UserError

SUPER, BLOCK, BYTES = 256, 32, 144
BLOCKS = SUPER // BLOCK
CHUNK = {"cpu": 512, "cuda": 1 << 16}  # super-blocks at a time: arrays that a core's cache holds; that fill a GPU
TOP, TOP6 = 15, 63  # largest code, and largest scale or minimum
TINY = 1e-15  # scales below it are stored as zeros where they are fitted
PLAIN, WEIGHTED = (-1.0, 0.1, 21), (-0.9, 0.05, 37)  # trials of the inverse scale: first, step, how many


def quantize(weight: Tensor, importance: Tensor | None = None) -> Tensor:
    """The Q4_K bytes uint8 `[N, K // 256 * 144]` of a weight `[N, K]`, rows one after the other.

    Args:
        weight: computed with in float32, on its own device.
        importance: `[K]`, how much the error of an input channel counts (mean x², ggml's importance matrix).

    Raises:
        UserError: 256 does not divide K, or a value is not finite, or an importance negative.
    """
    rows, columns = weight.shape
    check_columns(columns)
    if importance is not None:
        if importance.shape != (columns,):
            raise UserError(f"{list(importance.shape)} importances for {columns} input columns; there is one for each")
        if not (torch.isfinite(importance).all() and (importance >= 0).all()):
            raise UserError("an importance is negative, NaN or Inf; it is a mean of squares")
        importance = importance.to(weight.device, torch.float32).view(-1, SUPER).repeat(rows, 1)
    return encode(weight.reshape(-1, SUPER), importance).view(rows, columns // SUPER * BYTES)


def dequantize(blocks: Tensor, columns: int) -> Tensor:
    """float32 `[N, columns]`: the weights of Q4_K bytes uint8 `[N, columns // 256 * 144]`.

    UserError if 256 does not divide `columns`, or the bytes are not those of so many columns.
    """
    check_columns(columns)
    if blocks.shape[1] != columns // SUPER * BYTES:
        raise UserError(f"{blocks.shape[1]} bytes a row; {columns} columns of Q4_K take {columns // SUPER * BYTES}")
    return decode(blocks.reshape(-1, BYTES)).view(len(blocks), columns)


def check_columns(columns: int) -> None:
    """Raise unless rows of `columns` weights divide into super-blocks."""
    if columns % SUPER:
        nearest = max(SUPER, (columns + SUPER // 2) // SUPER * SUPER)
        raise UserError(f"{columns} columns do not divide into Q4_K's super-blocks of {SUPER}; {nearest} would")


def encode(x: Tensor, importance: Tensor | None = None) -> Tensor:
    """uint8 `[B, 144]` of super-blocks `[B, 256]`; `importance` `[B, 256]` weighs each weight's squared error.

    UserError if a weight is NaN or Inf.
    """
    if not torch.isfinite(x).all():
        raise UserError("a weight is NaN or Inf; the model is damaged")
    size = CHUNK.get(x.device.type, CHUNK["cpu"])
    encoded = torch.empty(len(x), BYTES, dtype=torch.uint8, device=x.device)
    with torch.no_grad():
        for at in range(0, len(x), size):
            weights = None if importance is None else importance[at : at + size].float()
            encoded[at : at + size] = _encode(x[at : at + size].float(), weights)
    return encoded


def decode(blocks: Tensor) -> Tensor:
    """float32 `[B, 256]` of super-blocks uint8 `[B, 144]`."""
    d, dmin = blocks[:, :4].contiguous().view(torch.float16).float()[:, :, None].unbind(1)
    scales, minima = _unpacked(blocks[:, 4:16].T.int())
    nibbles = blocks[:, 16:].view(-1, BLOCKS // 2, 1, BLOCK)
    codes = torch.cat([nibbles & 15, nibbles >> 4], 2).view(-1, BLOCKS, BLOCK).float()
    return ((d * scales.T)[..., None] * codes - (dmin * minima.T)[..., None]).flatten(1)


def _encode(x: Tensor, importance: Tensor | None) -> Tensor:
    """`encode` of one chunk; inside, the 32 weights of a block are the first axis, then 8 blocks, then B."""
    x = _split(x)
    if importance is None:
        weights = _root(sum(x * x) * (1 / BLOCK)) + x.abs()
        scales, minima, codes = _search(x, weights, *PLAIN)
        (d, scales), (dmin, minima) = _rounded(scales), _rounded(minima)
    else:
        squares = x * x
        mean = sum(squares.transpose(0, 1).reshape(SUPER, -1)) * 2 * (1 / SUPER)
        weights = _split(importance) * _root(mean + squares)
        scales, minima, codes = _search(x, weights, *WEIGHTED)
        total = sum(weights)
        (d, scales), (dmin, minima) = _fitted(scales, total), _fitted(minima, total)
    packed = _packed(scales, minima)
    factors = torch.stack([d, dmin]).half()
    step, offset = (factor.float() * six for factor, six in zip(factors, _unpacked(packed)))
    codes = torch.where(step != 0, _nearest((x + offset) / step).clamp_(0, TOP), codes).to(torch.uint8)
    codes = codes.view(BLOCK, BLOCKS // 2, 2, -1)
    nibbles = (codes[:, :, 0] | codes[:, :, 1] << 4).permute(2, 1, 0).flatten(1)
    return torch.cat([factors.T.contiguous().view(torch.uint8), packed.T.to(torch.uint8), nibbles], 1)


def _split(x: Tensor) -> Tensor:
    """`[32, 8, B]` of `[B, 256]`."""
    return x.view(-1, BLOCKS, BLOCK).permute(2, 1, 0).contiguous()


def _search(x: Tensor, weights: Tensor, first: float, step: float, trials: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scale and minimum (negated, at least 0) `[8, B]` of each block and codes `[32, 8, B]` of least weighted error.

    Every trial rounds with another inverse scale and takes the least squares line through the codes. The best minimum
    so far is the offset and the end of the range of the trials after it, as in ggml.
    """
    low, high = x.amin(0).clamp_(max=0), x.amax(0)
    flat = low == high
    sum_w, sum_x = sum(weights), sum(weights * x)
    inverse = _over(TOP, high - low)
    codes = _nearest(inverse * (x - low)).clamp_(0, TOP).float()
    scale = _over(1, inverse)
    best = sum(weights * (scale * codes + low - x).square_())
    for i in range(trials):
        factor = np.float32(first) + np.float32(step) * np.float32(i) + np.float32(TOP)
        q = _nearest(_over(factor, high - low) * (x - low)).clamp_(0, TOP).float()
        wq = weights * q
        sum_q = sum(wq)
        sum_qq = sum(wq * q)
        sum_qx = sum(wq * x)
        determinant = sum_w * sum_qq - sum_q * sum_q
        slope = (sum_w * sum_qx - sum_x * sum_q) / determinant
        offset = (sum_qq * sum_x - sum_q * sum_qx) / determinant
        above = offset > 0
        slope = torch.where(above, sum_qx / sum_qq, slope)
        offset = offset.masked_fill(above, 0)
        error = sum(weights * (slope * q + offset - x).square_())
        better = (determinant > 0) & (error < best)
        best, scale, low = (torch.where(better, *two) for two in ((error, best), (slope, scale), (offset, low)))
        codes = torch.where(better, q, codes)
    return scale.masked_fill(flat, 0), -low, codes.masked_fill(flat, 0)


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """The factor `[B]` and 6-bit codes `[8, B]` of scales or minima `[8, B]`, the largest of which gets code 63."""
    high = _highest(x)
    codes = _nearest(torch.where(high > 0, _over(TOP6, high), 0) * x) & 255  # a byte in ggml, before it is clipped
    return high / torch.full_like(high, TOP6), codes.clamp_(max=TOP6)


def _fitted(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """As `_rounded`, with the factor and codes of least error weighted by `weights` `[8, B]`.

    The inverse factor is searched, then each code in turn is moved where that lets the least squares factor fit better.
    """
    high = _highest(x)
    inverse = _over(TOP6, high)
    error = x - _over(1, inverse) * (_nearest(inverse * x) & 255)
    best = sum(weights * error * error)
    for i in (-4, -3, -2, -1, 1, 2, 3, 4):
        trial = _over(np.float32(0.1) * np.float32(i) + np.float32(TOP6), high)
        error = x - _over(1, trial) * _nearest(trial * x).clamp_(max=TOP6)
        error = sum(weights * error * error)
        best, inverse = torch.where(error < best, error, best), torch.where(error < best, trial, inverse)
    codes = _nearest(inverse * x).clamp_(max=TOP6)
    wx = weights * x
    sum_qx, sum_qq = sum(wx * codes), sum(weights * codes * codes)
    codes &= 255
    for _ in range(5):
        for i in range(BLOCKS):
            w, q = weights[i], codes[i]
            qx, qq = sum_qx - wx[i] * q, sum_qq - w * q * q
            moved = _nearest(x[i] * qq / qx).clamp_(max=TOP6)
            better = (qx > 0) & (qq > 0) & (moved != q)
            qx, qq = qx + wx[i] * moved, qq + w * moved * moved
            better &= qx * qx * sum_qq > sum_qx * sum_qx * qq
            codes[i] = torch.where(better, moved & 255, q)
            sum_qx, sum_qq = torch.where(better, qx, sum_qx), torch.where(better, qq, sum_qq)
    factor = torch.where(sum_qq > 0, sum_qx / sum_qq, 0)
    return factor.masked_fill(high < TINY, 0), codes.masked_fill(high < TINY, 0)


def _highest(x: Tensor) -> Tensor:
    """The largest of the first axis, +0 where none is positive."""
    high = x.amax(0)
    return torch.where(high > 0, high, 0)


def _root(x: Tensor) -> Tensor:
    """The square root, correctly rounded; PyTorch's own is off by a bit for every sixth number on a CPU."""
    return x.double().sqrt().float()


def _over(number: float, x: Tensor) -> Tensor:
    """number / x, correctly rounded."""
    return torch.full_like(x, number) / x


def _nearest(x: Tensor) -> Tensor:
    """int32, ties to even, read off the mantissa of x + 1.5 · 2^23: beyond ±2^22 what ggml finds there, of NaN 0."""
    rounded = (x + 12582912.0).view(torch.int32).bitwise_and_(0x7FFFFF).sub_(0x400000)
    return rounded.masked_fill_(x != x, 0)


def _packed(scales: Tensor, minima: Tensor) -> Tensor:
    """int32 `[12, B]`, the bytes of scales and minima `[8, B]`; those of blocks 0 to 3 hold top bits of 4 to 7."""
    lower = torch.cat([scales[:4] | scales[4:] >> 4 << 6, minima[:4] | minima[4:] >> 4 << 6])
    return torch.cat([lower, scales[4:] & 15 | (minima[4:] & 15) << 4]) & 255


def _unpacked(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima int32 `[8, B]` of their bytes int32 `[12, B]`."""
    low, mid, high = packed.split(4)
    return torch.cat([low & 63, high & 15 | low >> 6 << 4]), torch.cat([mid & 63, high >> 4 | mid >> 6 << 4])
