"""The timer: device time of a launch, next to the bytes that it must read and the floor for reading them.

A round replays one CUDA graph of many launches. Cold (the default) rotates over copies of the weights, more than 2.5
times the L2 cache in all; warm uses one copy. Activations stay where a model has them: in cache, shared by all
launches, and different from one round to the next. Tasks that are measured together take turns, a read floor of exactly
their bytes among them. The median of the rounds stands with p20 and p80.

Prove, then time: the outputs of the very graph that is timed are overwritten with NaN, replayed and compared with the
reference, before the first and at the last timed rounds. So a cached output, work on another stream, a kernel that
returns early, one that changes its inputs, and inputs of zeros raise `Unsound` instead of giving a time.
"""

import copy
import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from repro.bench.devices import Cuda, CudaGraph
from repro.bench.task import Task, Timing, Unsound, bits, check_inputs, copies_in_a_row, poison, tensors

COLD, WARM = "cold", "warm"
COLD_BYTES = 200e6  # copies hold at least this much, and at least L2_FACTOR times the L2 cache
L2_FACTOR = 2.5
MOST_COPIES = 2048
CEILING_BYTES = 1 << 30  # of a copy and of a read that measure the memory's rate
ROUNDS, WARMUP = 25, 4
CHECKED = 2  # rounds at either end whose outputs are compared with the reference: both sets of activations


def bare(error: Exception) -> Exception:
    """The exception without the frames that it came through.

    They hold tensors and graphs, and who keeps the exception: a cycle, which only garbage collection would free.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


# ---- a task that is ready to be timed


class GraphRun:
    """A task with its copies, its graph and its two sets of activations; `round` replays it once."""

    def __init__(self, task: Task, backend: Cuda, mode: str = COLD) -> None:
        check_inputs(task)
        self.task, self.backend, self.mode = task, backend, mode
        self.nbytes = task.cold_bytes
        self.samples: list[float] = []
        self.relerr = 0.0
        self.state: dict[str, Any] = {}
        self.joule: float | None = None
        cold = dict(task.inputs)
        self.hot = {name: copy.deepcopy(cold.pop(name)) for name in task.inputs if name in task.hot}
        first = [t.clone() for t in tensors(self.hot)]
        # The second set is the first with every tensor turned around: as valid, as random, another result.
        self.variants = [first, [bits(t).flip(-1).view(t.dtype) if t.ndim else t for t in first]]
        self.wants = []
        for variant in range(len(self.variants)):
            self._activate(variant)
            self.wants.append(tensors(task.want(**self.hot, **cold)))
        if any(not bool(torch.isfinite(w.float()).all()) or not bool(w.any()) for w in self.wants[0]):
            raise Unsound(f"{task.name}: the reference is zero or not finite on these inputs")
        self.pristine = tensors(cold)
        self.copies = self._count() if mode == COLD else 1
        self.cold = copies_in_a_row(cold, self.copies)
        calls = [functools.partial(task.launch, **self.hot, **one) for one in self.cold]
        self.launches = task.launches or self.copies
        self.graph = self._capture(calls)
        if task.launches is None:
            turns = self._turns(min(self.graph.replay() for _ in range(2)))
            if turns > 1:
                del self.graph
                self.launches *= turns
                self.graph = self._capture(calls)

    def _count(self) -> int:
        """Copies of the weights that no cache holds."""
        cold = sum(t.nbytes for t in self.pristine)
        wanted = max(L2_FACTOR * self.backend.l2, COLD_BYTES) if self.backend.l2 else 0
        return min(max(2, math.ceil(wanted / cold)), MOST_COPIES) if cold and wanted else 1

    def _capture(self, calls: Sequence[Callable[[], Any]]) -> CudaGraph:
        try:
            return self.backend.capture([calls[i % self.copies] for i in range(self.launches)])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            raise RuntimeError(f"{self.task.name}: cannot be captured: {first}") from None

    def _turns(self, seconds: float) -> int:
        """How many times a graph goes through the copies to last long enough; once takes `seconds`."""
        most = math.ceil(self.backend.most / self.copies)
        return min(most, math.ceil(self.backend.enough / seconds)) if seconds > 0 else most

    def _activate(self, variant: int) -> None:
        for mine, value in zip(tensors(self.hot), self.variants[variant]):
            bits(mine).copy_(bits(value))

    def round(self, number: int, check: bool = False) -> float:
        """Replay once with the activations of this round; microseconds a launch.

        Raises:
            Unsound: `check` is set and an output differs from the reference.
        """
        variant = number % len(self.variants)
        self._activate(variant)
        if check:
            poison(self.graph.outputs)
        us = self.graph.replay() * 1e6 / self.launches
        if check:
            self._compare(variant)
        return us

    def _compare(self, variant: int) -> None:
        wants = self.wants[variant]
        if any(len(tensors(out)) != len(wants) for out in self.graph.outputs):
            raise Unsound(f"{self.task.name}: gives another number of outputs than its reference, {len(wants)}")
        for i, want in enumerate(wants):
            norm = want.float().norm()
            errors = []
            for out in self.graph.outputs:
                got = tensors(out)[i]
                if got.shape != want.shape:
                    raise Unsound(f"{self.task.name}: output is {list(got.shape)}, expected {list(want.shape)}")
                errors.append((got.float() - want.float()).norm() / norm)
            worst = float(torch.stack(errors).nan_to_num(nan=math.inf).max())
            if not worst <= self.task.tolerance:
                problem = f"is off by {worst:.2g} (allowed {self.task.tolerance:.2g})"
                if math.isinf(worst):
                    problem = "was not written"
                raise Unsound(f"{self.task.name}: an output of the timed launches {problem}")
            self.relerr = max(self.relerr, worst)

    def check_unchanged(self) -> None:
        """Raise `Unsound` if a launch wrote to its inputs."""
        hot = tensors(self.hot)
        if not any(_are_equal(hot, variant) for variant in self.variants):
            raise Unsound(f"{self.task.name}: a launch changed its activations")
        for weights in self.cold:
            if not _are_equal(tensors(weights), self.pristine):
                raise Unsound(f"{self.task.name}: a launch changed its weights")

    def timing(self, floor_us: float | None = None) -> Timing:
        """The rounds so far as a `Timing`."""
        p20, _, _, p80 = statistics.quantiles(self.samples, n=5) if len(self.samples) > 1 else [self.samples[0]] * 4
        return Timing(
            name=self.task.name,
            mode=self.mode,
            us=statistics.median(self.samples),
            p20=p20,
            p80=p80,
            samples=tuple(self.samples),
            nbytes=self.nbytes,
            copies=self.copies,
            launches=self.launches,
            relerr=self.relerr,
            floor_us=floor_us,
            joule=self.joule,
            facts=self.task.facts,
            **self.state,
        )


def _are_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether tensors are pairwise equal, bit by bit."""
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(some, others))


