"""Bus traffic: when copies ran and how many bytes they moved, and when passes ran.

A pass does not copy its own streamed bytes alone: the first block of a verification came while the draft computed, and
after its last block the first one comes again for the next pass. So a share is that of the copies which really lay
inside a span of time; no copy overlaps another, and the share of time is at most 1.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

BLOCK = 256 * 2**20  # bytes of a copy over the bus
QUEUED = 8  # copies between two waits of the host


class Copy(NamedTuple):
    """One copy over the bus: seconds by the host's clock, and bytes."""

    begin: float
    end: float
    nbytes: int


class Use(NamedTuple):
    """The use of the bus during a span: seconds of copying, and bytes, a copy's in proportion to its time inside."""

    seconds: float
    nbytes: float


def used(copies: Sequence[Copy], begin: float, end: float) -> Use:
    """Seconds and bytes of copies, which do not overlap, between two times."""
    seconds, nbytes = 0.0, 0.0
    for copy in copies:
        inside = min(copy.end, end) - max(copy.begin, begin)
        if inside <= 0:
            continue
        seconds += inside
        nbytes += copy.nbytes * inside / (copy.end - copy.begin)
    return Use(seconds, nbytes)


class Traffic:
    """Notes the copies of an offloaded model while it is `on`; on a GPU with events, which cost the host little."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on = device, False
        self._origin: tuple[float, Any] = (0.0, None)  # one moment by the host's clock and by the device's
        self._noted: list[tuple[Any, Any, int]] = []

    def start(self) -> None:
        """Forget what was noted and note from now on."""
        self._noted, self.on = [], True
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._origin = time.perf_counter(), self.mark()

    def stop(self) -> list[Copy]:
        """Note no more; what was noted."""
        self.on = False
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return [Copy(self._seconds(begin), self._seconds(end), nbytes) for begin, end, nbytes in self._noted]

    def mark(self) -> Any:
        """The present moment: an event on the current stream, or on a CPU the host's clock."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def note(self, begin: Any, nbytes: int) -> None:
        """A copy that began at a mark and is the last work of the current stream."""
        self._noted.append((begin, self.mark(), nbytes))

    def _seconds(self, mark: Any) -> float:
        if self.device.type != "cuda":
            return mark
        began, event = self._origin
        return began + event.elapsed_time(mark) / 1e3


@contextmanager
def noted(passes: Traffic | None) -> Iterator[None]:
    """Note what is launched on the current stream as one span of no bytes, where somebody wants to know."""
    if passes is None or not passes.on:
        yield
        return
    began = passes.mark()
    yield
    passes.note(began, 0)


def bus_rate(device: torch.device, seconds: float = 1.0) -> float:
    """Bytes per second from pinned host memory to a GPU, over about a second; NaN on a CPU.

    Several copies are queued between two waits of the host, as a pass queues them: a wait after each one would make the
    bus look slower than a pass can find it.
    """
    if device.type != "cuda":
        return math.nan
    source = torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(BLOCK, dtype=torch.uint8, device=device)
    target.copy_(source)
    torch.cuda.synchronize()
    began = time.perf_counter()
    copies = 0
    while time.perf_counter() - began < seconds:
        for _ in range(QUEUED):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        copies += QUEUED
    return copies * BLOCK / (time.perf_counter() - began)
