"""The job runner: it serves Snakemake's script, `python -m repro run` and the commands of a person."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from repro import models
from repro.core.errors import Crowded, NotMeasurable, UserError, logged, shortened, unknown
from repro.core.files import atomic, reading, regular, unreadable, write_text
from repro.data import corpora
from repro.metrics import KINDS
from repro.metrics.metric import Metric
from repro.recipes import recipe
from repro.recipes.recipe import STEPS
from repro.store import observations
from repro.store.job import Job, distinct, from_json
from repro.workflow import versions

JOBS: dict[str, ModuleType | Metric] = {
    **versions.SHARED,
    **{name: kind for name, kind in KINDS.items() if kind.run},
}
LABEL_PART = "(?![.])[A-Za-z0-9_.=-]{1,150}"  # a folder name in a job's label
REFUSED = "refused.json"  # file in a job's folder: why the job could not be done, with its status
CONTEXTS = 2 << 30  # bytes of GPU memory that CUDA itself holds for all programs, this one included


def outputs(job: Job) -> list[Path]:
    """The files of a job."""
    return [job.folder / name for name in JOBS[job.kind].OUTPUTS]


def done(job: Job) -> bool:
    """Whether all files of a job exist, are undamaged, and were made with today's versions."""
    try:
        noted = origin(job) if all(path.is_file() for path in outputs(job)) else {}
    except UserError:  # damaged, or of another job
        return False
    return bool(noted) and noted["versions"] == versions.text(versions.of_job(job))


def origin(job: Job) -> dict[str, str]:
    """The origin stored with a job's results or its refusal (`observations.origin`); empty if the job is not built.

    Raises:
        UserError: damaged files, or those of another job.
    """
    refusal = job.folder / REFUSED
    path = job.folder / observations.FILE
    if refusal.is_file():
        noted = _refusal(refusal)["origin"]
    elif path.is_file():
        noted = observations.once(path, path.stat().st_mtime_ns).meta
        refusal = path
    else:
        return {}
    if absent := [name for name in observations.ORIGIN if name not in noted]:
        raise UserError(f"{refusal}: it does not say its {absent[0]}; delete the folder and build it again")
    if (noted["job"], noted["inputs"]) != (job.id, job.inputs):
        difference = "with other declared inputs" if noted["job"] == job.id else f"of the job {noted['job']}"
        raise UserError(f"{refusal}: these are results {difference}; delete the folder and build it again")
    return dict(noted)


def times(job: Job) -> bool:
    """Whether a job measures times."""
    return getattr(JOBS[job.kind], "TIMES", False)  # shared jobs do not have it


def alone(job: Job) -> bool:
    """Whether a job needs its GPU to itself because it measures times there."""
    return job.parsed_options().get("device") == "cuda" and times(job)


def run(job: Job) -> None:
    """Execute a job whose needs are built; its files are written atomically.

    That a job cannot be done (a budget that pays for no rank, too little memory, a training that diverged) is a result
    too: it is stored with its status, and every job that needs it is refused for the same reason.

    Raises:
        UserError: bad input.
        Crowded: the GPU has too little memory because other programs use it; nothing is stored.
    """
    folders = {role: need.folder for role, need in job.needs}
    job.folder.mkdir(parents=True, exist_ok=True)
    (job.folder / REFUSED).unlink(missing_ok=True)
    for _, need in job.needs:
        if not done(need):
            raise UserError(f"{need.id}: not built with today's versions; build it first")
    noted = observations.origin(job, versions.of_job(job), folders)
    noted["environment"] = _environment(job, noted["environment"])
    try:
        for folder in folders.values():
            check(folder)
        torch.set_num_threads(int(job.parsed_options().get("threads", 1)))
        JOBS[job.kind].run(job, folders, job.folder, noted)
    except NotMeasurable as refused:
        _refuse(job, refused, noted)
    except Exception as error:
        if "OutOfMemory" not in type(error).__name__:
            raise
        if bytes_of_others := _of_others():
            message = f"the GPU's memory did not suffice beside {bytes_of_others / 2**30:.1f} GiB of other programs"
            raise Crowded(f"{message}; run it again with fewer side by side") from None
        _refuse(job, NotMeasurable("oom", str(error).partition("\n")[0]), noted)
    write_text(job.folder / "job.json", json.dumps(job.to_json(), indent=1) + "\n")


