"""PMPD's schedulers: labels, rule, file, training and cell of the learned, search and cell of the static one."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from repro.core.errors import UserError
from repro.engine import head_files, pmpd
from repro.generation import train_pmpd as training
from repro.jobs.target import Target
from repro.methods.flexquant import order
from repro.methods.flexquant.config import Config
from repro.methods.flexquant.schedule import Controller
from repro.metrics import switching
from repro.metrics.switching import Switching
from repro.specs import scale as scales
from repro.specs import tables
from repro.store import observations
from repro.store.job import built_under, distinct
from repro.workflow import runner

RECIPE = "rtn-w4-g64"
SCHEDULE = "flexquant(path=[8, 4], window=0, layers=100000)"


def log(config, rule=None):
    """The switches that take effect in a text of 256 tokens."""
    controller = Controller(config, order.moves({}, ["a", "b", "c"], config), rule)
    controller.start([2.0])
    for token in range(255):
        controller.observe(2.0, token)
    return [switch for switch in controller.log if switch.step <= 255]


@pytest.mark.parametrize("point", pmpd.POINTS)
def test_a_chosen_point_switches_where_the_static_schedule_of_that_point_does(point):
    base = Config(path=[4, 3], order="model", layers=100000)
    static = replace(base, interval=point) if point else replace(base, window=0, threshold=1e30)
    result = log(replace(base, window=0), pmpd.rule_of(point))
    assert result == log(static) and len(result) == (0 if point == 255 else 3)
    if result:
        assert {switch.step for switch in result} == {point + 1}


def test_the_right_point_is_the_earliest_that_costs_little_more():
    high = np.ones(255)
    assert training.right_point(high, high * 1.005, 0.01) == 0
    late = high.copy()
    late[:85] += 1  # low bits cost early tokens alone
    assert training.right_point(high, late, 0.01) == 1
    assert training.right_point(high, high * 1.02, 0.01) == 2  # half a share of 170 tokens is within 1 %
    assert training.right_point(high, high * 9, 0.01) == 3


def test_a_training_tells_prompts_apart_whose_keys_do():
    generator = torch.Generator().manual_seed(0)
    examples = []
    for number in range(40):
        label = number % 2 * 3
        keys = torch.randn(6, 8, generator=generator)
        examples.append((keys, keys + 3 * (label - 1.5), label))
    scheduler, facts = training.train(examples, training.PmpdSettings(prompts=40, epochs=60, rate=1e-2))
    assert facts["held_out_right"] > 0.8 and facts["loss"][1] < facts["loss"][0]
    assert facts["labels"][1] == facts["labels"][2] == 0 and sum(facts["labels"]) == 32
    assert facts["held_out_most_frequent"] < 0.8
    keys, values, label = examples[1]
    assert int(scheduler(keys, values).argmax()) == label


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The command on pocket-3m between 8 and 4 bits, a few short prompts."""
    folder = tmp_path_factory.mktemp("pmpd")
    with pytest.MonkeyPatch.context() as patch, built_under(folder / "build"):
        patch.chdir(folder)
        patch.setattr(pmpd, "HEADS", folder)
        patch.setattr(training.corpora, "token_ids", lambda name, tokenizer: np.arange(900, dtype=np.int32) * 7 % 500)
        words = ["--model", "pocket-3m", "--recipe", RECIPE, "--path", "8", "4", "--device", "cpu"]
        training.main([*words, "--prompts", "5", "--length", "8", "--epochs", "2"])
    return folder / "pocket-3m-pmpd-8-4.safetensors"


def test_the_command_writes_a_small_file_with_its_card(trained):
    card = json.loads(trained.with_suffix(".json").read_text())
    assert card["recipes"] == ["rtn-w8-g64", "rtn-w4-g64"] and card["settings"]["prompts"] == 5
    assert trained.stat().st_size < training.MOST_BYTES and card["bytes"] < training.MOST_BYTES
    assert sum(card["labels"]) == 4 and 0 <= card["held_out_right"] <= 1


def test_a_file_that_does_not_fit_is_one_sentence(trained, tmp_path):
    fingerprint = json.loads(trained.with_suffix(".json").read_text())["fingerprint"]
    assert pmpd.load(trained, 64, fingerprint)
    with pytest.raises(UserError, match="the PMPD scheduler of another model \\(pocket-3m\\)"):
        pmpd.load(trained, 64, "other")
    for path, size in ((trained, 32), (tmp_path / "none", 64)):
        with pytest.raises(UserError, match="no PMPD scheduler"):
            pmpd.load(path, size, fingerprint)


