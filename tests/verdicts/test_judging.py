"""Claims: evidence from what is built and accepted, pairing, verdict, count, grade; arithmetic on printed numbers."""

import dataclasses
import math
import re
import shutil
from itertools import chain, product

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import stdtr, stdtrit
from series import interval

from repro import papers
from repro.core.errors import UserError
from repro.core.files import ROOT
from repro.make import snake
from repro.render import table_files as rendered
from repro.render.content import verdict_line
from repro.results import measure
from repro.specs import scale as scales
from repro.specs import tables
from repro.specs.tables import ClaimSpec
from repro.stats.quantity import Quantity
from repro.store import accepted, kernel_rows, observations
from repro.store.observations import Series
from repro.verdicts import judging
from repro.verdicts.judging import Case
from repro.verdicts.table_results import judge
from repro.workflow import versions
from repro.workflow.workflow import Workflow

pytestmark = pytest.mark.usefixtures("no_pooled_seeds")

HEAD = tables.headline()
BY_ID = {claim.claim: claim for claim in HEAD.claims}
GAP = next(claim for claim in tables.table("spear", "1").claims if claim.claim == "spear C001 C004")
ONE, TWO, THREE = MODELS = ("Llama-3.2-1B", "Llama-3.2-3B", "Llama-2-7B")
DAMAGE = ClaimSpec(
    "spear C005", "RTN costs perplexity", "9.71 to 20.46", "spear/1",
    {"f": "FP16 | Wiki", "b": "RTN pc | Wiki"}, (ONE,), "b / f - 1", "> 0",
)  # fmt: skip
SHARE = dataclasses.replace(GAP, cases=(ONE,), cross_checks={})
SETTINGS = {
    "name": "test",
    "about": "a test",
    "models": {ONE: "pocket-3m"},
    "corpora": {"wikitext2": "tiny-wikitext", "c4": "tiny-c4-docs"},
    "calibration": {"corpus": "tiny-held-out", "sequences": 2, "length": 16},
    "seeds": 1,
    "perplexity": {"length": 64, "kl_windows": 4},
    "zeroshot": {"limit": 40, "tasks": ["piqa", "boolq"]},
}
SHIFTS = {"FP16": 0.0, "RTN pc": 0.2, "+SPEAR pc on RTN": 0.05, "GPTQ pc": 0.1, "+SPEAR pc on GPTQ": 0.04}
GROUP = "gptq-64-v1 on tiny-wikitext"


def flow(**changes):
    """A workflow at the scale of this file, some keys changed."""
    return Workflow(scales.load(SETTINGS | changes), stored=False)


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """An empty working folder, and accepted results of its own: scale and place to row and series by seed."""
    monkeypatch.chdir(tmp_path)
    result = {}
    monkeypatch.setattr(accepted, "find", lambda scale, cell: result.get((scale, cell.cell_key), (None, []))[0])
    monkeypatch.setattr(accepted, "series", lambda row: result[row.scale, row.cell_key][1])
    return result


def cells(at, row, col="Wiki"):
    return [c for c in at.cells("spear", "1") if (c.row, c.col) == (row, col) and c.stand_in]


def nlls(row, seed=0, n=24, noise=0.01):
    """Windows that rows share, a shift by row, and a little noise of their own; in single precision, as stored."""
    shared = np.random.default_rng(99).normal(3.0, 0.4, n)
    own = np.random.default_rng([seed, *row.encode()]).normal(0, noise, n)
    return (shared + SHIFTS[row] + own).astype(np.float32).astype(float)


def observe(at, rows=SHIFTS, col="Wiki", n=24, seeds=(0,), c4=None):
    """Write what the jobs of some rows would have observed, in their folders; on C4 with the shifts of `c4`."""
    for cell in chain.from_iterable(cells(at, row, col) for row in rows):
        for seed, jobs in zip(seeds, at.jobs(cell), strict=False):
            windows = {"nll": nlls(cell.row, seed, n)}
            if cell.row != "FP16":
                kl = 0.01 + 0.1 * SHIFTS[cell.row] + 0.001 * np.arange(4)
                windows |= {"kl": kl, "top1": 1 - kl}
            groups = {"nll": GROUP, "kl": f"{GROUP}, first 4", "top1": f"{GROUP}, first 4"}
            correct = (np.random.default_rng(7).random(60) + SHIFTS[cell.row] < 0.7).astype(float)
            series = {
                "scores": {f"tiny-wikitext/{k}": Series(v, "windows", groups[k]) for k, v in windows.items()},
                "items": {f"{t}/correct": Series(correct, "items", f"lm-eval 0: {t}") for t in ("piqa", "boolq")},
            }
            if cell.row in (c4 or {}):
                other = nlls(cell.row, 50 + seed, n, 0.003) - SHIFTS[cell.row] + c4[cell.row]
                series["scores"]["tiny-c4-docs/nll"] = Series(other, "windows", "gptq-64-v1 on tiny-c4-docs")
            for role, job in jobs.items():
                origin = observations.origin(job, versions.of_job(job))
                observations.save(job.folder / observations.FILE, series[role], origin)


def accept(at, rows, kept, **changes):
    """Take rows that are built into accepted results, some columns changed, and remove what is built of them."""
    for cell in chain.from_iterable(cells(at, row) for row in rows):
        row = dataclasses.replace(measure.fresh(at, cell), source="", **changes)
        kept[(at.scale.name, cell.cell_key)] = row, list(at.quantity(cell).seeds) if row.observations else []
        for job in chain.from_iterable(jobs.values() for jobs in at.jobs(cell)):
            shutil.rmtree(job.folder)


# --- the verdict ------------------------------------------------------------------------------------------------------


def of_interval(holds, low, value, high):
    return judging.verdict_of(Case("m", holds, None, value, low, high))


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
        ("> 0", (None, 3.0, None), 2),
    ],
)
def test_the_verdict_of_an_interval(holds, interval, verdict):
    assert of_interval(holds, *interval) == verdict


