"""Histograms of codes and weights: counts by hand, one master at several widths, entropy, bad input."""

import numpy as np
import pytest
import tiny
import torch

from repro.core.errors import UserError
from repro.jobs.target import Target
from repro.metrics import histogram
from repro.models.groups.quantizer import GroupGrid
from repro.models.groups.weight import pack
from repro.models.lowbit import block_linears
from repro.specs import scale as scales
from repro.store.observations import Observations, Series


def test_weights_are_counted_in_bins_around_zero():
    """Reach 2 and five bins: middles -2, -1, 0, 1, 2; what is larger lies in the outermost."""
    weights = [torch.tensor([[0.0, 0.4, -0.4, 0.6]]), torch.tensor([[-1.4, -9.0, 2.2, 2.0]])]
    middles, shares = histogram.of_weights(weights, 2.0, 5)
    assert middles.tolist() == [-2, -1, 0, 1, 2]
    assert (8 * shares).tolist() == [1, 1, 3, 1, 2] and shares.sum() == 1


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_codes_of_one_master_are_counted_at_every_width(bits):
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    masters = {"a": pack(weight, GroupGrid(8, 32)), "b": pack(weight.flip(0) ** 3, GroupGrid(8, 32))}
    levels, shares = histogram.of_codes({name: one.at(bits) for name, one in masters.items()})
    by_hand = np.zeros(2**bits)
    for one in masters.values():
        for code in one.codes.flatten().tolist():
            by_hand[code // 2 ** (8 - bits)] += 1 / 1024
    assert shares == pytest.approx(by_hand) and len(levels) == 2**bits
    step = 2 ** (8 - bits)
    assert levels == pytest.approx(np.arange(2**bits) * step + (step - 1) / 2), "the middle of what a code stands for"


def test_the_reach_leaves_one_in_a_thousand_out():
    weights = [torch.arange(1, 501) / 1000, -torch.arange(501, 1001) / 1000]
    assert histogram.largest(weights) == pytest.approx(0.999, abs=1e-3)


@pytest.mark.parametrize(
    ("shares", "count"), [([0.25] * 4, 4.0), ([1, 0, 0], 1.0), ([0.5, 0.5, 0], 2.0), ([0.9, 0.1], 1.3842)]
)
def test_effective_bins_are_exp_of_the_entropy(shares, count):
    assert histogram.effective(np.asarray(shares)) == pytest.approx(count, abs=1e-4)


def test_values_of_a_group_are_counted_where_they_are_equal():
    """Two groups of four: all different, 4; three and one, exp of the entropy; of one value, 1."""
    three = np.exp(-(0.75 * np.log(0.75) + 0.25 * np.log(0.25)))
    rows = torch.tensor([[1.0, 2, 3, 4, 5, 5, 5, 6], [7, 7, 7, 7, 7, 7, 7, 7]])
    assert histogram.of_groups([rows], [4]) == pytest.approx((4 + three + 1 + 1) / 4)
    assert histogram.of_groups([rows[:1], rows[1:]], [4, 8]) == pytest.approx((4 + three + 1) / 3)
    with pytest.raises(UserError, match="8 input channels do not divide into groups of 3"):
        histogram.of_groups([rows], [3])


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_group_has_at_most_as_many_values_as_codes(bits):
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    result = histogram.of_groups([pack(weight, GroupGrid(8, 32)).at(bits).codes], [32])
    assert 1 < result <= min(32, 2**bits) and (bits > 2 or result > 2)


HELD = {"counts": Observations({
    "bins": Series(np.asarray([-1.0, 0, 1]), "bins"), "weights": Series(np.asarray([0.25, 0.5, 0.25]), "bins"),
    "groups": Series(np.asarray([3.5]), "model"),
    "levels": Series(np.asarray([31.5, 95.5]), "codes"), "codes": Series(np.asarray([0.1, 0.9]), "codes"),
}, {})}  # fmt: skip


@pytest.mark.parametrize(
    ("show", "values"),
    [("weights", [25, 50, 25]), ("bins", [-1, 0, 1]), ("codes", [10, 90]), ("levels", [31.5, 95.5]),
     ("values", [2 * 2**0.5]), ("groups", [3.5])],
)  # fmt: skip
def test_what_is_shown(show, values):
    (only,) = histogram.Histogram(show).series(HELD, None).values()
    assert only.values.tolist() == pytest.approx(values)
    assert histogram.Histogram(show).value({show: only.values.mean()}) == only.values.mean()


def test_full_precision_has_no_codes():
    bare = {"counts": Observations({"weights": HELD["counts"].series["weights"]}, {})}
    assert histogram.Histogram("codes").series(bare, None) == {}
    assert histogram.Histogram("values").series(bare, None)["values"].values == pytest.approx(2 * 2**0.5)


def test_full_precision_needs_no_other_job_and_a_scale_without_it_has_none():
    at = scales.load(name="pocket")
    full, low = (histogram.Histogram().jobs(Target(at, "pocket-3m", t))["counts"] for t in ("fp16", "rtn-w4-pc"))
    assert dict(full.needs) == {} and [job.kind for job in dict(low.needs).values()] == ["compress"]
    assert full.parsed_options()["bins"] == 101
    off = scales.load({"histogram": None}, "pocket")
    assert histogram.Histogram().jobs(Target(off, "pocket-3m", "fp16")) is None


def test_bad_input_is_one_sentence():
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    mixed = {"a": pack(weight, GroupGrid(8, 32)), "b": pack(weight, GroupGrid(4, 32))}
    broken = tiny.model("llama")
    next(iter(block_linears(broken).values())).weight.data[0, 0] = float("inf")
    for make, message in (
        (lambda: histogram.Protocol(bins=100), "bins is 100; an odd number, 3 or more"),
        (lambda: histogram.of_codes(mixed), "codes of 4 bits, 8 bits have no common histogram"),
        (lambda: histogram.largest([torch.zeros(3)]), "nearly all of them are 0"),
        (lambda: histogram.largest([m.weight for m in histogram.linears(broken)]), "weights hold NaN or Inf"),
    ):
        with pytest.raises(UserError, match=message):
            make()
