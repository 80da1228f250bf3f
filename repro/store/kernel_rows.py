"""Kernel times as CSV: one tidy row per kernel or peer, shape and mode, with its provenance.

`bench` writes such files; `accept` merges one into `results/<device>/kernels.csv.xz` as it does every result, when
`check_new` finds a provenance in each row and nothing faster than the device's roofline, and `check_floors` no read
floor that contradicts those of accepted rows.
"""

import bisect
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from repro.core.errors import UserError, unknown
from repro.core.files import read_text
from repro.store import provenance, row_list, stored_row
from repro.store.measurement import RESULTS
from repro.store.stored_row import ENDING, StoredRow

KERNELS = {  # this project's own, by module of kernels/, with their versions: raise one when its times may change
    "read_floor": 2,  # a plain CUDA reader, the nearest recorded size
    "wna16_gemv": 1,
    "w4a16_gemm": 1,
    "dequantize": 1,
    "linear": 1,
    "quantize_activation": 1,
    "w8a8_gemv": 1,
    "w8a8_gemm": 1,
    "w8a8": 2,  # two launches
    "rms_norm": 1,
    "rope_append": 1,
    "attention": 1,
    "silu_product": 1,
    "sample": 2,  # one launch
    "argmax": 1,
    "pple": 2,
    "active_inputs": 1,
    "rms_norm_active": 1,
    "silu_product_active": 1,
    "q4_k_gemv": 3,
    "q4_k_naive_sparse": 1,
    "zigzag_gemv": 3,
    "zigzag_sparse": 1,
    "zigzag_masked": 1,
    "quantize_2bit": 1,
    "w2a2_gemv": 3,
    "w2a2_ready": 3,
    "dense_gemv": 1,
    "compensated_gemv": 1,
}
USES = {  # kernels that others launch, and whose versions decide the times of these, too
    "linear": ("wna16_gemv", "w4a16_gemm", "dequantize"),
    "w8a8": ("quantize_activation", "w8a8_gemv", "w8a8_gemm"),
    "zigzag_sparse": ("zigzag_gemv",),
    "zigzag_masked": ("zigzag_gemv",),
    "w2a2_ready": ("w2a2_gemv",),
    "compensated_gemv": ("wna16_gemv",),
}
TIMER = 2  # version of how everything is timed (timing.py); 2: a floor is the best of a few readers
PEERS = 1  # version of how peers are called (peers.py), launch configurations (gemlite.json) included
BUILT = Path("build") / "kernels.csv"  # where `bench` writes by default
STORED = f"kernels{ENDING}"  # accepted ones, in the folder of their device
KERNEL_STATUSES = ("ok", "rescaled", "wrong", "oom", "unsupported", "failed")
WITH_TIME = ("ok", "rescaled")  # statuses that come with a time
MODES = ("cold", "warm")

LARGE = 8192  # rows, columns and activation rows of the product that measures a ceiling
FLOORS_APART = 1.2  # by which floors of one device differ: 1.09 at most in 5,499 rows of an H100 and an H200
FLOOR_NOISE = 1.02  # by which a median may be below the read floor that was timed beside it


def _peaks(memory: float, halves: float, bytes_: float) -> dict[str, float]:
    """Bytes a second, and operations a second on 16-bit and on 8-bit numbers."""
    return {"memory": memory, "bf16": halves, "fp16": halves, "int32": bytes_, "fp8": bytes_}


# Datasheet peaks: bytes a second of memory, dense operations a second. No measurement can beat them.
PEAKS = {
    "NVIDIA B200": _peaks(8e12, 2250e12, 4500e12),
    "NVIDIA H200": _peaks(4.8e12, 989.5e12, 1979e12),
    "NVIDIA H100 80GB HBM3": _peaks(3.35e12, 989.5e12, 1979e12),
    "NVIDIA H100 NVL": _peaks(3.94e12, 835.5e12, 1671e12),
    "NVIDIA H100 PCIe": _peaks(2.04e12, 756e12, 1513e12),
    "NVIDIA A100-SXM4-80GB": _peaks(2.04e12, 312e12, 624e12),
}
WORST = 0.01  # relative error of an output whose time counts: twice the largest that a peer's 4-bit product has
WIDTHS = {"bf16": 16, "fp16": 16, "int8": 8, "fp8": 8}  # bits of a weight; of other formats their name says them
ALIKE = 0.005  # relative difference of a share of the floor from floor and time, which are written with 5 digits
# A device that is not listed is judged by what the same file measured of it. Copies and reads of 1 GiB reach about 0.95
# of what memory does; a product of 8192^3 0.8 of what the tensor cores do, and those do twice as much on 8 bits.
ABOVE_READ = 1.1
ABOVE_PRODUCT = 1.25


