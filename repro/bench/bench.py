"""Time all kernels and peers once on this device, on layer shapes of real models, as tidy rows of a CSV.

The file (`kernel_rows.py`) is written anew after every shape and number of activation rows, whole each time.
"""

import contextlib
import datetime
import functools
import importlib.metadata
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from repro.bench import operator_tasks, peers, stored_peers, timing
from repro.bench.kernel_list import OURS, load, machine_code
from repro.bench.task import Layer, Task, Timing, Unsound
from repro.core.errors import UserError, unknown
from repro.core.files import write_text
from repro.store import provenance
from repro.store.kernel_rows import KERNELS, LARGE, MODES, KernelRow, broken_of_ours, from_csv, to_csv, versions

CEILINGS = ("bf16/bf16/torch.matmul", "fp8/bf16/torch._scaled_mm", "int8/int32/torch._int_mm")
JOULE_SECONDS = 0.05  # at least: one step of the driver's energy counter, which is updated every 0.1 s
MEASURED = ("mode", "us", "p20", "p80", "floor_us", "fraction", "relerr", "copies", "clock_mhz", "joule")
STATUS = {torch.OutOfMemoryError: "oom", Unsound: "wrong", ValueError: "unsupported"}  # of a failure; else failed


@dataclass(frozen=True)
class Device:
    """Where `bench` runs: what torch calls it, its timer backend, its floor and ceilings, who is asked, its origin.

    `choices` gives tasks that choose tokens from logits, those of one case together; their names are labels.
    """

    name: str
    backend: timing.Cuda
    floor: Callable[[int], Sequence[Task]]
    ceilings: Callable[[], dict[str, Timing]]
    providers: dict[str, peers.Provider]
    origin: dict[str, str]
    choices: Callable[[], Sequence[Sequence[Task]]] = tuple


def this_gpu() -> Device:
    """This machine's GPU.

    Raises:
        UserError: there is none.
    """
    if not torch.cuda.is_available():
        raise UserError("bench: this machine has no CUDA device; results/ has what was measured on one")
    backend = timing.Cuda()

    def ceilings() -> dict[str, Timing]:
        layer = Layer(LARGE, LARGE)
        able = [peers.PEERS[name] for name in CEILINGS if not peers.PEERS[name].unavailable("cuda")]
        timings = timing.measure([provider.task(layer, LARGE) for provider in able], backend, rounds=9)
        return timing.ceilings(backend) | {t.name: t for t in timings}

    return Device("cuda", backend, timing.read_floors, ceilings, {**peers.PEERS, **OURS}, origin(), greedy_choices)


def greedy_choices(device: str = "cuda") -> list[list[Task]]:
    """The greedy choice by `argmax` and by torch, of the logits of a vocabulary of 128,256 for 1 token and for 16.

    Cold, logits come from memory; warm, from L2, where a decode step's last product has left them.
    """
    cases = [case for case in load("argmax").CASES if case["V"] == 128256]
    choices = []
    for case in cases:
        tasks = []
        for provider in ("argmax", "torch"):
            facts = {"kernel": "argmax", "provider": provider, "dtype": "bf16", "N": case["V"], "M": case["T"]}
            task = operator_tasks.task("argmax", case, provider, device)
            tasks.append(replace(task, name=f"argmax/bf16/{provider}", hot=(), facts=facts))
        choices.append(tasks)
    return choices


def origin() -> dict[str, str]:
    """The origin of a time: this GPU, the commit, the libraries and the date."""
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    for name in ("triton", "gemlite"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "device": torch.cuda.get_device_name(),
        "commit": provenance.commit(),
        "environment": " ".join(f"{k} {v}" for k, v in versions.items()),
        "date": os.environ.get("REPRO_DATE") or datetime.date.today().isoformat(),
    }


