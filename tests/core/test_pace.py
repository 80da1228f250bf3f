"""Whether a thread runs at its full pace."""

from types import SimpleNamespace

import pytest

from repro.core import pace


@pytest.fixture
def paced(monkeypatch):
    """A pace whose fixed piece takes the next of some seconds, and what it takes from then on."""
    left = []
    clock = SimpleNamespace(now=0.0)

    def piece():
        clock.now += left.pop(0)

    monkeypatch.setattr(pace, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return pace.Pace(piece), left


def test_the_fastest_look_is_the_full_pace(paced):
    one, takes = paced
    was_full = []
    for seconds in (1.0, 1.2, 1.3, 0.9, 1.2, 1.1):
        takes[:] = [seconds, seconds]
        was_full.append(one.is_full())
    assert was_full == [True, True, False, True, False, True] and one.least == pytest.approx(0.9)


@pytest.mark.parametrize("takes", [(1.0, 9.0), (9.0, 1.0)])
def test_one_interrupt_is_no_slow_pace(paced, takes):
    one, left = paced
    left[:] = [1.0, 1.0, *takes]
    assert one.is_full() and one.is_full() and not left


def test_the_fixed_piece_is_work_that_takes_time():
    one = pace.Pace()
    assert one.is_full() and 0 < one.least < 1
    assert pace.fixed_piece() == sum(number & 3 for number in range(pace.TURNS))
