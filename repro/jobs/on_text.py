"""Jobs that run a model under a recipe over one text, such as those that score its windows."""

from collections.abc import Mapping
from typing import Any

from repro.data import corpora
from repro.jobs import compress, tokens
from repro.jobs.target import Target
from repro.store.job import Job, make


def job(kind: str, target: Target, text: str, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Job:
    """The job of a kind that reads the target's compressed weights, if it has steps, and the tokens of a corpus.

    Args:
        kind: key of `repro.jobs.JOBS`.
        target: what is run.
        text: the corpus by its own name.
        inputs: what decides the result besides target, text and calibration.
        options: how it runs, besides what every job on the target says.

    Raises:
        UserError: unknown model, recipe or corpus.
    """
    needs = {"text": tokens.job(target, text)}
    if target.recipe.steps:
        needs["weights"] = compress.job(target)
    calibration = needs["weights"].parsed_inputs().get("calibration") if target.recipe.steps else None
    facts = {"calibration": calibration, "text": corpora.identifier(text, target.scale.hub)}
    return make(kind, target.label, target.inputs() | inputs | facts, target.options() | options, needs, target.steps)
