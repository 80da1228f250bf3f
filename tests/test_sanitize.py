"""`.ci/sanitize` with a compute-sanitizer that says what it is told: what went wrong is there, with its reason."""

import csv
import os
import re
import subprocess
import sys
from itertools import product

import every_kernel
import pytest

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