@given(st.lists(st.floats(-10, 10), min_size=3, max_size=3).map(sorted), st.floats(-10, 10))
def test_holds_only_when_all_of_it_does_and_fails_only_when_none_does(interval, edge):
    low, _, high = interval
    assert of_interval(f">= {edge!r}", *interval) == (0 if low >= edge else 1 if high < edge else 2)
    assert of_interval(f"<= {edge!r}", *interval) == (0 if high <= edge else 1 if low > edge else 2)


@pytest.mark.parametrize(
    ("verdicts", "wanted"),
    [([0, 0], 0), ([0, 1], 1), ([2, 1], 1), ([0, 2], 2), ([2, 2], 2), ([0], 0), ([0, None], 2), ([1, None], 1)],
)
def test_one_case_that_fails_fails_the_claim_and_one_that_is_not_judged_leaves_it_open(verdicts, wanted):
    assert judging.together(verdicts) == wanted


# --- on what is built -------------------------------------------------------------------------------------------------


def test_a_measured_claim_is_the_block_jackknife_of_paired_windows():
    at = flow()
    observe(at)
    judged = judge(at, DAMAGE)
    (case,) = judged.cases
    arrays = {"b": nlls("RTN pc"), "f": nlls("FP16")}
    want = interval(arrays, lambda m: np.exp(m["b"]) / np.exp(m["f"]) - 1)
    assert (case.measured, case.lo, case.hi) == pytest.approx((want.value, want.lo, want.hi), rel=1e-12)
    apart = interval(arrays, lambda m: np.exp(m["b"]) / np.exp(m["f"]) - 1, {"b": "one", "f": "other"}, paired=True)
    assert case.hi - case.lo < 0.1 * (apart.hi - apart.lo), "unpaired windows would give ten times that"
    assert (case.on, case.covers, judged.scale) == ("pocket-3m", "windows only", "test")
    assert case.printed == pytest.approx(20.46 / 9.71 - 1) and judged.count == "1 of 1 case"


@pytest.mark.parametrize(
    ("holds", "words"),
    [
        ("> 0.1", {"C": "holds on the stand-ins", "B": "holds", "A": "holds"}),
        ("> 0.9", dict.fromkeys("ABC", "same direction, smaller")),
        ("< -0.1", dict.fromkeys("ABC", "same direction, smaller")),  # the paper's own 1.1 is positive
        ("> 0.2214", dict.fromkeys("ABC", "undecided, 0 of 1 hold")),
    ],
)
@pytest.mark.parametrize("grade", ["A", "B", "C"])
def test_the_words_say_the_grade(holds, words, grade):
    at = flow(grade=grade)
    observe(at)
    judged = judge(at, dataclasses.replace(DAMAGE, holds=holds))
    assert (judged.verdict, judged.grade, judged.measured) == (words[grade], grade, True)


@pytest.mark.parametrize(("n", "verdict"), [(96, "undecided, 0 of 1 hold"), (120, "holds on the stand-ins")])
def test_a_single_perplexity_has_an_interval_from_a_hundred_windows_on(n, verdict):
    at = flow()
    observe(at, n=n)
    alone = dataclasses.replace(DAMAGE, cells={"b": "RTN pc | Wiki"}, quantity="b", holds="> 1")
    judged = judge(at, alone)
    assert judged.verdict == verdict and (judged.cases[0].lo is None) == (n < 100)
    assert judged.cases[0].measured == pytest.approx(np.exp(nlls("RTN pc", n=n).mean()))
    assert judge(at, DAMAGE).cases[0].lo is not None, "windows of both models are paired"


def test_accuracies_are_paired_by_item():
    at = flow()
    observe(at, col="ZS")
    gain = dataclasses.replace(DAMAGE, cells={"f": "FP16 | ZS", "b": "RTN pc | ZS"}, quantity="f - b")
    (case,) = judge(at, gain).cases
    items = np.random.default_rng(7).random(60)
    lost = (items < 0.7).astype(float) - (items + SHIFTS["RTN pc"] < 0.7)
    want = interval({"a": lost}, lambda m: m["a"], {"a": "p"}, "items", True)  # of PIQA; no mean has BoolQ
    assert (case.measured, case.lo, case.hi) == pytest.approx((want.value, want.lo, want.hi))
    assert case.covers == "items only"


def test_one_seed_is_said_and_three_are_not(monkeypatch):
    spec = tables.table("spear", "1")
    for seeds in ((0,), (0, 1, 2)):
        made = dataclasses.replace(spec, seeds=seeds, extra_rows=())
        monkeypatch.setattr(tables, "table", lambda paper, number, made=made: made)
        at = flow(seeds=None)
        observe(at, seeds=seeds)
        judged = judge(at, SHARE)
        covers = "windows only" if len(seeds) == 1 else "windows and seeds"
        assert judged.one_seed == (len(seeds) == 1) and judged.cases[0].covers == covers
        assert ("one seed" in verdict_line(judged)) == (len(seeds) == 1)
        assert not judge(at, DAMAGE).one_seed, "rounding to nearest draws nothing"


# --- cases that are missing -------------------------------------------------------------------------------------------


def test_a_claim_holds_on_the_stand_ins_that_there_are():
    at = flow()
    observe(at)
    judged = judge(at, dataclasses.replace(DAMAGE, cases=MODELS))
    assert (judged.verdict, judged.count) == ("holds on the stand-ins", "1 of 1 case") and judged.measured
    assert [case.verdict for case in judged.cases] == [0, None, None]
    assert {case.missing for case in judged.cases[1:]} == {"no_stand_in"}
    assert judged.why == "2 of 3 cases without a stand-in"
    fails = judge(at, dataclasses.replace(DAMAGE, cases=MODELS, holds="> 0.9"))
    assert fails.said == "same direction, smaller (holds in 0 of 1 case)"