def measure(
    tasks: Sequence[Task],
    backend: Cuda,
    mode: str = COLD,
    rounds: int = ROUNDS,
    floor: Callable[[int], Sequence[Task]] | None = None,
    joule_seconds: float = 0.0,
    failures: dict[str, Exception] | None = None,
) -> list[Timing]:
    """Time several tasks in interleaved rounds.

    Args:
        tasks: with different names.
        backend: the device.
        mode: `cold` or `warm`.
        rounds: timed rounds of each task, after `WARMUP`.
        floor: makes the tasks that read so many bytes, of which the fastest counts; None leaves `floor_us` empty.
        joule_seconds: how long each task runs once more, at least, for its energy; 0 leaves it out.
        failures: takes the exception of a task that fails, by name and without its frames, instead of raising it.

    Returns:
        A timing for each task that is sound, in order.

    Raises:
        Unsound: see the top of this file; when `failures` is given, only of a floor.
    """
    if mode not in (COLD, WARM):
        raise ValueError(f"mode is {mode!r}, expected {COLD!r} or {WARM!r}")
    if len({task.name for task in tasks}) != len(tasks):
        raise ValueError(f"tasks share a name: {', '.join(task.name for task in tasks)}")
    together = _RunsTogether(failures)
    together.prepare(tasks, backend, mode, floor)
    together.time(rounds)
    together.check_unchanged()
    for run in together.runs:
        run.state = backend.state(run.graph)
    if joule_seconds:
        joules_by_run = backend.joules([run.graph for run in together.runs], joule_seconds)
        for run, joules in zip(together.runs, joules_by_run):
            run.joule = None if joules is None else joules / run.launches
    floors_us = together.floors_us()
    return [run.timing(floors_us.get(run.nbytes)) for run in together.runs]


