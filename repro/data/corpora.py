"""Named texts and their token ids; files are checked by hash, so that a name always means the same text.

A text is read whole, its rows or documents are joined as the corpus says, and the tokenizer sees it in one call; BOS is
whatever that call adds (one at the very start, or none). Nothing falls back: a text that is not there is an error that
names the file, and no corpus is called by another's name (`c4-local` is 200 documents of C4, not `c4`). A text of
one's own is a corpus as well: its name is the path of a UTF-8 file.

The hub corpora are fetched with the `datasets` library, at pinned commits, and only when the scale says `hub: true`.
"""

import hashlib
import json
import lzma
import os
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor

from repro.core.errors import UserError, shortened, unknown
from repro.core.files import atomic, regular, short_hash
from repro.core.strict import build, load_yaml
from repro.data import sources

ENTRIES = Path(__file__).with_name("corpora.yaml")
FIRST_IDS = 8


@dataclass(frozen=True)
class Excerpt:
    """The first calibration sequences of one draw from a text that is too large for the repository.

    Attributes:
        file: their token ids one after the other, uint16 little-endian, a data file of the repository.
        sequences, length: how many there are, and the tokens of each.
        seed: of the draw, as `calibration` takes it.
        tokenizer_sha256: of the tokenizer whose ids they are.
    """

    file: str
    sequences: int
    length: int
    seed: int
    tokenizer_sha256: str


@dataclass(frozen=True)
class Corpus:
    """A named text.

    Attributes:
        source: the data file (`repro.data.sources`), or the hub data set with its configuration or file.
        joining: what stands between two documents (rows) of the text.
        empty_row: what an empty row reads as.
        excerpts: calibration sequences that the repository has although it does not have the whole text.
        split: which part of the data set it is.
        reader: what reads the documents that are joined, key of `READERS`; `file` is a text of one's own.
        sha256: of the joined text (UTF-8), where it is known beforehand.
        max_documents, max_tokens: the protocol's own cut before joining and after tokenizing.
        on_hub: the hub corpus to name instead, the same text or the fuller one.
    """

    name: str
    description: str
    source: str
    licence: str
    joining: str
    split: str
    reader: Literal["mirror", "hub", "file"]
    sha256: str = ""
    max_documents: int | None = None
    max_tokens: int | None = None
    on_hub: str = ""
    empty_row: str = ""
    excerpts: tuple[Excerpt, ...] = ()


# --- where the documents come from ------------------------------------------------------------------------------------


