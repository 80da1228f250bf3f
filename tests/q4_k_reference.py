"""Q4_K of one super-block, one number after the other in float32, with nothing of the project's own codec in it."""

import struct
from itertools import product

import numpy as np

F = np.float32


def quantize(x, importance=None) -> bytes:
    """The 144 bytes of 256 weights; `importance` `[256]` weighs their squared errors."""
    with np.errstate(all="ignore"):
        return _quantize(np.asarray(x, F), None if importance is None else np.asarray(importance, F))


def dequantize(block: bytes) -> np.ndarray:
    """float32 `[256]`: w = d scale q - dmin min."""
    d, dmin = np.frombuffer(block[:4], np.float16).astype(F)
    result = np.empty(256, F)
    for j, (scale, low) in enumerate(_factors(block[4:16])):
        for l in range(32):  # noqa: E741
            byte = block[16 + 32 * (j // 2) + l]
            q = byte >> 4 if j % 2 else byte & 15
            result[32 * j + l] = d * F(scale) * F(q) - dmin * F(low)
    return result


def _quantize(x, importance):
    parts = [x[32 * j : 32 * j + 32] for j in range(8)]
    fits, sums = [], []
    whole = F(2) * total(x * x) / F(256)
    for j, part in enumerate(parts):
        if importance is None:
            weights = np.sqrt(total(part * part) / F(32)) + np.abs(part)
            fits.append(line(part, weights, F(-1), F(0.1), 21))
        else:
            weights = importance[32 * j : 32 * j + 32] * np.sqrt(whole + part * part)
            fits.append(line(part, weights, F(-0.9), F(0.05), 37))
        sums.append(total(weights))
    scales, lows, codes = zip(*fits)
    if importance is None:
        (d, scales), (dmin, lows) = six_bits(scales), six_bits(lows)
    else:
        (d, scales), (dmin, lows) = fitted(scales, sums), fitted(lows, sums)
    head = bytearray(12)
    for j in range(4):
        head[j], head[j + 4] = scales[j], lows[j]
    for j in range(4, 8):
        head[j + 4] = scales[j] & 15 | (lows[j] & 15) << 4
        head[j - 4] |= scales[j] >> 4 << 6 & 255
        head[j] |= lows[j] >> 4 << 6 & 255
    d, dmin = d.astype(np.float16), dmin.astype(np.float16)
    for j, (scale, low) in enumerate(_factors(head)):
        step, offset = F(d) * F(scale), F(dmin) * F(low)
        if step != 0:
            codes[j][:] = [min(15, max(0, nearest((v + offset) / step))) for v in parts[j]]
    body = [codes[j][l] | codes[j + 1][l] << 4 for j, l in product((0, 2, 4, 6), range(32))]  # noqa: E741
    return struct.pack("<2s2s", d.tobytes(), dmin.tobytes()) + bytes(head) + bytes(body)


def _factors(head):
    """(scale, minimum) of the 8 blocks."""
    for j in range(4):
        yield head[j] & 63, head[j + 4] & 63
    for j in range(4):
        yield head[j + 8] & 15 | head[j] >> 6 << 4, head[j + 8] >> 4 | head[j + 4] >> 6 << 4


def total(terms):
    result = F(0)
    for term in terms:
        result = result + term
    return result


def nearest(v) -> int:
    return (int(np.asarray(F(v) + F(12582912), F).view(np.int32)) & 0x7FFFFF) - 0x400000


def line(x, weights, first, step, trials):
    """(scale, minimum, codes) of 32 weights."""
    low, high = min(F(0), x.min()), x.max()
    if low == high:
        return F(0), -low, [0] * 32
    sum_w, sum_x = total(weights), total(weights * x)

    def rounded(inverse):
        return [min(15, max(0, nearest(inverse * (v - low)))) for v in x]

    def error(scale, codes, low):
        return total([w * ((scale * F(q) + low - v) * (scale * F(q) + low - v)) for w, q, v in zip(weights, codes, x)])

    inverse = F(15) / (high - low)
    scale, best = F(1) / inverse, rounded(inverse)
    least = error(scale, best, low)
    for i in range(trials):
        codes = rounded((first + step * F(i) + F(15)) / (high - low))
        q = np.array(codes, F)
        sum_q, sum_qq, sum_qx = total(weights * q), total(weights * q * q), total(weights * q * x)
        determinant = sum_w * sum_qq - sum_q * sum_q
        if determinant > 0:
            slope = (sum_w * sum_qx - sum_x * sum_q) / determinant
            offset = (sum_qq * sum_x - sum_q * sum_qx) / determinant
            if offset > 0:
                slope, offset = sum_qx / sum_qq, F(0)
            now = error(slope, codes, offset)
            if now < least:
                least, scale, low, best = now, slope, offset, codes
    return scale, -low, best


def six_bits(values):
    high = max(F(0), *values)
    inverse = F(63) / high if high > 0 else F(0)
    return high / F(63), [min(63, nearest(inverse * v) & 255) for v in values]


def fitted(values, weights):
    high = max(F(0), *values)
    if high < F(1e-15):
        return F(0), [0] * 8

    def error(inverse, codes):
        scale = F(1) / inverse
        return total([w * (v - scale * F(q)) * (v - scale * F(q)) for v, w, q in zip(values, weights, codes)])

    inverse = F(63) / high
    least = error(inverse, [nearest(inverse * v) & 255 for v in values])
    for i in (-4, -3, -2, -1, 1, 2, 3, 4):
        trial = (F(0.1) * F(i) + F(63)) / high
        now = error(trial, [min(63, nearest(trial * v)) for v in values])
        if now < least:
            least, inverse = now, trial
    codes = [min(63, nearest(inverse * v)) for v in values]
    sum_qx = total([w * v * F(q) for v, w, q in zip(values, weights, codes)])
    sum_qq = total([w * F(q) * F(q) for w, q in zip(weights, codes)])
    codes = [q & 255 for q in codes]
    for _ in range(5):
        for i, (v, w) in enumerate(zip(values, weights)):
            qx, qq = sum_qx - w * v * F(codes[i]), sum_qq - w * F(codes[i]) * F(codes[i])
            if qx > 0 and qq > 0 and (new := min(63, nearest(v * qq / qx))) != codes[i]:
                qx, qq = qx + w * v * F(new), qq + w * F(new) * F(new)
                if qx * qx * sum_qq > sum_qx * sum_qx * qq:
                    codes[i], sum_qx, sum_qq = new & 255, qx, qq
    return (sum_qx / sum_qq if sum_qq > 0 else F(0)), codes
