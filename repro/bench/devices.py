"""NVIDIA GPUs for the timer: capture and replay launches, read energy and clocks.

The tests of the timer bring devices with the same methods: a fake one with streams, graphs and a clock, and the host.
"""

import contextlib
import gc
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from repro.core.pace import Pace


class Cuda:
    """An NVIDIA GPU: CUDA graphs, timed by events on the stream that replays them.

    Attributes:
        l2: bytes of its cache.
        pace: of the process that launches.
    """

    enough = 1e-3  # seconds of a replay, beside which its start does not count
    most = 128  # launches in a graph, at which it need not become longer
    lead = 300_000  # cycles that the device spins before the first event, so that the host is ahead of it
    ahead = 3e-3  # seconds of replays that are queued at a time while energy and clock are read
    rounds, calls = 35, 20  # of which the host's time is the least; calls of a round that are timed
    lead_calls = 4  # before those, which find code and data in no cache
    full_rounds = 10  # rounds at the host's full pace that are waited for
    patience = 0.25  # seconds of that

    def __init__(self) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self.nvml = Nvml(device)
        self.pace = Pace()

    def capture(self, calls: Sequence[Callable[[], Any]]) -> "CudaGraph":
        """Capture all calls into one graph, after one of them ran for whatever happens at a first call."""
        return CudaGraph(calls, self.lead)

    def state(self, graph: "CudaGraph") -> dict[str, Any]:
        """Clock and throttle reasons while the graph runs, as far as NVML tells."""
        for _ in range(math.ceil(self.ahead / graph.replay())):
            graph.graph.replay()
        facts = self.nvml.state()
        torch.cuda.synchronize()
        return facts

    def joules(self, graphs: Sequence["CudaGraph"], seconds: float) -> list[float | None]:
        """Energy of one replay of each: power while it runs back to back, times a replay's time; None if unreadable."""
        watts = powers(self.nvml.millijoules, [self.keep_busy(graph) for graph in graphs], seconds)
        return [None if power is None else power * graph.replay() for power, graph in zip(watts, graphs)]

    def keep_busy(self, graph: "CudaGraph") -> Callable[[], None]:
        """A function that, called often enough, keeps replays of a graph queued: never none, never many."""
        chunk, queued = math.ceil(self.ahead / graph.replay()), deque()

        def more() -> None:
            while queued and queued[0].query():
                queued.popleft()
            while len(queued) < 2:
                for _ in range(chunk):
                    graph.graph.replay()
                queued.append(torch.cuda.Event())
                queued[-1].record()

        return more

    def host_us(self, *calls: Callable[[], Any]) -> list[float]:
        """Microseconds that the host takes for calls without waiting for the device: of many short series the fastest.

        The calls take turns, so that a slow moment of a shared host is everybody's. A series is shorter than the queue
        of launches, behind which the host would wait: it holds 1,020, those of 42 a call. A host has two paces, which
        may last for seconds (`Pace`); the full one is waited for.
        """
        times: list[list[float]] = [[] for _ in calls]
        full = 0
        for _ in range(self.rounds):
            full += self._host_round(calls, times)
        end = time.perf_counter() + self.patience
        while full < self.full_rounds and time.perf_counter() < end:
            full += self._host_round(calls, times)
        torch.cuda.synchronize()
        return [min(us) for us in times]

    def _host_round(self, calls: Sequence[Callable[[], Any]], times: Sequence[list[float]]) -> bool:
        """Add microseconds of each call; whether the host had its full pace before and after."""
        was_full = self.pace.is_full()
        for call, us in zip(calls, times):
            torch.cuda.synchronize()
            for _ in range(self.lead_calls):
                call()
            began = time.perf_counter()
            for _ in range(self.calls):
                call()
            us.append((time.perf_counter() - began) / self.calls * 1e6)
        return was_full and self.pace.is_full()

    def release(self) -> None:
        """Give the memory of graphs that are gone back to the device."""
        torch.cuda.empty_cache()


