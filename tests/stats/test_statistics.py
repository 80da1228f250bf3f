"""Intervals: coverage on correlated windows and over seeds, known answers, pairing."""

import time
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from series import interval

from repro.core.errors import UserError
from repro.stats import statistics
from repro.stats.quantity import Quantity, choices, compose, evaluate
from repro.stats.statistics import Draw, Interval, block_length, block_starts, lag_one, share_of_blocks
from repro.store.observations import Series

SEEDS = [(3, 0.0), (3, 0.3), (5, 0.1)]  # how many, and how far apart
MORE_SEEDS = [pytest.param(*case, marks=pytest.mark.slow) for case in ((3, 0.1), (5, 0.0), (5, 0.3))]
SERIES = 2000  # simulated; the standard error of a coverage near 0.93 is 0.006


@pytest.fixture
def random():
    return np.random.default_rng(0)


def correlated(random, shape, rho):
    """AR(1) series of unit variance along the last axis, in their stationary state."""
    noise = random.normal(size=shape)
    series = noise.copy()
    for i in range(1, shape[-1]):
        series[..., i] = rho * series[..., i - 1] + np.sqrt(1 - rho**2) * noise[..., i]
    return series


def coverage(intervals, truth):
    """The share of intervals that contain the truth."""
    return np.mean([result.lo <= truth <= result.hi for result in intervals])


def mean(values, **options):
    """The interval of a plain mean that may have any number of windows."""
    return interval({"x": values}, lambda m: m["x"], **({"paired": True} | options))


def difference(m):
    return m["w4"] - m["w16"]


def share(m):
    """What a study calls recovered: of the perplexity gap between the base and full precision."""
    base, full = np.exp(m["base"]), np.exp(m["full"])
    return (base - np.exp(m["ours"])) / (base - full)


@pytest.mark.parametrize("n", [100, pytest.param(166, marks=pytest.mark.slow), 213])
def test_covers_a_perplexity(n, random):
    windows = 2 + 0.25 * correlated(random, (SERIES, n), 0.6)
    result = [interval({"nll": nll}, lambda m: np.exp(m["nll"])) for nll in windows]
    assert 0.92 <= coverage(result, np.exp(2)) <= 0.97
    assert {i.covers for i in result} == {"windows only"}
    assert coverage((mean(nll, axis="items") for nll in windows[:1000]), 2) < 0.72  # as if windows were independent


@pytest.mark.parametrize("n", [100, 213])
def test_covers_where_windows_are_strongly_correlated(n, random):
    result = [mean(windows) for windows in correlated(random, (1000, n), 0.8)]
    assert 0.92 <= coverage(result, 0) <= 0.97
    assert np.median([one.df for one in result]) < n // 12 - 1, "blocks are longer than 12"


@pytest.mark.parametrize("n", [100, pytest.param(166, marks=pytest.mark.slow), 213])
def test_covers_a_paired_difference(n, random):
    common, own = correlated(random, (SERIES, n), 0.6), correlated(random, (SERIES, n), 0.35)
    result = [interval({"w16": w16, "w4": w16 + 0.1 + 0.02 * d}, difference) for w16, d in zip(common, own)]
    assert 0.92 <= coverage(result, 0.1) <= 0.97
    assert coverage((mean(d, axis="items") for d in own[:1000]), 0) < 0.87


@pytest.mark.parametrize("n, least", [(8, 0.88), (16, 0.88), (40, 0.92), (99, 0.92)])
def test_covers_a_paired_difference_of_few_windows(n, least, random):
    own = correlated(random, (SERIES, n), 0.35)
    assert least <= coverage((interval({"w16": 0 * d, "w4": d}, difference) for d in own), 0) <= 0.97


@pytest.mark.parametrize("n", [40, pytest.param(100, marks=pytest.mark.slow), 213])
def test_covers_a_recovered_share(n, random):
    full = 2 + 0.25 * correlated(random, (SERIES, n), 0.6)
    base = full + 0.2 + 0.1 * correlated(random, (SERIES, n), 0.35)
    ours = full + 0.1 + 0.1 * correlated(random, (SERIES, n), 0.35)
    truth = share({"full": 2.0, "base": 2.2, "ours": 2.1})
    result = (interval({"full": f, "base": b, "ours": s}, share) for f, b, s in zip(full, base, ours))
    assert 0.92 <= coverage(result, truth) <= 0.97


