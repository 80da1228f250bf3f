"""Duplicated input channels of a layer: the index list of its columns, both copies of a channel in one group.

A layer of K channels of which k are split has K + k columns, filled up to whole groups with columns that read 0. Inputs
are gathered by the list before they are quantized, so that groups of inputs match groups of weights.
"""

from dataclasses import dataclass, fields
from itertools import chain, islice

import torch
from torch import Tensor
from torch.nn import functional as F

from repro.core.errors import UserError


@dataclass(frozen=True)
class Columns:
    """Which channel each of the K' columns of a layer of K channels reads.

    Attributes:
        index: int64 `[K']`, K where a column reads 0.
        first: int64 `[K]`: the column that has a channel, or its first copy.
        second: int64 `[K]`: that of its second copy, K' where there is none.
        sign: float32 `[K']`: -1 and 1 for the two copies of a channel, else 0.
    """

    index: Tensor
    first: Tensor
    second: Tensor
    sign: Tensor

    @classmethod
    def of(cls, index: Tensor, channels: int, group: int) -> "Columns":
        """The columns of an index list of any integer type.

        Raises:
            UserError: the group does not divide K', a channel is not there once or twice, or its copies are in
                different groups, which have different steps.
        """
        index = index.long()
        width = len(index)
        if group < 1 or width % group:
            raise UserError(f"{width} columns of {channels} channels do not divide into groups of {group}")
        if width == 0 or index.min() < 0 or index.max() > channels:
            raise UserError(f"an index list of {width} columns names channels other than 0 to {channels - 1}")
        positions = torch.arange(width, device=index.device)
        empty = positions.new_full((channels + 1,), width)
        first = empty.scatter_reduce(0, index, positions, "amin")[:channels]
        last = (empty - width - 1).scatter_reduce(0, index, positions, "amax")[:channels]
        count = torch.bincount(index, minlength=channels + 1)[:channels]
        if bad := ((count < 1) | (count > 2)).nonzero().flatten().tolist():
            raise UserError(f"channel {bad[0]} has {count[bad[0]]} columns; each channel has one or two")
        twice = count == 2
        if bad := (twice & (first // group != last // group)).nonzero().flatten().tolist():
            where = f"columns {first[bad[0]]} and {last[bad[0]]}, of two groups of {group}"
            raise UserError(f"channel {bad[0]} is in {where}; both copies of a channel share one step")
        sign = torch.zeros(width, device=index.device)
        sign[first[twice]], sign[last[twice]] = -1.0, 1.0
        return cls(index, first, torch.where(twice, last, width), sign)

    def to(self, device: torch.device) -> "Columns":
        """The same on another device."""
        return Columns(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def stored(self) -> Tensor:
        """A copy of the index list as it is stored: int16, or int32 from 32,768 channels on."""
        return self.index.to(torch.int16 if len(self.first) < 2**15 else torch.int32, copy=True)

    def gather(self, x: Tensor) -> Tensor:
        """`[…, K']` of `x` `[…, K]`."""
        return F.pad(x, (0, 1))[..., self.index]

    def taken(self, wide: Tensor) -> Tensor:
        """`[…, K]`: of each channel its column in `wide` `[…, K']`, the first of two."""
        return wide[..., self.first]

    def joined(self, wide: Tensor) -> Tensor:
        """`[…, K]`: of each channel the sum of its columns in `wide` `[…, K']`."""
        return wide[..., self.first] + F.pad(wide, (0, 1))[..., self.second]


def paired(twice: Tensor, group: int) -> Columns:
    """The columns of a layer whose channels `twice` (bool `[K]`) are split, as near to the channels' order as can be.

    Columns come two by two, so that no pair lies across a border: both copies of a split channel, or two neighbours
    among the other channels. Columns that read 0 are spread over the groups: one group of little else would have a
    range with 0 at its end, and a zero point that is no code.

    Raises:
        UserError: an odd group.
    """
    if group % 2:
        raise UserError(f"a group of {group} cannot hold pairs of columns alone; splitting takes an even group")
    channels = len(twice)
    single = (~twice).nonzero().flatten().tolist()
    single += [channels] * (len(single) % 2)
    pairs = [(i, i) for i in twice.nonzero().flatten().tolist()] + list(zip(single[::2], single[1::2], strict=True))
    units = iter(sorted(pairs))
    half = group // 2
    groups = -(-len(pairs) // half)
    empty = groups * half - len(pairs)
    index = []
    for number in range(groups):
        zeros = (number + 1) * empty // groups - number * empty // groups
        index += chain.from_iterable(islice(units, half - zeros))
        index += [channels] * (2 * zeros)
    return Columns.of(torch.tensor(index, device=twice.device), channels, group)
