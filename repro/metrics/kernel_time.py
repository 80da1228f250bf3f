"""What a kernel or peer takes on layers of real shapes, and at which share of the read floor, rate or error.

No job and no model: the rows are those of `repro bench` on this machine (build/kernels.csv), else accepted ones. A row
is a median over rounds with its 20th and 80th percentile, from which the interval of the median comes.
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
    """Whose time, on which layers.

    Attributes:
        who: labels `format/dtype/provider` with blanks between, `*` for any; the fastest counts.
        tokens: rows of activations.
        layers: one (`4096x14336`, N x K), or all, large (from 4096 x 4096 on) or small: one value a layer, for
            arithmetic to reduce by geomean, min or max.
        show: microseconds; as recorded, where a peer's time is rescaled; share of the read floor; 10^12 operations or
            bytes a second; relative error; bytes that must be read; operations a byte.
        device: whose times; by default that of the rows built here, or the H200.
        partial: leave out layers without a time; else one such layer leaves no value.
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
        """The number of one layer, or one a layer; None where a time is missing."""
        rows = chosen(self)
        known = {name: _interval(row, self.show) for name, row in rows.items()}

        def value(mean: Mapping[str, Any]) -> Any:
            return np.stack([mean[name] for name in rows]) if self.several() else mean[self.layers]

        return Quantity([{}], value, known=known) if rows else None

    def several(self) -> bool:
        """Whether there is a number a layer, which a cell by itself shows as their geometric mean."""
        return self.layers in LAYERS

    @staticmethod
    def origin(all_params: Sequence["KernelTime"]) -> dict[str, str]:
        """Where the rows of a cell come from, as fields of a measurement.

        `unattested`: a row was timed before versions were kept, and stands until it is timed anew.
        """
        rows, shown = [], []  # `shown`: but those whose stored time is asked for
        for params in all_params:
            rows += chosen(params).values()
            if params.show != "recorded":
                shown += chosen(params).values()
        measured = [row for row in rows if row.status == "ok"]
        here = all(row.built for row in rows)
        old = any(not row.versions for row in measured)
        changed = any(row.versions not in ("", kernel_rows.versions(row.label)) for row in measured)
        rescaled = any(row.status == "rescaled" for row in shown)
        facts = {to: {getattr(row, of) for row in rows} for to, of in FACTS.items()}
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
            "source": "fresh" if here else "unattested" if old else "stored",
            "status": "stale" if changed else "ok",
            "note": CHANGED if changed else RESCALED if rescaled else "",
        }


def chosen(params: KernelTime) -> dict[str, KernelRow]:
    """The fastest row on each layer; empty where one is missing.

    Raises:
        UserError: tokens or layers that are none.
    """
    return _chosen(params, kernel_rows.stamps())


@cache
def _chosen(params: KernelTime, stamps: kernel_rows.Stamps) -> dict[str, KernelRow]:
    if not params.tokens.isdecimal():
        raise UserError(f"kernel_time: tokens is {params.tokens!r:.40}, not a number of activation rows")
    wanted = _names(params)
    show = SHOWN[params.show]
    chosen = {}
    device = params.device or kernel_rows.shown_device(stamps)
    for name in wanted:
        rows = kernel_rows.timed(stamps).get((device, name, int(params.tokens), params.mode), ())
        mine = [row for row in rows if any(fnmatchcase(row.label, label) for label in params.who.split())]
        here = [row for row in mine if show(row) is not None]
        if here:
            chosen[name] = min(here, key=show if params.show == "recorded" else lambda row: row.us)
    return chosen if params.partial or len(chosen) == len(wanted) else {}


def _names(params: KernelTime) -> list[str]:
    if not params.several():
        n, _, k = params.layers.partition("x")
        if not (n.isdecimal() and k.isdecimal()):
            raise UserError(f"kernel_time: {unknown('layers', params.layers, [*LAYERS, '4096x14336'])}")
        return [params.layers]
    low, high = LAYERS[params.layers]
    return [f"{n}x{k}" for n, k in stored_peers.shapes() if low <= n * k <= high]


def _interval(row: KernelRow, show: str) -> Interval:
    """A row's number; its 95 % interval is that of a median of normal samples: 1.253 standard errors of a mean."""
    value = float(SHOWN[show](row))
    half = 0.0
    if row.status == "ok" and show in TIMED and row.rounds:
        error = 1.2533 * (row.p80 - row.p20) / 1.6832 / math.sqrt(row.rounds)
        half = value * error / row.us * float(stdtrit(row.rounds - 1, (1 + LEVEL) / 2))
    free = row.rounds - 1 if half else None
    return Interval(value, value - half, value + half, row.rounds or 0, free, "rounds only", (value,))


def _as_recorded(row: KernelRow) -> float:
    """The fastest recorded time behind a rescaled one."""
    names = next(
        names for who, kernel, _, names in stored_peers.RESCALED_PEERS if (who, kernel) == (row.provider, row.kernel)
    )
    shape = (row.N, row.K, row.M, row.mode)
    return min(r.us for r in stored_peers.times() if r.peer in names and (r.N, r.K, r.M, r.mode) == shape)
