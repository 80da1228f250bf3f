"""The pool that runs jobs: forked workers that import torch once, several on a GPU, resumable.

    python -m repro run spear/table1 --missing --side-by-side 16 --gpus 2 --minutes 9

`make` runs the jobs of its targets through it, too. Each result is written as it ends; a second call does only what is
missing. Where NVIDIA's MPS daemon may be started, workers share a GPU through it.

What a job holds of a GPU is measured, not predicted: the first of its kind, steps and model runs while no other of them
does, and its peak decides how many of them fit beside each other. A job that times has its GPU to itself.
"""

import contextlib
import csv
import io
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TextIO

import torch
from tqdm import tqdm

from repro import models
from repro.core.errors import Crowded, UserError, shortened
from repro.core.files import write_text, writing
from repro.core.machine import free_bytes, gpus, visible_gpus
from repro.engine import limits
from repro.recipes.recipe import STEPS
from repro.store import job as built
from repro.store.job import Job
from repro.train.training_cost import CONTEXT
from repro.workflow import runner

Alike = tuple[str, tuple[str, ...], str]  # kind, steps and model: jobs whose GPU memory is taken to be the same


@dataclass
class Worker:
    """A process that runs one job after another, on one GPU where there are some.

    Attributes:
        job: what it runs now.
        alone: whether that job has its GPU to itself.
        compiled: steps that it ran before, whose training steps it need not compile again (30 to 75 s each).
    """

    process: BaseProcess
    pipe: Connection
    gpu: int
    job: Job | None = None
    alone: bool = False
    compiled: set[tuple[str, ...]] = field(default_factory=set)


@dataclass(frozen=True)
class Outcome:
    """A job that ended.

    Attributes:
        seconds: its run time.
        problem: what went wrong, in one sentence; empty if nothing did.
        crowded: whether it failed because other programs held GPU memory.
        gpu_bytes: its peak GPU memory, CUDA's context included; 0 for a job that used no GPU.
    """

    seconds: float
    problem: str = ""
    crowded: bool = False
    gpu_bytes: int = 0


@dataclass
class GpuMemory:
    """GPU memory: what was free at the start, and the peaks that were measured of jobs.

    Attributes:
        free: free bytes by GPU at the start; a GPU that is not in it takes any number of jobs.
        peaks: peak bytes of jobs that are `alike`.
        alone: ids of jobs that did not fit next to others and wait for a GPU to themselves.
    """

    free: Mapping[int, int] = field(default_factory=dict)
    peaks: dict[Alike, int] = field(default_factory=dict)
    alone: set[str] = field(default_factory=set)

    @classmethod
    def measured(cls, jobs: Sequence[Job], todo: Mapping[str, Job], gpus: int) -> "GpuMemory":
        """Free memory of `gpus` GPUs, and the peaks of those `jobs` that ran in an earlier call.

        Args:
            todo: the jobs by id that have not run yet.
        """
        memory = cls(free_bytes(gpus) if jobs else {})
        for job in jobs:
            if job.id not in todo and (held := gpu_bytes_of(job)) is not None:
                memory.note(job, held)
        return memory

    def note(self, job: Job, gpu_bytes: int) -> None:
        """Keep the measured peak of a job."""
        self.peaks[alike(job)] = max(gpu_bytes, self.peaks.get(alike(job), 0))

    def fits(self, job: Job, worker: Worker, workers: Sequence[Worker]) -> bool:
        """Whether a job may start on an idle worker's GPU next to the jobs that run there."""
        others = [other for other in workers if other.job and other.gpu == worker.gpu]
        if any(other.alone for other in others) or (others and self.needs_gpu_alone(job)):
            return False
        if not on_gpu(job):
            return True
        if alike(job) not in self.peaks:
            return not any(other.job and alike(other.job) == alike(job) for other in workers)
        used = sum(self.peaks.get(alike(other.job), 0) for other in others)
        return not used or used + self.peaks[alike(job)] <= self.free.get(worker.gpu, sys.maxsize)

    def needs_gpu_alone(self, job: Job) -> bool:
        """Whether a job needs a GPU to itself: it measures times, or did not fit next to others."""
        return job.id in self.alone or runner.alone(job)


def on_gpu(job: Job) -> bool:
    """Whether a job runs on a GPU."""
    return job.parsed_options().get("device") == "cuda"