def _environment(job: Job, environment: str) -> str:
    """The JSON of an environment, extended by the dtype in which the job's training steps compute on this device."""
    options = job.parsed_options()
    steps = recipe.parse(options["recipe"]).steps if "recipe" in options else ()
    computed = recipe.computed_in(steps, options.get("device", "cpu"))
    return json.dumps(json.loads(environment) | {"compute": computed}, sort_keys=True) if computed else environment


def _of_others() -> int:
    """Bytes of this process's GPU that other programs hold; 0 if it is no more than CUDA contexts take."""
    if not torch.cuda.is_initialized():
        return 0
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()
    return others if others > CONTEXTS else 0


def run_logged(text: str, log: str) -> None:
    """Execute a job for a Snakemake rule; its output goes to the file `log`.

    Args:
        text: the job as JSON.

    Raises:
        SystemExit: it failed; the message is one sentence.
    """
    job = from_json(json.loads(text))
    with logged(log, job.id):
        run(job)


def check(folder: Path) -> None:
    """Raise if the job of a folder could not be done.

    Raises:
        NotMeasurable: with its status and reason.
    """
    path = folder / REFUSED
    if path.is_file():
        facts = _refusal(path)
        raise NotMeasurable(facts["status"], facts["reason"])


def _refusal(path: Path) -> dict[str, Any]:
    try:
        with reading(path):
            facts = json.loads(path.read_text(encoding="utf-8"))
        return {"status": facts["status"], "reason": facts["reason"], "origin": dict(facts["origin"])}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: damaged; delete the folder and build it again") from None


def _refuse(job: Job, refused: NotMeasurable, noted: Mapping[str, str]) -> None:
    facts = {"status": refused.status, "reason": " ".join(str(refused).split()), "origin": noted}
    write_text(job.folder / REFUSED, json.dumps(facts) + "\n")
    for path in outputs(job):
        with atomic(path) as temporary:
            temporary.write_bytes(b"")


def from_file(path: Path) -> list[Job]:
    """The jobs of a file that `repro run --save` wrote, or of one job's `job.json`.

    Raises:
        UserError: no such file, or none of jobs.
    """
    how = "write one with python -m repro run TARGET --save FILE.json"
    try:
        facts = json.loads(regular(path).read_text(encoding="utf-8"))
        jobs = [from_json(job_facts) for job_facts in (facts if isinstance(facts, list) else [facts])]
        for job in distinct(jobs):
            _check(job)
        return jobs
    except OSError as error:
        raise unreadable(path, error, how) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path}: not a file of jobs (not JSON, or its keys are not those of jobs); {how}") from None
    except UserError as error:
        raise UserError(f"{path}: not a file of jobs ({error})") from None


def is_file_of_jobs(path: Path) -> bool:
    """Whether a file is one that `from_file` reads."""
    try:
        from_file(path)
    except UserError:
        return False
    return True


def check_here(jobs: Sequence[Job]) -> None:
    """Check that the models and texts that jobs from a file declare are the ones that this machine has by these names.

    Jobs that are done are skipped.

    Raises:
        UserError: a model or text is another one here, or missing.
    """
    for job in jobs:
        options = job.parsed_options()
        inputs = job.parsed_inputs()
        where = "than where the jobs were written"
        if done(job):
            continue
        if "model" in inputs and models.fingerprint(name := options.get("model", "")) != inputs["model"]:
            raise UserError(f"{job.id}: {name} here is another model {where}; bring that one, or write the jobs here")
        if "tokenizer" in inputs and models.tokenizer_key(name := options.get("model", "")) != inputs["tokenizer"]:
            raise UserError(f"{job.id}: {name} has another tokenizer here {where}; bring that one")
        text = options.get("corpus", ""), bool(options.get("hub"))
        if job.kind == "tokens" and corpora.identifier(*text) != inputs.get("text"):
            label = corpora.identity(*text)["label"]
            raise UserError(f"{job.id}: {label} here is another text {where}; bring that one, or write the jobs here")


def _check(job: Job) -> None:
    """Raise unless a job from a file has a known kind and steps, and a label that is a folder under build/."""
    if job.kind not in JOBS:
        raise unknown("kind of job", job.kind, JOBS)
    for step in job.steps:
        if step not in STEPS:
            raise unknown("step", step, STEPS)
    if not re.fullmatch(f"{LABEL_PART}(/{LABEL_PART})?", job.label):
        raise UserError(f"label {shortened(job.label)!r}: it is one or two names of letters, digits and . _ = -")
    if not isinstance(job.parsed_inputs(), dict) or not isinstance(job.parsed_options().get("model", ""), str):
        raise TypeError
