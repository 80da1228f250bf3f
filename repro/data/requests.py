"""Requests of a zero-shot task: lm-eval's own prompts and answers as token ids, made once per tokenizer and task.

lm-eval's shipped task files make the prompts, the choices and the right answer; only the source of the records is
replaced, no socket is opened. A prompt and its answer become ids as lm-eval makes them: both are tokenized together,
and the answer is what follows the prompt's own ids, so that a blank between them belongs to the answer.

    requests = build("piqa", data, tokenizer)  ->  save / load  ->  repro.data.task_scores.run(model, [requests])

What is stored is small, because prompts are kept once: a prefix that all prompts of a subject share (MMLU's five
examples), then each prompt, then each answer. A machine without lm-eval and without the data scores from such a file.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from repro.core.errors import UserError
from repro.core.files import atomic
from repro.data.corpora import tokenizer_sha256
from repro.data.tasks import EvaluationTask, chosen, items

LEAST_PREFIX = 32  # tokens that all prompts of a subject share before they are kept and run once
CHUNK = 512  # requests that are tokenized at a time


@dataclass(frozen=True, eq=False)
class Requests:
    """A task's requests: ids of all texts in one row, with the length of each in `*_size`. All int32.

    Attributes:
        meta: `task`, `shipped` (lm-eval's name), `metric`, `version` (of the task), `harness` (lm-eval's version),
            `shots`, `form`, `bos`, `subjects` (JSON list), `tokenizer_sha256`.
        prefix, prefix_size: ids shared by the prompts of a subject, BOS included; `[P]` sizes.
        prompt, prompt_size, prompt_prefix: the rest of each prompt `[C]` and which prefix is in front of it, -1: none.
        answer, answer_size, answer_prompt, answer_chars: each answer `[R]`, its prompt, its characters (`acc_norm`).
        number, subject, gold, answers: of each item `[N]`: its number in its file or subject, its subject, the index of
            the right answer (-1: right if greedy decoding gives it), and how many of the answers are its own.
    """

    meta: dict[str, str]
    prefix: np.ndarray
    prefix_size: np.ndarray
    prompt: np.ndarray
    prompt_size: np.ndarray
    prompt_prefix: np.ndarray
    answer: np.ndarray
    answer_size: np.ndarray
    answer_prompt: np.ndarray
    answer_chars: np.ndarray
    number: np.ndarray
    subject: np.ndarray
    gold: np.ndarray
    answers: np.ndarray

    @property
    def prefixes(self) -> list[np.ndarray]:
        """The shared prefixes, int32 `[ids]` each."""
        return _split(self.prefix, self.prefix_size)

    def rows(self) -> list[tuple[int, np.ndarray, int]]:
        """Of each answer: its prefix (-1: none), the ids of prompt and answer after it, how many are the answer's."""
        prompts = _split(self.prompt, self.prompt_size)
        answers = _split(self.answer, self.answer_size)
        before, of = self.prompt_prefix.tolist(), self.answer_prompt.tolist()
        return [(before[i], np.concatenate([prompts[i], ids]), len(ids)) for i, ids in zip(of, answers)]


ARRAYS = [field.name for field in fields(Requests) if field.name != "meta"]


