"""Readers of the files that prompt sets are made from: each turns the bytes of a source into rows.

The second argument is the content of a second source, which only the two languages of a translation need.
"""

import csv
import gzip
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import unescape
from typing import Any


@dataclass(frozen=True)
class PromptRow:
    """A prompt as its data set has it, before any template.

    Attributes:
        id: its name in the data set.
        turns: the user's messages; all sets but MT-Bench have one.
        references: right answers, summaries or translations; empty where the set has none.
        words: how many words the task asks for (LongBench-Write), else None.
    """

    id: str
    turns: tuple[str, ...]
    references: tuple[str, ...] = ()
    words: int | None = None


def json_lines(content: bytes) -> Iterator[dict[str, Any]]:
    """The records of JSON Lines."""
    for line in content.decode().split("\n"):
        if line:
            yield json.loads(line)


def _questions(content: bytes, second: bytes) -> Iterator[PromptRow]:
    """Questions of EAGLE and Spec-Bench."""
    for record in json_lines(content):
        references = tuple(map(str, record.get("reference", ())))
        yield PromptRow(str(record["question_id"]), tuple(record["turns"]), references)


def _humaneval(content: bytes, second: bytes) -> Iterator[PromptRow]:
    for record in json_lines(gzip.decompress(content)):
        yield PromptRow(record["task_id"], (record["prompt"],), (record["canonical_solution"],))


def _gsm8k(content: bytes, second: bytes) -> Iterator[PromptRow]:
    for number, record in enumerate(json_lines(content)):
        yield PromptRow(str(number), (record["question"],), (record["answer"],))


def _math(content: bytes, second: bytes) -> Iterator[PromptRow]:
    """Problems whose reference is the final answer; the solutions, other people's prose, are left out."""
    for number, record in enumerate(json_lines(content)):
        name = record.get("unique_id", record.get("id", number))
        yield PromptRow(str(name), (record["problem"],), (str(record["answer"]),))


def _longwriter(content: bytes, second: bytes) -> Iterator[PromptRow]:
    for number, record in enumerate(json_lines(content)):
        yield PromptRow(str(number), (record["prompt"],), words=record["length"])


def _articles(content: bytes, second: bytes) -> Iterator[PromptRow]:
    for record in csv.DictReader(io.StringIO(content.decode(), newline="")):
        yield PromptRow(record["id"], (record["article"],), (record["highlights"],))


def _dialogues(content: bytes, second: bytes) -> Iterator[PromptRow]:
    for record in json_lines(content):
        summaries = tuple(record[key] for key in sorted(record) if key.startswith("summary"))
        yield PromptRow(record["fname"], (record["dialogue"],), summaries)


def _segments(content: bytes, second: bytes) -> Iterator[PromptRow]:
    """Segments of the TED test set of 2017: French in the first archive, the English reference in the second."""
    french = _ted(content, "fr-en/IWSLT17.TED.tst2017.fr-en.fr.xml")
    english = _ted(second, "en-fr/IWSLT17.TED.tst2017.en-fr.en.xml")
    if list(french) != list(english):
        raise ValueError("the segments of the two languages differ")
    for name, text in french.items():
        yield PromptRow(name, (text,), (english[name],))


def _ted(archive: bytes, member: str) -> dict[str, str]:
    """Segments of a talk file by `document/segment`."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        text = files.extractfile(member).read().decode()
    segments = {}
    document = ""
    for line in text.splitlines():
        if opened := re.search(r'<doc docid="(\d+)"', line):
            document = opened[1]
        elif segment := re.search(r'<seg id="(\d+)">(.*)</seg>', line):
            segments[f"{document}/{segment[1]}"] = unescape(segment[2]).strip()
    return segments


READERS: dict[str, Callable[[bytes, bytes], Iterator[PromptRow]]] = {
    "questions": _questions,
    "humaneval": _humaneval,
    "gsm8k": _gsm8k,
    "math": _math,
    "longwriter": _longwriter,
    "articles": _articles,
    "dialogues": _dialogues,
    "segments": _segments,
}
