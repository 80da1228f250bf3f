"""Token ids of a named corpus, with hashes."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np

from repro import models
from repro.data import corpora
from repro.jobs.target import Target
from repro.store import observations
from repro.store.job import Job, make
from repro.store.observations import Series

VERSION = 1
OUTPUTS = ("data.safetensors", observations.FILE)


def job(target: Target, corpus: str) -> Job:
    """The job that tokenizes `corpus` for the target's model; models that share a tokenizer share it.

    Raises:
        UserError: unknown model or corpus.
    """
    inputs = {"tokenizer": target.tokenizer, "text": corpora.identifier(corpus, target.scale.hub)}
    options = {"corpus": corpus, "model": target.model, "hub": target.scale.hub, "device": "cpu", "threads": 1}
    return make("tokens", corpora.label(corpus), inputs, options)


def excerpt_job(target: Target, corpus: str, excerpt: corpora.Excerpt) -> Job:
    """The job that gives the calibration sequences which the repository has of a corpus, in place of the whole text.

    Raises:
        UserError: unknown model or corpus.
    """
    of_whole_text = job(target, corpus)
    inputs = of_whole_text.parsed_inputs() | {"excerpt": asdict(excerpt)}
    return make("tokens", f"{corpus}-excerpt", inputs, of_whole_text.parsed_options() | {"excerpt": excerpt.file})


def run(job: Job, folders: Mapping[str, Path], folder: Path, origin: dict[str, str]) -> None:
    """Tokenize the corpus in one call, or take the ids of its excerpt; write them with their identity.

    Raises:
        UserError: a corpus or tokenizer that is not there.
    """
    options = job.parsed_options()
    tokenizer = models.tokenizer(options["model"], options["hub"])
    if options.get("excerpt"):
        sequences = corpora.excerpt_ids(options["corpus"], tokenizer, options["excerpt"])
        ids = sequences.ravel()
        meta = {"corpus": options["corpus"], "excerpt_length": str(sequences.shape[1])}
    else:
        ids = corpora.token_ids(options["corpus"], tokenizer, options["hub"])
        meta = corpora.identity(options["corpus"], options["hub"])
    meta |= {"tokenizer_sha256": corpora.tokenizer_sha256(tokenizer)}
    corpora.save_tokens(folder / OUTPUTS[0], ids, meta)
    count = {"tokens": Series(np.asarray([len(ids)], dtype=float), "model")}
    observations.save(folder / OUTPUTS[1], count, origin)
