"""Zero-shot accuracy (5-shot for MMLU): from log likelihoods of answers to correct items and chance levels.

Metric and shots follow SPEAR, appendix D.4: acc_norm where a task has it (PIQA, ARC, HellaSwag), acc elsewhere, the
average being the plain mean of the tasks. One line per item is kept, so that every interval can be paired over items.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import logsumexp

from repro.data.requests import Requests
from repro.data.tasks import TASKS
from repro.models import loglikelihood

if TYPE_CHECKING:
    import pandas as pd  # takes a quarter of a second, which only who scores pays


def run(model: Any, every: Sequence[Requests], tokens: int = 4096) -> "pd.DataFrame":
    """Score a causal LM on tasks' requests.

    Args:
        model: a transformers causal LM, on its device.
        every: what `requests.build` or `requests.load` gives, one a task.
        tokens: ids in a forward pass, padding included.

    Returns:
        One row per item: task, number (in its file or subject), subject ("" but for MMLU), correct (under the task's
        metric), acc, acc_norm (that of one answer is acc), logliks (natural logs, one per answer), nll (of the right
        answer, nats), choice (log of its probability among the answers; NaN where it is the only one), truncated (a
        prompt was cut from the left to fit the context). LAMBADA has one answer, the last word, and is correct when
        greedy decoding gives it.

    Raises:
        UserError: as `loglikelihood.score`.
    """
    import pandas as pd

    frames = []
    for requests in every:
        logliks, greedy, cut = loglikelihood.score(model, requests.prefixes, requests.rows(), tokens)
        ends = np.cumsum(requests.answers)[:-1]
        by_item = [np.split(values, ends) for values in (logliks, greedy, cut, requests.answer_chars)]
        right = [_right(*values, gold) for *values, gold in zip(*by_item, requests.gold.tolist())]
        subjects = np.asarray(json.loads(requests.meta["subjects"]), dtype=object)
        frame = pd.DataFrame(right, columns=["acc", "acc_norm", "logliks", "nll", "choice", "truncated"])
        names = {"task": requests.meta["task"], "number": requests.number, "subject": subjects[requests.subject]}
        frames.append(frame.assign(**names, correct=frame[requests.meta["metric"]]))
    return pd.concat(frames, ignore_index=True)


def _right(
    logliks: np.ndarray, greedy: np.ndarray, cut: np.ndarray, chars: np.ndarray, gold: int
) -> tuple[int, int, list[float], float, float, bool]:
    """Whether an item is right by the largest log likelihood and by the largest one per character; its likelihoods."""
    if gold < 0:
        acc = norm = int(greedy[0])
    else:
        acc = int(logliks.argmax() == gold)
        norm = int((logliks / chars).argmax() == gold)
    right = float(logliks[max(gold, 0)])
    choice = right - float(logsumexp(logliks)) if len(logliks) > 1 else np.nan
    return acc, norm, logliks.tolist(), -right, choice, bool(cut.any())


def at_chance(correct: Mapping[str, np.ndarray]) -> bool:
    """Whether the plain mean of several tasks is less than 3 binomial standard errors above that of their chances.

    The error is the larger of the mean's own and of that which answers at chance would have.

    Args:
        correct: task to 0 or 1 for each item.
    """
    n = np.asarray([len(values) for values in correct.values()])
    accuracy = np.asarray([values.mean() for values in correct.values()])
    chance = np.asarray([TASKS[task].chance for task in correct])
    errors = [np.sqrt((share * (1 - share) / n).sum()) / len(n) for share in (accuracy, chance)]
    return not accuracy.mean() - chance.mean() > 3 * max(errors)
