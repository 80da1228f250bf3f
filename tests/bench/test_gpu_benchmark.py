"""The fixture of the GPU benchmarks, on the fake device: what pytest-benchmark stores is device time per launch."""

import json
import sys

import dag
import pytest

from repro.bench.regress import load
from repro.core.files import ROOT

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
ALONE = {"PYTEST_ADDOPTS": "", "PYTEST_XDIST_WORKER": ""}  # a run of its own, whoever runs this one
CONFTEST = """
import dataclasses, sys
sys.path[:0] = [{tests!r}, {tests!r} + "/bench"]
import pytest
from fake_device import Fake
from repro.bench import timing
from repro.kernels.conftest import *
from test_timing import kernel, task

timing.COLD_BYTES = 0
timing.torch.cuda.get_device_name = lambda *a: "NVIDIA Fake"
FAKE = Fake(l2=1 << 14)
timing.read_floors = lambda nbytes: [task(kernel(FAKE, cost=1e-6), "floor", nbytes=nbytes)]

@pytest.fixture(scope="session")
def backend():
    return FAKE
"""
SUITE = """
import functools
import pytest
from conftest import FAKE, kernel, task
from repro.bench import timing
from repro.bench.timing import Unsound

def facts(**who):
    return {"N": 48, "K": 64, "M": 2, **who}

OURS = facts(kernel="w4-g128", dtype="fp16", provider="wna16_gemv")
LIBRARY = facts(kernel="bf16", dtype="bf16", provider="torch.matmul")

@pytest.mark.parametrize("cost, who", [(3e-6, OURS), (9e-6, LIBRARY)], ids=["ours", "library"])
def test_it(gpu_benchmark, backend, cost, who):
    one = task(kernel(FAKE, cost=cost), facts=who)
    found = gpu_benchmark(one)
    alone = timing.measure([one], backend, floor=timing.read_floors)[0]
    assert found.us == pytest.approx(alone.us, rel=1e-9) and found.fraction == pytest.approx(alone.fraction)

def test_host(host_benchmark, benchmark, monkeypatch):
    times = iter([(99.0, 20.0), *[(30.0 * i, 15.0 * i) for i in range(1, 26)]])  # ever slower; the first warms up
    monkeypatch.setattr(FAKE, "host_us", lambda *calls: [*next(times)], raising=False)
    assert host_benchmark(str, str) == 20.0

def test_graph(graph_benchmark, benchmark):
    mine, other = ([kernel(FAKE, cost=cost * 1e-6)] * times for cost, times in ((5, 2), (4, 3)))
    given = task(kernel(FAKE)).inputs
    calls = [[functools.partial(call, **given) for call in each] for each in (mine, other)]
    assert graph_benchmark(*calls) == pytest.approx(12.0)

def test_cheat(gpu_benchmark):
    with pytest.raises(Unsound):
        gpu_benchmark(task(kernel(FAKE, side=True)))
"""


@pytest.mark.parametrize("words", [[], ["--benchmark-disable"]])
def test_what_is_stored(tmp_path, words):
    (tmp_path / "conftest.py").write_text(CONFTEST.format(tests=str(ROOT / "tests")))
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [*PYTEST, "--benchmark-json=run.json", *words, tmp_path]
    done = dag.quick(command, tmp_path, ROOT, **ALONE)
    assert done.code == 0, done.text
    if words:
        return
    assert "UNSERIALIZABLE" not in (tmp_path / "run.json").read_text()
    benchmarks = json.loads((tmp_path / "run.json").read_text())["benchmarks"]
    host = next(b for b in benchmarks if b["name"] == "test_host")
    assert host["stats"]["median"] == pytest.approx(40e-6)
    assert host["stats"]["iqr"] < 1e-12
    assert host["stats"]["rounds"] == 25
    prompt = next(b for b in benchmarks if b["name"] == "test_graph")
    assert prompt["stats"]["median"] == pytest.approx(10e-6) and prompt["stats"]["rounds"] == 25
    timed = [b for b in benchmarks if b["params"]]
    by_cost = {benchmark["params"]["cost"]: benchmark for benchmark in timed}
    ours, library = by_cost[3e-6], by_cost[9e-6]
    assert ours["stats"]["median"] == pytest.approx(3e-6) and library["stats"]["median"] == pytest.approx(9e-6)
    assert ours["stats"]["rounds"] == 25 and ours["group"] == "48 x 64, M = 2"
    info = ours["extra_info"]
    assert info["bytes"] == 48 * 64 * 4 and info["fraction"] == pytest.approx(1 / 3) and info["mode"] == "cold"
    run = load(tmp_path / "run.json")
    assert run.device == "NVIDIA Fake" and [cell.judged for cell in run.cells.values()] == [True, False]


def test_the_suite_runs_on_a_processor(tmp_path):
    """Packing, quantizers and references are timed; what needs a GPU is skipped by name."""
    run = tmp_path / "run.json"
    command = [*PYTEST, "kernels", "--benchmark-only", "--benchmark-max-time=0.01", f"--benchmark-json={run}"]
    done = dag.quick(command, ROOT, ROOT, **ALONE, CUDA_VISIBLE_DEVICES="")
    assert done.code == 0, done.text
    content = json.loads(run.read_text())
    assert {b["name"].split("[")[0] for b in content["benchmarks"]} == {
        "test_packing", "test_round_to_nearest", "test_reference"
    }  # fmt: skip
    assert not any("data" in b["stats"] for b in content["benchmarks"]) and content["machine_info"]["node"] == ""
    assert run.stat().st_size < 100_000
    table = [sys.executable, "-m", "pytest_benchmark", "compare", str(run), "--columns=median,iqr,rounds"]
    done = dag.quick(table, tmp_path, ROOT)
    assert done.code == 0 and "test_packing[pack-4]" in done.out


def test_larger_counts_and_a_layer_without_a_recorded_choice_are_watched():
    """Of this project's kernels and of the library that they are compared with; peers stay at a few counts."""
    from repro.kernels import test_benchmarks as suite

    rows, columns = suite.UNTUNED
    recorded = json.loads((ROOT / "kernels" / "configs" / "nvidia-h200.json").read_text())
    for keys in recorded.values():
        assert not [key for key in keys if f"{rows}x{columns}" in key]
    for count in suite.WATCHED:
        labels = {provider.label for provider in suite.providers(count, untuned=False)}
        assert {suite.LIBRARY, "w4-g128/bf16/linear", "w8a8/bf16/w8a8"} <= labels
        assert "w4-g128/bf16/tinygemm" not in labels
    assert "w4-g128/bf16/tinygemm" in {provider.label for provider in suite.providers(64, untuned=False)}
    assert "w4-g128/bf16/tinygemm" not in {provider.label for provider in suite.providers(64, untuned=True)}
