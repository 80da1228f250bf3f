"""Zero-shot accuracy of lm-eval tasks on local data, per task or as the plain mean over tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from repro.core.errors import UserError, unknown
from repro.data import tasks as entries
from repro.jobs import compress, requests
from repro.jobs.target import Target
from repro.metrics.accuracy import Accuracy, scored
from repro.store import observations
from repro.store.job import Job, make
from repro.store.observations import Observations, Series

# SPEAR, appendix D.4. Not all of tasks.yaml: a new entry there changes no protocol and no mean.
TASKS = ("piqa", "arc_easy", "arc_challenge", "hellaswag-1916", "winogrande", "boolq", "lambada_openai", "mmlu")


@dataclass(frozen=True)
class Protocol:
    """`limit` items of each task (null: all), `tokens` in a forward pass.

    With a task and a draw from it (`mmlu`, `mmlu-10`) the draw is what is asked and averaged, on the same items for all
    recipes; full precision answers the whole set too.

    `absent` are tasks whose files are not on this machine. Only a build's own measurement passes over them; no mean
    over tasks is measured then.
    """

    limit: int | None = None
    tokens: int = 4096
    tasks: tuple[str, ...] = TASKS
    absent: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        entries.chosen(self.tasks)
        for name in ("limit", "tokens"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be 1 or more")

    def draw(self, name: str) -> str:
        """The draw that this protocol has from a task, or the task itself."""
        task_of = {entries.TASKS[task].shipped: task for task in self.tasks if entries.TASKS[task].draw}
        return task_of.get(entries.TASKS[name].shipped, name)

    def answered(self, params: "ZeroShot") -> list[str]:
        """The tasks that a metric means here."""
        names = [name for name in params.tasks or map(self.draw, self.tasks) if name not in params.without]
        return list(dict.fromkeys(names if params.whole else map(self.draw, names)))


@dataclass(frozen=True)
class ZeroShot(Accuracy):
    """Which tasks; none is all of the scale's. `percent`: the paper prints percent, not a fraction.

    Attributes:
        whole: all items of a task of which the scale draws some; full precision alone answers them.
        without: tasks that are left out of a mean.
    """

    VERSION = 1
    LATER = {"without": ()}
    PROTOCOL = Protocol

    tasks: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    percent: bool = False
    whole: bool = False
    unit: str = "fraction"

    def __post_init__(self) -> None:
        entries.chosen(self.tasks)
        entries.chosen(self.without)

    @staticmethod
    def brief(protocol: Protocol, least: Any) -> Protocol:
        """The protocol of a build's own measurement: the first items, of the tasks whose files are here."""
        absent = tuple(task for task in protocol.tasks if not entries.available(task))
        return replace(protocol, limit=min(protocol.limit or least.items, least.items), absent=absent)

    def only(self, protocol: Protocol) -> Protocol:
        """The protocol with the tasks of this metric alone: those of others need no file.

        Raises:
            UserError: a task that the scale does not ask.
        """
        wanted = protocol.answered(self)
        for task in wanted:
            if task not in protocol.tasks:
                raise unknown("task of this scale", task, protocol.tasks)
        return replace(protocol, absent=tuple(task for task in protocol.tasks if task not in wanted))

    def jobs(self, target: Target) -> dict[str, Job] | None:
        """One job scores all tasks of a scale, so that a model is loaded once; None where it measures no such task."""
        return scoring_job("zeroshot", self, target)

    @staticmethod
    def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
        """Score the tasks: one series a task, 1 where an item is answered correctly.

        Raises:
            UserError: damaged inputs, an answer beyond the context, NaN in the logits.
        """
        score(job, folders, folder, origin, ("correct",))

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """The items of the tasks that were asked for."""
        recorded = observed["items"].series
        return {
            f"{task}/correct": recorded[f"{task}/correct"] for task in target.scale.protocols["zeroshot"].answered(self)
        }


def scoring_job(kind: str, params: "ZeroShot", target: Target) -> dict[str, Job] | None:
    """The job of a kind that scores tasks, under the scale's protocol for that kind."""
    protocol = target.scale.protocols[kind]
    if protocol is None:
        return None
    tasks = [task for task in protocol.tasks if not target.recipe.steps or protocol.draw(task) == task]
    tasks = [task for task in tasks if task not in protocol.absent]
    if set(protocol.answered(params)) - set(tasks):
        return None
    return {"items": target.once(kind, lambda: _job(kind, target, tasks))}


def _job(kind: str, target: Target, tasks: list[str]) -> Job:
    """The job that scores these tasks."""
    protocol = target.scale.protocols[kind]
    needs = {f"requests {task}": requests.job(target, task, protocol.limit) for task in tasks}
    compressed = compress.job(target)
    inputs = target.inputs() | {
        "calibration": compressed.parsed_inputs().get("calibration"),
        "tasks": {task: entries.identifier(task) for task in tasks},
        "limit": protocol.limit,
        "tokens": protocol.tokens,
    }
    if target.recipe.steps:
        needs["weights"] = compressed
    rule = {"tasks": tasks, "limit": protocol.limit, "tokens": protocol.tokens}
    return make(kind, target.label, inputs, target.options() | rule, needs, target.steps)


def score(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str], columns: Sequence[str]) -> None:
    """Score the tasks of a job and keep columns of `repro.data.task_scores.run`, a series a task each.

    Raises:
        UserError: as `scored`.
    """
    options = job.parsed_options()
    lm = compress.load(options, folders.get("weights"))
    series = {}
    for task in options["tasks"]:
        series |= scored(lm, folders[f"requests {task}"], task, options["limit"], options["tokens"], columns)
    observations.save(folder / observations.FILE, series, origin)
