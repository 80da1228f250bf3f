"""A model under a recipe: codes, scales and zeros of every block linear, made once for all tables.

Next to the weights lie observations about them: stored bits by kind, and what steps say of themselves (`lm.facts`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from repro import models
from repro.core.errors import UserError
from repro.data import corpora
from repro.jobs import tokens
from repro.jobs.target import Target
from repro.models import bits, perplexity
from repro.models.lowbit import LowBitModel
from repro.recipes import recipe
from repro.recipes.recipe import Step
from repro.store import observations
from repro.store.job import Job, make
from repro.store.observations import Series

VERSION = 1
OUTPUTS = ("data.safetensors", observations.FILE)


def job(target: Target) -> Job:
    """The job that compresses the target; of full precision only the bits are counted.

    Raises:
        UserError: unknown model, recipe or corpus.
    """
    return target.once("compress", lambda: _job(target))


def _job(target: Target) -> Job:
    inputs = target.inputs()
    options = target.options()
    needs = {}
    if target.recipe.calibrated:
        facts = target.scale.calibration.facts()
        crops = facts | {"seed": facts["seed"] + target.seed}
        text = corpora.identifier(facts["corpus"], target.scale.hub)
        inputs["calibration"] = {key: value for key, value in crops.items() if key != "corpus"} | {"text": text}
        options["calibration"] = crops
        needs["calibration"] = _calibration_tokens(target, crops)
        if second := _second_texts(target):
            texts = {name: corpora.identifier(corpus, target.scale.hub) for name, corpus in second.items()}
            inputs["calibration"]["second"], options["calibration"]["second"] = texts, second
            for corpus in second.values():
                needs[f"text {corpus}"] = tokens.job(target, corpus)
    if target.recipe.before:
        needs["start"] = job(target.under(target.recipe.before))
    return make("compress", target.label, inputs, options, needs, target.steps)


def _second_texts(target: Target) -> dict[str, str]:
    """The corpora that steps read besides the calibration text, by the names that the recipe has for them."""
    named = {}
    for step in target.recipe.steps:
        if step.second_text:
            named[step.second_text] = target.scale.second_text(step.second_text)
    return named


def _calibration_tokens(target: Target, crops: Mapping[str, Any]) -> Job:
    """The job whose token ids the crops are cut from: the whole text, or its excerpt where nothing else is here."""
    corpus = crops["corpus"]
    if crops.get("from_start"):
        return tokens.job(target, corpus)
    read = _sequences_read(target, crops)
    excerpt = corpora.excerpt_for(corpus, read, crops["length"], crops["seed"])
    return tokens.excerpt_job(target, corpus, excerpt) if excerpt else tokens.job(target, corpus)


def _sequences_read(target: Target, crops: Mapping[str, Any]) -> int:
    """How many of the crops the recipe's steps read: all, unless every calibrated step reads its first tokens alone."""
    calibrated = [step for step in target.recipe.steps if step.calibrated]
    if not all(_reads_first_tokens(step) for step in calibrated):
        return crops["sequences"]
    return max(needed(step, crops) for step in calibrated)


def _reads_first_tokens(step: Step) -> bool:
    return getattr(step.module, "READS_FIRST_TOKENS", False)


