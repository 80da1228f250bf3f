"""Everything once on this device: all kernels and peers on the layer shapes of real models, as tidy rows of a CSV.

`bench` measures and writes the file anew after every shape, whole each time; `accept` takes such a file into
`results/<device>/kernels.csv`: schema, provenance, and nothing faster than the device's roofline.
"""

import contextlib
import csv
import datetime
import functools
import importlib.metadata
import io
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from repro.errors import UserError, unknown
from repro.files import ROOT, sha256, short_hash, write_text
from repro.record import RESULTS

COUNTS = (1, 4, 8, 16, 64, 256, 512, 1024, 2048)  # the last three: prefill, of those that are made for it
STATUSES = ("ok", "bridged", "wrong", "oom", "unsupported", "failed")
MODES = ("cold", "warm")
GEMLITE_VARIANTS = ("", "_kc", "_h100cfg", "_h100cfg_kc", "max", "max_kc", "p8", "p8_kc")  # of packing and tuning
BRIDGED = (  # peers that do not run here: who, what they compute, and their recorded variants; the fastest counts
    ("awq_gemv", "w4-g128", "fp16", ("awq_gemv_g128",)),
    ("marlin", "w4-g128", "fp16", ("marlin_g128", "marlin_g128_t64x256")),
    *(
        ("gemlite-recorded", kernel, "fp16", tuple(name + variant for variant in GEMLITE_VARIANTS))
        for kernel, name in (("w4-g128", "gl_w4g128"), ("w2-g64", "gl_w2g64"))
    ),
)
CEILINGS = ("bf16/bf16/torch.matmul", "fp8/bf16/torch._scaled_mm", "int8/int32/torch._int_mm")
JOULE_SECONDS = 0.05  # at least: one step of the driver's energy counter, which is updated every 0.1 s
LARGE = 8192  # rows, columns and activation rows of the product that measures a ceiling

# Datasheet peaks: bytes a second of memory, dense operations a second. No measurement can beat them.
PEAKS = {
    "NVIDIA H200": {"memory": 4.8e12, "bf16": 989.5e12, "fp16": 989.5e12, "int32": 1979e12, "fp8": 1979e12},
}


@dataclass(frozen=True)
class Row:
    """One kernel or peer on one shape. `us`, `p20`, `p80`, `floor_us` are microseconds a launch.

    `bytes` must be read from memory, `floor_us` is what reading them takes on this device (same process, turn about),
    `fraction` their ratio; `copy_fraction` is bytes over time over the device's own copy bandwidth; `relerr` the error
    against float32; `joule` a launch. Status `bridged` is a recorded time of another run, times the ratio of the
    library's time here to then.
    """

    kernel: str
    provider: str
    dtype: str
    N: int | None = None
    K: int | None = None
    M: int | None = None
    mode: str = ""
    status: str = "ok"
    us: float | None = None
    p20: float | None = None
    p80: float | None = None
    bytes: int | None = None
    floor_us: float | None = None
    fraction: float | None = None
    copy_fraction: float | None = None
    relerr: float | None = None
    rounds: int | None = None
    copies: int | None = None
    clock_mhz: int | None = None
    throttle: str = ""
    joule: float | None = None
    device: str = ""
    commit: str = ""
    code: str = ""
    environment: str = ""
    date: str = ""
    note: str = ""

    @property
    def label(self) -> str:
        """The name of the provider among all of a run."""
        return f"{self.kernel}/{self.dtype}/{self.provider}"

    @property
    def origin(self) -> dict[str, str]:
        """Where and with what it was measured."""
        return {name: getattr(self, name) for name in ("device", "commit", "environment", "date")}

    @property
    def key(self) -> tuple:
        """What makes a cell of the file."""
        return (self.kernel, self.provider, self.dtype, self.N or 0, self.K or 0, self.M or 0, self.mode)


COLUMNS = tuple(f.name for f in fields(Row))
INTEGERS = ("N", "K", "M", "bytes", "rounds", "copies", "clock_mhz")
FLOATS = ("us", "p20", "p80", "floor_us", "fraction", "copy_fraction", "relerr", "joule")