def test_cells_at_chance_give_no_verdict(monkeypatch):
    at, one = flow(), measure.one_measured
    observe(at)
    assert judge(at, DAMAGE).why == ""
    chance = lambda flow, cell: one(flow, cell).marked(status="at_chance" if cell.row == "FP16" else "ok")  # noqa: E731
    monkeypatch.setattr(measure, "one_measured", chance)
    judged = judge(at, DAMAGE)
    assert (judged.verdict, judged.grade, judged.measured) == ("no verdict: at chance", "", False)
    assert judged.cases[0].measured is not None and judged.cases[0].verdict is None


def test_two_scores_of_0_have_no_quotient(monkeypatch):
    """BLEU of translations without a matching 4-gram, by full precision and by everything else."""
    at, one = flow(), measure.one_measured
    observe(at)
    series = {"f": Series(np.zeros(9), "texts", "g"), "b": Series(np.zeros(9), "texts", "h")}
    quotient = Quantity([series], lambda mean: mean["b"] / mean["f"])
    monkeypatch.setattr(judging, "compose", lambda *arguments: quotient)
    with pytest.raises(UserError, match="may be 0"):
        judge(at, DAMAGE)
    monkeypatch.setattr(measure, "one_measured", lambda *arguments: one(*arguments).marked(status="at_chance"))
    assert judge(at, DAMAGE).verdict == "no verdict: at chance"


def test_two_models_that_are_both_lost_are_not_compared(monkeypatch):
    """Bit-by-Bit's B26 was judged at perplexities of 647 and 537, where full precision has 18."""
    at = flow()
    for shift, word in ((1.5, "holds on the stand-ins"), (1.7, "no verdict: all that is compared is above 5 times")):
        monkeypatch.setitem(SHIFTS, "RTN pc", shift)
        monkeypatch.setitem(SHIFTS, "GPTQ pc", 1.65)  # exp(1.65) = 5.2, exp(1.5) = 4.5
        observe(at)
        better = dataclasses.replace(
            DAMAGE, cells={"a": "RTN pc | Wiki", "b": "GPTQ pc | Wiki"}, quantity="a / b", holds="> 0"
        )
        assert judge(at, better).verdict.startswith(word)
        assert judge(at, DAMAGE).measured, "a comparison with full precision itself says how much is lost"


def test_evidence_that_is_not_whole_decides_where_it_can():
    """B04 failed in 4 of 4 measured cases, and read "printed numbers agree"."""
    at = flow(models={ONE: "pocket-3m", TWO: "pocket-5m"})
    observe(at)
    shutil.rmtree(at.jobs(cells(at, "RTN pc")[1])[0]["scores"].folder)
    judged = judge(at, dataclasses.replace(DAMAGE, cases=MODELS))
    what = "of the two that have a stand-in, one is not run"
    assert (judged.verdict, judged.grade, judged.measured) == ("undecided, 1 of 2 hold", "C", True), what
    assert judged.why == "1 of 3 cases not run, 1 of 3 cases without a stand-in"
    fails = judge(at, dataclasses.replace(DAMAGE, cases=MODELS, holds="> 0.9"))
    assert fails.verdict == "same direction, smaller" and fails.own_numbers == "inconsistent"
    assert judge(flow(models={}), DAMAGE).verdict == "no verdict: without a stand-in"


def test_one_measured_case_that_fails_fails_the_claim():
    at = flow(models={ONE: "pocket-3m", TWO: "pocket-5m"})
    observe(at)
    cases = ({"model": ONE, "limit": "0.3"}, {"model": TWO, "limit": "0.1"})
    judged = judge(at, dataclasses.replace(DAMAGE, cases=cases, holds="<= {limit}"))
    assert (judged.verdict, judged.count) == ("same direction, smaller", "1 of 2 cases")
    assert [case.holds for case in judged.cases] == ["<= 0.3", "<= 0.1"]


def failing_case(t, df=None):
    """A case that fails `> 0` at `t` standard errors of 1."""
    half = float(stdtrit(math.inf if df is None else df, 0.975))
    value = -float(t)
    case = Case("m", "> 0", 1.0, value, value - half, value + half, df)
    return dataclasses.replace(case, verdict=judging.verdict_of(case))


@pytest.mark.parametrize("df", [None, 5.0, 40.0])
@pytest.mark.parametrize("t", [2.6, 3.0, 5.0])
def test_the_p_value_of_a_failing_case_is_that_of_its_t_statistic(t, df):
    want = 2 * float(stdtr(math.inf if df is None else df, -t))
    assert judging.p_failing(failing_case(t, df)) == pytest.approx(want, rel=1e-3)


def test_one_case_of_many_does_not_fail_a_claim_by_chance():
    """Holm: of 48 cases one at 2.5 standard errors (p = 0.012) is no failure, at 3.5 (p = 0.0005) it is."""
    holding = [Case("m", "> 0", 1.0, 1.0, 0.5, 1.5, verdict=0)] * 47
    assert judging.rejected([*holding, failing_case(2.5)]) == []
    assert len(judging.rejected([*holding, failing_case(3.5)])) == 1
    assert len(judging.rejected([failing_case(2.5)])) == 1
    several = [failing_case(3.5), failing_case(3.3), failing_case(2.1)]  # p = 0.0005, 0.001, 0.036
    assert len(judging.rejected([*several, *holding[:1]])) == 2, "0.036 is above 0.05 / 2"
    assert len(judging.rejected(several)) == 3


def test_a_claim_about_most_cases_needs_more_than_half():
    assert [judging.together(v, most=True) for v in ([0, 0, 1], [0, 1], [1, 1, 0], [0, 2, 2], [0, 0, 2])] == [
        0,
        2,
        1,
        2,
        0,
    ]
    at = flow(models={ONE: "pocket-3m", TWO: "pocket-5m", THREE: "pocket-10m"})
    observe(at)
    cases = [{"model": model, "most": edge} for model, edge in zip(MODELS, (0.3, 0.3, 0.1))]
    claim = dataclasses.replace(DAMAGE, cases=tuple(cases), holds="< {most}", most=True)
    assert judge(at, claim).said == "holds on the stand-ins (2 of 3 cases)"
    assert judge(at, dataclasses.replace(claim, most=False)).verdict == "same direction, larger"
    two = flow(models={ONE: "pocket-3m", TWO: "pocket-5m"})
    observe(two)
    halves = [{"model": ONE, "most": 0.3}, {"model": TWO, "most": 0.1}, {"model": THREE, "most": 0.3}]
    split = judge(two, dataclasses.replace(claim, cases=tuple(halves)))
    assert split.verdict == "undecided, 1 of 2 hold" and split.why == "1 of 3 cases without a stand-in"


