"""Where a number comes from: the commit, the files that decided it, the environment. A row of every results file."""

import ast
import importlib.metadata
import json
import os
import platform
import subprocess
from functools import cache
from pathlib import Path

from repro.files import ROOT, sha256, short_hash

# Registries and plumbing: they choose and store, they do not decide a number.
PLUMBING = frozenset(
    f"repro/{name}.py"
    for name in (
        *("__init__", "errors", "files", "strict", "recipe", "profile", "provenance", "record"),
        *("baselines/__init__", "methods/__init__", "jobs/__init__"),
    )
)
LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "lm_eval", "triton")


@cache
def _imports(path: Path) -> frozenset[Path]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "repro":
            for name in node.names:
                found |= {f"{node.module}.{name.name}", node.module}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.startswith("repro.")}
    paths = {ROOT / (module.replace(".", "/") + end) for module in found for end in (".py", "/__init__.py")}
    return frozenset(p.resolve() for p in paths if p.is_file() and str(p.relative_to(ROOT)) not in PLUMBING)


def closure(*files: Path | str) -> list[Path]:
    """The given files of this project and all that they import from it, plumbing and registries left out, sorted."""
    todo, seen = [(ROOT / f).resolve() for f in files], set()
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            todo += _imports(path)
    return sorted(seen)


def code_hash(paths: list[Path]) -> str:
    """Eight hex digits of the contents of code files."""
    return short_hash("\n".join(f"{p.relative_to(ROOT)} {sha256(p)}" for p in sorted(paths)))


@cache
def commit() -> str:
    """The short commit of the checkout, `+` behind it when tracked files differ from it.

    Where the tree came without its history, `$REPRO_COMMIT` says it and goes before git; else `unknown` outside git.
    """
    if named := os.environ.get("REPRO_COMMIT"):
        return named

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout

    try:
        if Path(git("rev-parse", "--show-toplevel").strip()).resolve() != ROOT:
            return "unknown"
        return git("rev-parse", "--short=10", "HEAD").strip() + ("+" if git("status", "-s", "-uno").strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@cache
def environment() -> str:
    """JSON of what decides numbers besides our code: Python, libraries, processor (and GPU where torch sees one)."""
    facts = {"python": platform.python_version(), "machine": platform.machine(), "cpu": _cpu()}
    for name in LIBRARIES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return json.dumps(facts, sort_keys=True)


def origin(device: str, code: str) -> dict[str, str]:
    """What is written beside raw scores: the device, the commit, the hash of the deciding code, the environment."""
    return {"device": device_name(device), "commit": commit(), "code": code, "environment": environment()}


def device_name(device: str) -> str:
    """What a device calls itself: the GPU's name, or the processor's."""
    if device == "cpu":
        return _cpu()
    import torch

    return torch.cuda.get_device_name(device)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
