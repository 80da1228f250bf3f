"""The serving workload: real lengths within their bounds, the same arrivals at every rate."""

import statistics

import pytest

from repro.core.errors import UserError
from repro.data import arrivals


def test_lengths_are_within_the_bounds_of_vllm_s_benchmark():
    pairs = arrivals.lengths()
    assert len(pairs) == 3000
    assert min(min(pair) for pair in pairs) >= 4
    assert max(prompt for prompt, _ in pairs) <= 1024 and max(map(sum, pairs)) <= 2048
    assert statistics.mean(prompt for prompt, _ in pairs) == pytest.approx(248.7, abs=0.05)
    assert statistics.mean(new for _, new in pairs) == pytest.approx(230.8, abs=0.05)


def test_arrivals_are_a_poisson_process():
    drawn = arrivals.draw(3000, 16.0, seed=1)
    gaps = [after[0] - before[0] for before, after in zip(drawn, drawn[1:])]
    assert statistics.mean(gaps) == pytest.approx(1 / 16, rel=0.06)
    assert statistics.stdev(gaps) == pytest.approx(1 / 16, rel=0.08), "an exponential's mean is its deviation"
    assert len({pair[0] for pair in drawn}) == 3000
    assert sorted(pair[1:] for pair in drawn) == sorted(arrivals.lengths()), "each pair once"


def test_another_rate_stretches_the_same_requests():
    slow, fast = arrivals.draw(50, 16.0, seed=2), arrivals.draw(50, 32.0, seed=2)
    assert [one[1:] for one in slow] == [one[1:] for one in fast]
    assert [one[0] for one in slow] == pytest.approx([2 * one[0] for one in fast])
    assert arrivals.draw(50, 16.0, seed=3) != slow


@pytest.mark.parametrize(("count", "rate", "message"), [(0, 1.0, "0 requests"), (3001, 1.0, "3,000"), (5, 0.0, "rate")])
def test_what_cannot_be_drawn_is_refused(count, rate, message):
    with pytest.raises(UserError, match=message):
        arrivals.draw(count, rate, 0)
