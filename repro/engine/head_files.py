"""Files of modules that are trained for a model: EAGLE-2's draft head and PMPD's scheduler.

A file has 16-bit tensors and says whose they are; a card of the same name, `.json`, says how they were trained. Those
of pocket models lie in this repository.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from repro import models
from repro.core.errors import UserError
from repro.core.files import ROOT, atomic, write_text

HEADS = ROOT / "repro" / "pocket" / "heads"


def identity(path: Path) -> str:
    """Hash of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def check(path: Path, what: str, declared: str) -> None:
    """Raise unless a file is the one that a job declares, which may come from another machine.

    Args:
        path: the file, which a job does not name: it lies elsewhere on every machine.
        what: what it holds, for the sentence.
        declared: its `identity` where the job was written.

    Raises:
        UserError: there is none, or another one.
    """
    if not path.is_file() or identity(path) != declared:
        raise UserError(f"{path}: not the {what} that the job was written with; bring that one, or write it here")


def read(path: Path, kind: str, what: str, command: str, fingerprint: str) -> dict[str, Tensor]:
    """The tensors of a file.

    Args:
        path: the file.
        kind: the key under which it says whose it is.
        what, command: what it holds and what makes one, for the sentence where it cannot be used.
        fingerprint: of the model that it has to belong to.

    Raises:
        UserError: the file is not there, not readable, or belongs to another model.
    """
    if not path.is_file():
        raise UserError(f"{path}: no {what}; train one with {command}")
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {})[kind])
        tensors = load_file(path)
    except Exception as error:  # what a damaged file leads to has many kinds
        reason = " ".join(str(error).split())[:100]
        raise UserError(f"{path}: not a {what} ({reason}); train it again with {command}") from None
    if about["fingerprint"] != fingerprint:
        raise UserError(f"{path}: the {what} of another model ({about['model']}); train one with {command}")
    return tensors


def write(path: Path, kind: str, name: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], most: int) -> int:
    """Write tensors in 16 bits with their card; their bytes.

    Args:
        path: the file.
        kind: as of `read`.
        name: of the model that they belong to.
        tensors: by name.
        facts: of the training, for the card.
        most: bytes of a file in this repository.

    Raises:
        UserError: a pocket model's tensors are larger than the repository takes.
    """
    halves = {key: value.to("cpu", torch.float16).contiguous() for key, value in tensors.items()}
    size = sum(tensor.nbytes for tensor in halves.values())
    if path.is_relative_to(HEADS) and size > most:
        raise UserError(f"{path}: {size:,} bytes; the repository takes {most:,} of it, name another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"model": name, "fingerprint": models.fingerprint(name)}
    with atomic(path) as temporary:
        save_file(halves, temporary, {kind: json.dumps(about)})
    write_text(path.with_suffix(".json"), json.dumps(about | facts | {"bytes": size}, indent=1) + "\n")
    return size
