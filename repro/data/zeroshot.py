"""Zero-shot accuracy (5-shot for MMLU) through lm-eval's Python API, on local files, without opening a socket.

The prompt, the choices and the metrics are lm-eval's own: its shipped task files are loaded as they are, and only the
source of the records is replaced. `prepare` writes the mirror's files in the columns that a shipped task expects, `run`
keeps one line per item, so that every interval can be a paired bootstrap, and `summary` counts.

    prepare(["piqa"], data, out)  ->  out/piqa.jsonl  ->  run(model, tokenizer, ["piqa"], out)  ->  frame  ->  summary

Metric and shots follow SPEAR, appendix D.4: acc_norm where a task has it (PIQA, ARC, HellaSwag), acc elsewhere,
MMLU with five shots, the average being the plain mean of the tasks. A `limit` takes the first records, as lm-eval does;
for MMLU it takes them evenly from the 57 subjects, whose average is over questions.
"""

import contextlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd

from repro.data.tasks import TASKS, Record, chosen, jsonl
from repro.errors import UserError


def load(tasks: Iterable[str], prepared: Path, limit: int | None = None, seed: int = 0) -> dict[str, Any]:
    """lm-eval's task objects on the files that `prepare` wrote, by lm-eval's name (`piqa`, `mmlu_anatomy`, …).

    `limit` is the number of items per task; of a subject MMLU can give no more than it has.

    Raises:
        UserError: an unknown task, or one that was not prepared.
    """
    from datasets import Dataset
    from lm_eval import tasks as shipped

    named, members = chosen(tasks), []
    for task in named:
        path = Path(prepared) / f"{task.name}.jsonl"
        if not path.is_file():
            raise UserError(f"{path}: no such file; prepare task {task.name} first")
        subjects: dict[str, dict[str, list[Record]]] = {}
        for record in jsonl(path):
            splits = subjects.setdefault(record.pop("subject", ""), {})
            splits.setdefault(record.pop("split", task.split), []).append(record)
        for i, (subject, splits) in enumerate(sorted(subjects.items())):
            if limit is not None:
                share = (i + 1) * limit // len(subjects) - i * limit // len(subjects)
                splits[task.split] = splits[task.split][:share]
            if splits[task.split]:
                held = {split: Dataset.from_list(records) for split, records in splits.items()}
                unused = {f"{split}_split": None for split in ("training", "validation", "test") if split != task.split}
                source = {"custom_dataset": lambda held=held, **_: held, "dataset_kwargs": None, "process_docs": None}
                name = f"{task.name}_{subject}" if subject else task.name
                members.append({"task": name, "num_fewshot": task.shots} | source | unused)
    folders = dict.fromkeys(Path(shipped.__file__).parent / task.folder for task in named)
    manager = shipped.TaskManager(include_path=list(folders), include_defaults=False)
    loaded = manager.load({"group": "local", "task": members})["tasks"]
    for task in loaded.values():
        task.set_fewshot_seed(seed)
    return loaded


def _harness(model: Any, tokenizer: Any, batch_size: int, bos: bool) -> Any:
    """lm-eval's scorer around a model in memory: explicit BOS, softmax in float32, and a note of what was cut."""
    from lm_eval.models.huggingface import HFLM

    class Harness(HFLM):
        truncated: set[tuple[str, str]] = set()

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            ids = self.tokenizer.encode(string, add_special_tokens=False)
            return [self.tokenizer.bos_token_id] * (bos and add_special_tokens is not False) + ids

        def _loglikelihood_tokens(self, requests: list, **options: Any) -> list[tuple[float, bool]]:
            longest = max(len(answer) for _, _, answer in requests)
            if longest > self.max_length:
                raise UserError(f"an answer has {longest} tokens, the model's context only {self.max_length}")
            over = {args for args, prompt, answer in requests if len(prompt) + len(answer) > self.max_length + 1}
            self.truncated = self.truncated | over
            return super()._loglikelihood_tokens(requests, **options)

    # HFLM ties the embeddings again, which would throw away a head that was quantized by itself
    with mock.patch.object(model, "tie_weights", lambda *_, **__: None):
        options = {"batch_size": batch_size, "backend": "causal", "softmax_dtype": "float32"}
        return Harness(pretrained=model, tokenizer=tokenizer, **options)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """No hub, and lm-eval speaks only of errors."""
    noisy = logging.getLogger("lm_eval")
    level, offline = noisy.level, ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
    with mock.patch.dict(os.environ, dict.fromkeys(offline, "1")):
        noisy.setLevel(logging.ERROR)
        try:
            yield
        finally:
            noisy.setLevel(level)


