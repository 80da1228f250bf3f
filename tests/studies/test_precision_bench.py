"""Measurements of switching precision: what each file says, and that none is made twice. Times here mean nothing."""

import json

import numpy as np
import pytest
import torch

from repro.core.errors import UserError
from repro.generation import engine
from repro.store import observations
from repro.store.observations import Series
from repro.studies import precision

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 2,
         "num_key_value_heads": 1, "vocab_size": 512}  # fmt: skip


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """The measurements of a tiny shape on the CPU, a few steps each."""
    monkeypatch.setitem(engine.SHAPES, "tiny", engine.SHAPES["Llama-3.2-1B"] | SHAPE)
    few = {"CONTEXTS": (8, 64), "TIMED": 3, "SHORT": 8, "LONG": 30, "EVERY": 6, "SWITCHED": 30}
    for name, value in few.items():
        monkeypatch.setattr(precision, name, value)
    return precision.PrecisionBench("shape/tiny", torch.device("cpu"), tmp_path)


def extra(files, log):
    """What mixtures took beyond the static steps, token by token along a log of the tiny shape."""
    known = {0.0: 0.0, 1.0: 0.0, 2.0: 0.0}
    for share in (0.25, 0.5, 0.75, 1.25, 1.5, 1.75):
        facts = files[f"mixed-random-{share}"]
        known[share] = facts["ms"] - facts["expected ms"]
    sizes, total = {"q": 128 * 128, "k": 64 * 128, "v": 64 * 128, "o": 128 * 128, "gate": 256 * 128}, 0.0
    sizes |= {"up": sizes["gate"], "down": sizes["gate"]}
    everything = 3 * sum(sizes.values())
    for token in range(1, 30):
        made = sum(sizes[layer.split(".")[-1].removesuffix("_proj")] for step, layer, _ in log if step <= token)
        total += float(np.interp(made / everything, sorted(known), [known[at] for at in sorted(known)]))
    return total


def test_every_measurement_is_a_file_that_is_made_once(bench, tmp_path, capsys):
    bench.run()
    files = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert {f"step-{bits}-8" for bits in (16, 8, 4)} | {"signal", "whole", "switch-ahead-4"} <= files.keys()
    assert files["mixed-random-0.5"]["products"] == files["serial-random-0.5"]["products"] > 4 * 3
    around = files["switch-host-4"]
    assert around["prefetched"] + around["late"] >= 4 * 4 and around["host ms, worst"] > 0  # the last is made in vain
    assert around["host ms, worst"] == max(around["switch host ms, worst"], around["prepare host ms, worst"])
    assert around["buffer bytes"] <= 0.1 * around["bytes of the first width's layers"]
    tables = 4 * SHAPE["vocab_size"] * SHAPE["hidden_size"]  # the embedding in float32, which is the head
    assert around["bytes of the first width"] == around["bytes of the first width's layers"] + tables
    assert all(facts["shape"] == "shape/tiny" and "device" in facts and "commit" in facts for facts in files.values())
    assert files["mixed-model-1.0"]["expected ms"] == pytest.approx(files["step-8-8"]["ms"])
    half = files["mixed-model-0.5"]["expected ms"]
    assert min(files["step-16-8"]["ms"], files["step-8-8"]["ms"]) <= half * (1 + 1e-9)
    assert files["switch-asked-1"]["steps"] == [7, 13, 19, 25] and len(files["switch-asked-1"]["ms"]) == 29
    whole = files["whole"]
    assert [step for step, _, _ in whole["log"]] == [7] * 4 + [13] * 4 + [19] * 4 + [25] * 4
    assert whole["replayed"] == "a first run's" and len(whole["ms"]) == whole["tokens"] == 29
    assert whole["measured ms"] == pytest.approx(sum(whole["ms"]), abs=29 * 5e-5)  # steps are rounded to 1e-4 ms
    by_hand = whole["static sum ms"] + 4 * whole["lost ms, expected"] + extra(files, whole["log"])
    assert whole["calculated ms"] == pytest.approx(by_hand)
    capsys.readouterr()
    bench.run()
    assert capsys.readouterr().out == "" and len(list(tmp_path.glob("*.json"))) == len(files)


def test_a_recorded_run_is_replayed_at_its_own_steps(bench, tmp_path):
    """The text that switched most, four layers a switch here whatever the log had."""
    log = {
        "log 0": Series(np.array([9.0]), "switches"),
        "log 1": Series(np.array([5.0, 5, 12, 12, 20, 20]), "switches"),
    }
    observations.save(tmp_path / "log.parquet", log, {})
    bench.files.only = ("step", "mixed-random", "switch-ahead", "whole")
    bench.log = tmp_path / "log.parquet"
    bench.run()
    facts = json.loads((tmp_path / "whole.json").read_text())
    assert [step for step, _, _ in facts["log"]] == [5] * 4 + [12] * 4 + [20] * 4
    assert facts["replayed"].endswith("log.parquet") and not (tmp_path / "signal.json").exists()
    observations.save(tmp_path / "log.parquet", {"kl 0": Series(np.array([1.0]), "tokens")}, {})
    with pytest.raises(UserError, match="no text of this run switched"):
        precision.switch_steps(bench.log, 4)


def test_a_whole_run_asks_for_its_parts(bench):
    bench.files.only = ("whole",)
    with pytest.raises(UserError, match="say --only step mixed-random switch-ahead whole"):
        bench.run()