def powers(
    counter: Callable[[], int | None],
    loads: Sequence[Callable[[], None]],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float | None]:
    """Mean watts of loads, one after the other, by a counter of millijoules that is updated only now and then.

    An H200's driver updates it every 100 ms, at once for what ran until then, and takes 3 ms to answer. So a load's
    power is the counter's step over the time between two updates, the first of which is the last one of the load
    before; up to 6 ms of that step are work of the load before that was still queued.

    Args:
        counter: reads it; None where it cannot be read.
        loads: each is called again and again before readings and keeps the device busy.
        seconds: between the two updates, at least.
        clock: seconds.

    Returns:
        Watts of each load; None when the counter cannot be read or stands still.
    """
    watts: list[float | None] = []

    def next_update(busy: Callable[[], None], last: int | None) -> tuple[float, int | None]:
        begin = clock()
        while last is not None and clock() - begin < 1:
            busy()
            if (now := counter()) != last:
                return clock(), now
        return clock(), None

    edge = next_update(loads[0], counter()) if loads else (0.0, None)
    for busy in loads:
        start = edge
        while edge[1] is not None and (edge is start or edge[0] - start[0] < seconds):
            edge = next_update(busy, edge[1])
        watts.append(None if edge[1] is None else (edge[1] - start[1]) / 1e3 / (edge[0] - start[0]))
    return watts


class CudaGraph:
    """A captured CUDA graph with the outputs of its launches."""

    def __init__(self, calls: Sequence[Callable[[], Any]], lead: int) -> None:
        self.lead = lead
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                calls[0]()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # A destructor that calls CUDA, run by the garbage collection inside a capture, would make the capture fail. To
        # collect before it would not keep the captured calls from making garbage, and takes a tenth of a second.
        collects = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.graph(self.graph, stream=stream):
                self.outputs = [call() for call in calls]
        finally:
            if collects:
                gc.enable()
        torch.cuda.synchronize()
        self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay(self) -> float:
        """Run all launches; seconds on the device."""
        torch.cuda._sleep(self.lead)
        self.start.record()
        self.graph.replay()
        self.end.record()
        self.end.synchronize()
        return self.start.elapsed_time(self.end) / 1e3


THROTTLE = {  # nvmlClocksEventReasons; an idle GPU and clocks that an application set are no throttling
    0x04: "power cap", 0x08: "hardware slowdown", 0x10: "sync boost", 0x20: "thermal (software)",
    0x40: "thermal (hardware)", 0x80: "power brake",
}  # fmt: skip


class Nvml:
    """Reads, and only reads, what NVML tells about a device; None where it cannot."""

    def __init__(self, device: torch.device) -> None:
        self.handle = None
        with contextlib.suppress(Exception):  # no package, no library, no permission: then there is nothing to read
            import pynvml

            self.nvml = pynvml
            pynvml.nvmlInit()
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            try:
                self.handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            except pynvml.NVMLError:
                self.handle = pynvml.nvmlDeviceGetHandleByIndex(device.index or 0)

    def _read(self, call: str, *arguments: int) -> int | None:
        if self.handle is None:
            return None
        try:
            return getattr(self.nvml, call)(self.handle, *arguments)
        except self.nvml.NVMLError:
            return None

    def state(self) -> dict[str, Any]:
        """`clock_mhz` of the SMs and `throttle`: the active reasons joined by `+`, or `none`; None where unreadable."""
        mask = self._read("nvmlDeviceGetCurrentClocksThrottleReasons")
        reasons = "+".join(text for bit, text in THROTTLE.items() if (mask or 0) & bit)
        return {
            "clock_mhz": self._read("nvmlDeviceGetClockInfo", 1),  # 1: NVML_CLOCK_SM
            "throttle": None if mask is None else reasons or "none",
        }

    def millijoules(self) -> int | None:
        """Energy since the driver was loaded."""
        return self._read("nvmlDeviceGetTotalEnergyConsumption")
