"""Zero-shot tasks of lm-eval on local data files: their names, where their records are, their chance level.

Entries are data (`tasks.yaml`); a converter gives a file's records in the columns that lm-eval's shipped task expects.
A name that is not lm-eval's says what the set is: `hellaswag-1916` are the records that the mirror has, `mmlu-10` ten
items of each subject.
"""

import csv
import hashlib
import io
import json
import random
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from repro.core.errors import UserError, unknown
from repro.core.files import short_hash
from repro.core.strict import build, load_yaml
from repro.data import sources

ENTRIES = Path(__file__).with_name("tasks.yaml")
Record = dict[str, Any]


def jsonl(content: bytes) -> Iterator[Record]:
    """The records of a file with one JSON object a line."""
    for line in io.StringIO(content.decode("utf-8"), newline=None):
        yield json.loads(line)


def _piqa(valid: bytes, labels: bytes) -> Iterator[Record]:
    for record, label in zip(jsonl(valid), labels.decode().split(), strict=True):
        yield {key: record[key] for key in ("goal", "sol1", "sol2")} | {"label": int(label)}


def _arc(content: bytes) -> Iterator[Record]:
    for record in jsonl(content):
        texts, gold = record["choices"], record["gold"]
        if texts[0] in texts[1:]:  # the source pads three choices to four with a copy in front
            texts, gold = texts[1:], texts[1:].index(texts[gold])
        labels = list("ABCDE"[: len(texts)])
        question = record["query"].removeprefix("Question: ")
        yield {"question": question, "choices": {"text": texts, "label": labels}, "answerKey": labels[gold]}


def _hellaswag(content: bytes) -> Iterator[Record]:
    for record in jsonl(content):
        yield {"query": record["query"], "choices": record["choices"], "label": record["gold"]}


def _winogrande(content: bytes) -> Iterator[Record]:
    for record in jsonl(content):  # the blank in front: an option is then all that comes before the continuation
        one, two = record["context_options"]
        sentence = "_ " + record["continuation"]
        yield {"sentence": sentence, "option1": one, "option2": two, "answer": str(record["gold"] + 1)}


def _boolq(content: bytes) -> Iterator[Record]:
    for record in jsonl(content):
        passage, question = re.fullmatch(r"Passage: (.*)\nQuestion: (.*)\?", record["query"], re.DOTALL).groups()
        yield {"passage": passage, "question": question, "label": record["gold"]}


def _lambada(content: bytes) -> Iterator[Record]:
    for record in jsonl(content):
        yield {"text": record["text"]}


def _mmlu(content: bytes) -> Iterator[Record]:
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:xz") as archive:
        for name in sorted(name for name in archive.getnames() if name.endswith(".csv")):
            subject, split = Path(name).stem.rsplit("_", 1)
            for row in csv.DictReader(io.StringIO(archive.extractfile(name).read().decode("utf-8"), newline="")):
                choices = [row[f"choice{i}"] for i in range(4)]
                record = {"question": row["question"], "choices": choices, "answer": int(row["answer"])}
                yield {"subject": subject, "split": split} | record


def _blimp(content: bytes) -> Iterator[Record]:
    for record in jsonl(content):
        yield {"subject": record["UID"]} | {key: record[key] for key in ("sentence_good", "sentence_bad")}


def _cloze(near: bool, content: bytes) -> Iterator[Record]:
    """How a paragraph goes on, out of four runs of words, in the columns of HellaSwag.

    The text is the held-out one; an empty line ends a document. Every paragraph of 60 words or more gives an item: its
    first 40 words and the 12 after them. The other three runs of 12 begin anywhere in other paragraphs: of the same
    document where it is `near`, of other documents where not. Paragraphs, runs and order are drawn by a seed.
    """
    rng = random.Random(f"cloze near={near}")
    documents = []
    for document in content.decode("utf-8").split("\n\n"):
        paragraphs = [line.split() for line in document.splitlines()]
        documents.append([words for words in paragraphs if len(words) >= CLOZE.least])
    every: list[tuple[int, int]] = []  # numbers of a document and of a paragraph in it
    for d, paragraphs in enumerate(documents):
        every += [(d, p) for p in range(len(paragraphs))]
    for d, p in sorted(rng.sample(every, min(CLOZE.items, len(every)))):
        others = [at for at in every if (at[0] == d) == near and at != (d, p)]
        if len(others) < CLOZE.choices - 1:
            continue
        words = documents[d][p]
        choices = [words[CLOZE.context : CLOZE.context + CLOZE.run]]
        for other_d, other_p in rng.sample(others, CLOZE.choices - 1):
            other = documents[other_d][other_p]
            start = rng.randrange(len(other) - CLOZE.run + 1)
            choices.append(other[start : start + CLOZE.run])
        order = rng.sample(range(CLOZE.choices), CLOZE.choices)
        texts = [" ".join(choices[i]) for i in order]
        yield {"query": " ".join(words[: CLOZE.context]), "choices": texts, "label": order.index(0)}


