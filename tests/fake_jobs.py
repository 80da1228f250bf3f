"""Jobs that compute nothing: the observations of a table's cells are made up, everything around them is the real thing.

A recipe's quality is a shift that its text gives (`SHIFT`), so that known answers can be written down.
"""

from collections.abc import Iterable

import numpy as np
import pytest

from repro.jobs import compress, requests, tokens
from repro.store import observations
from repro.store.job import Job, distinct
from repro.store.observations import Series
from repro.workflow import runner

WINDOWS = 120
CONFIG = {
    "name": "test",
    "about": "a test",
    "models": {"Llama-3.2-1B": "pocket-3m", "Llama-2-7B": "pocket-10m"},
    "corpora": {"wikitext2": "tiny-wikitext", "c4": "tiny-c4-docs"},
    "calibration": {"corpus": "tiny-held-out", "sequences": 2, "length": 8, "seed": 7},
    "zeroshot": {"tasks": ["piqa", "arc_easy"]},
}
SHIFT = {"": 0.0, "rtn-w4-pc": 0.2, "gptq-w4-pc": 0.1, "rtn-w3-pc": 1.0}
BITS = {"": 16.0, "rtn-w4-pc": 4.125, "gptq-w4-pc": 4.125, "rtn-w3-pc": 3.125}
CORRECT = {"piqa": 0.9, "arc_easy": 0.7}  # shares of 40 items that every recipe answers, unless a test says otherwise


def recipe(job: Job) -> str:
    """The recipe of a job, empty for full precision."""
    text = job.parsed_options()["recipe"]
    return "" if text == "fp16" else text


def shift(text: str) -> float:
    """How much worse a recipe is than full precision, in nats."""
    return SHIFT[text] if text in SHIFT else 0.05 * (1 + len(text.split(" + ")))


def nll(text: str, job: Job) -> np.ndarray:
    """Windows `[120]` of a corpus, shared by all recipes, a recipe's shift, and a little of its own and its seed's."""
    seed = job.parsed_options()["seed"]
    shared = np.random.default_rng(len(text)).normal(3.0, 0.3, WINDOWS)
    own = np.random.default_rng([len(recipe(job)), seed]).normal(0, 0.01, WINDOWS)
    return shared + shift(recipe(job)) + (own + 0.02 * seed if recipe(job) else 0)


def score(job: Job, needs, folder, origin) -> None:
    """A job of perplexity."""
    series, options = {}, job.parsed_options()
    for text in options["texts"]:
        group = f"{options['label']} on {text}-x"
        series[f"{text}/nll"] = Series(nll(text, job), "windows", group)
        if recipe(job):
            kl = shift(recipe(job)) / 2 + 0.01 * np.arange(4)
            series[f"{text}/kl"] = Series(kl, "windows", f"{group}, first 4")
            series[f"{text}/top1"] = Series(0.75 + 0.01 * np.arange(4), "windows", f"{group}, first 4")
    observations.save(folder / observations.FILE, series, origin)


def answers(share: float, n: int = 40) -> np.ndarray:
    """n items of which the first ones are right."""
    return (np.arange(n) < share * n).astype(float)


def items(correct: dict[str, dict[str, np.ndarray]]):
    """A zero-shot job's `run`: items by recipe and task, by default those of CORRECT."""

    def run(job: Job, needs, folder, origin) -> None:
        right = {task: answers(share) for task, share in CORRECT.items()} | correct.get(recipe(job), {})
        series = {f"{t}/correct": Series(right[t], "items", f"lm-eval 0: {t}") for t in job.parsed_options()["tasks"]}
        observations.save(folder / observations.FILE, series, origin)

    return run


def store(job: Job, needs, folder, origin) -> None:
    """A job that compresses, tokenizes, or makes requests."""
    (folder / "data.safetensors").write_bytes(b"nothing")
    bits = {
        "bpw": BITS.get(recipe(job), 4.5) if "recipe" in job.parsed_options() else 0.0,
        "bytes": 2.5e6,
        "block_weights": 8.0,
    }
    series = {f"bits/{name}": Series(np.asarray([x], dtype=float), "model") for name, x in bits.items()}
    if " + " in job.parsed_options().get("recipe", ""):
        series["layers/rank"] = Series(np.asarray([4.0, 0.0, 2.0, 0.0]), "layers")
    observations.save(folder / observations.FILE, series, origin)


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """An empty working folder in which jobs compute nothing; call it with jobs to run what is not done."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SCALE", raising=False)
    for module in (compress, requests, tokens):
        monkeypatch.setattr(module, "run", store)
    monkeypatch.setattr(runner.JOBS["perplexity"], "run", score)
    monkeypatch.setattr(runner.JOBS["zeroshot"], "run", items({}))

    def run(jobs: Iterable[Job]) -> list[Job]:
        made = [job for job in distinct(list(jobs)) if not runner.done(job)]
        for job in made:
            runner.run(job)
        return made

    return run
