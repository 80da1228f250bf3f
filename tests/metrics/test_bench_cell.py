"""Numbers of benches as cells: what a file says, why there is none, and the verdicts on whole runs."""

import itertools
import json

import pytest

from repro.metrics import bench
from repro.metrics.bench import Bench
from repro.results import measure
from repro.specs import scale as scales
from repro.specs import tables
from repro.verdicts import table_results
from repro.workflow.workflow import Workflow

FACTS = {"device": "NVIDIA H200", "commit": "abc1234"}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Writes what a bench would have written; nothing else is there."""
    monkeypatch.setattr(bench, "BUILT", tmp_path / "build")
    monkeypatch.setattr(bench, "STORED", tmp_path / "results")

    def write(where, name, **facts):
        path = tmp_path / where / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(FACTS | facts))

    return write


def shown(table):
    """Row and metric to the measurement of a table."""
    flow = Workflow(scales.load(name="pocket"))
    return {(c.row, c.metric): measure.measurement_of(flow, c) for c in flow.cells(*table)}


def verdict(table):
    flow = Workflow(scales.load(name="pocket"))
    (claim,) = tables.table(*table).claims
    return table_results.judge(flow, claim)


@pytest.mark.parametrize("ratio, holds", [(0.96, True), (1.051, False)])
def test_a_whole_offloaded_run_is_judged_within_five_percent(files, ratio, holds):
    assert verdict(("subspec", "whole")).said == "no verdict: not run"
    files("build/offload", "qwen7b-whole", ratio=ratio, tokens_per_s=80.0, calculated_tokens_per_s=80 / ratio)
    result = shown(("subspec", "whole"))
    speed = result["Qwen2.5-7B", "tokens/s"]
    assert (speed.value, speed.device, speed.grade, speed.source) == (80.0, "NVIDIA H200", "B", "fresh")
    assert result["Qwen2.5-7B", "the same without prefills"].status == "not_run"
    judged = verdict(("subspec", "whole"))
    assert judged.said.startswith("holds" if holds else "fails")
    assert judged.cases[0].measured == ratio


@pytest.mark.parametrize("ratio, holds", [(1.029, True), (1.031, False)])
def test_a_whole_run_of_switches_is_judged_within_three_percent(files, ratio, holds):
    files("results/precision", "whole", ratio=ratio)
    judged = verdict(("flexquant", "whole"))
    assert judged.said.startswith("holds" if holds else "fails") and judged.cells[0].source == "stored"


def test_peers_have_rows_with_a_number_or_the_reason(files):
    files("results/offload", "Llama-3.1-8B-accelerate", pass_s=0.4, status="ok")
    files("results/offload", "llama8b-prefetch", step_s=0.2)
    files("results/offload", "Llama-3.1-8B-llamacpp", status="not_run", why="llama.cpp is not installed")
    files("results/offload", "Llama-3.1-8B-llamacpp-calculated", pass_s=0.3, status="calculated")
    result = {row: m for (row, _), m in shown(("subspec", "peers")).items()}
    assert result["Accelerate"].value == pytest.approx(400) and result["prefetching"].value == pytest.approx(200)
    assert (result["llama.cpp"].status, result["llama.cpp"].note) == ("not_run", "llama.cpp is not installed")
    line = result["llama.cpp, calculated"]
    assert line.value == pytest.approx(300) and line.note == "calculated"
    assert result["synchronous copies"].note == "offload has no measurement llama8b-sync here"
    assert verdict(("subspec", "peers")).said.startswith("holds")


def test_what_was_built_here_comes_before_what_is_stored(files):
    params = Bench("offload", "limit", "growth_bytes")
    assert params.read() is None
    files("results/offload", "limit", growth_bytes=1)
    files("build/offload", "limit", growth_bytes=2)
    assert params.read().interval().value == 2 and Bench.origin([params])["source"] == "fresh"


def test_the_targets_of_offloading_are_judged_by_what_the_bench_wrote(files):
    """A bound of 100 GB over 50 GB/s and 48 steps of 2 ms, which is 2.096 s."""
    for shape, over in (("llama8b", 1.0), ("qwen7b", 1.13)):
        bus = {"streamed_bytes": 1e11, "bus_bytes_per_s": 5e10, "bus_busy": 0.95}
        memory = {"device_bytes": 8e9, "budget_bytes": 8.1e9 / over}
        times = {"depth": 48, "iteration_s": 2.096 * over, "draft_pass_s": 0.0026 * over}
        files("build/offload", f"{shape}-speculate", **bus, **memory, **times)
        files("build/offload", f"{shape}-step", step_s=0.002)
        files("build/offload", f"{shape}-prefetch", bus_share=0.95 / over)
    flow = Workflow(scales.load(name="pocket"))
    judged = [table_results.judge(flow, claim) for claim in tables.table("subspec", "targets").claims]
    llama_and_qwen = [(True, False), (True, True), (True, False), (True, False), (True, False)]  # which target is met
    for claim, met in zip(judged, llama_and_qwen, strict=True):
        assert tuple(case.verdict == 0 for case in claim.cases) == met
    assert judged[0].cases[1].measured == pytest.approx(1.13)


def test_memory_over_a_thousand_tokens_is_judged(files):
    files("build/offload", "memory", tokens=1000, within=1, growth_bytes=0)
    files("build/offload", "memory-plain", tokens=1000, within=1, growth_bytes=2**21)
    flow = Workflow(scales.load(name="pocket"))
    within, grown = (table_results.judge(flow, claim) for claim in tables.table("subspec", "memory").claims)
    assert [case.verdict == 0 for case in within.cases] == [True, True]
    assert [case.verdict == 0 for case in grown.cases] == [True, False]


def test_the_targets_of_switching_are_judged_by_what_the_bench_wrote(files):
    files("build/precision", "switch-ahead-16", **{"late ms, worst": 4.5, "quiet ms": 4.0})
    memory = {"allocated bytes beside the cache": 17e9, "bytes of the first width": 16e9}
    files("build/precision", "switch-host-16", **memory)
    flow = Workflow(scales.load(name="pocket"))
    judged = [table_results.judge(flow, claim) for claim in tables.table("flexquant", "targets").claims]
    late, memory = judged[3], judged[6]
    assert [case.measured for case in late.cases if case.measured is not None] == [1.125]
    assert memory.cases[0].measured == pytest.approx(17 / 16) and memory.cases[0].verdict == 0


def test_sparse_products_and_their_lists_are_judged(files):
    """Every product at 0.8 of its floor, and at half of the dense one's time; a list for a microsecond."""
    times = {"sparse us": 5.0, "dense rows us": 12.0, "dense zigzag us": 10.0, "sparse share of the floor": 0.8}
    shares = {"sparse share of contiguous": 0.7, "dense zigzag share of contiguous": 0.9}
    for layer, s in itertools.product(
        ("28672x8192", "8192x28672", "5120x13824", "14336x4096", "4096x14336"), (25, 40, 50)
    ):
        files("results/sparse", f"gemv-{layer}-{s}", **times, **shares)
    for k in (4096, 8192, 14336, 28672):
        added = {"norm us": 2.0, "norm with list us": 3.1, "product us": 2.0, "product with list us": 2.9}
        files("results/sparse", f"list-{k}", **{"as they arrive us": 1.0, "ordered us": 2.0}, **added)
    flow = Workflow(scales.load(name="pocket"))
    result = {(c.row, c.col, c.metric): measure.measurement_of(flow, c) for c in flow.cells("spqt", "targets")}
    cell = result["28672 x 8192", "s 50", "over zigzag at 0.80 of P"]
    assert cell.value == pytest.approx(10 * 0.9 / 0.8 / 5) and cell.protocol == "sparse/gemv"
    assert result["28672 x 8192", "s 50", "over the better dense, list included"].value == pytest.approx(10 / 6)
    claims = [*tables.table("spqt", "targets").claims, *tables.table("spqt", "lists").claims]
    judged = [table_results.judge(flow, claim) for claim in claims]
    assert [claim.said.split()[0] for claim in judged] == ["holds"] * 6 + ["fails"]
    assert judged[-1].said.startswith("fails (holds in 2 of 4 cases)")
