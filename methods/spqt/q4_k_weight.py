"""A weight stored in Q4_K, in rows or in zigzag: its bytes in a file, and its dequantized values."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from repro.methods.spqt import layout as zigzag
from repro.methods.spqt import q4_k
from repro.models.quantized import FORMATS

Layout = Literal["row", "zigzag", "zigzag-planes"]


@dataclass(frozen=True)
class Q4KWeight:
    """Rows `start … end - 1` of a stack of layers that are stored together; only the first of these stores the stack.

    Attributes:
        layout: which of the tensors store the stack.
        start: first row of the stack that is this layer's.
        end: the row after its last.
        first: the layer that stores the stack; "" is this one.
        owner: that layer's weight, None where it is this one.
        blocks: uint8 `[N, K // 256 * 144]` in rows; `[bands, K, 144]` in zigzag.
        codes: uint8 `[bands, K, 128]` in planes.
        scales: uint8 `[bands, K, 16]` in planes.
    """

    FORMAT: ClassVar[str] = "q4_k"
    TENSORS: ClassVar[tuple[str, ...]] = ("blocks", "codes", "scales")
    NUMBERS: ClassVar[tuple[str, ...]] = ("layout", "start", "end", "first")

    layout: Layout
    start: int
    end: int
    first: str = ""
    owner: "Q4KWeight | None" = None
    blocks: Tensor | None = None
    codes: Tensor | None = None
    scales: Tensor | None = None

    @property
    def stack(self) -> tuple[Tensor, ...]:
        """The tensors that store the stack, here or in `owner`."""
        owner = self.owner or self
        return tuple(tensor for key in self.TENSORS if (tensor := getattr(owner, key)) is not None)

    @property
    def shape(self) -> torch.Size:
        """`[N, K]`"""
        first_band = self.stack[0]
        columns = first_band.shape[1] // q4_k.BYTES * q4_k.SUPER if self.layout == "row" else first_band.shape[1]
        return torch.Size((self.end - self.start, columns))

    def dequantize(self) -> Tensor:
        """float32 `[N, K]`: the weight that the super-blocks stand for."""
        rows, columns = self.shape
        if self.layout == "row":
            return q4_k.dequantize(self.stack[0][self.start : self.end], columns)
        all_rows = self.rows(0, rows)
        blocks = all_rows.blocks if self.layout == "zigzag" else zigzag.from_planes(all_rows.codes, all_rows.scales)
        bands = q4_k.decode(blocks.view(-1, q4_k.BYTES)).view(*blocks.shape[:2], zigzag.BAND)
        return zigzag.from_zigzag(bands)[all_rows.start : all_rows.end]

    def rows(self, start: int, end: int) -> "Q4KWeight":
        """A copy of the output rows `start … end - 1`, with the whole bands of 256 rows that they lie in."""
        start = self.start + start
        end = self.start + end
        size = 1 if self.layout == "row" else zigzag.BAND
        first = start // size
        last = -(-end // size)
        owner = self.owner or self
        stored = {key: t[first:last].clone() for key in self.TENSORS if (t := getattr(owner, key)) is not None}
        return replace(owner, start=start - first * size, end=end - first * size, **stored)

    def stored_bits(self) -> dict[str, int]:
        """Bits by kind of what is stored here, padding rows and the layers that share the stack included.

        Scales are the 6-bit scales and d, zeros the 6-bit minima and dmin.
        """
        blocks = 0 if self.first else sum(tensor.numel() for tensor in self.stack) // q4_k.BYTES
        factors = 6 * q4_k.BLOCKS + 16
        return {"codes": 4 * q4_k.SUPER * blocks, "scales": factors * blocks, "zeros": factors * blocks}

    @classmethod
    def restored(
        cls, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], earlier: Mapping[str, Any]
    ) -> "Q4KWeight":
        """The weight that a file holds; its stack may be that of an `earlier` layer."""
        return cls(**numbers, **tensors, owner=earlier[numbers["first"]] if numbers["first"] else None)


FORMATS[Q4KWeight.FORMAT] = Q4KWeight


def pack(weights: Mapping[str, Tensor], layout: Layout, importance: Tensor | None = None) -> dict[str, Q4KWeight]:
    """The weights `[N_i, K]` of layers that are stored together, by name.

    Args:
        weights: of one layer, or in zigzag of several that share their input.
        layout: of the stored bytes.
        importance: `[K]`, of the input channels. A super-block of zigzag has one channel, whose importance is a factor
            of all its weights' and cancels: what remains is ggml's search for importances that are all the same.

    Raises:
        UserError: K does not divide into super-blocks of a row, or a value is not finite.
    """
    if layout == "row":
        return {name: Q4KWeight("row", 0, len(w), blocks=q4_k.quantize(w, importance)) for name, w in weights.items()}
    bands = zigzag.to_zigzag(zigzag.stacked(weights.values()))
    columns = bands.view(-1, zigzag.BAND)
    alike = None if importance is None else torch.ones_like(columns, dtype=torch.float32)
    blocks = q4_k.encode(columns, alike).view(*bands.shape[:2], q4_k.BYTES)
    stored = {"blocks": blocks} if layout == "zigzag" else dict(zip(("codes", "scales"), zigzag.to_planes(blocks)))
    packed, end = {}, 0
    for name, weight in weights.items():
        start = end
        end = end + len(weight)
        packed[name] = Q4KWeight(layout, start, end, **stored)
        stored = stored if "first" in stored else {"first": name, "owner": packed[name]}
    return packed
