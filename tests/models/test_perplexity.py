"""GPTQ-style perplexity against a slow plain reference; KL and agreement; windows, positions, files."""

import copy
import math

import disk_errors
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from repro.core.errors import UserError
from repro.core.strict import build
from repro.models import perplexity as module
from repro.models.perplexity import Protocol, by_position, load_frame, perplexity, save_frame, score, windows

LENGTH = 24
IDS = np.random.default_rng(0).integers(2, 256, size=5 * LENGTH + 7).astype(np.int32)


@pytest.fixture
def low_bit(tiny_llama):
    """The tiny model with its weights rounded coarsely: what KL is measured on."""
    model = copy.deepcopy(tiny_llama)
    for parameter in model.parameters():
        parameter.data = torch.round(parameter.data * 12) / 12
    return model


def plain_logits(model, ids):
    """float64 logits `[L - 1, V]`, one prefix at a time."""
    model = copy.deepcopy(model).double()
    with torch.no_grad():
        return [model(input_ids=torch.tensor([ids[:t].tolist()])).logits[0, -1] for t in range(1, len(ids))]


def plain_nll(model, ids):
    """Per target: log of the sum of exponentials, minus the target's logit."""
    return [float(z.exp().sum().log() - z[int(x)]) for z, x in zip(plain_logits(model, ids), ids[1:])]


def plain_perplexity(model, ids, length):
    """The definition, token by token: cut, drop the tail, mean per window, mean of means, exp."""
    means = []
    for start in range(0, len(ids) - length + 1, length):
        losses = plain_nll(model, ids[start : start + length])
        means.append(sum(losses) / len(losses))
    return math.exp(sum(means) / len(means))


# --- the measure ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [module.CHUNK, 256 * 5, 1])
def test_perplexity_is_the_definition(tiny_llama, monkeypatch, chunk):
    monkeypatch.setattr(module, "CHUNK", chunk)
    frame = score(tiny_llama, windows(IDS, LENGTH))
    assert len(frame) == 5 and set(frame.targets) == {LENGTH - 1}
    assert perplexity(frame) == pytest.approx(plain_perplexity(tiny_llama, IDS, LENGTH), rel=1e-5)
    assert frame.kl.isna().all() and frame.top1.isna().all()


def test_kl_and_top1_are_their_definitions(tiny_llama, low_bit):
    frame = score(low_bit, windows(IDS, LENGTH), tiny_llama, kl_windows=2)
    for window in range(2):
        ids = IDS[window * LENGTH : (window + 1) * LENGTH]
        p, q = (torch.stack(plain_logits(m, ids)) for m in (tiny_llama, low_bit))
        want = torch.nn.functional.kl_div(q.log_softmax(1), p.log_softmax(1), reduction="batchmean", log_target=True)
        assert frame.kl[window] == pytest.approx(float(want), rel=1e-4)
        assert frame.top1[window] == pytest.approx(float((p.argmax(1) == q.argmax(1)).double().mean()))
    assert frame.kl[0] > 0.01 and 0 < frame.top1[0] < 1
    assert frame.kl[2:].isna().all() and frame.top1[2:].isna().all()


def test_a_model_agrees_with_itself(tiny_llama):
    frame = score(tiny_llama, windows(IDS, LENGTH), copy.deepcopy(tiny_llama), kl_windows=99, batch=2)
    assert list(map(str, frame.kl)) == ["0.0"] * 5
    assert frame.top1.tolist() == [1.0] * 5


@pytest.mark.parametrize("batch", [2, 3, 8])
def test_batch_does_not_matter(tiny_llama, low_bit, batch):
    one = score(low_bit, windows(IDS, LENGTH), tiny_llama, kl_windows=3)
    many = score(low_bit, windows(IDS, LENGTH), tiny_llama, kl_windows=3, batch=batch)
    pd.testing.assert_frame_equal(one, many, rtol=1e-5)