class Cloze(NamedTuple):
    """Words of a cloze's context and runs, of the least paragraph; choices; items at most."""

    context: int = 40
    run: int = 12
    least: int = 60
    choices: int = 4
    items: int = 1000


CLOZE = Cloze()


@dataclass(frozen=True)
class EvaluationTask:
    """One task: `task` is lm-eval's own name where ours differs, `folder` is where lm-eval/tasks keeps it.

    `version` is lm-eval's of the task. `chance` is what an answer without reading gets. `files` (`repro.data.sources`),
    each with its SHA-256, go as bytes to the converter of that name in `CONVERT`, which yields records with the columns
    of the shipped task. `form` says how the records differ from the original data set. `draw` items of each subject,
    chosen by `seed`; 0 is all of them.
    """

    name: str
    folder: str
    version: str
    metric: str
    chance: float
    files: dict[str, str]
    convert: str
    form: str
    task: str = ""
    split: str = "validation"
    shots: int = 0
    draw: int = 0
    seed: int = 0

    @cached_property
    def identifier(self) -> str:
        """A hash of the entry, which has those of its files."""
        return short_hash(json.dumps(asdict(self), sort_keys=True))

    @property
    def shipped(self) -> str:
        """lm-eval's own name."""
        return self.task or self.name


CONVERT: dict[str, Callable[..., Iterator[Record]]] = {
    "piqa": _piqa,
    "arc": _arc,
    "hellaswag": _hellaswag,
    "winogrande": _winogrande,
    "boolq": _boolq,
    "lambada": _lambada,
    "mmlu": _mmlu,
    "blimp": _blimp,
    "cloze_far": partial(_cloze, False),
    "cloze_near": partial(_cloze, True),
}
TASKS: dict[str, EvaluationTask] = {
    name: build(EvaluationTask, {"name": name, **entry}, f"repro/data/{ENTRIES.name}: {name}")
    for name, entry in load_yaml(ENTRIES).items()
}


def chosen(tasks: Iterable[str]) -> list[EvaluationTask]:
    names = list(tasks)
    for name in names:
        if name not in TASKS:
            raise unknown("zero-shot task", name, TASKS)
    return [TASKS[name] for name in dict.fromkeys(names)]


def items(task: EvaluationTask, data: Path | None = None) -> dict[str, dict[str, list[tuple[int, Record]]]]:
    """Subject ("" where a task has none) to split to its records, each with its number there; drawn where it says so.

    Args:
        task: an entry of `TASKS`.
        data: the data folder, for what the repository does not carry; None is the one of REPRO_DATA.

    Raises:
        UserError: a file that is neither in the repository nor in `data`, or one that is cut or of another version.
    """
    contents = []
    for name, expected in task.files.items():
        content = sources.read(name, f"task {task.name}", sha256=expected, folder=data)
        if (digest := hashlib.sha256(content).hexdigest()) != expected:
            raise UserError(
                f"{name}: not the file that task {task.name} stands for, but cut or of another version (SHA-256 "
                f"{digest[:12]}, not {expected[:12]}); copy it again"
            )
        contents.append(content)
    subjects: dict[str, dict[str, list[tuple[int, Record]]]] = {}
    for record in CONVERT[task.convert](*contents):
        splits = subjects.setdefault(record.pop("subject", ""), {})
        records = splits.setdefault(record.pop("split", task.split), [])
        records.append((len(records), record))
    for subject, splits in subjects.items() if task.draw else ():
        every = splits[task.split]
        sampled = random.Random(f"{task.seed} {subject}").sample(range(len(every)), min(task.draw, len(every)))
        splits[task.split] = [every[number] for number in sorted(sampled)]
    return dict(sorted(subjects.items()))


def available(name: str) -> bool:
    """Whether the files of a task can be read here."""
    (task,) = chosen([name])
    return all(sources.available(file, sha256) for file, sha256 in task.files.items())


def identifier(name: str) -> str:
    """The hash that identifies a task in a record: of its entry, which has the hashes of its files."""
    (task,) = chosen([name])
    return task.identifier