def to_csv(rows: Iterable[Row]) -> str:
    """Rows as CSV text; numbers with 5 significant digits, missing ones empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        values = asdict(row).values()
        writer.writerow(["" if v is None else f"{v:.5g}" if isinstance(v, float) else v for v in values])
    return out.getvalue()


def is_bench(path: Path) -> bool:
    """Whether a file has the columns of this room."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return tuple(next(csv.reader(file), ())) == COLUMNS
    except (OSError, UnicodeDecodeError, csv.Error):
        return False


def from_csv(path: Path) -> list[Row]:
    """Read rows, checked.

    Raises:
        UserError: no such file, other columns, a word or a number that cannot be.
    """
    if not Path(path).is_file():
        raise UserError(f"{path}: no such file")
    if not is_bench(path):
        raise UserError(f"{path}: not a file of python -m repro bench; its columns differ")
    rows = []
    with open(path, encoding="utf-8", newline="") as file:
        for i, line in enumerate(list(csv.reader(file))[1:], start=2):
            where = f"{path}, line {i}"
            if len(line) != len(COLUMNS):
                raise UserError(f"{where}: {len(line)} values for {len(COLUMNS)} columns; the file was cut short")
            values: dict[str, Any] = dict(zip(COLUMNS, line))
            for name in (*INTEGERS, *FLOATS):
                try:
                    kind = int if name in INTEGERS else float
                    values[name] = kind(values[name]) if values[name] else None
                except ValueError:
                    raise UserError(f"{where}: {name} is {values[name]!r}, not a number") from None
                if values[name] is not None and not math.isfinite(values[name]):
                    raise UserError(f"{where}: {name} is {values[name]}; a number that is not finite is a status")
            if values["status"] not in STATUSES:
                raise UserError(f"{where}: {unknown('status', values['status'], STATUSES)}")
            rows.append(Row(**values))
    return rows


# ---- measuring


def bench(
    out: Path,
    shapes: Sequence[tuple[int, int]] = (),
    counts: Sequence[int] = COUNTS,
    modes: Sequence[str] = ("cold",),
    only: Sequence[str] = (),
    rounds: int = 25,
    joule_seconds: float = JOULE_SECONDS,
    resume: bool = False,
    workers: int = 0,
    say: Callable[[str], None] = print,
    device: "Device | None" = None,
) -> list[Row]:
    """Measure every provider on every shape and write `out` as it goes.

    Args:
        out: CSV file, written anew after every shape and number of rows.
        shapes: (N, K) of layers; those of the recorded peers when empty.
        counts: numbers of activation rows M, in this order; a provider is measured at those that it takes.
        modes: cold, warm.
        only: words; a provider is measured if its label has one of them (the library always is). Empty: all.
        rounds: timed rounds of each.
        joule_seconds: how long each runs once more, at least, for its energy; 0 leaves energy out.
        resume: what `out` has already, from the same commit and environment, is not measured again.
        workers: processes that compile everything beforehand, side by side; 0: kernels are compiled when they are met.
        say: takes a line a measurement.
        device: where; this machine's GPU when not given.

    Raises:
        UserError: no CUDA device, or a word that names no provider.
    """
    from repro import peers

    device = device or this_gpu()
    for word in only:
        if not any(word in label for label in device.providers):
            raise unknown("provider", word, device.providers)
    library, about = f"bf16/bf16/{peers.LIBRARY}", device.origin
    chosen = {n: p for n, p in device.providers.items() if not only or n == library or any(w in n for w in only)}
    old = [row for row in from_csv(out) if row.origin == about] if resume and Path(out).exists() else []
    rows: list[Row] = []
    for name, provider in list(chosen.items()):
        if reason := provider.unavailable(device.name):
            del chosen[name]
            rows.append(Row(provider.format, provider.name, provider.dtype, status="unsupported", note=reason, **about))
            say(f"{name}: {reason}")
    best = device.ceilings()
    run = _Run(device, chosen, best["copy"].gb_per_s, rounds, joule_seconds, say)
    for t in best.values():
        rows.append(run.row(t, t.facts or {"kernel": t.name, "provider": t.name, "dtype": "uint8"}))
        work = f"{2 * LARGE**3 / t.us / 1e6:.0f} T operations/s" if t.facts else f"{t.gb_per_s:.0f} GB/s"
        say(f"{t.name}: {work}")
    todo, there = [], set()
    for n, k in shapes or peers.shapes():
        for m in counts:
            wanted = {(name, mode) for name, p in chosen.items() if p.takes(m) for mode in modes}
            done = [row for row in old if (row.N, row.K, row.M) == (n, k, m)]
            todo.append((n, k, m))
            if wanted <= {(row.label, row.mode) for row in done}:
                rows += done
                there.add((n, k, m))
    if there:
        say(f"{len(there)} of {len(todo)} shapes and numbers of rows are there already")
        todo = [place for place in todo if place not in there]
    if workers:
        begin = time.perf_counter()
        compile_ahead([name for name, p in chosen.items() if not p.alone], todo, workers)
        say(f"compiled ahead by {workers} processes: {time.perf_counter() - begin:.0f} s")
    begin, layer = time.perf_counter(), None
    for i, (n, k, m) in enumerate(todo, start=1):
        if layer is None or (layer.rows, layer.columns) != (n, k):
            layer = peers.Layer(n, k, device=device.name)
        rows += run.at(layer, m, modes)
        write_text(out, to_csv(rows))
        spent = time.perf_counter() - begin
        left = f", about {spent / i * (len(todo) - i):.0f} s left" if i < len(todo) else ""
        say(f"[{i}/{len(todo)}] {n} x {k}, M = {m}: {spent:.0f} s so far{left}")
    write_text(out, to_csv(rows))
    return rows