def test_full_precision_is_computed_once_for_all_that_is_compared_with_it(tiny_llama, low_bit, monkeypatch):
    """The same bits, whoever was first; other weights of the reference, and other ids, are other logits."""
    calls, cut = [], windows(IDS, LENGTH)
    logits = module._logits
    monkeypatch.setattr(module, "_logits", lambda model, ids: calls.append(model) or logits(model, ids))
    monkeypatch.setattr(module, "_kept", {})
    alone = score(tiny_llama, cut, batch=2)
    want = score(low_bit, cut, copy.deepcopy(tiny_llama), 5, batch=2)
    full = calls.count(low_bit)
    pd.testing.assert_frame_equal(score(tiny_llama, cut, batch=2, full_precision=True), alone)
    calls.clear()
    pd.testing.assert_frame_equal(score(low_bit, cut, tiny_llama, 5, batch=2), want)
    assert calls == [low_bit] * full, "full precision was there already"
    other = copy.deepcopy(tiny_llama)
    other.model.layers[0].mlp.up_proj.weight.data *= 1.5
    assert (score(low_bit, cut, other, 5, batch=2)["kl"] != want["kl"]).all()
    assert (score(low_bit, cut.flip(0), tiny_llama, 5, batch=2)["kl"].to_numpy()[::-1] != want["kl"]).sum() <= 5
    assert len(module._kept) == full


def test_logits_that_are_no_heads_own_and_too_many_states_are_not_kept(tiny_llama, monkeypatch):
    cut = windows(IDS, LENGTH)
    monkeypatch.setattr(module, "_kept", {})
    monkeypatch.setattr(module, "LARGEST", 4 * LENGTH * tiny_llama.config.hidden_size * 4)
    score(tiny_llama, cut, full_precision=True)
    assert len(module._kept) == 1, "five windows are two batches; the second is beyond the limit"
    module._kept.clear()
    logits = module._logits
    monkeypatch.setattr(module, "_logits", lambda model, ids: logits(model, ids) * 2)  # as a model with a scaled head
    score(tiny_llama, cut, full_precision=True)
    assert not module._kept


def test_twice_is_the_same(tiny_llama, low_bit):
    frames = [score(low_bit, windows(IDS, LENGTH), tiny_llama, kl_windows=3) for _ in range(2)]
    pd.testing.assert_frame_equal(*frames, check_exact=True)


def test_bfloat16_logits_are_summed_in_higher_precision(tiny_llama):
    model = copy.deepcopy(tiny_llama).bfloat16()
    want = perplexity(score(model.float(), windows(IDS, LENGTH)))
    assert perplexity(score(model.bfloat16(), windows(IDS, LENGTH))) == pytest.approx(want, rel=0.02)


def test_a_window_knows_nothing_of_its_neighbours(tiny_llama):
    cut = windows(IDS, LENGTH)
    moved = score(tiny_llama, cut[[3, 1, 0]])
    assert moved.nll.tolist() == score(tiny_llama, cut).nll[[3, 1, 0]].tolist()


@pytest.mark.parametrize("value, kind", [(float("nan"), "NaN"), (float("inf"), "Inf"), (float("-inf"), "Inf")])
def test_broken_logits_are_named(tiny_llama, value, kind):
    broken = copy.deepcopy(tiny_llama)
    broken.lm_head.weight.data[7, 0] = value
    with pytest.raises(UserError, match=f"the model's logits in window 0 hold (NaN|{kind})"):
        score(broken, windows(IDS, LENGTH))
    with pytest.raises(UserError, match="the reference's logits in window 0"):
        score(tiny_llama, windows(IDS, LENGTH), broken, kl_windows=1)
    score(tiny_llama, windows(IDS, LENGTH), broken, kl_windows=0)
    with pytest.raises(UserError, match="hold"):
        by_position(broken, windows(IDS, LENGTH), [1, LENGTH])


def test_another_models_tokenizer_is_noticed(tiny_llama):
    with pytest.raises(UserError, match="id 256 is not among the model's 256"):
        score(tiny_llama, windows(np.full(LENGTH, 256), LENGTH))


def test_windows_longer_than_the_context_are_refused(tiny_llama):
    short = copy.deepcopy(tiny_llama)
    short.config.max_position_embeddings = LENGTH
    assert len(score(short, windows(IDS, LENGTH))) == 5, "a window as long as the context fits"
    short.config.max_position_embeddings = LENGTH - 1
    message = (
        rf"windows of {LENGTH} tokens are longer than the context of LlamaForCausalLM \(max_position_embeddings 23\)"
    )
    with pytest.raises(UserError, match=message):
        score(short, windows(IDS, LENGTH))
    with pytest.raises(UserError, match=message):
        score(tiny_llama, windows(IDS, LENGTH), short, kl_windows=1)
    with pytest.raises(UserError, match=message):
        by_position(short, windows(IDS, LENGTH), [1, LENGTH])
    short.config.name_or_path = "/some/where/pocket-1m"
    with pytest.raises(UserError, match="the context of pocket-1m "):
        score(short, windows(IDS, LENGTH))
    del short.config.max_position_embeddings
    score(short, windows(IDS, LENGTH))


