"""The regression guard: silent on noise, loud on a slowdown that two runs agree on."""

import dataclasses
import json
import math
import random
import runpy
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from repro.__main__ import main
from repro.bench import devices, kernel_list, peers, regress, task, timing
from repro.core.errors import UserError
from repro.core.files import ROOT, read_text

LIBRARY = dict(zip(("kernel", "dtype", "provider"), regress.LIBRARY))
OURS = {"kernel": "w4-g128", "dtype": "fp16", "provider": "wna16_gemv"}
SHAPES = [(2048, 2048), (4096, 4096), (14336, 4096), (8192, 8192)]


def benchmark(us, floor_us, rows, columns, who=OURS, spread=0.002, rng=None, rounds=25, **more):
    """One benchmark as pytest-benchmark stores it, with rounds around a median."""
    rng = rng or random.Random(f"{us} {rows} {columns}")
    data = sorted(us * 1e-6 * (1 + rng.gauss(0, spread)) for _ in range(rounds))
    low, _, high = statistics.quantiles(data, n=4)
    stats = {"median": statistics.median(data), "iqr": high - low, "rounds": rounds, "data": data}
    info = {**who, "N": rows, "K": columns, "M": 1, "mode": "cold", "floor_us": floor_us, "device": "NVIDIA H200"}
    return {"name": "x", "fullname": "x", "extra_info": info | more, "stats": stats}


def run(path, slower=1.0, where=None, machine=1.0, seed=0, noise=0.003, library=1.0, floor=1.0, spread=0.002):
    """A file of benchmarks: our kernel and the library on all shapes, times `machine`; `slower` at one shape or all."""
    rng = random.Random(seed)
    some = lambda us: us * machine * math.exp(rng.gauss(0, noise))  # noqa: E731
    benchmarks = []
    for i, (n, k) in enumerate(SHAPES):
        factor = slower if where is None or where == (n, k) else 1.0
        floor_us = some(2.0 + 3 * i) * floor
        ours = some(2.4 + 3.3 * i) * factor
        benchmarks.append(benchmark(ours, floor_us, n, k, spread=spread, rng=rng, ours=True))
        lib = some(7.0 + 9 * i) * library
        benchmarks.append(benchmark(lib, floor_us * 3.5, n, k, LIBRARY, spread=spread, rng=rng, ours=False))
    path.write_text(json.dumps({"benchmarks": benchmarks}))
    return path


@pytest.fixture
def base(tmp_path):
    return [run(tmp_path / f"base{i}.json", seed=100 + i) for i in range(3)]


@pytest.mark.parametrize("percent", [5, 10])
@pytest.mark.parametrize("baselines", [1, 3])
def test_a_real_slowdown_at_one_shape_is_caught_by_two_runs(tmp_path, base, percent, baselines, capsys):
    caught = 0
    for seed in range(20):
        new = [run(tmp_path / f"new{i}.json", 1 + percent / 100, (4096, 4096), seed=2 * seed + i) for i in range(2)]
        words = ["regress", *map(str, new), "--against", *map(str, base[:baselines])]
        caught += main(words) == 1
        printed = capsys.readouterr().out
    assert caught == 20
    assert printed.count("\n") == 1 and "wna16_gemv (w4-g128, fp16) at 4096 x 4096, M = 1, cold" in printed
    slower = float(printed.split(" is ")[1].split(" %")[0])
    assert slower == pytest.approx(percent, abs=1.5)


def test_one_slow_run_is_a_suspicion(tmp_path, base, capsys):
    slow, fine = run(tmp_path / "slow.json", 1.1), run(tmp_path / "fine.json", seed=9)
    against = ["--against", *map(str, base)]
    assert main(["regress", str(slow), *against]) == 3
    assert "measure again and give both files" in capsys.readouterr().out
    assert main(["regress", str(slow), str(fine), *against]) == 0
    assert main(["regress", str(fine), *against]) == 0
    assert "no regression: 4 cells" in capsys.readouterr().out


