"""What a call costs the host, measured on a machine whose costs are known: `Cuda.host_us`."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch

from repro.bench import devices
from repro.core import pace

ROOM = 1024  # launches that wait for the device; who launches more waits for it, too
US = 1e-6


class Machine:
    """A host and a device, each with a clock; `pace` is by what a call takes longer at a time of the host's clock."""

    def __init__(self, pace=lambda now: 1.0, cold=0.0):
        self.now, self.pace, self.cold = 0.0, pace, cold
        self.ends = deque()  # when the device is done with each launch that waits for it
        self.fresh = 0  # calls that still find nothing in the host's caches
        self.did = []

    def piece(self):
        """The fixed piece of work by which the pace is seen."""
        self.now += 35 * US * self.pace(self.now)

    def wait(self):
        self.did.append("wait")
        if self.ends:
            self.now = max(self.now, self.ends[-1])
        self.ends.clear()
        self.fresh = 3

    def call(self, name, host_us, launches=1, device_us=1.0):
        """A call that takes the host and, each of its launches, the device so many microseconds."""

        def run():
            self.did.append(name)
            more = self.cold if self.fresh else 0.0
            self.fresh = max(0, self.fresh - 1)
            for _ in range(launches):
                self.now += (host_us + more) / launches * US * self.pace(self.now)
                while self.ends and self.ends[0] <= self.now:
                    self.ends.popleft()
                if len(self.ends) >= ROOM:
                    self.now = self.ends.popleft()
                busy = self.ends[-1] if self.ends else self.now
                self.ends.append(max(busy, self.now) + device_us * US)

        return run


@pytest.fixture
def machine(monkeypatch):
    """A function that makes one, and lets the timer run on it."""

    def make(**options):
        made = Machine(**options)
        monkeypatch.setattr(torch.cuda, "synchronize", made.wait)
        for module in (devices, pace):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: made.now))
        return made

    return make


class Timer(devices.Cuda):
    """The timer of a GPU on such a machine."""

    def __init__(self, machine):
        self.pace = pace.Pace(machine.piece)


@pytest.mark.parametrize("device_us", [0.1, 20.0, 500.0])
def test_the_device_is_not_waited_for(machine, device_us):
    """However many times longer it takes, and of however many launches a call is."""
    one = machine()
    calls = [one.call("one", 12.0, 1, device_us), one.call("three", 20.0, 3, device_us)]
    calls.append(one.call("forty", 160.0, 40, device_us))
    assert Timer(one).host_us(*calls) == pytest.approx([12.0, 20.0, 160.0], rel=1e-6)


def test_a_machine_with_a_full_queue_makes_a_longer_series_wait(machine, monkeypatch):
    """So the one above tells."""
    monkeypatch.setattr(devices.Cuda, "calls", 100)
    one = machine()
    (us,) = Timer(one).host_us(one.call("forty", 160.0, 40, 20.0))
    assert us > 2 * 160


def test_calls_behind_a_wait_find_caches_empty_and_do_not_count(machine):
    one = machine(cold=30.0)
    assert Timer(one).host_us(one.call("a", 12.0), one.call("b", 20.0)) == pytest.approx([12.0, 20.0], rel=1e-6)


def test_a_host_of_two_paces_is_timed_at_its_full_one(machine):
    """It has that for 2 of every 17 milliseconds, which hold a short series of each, and no long one."""
    one = machine(pace=lambda now: 1.0 if now % 17e-3 > 15e-3 else 1.8)
    library, call = Timer(one).host_us(one.call("library", 14.0, 1, 30.0), one.call("call", 21.0, 3, 15.0))
    assert (library, call) == (pytest.approx(14.0, rel=1e-6), pytest.approx(21.0, rel=1e-6))


def test_a_full_pace_that_was_seen_is_waited_for(machine):
    """The host is slow for a fifth of a second, many times longer than the rounds take."""
    one = machine(pace=lambda now: 1.9 if 0.1 < now < 0.3 else 1.0)
    timer, calls = Timer(one), [one.call("library", 14.0), one.call("call", 21.0, 3)]
    assert timer.host_us(*calls) == pytest.approx([14.0, 21.0])
    one.now = 0.1 + US
    assert timer.host_us(*calls) == pytest.approx([14.0, 21.0])
    assert one.now > 0.3


def test_a_full_pace_that_does_not_come_is_waited_for_no_longer_than_that(machine):
    one = machine(pace=lambda now: 1.0 if now < 0.1 else 1.9)
    timer, call = Timer(one), one.call("a", 20.0)
    timer.host_us(call)
    one.now = 0.1 + US
    assert timer.host_us(call) == pytest.approx([38.0])
    rounds = devices.Cuda.rounds * 24 * 38e-6
    assert devices.Cuda.patience < one.now - 0.1 - rounds < 1.1 * devices.Cuda.patience


def test_calls_take_turns_of_a_lead_and_a_series(machine, monkeypatch):
    for name, value in {"rounds": 2, "calls": 2, "lead_calls": 1, "full_rounds": 0}.items():
        monkeypatch.setattr(devices.Cuda, name, value)
    one = machine()
    both_us = Timer(one).host_us(one.call("a", 3.0), one.call("b", 4.0))
    assert one.did == 2 * ["wait", "a", "a", "a", "wait", "b", "b", "b"] + ["wait"]
    assert both_us == pytest.approx([3.0, 4.0])
    assert Timer(one).host_us() == []
