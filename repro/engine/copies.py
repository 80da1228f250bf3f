"""Layers with weight copies at several widths, all in device memory; one copy of each layer is active.

`Copies` takes the place of a product of layers that share their input. While its layers have one width it is one
launch, as in a static model of that width; where their widths differ, each run of neighbours of one width is a launch,
exactly as in a model that was quantized to that mixture from the start. In a batch whose sequences are in different
states, every copy computes and each row takes the one of its own sequence.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from repro.core.errors import UserError
from repro.engine.step import Block, Decoder
from repro.engine.weights import LAYERS, Dense, Joined, Packed, layer_sizes, runs
from repro.kernels import w8a8
from repro.kernels.packing import TILE, PackedWeight


class Copies(nn.Module):
    """A product, x `[T, K]` to y `[T, N]`, of layers whose widths change one by one.

    Attributes:
        branches: whether products of different widths run beside one another in a captured step (`Joined`).
        names, sizes, columns: the layers, how many outputs each has, and how many inputs all have.
        at: width to the product of all layers at that width; the first is the one that decoding begins with.
        bits: the width of each layer now.
        levels: int8 `[rows, layers]` on the device where rows have states of their own: which of the widths each has.
    """

    def __init__(
        self, names: Sequence[str], sizes: Sequence[int], columns: int, by_bits: Mapping[int, nn.Module]
    ) -> None:
        super().__init__()
        self.names = list(names)
        self.sizes = list(sizes)
        self.columns = columns
        self.levels = None
        self.at = dict(by_bits)  # a plain mapping: `buffers` counts what a step reads, not all that is there
        self.high = next(iter(by_bits))
        self.prefill = self.at[self.high]
        layer_of_column = torch.arange(len(sizes)).repeat_interleave(torch.tensor(self.sizes))
        self.layer_of_column = layer_of_column.to(next(self.prefill.buffers()).device)
        self.bits = [self.high] * len(self.names)
        self._running = self.prefill
        self.branches = True
        self._products: dict[tuple[int, ...], nn.Module] = {}  # of states that were asked for

    @property
    def dense(self) -> nn.Module:
        """The product that a prefill runs."""
        return self.prefill

    def set(self, bits: Sequence[int]) -> None:
        """Let each layer compute with the copy of a width."""
        self.bits, self._running = list(bits), self.product(bits)

    def set_branches(self, branches: bool) -> None:
        """Let products of different widths be branches of a step that is captured from now on, or follow each other."""
        self.branches = branches
        self._products.clear()

    def product(self, bits: Sequence[int]) -> nn.Module:
        """The product whose layers have these widths; on a GPU its weights are the copies' own, or views of them.

        Made once for each state, so that a switch takes the host no longer, however many layers have gone before.
        """
        key = tuple(bits)
        if key not in self._products:
            self._products[key] = self._made(key)
        return self._products[key]

    def _made(self, bits: tuple[int, ...]) -> nn.Module:
        parts = [self.part(first, end, bits[first]) for first, end in runs(bits)]
        if len(parts) == 1:
            return parts[0]
        apart = Joined(parts)
        apart.branches = self.branches
        return apart

    def part(self, first: int, end: int, bits: int) -> nn.Module:
        """The product of layers `first` to `end`, without the last, at a width."""
        return rows_of(self.at[bits], sum(self.sizes[:first]), sum(self.sizes[:end]))

    def forward(self, x: Tensor) -> Tensor:
        if self.levels is None:
            return self._running(x)
        level = self.levels[: len(x)][:, self.layer_of_column]
        first, *others = self.at.values()
        y = first(x)
        for number, product in enumerate(others, start=1):
            y = torch.where(level == number, product(x), y)
        return y

    __call__ = forward  # as `Dense`

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """The tensors that a step reads in the present state."""
        return self._running.buffers(recurse)

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        buffers = itertools.chain.from_iterable(product.buffers() for product in self.at.values())
        return sum(tensor.nbytes for tensor in buffers)


class Int8(nn.Module):
    """A product with int8 weights and int8 activations, for a prefill (`kernels/w8a8.py`)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        codes, scales = w8a8.quantize_weight(weight.float())
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cuda":
            y = w8a8.w8a8(x, self.codes, self.scales)
        else:
            y = w8a8.on_cpu(x, self.codes, self.scales)
        return y if self.bias is None else y + self.bias