def compile_ahead(labels: Sequence[str], places: Sequence[tuple[int, int, int]], workers: int) -> None:
    """Launch every provider once at every (N, K, M), spread over processes: what they compile stays on disk.

    Failures are silent here: the measurement meets them again and says so.
    """
    by_layer: dict[tuple[int, int], list[int]] = {}
    for n, k, m in places:
        by_layer.setdefault((n, k), []).append(m)
    jobs = [(label, n, k, counts) for (n, k), counts in by_layer.items() for label in labels]
    with ProcessPoolExecutor(min(workers, len(jobs)) or 1, multiprocessing.get_context("spawn")) as pool:
        for job in [pool.submit(_first_launches, *job) for job in jobs]:
            job.exception()


def _first_launches(label: str, n: int, k: int, counts: Sequence[int]) -> None:
    import torch

    from repro import peers
    from repro.kernel_list import OURS

    provider, layer, task = {**peers.PEERS, **OURS}[label], peers.Layer(n, k), None
    for m in counts:
        if provider.takes(m):
            with contextlib.suppress(RuntimeError, ValueError, NotImplementedError, AssertionError):
                task = provider.task(layer, m)
                task.launch(**task.inputs)
                torch.cuda.synchronize()
    del layer, task
    torch.cuda.empty_cache()  # other processes share the device


class _Run:
    """One call of `bench`: who is measured, how, and what stands beside every row."""

    def __init__(
        self,
        device: "Device",
        chosen: Mapping[str, Any],
        copy: float,
        rounds: int,
        joule_seconds: float,
        say: Callable[[str], None],
    ) -> None:
        self.device, self.chosen, self.copy, self.say = device, chosen, copy, say
        self.rounds, self.joule_seconds = rounds, joule_seconds
        self.codes = {name: code(name) for name in chosen}

    def at(self, layer: Any, m: int, modes: Sequence[str]) -> list[Row]:  # noqa: ANN401
        """Rows of everybody on one layer with so many rows of activations, failures and recorded peers among them."""
        from repro import peers, timing

        rows, tasks, unable = [], [], {}
        for name, provider in self.chosen.items():
            if provider.takes(m):
                try:
                    tasks.append(provider.task(layer, m))
                except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
                    unable[name] = error
        for mode in modes:
            failed, where = dict(unable), f"{layer.rows} x {layer.columns}, M = {m}, {mode}"
            device = self.device
            found = timing.measure(tasks, device.backend, mode, self.rounds, device.floor, self.joule_seconds, failed)
            for t in found:
                rows.append(self.row(t, t.facts))
                self.say(
                    f"{where}: {t.name} {t.us:.2f} us, {t.fraction:.2f} of the floor, {t.gb_per_s:.0f} GB/s, "
                    f"error {t.relerr:.1e}" + (f", {t.watts:.0f} W" if t.watts else "")
                )
            rows += _bridged(peers.library_times(found), device.origin)
            for name, error in failed.items():
                p, status = self.chosen[name], _status(error)
                note = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
                place = (p.format, p.name, p.dtype, layer.rows, layer.columns, m, mode, status)
                rows.append(Row(*place, note=note, **device.origin))
                self.say(f"{where}: {name} {status}: {note}")
        del tasks
        self.device.backend.release()
        return rows

    def row(self, t: Any, facts: Mapping[str, Any]) -> Row:  # noqa: ANN401
        """A timing as a row."""
        return Row(
            **facts,
            mode=t.mode,
            us=t.us,
            p20=t.p20,
            p80=t.p80,
            bytes=t.nbytes,
            floor_us=t.floor_us,
            fraction=t.fraction,
            copy_fraction=t.gb_per_s / self.copy,
            relerr=t.relerr,
            rounds=len(t.samples),
            copies=t.copies,
            clock_mhz=t.clock_mhz,
            throttle=t.throttle or "",
            joule=t.joule,
            code=self.codes.get(t.name, ""),
            **self.device.origin,
        )


