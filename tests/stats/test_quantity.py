"""Quantities: what an expression may say, and that series of one group are paired wherever quantities meet."""

import numpy as np
import pytest
from series import interval

from repro.core.errors import UserError
from repro.stats.quantity import Quantity, compose, constant, evaluate, on_same_windows, satisfied
from repro.stats.statistics import Interval
from repro.store.observations import Series

# --- expressions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("(b - s) / (b - f)", 0.75),
        ("-f + 2 * b", 9),
        ("min(b, s, f) - 1", 0),
        ("max(b, s, f)", 5),
        ("min(b - s, max(s, f))", 2),
        ("b > s", True),
        ("f <= s < b", True),
        ("f <= s < s", False),
        ("b > 1 and s > 2", False),
        ("b > 1 and s > 1 and f > 0.5", True),
        ("1e-3 * b", 0.005),
    ],
)
def test_expressions_are_evaluated(text, value):
    assert evaluate(text, {"b": 5.0, "s": 2.0, "f": 1.0}) == pytest.approx(value)


def test_arrays_go_through_elementwise():
    values = {"a": np.array([1.0, 4.0]), "b": np.array([3.0, 2.0])}
    assert evaluate("min(a, b, 2.5)", values).tolist() == [1.0, 2.0]
    assert evaluate("max(a, b, 2.5)", values).tolist() == [3.0, 4.0]
    assert evaluate("0 <= a - b < 3 and b > 1", values).tolist() == [False, True]
    assert evaluate("0 < 1 < a and 1 < 2", values).tolist() == [False, True], "a comparison may hold for all of them"


@pytest.mark.parametrize(
    "text",
    [
        "a.real", "().__class__", "__import__('os')", "open('x')", "abs(a)", "min(a, key=a)", "min(*a)", "a[0]", "[a]",
        "a if a else a", "lambda: a", "a ** 9", "a // 2", "a % 2", "a or a", "not a", "a == a", "a in a", "'a'",
        "(a := 3)", "True + 1j", "True", "None", "a; a", "import os", "a = 3", "", "(", "a b", "a.min()", "~a", "+a",
        "f'{a}'", "a\0", "min()",
    ],
)  # fmt: skip
def test_nothing_but_arithmetic(text):
    with pytest.raises(UserError, match="only arithmetic, min, max|not an expression"):
        evaluate(text, {"a": 1.0})


@pytest.mark.parametrize("text", ["geomean(a)"])  # of one value there are no layers
def test_a_function_that_does_not_take_that(text):
    with pytest.raises(UserError, match="cannot be computed"):
        evaluate(text, {"a": 1.0})


def test_what_is_nested_too_deeply():
    with pytest.raises(UserError, match="nested too deeply|not an expression"):
        evaluate("-" * 100_000 + "a", {"a": 1.0})
    with pytest.raises(UserError, match="nested too deeply|not an expression"):
        evaluate("(" * 5000 + "a" + ")" * 5000, {"a": 1.0})


def test_an_unknown_name_and_a_division_by_zero():
    with pytest.raises(UserError, match="unknown name 'rtn'; did you mean 'rtm'?"):
        evaluate("rtn / 2", {"rtm": 1.0})
    with pytest.raises(UserError, match="divides by zero"):
        evaluate("1 / (a - a)", {"a": 1.0})


@pytest.mark.parametrize(
    ("holds", "inside", "outside"),
    [
        (">= 0.5", [0.5, 9], [0.49, -1]),
        ("> 0", [1e-9], [0, -1]),
        ("<= 2.255", [2.255], [2.26]),
        ("0.1 <= x <= 0.2", [0.1, 0.2], [0.09, 0.21]),
        ("25 <= x < 35", [25, 34.99], [35, 24.9]),
        ("x > 0 and x < 1", [0.5], [0, 1]),
        ("<= max(1, 2)", [2], [2.1]),
    ],
)
def test_a_claim_is_satisfied_inside_its_bounds_alone(holds, inside, outside):
    assert all(satisfied(holds, x) for x in inside) and not any(satisfied(holds, x) for x in outside)
    assert satisfied(holds, np.array(inside)).all()


# --- series -----------------------------------------------------------------------------------------------------------


def drawn(seed, n=30, shift=0.0):
    """Windows that share their ups and downs, with a little noise of their own."""
    return np.random.default_rng(5).normal(3, 0.4, n) + shift + np.random.default_rng(seed).normal(0, 0.01, n)


def windows(*arrays, group="text", axis="windows", compares=None):
    """A quantity whose value is the mean, one array a seed."""
    return Quantity([{"nll": Series(np.asarray(a), axis, group)} for a in arrays], lambda m: m["nll"], compares)


def ends(result):
    return result.value, result.lo, result.hi


def test_one_group_is_paired_and_two_are_not():
    a, b = drawn(1), drawn(2, shift=0.2)
    together = compose("b - a", {"a": windows(a), "b": windows(b)}).interval()
    assert ends(together) == pytest.approx(ends(interval({"a": a, "b": b}, lambda m: m["b"] - m["a"])))
    assert together.hi - together.lo < 0.05 and together.covers == "windows only" and together.n == 30
    apart = compose("b - a", {"a": windows(a), "b": windows(b, group="other")}).interval()
    assert apart.lo is None and apart.value == together.value, "30 windows are too few for two single texts"


