"""Many jobs without Snakemake: forked workers that import torch once, several on a GPU, resumable.

    python -m repro run spear/table1 --missing --side-by-side 16 --gpus 2 --minutes 9

That is what a GPU machine without the workflow's packages uses. Each result is written as it ends; a second call does
only what is missing. Where NVIDIA's MPS daemon may be started, workers share a GPU through it. Jobs are side by side on
a GPU only while the bytes that they declare fit it (`memory`). A job that times has its GPU to itself.
"""

import contextlib
import io
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TextIO

import torch

from repro import models
from repro.core.errors import Crowded, UserError, shortened
from repro.core.files import write_text, writing
from repro.core.machine import gpus
from repro.engine import limits
from repro.recipes.recipe import STEPS
from repro.store import job as built
from repro.store.job import Job
from repro.workflow import memory, runner, versions


@dataclass
class Worker:
    """A process that runs one job after another, on one GPU where there are some; its job and the bytes of it there.

    Attributes:
        compiled: steps that it ran before, whose training steps it need not compile again (30 to 75 s each).
    """

    process: BaseProcess
    pipe: Connection
    gpu: int
    job: Job | None = None
    held: int = 0
    compiled: set[tuple[str, ...]] = field(default_factory=set)


def run_all(
    jobs: Sequence[Job], side_by_side: int = 1, gpus: int = 0, minutes: float = 0.0, turns: Mapping[str, int] = {}
) -> int:
    """Run jobs whose needs come before them; returns how many are not done.

    Args:
        jobs: in an order in which they can run (`job.distinct`).
        side_by_side: worker processes.
        gpus: GPUs that the workers are spread over; 0 leaves them alone.
        minutes: start nothing after that many; 0 is no limit.
        turns: by a job's id, what is started first: of jobs that are ready those of the least number, and among them
            what nothing else needs, so that what is compressed is measured at once: a run that is cut leaves numbers.
            Then steps that an idle worker ran before, steps that none ran, and the longest.

    Raises:
        UserError: fewer than one worker.
    """
    if side_by_side < 1 or gpus < 0:
        raise UserError(f"run: {side_by_side} workers on {gpus} GPUs; at least one worker is needed")
    todo = {job.id: job for job in jobs if not runner.done(job)}
    needs = chain.from_iterable(job.needs for job in jobs)
    needed_by = Counter(need.id for _, need in needs)
    for job in jobs:
        versions.file(job)  # older than the results, so that Snakemake takes them as they are
    if any("model" in job.given() for job in todo.values()):
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401  once, and not in every worker
    order = {job.id: (turns.get(job.id, 0), needed_by[job.id] > 0, -weight(job)) for job in todo.values()}
    began, problems, total = time.monotonic(), [], len(todo)
    declared = {job.id: memory.gpu_bytes(job) for job in todo.values()}
    room = memory.free(gpus) if any(declared.values()) else {}
    with _mps(gpus), _workers(min(side_by_side, max(1, total)), gpus) as workers:
        while todo or any(worker.job for worker in workers):
            late = minutes and time.monotonic() - began > 60 * minutes
            missing = todo.keys() | {worker.job.id for worker in workers if worker.job}
            ready = [job for job in todo.values() if all(need.id not in missing for _, need in job.needs)]
            ready = [job for job in ready if all(runner.done(need) for _, need in job.needs)]
            while not late and (pair := _next(workers, ready, order, declared, room)):
                worker, job = pair
                ready.remove(job)
                worker.job, worker.held = todo.pop(job.id), declared[job.id]
                worker.compiled |= {job.steps}
                worker.pipe.send(job)
            busy = [worker for worker in workers if worker.job]
            if not busy:
                break
            ended = wait([worker.pipe for worker in busy])
            for worker in (worker for worker in busy if worker.pipe in ended):
                job, worker.job, worker.held = worker.job, None, 0
                try:
                    seconds, problem, crowded = worker.pipe.recv()
                except (EOFError, OSError):
                    raise UserError(f"{job.id}: a worker died; run again to resume, with fewer side by side") from None
                if crowded and declared[job.id] <= room.get(worker.gpu, -1):  # declared too little: it waits for more
                    todo[job.id] = job
                    declared[job.id] += max(declared[job.id], room[worker.gpu]) // 2
                    continue
                problems += [f"{job.id}: {problem}"] if problem else []
                finished = total - len(todo) - sum(worker.job is not None for worker in workers)
                failed = f" FAILED {problem}" if problem else ""
                print(f"{finished}/{total} {job.id} {seconds:.1f} s{failed}", flush=True)
    left = len(todo) + len(problems)
    if left:
        print(f"{left} of {total} jobs are not done; run again to resume", file=sys.stderr)
    if problems:
        print(f"error: {problems[0]}", file=sys.stderr)
    return left


