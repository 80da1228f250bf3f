"""Loss curves and their spikes: the rule on known curves, blocks kept apart, stretches of equal length, bad input."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.core.errors import UserError
from repro.jobs.target import Target
from repro.metrics import curve, training
from repro.specs import scale as scales
from repro.store.observations import Observations, Series

AT = scales.load({"calibration": {"corpus": "tiny-held-out", "sequences": 64, "length": 16}, "device": "cpu"}, "pocket")


def target(text: str) -> Target:
    return Target(AT, "pocket-3m", text)


def shown(params: curve.Curve, points, text: str = "paretoq(tokens=1024)"):
    steps = {"step 0": Observations({training.LOSS: Series(np.asarray(points, float), "layers")}, {})}
    result = params.series(steps, target(text))
    return next(iter(result.values())).values.tolist() if result else None


FLAT = [1.0] * 20


@pytest.mark.parametrize(
    ("points", "count"),
    [
        (FLAT, 0),
        ([*FLAT, 1.25, 1.0], 0),  # not more than the factor
        ([*FLAT, 1.2501, 1.0], 1),
        ([*FLAT, 9.0, 9.0, *FLAT], 2),
        ([9.0, *FLAT], 0),  # nothing is before it
        (np.geomspace(8, 1, 64), 0),
        ([*FLAT, *[2.0] * 20], 5),  # a step is one until most of what is before it has its height
    ],
)
def test_a_spike_is_above_the_median_before_it(points, count):
    assert shown(curve.Curve(), points) == [count]


def test_factor_and_window_are_the_rules():
    points = [1, 1, 1, 1, 1.5, 1, 1]
    assert [shown(curve.Curve(factor=f, window=3), points) for f in (1.4, 1.5, 1.6)] == [[1], [0], [0]]
    assert shown(curve.Curve(factor=1.4, window=5), points) == [0], "it has four points before it"


def test_a_block_that_starts_higher_is_no_spike():
    """64 sequences of 16 in batches of 2, one epoch: 32 steps a block, and as many points."""
    text, blocks = "bitbybit(tokens=1024, epochs=1, schedule=[w2a16])", [1.0] * 32 + [5.0] * 32
    assert curve.stretches(target(text)) == 32
    assert shown(curve.Curve(), blocks, text) == [0] and shown(curve.Curve(), blocks) == [5], (
        "end to end it is one curve"
    )
    blocks[40] = 10.0
    assert shown(curve.Curve(), blocks, text) == [1]


def test_points_of_a_block_are_at_most_those_that_the_trainer_keeps():
    """Six epochs are 192 steps and 64 points, two are 64 steps; EfficientQAT trains by blocks, too."""
    lengths = [curve.stretches(target(t)) for t in ("bitbybit(tokens=1024, epochs=6)", "bitbybit(tokens=1024)",
               "efficientqat(tokens=512, epochs=1)", "e2e_qp(tokens=64)")]  # fmt: skip
    assert lengths == [64, 64, 16, 0]
    assert curve.stretches(target("efficientqat(tokens=1024) + e2e_qp(tokens=1024)")) == 0, "the last step's curve"


def test_merged_points_are_means_of_equal_stretches():
    text = "bitbybit(tokens=64, epochs=3, schedule=[w2a16])"  # 4 sequences, 2 steps an epoch: 6 points a block
    assert curve.stretches(target(text)) == 6
    assert shown(curve.Curve("loss", merged=3), range(12), text) == [1, 4, 7, 10]
    assert shown(curve.Curve("loss", merged=4), range(12), text) == [2.5, 8.5], (
        "a block shorter than asked is one point"
    )
    assert shown(curve.Curve("place", merged=3), range(12), text) == [12.5, 37.5, 62.5, 87.5]
    assert shown(curve.Curve("loss"), range(12), text) == list(range(12))


@given(st.integers(1, 40), st.integers(1, 12))
def test_merging_keeps_the_mean_of_blocks_that_divide(blocks, count):
    points = np.random.default_rng(blocks).normal(size=count * blocks)
    assert curve.merged(points, count).mean() == pytest.approx(points.mean())


def test_nothing_is_shown_where_nothing_was_trained():
    assert shown(curve.Curve(), []) is None
    assert curve.Curve().series({"step 0": Observations({}, {})}, target("rtn-w4-pc")) == {}
    assert curve.Curve.jobs is training.Training.jobs


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: curve.Curve(factor=1.0), "factor is 1.0; it must be above 1, as a spike rises"),
        (lambda: curve.Curve(window=0), "window is 0; it must be 1 or more"),
        (lambda: curve.Curve(merged=0), "merged is 0; it must be 1 or more"),
        (lambda: shown(curve.Curve(), range(65), "bitbybit(tokens=1024)"), "65 points is not made of blocks of 64"),
    ],
)
def test_bad_input_is_one_sentence(make, message):
    with pytest.raises(UserError) as error:
        make()
    assert message in str(error.value) and "\n" not in str(error.value)
