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
registers.

SPLIT thread blocks of a cluster split K. Each adds up and stores a part of the sums, which the others send to its
shared memory, always in the same order: no workspace, and bitwise reproducible results.
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

SOURCE = Path(__file__).with_suffix(".cu")
WGMMA_SOURCE = SOURCE.with_name("w4a16_wgmma.cu")
MULTICAST_SOURCE = SOURCE.with_name("w4a16_multicast.cu")
MAX_ROWS = 2048
TAIL = "w4a16_gemm_tail"  # where configurations for a second launch are recorded
LEAST_TILE = 16  # tokens of a tile, unless its configuration has fewer
MOST_BOX = 256  # rows of a box of a tensor map
LEAST_MULTICAST = (
    97  # tokens: up to 96 of 14336 x 4096 and 8192 x 8192 the other source takes 0.90 and 0.93 of its time
)
MOST_FEW, MOST_MIDDLE, MOST_NARROW, MOST_WIDE = 32, 48, 64, 112  # tokens up to which few, middle, wide are chosen from
MOST_KNOWN = 24  # tokens up to which columns that are a constant of the source are chosen from
MOST_FOUR = 128  # tokens up to which four warpgroups that share x by tensor maps are chosen from
MOST_LOOP = 128  # tokens up to which configurations with an unrolled loop are chosen from
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
CONSTANTS = ("MT", "RT", "WR", "WK", "KS", "STAGES", "BLOCKS", "SCALED", "SPLIT")  # of `w4a16_gemm.cu`
TILES = [  # CONSTANTS without SPLIT
    (16, 1, 2, 4, 512, 6, 1, 0), (16, 1, 1, 8, 1024, 4, 1, 0), (16, 1, 2, 8, 1024, 4, 1, 0),
    (16, 1, 3, 4, 512, 6, 1, 0), (16, 1, 4, 4, 512, 4, 1, 0), (16, 1, 4, 4, 1024, 3, 1, 0),
    (16, 1, 5, 4, 512, 5, 1, 0), (16, 1, 6, 4, 512, 4, 1, 0), (16, 1, 7, 4, 512, 4, 1, 0),
    (16, 2, 4, 2, 256, 6, 1, 0), (16, 1, 1, 4, 512, 5, 2, 0), (16, 1, 1, 4, 512, 2, 4, 0),
    (32, 2, 2, 4, 512, 3, 1, 0), (32, 1, 2, 2, 256, 5, 2, 0), (32, 1, 2, 4, 512, 4, 1, 0),
    (32, 1, 5, 4, 512, 3, 1, 0), (32, 3, 2, 4, 512, 3, 1, 0), (32, 2, 4, 2, 256, 5, 1, 0),
    (32, 2, 4, 3, 384, 3, 1, 0), (64, 2, 2, 4, 256, 3, 1, 1), (64, 2, 4, 2, 256, 3, 1, 1),
    (64, 3, 2, 4, 256, 2, 1, 1), (64, 1, 2, 4, 256, 4, 1, 1), (64, 1, 2, 2, 256, 2, 2, 0),
    (64, 1, 4, 1, 128, 4, 2, 0),
]  # fmt: skip
MOST_SHARED = {(8, 0): 166912, (8, 7): 166912, (9, 0): 232448, (10, 0): 232448}  # bytes per block, by capability
LEAST_SHARED = 101376  # of all other devices of capability 8.0 or later
WGMMA_CONSTANTS = ("WGS", "MB", "KS", "STAGES", "RING", "SPLIT")  # of `w4a16_wgmma.cu`, which gets 64 MB tokens as MT
WGMMA_TILES = [
    (1, 1, 256, 5, 4), (1, 1, 256, 3, 4), (1, 1, 128, 8, 4), (2, 1, 256, 3, 4), (2, 1, 128, 8, 4), (2, 1, 128, 5, 4),
    (3, 1, 128, 8, 3), (3, 1, 128, 6, 4), (4, 1, 128, 5, 3), (1, 2, 128, 4, 3), (2, 2, 128, 3, 3), (2, 2, 64, 6, 4),
    (3, 2, 64, 5, 4),
]  # fmt: skip
MORE_WGMMA_TILES = [  # fastest at some shape of an H200 in an earlier sweep
    (1, 1, 128, 3, 6), (1, 1, 128, 5, 6), (1, 1, 128, 8, 6), (1, 1, 256, 3, 6), (2, 1, 128, 3, 6), (2, 1, 128, 3, 8),
    (2, 1, 128, 5, 6), (2, 1, 128, 8, 6), (2, 2, 64, 5, 6), (2, 2, 128, 3, 6), (3, 1, 128, 3, 6), (3, 2, 64, 3, 6),
    (3, 2, 64, 5, 6), (4, 1, 128, 5, 4),
]  # fmt: skip
LARGE_WGMMA_TILES = [(2, 3, 64, 4, 4)]  # for 129 to 192 tokens, which fill no two tiles of 128
PLAIN_SPACE = []  # of the first two sources
for constants, tiles in (
    (CONSTANTS, TILES),
    (WGMMA_CONSTANTS, WGMMA_TILES + MORE_WGMMA_TILES + LARGE_WGMMA_TILES),
):
    for tile in tiles:
        for split in (1, 2, 3, 4, 5, 6, 7, 8):
            PLAIN_SPACE.append(dict(zip(constants, (*tile, split))))