def alike(job: Job) -> Alike:
    """The key of jobs that are taken to need the same GPU memory."""
    return job.kind, job.steps, job.parsed_options().get("model", "")


def run_all(
    jobs: Sequence[Job], side_by_side: int = 1, gpus: int = 0, minutes: float = 0.0, turns: Mapping[str, int] = {}
) -> int:
    """Run jobs whose needs come before them; returns how many are not done.

    Args:
        jobs: in an order in which they can run (`job.distinct`).
        side_by_side: worker processes.
        gpus: GPUs that the workers are spread over; 0 leaves them alone.
        minutes: start nothing after that many; 0 is no limit.
        turns: job id to its turn; of the jobs that are ready, those with the lowest turn start first. Among these, jobs
            that no other job needs come first, so that a compressed model is measured at once and a run that is cut
            off leaves numbers. Then, on a GPU, jobs whose steps an idle worker has compiled, then jobs whose steps no
            worker has compiled, then the longest chain.

    Raises:
        UserError: fewer than one worker.
    """
    if side_by_side < 1 or gpus < 0:
        raise UserError(f"run: {side_by_side} workers on {gpus} GPUs; at least one worker is needed")
    todo = {job.id: job for job in jobs if not runner.done(job)}
    if any("model" in job.parsed_options() for job in todo.values()):
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401  once, and not in every worker
    needed_by = Counter(need.id for _, need in chain.from_iterable(job.needs for job in jobs))
    work = work_left(jobs)
    order = {job.id: (turns.get(job.id, 0), needed_by[job.id] > 0, -work[job.id]) for job in todo.values()}
    memory = GpuMemory.measured([job for job in jobs if on_gpu(job)], todo, gpus)
    began = time.monotonic()
    problems = []
    total = len(todo)
    with _mps(gpus), _workers(min(side_by_side, max(1, total)), gpus) as workers, Progress(total) as progress:
        while todo or any(worker.job for worker in workers):
            if not minutes or time.monotonic() - began <= 60 * minutes:
                _start(workers, todo, order, memory)
            if not any(worker.job for worker in workers):
                break
            for job, outcome in _ended(workers):
                if outcome.crowded and job.id not in memory.alone:
                    memory.alone.add(job.id)
                    todo[job.id] = job
                    continue
                if outcome.problem:
                    problems.append(f"{job.id}: {outcome.problem}")
                else:
                    memory.note(job, outcome.gpu_bytes)
                progress.ended(job, outcome)
    left = len(todo) + len(problems)
    if left:
        print(f"{left} of {total} jobs are not done; run again to resume", file=sys.stderr)
    if problems:
        print(f"error: {problems[0]}", file=sys.stderr)
    return left


def _start(workers: Sequence[Worker], todo: dict[str, Job], order: Mapping[str, tuple], memory: GpuMemory) -> None:
    """Start jobs of `todo` that can run now on idle workers, and take them out of it."""
    missing = todo.keys() | {worker.job.id for worker in workers if worker.job}
    ready = [job for job in todo.values() if all(need.id not in missing for _, need in job.needs)]
    ready = [job for job in ready if all(runner.done(need) for _, need in job.needs)]
    while pair := _next(workers, ready, order, memory):
        worker, job = pair
        ready.remove(job)
        worker.job = todo.pop(job.id)
        worker.alone = memory.needs_gpu_alone(job)
        worker.compiled |= {job.steps}
        worker.pipe.send(job)


def _ended(workers: Sequence[Worker]) -> list[tuple[Job, Outcome]]:
    """Wait until at least one job has ended; return those that have, and mark their workers as idle.

    Raises:
        UserError: a worker died.
    """
    busy = [worker for worker in workers if worker.job]
    told = wait([worker.pipe for worker in busy])
    ended = []
    for worker in busy:
        if worker.pipe in told:
            job, worker.job, worker.alone = worker.job, None, False
            try:
                ended.append((job, worker.pipe.recv()))
            except (EOFError, OSError):
                raise UserError(f"{job.id}: a worker died; run again to resume, with fewer side by side") from None
    return ended


def rebuild(jobs: Sequence[Job], folder: Path, minutes: float = 0.0, turns: Mapping[str, int] = {}) -> int:
    """Run jobs from nothing under `folder`, on all GPUs or cores of this machine; returns how many are not done."""
    shutil.rmtree(folder, ignore_errors=True)
    with built.built_under(folder):
        return run_on_machine(jobs, os.cpu_count() or 1, minutes, turns)