def _status(error: Exception) -> str:
    import torch

    from repro.timing import Unsound

    if isinstance(error, torch.OutOfMemoryError):
        return "oom"
    return "wrong" if isinstance(error, Unsound) else "unsupported" if isinstance(error, ValueError) else "failed"


def _bridged(here: Mapping[tuple, float], about: dict[str, str]) -> list[Row]:
    """Rows of the recorded peers, carried over by the library's times of this run."""
    from repro import peers

    rows = []
    for provider, kernel, dtype, names in BRIDGED:
        best: dict[tuple, tuple[float, float, Any]] = {}
        for r, ratio, us in peers.bridge(here, recorded_peers(), names):
            place = (r.N, r.K, r.M, r.mode)
            best[place] = min(best.get(place, (us, ratio, r)), (us, ratio, r), key=lambda found: found[0])
        for place, (us, ratio, r) in best.items():
            note = f"{r.peer}, recorded {r.us:.3f} us on {r.date} ({r.device}), times {ratio:.3f}, "
            note += "the library's time here to then"
            facts = {"bytes": r.bytes, "relerr": r.relerr, "note": note}
            rows.append(Row(kernel, provider, dtype, *place, "bridged", us, **facts, **about))
    return rows


@functools.cache
def recorded_peers() -> list[Any]:
    """The recorded peers, read once."""
    from repro import peers

    return peers.recorded()


@dataclass(frozen=True)
class Device:
    """Where `bench` runs: what torch calls it, its timer backend, its floor and ceilings, who is asked, its origin."""

    name: str
    backend: Any
    floor: Callable[[int], Any]
    ceilings: Callable[[], dict[str, Any]]
    providers: dict[str, Any]
    origin: dict[str, str]


def this_gpu() -> Device:
    """This machine's GPU.

    Raises:
        UserError: there is none.
    """
    import torch

    from repro import peers, timing
    from repro.kernel_list import OURS

    if not torch.cuda.is_available():
        raise UserError("bench: this machine has no CUDA device; results/ has what was measured on one")
    backend = timing.Cuda()

    def ceilings() -> dict[str, timing.Timing]:
        layer = peers.Layer(LARGE, LARGE)
        able = [peers.PEERS[name] for name in CEILINGS if not peers.PEERS[name].unavailable("cuda")]
        found = timing.measure([provider.task(layer, LARGE) for provider in able], backend, rounds=9)
        return timing.ceilings(backend) | {t.name: t for t in found}

    return Device("cuda", backend, timing.read_floor, ceilings, {**peers.PEERS, **OURS}, origin())


def origin() -> dict[str, str]:
    """What stands beside a time: this GPU, the commit, the libraries and the date."""
    import torch

    from repro import provenance

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