def test_a_changed_predicate_says_so():
    claim = next(claim for claim in tables.table("spear", "gate").claims if claim.claim == "spear C050")
    assert "predicate changed after the runs: as a share of SPEAR's" in verdict_line(judge(flow(models={}), claim))


@given(st.lists(st.floats(1.97, 6), min_size=1, max_size=6), st.integers(0, 20))
def test_holm_rejects_no_more_than_single_tests_and_no_less_than_bonferroni(ts, more):
    cases = [failing_case(t) for t in ts] + [Case("m", "> 0", 1.0, 1.0, 0.5, 1.5, verdict=0)] * more
    result = len(judging.rejected(cases))
    bonferroni = sum(judging.p_failing(case) <= 0.05 / len(cases) for case in cases)
    assert bonferroni <= result <= len(ts)


@pytest.mark.parametrize(
    ("holds", "printed", "interval", "neutral", "word"),
    [
        (">= 0.5", 0.6, (0.1, 0.2, 0.3), 0, "same direction, smaller"),
        (">= 0.5", 0.6, (-0.1, 0.2, 0.3), 0, "no effect"),
        (">= 0.5", 0.6, (-0.3, -0.2, -0.1), 0, "opposite direction"),
        ("<= 0.1", 0.05, (0.2, 0.3, 0.4), 0, "same direction, larger"),
        ("<= 0.1", None, (0.2, 0.3, 0.4), 0, "same direction, larger"),  # costs a little, and here more
        ("<= 0", None, (0.2, 0.3, 0.4), 0, "opposite direction"),  # costs nothing
        ("<= 0", -0.01, (0.2, 0.3, 0.4), 0, "opposite direction"),
        (">= -0.1", None, (-0.4, -0.3, -0.2), 0, "same direction, larger"),
        (">= 0", None, (-0.4, -0.3, -0.2), 0, "opposite direction"),
        ("0.9 <= x <= 1.1", None, (1.2, 1.3, 1.4), 1, "same direction, larger"),
        ("0.9 <= x <= 1.1", None, (0.6, 0.7, 0.8), 1, "same direction, larger"),
        ("0.9 <= x <= 1", None, (1.2, 1.3, 1.4), 1, "opposite direction"),
        ("1.3 <= x <= 2.5", None, (59, 65, 71), 1, "same direction, larger"),  # asks for an effect, within a band
        ("0.45 <= x <= 0.55", None, (0.36, 0.37, 0.38), 0, "same direction, smaller"),
        ("0.45 <= x <= 0.55", None, (-0.4, -0.3, -0.2), 0, "opposite direction"),
        ("< 0.5", None, (0.97, 0.98, 0.99), 1, "same direction, smaller"),  # halved, and here next to nothing
        ("< 0.5", None, (1.1, 1.2, 1.3), 1, "opposite direction"),
        ("<= 0.465", 0.46, (0.77, 0.84, 0.91), 1, "same direction, smaller"),
        (">= 2", 2.2, (1.1, 1.2, 1.3), 1, "same direction, smaller"),
        (">= 2", 2.2, (0.7, 0.8, 0.9), 1, "opposite direction"),
        ("> 0", -1.5, (-0.3, -0.2, -0.1), 0, "opposite direction"),
        ("> 0", None, (0.0, 0.0, 0.0), 0, "no effect"),
        ("> 0", 4.7, (-0.03, 0.0, 0.0), 0, "no effect"),
    ],
)
def test_what_fails_is_said_by_its_direction(holds, printed, interval, neutral, word):
    low, value, high = interval
    assert judging.direction([Case("m", holds, printed, value, low, high)], neutral) == word


def test_a_loss_above_its_bound_is_larger_also_where_the_printed_value_is_of_another_unit():
    """SPEAR's and Bit-by-Bit's accuracies are printed in points, and judged in nats."""
    assert judging.direction([Case("m", "<= 0.016", 0.48, 0.13, 0.09, 0.16, nats=True)]) == "same direction, larger"
    assert judging.direction([Case("m", ">= 0.16", 5.0, 0.13, 0.09, 0.15, nats=True)]) == "same direction, smaller"


def test_the_word_of_most_failing_cases_is_taken():
    small, none = Case("m", "> 1", 2.0, 0.5, 0.4, 0.6), Case("m", "> 1", 2.0, 0.0, -0.1, 0.1)
    assert judging.direction([small, none, none]) == "no effect"
    assert judging.direction([small, none]) == "same direction, smaller"


def test_cases_may_be_a_product_of_lists_and_a_quantity_may_have_constants():
    cases = ({"model": (ONE, TWO), "q": ("RTN", "GPTQ"), "unit": 100},)
    claim = dataclasses.replace(
        DAMAGE, cells={"f": "FP16 | Wiki", "b": "{q} pc | Wiki"}, cases=cases, quantity="{unit} * (b / f - 1)"
    )
    named = [(keys["model"], keys["q"]) for keys, _ in claim.case_cells()]
    assert named == [(ONE, "RTN"), (ONE, "GPTQ"), (TWO, "RTN"), (TWO, "GPTQ")]
    at = flow()
    observe(at)
    judged = judge(at, claim)
    assert judged.count == "2 of 2 cases" and judged.why == "2 of 4 cases without a stand-in"
    assert judged.cases[0].measured == pytest.approx(100 * judge(at, DAMAGE).cases[0].measured)
    assert judged.cases[0].printed == pytest.approx(100 * (20.46 / 9.71 - 1))


# --- on accepted results ----------------------------------------------------------------------------------------------


