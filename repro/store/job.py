"""Jobs: their kind, the declared inputs that decide the result, the jobs that they need, and how they run here.

A job's id is a hash of its declared inputs (parsed configs, fingerprints, hashes of texts), never of a spelling, a path
or a commit, so every table that needs a result shares it. A job writes its files to a folder named by the id.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from repro.core.files import short_hash

BUILD = Path("build")  # `built_under` replaces it


@dataclass(frozen=True)
class Job:
    """One unit of work.

    Attributes:
        kind: key of `repro.jobs.JOBS`.
        label: model and recipe as part of a file name.
        inputs: canonical JSON of what decides the result.
        options: canonical JSON of how it runs: names, device, protocol.
        needs: role and job, for each job whose output it reads.
        steps: names of the recipe's steps, whose versions decide the result too.
    """

    kind: str
    label: str
    inputs: str
    options: str
    needs: tuple[tuple[str, "Job"], ...] = field(default=(), compare=False)
    steps: tuple[str, ...] = ()

    @cached_property
    def id(self) -> str:
        """`<kind>/<label>.<hash>`, its folder under build/."""
        return f"{self.kind}/{self.label}.{short_hash(self.inputs)}"

    @property
    def folder(self) -> Path:
        """The folder of its files, relative to the working directory."""
        return BUILD / self.id

    @property
    def benchmark(self) -> Path:
        """The file of its run time, in Snakemake's format, and of its peak GPU memory."""
        return BUILD / "benchmarks" / f"{self.id}.tsv"

    def parsed_options(self) -> dict[str, Any]:
        """The options as a mapping."""
        return json.loads(self.options)

    def parsed_inputs(self) -> dict[str, Any]:
        """The inputs as a mapping."""
        return json.loads(self.inputs)

    def every(self) -> Iterator["Job"]:
        """All jobs that it needs, directly or not, each after its own needs; itself last."""
        for _, need in self.needs:
            yield from need.every()
        yield self

    def to_json(self) -> dict[str, Any]:
        """The job as a mapping that `from_json` reads."""
        facts = {"kind": self.kind, "label": self.label, "inputs": self.inputs, "options": self.options}
        return {**facts, "needs": [[role, need.to_json()] for role, need in self.needs], "steps": list(self.steps)}


def make(
    kind: str,
    label: str,
    inputs: Mapping[str, Any],
    options: Mapping[str, Any],
    needs: Mapping[str, Job] | None = None,
    steps: tuple[str, ...] = (),
) -> Job:
    """A job from mappings of JSON values."""
    texts = [json.dumps(facts, sort_keys=True) for facts in (inputs, options)]
    return Job(kind, label, *texts, tuple((needs or {}).items()), steps)


def from_json(facts: Mapping[str, Any]) -> Job:
    """The job that `Job.to_json` wrote."""
    needs = tuple((role, from_json(need)) for role, need in facts["needs"])
    words = {key: facts[key] for key in ("kind", "label", "inputs", "options")}
    return Job(**words, needs=needs, steps=tuple(facts["steps"]))


@contextlib.contextmanager
def built_under(folder: Path) -> Iterator[None]:
    """During the block, the folders of jobs are under `folder` instead of build/."""
    global BUILD
    before, BUILD = BUILD, folder
    try:
        yield
    finally:
        BUILD = before


def distinct(jobs: Iterable[Job]) -> list[Job]:
    """The jobs and all jobs that they need, each once, in an order in which they can run."""
    by_id: dict[str, Job] = {}
    for top in jobs:
        by_id |= {job.id: job for job in top.every()}
    return list(by_id.values())
