"""Agreement of two recipes on the most damaged layers: known answers, and intervals by resampling sequences."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from repro.core.errors import UserError
from repro.jobs.target import Target
from repro.metrics.agreement import Agreement
from repro.papers.cell import Cell
from repro.specs import scale
from repro.stats.quantity import Quantity, compose
from repro.store.observations import Observations, Series
from repro.workflow.workflow import Workflow

ONE = np.array([9.0, 8, 7, 6, 5, 4, 3, 2, 1, 0])


def shown(params, one, other):
    means = {f"one {i}": value for i, value in enumerate(one)} | {f"other {i}": value for i, value in enumerate(other)}
    return float(params.value(means))


@pytest.mark.parametrize(
    ("other", "rho", "jaccard", "mismatch", "moved"),
    [
        (ONE, 1.0, 1.0, 0.0, 0),
        (2 * ONE**3 + 1, 1.0, 1.0, 0.0, 0),
        (-ONE, -1.0, 0.0, 100.0, 90),
        (ONE[[0, 1, 3, 2, 4, 5, 6, 7, 8, 9]], 1 - 6 * 2 / 990, 0.5, 100 / 3, 0),  # 2 of 3 layers are in both sets
        (ONE[[2, 1, 0, 3, 4, 5, 6, 7, 8, 9]], 1 - 6 * 8 / 990, 1.0, 0.0, 20),
    ],
)
def test_rankings_agree_as_by_hand(other, rho, jaccard, mismatch, moved):
    result = [shown(Agreement(show, ""), ONE, other) for show in ("rho", "jaccard", "mismatch", "moved")]
    assert result == pytest.approx([rho, jaccard, mismatch, moved])


def test_the_top_is_a_share_of_the_layers_rounded_and_ties_go_to_the_earlier_layer():
    assert shown(Agreement("jaccard", "", top=0.1), np.ones(14), np.r_[1.0, np.zeros(13)]) == 1
    assert shown(Agreement("jaccard", "", top=0.3), np.arange(14.0), np.r_[np.zeros(10), 1, 2, 3, 9]) == 1, "4 of 14"
    for odd in (0, 1.1):
        with pytest.raises(UserError, match="top is"):
            Agreement("rho", "", top=odd)


def test_jaccard_of_14_layers_has_five_values():
    orders = [np.random.default_rng(seed).permutation(14) for seed in range(300)]
    result = {round(shown(Agreement("jaccard", ""), orders[0], order), 6) for order in orders}
    assert result <= {0, round(1 / 7, 6), round(1 / 3, 6), 0.6, 1.0} and len(result) >= 4


def test_both_recipes_are_measured_on_the_same_sequences_and_full_precision_gives_nothing():
    at = Target(scale.load(name="pocket"), "pocket-3m", "rtn-w4-pc")
    result = Agreement("rho", "gptq-w4-pc").jobs(at)
    assert [job.steps for job in result.values()] == [("rtn",), ("gptq",)] and list(result) == ["one", "other"]
    assert Agreement("rho", "gptq-w4-pc").series({"other": Observations({}, {})}, at) == {}


def quantity(show, noise):
    """Of ten layers whose damage differs by 1 and, by sequence, by normal noise; the other recipe's is the same."""
    random = np.random.default_rng(0)
    by_role = {}
    for role in ("one", "other"):
        values = ONE[:, None] + noise * random.normal(size=(10, 64))
        series_ = {f"damage {i}": Series(row, "sequences", "probe") for i, row in enumerate(values)}
        by_role[role] = Observations(series_ | {"loss 0": Series(ONE, "sequences", "text")}, {})
    result = Agreement(show, "").series(by_role, None)
    assert list(result) == [f"{role} {i}" for role, i in product(("one", "other"), range(10))]
    return Quantity([result], lambda mean: Agreement(show, "").value(mean), True)


def test_ranks_have_the_interval_that_resampling_gives():
    sure, unsure = (quantity("rho", noise).interval() for noise in (0.1, 8.0))
    assert (sure.lo, sure.value, sure.hi) == (1, 1, 1)
    assert unsure.lo < unsure.value < unsure.hi and unsure.n == 64 and unsure.covers == "sequences only"
    assert 0.05 < unsure.hi - unsure.lo < 0.6
    overlap = quantity("jaccard", 8.0).interval()
    assert overlap.value in (0, 0.2, 0.5, 1) and overlap.lo < overlap.value < overlap.hi  # three layers each


def test_intervals_end_where_a_kind_has_its_limits():
    cell = Cell(*[""] * 7, measure="agreement", params=Agreement("rho", ""), recipe="rtn-w4-pc")
    flow = Workflow(scale.load(name="pocket"), stored=False)
    whole = flow.of_series(cell, quantity("rho", 2.0).seeds)
    free = quantity("rho", 2.0).interval()
    assert free.hi > 1 and whole.interval() == replace(free, hi=1.0)
    assert compose("r", {"r": whole}).interval().hi == 1 and compose("2 * r", {"r": whole}).interval().hi > 2
    assert Agreement("jaccard", "").limits == (0, 1)
    assert Agreement("mismatch", "").limits == Agreement("moved", "").limits == (0, 100)
