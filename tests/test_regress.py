"""The regression guard: silent on noise, loud on a slowdown that two runs agree on."""

import json
import math
import random
import statistics

import pytest
import yaml

from repro import regress
from repro.__main__ import main
from repro.errors import UserError
from repro.files import ROOT

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
        said = capsys.readouterr().out
    assert caught == 20
    assert said.count("\n") == 1 and "wna16_gemv (w4-g128, fp16) at 4096 x 4096, M = 1, cold" in said
    found = float(said.split(" is ")[1].split(" %")[0])
    assert found == pytest.approx(percent, abs=1.5)


def test_one_slow_run_is_a_suspicion(tmp_path, base, capsys):
    slow, fine = run(tmp_path / "slow.json", 1.1), run(tmp_path / "fine.json", seed=9)
    against = ["--against", *map(str, base)]
    assert main(["regress", str(slow), *against]) == 3
    assert "measure again and give both files" in capsys.readouterr().out
    assert main(["regress", str(slow), str(fine), *against]) == 0
    assert main(["regress", str(fine), *against]) == 0
    assert "no regression: 4 cells" in capsys.readouterr().out


def test_a_slower_machine_is_no_regression(tmp_path, base):
    new = [run(tmp_path / f"new{i}.json", machine=1.3, seed=i) for i in range(2)]
    assert regress.regress(new, base)[0] == 0


@pytest.mark.parametrize("reference", ["library", "floor"])
def test_one_reference_that_got_faster_is_no_regression(tmp_path, base, reference):
    """A new cuBLAS, or a better read floor kernel: ours did not change."""
    new = [run(tmp_path / f"new{i}.json", seed=i, **{reference: 0.9}) for i in range(2)]
    assert regress.regress(new, base)[0] == 0


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
    assert all(c.key[2] == "wna16_gemv" for c in regress.compare(regress.load(base[0]), [regress.load(base[1])]))


# ---- recorded on an H200: runs of four processes, and a kernel that really was slower

RECORDED = json.loads((ROOT / "tests" / "recorded_noise.json").read_text())["runs"]
BY_PROCESS = {p: [r["cells"] for r in RECORDED if r["process"] == p] for p in "abcd"}
MATMUL = "/".join(regress.LIBRARY)


def as_file(path, cells, rng=None, slowed=None, rename=None):
    """A recorded run as a file of benchmarks: rounds drawn anew, one cell `slowed` by a factor, others left out."""
    benchmarks = []
    for name, cell in cells.items():
        label, shape = name.split(" ")
        label = (rename or {}).get(label, label)
        if label is None:
            continue
        kernel, dtype, provider = label.split("/")
        n, k = map(int, shape.split("x"))
        factor = slowed[1] if slowed and slowed[0] == name else 1.0
        data = [us * factor * 1e-6 for us in (rng.choices(cell["us"], k=25) if rng else cell["us"])]
        low, _, high = statistics.quantiles(data, n=4)
        stats = {"median": statistics.median(data), "iqr": high - low, "rounds": len(data), "data": data}
        info = {"kernel": kernel, "dtype": dtype, "provider": provider, "N": n, "K": k, "M": 1, "mode": "cold"}
        info |= {"floor_us": cell["floor_us"], "device": "NVIDIA H200", "ours": label != MATMUL}
        benchmarks.append({"name": name, "extra_info": info, "stats": stats})
    path.write_text(json.dumps({"benchmarks": benchmarks}))
    return path


def test_silent_on_recorded_noise_200_times(tmp_path):
    """The baseline has a run of each of two processes, as the workflow makes it; the new runs are of either."""
    rng = random.Random(0)
    for _ in range(200):
        base = [rng.choice(BY_PROCESS["a"]), rng.choice(BY_PROCESS["b"]), rng.choice(BY_PROCESS["b"])]
        new = [rng.choice(BY_PROCESS[rng.choice("ab")]) for _ in range(2)]
        files = [as_file(tmp_path / f"{i}.json", cells, rng) for i, cells in enumerate([*base, *new])]
        assert regress.regress(files[3:4], files[:3])[0] == 0
        assert regress.regress(files[3:], files[:3])[0] == 0


@pytest.mark.parametrize("percent", [5, 10])
def test_a_slowdown_in_recorded_noise_is_caught(tmp_path, percent):
    rng = random.Random(percent)
    for _ in range(60):
        process = rng.choice("ab")
        *base, one, two = rng.sample(BY_PROCESS[process], 4)
        cell = rng.choice([name for name in one if MATMUL not in name])
        files = [as_file(tmp_path / f"{i}.json", cells, rng) for i, cells in enumerate(base)]
        slow = [
            as_file(tmp_path / f"new{i}.json", cells, rng, (cell, 1 + percent / 100))
            for i, cells in enumerate([one, two])
        ]
        code, lines = regress.regress(slow, files)
        shape = cell.split(" ")[1].replace("x", " x ")
        assert code == 1 and len(lines) == 1 and cell.split(" ")[0].split("/")[2] in lines[0] and shape in lines[0]


@pytest.mark.parametrize("slow, shape, percent", [("slow5", "2048x2048", 5.2), ("slow10", "4096x4096", 11.9)])
def test_a_kernel_that_really_was_slower_is_caught(tmp_path, slow, shape, percent):
    """The same kernel on more rows under the old name, measured on the GPU in two processes."""
    honest = {"slow5": None, "slow10": None}
    other = {name: None for name in ("slow5", "slow10", "w4-g128/fp16/wna16_gemv")}
    runs = [BY_PROCESS[p][0] for p in "cd"]
    base = [as_file(tmp_path / f"base{i}.json", cells, rename=honest) for i, cells in enumerate(runs)]
    here = [{name: cell for name, cell in cells.items() if name.endswith(shape)} for cells in runs]
    new = [
        as_file(tmp_path / f"new{i}.json", cells, rename=other | {slow: "w4-g128/fp16/wna16_gemv"})
        for i, cells in enumerate(here)
    ]
    code, lines = regress.regress(new, base, partial=True)
    assert code == 1 and len(lines) == 1 and shape.replace("x", " x ") in lines[0]
    assert float(lines[0].split(" is ")[1].split(" %")[0]) == pytest.approx(percent, abs=0.5)
    assert regress.regress(base, base)[0] == 0


def spoiled(change):
    def spoil(content):
        change(content["benchmarks"])
        return content

    return spoil


@pytest.mark.parametrize(
    "spoil, said",
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
    ],
)
def test_bad_input_is_a_sentence(tmp_path, base, spoil, said, capsys):
    new = run(tmp_path / "new.json")
    if spoil is None:
        new.unlink()
    else:
        new.write_text(json.dumps(spoil(json.loads(new.read_text()))))
    assert main(["regress", str(new), "--against", str(base[0])]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_too_many_runs_and_odd_thresholds(base):
    with pytest.raises(UserError, match="3 new runs"):
        regress.regress(base, base)
    with pytest.raises(UserError, match="threshold of 3"):
        regress.regress(base[:1], base, threshold=3)


def test_the_example_workflow_asks_again_on_a_suspicion():
    steps = yaml.safe_load((ROOT / "docs" / "regress-workflow.yml").read_text())["jobs"]["regress"]["steps"]
    script = "\n".join(step.get("run", "") for step in steps)
    assert f"-eq {regress.SUSPICION}" in script and "regress new.json again.json --against $BASELINE" in script
