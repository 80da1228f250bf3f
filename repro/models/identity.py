"""Fingerprints of models and tokenizers: the files of a Hugging Face folder that decide numbers or token ids.

A folder may hold its vocabulary as `tokenizer.json`, as `vocab.json` with `merges.txt`, or as `tokenizer.model`, and
special tokens, chat templates and settings of generation in files of their own. So every text file of the folder
counts, except those that Transformers never reads.

Source: Transformers 5, `AutoTokenizer.from_pretrained` and `PreTrainedModel.from_pretrained`: what these look for.
"""

import contextlib
import json
import os
from collections.abc import Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from repro.core.files import regular, sha256, short_hash

CONFIG, GENERATION, INDEX = "config.json", "generation_config.json", "model.safetensors.index.json"
DECIDING = (  # names of files that can decide a number or a token id
    "*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "*.spm", "*.bpe", "*.codes", "*.vocab", "tokenizer*",
    "*.tokenizer",
)  # fmt: skip
DECIDES_NOTHING = (  # and of those that match, but that no loader reads
    "card.json", "training-log.json", "trainer_state.json", "*_results.json", "*.index.json", "*.safetensors",
    "README*", "LICENSE*", "NOTICE*", "USE_POLICY*", "requirements.txt",
)  # fmt: skip
TEMPLATES = "additional_chat_templates"  # a folder of named chat templates
# The keys of config.json by which `AutoTokenizer` chooses and patches a class.
OF_TOKENIZER = ("model_type", "model_name", "tokenizer_class", "auto_map", "transformers_version", "vocab_size")


def deciding_files(folder: Path) -> list[Path]:
    """The text files of a model's folder that can decide numbers or token ids, in name order.

    Args:
        folder: a Hugging Face folder.

    Raises:
        UserError: one of them is no regular file, such as a named pipe, which its reader would wait for.
    """
    files = []
    for path in folder.iterdir():
        decides = any(fnmatch(path.name, pattern) for pattern in DECIDING)
        unread = any(fnmatch(path.name, pattern) for pattern in DECIDES_NOTHING)
        if decides and not unread and regular(path).is_file():
            files.append(path)
    files += [path for path in (folder / TEMPLATES).glob("*.jinja") if path.is_file()]
    return sorted(files)


def model_digest(folder: Path, files: Sequence[Path], indexed: Sequence[str]) -> str:
    """Eight hex digits of everything in a folder that decides the model's numbers.

    Args:
        folder: the folder.
        files: `deciding_files`, then its safetensors files.
        indexed: the names of the safetensors files that its index lists; none where it has no index.
    """
    lines = [f"{path.relative_to(folder).as_posix()} {sha256(path)}" for path in files]
    weights = {path.name for path in files if path.suffix == ".safetensors"}
    if indexed and set(indexed) != weights:  # the index chooses among the files
        lines.append(f"{INDEX} {' '.join(sorted(indexed))}")
    return short_hash("\n".join(lines))


def tokenizer_digest(folder: Path) -> str:
    """Eight hex digits of everything in a folder that decides its tokenizer's ids; models that share it share them.

    A listing of all jobs asks a thousand times: files are read again only where one of the folder has changed.
    """
    return _tokenizer_digest(folder, (*_stamps(folder), *_stamps(folder / TEMPLATES)))


def _stamps(folder: Path) -> list[tuple]:
    """What changes as soon as a file of a folder does, in name order: names, inodes, sizes and times."""
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    stamps = []
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # a link to nothing
            stat = os.stat(f"{folder}/{name}")
            stamps.append((name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return stamps


@cache
def _tokenizer_digest(folder: Path, stamps: tuple[tuple, ...]) -> str:
    files = [path for path in deciding_files(folder) if path.name not in (CONFIG, GENERATION)]
    facts: dict[str, Any] = {path.relative_to(folder).as_posix(): sha256(path) for path in files}
    config = read_config(folder)
    facts[CONFIG] = {key: config[key] for key in OF_TOKENIZER if key in config}
    return short_hash(json.dumps(facts, sort_keys=True))


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder; empty where it is no JSON object, of which its loader says what is wrong."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
