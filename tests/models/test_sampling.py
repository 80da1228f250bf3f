"""What is drawn, and what a seed changes: sampled sequences, crops of calibration text, whole compressed models."""

import shutil

import dag
import pytest
import tiny
import torch

from repro.baselines import gptq
from repro.data import corpora
from repro.jobs import compress
from repro.jobs.target import Target
from repro.methods import spear
from repro.models.sampling import sample
from repro.recipes.recipe import parse, with_seed
from repro.specs import scale as scales
from repro.store.job import distinct
from repro.workflow import runner

SPEAR = "samples=4, tokens=12, cka_samples=2, batch=2, epochs1=1, epochs2=1, budget=0.2"

# --- sequences --------------------------------------------------------------------------------------------------------


def test_one_seed_gives_the_same_sequences_and_two_do_not():
    model = tiny.model("llama")
    first, again, other = (sample(model, 5, 12, seed) for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.shape == (5, 12) and first.dtype == torch.int64 and (first[:, 0] == 0).all()


def test_tokens_come_as_often_as_the_model_says():
    model = tiny.model("llama")
    for temperature in (1.0, 0.5):
        drawn = sample(model, 20_000, 2, 0, temperature)[:, 1]
        with torch.no_grad():
            want = torch.softmax(model(torch.zeros(1, 1, dtype=torch.int64)).logits[0, 0] / temperature, -1)
        shares = drawn.bincount(minlength=len(want)) / len(drawn)
        assert ((shares - want).abs() < 5 * (want / len(drawn)).sqrt() + 1e-4).all(), temperature


def test_sampling_with_a_cache_follows_the_whole_prefix():
    model = tiny.model("llama")
    cold = sample(model, 4, 10, 0, temperature=1e-4)  # the most likely token, so that the draw decides nothing
    with torch.no_grad():
        following = model(cold).logits.argmax(-1)
    assert torch.equal(cold[:, 1:], following[:, :-1])


def test_after_the_end_of_a_text_only_ends_follow():
    model = tiny.model("llama")
    free, stopped = (sample(model, 64, 40, 0, stop_at_eos=stop) for stop in (False, True))
    ended = (stopped == 1).int().cumsum(1) > 0
    assert ended.any() and (stopped[ended] == 1).all()
    width = stopped.shape[1]
    assert torch.equal(stopped[~ended], free[:, :width][~ended]), "until then nothing differs"


def test_spear_draws_its_sequences_with_its_seed():
    teacher, config = tiny.model("llama"), {"samples": 6, "tokens": 12, "cka_samples": 2}
    first, again, other = (spear.sequences(teacher, None, spear.Config(**config, seed=s)) for s in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    corpus = [spear.sequences(teacher, tiny.tokens(9), spear.Config(**config, source="corpus", seed=s)) for s in (0, 1)]
    assert torch.equal(*corpus), "a corpus is what it is"


# --- seeds of a recipe and of a job -----------------------------------------------------------------------------------


def test_a_seed_goes_to_the_steps_that_take_one_and_whose_text_names_none():
    drawn = parse("gptq-w4-pc + spear")
    assert with_seed(drawn, 0) == drawn and with_seed(drawn, 0).name == drawn.name
    (_, gptq), (_, spear_config) = with_seed(drawn, 3).config
    assert "seed" not in gptq and spear_config["seed"] == 3
    assert with_seed(parse("rtn-w4-pc + spear-seed=7"), 3).config[1][1]["seed"] == 7
    assert with_seed(parse("rtn-w4-pc"), 3).name == "rtn-w4-pc"


@pytest.fixture(scope="module")
def at(tmp_path_factory):
    """A scale with a tiny Llama whose calibration starts at seed 5, and its folder."""
    folder = tmp_path_factory.mktemp("seeds")
    facts = {"name": "tiny", "about": "a test", "models": {"m": str(dag.save_model(folder / "tiny-llama"))}}
    crops = {"corpus": "tiny-held-out", "sequences": 4, "length": 32, "seed": 5}
    return folder, scales.load(facts | {"corpora": {"wikitext2": "tiny-wikitext"}, "calibration": crops})


def built(at, recipe, seed):
    """The compressed model of a recipe under a seed, as bytes; made anew each time."""
    _, scale = at
    job = compress.job(Target(scale, scale.models["m"], recipe, seed))
    for each in distinct([job]):
        if each.kind == "compress":
            shutil.rmtree(each.folder, ignore_errors=True)
        if not runner.done(each):
            runner.run(each)
    return (job.folder / compress.OUTPUTS[0]).read_bytes()


def test_a_seed_declares_other_crops(at):
    _, scale = at
    jobs = [compress.job(Target(scale, scale.models["m"], "gptq-w4-pc", seed)) for seed in (0, 1)]
    assert [job.parsed_inputs()["calibration"]["seed"] for job in jobs] == [5, 6]
    assert [job.parsed_options()["calibration"]["seed"] for job in jobs] == [5, 6]
    assert jobs[0].id != jobs[1].id
    assert len({compress.job(Target(scale, scale.models["m"], "rtn-w4-pc", seed)).id for seed in (0, 1)}) == 1


@pytest.mark.parametrize("recipe", ["gptq-w3-pc", "awq-w3-pc", f"rtn-w3-pc + spear({SPEAR})"])
def test_two_seeds_give_two_models_and_one_seed_the_same_bytes(at, monkeypatch, recipe):
    monkeypatch.chdir(at[0])
    first, again, other = (built(at, recipe, seed) for seed in (0, 0, 1))
    assert first == again and first != other


def test_what_draws_nothing_has_one_model(at, monkeypatch):
    monkeypatch.chdir(at[0])
    assert built(at, "rtn-w3-pc", 0) == built(at, "rtn-w3-pc", 1)


def test_the_crops_are_those_of_the_seed(at, monkeypatch):
    """What reaches a step: the crops of the corpus that the scale's seed plus the target's draws."""
    monkeypatch.chdir(at[0])
    seen, apply = [], gptq.apply
    monkeypatch.setattr(gptq, "apply", lambda lm, data, config: seen.append(data) or apply(lm, data, config))
    for seed in (0, 1):
        built(at, "gptq-w4-pc", seed)
    _, scale = at
    job = compress.job(Target(scale, scale.models["m"], "gptq-w4-pc", 0))
    ids, _ = corpora.load_tokens(dict(job.needs)["calibration"].folder / "data.safetensors")
    for crops, seed in zip(seen, (5, 6), strict=True):
        assert torch.equal(crops, corpora.calibration(ids, 4, 32, seed))
