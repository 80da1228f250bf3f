"""EAGLE-2: the head in the engine against the module that is trained, lossless texts, a tiny training, its command."""

import json

import pytest
import torch

from repro import models
from repro.core.errors import UserError
from repro.engine import eagle, head_files
from repro.engine.speculating import Speculating
from repro.engine.step import Cache, run_of
from repro.engine.weights import decoder
from repro.generation import Engine
from repro.generation import train_eagle as training
from repro.jobs.target import Target
from repro.metrics import acceptance
from repro.models.lowbit import LowBitModel
from repro.specs import scale as scales
from repro.store import observations

CPU = torch.device("cpu")
PROMPT = list(range(5, 30))
CONFIG = eagle.Eagle2(size=16, depth=4, top_k=4)
FEW = training.EagleSettings(steps=12, batch=4, length=32, warm_up=2, rate=3e-3)


@pytest.fixture(scope="module")
def model():
    """pocket-3m in Transformers' form."""
    return models.load("pocket-3m", "cpu")


@pytest.fixture(scope="module")
def trained(model):
    """A head after a few steps on text of few tokens, and its losses."""
    ids = torch.arange(2000) * 7 % 50 + 5
    return training.train(model, ids, FEW, lambda line: None)


@pytest.fixture(scope="module")
def fitted(model, trained):
    """The head in the engine, and its target."""
    target = decoder(LowBitModel(model), 128 + CONFIG.nodes, CPU, torch.float32)
    return target, eagle.FittedHead(trained[0], target)


