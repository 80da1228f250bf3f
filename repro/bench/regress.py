"""Regression guard for CI: is a kernel slower than it was, by more than noise?

    python -m repro regress new.json [again.json] --against results/nvidia-h200/benchmark.json [more.json ...]

Files are what `pytest kernels --benchmark-only --benchmark-json=new.json` writes, each from a process of its own.
Absolute times never count: a kernel's time is divided by two reference times of its own run, the read floor of its
bytes and the library's bf16 matmul (the median over its shapes), and is called slower only by as much as both agree on.
What is allowed is the threshold, or more where repeats say that a cell is noisier. One slow run is a suspicion (exit 3:
measure again); two runs that agree are a regression (exit 1, a sentence with kernel, shape and percent).
"""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from repro.errors import UserError

THRESHOLD = 0.03  # a smaller slowdown of one cell is never called one
SIGMAS = 3.0  # nor one within so many standard errors
FINE, REGRESSION, SUSPICION = 0, 1, 3
PLACE = ("kernel", "dtype", "provider", "N", "K", "M", "mode")
LIBRARY = ("bf16", "bf16", "torch.matmul")  # kernel, dtype, provider of the library's reference

Key = tuple  # the values of PLACE


@dataclass(frozen=True)
class Cell:
    """One kernel on one shape in one run: median microseconds, its relative standard error, and its read floor's."""

    us: float
    error: float
    floor_us: float
    judged: bool


@dataclass(frozen=True)
class Run:
    """One file of benchmarks."""

    path: Path
    device: str
    cells: dict[Key, Cell]

    def library_level(self, other: "Run") -> float:
        """log of how slow the library is here, over how slow it is in another run: the median of the common shapes."""
        steps = [
            math.log(cell.us / other.cells[key].us)
            for key, cell in self.cells.items()
            if key[:3] == LIBRARY and key in other.cells
        ]
        if not steps:
            raise UserError(f"{self.path} and {other.path}: no time of {LIBRARY[2]} in common")
        return statistics.median(steps)


@dataclass(frozen=True)
class Change:
    """How much slower a cell is than the baseline (0.1 is 10 %), as far as both references agree, and what is noise."""

    key: Key
    change: float
    allowed: float

    @property
    def slower(self) -> bool:
        """More than noise."""
        return self.change > self.allowed


