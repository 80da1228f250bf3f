"""`.ci/sanitize` with a compute-sanitizer that says what it is told: what went wrong is there, with its reason."""

import csv
import math
import os
import re
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import every_kernel
import pytest
import torch

from repro.core.files import ROOT

PYTHON = """#!/bin/bash
case "$*" in
*get_device_name*) {facts} ;;
esac
"""
SANITIZER = """#!/bin/bash
[ "$1" = --version ] && {{ echo "Version 2025.3.1.0 (build 1)"; exit; }}
echo "========= COMPUTE-SANITIZER"
kernel="${{@: -1}}"
case "$2-$kernel" in
{cases}
*) echo "$kernel: 3 runs, worst error 1.0e-04"; echo "========= ERROR SUMMARY: 0 errors" ;;
esac
"""
ASKED = """exec {python} -c "import torch; torch.cuda.get_device_name = lambda: 'NVIDIA Fake'; $2\""""
SAID = "printf '%s\\n' 'NVIDIA Fake' nvidia-fake 0123456789 'read_floor dequantize'"  # as that does, at once
BARRIER = """echo "========= Barrier error detected. Divergent thread(s) in block, of 4"
for i in $(seq 30); do echo "=========     at line $i"; done
echo "========= Barrier error detected again"
echo "========= ERROR SUMMARY: 320 errors"
echo "========= ERROR SUMMARY: 220 errors were not printed. Use --print-limit option"
exit 1"""
RACES = """echo "========= Warning: Race reported between Write and Read"
echo "$kernel: 3 runs, worst error 1.0e-04"
echo "========= RACECHECK SUMMARY: 4 hazards displayed (0 errors, 4 warnings)\""""
CRASH = """echo "Traceback (most recent call last):"; echo "RuntimeError: no, it cannot"
echo "========= Target application returned an error"; echo "========= ERROR SUMMARY: 0 errors"; exit 1"""
OFF = """echo "$kernel x: off by 2"; echo "$kernel: 3 runs, worst error 2.0e+00"
echo "========= ERROR SUMMARY: 0 errors"; exit 1"""


@pytest.fixture
def sanitize(tmp_path):
    """Runs it with cases of `tool-kernel`, gives its process and its lines by tool and kernel."""

    def run(cases, *words, facts=SAID, **environment):
        text = "\n".join(f"{name}) {script} ;;" for name, script in cases.items())
        files = {"python": PYTHON.format(facts=facts), "compute-sanitizer": SANITIZER.format(cases=text)}
        for name, content in files.items():
            (tmp_path / name).write_text(content)
            (tmp_path / name).chmod(0o755)
        out = tmp_path / "folder" / "out.csv"
        environment = {"JOBS": "8"} | environment
        environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(tmp_path / "python")}
        environment |= {"REPRO_COMMIT": "0123456789", "REPRO_DATE": "2026-01-01"}
        command = [ROOT / ".ci" / "sanitize", out, *words]
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
        lines = list(csv.DictReader(out.open())) if out.exists() else []
        return done, {(line["tool"], line["kernel"]): line for line in lines}

    return run


def test_what_is_clean(sanitize):
    from repro.bench.kernel_list import CHECKED

    done, lines = sanitize({"racecheck-w8a8_gemv": RACES}, facts=ASKED.format(python=sys.executable))
    assert done.returncode == 0, done.stderr
    tools = ("memcheck", "racecheck", "synccheck")
    assert set(lines) == set(product(tools, CHECKED))
    assert all((line["runs"], line["errors"], line["reason"]) == ("3", "0", "") for line in lines.values())
    line = lines["racecheck", "w8a8_gemv"]
    assert [line[name] for name in ("warnings", "version", "device", "commit", "date")] == [
        "4", "2025.3.1.0", "NVIDIA Fake", "0123456789", "2026-01-01"
    ]  # fmt: skip


HELPERS = {  # and who calls them
    "noise": "sample",
    "q4_k_planes": "q4_k_naive_sparse",
    "w2a2_format": "quantize_2bit",
    "w4a16_plans": "w4a16_gemm",
}


def files_with_kernels():
    """Names of the files of `kernels/` that launch something, by what they must contain."""
    stems = set()
    for path in (ROOT / "kernels").glob("*.py"):
        text = path.read_text()
        if "@triton.jit" in text or "nvrtc.load(" in text or path.with_suffix(".cu").exists():
            stems.add(path.stem)
    return stems


