"""The benchmark of everything: rows as it goes, failures as rows."""

import dataclasses
import hashlib
import types

import pytest
import torch
from fake_device import Fake

from repro.__main__ import main
from repro.bench import bench, timing
from repro.bench.peers import PEERS, Provider, against
from repro.core.errors import UserError
from repro.metrics import kernel_time
from repro.results.accept import accept
from repro.store import accepted, kernel_rows, provenance
from repro.store.kernel_rows import from_csv

ORIGIN = {"device": "NVIDIA H200", "commit": "0123456789", "environment": "torch 2", "date": "2026-01-01"}


def provider(fake, name, form="w4-g128", cost=3e-6, wrong=1.0, reason=None, **more):
    """A provider on the fake device."""

    def prepare(layer, count):
        if name == "breaks":
            raise ValueError("K must be a multiple of 7")

        def launch(x, weight):
            y = torch.empty(x.shape[0], layer.rows)
            fake.run(lambda: y.copy_(wrong * x @ weight.T), cost * count)
            return y

        inputs = {"x": layer.activations(count, torch.float32), "weight": layer.weight}
        return inputs, launch, against(layer.weight)

    return Provider(name, form, lambda device: reason, prepare, tolerance=1e-5, **more)


@pytest.fixture
def device(monkeypatch):
    fake = Fake(l2=1 << 12)
    monkeypatch.setattr(timing, "COLD_BYTES", 0)
    floor = lambda nbytes: [  # noqa: E731
        dataclasses.replace(provider(fake, "floor", cost=1e-6).task(bench_layer(), 1), nbytes=nbytes)
    ]
    everyone = [
        provider(fake, "torch.matmul", "bf16", 9e-6),
        provider(fake, "mine"),
        provider(fake, "wrong", wrong=1.5),
        provider(fake, "breaks"),
        provider(fake, "absent", reason="needs the package absent==1.0"),
        provider(fake, "few", most=1),
    ]
    copy = timing.measure([dataclasses.replace(provider(fake, "copy").task(bench_layer(), 1), facts={})], fake)[0]
    return bench.Device("cpu", fake, floor, lambda: {"copy": copy}, {p.label: p for p in everyone}, ORIGIN)


def bench_layer():
    from repro.bench.peers import Layer

    return Layer(32, 64, device="cpu")


def test_everything_is_a_row(device, tmp_path):
    out, lines = tmp_path / "x.csv", []
    rows = bench.bench(out, [(32, 64), (64, 64)], (1, 4), say=lines.append, device=device, rounds=3)
    assert [r.key for r in from_csv(out)] == [r.key for r in rows]
    by = {(r.provider, r.N, r.M): r for r in rows}
    assert by["mine", 64, 4].us == pytest.approx(12.0) and by["mine", 64, 4].fraction == pytest.approx(1 / 12)
    assert by["mine", 32, 1].bytes == 32 * 64 * 4 and by["mine", 32, 1].relerr < 1e-5
    assert by["wrong", 32, 1].status == "wrong" and "off by 0.5" in by["wrong", 32, 1].note
    assert by["breaks", 32, 4].status == "unsupported" and "multiple of 7" in by["breaks", 32, 4].note
    assert by["absent", None, None].status == "unsupported" and "absent==1.0" in by["absent", None, None].note
    assert ("few", 32, 1) in by and ("few", 32, 4) not in by
    assert by["mine", 32, 1].versions == "peers=1 timer=2"
    assert by["mine", 32, 1].clock_mhz == 1980 and by["mine", 32, 1].machine == "libraries"
    assert any("mine 3.00 us, 0.33 of the floor" in line for line in lines)