def test_live_and_accepted_cells_are_paired(kept):
    at = flow()
    observe(at)
    whole = judge(at, SHARE).cases[0]
    accept(at, ["+SPEAR pc on RTN"], kept)
    judged = judge(at, SHARE)
    (case,) = judged.cases
    assert {m.source for m in judged.cells} == {"fresh", "stored"} and case.on == "pocket-3m"
    assert (case.measured, case.lo, case.hi) == pytest.approx((whole.measured, whole.lo, whole.hi), rel=1e-12)


@pytest.mark.parametrize("worst", ["FP16", "RTN pc", "+SPEAR pc on RTN"])
def test_the_worst_grade_counts(monkeypatch, worst):
    at, one = flow(grade="A"), measure.one_measured
    observe(at)
    assert judge(at, SHARE).verdict == "holds"
    monkeypatch.setattr(measure, "one_measured", lambda at, c: one(at, c).marked(grade="C" if c.row == worst else "A"))
    judged = judge(at, SHARE)
    assert (judged.grade, judged.verdict) == ("C", "holds on the stand-ins")


def test_a_stale_cell_is_no_evidence(kept):
    at = flow()
    observe(at)
    accept(at, ["+SPEAR pc on RTN"], kept, inputs="00000000")
    judged = judge(at, SHARE)
    assert not judged.measured and judged.why == "1 of 3 cells stale" and judged.verdict == "no verdict: stale"


def test_what_is_drawn_counts_only_with_all_of_its_windows(monkeypatch):
    """A few windows of one seed are shown, and are no evidence on what is calibrated or trained."""
    at, one = flow(), measure.one_measured
    observe(at)
    brief = lambda at, cell: one(at, cell).marked(source="partial" if "SPEAR" in cell.row else "fresh")  # noqa: E731
    monkeypatch.setattr(measure, "one_measured", brief)
    assert judge(at, SHARE).verdict == "no verdict: not run" and judge(at, SHARE).cases[0].missing == "not_run"
    assert judge(at, DAMAGE).measured


# --- cross-checks -------------------------------------------------------------------------------------------------


def test_the_kl_share_is_another_reading_in_the_same_line():
    at = flow()
    observe(at)
    claim = dataclasses.replace(SHARE, cross_checks={"KL": "KL", "agreement": "Top-1"})
    judged = judge(at, claim)
    kl = {row: 0.01 + 0.1 * SHIFTS[row] + 0.0015 for row in SHIFTS}
    base, ours = kl["RTN pc"], kl["+SPEAR pc on RTN"]
    one, agreement = judged.cases[0].cross_checks
    assert one.name == "KL" and one.value == pytest.approx((base - ours) / base) and one.lo < one.value < one.hi
    assert agreement.value == pytest.approx((base - ours) / base), "full precision agrees with itself everywhere"
    assert f"KL: {100 * one.value:.1f} %" in verdict_line(judged)
    for holds, wanted in (
        (">= 0.7", "holds on the stand-ins"),
        (">= 0.9", "same direction, larger"),
    ):  # 0.75 of the perplexity gap, 0.43 of KL
        assert judge(at, dataclasses.replace(claim, holds=holds)).verdict == wanted


@pytest.mark.parametrize(
    ("on_c4", "message"),
    [
        (0.05, "(agrees)"),
        (0.12, "(agrees, another value in 1 of 1 case)"),
        (0.25, "(disagrees: fails (0 of 1 case), another value in 1 of 1 case)"),
    ],
)
def test_a_printed_column_is_a_reading_and_the_line_says_where_it_disagrees(on_c4, message):
    """RTN costs 0.2 nats on both texts; SPEAR leaves 0.05 on WikiText-2, and on C4 as much, more, or more than RTN."""
    at = flow()
    observe(at, c4={"FP16": 0.0, "RTN pc": 0.2, "+SPEAR pc on RTN": on_c4})
    judged = judge(at, dataclasses.replace(SHARE, holds="> 0", cross_checks={"C4": "C4"}))
    share = (np.exp(0.2) - np.exp(on_c4)) / (np.exp(0.2) - 1)
    (one,) = judged.cases[0].cross_checks
    assert one.name == "C4" and one.value == pytest.approx(share, abs=0.02)
    assert (one.verdict, one.apart) == (int(on_c4 > 0.2), on_c4 > 0.1)
    assert judged.verdict == "holds on the stand-ins", "a cross-check never decides"
    assert f"C4: {100 * one.value:.1f} % [" in verdict_line(judged) and message in verdict_line(judged)
    rest = judge(at, dataclasses.replace(SHARE, cases=(ONE, TWO), cross_checks={"C4": "C4"}, judged_on_printed="ours"))
    assert "C4:" not in verdict_line(rest), "a measured cross-check is not compared with a verdict on printed numbers"


def test_the_headline_table_has_what_is_measured_alone(monkeypatch):
    at = flow()
    observe(at)
    printed = dataclasses.replace(DAMAGE, cases=(THREE,))
    monkeypatch.setattr(tables, "headline_claims", lambda: [printed, SHARE])
    rows = rendered.headline(at)[0].rows
    assert [row[0] for row in rows] == ["spear", "C001 C004"]
    assert rows[1][-1] == "C: holds on the stand-ins (1 of 1 case); one seed" and " % [" in rows[1][3]
    (waits,) = [note for note in rendered.headline(at)[0].notes if note.startswith("Not measured of spear")]
    assert waits.startswith("Not measured of spear: C005 RTN costs perplexity; C007 C008 C031, unfused")


def test_what_rests_on_the_papers_numbers_alone_is_a_table_of_its_own():
    sheet, text = rendered.printed_alone(flow())
    verdicts = {(row[0], row[-1].partition(";")[0]) for row in sheet.rows if len(row) > 1}
    assert ("B01", "consistent") in verdicts and ("C044", "inconsistent") in verdicts, "with and without a predicate"
    assert [row[0] for row in sheet.rows if len(row) == 1] == list(papers.PAPERS)
    assert "grade" not in text.splitlines()[0].split(",") and not any(row[-1].startswith("holds") for row in sheet.rows)


