"""Perplexity on a corpus as GPTQ measures it, with KL and top-1 agreement to full precision on the first windows."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from repro import models
from repro.core.errors import UserError, at_least
from repro.data import corpora
from repro.jobs import compress, tokens
from repro.jobs.target import Target
from repro.metrics.metric import Metric
from repro.models import perplexity as scoring
from repro.store import observations
from repro.store.job import Job, make
from repro.store.observations import Observations, Series

COMPARED = {"kl": 0.0, "top1": 100.0}  # what full precision gives against itself


@dataclass(frozen=True)
class Protocol:
    """Windows of `length`, the first `windows` (null: all); KL and top-1 over the first `kl_windows`."""

    length: int = 2048
    windows: int | None = None
    kl_windows: int = 4

    def __post_init__(self) -> None:
        at_least(self, length=2, windows=1, kl_windows=0)

    @property
    def label(self) -> str:
        """The name that stands in results: `gptq-2048-v1 w8`."""
        version = scoring.Protocol(length=self.length).version
        return f"gptq-{self.length}-v{version}" + (f" w{self.windows}" if self.windows else "")


@dataclass(frozen=True)
class Perplexity(Metric):
    """The paper's corpus, which the scale maps to a text, or a corpus by its own name; and what is shown of it."""

    VERSION = 1
    DEFAULT = {}
    PROTOCOL = Protocol

    corpus: str
    show: Literal["perplexity", "kl", "top1"] = "perplexity"
    unit: str = "ppl"

    @staticmethod
    def brief(protocol: Protocol, least: Any) -> Protocol:
        """The protocol of a build's own measurement: the first windows."""
        windows = min(protocol.windows or least.windows, least.windows)
        return replace(protocol, windows=windows, kl_windows=min(protocol.kl_windows, windows))

    def jobs(self, target: Target) -> dict[str, Job] | None:
        """One job scores all corpora of a scale, so that a model is loaded once; any other corpus is one of its own."""
        scale = target.scale
        if scale.protocols["perplexity"] is None:
            return None
        text = scale.text(self.corpus)
        together = sorted(set(scale.corpora.values()))
        return {"scores": job(target, together if text in together else [text], scale.protocols["perplexity"])}

    @staticmethod
    def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
        """Score every corpus; one series per corpus of nll, and of kl and top1 where compared.

        Raises:
            UserError: damaged inputs, a corpus without a full window, windows beyond the context, NaN in the logits.
        """
        options = job.parsed_options()
        lm = compress.load(options, folders.get("weights"))
        compared = options["kl_windows"] if "weights" in folders else 0
        full = (
            [models.load(options["model"], options["device"], options["dtype"], options["hub"])] if compared else [None]
        )
        series: dict[str, Series] = {}
        for text in options["texts"]:
            ids, identity = corpora.load_tokens(folders[f"text {text}"] / tokens.OUTPUTS[0])
            cut = scoring.windows(ids, options["length"], options["windows"])
            frame = scoring.score(lm.model, cut, full[0], compared, full_precision="weights" not in folders)
            group = f"{options['label']} on {identity['label']}"
            for name in ("nll", "kl", "top1"):
                values = frame[name].dropna().to_numpy(dtype=float)
                if len(values):
                    subgroup = group if len(values) == len(frame) else f"{group}, first {len(values)}"
                    series[f"{text}/{name}"] = Series(values, "windows", subgroup)
        observations.save(folder / observations.FILE, series, origin)

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """The windows of one corpus: nll, kl or top1."""
        name = "nll" if self.show == "perplexity" else self.show
        key = f"{target.scale.text(self.corpus)}/{name}"
        recorded = observed["scores"].series
        return {name: recorded[key]} if key in recorded else {}

    def value(self, mean: Mapping[str, Any]) -> Any:
        """Perplexity, KL in nats, or agreement in percent."""
        if self.show == "perplexity":
            return np.exp(mean["nll"])
        return mean["kl"] if self.show == "kl" else 100 * mean["top1"]

    @property
    def reference(self) -> bool:
        """KL and agreement compare with full precision on the same windows by themselves."""
        return self.show in COMPARED

    @property
    def limits(self) -> tuple[float, float]:
        """A perplexity is 1 or more, KL 0 or more, agreement a percentage."""
        return {"perplexity": (1.0, np.inf), "kl": (0.0, np.inf)}.get(self.show, (0.0, 100.0))

    @property
    def itself(self) -> float | None:
        """KL and agreement of full precision with itself."""
        return COMPARED.get(self.show)

    @property
    def against(self) -> str:
        """Perplexity is read as a ratio to full precision; KL and agreement compare already."""
        return "q / f" if self.show == "perplexity" else ""


def job(target: Target, texts: list[str], protocol: Protocol) -> Job:
    """The job that scores the target on corpora.

    Raises:
        UserError: unknown model, recipe or corpus, or a text that the recipe is calibrated on.
    """
    rule = {"length": protocol.length, "windows": protocol.windows, "kl_windows": protocol.kl_windows}
    version = scoring.Protocol(length=protocol.length).version
    ids = {text: corpora.identifier(text, target.scale.hub) for text in texts}
    needs = {f"text {text}": tokens.job(target, text) for text in texts}
    compressed = compress.job(target)
    _keep_apart(target, ids, compressed)
    inputs = target.inputs() | {"calibration": compressed.parsed_inputs().get("calibration"), "texts": ids}
    if target.recipe.steps:
        needs["weights"] = compressed
    options = target.options() | rule | {"texts": texts, "label": protocol.label}
    return make("perplexity", target.label, inputs | rule | {"version": version}, options, needs, target.steps)


def _keep_apart(target: Target, ids: Mapping[str, str], compressed: Job) -> None:
    """Raise where a text that is scored is one that the recipe is calibrated on, also under its name on the hub."""
    crops = compressed.parsed_options().get("calibration")
    if not crops:
        return
    for name in (crops["corpus"], *crops.get("second", {}).values()):
        read = corpora.identifier(name, target.scale.hub)
        for text, identifier in ids.items():
            on_hub = text == corpora.entry(name).on_hub or name == corpora.entry(text).on_hub
            if identifier == read or on_hub:
                raise UserError(
                    f"scale {target.scale.name}: {target.recipe.name} is calibrated on {name}, and perplexity is "
                    f"measured on {text}, the same text or one that holds it; name another corpus for either"
                )