def bench(
    out: Path,
    shapes: Sequence[tuple[int, int]] = (),
    counts: Sequence[int] = stored_peers.COUNTS,
    modes: Sequence[str] = ("cold",),
    only: Sequence[str] = (),
    rounds: int = 25,
    joule_seconds: float = JOULE_SECONDS,
    resume: bool = False,
    workers: int = 0,
    say: Callable[[str], None] = print,
    device: Device | None = None,
) -> list[KernelRow]:
    """Measure every provider on every shape and write `out` as it goes.

    Args:
        out: CSV file, written anew after every shape and number of rows.
        shapes: (N, K) of layers; those of the stored peers when empty.
        counts: numbers of activation rows M, in this order; a provider is measured at those that it takes.
        modes: cold, warm.
        only: words; a provider is measured if its label has one of them (the library always is). Empty: all.
        rounds: timed rounds of each.
        joule_seconds: how long each runs once more, at least, for its energy; 0 leaves energy out.
        resume: what `out` has already, from the same commit and environment, is not measured again, but for the sizes
            for which a kernel of this project failed or was wrong; what it has of other sizes and providers stays.
        workers: processes that compile everything beforehand, side by side; 0: kernels are compiled when they are met.
        say: takes a line a measurement.
        device: where; this machine's GPU when not given.

    Raises:
        UserError: no CUDA device, or a word that names no provider.
    """
    device = device or this_gpu()
    choices = device.choices()
    names = [task.name for task in itertools.chain.from_iterable(choices)]
    labels = [*device.providers, *dict.fromkeys(names)]
    for word in only:
        if not any(word in label for label in labels):
            raise unknown("provider", word, labels)
    about = device.origin
    chosen = _chosen_providers(device, only)
    old = [row for row in from_csv(out) if row.origin == about] if resume and Path(out).exists() else []
    rows: list[KernelRow] = []
    for name, provider in list(chosen.items()):
        if reason := provider.unavailable(device.name):
            del chosen[name]
            rows.append(
                KernelRow(provider.format, provider.name, provider.dtype, status="unsupported", note=reason, **about)
            )
            say(f"{name}: {reason}")
    best = device.ceilings()
    run = _Run(device, chosen, best["copy"].gb_per_s, rounds, joule_seconds, say, tuple(only))
    run.note("read_floor", device.floor(timing.CEILING_BYTES))
    for t in best.values():
        rows.append(run.row(t, t.facts or {"kernel": t.name, "provider": t.name, "dtype": "uint8"}))
        work = f"{2 * LARGE**3 / t.us / 1e6:.0f} T operations/s" if t.facts else f"{t.gb_per_s:.0f} GB/s"
        say(f"{t.name}: {work}")
    rows += run.chosen_tokens(choices)
    all_sizes = [(*shape, m) for shape, m in itertools.product(shapes or stored_peers.shapes(), counts)]
    todo = []
    for sizes in all_sizes:
        done = [row for row in old if (row.N, row.K, row.M) == sizes]
        if _is_complete(done, chosen, sizes[2], modes):
            rows += done
        else:
            todo.append(sizes)
    if len(todo) < len(all_sizes):
        say(f"{len(all_sizes) - len(todo)} of {len(all_sizes)} shapes and numbers of rows are there already")
    if workers:
        begin = time.perf_counter()
        compile_ahead([name for name, p in chosen.items() if not p.alone], todo, workers)
        say(f"compiled ahead by {workers} processes: {time.perf_counter() - begin:.0f} s")
    begin = time.perf_counter()
    layer = None
    for i, (n, k, m) in enumerate(todo, start=1):
        if layer is None or (layer.rows, layer.columns) != (n, k):
            layer = Layer(n, k, device=device.name)
        rows += run.at(layer, m, modes)
        write_text(out, to_csv(_with_others(rows, old)))
        spent = time.perf_counter() - begin
        left = f", about {spent / i * (len(todo) - i):.0f} s left" if i < len(todo) else ""
        say(f"[{i}/{len(todo)}] {n} x {k}, M = {m}: {spent:.0f} s so far{left}")
    rows = _with_others(rows, old)
    write_text(out, to_csv(rows))
    return rows


