"""Regression guard for CI: report kernels that became slower by more than noise.

    python -m repro regress new.json [again.json] --against results/nvidia-h200/benchmark-1.json.xz [more ...]

Files are what `pytest kernels --benchmark-only --benchmark-json=new.json` writes, each from a process of its own, plain
or in xz.
A kernel's absolute time never counts: it is divided by two reference times of its own run, the read floor of its bytes
(for a prefill bf16 products alone) and the library's bf16 matmul (the median over its shapes), and is called slower
only by as much as both agree on.
Where the two references moved apart, the one that moved less counts alone: a library that became slower, beside read
floors as before, hides nothing. Nor does one read floor that moved apart from all others: these count in its place.
The host's time of a call has one reference, `F.linear` on the host in turns with it: what a device does says nothing of
its host, which other processes share.
What is allowed is the threshold, or more where repeats say that a cell is noisier, or that cells of its kind, the
device's or the host's, are. One slow run is a suspicion (exit 3:
measure again); two runs that agree are a regression (exit 1, a sentence with kernel, shape and percent).
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from repro.core.errors import UserError
from repro.core.files import read_text, reading

THRESHOLD = 0.03  # a smaller slowdown of one cell is never called one
HOST_THRESHOLD = 0.1  # nor of a call on the host, whose ratio to `F.linear` differs between processes by so much
SIGMAS = 3.0  # nor one within so many standard errors
APART = 0.015  # of a time: references that moved by more against each other do not count both; 0.009 was seen at most
FINE, REGRESSION, SUSPICION = 0, 1, 3
PLACE = ("kernel", "dtype", "provider", "N", "K", "M", "mode")
LIBRARY = ("bf16", "bf16", "torch.matmul")  # kernel, dtype, provider of the library's reference
RANGE = {2: 1.128, 3: 1.693, 4: 2.059, 5: 2.326, 6: 2.534, 7: 2.704, 8: 2.847}  # of n values, in standard deviations
SHORTEST, LONGEST = 1e-6, 1e12  # microseconds that a kernel can take
MORE = 2.97  # of nine or more
HOST = "host"  # the mode of a call's time on the host


@dataclass(frozen=True)
class TimedKernel:
    """One kernel on one shape in one run: median microseconds, its relative standard error, and its read floor's.

    Attributes:
        on_host: it is a call's time on the host, its floor that of `F.linear`.
    """

    us: float
    error: float
    floor_us: float
    is_library: bool
    judged: bool
    on_host: bool


@dataclass(frozen=True)
class BenchmarkFile:
    """One file of benchmarks; cells by their names in words."""

    path: Path
    device: str
    cells: dict[str, TimedKernel]

    def library_level(self, other: "BenchmarkFile") -> float:
        """log of the library's time here over its time in another run: the median of common shapes.

        Raises:
            UserError: the runs have no time of the library in common.
        """
        common = [name for name, cell in self.cells.items() if cell.is_library and name in other.cells]
        if not common:
            raise UserError(f"{self.path} and {other.path}: no time of {LIBRARY[2]} in common")
        return statistics.median(math.log(self.cells[name].us / other.cells[name].us) for name in common)

    def floor_level(self, other: "BenchmarkFile") -> float:
        """log of the read floor here over that of another run: the median of all common cells of the device."""
        common = [name for name, cell in self.cells.items() if name in other.cells and not cell.on_host]
        return statistics.median(math.log(self.cells[name].floor_us / other.cells[name].floor_us) for name in common)

    def ratios(self, other: "BenchmarkFile") -> dict[str, tuple[float, ...]]:
        """log of each cell's time over its floor and, on the device, over the library's level since another run.

        Raises:
            UserError: as `library_level`.
        """
        level = self.library_level(other)
        logs: dict[str, tuple[float, ...]] = {}
        for name, cell in self.cells.items():
            over_floor = math.log(cell.us / cell.floor_us)
            logs[name] = (over_floor,) if cell.on_host else (over_floor, math.log(cell.us) - level)
        return logs

    def references(self, other: "BenchmarkFile") -> slice:
        """Which of the two ratios count between this run and another: both, or that whose reference moved less."""
        floor, library = self.floor_level(other), self.library_level(other)
        if abs(floor - library) <= APART:
            return slice(0, 2)
        return slice(0, 1) if abs(floor) < abs(library) else slice(1, 2)


@dataclass(frozen=True)
class Change:
    """How much slower a cell is than the baseline (0.1 is 10 %), as far as both references agree, and what is noise."""

    change: float
    allowed: float

    @property
    def slower(self) -> bool:
        """More than noise."""
        return self.change > self.allowed


def _timed_kernels(path: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The information and statistics of every benchmark of a kernel in a file of pytest-benchmark.

    Raises:
        UserError: missing, not to be read, not such a file, or without kernels.
    """
    try:
        with reading(path, "name a file of pytest --benchmark-json"):
            content = json.loads(read_text(path))
        benchmarks = [(dict(entry["extra_info"]), dict(entry["stats"])) for entry in content["benchmarks"]]
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path}: not a file of pytest --benchmark-json") from None
    kernels = []
    for info, stats in benchmarks:
        # Others are benchmarks of something else: packing on the processor, …
        if info.get("floor_us") and all(name in info for name in PLACE):
            kernels.append((info, stats))
    if not kernels:
        raise UserError(f"{path}: no kernel with a read floor in it; run pytest kernels --benchmark-only on a GPU")
    return kernels