def code(label: str) -> str:
    """The hash of what decides a provider's time: timer, peers, our kernels with CUDA and configurations."""
    from repro.kernel_list import KERNELS
    from repro.provenance import closure, code_hash

    name = label.rsplit("/", 1)[-1]
    files = closure("repro/timing.py", "repro/peers.py", *([f"kernels/{name}.py"] if name in KERNELS else []))
    texts = [f.read_text(encoding="utf-8") for f in files if f.parent.name == "kernels"]
    sources = sorted((ROOT / "kernels").glob("*.cu"))
    cuda = [f for f in sources if f.with_suffix(".py") in files or any(f.name in text for text in texts)]
    headers = sorted((ROOT / "kernels").glob("*.cuh")) if cuda else []
    configs = {}
    for path in sorted((ROOT / "kernels" / "configs").glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        configs[path.name] = {f.stem: content[f.stem] for f in files if f.stem in content}
    if name == "gemlite":
        configs |= {str(path.relative_to(ROOT)): sha256(path) for path in sorted(RESULTS.glob("*/gemlite.json"))}
    return short_hash(code_hash([*files, *cuda, *headers]) + json.dumps(configs, sort_keys=True))


# ---- accepting


def accept(path: Path, results: Path = RESULTS) -> dict[str, int]:
    """Validate a file of `bench` and merge it into `results/<device>/kernels.csv`; nothing is half-taken.

    Returns:
        Number of rows by file that was written.

    Raises:
        UserError: schema, a row given twice, a missing origin, uncommitted code, a wrong result of ours, or a time
            that the device cannot have.
    """
    from repro.kernel_list import KERNELS

    rows = from_csv(path)
    if not any(row.status == "ok" for row in rows):
        raise UserError(f"{path}: no measured row to accept")
    seen: set[tuple] = set()
    by_file: dict[Path, list[Row]] = {}
    for row in rows:
        where = f"{path}: {row.provider} ({row.kernel}, {row.dtype}) at {row.N} x {row.K}, M = {row.M}, {row.mode}"
        if row.key in seen:
            raise UserError(f"{where}: given twice")
        seen.add(row.key)
        for name in ("device", "commit", "environment", "date"):
            if not getattr(row, name):
                raise UserError(f"{where}: {name} is empty; a number without its origin is not accepted")
        if row.commit == "unknown" or row.commit.endswith("+"):
            raise UserError(f"{where}: measured at commit {row.commit!r}; commit the code, then measure")
        if row.status == "wrong" and row.provider in KERNELS:  # a peer's is a finding
            raise UserError(f"{where}: its result is wrong ({row.note}); mend it or leave it out with --only")
        if row.status in ("ok", "bridged"):
            _check(row, where)
        slug = "".join(c if c.isalnum() else "-" for c in row.device.lower()).strip("-")
        by_file.setdefault(results / slug / "kernels.csv", []).append(row)
    merged = {}
    for file, new in by_file.items():
        keys = {row.key for row in new}
        old = [row for row in (from_csv(file) if file.exists() else []) if row.key not in keys]
        merged[file] = sorted([*old, *new], key=lambda row: row.key)
    for file, content in merged.items():
        write_text(file, to_csv(content))
    return {str(file): len(by_file[file]) for file in by_file}


def _check(row: Row, where: str) -> None:
    """Raise unless a measured row is complete and possible."""
    needed = ["us", "bytes", "mode"] + (["p20", "p80", "relerr", "copies"] if row.status == "ok" else [])
    for name in needed:
        if getattr(row, name) in (None, ""):
            raise UserError(f"{where}: {name} is empty")
    if row.mode not in MODES:
        raise UserError(f"{where}: {unknown('mode', row.mode, MODES)}")
    if row.us <= 0 or (row.status == "ok" and not row.p20 <= row.us <= row.p80):
        raise UserError(f"{where}: {row.us} us is not between its p20 and p80, {row.p20} and {row.p80}")
    if row.status == "ok" and row.mode == "cold" and row.copies < 2:
        raise UserError(f"{where}: cold with {row.copies} copy of the weights")
    bound, why = roofline(row)
    if row.us < bound:
        raise UserError(f"{where}: {row.us} us, less than the {bound:.3g} us that {why} allows; measure again")


def roofline(row: Row) -> tuple[float, str]:
    """The least microseconds that the device's datasheet allows a row, and what sets them; 0 for an unknown device."""
    peaks = PEAKS.get(row.device)
    if not peaks:
        return 0.0, "no datasheet"
    memory = row.bytes / peaks["memory"] * 1e6 if row.mode == "cold" else 0.0
    kind = "fp8" if row.kernel == "fp8" else "int32" if row.kernel in ("int8", "w8a8") else row.dtype
    work = 2 * row.N * row.K * row.M / peaks[kind] * 1e6 if row.N and kind in peaks else 0.0
    if work > memory:
        return work, f"{peaks[kind] / 1e12:.0f} T operations/s"
    return memory, f"{peaks['memory'] / 1e12:.1f} TB/s of memory"


def accepted(results: Path = RESULTS) -> list[Row]:
    """All accepted rows, of all devices."""
    return [row for file in sorted(results.glob("*/kernels.csv")) for row in from_csv(file)]