def _with_others(rows: Sequence[KernelRow], old: Sequence[KernelRow]) -> list[KernelRow]:
    """Rows of a run, and of the file that it goes on with those that it has not measured."""
    measured = {row.key for row in rows}
    return [*rows, *(row for row in old if row.key not in measured)]


def _chosen_providers(device: Device, only: Sequence[str]) -> dict[str, peers.Provider]:
    """The providers whose label has one of some words, and the library; all without any word."""
    words = [*only, peers.LIBRARY_LABEL]
    chosen = {}
    for label, provider in device.providers.items():
        if not only or any(word in label for word in words):
            chosen[label] = provider
    return chosen


def _is_complete(rows: Sequence[KernelRow], chosen: Mapping[str, peers.Provider], m: int, modes: Sequence[str]) -> bool:
    """Whether rows of one size have every chosen provider that takes `m` activation rows, in every mode."""
    labels = [label for label, provider in chosen.items() if provider.takes(m)]
    needed = set(itertools.product(labels, modes))
    return needed <= {(row.label, row.mode) for row in rows if not broken_of_ours(row)}


def compile_ahead(labels: Sequence[str], all_sizes: Sequence[tuple[int, int, int]], workers: int) -> None:
    """Launch every provider once at every (N, K, M), spread over processes: what they compile stays on disk.

    Failures are silent here: the measurement meets them again and says so.
    """
    by_layer: dict[tuple[int, int], list[int]] = {}
    for n, k, m in all_sizes:
        by_layer.setdefault((n, k), []).append(m)
    jobs = []
    for (n, k), counts in by_layer.items():
        jobs += [(label, n, k, counts) for label in labels]
    with ProcessPoolExecutor(min(workers, len(jobs)) or 1, multiprocessing.get_context("spawn")) as pool:
        for job in [pool.submit(_first_launches, *job) for job in jobs]:
            job.exception()


def _first_launches(label: str, n: int, k: int, counts: Sequence[int]) -> None:
    provider = {**peers.PEERS, **OURS}[label]
    layer = Layer(n, k)
    task = None
    for m in filter(provider.takes, counts):
        with contextlib.suppress(Exception):
            task = provider.task(layer, m)
            task.launch(**task.inputs)
            torch.cuda.synchronize()
    del layer, task
    torch.cuda.empty_cache()  # other processes share the device