def needed(step: Step, crops: Mapping[str, Any]) -> int:
    """Sequences that a step reads: as many as its own `tokens` take, else those of the calibration."""
    if not step.calibrated:
        return 0
    return -(-step.config.tokens // crops["length"]) if _reads_first_tokens(step) else crops["sequences"]


def first_sequences(ids: np.ndarray, steps: Sequence[Step], crops: Mapping[str, Any]) -> Tensor:
    """The first sequences of a text, int64 `[S, L]`, as many as the step needs that needs the most.

    Args:
        ids: of the text, int `[T]`.
        steps: of a recipe, some of them calibrated.
        crops: `corpus`, `sequences` and `length` of the calibration.

    Raises:
        UserError: the text is shorter.
    """
    length = crops["length"]
    for step in steps:
        count = needed(step, crops)
        if len(ids) < count * length:
            request = f"{count} sequences of {length} tokens"
            hint = "or shorter sequences by --length"
            if _reads_first_tokens(step):
                request = f"{step.config.tokens:,} tokens"
                hint = f"or set its tokens={len(ids) // length * length}"
            problem = f"{len(ids):,} tokens, {step.name} asks for {request}"
            raise UserError(f"{crops['corpus']}: {problem}; give more text, {hint}")
    count = max(needed(step, crops) for step in steps)
    return torch.from_numpy(ids[: count * length].astype(np.int64)).view(count, length)


def calibration_sequences(folder: Path, crops: Mapping[str, Any]) -> Tensor:
    """The calibration sequences int64 `[S, L]` from the folder of a `tokens` job; of an excerpt those that it has.

    Raises:
        UserError: as `corpora.load_tokens` and `corpora.calibration`.
    """
    ids, meta = corpora.load_tokens(folder / tokens.OUTPUTS[0])
    if "excerpt_length" in meta:
        sequences = torch.from_numpy(ids.astype(np.int64)).reshape(-1, int(meta["excerpt_length"]))
        return sequences[: crops["sequences"]]
    return corpora.calibration(ids, crops["sequences"], crops["length"], crops["seed"])


def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
    """Apply the recipe's steps in order and write the compressed model, then what is known of it.

    Raises:
        UserError: what a step refuses, a text that is too short, or a damaged start.
    """
    options = job.parsed_options()
    parsed = recipe.parse(options["recipe"])
    steps = recipe.on_device(parsed.steps, options["device"])
    if "start" in folders:
        steps = steps[-1:]
    lm = load(options, folders.get("start"), keep_full=True)
    apply_steps(lm, steps, options.get("calibration"), folders)
    meta = {"model": options["model"], "fingerprint": models.fingerprint(options["model"]), "recipe": parsed.name}
    lm.save(folder / OUTPUTS[0], meta)
    counted = bits.report(lm, float_bits=16)
    totals = {key: counted[key] for key in ("bpw", "bytes", "block_weights")}
    series = {f"bits/{kind}": one(n) for kind, n in (counted["block"] | totals).items()}
    series |= {name: Series(np.asarray(values, dtype=float), "layers") for name, values in lm.facts.items()}
    observations.save(folder / OUTPUTS[1], series, origin)


def apply_steps(
    lm: LowBitModel, steps: Sequence[Step], crops: Mapping[str, Any] | None, folders: Mapping[str, Path]
) -> None:
    """Apply steps in order, with the texts that they read.

    Args:
        lm: the model; edited.
        steps: of the recipe, as they run on the model's device.
        crops: the option `calibration` of a `compress` job; None where no step reads a text.
        folders: the folders of its needs.

    Raises:
        UserError: what a step refuses, or a text that is too short for the crops, which are longer than the context.
    """
    data, second = None, {}
    if crops:
        data = _sequences(steps, crops, folders["calibration"])
        perplexity.check_context(lm.model, data.shape[1])
        for name, corpus in crops.get("second", {}).items():
            second[name] = calibration_sequences(folders[f"text {corpus}"], crops)
    for step in steps:
        step_data = data
        if data is not None and crops.get("from_start"):
            step_data = data[: needed(step, crops)]
        more = {"second": second[step.second_text]} if step.second_text else {}
        step.module.apply(lm, step_data, step.config, **more)


def _sequences(steps: Sequence[Step], crops: Mapping[str, Any], folder: Path) -> Tensor:
    """The crops, or of a text from its start as many sequences as the step needs that needs the most."""
    if not crops.get("from_start"):
        return calibration_sequences(folder, crops)
    ids, _ = corpora.load_tokens(folder / tokens.OUTPUTS[0])
    return first_sequences(ids, steps, crops)


def one(value: float) -> Series:
    """A single number as observations."""
    return Series(np.asarray([value], dtype=float), "model")


def load(options: Mapping[str, Any], weights: Path | None, keep_full: bool = False) -> LowBitModel:
    """A model with its compressed weights from the folder `weights`, or in full precision where there are none.

    Args:
        options: `model`, `device`, `dtype` and `hub`.
        weights: the folder of a `compress` job.
        keep_full: keep the full-precision weights at hand for a step that comes after.

    Raises:
        UserError: the compressed weights belong to another model, or either is damaged.
    """
    lm = LowBitModel(models.load(options["model"], options["device"], options["dtype"], options["hub"]))
    if weights is not None:
        models.check_fingerprint(options["model"], lm.load(weights / OUTPUTS[0], keep_full)["fingerprint"], weights)
    return lm
