"""Loss of the tokens that a quantizer hurts least to most, in quartiles by the error that it makes (SPEAR, Figure 10).

Open in the paper, chosen here: the error of a token is 1 - cosine of the last hidden states that predict it, in full
precision and under the quantizer alone. It uses no loss: tokens grouped by their loss would differ in it by selection.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from repro import models
from repro.core.errors import UserError
from repro.data import corpora
from repro.jobs import compress, tokens
from repro.jobs.target import Target
from repro.metrics import perplexity
from repro.metrics.metric import Metric
from repro.metrics.sensitivity import token_nll
from repro.metrics.similarity import traces
from repro.models.perplexity import check_context, windows
from repro.store import observations
from repro.store.job import Job, make
from repro.store.observations import Observations, Series

QUARTILES = (1, 2, 3, 4)
TOGETHER = 4  # windows in one forward pass


@dataclass(frozen=True)
class ByError(Metric):
    """Mean negative log likelihood, in nats, of the tokens in a `quartile` (1 to 4, the largest error) of the error
    that the recipe `base` makes; windows are those of perplexity."""  # fmt: skip

    VERSION = 1

    base: str
    quartile: int
    corpus: str = "c4"
    unit: str = "nats"

    def __post_init__(self) -> None:
        if self.quartile not in QUARTILES:
            raise UserError(f"by_error: quartile is {self.quartile}; it must be 1, 2, 3 or 4, the largest error")

    def jobs(self, target: Target) -> dict[str, Job] | None:
        """One job scores the tokens of all quartiles; None where this scale does not measure perplexity."""
        if perplexity.Perplexity(self.corpus).jobs(target) is None:  # refuses a text that the recipe is calibrated on
            return None
        protocol = target.scale.protocols["perplexity"]
        text = target.scale.text(self.corpus)
        base = compress.job(target.under(self.base))
        needs = {"text": tokens.job(target, text), "base": base}
        rule = {"length": protocol.length, "windows": protocol.windows}
        inputs = (
            target.inputs() | rule | {"text": corpora.identifier(text, target.scale.hub), "base": base.parsed_inputs()}
        )
        if target.recipe.steps:
            needs["weights"] = compress.job(target)
            inputs["calibration"] = needs["weights"].parsed_inputs().get("calibration")
        options = target.options() | rule | {"label": protocol.label}
        return {"tokens": make("by_error", target.label, inputs, options, needs, target.steps)}

    @staticmethod
    def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
        """Score every window: sums and counts of each quartile.

        Raises:
            UserError: damaged inputs, a corpus without a full window, windows beyond the context.
        """
        options = job.parsed_options()
        full = models.load(options["model"], options["device"], options["dtype"], options["hub"])
        base, model = (compress.load(options, folders.get(role)).model for role in ("base", "weights"))
        ids, identity = corpora.load_tokens(folders["text"] / tokens.OUTPUTS[0])
        check_context(model, options["length"])
        errors, nll = [], []
        for batch in windows(ids, options["length"], options["windows"]).to(full.device).split(TOGETHER):
            errors.append(1 - traces(full, base, batch)[:, :-1])
            with torch.no_grad():
                nll.append(token_nll(model, model.base_model(batch, use_cache=False).last_hidden_state, batch))
        group = f"{options['label']} on {identity['label']}"
        series = quartiles(np.concatenate(errors), np.concatenate(nll), group)
        observations.save(folder / observations.FILE, series, origin)

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """Sum and count of the quartile, by window."""
        return {name: observed["tokens"].series[f"{name} {self.quartile}"] for name in ("nll", "count")}

    def value(self, mean: Mapping[str, Any]) -> Any:
        """The mean over the tokens of the quartile."""
        return mean["nll"] / mean["count"]

    @property
    def reference(self) -> bool:
        """One recipe's loss compares with nothing, though it has two series."""
        return False

    @property
    def against(self) -> str:
        """Losses are read as a difference to full precision."""
        return "q - f"


def quartiles(errors: np.ndarray, nll: np.ndarray, group: str) -> dict[str, Series]:
    """Sum of `nll` and count of tokens, per window and quartile of `errors`, both `[windows, positions]`."""
    of = np.searchsorted(np.quantile(errors, [0.25, 0.5, 0.75]), errors) + 1
    series = {}
    for quartile in QUARTILES:
        inside = (of == quartile).astype(float)
        for name, values in (("nll", inside * nll), ("count", inside)):
            series[f"{name} {quartile}"] = Series(values.sum(1), "windows", group)
    return series
