"""How long a configuration of `w4a16_gemm.py` is estimated to take for a shape: by it one is chosen without a record.

Thread blocks run in waves. A wave takes as long as an SM reads its weights and multiplies; constants say how fast an
SM of an H200 is at either. They decide the order of configurations, not what is reported: no time in a table is one of
these. Weights are in groups of 128, whatever theirs is.
"""

from repro.kernels.launch_config import CLUSTERS
from repro.kernels.w4a16_plans import (
    LEAST_TILE,
    MOST_BOX,
    MULTICAST_STAGE,
    copies_all_at_once,
    fitted,
    grid_of,
    known,
    rows_of,
    shared_bytes,
    trimmed,
    uses_wgmma,
    warpgroups,
    wgmma_fitted,
)

# What an SM of an H200 does in a microsecond, and what its launches take, fitted to the configurations that are
# tuned for 19 shapes (5120 x 13824 left out) and to the times that are accepted of them: the error of a time is 5 %
# in the mean, and by these estimates a tuned configuration is 2 % slower than the best one.
START = 3.2  # us of a launch, of a further wave too
READ = 32_900  # bytes of weights
LATENCY = 0.77  # us of a trip to memory: so many bytes must be on their way
MMA_PRODUCTS, WGMMA_PRODUCTS = 2.83e6, 4.41e6  # operations
UNPACK = 5.6e-4  # us of a warp for 16 rows of a column
KNOWN_SHARE = 0.98  # of the time, with columns that are a constant of the source
# The same where all stages are copied at once, fitted to 2,823 times of 17 shapes and 8 to 64 tokens, those that are at
# most 1.2 times the best of their place. Their thread blocks may be small enough to share an SM.
AT_ONCE_SHARE = 0.93
SHARED_OF_SM, SHARED_OF_BLOCK = 233_472, 1024  # bytes of shared memory, and of them those of the system for a block
THREADS_OF_SM, REGISTERS_OF_SM = 2048, 65_536
REGISTERS = 96  # of a thread, about
JOIN = 0.11  # us to add up the parts of a cluster
FEW_WAIT = {40: 1.19, 48: 1.11}  # times as long up to so many tokens, whose products do not hide wgmma's waits
LONE_WAIT = 1.1  # times as long with one warpgroup and more than 64 tokens, of some 30 times
# The same with an unrolled loop, fitted to some 600 times of 18 layers, those that are at most 1.12 times the best of
# their place: of group sums that scales multiply, of weights that they multiply.
SUMS_WAIT, LOOP_WAIT = {16: 0.94, 48: 0.99}, {40: 1.06, 48: 1.03, 64: 0.97}
MORE_SUMS = {1: 1.0, 2: 1.0, 3: 1.04, 4: 1.06}  # the same of group sums of more than 16 tokens by warpgroups
# Where scales multiply the weights of an unrolled loop of more tokens, fitted to 4,107 times of 22 layers and 72 to 600
# tokens, those that are at most 1.2 times the best of their place: the error is 4 %. By warpgroups.
LEAST_LOOP = 65  # tokens from which on that is so
LOOP_STEP = {1: 0.03, 2: 0.08, 3: 0.13, 4: 0.24}  # us of 64 columns, whatever the tokens: unpacking, waiting
LOOP_PRODUCT = {1: 2.21e-3, 2: 2.97e-3, 3: 3.97e-3, 4: 3.68e-3}  # us of 64 columns for a token
LOOP_JOIN = 1e-4  # us to add up a row's sums of a token
SHORT = 0.045  # us of a stage of 64 columns of `w4a16_wgmma.cu`, where thread blocks share weights