def load_shipped(
    task: EvaluationTask, data: Path | None, limit: int | None = None
) -> dict[str, tuple[str, list[int], Any]]:
    """lm-eval's task objects by its own name (`piqa`, `mmlu_anatomy`, …): subject, numbers of its items, the object.

    Args:
        task: an entry of `TASKS`.
        data: the data folder, for what the repository does not carry; None is the one of REPRO_DATA.
        limit: so many items, the first ones, evenly from the subjects; None is all.

    Raises:
        UserError: as `items`; lm-eval is not installed, or has another version of the task.
    """
    try:
        from datasets import Dataset
        from lm_eval import tasks as shipped
    except ImportError:
        raise UserError(
            f"task {task.name}: its requests are made by lm-eval, which is not installed here; install lm_eval and "
            "datasets, or bring build/requests from a machine that has them"
        ) from None
    members, known = [], {}
    every = items(task, data)
    for i, (subject, splits) in enumerate(every.items()):
        if limit is not None:
            share = (i + 1) * limit // len(every) - i * limit // len(every)
            splits[task.split] = splits[task.split][:share]
        if splits[task.split]:
            datasets = {}
            for split, records in splits.items():
                datasets[split] = Dataset.from_list([record for _, record in records])
            unused = {f"{split}_split": None for split in ("training", "validation", "test") if split != task.split}
            source = {
                "custom_dataset": lambda datasets=datasets, **_: datasets,
                "dataset_kwargs": None,
                "process_docs": None,
            }
            source[f"{task.split}_split"] = task.split  # BLiMP's own is `train`
            name = f"{task.shipped}_{subject}" if subject else task.shipped
            members.append({"task": name, "num_fewshot": task.shots} | source | unused)
            known[name] = (subject, [number for number, _ in splits[task.split]])
    folder = Path(shipped.__file__).parent / task.folder
    manager = shipped.TaskManager(include_path=[folder], include_defaults=False)
    loaded = manager.load({"group": "local", "task": members})["tasks"]
    for name, record in loaded.items():
        record.set_fewshot_seed(0)  # MMLU takes its examples in order: nothing is drawn
        if str(record.VERSION) != task.version:
            raise UserError(
                f"task {task.name}: lm-eval {importlib.metadata.version('lm_eval')} has version {record.VERSION} of "
                f"{name}, not {task.version}; install the lm_eval of requirements.lock"
            )
    return {name: (*known[name], record) for name, record in loaded.items()}


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """No hub, and lm-eval speaks only of errors."""
    noisy = logging.getLogger("lm_eval")
    level = noisy.level
    words = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
    with mock.patch.dict(os.environ, dict.fromkeys(words, "1")):
        noisy.setLevel(logging.ERROR)
        try:
            yield
        finally:
            noisy.setLevel(level)


def build(
    name: str, data: Path | None, tokenizer: Callable[..., Any], limit: int | None = None, add_bos: bool | None = None
) -> Requests:
    """The requests of a task for a tokenizer.

    Args:
        name: a key of `TASKS`.
        data: the data folder, for what the repository does not carry; None is the one of REPRO_DATA.
        tokenizer: a Hugging Face tokenizer.
        limit: as in `load_shipped`.
        add_bos: a BOS in front of every prompt or not; None is what the tokenizer does by itself.

    Raises:
        UserError: unknown task, what `load_shipped` says, a limit below 1, a BOS that the tokenizer does not have.
    """
    (task,) = chosen([name])
    if limit is not None and limit < 1:
        raise UserError(f"task {name}: a limit of {limit} items; it must be 1 or more")
    bos = tokenizer("a").input_ids[0] == tokenizer.bos_token_id if add_bos is None else add_bos
    if bos and tokenizer.bos_token_id is None:
        raise UserError("add_bos is true, but the tokenizer has no BOS token")
    arrays: dict[str, list[Any]] = {field: [] for field in ARRAYS}
    with offline():
        loaded = load_shipped(task, data, limit)
        from lm_eval.utils import env  # installed, as `load_shipped` has seen

        with mock.patch.object(env, "from_string", functools.cache(env.from_string)):  # else compiled for every request
            for subject, numbers, loaded_task in loaded.values():
                _add(arrays, subject, numbers, loaded_task, tokenizer, [tokenizer.bos_token_id] * bool(bos))
    subjects = sorted(set(arrays["subject"]))
    arrays["subject"] = [subjects.index(subject) for subject in arrays["subject"]]
    meta = {key: getattr(task, key) for key in ("metric", "version", "form", "shipped")}
    meta |= {"task": name, "shots": str(task.shots), "bos": str(bool(bos)), "subjects": json.dumps(subjects)}
    meta |= {"harness": importlib.metadata.version("lm_eval"), "tokenizer_sha256": tokenizer_sha256(tokenizer)}
    for field in ("prefix", "prompt", "answer"):
        arrays[f"{field}_size"] = [len(ids) for ids in arrays[field]]
        arrays[field] = list(itertools.chain.from_iterable(arrays[field]))
    return Requests(meta, **{field: np.asarray(values, dtype=np.int32) for field, values in arrays.items()})