def rows_of(product: nn.Module, start: int, end: int) -> nn.Module:
    """The product of some of the outputs of another, without copying a weight on a GPU.

    Raises:
        UserError: a product that has no plain weight, or packed rows that are not divided where the layers are.
    """
    if isinstance(product, Joined):
        return _rows_of_parts(product, start, end)
    if not isinstance(product, Dense | Packed):
        raise UserError(
            "flexquant switches plain quantized weights; name a recipe of one quantizer, such as gptq-w4-g128"
        )
    if (start, end) == (0, product.outputs):
        return product
    bias = None if product.bias is None else product.bias[start:end]
    if isinstance(product, Dense):
        return Dense(product.weight[start:end].contiguous(), bias)
    packed = product.packed
    if start % TILE or (end % TILE and end != packed.rows):
        raise UserError(f"outputs {start} to {end} of a product are not divided by {TILE}, which packed rows come in")
    tiles = slice(start // TILE, -(-end // TILE))
    form = packed.bits, packed.group, end - start, packed.columns, packed.symmetric
    part = PackedWeight(packed.codes[tiles], packed.scale_zero[tiles], *form)
    return Packed(part, bias, product.order)


def _rows_of_parts(joined_weight: Joined, start: int, end: int) -> nn.Module:
    parts, begin = [], 0
    for part in joined_weight:
        first = max(start - begin, 0)
        last = min(end - begin, part.outputs)
        if first < last:
            parts.append(rows_of(part, first, last))
        begin += part.outputs
    return parts[0] if len(parts) == 1 else Joined(parts)


def joined(decoders: Mapping[int, Decoder], int8_prefill: bool) -> Decoder:
    """One decoder whose block products have the copies of all given ones, by width; it begins with the first width.

    Args:
        decoders: width to a decoder of the model at that width; all but the blocks' products comes from the first.
        int8_prefill: the prompt runs with 8-bit weights and activations (W8A8).

    Raises:
        UserError: W8A8 of weights that the first decoder has no plain copy of.
    """
    first = next(iter(decoders.values()))
    sizes = layer_sizes(first.config)
    blocks = []
    for number in range(len(first.blocks)):
        products = {}
        for product, layers in LAYERS.items():
            by_bits = {bits: getattr(decoder.blocks[number], product) for bits, decoder in decoders.items()}
            names = [f"{number}.{layer}" for layer in layers]
            products[product] = Copies(names, *sizes[product], by_bits)
            if int8_prefill:
                products[product].prefill = _int8(products[product].prefill)
        blocks.append(replace(first.blocks[number], **products))
    return with_copies(first, blocks)


def with_copies(first: Decoder, blocks: Sequence[Block]) -> Decoder:
    """The first width's decoder with blocks that have copies, whose further widths are stored as well."""
    stored = first.stored_bytes
    for block in blocks:
        for copies in copies_of(block):
            stored += copies.nbytes - sum(tensor.nbytes for tensor in copies.at[copies.high].buffers())
    return replace(first, blocks=tuple(blocks), stored_bytes=stored)


def _int8(product: nn.Module) -> Int8:
    if not isinstance(product, Dense):
        raise UserError("a W8A8 prefill is made of 16-bit weights; begin the path with 16 bits, or prefill with high")
    return Int8(product.weight, product.bias)


def static(model: Decoder, bits: Mapping[str, int]) -> Decoder:
    """A decoder with copies as one whose layers have given widths for good, over the same weights."""
    blocks = []
    for block in model.blocks:
        chosen = {}
        for product in LAYERS:
            copies = getattr(block, product)
            chosen[product] = copies.product([bits[name] for name in copies.names])
        blocks.append(replace(block, **chosen))
    return replace(model, blocks=tuple(blocks))


def copies_of(block: Block) -> list[Copies]:
    """The products of a block that have copies, in order."""
    return [getattr(block, product) for product in LAYERS if isinstance(getattr(block, product), Copies)]


def weights_of(model: Decoder) -> dict[str, int]:
    """How many weights each layer with copies has."""
    counts = {}
    for block in model.blocks:
        for copies in copies_of(block):
            counts |= {name: size * copies.columns for name, size in zip(copies.names, copies.sizes)}
    return counts