def test_the_cell_decodes_each_prompt_to_its_own_point(trained, tmp_path, monkeypatch):
    """Points that the scheduler would choose are replaced by known ones; both runs of a prompt switch there."""
    at = scales.load(name="pocket").on("cpu")
    small = switching.Protocol(prompts=3, new_tokens=20, context=120, validation=1, together=3)
    target = Target(replace(at, protocols=at.protocols | {"switching": small}), "pocket-3m", RECIPE)
    params = Switching("agreement", schedule=SCHEDULE, control="learned")
    monkeypatch.setattr(pmpd, "HEADS", tmp_path)
    assert params.jobs(target) is None
    monkeypatch.setattr(pmpd, "HEADS", trained.parent)
    job = params.jobs(target)["texts"]
    assert json.loads(job.inputs)["scheduler"] == head_files.identity(trained) and "signal" not in dict(job.needs)
    assert str(trained.parent) not in job.options, "the file lies elsewhere on every machine"
    with monkeypatch.context() as other, pytest.raises(UserError, match="not the PMPD scheduler that the job was"):
        other.setattr(head_files, "identity", lambda path: "another")
        Switching.run(job, {}, tmp_path, {})
    points = []

    def chosen(scheduler, model, prompts):
        points.append([int(scheduler(*each).argmax()) for each in pmpd.features(model, prompts)])
        return [0, 6, 255]

    monkeypatch.setattr(pmpd, "chosen", chosen)
    with built_under(tmp_path):
        (job,) = params.jobs(target).values()
        for each in distinct([job]):
            if not runner.done(each):
                runner.run(each)
        series = observations.load(job.folder / observations.FILE).series
    assert len(points) == 1 and len(points[0]) == 3
    assert set(series["log 0"].values) == set(series["along log 0"].values) == {1.0}
    assert set(series["log 1"].values) == {7.0} and "log 2" not in series
    bits = series["bits"].values
    assert bits[0] == 4 and bits[2] == 8 and bits[1] == pytest.approx((6 * 8 + 13 * 4) / 19)


# --- the static scheduler ---------------------------------------------------------------------------------------------

POINTS = (0, 4, 9, 19)


@pytest.fixture(scope="module")
def static(tmp_path_factory):
    """From a score of each point to what a static cell holds, whose texts on validation prompts it gives."""
    folder = tmp_path_factory.mktemp("static")
    at = scales.load(name="pocket").on("cpu")
    small = switching.Protocol(prompts=3, new_tokens=20, context=200, validation=1, together=2, searched=5)

    def observed(schedule=SCHEDULE, control="static", prompts="gsm8k", scores=None, tested=3):
        protocols = at.protocols | {"switching": replace(small, prompts=tested)}
        target = Target(replace(at, protocols=protocols), "pocket-3m", RECIPE)
        params = Switching("rougeL", schedule=schedule, control=control, prompts=prompts)
        with pytest.MonkeyPatch.context() as patch, built_under(folder / ("made up" if scores else "searched")):
            patch.setattr(pmpd, "POINTS", POINTS)
            if scores:
                patch.setattr(switching, "_score_of_point", lambda *words: scores[POINTS.index(words[4])])
            job = params.jobs(target)["texts"]
            for each in distinct([job]):
                if not runner.done(each) or (scores and each is job):
                    runner.run(each)
            return job, observations.load(job.folder / observations.FILE).series

    return observed


@pytest.mark.parametrize(
    "scores, point",
    [([1.0, 3.0, 2.0, 0.0], 4), ([0.0, 0.0, 0.0, 0.0], 0), ([1.0, 2.0, 5.0, 5.0], 9), ([0.0, 1.0, 2.0, 3.0], 19)],
)
def test_the_static_point_is_the_best_on_validation_texts_of_equal_ones_the_earliest(static, scores, point):
    _, series = static(scores=scores)
    assert series["rougeL by point"].values.tolist() == scores
    for prompt in range(3):
        steps = series[f"log {prompt}"].values if f"log {prompt}" in series else np.asarray([])
        assert set(steps) == ({point + 1.0} if point < 19 else set())
        assert series["bits"].values[prompt] == pytest.approx((point * 8 + (19 - point) * 4) / 19)


