"""Estimated seconds of a job, from jobs that were timed.

Times come from benchmark files of earlier builds here (build/benchmarks) and from benchmarks.csv beside this module.
"""

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from repro import models
from repro.recipes.recipe import STEPS
from repro.store.job import BUILD, Job
from repro.workflow import runner

KNOWN = Path(__file__).with_name("benchmarks.csv")  # seconds of jobs, two side by side on two cores of an EPYC
START_S = 1.0  # of a job beside a process that has imported everything; the rest grows with model and tokens
SPEED = {"cpu": 1.0, "cuda": 100.0}  # a cautious guess, for jobs that were timed on the other device class alone
BILLIONS = {1.0: 1.24, 3.0: 3.21, 7.0: 6.9, 8.0: 8.03}  # parameters of models with these names; others as named
WINDOWS, ITEMS, ITEM_TOKENS = 190, 2000, 75  # of a whole text or task, and tokens of an item, where a scale sets none


@dataclass(frozen=True)
class JobTime:
    """A timed job: what was run, on how many parameters and tokens, on which device class, for how long."""

    kind: str
    steps: str
    recipe: str
    parameters: int
    tokens: int
    device: str
    seconds: float = 0.0


def parameters(model: str) -> int:
    """Parameters of a model: two bytes each where it is local, else read off its name on the hub."""
    sizes = [path.stat().st_size for path in models.weight_files(model) if path.suffix == ".safetensors"]
    match = re.search(r"(\d+(?:\.\d+)?)b(?![a-z])", model.partition("@")[0].lower())
    named = float(match[1]) if match else 1.0
    return sum(sizes) // 2 or round(1e9 * BILLIONS.get(named, named))


def job_time(job: Job, seconds: float = 0.0) -> JobTime:
    """The `JobTime` of a job. Its tokens: calibration, scored text and answered items; tokenizing has no model."""
    given = job.given()
    crops = given.get("calibration") or {"sequences": 0, "length": 0}
    tokens = crops["sequences"] * crops["length"]
    tokens += (given.get("windows") or WINDOWS) * given.get("length", 0) * len(given.get("texts", ()))
    tokens += (given.get("limit") or ITEMS) * ITEM_TOKENS * len(given.get("tasks", ()))
    size = parameters(given["model"]) if "recipe" in given and "model" in given else 0  # a shape has no file
    return JobTime(job.kind, " ".join(job.steps), given.get("recipe", ""), size, tokens, given["device"], seconds)


def measured_times(build: Path = BUILD, known: Path = KNOWN) -> list[JobTime]:
    """Times of jobs whose benchmark files lie under `build`, then those of the committed file."""
    times, types = [], {"parameters": int, "tokens": int, "seconds": float}
    for path in sorted(build.glob("benchmarks/*/**/*.tsv")):
        job = build / path.relative_to(build / "benchmarks").with_suffix("") / "job.json"
        lines = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines(), delimiter="\t"))
        if job.is_file() and lines:
            start = 0.0 if "max_rss" in lines[0] else START_S  # `repro run` starts nothing anew for a job
            times += [job_time(one, float(lines[0]["s"]) + start) for one in runner.from_file(job)]
    rows = csv.DictReader(known.read_text(encoding="utf-8").splitlines())
    return times + [JobTime(**{key: types.get(key, str)(text) for key, text in row.items()}) for row in rows]


def estimate(job: Job, runs: Iterable[JobTime]) -> tuple[float, bool]:
    """Seconds of a job, and whether they are a guess: no run of its kind and steps on its device class is known.

    The closest runs decide, by their median: same recipe, model and tokens; else same recipe; same steps; same kind.
    What a run took beyond its start is scaled by parameters and tokens, and for a guess by device and steps.
    """
    want, tiers = job_time(job), {(False, False): [START_S]}
    for run in runs:
        if run.kind == want.kind:
            scale = SPEED[run.device] / SPEED[want.device] * _cost(want.steps) / _cost(run.steps)
            for wanted, known in ((want.parameters, run.parameters), (want.tokens, run.tokens)):
                scale *= wanted / known if wanted and known else 1.0
            same = (run.device == want.device, run.steps == want.steps, run.recipe == want.recipe)
            same += ((run.parameters, run.tokens) == (want.parameters, want.tokens),)
            tiers.setdefault(same, []).append(min(run.seconds, START_S) + max(0.0, run.seconds - START_S) * scale)
    best = max(tiers)
    return median(tiers[best]), not all(best[:2])


def _cost(steps: str) -> float:
    return 1.0 + sum(getattr(STEPS.get(step), "COST", 1.0) for step in steps.split())
