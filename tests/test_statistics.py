"""Intervals: pairing, coverage, determinism, speed; and what counts as chance."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.errors import UserError
from repro.statistics import chance_floor, interval, paired


@pytest.fixture
def random():
    return np.random.default_rng(0)


def plain(values, statistic, level, resamples):
    """The textbook loop, with other random numbers."""
    random = np.random.default_rng(123)
    drawn = sorted(statistic(random.choice(values, len(values)).mean()) for _ in range(resamples))
    return drawn[round((1 - level) / 2 * resamples)], drawn[round((1 + level) / 2 * resamples) - 1]


@pytest.mark.parametrize("statistic", [np.asarray, np.exp])
def test_agrees_with_the_plain_bootstrap(statistic, random):
    values = random.normal(2.0, 0.3, 80)
    low, high = interval(values, statistic)
    want_low, want_high = plain(values, statistic, 0.95, 2000)
    assert low < statistic(values.mean()) < high
    assert np.allclose([low, high], [want_low, want_high], atol=0.1 * (want_high - want_low))


def test_covers_the_truth_as_often_as_it_says(random):
    inside = [low < 0 < high for low, high in (interval(random.normal(size=60), resamples=400) for _ in range(300))]
    assert 0.90 < np.mean(inside) < 0.98


def test_is_byte_for_byte_the_same(random):
    values = random.normal(size=50)
    assert np.array(interval(values)).tobytes() == np.array(interval(values)).tobytes()
    assert interval(values, seed=1) != interval(values, seed=0)
    assert interval(np.sqrt(np.arange(30.0))) == pytest.approx((3.033020005012678, 4.009468455116018), rel=1e-12)


def test_a_group_does_not_depend_on_its_neighbours(random):
    arrays = {"a": random.normal(size=30), "b": random.normal(size=40)}
    groups = {"a": "wikitext2", "b": "c4"}
    alone = paired({"a": arrays["a"]}, lambda m: m["a"], groups)
    assert paired(arrays, lambda m: m["a"], groups) == alone


def test_pairing_removes_the_common_noise(random):
    common = random.normal(size=100)
    arrays = {"w16": common, "w4": common + 0.1 + random.normal(0, 0.01, 100)}
    low, high = paired(arrays, lambda m: m["w4"] - m["w16"])
    wide_low, wide_high = paired(arrays, lambda m: m["w4"] - m["w16"], {"w4": "another corpus"})
    assert 0.09 < low < 0.1 < high < 0.11
    assert wide_high - wide_low > 20 * (high - low)


def test_a_difference_with_itself_is_exactly_zero(random):
    values = random.normal(size=20)
    assert paired({"a": values, "b": values}, lambda m: m["a"] - m["b"]) == (0.0, 0.0)


@given(st.floats(-5, 5), st.floats(0.1, 5), st.integers(2, 40))
def test_moves_with_shift_and_scale(shift, scale, n):
    values = np.random.default_rng(n).normal(size=n)
    low, high = interval(values, resamples=50)
    assert np.allclose(interval(shift + scale * values, resamples=50), (shift + scale * low, shift + scale * high))


def test_blocks_do_not_show(monkeypatch, random):
    values = random.normal(size=37)
    whole = interval(values)
    monkeypatch.setattr("repro.statistics.BLOCK", 37 * 7)
    assert interval(values) == whole


def test_two_thousand_resamples_are_quick(random):
    values = random.normal(size=166)
    interval(values)
    started = time.process_time()
    paired({"a": values, "b": values, "c": values}, lambda m: m["a"] / m["b"] - m["c"])
    assert time.process_time() - started < 0.2


@pytest.mark.parametrize(
    "arrays, expression, groups, says",
    [
        ({"a": np.ones(3), "b": np.ones(4)}, lambda m: m["a"], None, "differ in length"),
        ({"a": np.ones(1)}, lambda m: m["a"], None, "two or more"),
        ({"a": np.array([1.0, np.nan])}, lambda m: m["a"], None, "finite"),
        ({"a": np.zeros(3)}, lambda m: m["a"] / m["a"], None, "divides"),
        ({"a": np.zeros(3)}, lambda m: 1.0, None, "one finite number per resample"),
    ],
)
def test_what_has_no_interval_is_a_sentence(arrays, expression, groups, says):
    with np.errstate(invalid="ignore"), pytest.raises(UserError, match=says):
        paired(arrays, expression, groups)


def test_bad_level():
    with pytest.raises(UserError, match="level 95"):
        interval(np.ones(3), level=95)


@pytest.mark.parametrize(
    "mean, n, chance, floor",
    [
        (0.25, 1000, 0.25, True),
        (0.20, 1000, 0.25, True),
        (0.29, 1000, 0.25, True),  # 3 standard errors are 0.0411
        (0.30, 1000, 0.25, False),
        (0.30, 100, 0.25, True),
        (0.0, 100, 0.0, True),
        (0.01, 100, 0.0, False),
    ],
)
def test_chance_floor(mean, n, chance, floor):
    assert chance_floor(mean, n, chance) is floor


def test_chance_floor_of_nothing():
    with pytest.raises(UserError, match="0 items"):
        chance_floor(0.5, 0, 0.25)
