"""Acceptance length of a speculating model: tokens of an iteration, on prompts of one set (SubSpec, Tables 1, 2, 5, 6).

By the paper's counting: the bonus token counts, and the prefill is an iteration of one token. Losslessness makes it the
same with and without offloading, so nothing is offloaded here; every block of SubSpec's draft is a substitute, as in
the published recipes. Other drafts are models of their own (`repro/engine/drafts.py`). The models are base models
without a chat template: prompts are plain text, first turns only.

The context includes the prompt, 2,048 tokens in the paper (section 5.1) and here: a long prompt gets fewer new tokens,
and one that is longer than the context is left out, as the authors' code skips it. Which ones are is the same for every
draft. Several sets are measured one by one, and the paper's mean is the plain one of their lengths.

Greedy continuations of small models repeat themselves, which a draft of the same model guesses well. So the share of
repeated 4-grams in the new text is kept for every prompt, and there is a length of the less repetitive half. A mean of
tokens over iterations hides that many are short and some very long: the median iteration of every prompt is kept, too.
"""

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from repro import models
from repro.core.errors import NotMeasurable, UserError, at_least
from repro.data import prompts
from repro.engine import drafts, eagle, head_files, weights
from repro.engine.core import Core
from repro.engine.speculating import Speculating
from repro.engine.substitute import draft_of
from repro.jobs import compress
from repro.jobs.target import Target
from repro.methods import subspec
from repro.metrics.metric import Metric
from repro.store import observations
from repro.store.job import Job, make
from repro.store.observations import Observations, Series

GRAM = 4
LEAST = 2  # new tokens: that of the prefill, and one of an iteration
# `show` to the series that it is the mean of.
ALONE = {"repeated 4-grams": "repeated", "median iteration": "median", "draft passes": "passes"}
CONFIGS = {  # draft to its configuration, and the options of it that `Acceptance` may set
    "subspec": (subspec.Config, ("bits", "top_k", "depth")),
    "apart": (drafts.Apart, ("bits", "top_k", "depth")),
    "self": (subspec.Config, ("bits", "top_k", "depth")),
    "small": (drafts.Small, ("top_k", "depth")),
    "specexec": (drafts.SpecExec, ("budget",)),
    "eagle2": (eagle.Eagle2, ("top_k", "depth")),
}
OWN = ("small", "specexec")  # drafts that are models of their own

FEW, SHORT = 3, 64  # prompts and new tokens of a build's own measurement: a drawn text of 256 takes a minute on a core


@dataclass(frozen=True)
class Protocol:
    """The first `prompts` of the set, shuffled by seed 0 as in the authors' code; at most `tokens` new ones each."""

    prompts: int = 40
    tokens: int = 256

    def __post_init__(self) -> None:
        at_least(self, prompts=1, tokens=2)