@dataclass(frozen=True)
class _Run:
    """One call of `bench`: the providers that are measured, how, and the facts in every row."""

    device: Device
    chosen: Mapping[str, peers.Provider]
    copy: float  # 10^9 bytes a second
    rounds: int
    joule_seconds: float
    say: Callable[[str], None]
    only: tuple[str, ...] = ()
    machine: dict[str, str] = field(default_factory=dict)

    def at(self, layer: Layer, m: int, modes: Sequence[str]) -> list[KernelRow]:
        """Rows of everybody on one layer with so many rows of activations, failures and stored peers among them."""
        rows = []
        tasks = []
        unable = {}
        device = self.device
        for name, provider in self.chosen.items():
            if provider.takes(m):
                try:
                    tasks.append(provider.task(layer, m))
                    self.note(tasks[-1].name, tasks[-1:])
                except Exception as error:
                    unable[name] = timing.bare(error)
        host = self.host_us(tasks)
        for mode in modes:
            failed = dict(unable)
            where = f"{layer.rows} x {layer.columns}, M = {m}, {mode}"
            timings = timing.measure(tasks, device.backend, mode, self.rounds, device.floor, self.joule_seconds, failed)
            for t in timings:
                rows.append(replace(self.row(t, t.facts), host_us=host.get(t.name)))
                self.say(
                    f"{where}: {t.name} {t.us:.2f} us, {t.fraction:.2f} of the floor, {t.gb_per_s:.0f} GB/s, "
                    f"error {t.relerr:.1e}" + (f", {t.watts:.0f} W" if t.watts else "")
                )
            library = {(layer.rows, layer.columns, m, t.mode): t.us for t in timings if t.name == peers.LIBRARY_LABEL}
            rescaled = _rescaled(library, device.origin)
            # Who was not asked for keeps the ratio of the run that its rivals are of.
            rows += [row for row in rescaled if self.is_asked_for(row.label)]
            for name, error in failed.items():
                p = self.chosen[name]
                status = next((status for kind, status in STATUS.items() if isinstance(error, kind)), "failed")
                note = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
                first_columns = (p.format, p.name, p.dtype, layer.rows, layer.columns, m, mode, status)
                rows.append(KernelRow(*first_columns, note=note, **device.origin))
                self.say(f"{where}: {name} {status}: {note}")
        del tasks
        device.backend.release()
        return rows

    def chosen_tokens(self, choices: Sequence[Sequence[Task]]) -> list[KernelRow]:
        """Rows of tasks that choose tokens, cold and warm; those of the same logits take turns."""
        rows, device = [], self.device
        for tasks in choices:
            timed_tasks = [task for task in tasks if self.is_asked_for(task.name)]
            for task in timed_tasks:
                self.note(task.name, [task])
            host = self.host_us(timed_tasks)
            for mode in MODES if timed_tasks else ():
                for t in timing.measure(
                    timed_tasks, device.backend, mode, self.rounds, device.floor, self.joule_seconds
                ):
                    rows.append(replace(self.row(t, t.facts), host_us=host.get(t.name)))
                    self.say(f"{t.name}, {t.facts['M']} tokens, {mode}: {t.us:.2f} us, {t.fraction:.2f} of the floor")
        return rows

    def is_asked_for(self, label: str) -> bool:
        """Whether a label has one of the words of `only`; every label without any."""
        return not self.only or any(word in label for word in self.only)

    def host_us(self, tasks: Sequence[Task]) -> dict[str, float]:
        """What a launch of each costs the host; all take turns, as the pace of a host has levels that last."""
        calls = {}
        for task in tasks:
            call = functools.partial(task.launch, **task.inputs)
            with contextlib.suppress(Exception):  # what fails here is met again by the measurement
                call()
                calls[task.name] = call
        with contextlib.suppress(Exception):
            return dict(zip(calls, self.device.backend.host_us(*calls.values()), strict=True))
        return {}

    def note(self, name: str, tasks: Sequence[Task]) -> None:
        """Keep the digest of the machine code of tasks; what fails here is met again by the measurement."""
        with contextlib.suppress(Exception):
            self.machine[name] = machine_code(lambda: [task.launch(**task.inputs) for task in tasks])

    def row(self, t: Timing, facts: Mapping[str, Any]) -> KernelRow:
        """A timing as a row."""
        return KernelRow(
            **facts,
            **{name: getattr(t, name) for name in MEASURED},
            bytes=t.nbytes,
            copy_fraction=t.gb_per_s / self.copy,
            rounds=len(t.samples),
            throttle=t.throttle or "",
            versions=versions(t.name),
            machine=self.machine.get(t.name) or ("" if facts["provider"] in KERNELS else "libraries"),
            **self.device.origin,
        )


def _rescaled(here: Mapping[tuple[int, int, int, str], float], about: Mapping[str, str]) -> list[KernelRow]:
    """Rows of the peers stored for this device, rescaled by the library's times of this run by (N, K, M, mode)."""
    rows = []
    records = [record for record in stored_peers.times() if record.device == about["device"]]
    for provider, kernel, dtype, names in stored_peers.RESCALED_PEERS:
        for r, ratio, us in stored_peers.rescale(here, records, names):
            note = f"{r.peer}, recorded {r.us:.3f} us on {r.date} ({r.device}), times {ratio:.3f}, "
            note += "the library's time here to then"
            shape = (r.N, r.K, r.M, r.mode)
            facts = {"bytes": r.bytes, "relerr": r.relerr, "note": note}
            rows.append(KernelRow(kernel, provider, dtype, *shape, "rescaled", us, **facts, **about))
    return rows