def test_a_run_that_is_cut_leaves_a_whole_file(device, tmp_path):
    out = tmp_path / "x.csv"

    def cut(line):
        if line.startswith("64 x 64"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.bench(out, [(32, 64), (64, 64)], (1,), say=cut, device=device, rounds=3)
    assert {r.N for r in from_csv(out)} == {None, 32}
    assert [p.name for p in tmp_path.iterdir()] == ["x.csv"]


def test_resume_measures_only_what_is_missing(device, tmp_path):
    out, lines = tmp_path / "x.csv", []
    full = bench.bench(out, [(32, 64), (64, 64)], (1,), say=str, device=device, rounds=3)
    bench.bench(out, [(32, 64)], (1,), say=str, device=device, rounds=3)
    again = bench.bench(out, [(32, 64), (64, 64)], (1,), say=lines.append, device=device, rounds=3, resume=True)
    assert [r.key for r in again] == [r.key for r in full] == [r.key for r in from_csv(out)]
    assert "1 of 2 shapes and numbers of rows are there already" in lines
    assert not any(line.startswith("32 x 64") for line in lines)
    assert any(line.startswith("[1/1] 64 x 64, M = 1: ") for line in lines)
    for other in ({"counts": (1, 4)}, {"device": dataclasses.replace(device, origin=ORIGIN | {"commit": "other"})}):
        lines.clear()
        options = {"counts": (1,), "device": device, "rounds": 3, "resume": True, "say": lines.append} | other
        bench.bench(tmp_path / "y.csv", [(32, 64)], (1,), say=str, device=device, rounds=3)
        bench.bench(tmp_path / "y.csv", [(32, 64)], **options)
        assert any(line.startswith("32 x 64") for line in lines)


def test_resume_keeps_what_it_is_not_asked_for(device, tmp_path):
    """Other shapes and numbers of rows, and other providers of the same ones: a file may be made by several runs."""
    out = tmp_path / "x.csv"
    options = {"say": str, "device": device, "rounds": 3, "resume": True}
    first = bench.bench(out, [(32, 64)], (1,), **options)
    bench.bench(out, [(64, 64)], (4,), **options)
    bench.bench(out, [(32, 64)], (1, 4), only=["mine"], **options)
    rows = from_csv(out)
    sizes = {(row.N, row.K, row.M) for row in rows if row.provider == "mine"}
    assert sizes == {(32, 64, 1), (32, 64, 4), (64, 64, 4)} and len({row.key for row in rows}) == len(rows)
    assert {row.key for row in first} <= {row.key for row in rows}


@pytest.mark.parametrize("status", ["wrong", "failed"])
def test_resume_measures_again_where_a_kernel_of_ours_was_wrong_or_failed(device, tmp_path, monkeypatch, status):
    out, lines = tmp_path / "x.csv", []
    bench.bench(out, [(32, 64), (64, 64)], (1,), say=str, device=device, rounds=3)
    rows = [dataclasses.replace(r, status=status) if r.provider == "mine" and r.N == 64 else r for r in from_csv(out)]
    out.write_text(kernel_rows.to_csv(rows))
    monkeypatch.setattr(kernel_rows, "KERNELS", {"mine": 1})
    bench.bench(out, [(32, 64), (64, 64)], (1,), say=lines.append, device=device, rounds=3, resume=True)
    assert "1 of 2 shapes and numbers of rows are there already" in lines  # the peer called wrong is no reason
    assert {r.status for r in from_csv(out) if r.provider == "mine"} == {"ok"}


def test_runs_of_several_gpus_enter_one_file_and_what_they_left_out_is_stale(device, tmp_path, monkeypatch):
    """Each with its own --shapes, accepted one after the other; ceilings are in each, and the last one's stay."""
    results, shapes = tmp_path / "results", [(32, 64), (64, 64), (96, 64), (128, 64)]
    with monkeypatch.context() as earlier:
        earlier.setattr(bench, "versions", lambda label: "timer=0")
        bench.bench(tmp_path / "old.csv", shapes, (1, 4), say=str, device=device, rounds=3)
    monkeypatch.setattr(provenance, "has_commit", lambda commit: True)
    monkeypatch.setattr(accepted, "RESULTS", results)
    accept(tmp_path / "old.csv")
    old = kernel_rows.from_csv(results / "nvidia-h200" / "kernels.csv.xz")
    again = dataclasses.replace(device, origin=ORIGIN | {"commit": "abcdef0123", "date": "2026-02-02"})
    for i, shape in enumerate(shapes[:3]):
        bench.bench(tmp_path / f"{i}.csv", [shape], (1, 4), say=str, device=again, rounds=3)
    for i in (2, 0, 1):
        accept(tmp_path / f"{i}.csv")
    rows = kernel_rows.from_csv(results / "nvidia-h200" / "kernels.csv.xz")
    assert [row.key for row in rows] == [row.key for row in old] and len({row.key for row in rows}) == len(rows)
    assert {row.commit for row in rows if (row.N, row.K) != shapes[3]} == {"abcdef0123"}
    assert [row for row in rows if row.commit == ORIGIN["commit"]] == [row for row in old if row.N == 128]
    kept = sum(row.status == "ok" for row in rows if row.N == 128)
    monkeypatch.setattr(kernel_rows, "files", lambda: [results / "nvidia-h200" / "kernels.csv.xz"])
    stands = {
        n: kernel_time.KernelTime.origin([kernel_time.KernelTime("*/mine", "1", f"{n}x64")])["status"]
        for n, _ in shapes
    }
    assert kept == 5 and stands == {32: "ok", 64: "ok", 96: "ok", 128: "stale"}


def test_the_machine_code_of_a_launch_is_that_of_every_kernel_in_it(monkeypatch):
    """CUDA C++ of ours and Triton, alone and in a row; a launch of neither has none, nothing stays watched."""
    import triton.compiler

    from repro.bench.kernel_list import machine_code
    from repro.kernels import launches, nvrtc

    class Cuda(nvrtc.Function):
        def __init__(self, digest):
            self.digest = digest

        __call__ = None

    class Triton(triton.compiler.CompiledKernel):
        def __init__(self, cubin):
            self.asm = {"cubin": cubin}

    launched = []
    monkeypatch.setattr(nvrtc.Function, "__call__", lambda self, *arguments: launched.append(arguments))
    del Cuda.__call__
    monkeypatch.setattr(
        triton.compiler.CompiledKernel, "launch_metadata", lambda self, *arguments: launched.append(arguments)
    )
    before = nvrtc.Function.__call__
    one = machine_code(lambda: Cuda("a")(1, 2))
    both = machine_code(lambda: [Triton(b"x").launch_metadata((1,), 0), Cuda("a")(3)])
    assert launched == [(1, 2), ((1,), 0), (3,)] and nvrtc.Function.__call__ is before
    assert one and both and one != both == machine_code(lambda: [Cuda("a")(), Triton(b"x").launch_metadata()])
    assert both != machine_code(lambda: [Cuda("a")(), Triton(b"y").launch_metadata()])
    assert machine_code(lambda: None) == ""
    steps = [
        launches.Step(None, (1, 1, 1), 32, 0, (), digest=digest) for digest in ("a", hashlib.sha256(b"x").hexdigest())
    ]
    row = launches.Launches(None, 0, (), steps)
    monkeypatch.setattr(launches.Launches, "__call__", lambda self: launched.append("row"))
    assert machine_code(row) == both and launched[-1] == "row"


def test_everything_is_compiled_ahead_by_launching_it_once(monkeypatch):
    seen = []

    def prepare(layer, m):
        if m == 4:
            raise ValueError("K must be a multiple of 7")
        return {"x": m}, lambda x: seen.append((layer.rows, layer.columns, x)), None

    mine = Provider("mine", "w4-g128", lambda device: None, prepare, most=8)
    monkeypatch.setitem(PEERS, mine.label, mine)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    bench._first_launches(mine.label, 32, 64, (1, 4, 8, 64))
    assert seen == [(32, 64, 1), (32, 64, 8)]
    bench.compile_ahead(["bf16/bf16/torch.matmul"], [(32, 64, 1)], 2)  # in processes; without a GPU it fails, silently
    assert PEERS["bf16/bf16/torch.compile"].alone and not PEERS["bf16/bf16/torch.matmul"].alone


def test_energy_is_in_every_row_by_default(device, tmp_path):
    rows = bench.bench(tmp_path / "x.csv", [(32, 64)], (1,), say=str, device=device, rounds=3)
    measured = [r for r in rows if r.status == "ok" and r.N]
    assert measured and all(r.joule and r.clock_mhz == 1980 and r.throttle == "none" for r in measured)


def test_the_fastest_recorded_variant_is_carried_over():
    here = {(4096, 4096, 1, "cold"): 12.497, (4096, 4096, 16, "cold"): 20.0}
    rows = {(r.provider, r.kernel, r.M): r for r in bench._rescaled(here, ORIGIN)}
    best = rows["gemlite-recorded", "w4-g128", 1]
    assert best.note.startswith("gl_w4g128_h100cfg_kc, recorded 6.959 us") and best.status == "rescaled"
    assert rows["awq_gemv", "w4-g128", 1].us == pytest.approx(5.379, rel=0.02)
    assert ("awq_gemv", "w4-g128", 16) not in rows and rows["marlin", "w4-g128", 16].us > 0
    assert rows["gemlite-recorded", "w2-g64", 1].note.startswith("gl_w2g64_kc")
    assert not bench._rescaled(here, ORIGIN | {"device": "NVIDIA H100 80GB HBM3"}), "recorded on another device"


def test_the_versions_of_a_row_are_those_that_decide_its_time(monkeypatch):
    assert bench.versions("w4-g128/fp16/wna16_gemv") == "timer=2 wna16_gemv=1"
    assert bench.versions("bf16/bf16/torch.matmul") == "peers=1 timer=2"
    used = ("linear", "wna16_gemv", "w4a16_gemm", "dequantize", "w8a8", "quantize_activation", "w8a8_gemv", "w8a8_gemm")
    assert set(kernel_rows.USES) <= set(kernel_rows.KERNELS) >= {*used}
    both = "dequantize=1 linear=1 timer=2 w4a16_gemm=1 wna16_gemv=1"
    assert bench.versions("w4-g128/bf16/linear") == both
    monkeypatch.setitem(kernel_rows.KERNELS, "wna16_gemv", 7)
    assert bench.versions("w4-g128/bf16/linear") == both.replace("wna16_gemv=1", "wna16_gemv=7")
    assert "=7" not in bench.versions("w8a8/bf16/w8a8") + bench.versions("bf16/bf16/torch.matmul")


def test_only_takes_words_and_always_the_library(device, tmp_path):
    rows = bench.bench(tmp_path / "x.csv", [(32, 64)], (1,), only=["mine"], say=str, device=device, rounds=3)
    assert {r.provider for r in rows} == {"torch.matmul", "mine"} | {r.provider for r in rows if r.N is None}
    with pytest.raises(UserError, match="unknown provider 'mein'"):
        bench.bench(tmp_path / "x.csv", only=["mein"], device=device)


def test_without_a_gpu_it_says_so(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["bench", "--out", str(tmp_path / "x.csv")]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert main(["bench", "--out", "x.csv", "--shapes", "4096*4096"]) == 2
    assert "write rows and columns as 4096x14336" in capsys.readouterr().err


def test_labels_of_peers_are_known_to_the_guard():
    from repro.bench import regress

    assert "/".join(regress.LIBRARY) in PEERS


@pytest.mark.parametrize(("only", "who"), [((), {"awq_gemv", "marlin", "gemlite-recorded"}), (("mine",), set())])
def test_peers_that_do_not_run_here_are_rescaled_where_they_are_asked_for(device, tmp_path, only, who):
    """A run of some providers leaves accepted rows of the others as they are, whose rivals are of another run."""
    mine = {label: p for label, p in device.providers.items() if p.name in ("torch.matmul", "mine")}
    some = dataclasses.replace(device, providers=mine)
    rows = bench.bench(tmp_path / "x.csv", [(512, 2048)], (1,), only=only, say=str, device=some, rounds=3)
    rescaled = {r.provider for r in rows if r.status == "rescaled"}
    assert rescaled <= who and bool(rescaled) == bool(who)


def test_calls_on_the_host_take_turns_and_one_that_fails_is_left_out(device, tmp_path, monkeypatch):
    """Of all providers at a layer and a number of tokens at once: the pace of a host has levels that last."""
    together = []

    def host_us(*calls):
        together.append(len(calls))
        return [10.0 + number for number in range(len(calls))]

    def launch(work, cost):
        raise RuntimeError("does not launch")

    monkeypatch.setattr(device.backend, "host_us", host_us, raising=False)
    last = provider(types.SimpleNamespace(run=launch), "last")
    device.providers[last.label] = last
    rows = bench.bench(tmp_path / "x.csv", [(32, 64)], (1,), say=str, device=device, rounds=3)
    assert together == [4] and {
        r.provider: r.host_us for r in rows if r.status == "ok" and r.N and r.mode == "cold"
    } == {
        "torch.matmul": 10.0,
        "mine": 11.0,
        "few": 13.0,  # behind one whose output is wrong
    }

    def broken(*calls):
        raise RuntimeError("no clock")

    monkeypatch.setattr(device.backend, "host_us", broken, raising=False)
    rows = bench.bench(tmp_path / "y.csv", [(32, 64)], (1,), say=str, device=device, rounds=3)
    assert {r.host_us for r in rows} == {None} and any(r.status == "ok" for r in rows)


def test_choices_of_tokens_are_rows_cold_and_warm(device, tmp_path):
    def choices():
        made = provider(device.backend, "mine", "argmax", cost=2e-6).task(bench_layer(), 2)
        facts = {"kernel": "argmax", "provider": "mine", "dtype": "bf16", "N": 32, "M": 2}
        return [[dataclasses.replace(made, name="argmax/bf16/mine", hot=(), facts=facts)]]

    some = dataclasses.replace(device, choices=choices)
    rows = bench.bench(tmp_path / "x.csv", [(32, 64)], (1,), say=str, device=some, rounds=3)
    by_mode = {r.mode: r for r in rows if r.kernel == "argmax"}
    assert set(by_mode) == {"cold", "warm"} and by_mode["cold"].copies > 1 and by_mode["warm"].copies == 1
    for row in by_mode.values():
        assert (row.N, row.K, row.M, row.host_us, row.us) == (32, None, 2, 12.5, pytest.approx(4.0))
    rows = bench.bench(tmp_path / "x.csv", [(32, 64)], (1,), only=["few"], say=str, device=some, rounds=3)
    assert "argmax" not in {r.kernel for r in rows}
    rows = bench.bench(tmp_path / "x.csv", [(32, 64)], (1,), only=["argmax"], say=str, device=some, rounds=3)
    assert {r.kernel for r in rows if r.N} == {"argmax", "bf16"}


def test_the_greedy_choice_is_timed_of_all_its_logits():
    choices = bench.greedy_choices("cpu")
    for tasks, count in zip(choices, (1, 16), strict=True):
        assert [task.facts["M"] for task in tasks] == [count, count]
        assert [task.name for task in tasks] == ["argmax/bf16/argmax", "argmax/bf16/torch"]
        for task in tasks:
            assert torch.equal(task.launch(**task.inputs), task.want(**task.inputs))
            assert task.hot == () and task.cold_bytes == task.facts["M"] * (2 * 128256 + 8)
    assert bench.versions("argmax/bf16/argmax") == "argmax=1 timer=2"
