"""What users would run instead: on tiny shapes on the CPU, where nothing is offloaded."""

import json

import pytest
import torch
from tiny import llama_config

from repro.core.errors import UserError
from repro.studies import offload_peers as peers

TINY = llama_config(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    head_dim=32,
    vocab_size=128,
    max_position_embeddings=128,
)


@pytest.fixture
def tiny(monkeypatch):
    """A tiny shape, and a smaller one of its family."""
    monkeypatch.setitem(peers.SHAPES, "tiny", TINY)
    monkeypatch.setitem(peers.SHAPES, "tiny-small", TINY | {"num_hidden_layers": 1})
    monkeypatch.setattr(peers, "PAIRS", {"tiny": "tiny-small"})
    monkeypatch.setattr(peers, "TIMED", 3)
    monkeypatch.setattr(peers, "HOST_READ", 2**20)
    monkeypatch.setenv("PATH", "")  # an installed llama.cpp is none of these tests'


def test_both_are_timed_once(tiny, tmp_path, capsys):
    words = ["--out", str(tmp_path), "--shape", "tiny", "--device", "cpu"]
    peers.main(words)
    facts_of = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    rows = ("accelerate", "accelerate-assisted", "llamacpp", "llamacpp-calculated")
    assert set(facts_of) == {f"tiny-{row}" for row in rows}
    alone = facts_of["tiny-accelerate"]
    assert alone["status"] == "ok" and len(alone["seconds"]) == 3 and 0 < alone["pass_s"] < 10
    assert facts_of["tiny-accelerate-assisted"]["status"] == "ok" and facts_of["tiny-accelerate-assisted"]["pass_s"] > 0
    capsys.readouterr()
    peers.main(words)
    assert capsys.readouterr().out == ""


def test_too_little_memory_is_a_status(tiny, tmp_path, monkeypatch):
    def full(*arguments):
        raise RuntimeError("CUDA out of memory\nat all")

    monkeypatch.setattr(peers, "offloaded", full)
    peers.main(["--out", str(tmp_path), "--shape", "tiny", "--device", "cpu"])
    kept = json.loads((tmp_path / "tiny-accelerate.json").read_text())
    assert (kept["status"], kept["why"]) == ("oom", "CUDA out of memory at all")


def test_the_largest_share_that_runs_is_taken(tiny, monkeypatch):
    """As on a GPU whose memory two of the shares exceed; a small model's room is taken off the limit first."""
    shares, offloaded = [], peers.offloaded

    def full(model, weights, device):
        shares.append(weights)
        if weights > 0.65e6:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return offloaded(model, weights, device)

    monkeypatch.setattr(peers, "offloaded", full)
    facts = peers.measured("tiny", "1000000", torch.device("cpu"), assisted=False)
    assert shares == pytest.approx([0.8e6, 0.7e6, 0.6e6]) and (facts["status"], facts["share"]) == ("ok", 0.6)
    assert peers.measured("tiny", "1000000", torch.device("cpu"), assisted=True)["share"] == 0.8
    with pytest.raises(torch.OutOfMemoryError):
        peers.measured("tiny", "2000000", torch.device("cpu"), assisted=False)


def test_a_generation_ends_in_time(tiny, monkeypatch):
    monkeypatch.setattr(peers, "SECONDS", 0.0)
    assert len(peers.measured("tiny", "8GiB", torch.device("cpu"), assisted=False)["seconds"]) == 1


def test_what_is_missing_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="Accelerate is not installed; pip install accelerate"):
        peers.main(["--out", str(tmp_path)])


def test_llama_cpp_is_timed_where_it_is_installed(tiny, tmp_path, monkeypatch):
    """A stand-in of its program that says how it was called."""
    assert peers.llamacpp("tiny", "8GiB", None)["status"] == "not_run"
    program = tmp_path / peers.LLAMA_BENCH
    program.write_text('#!/bin/sh\necho "$@" > "$0.words"\necho \'[{"samples_ns": [3e9, 6e9, 9e9]}]\'\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}")
    assert "name one with --gguf" in peers.llamacpp("tiny", "8GiB", None)["why"]
    gguf = tmp_path / "tiny.gguf"
    gguf.touch()
    facts = peers.llamacpp("tiny", "8GiB", gguf)
    assert facts["status"] == "ok" and facts["pass_s"] == pytest.approx(2.0) and facts["layers_on_device"] == 2
    assert f"-m {gguf} -ngl 2 -p 0 -n 3" in program.with_name("llama-bench.words").read_text()
    program.write_text("#!/bin/sh\necho no memory >&2\nexit 3\n")
    with pytest.raises(UserError, match="llama-bench ended with 3: no memory"):
        peers.llamacpp("tiny", "8GiB", gguf)


def test_the_calculated_line_reads_every_weight_where_it_lies(tiny, monkeypatch):
    """A block has 2 x 64 x 64 + 2 x 32 x 64 + 3 x 128 x 64 weights, the head 128 x 64."""
    block, head = 2 * (12_288 + 24_576), 2 * 8_192
    monkeypatch.setattr(peers, "host_read_rate", lambda nbytes: 1e6)
    for blocks in (0, 1, 2):
        memory = str(int((head + blocks * block) / 0.8) + 1)
        facts = peers.calculated("tiny", memory, torch.device("cpu"))
        assert facts["layers_on_device"] == blocks and facts["pass_s"] == pytest.approx((2 - blocks) * block / 1e6)
    assert peers.layers_on_device("tiny", str(int((head + 2 * block) / 0.8) - 1)) == 1
    assert peers.calculated("tiny", "1KiB", torch.device("cpu"))["layers_on_device"] == 0
    monkeypatch.setattr(peers.fit, "read_rate", lambda device: 1e7)
    on_gpu = peers.calculated("tiny", memory, torch.device("cuda"))
    assert on_gpu["pass_s"] == pytest.approx((2 * block + head) / 1e7) and on_gpu["status"] == "calculated"


def test_the_host_reads_at_a_rate():
    assert 1e8 < peers.host_read_rate(2**22) < 1e13
