"""The versions that decide a result: those of its metric, of its recipe's steps, and of the jobs that it needs.

Every step (`methods/`, `baselines/`), every metric (`repro/metrics/`) and every shared job (`repro/jobs/`: tokens,
requests, questions, compress) has a `VERSION`. Whoever changes what it computes raises it by one: what is stored under
another version is stale from then on. `tests/contract/` is red where a result has changed and its version has not. An
edit that changes no result (a name, a comment, another file) changes no version, and nothing is measured again.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from repro.core.errors import UserError
from repro.core.files import write_text
from repro.jobs import compress, questions, requests, tokens
from repro.metrics import KINDS
from repro.papers.cell import Cell
from repro.recipes.recipe import STEPS
from repro.store.job import Job
from repro.workflow.workflow import Workflow

SHARED: dict[str, Any] = {
    "tokens": tokens,
    "requests": requests,
    "questions": questions,
    "compress": compress,
}
FOLDER = Path("build/versions")

Versions = Mapping[str, int]  # name of a step, metric or shared job to its version


def owner(name: str) -> Any:
    """The module or class that holds the `VERSION` of a step, metric or shared job."""
    return SHARED.get(name) or KINDS.get(name) or STEPS[name]


def of(name: str) -> int:
    """Today's version of a step, metric or shared job."""
    return owner(name).VERSION


def own(job: Job) -> dict[str, int]:
    """The versions of a job's kind and of its recipe's steps, without those of the jobs that it needs."""
    return {name: of(name) for name in (job.kind, *job.steps)}


def of_job(job: Job) -> dict[str, int]:
    """The versions that decide a job's result, including those of all jobs that it needs."""
    version_of: dict[str, int] = {}
    for needed in job.every():
        version_of |= own(needed)
    return version_of


def of_cell(flow: Workflow, cell: Cell) -> dict[str, int]:
    """Today's versions that decide a cell: of its metric, of its operands' metrics, and of all its jobs."""
    version_of = of_metrics(flow, cell)
    for seed in flow.jobs(cell):
        for job in seed.values():
            version_of |= of_job(job)
    return version_of


def of_metrics(flow: Workflow, cell: Cell) -> dict[str, int]:
    """Today's versions of a cell's metric and of its operands' metrics, which combine what jobs measured."""
    names = [cell.measure, *(operand.measure for operand in flow.operands(cell).values())]
    return {name: of(name) for name in names}


def text(versions: Versions) -> str:
    """Versions as a row stores them: `compress=1 gptq=1 perplexity=1 tokens=1`."""
    return " ".join(f"{name}={version}" for name, version in sorted(versions.items()))


def read(text: str) -> dict[str, int]:
    """Parse the text of `text`.

    Raises:
        UserError: the text is malformed.
    """
    version_of: dict[str, int] = {}
    for word in text.split():
        name, _, version = word.partition("=")
        if not name or not version.isdecimal() or name in version_of:
            raise UserError(f"versions is {text!r:.80}, not names with their versions, such as gptq=1 perplexity=1")
        version_of[name] = int(version)
    return version_of


def merged(texts: Iterable[tuple[str, str]]) -> dict[str, int]:
    """The merged versions of several jobs' results.

    Args:
        texts: pairs of a job's id and the versions that made its result, as `text` writes them.

    Raises:
        UserError: two results were made under different versions of one name.
    """
    first: dict[str, tuple[str, int]] = {}
    for job, versions in texts:
        for name, version in read(versions).items():
            first_job, first_version = first.setdefault(name, (job, version))
            if first_version != version:
                raise UserError(
                    f"{first_job} and {job} were built with different versions of {name} "
                    f"({first_version} and {version}); delete their folders and build them again"
                )
    return {name: version for name, (_, version) in first.items()}


def changed(old: Versions, new: Versions) -> str:
    """The difference between a result's versions and today's: `gptq was 1, is 2`; empty if there is none."""
    differences = []
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            differences.append(f"{name} was {old.get(name, 'absent')}, is {new.get(name, 'absent')}")
    return ", ".join(differences)


def file(job: Job, again: bool = False) -> Path:
    """Snakemake's input for the versions that a job depends on: a file, rewritten when one changes, or `again`."""
    return input_file("-".join([job.kind, *job.steps]), text(own(job)), again)


def input_file(name: str, content: str, again: bool = False) -> Path:
    """A small file under build/versions/, rewritten only when its content changes, or `again`."""
    path = FOLDER / f"{name}.txt"
    if again or not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != f"{content}\n":
        write_text(path, f"{content}\n")
    return path