# The same of `w4a16_multicast.cu`, fitted to 254 times of 7 shapes and 65 to 600 tokens: the error is 5 % in the mean;
# with three or four warpgroups to some 200 of 8 shapes and 112 to 224 tokens.
MULTICAST_START = {2: 3.4, 3: 5.2, 4: 9.9}  # us of a wave, by warpgroups
MULTICAST_STEP = {2: 0.235, 3: 0.245, 4: 0.385}  # us of 64 columns, whatever the tokens: unpacking, waiting
MULTICAST_PRODUCT = {2: 1.72e-3, 3: 2.98e-3, 4: 2.7e-3}  # us of 64 columns for a token
MULTICAST_LARGE = 7e-4  # us more of 64 columns for a token beyond 256
MULTICAST_JOIN = 0.018  # us to send the sums of a token
MULTICAST_LOOP_SHARE = {2: 0.91, 3: 0.91, 4: 0.93}  # times as long with an unrolled loop, by warpgroups
MOST_MULTICAST_LOOP = 256  # tokens up to which that is so
# Beyond them, in several tiles, fitted to 1,500 times of 22 layers and 257 to 640 tokens.
MULTICAST_LOOPS_SHARE = {2: 1.0, 3: 0.94, 4: 1.05}
NO_PRODUCER = 1.065  # times as long where those that multiply copy x
CROWDED = 1.1  # times as long where tiles of fewer tokens share weights on all SMs in one wave
LEAST_UNCROWDED = 200  # tokens of a tile from which on they do not
ALL_SMS = 0.95  # share of the SMs that counts as all of them

GROUP = 128  # columns that share a scale and a zero


