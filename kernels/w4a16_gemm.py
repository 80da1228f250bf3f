"""Low-bit GEMM for small batches, verification and short prompts, directly on the packed weights of `packing.py`.

    y[m, n] = sum_k x[m, k] * (q[n, k] - zero[n, group(k)]) * scale[n, group(k)]

x: fp16 or bf16 [M, K], M = 1 … 2048 (`linear.py` uses the decode kernel for one token, or few, and dequantizes for
larger M).
Weights of 4 bits (2 and 8 too), groups of 32, 64, 128 columns or one per row, symmetric or not. y: [M, N] in x's type,
summed in fp32. Bytes moved: packed weights + 2 M (K + N); operations: 2 M N K.

Algorithm of one thread block (`w4a16_gemm.cu`): WR x WK warps own 16 RT rows each; the WK warps of the same rows split
the columns of a stage. Packed weights, in the order of `mma.m16n8k16`'s A operand, their scales and MT tokens of x are
copied to shared memory several stages ahead, to keep enough bytes in flight. A lane unpacks in registers: (code - zero)
is exact in the activations' type (for bf16 a non-integer zero is rounded to 8 bits). One 16-byte read of x feeds two
k-steps. The products of one group are summed separately and multiplied by the group's scale in fp32; with SCALED the
weights are multiplied by it in the activations' type, which rounds once more (in fp16 scales must be below 128).
With KNOWN the columns are a constant of the source if they and the rows divide into whole tiles: 6 to 13 % fewer
instructions, those of addresses and of the ends.

`w4a16_wgmma.cu` runs if a configuration has WGS, on compute capability 9.0: a warpgroup holds 64 rows of A in
registers, SCALED unless a configuration says 0, and shares each read of x. Producer warps load x; the others unpack
while the tensor cores multiply what they unpacked before. With KNOWN the loop is unrolled (`turns.cuh`) if the columns
divide into whole stages: a third fewer instructions a stage. Where scales multiply the sums of groups, two groups take
turns: the tensor cores work on one while the sums of the other are scaled.

A tile of tokens is no larger than they need: of 65 tokens and a configuration for 128 it has 72 (`trimmed`).

`w4a16_multicast.cu` runs if a configuration has PAIR, for more than 64 tokens on the same devices: up to 352 tokens
share what is unpacked, and x is copied by tensor maps, one thread instead of four warps that pass it through
registers. Two warpgroups have registers for the sums of 352 tokens, three for 192, four for 128, or for 160 if the
thread that copies is one of theirs (PRODUCER 0). Which is fastest depends on how many waves of 128, 192 or 256 rows
fill the SMs.

SPLIT thread blocks of a cluster split K. Each adds up and stores a part of the sums: what the others have of it, added
up over their warps, they send to its shared memory. The order is always the same: no workspace, and bitwise
reproducible results.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from repro.kernels import nvrtc, packing
from repro.kernels.launch_config import CLUSTERS, lacks, launch_config, processors
from repro.kernels.launches import Mapped, Parameter, Step, behind
from repro.kernels.operators import HALVES, VECTOR, Argument, operator
from repro.kernels.prepared import blank
from repro.kernels.w4a16_tiles import (
    CANDIDATES,
    LEAST_MULTICAST,
    MAX_ROWS,
    MMA,
    MOST_TOKENS,
    MULTICAST,
    WGMMA,
    tokens_of,
)

SOURCE = Path(__file__).with_suffix(".cu")
WGMMA_SOURCE = SOURCE.with_name("w4a16_wgmma.cu")
MULTICAST_SOURCE = SOURCE.with_name("w4a16_multicast.cu")
TAIL = "w4a16_gemm_tail"  # where configurations for a second launch are recorded
LEAST_TILE = 16  # tokens of a tile, unless its configuration has fewer
MOST_BOX = 256  # rows of a box of a tensor map
SPACE = [candidate.config for candidate in itertools.chain.from_iterable(CANDIDATES.values())]
MULTICAST_STAGE = 128  # columns of a stage of words of `w4a16_multicast.cu`
MOST_SUMS, MOST_LOOP = 32, 128  # tokens of a tile whose sums are scaled; up to which an unrolled loop is estimated
LEAST_HEAD, MOST_BESIDE = 256, 64  # tokens of the larger of two launches beside each other, and of the smaller

CASES = [  # tokens, rows, columns (Llama 3.2 1B, 3.1 8B, 2 13B and ragged ones), bits, group, symmetric, dtype, seed
    {"M": 16, "N": 2048, "K": 8192, "bits": 4, "group": 128, "symmetric": False, "dtype": "float16", "seed": 0},
    {"M": 64, "N": 4096, "K": 14336, "bits": 4, "group": 128, "symmetric": False, "dtype": "bfloat16", "seed": 1},
    {"M": 256, "N": 5120, "K": 5120, "bits": 4, "group": 64, "symmetric": True, "dtype": "float16", "seed": 2},
    {"M": 2048, "N": 1024, "K": 4096, "bits": 4, "group": 128, "symmetric": True, "dtype": "bfloat16", "seed": 3},
    {"M": 33, "N": 127, "K": 416, "bits": 4, "group": 32, "symmetric": False, "dtype": "bfloat16", "seed": 4},
    {"M": 19, "N": 129, "K": 1001, "bits": 4, "group": 0, "symmetric": False, "dtype": "float16", "seed": 5},
    {"M": 65, "N": 300, "K": 1536, "bits": 2, "group": 64, "symmetric": False, "dtype": "float16", "seed": 6},
    {"M": 17, "N": 300, "K": 1032, "bits": 8, "group": 0, "symmetric": True, "dtype": "bfloat16", "seed": 7},
]
MOST_SHARED = {(8, 0): 166912, (8, 7): 166912, (9, 0): 232448, (10, 0): 232448}  # bytes per block, by capability
LEAST_SHARED = 101376  # of all other devices of capability 8.0 or later


def random_weight(case: dict) -> packing.PackedWeight:
    """A random packed weight `[N, K]` of one case."""
    generator = torch.Generator().manual_seed(case["seed"])
    n, k, bits, group = (case[name] for name in ("N", "K", "bits", "group"))
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, generator=generator)
    scales = torch.rand(n, k // group if group else 1, generator=generator) * 0.02 + 0.001
    zeros = torch.randint(0, 1 << bits, scales.shape, generator=generator).float()
    return packing.pack(codes, scales, None if case["symmetric"] else zeros, bits, group)


def make_inputs(case: dict, device: torch.device | str = "cpu") -> tuple[Tensor, packing.PackedWeight]:
    """x [M, K] and a random packed weight of one case."""
    x = torch.randn(case["M"], case["K"], generator=torch.Generator().manual_seed(case["seed"] + 1))
    return x.to(device, getattr(torch, case["dtype"])), random_weight(case).to(device)


def reference(x: Tensor, packed: packing.PackedWeight) -> Tensor:
    """y [M, N] in float32: dequantize, then multiply."""
    return x.float() @ packing.dequantize(packed).T


def unsupported(device: torch.device | str) -> str | None:
    """Why this kernel cannot run on `device`, or None if it can."""
    return lacks("w4a16_gemm", device) or nvrtc.unavailable()


# Numbers of tokens: with configurations of their own; of those, each that serves all tokens above the one before it; as
# many as which fewer tokens are estimated.
TOKENS = (8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
SERVED = (16, 24, 32, 64, 80, 96, 112, 128, 160, 192, 224)
ESTIMATED = (8, 12, 16, 24, 32, 40, 48, 64, 80)


def tuning_key(case: dict) -> str:
    """The key of a case in the device's file: bits, the next tuned number of tokens, and shape."""
    tokens = next((t for t in TOKENS if case["M"] <= t), TOKENS[-1])
    return f"w{case['bits']} m{tokens} {case['N']}x{case['K']}"