def load(path: Path) -> Run:
    """A file of pytest-benchmark as a run.

    Raises:
        UserError: missing, not such a file, without kernels, or without one of the references.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        benchmarks = [(dict(one["extra_info"]), dict(one["stats"])) for one in content["benchmarks"]]
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path}: not a file of pytest --benchmark-json") from None
    cells, devices = {}, set()
    for info, stats in benchmarks:
        if any(name not in info for name in PLACE) or not info.get("floor_us"):
            continue  # a benchmark of something else: packing on the processor, …
        key = tuple(info[name] for name in PLACE)
        if key in cells:
            raise UserError(f"{path}: {say(key)} is there twice")
        try:
            samples = stats.get("data")
            us = (statistics.median(samples) if samples else stats["median"]) * 1e6
            if not (math.isfinite(us) and us > 0 and info["floor_us"] > 0):
                raise UserError(f"{path}: {say(key)} took {us} us; a time is positive")
            error = 1.2533 * stats["iqr"] * 1e6 / us / 1.349 / math.sqrt(max(1, stats["rounds"]))
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{path}: {say(key)} has no times that can be read; measure again") from None
        cells[key] = Cell(us, error, info["floor_us"], info.get("ours", True) and key[:3] != LIBRARY)
        devices.add(info.get("device", "unknown"))
    if not cells:
        raise UserError(f"{path}: no kernel with a read floor in it; run pytest kernels --benchmark-only on a GPU")
    if len(devices) > 1:
        raise UserError(f"{path}: measured on {', '.join(sorted(devices))}; one run is one device")
    if not any(key[:3] == LIBRARY for key in cells):
        raise UserError(f"{path}: no time of {LIBRARY[2]} in {LIBRARY[1]} in it; a run needs that reference")
    return Run(Path(path), devices.pop(), cells)


def say(key: Key) -> str:
    """A cell in words."""
    place = dict(zip(PLACE, key))
    shape = f"{place['N']} x {place['K']}, M = {place['M']}, {place['mode']}"
    return f"{place['provider']} ({place['kernel']}, {place['dtype']}) at {shape}"


def _ratios(run: Run, key: Key, level: float) -> tuple[float, float]:
    """log of a cell's time over its read floor, and over the library's `level` in that run."""
    cell = run.cells[key]
    return math.log(cell.us / cell.floor_us), math.log(cell.us) - level


def compare(new: Run, baseline: Sequence[Run], threshold: float = THRESHOLD) -> list[Change]:
    """Every judged cell of a run against the median of the baseline runs that have it."""
    levels = {id(run): run.library_level(baseline[0]) for run in (new, *baseline)}
    olds = {
        key: [_ratios(run, key, levels[id(run)]) for run in baseline if key in run.cells]
        for key, cell in new.cells.items()
        if cell.judged and any(key in run.cells for run in baseline)
    }
    # Rounds say how well a median is known; several baseline runs say how much it moves between runs. A spread of a few
    # runs is itself uncertain, so it goes half and half with what is usual among the cells.
    spreads = {key: max(map(_spread, zip(*theirs))) for key, theirs in olds.items() if len(theirs) > 1}
    usual = statistics.median(spreads.values()) if spreads else 0.0
    changes = []
    for key, theirs in olds.items():
        mine = _ratios(new, key, levels[id(new)])
        step = min(here - statistics.median(then) for here, then in zip(mine, zip(*theirs)))
        rounds = statistics.median(run.cells[key].error for run in baseline if key in run.cells)
        between = math.sqrt((spreads.get(key, usual) ** 2 + usual**2) / 2)
        error = math.hypot(new.cells[key].error, rounds, between)
        changes.append(Change(key, math.expm1(step), max(threshold, SIGMAS * error)))
    return changes


def _spread(values: Iterable[float]) -> float:
    """A standard deviation from the range of a few values."""
    values = list(values)
    expected = {2: 1.128, 3: 1.693, 4: 2.059, 5: 2.326, 6: 2.534, 7: 2.704, 8: 2.847}.get(len(values), 2.97)
    return (max(values) - min(values)) / expected


def regress(
    new: Sequence[Path], against: Sequence[Path], threshold: float = THRESHOLD, partial: bool = False
) -> tuple[int, list[str]]:
    """The verdict on one or two new runs.

    Args:
        new: the run, and the second one that confirms a suspicion.
        against: the runs of the baseline; three tell noise from change better than one.
        threshold: slowdown of a cell that is never called a regression.
        partial: the new runs need not have every kernel of the baseline.

    Returns:
        0, 1 or 3 and sentences to print.

    Raises:
        UserError: a file that cannot be used, other devices, or nothing in common.
    """
    if len(new) > 2:
        raise UserError(f"regress: {len(new)} new runs; give one, and a second one to confirm a suspicion")
    if not 0 < threshold < 1:
        raise UserError(f"regress: a threshold of {threshold}; give a fraction between 0 and 1, as 0.03")
    runs, baseline = [load(path) for path in new], [load(path) for path in against]
    devices = {run.device for run in (*runs, *baseline)}
    if len(devices) > 1:
        raise UserError(f"regress: runs of {' and '.join(sorted(devices))}; ratios compare on one device only")
    where = " and ".join(str(path) for path in against)
    missing = sorted({k for run in baseline for k, c in run.cells.items() if c.judged} - set(runs[0].cells))
    changes = [{change.key: change for change in compare(run, baseline, threshold)} for run in runs]
    if not changes[0]:
        raise UserError(f"{new[0]}: no kernel in common with {where}")
    lines = []
    if missing and not partial:
        lines += [f"regression: {say(key)} was not measured in {new[0]}, as it was in {where}" for key in missing]
    suspects = [change for change in changes[0].values() if change.slower]
    if len(runs) == 2:
        again = changes[1]
        for first in suspects:
            second = again.get(first.key)
            if second and second.slower:
                percent = f"{100 * first.change:.1f} % and {100 * second.change:.1f} %"
                allowed = 100 * max(first.allowed, second.allowed)
                lines.append(
                    f"regression: {say(first.key)} is {100 * min(first.change, second.change):.1f} % slower than in "
                    f"{where}: {percent} in two runs, where {allowed:.1f} % is noise"
                )
    if lines:
        return REGRESSION, lines
    if suspects and len(runs) == 1:
        worst = sorted(suspects, key=lambda change: change.allowed - change.change)
        return SUSPICION, [
            f"suspicion: {say(c.key)} is {100 * c.change:.1f} % slower than in {where}, where {100 * c.allowed:.1f} % "
            f"is noise; measure again and give both files"
            for c in worst
        ]
    fastest = min(changes[0].values(), key=lambda change: change.change)
    slowest = max(changes[0].values(), key=lambda change: change.change)
    return FINE, [
        f"no regression: {len(changes[0])} cells against {where}, from {100 * fastest.change:+.1f} % "
        f"({say(fastest.key)}) to {100 * slowest.change:+.1f} % ({say(slowest.key)})"
    ]
