"""Kernel times as cells: targets, peers and roofline of rows whose answers are known, and what docs/ shows."""

import dataclasses
import re
import statistics
from itertools import chain

import pytest

from repro.bench import kernel_list, peers, stored_peers
from repro.core.errors import UserError
from repro.core.files import ROOT, write_text
from repro.metrics import kernel_time
from repro.metrics.kernel_time import KernelTime
from repro.render import content
from repro.render import figure_files as drawn
from repro.render import table_files as written
from repro.results import measure
from repro.specs import figures, scale, tables
from repro.stats.quantity import compose
from repro.store import kernel_rows, row_list
from repro.store.kernel_rows import KernelRow
from repro.verdicts import table_results
from repro.workflow.workflow import Workflow

ORIGIN = {"device": "NVIDIA H200", "commit": "0123456789", "environment": "torch 2", "date": "2026-01-01"}
PUBLISHED = {
    "nvidia-h200-bars.md": "tables/kernels/targets.md",
    "nvidia-h100-bars.md": "tables/kernels/targets-h100.md",
    "nvidia-h200-roofline.svg": "figures/kernels/roofline.svg",
    **{f"nvidia-h200-peers-m{m}.svg": f"figures/kernels/peers-m{m}.svg" for m in (1, 64)},
}


def row(kernel, provider, dtype, shape, m, us, floor=None, **changes):
    n, k = shape
    nbytes = n * k * {"w4-g128": 17, "w2-g64": 10, "bf16": 64, "fp16": 64}.get(kernel, 32) // 32
    numbers = {"us": us, "p20": us * 0.99, "p80": us * 1.01, "bytes": nbytes, "floor_us": floor, "relerr": 2e-4}
    numbers |= {"fraction": floor / us if floor else None, "copies": 5, "rounds": 25}
    return KernelRow(kernel, provider, dtype, n, k, m, "cold", **(numbers | ORIGIN | changes))


def rows():
    """On every layer the floor is 10 us and this project takes 12.5 (one layer: 12), everybody else a round number."""
    result = [
        KernelRow("read_floor", "read_floor", "uint8", mode="cold", us=200.0, p20=199.0, p80=201.0, bytes=9 * 10**8,
            relerr=0.0, copies=2, rounds=9, **ORIGIN),
        row("bf16", "torch.matmul", "bf16", (8192, 8192), 8192, 1400.0),
    ]  # fmt: skip
    for shape in stored_peers.shapes():
        ours = 12.0 if shape == (4096, 4096) else 12.5
        result += [
            row("w4-g128", "wna16_gemv", "fp16", shape, 1, ours, 10.0),
            row("w4-g128", "linear", "fp16", shape, 4, ours * 1.1, 10.0),
            *(row("bf16", "torch.matmul", "bf16", shape, m, 30.0, 25.0) for m in (1, 4)),
            row("bf16", "torch.compile", "bf16", shape, 1, 26.0, 25.0),
            row("w4-g128", "awq_gemv", "fp16", shape, 1, 15.0, status="rescaled", p20=None, p80=None, copies=None),
        ]
    return result


@pytest.fixture
def accepted(tmp_path, monkeypatch):
    """Writes rows as the accepted ones."""
    path = tmp_path / "nvidia-h200" / "kernels.csv.xz"
    path.parent.mkdir()

    def write(some):
        row_list.write(path, some)
        kernel_time._chosen.cache_clear()
        kernel_rows.timed.cache_clear()

    monkeypatch.setattr(kernel_rows, "files", lambda: [path])
    write(rows())
    yield write
    kernel_time._chosen.cache_clear()
    kernel_rows.timed.cache_clear()


@pytest.fixture(scope="module")
def flow():
    return Workflow(scale.load(name="pocket"))


def number(expression, **all_params):
    parts = {name: params.read() for name, params in all_params.items()}
    return None if None in parts.values() else compose(expression, parts).interval()


OURS, AWQ = KernelTime("w4-g128/fp16/wna16_gemv"), KernelTime("w4-g128/fp16/awq_gemv")
LARGE = dataclasses.replace(OURS, layers="large", show="fraction")