def test_the_headline_names_ten_measured_claims_of_tables_own_specs(monkeypatch):
    result = tables.headline_claims()
    assert len(HEAD.measured) >= 10 and result[len(HEAD.measured) :] == list(HEAD.claims)
    assert all(claim in tables.table(*tables.split(claim.table)).claims for claim in result[: len(HEAD.measured)])
    wrong = dataclasses.replace(HEAD, measured=("spear/1: spear C022x",))
    monkeypatch.setattr(tables, "headline", lambda: wrong)
    with pytest.raises(UserError, match="measured: unknown claim of spear/1 'spear C022x'; did you mean 'spear C022'"):
        tables.headline_claims()


def test_a_reading_that_is_not_beside_the_table_is_refused():
    with pytest.raises(UserError, match="cross_checks: unknown column of spear/1 'kl'; choose from: .*KL"):
        judge(flow(), dataclasses.replace(SHARE, cross_checks={"KL": "kl"}))


def test_a_claim_may_be_judged_on_printed_cells_alone():
    at = flow()
    observe(at)
    judged = judge(at, dataclasses.replace(DAMAGE, judged_on_printed="here it is set by our budget"))
    assert (judged.grade, judged.verdict, judged.own_numbers) == ("", "", "consistent")
    assert verdict_line(judged).endswith("ere it is set by our budget; the paper's own numbers: consistent.")


def test_the_line_names_count_scale_models_corpora_and_seeds():
    at = flow()
    observe(at)
    line = verdict_line(judge(at, dataclasses.replace(SHARE, cases=(ONE, TWO))))
    assert line.startswith(
        "spear C001 C004: SPEAR closes most of the 4-bit per-channel gap of RTN (WikiText-2). Printed"
    )
    for part in ("(1 of 1 case)", "grade C", "on pocket-3m", "one seed", "1 of 2 cases without a stand-in"):
        assert part in line, part
    assert re.search(r"measured: 7\d\.\d % \[\d\d\.\d, \d\d\.\d\]", line)


# --- on printed numbers -----------------------------------------------------------------------------------------------


def number(paper, table_number, row, col, model):
    (cell,) = [c for c in papers.printed(paper, table_number) if (c.row, c.col, c.model) == (row, col, model)]
    return cell.number


def spear1(row, col, model):
    return number("spear", "1", row, col, model)


STATIC = ("LoftQ", "LQER", "QERA", "EoRA", "ASER")
W2A2 = {"LLaMA-3.2-1B": "3.2-1B", "LLaMA-3.2-3B": "3.2-3B", "LLaMA-2-7B": "2-7B", "LLaMA-3-8B": "3-8B"}
# hidden size, layers, FFN, width of keys and values, vocabulary, and whether the head is a matrix of its own
SHAPES = {
    "Llama-3.2-1B": (2048, 16, 8192, 512, 128256, 0),
    "Llama-3.2-3B": (3072, 28, 8192, 1024, 128256, 0),
    "Llama-2-7B": (4096, 32, 11008, 4096, 32000, 1),
    "Llama-2-13B": (5120, 40, 13824, 5120, 32000, 1),
    "Llama-2-70B": (8192, 80, 28672, 1024, 32000, 1),
}


def _c4(model):
    cell = lambda row, col: number("spear", "2", f"{row} pc on RTN", col, model)  # noqa: E731
    return min(cell(row, "C4 PPL") for row in STATIC) - cell("SPEAR", "C4 PPL")


def _memory(model):
    h, layers, ffn, kv, vocabulary, head = SHAPES[model]
    blocks, embeddings = layers * (2 * h * h + 2 * h * kv + 3 * h * ffn), (1 + head) * vocabulary * h
    return 1e6 * number("spear", "2", "SPEAR pc on RTN", "Mem", model) / (blocks / 2 + 2 * embeddings)


def _tp(size, ranks):
    cell = lambda row: number("spear", "5", row, f"TP={ranks} {size}", f"Llama-2-{size}")  # noqa: E731
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
    return number("spqt", "3", "Unified 50%", model, model) / number("spqt", "3", "Baseline-Q4K", model, model) - 1


def _of(paper, table_number, *cells):
    return [number(paper, table_number, *cell) for cell in cells]


def _ratio(pair):
    return pair[0] / pair[1]


# Each row of tables/table1.yaml: the quantity of every case computed here, then what the rounded result must be.
ROWS = {
    "spear C005": ([spear1("RTN pc", "Wiki", m) / spear1("FP16", "Wiki", m) - 1 for m in MODELS],
                             [1.1071, 0.3565, 0.1927], "agree"),
    "spear C001 C004": ([(spear1("RTN pc", "Wiki", m) - spear1("+SPEAR pc on RTN", "Wiki", m))
                         / (spear1("RTN pc", "Wiki", m) - spear1("FP16", "Wiki", m)) for m in MODELS],
                        [0.7498, 0.5632, 0.6038], "agree"),
    "spear C002": ([_memory(m) for m in SHAPES], [0.0097, 0.0088, 0.0066, 0.0061, 0.0042], "agree"),
    "spear C024": ([_c4(m) for m in MODELS], [1.8, 0.09, 0.09], "agree"),
    "spear C039 C053 C054": ([_tp(size, ranks) for size in ("7B", "13B", "70B") for ranks in (2, 3, 4)],
                             [0.7049, 0.6484, 0.6805, 0.8521, 0.7823, 0.7541, 1.1372, 1.0917, 1.0594], "agree"),
    "bitbybit B01": ([_ratio(_of("bitbybit", "7", ("(4096, 14336)", "BF16", "Llama3-8B"),
                                 ("(4096, 14336)", "W2A2", "Llama3-8B")))], [11.5476], "agree"),
    "flexquant F02": ([_flex(t) for t in ("CNN/DM Rouge-L", "DialogSum Rouge-L", "IWSLT BLEU")],
                      [-0.1001, -0.0157, -0.1848], "disagree"),
    "flexquant F14": ([_rouge()], [4.72], "agree"),
    "spqt Q01": ([_ratio(_of("spqt", "2", ("A19 Pro / Unified 50%", "Llama-2-7B", "Llama-2-7B"),
                             ("A19 Pro / Baseline-Q4K", "Llama-2-7B", "Llama-2-7B")))], [1.5467], "agree"),
    "subspec S01": ([_ratio(_of("subspec", "1",
                                ("SubSpec [T=0, 8GB]", "MT-Bench tokens/s", "Qwen2.5-7B-Instruct"),
                                ("None [T=0, 8GB]", "MT-Bench tokens/s", "Qwen2.5-7B-Instruct")))], [9.1516], "agree"),
    "subspec S07": ([number("subspec", "1", "SubSpec [T=0, 8GB]", f"{prompts} tau", "Qwen2.5-7B-Instruct")
                     for prompts in ("MT-Bench", "HumanEval", "GSM8K")], [27.08, 34.77, 34.18], "agree"),
}  # fmt: skip