def without(path, benchmark):
    """The same run without one benchmark."""
    content = json.loads(path.read_text())
    del content["benchmarks"][benchmark]
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("options", [[], ["--partial"]])
def test_a_slow_cell_that_the_second_run_lacks_is_an_error(tmp_path, base, capsys, options):
    slow = run(tmp_path / "slow.json", 2.0, (4096, 4096))
    again = without(run(tmp_path / "again.json", seed=9), 2)
    words = ["regress", str(slow), str(again), "--against", *map(str, base), *options]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {again}: wna16_gemv (w4-g128, fp16) at 4096 x 4096") and "slower in" in error
    assert main(["regress", str(slow), str(run(again, seed=9)), *words[3:]]) == 0  # measured, and not slow


def test_a_slow_cell_that_the_first_of_two_partial_runs_lacks_is_an_error(tmp_path, base, capsys):
    first = without(run(tmp_path / "first.json", seed=8), 2)
    slow = run(tmp_path / "slow.json", 2.0, (4096, 4096))
    assert main(["regress", str(first), str(slow), "--against", *map(str, base), "--partial"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {first}: wna16_gemv (w4-g128, fp16) at 4096 x 4096") and "slower in" in error
    assert main(["regress", str(first), str(run(slow, seed=9)), "--against", *map(str, base), "--partial"]) == 0


def test_a_regression_is_said_beside_what_was_not_confirmed(tmp_path, base, capsys):
    slow, again = run(tmp_path / "slow.json", 2.0), without(run(tmp_path / "again.json", 2.0, seed=9), 2)
    assert main(["regress", str(slow), str(again), "--against", *map(str, base)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and sum(line.startswith("regression: ") for line in lines) == 3
    assert lines[-1].startswith("not confirmed: wna16_gemv (w4-g128, fp16) at 4096 x 4096")


def test_a_slower_machine_is_no_regression(tmp_path, base):
    new = [run(tmp_path / f"new{i}.json", machine=1.3, seed=i) for i in range(2)]
    assert regress.regress(new, base)[0] == 0


@pytest.mark.parametrize("reference", ["library", "floor"])
def test_one_reference_that_got_faster_is_no_regression(tmp_path, base, reference):
    """A new cuBLAS, or a better read floor kernel: ours did not change."""
    new = [run(tmp_path / f"new{i}.json", seed=i, **{reference: 0.9}) for i in range(2)]
    assert regress.regress(new, base)[0] == 0


@pytest.mark.parametrize("reference", ["library", "floor"])
def test_one_reference_that_got_slower_hides_nothing(tmp_path, base, reference):
    """An older cuBLAS, or a slower reader, beside a kernel that is 5 % slower at one shape."""
    new = [
        run(tmp_path / f"new{i}.json", 1.05, (4096, 4096), seed=20 + i, noise=0.001, **{reference: 1.06})
        for i in range(2)
    ]
    status, lines = regress.regress(new, base)
    assert status == 1 and len(lines) == 1 and "4096 x 4096" in lines[0]


@pytest.mark.parametrize("library", [1.0, 1.0145, 1.0195, 1.03])
def test_no_drift_of_the_library_hides_five_percent(tmp_path, base, library):
    new = [run(tmp_path / f"new{i}.json", 1.05, (4096, 4096), seed=i, noise=0, library=library) for i in range(2)]
    exact = [run(tmp_path / f"exact{i}.json", seed=10 + i, noise=0) for i in range(3)]
    status, lines = regress.regress(new, exact)
    assert status == 1 and len(lines) == 1 and "4096 x 4096" in lines[0]


def with_floor(path, factor, shape=(4096, 4096)):
    """A run whose read floor is slower by a factor at one shape alone."""
    content = json.loads(path.read_text())
    for one in content["benchmarks"]:
        info = one["extra_info"]
        if (info["N"], info["K"], info["provider"]) == (*shape, OURS["provider"]):
            info["floor_us"] *= factor
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("machine", [1.0, 1.3])
@pytest.mark.parametrize("floor", [0.9, 1.0, 1.05, 1.2])
def test_a_read_floor_that_moved_alone_hides_nothing_and_accuses_nobody(tmp_path, base, floor, machine):
    for slower, wanted in ((1.0, 0), (1.05, 1)):
        new = []
        for seed in (31, 32):
            path = run(tmp_path / f"new{seed}.json", slower, (4096, 4096), seed=seed, noise=0.001, machine=machine)
            new.append(with_floor(path, floor))
        status, lines = regress.regress(new, base)
        assert status == wanted and ("4096 x 4096" in lines[0] or not wanted), lines


CALL = {"kernel": "rms_norm", "dtype": "bf16", "provider": "call"}
HOST_NOISE = 0.04  # of the ratio of two calls in turns, between processes


def with_host(path, slower=1.0, host=1.0, seed=0, calls=8, spread=0.1, **more):
    """A run and calls on its host, which is `host` times as slow; one call `slower` times its own time."""
    rng = random.Random(f"host {seed}")
    content = json.loads(run(path, seed=seed, **more).read_text())
    for i in range(calls):
        floor_us = 14.0 * host * math.exp(rng.gauss(0, spread))
        us = (0.8 + i / 10) * floor_us * math.exp(rng.gauss(0, HOST_NOISE)) * (slower if i == 2 else 1.0)
        content["benchmarks"].append(benchmark(us, floor_us, 1024, 1024 + i, CALL, rng=rng, mode="host"))
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def hosts(tmp_path):
    return [with_host(tmp_path / f"host{i}.json", seed=200 + i, host=1 + 0.2 * i) for i in range(3)]


@pytest.mark.parametrize("host", [0.6, 1.0, 1.5])
@pytest.mark.parametrize("device", [{}, {"library": 0.9}, {"library": 1.1}, {"floor": 0.9}], ids=str)
def test_a_call_is_judged_by_the_one_beside_it_alone(tmp_path, hosts, host, device):
    """Whatever the host is like, and whatever the device's references became."""
    for slower, wanted in ((1.0, 0), (1.5, 1)):
        new = [with_host(tmp_path / f"new{i}.json", slower, host, seed=i, **device) for i in range(2)]
        status, lines = regress.regress(new, hosts)
        assert status == wanted, lines
    (line,) = lines
    assert "call (rms_norm, bf16) at 1024 x 1026, M = 1, host is " in line


def test_what_the_host_is_like_loosens_nothing_of_the_device(tmp_path, hosts):
    """The former are more, and vary by more."""
    new = regress.load(with_host(tmp_path / "new.json", seed=1))
    changes = regress.compare(new, [regress.load(path) for path in hosts])
    host = [change.allowed for name, change in changes.items() if new.cells[name].on_host]
    device = {name: change for name, change in changes.items() if not new.cells[name].on_host}
    assert len(host) == 8 and len(device) == len(SHAPES) and min(host) >= 0.1
    alone = regress.compare(regress.load(run(tmp_path / "alone.json", seed=1)), [
        regress.load(run(tmp_path / f"base{i}.json", seed=200 + i)) for i in range(3)
    ])  # fmt: skip
    assert device == alone


def test_noisy_rounds_raise_what_is_allowed(tmp_path, base):
    new = [run(tmp_path / f"new{i}.json", 1.05, seed=i, spread=0.12) for i in range(2)]
    assert regress.regress(new, base)[0] == 0
    new = [run(tmp_path / f"new{i}.json", 1.5, seed=i, spread=0.12) for i in range(2)]
    assert regress.regress(new, base)[0] == 1


def test_a_kernel_that_vanished_is_said(tmp_path, base, capsys):
    new = run(tmp_path / "new.json")
    content = json.loads(new.read_text())
    content["benchmarks"] = content["benchmarks"][1:]
    new.write_text(json.dumps(content))
    against = ["--against", *map(str, base)]
    assert main(["regress", str(new), *against]) == 1
    assert "at 2048 x 2048, M = 1, cold was not measured" in capsys.readouterr().out
    assert main(["regress", str(new), "--partial", *against]) == 0


def test_peers_and_the_library_are_not_judged(tmp_path, base):
    judged = regress.compare(regress.load(base[0]), [regress.load(base[1])])
    assert len(judged) == len(SHAPES) and all(name.startswith("wna16_gemv ") for name in judged)


# ---- recorded on an H200: whole runs, runs with a kernel that really was slower, and the accepted baseline

RECORDED = json.loads(read_text(ROOT / "tests" / "recorded_noise.json.xz"))["runs"]
STORED = [ROOT / "results" / "nvidia-h200" / f"benchmark-{number}.json.xz" for number in range(1, 10)]
ACCEPTED = {f"accepted {first + 1} to {first + 3}": STORED[first : first + 3] for first in range(0, len(STORED), 3)}
MATMUL = "/".join(regress.LIBRARY)


def as_file(path, cells):
    """A recorded run as a file of benchmarks."""
    benchmarks = []
    for name, cell in cells.items():
        label, shape, m = name.split(" ")
        n, k = map(int, shape.split("x"))
        data = [us * 1e-6 for us in cell["us"]]
        low, _, high = statistics.quantiles(data, n=4)
        stats = {"median": statistics.median(data), "iqr": high - low, "rounds": len(data), "data": data}
        info = dict(zip(("kernel", "dtype", "provider"), label.split("/"))) | {"N": n, "K": k, "M": int(m)}
        info |= {"mode": "cold", "floor_us": cell["floor_us"], "device": "NVIDIA H200", "ours": label != MATMUL}
        benchmarks.append({"name": name, "extra_info": info, "stats": stats})
    path.write_text(json.dumps({"benchmarks": benchmarks}))
    return path


def recorded(folder, kind):
    """Files of the recorded runs of a kind."""
    return [as_file(folder / f"{r['process']}.json", r["cells"]) for r in RECORDED if r["kind"] == kind]


@pytest.fixture(scope="module", params=["recorded", *ACCEPTED])
def whole_runs(request, tmp_path_factory):
    """Runs of the same kernels, a process each, with the rounds of their cells; nothing is tuned on them."""
    if request.param == "recorded":
        paths = recorded(tmp_path_factory.mktemp("runs"), "noise")
    else:
        paths = ACCEPTED[request.param]
    runs = []
    for path in paths:
        rounds = {}
        for one in json.loads(read_text(path))["benchmarks"]:
            if all(name in one["extra_info"] for name in regress.PLACE) and "data" in one["stats"]:
                rounds[regress.say(one["extra_info"])] = [1e6 * seconds for seconds in one["stats"]["data"]]
        runs.append((regress.load(path), rounds))
    return runs


def drawn(run, rounds, rng, slowed=None, factor=1.0):
    """A run whose rounds are drawn anew, but those of a host, whose pace changes meanwhile; one cell slower."""
    cells = {}
    for name, cell in run.cells.items():
        us = cell.us if cell.on_host else statistics.median(rng.choices(rounds[name], k=len(rounds[name])))
        cells[name] = dataclasses.replace(cell, us=us * (factor if name == slowed else 1.0))
    return dataclasses.replace(run, cells=cells)


def verdict(monkeypatch, new, base):
    """What `regress` says of runs in memory."""
    runs = {f"new{i}": run for i, run in enumerate(new)} | {f"base{i}": run for i, run in enumerate(base)}
    monkeypatch.setattr(regress, "load", runs.__getitem__)
    return regress.regress([name for name in runs if name[0] == "n"], [name for name in runs if name[0] == "b"])


def one_against_the_others(runs, i):
    """The i-th run, and all but it."""
    i %= len(runs)
    return runs[i], runs[:i] + runs[i + 1 :]


def test_silent_on_noise_200_times(whole_runs, monkeypatch):
    """Each run against the others, rounds drawn anew: both new runs have the quirks of one process."""
    rng = random.Random(0)
    for i in range(200):
        new, others = one_against_the_others(whole_runs, i)
        code, lines = verdict(monkeypatch, [drawn(*new, rng) for _ in range(2)], [drawn(*o, rng) for o in others])
        assert code == 0, lines


@pytest.mark.parametrize("percent", [5, 10, 25])
def test_a_slowdown_in_noise_is_caught(whole_runs, monkeypatch, percent):
    """Of any kernel on any shape, and of 25 % of any call on the host; two runs are a weaker baseline than three."""
    rng, caught, draws = random.Random(percent), 0, 100
    for i in range(draws):
        new, others = one_against_the_others(whole_runs, i)
        judged = [name for name, cell in new[0].cells.items() if cell.judged and cell.on_host == (percent == 25)]
        if not judged:
            pytest.skip("no call on the host in these runs")
        name = rng.choice(judged)
        slow = [drawn(*new, rng, name, 1 + percent / 100) for _ in range(2)]
        code, lines = verdict(monkeypatch, slow, [drawn(*o, rng) for o in others])
        assert all(name in line for line in lines if code)
        caught += code == 1
    assert caught >= LEAST_CAUGHT[percent] * draws


LEAST_CAUGHT = {5: 0.85, 10: 0.98, 25: 0.9}
SLOWER = {  # percent by which each format was slower in the runs with worse launch configurations
    ("w4-g128", "fp16", 14336): 9.6, ("w4-g128", "bf16", 14336): 8.3, ("w4-g128-sym", "fp16", 14336): 14.2,
    ("w4-g128", "fp16", 8192): 9.1, ("w4-g128", "bf16", 8192): 7.8, ("w4-g128-sym", "fp16", 8192): 4.1,
    ("w4-pc", "fp16", 8192): 4.3,
}  # fmt: skip


def test_a_kernel_that_really_was_slower_is_named(tmp_path, capsys):
    """Worse launch configurations of the decode kernel: every slow cell is named, and no other."""
    (first, *base), slow = recorded(tmp_path, "noise"), recorded(tmp_path, "slow")
    words = ["--against", *map(str, base), "--partial"]
    assert main(["regress", str(slow[0]), *words]) == regress.SUSPICION
    capsys.readouterr()
    assert main(["regress", *map(str, slow), *words]) == regress.REGRESSION
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(SLOWER)
    for (kernel, dtype, rows), percent in SLOWER.items():
        (line,) = [line for line in lines if f"wna16_gemv ({kernel}, {dtype}) at {rows} x " in line]
        assert float(line.split(" is ")[1].split(" %")[0]) == pytest.approx(percent, abs=0.3)
    assert main(["regress", str(base[0]), str(base[1]), "--against", str(first)]) == regress.FINE


def test_one_run_is_not_two(tmp_path, base, capsys):
    """A file that is given twice, or copied, confirms nothing and is no baseline of itself."""
    new, copied = run(tmp_path / "new.json", 1.1, (4096, 4096)), tmp_path / "copied.json"
    copied.write_bytes(new.read_bytes())
    for words in ([new, new, "--against", *base], [new, copied, "--against", *base], [new, "--against", new, *base]):
        assert main(["regress", *map(str, words)]) == 2
        error = capsys.readouterr().err
        assert "new.json" in error and "every file has to be a run of its own" in error
    assert main(["regress", str(new), "--against", *map(str, base)]) == regress.SUSPICION


def spoiled(change):
    def spoil(content):
        change(content["benchmarks"])
        return content

    return spoil


@pytest.mark.parametrize(
    "spoil, message",
    [
        (None, "no such file"),
        (lambda content: [], "not a file of pytest --benchmark-json"),
        (lambda content: {"benchmarks": []}, "no kernel with a read floor"),
        (spoiled(lambda b: b.append(b[0])), "is there twice"),
        (spoiled(lambda b: b[0]["extra_info"].update(device="NVIDIA A100")), "one run is one device"),
        (spoiled(lambda b: [x["extra_info"].update(device="NVIDIA A100") for x in b]), "compare on one device only"),
        (spoiled(lambda b: [x["extra_info"].update(M=3) for x in b[::2]]), "no kernel in common"),
        (spoiled(lambda b: [x["extra_info"].update(M=3) for x in b[1::2]]), "no time of torch.matmul in common"),
        (spoiled(lambda b: b.__setitem__(slice(None), b[::2])), "no time of torch.matmul"),
        (spoiled(lambda b: b[0]["stats"].update(data=[-1.0])), "a time is positive"),
        (spoiled(lambda b: b[0]["stats"].update(data=[1e300])), "a time is positive and below"),
        (spoiled(lambda b: b[0]["extra_info"].update(floor_us=math.inf)), "has a read floor of inf us; a time is"),
        (spoiled(lambda b: b[0]["extra_info"].update(floor_us=-1.0)), "has a read floor of -1.0 us"),
        (spoiled(lambda b: b[0]["extra_info"].update(floor_us="2")), "has no times that can be read"),
        (spoiled(lambda b: b[0]["stats"].update(iqr=math.inf)), "has no times that can be read"),
    ],
)
def test_bad_input_is_a_sentence(tmp_path, base, spoil, message, capsys):
    new = run(tmp_path / "new.json")
    if spoil is None:
        new.unlink()
    else:
        new.write_text(json.dumps(spoil(json.loads(new.read_text()))))
    assert main(["regress", str(new), "--against", str(base[0])]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_too_many_runs_and_odd_thresholds(base):
    with pytest.raises(UserError, match="3 new runs"):
        regress.regress(base, base)
    with pytest.raises(UserError, match="threshold of 3"):
        regress.regress(base[:1], base, threshold=3)


@pytest.fixture
def suite():
    """The module of `pytest kernels --benchmark-only`."""
    return runpy.run_path(str(ROOT / "kernels" / "test_benchmarks.py"))


def test_the_guard_times_few_and_many_tokens_also_of_a_layer_that_nobody_tuned(suite):
    """Every kernel of ours that takes so many, beside the library."""
    cells = {}

    class Metafunc:
        fixturenames = ["provider"]
        config = SimpleNamespace(getoption=lambda name: False)

        def parametrize(self, names, given):
            for cell in given:
                n, k, m, provider = cell.values
                cells.setdefault((n, k), {}).setdefault(m, set()).add(provider.label)

    suite["pytest_generate_tests"](Metafunc())
    untuned = suite["UNTUNED"]
    recorded = (ROOT / "kernels" / "configs" / "nvidia-h200.json").read_text()
    assert untuned in cells and "{}x{}".format(*untuned) not in recorded and len(cells) >= 4
    for by_count in cells.values():
        assert set(by_count) >= {1, 8, 16, 64, 128, 256}
        for count, labels in by_count.items():
            assert labels >= {label for label, provider in kernel_list.OURS.items() if provider.takes(count)} | {
                suite["LIBRARY"]
            }


def test_the_guard_times_calls_on_the_host_and_a_prefill(suite):
    called = {name for name, *_ in suite["HOST_CALLS"]}
    assert called == {"F.linear", "wna16", "w8a8", *suite["STEP"]}
    assert {"rms_norm", "silu_product", "rope_append", "attention", "argmax", "sample"} <= set(suite["STEP"])
    for name in ("test_linear", "test_host_time", "test_prefill"):
        assert "gpu" in {mark.name for mark in suite[name].pytestmark}, name


def test_the_stored_baseline_has_what_the_guard_times():
    """A prefill, calls on the host, 16, 128 and 256 tokens, the layer that nobody tuned."""
    cells = set()
    for path in STORED:
        for name, cell in regress.load(path).cells.items():
            if cell.judged:
                cells.add(name.partition(" at ")[2])
    for n, k in ((4096, 4096), (14336, 4096), (3584, 3584)):
        assert {f"{n} x {k}, M = {m}, cold" for m in (1, 8, 16, 64, 128, 256)} <= cells
    assert {f"8192 x 8192, M = {m}, cold" for m in (1, 8, 16, 64, 128)} <= cells
    assert any(cell.endswith("whole") for cell in cells) and any(cell.endswith("host") for cell in cells)


def test_the_example_workflow_watches_files_that_exist():
    """Every path of its filter exists, and what measures and judges is behind one of them."""
    content = yaml.safe_load((ROOT / "docs" / "regress-workflow.yml").read_text())
    watched = set()
    for pattern in content[True]["pull_request"]["paths"]:  # YAML 1.1 reads the key `on` as true
        folder = pattern.removesuffix("/**")
        matched = list((ROOT / folder).rglob("*")) if folder != pattern else list(ROOT.glob(pattern))
        assert matched, pattern
        watched |= {path.resolve() for path in matched}
    for module in (timing, peers, devices, task, regress):
        assert Path(module.__file__).resolve() in watched, module
    assert {path.resolve() for path in (ROOT / "kernels").iterdir() if path.is_file()} <= watched
    for file in content["jobs"]["regress"]["env"]["BASELINE"].split():
        assert (ROOT / file).is_file(), file


def test_the_example_workflow_asks_again_on_a_suspicion():
    steps = yaml.safe_load((ROOT / "docs" / "regress-workflow.yml").read_text())["jobs"]["regress"]["steps"]
    script = "\n".join(step.get("run", "") for step in steps)
    assert f"-eq {regress.SUSPICION}" in script and "regress new.json again.json --against $BASELINE" in script