class _RunsTogether:
    """Tasks that take turns, with the readers of their floors among them.

    Attributes:
        runs: of the tasks that have not failed.
        readers: of the floors, by the bytes that they read.
        failures: takes the exception of a task that fails; None raises it, as that of a reader is raised anyway.
    """

    def __init__(self, failures: dict[str, Exception] | None) -> None:
        self.runs: list[GraphRun] = []
        self.readers: dict[int, list[GraphRun]] = {}
        self.failures = failures

    def prepare(
        self, tasks: Sequence[Task], backend: Cuda, mode: str, floor: Callable[[int], Sequence[Task]] | None
    ) -> None:
        """Capture a graph for each task, then for the readers of as many bytes."""
        for task in tasks:
            try:
                self.runs.append(GraphRun(task, backend, mode))
            except Exception as error:
                self._note(task.name, error)
        if floor is None:
            return
        for nbytes in sorted({run.nbytes for run in self.runs if run.nbytes}):
            self.readers[nbytes] = [GraphRun(task, backend, mode) for task in floor(nbytes)]

    def time(self, rounds: int) -> None:
        """Replay all graphs in turn, `WARMUP` rounds and then those that count; the first and last ones are checked."""
        for number in range(WARMUP + rounds):
            check = number < CHECKED or number >= WARMUP + rounds - CHECKED
            everyone = [*self.runs, *self._all_readers()]
            start = number % max(1, len(everyone))  # who begins changes from round to round
            for run in everyone[start:] + everyone[:start]:
                us = self._round(run, number, check)
                if us is not None and number >= WARMUP:
                    run.samples.append(us)

    def check_unchanged(self) -> None:
        """Leave out the runs whose launches wrote to their inputs."""
        for run in list(self.runs):
            try:
                run.check_unchanged()
            except Exception as error:
                self._leave_out(run, error)

    def floors_us(self) -> dict[int, float]:
        """Microseconds of the fastest reader, by bytes."""
        fastest = {}
        for nbytes, readers in self.readers.items():
            fastest[nbytes] = min(statistics.median(reader.samples) for reader in readers)
        return fastest

    def _round(self, run: GraphRun, number: int, check: bool) -> float | None:
        """Microseconds of a launch, or None of a task that failed."""
        try:
            return run.round(number, check)
        except Exception as error:
            if run in self._all_readers():
                raise
            self._leave_out(run, error)
            return None

    def _leave_out(self, run: GraphRun, error: Exception) -> None:
        self._note(run.task.name, error)
        self.runs.remove(run)

    def _note(self, name: str, error: Exception) -> None:
        if self.failures is None:
            raise error
        self.failures[name] = bare(error)

    def _all_readers(self) -> list[GraphRun]:
        return list(itertools.chain.from_iterable(self.readers.values()))


# ---- what a device can do at best


def read_floors(nbytes: int) -> list[Task]:
    """The tasks of the readers whose best is the floor of `nbytes` bytes on this GPU."""
    from repro.kernels import read_floor as kernel  # needs Triton

    tasks = [read_floor(nbytes, config) for config in kernel.readers(nbytes, "cuda")]
    return [dataclasses.replace(task, name=f"read_floor {i}") for i, task in enumerate(tasks)]


def read_floor(nbytes: int, config: Mapping[str, Any]) -> Task:
    """The task that reads exactly `nbytes` bytes (rounded up to words of 4) and does next to nothing with them.

    `config` is a launch configuration of the kernel.
    """
    from repro.kernels import read_floor as kernel  # needs Triton

    buffer = torch.randint(0, 256, (-(-nbytes // 4) * 4,), dtype=torch.uint8, device="cuda")
    config = dict(config)
    block = kernel.words_of_block(config)
    blocks = -(-buffer.nbytes // (4 * block))

    def launch(buffer: Tensor) -> Tensor:
        out = torch.empty(blocks, dtype=torch.int32, device=buffer.device)
        kernel.launch(buffer, out, config)
        return out

    def want(buffer: Tensor) -> Tensor:
        words = torch.zeros(blocks * block, dtype=torch.int32, device=buffer.device)
        words[: buffer.nbytes // 4] = buffer.view(torch.int32)
        words = words.view(blocks, block)
        while words.shape[1] > 1:  # torch has no exclusive or over a dimension: fold the row in half
            half = words.shape[1] // 2
            words = words[:, :half] ^ words[:, half:]
        return words[:, 0]

    return Task("read_floor", launch, {"buffer": buffer}, want, 0.0, hot=(), nbytes=nbytes)


def ceilings(backend: Cuda) -> dict[str, Timing]:
    """This device's own copy bandwidth and read rate on `CEILING_BYTES`, as timings called `copy` and `read_floor`.

    The read rate is that of the fastest reader.

    A copy reads and writes, so its bytes count twice. It inverts what it copies: a plain copy becomes a copy node of
    the graph, which runs at two thirds of the speed.
    """
    source = torch.randint(0, 256, (CEILING_BYTES,), dtype=torch.uint8, device="cuda")
    invert = lambda source: torch.bitwise_not(source.view(torch.int32)).view(torch.uint8)  # noqa: E731
    how = {"tolerance": 0.0, "hot": (), "nbytes": 2 * CEILING_BYTES, "launches": 4}
    copied = Task("copy", invert, {"source": source}, lambda source: ~source, **how)
    reads = [dataclasses.replace(task, launches=4) for task in read_floors(CEILING_BYTES)]
    copy_timing, *read_timings = measure([copied, *reads], backend, rounds=9)
    fastest = min(read_timings, key=lambda timing: timing.us)
    return {"copy": copy_timing, "read_floor": dataclasses.replace(fastest, name="read_floor")}
