"""Zero-shot requests as token ids, with hashes: built where lm-eval and the data are, scored anywhere."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np

from repro import models
from repro.data import requests, tasks
from repro.jobs.target import Target
from repro.store import observations
from repro.store.job import Job, make
from repro.store.observations import Series

VERSION = 1
OUTPUTS = ("data.safetensors", observations.FILE)


def job(target: Target, task: str, limit: int | None) -> Job:
    """The job that makes a task's requests for the target's model; models that share a tokenizer share it.

    Raises:
        UserError: unknown model or task.
    """
    return _job(target.tokenizer, tasks.identifier(task), task, limit, target.model, target.scale.hub)


@cache
def _job(tokenizer: str, identifier: str, task: str, limit: int | None, model: str, hub: bool) -> Job:
    """Made once: every row of a table asks for the requests of the same tasks."""
    inputs = {"tokenizer": tokenizer, "task": identifier, "limit": limit}
    options = {"task": task, "limit": limit, "model": model, "hub": hub, "device": "cpu", "threads": 1}
    return make("requests", task, inputs, options)


def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
    """Make and tokenize the requests, from the repository's files or those of REPRO_DATA.

    Raises:
        UserError: as `requests.build`.
    """
    options = job.parsed_options()
    tokenizer = models.tokenizer(options["model"], options["hub"])
    built = requests.build(options["task"], None, tokenizer, options["limit"])
    requests.save(folder / OUTPUTS[0], built)
    counts = {"items": len(built.number), "answers": len(built.answer_size)}
    series = {name: Series(np.asarray([count], dtype=float), "model") for name, count in counts.items()}
    observations.save(folder / OUTPUTS[1], series, origin)