def run_on_machine(jobs: Sequence[Job], cores: int, minutes: float = 0.0, turns: Mapping[str, int] = {}) -> int:
    """As `run_all`, with one worker per GPU of this machine if a job needs one, else as many as fit on `cores`.

    The number of workers follows from the job with the fewest threads. Jobs that train may have more threads, and share
    the cores with the others: their threads often wait for each other, and other work then keeps the cores busy.
    """
    on_gpus = gpus() if any(map(on_gpu, jobs)) else 0
    threads = min(
        (int(job.parsed_options().get("threads", 1)) for job in jobs if "dtype" in job.parsed_options()), default=1
    )
    return run_all(jobs, on_gpus or max(1, cores // threads), on_gpus, minutes, turns)


def run_here(jobs: Sequence[Job]) -> None:
    """Run jobs that are not done one after another in this process; their output goes to their logs.

    Raises:
        UserError: a job failed; those before it are kept.
    """
    todo = [job for job in jobs if not runner.done(job)]
    for i, job in enumerate(todo, start=1):
        terminal = sys.stderr if sys.stderr.isatty() else None
        outcome = _run(job, terminal)
        if outcome.problem and terminal:
            print(file=terminal)  # after an unfinished bar
        if outcome.problem:
            raise UserError(f"{job.id}: {outcome.problem}")
        print(f"{i}/{len(todo)} {job.id} {outcome.seconds:.1f} s", flush=True)


def weight(job: Job) -> float:
    """A rough estimate of a job's run time, used for ordering only: the model's bytes times the cost of its steps."""
    name = job.parsed_options().get("model")
    size = sum(path.stat().st_size for path in models.weight_files(name)) if name else 1
    applied = job.steps if job.kind == "compress" else ()
    return size * (1.0 + sum(getattr(STEPS[step], "COST", 1.0) for step in applied))


def work_left(jobs: Iterable[Job]) -> dict[str, float]:
    """Job id to the weight (`weight`) of the job plus that of the longest chain of jobs that waits for it."""
    waiting: dict[str, list[Job]] = {job.id: [] for job in jobs}
    for job in jobs:
        for _, need in job.needs:
            waiting[need.id].append(job)
    work: dict[str, float] = {}

    def left(job: Job) -> float:
        if job.id not in work:
            work[job.id] = weight(job) + max(map(left, waiting[job.id]), default=0.0)
        return work[job.id]

    for job in jobs:
        left(job)
    return work


class Bars(io.TextIOBase):
    """A log that passes progress bars on to a terminal: text that begins with a carriage return, as tqdm's does."""

    def __init__(self, log: TextIO, terminal: TextIO) -> None:
        self.log = log
        self.terminal = terminal

    def write(self, text: str) -> int:
        """Write text to the log; if it begins with a carriage return, to the terminal too."""
        if text.startswith("\r"):
            self.terminal.write(text)
            self.terminal.flush()
        return self.log.write(text)

    def flush(self) -> None:
        """Flush the log."""
        self.log.flush()


class Progress:
    """Progress of a run: a bar on a terminal, otherwise a line for each job that ended.

    Both show the time that is left at the pace of the run so far.
    """

    def __init__(self, total: int) -> None:
        self._bar = tqdm(total=total, unit="job", smoothing=0, leave=False, disable=not sys.stderr.isatty())
        self._total = total
        self._ended = 0
        self._began = time.monotonic()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def ended(self, job: Job, outcome: Outcome) -> None:
        """Count a job that ended and report it."""
        self._ended += 1
        self._bar.update()
        line = f"{self._ended}/{self._total} {job.id} {outcome.seconds:.1f} s"
        if outcome.problem:
            tqdm.write(f"{line} FAILED {outcome.problem}", file=sys.stderr)
        elif self._bar.disable:
            print(f"{line}{self._time_left()}", file=sys.stderr, flush=True)

    def _time_left(self) -> str:
        """The time left if the remaining jobs take as long as those that ended; empty after the last one."""
        others = self._total - self._ended
        if not others:
            return ""
        seconds = (time.monotonic() - self._began) / self._ended
        return f", {tqdm.format_interval(seconds * others)} left"


def _run(job: Job, terminal: TextIO | None = None) -> Outcome:
    """Run a job; its output goes to its log, its run time and GPU memory to its benchmark file.

    Args:
        terminal: where progress bars of a step are shown too.
    """
    began = time.monotonic()
    path = job.folder / "log.txt"
    problem = ""
    crowded = False
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    with writing(path):
        os.makedirs(job.folder, exist_ok=True)
        log = open(path, "w", encoding="utf-8")
    with log:
        try:
            errors = Bars(log, terminal) if terminal else log
            with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(log):
                runner.run(job)
        except UserError as error:
            problem = " ".join(str(error).split())
            crowded = isinstance(error, Crowded)
            print(problem, file=log)
        except Exception as error:
            traceback.print_exc(file=log)
            message = " ".join(f"{type(error).__name__}: {error}".split())
            problem = f"{shortened(message, 300)}; the traceback is in {path}"
    gpu_bytes = torch.cuda.max_memory_reserved() + CONTEXT if torch.cuda.is_initialized() else 0
    outcome = Outcome(time.monotonic() - began, problem, crowded, gpu_bytes)
    if not problem:
        clock = timedelta(seconds=round(outcome.seconds))
        write_text(job.benchmark, f"s\th:m:s\tgpu_bytes\n{outcome.seconds:.4f}\t{clock}\t{gpu_bytes}\n")
    return outcome


def gpu_bytes_of(job: Job) -> int | None:
    """The peak GPU memory of a job that ran before, in bytes; None if it is unknown because Snakemake ran the job."""
    if not job.benchmark.is_file():
        return None
    lines = csv.DictReader(job.benchmark.read_text(encoding="utf-8").splitlines(), delimiter="\t")
    return next((int(line["gpu_bytes"]) for line in lines if "gpu_bytes" in line), None)


def _next(
    workers: Sequence[Worker], ready: Sequence[Job], order: Mapping[str, tuple], memory: GpuMemory
) -> tuple[Worker, Job] | None:
    """The next job to start and an idle worker whose GPU it fits on; None if there is none."""
    jobs_on = Counter(worker.gpu for worker in workers if worker.job)
    idle = [worker for worker in workers if worker.job is None]

    def preference(job: Job, worker: Worker) -> tuple:
        compiled_here = on_gpu(job) and job.steps in worker.compiled
        compiled_nowhere = on_gpu(job) and not any(job.steps in other.compiled for other in workers)
        turn, need, work = order[job.id]
        return turn, need, not compiled_here, not compiled_nowhere, work, bool(worker.compiled), jobs_on[worker.gpu]

    pairs = []
    for job in ready:
        pairs += [(worker, job) for worker in idle if memory.fits(job, worker, workers)]
    return min(pairs, key=lambda pair: preference(pair[1], pair[0]), default=None)


@contextlib.contextmanager
def _workers(count: int, gpus: int) -> Iterator[list[Worker]]:
    """Worker processes for the length of the block, spread over GPUs; they are ended with it."""
    context = multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")  # CUDA survives no fork
    workers: list[Worker] = []
    for number in range(count):
        pipe, theirs = context.Pipe()
        inherited = [pipe, *(w.pipe for w in workers)] if context.get_start_method() == "fork" else []
        words = (theirs, inherited, number, gpus, built.BUILD)
        process = context.Process(target=_serve, args=words, daemon=True)
        process.start()
        theirs.close()
        workers.append(Worker(process, pipe, number % len(visible_gpus(gpus)) if gpus else 0))
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
    """The main loop of a worker: run the jobs that come through the pipe until it is closed."""
    for other in inherited:  # otherwise it would stay open in this process
        other.close()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is half written is removed
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _begin(number, gpus, build)
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            pipe.send(_run(pipe.recv()))
            limits.release()  # give the job's memory back to the other workers


def _end_with_parent() -> None:
    """End this worker as soon as its parent process is gone, even in the middle of a job."""
    multiprocessing.parent_process().join()
    os.kill(os.getpid(), signal.SIGKILL)


def _begin(number: int, gpus: int, build: Path) -> None:
    """Set this worker's build folder and its GPU, one of the visible ones, before anything touches CUDA."""
    built.BUILD = build
    if gpus:
        visible = visible_gpus(gpus)
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[number % len(visible)]


@contextlib.contextmanager
def _mps(gpus: int) -> Iterator[None]:
    """Run NVIDIA's MPS daemon during the block if it can be started; otherwise the GPU time-slices the workers.

    The daemon is started without CUDA_VISIBLE_DEVICES. With it, the daemon would renumber the GPUs, and a worker would
    not find its own.
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
