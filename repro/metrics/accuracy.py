"""The base of metrics that are shares of right answers: scoring of items, chance, comparison with full precision."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from repro.data import requests as stored
from repro.data import task_scores as scoring
from repro.jobs import requests
from repro.metrics.metric import Metric
from repro.models.lowbit import LowBitModel
from repro.store.observations import Series


class Accuracy(Metric):
    """The share of a task's items that are answered right, or the plain mean over several tasks.

    Its series are `<task>/correct`: 1 where an item is answered right.
    """

    percent = False  # a field where a paper prints percent

    def value(self, mean: Mapping[str, Any]) -> Any:
        """The plain mean of the tasks, a share or percent."""
        tasks = [share for name, share in mean.items() if name.endswith("/correct")]
        return (100 if self.percent else 1) * np.mean(tasks, axis=0)

    @property
    def limits(self) -> tuple[float, float]:
        """A share, or a percentage."""
        return (0.0, 100.0 if self.percent else 1.0)

    def status(self, full: Mapping[str, Series]) -> str:
        """`at_chance` where full precision itself is less than 3 standard errors above chance, else `ok`."""
        correct = {name.partition("/")[0]: series.values for name, series in full.items()}
        return "at_chance" if scoring.at_chance(correct) else "ok"

    @property
    def against(self) -> str:
        """Accuracies are compared with full precision by their difference."""
        return "q - f"


def scored(
    lm: LowBitModel, folder: Path, task: str, limit: int | None, tokens: int, columns: Sequence[str] = ("correct",)
) -> dict[str, Series]:
    """Score the items of a task with given answers by log likelihoods: a series per column, without missing values.

    Args:
        lm: the model.
        folder: of the job `requests`.
        task: its name.
        limit: how many items the requests hold; None is all.
        tokens: per forward pass.
        columns: of `repro.data.task_scores.run`.

    Raises:
        UserError: damaged requests, an answer beyond the context, NaN in the logits.
    """
    task_requests = stored.load(folder / requests.OUTPUTS[0])
    label = f"lm-eval {task_requests.meta['harness']}" + (f" n{limit}" if limit else "") + f": {task}"
    frame = scoring.run(lm.model, [task_requests], tokens)
    series = {}
    for name in columns:
        values = frame[name].dropna().to_numpy(dtype=float)
        series[f"{task}/{name}"] = Series(values, "items", label)
    return series
