"""How the sources of `w4a16_gemm.py` run a shape: tiles cut down to the tokens, shared memory, macros, thread blocks.

A configuration (`w4a16_tiles.py`) says how many tokens and stages a tile has at most, and at most how many thread
blocks split K. `plan_of` gives what is compiled and launched for one: a tile has no more tokens than it needs, stages
are dropped until all fit into shared memory, and every thread block that splits K has a stage at least.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from repro.kernels import packing
from repro.kernels.launch_config import LaunchPlan
from repro.kernels.w4a16_tiles import MMA, MULTICAST, WGMMA, tokens_of

SOURCE = Path(__file__).with_name("w4a16_gemm.cu")  # "mma" of the candidates
WGMMA_SOURCE = SOURCE.with_name("w4a16_wgmma.cu")
MULTICAST_SOURCE = SOURCE.with_name("w4a16_multicast.cu")
LEAST_TILE = 16  # tokens of a tile, unless its configuration has fewer
MOST_BOX = 256  # rows of a box of a tensor map
MULTICAST_STAGE = 128  # columns of a stage of words of `w4a16_multicast.cu`
MOST_SHARED = {(8, 0): 166912, (8, 7): 166912, (9, 0): 232448, (10, 0): 232448}  # bytes per block, by capability
LEAST_SHARED = 101376  # of all other devices of capability 8.0 or later

Form = tuple[int, int, bool]  # bits, group and symmetric of a weight


# ---- what a configuration asks for


def uses_wgmma(config: dict) -> bool:
    """Whether a configuration is for one of the two sources with `wgmma`, which need compute capability 9.0."""
    return "RT" not in config


def is_unrolled(config: dict) -> bool:
    """Whether a configuration asks for an unrolled loop with `wgmma`."""
    return "KNOWN" in config and uses_wgmma(config)


def runs(config: dict, capability: tuple[int, int]) -> bool:
    """Whether a device has what a configuration needs: clusters for one that splits K, `wgmma` for two sources."""
    if uses_wgmma(config):
        return capability == (9, 0)
    return capability >= (9, 0) or config["SPLIT"] == 1


def known(config: dict, rows: int, columns: int, group: int = 128) -> bool:
    """Whether the columns of a weight are a constant of its source: asked for, and nothing ends within a tile.

    With `wgmma` only the columns have to, and those of a thread block: in whole stages and groups. Groups of 32 have
    more scales than four warpgroups have registers for beside an unrolled loop: products would wait for each other.
    """
    if "KNOWN" not in config:
        return False
    stage = stage_columns(config)
    if not uses_wgmma(config):
        return rows % rows_of(config) == 0 and columns % stage == 0
    if 0 < group < 64:
        return False
    return columns % stage == 0 and (group <= stage or columns % (config["SPLIT"] * group) == 0)


def copies_all_at_once(config: dict, rows: int, columns: int) -> bool:
    """Whether `w4a16_gemm.cu` copies all stages of a thread block before it uses the first, and unrolls its loop.

    It does where columns are a constant and each stage has a place of its own in shared memory.
    """
    if uses_wgmma(config) or not known(config, rows, columns):
        return False
    together = config["SPLIT"] * config["KS"]
    return columns % together == 0 and columns <= together * config["STAGES"]


def rows_of(config: dict) -> int:
    """Rows of a weight that a thread block multiplies."""
    return 64 * warpgroups(config) if uses_wgmma(config) else 16 * config["RT"] * config["WR"]


def warpgroups(config: dict) -> int:
    """Warpgroups of a thread block with `wgmma` that unpack and multiply, 64 rows each."""
    return config.get("WGS", 2)


def stage_columns(config: dict) -> int:
    """Columns of a stage of words."""
    return config.get("KS", MULTICAST_STAGE)


# ---- tiles and thread blocks


@dataclass(frozen=True)
class Grid:
    """The thread blocks of a launch.

    Attributes:
        tokens: of a tile.
        split: thread blocks that share the columns of a tile.
        together: thread blocks of a cluster; more than `split` where some share tokens.
        clusters: of the launch.
    """

    tokens: int
    split: int
    together: int
    clusters: int

    @property
    def blocks(self) -> int:
        """Thread blocks of the launch."""
        return self.clusters * self.together


def grid_of(config: dict, m: int, n: int, k: int) -> Grid:
    """The thread blocks of a product `[m, k] [n, k]^T` with a configuration."""
    tokens = trimmed(config, m)
    split = min(config["SPLIT"], -(-k // stage_columns(config)))  # at least one stage each
    pair = config.get("PAIR", 1)
    clusters = -(-m // tokens) * -(-n // (rows_of(config) * pair))
    return Grid(tokens, split, split * pair, clusters)


def trimmed(config: dict, m: int) -> int:
    """Tokens of a tile when m share as many tiles as a configuration needs: a multiple of what its source adds up.

    A tile of up to 16 tokens stays as it is.
    """
    if tokens_of(config) <= LEAST_TILE:
        return tokens_of(config)
    tiles = -(-m // tokens_of(config))
    tokens = -(-m // tiles)
    step = 16 if config.get("PAIR") == 2 or tokens > MOST_BOX else 8
    return max(LEAST_TILE, -(-tokens // step) * step)


# ---- what is compiled and launched


def format_defines(bits: int, group: int, symmetric: bool, dtype: torch.dtype) -> dict[str, int]:
    """The macros of a source that depend on the weight and the activations' type."""
    return {"BITS": bits, "GROUP": group, "SYMMETRIC": int(symmetric), "BF16": int(dtype == torch.bfloat16)}


