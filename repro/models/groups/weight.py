"""A weight stored in groups: codes that are read at their own width, or shifted to a narrower one (Bit-by-Bit, 3.3).

A master of 8 bits is the only file: `at(4)` and `at(2)` are its shifted codes with its own scales and zero points.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from repro.core.errors import UserError
from repro.models.groups import quantizer
from repro.models.groups.columns import Columns
from repro.models.groups.quantizer import GroupGrid, Offset
from repro.models.quantized import FORMATS


def nested(bits: int) -> list[int]:
    """The widths whose min-max grid is a part of the `bits`-bit one, widest first: 2^l - 1 divides 2^b - 1."""
    return [width for width in range(bits, 1, -1) if (2**bits - 1) % (2**width - 1) == 0]


def check_nested(bits: int, master: int) -> None:
    """Raise unless codes of a master can be read at `bits` bits.

    Raises:
        UserError: they cannot.
    """
    if bits not in nested(master):
        widths = ", ".join(map(str, nested(master)))
        raise UserError(f"{bits} bits are not nested in a master of {master}; choose from: {widths}")


@dataclass(frozen=True)
class GroupWeight:
    """A linear weight `[N, K]`: ŵ = s (2^shift q + δ - z), a scale s and a zero point z per row and group.

    Attributes:
        codes: uint8 `[N, K]`, each in `0 … 2^bits - 1`.
        scales: `[N, G]` in the dtype that is stored: float8_e4m3fn, float16 or float32.
        factor: float32 `[1]`, by which E4M3 scales are multiplied; None for other scales.
        zeros: `[N, G]` in steps of the master: uint8, stored in the master's width, or int16 where a group's range
            lies so far from 0 that its zero point is no code; None for SEQ levels, whose zero point is a constant.
        bits: width of a stored code.
        group: columns of a group.
        shift: low bits of the master that are gone.
        delta: where in what a shifted code stands for its value lies.
    """

    FORMAT: ClassVar[str] = "group"
    TENSORS: ClassVar[tuple[str, ...]] = ("codes", "scales", "factor", "zeros")
    NUMBERS: ClassVar[tuple[str, ...]] = ("bits", "group", "shift", "delta")

    codes: Tensor
    scales: Tensor
    factor: Tensor | None
    zeros: Tensor | None
    bits: int
    group: int
    shift: int = 0
    delta: Offset = "centred"

    @property
    def shape(self) -> torch.Size:
        """`[N, K]`"""
        return self.codes.shape

    @property
    def master(self) -> int:
        """Width of the codes before they were shifted."""
        return self.bits + self.shift

    @property
    def zero_bits(self) -> int:
        """Stored bits of one zero point."""
        if self.zeros is None:
            return 0
        return self.master if self.zeros.dtype == torch.uint8 else 8 * self.zeros.dtype.itemsize

    def at(self, bits: int) -> "GroupWeight":
        """The same weight read at `bits` bits: shifted codes, everything else as it is.

        Raises:
            UserError: the width is not nested in the master's, or wider than what is stored.
        """
        check_nested(bits, self.master)
        if bits > self.bits:
            raise UserError(f"codes of {self.bits} bits cannot be read at {bits}; the low bits are not stored")
        away = self.bits - bits
        return replace(self, codes=quantizer.shifted(self.codes, away), bits=bits, shift=self.shift + away)

    def dequantize(self) -> Tensor:
        """float32 `[N, K]`: the weight that the codes stand for."""
        s = quantizer.restored(self.scales, self.factor)[..., None]
        z = torch.full_like(s, (2**self.master - 1) / 2) if self.zeros is None else self.zeros[..., None].float()
        codes = quantizer.split(self.codes.float(), self.group)
        return quantizer.decode(codes, s, z, self.shift, self.delta).flatten(1)

    def rows(self, start: int, end: int) -> "GroupWeight":
        """A copy of the output rows `start … end - 1`, with the factor of all."""
        codes, scales = self.codes[start:end].clone(), self.scales[start:end].clone()
        zeros = None if self.zeros is None else self.zeros[start:end].clone()
        return replace(self, codes=codes, scales=scales, zeros=zeros)

    def stored_bits(self) -> dict[str, int]:
        """Bits by kind: codes, scales with their factor, zeros."""
        factor = 0 if self.factor is None else 32
        return {
            "codes": self.codes.numel() * self.bits,
            "scales": self.scales.numel() * self.scales.dtype.itemsize * 8 + factor,
            "zeros": 0 if self.zeros is None else self.zeros.numel() * self.zero_bits,
        }

    @classmethod
    def restored(
        cls, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], earlier: Mapping[str, Any]
    ) -> "GroupWeight":
        """The weight that a file holds."""
        return cls(**{"factor": None, "zeros": None} | dict(tensors), **numbers)


@dataclass(frozen=True)
class WideWeight(GroupWeight):
    """A linear weight `[N, K]` that is stored as K' columns, two for each input channel that is split.

    Attributes:
        index: int16 or int32 `[K']`: the channel of each column, K where a column reads 0.
        channels: K.
    """

    FORMAT: ClassVar[str] = "wide_group"
    TENSORS: ClassVar[tuple[str, ...]] = (*GroupWeight.TENSORS, "index")
    NUMBERS: ClassVar[tuple[str, ...]] = (*GroupWeight.NUMBERS, "channels")

    index: Tensor = None
    channels: int = 0

    @property
    def shape(self) -> torch.Size:
        """`[N, K]`"""
        return torch.Size((len(self.codes), self.channels))

    @property
    def columns(self) -> Columns:
        """The columns of the weight; UserError if the list is not one of this layer."""
        if len(self.index) != self.codes.shape[1]:
            raise UserError(f"an index list of {len(self.index)} columns for {self.codes.shape[1]} columns of codes")
        return Columns.of(self.index, self.channels, self.group)

    def dequantize(self) -> Tensor:
        """float32 `[N, K]`: what the columns of each channel add up to."""
        return self.columns.joined(super().dequantize())

    def rows(self, start: int, end: int) -> "WideWeight":
        """A copy of the output rows `start … end - 1`, with the factor and the index list of all."""
        return replace(super().rows(start, end), index=self.index.clone())

    def stored_bits(self) -> dict[str, int]:
        """Bits by kind, the index list among them."""
        return super().stored_bits() | {"indices": self.index.numel() * self.index.dtype.itemsize * 8}


FORMATS |= {form.FORMAT: form for form in (GroupWeight, WideWeight)}


def pack(weight: Tensor, grid: GroupGrid, delta: Offset = "centred") -> GroupWeight:
    """`weight` `[N, K]` rounded to the grid that is fitted to it.

    Raises:
        UserError: the group does not divide K, or the weight holds NaN or Inf.
    """
    check_finite(weight)
    groups = quantizer.split(weight.float(), grid.group)
    return packed(groups, *quantizer.fit(groups, grid), grid, delta)


def check_finite(weight: Tensor) -> None:
    """Raise unless every entry of `weight` `[N, K]` is a number.

    Raises:
        UserError: it holds NaN or Inf.
    """
    if not torch.isfinite(weight).all():
        raise UserError(f"a {weight.shape[0]}x{weight.shape[1]} weight holds NaN or Inf; the model is damaged")


def packed(
    groups: Tensor, scales: Tensor, factor: Tensor | None, z: Tensor, grid: GroupGrid, delta: Offset
) -> GroupWeight:
    """Float32 `groups` `[N, G, group]` on the steps and zero points `[N, G, 1]` that `quantizer.fit` gives."""
    codes = quantizer.encode(groups, quantizer.restored(scales, factor), z, grid).flatten(1).to(torch.uint8)
    zeros = None
    if grid.levels != "seq":
        is_code = bool(((z >= 0) & (z <= 2**grid.bits - 1)).all())
        zeros = z.squeeze(-1).to(torch.uint8 if is_code else torch.int16)
    return GroupWeight(codes, scales.squeeze(-1), factor, zeros, grid.bits, grid.group, delta=delta)
