"""Pretraining: schedule, batches, and that a run which was stopped ends as one which was not."""

import dataclasses
import json
import lzma
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from repro import pretrain as room
from repro.errors import UserError
from repro.pretrain import Training, batch_starts, learning_rate, length_at

TRAINING = Training(
    learning_rate=1e-2, batch_tokens=64, length=16, long_length=32, long_share=0.25, warmup_share=0.1, decay_share=0.4,
    weight_decay=0.1, beta1=0.9, beta2=0.95, clip=1.0, seed=3,
)  # fmt: skip
CONFIG = room.PocketConfig(
    room.TokenizerArgs(vocab=64, sample_bytes=100),
    {"pocket-tiny": room.ModelArgs(layers=1, tokens=6400)},
    room.Architecture(hidden=32, ffn=64, heads=2, kv_heads=1, head_size=16, rope_theta=1e4, context=32),
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
    assert (
        whole["done"]
        and whole["steps"] == 100
        and whole["tokens"] == 6400
        and not checkpoint(tmp_path / "whole").exists()
    )
    first = train(tmp_path / "parts", stop_after_s=0)
    assert not first["done"] and first["step"] == 50 and checkpoint(tmp_path / "parts").exists()
    second = train(tmp_path / "parts", stop_after_s=0)
    assert second["done"] and second["losses"] == whole["losses"]
    one, two = (load_file(tmp_path / n / "pocket-tiny" / "model" / "model.safetensors") for n in ("whole", "parts"))
    assert set(one) == set(two) and all(torch.equal(one[key], two[key]) for key in one)
    assert whole["losses"][-1][1] < whole["losses"][0][1] < 4.2, "it learns"
    assert second["seconds"] > first["seconds"]


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
    with pytest.raises(UserError, match="^unknown pocket model 'pocket-tinny': did you mean 'pocket-tiny'"):
        room.pretrain("pocket-tinny", IDS, CONFIG, None, "cpu")


def test_a_loss_that_is_not_finite_stops_and_leaves_nothing(tmp_path):
    hot = dataclasses.replace(TRAINING, learning_rate=1e30, warmup_share=0.0)
    with pytest.raises(UserError, match="the loss is nan at step 10; lower the learning rate"):
        train(tmp_path, dataclasses.replace(CONFIG, training=hot), tokens_to_see=640)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


# --- corpus -----------------------------------------------------------------------------------------------------------


def test_no_shards(tmp_path):
    (tmp_path / "valid.txt").write_text("never trained on")
    with pytest.raises(UserError, match=f"^{tmp_path}: no train-\\*.txt.xz there"):
        room.shards(tmp_path)


def test_only_training_shards_are_read(tmp_path):
    for name in ("train-01.txt.xz", "train-00.txt.xz", "valid.txt.xz", "train.txt"):
        (tmp_path / name).write_bytes(lzma.compress(b"a\nb\n\n\nc\n"))
    assert [p.name for p in room.shards(tmp_path)] == ["train-00.txt.xz", "train-01.txt.xz"]
    assert room.documents(tmp_path / "train-00.txt.xz") == ["a\nb", "c"]


def test_documents_are_packed_between_bos_and_eos(tmp_path):
    path = tmp_path / "train-00.txt.xz"
    path.write_bytes(lzma.compress(b"One text, 42.\n\nAnother.\n\nA third.\n"))
    parts = [room._encode((str(room.TOKENIZER), str(path), part, 2)).tolist() for part in range(2)]
    ids = parts[0] + parts[1]
    assert ids.count(0) == ids.count(1) == 3 and ids[0] == 0 and ids[-1] == 1
    tokenizer = room.Tokenizer.from_file(str(room.TOKENIZER))
    assert [tokenizer.decode(part) for part in parts] == ["One text, 42.A third.", "Another."]


def test_the_tokenizer_is_trained_as_configured(tmp_path):
    (tmp_path / "train-00.txt.xz").write_bytes(lzma.compress(b"the cat and the hat and 1984 the cats\n\n" * 50))
    made = room.train_tokenizer(tmp_path, room.TokenizerArgs(vocab=280, sample_bytes=10_000))
    assert made.get_vocab_size() <= 280 and made.token_to_id("<s>") == 0 and made.token_to_id("</s>") == 1
    encoded = made.encode("the cat 1984 – é")
    assert encoded.ids[0] == 0 and made.decode(encoded.ids) == "the cat 1984 – é"
    assert {"1", "9", "8", "4"} <= set(encoded.tokens), "digits are split"
    assert "Ġthe" in encoded.tokens or "the" in encoded.tokens


def test_the_shipped_configuration():
    config = room.load_config()
    assert set(config.models) == {"pocket-3m", "pocket-5m", "pocket-10m"}
    a, t = config.architecture, config.training
    assert (
        a.head_size == 64
        and a.heads * a.head_size == a.hidden
        and a.ffn % 256 == 0
        and a.context == t.long_length == 2048
    )
    assert t.long_share >= 0.1 and t.length == 512 and config.tokenizer.vocab == 4096
