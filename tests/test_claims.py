"""Claims: what a predicate may say, the verdict of an interval, and arithmetic on the printed numbers."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro import claims, papers, perplexity, provenance, spec, table
from repro.claims import evaluate, judge, satisfied, show
from repro.errors import UserError
from repro.jobs.tables import judged_notes
from repro.record import Measurement
from repro.spec import ClaimSpec
from repro.workflow import Workflow

HEAD = spec.headline()
BY_ID = {claim.claim: claim for claim in HEAD.claims}
GAP = BY_ID["spear C001 C004"]


# --- predicates -------------------------------------------------------------------------------------------------------


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
def test_arithmetic(text, value):
    assert evaluate(text, {"b": 5.0, "s": 2.0, "f": 1.0}) == pytest.approx(value)


def test_arrays_go_through_elementwise():
    values = {"a": np.array([1.0, 4.0]), "b": np.array([3.0, 2.0])}
    assert evaluate("min(a, b, 2.5)", values).tolist() == [1.0, 2.0]
    assert evaluate("max(a, b, 2.5)", values).tolist() == [3.0, 4.0]
    assert evaluate("0 <= a - b < 3 and b > 1", values).tolist() == [False, True]


@pytest.mark.parametrize(
    "text",
    [
        "a.real", "().__class__", "__import__('os')", "open('x')", "abs(a)", "min(a, key=a)", "min(*a)", "a[0]", "[a]",
        "a if a else a", "lambda: a", "a ** 9", "a // 2", "a % 2", "a or a", "not a", "a == a", "a in a", "'a'",
        "(a := 3)", "True + 1j", "None", "a; a", "import os", "a = 3", "", "(", "a b", "a.min()", "~a", "+a", "f'{a}'",
    ],
)  # fmt: skip
def test_nothing_but_arithmetic(text):
    with pytest.raises(UserError, match="only arithmetic, min, max and comparisons|not an expression"):
        evaluate(text, {"a": 1.0})


def test_an_unknown_name_and_a_division_by_zero():
    with pytest.raises(UserError, match="unknown name 'rtn': did you mean 'rtm'?"):
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
def test_satisfied(holds, inside, outside):
    assert all(satisfied(holds, x) for x in inside) and not any(satisfied(holds, x) for x in outside)
    assert satisfied(holds, np.array(inside)).all()


# --- verdicts ---------------------------------------------------------------------------------------------------------


def of_interval(holds, low, value, high):
    return claims._of_interval(claims.Case("m", holds, None, value, low, high))


@pytest.mark.parametrize(
    ("holds", "interval", "verdict"),
    [
        (">= 0.5", (0.5, 0.6, 0.7), 0),
        (">= 0.5", (0.3, 0.4, 0.49), 1),
        (">= 0.5", (0.4, 0.6, 0.7), 2),
        (">= 0.5", (0.4, 0.45, 0.5), 2),
        ("1 <= x <= 2", (1.1, 1.5, 1.9), 0),
        ("1 <= x <= 2", (2.1, 2.5, 3.0), 1),
        ("1 <= x <= 2", (0.5, 1.5, 2.5), 2),
        ("1 <= x <= 2", (0.5, 0.6, 2.5), 2),
        ("1 <= x <= 2", (0.5, 2.4, 2.5), 2),
        ("> 0", (3.0, 3.0, 3.0), 0),
    ],
)
def test_the_verdict_of_an_interval(holds, interval, verdict):
    assert of_interval(holds, *interval) == verdict


@given(st.lists(st.floats(-10, 10), min_size=3, max_size=3).map(sorted), st.floats(-10, 10))
def test_holds_only_when_all_of_it_does_and_fails_only_when_none_does(interval, edge):
    low, _, high = interval
    assert of_interval(f">= {edge!r}", *interval) == (0 if low >= edge else 1 if high < edge else 2)
    assert of_interval(f"<= {edge!r}", *interval) == (0 if high <= edge else 1 if low > edge else 2)


def test_one_failing_case_fails_the_claim():
    for verdicts, wanted in (([0, 0], 0), ([0, 1], 1), ([2, 1], 1), ([0, 2], 2), ([2, 2], 2), ([0], 0)):
        assert claims._all(verdicts) == wanted


# --- on printed numbers -----------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_runs():
    """A profile in which nothing stands in for any model, so that every claim is judged on printed numbers."""
    config = {
        "name": "none",
        "about": "nothing",
        "models": {},
        "corpora": {"wikitext2": "pocket-sample", "c4": "pocket-sample"},
    }
    return Workflow(config | {"calibration": {"corpus": "pocket-sample", "sequences": 1, "length": 8}})


def number(paper, table_number, row, col, model):
    (cell,) = [c for c in papers.printed(paper, table_number) if (c.row, c.col, c.model) == (row, col, model)]
    return cell.number


def spear1(row, col, model):
    return number("spear", "1", row, col, model)


SPEAR = ("Llama-3.2-1B", "Llama-3.2-3B", "Llama-2-7B")
STATIC = ("LoftQ", "LQER", "QERA", "EoRA", "ASER")
W2A2 = {"LLaMA-3.2-1B": "3.2-1B", "LLaMA-3.2-3B": "3.2-3B", "LLaMA-2-7B": "2-7B", "LLaMA-3-8B": "3-8B"}
OFFLOAD = {"Llama-3.1-8B-Instruct": 8, "Qwen2.5-7B-Instruct": 8, "Qwen2.5-14B-Instruct": 12, "Qwen2.5-32B-Instruct": 24}


def _c4(model):
    cell = lambda row, col: number("spear", "2", f"{row} pc on RTN", col, model)  # noqa: E731
    return min(cell(row, "C4 PPL") for row in STATIC) - cell("SPEAR", "C4 PPL")


def _tp(size):
    cell = lambda row: number("spear", "5", row, f"TP=2 {size}", f"Llama-2-{size}")  # noqa: E731
    return cell("EC + fusion + P2P (SPEAR)") / cell("W4+NCCL (no EC, reference)")


def _w2a2(model):
    cell = lambda row: number("bitbybit", "1", f"{row} [w2a2 g32]", f"C4 {W2A2[model]}", model)  # noqa: E731
    return min(cell("EfficientQAT"), cell("BitDistiller")) - cell("Bit-by-Bit")


def _flex(task):
    cell = lambda row: number("flexquant", "1", row, task, "Vicuna-7B")  # noqa: E731
    return cell("FlexQuant") / cell("Baseline-h") - 1


def _rouge():
    steps = [
        number("flexquant", "2", f"FQ-{t}", "Rouge-L", "LongWriter-LLaMA3.1-8B") for t in (1.3, 1.5, 1.7, 2.0, 2.5)
    ]
    return min(a - b for a, b in zip(steps, steps[1:]))


def _spqt(model):
    return number("spqt", "3", "Unified 50%", model, model) - number("spqt", "3", "Baseline-Q4K", model, model)


def _of(paper, table_number, *cells):
    return [number(paper, table_number, *cell) for cell in cells]


def _ratio(pair):
    return pair[0] / pair[1]


# Each row of tables/table1.yaml: the quantity of every case computed here, then what the rounded result must be.
ROWS = {
    "spear C005 C018-C020": ([spear1("RTN pc", "Wiki", m) / spear1("FP16", "Wiki", m) - 1 for m in SPEAR],
                             [1.1071, 0.3565, 0.1927], "agree"),
    "spear C001 C004": ([(spear1("RTN pc", "Wiki", m) - spear1("+SPEAR pc on RTN", "Wiki", m))
                         / (spear1("RTN pc", "Wiki", m) - spear1("FP16", "Wiki", m)) for m in SPEAR],
                        [0.7498, 0.5632, 0.6038], "agree"),
    "spear C002": ([number("spear", "8", "RTN", "4-bit pc BPW", m) / 4 - 1 for m in SPEAR],
                   [0.0175, 0.0125, 0.0075], "disagree"),
    "spear C024": ([_c4(m) for m in SPEAR], [1.8, 0.09, 0.09], "agree"),
    "spear C039 C053 C054": ([_tp(size) for size in ("7B", "13B", "70B")], [0.7049, 0.8521, 1.1372], "agree"),
    "bitbybit B02 B06": ([-np.subtract(*_of("bitbybit", "1", ("FP16", "WikiText2 2-7B", "LLaMA-2-7B"),
                                            ("Bit-by-Bit [w2a2 g32]", "WikiText2 2-7B", "LLaMA-2-7B")))],
                         [2.25], "within rounding"),
    "bitbybit B03 B04": ([_w2a2(m) for m in W2A2], [13.59, 4.6, -1.98, 4.28], "disagree"),
    "bitbybit B26": ([_ratio(_of("bitbybit", "6", ("block-wise [w2a2 g32]", "WikiText2 ppl", "LLaMA-3.2-1B"),
                                 ("block-wise + progressive [w2a2 g32]", "WikiText2 ppl", "LLaMA-3.2-1B")))],
                     [34.1682], "agree"),
    "bitbybit B01": ([_ratio(_of("bitbybit", "7", ("(4096, 14336)", "BF16", "Llama3-8B"),
                                 ("(4096, 14336)", "W2A2", "Llama3-8B")))], [11.5476], "agree"),
    "flexquant F02": ([_flex(t) for t in ("CNN/DM Rouge-L", "DialogSum Rouge-L", "IWSLT BLEU")],
                      [-0.1001, -0.0157, -0.1848], "disagree"),
    "flexquant F14": ([_rouge()], [4.72], "agree"),
    "spqt Q01": ([_ratio(_of("spqt", "2", ("A19 Pro / Unified 50%", "Llama-2-7B", "Llama-2-7B"),
                             ("A19 Pro / Baseline-Q4K", "Llama-2-7B", "Llama-2-7B")))], [1.5467], "agree"),
    "spqt Q08": ([_spqt(m) for m in ("Llama-2-7B", "Llama-2-13B", "Llama-2-70B", "Llama-3-8B")],
                 [0.37, 0.28, 0.42, 0.74], "disagree"),
    "subspec S01": ([_ratio(_of("subspec", "1",
                                ("SubSpec [T=0, 8GB]", "MT-Bench tokens/s", "Qwen2.5-7B-Instruct"),
                                ("None [T=0, 8GB]", "MT-Bench tokens/s", "Qwen2.5-7B-Instruct")))], [9.1516], "agree"),
    "subspec S07": ([number("subspec", "1", f"SubSpec [T=0, {gb}GB]", "Mean tau", m) for m, gb in OFFLOAD.items()],
                    [29.66, 29.11, 27.79, 28.97], "agree"),
}  # fmt: skip


def test_every_row_of_the_headline_table_is_here():
    assert set(ROWS) == set(BY_ID) and len(HEAD.claims) <= 15
    for claim in HEAD.claims:
        assert claim.claim.split()[0] == claim.table.split("/")[0]


@pytest.mark.parametrize("name", ROWS)
def test_arithmetic_on_printed_numbers(nothing_runs, name):
    quantities, rounded, word = ROWS[name]
    judged = judge(nothing_runs, BY_ID[name])
    assert np.round(quantities, 4).tolist() == rounded
    assert [case.printed for case in judged.cases] == pytest.approx(quantities, rel=1e-12)
    assert [round(case.printed, 4) for case in judged.cases] == rounded
    assert (judged.grade, judged.verdict, judged.measured) == (
        "D",
        word if " " in word else f"printed numbers {word}",
        False,
    )
    assert all(case.measured is None and case.lo is None for case in judged.cases)
    assert judged.why == f"{len(judged.cells)} of {len(judged.cells)} cells no stand in"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"claim": "spear C999"}, "unknown claim of spear 'C999'"),
        ({"cells": {"b": "RTN pcs | Wiki"}, "quantity": "b"}, "spear/1 printed no RTN pcs | Wiki of Llama-3.2-1B"),
        ({"quantity": "b - q"}, "unknown name 'q'"),
        ({"quantity": "b.real"}, "only arithmetic"),
        ({"holds": "about 3"}, "not an expression"),
    ],
)
def test_a_claim_that_names_what_is_not_there(nothing_runs, change, sentence):
    with pytest.raises(UserError) as error:
        judge(nothing_runs, dataclasses.replace(GAP, **change))
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"table": "spear"}, "unknown table of spear ''"),
        ({"table": "spaer/1"}, "unknown paper 'spaer'"),
        ({"table": "spear/99"}, "unknown table of spear '99'"),
        ({"cells": {"b": "RTN {bits} | Wiki"}}, "does not give 'bits'"),
        ({"cases": ({"size": "7B"},)}, "does not give 'model'"),
        ({"holds": "<= {limit}"}, "does not give 'limit'"),
    ],
)
def test_a_claim_that_cannot_be_read(change, sentence):
    with pytest.raises(UserError) as error:
        dataclasses.replace(GAP, **change)
    assert sentence in str(error.value)


def test_a_headline_has_at_most_fifteen_claims():
    with pytest.raises(UserError, match="16 claims; the headline table has at most 15"):
        spec.HeadlineSpec("t", (GAP,) * 16)


# --- on measured cells ------------------------------------------------------------------------------------------------

WINDOWS = np.random.default_rng(0).normal(3.0, 0.4, 24)
RUNS = {"fp16": 0.0, "rtn-w4-pc": 0.20, "rtn-w8-pc": 0.05}
MEASURED = ClaimSpec(
    "spear C005",
    "a gap",
    "x",
    "spear/1",
    {"f": "FP16 | Wiki", "b": "RTN pc | Wiki"},
    ("Llama-3.2-1B",),
    "b / f - 1",
    "> 0",
)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """A flow whose FP16 and RTN rows of spear/1 were measured on one model; `f(noise, grade)` builds it."""
    monkeypatch.chdir(tmp_path)
    table.scores.cache_clear()
    monkeypatch.setattr(provenance, "commit", lambda: "0123456789")

    def build(shift=RUNS, grade="C", noise=0.01, models=("Llama-3.2-1B",)):
        config = {
            "name": "test", "about": "a test", "grade": grade, "models": dict.fromkeys(models, "pocket-3m"),
            "corpora": {"wikitext2": "pocket-sample", "c4": "pocket-sample"},
            "calibration": {"corpus": "pocket-sample-calib", "sequences": 1, "length": 8},
        }  # fmt: skip
        flow = Workflow(config)
        rows = {"FP16": "fp16", "RTN pc": "rtn-w4-pc", "GPTQ pc": "rtn-w8-pc"}
        made = spec.TableSpec("t", rows, {"Wiki": spec.Column("perplexity", "wikitext2")})
        monkeypatch.setattr(spec, "table", lambda paper, number: made)
        for i, (recipe, extra) in enumerate(shift.items()):
            nll = WINDOWS + extra + np.random.default_rng(i + 1).normal(0, noise, len(WINDOWS))
            write_scores(flow.scores(flow.run("pocket-3m", recipe), "pocket-sample"), nll)
        return flow

    yield build
    table.scores.cache_clear()


def write_scores(path, nll):
    import pandas as pd

    frame = pd.DataFrame({"window": range(len(nll)), "first": 0, "second": 1, "targets": 2047, "nll": nll})
    frame = frame.assign(kl=None, top1=None).astype({"kl": "Float64", "top1": "Float64"})
    meta = {"protocol": "gptq-2048-v1", "label": "pocket-sample", "device": "cpu", "commit": "0123456789"}
    meta |= {"code": "abcdef01", "environment": "{}", "bits": '{"bpw": 4.0, "bytes": 1000000, "block": {"codes": 1}}'}
    perplexity.save_frame(path, frame, meta)


def ratio(nlls):
    return np.exp(nlls["b"].mean(axis=-1)) / np.exp(nlls["f"].mean(axis=-1)) - 1


def test_a_measured_claim_is_a_paired_bootstrap(measured):
    flow = measured()
    (case,) = judge(flow, MEASURED).cases
    nlls = {name: table.scores(flow.scores(flow.run("pocket-3m", recipe), "pocket-sample"))[0]["nll"].to_numpy()
            for name, recipe in (("f", "fp16"), ("b", "rtn-w4-pc"))}  # fmt: skip
    assert case.measured == pytest.approx(ratio(nlls), rel=1e-9)
    index = np.random.default_rng(9).integers(len(WINDOWS), size=(4000, len(WINDOWS)))
    low, high = np.quantile(ratio({k: v[index] for k, v in nlls.items()}), [0.025, 0.975])
    assert case.lo == pytest.approx(low, abs=0.1 * (high - low)) and case.hi == pytest.approx(
        high, abs=0.1 * (high - low)
    )
    assert case.hi - case.lo < 0.02, "unpaired windows would give ten times that"
    assert case.on == "pocket-3m" and case.printed == pytest.approx(20.46 / 9.71 - 1)


@pytest.mark.parametrize(
    ("holds", "words"),
    [
        ("> 0.1", {"C": "seen", "B": "holds", "A": "holds"}),
        ("< 0.1", {"C": "not seen", "B": "fails", "A": "fails"}),
        ("> 0.2214", {"C": "inconclusive at this scale", "B": "inconclusive", "A": "inconclusive"}),
    ],
)
@pytest.mark.parametrize("grade", ["A", "B", "C"])
def test_the_words_say_the_grade(measured, holds, words, grade):
    flow = measured(grade=grade)
    judged = judge(flow, dataclasses.replace(MEASURED, holds=holds))
    assert (judged.verdict, judged.grade, judged.measured) == (words[grade], grade, True)


def test_a_case_without_a_stand_in_is_left_out_and_said(measured):
    judged = judge(measured(), dataclasses.replace(MEASURED, cases=("Llama-3.2-1B", "Llama-3.2-3B")))
    assert judged.verdict == "seen" and judged.measured
    assert [case.measured is None for case in judged.cases] == [False, True]
    assert judged.cases[1].missing == "no_stand_in"


def test_a_case_that_was_not_run_leaves_the_claim_to_the_printed_numbers(measured):
    flow = measured()
    judged = judge(flow, GAP)
    assert (judged.grade, judged.measured) == ("D", False) and judged.verdict == "printed numbers agree"
    assert judged.why == "1 of 9 cells not run, 6 of 9 cells no stand in"


def test_one_measured_case_that_fails_fails_the_claim(measured):
    flow = measured(models=("Llama-3.2-1B", "Llama-3.2-3B"))
    claim = dataclasses.replace(MEASURED, cases=("Llama-3.2-1B", "Llama-3.2-3B"), holds="< 0.1")
    assert judge(flow, claim).verdict == "not seen"


def recorded(value, low, high, **more):
    return Measurement("spear", "table", "1", "r", "c", "m", "ppl", value=value, lo=low, hi=high, status="ok",
                       live="recorded", grade="B", stand_in="big", **more)  # fmt: skip


@pytest.mark.parametrize(("low", "high"), [(9.5, 10.5), (0.0, 20.0), (None, None)])
def test_a_recorded_cell_brings_its_own_interval(measured, low, high):
    claim = dataclasses.replace(MEASURED, cells={"b": "RTN pc | Wiki"}, quantity="b")
    case = claims._case(measured(), claim, {"model": "m"}, {"b": recorded(10.0, low, high)})
    assert case.measured == 10.0 and case.on == "big*"
    wanted = (10.0, 10.0) if low is None else (low, high)
    assert (case.lo, case.hi) == pytest.approx(wanted, abs=0.06 * (wanted[1] - wanted[0]))


def test_a_case_may_bring_its_own_threshold(measured):
    cases = ({"model": "Llama-3.2-1B", "limit": "0.3"}, {"model": "Llama-3.2-3B", "limit": "0.1"})
    claim = dataclasses.replace(MEASURED, cases=cases, holds="<= {limit}")
    judged = judge(measured(models=("Llama-3.2-1B",)), claim)
    assert judged.verdict == "seen" and [case.holds for case in judged.cases] == ["<= 0.3", "<= 0.1"]
    assert judge(measured(models=("Llama-3.2-3B",)), claim).verdict == "not seen"


# --- showing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "percent", "text"),
    [
        (None, False, "–"), (0.0, False, "0"), (0.7498, True, "75.0 %"), (1.107, True, "111 %"), (34.17, False, "34.2"),
        (1.5467, False, "1.55"), (0.0028, False, "0.0028"), (-0.1848, True, "-18.5 %"), (1234.5, False, "1234"),
        (0.00001, False, "0.0000"),
    ],
)  # fmt: skip
def test_show(x, percent, text):
    assert show(x, percent) == text


# --- claims in a table's own spec -------------------------------------------------------------------------------------


def test_a_table_s_own_claims_are_about_that_table():
    found = spec.table("spear", "1").claims
    assert found and {claim.table for claim in found} == {"spear/1"}
    everywhere = next(claim for claim in found if claim.cells["s"].endswith("Wiki"))
    rows = {(row, model) for _, named in everywhere.places() for row, _, model in [named["s"]]}
    models = {"Llama-3.2-1B", "Llama-3.2-3B", "Llama-2-7B"}
    printed = {
        (c.row, c.model) for c in papers.printed("spear", "1") if c.row.startswith("+SPEAR") and c.model in models
    }
    assert rows == printed, "every setting, none left out"


def test_how_many_cases_hold():
    def case(value, low, high):
        return claims.Case("m", "> 0", 1.0, value, low, high, "pocket-3m")

    judged = claims.Judged(
        GAP, (case(1, 0.5, 2), case(2, 1, 3), case(-1, -2, -0.5), case(0.1, -1, 1)), "C", "not seen", True
    )
    assert claims.held(judged) == "2 of 4 cases hold, 1 do not"
    assert claims.held(dataclasses.replace(judged, cases=(claims.Case("m", "> 0", 1.0),))) == ""


def test_they_stand_under_their_table(nothing_runs):
    (claim, *_), lines = spec.table("spear", "1").claims, judged_notes(nothing_runs, "spear", "1")
    assert len(lines) == len(spec.table("spear", "1").claims)
    assert claim.claim in lines[0] and claim.printed in lines[0] and "grade" in lines[0]


@pytest.mark.parametrize(
    ("live", "whole_elsewhere", "on"),
    [
        ("live", True, "own"),
        ("recorded", True, "elsewhere"),
        ("recorded", False, "own"),
        ("live", False, "own"),
        ("", True, "elsewhere"),  # nothing is measured here
    ],
)
def test_live_before_the_profile_that_judges_before_own_recordings(monkeypatch, live, whole_elsewhere, on):
    def cases(flow, claim):
        own = flow.profile.name == "pocket"
        if not (live if own else whole_elsewhere):
            return (claims.Case("m", "> 0", 1.0, missing="not_run"),), ()
        cell = dataclasses.replace(recorded(1.0, 0.5, 1.5), grade="C", live=live if own else "recorded")
        return (claims.Case("m", "> 0", 1.0, 1.0, 0.5, 1.5, "own" if own else "elsewhere"),), (cell,)

    monkeypatch.setattr(claims, "_cases", cases)
    judged = judge(Workflow(None, "pocket"), GAP)
    assert judged.measured and judged.cases[0].on == on and judged.grade == "C"
