"""Provenance of a number: the commit, the environment and the device, stored with every row."""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from repro.core.errors import UserError
from repro.core.files import ROOT, sha256

LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "lm_eval", "triton")


def entry_hash(entry: Mapping[str, Any]) -> str:
    """Twelve hex digits of one entry of a data file (a corpus, task or model); the order of its keys does not count."""
    text = json.dumps(dict(entry), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return _digits(text)


def sources_hash() -> str:
    """Twelve hex digits of all Python files of the package: whatever draws a table or figure is among them.

    Steps and kernels draw nothing: their folders are links in the package, which are not followed.
    """
    hashed = hashlib.sha256()
    for folder, _, names in sorted(os.walk(ROOT / "repro")):
        for name in sorted(names):
            if name.endswith(".py"):
                hashed.update(f"{name}\0{sha256(Path(folder) / name)}\0".encode())
    return hashed.hexdigest()[:12]


def _digits(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# --- commit, environment, device --------------------------------------------------------------------------------------


@cache
def commit() -> str:
    """The short commit of the checkout, with a `+` if tracked files differ from it; `unknown` outside git.

    For a tree that came without its history, `$REPRO_COMMIT` names the commit. It takes precedence over git's, but a
    difference that git sees still adds the `+`.
    """
    named = os.environ.get("REPRO_COMMIT") or _git("rev-parse", "--short=10", "HEAD")
    if not named:
        return "unknown"
    differs = bool(_git("status", "-s", "-uno"))
    return named if named.endswith("+") or not differs else f"{named}+"


@cache
def has_commit(commit: str) -> bool:
    """Whether this checkout has a commit; True if there is no history to ask."""
    return _git("rev-parse", "--git-dir") is None or _git("cat-file", "-e", f"{commit}^{{commit}}") is not None


def check_commit(commit: str) -> None:
    """Check that a measurement at a commit can be repeated from this project's history.

    Raises:
        UserError: the commit is unknown, had uncommitted changes (`+`), or is not in this checkout.
    """
    if not re.fullmatch("[0-9a-f]{7,40}", commit):
        raise UserError(f"measured at commit {commit!r}; commit the code, then measure")
    if not has_commit(commit):
        raise UserError(f"measured at commit {commit}, which this checkout does not have; fetch it")


def _git(*words: str) -> str | None:
    """The output of a git command on this checkout; None if it is no checkout, or git fails or is missing."""
    try:
        top = _output_of_git("rev-parse", "--show-toplevel")
        output = _output_of_git(*words)
    except (OSError, subprocess.CalledProcessError):
        return None
    return output if Path(top).resolve() == ROOT else None


def _output_of_git(*words: str) -> str:
    """The output of a git command on the checkout.

    Raises:
        OSError, subprocess.CalledProcessError: git is missing or fails.
    """
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def environment() -> str:
    """JSON of what influences numbers besides our code: versions of Python and libraries, and the processor."""
    facts = {"python": platform.python_version(), "machine": platform.machine(), "cpu": _cpu()}
    for name in LIBRARIES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return json.dumps(facts, sort_keys=True)


def device_name(device: str) -> str:
    """The name of a device: the GPU's, or the processor's.

    Raises:
        UserError: there is no such device.
    """
    if device == "cpu":
        return _cpu()
    import torch

    if not torch.cuda.is_available():
        raise UserError(f"device {device!r}: this machine has no CUDA device; choose a scale whose device is cpu")
    return torch.cuda.get_device_name(device)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
