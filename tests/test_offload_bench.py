"""The bench of offloading on a tiny shape and few prompts: what it writes, what it skips, what a fault leaves."""

import json

import pytest
import torch

from repro.bench import offload as bench
from repro.engine import engine as engines_by_name
from repro.methods import subspec

SHAPE = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 512,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    """One tiny shape, and iterations that a test can wait for."""
    monkeypatch.setitem(engines_by_name.SHAPES, "tiny", SHAPE)
    monkeypatch.setattr(bench, "SHAPES", {"llama8b": ("shape/tiny", 96)})
    monkeypatch.setattr(bench, "WARM", 1)
    monkeypatch.setattr(bench, "TIMED", 2)
    monkeypatch.setattr(bench, "MODEL", "pocket-3m")
    monkeypatch.setattr(bench, "TOKENS", 8)
    monkeypatch.setattr(bench, "SETS", {"mt-bench": 2})
    monkeypatch.setattr(bench, "DRAFT", subspec.Config(top_k=3, depth=5))


def test_every_measurement_is_written_once(small, tmp_path, capsys):
    words = ["--out", str(tmp_path), "--device", "cpu", "--memory", "6.2MiB"]
    bench.main([*words, "--only", "llama8b", "limit", "lossless-float32"])
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(found) == {f"llama8b-{n}" for n in ("sync", "prefetch", "speculate", "step")} | {
        "limit",
        "lossless-float32",
    }
    speculate = found["llama8b-speculate"]
    assert speculate["nodes"] == 16 and len(speculate["seconds"]) >= 1 and speculate["draft_pass_s"] > 0
    assert speculate["streamed_bytes"] > 0 and len(found["llama8b-sync"]["seconds"]) == 2
    lossless = found["lossless-float32"]
    assert (lossless["prompts"], lossless["disagreements"], lossless["unexplained"]) == (2, 0, 0)
    capsys.readouterr()
    bench.main([*words, "--only", "llama8b", "limit", "lossless-float32"])
    assert capsys.readouterr().out == ""


def test_a_measurement_that_fails_is_named_and_not_written(small, tmp_path):
    with pytest.raises(SystemExit, match="not measured: llama8b-sync"):
        bench.main(["--out", str(tmp_path), "--device", "cpu", "--memory", "1KiB", "--only", "llama8b-sync"])
    assert not list(tmp_path.iterdir())


def test_a_disagreement_has_its_gap_and_what_a_tree_moves(small):
    plain = bench.Engine.load("pocket-3m", context=128, dtype="float32", device="cpu")
    ids = list(range(5, 25))
    own = next(plain.generate([ids], 8)).tokens
    got = [*own[:5], own[5] + 1, *own[6:]]
    found = bench.disagreement(plain, ids, own, got)
    logits = plain.logits([*ids, *own[:5]])[-1].topk(2).values
    assert found["token"] == 5 and found["gap"] == pytest.approx((logits[0] - logits[1]).item(), abs=1e-3)
    assert 0 <= found["moved"] < 1e-3 < found["gap"]


def test_a_planted_fault_is_a_disagreement(small, monkeypatch):
    monkeypatch.setattr(
        bench.Loaded, "streamed", lambda self, names, real=bench.Loaded.streamed: _scaled(real(self, names))
    )
    found = bench.lossless(torch.device("cpu"), torch.float32, {"mt-bench": 2})
    assert found["disagreements"] == found["unexplained"] == 2


def _scaled(pair):
    return 1.5 * pair[0], pair[1]


def test_random_products_have_the_shapes_of_the_plan(small):
    engine = bench.of_shape("shape/tiny", "6.2MiB", bench.DRAFT, 96, torch.device("cpu"), torch.float32)
    streamed = [b for n, b in enumerate(engine.model.blocks) if n not in engine.plan.resident]
    assert (
        sum(p.weight.nbytes for b in streamed for p in (b.qkv, b.out, b.gate_up, b.down)) == engine.plan.streamed_bytes
    )