TABLE_OF = {"spear C005": "spear/1", "spear C001 C004": "spear/1", "spear C024": "spear/2",
             "spear C039 C053 C054": "spear/5",
             "spqt Q01": "spqt/2", "subspec S01": "subspec/1", "subspec S07": "subspec/1"}  # fmt: skip
IN_TABLES = {}
for claimed, its_table in TABLE_OF.items():
    claims = tables.table(*tables.split(its_table)).claims
    IN_TABLES[claimed] = next(claim for claim in claims if claim.claim == claimed)


def test_every_row_of_the_headline_table_is_here():
    assert set(BY_ID) < set(ROWS)
    for claim in HEAD.claims:
        assert claim.claim.split()[0] == claim.table.split("/")[0]


@pytest.mark.parametrize("name", ROWS)
def test_arithmetic_on_printed_numbers(name, monkeypatch):
    monkeypatch.setattr(kernel_rows, "files", lambda: [])  # accepted times would judge what is about kernels
    quantities, rounded, word = ROWS[name]
    judged = judge(flow(models={}), IN_TABLES.get(name) or BY_ID[name])
    assert np.round(quantities, 4).tolist() == rounded
    assert [case.printed for case in judged.cases] == pytest.approx(quantities, rel=1e-4 if "C002" in name else 1e-12)
    word = {"agree": "consistent", "disagree": "inconsistent"}.get(word, word)
    assert (judged.grade, judged.own_numbers, judged.measured) == ("", word, False)
    assert all(case.measured is None and case.lo is None for case in judged.cases)
    shaped = ("bitbybit B01", "spear C039 C053 C054")  # times of shapes need no stand-in
    lacks = "not run" if name in shaped else "without a stand-in"
    why = f"{len(judged.cells)} of {len(judged.cells)} cells {lacks}"
    if name == "subspec S01":  # decoding without a draft is a time of a shape, SubSpec's has a stand-in's lengths
        why = "1 of 2 cells without a stand-in, 1 of 2 cells not run"
    assert judged.why == (judged.spec.judged_on_printed or why)


def test_rounding_is_that_of_the_cell_that_is_meant():
    k_and_rank = {"k": "RTN | 4-bit pc K%/r | k_percent", "r": "RTN | 4-bit pc K%/r | rank"}
    claim = dataclasses.replace(DAMAGE, table="spear/8", cells=k_and_rank, quantity="k - r", holds=">= 14.0")
    judged = judge(flow(models={}), claim)
    assert judged.cases[0].printed == 41 - 26 and judged.own_numbers == "consistent"
    assert judge(flow(models={}), dataclasses.replace(claim, holds=">= 14.1")).own_numbers == "within rounding"
    with pytest.raises(UserError, match="spear/8 has no cell RTN . 4-bit pc K%/r . bpw of Llama-3.2-1B"):
        judge(flow(models={}), dataclasses.replace(claim, cells=k_and_rank | {"r": "RTN | 4-bit pc K%/r | bpw"}))


def test_a_claim_about_several_tables_takes_its_cells_from_all_of_them():
    """Known answer: FP16's mean of Table 19 (1B) and of Table 21 (3B), each in the table of its model."""
    mean = {"claim": "spear C086", "cells": {"m": "FP16 | Avg"}, "quantity": "m", "holds": "> 0.5", "cases": (ONE, TWO)}
    both = dataclasses.replace(DAMAGE, table="spear/19", more=("spear/21",), **mean)
    judged = judge(flow(models={}), both)
    assert [case.printed for case in judged.cases] == [0.572, 0.669] and judged.own_numbers == "consistent"
    with pytest.raises(UserError, match="spear/19 has no cell FP16 . Avg of Llama-3.2-3B"):
        judge(flow(models={}), dataclasses.replace(both, more=()))


def test_a_table_needs_the_tables_that_its_claims_name():
    assert tables.behind("spear", "23") == [("spear", "23"), ("spear", "25")]
    numbers = {cell.number for cell in flow().table_cells("spear/table23")}
    assert numbers == {"23", "25"} and {cell.number for cell in flow().table_cells("spear/table24")} == {"24"}
    assert any(path.name == "table25.csv" for path in snake._sources("spear/table23"))


def test_a_table_is_drawn_anew_where_any_table_accepts_results():
    """One of its cells may take the row of another table."""
    accepted_in = {path.name for path in snake._sources("spear/table4") if path.parent.parent.name == "results"}
    assert {"spear-table1.csv.xz", "spear-table22.csv.xz"} <= accepted_in and "kernels.csv.xz" not in accepted_in
    headline = {path.name for path in snake._sources("table1")}
    assert accepted_in | {"kernels.csv.xz", "peers-recorded.csv.xz"} <= headline, "it judges the claims of all tables"