MULTICAST_STAGE = 128  # columns of a stage of words of `w4a16_multicast.cu`
MULTICAST_CONSTANTS = ("MB", "STAGES", "RING", "SPLIT", "PAIR")  # of `w4a16_multicast.cu`, likewise
MULTICAST_TILES = [
    (2, 6, 4),
    (3, 6, 3),
    (4, 4, 3),
    (5, 4, 3),
]  # fastest on an H200, with what fits into shared memory
MULTICAST_SPACE = []
for tile, pair, split in itertools.product(MULTICAST_TILES, (1, 2), (1, 2, 3, 4)):
    MULTICAST_SPACE.append(dict(zip(MULTICAST_CONSTANTS, (*tile, split, pair))))
MOST_TOKENS = 352  # of a tile: the registers hold no more sums
for split in (1, 2, 3, 4):
    MULTICAST_SPACE.append({"MT": MOST_TOKENS, "STAGES": 4, "RING": 3, "SPLIT": split, "PAIR": 1})
FOUR_SPACE = [  # of the same source: 256 rows, which four warpgroups multiply, for 97 to 128 tokens
    {"WGS": 4, "MT": 128, "STAGES": 4, "RING": 3, "SPLIT": 1, "PAIR": 1}
]
BETWEEN_CONSTANTS = ("WGS", "MT", "KS", "STAGES", "RING", "SPLIT")  # of `w4a16_wgmma.cu`, for at most MT tokens a tile
BETWEEN_TILES = [(4, 96, 64, 5, 6)]  # 256 rows, for which the registers do not hold the sums of 128 tokens
BETWEEN_SPACE = []
for tile, split in itertools.product(BETWEEN_TILES, (1, 2, 3, 4, 5, 6, 7, 8)):
    BETWEEN_SPACE.append(dict(zip(BETWEEN_CONSTANTS, (*tile, split))))
FEW_TILES = [(32, 1, 2, 4, 512, 6, 1, 0), (32, 1, 3, 4, 512, 6, 1, 0), (32, 2, 4, 2, 256, 6, 1, 0),
             (32, 2, 7, 2, 256, 6, 1, 0)]  # for 17 to 32 tokens: as the fastest ones of 16, more warps  # fmt: skip