def run(
    model: Any,
    tokenizer: Any,
    tasks: Iterable[str],
    prepared: Path,
    limit: int | None = None,
    batch_size: int = 8,
    add_bos: bool | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """Score a causal LM in memory on prepared tasks.

    Args:
        model: a transformers causal LM, on its device.
        tokenizer: its tokenizer; a missing padding token is set to the end token by lm-eval.
        tasks: names in `TASKS`.
        prepared: the folder that `prepare` wrote.
        limit: items per task, None for all.
        batch_size: sequences per forward pass; SPEAR uses 8.
        add_bos: a BOS in front of every prompt or not; None is what the tokenizer does by itself.
        seed: lm-eval's few-shot seed; MMLU takes its examples in order, so that nothing here is drawn.

    Returns:
        One row per item: task, item (number in its file or subject), subject ("" but for MMLU), correct (under the
        task's metric), acc, acc_norm (missing where not defined), logliks (JSON list, one natural log per choice),
        truncated (the prompt was cut from the left to fit the context), shots, metric, task_version, harness_version,
        form, bos. LAMBADA has one choice, the last word, and is correct when greedy decoding gives it.

    Raises:
        UserError: an unknown or unprepared task, a limit or batch below 1, or a BOS that the tokenizer does not have.
    """
    named = chosen(tasks)
    if not named or batch_size < 1 or (limit is not None and limit < 1):
        raise UserError(f"zero-shot needs a task, and limit ({limit}) and batch_size ({batch_size}) of 1 or more")
    token = tokenizer.bos_token_id
    bos = tokenizer("a").input_ids[0] == token if add_bos is None else add_bos
    if bos and token is None:
        raise UserError("add_bos is true, but the tokenizer has no BOS token")
    with _offline():
        import lm_eval

        loaded = load([task.name for task in named], prepared, limit, seed)
        harness = _harness(model, tokenizer, batch_size, bos)
        samples = lm_eval.evaluate(harness, {"tasks": loaded}, bootstrap_iters=0)["samples"]
    rows = []
    for name, task in loaded.items():
        ours = TASKS.get(name) or TASKS[name.split("_")[0]]
        for sample in samples[name]:
            rows.append(
                {
                    "task": ours.name,
                    "item": sample["doc_id"],
                    "subject": name.removeprefix(ours.name).lstrip("_"),
                    "correct": int(sample[ours.metric]),
                    "acc": int(sample["acc"]),
                    "acc_norm": float(sample.get("acc_norm", np.nan)),
                    "logliks": json.dumps([loglik for loglik, _ in sample["filtered_resps"]]),
                    "truncated": any(tuple(args) in harness.truncated for args in sample["arguments"]),
                    "shots": ours.shots,
                    "metric": ours.metric,
                    "task_version": str(task.VERSION),
                    "harness_version": importlib.metadata.version("lm_eval"),
                    "form": ours.form,
                    "bos": bool(bos),
                }
            )
    return pd.DataFrame(rows)


def perplexity(frame: pd.DataFrame) -> float:
    """LAMBADA's last-word perplexity, exp of minus the mean log likelihood, as lm-eval gives it."""
    logliks = frame.loc[frame["task"] == "lambada_openai", "logliks"].map(lambda text: json.loads(text)[0])
    return float(np.exp(-logliks.mean()))


def _accuracy(frame: pd.DataFrame) -> pd.DataFrame:
    """Per task and for their plain mean: n, accuracy, its binomial error, chance and chance's own error."""
    groups = frame.groupby("task", sort=False)
    table = groups.agg(n=("correct", "size"), accuracy=("correct", "mean"), truncated=("truncated", "sum"))
    table["chance"] = [TASKS[name].chance for name in table.index]
    for error, share in (("stderr", "accuracy"), ("chance_stderr", "chance")):
        table[error] = np.sqrt(table[share] * (1 - table[share]) / table["n"])
    total = table[["n", "truncated"]].sum().to_dict() | table[["accuracy", "chance"]].mean().to_dict()
    total |= {error: np.sqrt((table[error] ** 2).sum()) / len(table) for error in ("stderr", "chance_stderr")}
    table.loc["average"] = total
    return table.astype({"n": int, "truncated": int})


def summary(frame: pd.DataFrame, reference: pd.DataFrame | None = None) -> pd.DataFrame:
    """Accuracy per task, and `average`, their plain mean.

    Args:
        frame: what `run` returned.
        reference: the same for the full-precision model on the same items; None if `frame` is of that model itself.

    Returns:
        Columns task, n, accuracy, stderr, chance, truncated (items), status: `floor` where full precision is less than
        3 binomial standard errors (the larger of its own and of chance's) above chance, else `ok`.

    Raises:
        UserError: the reference was measured on other items.
    """
    keys = ["task", "subject", "item", "metric"]
    if reference is not None:
        reference = reference[reference["task"].isin(frame["task"])]
        if set(frame[keys].itertuples(index=False)) != set(reference[keys].itertuples(index=False)):
            raise UserError("the full-precision reference was measured on other zero-shot items; use the same limit")
    table, full = _accuracy(frame), _accuracy(frame if reference is None else reference)
    noise = full[["stderr", "chance_stderr"]].max(axis=1)
    seen = full["accuracy"] - full["chance"] > 3 * noise
    table["status"] = seen.map({True: "ok", False: "floor"})
    return table.reset_index()[["task", "n", "accuracy", "stderr", "chance", "truncated", "status"]]


def at_chance(correct: Mapping[str, np.ndarray]) -> bool:
    """Whether the plain mean of several tasks is less than 3 binomial standard errors above chance.

    Args:
        correct: task to 0 or 1 for each item.
    """
    frame = pd.concat([pd.DataFrame({"task": t, "correct": c, "truncated": False}) for t, c in correct.items()])
    row = _accuracy(frame).loc["average"]
    return not row["accuracy"] - row["chance"] > 3 * max(row["stderr"], row["chance_stderr"])