def test_no_kernel_is_left_out():
    """Every file with a kernel is checked on at least one small case, every source is of a file that is checked."""
    from repro.bench.kernel_list import CHECKED, load

    assert files_with_kernels() - set(HELPERS) <= set(CHECKED)
    for helper, caller in HELPERS.items():
        text = (ROOT / "kernels" / f"{caller}.py").read_text()
        assert caller in CHECKED and re.search(rf"import {helper}\b|kernels\.{helper} import", text), helper
    pytest.importorskip("triton")
    for name in CHECKED:
        assert every_kernel.small_cases(load(name)), f"{name}: no case is small enough for the sanitizer"
    texts = "".join((ROOT / "kernels" / f"{name}.py").read_text() for name in (*CHECKED, *HELPERS))
    for source in (ROOT / "kernels").glob("*.cu"):
        assert source.stem in CHECKED or f'"{source.name}"' in texts, source.name


def test_configurations_are_of_every_kind_and_as_many_of_each():
    """Four of tile a and four of b where K is split: of three cases from the first to the last, of each case others."""
    space = [{"a": size, "SPLIT": 1} for size in range(30)] + [{"b": size, "SPLIT": 2} for size in range(3)]
    space += [{"a": 7, "SPLIT": 2}, {"a": 1, "SPLIT": 1, "WGS": 3}]
    of_cases = [every_kernel.chosen(space, number, 3) for number in range(3)]
    sizes_of_cases = ([0, 7, 15, 23], [2, 10, 18, 26], [5, 13, 21, 29])
    for configs, sizes in zip(of_cases, sizes_of_cases, strict=True):
        assert [config["a"] for config in configs if config in space[:30]] == sizes
        assert len(configs) == 9 and all(config in configs for config in space[30:])
    assert every_kernel.chosen(space[:30], 0, 1) == [space[29 * i // 15] for i in range(16)]
    assert every_kernel.chosen(space[:1], 0, 1) == space[:1]
    many = [{"WGS": size, "PRODUCER": size} for size in range(40)]
    assert every_kernel.chosen(many, 1, 3) == many


def planned(config, case):
    """Source and macros of `w4a16_gemm` with a configuration on a case."""
    from repro.kernels import w4a16_plans

    form = case["bits"], case["group"], case["symmetric"]
    source, plan = w4a16_plans.plan_of(config, case["M"], case["N"], case["K"], form, (9, 0))
    return source.stem, plan.macros


CODE = ("WGS", "PAIR", "PRODUCER", "SCALED")  # constants of a source that decide what a thread block does


def stages_of_turn(source, constants):
    """Over how many stages turns.cuh unrolls the loop of a source; 1 for none."""
    if "COLUMNS" not in constants or source == "w4a16_gemm":
        return 1
    x_stages, most = constants["STAGES"], 8
    if source == "w4a16_multicast":  # a stage of words is two of x
        x_stages, most = x_stages if x_stages % 2 else x_stages // 2, 6
    both = math.lcm(x_stages, constants["RING"])
    return both if both <= most else 1


def code_paths(configs, case):
    """What thread blocks do with some configurations: sources with their constants, split or not, unrolled or not."""
    paths = set()
    for config in configs:
        source, constants = planned(config, case)
        values = tuple(constants.get(name) for name in CODE)
        unrolled = stages_of_turn(source, constants) > 1
        paths.add((source, *values, constants["SPLIT"] > 1, "COLUMNS" in constants, unrolled))
    return paths


def test_thread_blocks_of_every_kind_of_w4a16_gemm_run():
    from repro.kernels import w4a16_gemm

    cases = every_kernel.small_cases(w4a16_gemm)
    run, possible = set(), set()
    for number, case in enumerate(cases):
        configs = every_kernel.chosen(w4a16_gemm.SPACE, number, len(cases))
        assert len(configs) < 60
        run |= code_paths(configs, case)
        possible |= code_paths(w4a16_gemm.SPACE, case)
    assert run == possible and len(run) > 40


def test_unrolled_loops_of_w4a16_gemm_run_with_full_tiles_and_ragged_ones():
    """Of each source with known columns; three and four warpgroups, with and without a producer, K split or not."""
    from repro.kernels import w4a16_gemm

    cases = every_kernel.small_cases(w4a16_gemm)
    full, ragged = set(), set()
    for number, case in enumerate(cases):
        for config in every_kernel.chosen(w4a16_gemm.SPACE, number, len(cases)):
            source, constants = planned(config, case)
            if "COLUMNS" not in constants:
                continue
            groups = constants.get("WGS")
            if groups is None:
                full.add((source, None, None, constants["SPLIT"] > 1))
                continue
            if stages_of_turn(source, constants) == 1:
                continue
            of_rows = full if case["N"] % (64 * groups) == 0 else ragged
            of_rows.add((source, groups, constants.get("PRODUCER"), constants["SPLIT"] > 1))
    assert full >= {
        *product(["w4a16_gemm"], [None], [None], [False, True]),
        *product(["w4a16_wgmma"], [1, 2, 3, 4], [None], [False, True]),
        *product(["w4a16_multicast"], [2, 3, 4], [1], [False, True]),
        ("w4a16_multicast", 3, 0, False), ("w4a16_multicast", 3, 0, True), ("w4a16_multicast", 4, 0, False)
    }  # fmt: skip
    assert {path[:3] for path in ragged} >= {
        ("w4a16_wgmma", 3, None), ("w4a16_wgmma", 4, None), ("w4a16_multicast", 3, 0), ("w4a16_multicast", 4, 0),
    }  # fmt: skip


def test_parts_are_the_cases_of_a_kernel(monkeypatch, capsys):
    """Each of three parts runs other cases, one with none is no failure; of one part nothing is."""
    from types import SimpleNamespace

    from repro.kernels import w4a16_gemm

    ran = []

    def launch(x, packed, config):
        ran.append(int(x))
        return x.float()

    module = SimpleNamespace(
        CASES=[{"N": 1, "number": number} for number in range(2)],
        SPACE=w4a16_gemm.SPACE[:1],
        make_inputs=lambda case, device: (torch.tensor(1 + case["number"]), None),
        reference=lambda x, packed: x.float(),
        launch=launch,
    )
    monkeypatch.setattr(every_kernel.kernel_list, "load", lambda name: module)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for part, want in ((0, [1]), (1, [2]), (2, [])):
        ran.clear()
        assert every_kernel.main(["--part", f"{part}/3", "fake"]) == 0
        assert ran == want and f"fake: {len(want)} runs" in capsys.readouterr().out
    ran.clear()
    assert every_kernel.main(["fake"]) == 0 and ran == [1, 2]
    module.CASES = []
    assert every_kernel.main(["fake"]) == 1


@pytest.mark.parametrize(
    "script, runs, errors, reason",
    [
        (BARRIER, "0", "320", "exit status 1: Barrier error detected. Divergent thread(s) in block; of 4"),
        (CRASH, "0", "0", "exit status 1: RuntimeError: no; it cannot"),
        (OFF, "3", "0", "exit status 1: dequantize: 3 runs; worst error 2.0e+00"),
        ("kill -9 $$", "0", "unknown", "exit status 137: "),
        ("sleep 9", "0", "unknown", "exit status 124: "),
        ('echo "========= ERROR SUMMARY: 0 errors"', "0", "0", "exit status 0: "),
    ],
    ids=["barrier", "crash", "wrong", "killed", "hangs", "nothing-ran"],
)
def test_what_is_not(sanitize, script, runs, errors, reason):
    done, lines = sanitize({"synccheck-dequantize": script}, "dequantize", "read_floor", TOOLS="synccheck", LIMIT="2")
    assert done.returncode == 1 and set(lines) == {("synccheck", "dequantize"), ("synccheck", "read_floor")}
    line = lines["synccheck", "dequantize"]
    assert (line["runs"], line["errors"], line["reason"]) == (runs, errors, reason)
    assert lines["synccheck", "read_floor"]["reason"] == ""
    if script is BARRIER:
        assert "at line 14" in done.stderr and "at line 15" not in done.stderr


IN_PARTS = """case "$*" in
*"--part 0/3"*) echo "$kernel: 2 runs, worst error 1.0e-04"; echo "========= ERROR SUMMARY: 0 errors" ;;
*"--part 1/3"*) {second} ;;
*"--part 2/3"*) echo "$kernel: 0 runs, worst error 0.0e+00"; echo "========= ERROR SUMMARY: 0 errors" ;;
esac"""


@pytest.mark.parametrize(
    "second, runs, errors, reason",
    [
        ('echo "$kernel: 5 runs, worst error 1.0e-04"; echo "========= ERROR SUMMARY: 0 errors"', "7", "0", ""),
        (BARRIER, "2", "320", "exit status 1: Barrier error detected. Divergent thread(s) in block; of 4"),
        ('echo "what it said last"; kill -9 $$', "2", "unknown", "exit status 137: what it said last"),
    ],
    ids=["clean", "barrier", "killed"],
)
def test_a_check_in_parts_is_one_line(sanitize, second, runs, errors, reason):
    """Runs and errors of all parts, the reason of the one that has one."""
    cases = {"memcheck-dequantize": IN_PARTS.format(second=second)}
    done, lines = sanitize(cases, "dequantize", TOOLS="memcheck", PARTS="3")
    line = lines["memcheck", "dequantize"]
    assert (line["runs"], line["errors"], line["reason"]) == (runs, errors, reason)
    assert done.returncode == int(reason != "")


def test_an_unknown_kernel_is_a_sentence(sanitize):
    done, lines = sanitize({}, "dequantise")
    assert done.returncode == 2 and "unknown kernel 'dequantise'; there is read_floor" in done.stderr and not lines


def test_a_run_that_is_stopped_leaves_the_lines_that_it_has(sanitize, tmp_path):
    """One at a time: the last check is the one in which the whole is stopped."""
    stop = 'kill -TERM "$(cat pid)"; sleep 2'
    done, lines = sanitize(
        {"synccheck-dequantize": f"cd {tmp_path}; {stop}"}, facts=f"{SAID}; echo $PPID > {tmp_path}/pid", JOBS="1"
    )
    assert done.returncode == 143
    last = lines.pop(("synccheck", "dequantize"))
    assert (last["runs"], last["reason"]) == ("0", "not checked")
    assert len(lines) == 5 and all((line["runs"], line["reason"]) == ("3", "") for line in lines.values())


def test_no_process_of_a_check_outlives_it(sanitize, tmp_path):
    """Two parts of each of two checks sleep when it is stopped."""
    asleep = f"echo $$ >> {tmp_path}/asleep; exec sleep 60"
    stop = (
        f'while [ "$(wc -l < {tmp_path}/asleep)" -lt 4 ]; do sleep 0.1; done; kill -TERM "$(<{tmp_path}/pid)"; sleep 2'
    )
    cases = {"memcheck-dequantize": asleep, "racecheck-dequantize": asleep, "synccheck-dequantize": stop}
    (tmp_path / "asleep").touch()
    done, lines = sanitize(cases, "dequantize", facts=f"{SAID}; echo $PPID > {tmp_path}/pid", PARTS="2")
    assert done.returncode == 143 and {line["reason"] for line in lines.values()} == {"not checked"}
    processes = (tmp_path / "asleep").read_text().split()
    assert len(processes) == 4
    deadline = time.monotonic() + 5
    while running := [process for process in processes if Path("/proc", process).exists()]:
        assert time.monotonic() < deadline, running
        time.sleep(0.05)


def test_checks_that_run_when_it_is_stopped_write_no_more(sanitize, tmp_path):
    """Side by side, lines being copied slowly: what has not ended is not checked, none is written over another."""
    (tmp_path / "cat").write_text('#!/bin/bash\nsleep 0.5\nexec /bin/cat "$@"\n')
    (tmp_path / "cat").chmod(0o755)
    ended = 'echo "$kernel: 3 runs"; echo "========= ERROR SUMMARY: 0 errors"'
    cases = {"memcheck-read_floor": f'sleep 0.2; kill -TERM "$(<{tmp_path}/pid)"; sleep 2'}
    cases |= {f"{tool}-dequantize": f"sleep 0.5; {ended}" for tool in ("memcheck", "racecheck", "synccheck")}
    done, lines = sanitize(cases, facts=f"{SAID}; echo $PPID > {tmp_path}/pid")
    assert done.returncode == 143 and len(lines) == 6
    assert {tool for tool, _ in lines} == {"memcheck", "racecheck", "synccheck"}
    assert all((line["runs"], line["reason"]) in (("3", ""), ("0", "not checked")) for line in lines.values())
    assert lines["memcheck", "read_floor"]["reason"] == "not checked"