def rebuild(jobs: Sequence[Job], folder: Path, side_by_side: int = 0) -> int:
    """Run jobs from nothing under `folder`, on all GPUs or cores of this machine; returns how many are not done.

    `side_by_side` are the worker processes; 0 is one for each GPU, or as many as the cores carry.
    """
    shutil.rmtree(folder, ignore_errors=True)
    on_gpus = gpus() if any(job.given().get("device") == "cuda" for job in jobs) else 0
    threads = max((int(job.given().get("threads", 1)) for job in jobs), default=1)
    with built.built_under(folder):
        return run_all(jobs, side_by_side or on_gpus or max(1, (os.cpu_count() or 1) // threads), on_gpus)


def run_here(jobs: Sequence[Job]) -> None:
    """Run jobs that are not done one after the other in this process, their output to their logs.

    Raises:
        UserError: a job failed; those before it are kept.
    """
    todo = [job for job in jobs if not runner.done(job)]
    for i, job in enumerate(todo, start=1):
        versions.file(job)
        shown = sys.stderr if sys.stderr.isatty() else None
        seconds, problem, _ = _run(job, shown)
        if problem and shown:
            print(file=shown)  # behind an unfinished bar
        if problem:
            raise UserError(f"{job.id}: {problem}")
        print(f"{i}/{len(todo)} {job.id} {seconds:.1f} s", flush=True)


def weight(job: Job) -> float:
    """A guess of how long a job takes, so that long ones start first: its steps' relative cost times the model size."""
    name = job.given().get("model")
    size = sum(path.stat().st_size for path in models.weight_files(name)) if name else 1
    return size * sum(getattr(STEPS[step], "COST", 1.0) for step in job.steps)


class Bars(io.TextIOBase):
    """A log that shows progress bars elsewhere, too: what rewrites its line, as tqdm does."""

    def __init__(self, log: TextIO, shown: TextIO) -> None:
        self.log, self.shown = log, shown

    def write(self, text: str) -> int:
        """Write to the log, and to the terminal what begins with a carriage return."""
        if text.startswith("\r"):
            self.shown.write(text)
            self.shown.flush()
        return self.log.write(text)

    def flush(self) -> None:
        """Flush the log."""
        self.log.flush()


def _run(job: Job, shown: TextIO | None = None) -> tuple[float, str, bool]:
    """Seconds that a job took, kept for `plan`; what went wrong in one sentence; whether it was others' GPU memory.

    Its output goes to its log, with the most that it held of a GPU beside what it declared. Progress bars inside a step
    are shown on `shown`, too.
    """
    began, path, problem, crowded = time.monotonic(), job.folder / "log.txt", "", False
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    with writing(path):
        os.makedirs(job.folder, exist_ok=True)
        log = open(path, "w", encoding="utf-8")
    with log:
        try:
            errors = Bars(log, shown) if shown else log
            with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(log):
                runner.run(job)
                if torch.cuda.is_initialized():
                    reserved, said = torch.cuda.max_memory_reserved() / 2**30, memory.gpu_bytes(job) / 2**30
                    print(f"GPU memory at most {reserved:.1f} GiB, declared {said:.1f}")
        except UserError as error:
            problem, crowded = " ".join(str(error).split()), isinstance(error, Crowded)
        except Exception as error:
            traceback.print_exc(file=log)
            said = " ".join(f"{type(error).__name__}: {error}".split())
            problem = f"{shortened(said, 300)}; the traceback is in {path}"
    seconds = time.monotonic() - began
    if not problem:
        write_text(job.benchmark, f"s\th:m:s\n{seconds:.4f}\t{timedelta(seconds=round(seconds))}\n")
    return seconds, problem, crowded


def _next(
    workers: Sequence[Worker], ready: Sequence[Job], order: Mapping[str, tuple], needed: Mapping[str, int],
    room: Mapping[int, int],
) -> tuple[Worker, Job] | None:  # fmt: skip
    """What is started next, and where: a job that has room on the GPU of an idle worker, None if there is none."""
    taken_bytes: Counter[int] = Counter()
    for worker in workers:
        taken_bytes[worker.gpu] += worker.held
    idle = [worker for worker in workers if worker.job is None]
    left = {worker.gpu: room.get(worker.gpu, sys.maxsize) - taken_bytes[worker.gpu] for worker in idle}

    def preference(job: Job, worker: Worker) -> tuple:
        known = job.steps in worker.compiled
        new = not any(job.steps in other.compiled for other in workers)
        turn, need, size = order[job.id]
        return turn, need, not known, not new, size, bool(worker.compiled), -left[worker.gpu]

    def fits(job: Job, worker: Worker) -> bool:  # a GPU without jobs takes any
        return needed[job.id] <= left[worker.gpu] or not (needed[job.id] and taken_bytes[worker.gpu])

    def undisturbed(job: Job, worker: Worker) -> bool:
        others = [other.job for other in workers if other.job and other.gpu == worker.gpu]
        return not others or not any(map(runner.alone, [job, *others]))

    pairs = []
    for job in ready:
        pairs += [(worker, job) for worker in idle if fits(job, worker) and undisturbed(job, worker)]
    return min(pairs, key=lambda pair: preference(pair[1], pair[0]), default=None)


@contextlib.contextmanager
def _workers(count: int, gpus: int) -> Iterator[list[Worker]]:
    """Processes for the block, spread over GPUs; what they do is ended with it."""
    context = multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")  # CUDA survives no fork
    workers: list[Worker] = []
    for number in range(count):
        pipe, theirs = context.Pipe()
        inherited = [pipe, *(w.pipe for w in workers)] if context.get_start_method() == "fork" else []
        words = (theirs, inherited, number, gpus, built.BUILD)
        process = context.Process(target=_serve, args=words, daemon=True)
        process.start()
        theirs.close()
        workers.append(Worker(process, pipe, number % len(memory.visible(gpus)) if gpus else 0))
    try:
        yield workers
    finally:
        for worker in workers:
            if worker.job:
                worker.process.terminate()
            worker.pipe.close()  # an idle one ends
        for worker in workers:
            worker.process.join()


def _serve(pipe: Connection, inherited: Sequence[Connection], number: int, gpus: int, build: Path) -> None:
    """A worker: run what comes through the pipe until it is closed."""
    for other in inherited:  # else it would stay open in here
        other.close()
    _begin(number, gpus, build)
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            pipe.send(_run(pipe.recv()))
            limits.release()  # what a job held is the others' again


def _begin(number: int, gpus: int, build: Path) -> None:
    """Give this worker its folder, and its GPU, one of those that are visible, before anything touches CUDA."""
    built.BUILD = build
    if gpus:
        some = memory.visible(gpus)
        os.environ["CUDA_VISIBLE_DEVICES"] = some[number % len(some)]


@contextlib.contextmanager
def _mps(gpus: int) -> Iterator[None]:
    """NVIDIA's MPS daemon around the block where it can be started; otherwise the workers take turns.

    The daemon sees every GPU: it would number anew those that it was told of, and a worker would look for its own in
    vain.
    """
    control = shutil.which("nvidia-cuda-mps-control") if gpus else None
    every_gpu = dict(os.environ)
    every_gpu.pop("CUDA_VISIBLE_DEVICES", None)
    started = bool(control) and subprocess.run([control, "-d"], capture_output=True, env=every_gpu).returncode == 0
    try:
        yield
    finally:
        if started:
            subprocess.run([control], input="quit\n", text=True, capture_output=True)