@dataclass(frozen=True)
class Acceptance(Metric):
    """Tokens of an iteration, all new tokens over all iterations; or the share of repeated 4-grams, as a fraction.

    `median iteration` is the mean over prompts of the median tokens of an iteration, without the prefill, and `draft
    passes` the mean over prompts of an iteration's draft passes, which a dynamic tree decides.

    `prompts` names a set of repro/data/prompts.yaml, or several with ` + ` between them: the mean of their values. The
    target is the cell's recipe; `bits`, `top_k`, `depth`, `budget` and `draft_temperature` are the draft's, 0 being the
    default of its configuration. `apart` is SubSpec's draft with a cache of its own, `self` the target as draft;
    `small` and `specexec` draft with the stand-in of `draft_model`, a paper's name; `eagle2` with a head that was
    trained for the target. `none` decodes without a draft: passes of the target and their tokens are counted.
    """

    VERSION = 1
    LATER = {"draft_model": "", "budget": 0}  # fields that stored results do not declare, and what they mean there
    PROTOCOL = Protocol

    prompts: str
    show: Literal["length", "median iteration", "draft passes", "repeated 4-grams", "less repetitive half"] = "length"
    temperature: float = 0.0
    draft: Literal["subspec", "apart", "self", "small", "specexec", "eagle2", "none"] = "subspec"
    draft_model: str = ""
    bits: int = 0
    top_k: int = 0
    depth: int = 0
    budget: int = 0
    draft_temperature: float = 0.0
    unit: str = "tokens"

    def __post_init__(self) -> None:
        for name in self.sets:
            prompts.identifier(name)
        if len(set(self.sets)) < len(self.sets):
            raise UserError(f"prompts {self.prompts!r}: a set is named twice; name each once")
        if self.temperature < 0:
            raise UserError(f"temperature is {self.temperature}; it must be 0 or more")
        self.config  # noqa: B018  checks the values

    @property
    def sets(self) -> tuple[str, ...]:
        """The prompt sets."""
        return tuple(self.prompts.split(" + "))

    @property
    def config(self) -> Any:
        """The draft's configuration; None without a draft.

        Raises:
            UserError: an option that this draft does not have, or a draft model where it needs none, or the reverse.
        """
        if self.draft == "none":
            self._check_no_options()
            return None
        config_class, options = CONFIGS[self.draft]
        values = {}
        for name in ("bits", "top_k", "depth", "budget"):
            value = getattr(self, name)
            if value and name not in options:
                raise UserError(f"draft {self.draft} has no option {name!r}; options: {', '.join(options)}")
            if value:
                values[name] = value
        if (self.draft in OWN) != bool(self.draft_model):
            needs = "needs a draft_model" if self.draft in OWN else "is made of the target; leave out draft_model"
            raise UserError(f"draft {self.draft} {needs}")
        if self.draft_temperature:
            values["sampled_temperature" if self.temperature else "temperature"] = self.draft_temperature
        return config_class(**values)

    def _check_no_options(self) -> None:
        """Check that no option of a draft is given.

        Raises:
            UserError: one is.
        """
        for name in ("bits", "top_k", "depth", "budget", "draft_temperature", "draft_model"):
            if getattr(self, name):
                raise UserError(f"draft none has no option {name!r}; leave it out, or name a draft")

    def operands(self) -> dict[str, tuple[str | None, dict[str, Any]]]:
        """With several sets, the cell of each under the same recipe; empty with one."""
        if len(self.sets) == 1:
            return {}
        by_name = {}
        for name in self.sets:
            by_name[_identifier(name)] = (None, asdict(self) | {"kind": "acceptance", "prompts": name})
        return by_name

    @property
    def quantity(self) -> str:
        """The mean over several sets, as an expression of their names in `operands`."""
        return f"({' + '.join(map(_identifier, self.sets))}) / {len(self.sets)}"

    @staticmethod
    def brief(protocol: Protocol, least: Any) -> Protocol:
        """The protocol of a build's own measurement: the first prompts, and the beginnings of their texts."""
        return replace(protocol, prompts=min(protocol.prompts, FEW), tokens=min(protocol.tokens, SHORT))

    def lacking(self) -> str:
        """Why the prompts are not here; empty if they are."""
        try:
            for name in self.sets:
                prompts.rows(name)
        except UserError as error:
            return str(error)
        return ""

    def jobs(self, target: Target) -> dict[str, Job] | None:
        """One job decodes the prompts of a set; None where the scale has no protocol or no draft."""
        protocol = target.scale.protocols["acceptance"]
        small = target.scale.models.get(self.draft_model, "")
        head = eagle.path_of(target.model)
        if protocol is None or (self.draft in OWN and not small):
            return None
        if self.draft == "eagle2" and not head.is_file():
            return None
        count = min(protocol.prompts, prompts.SETS[self.prompts].prompts)
        rule = {"tokens": protocol.tokens, "count": count, "temperature": self.temperature}
        rule |= {"draft": vars(self.config) if self.config else None, "of": self.draft}
        inputs = target.inputs() | rule | {"prompts": prompts.identifier(self.prompts), "seed": target.seed}
        inputs["calibration"] = compress.job(target).parsed_inputs().get("calibration")
        needs = {"weights": compress.job(target)} if target.recipe.steps else {}
        options = target.options() | rule | {"prompts": self.prompts}
        if small:
            inputs["draft_model"] = models.fingerprint(small)
            options["draft_model"] = small
        if self.draft == "eagle2":
            inputs["draft_head"] = head_files.identity(head)
        return {"prompts": make("acceptance", target.label, inputs, options, needs, target.steps)}

    @staticmethod
    def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
        """Decode every prompt; a value a prompt: new tokens, iterations, their median, draft passes, repeated 4-grams.

        Raises:
            UserError: damaged inputs, or a model that the engine does not run; `NotMeasurable` where every prompt is
                beyond the context.
        """
        options = job.parsed_options()
        if "draft_head" in job.parsed_inputs():
            head_files.check(eagle.path_of(options["model"]), "draft head", job.parsed_inputs()["draft_head"])
        core = speculating(options, folders.get("weights"))
        columns: dict[str, list[float]] = {"tokens": [], "iterations": [], "median": [], "passes": [], "repeated": []}
        fitting = list(fit(core, prompts.load(options["prompts"], options["count"]), options["tokens"]))
        for number, prompt, new in fitting:
            text = next(core.generate([prompt.text], new, temperature=options["temperature"], seed=number))
            counts = drafted_counts(core.batch) if core.draft else plain_counts(core.batch, text.tokens)
            for name, value in (counts | {"repeated": repeated(text.tokens)}).items():
                columns[name].append(value)
            length = counts["tokens"] / counts["iterations"]
            print(f"{options['prompts']} {prompt.id}: {length:.2f} tokens an iteration", flush=True)
        group = f"{options['prompts']}, first {options['count']}, {options['tokens']} tokens"
        group += f", T {options['temperature']:g}"
        if len(fitting) < options["count"] or any(new < options["tokens"] for *_, new in fitting):
            group = f"{group}, within the context ({len(fitting)} of {options['count']} prompts)"
        series = {name: Series(np.asarray(values, dtype=float), "items", group) for name, values in columns.items()}
        observations.save(folder / observations.FILE, series, origin)

    def series(self, observed: Mapping[str, Observations], target: Target) -> dict[str, Series]:
        """New tokens and iterations of the prompts; of the less repetitive half, those up to the median share."""
        if self.show in ALONE:
            return observed["prompts"].only(ALONE[self.show])  # older observations lack some
        recorded = observed["prompts"].series
        sums = {name: recorded[name] for name in ("tokens", "iterations")}
        if self.show == "length":
            return sums
        share = recorded["repeated"].values
        chosen = np.sort(np.argsort(share, kind="stable")[: -(-len(share) // 2)])
        half = {}
        for name, series in sums.items():
            half[name] = Series(series.values[chosen], series.axis, f"{series.group}, less repetitive half")
        return half

    def value(self, mean: Mapping[str, Any]) -> Any:
        """Tokens over iterations, or the mean of what the prompts have by themselves."""
        return mean[ALONE[self.show]] if self.show in ALONE else mean["tokens"] / mean["iterations"]

    @property
    def limits(self) -> tuple[float, float]:
        """An iteration gives at least the bonus token, and at most a whole path of the tree in addition."""
        if self.show == "repeated 4-grams":
            return 0.0, 1.0
        if self.show == "draft passes":
            return 0.0, self._deepest
        return 1.0, self._deepest + 1.0

    @property
    def _deepest(self) -> float:
        """The most levels of a tree."""
        return float(self.config.depth) if self.config else 0.0


def speculating(options: Mapping[str, Any], weights_folder: Path | None) -> Speculating:
    """The target of a job with its draft, if it has one.

    Raises:
        UserError: damaged inputs, a model that the engine does not run, or a draft of another vocabulary.
    """
    config = CONFIGS[options["of"]][0](**options["draft"]) if options["draft"] else None
    lm = compress.load(options | {"device": "cpu"}, weights_folder)
    context = weights.check(options["model"], lm.model.config, None)
    device = torch.device(options["device"])
    dtype = getattr(torch, options["dtype"])
    target = weights.decoder(lm, context + (config.room if config else 0), device, dtype)
    if config is None:
        drafting = None
    elif options["of"] == "self":
        drafting = target
    elif options["of"] in ("subspec", "apart"):
        drafting = draft_of(lm, target, config)
    elif options["of"] == "eagle2":
        head = eagle.load(eagle.path_of(options["model"]), lm.model, models.fingerprint(options["model"]))
        drafting = eagle.FittedHead(head, target)
    else:
        names = (options["model"], options["draft_model"])
        hub = options["hub"]
        drafts.check_vocabulary(*(models.tokenizer(name, hub) for name in names), names)
        draft_model = compress.load(options | {"device": "cpu", "model": names[1], "recipe": "fp16"}, None)
        weights.check(names[1], draft_model.model.config, context)
        drafting = weights.decoder(draft_model, context + config.slots, device, dtype)
    return Speculating(options["model"], target, drafting, config, options["hub"])


def fit(core: Core, candidates: Sequence[prompts.Prompt], most: int) -> Iterator[tuple[int, prompts.Prompt, int]]:
    """The prompts that fit into the context: number, prompt, and how many new tokens, at most `most`, fit after it.

    Raises:
        NotMeasurable: none fits.
    """
    sizes = [len(core.tokenizer(prompt.text)["input_ids"]) for prompt in candidates]
    if min(sizes) > core.context - LEAST:
        problem = (
            f"the shortest of {len(candidates)} prompts has {min(sizes):,} tokens, and the context is {core.context:,}"
        )
        raise NotMeasurable("too_long", f"{problem}; name another set, or a model of a larger context")
    for number, (prompt, size) in enumerate(zip(candidates, sizes)):
        if size <= core.context - LEAST:
            yield number, prompt, min(most, core.context - size)


def drafted_counts(batch: Any) -> dict[str, float]:
    """Counts of a finished generation with a draft: tokens, iterations, median tokens and draft passes per iteration.

    The prefill counts as an iteration, but not for the median.
    """
    lengths = batch.lengths
    passes = batch.passes or [0]
    median = statistics.median(lengths[1:] or lengths)
    return {"tokens": sum(lengths), "iterations": len(lengths), "median": median, "passes": statistics.mean(passes)}


def plain_counts(batch: Any, tokens: list[int]) -> dict[str, float]:
    """The same counts without a draft: an iteration is a pass of the target, the prefill or the step of a token."""
    return {"tokens": len(tokens), "iterations": 1 + len(batch.seconds), "median": 1, "passes": 0}


def _identifier(name: str) -> str:
    """The name of a set as an identifier in an expression."""
    return re.sub(r"\W", "_", name)


def repeated(tokens: list[int]) -> float:
    """The share of a text's 4-grams that occurred in it before; 0 if it has none."""
    grams = list(zip(*(tokens[start:] for start in range(GRAM))))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
