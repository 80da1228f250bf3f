"""Similarity by token: known answers, a slow reference, what a table and a figure read of it."""

import numpy as np
import pytest
import tiny
import torch
from scipy import stats

from repro.core.errors import UserError
from repro.metrics import similarity
from repro.models.lowbit import block_linears
from repro.specs import templates
from repro.stats.quantity import Quantity
from repro.store.observations import Observations

COSINES = np.full((9, 4), 0.9)
COSINES[2] = [0.5, 0.9, 0.9, 0.9]  # the least mean, and the largest spread
COSINES[7] = [0.95, 1.0, 0.9, 0.75]
ALIKE = np.full((9, 4), 0.8)
HELD = {"traces": Observations(similarity.summary(np.stack([COSINES, ALIKE]), "two draws"), {})}


def shown(params: similarity.Similarity) -> float:
    result = params.series(HELD, None)
    return float(params.value({name: one.values.mean() for name, one in result.items()}))


@pytest.mark.parametrize(
    ("show", "expected"),
    [
        ("cos_min", (0.8 + 0.8) / 2),
        ("cos_max", (0.9 + 0.8) / 2),
        ("sigma_avg", (0.45 + 0.1 + 0 + 0.15) / 4 / 2),
        ("sigma_max", 0.45 / 2),
        ("wide", 25.0 / 2),
        ("lowest", (0.5 + 0.9 + 0.9 + 0.75) / 4),
        ("highest", (0.95 + 1.0 + 0.9 + 0.9) / 4),
    ],
)
def test_what_is_shown_of_known_cosines(show, expected):
    assert shown(similarity.Similarity(show)) == pytest.approx(expected)


def test_a_trace_of_the_first_draw_is_drawn_by_position():
    (only,) = similarity.Similarity("trace", sequence=7).series(HELD, None).values()
    assert only.values.tolist() == COSINES[7].tolist()


def test_a_number_has_the_t_interval_of_its_draws():
    result = similarity.Similarity("sigma_max").series(HELD, None)
    interval = Quantity([result], lambda mean: similarity.Similarity("sigma_max").value(mean), True).interval()
    half = stats.t.ppf(0.975, 1) * np.std([0.45, 0], ddof=1) / np.sqrt(2)
    assert (interval.lo, interval.hi, interval.n) == pytest.approx((0.225 - half, 0.225 + half, 2))
    assert interval.covers == "draws only"


@pytest.mark.parametrize("sequence", [-1, 9])
def test_there_are_nine_sequences(sequence):
    with pytest.raises(UserError, match=f"sequence is {sequence}; there are 9"):
        similarity.Similarity("trace", sequence=sequence)


def test_traces_are_cosines_of_last_hidden_states():
    full, rounded, ids = tiny.model("llama"), tiny.model("llama"), tiny.tokens(3, 7)
    assert similarity.traces(full, rounded, ids) == pytest.approx(np.ones((3, 7)))
    for linear in block_linears(rounded).values():
        linear.weight.data = (linear.weight.data * 4).round() / 4
    result = similarity.traces(full, rounded, ids)
    for i in range(3):
        with torch.no_grad():
            a, b = (m.base_model(ids[i : i + 1]).last_hidden_state[0].double().numpy() for m in (full, rounded))
        for t in range(7):
            expected = a[t] @ b[t] / np.sqrt(a[t] @ a[t]) / np.sqrt(b[t] @ b[t])
            assert result[i, t] == pytest.approx(expected, abs=1e-6)
    assert result.min() < 0.999


class JobOfOptions:
    def parsed_options(self):
        return {"model": "tiny", "device": "cpu", "dtype": "float32", "hub": False}


def test_nine_sequences_of_96_tokens_twelve_times_six_of_them_sampled(monkeypatch, tmp_path):
    full, ids, seen, kept = tiny.model("llama"), np.arange(4000) % 96, [], {}
    monkeypatch.setattr(similarity.models, "load", lambda *_: full)
    monkeypatch.setattr(similarity.corpora, "load_tokens", lambda _: (ids, {"label": "counting"}))
    monkeypatch.setattr(similarity.compress, "load", lambda *_: type("lm", (), {"model": full}))
    monkeypatch.setattr(similarity, "traces", lambda a, b, c: seen.append(c) or np.ones(c.shape))
    monkeypatch.setattr(similarity.observations, "save", lambda path, series, origin: kept.update(series))
    similarity.Similarity.run(JobOfOptions(), {"text": tmp_path}, tmp_path, {})
    assert [nine.shape for nine in seen] == [(9, 96)] * 12
    assert all((nine[:6, 0] == 0).all() for nine in seen), "sampled ones start with BOS"
    sampled = np.concatenate([nine[:6] for nine in seen])
    assert len(np.unique(sampled, axis=0)) == 72
    starts = [4000 * (i + 1) // 37 % 96 for i in range(36)]
    assert [nine[6:, 0].tolist() for nine in seen] == [starts[i::12] for i in range(12)]
    assert len(kept["sigma_avg"].values) == 12 and len(kept["trace 8"].values) == 96
    monkeypatch.setattr(similarity.corpora, "load_tokens", lambda _: (ids[:3551], {"label": "counting"}))
    with pytest.raises(UserError, match="counting has 3551 tokens, too few for 36 passages of 96"):
        similarity.Similarity.run(JobOfOptions(), {"text": tmp_path}, tmp_path, {})


def test_a_spec_names_the_sequence_by_a_variable():
    kind, params = templates.params_of(
        {"kind": "similarity", "show": "{s}", "sequence": "{i}"}, {"s": "trace", "i": 3}, "x"
    )
    assert (kind, params.show, params.sequence) == ("similarity", "trace", 3), "a value alone keeps its type"
    nested = {
        "kind": "derived",
        "quantity": "a",
        "cells": {"a": "{s}"},
        "of": {"kind": "similarity", "sequence": "{i}"},
    }
    assert templates.params_of(nested, {"s": "rtn-w4-pc", "i": 3}, "x")[1].of["sequence"] == 3, "also deeper down"
