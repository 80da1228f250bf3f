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
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from repro.errors import UserError, unknown
from repro.files import write_text
from repro.record import RESULTS

COUNTS = (1, 4, 8, 16, 64, 256)
STATUSES = ("ok", "bridged", "wrong", "oom", "unsupported", "failed")
MODES = ("cold", "warm")
BRIDGED = {  # recorded peers that are carried over: what they compute
    "awq_gemv_g128": ("w4-g128", "fp16"),
    "marlin_g128": ("w4-g128", "fp16"),
    "gl_w4g128": ("w4-g128", "fp16"),
    "gl_w2g64_kc": ("w2-g64", "fp16"),
    "inductor_bf16": ("bf16", "bf16"),
}

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
    joule_seconds: float = 0.0,
    say: Callable[[str], None] = print,
    device: "Device | None" = None,
) -> list[Row]:
    """Measure every provider on every shape and write `out` as it goes.

    Args:
        out: CSV file.
        shapes: (N, K) of layers; those of the recorded peers when empty.
        counts: numbers of activation rows M.
        modes: cold, warm.
        only: words; a provider is measured if its label has one of them (the library always is). Empty: all.
        rounds: timed rounds of each.
        joule_seconds: how long each runs once more for its energy; 0 leaves energy out.
        say: takes a line a measurement.
        device: where; this machine's GPU when not given.

    Raises:
        UserError: no CUDA device, or a word that names no provider.
    """
    from repro import peers, timing

    device = device or this_gpu()
    for word in only:
        if not any(word in label for label in device.providers):
            raise unknown("provider", word, device.providers)
    library, backend, about = f"bf16/bf16/{peers.LIBRARY}", device.backend, device.origin
    chosen = {n: p for n, p in device.providers.items() if not only or n == library or any(w in n for w in only)}
    rows: list[Row] = []
    for name, provider in list(chosen.items()):
        if reason := provider.unavailable(device.name):
            del chosen[name]
            rows.append(Row(provider.format, provider.name, provider.dtype, status="unsupported", note=reason, **about))
            say(f"{name}: {reason}")
    best = device.ceilings()
    copy = best["copy"].gb_per_s
    for t in best.values():
        rows.append(_row(t, about, copy, {"kernel": t.name, "provider": t.name, "dtype": "uint8"}))
        say(f"{t.name}: {t.gb_per_s:.0f} GB/s")
    codes = {name: _code(p.name) for name, p in chosen.items()}
    recorded = peers.recorded()
    for n, k in shapes or peers.shapes():
        layer = peers.Layer(n, k, device=device.name)
        for m in counts:
            tasks, failures = [], {}
            for name, provider in chosen.items():
                if provider.least <= m <= provider.most:
                    try:
                        tasks.append(provider.task(layer, m))
                    except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
                        failures[name] = error
            for mode in modes:
                found = timing.measure(tasks, backend, mode, rounds, device.floor, joule_seconds, failures)
                for t in found:
                    rows.append(_row(t, about | {"code": codes[t.name]}, copy, t.facts))
                    say(
                        f"{n} x {k}, M = {m}, {mode}: {t.name} {t.us:.2f} us, {t.fraction:.2f} of the floor, "
                        f"{t.gb_per_s:.0f} GB/s, error {t.relerr:.1e}"
                    )
                here = peers.library_times(found)
                for r, ratio, us in peers.bridge(here, recorded, BRIDGED):
                    rows.append(_bridged(r, ratio, us, about))
                for name, error in failures.items():
                    p = chosen[name]
                    status = _status(error)
                    note = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
                    rows.append(Row(p.format, p.name, p.dtype, n, k, m, mode, status, note=note, **about))
                    say(f"{n} x {k}, M = {m}, {mode}: {name} {status}: {note}")
            del tasks
            backend.release()
        write_text(out, to_csv(rows))
    write_text(out, to_csv(rows))
    return rows


def _status(error: Exception) -> str:
    import torch

    from repro.timing import Unsound

    if isinstance(error, torch.OutOfMemoryError):
        return "oom"
    return "wrong" if isinstance(error, Unsound) else "unsupported" if isinstance(error, ValueError) else "failed"


def _row(t: Any, about: dict[str, str], copy: float, facts: Any) -> Row:  # noqa: ANN401
    return Row(
        **facts,
        mode=t.mode,
        us=t.us,
        p20=t.p20,
        p80=t.p80,
        bytes=t.nbytes,
        floor_us=t.floor_us,
        fraction=t.fraction,
        copy_fraction=t.gb_per_s / copy,
        relerr=t.relerr,
        rounds=len(t.samples),
        copies=t.copies,
        clock_mhz=t.clock_mhz,
        throttle=t.throttle or "",
        joule=t.joule,
        **about,
    )