def _add(
    arrays: dict[str, list[Any]], subject: str, numbers: list[int], one: Any, tokenizer: Any, bos: list[int]
) -> None:
    """Append the requests of one of lm-eval's tasks."""
    one.build_all_requests(rank=0, world_size=1)
    first = len(arrays["prompt"])
    prompts = []
    index = {}
    pairs = [_moved(*instance.args) for instance in one.instances]
    for start in range(0, len(pairs), CHUNK):
        part = pairs[start : start + CHUNK]
        fresh = list(dict.fromkeys(text for text, _ in part if text not in index))
        ids = tokenizer([*fresh, *(text + answer for text, answer in part)], add_special_tokens=False)["input_ids"]
        for text, new in zip(fresh, ids):
            index[text] = len(prompts)
            prompts.append(np.asarray(bos + new or _start(tokenizer), dtype=np.int32))
        for (text, _), whole in zip(part, ids[len(fresh) :]):
            answer = (bos + whole)[len(prompts[index[text]]) :] if text else whole
            if not answer:
                raise UserError(f"task {one.config.task}: the tokenizer leaves nothing of an answer after its prompt")
            arrays["answer"].append(answer)
            arrays["answer_prompt"].append(first + index[text])
    shared = _shared(prompts)
    arrays["prompt_prefix"] += [len(arrays["prefix"]) if shared else -1] * len(prompts)
    arrays["prompt"] += [ids[shared:].tolist() for ids in prompts]
    if shared:
        arrays["prefix"].append(prompts[0][:shared].tolist())
    counts = Counter(instance.doc_id for instance in one.instances)
    for doc_id, doc in {instance.doc_id: instance.doc for instance in one.instances}.items():
        gold, chars = _right(one, doc)
        arrays["answer_chars"] += chars
        of_item = {"number": numbers[doc_id], "subject": subject, "gold": gold, "answers": counts[doc_id]}
        for field, value in of_item.items():
            arrays[field].append(value)


def _start(tokenizer: Any) -> list[int]:
    """The ids of an empty prompt, as in lm-eval: BOS, or else the end of text."""
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        raise UserError("a prompt is empty, and the tokenizer has no BOS and no EOS to begin with; use another task")
    return [start]


def _moved(prompt: str, answer: str) -> tuple[str, str]:
    """Blanks at the end of a prompt go to the answer, as lm-eval has it, so that words are tokenized as words."""
    text = prompt.rstrip()
    return text, prompt[len(text) :] + answer


def _right(one: Any, doc: Any) -> tuple[int, list[int]]:
    """The index of an item's right answer and the characters of each, without the blank in front."""
    if one.OUTPUT_TYPE != "multiple_choice":
        return -1, [len(one.doc_to_target(doc).strip())]
    choices = one.doc_to_choice(doc)
    gold = one.doc_to_text(doc) if one.multiple_input else one.doc_to_target(doc)
    return choices.index(gold) if isinstance(gold, str) else int(gold), [len(choice) for choice in choices]


def _shared(prompts: Sequence[np.ndarray]) -> int:
    """Ids that all prompts begin with, one of each being left over; 0 where too few to be worth a run of their own."""
    if len(prompts) < 2:
        return 0
    most = min(map(len, prompts)) - 1
    same = np.all([ids[:most] == prompts[0][:most] for ids in prompts], axis=0)
    count = most if same.all() else int(same.argmin())
    return count if count >= LEAST_PREFIX else 0


def _split(flat: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    return np.split(flat, np.cumsum(sizes)[:-1]) if len(sizes) else []


# --- files ------------------------------------------------------------------------------------------------------------


def save(path: Path | str, requests: Requests) -> None:
    """Write requests with their hash."""
    arrays = {name: np.ascontiguousarray(getattr(requests, name), dtype="<i4") for name in ARRAYS}
    text = json.dumps(requests.meta | {"ids_sha256": _digest(arrays)}, sort_keys=True)
    with atomic(path) as temporary:  # one key only: safetensors writes several in random order
        save_file(arrays, temporary, {"requests": text})


def load(path: Path | str) -> Requests:
    """Requests that `save` wrote.

    Raises:
        UserError: the file is missing, cut short, or not of requests as they were saved.
    """
    try:
        with safe_open(path, "np") as file:
            arrays = {name: file.get_tensor(name) for name in ARRAYS}
            meta = json.loads((file.metadata() or {})["requests"])
    except Exception as error:  # safetensors has its own kinds
        raise UserError(
            f"{path}: an incomplete or damaged file of requests ({error}); delete it and build it again"
        ) from None
    if meta.pop("ids_sha256", "") != _digest(arrays):
        raise UserError(f"{path}: the requests are not those that it was saved with; delete it and build it again")
    return Requests(meta, **arrays)


def _digest(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in ARRAYS:
        digest.update(f"{name} {len(arrays[name])}\0".encode() + arrays[name].tobytes())
    return digest.hexdigest()
