"""The read floor: plain CUDA's reader on a CPU, which readers count, and MBU as a share of their rate."""

import math

import cuda_on_cpu
import pytest
import torch

pytest.importorskip("triton")

from repro.core.errors import UserError  # noqa: E402
from repro.engine import output  # noqa: E402
from repro.engine.output import Stats  # noqa: E402
from repro.engine.speculating import DraftedStats  # noqa: E402
from repro.generation.limited import LimitedStats  # noqa: E402
from repro.kernels import nvrtc, read_floor  # noqa: E402

CPU = torch.device("cpu")


@cuda_on_cpu.NEEDS_COMPILER
@pytest.mark.parametrize("config", [{"threads": 64, "loads": 1}, {"threads": 256, "loads": 2}], ids=str)
@pytest.mark.parametrize("nbytes", [4, 4 * 4097, 4 * 2048, 8 * 2051 + 4])
def test_plain_cuda_reads_every_word_once(nbytes, config, monkeypatch):
    """Each block's own words, whole or at a ragged end; outside the tensor nothing is read."""
    monkeypatch.setattr(nvrtc, "load", cuda_on_cpu.load)
    x, out = read_floor.make_inputs({"bytes": nbytes, "seed": nbytes})
    out = torch.full((max(len(out), -(-nbytes // 1024)),), 77, dtype=torch.int32)
    read_floor.launch(x, out, config)
    size = 4 * read_floor.words_of_block(config)
    want = [read_floor.reference(block) for block in x.split(size)]
    assert out[: len(want)].tolist() == want and (out[len(want) :] == 77).all()


def test_the_recorded_size_that_is_nearest_counts_and_plain_readers_stand_beside_it(monkeypatch):
    recorded = {str(1 << n): {"block": 1024, "warps": n} for n in (20, 24, 28)}
    monkeypatch.setattr(read_floor, "configurations", lambda slug: {"read_floor": recorded})
    for nbytes, want in ((1, 20), (1 << 20, 20), (3 << 20, 20), (5 << 20, 24), (15 << 20, 24), (1 << 33, 28)):
        assert read_floor.configuration(nbytes, "cuda")["warps"] == want, nbytes
    monkeypatch.setattr(nvrtc, "unavailable", lambda: None)
    assert read_floor.readers(1 << 20, "cuda") == [recorded[str(1 << 20)], *read_floor.PLAIN]
    recorded[str(1 << 20)] = read_floor.PLAIN[1]
    plain = read_floor.readers(1 << 20, "cuda")
    assert plain[0] == read_floor.PLAIN[1] and len(plain) == len(read_floor.PLAIN)
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "no compiler")
    assert len(read_floor.readers(1 << 24, "cuda")) == 1
    assert all(config in read_floor.SPACE for config in read_floor.PLAIN)


def test_a_rate_is_that_of_a_size_near_the_bytes_of_a_step():
    sizes = {1: 20, 1 << 20: 20, 3 << 20: 22, 700 << 20: 29, 760 << 20: 30, 1 << 40: 30}
    assert {n: read_floor.rated_size(n) for n in sizes} == {n: 1 << power for n, power in sizes.items()}


def test_mbu_of_known_times(monkeypatch):
    """6 GB a step in 2 ms are 3 TB/s: three quarters of a device that reads 4. The median step counts."""
    sizes = []
    monkeypatch.setattr(output, "read_rate", lambda device, nbytes: sizes.append(nbytes) or 4e12)
    stats = output.measured(CPU, 0.1, [2e-3, 1e-3, 2e-3, 9e-3, 2e-3], 5, 6e9, new_tokens=6)
    assert stats.mbu == pytest.approx(0.75) and sizes == [6e9]
    assert (stats.step_bytes, stats.read_rate, stats.ms_p50) == pytest.approx((6e9, 4e12, 2.0))
    assert "MBU 0.75 (6,000.0 MB a step over its time over a read rate of 4,000.0 GB/s)" in str(stats)
    assert math.isnan(output.measured(CPU, 0.1, [], 0, 6e9).mbu)


@pytest.mark.parametrize("kind", [Stats, DraftedStats, LimitedStats])
def test_what_was_not_measured_is_not_shown_as_a_number(kind, monkeypatch):
    """One token has no step; an engine whose iterations read two models has no read rate."""
    monkeypatch.setattr(output, "read_rate", lambda device, nbytes: 4e12)
    none = kind(**vars(output.measured(CPU, 0.1, [], 0, 6e9, prompt_tokens=4, new_tokens=1)))
    assert "4 + 1 tokens | prefill 0.100 s | no step after the prefill" in str(none) and "nan" not in str(none)
    unrated = kind(**vars(output.measured(CPU, 0.1, [2e-3], 1, math.nan, new_tokens=2)))
    assert "500.0 tokens/s" in str(unrated) and "nan" not in str(unrated) and "MBU" not in str(unrated)


def test_no_step_reads_faster_than_the_device():
    stats = Stats(step_bytes=6e9, read_rate=2.9e12, ms_p50=2.0)
    for show in (str, lambda each: each.mbu):
        with pytest.raises(UserError, match=r"^MBU 1.03: 6,000.0 MB .* 3,000.0 GB/s, above the 2,900.0 GB/s at which"):
            show(stats)
    assert Stats(step_bytes=6e9, read_rate=3e12, ms_p50=2.0).mbu == 1.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("nbytes", [1 << 20, 3 << 22, 1 << 30])
def test_every_reader_reads_everything_on_a_gpu(nbytes):
    x = torch.randint(-(2**31), 2**31, (nbytes // 4,), dtype=torch.int32, device="cuda")
    want = read_floor.reference(x)
    for config in (*read_floor.readers(nbytes, "cuda"), *read_floor.CUDA_SPACE):
        out = torch.zeros(nbytes // 4 // read_floor.MIN_BLOCK, dtype=torch.int32, device="cuda")
        read_floor.launch(x, out, config)
        assert read_floor.reference(out) == want, config
    assert 1e11 < read_floor.rate(read_floor.rated_size(nbytes), x.device) < 1.2e13
