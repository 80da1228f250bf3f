"""Steps of public shapes as a cell: its job, a tiny shape by its function, its refusals, the specs that ask for it."""

import json

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from repro.cells import shape_decode  # noqa: E402
from repro.cells.shape_decode import HOW, Ask  # noqa: E402
from repro.engine import engine, q4_k, weights  # noqa: E402
from repro.errors import Refused, UserError  # noqa: E402
from repro.jobs.target import Target  # noqa: E402
from repro.record.observations import Series  # noqa: E402
from repro.spec import figures, tables  # noqa: E402
from repro.spec import scale as scales  # noqa: E402

TINY = dict(
    model_type="llama", hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=300, max_position_embeddings=128,
)  # fmt: skip


def target(device="cpu"):
    return Target(scales.load(name="pocket").on(device), "pocket-3m", "fp16")


def test_a_job_is_of_the_shape_and_the_way_alone():
    (made,) = shape_decode.jobs(Ask("Llama-2-7B", "s50-masked"), target("cuda")).values()
    rule = json.loads(made.inputs)
    assert rule == {
        "shape": "Llama-2-7B", "recipe": "q4_k(layout=zigzag) + spqt(sparsity=0.5)", "method": "masked",
        "device": "cuda", "prompt": 128, "new": 64, "rounds": 5,
    }  # fmt: skip
    (other,) = shape_decode.jobs(Ask("Llama-2-7B", "s50", show="ms"), target("cuda")).values()
    (same,) = shape_decode.jobs(Ask("Llama-2-7B", "s50"), target("cuda")).values()
    assert other.id == same.id != made.id


def test_a_cpu_has_no_such_times(tmp_path):
    (made,) = shape_decode.jobs(Ask("Llama-2-7B", "rows"), target()).values()
    with pytest.raises(Refused, match="need a GPU"):
        shape_decode.run(made, {}, tmp_path, {})


@pytest.mark.parametrize(("shape", "how", "said"), [("Llama-9", "rows", "shape"), ("Llama-2-7B", "s51", "s50")])
def test_what_there_is_not_is_refused(shape, how, said):
    with pytest.raises(UserError, match=said):
        Ask(shape, how)


@pytest.mark.parametrize("how", ["s50", "s50-masked", "s50-naive"])
def test_a_way_skips_inputs_by_its_kernel(monkeypatch, how):
    monkeypatch.setitem(engine.SHAPES, "tiny", TINY)
    monkeypatch.setattr(weights, "runs_q4_k", lambda device, dtype: True)
    kernel = {"s50": "zigzag_sparse", "s50-masked": "zigzag_masked", "s50-naive": "q4_k_naive_sparse"}[how]
    used, real = [], getattr(q4_k, kernel)
    monkeypatch.setattr(q4_k, kernel, lambda *given: used.append(1) or real(*given))
    core = shape_decode.loaded("tiny", *HOW[how], 9, torch.device("cpu"))
    assert core.time(3, 3).new_tokens == 3 and len(used) >= 4 * 2


def test_values_are_of_the_mean_step():
    kept = {"rounds": type("Kept", (), {"series": {"ms": Series(np.array([4.0, 4.0]), "items", "g")}})()}
    assert list(shape_decode.series(Ask("Llama-2-7B", "rows"), kept, target())) == ["ms"]
    assert shape_decode.value(Ask("Llama-2-7B", "rows"), {"ms": 4.0}) == 250
    assert shape_decode.value(Ask("Llama-2-7B", "rows", show="ms"), {"ms": 4.0}) == 4


def test_table_and_figure_ask_for_every_way_and_shape():
    asked = {(cell.ask.shape, cell.ask.how) for cell in tables.cells("spqt", "decode")}
    assert {how for _, how in asked} == set(HOW) and len(asked) == 4 * len(HOW)
    assert len(figures.cells("spqt", "7")) == 12
