"""Weights beyond the memory budget: kept in pinned host memory, streamed through reused buffers of one block.

Each product of a block (`qkv`, `out`, `gate_up`, `down`) has a lane: the weights of all streamed blocks on the host and
one buffer on the device. As soon as a weight was used, the lane starts to copy that of the next streamed block into the
same buffer, on a stream of its own; after the last block comes the first again, for the pass that follows. So the bus
is busy while other products, resident blocks and draft passes compute (SubSpec, section 4.3).
Without prefetching, a product waits for the copy of its own weight (the baseline of the paper's own code).

On a CPU the same code copies from plain memory to plain memory.
"""

import mmap
import weakref
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from repro.core.errors import NotMeasurable
from repro.engine.traffic import Traffic


class HostMemory:
    """Pinned memory of exactly the bytes that are asked for, page by page.

    PyTorch's own allocator of pinned memory rounds up to powers of two: 62 GB of weights would take 124. Pages of the
    operating system are pinned instead (`cudaHostRegister`), and released with this object.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes = device, 0
        self._pinned: list[int] = []
        self.release = weakref.finalize(self, _unpin, self._pinned)

    def copy(self, weight: Tensor) -> Tensor:
        """A copy of a weight, on the host.

        Raises:
            NotMeasurable: the system does not pin that much memory.
        """
        pages = mmap.mmap(-1, weight.nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin
        copied = torch.frombuffer(pages, dtype=weight.dtype).view(weight.shape)
        if self.device.type == "cuda":
            failed = int(torch.cuda.cudart().cudaHostRegister(copied.data_ptr(), copied.nbytes, 0))
            if failed:
                already = f"{self.bytes:,} bytes are pinned already"
                raise NotMeasurable("oom", f"the host does not pin {weight.nbytes:,} bytes more; {already}")
            self._pinned.append(copied.data_ptr())
        self.bytes += weight.nbytes
        return copied.copy_(weight)


def _unpin(pointers: list[int]) -> None:
    for pointer in pointers:
        torch.cuda.cudart().cudaHostUnregister(pointer)
    pointers.clear()


class Lane:
    """The weights `[N, K]` of one product in all streamed blocks, and the buffer through which they go in turn."""

    def __init__(
        self, host: HostMemory, copies: "torch.cuda.Stream | None", prefetch: bool, traffic: Traffic | None = None
    ) -> None:
        self.host, self.copies, self.prefetch = host, copies, prefetch  # what holds a lane keeps its memory pinned
        self.traffic = traffic or Traffic(host.device)
        self.weights: list[Tensor] = []  # on the host, in the order of the blocks
        self.buffer: Tensor | None = None
        self.loaded = -1  # whose weight was copied last, or is being copied
        self.ready, self.free = (None, None) if copies is None else (torch.cuda.Event(), torch.cuda.Event())

    def add(self, weight: Tensor) -> int:
        """Take a copy of a weight, from any device; its index.

        Raises:
            NotMeasurable: the host has too little memory.
        """
        if self.buffer is None:
            self.buffer = torch.empty_like(weight, device=self.host.device)
        self.weights.append(self.host.copy(weight))
        return len(self.weights) - 1

    def take(self, index: int) -> Tensor:
        """The buffer with a weight in it; it stays there until `give_back`."""
        if self.loaded != index:  # the first of all, or out of turn
            if self.copies is not None:
                self.free.record()
            self._load(index)
        if self.prefetch and self.copies is not None:
            torch.cuda.current_stream().wait_event(self.ready)
        return self.buffer

    def give_back(self, index: int) -> None:
        """Say that the last operator that reads the buffer has been launched; the next weight follows."""
        if self.copies is not None:
            self.free.record()
        if self.prefetch:
            self._load((index + 1) % len(self.weights))

    def _load(self, index: int) -> None:
        if index == self.loaded:
            return
        self.loaded = index
        if self.copies is None or not self.prefetch:
            self._copy(index, blocking=True)
            return
        with torch.cuda.stream(self.copies):
            self.copies.wait_event(self.free)
            self._copy(index, blocking=False)
            self.ready.record()

    def _copy(self, index: int, blocking: bool) -> None:
        began = self.traffic.mark() if self.traffic.on else None
        self.buffer.copy_(self.weights[index], non_blocking=not blocking)
        if self.traffic.on:
            self.traffic.note(began, self.buffer.nbytes)


class Streamed(nn.Module):
    """A product `[T, K]` to `[T, N]` whose weight comes from the host; the bias is resident."""

    def __init__(self, lane: Lane, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.lane = lane
        self.index = lane.add(weight)
        self.register_buffer("weight", lane.weights[self.index])  # on the host: what a step reads counts it
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight_of(self.lane.take(self.index)), self.bias)
        self.lane.give_back(self.index)
        return y

    __call__ = forward

    def weight_of(self, buffer: Tensor) -> Tensor:
        """The weight `[N, K]` that has come into the lane's buffer."""
        return buffer

    def expanded(self, tokens: int, dtype: torch.dtype) -> "Kept":
        """The product for several chunks of a prefill one after another, which all need the same weight."""
        return Kept(self)