BEST_OF_FIVE, FLAT = "min(a, b, c, d, e) - s", "max(a, b, c) / min(a, b, c) - 1"


def extremes(gap, expression, count=250):
    """Intervals of perplexities that differ by steps of `gap` nats, plain and as `compose` gives them; the truth.

    What `s` loses varies less, since it loses less.
    """
    random = np.random.default_rng(20261126)
    losses = {name: 0.1 + gap * i for i, name in enumerate("abcde" if expression == BEST_OF_FIVE else "abc")}
    losses |= {"s": 0.08} if expression == BEST_OF_FIVE else {}
    own = 0.05 * correlated(random, (count, len(losses), 213), 0.35)
    full = 2 + 0.25 * correlated(random, (count, 213), 0.6)
    plain, result = [], []
    for common, noise in zip(full, own):
        parts = {}
        for (name, lost), each in zip(losses.items(), noise):
            nll = Series(common + lost + each * (0.3 if name == "s" else 1), "windows", "text")
            parts[name] = Quantity([{"nll": nll}], lambda mean: np.exp(mean["nll"]))
        both = compose(expression, parts)
        result.append(both.interval())
        plain.append(replace(both, branches=tuple).interval())
    truth = float(evaluate(expression, {name: np.exp(2 + lost) for name, lost in losses.items()}))
    return plain, [replace(one, lo=one.lo - 1e-12) for one in result], truth


@pytest.mark.parametrize("expression", [BEST_OF_FIVE, FLAT])
@pytest.mark.parametrize("gap, most", [(0.0, 0.99), (0.004, 1.0), (0.1, 0.97)])
def test_covers_the_least_and_the_greatest_of_several(gap, most, expression):
    """Equal, close and far apart. Where they are close it is only known that several may be the least."""
    plain, result, truth = extremes(gap, expression)
    assert 0.93 <= coverage(result, truth) <= most
    assert all(one.lo <= one.value <= one.hi for one in result)
    if not gap:
        assert coverage(plain, truth) < 0.91, "the least of five estimates is too low"
        assert min(one.lo for one in result) >= -1e-12 or expression == BEST_OF_FIVE, "at least 0"
    if gap == 0.1:
        widths = [(one.hi - one.lo) / (other.hi - other.lo) for one, other in zip(result, plain)]
        assert np.median(widths) == pytest.approx(1, abs=0.02), "one alone may be the least"


def over_seeds(**values):
    """A quantity for each name whose value is another one in every seed."""
    quantities = {}
    for name, by_seed in values.items():
        seeds = [{"x": Series(np.asarray([value]), "model")} for value in by_seed]
        quantities[name] = Quantity(seeds, lambda mean: mean["x"])
    return quantities


def test_the_least_over_seeds_is_that_of_the_means():
    """The best of two methods is not the luckier one of every seed, whose mean is 4/3; which seed is which decides."""
    two = over_seeds(a=(1.0, 3.0, 2.0), b=(3.0, 1.0, 2.5))
    assert compose("min(a, b)", two).interval().value == 2.0
    assert compose("max(a, b)", two).interval().value == pytest.approx(6.5 / 3)
    assert compose("2 - min(a, b)", two).interval().value == 0.0
    assert compose("min(a, b) - max(a, b)", two).interval().value == pytest.approx(2.0 - 6.5 / 3)
    assert compose("min(a, b)", two).interval().by_seed == (1.0, 1.0, 2.0)
    assert compose("a - b", two).interval().value == pytest.approx(2.0 - 6.5 / 3)
    exchanged = over_seeds(a=(1.0, 3.0, 2.0), b=(1.0, 3.0, 2.5))
    assert compose("min(a, b)", exchanged).interval().value == 2.0
    four = over_seeds(a=(1.0, 3.0), b=(3.0, 1.0), c=(5.0, 0.0), d=(0.0, 5.0))
    neither = compose("min(a, b) + max(c, d)", four).interval()
    assert neither.value == 6.0 and neither.by_seed == (6.0, 6.0), "the mean of its seeds, no branch's"


def test_a_least_of_one_certain_and_one_uncertain_value(random):
    """A series without spread beside one with: no correlation to divide by."""
    series = {"a": Series(1 + 0.1 * random.normal(size=120), "windows"), "b": Series(np.full(120, 1.0), "windows")}
    parts = {name: Quantity([{"x": one}], lambda mean: mean["x"]) for name, one in series.items()}
    result = compose("min(a, b)", parts).interval()
    assert result.lo < 1 and result.hi == 1.0


