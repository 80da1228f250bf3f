"""Named prompt sets for everything that generates text: acceptance length, precision switching, demos.

    for prompt in prompts.load("gsm8k", count=40):
        engine.generate(prompt.text)

A set is plain text, because the models here are base models without a chat template: `template` in prompts.yaml ends
in the cue after which a base model answers. Sets whose licence allows it lie in this repository as compressed JSON
Lines; the others are read from the folder in REPRO_DATA. Both are checked by hash, and nothing falls back.

`python -m repro.data.prompts` writes the stored sets again from the folder in REPRO_DATA.
"""

import bz2
import hashlib
import json
import os
import tarfile
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np

from repro.core.errors import UserError, unknown
from repro.core.files import atomic, unpacked
from repro.core.strict import build, load_yaml
from repro.data.prompt_readers import READERS, PromptRow, json_lines

ENTRIES = Path(__file__).with_name("prompts.yaml")
FOLDER = Path(__file__).with_name("prompt_sets")


@dataclass(frozen=True)
class Prompt:
    """A prompt as a model sees it.

    Attributes:
        id: its name in the data set.
        text: the first turn in the set's template.
        turns: the user's messages without the template; those after the first are not asked.
        references: right answers, summaries or translations; empty where the set has none.
        words: how many words the task asks for (LongBench-Write), else None.
    """

    id: str
    text: str
    turns: tuple[str, ...]
    references: tuple[str, ...]
    words: int | None


@dataclass(frozen=True)
class PromptSet:
    """An entry of prompts.yaml, whose head says what each key means."""

    name: str
    description: str
    reader: str
    source: str
    origin: str
    sha256: str
    licence: str
    template: str
    prompts: int
    rows_sha256: str
    stored: bool = False
    second: str = ""
    second_sha256: str = ""

    def __post_init__(self) -> None:
        if self.reader not in READERS:
            raise unknown("reader", self.reader, READERS)
        if "{text}" not in self.template:
            raise UserError(f"template of {self.name}: it has no {{text}}, which the prompt replaces")


# --- the sets ---------------------------------------------------------------------------------------------------------


def _entries() -> dict[str, PromptSet]:
    entries = {}
    for name, entry in load_yaml(ENTRIES).items():
        entries[name] = build(PromptSet, {"name": name, **entry}, f"repro/data/{ENTRIES.name}: {name}")
    return entries


SETS = _entries()


def load(name: str, count: int | None = None, seed: int = 0) -> list[Prompt]:
    """Prompts of a set: all in its order, or the first `count` of a shuffle.

    The shuffle is that of the `datasets` library (a permutation by NumPy's default generator), with which SubSpec's
    code draws its 20 samples by seed 0. A larger `count` therefore begins with the same prompts.

    Args:
        name: a key of `SETS`.
        count: how many, 1 to the size of the set; None for all.
        seed: of the shuffle.

    Raises:
        UserError: unknown name, more prompts than the set has, or a file that is missing, damaged or another one.
    """
    if name not in SETS:
        raise unknown("prompt set", name, SETS)
    entry = SETS[name]
    prompts = rows(name)
    if count is not None:
        if not 1 <= count <= len(prompts):
            raise UserError(f"{count} prompts of {name!r}: the set has {len(prompts):,}; take 1 to {len(prompts):,}")
        order = np.random.default_rng(seed).permutation(len(prompts))
        prompts = tuple(prompts[i] for i in order[:count])
    result = []
    for row in prompts:
        text = entry.template.replace("{text}", row.turns[0])
        result.append(Prompt(row.id, text, row.turns, row.references, row.words))
    return result


def lacking(name: str) -> str:
    """Why a set's prompts cannot be read here; empty if they can."""
    entry = SETS[name]
    folder = os.environ.get("REPRO_DATA")
    if entry.stored or (folder and (Path(folder) / entry.source).is_file()):
        return ""
    return f"prompt set {name!r} is read from the folder in REPRO_DATA, which has no {entry.source}"


def identifier(name: str) -> str:
    """The hash that identifies the prompts of a set in a job, of its rows and template, without reading them.

    Raises:
        UserError: unknown name.
    """
    if name not in SETS:
        raise unknown("prompt set", name, SETS)
    entry = SETS[name]
    return hashlib.sha256(f"{entry.rows_sha256} {entry.template}".encode()).hexdigest()[:16]


@cache
def rows(name: str) -> tuple[PromptRow, ...]:
    """All rows of a set, from this repository or from the folder in REPRO_DATA.

    Raises:
        UserError: a file that is missing, damaged or another one.
    """
    entry = SETS[name]
    if entry.stored:
        path = FOLDER / f"{name}.jsonl.bz2"
        content = _stored(path)
        where = f"{path}: not the rows that prompts.yaml lists; check both out again"
    else:
        content = _lines(_source_rows(entry))
        where = f"prompt set {name!r}: {entry.source} gives other rows than prompts.yaml lists; copy it again"
    if hashlib.sha256(content).hexdigest() != entry.rows_sha256:
        raise UserError(where)
    parsed = []
    for record in json_lines(content):
        turns, references = tuple(record["turns"]), tuple(record["references"])
        parsed.append(PromptRow(record["id"], turns, references, record["words"]))
    return tuple(parsed)


def _stored(path: Path) -> bytes:
    try:
        return unpacked(path)
    except FileNotFoundError:
        raise UserError(f"{path}: this file of the repository is missing; check it out again") from None


def _source_rows(entry: PromptSet) -> list[PromptRow]:
    """The rows of a set from its source in REPRO_DATA."""
    content = _source(entry.name, entry.source, entry.sha256)
    second = _source(entry.name, entry.second, entry.second_sha256) if entry.second else b""
    try:
        return list(READERS[entry.reader](content, second))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, tarfile.TarError) as error:
        raise UserError(f"prompt set {entry.name!r}: {entry.source} is not readable ({error!r})") from None


def _source(name: str, source: str, sha256: str) -> bytes:
    folder = os.environ.get("REPRO_DATA")
    path = Path(folder or "") / source
    if not folder or not path.is_file():
        why = f"is not in REPRO_DATA={folder}" if folder else "is looked for in REPRO_DATA, which is not set"
        raise UserError(
            f"prompt set {name!r}: the file {source} {why}; set REPRO_DATA to the folder of the data mirror, "
            "or name a set that this repository holds"
        )
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(f"{path}: not the file that prompt set {name!r} is made from; copy it again")
    return content


def _lines(rows: list[PromptRow]) -> bytes:
    """Rows as JSON Lines."""
    return "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows).encode()


def write() -> None:
    """Write the stored sets again from their sources in REPRO_DATA, and print count and hash of every set."""
    for name, entry in SETS.items():
        content = _lines(_source_rows(entry))
        if entry.stored:
            with atomic(FOLDER / f"{name}.jsonl.bz2") as temporary:
                temporary.write_bytes(bz2.compress(content))
        print(f"{name}: prompts: {content.count(10)}, rows_sha256: {hashlib.sha256(content).hexdigest()}")


if __name__ == "__main__":
    write()
