"""The kind of cell of BERTScore: the texts of `switching`, read up to their end, each with its own references."""

from dataclasses import replace

import numpy as np
import pytest

from repro import models
from repro.core.errors import UserError
from repro.data import bert_score, prompts, text_scores
from repro.jobs.target import Target
from repro.metrics import switching
from repro.metrics.bertscore import BertScore
from repro.metrics.switching import Protocol, Switching
from repro.specs import scale as scales
from repro.stats.quantity import Quantity
from repro.store import observations
from repro.store.job import built_under, distinct
from repro.store.observations import Observations, Series
from repro.workflow import runner
from repro.workflow.workflow import Workflow

SCHEDULE = "flexquant(window=3, layers=2, prompt_tokens=4)"


@pytest.fixture(scope="module")
def target():
    """pocket-3m under 4-bit RTN, three short texts."""
    at = scales.load(name="pocket").on("cpu")
    small = Protocol(prompts=3, new_tokens=20, context=200, validation=1, together=3)
    return Target(replace(at, protocols=at.protocols | {"switching": small}), "pocket-3m", "rtn-w4-g64")


@pytest.fixture(scope="module")
def texts(target, tmp_path_factory):
    """The observations of a schedule's texts of a set."""
    folder = tmp_path_factory.mktemp("texts")

    def observed(name):
        with built_under(folder):
            (job,) = BertScore(name, SCHEDULE).jobs(target).values()
            for each in distinct([job]):
                if not runner.done(each):
                    runner.run(each)
            return {"texts": observations.load(job.folder / observations.FILE)}

    return observed


@pytest.fixture
def scored(monkeypatch):
    """What is scored, in place of an encoder: a score is the number of letters of the text."""
    pairs = []

    def score(text, references):
        pairs.append((text, references))
        return float(len(text))

    monkeypatch.setattr(bert_score, "score", score)
    return pairs


def test_each_text_is_scored_with_its_own_references(texts, target, scored):
    observed = texts("gsm8k")
    series = BertScore("gsm8k", SCHEDULE).series(observed, target)
    recorded, tokenizer = observed["texts"].series, models.tokenizer(target.model)
    every = prompts.load("gsm8k", 3)
    assert [references for _, references in scored] == [prompt.references for prompt in every]
    for number, (text, references) in enumerate(scored):
        assert text == tokenizer.decode(list(map(int, recorded[f"tokens {number}"].values)))
        assert text_scores.rouge_l(text, references) == pytest.approx(recorded["rougeL"].values[number], rel=1e-6)
    kept = series["bertscore"]
    assert kept.values.tolist() == [len(text) for text, _ in scored]
    assert (kept.axis, kept.group) == (recorded["rougeL"].axis, recorded["rougeL"].group), "paired with other rows"
    measured = Quantity([series], BertScore("gsm8k").value).interval()
    assert measured.value == kept.values.mean() and measured.n == 3


def test_a_text_ends_where_an_answer_ends(scored, monkeypatch, target):
    """Of a dialogue at a line break; what follows is not scored."""
    tokenizer = models.tokenizer(target.model)
    prompt = replace(prompts.load("gsm8k", 1)[0], references=("It is said.",))
    monkeypatch.setattr(switching, "tested", lambda name, protocol: [prompt])
    ids = tokenizer("It was said.\nAnd more")["input_ids"]
    series = {"tokens 0": Series(np.asarray(ids, float), "tokens"), "rougeL": Series(np.ones(1), "sequences", "g")}
    BertScore("dialogsum", SCHEDULE).series({"texts": Observations(series, {})}, target)
    assert scored == [("It was said.", ("It is said.",))]


def test_the_prompts_are_those_that_were_measured(target):
    """In their order, and none of those for validation."""
    protocol = target.scale.protocols["switching"]
    assert [p.id for p in switching.tested("gsm8k", protocol)] == [p.id for p in prompts.load("gsm8k", 3)]


def test_a_set_without_references_has_no_score(texts, target, scored):
    assert BertScore("longwriter-en", SCHEDULE).series(texts("longwriter-en"), target) == {} and not scored


def test_its_job_is_that_of_the_texts(target):
    for schedule, control in ((SCHEDULE, ""), (SCHEDULE, "uniform"), ("", "")):
        ours = BertScore("gsm8k", schedule, control=control).jobs(target)
        theirs = Switching("bits", "gsm8k", schedule, control=control).jobs(target)
        assert ours["texts"].id == theirs["texts"].id
    with pytest.raises(UserError, match="a control or a quantile belongs to a schedule"):
        BertScore("gsm8k", control="uniform")


def test_it_says_what_it_lacks(monkeypatch):
    monkeypatch.setattr(bert_score, "lacking", lambda: "")
    assert BertScore("gsm8k").lacking() == Switching("bits", "gsm8k").lacking()
    monkeypatch.setattr(bert_score, "lacking", lambda: "no encoder")
    assert BertScore("gsm8k").lacking() == "no encoder"


def test_the_columns_of_table_1_are_measured_against_the_fewest_bits():
    """Every printed cell of the two columns has a kind; a difference to full precision is read in points."""
    cells = Workflow(scales.load(name="pocket")).cells("flexquant", "1")
    ours = [cell for cell in cells if cell.metric == "bertscore"]
    assert all(cell.measure == "bertscore" for cell in ours) and BertScore("gsm8k").against == "q - f"
    printed = [cell for cell in ours if cell.printed and cell.stand_in and cell.model != "Phi-1.5"]
    assert len(printed) == 23
    flex = next(cell for cell in printed if cell.row == "FlexQuant")
    peers = [cell for cell in ours if cell.cell_key[1:] == flex.cell_key[1:]]
    assert flex.params.fewest_bits(flex, peers).row == "Baseline-l"
    assert {cell.params.control for cell in ours if cell.row.startswith("PMPD-")} == {"learned", "static"}