def test_geometric_mean_and_worst_layer(accepted):
    count = len(stored_peers.shapes())
    mean = 15 / statistics.geometric_mean([12.0] + [12.5] * (count - 1))
    assert number("geomean(t / o)", t=AWQ, o=OURS).value == pytest.approx(mean, rel=1e-4)
    assert number("min(t / o)", t=AWQ, o=OURS).value == pytest.approx(1.2, rel=1e-4)
    assert number("max(o)", o=LARGE).value == pytest.approx(10 / 12, rel=1e-4)
    assert number("min(o)", o=LARGE).value == pytest.approx(0.8, rel=1e-4)
    assert number("max(o)", o=dataclasses.replace(LARGE, layers="small")).value == pytest.approx(0.8, rel=1e-4)
    assert number("o", o=dataclasses.replace(OURS, layers="4096x4096")).value == 12.0


def test_the_interval_is_that_of_the_medians_and_a_rescaled_time_has_none(accepted):
    """p20 and p80 1 % beside the median of 25 rounds: 2.064 * 1.2533 * 2 % / 1.6832 / 5 = 0.615 %."""
    one = dataclasses.replace(OURS, layers="4096x4096")
    result = number("o", o=one)
    assert (result.hi - result.value) / result.value == pytest.approx(0.00615, rel=2e-3) and result.n == 25
    ratio = number("t / o", t=dataclasses.replace(AWQ, layers="4096x4096"), o=one)
    assert (ratio.hi - ratio.value) / ratio.value == pytest.approx(0.00615, rel=2e-3)
    both = number("t / o", t=dataclasses.replace(one, who="bf16/bf16/torch.matmul"), o=one)
    assert (both.hi - both.value) / both.value == pytest.approx(0.00615 * 2**0.5 * 2.011 / 2.064, rel=2e-3)
    error = number("e", e=dataclasses.replace(one, show="relerr"))
    assert error.lo == error.value == error.hi == pytest.approx(2e-4)


def test_the_fastest_of_those_asked_counts(accepted):
    everybody = KernelTime("bf16/bf16/torch.* w4-g128/*/awq_gemv", layers="4096x4096")
    assert number("t", t=everybody).value == 15.0
    assert number("t", t=dataclasses.replace(everybody, who="*/torch.*")).value == 26.0
    assert number("t", t=dataclasses.replace(everybody, who="w4-g128/bf16/*")) is None


def test_a_missing_layer_leaves_no_value_unless_a_part_is_asked(accepted):
    accepted([r for r in rows() if (r.provider, r.N) != ("awq_gemv", 8192)])
    assert number("geomean(t)", t=AWQ) is None
    assert number("geomean(t)", t=dataclasses.replace(AWQ, partial=True)).value == pytest.approx(15.0)


def test_warm_rows_and_failures_do_not_count(accepted):
    some = rows()
    some += [dataclasses.replace(r, mode="warm", us=1.0) for r in some if r.provider == "wna16_gemv"]
    some += [dataclasses.replace(r, status="oom", us=None, M=64) for r in some if r.provider == "linear"]
    accepted(some)
    assert number("min(o)", o=LARGE).value == pytest.approx(0.8, rel=1e-4)
    assert number("geomean(o)", o=dataclasses.replace(OURS, mode="warm")).value == pytest.approx(1.0)
    assert number("geomean(o)", o=KernelTime("w4-g128/fp16/linear", "64")) is None


def test_a_time_as_it_was_recorded(accepted):
    one = dataclasses.replace(AWQ, layers="4096x4096", show="recorded")
    assert number("t", t=one).value == pytest.approx(5.379)
    assert number("t", t=dataclasses.replace(one, who="bf16/bf16/torch.matmul")).value == 30.0


def test_where_a_time_comes_from_and_whether_it_stands(accepted, monkeypatch):
    one = [dataclasses.replace(OURS, layers="4096x4096")]
    result = KernelTime.origin(one)
    assert (result["source"], result["status"], result["commit"], result["device"]) == (
        *("unattested", "ok"),
        *("0123456789", "NVIDIA H200"),
    )
    label = "w4-g128/fp16/wna16_gemv"
    today = kernel_rows.versions(label)
    timed = [dataclasses.replace(r, machine="ab", versions=today) for r in rows() if r.label == label]
    accepted(timed)
    result = KernelTime.origin(one)
    assert (result["source"], result["status"], result["artifacts"], result["note"]) == ("stored", "ok", "ab", "")
    accepted([dataclasses.replace(r, versions="timer=0") for r in timed])
    assert KernelTime.origin(one)["status"] == "stale"
    monkeypatch.setattr(kernel_rows, "BUILT", kernel_rows.files()[0])
    accepted(timed)
    assert KernelTime.origin(one)["source"] == "fresh"


