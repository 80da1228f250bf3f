"""Measurements of SpQt's kernels on tiny layers: what each file says, and that none is made twice."""

import json

import pytest
import torch
from fake_device import Host

pytest.importorskip("triton")

from repro.bench import listed_reader  # noqa: E402
from repro.engine import weights  # noqa: E402
from repro.generation import engine  # noqa: E402
from repro.kernels import active_inputs, q4_k_planes  # noqa: E402
from repro.studies import sparse  # noqa: E402

TINY = dict(
    model_type="llama", hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=300, max_position_embeddings=128,
)  # fmt: skip


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setitem(engine.SHAPES, "tiny", TINY)
    monkeypatch.setattr(weights, "runs_q4_k", lambda device, dtype: True)
    few = {"LAYERS_TIMED": [(300, 256)], "COLUMNS": (256,), "SHAPES": ("tiny",), "PROMPT": 3, "NEW": 3, "ROUNDS": 1}
    for name, value in few.items():
        monkeypatch.setattr(sparse, name, value)
    for name in ("active_inputs", *sparse.operator_tasks.PRODUCTS):
        module = sparse.load(name)
        monkeypatch.setattr(module, "CASES", module.CASES[:2])
    monkeypatch.setattr(listed_reader, "CONFIGS", listed_reader.CONFIGS[:2])
    return sparse.SparseBench(tmp_path, "cpu", Host())


def test_every_measurement_is_a_file_that_is_made_once(bench, tmp_path, capsys):
    assert bench.run() == []
    files = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert all("device" in facts and "commit" in facts for facts in files.values())
    assert files["check"]["active_inputs"] == 0 and files["check"]["zigzag_sparse"] < 0.5
    half = files["gemv-300x256-50"]
    assert half["listed bytes"] == 128 * 2 * 144 and half["sparse relerr"] < 4e-3
    assert {"naive us", "without load balance us", "dense rows us", "floor us"} <= half.keys()
    assert "naive us" not in files["gemv-300x256-25"] and "break-even %" in files["even-300x256"]
    steps = {name.removeprefix("step-tiny-"): facts for name, facts in files.items() if name.startswith("step")}
    assert steps.keys() == sparse.HOW.keys()
    lists = {how: facts["lists"] for how, facts in steps.items()}
    assert (lists["s50"], lists["s50-naive"]) == (1, 4) and lists["zigzag"] == lists["s50-masked"] == 0
    assert steps["rows"]["read_bytes"] < steps["bf16"]["read_bytes"]
    capsys.readouterr()
    assert bench.run() == [] and capsys.readouterr().out == ""


def test_what_fails_is_named_and_the_others_go_on(bench, tmp_path, capsys):
    bench.files.only = ("even", "list")
    assert bench.run() == ["even-300x256"]
    assert "gemv-300x256-25 is not measured" in capsys.readouterr().out
    assert [path.stem for path in tmp_path.glob("*.json")] == ["list-256"]


def test_a_wrong_kernel_is_not_timed(bench, monkeypatch, capsys):
    bench.files.only = ("check",)
    monkeypatch.setattr(sparse.load("zigzag_gemv"), "reference", lambda x, rows, **_: x.new_ones(1, rows))
    assert bench.run() == ["check"] and "wrong: zigzag_gemv" in capsys.readouterr().out


def test_the_reader_reads_what_is_listed_and_nothing_else():
    planes = q4_k_planes.make_planes(300, 40, True, 0)
    active = active_inputs.reference(torch.randn(1, 40, generator=torch.Generator().manual_seed(0)), 0.7)
    config = {"splits": 3}
    before = listed_reader.reference(**planes, active=active, config=config)
    skipped = next(k for k in range(40) if k not in active[1 : 1 + int(active[0])])
    for name in planes:
        planes[name][:, skipped] = 255
    assert torch.equal(listed_reader.reference(**planes, active=active, config=config), before)
    planes["codes"][1, active[1], 5] ^= 1
    assert (listed_reader.reference(**planes, active=active, config=config) != before).sum() == 1
