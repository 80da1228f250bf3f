"""Quantized weights: codes, scales and zeros with their dequantized values, and formats that are no such grid.

A format that is no uniform grid is a class of its own. It offers what `LowBitModel` needs of a weight: `FORMAT`, its
name, `TENSORS` and `NUMBERS`, what is saved, `shape`, `dequantize`, `rows`, `stored_bits` and `restored`. Its module
adds it to `FORMATS`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from repro.core.errors import UserError


@dataclass(frozen=True)
class QuantizedWeight:
    """A linear weight `[N, K]` on a uniform grid: `w = (codes - zeros) * scales`, a scale per row and group of columns.

    Attributes:
        codes: uint8 `[N, K]`, each in `0 … 2^bits - 1`.
        scales: float `[N, G]`, G groups of `group` columns (G = 1 per channel).
        zeros: float `[N, G]`, integer-valued unless the method says otherwise (HQQ keeps them real).
        bits: width of a code.
        group: columns per group; 0 is per channel, one group a row.
        zero_bits: stored bits of one zero point; 0 where the grid is symmetric and the zero is a constant.
        scale_bits: stored bits of one scale.
        group_index: int32 `[K]` group of each column, only where columns were permuted (GPTQ act order), stored.
    """

    FORMAT: ClassVar[str] = ""  # nothing is written for the grid, so that files are what they were before formats
    TENSORS: ClassVar[tuple[str, ...]] = ("codes", "scales", "zeros", "group_index")
    NUMBERS: ClassVar[tuple[str, ...]] = ("bits", "group", "zero_bits", "scale_bits")

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int
    group: int = 0
    zero_bits: int = 0
    scale_bits: int = 16
    group_index: Tensor | None = None

    def __post_init__(self) -> None:
        rows, columns = self.codes.shape
        groups = 1 if self.group == 0 else columns // self.group
        if self.group and columns % self.group:
            raise UserError(f"{columns} input columns do not divide into groups of {self.group}")
        for name, tensor in (("scales", self.scales), ("zeros", self.zeros)):
            if tuple(tensor.shape) != (rows, groups):
                raise ValueError(
                    f"{name} is {list(tensor.shape)}, expected {[rows, groups]} for {rows}x{columns} codes"
                )

    @property
    def shape(self) -> torch.Size:
        """`[N, K]`"""
        return self.codes.shape

    def column_group(self) -> Tensor:
        """int64 `[K]`: the group of each column."""
        if self.group_index is not None:
            return self.group_index.long()
        columns = self.codes.shape[1]
        return torch.arange(columns, device=self.codes.device) // (self.group or columns)

    def dequantize(self) -> Tensor:
        """float32 `[N, K]`: the weight that the codes stand for."""
        index = self.column_group()
        return (self.codes.float() - self.zeros.float()[:, index]) * self.scales.float()[:, index]

    def rows(self, start: int, end: int) -> "QuantizedWeight":
        """A copy of the output rows `start … end - 1`."""
        index = None if self.group_index is None else self.group_index.clone()
        codes, scales, zeros = (t[start:end].clone() for t in (self.codes, self.scales, self.zeros))
        return replace(self, codes=codes, scales=scales, zeros=zeros, group_index=index)

    def stored_bits(self) -> dict[str, int]:
        """Bits by kind: codes, scales, zeros, indices."""
        return {
            "codes": self.codes.numel() * self.bits,
            "scales": self.scales.numel() * self.scale_bits,
            "zeros": self.zeros.numel() * self.zero_bits,
            "indices": 0 if self.group_index is None else self.group_index.numel() * 32,
        }

    @classmethod
    def restored(
        cls, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], earlier: Mapping[str, Any]
    ) -> "QuantizedWeight":
        """The weight that a file holds; `earlier` are the layers read before it, for formats that share tensors."""
        return cls(**tensors, **numbers)


FORMATS: dict[str, Any] = {QuantizedWeight.FORMAT: QuantizedWeight}
