"""A weight stored in Q4_K, in rows or in zigzag: what a compressed model's file holds, and the weight that it means."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from repro.methods.spqt import layout as zigzag
from repro.methods.spqt import q4_k
from repro.models.quantized import FORMATS

Layout = Literal["row", "zigzag", "zigzag-planes"]


@dataclass(frozen=True, init=False)
class Q4KWeight:
    """Rows `start … end - 1` of a stack of layers that are stored together; only the first of these stores the stack.

    Attributes:
        stack: uint8 `[N, K // 256 * 144]` in rows; `[bands, K, 144]` in zigzag; codes `[bands, K, 128]` and scales
            `[bands, K, 16]` in planes.
        layout: which of these.
        start: first row of the stack that is this layer's.
        end: the row after its last.
        first: the layer that stores the stack; "" is this one.
    """

    FORMAT: ClassVar[str] = "q4_k"
    TENSORS: ClassVar[tuple[str, ...]] = ("blocks", "codes", "scales")
    NUMBERS: ClassVar[tuple[str, ...]] = ("layout", "start", "end", "first")

    stack: tuple[Tensor, ...]
    layout: Layout
    start: int
    end: int
    first: str = ""

    def __init__(
        self, stack: tuple[Tensor, ...] = (), layout: Layout = "row", start: int = 0, end: int = 0, first: str = "",
        **tensors: Tensor,
    ) -> None:  # fmt: skip
        """`tensors`, by the names of TENSORS, are the stack as a file holds it, in place of `stack`."""
        stack = tuple(tensors[key] for key in self.TENSORS if key in tensors) or stack
        for name, value in (("stack", stack), ("layout", layout), ("start", start), ("end", end), ("first", first)):
            object.__setattr__(self, name, value)

    @property
    def shape(self) -> torch.Size:
        """`[N, K]`"""
        one = self.stack[0]
        columns = one.shape[1] // q4_k.BYTES * q4_k.SUPER if self.layout == "row" else one.shape[1]
        return torch.Size((self.end - self.start, columns))

    @property
    def blocks(self) -> Tensor | None:
        """The super-blocks, if they are stored here in one plane."""
        return None if self.first or len(self.stack) > 1 else self.stack[0]

    @property
    def codes(self) -> Tensor | None:
        """The plane of codes, if it is stored here."""
        return None if self.first or len(self.stack) == 1 else self.stack[0]

    @property
    def scales(self) -> Tensor | None:
        """The plane of scales, if it is stored here."""
        return None if self.first or len(self.stack) == 1 else self.stack[1]

    def dequantize(self) -> Tensor:
        """float32 `[N, K]`: the weight that the super-blocks stand for."""
        rows, columns = self.shape
        if self.layout == "row":
            return q4_k.dequantize(self.stack[0][self.start : self.end], columns)
        own = self.rows(0, rows)
        blocks = own.stack[0] if len(own.stack) == 1 else zigzag.from_planes(*own.stack)
        bands = q4_k.decode(blocks.view(-1, q4_k.BYTES)).view(*blocks.shape[:2], zigzag.BAND)
        return zigzag.from_zigzag(bands)[own.start : own.end]

    def rows(self, start: int, end: int) -> "Q4KWeight":
        """A copy of the output rows `start … end - 1`, with the whole bands of 256 rows that they lie in."""
        start, end, size = self.start + start, self.start + end, 1 if self.layout == "row" else zigzag.BAND
        first, last = start // size, -(-end // size)
        stack = tuple(tensor[first:last].clone() for tensor in self.stack)
        return replace(self, stack=stack, start=start - first * size, end=end - first * size, first="")

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
        return cls(earlier[numbers["first"]].stack if numbers["first"] else (), **numbers, **tensors)


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
        return {name: Q4KWeight((q4_k.quantize(w, importance),), "row", 0, len(w)) for name, w in weights.items()}
    bands = zigzag.to_zigzag(zigzag.stacked(weights.values()))
    columns = bands.view(-1, zigzag.BAND)
    alike = None if importance is None else torch.ones_like(columns, dtype=torch.float32)
    blocks = q4_k.encode(columns, alike).view(*bands.shape[:2], q4_k.BYTES)
    stack = (blocks,) if layout == "zigzag" else zigzag.to_planes(blocks)
    found, end, first = {}, 0, ""
    for name, weight in weights.items():
        start, end = end, end + len(weight)
        found[name] = Q4KWeight(stack, layout, start, end, first)
        first = first or name
    return found