def _bridged(r: Any, ratio: float, us: float, about: dict[str, str]) -> Row:  # noqa: ANN401
    kernel, dtype = BRIDGED[r.peer]
    note = f"recorded {r.us:.3f} us on {r.date} ({r.device}), times {ratio:.3f}, the library's time here to then"
    place = (kernel, r.peer, dtype, r.N, r.K, r.M, r.mode)
    return Row(*place, "bridged", us, bytes=r.bytes, relerr=r.relerr, note=note, **about)


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

    from repro import peers, provenance, timing
    from repro.kernel_list import OURS

    if not torch.cuda.is_available():
        raise UserError("bench: this machine has no CUDA device; results/ has what was measured on one")
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    for name in ("triton", "gemlite"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    origin = {
        "device": torch.cuda.get_device_name(),
        "commit": provenance.commit(),
        "environment": " ".join(f"{k} {v}" for k, v in versions.items()),
        "date": os.environ.get("REPRO_DATE") or datetime.date.today().isoformat(),
    }
    backend = timing.Cuda()
    ceilings = functools.partial(timing.ceilings, backend)
    return Device("cuda", backend, timing.read_floor, ceilings, {**peers.PEERS, **OURS}, origin)


def _code(provider: str) -> str:
    """The hash of the files that decide a time: timer, peers, and our kernel with what it imports and its CUDA."""
    from repro.kernel_list import KERNELS
    from repro.provenance import closure, code_hash

    ours = [f"kernels/{provider}.py"] if provider in KERNELS else []
    files = closure("repro/timing.py", "repro/peers.py", *ours)
    return code_hash([*files, *(f.with_suffix(".cu") for f in files if f.with_suffix(".cu").is_file())])


# ---- accepting


def accept(path: Path, results: Path = RESULTS) -> dict[str, int]:
    """Validate a file of `bench` and merge it into `results/<device>/kernels.csv`; nothing is half-taken.

    Returns:
        Number of rows by file that was written.

    Raises:
        UserError: schema, a row given twice, a missing origin, uncommitted code, a wrong result, or a time that the
            device cannot have.
    """
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
        if row.status == "wrong":
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


# ---- figures


def draw(out: Path, results: Path = RESULTS) -> list[Path]:
    """Figures of the accepted times of every device: a roofline, and peers at 1 and 16 activation rows.

    Raises:
        UserError: nothing is accepted.
    """
    from repro import plot

    rows = [row for row in accepted(results) if row.us and row.mode == "cold" and row.M]
    if not rows:
        raise UserError(f"{results}: no accepted kernel times; run bench on a GPU, then accept its file")
    drawn = []
    for device in sorted({row.device for row in rows}):
        mine = [row for row in rows if row.device == device]
        slug = "-".join(device.lower().split())
        for count in (1, 16):
            if ratios := speedups(mine, count):
                drawn.append(Path(out) / f"{slug}-peers-m{count}.svg")
                plot.bars(ratios, f"times as fast as bf16, M = {count}", drawn[-1], line=1.0)
        if device in PEAKS:
            series: dict[str, list[tuple[float, float]]] = {}
            for row in mine:
                if row.status == "ok" and row.kernel in ("bf16", "w4-g128", "w8a8"):
                    work = 2 * row.N * row.K * row.M
                    points = series.setdefault(f"{row.provider} ({row.kernel}, {row.dtype})", [])
                    points.append((work / row.bytes, work / row.us * 1e6))
            drawn.append(Path(out) / f"{slug}-roofline.svg")
            plot.roofline(series, PEAKS[device]["memory"], PEAKS[device]["bf16"], drawn[-1])
    return drawn


def speedups(rows: Sequence[Row], count: int) -> dict[str, dict[str, float]]:
    """Provider to shape to how many times as fast as the best bf16 it is; 4 bits in groups of 128 only.

    Recorded times that were carried over say so in their name.
    """
    best: dict[tuple[int | None, int | None], float] = {}
    for row in rows:
        if row.kernel == "bf16" and row.M == count and row.status == "ok":
            best[row.N, row.K] = min(row.us, best.get((row.N, row.K), math.inf))
    found: dict[str, dict[str, float]] = {}
    for row in sorted(rows, key=lambda row: (row.N * row.K, row.N)):
        if row.kernel == "w4-g128" and row.M == count and row.status in ("ok", "bridged") and (row.N, row.K) in best:
            name = f"{row.provider} (recorded)" if row.status == "bridged" else f"{row.provider} {row.dtype}"
            found.setdefault(name, {})[f"{row.N} x {row.K}"] = best[row.N, row.K] / row.us
    return found