def plan_of(
    config: dict, count: int, rows: int, columns: int, form: Form, capability: tuple[int, int]
) -> tuple[Path, LaunchPlan]:
    """The source that a configuration is for, and its launch; `format_defines` are macros besides.

    Args:
        config: one of `w4a16_gemm.SPACE`.
        count: tokens.
        rows, columns, form: of the weight.
        capability: compute capability of the device, 9.0 for a configuration with `wgmma`.
    """
    if "PAIR" in config:
        return MULTICAST_SOURCE, plan_multicast(config, count, rows, columns, form)
    if uses_wgmma(config):
        return WGMMA_SOURCE, plan_wgmma(config, count, rows, columns, form)
    return SOURCE, plan_mma(config, count, rows, columns, form, MOST_SHARED.get(capability, LEAST_SHARED))


# ---- by w4a16_gemm.cu


def plan_mma(config: dict, count: int, rows: int, columns: int, form: Form, most: int) -> LaunchPlan:
    """The launch of `w4a16_gemm.cu` on a device with `most` bytes of shared memory for a thread block."""
    config = fitted(config | {"MT": trimmed(config, count)}, *form, most)
    grid = grid_of(config, count, rows, columns)
    config |= {"MT": grid.tokens, "SPLIT": grid.split}
    macros = {name: config[name] for name in MMA}
    if known(config, rows, columns):
        macros["COLUMNS"] = columns
    threads = 32 * config["WR"] * config["WK"]
    return LaunchPlan(grid.blocks, threads, macros, shared_bytes(config, *form))


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
    split, units = config["SPLIT"], tiles * -(-config["MT"] // 8)
    own = max(stages, config["WK"] * units * 512)
    return own + split * -(-units // split) * 512 + 8 if split > 1 else own


# ---- by w4a16_wgmma.cu


def plan_wgmma(config: dict, count: int, rows: int, columns: int, form: Form) -> LaunchPlan:
    """The launch of `w4a16_wgmma.cu`."""
    config = wgmma_fitted(config, *form)
    grid = grid_of(config, count, rows, columns)
    config["SPLIT"] = grid.split
    macros = {"MT": grid.tokens} | {name: config[name] for name in WGMMA if name != "MT"}
    macros |= {"SCALED": config.get("SCALED", 1), "OVERLAID": config["OVERLAID"]}
    if known(config, rows, columns, form[1]):
        macros["COLUMNS"] = columns
    threads = 128 * config["WGS"] + 128
    return LaunchPlan(grid.blocks, threads, macros, wgmma_shared_bytes(config, grid.tokens, *form))


def wgmma_fitted(config: dict, bits: int, group: int, symmetric: bool) -> dict:
    """`config` for a format: stages are whole packed blocks, as many as fit.

    Sums lie where stages did (OVERLAID) unless they fit beside them. Where stages do not fit either, those of words are
    dropped first; where two of each do not, they have half as many columns.
    """
    config = config | {"KS": max(config["KS"], packing.block_columns(bits)), "OVERLAID": 0}
    while wgmma_shared_bytes(config, tokens_of(config), bits, group, symmetric) > MOST_SHARED[9, 0]:
        if not config["OVERLAID"]:
            config["OVERLAID"] = 1
        elif config["RING"] > 2:
            config["RING"] -= 1
        elif config["STAGES"] > 2:
            config["STAGES"] -= 1
        else:
            config["KS"] //= 2
    return config


def wgmma_shared_bytes(config: dict, tokens: int, bits: int, group: int, symmetric: bool) -> int:
    """Dynamic shared memory of a block of `w4a16_wgmma.cu`: stages of x, of words and scales, sums, mbarriers."""
    tiles, columns, split = 4 * config["WGS"], config["KS"], config["SPLIT"]
    groups = columns // group if group and group < columns else 1
    x = config["STAGES"] * tokens * columns * 2
    words = config["RING"] * tiles * (2 * columns * bits + groups * (32 if symmetric else 64))
    sums = split * -(-tiles * tokens // 8 // split) * 512
    room = max(x + words, sums) if config["OVERLAID"] else x + words + sums
    return room + 8 * (2 * config["STAGES"] + 1)


# ---- by w4a16_multicast.cu


def plan_multicast(config: dict, count: int, rows: int, columns: int, form: Form) -> LaunchPlan:
    """The launch of `w4a16_multicast.cu`."""
    grid = grid_of(config, count, rows, columns)
    config = multicast_fitted(config | {"SPLIT": grid.split}, grid.tokens, *form)
    producer = config.get("PRODUCER", 1)
    macros = {name: config[name] for name in MULTICAST if name not in ("WGS", "MT")}
    macros |= {"WGS": warpgroups(config), "MT": grid.tokens, "PAIR": config["PAIR"]}
    macros |= {"CLUSTER": grid.together, "PRODUCER": producer}
    if known(config, rows, columns, form[1]):
        macros["COLUMNS"] = columns
    threads = 128 * (warpgroups(config) + producer)
    return LaunchPlan(grid.blocks, threads, macros, multicast_shared_bytes(config, grid.tokens, *form))


def multicast_fitted(config: dict, tokens: int, bits: int, group: int, symmetric: bool) -> dict:
    """`config` for a format and so many tokens a tile: stages of x are dropped until all fit."""
    config = dict(config)
    while multicast_shared_bytes(config, tokens, bits, group, symmetric) > MOST_SHARED[9, 0]:
        config["STAGES"] -= 1
    return config


def multicast_shared_bytes(config: dict, tokens: int, bits: int, group: int, symmetric: bool) -> int:
    """Dynamic shared memory of a block of `w4a16_multicast.cu`: stages of x, words and scales, or sums; mbarriers."""
    tiles, split = 4 * warpgroups(config), config["SPLIT"]
    groups = 128 // group if group and group < 128 else 1
    x = config["STAGES"] * tokens * 64 * 2
    words = config["RING"] * tiles * (2 * 128 * bits + groups * (32 if symmetric else 64))
    sums = split * -(-tiles * tokens // 8 // split) * 512
    return max(x + words, sums) + 8 * (2 * config["STAGES"] + 1)


def box_rows(config: dict) -> int:
    """Tokens that one copy of `w4a16_multicast.cu` brings: a thread block's part of a tile, or half of that."""
    part = config["MT"] // config["PAIR"]
    return part if part <= MOST_BOX else part // 2
