"""What users would run instead: on tiny shapes on the CPU, where nothing is offloaded."""

import json

import pytest

from repro.bench import offload_peers as peers

TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 128,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


@pytest.fixture
def tiny(monkeypatch):
    """A tiny shape, and a smaller one of its family."""
    monkeypatch.setitem(peers.SHAPES, "tiny", TINY)
    monkeypatch.setitem(peers.SHAPES, "tiny-small", TINY | {"num_hidden_layers": 1})
    monkeypatch.setattr(peers, "PAIRS", {"tiny": "tiny-small"})
    monkeypatch.setattr(peers, "TIMED", 3)


def test_both_are_timed_once(tiny, tmp_path, capsys):
    words = ["--out", str(tmp_path), "--shape", "tiny", "--device", "cpu"]
    peers.main(words)
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(found) == {"tiny-accelerate", "tiny-accelerate-assisted"}
    alone = found["tiny-accelerate"]
    assert alone["status"] == "ok" and len(alone["seconds"]) == 3 and 0 < alone["pass_s"] < 10
    assert found["tiny-accelerate-assisted"]["status"] == "ok" and found["tiny-accelerate-assisted"]["pass_s"] > 0
    capsys.readouterr()
    peers.main(words)
    assert capsys.readouterr().out == ""


def test_too_little_memory_is_a_status(tiny, tmp_path, monkeypatch):
    def full(*given):
        raise RuntimeError("CUDA out of memory\nat all")

    monkeypatch.setattr(peers, "offloaded", full)
    peers.main(["--out", str(tmp_path), "--shape", "tiny", "--device", "cpu"])
    kept = json.loads((tmp_path / "tiny-accelerate.json").read_text())
    assert (kept["status"], kept["why"]) == ("oom", "CUDA out of memory at all")


def test_what_is_missing_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="Accelerate is not installed; pip install accelerate"):
        peers.main(["--out", str(tmp_path)])