def test_the_choices_of_an_expression():
    assert choices("max(a, b) / min(a, b) - 1") == ["a / a - 1", "a / b - 1", "b / a - 1", "b / b - 1"]
    assert choices("-min(a, max(b, c))") == ["-a", "-b", "-c"]
    assert choices("(a - s) / b") == [] == choices("max(a / b)"), "of one argument it is over its layers"


@pytest.mark.parametrize("count, spread", [*SEEDS, *MORE_SEEDS])
def test_covers_windows_and_seeds(count, spread, random):
    """Over seeds that move the value by up to three times the standard error from windows."""
    windows = correlated(random, (SERIES, 1, 100), 0.35) + 0.3 * correlated(random, (SERIES, count, 100), 0.35)
    values = windows + spread * random.normal(size=(SERIES, count, 1))
    result = [mean(series) for series in values]
    assert 0.92 <= coverage(result, 0) <= 0.97
    assert {i.covers for i in result} == {"windows and seeds"}
    if spread == 0.3:
        assert coverage((mean(series.mean(axis=0)) for series in values), 0) < 0.89  # without s^2 / S
        assert coverage((mean(series[0]) for series in values), 0) < 0.7  # what one seed says


@given(st.integers(2, 500))
def test_blocks_are_neighbours_and_use_every_window(n):
    starts = block_starts(n, block_length(n))
    sizes = np.diff(starts, append=n)
    assert starts[0] == 0 and sizes.sum() == n and sizes.max() - sizes.min() <= 1
    assert sizes.min() >= min(n, block_length(n)) and (n < 8 or len(sizes) >= 4) and (n < 12 or len(sizes) >= 6)


def test_blocks_grow_with_the_series_and_its_correlation():
    assert [block_length(n) for n in (2, 8, 17, 18, 40, 71, 72, 100, 213, 2000)] == [2, 2, 2, 3, 6, 11, 12, 12, 12, 12]
    assert [block_length(213, rho) for rho in (0, 0.35, 0.6, 0.8, 0.95)] == [12, 12, 12, 19, 35]
    assert block_length(100, 0.8) == 15 and block_length(100, 0.95) == 16, "six blocks at least"


def test_blocks_show_a_part_of_the_variance():
    """By the covariances of an AR(1) block, added up."""
    rho, length = 0.7, 9
    total = sum(rho ** abs(i - j) for i, j in product(range(length), range(length))) / length
    assert share_of_blocks(length, rho) == pytest.approx(total / ((1 + rho) / (1 - rho)))
    assert share_of_blocks(12, 0.0) == 1.0


def test_the_lag_one_correlation_is_not_biased(random):
    for rho in (0.0, 0.6):
        result = [lag_one(windows) for windows in correlated(random, (500, 100), rho)]
        assert np.median(result) == pytest.approx(rho, abs=0.03)
    assert lag_one(np.ones(100)) == 0.0


def test_a_hand_computed_case():
    """Blocks of two with means 2, 4, 5, 9: mean 5, standard error sqrt(26 / (4 * 3)), t quantile 3.1824 with 3."""
    result = mean([1.0, 3, 4, 4, 2, 8, 9, 9])
    half = 3.182446305284263 * np.sqrt(26 / 12)
    assert (result.lo, result.hi, result.df) == pytest.approx((5 - half, 5 + half, 3))
    assert (result.value, result.n, result.covers, result.by_seed) == (5, 8, "windows only", (5,))


def test_equal_blocks_give_the_t_interval_of_block_means(random):
    values = random.normal(size=96)
    result, means = mean(values), values.reshape(8, 12).mean(axis=1)
    want = stats.t.interval(0.95, 7, loc=means.mean(), scale=stats.sem(means))
    assert (result.lo, result.hi, result.df) == pytest.approx((*want, 7))


def test_a_draw_adds_its_variance(random):
    """Two draws of the same size, one of which moves both series: of a difference it moves nothing."""
    values = random.normal(size=90)
    seeds = [{name: Series(values, "windows") for name in ("a", "b")}]
    own, both = Draw({"a": 0.5}, 20), Draw({"a": 0.5, "b": 0.5}, 20)
    one, none = (statistics.interval(seeds, lambda m: m["a"] - m["b"], draws=[draw]) for draw in (own, both))
    assert (none.lo, none.hi) == (0, 0) and none.covers == "windows and pooled seeds"
    assert (one.hi, one.df) == (pytest.approx(0.5 * stats.t.ppf(0.975, 20)), pytest.approx(20))


