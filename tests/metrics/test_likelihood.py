"""Log probability of right answers: known answers by hand, what is kept, and what is asked wrongly."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from repro import models
from repro.core.errors import UserError
from repro.data import corpora, requests, tasks
from repro.data import task_scores as scoring
from repro.jobs.target import Target
from repro.metrics import accuracy, likelihood, zeroshot
from repro.specs import scale as scales
from repro.stats.quantity import compose
from repro.store.observations import Observations, Series
from repro.workflow.workflow import Workflow

LOGS = np.log([0.1, 0.3, 0.2, 0.2])  # of four answers, of all texts


def right(logliks, gold):
    """The six columns of an item with answers of one length."""
    same = np.ones(len(logliks))
    return scoring._right(np.asarray(logliks), np.zeros(len(logliks), bool), np.zeros(1, bool), same, gold)


def test_the_probability_among_the_choices_by_hand():
    *_, nll, choice, _ = right(LOGS, 1)
    assert np.exp(choice) == pytest.approx(0.3 / 0.8) and np.exp(-nll) == pytest.approx(0.3)
    shifted = right(LOGS - 5, 1)
    assert shifted[4] == pytest.approx(choice) and shifted[3] == pytest.approx(nll + 5)
    assert np.exp(right([-2.0] * 4, 3)[4]) == pytest.approx(1 / 4), "chance"


def test_one_answer_has_an_nll_alone():
    *_, nll, choice, _ = right([-1.5], -1)
    assert nll == 1.5 and np.isnan(choice)


@pytest.fixture
def target():
    return Target(scales.load({"likelihood": {"tasks": ["piqa", "cloze-far"]}}, "pocket"), "pocket-3m", "rtn-w4-pc")


def test_one_job_of_its_own_scores_all_its_tasks(target):
    """Stored accuracies keep their declared inputs: `zeroshot` does not know of it."""
    params = likelihood.Likelihood(("piqa",))
    (job,) = params.jobs(target).values()
    assert job.kind == "likelihood" and job.parsed_options()["tasks"] == ["piqa", "cloze-far"]
    assert likelihood.Likelihood(("cloze-far",), "nll").jobs(target)["items"].id == job.id
    before = target.scale.protocols["zeroshot"]
    assert job.id not in str(zeroshot.ZeroShot(("piqa",)).jobs(target)) and "cloze-far" not in before.tasks
    values = Series(np.array([-0.5, -0.7, -0.1, -1.7]), "items", "lm-eval: piqa")
    kept = {"piqa/choice": values, "piqa/correct": values}
    series = params.series({"items": Observations(kept, {})}, target)
    assert list(series) == ["piqa/choice"] and series["piqa/choice"].group == "lm-eval: piqa"
    assert series["piqa/choice"].values.tolist() == [-0.75]
    right = likelihood.Likelihood(("piqa",), "correct").series({"items": Observations(kept, {})}, target)
    assert right["piqa/correct"].values.tolist() == values.values.tolist(), "of accuracy every item is stored"
    assert params.value({"piqa/choice": -0.6}) == pytest.approx(-0.6)
    assert likelihood.Likelihood(("boolq",)).jobs(target) is None, "the scale does not measure it"


@pytest.mark.parametrize("count", [8, 1175, 2])
def test_what_is_stored_has_the_mean_and_the_interval_of_all_items(count):
    """Of 8 items two values, of 1175 not all of as many items."""
    items = np.random.default_rng(7).normal(-4, 2, count)
    stored = likelihood.of_neighbours(items)
    assert len(stored) == max(1, count // 4)
    assert stored.mean() == pytest.approx(items.mean(), abs=likelihood.STEP)
    assert np.array_equal(stored * 1024, np.round(stored * 1024)), "in steps of 2^-10 nats"
    if count == 8:
        assert stored == pytest.approx(items.reshape(2, 4).mean(1), abs=likelihood.STEP)
    if count == 1175:
        errors = [values.std(ddof=1) / np.sqrt(len(values)) for values in (items, stored)]
        assert errors[1] == pytest.approx(errors[0], rel=0.1)


def test_what_is_kept_of_an_item(monkeypatch, tmp_path, target):
    """LAMBADA's items have no choice; all else three columns."""
    frame = pd.DataFrame({"correct": [1, 0], "nll": [2.0, 3.0], "choice": [-0.1, -2.0]})
    alone = frame.assign(choice=np.nan)
    monkeypatch.setattr(zeroshot.compress, "load", lambda *words: SimpleNamespace(model=None))
    monkeypatch.setattr(accuracy.stored, "load", lambda path: SimpleNamespace(meta={"harness": "0"}))
    for answer, names in ((frame, ["correct", "choice", "nll"]), (alone, ["correct", "nll"])):
        monkeypatch.setattr(accuracy.scoring, "run", lambda *words, answer=answer: answer)
        saved = {}
        monkeypatch.setattr(zeroshot.observations, "save", lambda path, series, origin, to=saved: to.update(series))
        job = SimpleNamespace(parsed_options=lambda: {"tasks": ["piqa"], "limit": None, "tokens": 1})
        likelihood.Likelihood.run(job, {"requests piqa": tmp_path}, tmp_path, {})
        kept = [name for name, one in saved.items() if len(one.values)]
        assert kept == [f"piqa/{name}" for name in names]


