"""Log probability of a task's right answers, in nats: what moves before accuracy does, and where accuracy is at chance.

`choice` is the right answer's log probability among the answers, by their total log likelihoods: at chance, a model
gives log(1/4) for four answers, and damage shows without a single answer changing. `nll` is the negative log likelihood
of the right answer's text, such as LAMBADA's last word, which has no other answers. Whether an item is right is stored
too, so that accuracy comes from the same run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from repro.core.errors import UserError
from repro.data import tasks as entries
from repro.jobs.target import Target
from repro.metrics import zeroshot
from repro.metrics.accuracy import Accuracy
from repro.store.job import Job
from repro.store.observations import Observations, Series

KEPT = ("correct", "choice", "nll")
# Means over this many neighbouring items are stored, which takes a quarter of the bytes. If items are independent, the
# interval is as wide as without (0.93 to 1.04 of it); if neighbours are alike, it is wider, as it should be (BLiMP
# 1.46, clozes 1.07 and 1.12).
NEIGHBOURS = 4
STEP = 2.0**-10  # nats, to which means are rounded; this moves a mean of 100 by 0.00003, intervals are 0.01 and more
TASKS = (
    *("piqa", "arc_easy", "arc_challenge", "hellaswag-1916", "winogrande", "lambada_openai"),
    *("blimp-100", "cloze-far", "cloze-near"),
)


@dataclass(frozen=True)
class Protocol(zeroshot.Protocol):
    """As that of `zeroshot`; its tasks are those with something above chance, or whose log probability moves."""

    tasks: tuple[str, ...] = TASKS


@dataclass(frozen=True)
class Likelihood(Accuracy):
    """The mean over the items of a task, or the plain mean over several, of the log probability of the right `choice`,
    of the right answer's `nll`, or of whether it is `correct`, a share.

    `percent`: the paper prints percent of right answers, not a fraction.
    """  # fmt: skip

    VERSION = 1
    LATER = {"percent": False}
    PROTOCOL = Protocol
    brief = staticmethod(zeroshot.ZeroShot.brief)

    tasks: tuple[str, ...]
    show: Literal["choice", "nll", "correct"] = "choice"
    percent: bool = False
    unit: str = "nats"

    def __post_init__(self) -> None:
        entries.chosen(self.tasks)
        if not self.tasks:
            raise UserError("likelihood: tasks is empty; name one or more")
        single = [name for name in self.tasks if not entries.TASKS[name].chance]
        if self.show == "choice" and single:
            raise UserError(f"likelihood: {single[0]} has one answer and no choice; show its nll")
        if self.percent and self.show != "correct":
            raise UserError(f"likelihood: percent is of right answers; show them, not the {self.show}")

    def only(self, protocol: Protocol) -> Protocol:
        """The protocol with the tasks of this metric alone, as that of `zeroshot`."""
        return zeroshot.ZeroShot(self.tasks).only(protocol)

    def jobs(self, target: Target) -> dict[str, Job] | None:
        """One job scores all tasks of a scale; None if the scale lacks one of these tasks."""
        return zeroshot.scoring_job("likelihood", zeroshot.ZeroShot(self.tasks), target)

    @staticmethod
    def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
        """Score the tasks: three series for each task, without `choice` for a task of one answer.

        Raises:
            UserError: as of `zeroshot`.
        """
        zeroshot.score(job, folders, folder, origin, KEPT)

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """Whether each item is right; of a log probability one value for `NEIGHBOURS` items, in steps of `STEP`."""
        named = {f"{task}/{self.show}": observed["items"].series[f"{task}/{self.show}"] for task in self.tasks}
        if self.show == "correct":
            return named
        return {name: replace(series, values=of_neighbours(series.values)) for name, series in named.items()}

    def value(self, mean: Mapping[str, Any]) -> Any:
        """The plain mean of the tasks, in nats, a share or percent."""
        return super().value(mean) if self.show == "correct" else np.mean(list(mean.values()), axis=0)

    @property
    def limits(self) -> tuple[float, float]:
        """A log probability is at most 0, an nll at least 0; `correct` is a share or a percentage."""
        return {"choice": (-np.inf, 0.0), "nll": (0.0, np.inf)}.get(self.show, super().limits)

    def status(self, full: Mapping[str, Series]) -> str:
        """`at_chance` where it is whether answers are right, and full precision is at chance; else `ok`."""
        return super().status(full) if self.show == "correct" else "ok"


def of_neighbours(items: np.ndarray) -> np.ndarray:
    """Means of `NEIGHBOURS` or one more neighbouring items `[n]`, weighted so that their mean is that of all items."""
    parts = max(1, len(items) // NEIGHBOURS)
    starts = np.arange(parts) * len(items) // parts
    means = np.add.reduceat(items, starts) * parts / len(items)
    return np.round(means / STEP) * STEP