@dataclass(frozen=True)
class KernelRow(StoredRow):
    """One kernel or peer on one shape. `us`, `p20`, `p80`, `floor_us` are microseconds a launch.

    `bytes` must be read from memory, `floor_us` is what reading them takes on this device (same process, interleaved),
    `fraction` their ratio; `copy_fraction` is bytes over time over the device's own copy bandwidth; `relerr` the error
    against float32; `joule` a launch; `host_us` what the host takes for a call, checks and launches, without waiting
    for the device. `machine` is the digest of the machine code that ran (a library: `libraries`), `versions` are those
    of the timer and of the kernel or the peers; empty where none were kept yet.
    Status `rescaled` is a time of another run, times the library's time here over then.
    """

    WHAT: ClassVar[str] = "a file of python -m repro bench"
    MADE_BY: ClassVar[str] = WHAT
    STATUSES: ClassVar[tuple[str, ...]] = KERNEL_STATUSES
    MEASURED: ClassVar[tuple[str, ...]] = ("ok",)
    DIGITS: ClassVar[int] = 5

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
    host_us: float | None = None
    device: str = ""
    commit: str = ""
    versions: str = ""
    machine: str = ""
    environment: str = ""
    date: str = ""
    note: str = ""
    digest: str = ""
    built: bool = field(default=False, compare=False)  # whether it was read from `BUILT`; no column

    @property
    def label(self) -> str:
        """The name of the provider among all of a run."""
        return f"{self.kernel}/{self.dtype}/{self.provider}"

    @property
    def origin(self) -> dict[str, str]:
        """Device, commit, environment and date of the measurement."""
        return {name: getattr(self, name) for name in ("device", "commit", "environment", "date")}

    @property
    def table(self) -> str:
        """All kernel times of a device are in one file."""
        return "kernels"

    @property
    def key(self) -> tuple:
        """The key of the row in its file."""
        return (self.kernel, self.provider, self.dtype, self.N or 0, self.K or 0, self.M or 0, self.mode)

    @property
    def where(self) -> str:
        """The row in a message."""
        return f"{self.provider} ({self.kernel}, {self.dtype}) at {self.N} x {self.K}, M = {self.M}, {self.mode}"


COLUMNS = stored_row.columns(KernelRow)


def to_csv(rows: Iterable[KernelRow]) -> str:
    """Rows as CSV text."""
    return stored_row.to_csv(rows, KernelRow)


def is_kernel_rows(path: Path) -> bool:
    """Whether a file has the columns of kernel times."""
    try:
        return read_text(path).startswith(",".join(COLUMNS) + "\n")
    except (OSError, UserError):
        return False


def from_csv(path: Path) -> list[KernelRow]:
    """Read rows, checked; raises what `stored_row.from_csv` does."""
    return stored_row.from_csv(path, KernelRow)


# ---- what can be accepted


def check_new(rows: Sequence[KernelRow]) -> None:
    """Raise unless all rows of a file of `bench` can be accepted.

    Raises:
        UserError: a missing origin, uncommitted code, a failure or wrong result of ours, a time that the device cannot
            have, or a peer that is rescaled from another device.
    """
    for row in rows:
        _check_origin(row)
        if broken_of_ours(row):
            problem = "its result is wrong" if row.status == "wrong" else "it failed"
            how = "fix it, measure it again with --resume, or leave it out with --only"
            raise UserError(f"{row.where}: {problem} ({row.note}); {how}")
        if row.status in WITH_TIME:
            _check(row, row.where, *peaks_of(row.device, rows))


def check_floors(rows: Iterable[KernelRow], stored: Iterable[KernelRow]) -> None:
    """Raise where a row's read floor is below what the device took for as many bytes, or fewer, in accepted rows.

    All times of a file that were divided by one number would agree with each other; small sizes, which take the time of
    a launch, lie far from any peak.

    Raises:
        UserError: a read floor that is more than `FLOORS_APART` below an accepted one.
    """
    known: dict[tuple[str, str], list[KernelRow]] = {}
    for row in stored:
        if row.floor_us and row.bytes:
            known.setdefault((row.device, row.mode), []).append(row)
    highest: dict[tuple[str, str], tuple[list[int], list[KernelRow]]] = {}  # up to so many bytes: the longest floor
    for key, some in known.items():
        some.sort(key=lambda row: row.bytes)
        longest = list(itertools.accumulate(some, lambda a, b: b if b.floor_us > a.floor_us else a))
        highest[key] = [row.bytes for row in some], longest
    for row in rows:
        if row.status != "ok" or not row.floor_us or (row.device, row.mode) not in highest:
            continue
        sizes, longest = highest[row.device, row.mode]
        fewer = bisect.bisect_right(sizes, row.bytes) - 1
        if fewer >= 0 and row.floor_us * FLOORS_APART < longest[fewer].floor_us:
            other = longest[fewer]
            raise UserError(
                f"{row.where}: floor_us is {row.floor_us} for {row.bytes} bytes, but reading {other.bytes} took "
                f"{other.floor_us} us on {row.device} ({other.date}); measure again"
            )


