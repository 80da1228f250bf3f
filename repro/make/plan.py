"""Plan a target: jobs, minutes, downloads and disk, from Snakemake's dry run and the times of earlier runs."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from repro import models
from repro.core.errors import UserError
from repro.core.files import HOME
from repro.make.snake import SnakemakeAdapter
from repro.papers.cell import Cell
from repro.store.job import Job
from repro.workflow import runner
from repro.workflow.job_times import estimate, measured_times, parameters
from repro.workflow.workflow import Workflow, has_cuda


def to_do(flow: Workflow, targets: Collection[str], cells: Collection[Cell]) -> tuple[list[Job], int]:
    """The jobs that are not built yet, and how many tables and figures are written from them.

    Snakemake says it where the scale's device is here; elsewhere it is the jobs of `cells` that have no files.

    Raises:
        UserError: what Snakemake refuses.
    """
    if flow.scale.device == "cuda" and not has_cuda():
        written = {cell.table for cell in cells} if "all" in targets else targets
        return [job for job in flow.every_job(cells) if not runner.done(job)], len(written)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{flow.scale.name}.yaml"  # JSON is YAML; a scale is named like its file
        path.write_text(json.dumps(flow.scale.as_config()), encoding="utf-8")
        words = [sys.executable, "-m", "snakemake", "-s", str(HOME / "Snakefile"), "-n", "--cores", "1", "--nocolor"]
        words += ["--rerun-incomplete", "--configfile", str(path), "--", *targets]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        said = re.search(r"^error: (.*)$", done.stdout, re.MULTILINE)
        raise UserError(said[1] if said else f"Snakemake's dry run failed: {' '.join(done.stdout.split()[-60:])}")
    asked = re.findall(r"^ +wildcards: (?:kind=(\w+), job=(\S+)|(?:table|figure)=\S+)$", done.stdout, re.MULTILINE)
    known = SnakemakeAdapter(flow.scale.as_config()).jobs_behind(targets)
    return [known[f"{kind}/{name}"] for kind, name in asked if kind], sum(not kind for kind, _ in asked)


def plan(flow: Workflow, targets: list[str], cells: Collection[Cell]) -> str:
    """The cost of targets (files that Snakemake builds, or `all`) as text; `cells` are those behind them."""
    jobs, written = to_do(flow, targets, cells)
    on_cpu = flow.scale.here().device == "cpu"
    runs, side_by_side = measured_times(), max(1, (os.cpu_count() or 1) // flow.scale.threads) if on_cpu else 1
    times = {job: estimate(job, runs) for job in jobs}
    minutes = sum(seconds for seconds, _ in times.values()) / 60
    least = max([minutes / side_by_side, *(seconds / 60 for seconds, _ in times.values())])
    kinds = Counter(job.kind for job in jobs) + Counter({"table/figure": written})
    guessed = Counter(" ".join([job.kind, *job.steps]) for job, (_, guess) in times.items() if guess)
    named = {job.given()["model"] for job in jobs if "model" in job.given()}  # a time of a public shape has none
    hub = sorted(name for name in named if models.folder(name) is None)
    stored = [job.given()["model"] for job in jobs if job.steps and len(runner.outputs(job)) > 1]  # a byte a weight
    lines = {
        "jobs": ", ".join(f"{n} {name}" for name, n in kinds.items()) or "none, everything is built",
        "minutes": f"about {minutes:.0f} one by one, {least:.0f} with {side_by_side} side by side",
        "GPU-minutes": f"{0 if on_cpu else minutes:.0f}",
        "downloads": ", ".join(f"{name} {2 * parameters(name) / 1e9:.1f} GB" for name in hub) or "none",
        "disk": f"{(sum(map(parameters, stored)) + 2 * sum(map(parameters, hub))) / 1e9:.2f} GB",
        "guesses": ", ".join(f"{n} {name}" for name, n in guessed.items()) or "none, such jobs were timed before",
    }
    return "\n".join([f"{' '.join(targets)} at scale {flow.scale.name}", *(f"{k:13} {v}" for k, v in lines.items())])
