"""Tasks with generated answers (GSM8K, IFEval), and MathQA's records: prompts and judges of lm-eval 0.4.

Prompts are lm-eval's own, from its shipped task files on this project's records, as `repro.data.requests` makes
those of tasks with given answers; GSM8K's five examples are drawn by lm-eval's own sampler with its default seed.

An answer to GSM8K is right if its number is that of the solution: lm-eval's filter `strict-match` takes the first
number after `####`, and `exact_match` compares without case, commas, dollar signs, what is before `####`, and a full
stop at the end (lm_eval/tasks/gsm8k/gsm8k.yaml, lm_eval/api/metrics.py). An answer to IFEval is right if it follows all
of its instructions, by lm-eval's own checkers (lm_eval/tasks/ifeval), at the prompt level, strictly. The paper names
neither.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import lzma
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from repro.core.errors import UserError, unknown
from repro.core.files import atomic, short_hash
from repro.core.strict import build as built
from repro.core.strict import load_yaml
from repro.data import requests, tasks
from repro.data.corpora import tokenizer_sha256
from repro.data.tasks import EvaluationTask, Record, jsonl

ENTRIES = Path(__file__).with_name("generated.yaml")
SEED = 1234  # of lm-eval's draw of examples, its default
NUMBER = re.compile(r"#### (-?[0-9.,]+)")
IGNORED = (r",", r"\$", r"(?s).*#### ", r"\.$")  # in this order
PACKAGES = {"instructions": ("immutabledict", "langdetect", "nltk")}  # what lm-eval's checkers import


@dataclass(frozen=True)
class Generated:
    """A task, the most tokens of an answer, and how one is judged: a key of `GRADES`."""

    task: EvaluationTask
    new_tokens: int
    grade: str

    @property
    def identifier(self) -> str:
        """The hash that identifies the task in a record."""
        return short_hash(json.dumps(asdict(self), sort_keys=True))


@dataclass(frozen=True, eq=False)
class Questions:
    """Prompts as token ids, and what their answers are judged by.

    Attributes:
        meta: `task`, `harness` (lm-eval's version), `version`, `form`, `shots`, `tokenizer_sha256`, `stop` (JSON list).
        prompts: int32 `[T]` each, BOS included.
        items: of each what its judge reads: a solution, or an item of IFEval.
    """

    meta: dict[str, str]
    prompts: list[np.ndarray]
    items: list[Any]

    @property
    def stop(self) -> list[str]:
        """Texts that end an answer."""
        return json.loads(self.meta["stop"])


# --- records ----------------------------------------------------------------------------------------------------------


def _gsm8k(test: bytes, train: bytes) -> Iterator[Record]:
    for record in jsonl(test):
        yield record | {"split": "test"}
    for record in jsonl(lzma.decompress(train)):
        yield record | {"split": "train"}


def _ifeval(content: bytes) -> Iterator[Record]:
    yield from jsonl(content)


def _mathqa(content: bytes) -> Iterator[Record]:
    """The records name four choices by letters below the question; lm-eval reads them from one line."""
    for record in jsonl(content):
        *problem, _ = record["query"].removeprefix("Question: ").split("\n")
        count = len(record["choices"])
        texts = [line.partition(". ")[2] for line in problem[-count:]]
        options = "".join(f"{letter} ) {text} , " for letter, text in zip("abcd", texts))
        yield {"Problem": "\n".join(problem[:-count]), "options": options, "correct": "abcd"[record["gold"]]}


tasks.CONVERT |= {"gsm8k": _gsm8k, "ifeval": _ifeval, "mathqa": _mathqa}


def _entry(name: str, keys: dict[str, Any]) -> Generated:
    settings = {key: keys[key] for key in ("new_tokens", "grade") if key in keys}
    where = f"repro/data/{ENTRIES.name}: {name}"
    task = built(
        EvaluationTask, {"name": name} | {key: value for key, value in keys.items() if key not in settings}, where
    )
    return built(Generated, {"task": asdict(task), **settings}, where)


GENERATED: dict[str, Generated] = {name: _entry(name, keys) for name, keys in load_yaml(ENTRIES).items()}


def lacking(name: str) -> str:
    """Why a task's answers cannot be judged here; empty if they can."""
    absent = [
        package for package in PACKAGES.get(GENERATED[name].grade, ()) if importlib.util.find_spec(package) is None
    ]
    if absent:
        return f"{name}: lm-eval's checkers need {' and '.join(absent)}, not installed here"
    if GENERATED[name].grade in PACKAGES and not _splits_sentences():
        return f"{name}: lm-eval's checkers need nltk's punkt_tab, not here (python -m nltk.downloader punkt_tab)"
    return ""


def _splits_sentences() -> bool:
    """Whether nltk's data is here; lm-eval would else ask the network for it as it is imported."""
    import nltk  # of the extra `ifeval`

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        return False
    return True


# --- prompts ----------------------------------------------------------------------------------------------------------


def build(name: str, data: Path | None, tokenizer: Callable[..., Any], limit: int | None = None) -> Questions:
    """The prompts of a task for a tokenizer.

    Args:
        name: a key of `GENERATED`.
        data: the data folder, for what the repository does not carry; None is the one of REPRO_DATA.
        tokenizer: a Hugging Face tokenizer, which adds a BOS or not.
        limit: so many items, the first ones; None is all.

    Raises:
        UserError: unknown task, one that cannot be judged here, a limit below 1, or as `requests.load_shipped`.
    """
    if name not in GENERATED:
        raise unknown("task with generated answers", name, GENERATED)
    if limit is not None and limit < 1:
        raise UserError(f"task {name}: a limit of {limit} items; it must be 1 or more")
    if why := lacking(name):
        raise UserError(why)
    entry = GENERATED[name]
    bos = [tokenizer.bos_token_id] * bool(tokenizer("a").input_ids[0] == tokenizer.bos_token_id)
    with requests.offline():
        ((_, _, task),) = requests.load_shipped(entry.task, data, limit).values()
        task.set_fewshot_seed(SEED)
        task.build_all_requests(rank=0, world_size=1)
    prompts, items = [], []
    for instance in task.instances:
        ids = tokenizer(instance.args[0], add_special_tokens=False)["input_ids"]
        prompts.append(np.asarray(bos + ids, dtype=np.int32))
        items.append(instance.doc["answer"] if entry.grade == "number" else instance.doc)
    stop = list(task.config.generation_kwargs["until"])
    meta = {key: str(getattr(entry.task, key)) for key in ("version", "form", "shots")}
    meta |= {"task": name, "stop": json.dumps(stop), "tokenizer_sha256": tokenizer_sha256(tokenizer)}
    return Questions(meta | {"harness": importlib.metadata.version("lm_eval")}, prompts, items)


def save(path: Path, questions: Questions) -> None:
    """Write questions with their hash."""
    ids = np.concatenate(questions.prompts).astype("<i4")
    arrays = {"ids": ids, "sizes": np.asarray([len(prompt) for prompt in questions.prompts], dtype="<i4")}
    facts = {"meta": questions.meta, "items": questions.items}
    text = json.dumps(facts | {"sha256": _digest(arrays, facts)}, sort_keys=True)
    with atomic(path) as temporary:  # one key only: safetensors writes several in random order
        save_file(arrays, temporary, {"questions": text})


def load(path: Path) -> Questions:
    """Questions that `save` wrote.

    Raises:
        UserError: the file is missing, cut short, or not of questions as they were saved.
    """
    try:
        with safe_open(path, "np") as file:
            arrays = {name: file.get_tensor(name) for name in ("ids", "sizes")}
            facts = json.loads((file.metadata() or {})["questions"])
        if facts.pop("sha256") != _digest(arrays, facts):
            raise ValueError("their contents do not match their SHA-256")
    except Exception as error:  # safetensors has its own kinds
        raise UserError(
            f"{path}: an incomplete or damaged file of questions ({error}); delete it and build it again"
        ) from None
    prompts = np.split(arrays["ids"], np.cumsum(arrays["sizes"])[:-1])
    return Questions(facts["meta"], prompts, facts["items"])


def _digest(arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {len(array)}\0".encode() + array.tobytes())
    return digest.hexdigest()


# --- judges -----------------------------------------------------------------------------------------------------------


def number(text: str) -> str:
    """The first number after `####`, as it stands there; `[invalid]` without one."""
    match = NUMBER.search(text)
    return match[1].strip() if match else "[invalid]"


def plain(text: str) -> str:
    """A text as `exact_match` compares it."""
    for pattern in IGNORED:
        text = re.sub(pattern, "", text)
    return text.lower()


def _number_is_right(answer: str, solution: str) -> bool:
    return plain(number(answer)) == plain(solution)


def _follows_all(answer: str, item: Record) -> bool:
    from lm_eval.tasks.ifeval import utils  # needs `PACKAGES`

    return bool(utils.process_results(item, [answer])["prompt_level_strict_acc"])


GRADES: dict[str, Callable[[str, Any], bool]] = {"number": _number_is_right, "instructions": _follows_all}


def graded(name: str, answers: Sequence[str], items: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """1 where an answer is right, and where it would be right for the next item, float64 `[N]` each."""
    judge = GRADES[GENERATED[name].grade]
    following = [*items[1:], *items[:1]]
    right = [float(judge(answer, item)) for answer, item in zip(answers, items)]
    right_for_next = [float(judge(answer, item)) for answer, item in zip(answers, following)]
    return np.asarray(right), np.asarray(right_for_next)
