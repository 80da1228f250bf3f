"""The whole machinery on something tiny: a copy of the checkout, a random Llama, a scale, Make and Snakemake.

A copy, because these tests edit sources and because the checkout changes under a developer's hands. It has no trained
weights and no git, so that nothing in a table depends on the commit; its spec of SPEAR's Table 1 has three rows.
"""

import fcntl
import hashlib
import json
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import short_texts
import torch
import warm
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from repro.core.files import ROOT
from repro.store import observations

LEFT_OUT = (".*", "__pycache__", "build", "pocket-*m", "attempts", "docs", "tests")
BUILT = (".csv", ".tex", ".md")
DRAWN = (".svg", ".pdf", ".csv", ".md")
TARGET, PLOT = "tables/spear/table1.csv", "figures/spear/figure13.svg"
MODEL = "tiny $(touch x) llama"  # a folder; its name is in no command
HARD = 'it\'s "a" $(touch y) checkout'
SPEC = """\
title: 4-bit quality of four quantizers, bare and with SPEAR
rows:
  FP16: fp16
  RTN pc: rtn-w4-pc
  +SPEAR pc on RTN: rtn-w4-pc + spear(budget=1e-06, samples=4, tokens=16, cka_samples=4)
  GPTQ g128: gptq-w4-g128
extra_columns:
  KL: {kind: perplexity, corpus: wikitext2, show: kl, unit: nats}
  BPW: {kind: storage}
claims:
  - claim: spear C018
    says: 4-bit per-channel RTN costs perplexity
    printed: 9.71 to 20.46
    cells: {f: FP16 | Wiki, b: RTN pc | Wiki}
    cases: [Llama-3.2-1B]
    quantity: b / f - 1
    holds: "> 0"
"""
FIGURE = """\
title: bits a block weight
series: {pc: {group: pc}}
recipe: "rtn-w{bits}-{group}"
models: [Llama-3.2-1B]
measure: {kind: storage}
sweep: {bits: [4, 3]}
x: bits
y: bits a block weight
"""
HEADLINE = """\
title: Headline claims
claims:
  - claim: spear C005 C018-C020
    says: 4-bit per-channel RTN costs perplexity
    printed: 9.71 to 20.46
    table: spear/1
    cells: {f: FP16 | Wiki, b: RTN pc | Wiki}
    cases: [Llama-3.2-1B]
    quantity: b / f - 1
    holds: "> 0"
"""
SCALE = {
    "name": "tiny",
    "about": "a random Llama on short texts",
    "models": {"Llama-3.2-1B": MODEL},
    "corpora": {"wikitext2": "tiny-c4-docs", "c4": "tiny-c4-docs"},
    "calibration": {"corpus": "tiny-held-out", "sequences": 4, "length": 64},
    "perplexity": {"length": 64, "windows": 8, "kl_windows": 2},
}


def copy_checkout(checkout: Path, spec: str | None = SPEC) -> Path:
    """The sources of this checkout in a new folder; `spec` becomes the one of SPEAR's Table 1.

    Weights and what is built are left out.
    """
    ignored = shutil.ignore_patterns(*LEFT_OUT)

    def left_out(folder: str, names: list[str]) -> set[str]:
        built = any(Path(folder).is_relative_to(ROOT / top) for top in ("tables", "figures"))
        return ignored(folder, names) | ({n for n in names if n.endswith((*BUILT, *DRAWN))} if built else set())

    shutil.copytree(ROOT, checkout, symlinks=True, ignore=left_out)
    if spec is not None:
        for path in [*(checkout / "tables").glob("*/*.yaml"), *(checkout / "figures").glob("*/*.yaml")]:
            path.unlink()
        (checkout / "tables" / "spear" / "table1.yaml").write_text(spec)
        (checkout / "figures" / "spear" / "figure13.yaml").write_text(FIGURE)
        (checkout / "tables" / "table1.yaml").write_text(HEADLINE)
    short_texts.add_to(checkout)
    (checkout / "config" / "tiny.yaml").write_text(json.dumps(SCALE))  # JSON is YAML
    shutil.rmtree(checkout / "results", ignore_errors=True)
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    (checkout / ".venv" / "ready").touch()
    return checkout


