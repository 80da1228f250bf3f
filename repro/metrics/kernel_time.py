"""Times of kernels and peers on layers of real shapes, and their share of the read floor, rate or error.

It needs no job and no model: rows are those of `repro bench` on this machine (build/kernels.csv), else accepted ones. A
row has the median over rounds, and the 20th and 80th percentile, from which the interval of the median follows.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

import numpy as np
from scipy.special import stdtrit

from repro.bench import stored_peers
from repro.core.errors import UserError, unknown
from repro.metrics.metric import External
from repro.stats.quantity import Quantity
from repro.stats.statistics import LEVEL, Interval
from repro.store import kernel_rows
from repro.store.kernel_rows import KernelRow

LARGE = 2**24  # weights of a layer of 4096 x 4096
LAYERS = {"all": (0, math.inf), "large": (LARGE, math.inf), "small": (0, LARGE - 1)}  # by number of weights
RESCALED = "recorded, rescaled"  # by the ratio of the library's times in this run and then
CHANGED = "timed under other versions; time it anew with python -m repro bench"
SHOWN: dict[str, Callable[[KernelRow], float | None]] = {
    "us": lambda row: row.us,
    "recorded": lambda row: _as_recorded(row) if row.status == "rescaled" else row.us,
    "fraction": lambda row: row.fraction,
    "rate": lambda row: 2 * row.N * row.K * row.M / row.us / 1e6,
    "bandwidth": lambda row: row.bytes / row.us / 1e6,
    "relerr": lambda row: row.relerr,
    "bytes": lambda row: row.bytes,
    "intensity": lambda row: 2 * row.N * row.K * row.M / row.bytes,
}
FACTS = {"device": "device", "stand_in": "device", "commit": "commit", "artifacts": "machine"}
TIMED = ("us", "fraction", "rate", "bandwidth")  # those whose interval is that of the time


@dataclass(frozen=True)
class KernelTime(External):
    """The time of the fastest of some kernels on one or several layers.

    Attributes:
        who: labels `format/dtype/provider`, separated by blanks, `*` for any; the fastest counts.
        tokens: rows of activations.
        layers: a layer (`4096x14336`, N x K); or `all`, `large` (from 4096 x 4096 on) or `small`, which give a value
            for each layer, to be reduced by geomean, min or max.
        show: `us`, microseconds; `recorded`, the same, but of a rescaled peer as it was recorded; `fraction`, the share
            of the read floor; `rate` and `bandwidth`, 10^12 operations or bytes a second; `relerr`, relative error;
            `bytes` that must be read; `intensity`, operations a byte.
        mode: whether weights are cold or warm in the L2 cache.
        device: of the times; by default that of the rows built here, else the H200.
        partial: leave out layers without a time; otherwise one such layer leaves no value.
    """

    VERSION = 1

    who: str
    tokens: str = "1"
    layers: str = "all"
    show: Literal["us", "recorded", "fraction", "rate", "bandwidth", "relerr", "bytes", "intensity"] = "us"
    mode: Literal["cold", "warm"] = "cold"
    partial: bool = False
    device: str = ""
    unit: str = "us"

    def read(self) -> Quantity | None:
        """The number of one layer, or of each layer; None if a time is missing."""
        rows = chosen(self)
        intervals = {name: _interval(row, self.show) for name, row in rows.items()}

        def value(mean: Mapping[str, Any]) -> Any:
            return np.stack([mean[name] for name in rows]) if self.several() else mean[self.layers]

        return Quantity([{}], value, known=intervals) if rows else None

    def several(self) -> bool:
        """Whether there is a number for each layer; a cell then shows their geometric mean."""
        return self.layers in LAYERS

    @staticmethod
    def origin(all_params: Sequence["KernelTime"]) -> dict[str, str]:
        """Where the rows of a cell come from, as fields of a measurement.

        `unattested`: a row was timed before versions were kept, and stands until it is timed anew.
        """
        rows: list[KernelRow] = []
        rescaled_rows: list[KernelRow] = []  # those that are shown as they are rescaled in this run
        for params in all_params:
            rows += chosen(params).values()
            if params.show != "recorded":
                rescaled_rows += chosen(params).values()
        measured = [row for row in rows if row.status == "ok"]
        all_built = all(row.built for row in rows)
        unattested = any(not row.versions for row in measured)
        changed = any(row.versions not in ("", kernel_rows.versions(row.label)) for row in measured)
        rescaled = any(row.status == "rescaled" for row in rescaled_rows)
        if all_built:
            source = "fresh"
        else:
            source = "unattested" if unattested else "stored"
        note = RESCALED if rescaled else ""
        facts: dict[str, set[str]] = {}
        for field, column in FACTS.items():
            facts[field] = {getattr(row, column) for row in rows}
        facts["environment"] = {f"{row.environment}, {row.date}" for row in rows}
        joined = {name: " + ".join(sorted(filter(None, words))) for name, words in facts.items()}
        modes = " and ".join(sorted({params.mode for params in all_params}))
        versions: set[str] = set()
        for row in measured:
            versions.update(row.versions.split())
        return {
            **joined,
            "device_class": "cuda",
            "protocol": f"CUDA graphs, {modes} weights",
            "covers": "rounds of one run",
            "versions": " ".join(sorted(versions)),
            "source": source,
            "status": "stale" if changed else "ok",
            "note": CHANGED if changed else note,
        }


def chosen(params: KernelTime) -> dict[str, KernelRow]:
    """The fastest row on each layer; empty if one is missing and `partial` is not set.

    Raises:
        UserError: malformed tokens or layers.
    """
    return _chosen(params, kernel_rows.stamps())


@cache
def _chosen(params: KernelTime, stamps: kernel_rows.Stamps) -> dict[str, KernelRow]:
    if not params.tokens.isdecimal():
        raise UserError(f"kernel_time: tokens is {params.tokens!r:.40}, not a number of activation rows")
    names = _names(params)
    show = SHOWN[params.show]
    chosen = {}
    device = params.device or kernel_rows.shown_device(stamps)
    for name in names:
        rows = kernel_rows.timed(stamps).get((device, name, int(params.tokens), params.mode), ())
        with_value = [row for row in rows if _is_of(row, params.who) and show(row) is not None]
        if with_value:
            chosen[name] = min(with_value, key=show if params.show == "recorded" else lambda row: row.us)
    return chosen if params.partial or len(chosen) == len(names) else {}


def _is_of(row: KernelRow, who: str) -> bool:
    """Whether a row's label matches one of the patterns in `who`."""
    return any(fnmatchcase(row.label, pattern) for pattern in who.split())


