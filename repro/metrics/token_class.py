"""Negative log likelihood and KL to full precision by class of the predicted token: where two measures disagree, why.

A class's number is summed over its tokens and divided by all tokens of the text, so that the five classes add up to the
text's mean, and a class with few tokens weighs little.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from repro import models
from repro.data import corpora
from repro.jobs import compress, tokens
from repro.jobs.target import Target
from repro.metrics.metric import Metric
from repro.models import perplexity as scoring
from repro.store import observations
from repro.store.job import Job, make
from repro.store.observations import Observations, Series

CLASSES = ("breaks", "punctuation", "digits", "starts", "inside")


@dataclass(frozen=True)
class TokenClass(Metric):
    """`breaks` are line breaks, `punctuation` is without a letter or digit, blanks too; `starts` begin a word, `inside`
    goes on with one. On the windows of `corpus` that the scale measures KL on."""  # fmt: skip

    VERSION = 1

    corpus: str
    of: Literal["breaks", "punctuation", "digits", "starts", "inside"]
    show: Literal["nll", "kl"] = "nll"
    unit: str = "nats"

    def jobs(self, target: Target) -> dict[str, Job] | None:
        """One job scores all classes of a text; none where the scale measures no perplexity."""
        if (protocol := target.scale.protocols["perplexity"]) is None:
            return None
        text = target.scale.text(self.corpus)
        needs = {"text": tokens.job(target, text)}
        if target.recipe.steps:
            needs["weights"] = compress.job(target)
        rule = {"length": protocol.length, "windows": protocol.kl_windows}
        calibration = needs["weights"].parsed_inputs().get("calibration") if target.recipe.steps else None
        inputs = (
            target.inputs() | rule | {"calibration": calibration, "text": corpora.identifier(text, target.scale.hub)}
        )
        options = target.options() | rule | {"label": protocol.label}
        return {"classes": make("token_class", target.label, inputs, options, needs, target.steps)}

    @staticmethod
    def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
        """Score the windows with the recipe and in full precision.

        Raises:
            UserError: damaged inputs, a corpus without a full window, a value that is not finite.
        """
        options = job.parsed_options()
        full = models.load(options["model"], options["device"], options["dtype"], options["hub"])
        low = compress.load(options, folders["weights"]).model if "weights" in folders else None
        ids, identity = corpora.load_tokens(folders["text"] / tokens.OUTPUTS[0])
        tokenizer = models.tokenizer(options["model"], options["hub"])
        of = np.asarray([class_of(tokenizer.decode([i])) for i in range(len(tokenizer))])
        cut = scoring.windows(ids, options["length"], options["windows"])
        rows = [by_class(full, low, window, of) for window in cut]
        group = f"{options['label']} on {identity['label']}, first {len(cut)}, by token class"
        series = {}
        for name in rows[0]:
            series[name] = Series(np.asarray([row[name] for row in rows]), "windows", group)
        observations.save(folder / observations.FILE, series, origin)

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """The windows of one class."""
        return observed["classes"].only(f"{self.of}/{self.show}")

    def value(self, mean: Mapping[str, Any]) -> Any:
        """Nats per token of the text."""
        return mean[f"{self.of}/{self.show}"]

    @property
    def reference(self) -> bool:
        """True: KL is already a comparison with full precision."""
        return self.show == "kl"

    @property
    def limits(self) -> tuple[float, float]:
        """A loss or KL is 0 or more."""
        return (0.0, np.inf)

    @property
    def itself(self) -> float | None:
        """KL of full precision with itself."""
        return 0.0 if self.show == "kl" else None


def class_of(text: str) -> int:
    """The index in CLASSES of a token's text."""
    if text and not text.strip("\n"):
        return 0
    if not re.search(r"[^\W_]", text):
        return 1
    if re.search(r"\d", text):
        return 2
    return 3 if text[0].isspace() else 4


@torch.inference_mode()
def by_class(full: nn.Module, low: nn.Module | None, ids: torch.Tensor, of: Sequence[int]) -> dict[str, float]:
    """`<class>/nll` of `low`, or of `full` without one, and `<class>/kl` of the two, of one window.

    Args:
        full: the causal LM in full precision.
        low: the same under a recipe.
        ids: int64 `[L]`; the targets are the last L - 1.
        of: by token id its place in CLASSES.

    Returns:
        Nats of the class's targets over the number of all targets.
    """
    logs = [
        F.log_softmax(model(input_ids=ids[None].to(model.device), use_cache=False).logits[0, :-1].float(), -1)
        for model in filter(None, (full, low))
    ]
    targets = ids[1:].to(logs[0].device)
    values = {"nll": F.nll_loss(logs[-1], targets, reduction="none")}
    if low is not None:
        values["kl"] = (logs[0].exp() * (logs[0] - logs[1])).sum(-1)
    class_of = np.asarray(of)[ids[1:].numpy()]
    totals = {}
    for show, of_tokens in values.items():
        sums = np.bincount(class_of, of_tokens.double().cpu().numpy(), minlength=len(CLASSES)) / len(class_of)
        totals |= {f"{name}/{show}": float(x) for name, x in zip(CLASSES, sums)}
    return totals