def test_a_static_cell_is_the_schedule_of_its_point(static):
    """Nothing replaced: the search decodes and scores itself, and the texts are those of a switch at that point."""
    job, series = static()
    options = job.parsed_options()
    best = POINTS[int(np.argmax(series["rougeL by point"].values))]
    at_point = f"interval={best}" if best else "window=0, threshold=1e30"
    _, other = static(f"flexquant(path=[8, 4], {at_point}, layers=100000)", control="")
    for name in ("rougeL", "KL", "bits", "agreement", *(f"tokens {prompt}" for prompt in range(3))):
        assert series[name].values.tolist() == other[name].values.tolist(), name
    searched, tested = (switching._prompts(options | {"validating": each}) for each in (True, False))
    assert len(searched) == 5 and len(tested) == 3 and not {p.id for p in searched} & {p.id for p in tested}


def test_the_search_scores_the_texts_of_each_point_on_its_own_prompts(static):
    """Each score is the mean over prompts 3 to 7 of a cell of eight prompts that switches at that point."""
    scores = static()[1]["rougeL by point"].values
    for point, score in zip(POINTS, scores):
        at_point = f"interval={point}" if point else "window=0, threshold=1e30"
        _, other = static(f"flexquant(path=[8, 4], {at_point}, layers=100000)", control="", tested=8)
        assert other["rougeL"].values[3:].mean() == pytest.approx(score, rel=1e-6)
    assert len(set(scores)) > 1


def test_a_set_without_references_is_one_sentence(static):
    with pytest.raises(UserError, match="static is searched by a score, and longwriter-en has no references"):
        static(prompts="longwriter-en")


def test_translations_are_searched_by_bleu_of_all_texts():
    counts = {"length": 5.0, "reference length": 5.0}
    for n, (matches, grams) in enumerate(((4, 5), (3, 4), (2, 3), (1, 2)), 1):
        counts |= {f"matches {n}": float(matches), f"n-grams {n}": float(grams)}
    mean = {"rougeL": 7.0} | {f"bleu {name}": count for name, count in counts.items()}
    assert switching.SEARCHED == {"iwslt": "bleu"} and switching._task_score(mean, "rougeL") == 7.0
    assert switching._task_score(mean, "bleu") == pytest.approx(100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25)


def test_what_the_search_takes_decides_its_job_alone(static):
    """How many prompts it searches on is declared by a static job, and by no other."""
    at = scales.load(name="pocket").on("cpu")

    def job(searched, control, schedule=SCHEDULE):
        protocol = switching.Protocol(searched=searched)
        target = Target(replace(at, protocols=at.protocols | {"switching": protocol}), "pocket-3m", RECIPE)
        return Switching("KL", schedule=schedule, control=control, prompts="gsm8k").jobs(target)["texts"]

    assert job(5, "static").id != job(6, "static").id
    assert job(5, "").id == job(6, "").id
    assert set(dict(job(5, "static").needs)) == {"full", "w8", "w4"}


def test_learned_and_static_take_two_widths_and_no_window():
    for schedule in ("flexquant(path=[4, 3])", "flexquant(window=0)", "flexquant(path=[4, 3], window=0, interval=9)"):
        for control in ("learned", "static"):
            with pytest.raises(UserError, match=f"{control} takes two widths"):
                Switching("KL", schedule=schedule, control=control)


def test_table_1_has_the_static_row():
    cells = {(c.row, c.col, c.model): c for c in tables.cells("flexquant", "1")}
    for model, path in (("Vicuna-7B", "[3, 2]"), ("MobileLLaMA-1.4B", "[4, 3]"), ("Zephyr-3B", "[4, 3]")):
        params = cells["PMPD-Static", "IWSLT BLEU", model].params
        assert params.control == "static" and f"path={path}" in params.schedule and params.show == "bleu"


def test_table_1_has_the_learned_row():
    cells = {(c.row, c.col, c.model): c for c in tables.cells("flexquant", "1")}
    learned = cells["PMPD-Learned", "CNN/DM Rouge-L", "Vicuna-7B"]
    assert learned.params.control == "learned" and "path=[3, 2]" in learned.params.schedule
    assert cells["PMPD-Learned", "KL, CNN/DM", "Vicuna-7B"].params.control == "learned"
    assert cells["FlexQuant", "CNN/DM Rouge-L", "Vicuna-7B"].params.control == ""