def save_tokenizer(path: Path) -> None:
    """A tokenizer of the 256 bytes and one BOS, as a local Hugging Face folder has it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(["<s>", *letters])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>").save_pretrained(path)


def save_model(path: Path, shards: bool = False) -> Path:
    """A random Llama that groups of 128 divide, always the same, with its tokenizer, as a local folder."""
    shape = {"vocab_size": 257, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    config = LlamaConfig(**shape, **heads, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(path, max_shard_size="300KB" if shards else "1GB")
    save_tokenizer(path)
    return path


def folder(path: Path) -> Path:
    """A working folder that has the tiny model."""
    save_model(path / MODEL)
    return path


def environment(source: Path) -> dict[str, str]:
    """The environment of a command that runs the harness in `source`; `python` and `snakemake` are this Python's."""
    outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")  # `make test` is a make itself
    dropped = ("SCALE", "REPRO_DATA", "REPRO_COMMIT", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", *outer)
    kept = {k: v for k, v in os.environ.items() if k not in dropped}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return kept | {"PATH": path, "PYTHONPATH": str(source), "SCALE": SCALE["name"]}


@dataclass(frozen=True)
class Done:
    """A command that ended."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """All that it said."""
        return self.out + self.err


def run(words: Sequence[object], cwd: Path, source: Path, timeout: float = 300, **env: str) -> Done:
    """Run a command to its end."""
    words, env = [str(w) for w in words], environment(source) | env
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)
    return Done(done.returncode, done.stdout, done.stderr)


def quick(words: Sequence[object], cwd: Path, source: Path, timeout: float = 300, **env: str) -> Done:
    """As `run`, for a command of this Python, without the time that importing torch and Snakemake takes."""
    first, *words = [str(w) for w in words]
    assert first == sys.executable
    with tempfile.TemporaryDirectory() as output:
        code = warm.run(words, cwd, environment(source) | env, Path(output), timeout)
        return Done(code, *(Path(output, name).read_text(encoding="utf-8") for name in ("out", "err")))


def repro(*words: object) -> list[object]:
    """`python -m repro …`"""
    return [sys.executable, "-m", "repro", *words]


def snakemake(source: Path, *words: object) -> list[object]:
    """`snakemake …` with the Snakefile in `source`."""
    return [sys.executable, "-m", "snakemake", "-s", source / "Snakefile", "--cores", 2, *words]


def dry_run(path: Path, source: Path, *words: object) -> set[str]:
    """What `snakemake -n` in `path` would run: each job as its rule and its first output."""
    done = quick(snakemake(source, "-n", *words), path, source)
    assert done.code == 0, done.text
    return jobs(done.text)


def jobs(dry_run: str) -> set[str]:
    """The jobs that `snakemake -n` lists, each as its rule and its first output."""
    result = set()
    for block in re.split(r"\n(?=(?:local)?rule \w+:\n)", dry_run)[1:]:
        name = block.partition(":")[0].split()[-1]
        output = re.search(r"\n    output: ([^,\n]+)", block)
        result |= {f"{name} {output[1]}"} if output else set()
    return result


def listing(*folders: Path) -> dict[str, str]:
    """Every file under the folders with the hash of its content, and every folder."""
    result = {}
    for where in folders:
        for path in sorted([where, *where.rglob("*")]):
            result[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
    return result


def outputs(where: Path) -> dict[str, bytes]:
    """Every built file of tables and figures under `where`, by its path."""
    result = []
    for top, kinds in (("tables", BUILT), ("figures", DRAWN)):
        result += [path for path in sorted((where / top).rglob("*")) if path.suffix in kinds]
    return {str(p.relative_to(where)): p.read_bytes() for p in result}


def observed(where: Path) -> dict[str, tuple[str, str]]:
    """Per job folder under `where` the digest of its observations and the hash of its data file, if it has one."""
    result = {}
    for path in sorted((where / "build").rglob("observations.parquet")):
        data = path.with_name("data.safetensors")
        known = hashlib.sha256(data.read_bytes()).hexdigest() if data.is_file() else ""
        digest = observations.load(path).digest if path.stat().st_size else ""
        result[str(path.parent.relative_to(where))] = (digest, known)
    return result


def processes(path: Path) -> list[int]:
    """Processes that work in `path`."""
    result = []
    for process in psutil.process_iter(["pid", "cwd", "status"]):
        if process.info["cwd"] == str(path.resolve()) and process.info["status"] != psutil.STATUS_ZOMBIE:
            result.append(process.info["pid"])
    return result


# What every Python of a held build runs first: its first job of the kind $HOLD_KIND announces itself by the file
# $HOLD_FILE, and then waits for its end.
HOLD = """
import builtins, json, os, sys, time
true_import = builtins.__import__

def import_and_hold(name, *rest, **named):
    found = true_import(name, *rest, **named)
    runner = sys.modules.get("repro.workflow.runner")
    if hasattr(runner, "run") and not hasattr(runner, "true_run"):
        runner.true_run = runner.run
        def held(job):
            if job.kind == os.environ["HOLD_KIND"]:
                open(os.environ["HOLD_FILE"], "w").close()
                time.sleep(3600)
            runner.true_run(job)
        runner.run = held
    return found

builtins.__import__ = import_and_hold
"""


def start(words: Sequence[object], cwd: Path, source: Path, log: Path, **env: str) -> subprocess.Popen:
    """Start a command in a process group of its own, which Ctrl-C ends also where these tests run in the background."""

    def listen() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell lets what it starts in the background ignore it

    words, env = [str(w) for w in words], environment(source) | env
    with log.open("ab") as file:
        return subprocess.Popen(
            words, cwd=cwd, env=env, stdout=file, stderr=file, start_new_session=True, preexec_fn=listen
        )


def start_held(words: Sequence[object], cwd: Path, source: Path, log: Path, kind: str) -> subprocess.Popen:
    """Start a build, and return when a job of a kind has announced that it runs; the job waits to be ended.

    So the build is at work, at a known point, and cannot end by itself.
    """
    hold_folder = Path(tempfile.mkdtemp(dir=cwd.parent))
    (hold_folder / "sitecustomize.py").write_text(HOLD)
    announced = hold_folder / "announced"
    path = os.pathsep.join([str(hold_folder), str(source)])
    process = start(words, cwd, source, log, PYTHONPATH=path, HOLD_KIND=kind, HOLD_FILE=str(announced))
    while not announced.is_file():
        assert process.poll() is None, log.read_text()
        time.sleep(0.02)
    return process


def kill(process: subprocess.Popen) -> None:
    """kill -9 for the whole process group, and wait until it is gone."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


# --- fixtures, imported by shared_fixtures.py -------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """A copy after a build in it: what it said, its tables, figures and observations, the seconds that it took.

    `twin` is a second copy of the same moment, for builds elsewhere with sources that no test edits.
    """

    folder: Path
    twin: Path
    done: Done
    tables: dict[str, bytes]
    observed: dict[str, tuple[str, str]]
    seconds: float


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A copy of the checkout with the tiny scale, the tiny model in it."""
    return folder(copy_checkout(tmp_path_factory.mktemp("dag") / HARD))


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """SPEAR's Table 1 and a figure on the tiny model, on two cores, in a copy that only test_workflow.py edits.

    Its jobs are run by the pool, and Snakemake draws. Built once for all workers of a test run.
    """
    top = tmp_path_factory.getbasetemp()
    top = top.parent if os.environ.get("PYTEST_XDIST_WORKER") else top
    with open(top / "built.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = top / "built.pickle"
        if not made.is_file():
            checkout, twin = folder(copy_checkout(top / "built" / HARD)), top / "twin" / HARD
            shutil.copytree(checkout, twin, symlinks=True)
            began = time.monotonic()
            done = quick(repro("run", "spear/table1", "spear/figure13", "--side-by-side", 2), checkout, checkout)
            assert done.code == 0, done.text
            done = quick(snakemake(checkout, TARGET, PLOT), checkout, checkout)
            assert done.code == 0, done.text
            result = Built(checkout, twin, done, outputs(checkout), observed(checkout), time.monotonic() - began)
            made.write_bytes(pickle.dumps(result))
        return pickle.loads(made.read_bytes())
