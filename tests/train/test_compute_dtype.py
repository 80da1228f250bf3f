"""What is trained computes in float32 on a CPU, in the recipe's dtype on a GPU; recipe and job stay the same."""

import json

import dag
import pytest

from repro.baselines import group_qat
from repro.jobs import compress
from repro.jobs.target import Target
from repro.methods import bitbybit
from repro.recipes import recipe
from repro.specs import scale
from repro.workflow import runner

TRAINED = "group_qat(tokens=256, batch=2, epochs=0, g=64)"


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dag.save_model(tmp_path / "tiny-llama")
    tiny = dag.SCALE | {"models": {"Llama-3.2-1B": "tiny-llama"}}
    return lambda text, **settings: Target(scale.load(tiny | settings), "tiny-llama", text)


@pytest.fixture
def seen(monkeypatch):
    """The configs that steps are applied with."""
    configs, apply = [], group_qat.apply
    monkeypatch.setattr(group_qat, "apply", lambda lm, ids, config: configs.append(config) or apply(lm, ids, config))
    return configs


def test_every_trained_step_is_resolved_and_the_others_are_left_alone():
    steps = recipe.parse("gptq-w4-g64 + bitbybit + e2e_qp").steps
    there, here = recipe.on_device(steps, "cuda"), recipe.on_device(steps, "cpu")
    assert there == steps and here[0] is steps[0]
    assert [step.config.compute for step in here[1:]] == ["float32", "float32"]
    assert recipe.computed_in(steps, "cpu") == {"bitbybit": "float32", "e2e_qp": "float32"}
    assert recipe.computed_in(steps, "cuda") == {"bitbybit": "bfloat16", "e2e_qp": "bfloat16"}
    assert recipe.computed_in(steps[:1], "cpu") == {}


def test_every_config_that_names_it_takes_float32():
    named = [name for name, module in recipe.STEPS.items() if hasattr(module.Config, "compute")]
    assert len(named) > 5 and "bitbybit" in named
    for name in named:
        assert recipe.computed_in(recipe.parse(name).steps, "cpu") == {name: "float32"}


def test_a_job_trains_in_float32_and_says_so_beside_its_result(target, seen):
    job = compress.job(target(TRAINED))
    for each in job.every():
        runner.run(each)
    assert [config.compute for config in seen] == ["float32"]
    assert dict(job.parsed_inputs()["steps"])["group_qat"]["compute"] == "bfloat16"
    assert "compute" not in job.parsed_options()["recipe"], "the recipe's name does not change"
    assert json.loads(runner.origin(job)["environment"])["compute"] == {"group_qat": "float32"}
    tokens = dict(job.needs)["calibration"]
    assert "compute" not in json.loads(runner.origin(tokens)["environment"])


def test_a_job_that_trains_has_threads_of_its_own(target):
    """Stored results are found whatever they are (test_scale.py)."""
    for settings, trained, rounded in (
        ({}, 1, 1),
        ({"training_threads": 2}, 2, 1),
        ({"threads": 3, "training_threads": 2}, 3, 3),
    ):
        for text, threads in ((TRAINED, trained), ("rtn-w4-pc", rounded)):
            job = compress.job(target(text, **settings))
            assert job.parsed_options()["threads"] == job.parsed_inputs()["threads"] == threads
    assert scale.load().training_threads == 2


def test_the_declared_inputs_of_a_job_name_the_recipes_dtype():
    """A stored result was declared so, on whichever device it ran."""
    config = dict(recipe.parse("bitbybit").config)["bitbybit"]
    assert config["compute"] == bitbybit.Config().compute == "bfloat16"