def test_the_change_is_paired_by_item():
    """Items differ much more than a recipe moves them."""
    items = np.random.default_rng(3).normal(-1, 0.8, 400)
    flow = Workflow(scales.load(name="pocket"), stored=True)
    cell = next(c for c in flow.cells("spear", "19") if c.row.startswith("RTN") and c.stand_in)
    cell = dataclasses.replace(cell, measure="likelihood", params=likelihood.Likelihood(("arc_easy",)))
    full, low = (Series(items - shift, "items", "arc") for shift in (0.0, 0.05))
    both = {"f": flow.of_series(cell, [{"c": full}]), "q": flow.of_series(cell, [{"c": low}])}

    change = compose(cell.params.against, both).interval()
    assert (change.value, change.lo, change.hi) == pytest.approx((-0.05, -0.05, -0.05))
    assert both["q"].interval().hi - both["q"].interval().lo > 0.1 and change.covers == "items only"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((("lambada_openai",),), "lambada_openai has one answer and no choice; show its nll"),
        (((),), "tasks is empty; name one or more"),
        ((("piqua",), "nll"), "did you mean 'piqa'"),
        ((("piqa",), "choice", True), "percent is of right answers; show them, not the choice"),
    ],
)
def test_bad_input_is_one_sentence(words, message):
    with pytest.raises(UserError) as error:
        likelihood.Likelihood(*words)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_lambada_has_an_nll():
    assert likelihood.Likelihood(("lambada_openai",), "nll").unit == "nats"
    limits = {show: likelihood.Likelihood(("piqa",), show).limits for show in ("choice", "nll", "correct")}
    assert limits == {"choice": (-np.inf, 0), "nll": (0, np.inf), "correct": (0, 1)}


def test_right_answers_in_percent():
    params = likelihood.Likelihood(("piqa", "winogrande"), "correct", percent=True, unit="%")
    assert params.value({"piqa/correct": 0.5, "winogrande/correct": 0.25}) == pytest.approx(37.5)
    assert params.limits == (0, 100)


def test_percent_is_declared_where_it_is_asked_for():
    """Rows that were stored before it was an option stand."""
    flow = Workflow(scales.load(name="pocket"), stored=True)
    cell = next(c for c in flow.cells("spear", "19") if c.metric == "BLiMP" and c.stand_in)
    assert "percent" not in flow.inputs(cell)["params"]
    in_percent = dataclasses.replace(cell, params=dataclasses.replace(cell.params, percent=True))
    assert flow.inputs(in_percent)["params"]["percent"] is True


# --- tasks ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cloze():
    """The records of both clozes, and the held-out text's documents."""
    near = [record for _, record in _records("cloze-near")]
    far = [record for _, record in _records("cloze-far")]
    return {True: near, False: far}


def _records(name):
    (splits,) = tasks.items(tasks.TASKS[name]).values()
    return splits["validation"]


def test_a_cloze_asks_how_a_paragraph_of_the_held_out_text_goes_on(cloze):
    documents = [" ".join(part.split()) for part in corpora.text("held-out").split("\n\n")]
    for near, records in cloze.items():
        assert 900 < len(records) <= 1000
        for one in records[::50]:
            right = f"{one['query']} {one['choices'][one['label']]}"
            (home,) = {number for number, text in enumerate(documents) if right in text}
            others = [text for i, text in enumerate(one["choices"]) if i != one["label"]]
            assert len(one["choices"]) == 4 and {len(text.split()) for text in one["choices"]} == {12}
            assert all((text in documents[home]) == near for text in others)
        labels = [one["label"] for one in records]
        assert all(0.2 < labels.count(i) / len(labels) < 0.3 for i in range(4)), "no position is the answer"


def test_a_cloze_is_the_same_every_time(cloze):
    again = [one for _, one in _records("cloze-near")]
    assert again == cloze[True] and again[0] != cloze[False][0]


def test_blimp_is_lm_evals_task_by_paradigm(tokenizer):
    """A prompt of BOS alone, two sentences, the good one first; as lm-eval names and scores it."""
    made = requests.build("blimp-100", None, tokenizer, 134)
    assert made.meta["metric"] == "acc" and len(json.loads(made.meta["subjects"])) == 67
    assert made.gold.tolist() == [0] * 134 and made.answers.tolist() == [2] * 134
    first = np.split(made.answer, np.cumsum(made.answer_size)[:-1])[:2]
    record = tasks.items(tasks.TASKS["blimp-100"])["adjunct_island"]["validation"][0][1]
    texts = [tokenizer.decode(ids.tolist()) for ids in first]
    assert [text.strip() for text in texts] == [record["sentence_good"], record["sentence_bad"]]


@pytest.fixture
def tokenizer():
    return models.tokenizer("pocket-3m")
