"""Gigabytes of the quantized linears of a paper's own model: arithmetic on its public shapes, no run and no stand-in.

Counted is what `GroupWeight` and `WideWeight` store: codes, a scale and a zero point for each group, the factor of E4M3
scales, the index list of split channels. Embedding, head and norms are not counted; in 16 bits those of Llama-3.2-1B
alone take 0.53 GB, more than all that Table 3 of Bit-by-Bit prints. 10^9 bytes are a GB.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from repro.methods.bitbybit import splitting
from repro.metrics.metric import Metric
from repro.models.groups.quantizer import GroupGrid

SCALE_BITS = {"e4m3": 8, "float16": 16, "float32": 32}


@dataclass(frozen=True)
class Memory(Metric):
    """Nothing but the unit."""

    VERSION = 1
    PUBLIC = True

    unit: str = "GB"

    def exact(self, steps: Sequence[Any], shape: Any) -> float | None:
        """Gigabytes at a public shape; None where the last step's config has no `stored_grid`, as Bit-by-Bit's has.

        A zero point takes the bits of a code. Weights decide that: a layer with a group on one side of 0 stores 16
        bits.

        Args:
            steps: those of a parsed recipe.
            shape: the `PublicShape`.
        """
        config = steps[-1].config if steps else None
        grid = getattr(config, "stored_grid", None)
        if grid is None:
            return None
        is_split = getattr(config, "split", "none") != "none"
        total = 0
        for number, (n, k) in enumerate(shape.linears):
            block = number * shape.layers // len(shape.linears)
            share = splitting.ratio(block, shape.layers, config.split_first, config.split_last) if is_split else 0.0
            total += layer_bits(n, k, splitting.count(share, k), grid)
        return total / 8e9


def layer_bits(n: int, k: int, split: int, grid: GroupGrid) -> int:
    """Stored bits of a linear of `n` outputs and `k` inputs, of which `split` have two columns."""
    half = grid.group // 2
    groups = -(-(split + -(-(k - split) // 2)) // half) if split else -(-k // grid.group)  # pairs, as `columns.paired`
    zero = 0 if grid.levels == "seq" else grid.bits
    index = 0
    if split:
        index = (16 if k < 2**15 else 32) * groups * grid.group
    factor = 32 if grid.scale == "e4m3" else 0
    return n * groups * (grid.group * grid.bits + SCALE_BITS[grid.scale] + zero) + factor + index