def serving(m: int) -> list[int]:
    """The tuned numbers of tokens whose configuration m tokens take as it is; the first that is recorded counts."""
    last = next((t for t in SERVED if m <= t), -(-m // 8) * 8)
    return [t for t in TOKENS if m <= t <= last]


def recorded_for(
    tokens: int, n: int, k: int, bits: int, device: torch.device | str, beside: bool = False
) -> dict | None:
    """What is recorded for one of `TOKENS`, alone or `beside` another launch, or None."""
    key = tuning_key({"M": tokens, "N": n, "K": k, "bits": bits})
    return (beside and launch_config(TAIL, key, device)) or launch_config("w4a16_gemm", key, device)


def configuration(m: int, n: int, k: int, bits: int, device: torch.device | str, beside: bool = False) -> dict:
    """The tuned configuration, or that of all `CANDIDATES` with the least `estimate`.

    A launch `beside` another takes what is recorded as "w4a16_gemm_tail", if anything is, and no unrolled loop is
    chosen for it: what is fastest alone may have thread blocks or clusters that find no room beside others.

    Between tuned numbers of tokens and above the last one, the tuned configuration may be for tiles that m tokens
    do not fill: another is taken where its estimate for them is lower.
    """
    tokens = next((t for t in ESTIMATED if m <= t), -(-m // 8) * 8)
    recorded = {t: recorded_for(t, n, k, bits, device, beside) for t in TOKENS if t >= min(m, TOKENS[-1])}
    for t in serving(m):
        if recorded[t]:
            return recorded[t]
    tuned = next(filter(None, recorded.values()), None)
    device = torch.device(device)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    sizes = tokens, n, k, bits, processors(device)
    able = [cheapest(*sizes, capability, beside)]
    if tuned and (tokens >= LEAST_MULTICAST or "PAIR" not in tuned):
        # Of equal estimates it comes first where its tile is full: its stages are as many as fit beside that one.
        full = trimmed(tuned, m) == tokens_of(tuned)
        able.insert(0 if full else len(able), tuned)
    return min(able, key=lambda config: estimate(config, *sizes))


@lru_cache(maxsize=4096)
def cheapest(
    m: int, n: int, k: int, bits: int = 4, sms: int = 132, capability: tuple[int, int] = (9, 0), beside: bool = False
) -> dict[str, int]:
    """The candidate with the least `estimate` for m tokens and a weight `[n, k]` in groups of 128."""
    able = chosen_from(m, bits, capability, beside)
    return min(able, key=lambda config: estimate(config, m, n, k, bits, sms))


def chosen_from(m: int, bits: int, capability: tuple[int, int], beside: bool = False) -> list[dict[str, int]]:
    """The candidates for m tokens that a device runs; `beside` another launch none with an unrolled loop."""
    able = []
    for candidate in itertools.chain.from_iterable(CANDIDATES.values()):
        fits = candidate.suits(m, bits) and runs(candidate.config, capability)
        if fits and not (beside and is_unrolled(candidate.config)):
            able.append(candidate.config)
    return able


def is_unrolled(config: dict) -> bool:
    """Whether a configuration asks for an unrolled loop, which the source with `mma` does not have."""
    return "KNOWN" in config and "RT" not in config


def runs(config: dict, capability: tuple[int, int]) -> bool:
    """Whether a device has what a configuration needs: clusters for one that splits K, `wgmma` for two sources."""
    if "RT" not in config:
        return capability == (9, 0)
    return capability >= (9, 0) or config["SPLIT"] == 1


def trimmed(config: dict, m: int) -> int:
    """Tokens of a tile when m share as many tiles as a configuration needs: a multiple of what its source adds up."""
    tiles = -(-m // tokens_of(config))
    tokens = -(-m // tiles)
    step = 16 if config.get("PAIR") == 2 or tokens > MOST_BOX else 8
    return max(min(LEAST_TILE, tokens_of(config)), -(-tokens // step) * step)


# What an SM of an H200 does in a microsecond, and what its launches take, fitted to the configurations that are
# tuned for 19 shapes (5120 x 13824 left out) and to the times that are accepted of them: the error of a time is 5 %
# in the mean, and by these estimates a tuned configuration is 2 % slower than the best one.
START = 3.2  # us of a launch, of a further wave too
READ = 32_900  # bytes of weights
LATENCY = 0.77  # us of a trip to memory: so many bytes must be on their way
PRODUCTS = {"mma": 2.83e6, "wgmma": 4.41e6}  # operations
UNPACK = 5.6e-4  # us of a warp for 16 rows of a column
KNOWN_SHARE = 0.98  # of the time, with columns that are a constant of the source
JOIN = 0.11  # us to add up the parts of a cluster
FEW_WAIT = {40: 1.19, 48: 1.11}  # times as long up to so many tokens, whose products do not hide wgmma's waits
# The same with an unrolled loop, fitted to 19 of 20 layers: of group sums that scales multiply, of weights that they
# multiply; and of more tokens.
SUMS_WAIT, LOOP_WAIT, LOOP_SHARE = {16: 0.98, 24: 1.04, 32: 1.07, 40: 1.08, 48: 1.06}, {40: 1.06, 48: 1.03}, 0.96
SHORT = 0.045  # us of a stage of 64 columns of `w4a16_wgmma.cu`, where thread blocks share weights


def at_once(together: int, sms: int, resident: int = 1) -> int:
    """Clusters of so many thread blocks that a device runs at once, with `resident` of them on an SM."""
    return max(1, CLUSTERS[together] * sms // CLUSTERS[1] * resident)


def estimate(config: dict, m: int, n: int, k: int, bits: int, sms: int) -> float:
    """Microseconds of a product `[m, k] [n, k]^T` with a configuration, as far as SMs, bytes and tokens decide them.

    A wave of thread blocks takes as long as its SMs read and multiply; the smaller of the two hides to three quarters.
    """
    form = bits, 128, False
    if "PAIR" in config:
        return estimate_multicast(config, m, n, k, sms)
    wgmma = "WGS" in config
    config = wgmma_fitted(config, *form) if wgmma else fitted(config | {"MT": trimmed(config, m)}, *form)
    split = min(config["SPLIT"], -(-k // config["KS"]))
    rows = 64 * config["WGS"] if wgmma else 16 * config["RT"] * config["WR"]
    resident = 1 if wgmma else config["BLOCKS"]
    tokens, columns = trimmed(config, m), -(-k // split // config["KS"]) * config["KS"]
    tiles = -(-m // tokens) * -(-n // rows)
    waves = -(-tiles // at_once(split, sms, resident))
    together = min(resident, -(-tiles * split // sms)) * rows  # rows that share an SM
    ahead = config["RING" if wgmma else "STAGES"] * config["KS"] * together * bits / 8
    reading = together * columns * (bits / 8 + 4 / 128) / min(READ, ahead / LATENCY)
    unpacking = UNPACK * columns * (1 if wgmma else config["RT"] / config["WK"])
    multiplying = 2 * together * columns * tokens / PRODUCTS["wgmma" if wgmma else "mma"] + unpacking
    wave = START + max(reading, multiplying) + min(reading, multiplying) / 4
    if wgmma:
        few = tokens if tokens <= MOST_SUMS else m
        unrolled = known(config, n, k) and m <= MOST_LOOP
        waits = (SUMS_WAIT if config.get("SCALED") == 0 else LOOP_WAIT) if unrolled else FEW_WAIT
        wave *= next((wait for most, wait in waits.items() if few <= most), LOOP_SHARE if unrolled else 1.0)
    if wgmma and m > tokens and config["KS"] == 64:
        wave += SHORT * columns / 64
    if known(config, n, k):
        wave *= KNOWN_SHARE
    return waves * wave + (JOIN if split > 1 else 0)


def known(config: dict, rows: int, columns: int, group: int = 128) -> bool:
    """Whether the columns of a weight are a constant of its source: asked for, and nothing ends within a tile.

    With `wgmma` only the columns have to, and those of a thread block: in whole stages and groups. Groups of 32 have
    more scales than four warpgroups have registers for beside an unrolled loop: products would wait for each other.
    """
    if "KNOWN" not in config:
        return False
    if "RT" in config:
        return rows % (16 * config["RT"] * config["WR"]) == 0 and columns % config["KS"] == 0
    if 0 < group < 64:
        return False
    stage = config.get("KS", MULTICAST_STAGE)
    return columns % stage == 0 and (group <= stage or columns % (config["SPLIT"] * group) == 0)


# The same of `w4a16_multicast.cu`, fitted to 254 times of 7 shapes and 65 to 600 tokens: the error is 5 % in the mean;
# with three or four warpgroups to some 200 of 8 shapes and 112 to 224 tokens.
MULTICAST_START = {2: 3.4, 3: 5.2, 4: 9.9}  # us of a wave, by warpgroups
MULTICAST_STEP = {2: 0.235, 3: 0.245, 4: 0.385}  # us of 64 columns, whatever the tokens: unpacking, waiting
MULTICAST_PRODUCT = {2: 1.72e-3, 3: 2.98e-3, 4: 2.7e-3}  # us of 64 columns for a token
MULTICAST_LARGE = 7e-4  # us more of 64 columns for a token beyond 256
MULTICAST_JOIN = 0.018  # us to send the sums of a token
LOOP_MULTICAST, MOST_LOOP_MULTICAST = {2: 0.91, 3: 0.91, 4: 0.93}, 256  # times as long with an unrolled loop, up to
NO_PRODUCER = 1.065  # times as long where those that multiply copy x
CROWDED = 1.1  # times as long where tiles of fewer than 200 tokens share weights on all SMs in one wave


def estimate_multicast(config: dict, m: int, n: int, k: int, sms: int) -> float:
    """Microseconds of a product with a configuration of `w4a16_multicast.cu`; PAIR decides how many clusters fit."""
    split, tokens = min(config["SPLIT"], -(-k // 128)), trimmed(config, m)
    tiles = -(-m // tokens) * -(-n // (64 * warpgroups(config) * config["PAIR"]))
    waves = -(-tiles // at_once(split * config["PAIR"], sms))
    crowded = tokens < min(m, 200) and waves == 1 and tiles * split * config["PAIR"] > 0.95 * sms
    steps = 2 * -(-k // 128 // split)
    joining = MULTICAST_JOIN * tokens * (split - 1) / split
    wgs = warpgroups(config)
    step = MULTICAST_STEP[wgs] + MULTICAST_PRODUCT[wgs] * tokens + MULTICAST_LARGE * max(0, tokens - MOST_BOX)
    wave = MULTICAST_START[wgs] + steps * step + joining
    if known(config, n, k) and m <= MOST_LOOP_MULTICAST:
        wave *= LOOP_MULTICAST[wgs]
    if config.get("PRODUCER") == 0:
        wave *= NO_PRODUCER
    return waves * wave * (CROWDED if crowded else 1)


# Two launches beside each other (beside.cuh), of an H200.
BESIDE, BESIDE_READ = 0.5, 25e6  # us that the second takes where it has room, and bytes of weights for one more
SLOWER = 1.15  # times as long as alone while the first runs
SLOWER_MMA, MOST_QUICK = 1.4, 24  # the same of `w4a16_gemm.cu` with more than so many tokens
TWO, GAIN = 0.985, 0.4  # of the time of one launch, and us less than that, which two have to be below
DECODE_START, DECODE_TOKEN = 2.5, 0.06  # us of `wna16_gemv.cu`, and by how much a token more is slower


@lru_cache(maxsize=4096)
def tokens_of_head(m: int, n: int, k: int, bits: int, device: torch.device) -> int:
    """How many of m tokens to multiply in a launch of their own, with the others beside them; 0 for one launch.

    The last wave of thread blocks leaves SMs free, which a few tokens more would make a wave of their own. Up to 256
    tokens one launch is the faster one (192 beside 17 to 64 took 1.01 to 1.22 of its time at four layers of an H200).
    """
    if m <= LEAST_HEAD or (device.type == "cuda" and torch.cuda.get_device_capability(device) != (9, 0)):
        return 0
    sms = processors(device)

    def alone(count: int) -> float:
        config = configuration(count, n, k, bits, device, True)
        if "RT" not in config:  # as without an unrolled loop, of whose gain with more than 128 tokens no estimate knows
            config = {name: value for name, value in config.items() if name not in ("KNOWN", "SCALED")}
        return estimate(config, count, n, k, bits, sms)

    times = {0: alone(m)}
    for head in sorted({*range(LEAST_HEAD, m, 64), MOST_TOKENS} - {m}):
        tail = m - head
        if not 0 < tail <= MOST_BESIDE:
            continue
        used = waves_of(configuration(head, n, k, bits, device), head, n, k, sms)
        wave = alone(head) / used.count
        if tail <= 8:
            behind = beside(wave, used.free, decoding(tail, n, k, bits, sms))
        else:
            second = configuration(tail, n, k, bits, device, True)
            slower = SLOWER_MMA if "RT" in second and tail > MOST_QUICK else SLOWER
            behind = in_turns(wave, used.free, alone(tail), waves_of(second, tail, n, k, sms), sms, slower)
        times[head] = alone(head) + BESIDE + n * k * bits / 8 / BESIDE_READ + behind
    best = min(times, key=times.get)
    return best if times[best] < min(TWO * times[0], times[0] - GAIN) else 0


def decoding(m: int, n: int, k: int, bits: int, sms: int) -> float:
    """Microseconds of up to 8 tokens by `wna16_gemv.cu`."""
    return (DECODE_START + n * k * (bits / 8 + 4 / 128) / (READ * sms)) * (1 + DECODE_TOKEN * (m - 1))


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
    tokens, resident = trimmed(config, m), config.get("BLOCKS", 1)
    if "PAIR" in config:
        together, rows = min(config["SPLIT"], -(-k // 128)) * config["PAIR"], 64 * warpgroups(config)
    elif "WGS" in config:
        together, rows = min(config["SPLIT"], -(-k // config["KS"])), 64 * config["WGS"]
    else:
        together, rows = min(config["SPLIT"], -(-k // config["KS"])), 16 * config["RT"] * config["WR"]
    clusters, room = -(-m // tokens) * -(-n // (rows * config.get("PAIR", 1))), at_once(together, sms, resident)
    count = -(-clusters // room)
    last = clusters - (count - 1) * room
    return Waves(together, clusters, room, count, 1 - min(1.0, last * together / resident / sms))


def beside(wave: float, free: float, tail: float) -> float:
    """Microseconds that a second launch of many small thread blocks goes on behind the last wave of the first.

    They take turns on the free share of the SMs while that wave runs; the rest comes behind it.
    """
    done = int(wave / tail) * free
    return 0.0 if done >= 1 else min(tail, DECODE_START + (1 - done) * tail)


def in_turns(wave: float, free: float, tail: float, waves: Waves, sms: int, slower: float) -> float:
    """The same of a second launch that fills the SMs in few waves, `tail` microseconds long by itself.

    Its thread blocks, alone or two together, run on free SMs, turn by turn, while the last wave of the first launch
    runs, and take `slower` times as long there; for larger clusters no GPC has room. What has not begun when that wave
    ends takes whole waves of its own.
    """
    turn = (tail - START) / waves.count
    at_a_time = int(free * sms / waves.together) if waves.together <= 2 else 0
    turns = int(wave / (slower * turn)) if at_a_time else 0
    left = waves.clusters - turns * at_a_time
    if left <= 0:
        return 0.0
    if left <= at_a_time:
        return (turns + 1) * slower * turn - wave
    return -(-(left - at_a_time) // waves.room) * turn


def fitted(config: dict, bits: int, group: int, symmetric: bool, most: int = MOST_SHARED[9, 0]) -> dict:
    """`config` for a format and a device with `most` bytes of shared memory.

    A warp's columns of a stage are whole packed blocks, at most 128 for 8 bits; stages are dropped until all fit.
    """
    columns = config["KS"] // config["WK"]
    columns = max(columns, packing.block_columns(bits)) if bits < 8 else min(columns, 128)
    config = config | {"KS": columns * config["WK"]}
    while shared_bytes(config, bits, group, symmetric) > most:
        if config["STAGES"] > 2:
            config["STAGES"] -= 1
        elif config["SPLIT"] > 1:
            config["SPLIT"] = 1  # sums reuse the memory of the stages
        elif config["MT"] > 8:
            config["MT"] //= 2
        else:
            config |= {"WK": config["WK"] // 2, "KS": config["KS"] // 2}
    return config


def shared_bytes(config: dict, bits: int, group: int, symmetric: bool) -> int:
    """Dynamic shared memory of a thread block: stages of x, words and scales, or sums; sums of other blocks behind."""
    columns, tiles = config["KS"] // config["WK"], config["RT"] * config["WR"]
    groups = columns // group if group and group < columns else 1
    stage = config["MT"] * columns * 2 + tiles * (2 * columns * bits + groups * (32 if symmetric else 64))
    stages = config["STAGES"] * config["WK"] * -(-stage // 128) * 128
    split, units = config["SPLIT"], tiles * config["MT"] // 8
    own = max(stages, config["WK"] * units * 512)
    return own + split * -(-units // split) * 512 + 8 if split > 1 else own


def format_defines(bits: int, group: int, symmetric: bool, dtype: torch.dtype) -> dict[str, int]:
    """The compile-time constants of `w4a16_gemm.cu` that depend on the weight and the activations' type."""
    return {"BITS": bits, "GROUP": group, "SYMMETRIC": int(symmetric), "BF16": int(dtype == torch.bfloat16)}


def is_aligned(x: Tensor) -> bool:
    """Whether rows of x begin at multiples of 16 bytes."""
    return x.shape[1] % 8 == 0 and x.is_contiguous() and x.data_ptr() % VECTOR == 0


def _aligned(x: Tensor) -> Tensor:
    """x with rows aligned to 16 bytes, padded with zeros."""
    if not is_aligned(x):
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % 8)).clone(memory_format=torch.contiguous_format)
    return x


def launch(x: Tensor, packed: packing.PackedWeight, config: dict) -> Tensor:
    """One launch with one configuration of SPACE; y `[M, N]`. Arguments as in the operator, unchecked.

    Raises:
        ValueError: the configuration is for compute capability 9.0 and the device has another.
    """
    form = packed.bits, packed.group, packed.rows, packed.columns, packed.symmetric
    return prepared(x, *form, config)(x, packed.codes, packed.scale_zero)


def prepared(
    x: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool, config: dict
) -> Callable[..., Tensor]:
    """The launch with one configuration for activations like x; it takes x, codes and scale_zero first."""
    kernel, step = planned(x, x.shape[0], bits, group, rows, columns, symmetric, config)
    write = kernel.in_a_row(("x", "codes", "scale_zero", "y"), (step,))
    aligned, made = is_aligned(x), blank(x.dtype, x.shape[0], rows)

    def launch(x: Tensor, codes: Tensor, scale_zero: Tensor, *_: object) -> Tensor:
        x = x if aligned else _aligned(x)
        y = made(x)
        write(x, codes, scale_zero, y)
        return y

    return launch


def planned(
    x: Tensor, count: int, bits: int, group: int, rows: int, columns: int, symmetric: bool, config: dict,
    part: str = "", before: int = 0,
) -> tuple[nvrtc.Function, Step]:  # fmt: skip
    """The kernel for `count` tokens of activations like x, and its launch with x, codes, scale_zero and y.

    Args:
        x: float16 or bfloat16 `[M, K]`; what the launch gets has rows that are aligned to 16 bytes.
        count: tokens, at most M.
        bits, group, rows, columns, symmetric: of the weight.
        config: one of SPACE.
        part: "HEAD" or "TAIL" of two launches that run beside each other (beside.cuh), or all.
        before: tokens of x and y before those of the launch.
    """
    capability = torch.cuda.get_device_capability(x.device)
    if ("WGS" in config or "PAIR" in config) and capability != (9, 0):
        raise ValueError(f"w4a16_gemm: {config} is for compute capability 9.0, this device has {capability}")
    if capability < (9, 0):  # no clusters
        config = config | {"SPLIT": 1}
    form = bits, group, symmetric
    source, config, thread_blocks, threads, shared = plan_of(config)(count, rows, columns, form, config, capability)
    macros = format_defines(*form, x.dtype) | config | ({part: 1} if part else {})
    kernel = nvrtc.load(source, "gemm", macros, x.device, shared)
    padded, groups = columns + -columns % 8, columns // group if group else 1
    if source == MULTICAST_SOURCE:
        box = box_rows(config)
        tokens: Parameter = Mapped("x", lambda x: nvrtc.TensorMap(x[before:], box))
    else:
        tokens = behind("x", before * columns * x.element_size())
    y = behind("y", before * rows * x.element_size())
    parameters = tokens, "codes", "scale_zero", y, count, rows, padded, groups
    return kernel, kernel.step(thread_blocks, threads, parameters, beside=part == "TAIL")


def plan_of(config: dict) -> Callable[..., tuple[Path, dict, int, int, int]]:
    """How the source that a configuration is for runs a shape: one of the three functions below."""
    if "PAIR" in config:
        return plan_multicast
    return plan_wgmma if "WGS" in config else plan_mma


def plan_mma(
    count: int, rows: int, columns: int, form: tuple[int, int, bool], config: dict, capability: tuple[int, int]
) -> tuple[Path, dict, int, int, int]:
    """How `w4a16_gemm.cu` runs a shape: source, constants, thread blocks, threads of one, bytes of shared memory."""
    config = fitted(config | {"MT": trimmed(config, count)}, *form, MOST_SHARED.get(capability, LEAST_SHARED))
    config["SPLIT"] = min(config["SPLIT"], -(-columns // config["KS"]))  # at least one stage each
    config["MT"] = trimmed(config, count)
    tiles = -(-count // config["MT"]) * -(-rows // (16 * config["RT"] * config["WR"]))
    constants = {name: config[name] for name in MMA}
    if known(config, rows, columns):
        constants["COLUMNS"] = columns
    threads = 32 * config["WR"] * config["WK"]
    return SOURCE, constants, tiles * config["SPLIT"], threads, shared_bytes(config, *form)


def wgmma_fitted(config: dict, bits: int, group: int, symmetric: bool) -> dict:
    """`config` for a format: stages are whole packed blocks, as many as fit; stages of words are dropped first."""
    config = config | {"KS": max(config["KS"], packing.block_columns(bits))}
    while wgmma_shared_bytes(config, tokens_of(config), bits, group, symmetric) > MOST_SHARED[9, 0]:
        name = next((name for name in ("RING", "STAGES") if config[name] > 2), "SPLIT")
        config[name] = 1 if name == "SPLIT" else config[name] - 1
    return config


def wgmma_shared_bytes(config: dict, tokens: int, bits: int, group: int, symmetric: bool) -> int:
    """Dynamic shared memory of a block of `w4a16_wgmma.cu`: stages of x, of words and scales, sums, mbarriers."""
    tiles, columns, split = 4 * config["WGS"], config["KS"], config["SPLIT"]
    groups = columns // group if group and group < columns else 1
    x = config["STAGES"] * -(-tokens // 16) * 16 * columns * 2
    words = config["RING"] * tiles * (2 * columns * bits + groups * (32 if symmetric else 64))
    return x + words + split * -(-tiles * tokens // 8 // split) * 512 + 8 * (2 * config["STAGES"] + 1)


def plan_wgmma(
    count: int, rows: int, columns: int, form: tuple[int, int, bool], config: dict, capability: tuple[int, int]
) -> tuple[Path, dict, int, int, int]:
    """The same of `w4a16_wgmma.cu`."""
    config = wgmma_fitted(config, *form)
    config["SPLIT"] = min(config["SPLIT"], -(-columns // config["KS"]))  # at least one stage each
    tokens = trimmed(config, count)
    tiles = -(-count // tokens) * -(-rows // (64 * config["WGS"]))
    constants = {"MT": tokens} | {name: config[name] for name in WGMMA if name != "MT"}
    constants["SCALED"] = config.get("SCALED", 1)
    if known(config, rows, columns, form[1]):
        constants["COLUMNS"] = columns
    threads, shared = 128 * config["WGS"] + 128, wgmma_shared_bytes(config, tokens, *form)
    return WGMMA_SOURCE, constants, tiles * config["SPLIT"], threads, shared


def multicast_shared_bytes(config: dict, tokens: int, bits: int, group: int, symmetric: bool) -> int:
    """Dynamic shared memory of a block of `w4a16_multicast.cu`: stages of x, words and scales, or sums; mbarriers."""
    tiles, split = 4 * warpgroups(config), config["SPLIT"]
    groups = 128 // group if group and group < 128 else 1
    x = config["STAGES"] * tokens * 64 * 2
    words = config["RING"] * tiles * (2 * 128 * bits + groups * (32 if symmetric else 64))
    sums = split * -(-tiles * tokens // 8 // split) * 512
    return max(x + words, sums) + 8 * (2 * config["STAGES"] + 1)


def warpgroups(config: dict) -> int:
    """Warpgroups of a thread block of `w4a16_multicast.cu` that unpack and multiply, 64 rows each."""
    return config.get("WGS", 2)


def box_rows(config: dict) -> int:
    """Tokens that one copy of `w4a16_multicast.cu` brings: a thread block's part of a tile, or half of that."""
    part = config["MT"] // config["PAIR"]
    return part if part <= MOST_BOX else part // 2


def plan_multicast(
    count: int, rows: int, columns: int, form: tuple[int, int, bool], config: dict, capability: tuple[int, int]
) -> tuple[Path, dict, int, int, int]:
    """The same of `w4a16_multicast.cu`."""
    config = config | {"SPLIT": min(config["SPLIT"], -(-columns // 128))}  # at least one stage each
    tokens = trimmed(config, count)
    while multicast_shared_bytes(config, tokens, *form) > MOST_SHARED[9, 0]:
        config["STAGES"] -= 1
    together = config["PAIR"] * config["SPLIT"]
    wgs = warpgroups(config)
    tiles = -(-count // tokens) * -(-rows // (64 * wgs * config["PAIR"]))
    producer = config.get("PRODUCER", 1)
    constants = {name: config[name] for name in MULTICAST if name not in ("WGS", "MT")}
    constants |= {"WGS": wgs, "MT": tokens, "PAIR": config["PAIR"], "CLUSTER": together, "PRODUCER": producer}
    if known(config, rows, columns, form[1]):
        constants["COLUMNS"] = columns
    threads, shared = 128 * (wgs + producer), multicast_shared_bytes(config, tokens, *form)
    return MULTICAST_SOURCE, constants, tiles * together, threads, shared


def on_cpu(
    x: Tensor, codes: Tensor, scale_zero: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool
) -> Tensor:
    """y [M, N] of the operator by the reference."""
    return reference(x, packing.PackedWeight(codes, scale_zero, bits, group, rows, columns, symmetric)).to(x.dtype)


def on_cuda(
    x: Tensor, codes: Tensor, scale_zero: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool
) -> Tensor:
    """y [M, N] of the operator by the kernel, with its tuned configuration."""
    return prepare(x, codes, scale_zero, bits, group, rows, columns, symmetric)(x, codes, scale_zero)


def prepare(
    x: Tensor, codes: Tensor, scale_zero: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool
) -> Callable[..., Tensor]:
    """The launch of the operator for calls like this one, with its tuned configuration."""
    config = configuration(x.shape[0], rows, columns, bits, x.device)
    return prepared(x, bits, group, rows, columns, symmetric, config)


def limit(
    x: Tensor, codes: Tensor, scale_zero: Tensor, bits: int, group: int, rows: int, columns: int, symmetric: bool
) -> str | None:
    """What is wrong with checked arguments, or None."""
    if x.shape[1] != columns or x.shape[0] > MAX_ROWS:
        return f"x is {list(x.shape)}, expected [1 to {MAX_ROWS}, {columns}]"
    return packing.misfit(codes.shape, scale_zero.shape, bits, group, rows, columns, symmetric)


w4a16_gemm = operator(
    "w4a16_gemm",
    on_cpu,
    on_cuda,
    {"x": Argument(HALVES, "M K"), **packing.TENSORS},
    empty=lambda x, codes, scale_zero, bits, group, rows, *_: x.new_empty(x.shape[0], rows),
    limit=limit,
    prepare=prepare,
)
