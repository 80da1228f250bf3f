"""Requests of a zero-shot task as token ids, with hashes: made where lm-eval and the data are, scored anywhere."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from repro import models
from repro.data import requests, tasks
from repro.jobs.job import Job, make
from repro.jobs.target import Target
from repro.record import observations
from repro.record.observations import Series

VERSION = 1
OUTPUTS = ("data.safetensors", observations.FILE)


def job(target: Target, task: str, limit: int | None) -> Job:
    """The job that makes a task's requests for the target's model; models that share a tokenizer share it.

    Raises:
        UserError: unknown model or task.
    """
    identifier = tasks.identifier(task)
    inputs = {"tokenizer": models.tokenizer_key(target.model), "task": identifier, "limit": limit}
    options = {"task": task, "limit": limit, "model": target.model, "hub": target.scale.hub, "device": "cpu"}
    return make("requests", task, inputs, options | {"threads": 1})


def run(job: Job, found: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
    """Make and tokenize the requests, from the repository's files or those of REPRO_DATA.

    Raises:
        UserError: as `requests.build`.
    """
    given = job.given()
    tokenizer = models.tokenizer(given["model"], given["hub"])
    made = requests.build(given["task"], None, tokenizer, given["limit"])
    requests.save(folder / OUTPUTS[0], made)
    counts = {"items": len(made.number), "answers": len(made.answer_size)}
    series = {name: Series(np.asarray([count], dtype=float), "model") for name, count in counts.items()}
    observations.save(folder / OUTPUTS[1], series, origin)