def load(path: Path) -> BenchmarkFile:
    """A file of pytest-benchmark as a run.

    Raises:
        UserError: missing, not such a file, without kernels, or without one of the references.
    """
    kernels = _timed_kernels(path)
    cells: dict[str, TimedKernel] = {}
    for info, stats in kernels:
        name = say(info)
        if name in cells:
            raise UserError(f"{path}: {name} is there twice")
        try:
            samples = stats.get("data")
            us = (statistics.median(samples) if samples else stats["median"]) * 1e6
            for verb, time in {"took": us, "has a read floor of": info["floor_us"]}.items():
                if not SHORTEST < time < LONGEST:  # also of NaN and Infinity, which JSON may hold
                    raise UserError(f"{path}: {name} {verb} {time} us; a time is positive and below {LONGEST:.0e} us")
            error = 1.2533 * stats["iqr"] * 1e6 / us / 1.349 / math.sqrt(max(1, stats["rounds"]))
            if not 0 <= error < math.inf:
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{path}: {name} has no times that can be read; measure again") from None
        library = tuple(info[key] for key in PLACE[:3]) == LIBRARY
        on_host = info["mode"] == HOST
        judged = info.get("ours", True) and not library
        cells[name] = TimedKernel(us, error, info["floor_us"], library, judged, on_host)
    devices = {str(info.get("device", "unknown")) for info, _ in kernels}
    if len(devices) > 1:
        raise UserError(f"{path}: measured on {', '.join(sorted(devices))}; one run is one device")
    if not any(cell.is_library for cell in cells.values()):
        raise UserError(f"{path}: no time of {LIBRARY[2]} in {LIBRARY[1]} in it; a run needs that reference")
    return BenchmarkFile(Path(path), devices.pop(), cells)


def say(key: Mapping[str, Any]) -> str:
    """A cell in words, from the values of `PLACE`."""
    return "{provider} ({kernel}, {dtype}) at {N} x {K}, M = {M}, {mode}".format_map(key)


def compare(new: BenchmarkFile, baseline: Sequence[BenchmarkFile], threshold: float = THRESHOLD) -> dict[str, Change]:
    """Every judged cell of a run against the median of the baseline runs that have it, by its name."""
    here = new.ratios(baseline[0])
    then = [run.ratios(baseline[0]) for run in baseline]
    olds = {}
    for name, cell in new.cells.items():
        theirs = [ratios[name] for ratios in then if name in ratios]
        if cell.judged and theirs:
            olds[name] = theirs
    # Rounds say how well a median is known; several baseline runs say how much it moves between runs. A spread of a few
    # runs is itself uncertain, so it goes half and half with what is usual among the cells of its kind.
    spreads = {name: max(map(_spread, zip(*theirs))) for name, theirs in olds.items() if len(theirs) > 1}
    usual = {}
    for on_host in (False, True):
        alike = [spread for name, spread in spreads.items() if new.cells[name].on_host == on_host]
        usual[on_host] = statistics.median(alike) if alike else 0.0
    changes = {}
    counted = new.references(baseline[0])
    lone = _lone_floors(new, baseline)
    for name, theirs in olds.items():
        steps = [mine - statistics.median(old) for mine, old in zip(here[name], zip(*theirs))]
        on_host = new.cells[name].on_host
        steps[0] += lone.get(name, 0.0)
        step = min(steps if on_host else steps[counted])
        rounds = statistics.median(run.cells[name].error for run in baseline if name in run.cells)
        between = math.sqrt((spreads.get(name, usual[on_host]) ** 2 + usual[on_host] ** 2) / 2)
        error = math.hypot(new.cells[name].error, rounds, between)
        least = max(threshold, HOST_THRESHOLD) if on_host else threshold
        changes[name] = Change(math.expm1(step), max(least, SIGMAS * error))
    return changes


def _lone_floors(new: BenchmarkFile, baseline: Sequence[BenchmarkFile]) -> dict[str, float]:
    """log of how much slower a read floor became than all floors did, of the cells that are more than `APART` off."""
    shifts = {}
    for name, cell in new.cells.items():
        olds = [run.cells[name].floor_us for run in baseline if name in run.cells]
        if olds and not cell.on_host:
            shifts[name] = math.log(cell.floor_us / statistics.median(olds))
    level = statistics.median(shifts.values()) if shifts else 0.0
    return {name: shift - level for name, shift in shifts.items() if abs(shift - level) > APART}