def test_a_hand_computed_case_of_two_seeds():
    """Seeds 4 and 6 of the same windows: s^2 / S = 1 with 1 degree of freedom, beside 26 / 12 with 3."""
    windows = np.array([1.0, 3, 4, 4, 2, 8, 9, 9])
    result = mean([windows - 1, windows + 1])
    variance = 26 / 12 + 1
    df = variance**2 / ((26 / 12) ** 2 / 3 + 1)
    assert (result.value, result.df, result.by_seed) == (5, pytest.approx(df), (4, 6))
    assert result.hi - 5 == pytest.approx(stats.t.ppf(0.975, df) * np.sqrt(variance))


@given(st.integers(2, 40))
def test_items_get_the_classic_t_interval(n):
    values = np.random.default_rng(n).normal(size=n)
    result = mean(values, axis="items", paired=None)
    want = stats.t.interval(0.95, n - 1, loc=values.mean(), scale=stats.sem(values))
    assert (result.lo, result.hi) == pytest.approx(want) and result.covers == "items only"


def test_sequences_are_resampled(random):
    """Of a mean the bootstrap gives the normal interval; of a step that no single sequence moves, both its values."""
    values = random.normal(size=64)
    result, jackknife = mean(values, axis="sequences"), mean(values, axis="draws")
    half = 1.96 * values.std() / 8
    assert (result.lo, result.hi) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.15 * half)
    assert (result.covers, result.df, result.n) == ("sequences only", 63, 64) and jackknife.covers == "draws only"
    values += 0.1 - values.mean()
    step = [interval({"x": values}, lambda m: (m["x"] > 0) * 1.0, axis=axis) for axis in ("draws", "sequences")]
    assert [(one.lo, one.value, one.hi) for one in step] == [(1, 1, 1), (0, 1, 2)], "quantiles and their reflection"


def test_covers_a_rank_correlation_that_noise_lowers(random):
    """Of 40 layers under two recipes, each with 64 sequences, whose noise lowers the correlation by 0.05."""
    layers = 40

    def ranks_of(means, role):
        return np.stack([means[f"{role}{i}"] for i in range(layers)]).argsort(0).argsort(0)

    def by_layer(of_roles):
        names = [f"{role}{i}" for role, i in product("ab", range(layers))]
        return dict(zip(names, of_roles.reshape(2 * layers, *of_roles.shape[2:]), strict=True))

    def rho(means):
        one, other = ranks_of(means, "a"), ranks_of(means, "b")
        return 1 - 6 * ((one - other) ** 2).sum(0) / (layers**3 - layers)

    result, truths = [], []
    for _ in range(100):
        true = random.normal(size=layers) + 0.4 * random.normal(size=(2, layers))
        values = true[:, :, None] + 2 * random.normal(size=(2, layers, 64))
        result.append(interval(by_layer(values), rho, axis="sequences"))
        truths.append(rho(by_layer(true)))
    assert np.mean([one.value for one in result]) < np.mean(truths) - 0.03
    assert coverage_of(result, truths) >= 0.92
    assert coverage_of([replace(one, hi=one.value) for one in result], truths) < 0.5, "the reflected end is needed"


def coverage_of(intervals, truths):
    """The share of intervals that contain their own truth."""
    return np.mean([result.lo <= truth <= result.hi for result, truth in zip(intervals, truths, strict=True)])


def test_resampled_groups_are_paired_within_and_independent_between(random):
    values = random.normal(size=64)
    arrays = {"w16": values, "w4": values + 1}
    paired, apart = (interval(arrays, difference, groups, axis="sequences") for groups in (None, {"w4": "other"}))
    assert (paired.lo, paired.hi) == pytest.approx((1, 1)) and apart.n == 128
    half = 1.96 * values.std() * np.sqrt(2) / 8
    assert (apart.lo, apart.hi) == pytest.approx((1 - half, 1 + half), abs=0.15 * half)