FEW_WGMMA_TILES = [(4, 32, 128, 5, 5)]
MIDDLE_TILES = [(40, 2, 2, 4, 512, 3, 1, 0), (40, 1, 3, 4, 512, 4, 1, 0), (40, 1, 2, 4, 512, 4, 1, 0)]  # for 33 to 40
LARGER_MIDDLE_TILES = [(48, 3, 1, 8, 512, 3, 1, 0)]  # for 41 to 48
MIDDLE_WGMMA_TILES = [(2, 48, 256, 3, 3), (2, 48, 128, 8, 6)]
WIDE_TILES = [(4, 80, 128, 3, 4), (3, 80, 128, 3, 4), (2, 80, 128, 4, 4), (1, 80, 256, 3, 4)]  # for 65 to 80 tokens
WIDER_TILES = [(4, 96, 128, 3, 3), (3, 96, 128, 4, 4), (2, 96, 256, 2, 4), (1, 96, 256, 3, 3)]  # for 81 to 96
WIDEST_TILES = [(3, 112, 128, 3, 3), (1, 112, 256, 3, 3)]  # for 97 to 112
FEW_SPACE, MIDDLE_SPACE, WIDE_SPACE = [], [], []
for space, constants, tiles in (
    (FEW_SPACE, CONSTANTS, FEW_TILES),
    (FEW_SPACE, BETWEEN_CONSTANTS, FEW_WGMMA_TILES),
    (MIDDLE_SPACE, CONSTANTS, MIDDLE_TILES),
    (MIDDLE_SPACE, BETWEEN_CONSTANTS, MIDDLE_WGMMA_TILES),
    (MIDDLE_SPACE, CONSTANTS, LARGER_MIDDLE_TILES),
    (WIDE_SPACE, BETWEEN_CONSTANTS, WIDE_TILES + WIDER_TILES + WIDEST_TILES),
):
    for tile, split in itertools.product(tiles, (1, 2, 3, 4, 5, 6, 7, 8)):
        space.append(dict(zip(constants, (*tile, split))))
KNOWN_TILES = [  # fastest at some shape of an H200 with columns that are a constant of the source, up to 32 tokens
    (24, 1, 3, 4, 512, 5, 1, 0), (24, 2, 4, 4, 512, 3, 1, 0), (24, 2, 7, 2, 256, 5, 1, 0),
    (24, 4, 2, 4, 512, 3, 1, 0), (24, 2, 2, 6, 768, 3, 1, 0), (24, 2, 1, 4, 512, 6, 1, 0),
    (24, 1, 1, 4, 512, 7, 1, 0), (24, 1, 1, 4, 1024, 3, 1, 0), (24, 1, 1, 8, 512, 7, 1, 0),
    (16, 1, 1, 4, 512, 8, 1, 0), (16, 1, 4, 4, 1024, 3, 1, 0), (32, 1, 1, 4, 1024, 3, 1, 0),
    (32, 1, 1, 8, 512, 6, 1, 0), (32, 2, 2, 4, 512, 4, 1, 0), (32, 1, 5, 4, 512, 3, 1, 0),
]  # fmt: skip
UNKNOWN_TILES = [  # the same with columns that are an argument
    (24, 2, 2, 4, 512, 4, 1, 0), (24, 2, 1, 8, 1024, 3, 1, 0), (16, 2, 2, 4, 512, 5, 1, 0), (32, 1, 1, 4, 512, 5, 1, 0),
    (32, 1, 3, 3, 384, 6, 1, 0), (32, 2, 1, 4, 512, 5, 1, 0), (32, 1, 3, 4, 512, 4, 1, 0),
]  # fmt: skip
EIGHT_TILES = [  # for up to 8 tokens, with columns that are a constant
    (8, 1, 1, 8, 2048, 4, 1, 0), (8, 1, 2, 8, 1024, 6, 1, 0), (8, 1, 2, 8, 2048, 3, 1, 0),
    (8, 1, 4, 4, 1024, 3, 1, 0), (8, 1, 5, 3, 768, 4, 1, 0), (8, 2, 1, 8, 1024, 6, 1, 0), (8, 2, 2, 4, 512, 8, 1, 0),
    (8, 2, 2, 8, 2048, 2, 1, 0), (8, 2, 4, 4, 1024, 2, 1, 0), (8, 2, 7, 2, 256, 6, 1, 0), (8, 3, 1, 8, 1024, 5, 1, 0),
]  # fmt: skip
EIGHT_UNKNOWN_TILES = [  # the same with columns that are an argument
    (8, 1, 2, 8, 1024, 4, 1, 0), (8, 1, 5, 4, 512, 7, 1, 0), (8, 1, 6, 4, 512, 4, 1, 0),
]  # fmt: skip
KNOWN_SPACE, EIGHT_SPACE = [], []
for space, tiles, known_columns in (
    (KNOWN_SPACE, KNOWN_TILES, {"KNOWN": 1}),
    (KNOWN_SPACE, UNKNOWN_TILES, {}),
    (EIGHT_SPACE, EIGHT_TILES, {"KNOWN": 1}),
    (EIGHT_SPACE, EIGHT_UNKNOWN_TILES, {}),
):
    for tile, split in itertools.product(tiles, (1, 2)):
        space.append(dict(zip(CONSTANTS, (*tile, split))) | known_columns)
