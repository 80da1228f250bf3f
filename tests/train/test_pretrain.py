"""Pretraining: schedule, batches, and that a run which was stopped ends as one which was not."""

import dataclasses
import json
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from repro.core.errors import UserError
from repro.core.files import sha256
from repro.train import pretrain as room
from repro.train.pocket_config import (
    Architecture,
    ModelArgs,
    PocketConfig,
    TokenizerArgs,
    TrainingSettings,
    load_config,
)
from repro.train.pretrain import batch_starts, learning_rate, length_at

TRAINING = TrainingSettings(
    learning_rate=1e-2, batch_tokens=64, length=16, long_length=32, long_share=0.25, warmup_share=0.1, decay_share=0.4,
    weight_decay=0.1, beta1=0.9, beta2=0.95, clip=1.0, seed=3, wikitext_every=0,
)  # fmt: skip
CONFIG = PocketConfig(
    TokenizerArgs(vocab=64, sample_bytes=100),
    {"pocket-tiny": ModelArgs(layers=1, tokens=6400)},
    Architecture(hidden=32, ffn=64, heads=2, kv_heads=1, head_size=16, rope_theta=1e4, context=32),
    TRAINING,
)
IDS = torch.from_numpy(np.random.default_rng(0).integers(0, 8, 2000).astype(np.int32) ** 2 % 64)


def train(out, config=CONFIG, **more):
    return room.pretrain("pocket-tiny", IDS, config, out, "cpu", compiled=False, **more)


# --- schedule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "rate"),
    [(0, 1e-3), (1, 2e-3), (9, 1e-2), (10, 1e-2), (59, 1e-2), (61, 1e-2 * 39 / 40), (80, 5e-3), (99, 1e-2 / 40)],
)  # fmt: skip
def test_warm_up_hold_and_decay(step, rate):
    assert learning_rate(step, 100, TRAINING) == pytest.approx(rate, rel=1e-12)


@given(st.integers(1, 5000))
def test_the_rate_is_positive_at_every_step_and_never_above_its_peak(steps):
    rates = [learning_rate(step, steps, TRAINING) for step in range(steps)]
    assert min(rates) > 0 and max(rates) <= TRAINING.learning_rate


def test_the_last_share_is_long():
    lengths = [length_at(step, 100, TRAINING) for step in range(100)]
    assert lengths == [16] * 75 + [32] * 25


@given(
    st.integers(2, 40), st.integers(1, 6), st.integers(0, 3), st.integers(0, 2**31),
    st.integers(0, 400),
)  # fmt: skip
def test_every_window_at_most_once_an_epoch_and_in_range(length, rows, spare, seed, more):
    total = length * (rows + spare) + 1 + length + more
    training = dataclasses.replace(TRAINING, batch_tokens=rows * length, seed=seed)
    windows = (total - 1 - length) // length
    per_epoch = windows // rows
    for epoch in range(2):
        steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
        starts = np.concatenate([batch_starts(step, length, total, training) for step in steps])
        assert len(set(starts.tolist())) == len(starts) == per_epoch * rows
        assert starts.min() >= 0 and starts.max() + length < total, "the window and its next id lie in the corpus"
        assert len(set((starts % length).tolist())) == 1, "windows of an epoch do not overlap"


