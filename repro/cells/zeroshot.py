"""Zero-shot accuracy of lm-eval tasks on local data, per task or as the plain mean over tasks."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from repro import models
from repro.data import tasks as entries
from repro.data import zeroshot as harness
from repro.errors import UserError
from repro.jobs import compress
from repro.jobs.job import Job, make
from repro.jobs.target import Target
from repro.record import observations
from repro.record.observations import Observations, Series

OUTPUTS = (observations.FILE,)
DEFAULT = None  # a scale that says nothing of it does not measure it
# SPEAR, appendix D.4. Not all of tasks.yaml: a new entry there changes no protocol and no mean.
TASKS = ("piqa", "arc_easy", "arc_challenge", "hellaswag", "winogrande", "boolq", "lambada_openai", "mmlu")


@dataclass(frozen=True)
class Ask:
    """Which tasks; none is all of the scale's. `percent`: the paper prints percent, not a fraction."""

    tasks: tuple[str, ...] = ()
    percent: bool = False
    unit: str = "fraction"

    def __post_init__(self) -> None:
        entries.chosen(self.tasks)


@dataclass(frozen=True)
class Protocol:
    """`limit` items of each task (null: all), `batch_size` sequences in a forward pass."""

    limit: int | None = None
    batch_size: int = 8
    tasks: tuple[str, ...] = TASKS

    def __post_init__(self) -> None:
        entries.chosen(self.tasks)
        for name in ("limit", "batch_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it is 1 or more")


def jobs(ask: Ask, target: Target) -> dict[str, Job] | None:
    """One job scores all tasks of a scale, so that a model is loaded once; None where it measures no such task."""
    protocol = target.scale.protocols["zeroshot"]
    if protocol is None or set(ask.tasks) - set(protocol.tasks):
        return None
    inputs = target.inputs() | {
        "calibration": compress.job(target).declared().get("calibration"),
        "tasks": entries.identifiers(protocol.tasks),
        "limit": protocol.limit,
        "batch_size": protocol.batch_size,
    }
    rule = {"tasks": list(protocol.tasks), "limit": protocol.limit, "batch_size": protocol.batch_size}
    needs = {"weights": compress.job(target)} if target.recipe.steps else {}
    return {"items": make("zeroshot", target.label, inputs, target.options() | rule, needs, target.steps)}


def run(job: Job, found: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
    """Score the tasks from the folder in `$REPRO_DATA`: one series a task, 1 where an item is answered correctly.

    Raises:
        UserError: the folder is not set or lacks a task's file, damaged inputs, an unknown task.
    """
    given = job.given()
    data = os.environ.get("REPRO_DATA")
    if not data:
        tasks = ", ".join(given["tasks"])
        raise UserError(f"zero-shot tasks need their files: set REPRO_DATA to the data folder ({tasks})")
    lm = compress.load(given, found.get("weights"))
    tokenizer = models.tokenizer(given["model"], given["hub"])
    with tempfile.TemporaryDirectory() as prepared:
        entries.prepare(given["tasks"], Path(data), Path(prepared))
        rule = {"limit": given["limit"], "batch_size": given["batch_size"]}
        frame = harness.run(lm.model, tokenizer, given["tasks"], Path(prepared), **rule)
    label = f"lm-eval {frame['harness_version'].iloc[0]}" + (f" n{given['limit']}" if given["limit"] else "")
    series = {
        f"{task}/correct": Series(rows["correct"].to_numpy(dtype=float), "items", f"{label}: {task}")
        for task, rows in frame.groupby("task", sort=False)
    }
    observations.save(folder / OUTPUTS[0], series, origin)


def series(ask: Ask, found: Mapping[str, Observations], target: Target) -> dict[str, Series]:
    """The items of the tasks that were asked for."""
    held = found["items"].series
    return {name: one for name, one in held.items() if not ask.tasks or name.partition("/")[0] in ask.tasks}


def value(ask: Ask, mean: Mapping[str, Any]) -> Any:
    """The plain mean of the tasks' accuracies."""
    return (100 if ask.percent else 1) * np.mean(list(mean.values()), axis=0)


def status(ask: Ask, full: Mapping[str, Series]) -> str:
    """`floor` where full precision itself is less than 3 standard errors above chance, else `ok`."""
    correct = {name.partition("/")[0]: one.values for name, one in full.items()}
    return "floor" if harness.at_chance(correct) else "ok"


def against(ask: Ask) -> str:
    """Accuracy is read as a difference to full precision."""
    return "q - f"
