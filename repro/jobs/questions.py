"""Prompts of tasks with generated answers, as token ids with their judges; built where lm-eval and the data are."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from repro import models
from repro.data import generated
from repro.jobs.target import Target
from repro.store import observations
from repro.store.job import Job, make
from repro.store.observations import Series

VERSION = 1
OUTPUTS = ("data.safetensors", observations.FILE)


def job(target: Target, task: str, limit: int | None) -> Job:
    """The job that makes a task's prompts for the target's model; models that share a tokenizer share it."""
    identifier = generated.GENERATED[task].identifier
    inputs = {"tokenizer": target.tokenizer, "task": identifier, "limit": limit}
    options = {"task": task, "limit": limit, "model": target.model, "hub": target.scale.hub, "device": "cpu"}
    return make("questions", task, inputs, options | {"threads": 1})


def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
    """Make and tokenize the prompts, from the repository's files or those of REPRO_DATA.

    Raises:
        UserError: as `generated.build`.
    """
    options = job.parsed_options()
    tokenizer = models.tokenizer(options["model"], options["hub"])
    questions = generated.build(options["task"], None, tokenizer, options["limit"])
    generated.save(folder / OUTPUTS[0], questions)
    sizes = Series(np.asarray([len(prompt) for prompt in questions.prompts], dtype=float), "model")
    observations.save(folder / OUTPUTS[1], {"tokens": sizes}, origin)