def test_the_engines_head_is_the_trained_one(model, trained, fitted):
    target, head = fitted
    rows = torch.tensor([PROMPT])
    states = model.base_model(rows).last_hidden_state[0]
    with torch.no_grad():
        wanted = trained[0](states[None, :-1], model.get_input_embeddings()(rows[:, 1:]))[0]
    cache = Cache(head.decoder, 1)
    ids = rows[0, 1:]
    first = head.states(cache, run_of(ids[:10], 0, 0), states[:10])  # in two parts, the second over the first's cache
    second = head.states(cache, run_of(ids[10:], 0, 10), states[10:-1])
    assert torch.allclose(torch.cat([first, second]), wanted, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_texts_are_the_targets_own(fitted, temperature):
    target, head = fitted
    engine = Speculating("pocket-3m", target, head, CONFIG)
    plain = Engine.load("pocket-3m", context=128, dtype="float32", device="cpu")
    how = {"temperature": temperature, "seed": 3}
    for prompt in (PROMPT, PROMPT[:9]):
        text = next(engine.generate([prompt], 20, **how)).tokens
        assert text == next(plain.generate([prompt], 20, **how)).tokens
    assert engine.context == 128


def test_the_heads_cache_holds_the_targets_states(model, fitted):
    """After a text, its entries are those of a fresh pass over the whole text."""
    target, head = fitted
    engine = Speculating("pocket-3m", target, head, CONFIG)
    text = next(engine.generate([PROMPT], 20, eos=False)).tokens
    drafter = engine.batch.drafter
    whole = torch.tensor([*PROMPT, *text[:18]])
    kept = drafter.cache.keys[0, 0, :, : len(whole) - 1].clone()
    states = model.base_model(whole[None]).last_hidden_state[0].detach()
    fresh = Cache(head.decoder, 1)
    head.states(fresh, run_of(whole[1:], 0, 0), states[:-1])
    assert torch.allclose(kept, fresh.keys[0, 0, :, : len(whole) - 1], atol=1e-3)


def test_a_perfect_head_is_accepted_to_the_last_level(fitted, monkeypatch):
    """A head that gives the target's own states: six levels and the bonus, with the paper's tree."""
    target, head = fitted
    config = eagle.Eagle2()
    wide = decoder(LowBitModel(models.load("pocket-3m", "cpu")), 128 + config.nodes, CPU, torch.float32)
    engine = Speculating("pocket-3m", wide, eagle.FittedHead(_untrained(), wide), config)
    plain = Engine.load("pocket-3m", context=128, dtype="float32", device="cpu")
    text = next(plain.generate([PROMPT], 40, eos=False)).tokens
    whole = [*PROMPT, *text]

    def perfect(self, tokens, numbers, parents):
        logits = torch.zeros(len(numbers), len(wide.embedding))
        for row, position in enumerate((tokens.positions + 2).tolist()):  # the cache is one token short
            logits[row, whole[position] if position < len(whole) else 0] = 50
        return logits

    monkeypatch.setattr(eagle.EagleDrafter, "evaluate", perfect)
    assert next(engine.generate([PROMPT], 29, eos=False)).tokens == text[:29]
    assert engine.batch.lengths[1:] == [7] * 4 and len(engine.batch.drafter.tree.ids) == 60


def _untrained():
    torch.manual_seed(0)
    return eagle.EagleHead(models.load("pocket-3m", "cpu"))


def test_training_lowers_the_loss_and_repeats_itself(model, trained):
    head, losses = trained
    assert len(losses) == 12 and losses[-1] < 0.8 * losses[0]
    again, same = training.train(model, torch.arange(2000) * 7 % 50 + 5, FEW, lambda line: None)
    assert same == losses and all(torch.equal(a, b) for a, b in zip(head.trained().values(), again.trained().values()))


def test_the_loss_is_that_of_the_paper_on_one_token(model):
    head = _untrained()
    rows = torch.tensor([[5, 6]])
    states = model.base_model(rows).last_hidden_state[0].detach()
    guess = head(states[None, :1], model.get_input_embeddings()(rows[:, 1:]))[0, 0]
    difference = (guess - states[1]).abs()
    distance = torch.where(difference < 1, difference.square() / 2, difference - 0.5).mean()
    chances = model.lm_head(states[1]).softmax(0)
    entropy = -(chances * model.lm_head(guess).log_softmax(0)).sum()
    loss = training.loss_of(model, head, rows, 0.0, 0.1)
    assert loss.item() == pytest.approx((distance + 0.1 * entropy).item(), rel=1e-5)


@pytest.fixture
def written(trained, tmp_path):
    """A head's file."""
    path = tmp_path / "pocket-3m-eagle2.safetensors"
    training.write(path, "pocket-3m", trained[0], {"held_out_top1_agreement": 0.5})
    return path


def test_a_file_gives_back_the_head_in_16_bits(model, trained, written):
    loaded = eagle.load(written, model, models.fingerprint("pocket-3m"))
    for name, tensor in trained[0].trained().items():
        assert torch.equal(loaded.trained()[name], tensor.half().float())
    assert json.loads(written.with_suffix(".json").read_text())["model"] == "pocket-3m"
    assert written.stat().st_size < training.MOST_BYTES


def test_what_is_not_this_models_head_is_one_sentence(model, written, tmp_path):
    with pytest.raises(UserError, match="the draft head of another model \\(pocket-3m\\)"):
        eagle.load(written, model, "other")
    with pytest.raises(
        UserError, match="no draft head; train one with python -m repro.generation.train_eagle --model mine"
    ):
        eagle.load(tmp_path / "mine-eagle2.safetensors", model, "it")
    written.write_bytes(b"no safetensors")
    with pytest.raises(UserError, match="not a draft head"):
        eagle.load(written, model, "it")


def test_a_file_too_large_for_the_repository_is_not_written(monkeypatch, tmp_path):
    monkeypatch.setattr(head_files, "HEADS", tmp_path)
    with pytest.raises(UserError, match="16 bytes; the repository takes 15 of it, name another --out"):
        head_files.write(tmp_path / "x.safetensors", "eagle2", "pocket-3m", {"w": torch.zeros(8)}, {}, 15)
    assert not list(tmp_path.iterdir())
    assert head_files.write(tmp_path / "x.safetensors", "eagle2", "pocket-3m", {"w": torch.zeros(8)}, {}, 16) == 16


def test_the_acceptance_cell_takes_a_head_that_is_there(written, monkeypatch, tmp_path):
    settings = {"acceptance": {"prompts": 1, "tokens": 5}}
    target = Target(scales.load(settings, name="pocket").on("cpu"), "pocket-3m", "fp16")
    params = acceptance.Acceptance("gsm8k", draft="eagle2")
    monkeypatch.setattr(eagle, "HEADS", tmp_path / "nothing")
    assert params.jobs(target) is None
    monkeypatch.setattr(eagle, "HEADS", written.parent)
    made = params.jobs(target)["prompts"]
    assert json.loads(made.inputs)["draft_head"] == head_files.identity(written)
    acceptance.Acceptance.run(made, {}, tmp_path, observations.origin(made, {}))
    assert observations.load(tmp_path / observations.FILE).series["tokens"].values[0] >= 5
    assert params.limits == (1, 7)


def test_a_job_with_a_head_runs_on_another_machine_that_has_the_same(written, monkeypatch, tmp_path):
    """A file of jobs names no path of the machine that wrote it, and another head is refused."""
    settings = {"acceptance": {"prompts": 1, "tokens": 5}}
    target = Target(scales.load(settings, name="pocket").on("cpu"), "pocket-3m", "fp16")
    monkeypatch.setattr(eagle, "HEADS", written.parent)
    made = acceptance.Acceptance("gsm8k", draft="eagle2").jobs(target)["prompts"]
    assert str(written.parent) not in json.dumps(made.to_json())
    there = tmp_path / "there"
    there.mkdir()
    monkeypatch.setattr(eagle, "HEADS", there)
    moved = there / written.name
    with pytest.raises(UserError, match="not the draft head that the job was written with"):
        acceptance.Acceptance.run(made, {}, tmp_path, observations.origin(made, {}))
    moved.write_bytes(written.read_bytes() + b" ")
    with pytest.raises(UserError, match="not the draft head that the job was written with"):
        acceptance.Acceptance.run(made, {}, tmp_path, observations.origin(made, {}))
    moved.write_bytes(written.read_bytes())
    acceptance.Acceptance.run(made, {}, tmp_path, observations.origin(made, {}))
    assert observations.load(tmp_path / observations.FILE).series["tokens"].values[0] >= 5


def test_the_command_trains_and_writes(tmp_path, monkeypatch, capsys):
    ids = (torch.arange(3000) * 11 % 90 + 5).int().numpy()
    monkeypatch.setattr(training.corpora, "token_ids", lambda name, tokenizer: ids)
    out = tmp_path / "head.safetensors"
    words = ["--model", "pocket-3m", "--out", str(out), "--steps", "2", "--batch", "2", "--length", "16"]
    training.main([*words, "--device", "cpu"])
    facts = json.loads(out.with_suffix(".json").read_text())
    assert facts["trained_tokens"] == 64 and 0 <= facts["held_out_top1_agreement"] <= 1 and len(facts["losses"]) == 2
    assert "agrees with the target on" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="steps is 0; it must be 1 or more"):
        training.main([*words[:-4], "--steps", "0"])


def test_a_deep_tree_has_room_for_what_it_expands():
    assert (eagle.Eagle2().room, eagle.Eagle2(depth=48).room) == (60, 471)
    with pytest.raises(UserError, match="size is 1; it must be 2 or more"):
        eagle.Eagle2(size=1)