def test_resampled_sequences_beside_seeds_give_a_symmetric_interval(random):
    seeds = random.normal(size=(3, 64)) + np.array([[0], [1], [2]])
    result = mean(seeds, axis="sequences")
    assert result.hi - result.value == pytest.approx(result.value - result.lo)
    assert result.covers == "sequences and seeds"
    assert result.hi - result.value > stats.t.ppf(0.975, 2) * np.std(seeds.mean(1), ddof=1) / np.sqrt(3) * 0.95


def test_items_of_several_tasks_are_independent(random):
    tasks = {"arc": random.normal(size=300), "boolq": random.normal(size=200)}
    result = interval(tasks, lambda m: (m["arc"] + m["boolq"]) / 2, {t: t for t in tasks}, axis="items")
    variances = [values.var(ddof=1) / len(values) / 4 for values in tasks.values()]
    df = sum(variances) ** 2 / sum(v**2 / (len(values) - 1) for v, values in zip(variances, tasks.values()))
    assert (result.n, result.df) == (500, pytest.approx(df))
    assert result.hi - result.value == pytest.approx(stats.t.ppf(0.975, df) * np.sqrt(sum(variances)))


def test_seeds_share_what_has_none(random):
    """Base and full precision are measured once; each seed's share is a ratio of its own."""
    full = random.normal(2, 0.2, 60)
    base, ours = full + random.normal(0.2, 0.02, 60), full + random.normal(0.1, 0.02, (3, 60))
    result = interval({"full": full, "base": base, "ours": ours}, share)
    each = [float(share({"full": full.mean(), "base": base.mean(), "ours": seed.mean()})) for seed in ours]
    assert result.by_seed == pytest.approx(each) and result.value == pytest.approx(np.mean(each))
    assert result.lo < result.value < result.hi and result.covers == "windows and seeds"
    one = interval({"full": full, "base": base, "ours": ours[:1]}, share)
    assert one == interval({"full": full, "base": base, "ours": ours[0]}, share) and one.covers == "windows only"


def test_equal_inputs_give_equal_bytes(random):
    windows = random.normal(size=(3, 50))
    assert repr(mean(windows)) == repr(mean(windows.copy()))


def test_a_group_does_not_depend_on_other_groups(random):
    arrays = {"a": random.normal(size=130), "b": random.normal(size=140)}
    groups = {"a": "wikitext2", "b": "c4"}
    alone, beside = (interval(values, lambda m: np.exp(m["a"]), groups) for values in ({"a": arrays["a"]}, arrays))
    assert repr((alone.value, alone.lo, alone.hi, alone.df)) == repr((beside.value, beside.lo, beside.hi, beside.df))


def test_pairing_removes_the_common_noise(random):
    common = random.normal(size=100)
    arrays = {"w16": common, "w4": common + 0.1 + random.normal(0, 0.01, 100)}
    paired, apart = interval(arrays, difference), interval(arrays, difference, {"w4": "another corpus"})
    assert 0.09 < paired.lo < 0.1 < paired.hi < 0.11
    assert apart.hi - apart.lo > 20 * (paired.hi - paired.lo)


def test_a_difference_with_itself_is_exactly_zero(random):
    values = random.normal(size=20)
    result = interval({"w4": values, "w16": values}, difference)
    assert (result.value, result.lo, result.hi, result.df) == (0, 0, 0, 5)


def test_a_single_perplexity_of_few_windows_has_no_interval(random):
    few, enough = random.normal(2, 0.2, (2, 99)), random.normal(2, 0.2, 100)

    def perplexity(values, **options):
        return interval({"nll": values}, lambda m: np.exp(m["nll"]), **options)

    bare = perplexity(few[0])
    assert bare == Interval(bare.value, None, None, 99, None, "", (bare.value,))
    assert bare.value == pytest.approx(np.exp(few[0].mean()))
    assert perplexity(few).lo is None and len(perplexity(few).by_seed) == 2
    assert perplexity(few[0], paired=True).lo is not None and perplexity(few[0], axis="items").lo is not None
    assert perplexity(enough).lo is not None
    arrays = {"w16": few[0], "w4": few[1]}
    assert interval(arrays, difference).lo is not None
    assert interval(arrays, difference, paired=False).lo is None
    assert interval(arrays, difference, {"w4": "another corpus"}).lo is None
    assert interval({"w16": few[0][:3], "w4": few[1][:3]}, difference).lo is None  # one block