def test_a_group_of_different_lengths_is_refused():
    with pytest.raises(UserError, match="paired differ in length"):
        compose("b - a", {"a": windows(drawn(1)), "b": windows(drawn(2, 20))}).interval()


def test_a_ratio_to_zero_is_refused():
    with pytest.raises(UserError, match="divides by may be 0"):
        compose("b / (a - a)", {"a": windows(drawn(1)), "b": windows(drawn(2))}).interval()


def test_what_compares_by_itself_needs_no_partner():
    alone = windows(drawn(1), group="first 30")
    assert alone.interval().lo is None
    own = windows(drawn(1), group="first 30", compares=True)
    assert own.interval().lo is not None
    assert compose("a / 2", {"a": own}).interval().lo is not None
    assert compose("(a - b) / a", {"a": own, "b": constant(0.0)}).interval().lo is not None


def test_items_are_independent():
    right = (np.arange(40) % 3 > 0).astype(float)
    result = windows(right, group="piqa", axis="items").interval()
    want = interval({"x": right}, lambda m: m["x"], axis="items")
    assert ends(result) == pytest.approx(ends(want)) and result.covers == "items only"


def test_counts_are_exact_also_beside_windows():
    bits = Quantity([{"bits/bpw": Series(np.array([4.0]), "model")}], lambda m: m["bits/bpw"])
    assert ends(bits.interval()) == (4.0, None, None) and bits.interval().n == 0
    both = compose("2 * a - b", {"a": bits, "b": windows(drawn(1, 120))}).interval()
    plain = windows(drawn(1, 120)).interval()
    assert both.value == pytest.approx(8 - plain.value) and both.hi - both.lo == pytest.approx(plain.hi - plain.lo)


def test_seeds_are_paired_and_what_has_one_takes_part_in_every():
    a, b = [drawn(i) for i in (1, 2, 3)], [drawn(i, shift=0.2) for i in (4, 5, 6)]
    result = compose("b - a - c", {"a": windows(*a), "b": windows(*b), "c": windows(drawn(9))}).interval()
    arrays = {"a": np.stack(a), "b": np.stack(b), "c": drawn(9)}
    want = interval(arrays, lambda m: m["b"] - m["a"] - m["c"])
    assert ends(result) == pytest.approx(ends(want)) and result.covers == "windows and seeds"
    assert result.by_seed == pytest.approx([y.mean() - x.mean() - drawn(9).mean() for x, y in zip(a, b)])


def test_seeds_that_do_not_fit():
    with pytest.raises(UserError, match="different numbers of seeds: {'a': 3, 'b': 2}"):
        compose("a - b", {"a": windows(*[drawn(1)] * 3), "b": windows(*[drawn(2)] * 2)})
    with pytest.raises(UserError, match=r"seeds of nll have different numbers of units: \[30, 20\]"):
        windows(drawn(1), drawn(2, 20)).interval()
    with pytest.raises(UserError, match="the seeds have different series"):
        Quantity([{"a": Series(drawn(1), "windows")}, {"b": Series(drawn(1), "windows")}], lambda m: m["a"]).interval()


def test_a_result_of_which_only_the_interval_is_left():
    known = Interval(10.0, 9.0, 11.0, 0, None, "launches only", ())
    alone = Quantity([], lambda m: m["x"], known={"x": known})
    assert ends(compose("2 * a", {"a": alone}).interval()) == pytest.approx((20, 18, 22))
    open_ended = Quantity([], lambda m: m["x"], known={"x": Interval(10.0, None, None, 8, None, "", ())})
    result = compose("a - b", {"a": alone, "b": open_ended}).interval()
    assert ends(result) == (0.0, None, None) and result.n == 8
    mixed = compose("a + b", {"a": alone, "b": windows(drawn(1, 120))}).interval()
    assert mixed.hi - mixed.lo > 2


def test_a_name_that_no_expression_can_hold():
    with pytest.raises(UserError, match="'a:b' is not a name"):
        compose("a", {"a:b": constant(1.0)})


def test_readings_of_a_few_windows_are_compared_on_those():
    """Known answer: the long series is lower behind its first 10 windows, which the short one does not have."""
    short = windows(drawn(1, 10), group="text, first 10", compares=True)
    long = windows(np.concatenate([drawn(1, 10), drawn(1) - 1]), group="text")
    other = windows(drawn(3), group="another text")
    one, two, three = on_same_windows([short, long, other])
    gap = compose("x - y", {"x": one, "y": two}).interval()
    assert ends(gap) == (0, 0, 0) and gap.n == 10
    assert len(three.seeds[0]["nll"].values) == 30 and one.compares
    apart = compose("x - y", {"x": short, "y": long}).interval()
    assert apart.n == 50 and apart.value > 0.5
