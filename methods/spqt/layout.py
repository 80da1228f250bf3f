"""Zigzag: the 256 weights of a super-block run down one column instead of along a row (SpQt, section 4.1.2).

Rows are cut into bands of 256, and super-block (R, c) holds column c of band R at address R · n + c: an input c that is
skipped skips one super-block in every band. Weights are rearranged before an unchanged quantizer, so other weights
share a scale than in rows. In two planes the codes of all super-blocks lie apart from their scales, so that the codes
of a super-block are one aligned line of 128 bytes.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

BAND = 256
HEAD = 16  # bytes of a super-block's scales, before its codes
SHARED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # linears of one module that read the same input


def to_zigzag(weight: Tensor) -> Tensor:
    """`[R / 256, K, 256]`, the columns of each band, of `[R, K]`."""
    return weight.view(-1, BAND, weight.shape[1]).transpose(1, 2).contiguous()


def from_zigzag(bands: Tensor) -> Tensor:
    """`[R, K]` of `[R / 256, K, 256]`."""
    return bands.transpose(1, 2).flatten(0, 1).contiguous()


def to_planes(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The codes `[…, 128]` and the scales `[…, 16]` of super-blocks uint8 `[…, 144]`."""
    return blocks[..., HEAD:].contiguous(), blocks[..., :HEAD].contiguous()


def from_planes(codes: Tensor, scales: Tensor) -> Tensor:
    """`[…, 144]` of both planes."""
    return torch.cat([scales, codes], -1)


def stacked(weights: Iterable[Tensor]) -> Tensor:
    """`[R, K]`: weights `[N_i, K]` one below the other, and zero rows up to the next multiple of 256."""
    tall = torch.cat(list(weights))
    return torch.nn.functional.pad(tall, (0, 0, 0, -len(tall) % BAND))


def stacks(heights: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Layers that are stacked with each other, by module path, in order; most are alone.

    `heights` are the rows of every layer. Where 256 divides those of all that share their input, nothing is stacked:
    the bands, and so the bytes, would be the same.
    """
    groups: list[tuple[str, ...]] = []
    for name in heights:
        leaf = name.rpartition(".")[2]
        kinds = next((kinds for kinds in SHARED if leaf in kinds), (leaf,))
        group = tuple(path for kind in kinds if (path := name.removesuffix(leaf) + kind) in heights)
        if all(heights[reader] % BAND == 0 for reader in group):
            group = (name,)
        if group[0] == name:
            groups.append(group)
    return groups