MORE_KNOWN_TILES = [  # for 9 tokens and more
    (16, 1, 2, 8, 1024, 4, 1, 0), (16, 1, 5, 4, 512, 5, 1, 0), (16, 1, 7, 4, 1024, 2, 1, 0),
    (16, 2, 1, 8, 1024, 4, 1, 0), (16, 4, 1, 8, 1024, 3, 1, 0), (16, 2, 2, 4, 512, 6, 1, 0),
    (16, 3, 1, 4, 512, 7, 1, 0), (24, 2, 2, 4, 512, 4, 1, 0), (40, 1, 1, 8, 512, 5, 1, 0),
    (40, 1, 2, 4, 512, 4, 1, 0), (40, 1, 3, 4, 512, 4, 1, 0), (48, 1, 1, 8, 512, 4, 1, 0),
]  # fmt: skip
SMALL_KNOWN_TILES = [  # for few rows, with more splits
    (8, 1, 1, 4, 512, 8, 4, 0), (16, 1, 1, 4, 512, 2, 4, 0), (32, 1, 2, 2, 256, 5, 2, 0),
]  # fmt: skip
LOOP_TILES = [  # of `w4a16_wgmma.cu` with an unrolled loop, chosen from: BETWEEN_CONSTANTS without SPLIT, and SCALED
    (4, 24, 128, 8, 8, 0), (4, 32, 128, 6, 6, 0), (4, 32, 128, 4, 4, 0), (3, 32, 128, 6, 6, 0), (2, 32, 128, 8, 8, 0),
    (1, 32, 256, 4, 4, 0), (4, 48, 128, 4, 4, 0), (3, 48, 128, 4, 4, 0), (2, 48, 128, 8, 8, 0), (1, 48, 256, 3, 3, 0),
    (4, 64, 128, 3, 3, 1), (3, 64, 128, 4, 4, 1), (2, 64, 256, 3, 3, 1), (2, 64, 128, 4, 4, 1), (1, 64, 256, 3, 3, 1),
    (4, 80, 128, 3, 3, 1), (2, 80, 128, 4, 4, 1), (1, 80, 256, 3, 3, 1), (4, 96, 128, 3, 3, 1), (4, 96, 128, 2, 4, 1),
    (3, 96, 128, 3, 3, 1),
]  # fmt: skip
LOOP_MULTICAST_TILES = [(2, 6, 3), (2, 8, 4)]  # of `w4a16_multicast.cu`: MULTICAST_CONSTANTS, likewise
MORE_THAN = {24: 8, 32: 8, 48: 32, 64: 40, 80: 64, 96: 64, 128: 96}  # by tokens of such a tile: it is chosen for more
LOOP_SPACE = []
for (*tile, scaled), split in itertools.product(LOOP_TILES, (1, 2, 3, 4, 5, 6, 7, 8)):
    config = dict(zip(BETWEEN_CONSTANTS, (*tile, split))) | {"KNOWN": 1}
    LOOP_SPACE.append(config if scaled else config | {"SCALED": 0})