def _check_origin(row: KernelRow) -> None:
    """Raise unless a row names its device, environment, date, and a commit of this project."""
    for name, value in row.origin.items():
        if not value:
            raise UserError(f"{row.where}: {name} is empty; a number without its origin is not accepted")
    try:
        provenance.check_commit(row.commit)
    except UserError as error:
        raise UserError(f"{row.where}: {error}") from None
    if not re.fullmatch(r"\w[\w ().+-]*", row.device):  # its name becomes that of a folder
        raise UserError(f"{row.where}: device is {row.device!r:.60}, which is not a name of a GPU")


def broken_of_ours(row: KernelRow) -> bool:
    """Whether a kernel of this project failed or was wrong; such a row is not accepted, a peer's is."""
    return row.status in ("wrong", "failed") and row.provider in KERNELS


def _check(row: KernelRow, where: str, peaks: Mapping[str, float], said: str) -> None:
    """Raise unless a measured row is complete and its time is possible.

    Args:
        where: the row, for messages.
        peaks: of its device.
        said: where these come from, for messages (`peaks_of`).
    """
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
    if row.status == "rescaled":
        recorded_on = re.search(r"\(([^()]*)\), times", row.note)
        if recorded_on is None or recorded_on[1] != row.device:
            whose = recorded_on[1] if recorded_on else "a device that its note does not name"
            why = f"rescaled from a time of {whose}, which says nothing of {row.device}"
            raise UserError(f"{where}: {why}; leave it out")
    bound, why = roofline(row, peaks)
    if row.us < bound:
        raise UserError(f"{where}: {row.us} us, less than the {bound:.3g} us that {why}{said} allows; measure again")
    _check_sizes(row, where)
    if row.status == "ok" and row.mode == "cold" and row.floor_us and row.us * FLOOR_NOISE < row.floor_us:
        raise UserError(f"{where}: {row.us} us, less than the {row.floor_us} us of reading its bytes; measure again")


def _check_sizes(row: KernelRow, where: str) -> None:
    """Raise unless a measured row's error, bytes and share of the floor are such as a launch can have."""
    if row.relerr is not None and not 0 <= row.relerr <= WORST:
        raise UserError(f"{where}: relerr is {row.relerr}; an output that is off by more than {WORST} has no time")
    for name in ("N", "K", "M", "rounds", "copies"):
        if getattr(row, name) is not None and getattr(row, name) < 1:
            raise UserError(f"{where}: {name} is {getattr(row, name)}; it must be 1 or more")
    least = 1.0
    if row.N and row.K:
        least = row.N * row.K * _width(row.kernel) / 8
    if row.bytes < least:
        raise UserError(f"{where}: bytes is {row.bytes}; its weights alone are {least:.0f}")
    if (row.floor_us is None) != (row.fraction is None):  # the ceilings have neither
        raise UserError(f"{where}: floor_us is {row.floor_us} and fraction {row.fraction}; a row has both or neither")
    if row.floor_us is not None and row.floor_us <= 0:
        raise UserError(f"{where}: floor_us is {row.floor_us}; it is the time that reading its bytes takes")
    if row.fraction is not None and not math.isclose(row.fraction, row.floor_us / row.us, rel_tol=ALIKE):
        raise UserError(f"{where}: fraction is {row.fraction}, but floor_us over us is {row.floor_us / row.us:.5g}")


def _width(kernel: str) -> float:
    """Bits of a weight in a format, such as 4 of `w4-g128`; 0 if the name does not say."""
    match = re.match(r"w(\d+)", kernel)
    return int(match[1]) if match else WIDTHS.get(kernel, 0)


