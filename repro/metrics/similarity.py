"""Cosine similarity of last hidden states to full precision, token by token, over nine sequences (SPEAR, appendix A.1).

Six sequences are sampled from the full-precision model, three are passages of a corpus, 96 tokens each. At a position t
the spread sigma(t) is the largest minus the smallest cosine over the nine; the first position is the same BOS in all
sampled ones. Open in the paper, chosen here: passages are spread evenly over the corpus.

Extremes of nine have no interval from these nine: a resample holds six of them on average, whose spread is smaller. So
nine sequences are drawn twelve times; numbers are means over the draws, figures show the first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from repro import models
from repro.core.errors import UserError
from repro.data import corpora
from repro.jobs import compress, tokens
from repro.jobs.target import Target
from repro.metrics.metric import Metric
from repro.models import sampling
from repro.store import observations
from repro.store.job import Job, make
from repro.store.observations import Observations, Series

DRAWS = 12
SAMPLED = 6
PASSAGES = 3
LENGTH = 96
WIDE = 0.2


@dataclass(frozen=True)
class Similarity(Metric):
    """What is shown of nine traces.

    `cos_min`, `cos_max`: least and greatest mean cosine of a sequence; `sigma_avg`, `sigma_max`: mean and greatest
    spread of a position; `wide`: percent of positions with a spread above 0.2. Of the first nine `trace`: the cosines
    of one `sequence` (0 to 5 sampled, 6 to 8 passages); `lowest`, `highest`: over the nine, by position.
    """

    VERSION = 1

    show: Literal["cos_min", "cos_max", "sigma_avg", "sigma_max", "wide", "trace", "lowest", "highest"]
    corpus: str = "wikitext2"
    sequence: int = 0
    unit: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.sequence < SAMPLED + PASSAGES:
            raise UserError(f"similarity: sequence is {self.sequence}; there are {SAMPLED + PASSAGES}, the first is 0")

    def jobs(self, target: Target) -> dict[str, Job]:
        """One job makes all traces of the target."""
        text = target.scale.text(self.corpus)
        needs = {"text": tokens.job(target, text)}
        if target.recipe.steps:
            needs["weights"] = compress.job(target)
        rule = {"draws": DRAWS, "sampled": SAMPLED, "passages": PASSAGES, "length": LENGTH}
        calibration = needs["weights"].parsed_inputs().get("calibration") if target.recipe.steps else None
        inputs = (
            target.inputs() | rule | {"calibration": calibration, "text": corpora.identifier(text, target.scale.hub)}
        )
        return {"traces": make("similarity", target.label, inputs, target.options(), needs, target.steps)}

    @staticmethod
    def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
        """Trace nine sequences through both models, for every draw of them.

        Raises:
            UserError: damaged inputs, or a corpus without enough passages.
        """
        options = job.parsed_options()
        full = models.load(options["model"], options["device"], options["dtype"], options["hub"])
        ids, identity = corpora.load_tokens(folders["text"] / tokens.OUTPUTS[0])
        text = passages(ids, DRAWS * PASSAGES, LENGTH, identity["label"])
        sampled = sampling.sample(full, DRAWS * SAMPLED, LENGTH, seed=0)
        quantized = compress.load(options, folders.get("weights")).model
        nines = [torch.cat([sampled[i::DRAWS], text[i::DRAWS].to(sampled)]) for i in range(DRAWS)]
        cosines = np.stack([traces(full, quantized, nine) for nine in nines])
        group = f"{DRAWS} draws of {SAMPLED} sampled sequences and {PASSAGES} passages of {identity['label']}"
        observations.save(folder / observations.FILE, summary(cosines, group), origin)

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """The number of every draw; for a figure the series that is drawn."""
        name = f"trace {self.sequence}" if self.show == "trace" else self.show
        return {name: observed["traces"].series[name]}

    def value(self, mean: Mapping[str, Any]) -> Any:
        """The mean of what is shown, or percent of positions."""
        (only,) = mean.values()
        return 100 * only if self.show == "wide" else only

    @property
    def limits(self) -> tuple[float, float]:
        """Of a cosine, of the distance of two, or percent."""
        return {"wide": (0.0, 100.0), "sigma_avg": (0.0, 2.0), "sigma_max": (0.0, 2.0)}.get(self.show, (-1.0, 1.0))

    @property
    def reference(self) -> bool:
        """True: every number is already a comparison with full precision."""
        return True

    @property
    def itself(self) -> float | None:
        """Full precision with itself: cosines of 1, no spread."""
        return 0.0 if self.show in ("sigma_avg", "sigma_max", "wide") else 1.0


def passages(ids: np.ndarray, count: int, length: int, label: str) -> Tensor:
    """Passages int64 `[count, length]` of the token ids `[T]` of the corpus `label`, spread evenly, apart.

    Raises:
        UserError: there are too few tokens.
    """
    if len(ids) < (count + 1) * length:
        raise UserError(f"{label} has {len(ids)} tokens, too few for {count} passages of {length}; name a longer one")
    starts = [len(ids) * (i + 1) // (count + 1) for i in range(count)]
    return torch.from_numpy(np.stack([ids[start : start + length] for start in starts]).astype(np.int64))


@torch.no_grad()
def traces(full: nn.Module, quantized: nn.Module, ids: Tensor) -> np.ndarray:
    """Cosine of the last hidden states of two decoders, float64 `[sequences, positions]`, for ids of that shape."""
    states = [model.base_model(ids, use_cache=False).last_hidden_state.double() for model in (full, quantized)]
    return torch.cosine_similarity(*states, dim=-1).cpu().numpy()


def summary(cosines: np.ndarray, group: str) -> dict[str, Series]:
    """The series of traces `[draws, 9, positions]`: numbers of every draw; of the first, traces and their extremes."""
    means = cosines.mean(2)
    low = cosines.min(1)
    high = cosines.max(1)
    sigma = high - low
    numbers = {"cos_min": means.min(1), "cos_max": means.max(1), "sigma_avg": sigma.mean(1), "sigma_max": sigma.max(1)}
    numbers["wide"] = (sigma > WIDE).mean(1)
    drawn = {f"trace {i}": trace for i, trace in enumerate(cosines[0])} | {"lowest": low[0], "highest": high[0]}
    series = {name: Series(values, "draws", group) for name, values in numbers.items()}
    return series | {name: Series(values, "positions") for name, values in drawn.items()}
