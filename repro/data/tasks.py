"""Zero-shot tasks: lm-eval's own, on files of the data mirror; what each is called, where its records are, its chance.

Entries are data (`tasks.yaml`); a converter writes a file's records in the columns that lm-eval's shipped task expects.
"""

import csv
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from repro.errors import UserError, unknown
from repro.files import short_hash, write_text
from repro.strict import build, load_yaml

ENTRIES = Path(__file__).with_name("tasks.yaml")
Record = dict[str, Any]


def jsonl(path: Path) -> Iterator[Record]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _piqa(valid: Path, labels: Path) -> Iterator[Record]:
    for record, label in zip(jsonl(valid), labels.read_text().split(), strict=True):
        yield {key: record[key] for key in ("goal", "sol1", "sol2")} | {"label": int(label)}


def _arc(path: Path) -> Iterator[Record]:
    for record in jsonl(path):
        texts, gold = record["choices"], record["gold"]
        if texts[0] in texts[1:]:  # the source pads three choices to four with a copy in front
            texts, gold = texts[1:], texts[1:].index(texts[gold])
        labels = list("ABCDE"[: len(texts)])
        question = record["query"].removeprefix("Question: ")
        yield {"question": question, "choices": {"text": texts, "label": labels}, "answerKey": labels[gold]}


def _hellaswag(path: Path) -> Iterator[Record]:
    for record in jsonl(path):
        yield {"query": record["query"], "choices": record["choices"], "label": record["gold"]}


def _winogrande(path: Path) -> Iterator[Record]:
    for record in jsonl(path):  # the blank in front: an option is then all that comes before the continuation
        one, two = record["context_options"]
        sentence = "_ " + record["continuation"]
        yield {"sentence": sentence, "option1": one, "option2": two, "answer": str(record["gold"] + 1)}


def _boolq(path: Path) -> Iterator[Record]:
    for record in jsonl(path):
        passage, question = re.fullmatch(r"Passage: (.*)\nQuestion: (.*)\?", record["query"], re.DOTALL).groups()
        yield {"passage": passage, "question": question, "label": record["gold"]}


def _lambada(path: Path) -> Iterator[Record]:
    for record in jsonl(path):
        yield {"text": record["text"]}


def _mmlu(path: Path) -> Iterator[Record]:
    with tarfile.open(path, "r:xz") as archive:
        for name in sorted(name for name in archive.getnames() if name.endswith(".csv")):
            subject, split = Path(name).stem.rsplit("_", 1)
            for row in csv.DictReader(io.StringIO(archive.extractfile(name).read().decode("utf-8"), newline="")):
                choices = [row[f"choice{i}"] for i in range(4)]
                record = {"question": row["question"], "choices": choices, "answer": int(row["answer"])}
                yield {"subject": subject, "split": split} | record


@dataclass(frozen=True)
class Task:
    """One task: `name` is lm-eval's own, and `folder` is where lm-eval/tasks keeps it.

    `chance` is what an answer without reading gets. `files` lie in the mirror and go to the converter of that name in
    `CONVERT`, which yields records with the columns of the shipped task. `form` says how the records differ from the
    original data set.
    """

    name: str
    folder: str
    metric: str
    chance: float
    files: tuple[str, ...]
    convert: str
    form: str
    split: str = "validation"
    shots: int = 0


CONVERT: dict[str, Callable[..., Iterator[Record]]] = {
    "piqa": _piqa,
    "arc": _arc,
    "hellaswag": _hellaswag,
    "winogrande": _winogrande,
    "boolq": _boolq,
    "lambada": _lambada,
    "mmlu": _mmlu,
}
TASKS: dict[str, Task] = {
    name: build(Task, {"name": name, **entry}, f"repro/data/{ENTRIES.name}: {name}")
    for name, entry in load_yaml(ENTRIES).items()
}


def chosen(tasks: Iterable[str]) -> list[Task]:
    names = list(tasks)
    for name in names:
        if name not in TASKS:
            raise unknown("zero-shot task", name, TASKS)
    return [TASKS[name] for name in dict.fromkeys(names)]


def prepare(tasks: Iterable[str], data: Path, out: Path) -> None:
    """Convert the mirror's files in `data` to `out`/<task>.jsonl: one record a line, in the shipped task's columns.

    Raises:
        UserError: an unknown task, a file that the mirror lacks, or one that is not in the expected format.
    """
    for task in chosen(tasks):
        paths = [Path(data) / name for name in task.files]
        for path in paths:
            if not path.is_file():
                raise UserError(
                    f"{path}: no such file, and task {task.name} needs it; point REPRO_DATA at a folder that has "
                    f"{path.relative_to(data)}"
                )
        try:
            records = list(CONVERT[task.convert](*paths))
        except (ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError, tarfile.TarError) as error:
            listed = " and ".join(map(str, paths))
            raise UserError(f"{listed}: not in the format of {task.name} ({type(error).__name__}: {error})") from None
        write_text(Path(out) / f"{task.name}.jsonl", "".join(json.dumps(record) + "\n" for record in records))


def identifiers(tasks: Iterable[str]) -> dict[str, str]:
    """What fixes each task in a record: a hash of its entry."""
    return {task.name: short_hash(json.dumps(asdict(task), sort_keys=True)) for task in chosen(tasks)}