def test_batches_are_a_function_of_seed_and_step():
    first = batch_starts(5, 16, 2000, TRAINING)
    assert first.tolist() == batch_starts(5, 16, 2000, TRAINING).tolist()
    others = [
        batch_starts(6, 16, 2000, TRAINING),
        batch_starts(5, 16, 2000, dataclasses.replace(TRAINING, seed=4)),
        batch_starts(5 + 2000 // 64, 16, 2000, TRAINING),
    ]
    assert all(first.tolist() != other.tolist() for other in others)


@pytest.mark.parametrize(("total", "batch"), [(40, 64), (0, 64), (2000, 8)])
def test_a_corpus_without_a_batch_is_refused(total, batch):
    with pytest.raises(UserError, match=f"a corpus of {total} tokens has no batch of"):
        batch_starts(0, 16, total, dataclasses.replace(TRAINING, batch_tokens=batch))


# --- the run ----------------------------------------------------------------------------------------------------------


def test_a_run_that_was_stopped_ends_like_one_that_was_not(tmp_path):
    whole = train(tmp_path / "whole")
    assert whole["done"]
    assert whole["steps"] == 100
    assert whole["tokens"] == 6400
    assert not checkpoint(tmp_path / "whole").exists()
    first = train(tmp_path / "parts", stop_after_s=0)
    assert not first["done"] and first["step"] == 50 and checkpoint(tmp_path / "parts").exists()
    second = train(tmp_path / "parts", stop_after_s=0)
    assert second["done"] and second["losses"] == whole["losses"]
    one, two = (load_file(tmp_path / n / "pocket-tiny" / "model" / "model.safetensors") for n in ("whole", "parts"))
    assert set(one) == set(two) and all(torch.equal(one[key], two[key]) for key in one)
    assert whole["losses"][-1][1] < whole["losses"][0][1] < 4.2, "it learns"
    assert second["seconds"] > first["seconds"]
    assert (whole["starts"], first["starts"], second["starts"]) == (1, 1, 2)


def test_a_run_that_was_killed_loses_only_what_came_after_its_checkpoint(tmp_path, monkeypatch):
    whole = train(tmp_path / "whole")
    saved = room.save_checkpoint

    def save_and_die(*args):
        saved(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(room, "save_checkpoint", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "parts", checkpoint_every_s=0)
    monkeypatch.undo()
    again = train(tmp_path / "parts")
    assert again["losses"] == whole["losses"]
    one, two = (load_file(tmp_path / n / "pocket-tiny" / "model" / "model.safetensors") for n in ("whole", "parts"))
    assert all(torch.equal(one[key], two[key]) for key in one)


def checkpoint(out):
    return out / "pocket-tiny" / "checkpoint.safetensors"


def test_the_seed_decides_and_the_model_is_whole(tmp_path):
    one = train(tmp_path / "a", tokens_to_see=640)
    other = train(
        tmp_path / "b", dataclasses.replace(CONFIG, training=dataclasses.replace(TRAINING, seed=4)), tokens_to_see=640
    )
    assert one["losses"] != other["losses"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "pocket-tiny" / "model")
    assert model.dtype == torch.bfloat16 and model.config.rope_parameters["rope_theta"] == 1e4
    assert model.config.tie_word_embeddings and model.config.head_dim == 16
    assert sum(p.numel() for p in model.parameters()) == one["parameters"]
    log = json.loads((tmp_path / "a" / "pocket-tiny" / "log.json").read_text())
    assert log == json.loads(json.dumps(one)) and log["training"]["seed"] == 3 and log["tokens_per_parameter"] > 0


def test_it_says_how_fast_it_was(tmp_path):
    started = time.perf_counter()
    log = train(tmp_path, peak_tflops=1e-3)
    assert log["tokens_per_s"] >= 3200 / (time.perf_counter() - started)
    flops = 6 * log["parameters"] + 6 * 1 * 16 * 32
    assert log["mfu"] == pytest.approx(log["tokens_per_s"] * flops / 1e9, rel=1e-2)


def test_an_unknown_model():
    with pytest.raises(UserError, match="^unknown pocket model 'pocket-4m'; did you mean 'pocket-5m'"):
        room.command("pocket-4m", None, None)


def test_a_loss_that_is_not_finite_stops_and_leaves_nothing(tmp_path):
    hot = dataclasses.replace(TRAINING, learning_rate=1e30, warmup_share=0.0)
    with pytest.raises(UserError, match="the loss is nan at step 10; lower the learning rate"):
        train(tmp_path, dataclasses.replace(CONFIG, training=hot), tokens_to_see=640)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


# --- installing a trained model, and the shipped settings -------------------------------------------------------------


def test_a_trained_model_is_installed_with_its_log_tokenizer_and_hashes(tmp_path):
    train(tmp_path / "out", tokens_to_see=640)
    train(tmp_path / "unfinished" / "nested", stop_after_s=0)
    folder = tmp_path / "pocket"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    installed = folder / "pocket-tiny"
    installed.mkdir()
    for old in ("card.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (installed / old).write_text("of the model before")
    assert room.install(tmp_path / "out", folder) == ["pocket-tiny"]
    names = {p.name for p in installed.iterdir()}
    assert names == {
        "config.json", "model.safetensors", "training-log.json", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
    assert (installed / "tokenizer.json").resolve() == folder / "tokenizer" / "tokenizer.json"
    listed = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert listed == {n: sha256(folder / n) for n in ("pocket-tiny/model.safetensors", "tokenizer/tokenizer.json")}
    assert json.loads((installed / "training-log.json").read_text())["done"]
    with pytest.raises(UserError, match="no pocket model there that was trained to its end"):
        room.install(tmp_path / "unfinished" / "nested", folder)


def test_the_shipped_configuration():
    config = load_config()
    assert set(config.models) == {"pocket-3m", "pocket-5m", "pocket-10m"}
    a, t = config.architecture, config.training
    assert a.head_size == 64
    assert a.heads * a.head_size == a.hidden
    assert a.ffn % 256 == 0
    assert a.context == t.long_length == 2048
    assert t.long_share >= 0.1 and t.length == 512 and config.tokenizer.vocab == 4096
    assert t.wikitext_every == 5 == config.of("pocket-5m").training.wikitext_every
    assert config.of("pocket-10m").training.wikitext_every == 16, "its own share instead of the one for all"
    assert config.of("pocket-10m", seed=2).training == dataclasses.replace(config.of("pocket-10m").training, seed=2)
    wrong = dataclasses.replace(config, models={"x": ModelArgs(layers=1, tokens=1, training={"wikitext_evry": 5})})
    with pytest.raises(UserError, match="training settings of x: .*wikitext_evry"):
        wrong.of("x")