# --- windows and positions --------------------------------------------------------------------------------------------


@given(st.integers(2, 300), st.integers(2, 40), st.none() | st.integers(1, 9))
def test_windows_are_the_text_without_its_tail(total, length, limit):
    ids = np.arange(total, dtype=np.int32)
    if total < length:
        with pytest.raises(UserError, match="no full window"):
            windows(ids, length, limit)
        return
    cut = windows(ids, length, limit)
    assert len(cut) == min(total // length, limit or total)
    assert cut.dtype == torch.int64 and cut.flatten().tolist() == list(range(len(cut) * length))


@pytest.mark.parametrize("length, limit", [(1, None), (0, None), (8, 0)])
def test_a_text_without_a_whole_window_is_refused(length, limit):
    with pytest.raises(UserError, match="at least one window"):
        windows(IDS, length, limit)


def test_only_window_0_begins_with_bos(tiny_llama):
    bos = 0
    frame = score(tiny_llama, windows(np.concatenate([[bos], IDS]), LENGTH))
    assert frame["first"].tolist() == [bos, *IDS[LENGTH - 1 :: LENGTH][:4]]
    assert frame["second"].tolist() == IDS[::LENGTH][:5].tolist()
    assert (frame["first"] == bos).tolist() == [True] + [False] * 4


def test_positions_add_up(tiny_llama):
    cut = windows(IDS, LENGTH)
    want = np.mean([plain_nll(tiny_llama, ids.numpy()) for ids in cut], axis=0)
    edges = [1, 2, 5, LENGTH]
    frame = by_position(tiny_llama, cut, edges, batch=2)
    assert list(zip(frame.start, frame.stop)) == [(1, 2), (2, 5), (5, LENGTH)]
    assert frame.targets.tolist() == [5, 15, 5 * (LENGTH - 5)]
    assert np.allclose(frame.nll, [want[0], want[1:4].mean(), want[4:].mean()], rtol=1e-5)
    overall = np.average(frame.nll, weights=frame.targets)
    assert overall == pytest.approx(score(tiny_llama, cut).nll.mean(), rel=1e-9)


@pytest.mark.parametrize("edges", [[1], [0, 4], [1, 1], [4, 2], [1, LENGTH + 1]])
def test_edges_must_rise(tiny_llama, edges):
    with pytest.raises(UserError, match="edges"):
        by_position(tiny_llama, windows(IDS, LENGTH), edges)


def test_protocol_is_strict():
    assert Protocol().label == "gptq-2048-v1"
    made = build(Protocol, {"name": "gptq-256", "length": 256, "max_windows": 8}, "profile")
    assert (made.label, made.length, made.max_windows, made.unit) == ("gptq-256-v1", 256, 8, "token")
    with pytest.raises(UserError, match="unknown value 'always'"):
        build(Protocol, {"bos": "always"}, "profile")


# --- files ------------------------------------------------------------------------------------------------------------


def test_frames_survive_the_disk(tiny_llama, low_bit, tmp_path):
    frame = score(low_bit, windows(IDS, LENGTH), tiny_llama, kl_windows=2)
    save_frame(tmp_path / "a" / "scores.parquet", frame, {"protocol": "gptq-24-v1"})
    loaded = load_frame(tmp_path / "a" / "scores.parquet")
    assert loaded.attrs == {"protocol": "gptq-24-v1"}
    pd.testing.assert_frame_equal(loaded, frame, check_exact=True)
    save_frame(tmp_path / "again.parquet", loaded, loaded.attrs)
    assert (tmp_path / "again.parquet").read_bytes() == (tmp_path / "a" / "scores.parquet").read_bytes()


def test_files_that_are_not_whole_frames(tiny_llama, tmp_path):
    path = tmp_path / "scores.parquet"
    with pytest.raises(UserError, match="scores.parquet: no such file; build it again"):
        load_frame(path)
    save_frame(path, score(tiny_llama, windows(IDS, LENGTH)))
    whole = path.read_bytes()
    for size in (0, 3, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match="an incomplete or damaged Parquet file"):
            load_frame(path)
    pq.write_table(pa.table({"window": [0], "nll": [1.0]}), path)
    with pytest.raises(UserError, match="columns"):
        load_frame(path)


def test_a_frame_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr(pq, "read_table", disk_errors.refuse)
    with pytest.raises(UserError, match=r"scores.parquet: cannot be read \(Permission denied\)$"):
        load_frame(tmp_path / "scores.parquet")