@pytest.mark.parametrize(("edge", "message"), [(2.9, "consistent"), (3.1, "within rounding"), (3.3, "inconsistent")])
def test_the_corners_of_many_printed_cells(edge, message):
    """16 accuracies, each known to half a thousandth: their sum within 0.008 of 3.1."""
    rows = ("FP16", "RTN 4-bit pc")
    tasks = ("PIQA", "ARC-E", "ARC-C", "HellaS", "WinoG", "BoolQ", "LAMBADA", "MMLU")
    named = {f"x{i}": f"{row} | {task}" for i, (row, task) in enumerate(product(rows, tasks))}
    printed = [c.number for c in papers.printed("spear", "19") if c.row in rows and c.col in tasks]
    total = f"{' + '.join(named)} - {sum(printed)!r} + 3.1"
    claim = dataclasses.replace(DAMAGE, claim="spear C085", table="spear/19", cells=named, quantity=total)
    judged = judge(flow(models={}), dataclasses.replace(claim, holds=f">= {edge}"))
    assert judged.own_numbers == message


def test_a_blank_cell_says_nothing():
    blank = dataclasses.replace(DAMAGE, table="spear/2", cells={"b": "RTN pc | Mem"}, quantity="b")
    judged = judge(flow(models={}), blank)
    assert (judged.verdict, judged.grade, judged.own_numbers) == ("no verdict: without a stand-in", "", "")


def test_arithmetic_on_public_shapes_is_no_verdict_and_names_no_stand_in():
    """Rank 16 in 16 bits in every layer of the 70B model is 414.19 MB; the paper prints 414."""
    claim = next(claim for claim in tables.table("spear", "2").claims if claim.claim == "spear C029")
    judged = judge(flow(models={}), claim)
    assert (judged.verdict, judged.grade, judged.measured) == ("", "", False)
    assert judged.why == "on the public shapes of its model: holds"
    assert {(round(case.measured, 2), case.on) for case in judged.cases} == {(414.19, "public shapes")}


# --- specs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"claim": "spear C999"}, "unknown claim of spear 'C999'"),
        ({"cells": {"b": "RTN pcs | Wiki"}, "quantity": "b"}, "spear/1 has no cell RTN pcs | Wiki of Llama-3.2-1B"),
        ({"quantity": "b - q"}, "unknown name 'q'"),
        ({"quantity": "b.real"}, "only arithmetic"),
        ({"holds": "about 3"}, "not an expression"),
        ({"table": "spear/memory"}, "spear/memory has no cell FP16 | Wiki of Llama-3.2-1B"),
    ],
)
def test_a_claim_that_names_what_is_not_there(change, sentence):
    with pytest.raises(UserError) as error:
        judge(flow(models={}), dataclasses.replace(SHARE, **change))
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"table": "spear"}, "unknown table 'spear'"),
        ({"table": "spaer/1"}, "unknown table 'spaer/1'"),
        ({"table": "spear/99"}, "unknown table 'spear/99'"),
        ({"cells": {"b": "RTN {bits} | Wiki"}}, "does not give 'bits'"),
        ({"cases": ({"size": "7B"},)}, "does not give 'model'"),
        ({"holds": "<= {limit}"}, "does not give 'limit'"),
        ({"quantity": "b / {blocks}"}, "does not give 'blocks'"),
        ({"quantity": "b / {model.size}"}, "does not give"),
    ],
)
def test_a_claim_that_cannot_be_read(change, sentence):
    with pytest.raises(UserError) as error:
        judge(flow(models={}), dataclasses.replace(SHARE, **change))
    assert sentence in str(error.value)


def test_a_headline_has_at_most_twenty_measured_claims():
    with pytest.raises(UserError, match="21 measured claims; the headline table has at most 20"):
        tables.HeadlineSpec("t", ("spear/1: spear C021",) * 21)


def test_a_table_s_own_claims_are_about_that_table():
    result = tables.table("spear", "1").claims
    assert result and {claim.table for claim in result} == {"spear/1"}
    everywhere = next(claim for claim in result if claim.cells.get("s", "").endswith("Wiki"))
    rows = set()
    for _, named in everywhere.case_cells():
        row, _, model, _ = named["s"]
        rows.add((row, model))
    printed = {
        (c.row, c.model) for c in papers.printed("spear", "1") if c.row.startswith("+SPEAR") and c.model in MODELS
    }
    assert rows == printed, "every setting, none left out"


def written_claims():
    """Every claim of the project, by the file that it is in."""
    files = {"tables/table1.yaml": HEAD.claims}
    files |= {str(tables.path_of(*both).relative_to(ROOT)): tables.table(*both).claims for both in tables.specified()}
    return {name: result for name, result in files.items() if result}


def test_no_threshold_changes_without_its_reason():
    """tests/claim_thresholds.yaml: what every claim compares, and why there; the reason has each number in it."""
    kept = yaml.safe_load((ROOT / "tests" / "claim_thresholds.yaml").read_text())
    today = written_claims()
    assert kept.keys() == today.keys()
    for name, result in today.items():
        assert [entry["claim"] for entry in kept[name]] == [claim.claim for claim in result]
        for claim, entry in zip(result, kept[name], strict=True):
            holds = list(dict.fromkeys(claim.holds.format(**keys) for keys, _ in claim.case_cells()))
            assert (claim.quantity, holds) == (entry["quantity"], entry["holds"]), f"{name}: {claim.claim}"
            nats = list(dict.fromkeys(claim.log_probability.format(**keys) for keys, _ in claim.case_cells()))
            assert nats == entry.get("log_probability", [""]), f"{name}: {claim.claim}"
            for text in re.findall(r"\d+(?:\.\d+)?", " ".join(holds + nats)):
                named = re.search(rf"(?<![\d.]){re.escape(text)}(?![\d.]*\d)", entry["because"])
                assert named, f"{claim.claim}: the reason does not name {text}"


RATIO = r"(?:\w+ / \w+|min\(\w+ / \w+(?:, \w+ / \w+)*\))"


def test_a_ratio_of_two_cells_has_no_effect_at_one():
    """With 0 in its place, a speed-up of 0.9 or a loss of a sixth would be said to go in the claimed direction."""
    ratios = []
    for claims in written_claims().values():
        ratios += [claim for claim in claims if re.fullmatch(RATIO, claim.quantity)]
    assert len(ratios) > 40
    for claim in ratios:
        assert claim.neutral == 1, f"{claim.table}: {claim.claim}, {claim.says}"