class Codes(NamedTuple):
    """A weight `[N, K]` in 8 bits: codes uint8, scales and zeros `[N, K / group]` in the dtype of the products."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor


class StreamedCodes(Streamed):
    """The same with 8-bit codes, which come with their scales and zeros; the weight is dequantized where it is used.

    That reads and writes the weight in device memory once more, which takes a fraction of the time of the bus.
    """

    def __init__(self, lane: Lane, weight: Codes, bias: Tensor | None) -> None:
        self.shape, self.groups, self.dtype = weight.codes.shape, weight.scales.shape, weight.scales.dtype
        flat = [part.contiguous().view(torch.uint8).flatten() for part in weight]
        super().__init__(lane, torch.cat(flat), bias)

    def weight_of(self, buffer: Tensor) -> Tensor:
        """The weight `[N, K]` from the codes, scales and zeros in the lane's buffer."""
        codes = self.shape.numel()
        groups = self.groups.numel() * self.dtype.itemsize
        scales, zeros = (part.view(self.dtype).view(*self.groups, 1) for part in buffer[codes:].split(groups))
        weight = buffer[:codes].to(self.dtype).view(*self.groups, -1)
        return weight.sub_(zeros).mul_(scales).view(self.shape)


class Kept(nn.Module):
    """A streamed product that keeps its weight until the lane is asked for another one, which is copied then."""

    def __init__(self, streamed: Streamed) -> None:
        super().__init__()
        self.streamed = streamed

    def forward(self, x: Tensor) -> Tensor:
        streamed = self.streamed
        return F.linear(x, streamed.weight_of(streamed.lane.take(streamed.index)), streamed.bias)


@dataclass
class Offload:
    """Makes the products of the blocks that stream.

    Attributes:
        device: where products are computed.
        prefetch: whether weights are copied before they are needed.
        host: the memory of the weights.
        traffic: notes the copies of all lanes for a measurement.
    """

    device: torch.device
    prefetch: bool = True
    host: HostMemory = field(init=False)
    traffic: Traffic = field(init=False)
    lanes: dict[str, Lane] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.host, self.traffic = HostMemory(self.device), Traffic(self.device)
        self._copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def streamed(self, kind: str, weight: Tensor | Codes, bias: Tensor | None) -> Streamed:
        """The product of a streamed block; `kind` is a key of `weights.LAYERS`, the weight on any device.

        Raises:
            NotMeasurable: the host has too little memory.
        """
        lane = self.lanes.setdefault(kind, Lane(self.host, self._copies, self.prefetch, self.traffic))
        return StreamedCodes(lane, weight, bias) if isinstance(weight, Codes) else Streamed(lane, weight, bias)