for tile, split in itertools.product(LOOP_MULTICAST_TILES, (1, 2, 3, 4)):
    LOOP_SPACE.append(dict(zip(MULTICAST_CONSTANTS, (*tile, split, 1))) | {"KNOWN": 1})
for split in (1, 2):
    LOOP_SPACE.append({"WGS": 4, "MT": 128, "STAGES": 8, "RING": 4, "SPLIT": split, "PAIR": 1, "KNOWN": 1})
TURNS_TILES = [  # more of them, recorded alone
    (4, 32, 128, 5, 5, 0), (2, 32, 256, 3, 3, 0), (2, 32, 256, 4, 4, 0), (3, 48, 128, 5, 5, 0), (2, 48, 128, 6, 6, 0),
    (2, 48, 256, 3, 3, 0), (2, 48, 256, 4, 4, 0), (1, 48, 256, 4, 4, 0), (3, 80, 128, 3, 3, 1), (2, 80, 128, 4, 8, 1),
    (2, 96, 128, 4, 4, 1), (1, 64, 128, 5, 5, 1), (1, 64, 128, 8, 8, 0), (1, 64, 256, 4, 4, 1),
    (1, 64, 256, 5, 5, 0), (2, 64, 128, 6, 6, 1), (2, 64, 128, 8, 4, 1), (4, 64, 128, 4, 4, 1), (2, 96, 256, 2, 4, 1),
    (1, 112, 256, 2, 4, 1), (3, 112, 128, 3, 3, 1), (2, 128, 128, 3, 3, 1), (3, 128, 64, 3, 3, 1),
]  # fmt: skip
TURNS_SPACE = []  # fastest at some shape of an H200 with columns that are a constant; recorded, not chosen from
for tiles, splits in ((MORE_KNOWN_TILES, (1, 2)), (SMALL_KNOWN_TILES, (2, 4, 8))):
    for tile, split in itertools.product(tiles, splits):
        TURNS_SPACE.append(dict(zip(CONSTANTS, (*tile, split))) | {"KNOWN": 1})
for (*tile, scaled), split in itertools.product(TURNS_TILES, (1, 2, 3, 4, 5, 6, 7, 8)):
    config = dict(zip(BETWEEN_CONSTANTS, (*tile, split))) | {"KNOWN": 1}
    TURNS_SPACE.append(config if scaled else config | {"SCALED": 0})
for split in (1, 2, 3, 4):
    TURNS_SPACE.append(dict(zip(MULTICAST_CONSTANTS, (4, 4, 2, split, 1))) | {"KNOWN": 1})
SPACES = {
    "plain": PLAIN_SPACE,
    "multicast": MULTICAST_SPACE,
    "between": BETWEEN_SPACE,
    "few": FEW_SPACE,
    "wide": WIDE_SPACE,
    "middle": MIDDLE_SPACE,
    "four": FOUR_SPACE,
    "known": KNOWN_SPACE,
    "turns": TURNS_SPACE,
    "loop": LOOP_SPACE,
    "eight": EIGHT_SPACE,
}
SPACE = list(itertools.chain.from_iterable(SPACES.values()))


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