def _names(params: KernelTime) -> list[str]:
    """The layers of a metric, as `4096x14336`."""
    if not params.several():
        n, _, k = params.layers.partition("x")
        if not (n.isdecimal() and k.isdecimal()):
            raise UserError(f"kernel_time: {unknown('layers', params.layers, [*LAYERS, '4096x14336'])}")
        return [params.layers]
    low, high = LAYERS[params.layers]
    return [f"{n}x{k}" for n, k in stored_peers.shapes() if low <= n * k <= high]


def _interval(row: KernelRow, show: str) -> Interval:
    """A row's number with its 95 % interval, that of a median of normal samples: 1.253 standard errors of the mean."""
    value = float(SHOWN[show](row))
    half = 0.0
    if row.status == "ok" and show in TIMED and row.rounds:
        error = 1.2533 * (row.p80 - row.p20) / 1.6832 / math.sqrt(row.rounds)
        half = value * error / row.us * float(stdtrit(row.rounds - 1, (1 + LEVEL) / 2))
    free = row.rounds - 1 if half else None
    return Interval(value, value - half, value + half, row.rounds or 0, free, "rounds only", (value,))


def _as_recorded(row: KernelRow) -> float:
    """The fastest recorded time that a rescaled one is computed from."""
    peers = {(who, kernel): names for who, kernel, _, names in stored_peers.RESCALED_PEERS}
    names = peers[row.provider, row.kernel]
    shape = (row.N, row.K, row.M, row.mode)
    return min(r.us for r in stored_peers.times() if r.peer in names and (r.N, r.K, r.M, r.mode) == shape)