def at_once(together: int, sms: int, resident: int = 1) -> int:
    """Clusters of so many thread blocks that a device runs at once, with `resident` of them on an SM."""
    return max(1, CLUSTERS[together] * sms // CLUSTERS[1] * resident)


def bytes_of_weight(bits: int) -> float:
    """Bytes of one packed weight, with its part of a scale and a zero."""
    return bits / 8 + 4 / GROUP


def estimate(config: dict, m: int, n: int, k: int, bits: int, sms: int) -> float:
    """Microseconds of a product `[m, k] [n, k]^T` with a configuration, as far as SMs, bytes and tokens decide them."""
    if "PAIR" in config:
        return estimate_multicast(config, m, n, k, sms)
    if uses_wgmma(config):
        return estimate_wgmma(config, m, n, k, bits, sms)
    return estimate_mma(config, m, n, k, bits, sms)


def estimate_mma(config: dict, m: int, n: int, k: int, bits: int, sms: int) -> float:
    """The same with a configuration of `w4a16_gemm.cu`, of whose thread blocks several may share an SM."""
    config = fitted(config | {"MT": trimmed(config, m)}, bits, GROUP, False)
    grid = grid_of(config, m, n, k)
    all_at_once = copies_all_at_once(config, n, k)
    resident = blocks_with_room(config, bits) if all_at_once else config["BLOCKS"]
    waves = -(-grid.clusters // at_once(grid.together, sms, resident))
    blocks_of_an_sm = min(resident, -(-grid.blocks // sms))
    rows = blocks_of_an_sm * rows_of(config)
    columns = columns_of_block(config, k, grid.split)
    requested = config["STAGES"] * config["KS"] * rows * bits / 8
    unpacking = UNPACK * columns * (config["RT"] / config["WK"])
    multiplying = 2 * rows * columns * grid.tokens / MMA_PRODUCTS + unpacking
    wave = time_of_wave(reading(rows, columns, bits, requested), multiplying)
    if known(config, n, k):
        wave *= KNOWN_SHARE
    if all_at_once:
        wave *= AT_ONCE_SHARE
    return waves * wave + (JOIN if grid.split > 1 else 0)


def blocks_with_room(config: dict, bits: int) -> int:
    """Thread blocks of `w4a16_gemm.cu` for which an SM has room; BLOCKS, or more if they need little of it."""
    threads = 32 * config["WR"] * config["WK"]
    by_memory = SHARED_OF_SM // (shared_bytes(config, bits, GROUP, False) + SHARED_OF_BLOCK)
    by_threads = min(THREADS_OF_SM, REGISTERS_OF_SM // REGISTERS) // threads
    return max(config["BLOCKS"], min(by_memory, by_threads))


def estimate_wgmma(config: dict, m: int, n: int, k: int, bits: int, sms: int) -> float:
    """The same with a configuration of `w4a16_wgmma.cu`, whose few tokens wait for the tensor cores."""
    config = wgmma_fitted(config, bits, GROUP, False)
    grid = grid_of(config, m, n, k)
    waves = -(-grid.clusters // at_once(grid.together, sms))
    rows, columns = rows_of(config), columns_of_block(config, k, grid.split)
    requested = config["RING"] * config["KS"] * rows * bits / 8
    read = reading(rows, columns, bits, requested)
    unrolled = known(config, n, k)
    if unrolled and config.get("SCALED") != 0 and m >= LEAST_LOOP:
        step = LOOP_STEP[config["WGS"]] + LOOP_PRODUCT[config["WGS"]] * grid.tokens
        joining = LOOP_JOIN * rows * grid.tokens if grid.split > 1 else 0
        return waves * (START + max(read, columns / 64 * step)) + joining
    multiplying = 2 * rows * columns * grid.tokens / WGMMA_PRODUCTS + UNPACK * columns
    wave = time_of_wave(read, multiplying) * wgmma_wait(config, m, grid.tokens, unrolled)
    if m > grid.tokens and config["KS"] == 64:
        wave += SHORT * columns / 64
    if unrolled:
        wave *= KNOWN_SHARE
    return waves * wave + (JOIN if grid.split > 1 else 0)


def columns_of_block(config: dict, k: int, split: int) -> int:
    """Columns of a thread block, in whole stages, where so many thread blocks split all k."""
    return -(-k // split // config["KS"]) * config["KS"]


def reading(rows: int, columns: int, bits: int, requested: float) -> float:
    """Microseconds in which an SM reads weights `[rows, columns]`, with so many bytes requested ahead."""
    return rows * columns * bytes_of_weight(bits) / min(READ, requested / LATENCY)


def time_of_wave(reading: float, multiplying: float) -> float:
    """Microseconds of a wave: of reading and multiplying the shorter one is hidden to three quarters."""
    return START + max(reading, multiplying) + min(reading, multiplying) / 4


def wgmma_wait(config: dict, m: int, tokens: int, unrolled: bool) -> float:
    """How many times as long m tokens in tiles of `tokens` take where they do not hide the waits of `wgmma`.

    Thread blocks of several tiles hide half of what those of one do not, by four times of 40 to 56 tokens a tile.
    """
    if unrolled and config.get("SCALED") == 0:
        wait = next((wait for most, wait in SUMS_WAIT.items() if tokens <= most), 1.0)
        return wait * MORE_SUMS[config["WGS"]] if tokens > LEAST_TILE else wait
    if unrolled:
        return next(wait for most, wait in LOOP_WAIT.items() if tokens <= most)
    for most, wait in FEW_WAIT.items():
        if tokens <= most:
            return wait if m <= tokens else (1 + wait) / 2
    return LONE_WAIT if config["WGS"] == 1 and m >= LEAST_LOOP else 1.0


def estimate_multicast(config: dict, m: int, n: int, k: int, sms: int) -> float:
    """The same with a configuration of `w4a16_multicast.cu`; PAIR decides how many clusters fit."""
    grid, wgs = grid_of(config, m, n, k), warpgroups(config)
    waves = -(-grid.clusters // at_once(grid.together, sms))
    steps = 2 * -(-k // MULTICAST_STAGE // grid.split)
    step = MULTICAST_STEP[wgs] + MULTICAST_PRODUCT[wgs] * grid.tokens
    step += MULTICAST_LARGE * max(0, grid.tokens - MOST_BOX)
    joining = MULTICAST_JOIN * grid.tokens * (grid.split - 1) / grid.split
    wave = MULTICAST_START[wgs] + steps * step + joining
    if known(config, n, k):
        shares = MULTICAST_LOOP_SHARE if m <= MOST_MULTICAST_LOOP else MULTICAST_LOOPS_SHARE
        wave *= shares[wgs]
    if config.get("PRODUCER") == 0:
        wave *= NO_PRODUCER
    shared = grid.tokens < min(m, LEAST_UNCROWDED)
    crowded = shared and waves == 1 and grid.blocks > ALL_SMS * sms
    return waves * wave * (CROWDED if crowded else 1)
