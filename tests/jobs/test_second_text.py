"""A text that a step reads besides the calibration text: a need of its own, declared, apart from what is scored."""

from dataclasses import replace

import dag
import pytest
from tiny_results import refusal

from repro.data import corpora
from repro.jobs import compress, tokens
from repro.jobs.target import Target
from repro.metrics.perplexity import Perplexity
from repro.recipes import recipe
from repro.specs import scale
from repro.workflow import runner

SPLIT = "bitbybit(tokens=256, batch=2, epochs=0, split_text={})"
TEXTS = {
    "calibration_texts": {
        "wikitext2": "tiny-wikitext",
        "redpajama": {"corpus": "tiny-held-out", "sequences": 4, "length": 64},
    }
}


@pytest.fixture
def target(tmp_path, monkeypatch):
    """A target of a tiny model under a recipe."""
    monkeypatch.chdir(tmp_path)
    dag.save_model(tmp_path / "tiny-llama")
    tiny = dag.SCALE | TEXTS | {"models": {"Llama-3.2-1B": "tiny-llama"}}
    return lambda text: Target(scale.load(tiny), "tiny-llama", text)


def index_of(job):
    """The columns of the first layer of a compressed model."""
    for each in job.every():
        runner.run(each)
    lm = compress.load(job.parsed_options(), job.folder)
    return next(iter(lm.weights.values())).index.tolist()


def test_channels_are_chosen_on_a_text_that_the_job_needs_and_declares(target):
    plain, other = (
        compress.job(target(text)) for text in (SPLIT.replace(", split_text={}", ""), SPLIT.format("wikitext2"))
    )
    declared = other.parsed_inputs()["calibration"]
    assert declared.pop("second") == {"wikitext2": corpora.identifier("tiny-wikitext")}
    assert declared == plain.parsed_inputs()["calibration"] and plain.id != other.id
    needs = dict(other.needs)
    assert needs["text tiny-wikitext"].id == tokens.job(target("fp16"), "tiny-wikitext").id
    assert needs["calibration"].id == dict(plain.needs)["calibration"].id and len(dict(plain.needs)) == 1
    assert index_of(plain) != index_of(other)


def test_a_step_after_it_needs_the_text_through_what_it_starts_from(target):
    job = compress.job(target(SPLIT.format("wikitext2").replace("(", "(any_precision, ") + " + sliced-w4"))
    assert "text tiny-wikitext" in dict(dict(job.needs)["start"].needs)
    assert job.parsed_inputs()["calibration"]["second"] == {"wikitext2": corpora.identifier("tiny-wikitext")}


def test_the_field_is_no_part_of_a_recipe_without_it():
    """Results that were accepted before it came are found."""
    assert "split_text" not in dict(recipe.parse("bitbybit").config)["bitbybit"]
    assert dict(recipe.parse(SPLIT.format("c4")).config)["bitbybit"]["split_text"] == "c4"
    assert dict(recipe.parse("bitbybit").config)["bitbybit"]["split_metric"] == "product"


def test_names_are_those_of_the_scale_or_of_a_corpus(target):
    at = target("fp16").scale
    assert at.second_text("redpajama") == "tiny-held-out"
    assert at.second_text("tiny-c4-docs") == "tiny-c4-docs"
    message = refusal(lambda: compress.job(target(SPLIT.format("wikitext3"))))
    assert message.startswith("scale tiny: unknown second text 'wikitext3'") and "wikitext2" in message


def test_a_text_that_is_scored_chooses_no_channels(target):
    message = refusal(lambda: Perplexity("c4").jobs(target(SPLIT.format("tiny-c4-docs"))))
    assert "is calibrated on tiny-c4-docs, and perplexity is measured on tiny-c4-docs" in message
    assert Perplexity("c4").jobs(target(SPLIT.format("wikitext2")))


def test_it_is_read_next_to_a_text_of_ones_own(target, tmp_path):
    (tmp_path / "mine.txt").write_text("one two three " * 300)
    at = target(SPLIT.format("wikitext2"))
    calibration = replace(at.scale.calibration, corpus=str(tmp_path / "mine.txt"), length=64, from_start=True)
    job = compress.job(replace(at, scale=replace(at.scale, calibration=calibration)))
    declared = job.parsed_inputs()["calibration"]
    assert declared["second"] == {"wikitext2": corpora.identifier("tiny-wikitext")} and declared["from_start"]
    assert index_of(job)
