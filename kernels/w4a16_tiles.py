"""The configurations of `w4a16_gemm.py`: tiles of its three sources, and for how many tokens each is chosen from.

A configuration is a tile and SPLIT, how many thread blocks of a cluster split K. What is recorded for a device and a
layer can be any of them. Where nothing is, the one with the least estimate is chosen of those whose range has the
number of tokens, a tile being cut down to the tokens that there are. They were the fastest of sweeps on an H200.

    mma         `w4a16_gemm.cu`       MT tokens, RT 16 WR rows; WK warps split the columns KS of a stage; STAGES; BLOCKS
                                      on an SM; SCALED: scales multiply weights, or the sums of a group
    wgmma       `w4a16_wgmma.cu`      WGS warpgroups of 64 rows; MT (or 64 MB) tokens; STAGES of KS columns of x; RING
                                      of them of words; SCALED unless a configuration says 0
    multicast   `w4a16_multicast.cu`  likewise, 2 warpgroups unless WGS says more; PAIR thread blocks share x;
                                      PRODUCER unless a configuration says 0

KNOWN: the columns are a constant of the source where rows and columns divide into whole tiles, so that the loop of
`wgmma` and `multicast` is unrolled; registers and shared memory limit their tiles. That of `mma` is where each stage of
a thread block has a place of its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MAX_ROWS = 2048  # tokens of a launch
BITS = (2, 4, 8)
MMA = ("MT", "RT", "WR", "WK", "KS", "STAGES", "BLOCKS", "SCALED", "SPLIT")
WGMMA, WGMMA_OF_64S = ("WGS", "MT", "KS", "STAGES", "RING", "SPLIT"), ("WGS", "MB", "KS", "STAGES", "RING", "SPLIT")
MULTICAST, MULTICAST_OF_64S = ("WGS", "MT", "STAGES", "RING", "SPLIT"), ("MB", "STAGES", "RING", "SPLIT")
SPLITS = tuple(range(1, 9))
KNOWN = {"KNOWN": 1}
KNOWN_OF_SUMS = {"KNOWN": 1, "SCALED": 0}  # scales multiply the sums of groups


@dataclass(frozen=True)
class Candidate:
    """A configuration, and what it is chosen for where none is recorded.

    Attributes:
        config: constants of its source by name.
        least, most: tokens, from and up to which it is chosen from; it is recorded alone if none lie between.
        bits: of weights.
        several: tokens from which on it is chosen from again, in several tiles.
    """

    config: dict[str, int]
    least: int
    most: int
    bits: tuple[int, ...]
    several: int = MAX_ROWS + 1

    def suits(self, tokens: int, bits: int) -> bool:
        """Whether it is chosen from for so many tokens and weights of some bits."""
        enough = self.least <= tokens <= self.most or self.several <= tokens <= MAX_ROWS
        return enough and bits in self.bits


def tokens_of(config: Mapping[str, int]) -> int:
    """Tokens of a tile, at most."""
    return config["MT"] if "MT" in config else 64 * config["MB"]


def each(
    names: Sequence[str],
    tiles: Iterable[Sequence[int]],
    splits: Iterable[int],
    least: int | Mapping[int, int],
    most: int | None = MAX_ROWS,
    bits: tuple[int, ...] = BITS,
    more: Mapping[str, int] | None = None,
    several: int = MAX_ROWS + 1,
) -> list[Candidate]:
    """A candidate for each tile with each split.

    Args:
        names: of a tile's numbers, and SPLIT.
        tiles: numbers of each tile.
        splits: thread blocks that split K.
        least: tokens from which on they are chosen from; by the tokens of a tile if not the same for all.
        most: tokens up to which they are; None for those of the tile.
        bits: of the weights for which they are.
        more: what all configurations say besides.
        several: tokens from which on they are again, in several tiles.
    """
    candidates = []
    for tile in tiles:
        for split in splits:
            config = dict(zip(names, (*tile, split), strict=True)) | (more or {})
            tokens = tokens_of(config)
            first = least if isinstance(least, int) else least[tokens]
            candidates.append(Candidate(config, first, tokens if most is None else most, bits, several))
    return candidates


def recorded_alone(
    names: Sequence[str], tiles: Iterable[Sequence[int]], splits: Iterable[int], more: Mapping[str, int]
) -> list[Candidate]:
    """Candidates that are chosen nowhere: the fastest at some layer of an H200, where they are recorded."""
    return each(names, tiles, splits, least=1, most=0, more=more)


FILLED = {16: 1, 32: 17, 64: 33, 128: 81, 192: 129}  # tokens from which on a tile of a few sizes is not mostly empty
ANY_MMA_TILES = [
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
EIGHT_KNOWN_TILES = [
    (8, 1, 1, 8, 2048, 4, 1, 0), (8, 1, 2, 8, 1024, 6, 1, 0), (8, 1, 2, 8, 2048, 3, 1, 0),
    (8, 1, 4, 4, 1024, 3, 1, 0), (8, 1, 5, 3, 768, 4, 1, 0), (8, 2, 1, 8, 1024, 6, 1, 0), (8, 2, 2, 4, 512, 8, 1, 0),
    (8, 2, 2, 8, 2048, 2, 1, 0), (8, 2, 4, 4, 1024, 2, 1, 0), (8, 2, 7, 2, 256, 6, 1, 0), (8, 3, 1, 8, 1024, 5, 1, 0),
]  # fmt: skip
EIGHT_TILES = [(8, 1, 2, 8, 1024, 4, 1, 0), (8, 1, 5, 4, 512, 7, 1, 0), (8, 1, 6, 4, 512, 4, 1, 0)]
TWELVE_TILES = [(16, 3, 1, 8, 1024, 3, 1, 0)]
THIRTY_TWO_TILES = [  # as the fastest ones of 16, more warps
    (32, 1, 2, 4, 512, 6, 1, 0), (32, 1, 3, 4, 512, 6, 1, 0), (32, 2, 4, 2, 256, 6, 1, 0), (32, 2, 7, 2, 256, 6, 1, 0),
]  # fmt: skip
KNOWN_MMA_TILES = [
    (24, 1, 3, 4, 512, 5, 1, 0), (24, 2, 4, 4, 512, 3, 1, 0), (24, 2, 7, 2, 256, 5, 1, 0),
    (24, 4, 2, 4, 512, 3, 1, 0), (24, 2, 2, 6, 768, 3, 1, 0), (24, 2, 1, 4, 512, 6, 1, 0),
    (24, 1, 1, 4, 512, 7, 1, 0), (24, 1, 1, 4, 1024, 3, 1, 0), (24, 1, 1, 8, 512, 7, 1, 0),
    (16, 1, 1, 4, 512, 8, 1, 0), (16, 1, 4, 4, 1024, 3, 1, 0), (32, 1, 1, 4, 1024, 3, 1, 0),
    (32, 1, 1, 8, 512, 6, 1, 0), (32, 2, 2, 4, 512, 4, 1, 0), (32, 1, 5, 4, 512, 3, 1, 0),
]  # fmt: skip
FEW_MMA_TILES = [
    (24, 2, 2, 4, 512, 4, 1, 0), (24, 2, 1, 8, 1024, 3, 1, 0), (16, 2, 2, 4, 512, 5, 1, 0), (32, 1, 1, 4, 512, 5, 1, 0),
    (32, 1, 3, 3, 384, 6, 1, 0), (32, 2, 1, 4, 512, 5, 1, 0), (32, 1, 3, 4, 512, 4, 1, 0),
]  # fmt: skip
FORTY_TILES = [(40, 2, 2, 4, 512, 3, 1, 0), (40, 1, 3, 4, 512, 4, 1, 0), (40, 1, 2, 4, 512, 4, 1, 0)]
FORTY_EIGHT_TILES = [(48, 3, 1, 8, 512, 3, 1, 0)]
RECORDED_MMA_TILES = [
    (8, 1, 1, 8, 512, 3, 1, 0), (8, 1, 1, 8, 512, 4, 1, 0), (8, 1, 2, 4, 512, 4, 1, 0), (8, 1, 2, 4, 512, 8, 1, 0),
    (8, 2, 1, 8, 1024, 3, 1, 0), (12, 1, 2, 4, 512, 8, 1, 0), (12, 3, 1, 8, 1024, 4, 1, 0),
    (12, 7, 1, 8, 1024, 2, 1, 0), (12, 7, 2, 4, 512, 3, 1, 0), (16, 1, 1, 8, 512, 4, 1, 0),
    (16, 1, 2, 4, 1024, 4, 1, 0), (16, 1, 4, 2, 256, 8, 1, 0), (16, 2, 1, 8, 1024, 4, 1, 0),
    (16, 2, 2, 4, 512, 4, 1, 0), (16, 3, 1, 4, 512, 7, 1, 0), (16, 4, 1, 8, 1024, 3, 1, 0),
    (16, 7, 1, 8, 1024, 2, 1, 0), (24, 1, 1, 4, 512, 4, 1, 0), (24, 2, 2, 4, 512, 4, 1, 0), (24, 2, 2, 4, 512, 5, 1, 0),
    (32, 1, 1, 4, 512, 4, 1, 0), (32, 1, 1, 4, 512, 5, 1, 0), (32, 2, 1, 4, 256, 4, 1, 0), (40, 1, 1, 4, 512, 3, 1, 0),
    (40, 1, 1, 4, 512, 4, 1, 0), (40, 1, 1, 8, 512, 5, 1, 0), (40, 1, 2, 4, 512, 4, 1, 0), (48, 1, 1, 4, 512, 3, 1, 0),
    (48, 1, 1, 4, 512, 4, 1, 0), (64, 1, 1, 4, 512, 3, 1, 0), (64, 1, 2, 2, 256, 4, 1, 0),
]  # fmt: skip
OTHER_RECORDED_MMA_TILES = [(12, 2, 1, 8, 1024, 5, 1, 0)]  # of columns that stages do not divide
SMALL_RECORDED_MMA_TILES = [
    (32, 1, 2, 2, 256, 8, 1, 0), (32, 1, 1, 4, 1024, 2, 1, 0), (72, 1, 2, 2, 256, 5, 1, 0),
    (8, 1, 1, 4, 512, 8, 4, 0), (16, 1, 1, 4, 512, 2, 4, 0), (24, 1, 1, 4, 512, 2, 1, 0), (32, 1, 1, 4, 256, 2, 1, 0),
]  # fmt: skip
OF_MMA = [
    *each(MMA, ANY_MMA_TILES, SPLITS, FILLED),
    *each(MMA, EIGHT_KNOWN_TILES, (1, 2), 1, 8, more=KNOWN),
    *each(MMA, EIGHT_TILES, (1, 2), 1, 8),
    *each(MMA, TWELVE_TILES, (1, 2), 9, 12, more=KNOWN),
    *each(MMA, THIRTY_TWO_TILES, SPLITS, 17, 32),
    *each(MMA, KNOWN_MMA_TILES, (1, 2), 17, 24, more=KNOWN),
    *each(MMA, FEW_MMA_TILES, (1, 2), 17, 24),
    *each(MMA, FORTY_TILES, SPLITS, 33, 48),
    *each(MMA, FORTY_EIGHT_TILES, SPLITS, 33, 48),
    *recorded_alone(MMA, RECORDED_MMA_TILES, (1, 2), KNOWN),
    *recorded_alone(MMA, OTHER_RECORDED_MMA_TILES, (1, 2), {}),
    *recorded_alone(MMA, SMALL_RECORDED_MMA_TILES, (2, 4, 8), KNOWN),
]

ANY_WGMMA_TILES = [
    (1, 1, 256, 5, 4), (1, 1, 256, 3, 4), (1, 1, 128, 8, 4), (2, 1, 256, 3, 4), (2, 1, 128, 8, 4), (2, 1, 128, 5, 4),
    (3, 1, 128, 8, 3), (3, 1, 128, 6, 4), (4, 1, 128, 5, 3), (1, 2, 128, 4, 3), (2, 2, 128, 3, 3), (2, 2, 64, 6, 4),
    (3, 2, 64, 5, 4), (1, 1, 128, 3, 6), (1, 1, 128, 5, 6), (1, 1, 128, 8, 6), (1, 1, 256, 3, 6), (2, 1, 128, 3, 6),
    (2, 1, 128, 3, 8), (2, 1, 128, 5, 6), (2, 1, 128, 8, 6), (2, 2, 64, 5, 6), (2, 2, 128, 3, 6), (3, 1, 128, 3, 6),
    (3, 2, 64, 3, 6), (3, 2, 64, 5, 6), (4, 1, 128, 5, 4), (2, 3, 64, 4, 4),
]  # fmt: skip
WIDE_WGMMA_TILES = [  # 128 columns a stage, for 65 to 112 tokens
    (4, 80, 128, 3, 4), (3, 80, 128, 3, 4), (2, 80, 128, 4, 4), (1, 80, 256, 3, 4), (4, 96, 128, 3, 3),
    (3, 96, 128, 4, 4), (2, 96, 256, 2, 4), (1, 96, 256, 3, 3), (3, 112, 128, 3, 3), (1, 112, 256, 3, 3),
]  # fmt: skip
LOOPS_OF_SUMS = [  # unrolled: stages of x as many as fit, half as many of words
    (3, 48, 128, 8, 4), (2, 48, 128, 8, 4), (1, 48, 128, 8, 4), (2, 32, 256, 8, 4), (2, 48, 256, 6, 3),
    (1, 32, 256, 8, 4), (1, 48, 256, 6, 3),
]  # fmt: skip
LOOPS = [
    (4, 64, 128, 6, 3), (4, 80, 128, 4, 2), (4, 104, 128, 6, 3), (3, 80, 128, 8, 4), (3, 112, 128, 4, 2),
    (3, 128, 128, 6, 2), (2, 72, 128, 8, 4), (2, 96, 128, 8, 4), (2, 128, 128, 4, 4), (2, 72, 256, 4, 2),
    (1, 80, 128, 8, 4), (1, 112, 128, 6, 3), (1, 128, 128, 4, 2), (1, 80, 256, 4, 2),
]  # fmt: skip
FROM_NINE, TO_FORTY = 9, 40  # tokens for which loops of sums over 256 rows are chosen from; beyond, registers spill
NEARLY_FULL = {  # tokens from which on others are, by tile
    32: 17, 48: 17, 64: 41, 72: 41, 80: 41, 96: 65, 104: 97, 112: 81, 128: 97, 160: 129, 192: 129, 224: 193, 256: 193,
}  # fmt: skip
SEVERAL = 257  # tokens from which on there are several tiles: unrolled loops are chosen from for them, too
SEVERAL_LOOPS = 129  # the same of `wgmma` where scales multiply weights
RECORDED_LOOPS_OF_SUMS = [
    (1, 48, 256, 3, 3), (1, 48, 256, 4, 4), (1, 56, 128, 8, 4), (1, 64, 128, 8, 8), (2, 48, 128, 8, 8),
    (2, 48, 256, 3, 3), (2, 48, 256, 4, 4), (2, 56, 128, 8, 4), (3, 32, 128, 6, 6), (3, 48, 128, 5, 5),
    (3, 48, 128, 6, 3), (4, 32, 128, 6, 3), (4, 32, 128, 6, 6), (4, 48, 128, 4, 4),
]  # fmt: skip
RECORDED_LOOPS = [
    (1, 64, 256, 3, 3), (1, 64, 256, 4, 4), (1, 80, 256, 3, 3), (2, 56, 128, 8, 4), (2, 64, 128, 4, 4),
    (2, 80, 128, 4, 4), (2, 80, 128, 6, 3), (2, 96, 128, 6, 3), (2, 112, 256, 2, 2), (2, 128, 128, 3, 3),
    (2, 128, 128, 4, 2), (3, 64, 128, 4, 4), (3, 64, 128, 6, 3), (3, 80, 128, 6, 3), (3, 96, 128, 3, 3),
    (3, 112, 128, 3, 3), (3, 128, 128, 2, 2), (4, 64, 128, 3, 3), (4, 64, 128, 4, 2), (4, 80, 128, 3, 3),
    (4, 96, 128, 2, 4), (4, 96, 128, 3, 3),
]  # fmt: skip
OF_WGMMA = [
    *each(WGMMA_OF_64S, ANY_WGMMA_TILES, SPLITS, FILLED),
    *each(WGMMA, [(4, 32, 128, 5, 5)], SPLITS, 17, 32),
    *each(WGMMA, [(2, 48, 256, 3, 3), (2, 48, 128, 8, 6)], SPLITS, 33, 48),
    *each(WGMMA, WIDE_WGMMA_TILES, SPLITS, 65, 112, bits=(4, 8)),
    *each(WGMMA, [(4, 96, 64, 5, 6)], SPLITS, 65, bits=(4, 8)),  # 256 rows: registers hold no sums of 128 tokens
    *each(WGMMA, [(4, 48, 128, 8, 4)], SPLITS, FROM_NINE, TO_FORTY, (4,), KNOWN_OF_SUMS, SEVERAL),
    *each(WGMMA, LOOPS_OF_SUMS, SPLITS, NEARLY_FULL, None, (4,), KNOWN_OF_SUMS, SEVERAL),
    *each(WGMMA, LOOPS, SPLITS, NEARLY_FULL, None, (4,), KNOWN, SEVERAL_LOOPS),
    *each(WGMMA, [(4, 96, 128, 4, 2)], (1, 2, 3, 4, 6, 8), NEARLY_FULL, None, (4,), KNOWN, SEVERAL_LOOPS),
    *recorded_alone(WGMMA, RECORDED_LOOPS_OF_SUMS, SPLITS, KNOWN_OF_SUMS),
    *recorded_alone(WGMMA, RECORDED_LOOPS, SPLITS, KNOWN),
]

LEAST_MULTICAST = 97  # tokens: up to 96 of 14336 x 4096 and 8192 x 8192 `wgmma` takes 0.90 and 0.93 of its time
MOST_TOKENS = 352  # of a tile: the registers hold no more sums
OF_MULTICAST = []
for tile in [(2, 6, 4), (3, 6, 3), (4, 4, 3), (5, 4, 3)]:  # with what fits into shared memory
    for pair in (1, 2):
        OF_MULTICAST += each(MULTICAST_OF_64S, [tile], (1, 2, 3, 4), LEAST_MULTICAST, more={"PAIR": pair})
ALONE = {"PAIR": 1}
OF_MULTICAST += [
    *each(("MT", "STAGES", "RING", "SPLIT"), [(MOST_TOKENS, 4, 3)], (1, 2, 3, 4), LEAST_MULTICAST, more=ALONE),
    *each(MULTICAST, [(4, 128, 4, 3)], (1,), LEAST_MULTICAST, 128, more=ALONE),
    *each(MULTICAST_OF_64S, [(2, 6, 3), (2, 8, 4)], (1, 2, 3, 4), NEARLY_FULL, None, (4,), ALONE | KNOWN, SEVERAL),
    *each(MULTICAST, [(4, 128, 8, 4)], (1, 2), NEARLY_FULL, None, (4,), ALONE | KNOWN, SEVERAL),
    *each(MULTICAST_OF_64S, [(3, 6, 3), (4, 4, 2)], (1, 2, 3, 4), NEARLY_FULL, None, (4,), ALONE | KNOWN, SEVERAL),
    *each(MULTICAST, [(3, 128, 6, 3), (3, 192, 4, 2)], SPLITS, NEARLY_FULL, None, (4,), ALONE | KNOWN, SEVERAL),
    *each(MULTICAST, [(4, 160, 4, 2)], (1,), NEARLY_FULL, None, (4,), ALONE | KNOWN | {"PRODUCER": 0}, SEVERAL),
    *each(MULTICAST, [(3, 224, 4, 2)], SPLITS, NEARLY_FULL, None, (4,), ALONE | KNOWN | {"PRODUCER": 0}, SEVERAL),
    *recorded_alone(MULTICAST_OF_64S, [(4, 6, 2), (4, 7, 3)], (1, 2, 3), ALONE | KNOWN),
    *recorded_alone(MULTICAST_OF_64S, [(5, 5, 2)], (1, 2), ALONE),
    *recorded_alone(MULTICAST_OF_64S, [(3, 8, 3), (4, 7, 3)], (1,), {"PAIR": 2}),
    *recorded_alone(MULTICAST, [(3, 160, 8, 3)], (1,), ALONE | KNOWN),
]

CANDIDATES = {"mma": OF_MMA, "wgmma": OF_WGMMA, "multicast": OF_MULTICAST}  # by source
