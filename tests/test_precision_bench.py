"""Measurements of switching precision: what each file says, and that none is made twice. Times here mean nothing."""

import json

import pytest
import torch

from repro.bench.commands import precision
from repro.engine import engine

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 2,
         "num_key_value_heads": 1, "vocab_size": 512}  # fmt: skip


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """The measurements of a tiny shape on the CPU, a few steps each."""
    monkeypatch.setitem(engine.SHAPES, "tiny", engine.SHAPES["Llama-3.2-1B"] | SHAPE)
    few = {"CONTEXTS": (8, 64), "TIMED": 3, "SHORT": 8, "LONG": 30, "EVERY": 6, "SWITCHED": 30}
    for name, value in few.items():
        monkeypatch.setattr(precision, name, value)
    return precision.Bench("shape/tiny", torch.device("cpu"), tmp_path)


def test_every_measurement_is_a_file_that_is_made_once(bench, tmp_path, capsys):
    bench.run()
    files = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert {f"step-{bits}-8" for bits in (16, 8, 4)} | {"signal", "whole", "switch-ahead-4"} <= files.keys()
    assert files["mixed-random-0.5"]["products"] == files["serial-random-0.5"]["products"] > 4 * 3
    around = files["switch-host-4"]
    assert around["prefetched"] + around["late"] >= 4 * 4 and around["host ms, worst"] > 0  # the last is made in vain
    assert around["buffer bytes"] <= 0.1 * around["bytes of the first width's layers"]
    assert all(found["shape"] == "shape/tiny" and "device" in found and "commit" in found for found in files.values())
    assert files["mixed-model-1.0"]["expected ms"] == pytest.approx(files["step-8-8"]["ms"])
    half = files["mixed-model-0.5"]["expected ms"]
    assert min(files["step-16-8"]["ms"], files["step-8-8"]["ms"]) <= half * (1 + 1e-9)
    assert files["switch-asked-1"]["steps"] == [7, 13, 19, 25] and len(files["switch-asked-1"]["ms"]) == 29
    assert [step for step, _, _ in files["whole"]["log"]] == [7] * 4 + [13] * 4 + [19] * 4 + [25] * 4
    capsys.readouterr()
    bench.run()
    assert capsys.readouterr().out == "" and len(list(tmp_path.glob("*.json"))) == len(files)
