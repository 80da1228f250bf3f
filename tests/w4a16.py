"""What tests of products of 16-bit activations with packed weights share: weights and their forms, inputs, cases."""

import pytest
import torch

from repro.kernels import packing, w4a16_gemm, w4a16_tiles

LARGEST = {"MT": w4a16_tiles.MOST_TOKENS, "STAGES": 4, "RING": 3, "SPLIT": 1, "PAIR": 1}  # of all tiles
NEEDS_WGMMA = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)


def random_weight(
    rows: int, columns: int, bits: int, group: int, symmetric: bool = False, seed: int = 0
) -> packing.PackedWeight:
    """A weight of codes, scales and zeros that are random but always the same."""
    case = {"N": rows, "K": columns, "bits": bits, "group": group, "symmetric": symmetric, "seed": seed}
    return w4a16_gemm.random_weight(case)


def inputs(
    tokens: int, rows: int = 48, columns: int = 256, bits: int = 4, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, packing.PackedWeight]:
    """x [tokens, columns] and a weight [rows, columns] in groups of 64."""
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    return x, random_weight(rows, columns, bits, 64)


def weight(packed: packing.PackedWeight) -> list:
    """The arguments by which an operator is given a weight."""
    names = ("codes", "scale_zero", "bits", "group", "rows", "columns", "symmetric")
    return [getattr(packed, name) for name in names]


def some_slow(cases: list, always: tuple[int, ...]) -> list:
    """Each case is compiled by itself; those that always run have every width, group, dtype and kind of tile."""
    return [pytest.param(case, marks=() if i in always else pytest.mark.slow) for i, case in enumerate(cases)]