def _mirrored(corpus: Corpus) -> list[str]:
    otherwise = f"set `hub: true` in the scale and name {corpus.on_hub!r}" if corpus.on_hub else ""
    content = sources.read(corpus.source, f"corpus {corpus.name!r}", otherwise)
    try:
        lines = (lzma.decompress(content) if corpus.source.endswith(".xz") else content).decode()
        if not corpus.source.endswith(".jsonl"):
            return [lines]
        rows = [json.loads(line) for line in lines.split("\n") if line]
        texts = [row["text"] if "text" in row else row["prefix"] + row["gold_completion"] for row in rows]
    except (lzma.LZMAError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{corpus.source}: not readable as corpus {corpus.name!r} ({error!r}); copy it again") from None
    return [row or corpus.empty_row for row in texts]


def _fetched(corpus: Corpus) -> list[str]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(f"corpus {corpus.name!r} needs the datasets library; pip install datasets") from None
    dataset, part = corpus.source.split(": ")
    dataset, revision = dataset.split("@")
    source = {"data_files": {corpus.split: part}} if part.endswith(".gz") else {"name": part}
    try:
        rows = load_dataset(dataset, split=corpus.split, revision=revision, **source)
    except Exception as error:  # the library raises many kinds, for the network, the cache and the files
        raise UserError(f"corpus {corpus.name!r}: {dataset} at {revision[:8]} cannot be fetched ({error})") from None
    return list(rows[: corpus.max_documents]["text"])


def _own(corpus: Corpus) -> list[str]:
    path = Path(corpus.source)
    try:
        return [regular(path).read_text(encoding="utf-8")]
    except OSError as error:
        raise UserError(f"{shortened(path, 200)}: {os.strerror(error.errno)}; name a text file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start:,} is not UTF-8; save the text as UTF-8") from None
    except ValueError:  # a path with a zero byte
        raise UserError(f"{shortened(path)!r}: not a path of a file") from None


# --- the corpora ------------------------------------------------------------------------------------------------------

READERS: dict[str, Callable[[Corpus], list[str]]] = {
    "mirror": _mirrored,
    "hub": _fetched,
    "file": _own,
}


def _entries() -> dict[str, Corpus]:
    """The corpora of corpora.yaml by name."""
    entries = {}
    for name, entry in load_yaml(ENTRIES).items():
        entries[name] = build(Corpus, {"name": name, **entry}, f"repro/data/{ENTRIES.name}: {name}")
    return entries


CORPORA = _entries()


def entry(name: str) -> Corpus:
    """The corpus of a name; of a path, which has a dot or a slash, the text file there.

    Raises:
        UserError: there is no such corpus.
    """
    if name in CORPORA:
        return CORPORA[name]
    if "." not in name and "/" not in name:
        raise UserError(f"{unknown('corpus', name, CORPORA)}, or a path of a text file")
    facts = {"description": "a text of one's own", "licence": "", "joining": "", "split": ""}
    return Corpus(name, source=name, reader="file", **facts)


def label(name: str) -> str:
    """A corpus as part of a file name."""
    return name if name in CORPORA else re.sub(r"[^A-Za-z0-9_.=-]+", "_", Path(name).name).strip("_.") or "text"


# --- text and token ids -----------------------------------------------------------------------------------------------


def text(name: str, hub: bool = False) -> str:
    """The whole text of a corpus, its documents joined as the corpus says.

    Args:
        name: as `entry` takes it.
        hub: the scale allows fetching from the Hugging Face hub; used by the corpora that need it and by no other.

    Raises:
        UserError: unknown name, a file that is missing, unreadable or another text, or a hub that is not allowed.
    """
    corpus = entry(name)
    if corpus.reader == "hub" and not hub:
        raise UserError(f"corpus {name!r} is fetched from the hub; set `hub: true` in the scale to allow that")
    joined = corpus.joining.join(READERS[corpus.reader](corpus))
    if corpus.sha256 and _sha256(joined.encode()) != corpus.sha256:
        raise UserError(f"corpus {name!r}: {corpus.source} is not the text that this name stands for; copy it again")
    return joined


def identity(name: str, hub: bool = False) -> dict[str, str]:
    """What fixes the text in a record: `corpus` (its name), `label` and `corpus_sha256`.

    Raises:
        UserError: as `text`.
    """
    digest = _sha256(text(name, hub).encode())
    return {"corpus": name, "label": label(name), "corpus_sha256": digest}


def identifier(name: str, hub: bool = False) -> str:
    """What fixes the text of a corpus in a job: a hash of the text, known beforehand or taken from it; of a hub corpus
    its source, joining and cuts.

    Raises:
        UserError: unknown name, or a text that is neither known nor there.
    """
    if name in CORPORA:
        return _known_identifier(name, hub)
    return identity(name)["corpus_sha256"][:16]  # a file of one's own may have changed


@cache
def _known_identifier(name: str, hub: bool) -> str:
    corpus = CORPORA[name]
    if corpus.reader == "hub":
        facts = (corpus.source, corpus.split, corpus.joining, corpus.max_documents, corpus.max_tokens)
        return short_hash(json.dumps(facts))
    return (corpus.sha256 or identity(name, hub)["corpus_sha256"])[:16]


def token_ids(name: str, tokenizer: Callable[..., Any], hub: bool = False) -> np.ndarray:
    """Token ids int32 `[T]` of one tokenizer call on the joined text, with BOS exactly as the tokenizer adds it.

    Args:
        name: as `entry` takes it.
        tokenizer: a Hugging Face tokenizer.
        hub: as in `text`.

    Raises:
        UserError: as `text`.
    """
    ids = tokenizer(text(name, hub), verbose=False)["input_ids"]
    return np.asarray(ids, dtype=np.int32)[: entry(name).max_tokens]


def excerpt_for(name: str, sequences: int, length: int, seed: int) -> Excerpt | None:
    """The excerpt with the first `sequences` crops of a draw; None where there is none, or the whole text is here."""
    corpus = entry(name)
    if not corpus.excerpts or sources.available(corpus.source):
        return None
    for excerpt in corpus.excerpts:
        if (length, seed) == (excerpt.length, excerpt.seed) and sequences <= excerpt.sequences:
            return excerpt
    return None


def excerpt_ids(name: str, tokenizer: Any, file: str) -> np.ndarray:
    """Token ids int32 `[sequences, length]` of a corpus's excerpt, which `file` names.

    Raises:
        UserError: the ids are another tokenizer's; then the whole text is needed, and the sentence says how to get it.
    """
    entry = next(excerpt for excerpt in CORPORA[name].excerpts if excerpt.file == file)
    if tokenizer_sha256(tokenizer) != entry.tokenizer_sha256:
        text(name)
        raise UserError(f"corpus {name!r}: its excerpt is of another tokenizer; build again from the whole text")
    ids = np.frombuffer(sources.read(entry.file, f"corpus {name!r}"), dtype="<u2")
    return ids.astype(np.int32).reshape(entry.sequences, entry.length)


def tokenizer_sha256(tokenizer: Any) -> str:
    """Hex SHA-256 of a fast tokenizer's definition; truncation and padding, which calls change, are left out."""
    definition = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    return _sha256(json.dumps(definition, sort_keys=True).encode())


def save_tokens(path: Path | str, ids: np.ndarray, meta: Mapping[str, str]) -> None:
    """Write token ids int32 `[T]` with `meta` (identity, tokenizer), their own hash, count and first ids."""
    facts = {"ids_sha256": _ids_sha256(ids), "count": str(len(ids)), "first_ids": json.dumps(ids[:FIRST_IDS].tolist())}
    text = json.dumps(dict(meta) | facts, sort_keys=True)
    with atomic(path) as temporary:  # one key only: safetensors writes several in random order
        save_file({"ids": np.ascontiguousarray(ids, dtype="<i4")}, temporary, {"tokens": text})


def load_tokens(path: Path | str) -> tuple[np.ndarray, dict[str, str]]:
    """Token ids int32 `[T]` and the metadata that `save_tokens` wrote beside them.

    Raises:
        UserError: the file is missing or cut short, or the ids are not those whose hash it carries.
    """
    try:
        with safe_open(path, "np") as file:
            ids = file.get_tensor("ids")
            meta = json.loads((file.metadata() or {}).get("tokens", "{}"))
    except Exception as error:  # safetensors has its own kinds
        raise UserError(
            f"{path}: an incomplete or damaged file of token ids ({error}); delete it and build it again"
        ) from None
    if meta.get("ids_sha256") != _ids_sha256(ids) or meta.get("count") != str(len(ids)):
        raise UserError(f"{path}: the token ids are not those that it was saved with; delete it and build it again")
    return ids, meta


def calibration(ids: np.ndarray, sequences: int, length: int, seed: int) -> Tensor:
    """Calibration sequences int64 `[sequences, length]`: random crops of the token ids `[T]`, drawn as in GPTQ.

    Raises:
        UserError: the corpus is not longer than one sequence.
    """
    if sequences < 1 or length < 1:
        raise UserError(f"calibration takes at least one sequence of one token, not {sequences} of {length}")
    if len(ids) <= length:
        raise UserError(f"calibration: {len(ids)} tokens are too few for crops of {length}; name a longer corpus")
    draw = random.Random(seed)
    starts = [draw.randint(0, len(ids) - length - 1) for _ in range(sequences)]
    return torch.from_numpy(np.stack([ids[start : start + length] for start in starts]).astype(np.int64))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _ids_sha256(ids: np.ndarray) -> str:
    return _sha256(np.ascontiguousarray(ids, dtype="<i4").tobytes())
