"""The choice of rates: the best of a list, inside it, by what was measured at that very budget; a list that goes on."""

import math
import shutil
from types import SimpleNamespace

import pytest

from repro.__main__ import main
from repro.core.errors import UserError
from repro.core.files import HOME
from repro.core.strict import load_yaml
from repro.results import choose
from repro.specs import tables

RATES = HOME / "tables" / "bitbybit" / "rates.yaml"
INSIDE = {1.0: 9.0, 10.0: 5.0, 30.0: 4.0, 100.0: 6.0, 300.0: math.inf}


@pytest.mark.parametrize(
    ("changes", "best", "further"),
    [
        ({}, 30, None),
        ({100.0: 3.0}, 100, None),
        ({300.0: 1.0}, 300, 1000),
        ({1.0: 1.0}, 1, 0.3),
        ({10.0: 4.0}, 10, None),  # of equal ones the smaller
        ({10.0: None}, None, None),
    ],
)
def test_the_least_value_inside_a_list_is_chosen(changes, best, further):
    values = INSIDE | changes
    assert choose.best(values) == best and choose.further(values) == pytest.approx(further)
    chosen = {"m": best} if best and not further else {}
    assert choose.choices({"m": values}) == chosen


@pytest.mark.parametrize(("end", "then"), [(3000.0, 10_000), (0.3, 0.1), (0.1, 0.03), (10.0, 30)])
def test_a_list_goes_on_in_steps_of_three_and_ten(end, then):
    others = {end * 3: 2.0, end * 9: 2.0} if end < 1 else {end / 3: 2.0, end / 9: 2.0}
    assert choose.further(others | {end: 1.0}) == pytest.approx(then)


def test_a_rate_that_is_not_the_best_of_its_list_is_refused():
    result = {"m": INSIDE, "open": INSIDE | {300.0: 1.0}, "half": INSIDE | {1.0: None}}
    assert choose.wrong(result, ["m, x 30"]) == []
    rows = ["m, x 10", "open, x 300", "half, x 30", "gone, x 1"]
    assert choose.wrong(result, rows) == rows


def test_the_rates_that_judged_rows_use_are_the_best_of_their_lists(stored):
    """By accepted results; nothing is chosen of a list that is not measured whole."""
    result = choose.sweep(stored, "bitbybit", "rates")
    assert len(result) == 16
    assert choose.wrong(result, tables.table("bitbybit", "rates").selected_rows) == []


def test_a_spec_is_rewritten_with_its_choices_and_longer_lists(tmp_path):
    spec = tmp_path / "rates.yaml"
    shutil.copy(RATES, spec)
    before = load_yaml(spec)["rows"]
    result = {label.rpartition(", x ")[0]: dict(INSIDE) for label in before}
    result["ParetoQ w2a2"][300.0] = 1.0
    result["EfficientQAT w2a16"][1.0] = 1.0
    result["BitDistiller w2a2"][10.0] = None
    new = choose.rewrite(spec, result)
    assert new == ["EfficientQAT w2a16, x 0.3", "ParetoQ w2a2, x 1000"]
    after = load_yaml(spec)
    assert after["rows"].keys() - before.keys() == set(new) and len(after["selected"]) == 13
    assert all(after["rows"][label] == row for label, row in before.items())
    high, low = after["rows"]["ParetoQ w2a2, x 1000"], after["rows"]["EfficientQAT w2a16, x 0.3"]
    assert high == before["ParetoQ w2a2, x 1"] | {"paretoq_a2_lr": pytest.approx(2e-2)}
    rates = {"efficientqat_lr": 6e-6, "quant_lr": 3e-5, "e2e_lr": 6e-6}
    assert low == before["EfficientQAT w2a16, x 1"] | {key: pytest.approx(value) for key, value in rates.items()}
    result["ParetoQ w2a2"][1000.0], result["EfficientQAT w2a16"][0.3] = 2.0, 2.0
    assert choose.rewrite(spec, result) == [] and len(load_yaml(spec)["selected"]) == 15
    again = spec.read_text()
    choose.rewrite(spec, result)
    assert spec.read_text() == again


def test_a_row_without_a_multiple_is_refused(monkeypatch):
    cell = SimpleNamespace(metric="ppl", row="plain")
    flow = SimpleNamespace(cells=lambda *both: [cell])
    with pytest.raises(UserError, match="the row 'plain' is not `METHOD, x MULTIPLE`"):
        choose.sweep(flow, "bitbybit", "rates")


def test_the_command_says_what_is_chosen_and_whether_to_run_again(monkeypatch, tmp_path, capfd):
    spec = tmp_path / "rates.yaml"
    shutil.copy(RATES, spec)
    result = {label.rpartition(", x ")[0]: dict(INSIDE) for label in load_yaml(spec)["rows"]}
    monkeypatch.setattr(choose, "sweep", lambda *words: result)
    monkeypatch.setattr(tables, "path_of", lambda *both: spec)
    assert main(["choose", "bitbybit/rates"]) == 0
    assert "Bit-by-Bit w2a2: x 30 (x 1: 9, x 10: 5, x 30: 4, x 100: 6, x 300: inf)" in capfd.readouterr().out
    result["Bit-by-Bit w2a2"][300.0] = 1.0
    assert main(["choose", "bitbybit/rates"]) == 1
    printed = capfd.readouterr().out
    assert "Bit-by-Bit w2a2: no choice yet" in printed and "new: Bit-by-Bit w2a2, x 1000" in printed