def test_rows_built_here_win_over_accepted_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kernel_rows.BUILT.parent.mkdir()
    kernel_rows.BUILT.write_text(kernel_rows.to_csv([row("w4-g128", "wna16_gemv", "fp16", (4096, 4096), 1, 3.9, 3.8)]))
    one = dataclasses.replace(OURS, layers="4096x4096")
    assert number("o", o=one).value == 3.9 and KernelTime.origin([one])["commit"] == "0123456789"
    assert number("o", o=dataclasses.replace(one, layers="8192x8192")).value != 3.9


def test_a_build_of_another_device_shows_that_device(tmp_path, monkeypatch, flow):
    """As `make tables/kernels/targets.md` after a bench on an L40S, of which nothing is stored."""
    monkeypatch.chdir(tmp_path)
    one = dataclasses.replace(OURS, layers="4096x4096")
    assert KernelTime.origin([one])["device"] == "NVIDIA H200"
    kernel_rows.BUILT.parent.mkdir()
    here = row("w4-g128", "wna16_gemv", "fp16", (4096, 4096), 1, 5.1, 4.9, device="NVIDIA L40S")
    kernel_rows.BUILT.write_text(kernel_rows.to_csv([here]))
    assert number("o", o=one).value == 5.1 and KernelTime.origin([one])["stand_in"] == "NVIDIA L40S"
    assert number("o", o=dataclasses.replace(one, layers="8192x8192")) is None
    assert number("o", o=dataclasses.replace(one, device="NVIDIA H200")).value != 5.1


@pytest.mark.parametrize(
    "params, message",
    [
        (KernelTime("x", layers="most"), "unknown layers 'most'"),
        (KernelTime("x", tokens="many"), "tokens is 'many', not a number"),
    ],
)
def test_bad_params_are_sentences(params, message):
    with pytest.raises(UserError, match=message):
        kernel_time.chosen(params)


def test_a_damaged_file_is_a_sentence(accepted, flow):
    write_text(kernel_rows.files()[0], "kernel,provider\n")
    with pytest.raises(UserError, match="its columns differ"):
        measure.measurement_of(flow, flow.cells("kernels", "targets")[0])


def test_cells_claims_and_figures_of_synthetic_rows(accepted, flow, tmp_path):
    cells = {(cell.row, cell.metric): cell for cell in flow.cells("kernels", "targets")}
    result = measure.measurement_of(
        flow, cells["W4A16 g128 fp16, M = 1, large layers, share of the read floor", "worst layer"]
    )
    assert result.value == pytest.approx(0.8, rel=1e-4) and result.grade == "B" and result.stand_in == "NVIDIA H200"
    missing = measure.measurement_of(flow, cells["W8A8, M = 512, over cuBLAS int8", "worst layer"])
    assert missing.value is None and missing.status == "not_run" and "no such time" in missing.note
    judged = {claim.claim: table_results.judge(flow, claim) for claim in tables.table("kernels", "targets").claims}
    assert judged["kernels T4"].verdict == "holds" and judged["kernels T8"].verdict == "no verdict: not run"
    points = drawn.build(flow, "kernels/peers-m1", tmp_path)[""]
    assert {p[0]: p[1] for p in points["this project"]}["8192x8192"] == pytest.approx(26 / 12.5)
    svg = (tmp_path / "kernels" / "peers-m1.svg").read_text()
    assert kernel_time.RESCALED in svg and "AWQ gemv" in svg and "MARLIN" not in svg
    drawn.build(flow, "kernels/roofline", tmp_path)
    svg = (tmp_path / "kernels" / "roofline.svg").read_text()
    assert "reading 4.50 TB/s" in svg and re.search("bf16 78[56]", svg) and "this project: W4A16" in svg


