"""Where the tokens of a product are faster in two launches beside each other (`beside.cuh`) than in one.

A few tokens more than fill the tiles of a launch make a wave of thread blocks of their own, though its last wave leaves
SMs free. As a second launch up to 64 tokens can run on these. `linear.py` launches both. How many tokens the first one
has is recorded, or what they take is estimated (`w4a16_estimates.py`), with constants for pairs measured on an H200.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from repro.kernels.launch_config import capability_of, processors
from repro.kernels.w4a16_choice import configuration, recorded_head
from repro.kernels.w4a16_estimates import READ, START, at_once, bytes_of_weight, estimate
from repro.kernels.w4a16_plans import grid_of, uses_wgmma
from repro.kernels.w4a16_tiles import MOST_TOKENS

LEAST_HEAD = 256  # tokens of the first launch
MOST_TAIL = 64  # of the second
MOST_DECODED = 8  # of a second launch by `wna16_gemv.py`, whatever the path of so many alone
BESIDE, BESIDE_READ = 0.5, 25e6  # us that the second takes where it has room, and bytes of weights for one more
SLOWER = 1.15  # times as long as alone while the first runs
SLOWER_MMA, MOST_QUICK = 1.4, 24  # the same of `w4a16_gemm.cu` with more than so many tokens
TWO, GAIN = 0.985, 0.4  # of the time of one launch, and us less than that, which two have to be below
DECODE_START, DECODE_TOKEN = 2.5, 0.06  # us of `wna16_gemv.cu`, and by how much a token more is slower
MOST_BESIDE = 2  # thread blocks of a cluster that finds free SMs: for larger ones no GPC has room


@lru_cache(maxsize=4096)
def tokens_of_head(m: int, n: int, k: int, bits: int, device: torch.device) -> int:
    """How many of m tokens to multiply in a launch of their own, with the others beside them; 0 for one launch.

    Up to 256 tokens one launch is the faster one (192 beside 17 to 64 took 1.01 to 1.22 of its time at four layers of
    an H200), and so it is where a configuration for m tokens is recorded, unless two launches are.
    """
    if m <= LEAST_HEAD or capability_of(device) != (9, 0):
        return 0
    recorded = recorded_head(m, n, k, bits, device)
    if recorded is not None:
        return recorded
    times = {head: time_of_two(head, m - head, n, k, bits, device) for head in heads_of(m)}
    if not times:
        return 0
    one, best = time_of_one(m, n, k, bits, device), min(times, key=times.get)
    return best if times[best] < min(TWO * one, one - GAIN) else 0


def heads_of(m: int) -> list[int]:
    """Numbers of tokens that the first of two launches can have: whole tiles of 64, or the largest tile there is."""
    heads = sorted({*range(LEAST_HEAD, m, 64), MOST_TOKENS})
    return [head for head in heads if 0 < m - head <= MOST_TAIL]


def time_of_one(m: int, n: int, k: int, bits: int, device: torch.device) -> float:
    """Microseconds of m tokens in one launch."""
    return estimate(configuration(m, n, k, bits, device), m, n, k, bits, processors(device))


def time_of_two(head: int, tail: int, n: int, k: int, bits: int, device: torch.device) -> float:
    """Microseconds of `head` tokens in one launch and `tail` in another beside it."""
    sms = processors(device)
    first = time_of_one(head, n, k, bits, device)
    waves = waves_of(configuration(head, n, k, bits, device), head, n, k, sms)
    wave = first / waves.count
    if tail <= MOST_DECODED:
        longer = longer_by_decoding(wave, waves.free, time_of_decoding(tail, n, k, bits, sms))
    else:
        config = configuration(tail, n, k, bits, device, beside=True)
        slower = SLOWER if uses_wgmma(config) or tail <= MOST_QUICK else SLOWER_MMA
        second = estimate(config, tail, n, k, bits, sms)
        longer = longer_in_turns(wave, waves.free, second, waves_of(config, tail, n, k, sms), sms, slower)
    return first + BESIDE + n * k * bits / 8 / BESIDE_READ + longer


def time_of_decoding(m: int, n: int, k: int, bits: int, sms: int) -> float:
    """Microseconds of up to 8 tokens by `wna16_gemv.cu`."""
    return (DECODE_START + n * k * bytes_of_weight(bits) / (READ * sms)) * (1 + DECODE_TOKEN * (m - 1))


# ---- how long the second launch goes on behind the first


@dataclass(frozen=True)
class Waves:
    """How the thread blocks of a launch fill a device.

    Attributes:
        together: thread blocks of a cluster.
        clusters: of the launch.
        room: clusters that run at once.
        count: of waves.
        free: share of the SMs that the last wave leaves free.
    """

    together: int
    clusters: int
    room: int
    count: int
    free: float


def waves_of(config: dict, m: int, n: int, k: int, sms: int) -> Waves:
    """The waves of a product `[m, k] [n, k]^T` with a configuration."""
    resident = config.get("BLOCKS", 1)  # thread blocks of an SM
    grid = grid_of(config, m, n, k)
    room = at_once(grid.together, sms, resident)
    count = -(-grid.clusters // room)
    last = grid.clusters - (count - 1) * room
    free = 1 - min(1.0, last * grid.together / resident / sms)
    return Waves(grid.together, grid.clusters, room, count, free)


def longer_by_decoding(wave: float, free: float, tail: float) -> float:
    """Microseconds that a second launch of many small thread blocks goes on behind the last wave of the first.

    They take turns on the free share of the SMs while that wave runs; the rest comes behind it.

    Args:
        wave: microseconds of that wave.
        free: share of the SMs that it leaves free.
        tail: microseconds of the second launch alone.
    """
    done = int(wave / tail) * free
    return 0.0 if done >= 1 else min(tail, DECODE_START + (1 - done) * tail)


def longer_in_turns(wave: float, free: float, tail: float, waves: Waves, sms: int, slower: float) -> float:
    """The same of a second launch that fills the SMs in few waves.

    Its thread blocks, alone or two together, run on free SMs, turn by turn, while the last wave of the first launch
    runs, and take `slower` times as long there. What has not begun when that wave ends takes whole waves of its own.

    Args:
        wave, free, tail: as above.
        waves: of the second launch.
        sms: of the device.
        slower: times as long as alone that the second launch takes beside the first.
    """
    turn = (tail - START) / waves.count
    at_a_time = int(free * sms / waves.together) if waves.together <= MOST_BESIDE else 0
    turns = int(wave / (slower * turn)) if at_a_time else 0
    left = waves.clusters - turns * at_a_time
    if left <= 0:
        return 0.0
    if left <= at_a_time:
        return (turns + 1) * slower * turn - wave
    return -(-(left - at_a_time) // waves.room) * turn