def peaks_of(device: str, rows: Iterable[KernelRow]) -> tuple[Mapping[str, float], str]:
    """The peaks of a device, as in `PEAKS`, and words for where they come from, empty for a datasheet.

    Raises:
        UserError: neither a datasheet nor ceilings in the same file, or ceilings above every datasheet's.
    """
    if device in PEAKS:
        return PEAKS[device], ""
    read = product = 0.0
    for row in rows:
        if row.device != device or not row.us or row.status != "ok":
            continue
        if row.kernel in ("read_floor", "copy"):
            read = max(read, row.bytes / row.us * 1e6)
        elif (row.kernel, row.N, row.K, row.M) == ("bf16", LARGE, LARGE, LARGE):
            product = max(product, 2 * LARGE**3 / row.us * 1e6)
    if not (read and product):
        problem = f"{device} has no listed peaks, and the file lacks its read rate or its bf16 product of {LARGE}^3"
        raise UserError(f"{problem}; python -m repro bench measures both first")
    for kind, reached, unit in (("memory", read, "TB/s"), ("bf16", product, "T operations/s")):
        fastest = max(peaks[kind] for peaks in PEAKS.values())
        if reached > fastest:
            ceiling = f"a {kind} ceiling of {reached / 1e12:.4g} {unit}"
            most = f"above the {fastest / 1e12:.4g} of any listed GPU"
            raise UserError(f"{device} has {ceiling}, {most}; measure again, or list its peaks in kernel_rows.py")
    halves = ABOVE_PRODUCT * product
    return _peaks(ABOVE_READ * read, halves, 2 * halves), ", by the ceilings of this file,"


def roofline(row: KernelRow, peaks: Mapping[str, float]) -> tuple[float, str]:
    """The least microseconds that a device's peaks allow a row, and what sets them."""
    memory = row.bytes / peaks["memory"] * 1e6 if row.mode == "cold" else 0.0
    kind = row.dtype
    if row.kernel == "fp8":
        kind = "fp8"
    elif row.kernel in ("int8", "w8a8"):
        kind = "int32"
    product = 2 * row.N * row.K * row.M if row.N and row.K else 0  # a choice of tokens has no K
    work = product / peaks[kind] * 1e6 if kind in peaks else 0.0
    if work > memory:
        return work, f"{peaks[kind] / 1e12:.0f} T operations/s"
    return memory, f"{peaks['memory'] / 1e12:.1f} TB/s of memory"


def files() -> list[Path]:
    """The files of kernel times: accepted ones, listed files that are missing included, then those measured here."""
    accepted = [folder / STORED for folder in sorted(RESULTS.glob("*/"))]
    return [*filter(row_list.is_stored, accepted), *([BUILT] if BUILT.is_file() else [])]


Stamps = tuple[tuple[Path, int], ...]


def stamps() -> Stamps:
    """The files with their modification times: what is read from them is read once per version."""
    return tuple((path, path.stat().st_mtime_ns if path.is_file() else 0) for path in files())


def _read(path: Path) -> list[KernelRow]:
    """The rows of one of `files`: those built here as they are, accepted ones checked."""
    return from_csv(path) if path == BUILT else row_list.read(path, KernelRow)


@cache
def shown_device(stamps: Stamps) -> str:
    """The device whose times are shown unless one is named: that of `BUILT`, else the H200 of the stored results."""
    if any(path == BUILT for path, _ in stamps):
        for row in from_csv(BUILT):
            if row.us:
                return row.device
    return "NVIDIA H200"


@cache
def timed(stamps: Stamps) -> dict[tuple[str, str, int, str], list[KernelRow]]:
    """Rows with a time by device, layer (`4096x14336`; `0x0` of a ceiling), tokens and mode; those built here win."""
    rows: dict[tuple[Any, ...], KernelRow] = {}
    for path, _ in stamps:
        rows |= {(r.device, r.key): replace(r, built=path == BUILT) for r in _read(path) if r.us}
    by_shape: dict[tuple[str, str, int, str], list[KernelRow]] = {}
    for row in rows.values():
        by_shape.setdefault((row.device, f"{row.N or 0}x{row.K or 0}", row.M or 0, row.mode), []).append(row)
    return by_shape


def versions(label: str) -> str:
    """The versions that decide a provider's time: the timer's, and the peers' or our kernel's with those it uses."""
    name = label.rsplit("/", 1)[-1]
    version_of = {"timer": TIMER}
    if name in KERNELS:
        version_of |= {kernel: KERNELS[kernel] for kernel in (name, *USES.get(name, ()))}
    else:
        version_of["peers"] = PEERS
    return " ".join(f"{word}={version}" for word, version in sorted(version_of.items()))