TOKENS = (8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 256)  # numbers of tokens with their own configurations
SERVED = (16, 24, 32, 64, 80, 96, 112, 128)  # each serves all tokens above the one before it
FILLED = (16, 24, 32, 64, 80)  # tokens of tiles of the plain space
ESTIMATED = (8, 16, 24, 32, 40, 48, 64, 80)  # as many as which fewer tokens are estimated


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
    """The tuned configuration, or that of all `SPACES` with the least `estimate`.

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
    able = []
    for space in chosen_from(tokens, bits, capability):
        if beside and space == "loop":
            continue
        able.append(cheapest(space, *sizes, capability))
    if tuned and (tokens >= LEAST_MULTICAST or "PAIR" not in tuned):
        # Of equal estimates it comes first where its tile is full: its stages are as many as fit beside that one.
        full = trimmed(tuned, m) == tokens_of(tuned)
        able.insert(0 if full else len(able), tuned)
    return min(able, key=lambda config: estimate(config, *sizes))


def chosen_from(tokens: int, bits: int, capability: tuple[int, int]) -> list[str]:
    """The names of the `SPACES` that a configuration for so many tokens is chosen from."""
    least_and_most = {
        "plain": (1, MAX_ROWS),
        "eight": (1, 8),
        "few": (LEAST_TILE + 1, MOST_FEW),
        "known": (LEAST_TILE + 1, MOST_KNOWN),
        "middle": (MOST_FEW + 1, MOST_MIDDLE),
    }
    if capability == (9, 0):
        if bits > 2:  # of 2 bits a stage is 128 columns
            least_and_most |= {"wide": (MOST_NARROW + 1, MOST_WIDE), "between": (MOST_NARROW + 1, MAX_ROWS)}
        least_and_most |= {"multicast": (LEAST_MULTICAST, MAX_ROWS), "four": (LEAST_MULTICAST, MOST_FOUR)}
        if bits == 4:
            least_and_most["loop"] = (min(MORE_THAN.values()) + 1, MOST_LOOP)
    return [space for space, (least, most) in least_and_most.items() if least <= tokens <= most]


@lru_cache(maxsize=4096)
def cheapest(
    space: str, m: int, n: int, k: int, bits: int = 4, sms: int = 132, capability: tuple[int, int] = (9, 0)
) -> dict[str, int]:
    """The configuration of one of `SPACES` with the least `estimate` for m tokens and a weight `[n, k]`, groups of 128.

    Of those that the device runs; of the plain ones only tiles that m tokens fill but for 8.
    """
    able = [config for config in SPACES[space] if runs(config, capability)]
    if space == "loop":
        able = [config for config in able if suits(config, m)]
    if space == "plain":
        able = [config for config in able if tokens_of(config) <= whole(m) + 8]
    return min(able, key=lambda config: estimate(config, m, n, k, bits, sms))


def suits(config: dict, m: int) -> bool:
    """Whether one of LOOP_SPACE is chosen from for m tokens: they nearly fill its tile; at most 16 do for 256 rows."""
    if m <= LEAST_TILE and config.get("WGS") != 4:
        return False
    return MORE_THAN[tokens_of(config)] < m <= tokens_of(config)


def runs(config: dict, capability: tuple[int, int]) -> bool:
    """Whether a device has what the configuration needs: clusters for one that splits K, wgmma for `w4a16_wgmma.cu`."""
    return (capability >= (9, 0) or config["SPLIT"] == 1) and (capability == (9, 0) or "WGS" not in config)


def whole(m: int) -> int:
    """The next of `FILLED`, then the next multiple of 64: plain tiles are at most as large."""
    return next((t for t in FILLED if m <= t), -(-m // 64) * 64)


def tokens_of(config: dict) -> int:
    """Tokens of a tile, at most."""
    return config["MT"] if "MT" in config else 64 * config["MB"]


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
        few = tokens if tokens <= MOST_FEW else m
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


# The same of `w4a16_multicast.cu`, fitted to 254 times of 7 shapes and 65 to 600 tokens: the error is 5 % in the mean.
MULTICAST_START = 3.4  # us of a wave
MULTICAST_STEP = 0.235  # us of 64 columns, whatever the tokens: unpacking, waiting
MULTICAST_PRODUCT = 1.72e-3  # us of 64 columns for a token
FOUR_STEP, FOUR_PRODUCT = 0.53, 2.3e-3  # the same with four warpgroups
MULTICAST_LARGE = 7e-4  # us more of 64 columns for a token beyond 256
MULTICAST_JOIN = 0.018  # us to send the sums of a token
LOOP_MULTICAST = {2: 0.91, 4: 0.93}  # times as long with an unrolled loop, by warpgroups
CROWDED = 1.1  # times as long where tiles of fewer than 200 tokens share weights on all SMs in one wave


def estimate_multicast(config: dict, m: int, n: int, k: int, sms: int) -> float:
    """Microseconds of a product with a configuration of MULTICAST_SPACE; PAIR decides how many clusters fit."""
    split, tokens = min(config["SPLIT"], -(-k // 128)), trimmed(config, m)
    tiles = -(-m // tokens) * -(-n // (64 * warpgroups(config) * config["PAIR"]))
    waves = -(-tiles // at_once(split * config["PAIR"], sms))
    crowded = tokens < min(m, 200) and waves == 1 and tiles * split * config["PAIR"] > 0.95 * sms
    steps = 2 * -(-k // 128 // split)
    joining = MULTICAST_JOIN * tokens * (split - 1) / split
    step = MULTICAST_STEP + MULTICAST_PRODUCT * tokens + MULTICAST_LARGE * max(0, tokens - MOST_BOX)
    if warpgroups(config) == 4:
        step = FOUR_STEP + FOUR_PRODUCT * tokens
    wave = MULTICAST_START + steps * step + joining
    if known(config, n, k) and m <= MOST_LOOP:
        wave *= LOOP_MULTICAST[warpgroups(config)]
    return waves * wave * (CROWDED if crowded else 1)


# Two launches beside each other (beside.cuh), of an H200.
BESIDE, BESIDE_READ = 0.5, 25e6  # us that the second takes where it has room, and bytes of weights for one more
SLOWER = 1.15  # times as long as alone while the first runs
TWO = 0.985  # of the time of one launch, which two have to be below
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
            waves = waves_of(configuration(tail, n, k, bits, device, True), tail, n, k, sms)
            behind = in_turns(wave, used.free, alone(tail), waves, sms)
        times[head] = alone(head) + BESIDE + n * k * bits / 8 / BESIDE_READ + behind
    best = min(times, key=times.get)
    return best if times[best] < TWO * times[0] else 0


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


def in_turns(wave: float, free: float, tail: float, waves: Waves, sms: int) -> float:
    """The same of a second launch that fills the SMs in few waves, `tail` microseconds long by itself.

    Its thread blocks, alone or two together, run on free SMs, turn by turn, while that wave runs; for larger clusters
    no GPC has room. What has not begun when it ends takes whole waves of its own.
    """
    turn = (tail - START) / waves.count
    at_a_time = int(free * sms / waves.together) if waves.together <= 2 else 0
    turns = int(wave / (SLOWER * turn)) if at_a_time else 0
    left = waves.clusters - turns * at_a_time
    if left <= 0:
        return 0.0
    if left <= at_a_time:
        return (turns + 1) * SLOWER * turn - wave
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
        else:
            config["MT"] //= 2
    return config


def shared_bytes(config: dict, bits: int, group: int, symmetric: bool) -> int:
    """Dynamic shared memory of a thread block: stages of x, words and scales; sums behind (SPLIT > 1) or over them."""
    columns, tiles = config["KS"] // config["WK"], config["RT"] * config["WR"]
    groups = columns // group if group and group < columns else 1
    stage = config["MT"] * columns * 2 + tiles * (2 * columns * bits + groups * (32 if symmetric else 64))
    stages = config["STAGES"] * config["WK"] * -(-stage // 128) * 128
    units = tiles * config["MT"] // 8
    sums = config["SPLIT"] * config["WK"] * -(-units // config["SPLIT"]) * 512
    return stages + sums + 8 if config["SPLIT"] > 1 else max(stages, sums)


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
    constants = {name: config[name] for name in CONSTANTS}
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
    constants = {"MT": tokens} | {name: config[name] for name in WGMMA_CONSTANTS if name != "MB"}
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
    constants = {"MT": tokens} | {name: config[name] for name in MULTICAST_CONSTANTS if name != "MB"}
    producer = config.get("PRODUCER", 1)
    constants |= {"WGS": wgs, "CLUSTER": together, "PRODUCER": producer}
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