def test_every_provider_that_a_spec_names_exists():
    known = {p.label for p in {**peers.PEERS, **kernel_list.OURS}.values()} | {"read_floor/uint8/read_floor"}
    known |= {f"{kernel}/{dtype}/{who}" for who, kernel, dtype, _ in stored_peers.RESCALED_PEERS}
    two_bit = ("tables/bitbybit/table7.yaml", "tables/bitbybit/kernels.yaml", "figures/bitbybit/figure6.yaml")
    specs = [
        *ROOT.glob("tables/kernels/*.yaml"),
        *ROOT.glob("figures/kernels/*.yaml"),
        *(ROOT / path for path in two_bit),
    ]
    texts = [path.read_text() for path in specs]
    named = set(chain.from_iterable(re.findall(r"[\w*-]+/[\w*]+/[\w.*-]+", text) for text in texts))
    assert len(named) > 20
    for label in named:
        assert any(kernel_time.fnmatchcase(one, label) for one in known), label


def test_the_specs_of_kernels_are_tables_and_figures_like_others():
    assert ("kernels", "targets") in tables.specified() and tables.split("kernels/targets") == ("kernels", "targets")
    assert {f"kernels/peers-m{m}" for m in (1, 16, 64)} | {"kernels/roofline", "spear/figure13"} <= set(figures.names())
    assert figures.split("figures/kernels/roofline.svg") == ("kernels", "roofline")
    with pytest.raises(
        UserError, match="unknown figure with a spec 'kernels/rofline'; did you mean 'kernels/roofline'"
    ):
        figures.split("kernels/rofline")


def test_a_peer_that_runs_here_comes_out_right_when_it_is_rescaled_instead():
    """What rescaling by the library's ratio is worth: tinygemm, recorded and measured."""
    for m, mean in (("1", 1.041), ("16", 1.053)):
        library, here = (
            kernel_time.chosen(KernelTime(who, m)) for who in ("bf16/bf16/torch.matmul", "w4-g128/*/tinygemm")
        )
        times = {(r.N, r.K, r.M, r.mode): r.us for r in library.values()}
        moved = {
            f"{r.N}x{r.K}": us for r, _, us in stored_peers.rescale(times, stored_peers.times(), ["tinygemm_g128"])
        }
        ratios = [moved[layer] / row.us for layer, row in here.items() if layer in moved]
        assert len(ratios) > 10 and statistics.geometric_mean(ratios) == pytest.approx(mean, abs=0.005)


def test_targets_and_verdicts_stand_next_to_what_was_measured(flow, accepted):
    sheet = content.sheet(table_results.table_results(flow, "kernels", "targets"))
    assert list(sheet.head) == ["", "target", "verdict"]
    by_row = {row[0]: row[1:] for row in sheet.rows}
    value, verdict = by_row["W4A16 g128 fp16, M = 1, over AWQ's gemv"]
    assert value.printed == "≥ 1.2 / ≥ 1.1" and value.here.startswith("1.20") and verdict.printed.count(" / ") == 1
    value, verdict = by_row["W4A16 g128 fp16, M = 1, smaller layers, share of the read floor"]
    assert (value.printed, verdict.printed) == ("≥ 0.78 / ≥ 0.7", "holds / holds")
    assert by_row["W4A16 g128 bf16, M = 1, relative error in 10^-3"][0].printed == "–", "it is not judged"


def test_what_docs_shows_is_built_from_the_accepted_rows(flow, tmp_path):
    """Build with `python -m repro make tables/kernels/targets{,-h100}.tex figures/kernels/*.svg`, then copy."""
    written.build(flow, "kernels/targets", tmp_path / "tables")
    written.build(flow, "kernels/targets-h100", tmp_path / "tables")
    for name in figures.names():
        if name.startswith("kernels/"):
            drawn.build(flow, name, tmp_path / "figures")
    for published, made in PUBLISHED.items():
        assert (ROOT / "docs" / published).read_bytes() == (tmp_path / made).read_bytes(), f"docs/{published}"
    assert {path.name for path in (ROOT / "docs").glob("nvidia-*")} == set(PUBLISHED)
