"""Acceptance length of a speculating model: tokens of an iteration, on prompts of one set (SubSpec, Tables 1, 2, 5, 6).

By the paper's counting: the bonus token counts, and the prefill is an iteration of one token. Losslessness makes it the
same with and without offloading, so nothing is offloaded here; every block of the draft is a substitute, as in the
published recipes. The models are base models without a chat template: prompts are plain text, first turns only.

Greedy continuations of small models repeat themselves, which a draft of the same model guesses well. So the share of
repeated 4-grams in the new text is kept for every prompt, and there is a length of the less repetitive half.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from repro.data import prompts
from repro.engine import weights
from repro.engine.speculating import Speculating
from repro.engine.substitute import draft_of
from repro.errors import UserError
from repro.jobs import compress
from repro.jobs.job import Job, make
from repro.jobs.target import Target
from repro.methods import subspec
from repro.record import observations
from repro.record.observations import Observations, Series

VERSION = 1
OUTPUTS = (observations.FILE,)
DEFAULT = None  # a scale that says nothing of it does not measure it
GRAM = 4
FEW = 3  # prompts of a build's own measurement: drawn text takes minutes for each on a CPU core


@dataclass(frozen=True)
class Ask:
    """Tokens of an iteration, all new tokens over all iterations; or the share of repeated 4-grams, as a fraction.

    `prompts` names a set of repro/data/prompts.yaml. The target is the cell's recipe; `bits`, `top_k`, `depth` and
    `draft_temperature` are the draft's, 0 being the default of `methods.subspec.Config`. `self` is the target as draft.
    """

    prompts: str
    show: Literal["length", "repeated 4-grams", "less repetitive half"] = "length"
    temperature: float = 0.0
    draft: Literal["subspec", "self"] = "subspec"
    bits: int = 0
    top_k: int = 0
    depth: int = 0
    draft_temperature: float = 0.0
    unit: str = "tokens"

    def __post_init__(self) -> None:
        prompts.identifier(self.prompts)
        if self.temperature < 0:
            raise UserError(f"temperature is {self.temperature}; it is 0 or more")
        self.config  # noqa: B018  checks the values

    @property
    def config(self) -> subspec.Config:
        """The draft's configuration."""
        given = {name: getattr(self, name) for name in ("bits", "top_k", "depth") if getattr(self, name)}
        if self.draft_temperature:
            given["sampled_temperature" if self.temperature else "temperature"] = self.draft_temperature
        return subspec.Config(**given)


@dataclass(frozen=True)
class Protocol:
    """The first `prompts` of a shuffle of the set by seed 0, as the authors draw them; at most `tokens` new ones."""

    prompts: int = 40
    tokens: int = 256

    def __post_init__(self) -> None:
        for name, least in {"prompts": 1, "tokens": 2}.items():
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}; it is {least} or more")


def brief(protocol: Protocol, least: Any) -> Protocol:
    """The protocol of a build's own measurement: the first prompts, as long as all."""
    return replace(protocol, prompts=min(protocol.prompts, FEW))


def lacking(ask: Ask) -> str:
    """Why the prompts are not here; empty if they are."""
    try:
        prompts.rows(ask.prompts)
    except UserError as error:
        return str(error)
    return ""


def jobs(ask: Ask, target: Target) -> dict[str, Job] | None:
    """One job decodes the prompts; None where the scale has no protocol, or the prompts are not here."""
    protocol = target.scale.protocols["acceptance"]
    if protocol is None or lacking(ask):
        return None
    count = min(protocol.prompts, prompts.SETS[ask.prompts].prompts)
    rule = {"tokens": protocol.tokens, "count": count, "temperature": ask.temperature}
    rule |= {"draft": vars(ask.config), "of": ask.draft}
    inputs = target.inputs() | rule | {"prompts": prompts.identifier(ask.prompts), "seed": target.seed}
    inputs["calibration"] = compress.job(target).declared().get("calibration")
    needs = {"weights": compress.job(target)} if target.recipe.steps else {}
    options = target.options() | rule | {"prompts": ask.prompts}
    return {"prompts": make("acceptance", target.label, inputs, options, needs, target.steps)}


def run(job: Job, found: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
    """Decode every prompt; a value a prompt: new tokens, iterations, share of repeated 4-grams.

    Raises:
        UserError: damaged inputs, or a model that the engine does not run; `Refused` for a prompt beyond the context.
    """
    given = job.given()
    config = subspec.Config(**given["draft"])
    lm = compress.load(given | {"device": "cpu"}, found.get("weights"))
    context = weights.check(given["model"], lm.model.config, None)
    device = torch.device(given["device"])
    target = weights.decoder(lm, context + config.nodes, device, getattr(torch, given["dtype"]))
    drafting = target if given["of"] == "self" else draft_of(lm, target, config)
    core = Speculating(given["model"], target, drafting, config, given["hub"])
    columns: dict[str, list[float]] = {"tokens": [], "iterations": [], "repeated": []}
    for number, prompt in enumerate(prompts.load(given["prompts"], given["count"])):
        how = {"temperature": given["temperature"], "seed": number}
        text = next(core.generate([prompt.text], given["tokens"], **how))
        lengths = core.batch.lengths
        columns["tokens"].append(sum(lengths))
        columns["iterations"].append(len(lengths))
        columns["repeated"].append(repeated(text.tokens))
        print(f"{given['prompts']} {prompt.id}: {sum(lengths) / len(lengths):.2f} tokens an iteration", flush=True)
    group = f"{given['prompts']}, first {given['count']}, {given['tokens']} tokens, T {given['temperature']:g}"
    series = {name: Series(np.asarray(values, dtype=float), "items", group) for name, values in columns.items()}
    observations.save(folder / OUTPUTS[0], series, origin)


def repeated(tokens: list[int]) -> float:
    """The share of a text's 4-grams that it had before; 0 of a shorter text."""
    grams = list(zip(*(tokens[start:] for start in range(GRAM))))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def series(ask: Ask, found: Mapping[str, Observations], target: Target) -> dict[str, Series]:
    """New tokens and iterations of the prompts; of the less repetitive half, those up to the median share."""
    kept = found["prompts"].series
    if ask.show == "repeated 4-grams":
        return {"repeated": kept["repeated"]}
    both = {name: kept[name] for name in ("tokens", "iterations")}
    if ask.show == "length":
        return both
    share = kept["repeated"].values
    chosen = np.sort(np.argsort(share, kind="stable")[: -(-len(share) // 2)])
    half = {}
    for name, one in both.items():
        half[name] = Series(one.values[chosen], one.units, f"{one.group}, less repetitive half")
    return half


def value(ask: Ask, mean: Mapping[str, Any]) -> Any:
    """Tokens over iterations, or the mean share."""
    return mean["repeated"] if ask.show == "repeated 4-grams" else mean["tokens"] / mean["iterations"]


def limits(ask: Ask) -> tuple[float, float]:
    """An iteration gives its bonus token at least, and a whole path with it at most; or a share."""
    return (0.0, 1.0) if ask.show == "repeated 4-grams" else (1.0, ask.config.depth + 1.0)