def _check_distinct(runs: Sequence[BenchmarkFile]) -> None:
    """Raise where one run is given twice, also as a copy: it would confirm itself, or be compared with itself."""
    for i, run in enumerate(runs):
        for other in runs[:i]:
            if run.cells == other.cells:
                same = (
                    f"{run.path} twice" if run.path == other.path else f"{other.path} and {run.path}, which are equal"
                )
                raise UserError(f"regress: {same}; every file has to be a run of its own, measure again")


def _spread(values: Sequence[float]) -> float:
    """A standard deviation from the range of a few values."""
    return (max(values) - min(values)) / RANGE.get(len(values), MORE)


def _measured_once(
    new: Sequence[Path], first: Mapping[str, Change], second: Mapping[str, Change]
) -> list[tuple[str, Path, Path, float]]:
    """Cells that are slow in one of two runs and absent from the other: name, both files in this order, slowdown."""
    names = []
    for slow, lacking, here, there in ((new[0], new[1], first, second), (new[1], new[0], second, first)):
        for name in sorted(here):
            if here[name].slower and name not in there:
                names.append((name, slow, lacking, here[name].change))
    return names


def regress(
    new: Sequence[Path], against: Sequence[Path], threshold: float = THRESHOLD, partial: bool = False
) -> tuple[int, list[str]]:
    """The verdict on one or two new runs.

    Args:
        new: the run, and the second one that confirms a suspicion.
        against: the runs of the baseline; three tell noise from change better than one.
        threshold: slowdown of a cell that is never called a regression.
        partial: allow new runs without some of the kernels of the baseline.

    Returns:
        0, 1 or 3 and sentences to print.

    Raises:
        UserError: a file that cannot be used or is given twice, other devices, nothing in common, or a cell that is
            slow in one of two runs and was not measured in the other.
    """
    if len(new) > 2:
        raise UserError(f"regress: {len(new)} new runs; give one, and a second one to confirm a suspicion")
    if not 0 < threshold < 1:
        raise UserError(f"regress: a threshold of {threshold}; give a fraction between 0 and 1, as 0.03")
    runs, baseline = [load(path) for path in new], [load(path) for path in against]
    _check_distinct([*runs, *baseline])
    devices = {run.device for run in (*runs, *baseline)}
    if len(devices) > 1:
        raise UserError(f"regress: runs of {' and '.join(sorted(devices))}; ratios compare on one device only")
    where = " and ".join(str(path) for path in against)
    first, *again = [compare(run, baseline, threshold) for run in runs]
    if not first:
        raise UserError(f"{new[0]}: no kernel in common with {where}")
    lines = []
    if not partial:
        judged = set()
        for run in baseline:
            judged |= {name for name, cell in run.cells.items() if cell.judged}
        missing = judged - set(runs[0].cells)
        lines += [f"regression: {name} was not measured in {new[0]}, as it was in {where}" for name in sorted(missing)]
    suspects = {name: one for name, one in first.items() if one.slower}
    for name, one in suspects.items():
        two = again[0].get(name) if again else None
        if two and two.slower:
            lines.append(
                f"regression: {name} is {100 * min(one.change, two.change):.1f} % slower than in {where}: "
                f"{100 * one.change:.1f} % and {100 * two.change:.1f} % in two runs, "
                f"where {100 * max(one.allowed, two.allowed):.1f} % is noise"
            )
    unconfirmed = _measured_once(new, first, again[0]) if again else []
    if lines:
        lines += [f"not confirmed: {name} is slow in {slow} and was not measured in {lacking}"
                  for name, slow, lacking, _ in unconfirmed]  # fmt: skip
        return REGRESSION, lines
    if unconfirmed:
        name, slow, lacking, change = unconfirmed[0]
        raise UserError(
            f"{lacking}: {name} was not measured in it, and is {100 * change:.1f} % slower in {slow}; measure it again"
        )
    if suspects and not again:
        worst = sorted(suspects.items(), key=lambda item: item[1].allowed - item[1].change)
        return SUSPICION, [
            f"suspicion: {name} is {100 * one.change:.1f} % slower than in {where}, where {100 * one.allowed:.1f} % "
            f"is noise; measure again and give both files"
            for name, one in worst
        ]
    fastest, slowest = (pick(first, key=lambda name: first[name].change) for pick in (min, max))
    return FINE, [
        f"no regression: {len(first)} cells against {where}, from {100 * first[fastest].change:+.1f} % "
        f"({fastest}) to {100 * first[slowest].change:+.1f} % ({slowest})"
    ]