def test_a_known_result_adds_its_variance(random):
    values = random.normal(2, 0.2, 120)
    whole = interval({"w4": values, "w16": values[::-1]}, difference, {"w4": "here", "w16": "there"})
    part = mean(values[::-1])
    result = interval({"w4": values}, difference, known={"w16": part})
    assert (result.value, result.lo, result.hi) == pytest.approx((whole.value, whole.lo, whole.hi))
    assert (result.n, result.df, result.covers) == (240, pytest.approx(whole.df), "windows only")
    normal = Interval(1.0, 1 - 1.959964, 1 + 1.959964, 50, None, "items only", (1.0,))  # of an older result
    alone = interval({}, lambda m: 3 * m["x"], known={"x": normal}, axis="items")
    assert (alone.lo, alone.hi) == pytest.approx((3 - 3 * 1.959964, 3 + 3 * 1.959964))
    assert alone.covers == "results only"
    bare = Interval(1.0, None, None, 50, None, "", (1.0,))
    assert interval({"w4": values}, difference, known={"w16": bare}).lo is None


def test_the_least_of_times_that_have_no_units_has_an_interval():
    """Recorded times count no units; of two far apart the least has the interval of the smaller one."""
    times = {name: Interval(value, value - 0.1, value + 0.1, 0, None, "items only", (value,))
             for name, value in {"a": 2.0, "b": 9.0}.items()}  # fmt: skip
    least = statistics.interval([], lambda m: np.minimum(m["a"], m["b"]), known=times, branches=[
        lambda m: m["a"], lambda m: m["b"]])  # fmt: skip
    assert (least.value, least.lo, least.hi) == pytest.approx((2.0, 1.9, 2.1), abs=5e-3)


def test_the_least_of_several_is_the_same_whatever_signs_and_order_eigenvectors_have(monkeypatch):
    """Libraries of linear algebra give either sign, by processor; of equal eigenvalues any basis."""
    known = {name: Interval(value, value - half, value + half, 60, None, "items only", (value,))
             for name, value, half in (("a", 2.0, 0.1), ("b", 2.05, 0.2), ("c", 2.02, 0.1))}  # fmt: skip
    branches = [lambda m: m["a"] + m["b"], lambda m: m["b"] + m["c"], lambda m: m["a"] + m["c"]]

    def ends():
        expression = lambda m: np.minimum.reduce([branch(m) for branch in branches])  # noqa: E731
        result = statistics.interval([], expression, known=known, branches=branches)
        return result.lo, result.hi

    before, eigh = ends(), np.linalg.eigh

    def turned(matrix):
        values, vectors = eigh(matrix)
        return values[::-1], vectors[:, ::-1] * np.array([1.0, -1.0, -1.0])

    monkeypatch.setattr(np.linalg, "eigh", turned)
    assert ends() == pytest.approx(before, rel=1e-12)


@given(st.floats(-5, 5), st.floats(0.1, 5), st.integers(4, 150), st.integers(1, 3))
def test_moves_with_shift_and_scale(shift, scale, n, seeds):
    values = np.random.default_rng(n).normal(size=(seeds, n))
    before, after = mean(values), mean(shift + scale * values)
    assert before.lo <= before.value <= before.hi
    assert (after.lo, after.hi) == pytest.approx((shift + scale * before.lo, shift + scale * before.hi), abs=1e-9)
    assert after.df == pytest.approx(before.df)
    turned = mean(-values)
    assert (turned.lo, turned.hi) == pytest.approx((-before.hi, -before.lo))


def test_a_table_of_intervals_is_quick(random):
    values = random.normal(size=(3, 213))
    started = time.process_time()
    for _ in range(600):
        interval({"full": values[0], "base": values[1] + 3, "ours": values}, share)
    assert time.process_time() - started < 3


@pytest.mark.parametrize(
    "arrays, expression, says",
    [
        ({"a": np.ones(3), "b": np.ones(4)}, lambda m: m["a"], "differ in length"),
        ({"a": np.ones(1)}, lambda m: m["a"], "two or more"),
        ({"a": np.array([1.0, np.nan])}, lambda m: m["a"], "finite"),
        ({"a": np.zeros(3)}, lambda m: m["a"] / m["a"], "divides"),
        ({"a": np.zeros(3)}, lambda m: 1.0, "one finite number per mean"),
    ],
)
def test_what_has_no_interval_is_a_sentence(arrays, expression, says):
    with pytest.raises(UserError, match=says):
        interval(arrays, expression)
