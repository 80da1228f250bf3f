"""Weight copies in pinned host memory; the device holds each layer at its current width and prefetches the next.

A product has one piece of device memory, as large as its first width needs. Whatever its layers' widths are, their
tensors lie in it at places that these widths alone decide, so that the step of a state can be captured before its
weights are there. A switch writes the new copies over the old ones, between two steps in the order of the stream.

The copies of the next moves are brought into a buffer (`Staging`) while decoding goes on, on a stream of their own, so
that a switch copies from device memory; what was not expected comes from the host at the switch. At the start of a
generation the first width comes back from the host. The device thus needs the weights of the first width, and a tenth
of them (`SHARE`) for the buffer and what a switch moves.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from repro.core.errors import UserError
from repro.engine.copies import Copies, rows_of, with_copies
from repro.engine.offload import HostMemory
from repro.engine.step import Decoder
from repro.engine.weights import LAYERS, Dense, Joined, Packed, layer_sizes, runs
from repro.kernels.packing import TILE, PackedWeight

SHARE = 0.1  # of the bytes of the first width, beyond these
ALIGNED = 256  # bytes between whose multiples tensors begin
Move = tuple[str, int]  # a layer and the width that it gets
State = tuple[int, ...]  # each layer's width
Moved = tuple[int, list[Tensor], list[Tensor] | None]  # a layer, where its weights go, where they lie on the device


class HostCopies(Copies):
    """`Copies` whose weights are on the host, and on the device at the present widths alone.

    Attributes:
        host: width to the product of all layers at it, whose weights are in host memory.
        memory: uint8 on the device, with the weights of the present state.
        staging: the copies of the next moves, shared by all products of a model.
    """

    def __init__(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        columns: int,
        host: Mapping[int, nn.Module],
        device: torch.device,
        staging: "Staging",
    ) -> None:
        self.host = dict(host)
        self.staging = staging
        self.rows = layer_rows(sizes)
        self.starts, end = layer_starts(self.host, self.rows)
        self.memory = torch.empty(end, dtype=torch.uint8, device=device)
        by_bits = {bits: placed(host_weight, self.memory, 0) for bits, host_weight in self.host.items()}
        super().__init__(names, sizes, columns, by_bits)
        self._changes: dict[tuple[State, State], list[Moved]] = {}  # that were asked for
        for layer in range(len(sizes)):
            for target, source in zip(self.tensors(self.bits, layer), self.source(layer, self.high)):
                target.copy_(source)

    def part(self, first: int, end: int, bits: int) -> nn.Module:
        """The product of layers `first` to `end`, without the last, at a width, where a state has it in memory."""
        if end - first == len(self.sizes):
            return self.at[bits]
        product = rows_of(self.host[bits], self.rows[first][0], self.rows[end - 1][1])
        return placed(product, self.memory, self.starts[first])

    def tensors(self, bits: Sequence[int], layer: int) -> list[Tensor]:
        """The weights of one layer on the device in a state, as views of `memory`."""
        product = self.product(bits)
        for number, (first, end) in enumerate(runs(bits)):
            if first <= layer < end:
                part = product[number] if isinstance(product, Joined) else product
                begin = self.rows[first][0]
                return tensors_of(part, *(row - begin for row in self.rows[layer]))
        raise IndexError(layer)

    def source(self, layer: int, bits: int) -> list[Tensor]:
        """The weights of one layer at a width, on the host."""
        return tensors_of(self.host[bits], *self.rows[layer])

    def change(self, before: Sequence[int], after: Sequence[int]) -> list[Moved]:
        """The layers whose weights a switch writes, and where to; without a source those of another width, which come.

        Made once for each pair of states, by a thread that knows the next one (`SwitchingSteps.prepare`): views of many
        layers take the host longer than copying them.
        """
        key = tuple(before), tuple(after)
        if key not in self._changes:
            self._changes[key] = self._changed(*key)
        return self._changes[key]

    def _changed(self, before: State, after: State) -> list[Moved]:
        moved = []
        for layer, width in enumerate(after):
            target = self.tensors(after, layer)
            if width != before[layer]:
                moved.append((layer, target, None))
                continue
            source = self.tensors(before, layer)
            if not all(map(_same_memory, source, target)):
                moved.append((layer, target, source))
        return moved

    @torch.inference_mode()
    def set(self, bits: Sequence[int]) -> None:
        """Let each layer compute with the copy of a width, which comes from the staging buffer or from the host."""
        moves = []
        for layer, target, source in self.change(self.bits, bits):
            if source is None:
                source = self.staging.take((self.names[layer], bits[layer])) or self.source(layer, bits[layer])
            else:
                source = [tensor.clone() for tensor in source]  # another layer may be written where it is
            moves += zip(target, source)
        for target, source in moves:
            target.copy_(source, non_blocking=True)
        super().set(bits)

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        total = 0
        for weight in self.host.values():
            total += sum(tensor.nbytes for tensor in tensors_of(weight))
        return total


class Staging:
    """A buffer on the device for the copies of the next moves, which come while decoding goes on.

    Attributes:
        room: its bytes.
        host: what keeps the copies' memory pinned.
        prefetched, late: layers whose copies a switch took from the buffer, or had to bring from the host.
    """

    def __init__(self, device: torch.device, room: int, host: HostMemory | None = None) -> None:
        self.room = room
        self.host = host
        self.prefetched = 0
        self.late = 0
        self._memory = torch.empty(room, dtype=torch.uint8, device=device)
        self._staged: dict[Move, list[Tensor]] = {}
        on_gpu = device.type == "cuda"
        self._copies = torch.cuda.Stream(device) if on_gpu else None
        self._ready, self._free = (torch.cuda.Event(), torch.cuda.Event()) if on_gpu else (None, None)

    def release(self) -> None:
        """Say that everything that reads the buffer has been launched on the current stream; what comes next waits."""
        if self._free is not None:
            self._free.record()

    def begin(self, tensors_by_move: Mapping[Move, Sequence[Tensor]]) -> None:
        """Begin to copy the weights of moves from the host, as many as there is room for; what was there is dropped.

        Any thread may, after `release`.
        """
        if list(tensors_by_move)[: len(self._staged)] == list(self._staged) and self._staged:
            return
        self._staged, end, pairs = {}, 0, []
        for move, tensors in tensors_by_move.items():
            targets = []
            for tensor in tensors:
                targets.append((end, tensor))
                end = aligned(end + tensor.nbytes)
            if end > self.room:
                break
            self._staged[move] = [_view(self._memory, start, tensor) for start, tensor in targets]
            pairs += zip(self._staged[move], tensors)
        if self._copies is None:
            for target, source in pairs:
                target.copy_(source)
            return
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(self._free)
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            self._ready.record()

    def take(self, move: Move) -> list[Tensor] | None:
        """The weights of a move in the buffer, which the current stream waits for; None if they were not expected."""
        tensors = self._staged.pop(move, None)
        if tensors is None:
            self.late += 1
            return None
        self.prefetched += 1
        if self._copies is not None:
            torch.cuda.current_stream().wait_event(self._ready)
        return tensors


# --- where tensors lie ------------------------------------------------------------------------------------------------


def aligned(start: int) -> int:
    """The next byte at which a tensor may begin."""
    return -(-start // ALIGNED) * ALIGNED


def layer_rows(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """The outputs (first, end) of each layer of a product."""
    ends = list(accumulate(sizes))
    return list(zip([0, *ends], ends))


def layer_starts(host: Mapping[int, nn.Module], rows: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """The byte at which each layer's weights begin in a state of mixed widths, and the bytes of the whole product.

    A layer has as many bytes as it needs at the width that needs the most.
    """
    starts, end = [], 0
    for first, last in rows:
        starts.append(end)
        sizes = []
        for weight in host.values():
            sizes.append(sum(aligned(tensor.nbytes) for tensor in tensors_of(weight, first, last)))
        end += max(sizes)
    return starts, end


def placed(product: nn.Module, memory: Tensor, start: int) -> nn.Module:
    """The same product with its weights in a piece of memory, from a byte on; the memory is not written."""
    views = []
    for tensor in tensors_of(product):
        views.append(_view(memory, start, tensor))
        start = aligned(start + tensor.nbytes)
    return _rebuilt(product, views)


def tensors_of(product: nn.Module, start: int = 0, end: int | None = None) -> list[Tensor]:
    """The weights of outputs `start` to `end` of a product, as views: codes and scales, or a dense weight.

    Raises:
        UserError: a product of several formats, or one that has more than a quantized weight.
    """
    if isinstance(product, Dense):
        return [product.weight[start:end]]
    if isinstance(product, Packed):
        tiles = slice(start // TILE, None if end is None else -(-end // TILE))
        return [product.codes[tiles], product.scale_zero[tiles]]
    raise UserError("flexquant: copies=host takes layers of one plain quantized weight; say copies=device")


def _rebuilt(product: nn.Module, tensors: Sequence[Tensor]) -> nn.Module:
    if isinstance(product, Dense):
        return Dense(tensors[0], product.bias)
    packed = product.packed
    form = packed.bits, packed.group, packed.rows, packed.columns, packed.symmetric
    return Packed(PackedWeight(*tensors, *form), product.bias, product.order)


def _view(memory: Tensor, start: int, like: Tensor) -> Tensor:
    flat = memory[start : start + like.nbytes].view(like.dtype)
    if like.is_contiguous():
        return flat.view(like.shape)
    return flat.view(like.mT.shape).mT  # in memory by columns


def _same_memory(first: Tensor, second: Tensor) -> bool:
    return first.data_ptr() == second.data_ptr() and first.stride() == second.stride()


# --- a model ----------------------------------------------------------------------------------------------------------


def staging_bytes(
    hosts: Sequence[Mapping[int, nn.Module]], rows: Sequence[Sequence[tuple[int, int]]], layers: int, share: float
) -> int:
    """The bytes of the buffer: for as many moves as a switch makes, within a share of the first width's bytes.

    Args:
        hosts: each product's widths, the first one being that which decoding begins with.
        rows: the outputs of each product's layers.
        layers: moves of a switch.
        share: of the bytes of the first width. A part of it is kept for what a switch moves within a product.
    """
    first, moved, moves = 0, 0, []
    for host, spans in zip(hosts, rows):
        high, *lower = host.values()
        first += _bytes(high)
        moved = max(moved, *map(_bytes, lower))
        for span in spans:
            moves.append(max(_bytes(weight, *span) for weight in lower))
    most = sum(sorted(moves)[-layers:])
    return max(0, min(most, int(share * first) - moved))


def _bytes(product: nn.Module, *rows: int) -> int:
    return sum(aligned(tensor.nbytes) for tensor in tensors_of(product, *rows))


def joined(make: Mapping[int, Callable[[], Decoder]], layers: int, share: float = SHARE) -> Decoder:
    """One decoder whose block products have the copies of all widths on the host.

    Args:
        make: width to what makes the decoder at it, from the width that decoding begins with downwards; one of them is
            on the device at a time.
        layers: layers that a switch takes.
        share: device memory beyond that of the first width, as a share of it.

    Raises:
        UserError: layers without a plain quantized weight; `NotMeasurable` if the host has too little memory.
    """
    decoders: dict[int, Decoder] = {}
    memory = None
    for bits in reversed(make):
        decoder = make[bits]()
        memory = memory or HostMemory(decoder.device)
        decoders[bits] = _to_host(decoder, memory)
        del decoder
    first = decoders[next(iter(make))]
    sizes = layer_sizes(first.config)
    hosts, rows = [], []
    for number in range(len(first.blocks)):
        for product in LAYERS:
            hosts.append({bits: getattr(decoders[bits].blocks[number], product) for bits in make})
            rows.append(layer_rows(sizes[product][0]))
    staging = Staging(first.device, staging_bytes(hosts, rows, layers, share), memory)
    blocks = []
    remaining = iter(hosts)
    for number, block in enumerate(first.blocks):
        products = {}
        for product, names in LAYERS.items():
            named = [f"{number}.{name}" for name in names]
            products[product] = HostCopies(named, *sizes[product], next(remaining), first.device, staging)
        blocks.append(replace(block, **products))
    return with_copies(first, blocks)


def _to_host(decoder: Decoder, memory: HostMemory) -> Decoder:
    """The decoder with the weights of its block products in host memory; the device's are freed one by one."""
    blocks = list(decoder.blocks)
    decoder = replace(decoder, blocks=())
    for number, block in enumerate(blocks):
        products = {}
        for name in LAYERS:
            product = getattr(block, name)
            products[name] = _rebuilt(product, [memory.copy(tensor) for tensor in tensors_of(product)])
        blocks[number] = replace(block, **products)
    return replace(decoder, blocks=tuple(blocks))
