"""What the accepted kernel times say: the bars that were asked, each beside what was measured, and the figures.

A bar is a line of a table: what, asked, measured (the geometric mean over the layers, and the worst of them), yes or
no. Everything is computed from `results/<device>/kernels.csv`; a bar whose rows are missing says so. Times of recorded
peers were carried over by the library's ratio of the same run (`peers.bridge`); beside each stands what comes out of
the recorded times as they are.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from repro import bench, kernel_list, kernel_rows, peers
from repro.errors import UserError
from repro.files import write_text
from repro.kernel_rows import Row
from repro.record import RESULTS

LARGE = 2**24  # weights of a layer of 4096 x 4096: where the larger class of shapes begins
SIXTEEN = ("bf16", "fp16")
OURS = {provider.name for provider in kernel_list.OURS.values()}
Shape = tuple[int, int]
Times = dict[Shape, float]


@dataclass(frozen=True)
class Bar:
    """One bar over layer shapes.

    Attributes:
        what: in words.
        values: by shape.
        shapes: those that it is asked of.
        mean: what the geometric mean must reach; None where nothing was asked.
        worst: what every shape must reach, likewise: a least, or with `most` a largest value.
        form: of a value.
        excused: shapes of which `worst` is not asked, since the dispatcher takes its other way there.
    """

    what: str
    values: Times
    shapes: Sequence[Shape]
    mean: float | None = None
    worst: float | None = None
    most: bool = False
    form: str = "{:.2f}x"
    excused: frozenset[Shape] = frozenset()

    @property
    def found(self) -> tuple[float, float, Shape] | None:
        """Geometric mean, the worst value and its shape; None where nothing was measured."""
        here = {shape: value for shape, value in self.values.items() if shape in self.shapes}
        if not here:
            return None
        shape = (max if self.most else min)(here, key=here.get)
        return statistics.geometric_mean(here.values()), here[shape], shape

    @property
    def holds(self) -> str:
        """`yes`, `no`, nothing where nothing was asked, or how much of it was measured."""
        if not self.found:
            return "not measured"
        count = sum(shape in self.values for shape in self.shapes)
        if count < len(self.shapes):
            return f"{count} of {len(self.shapes)} shapes"
        asked = {} if self.worst is None else {shape: self.worst for shape in set(self.shapes) - self.excused}
        pairs = [(limit, self.values[shape]) for shape, limit in asked.items()]
        pairs += [] if self.mean is None else [(self.mean, self.found[0])]
        if self.mean is None and self.worst is None:
            return ""
        short = sum(got > limit if self.most else got < limit for limit, got in pairs)
        other = f", {len(self.excused)} by the other way" if self.excused else ""
        return ("no" if short else "yes") + other

    def cells(self) -> list[str]:
        """Text of a line: what, asked, measured, holds."""
        sign = "at most" if self.most else "at least"
        asked = ["" if value is None else self.form.format(value) for value in (self.mean, self.worst)]
        shown = f"{sign} {asked[0] or '–'} / {asked[1] or '–'}" if any(asked) else ""
        if not self.found:
            return [self.what, shown, "", self.holds]
        mean, worst, (n, k) = self.found
        return [self.what, shown, f"{self.form.format(mean)} / {self.form.format(worst)} ({n} x {k})", self.holds]


# ---- times by shape


class Cells:
    """The times of one device, asked by format, provider, activation rows and type."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = [r for r in rows if r.mode == "cold" and r.us and r.N and r.M and r.M != bench.LARGE]
        self.shapes = sorted({(r.N, r.K) for r in self.rows}, key=lambda s: (s[0] * s[1], s))

    def pick(self, kernel: str, providers: Iterable[str], m: int, dtype: str | None = None) -> dict[Shape, Row]:
        """The fastest row of any of the providers, by shape."""
        providers, best = set(providers), {}
        for r in self.rows:
            if (r.kernel, r.M) == (kernel, m) and r.provider in providers and dtype in (None, r.dtype):
                here = best.get((r.N, r.K))
                best[r.N, r.K] = r if here is None or r.us < here.us else here
        return best

    def us(self, *what: object) -> Times:
        """As `pick`, microseconds."""
        return microseconds(self.pick(*what))

    def w4(self, m: int, dtype: str) -> dict[Shape, Row]:
        """This project's 4-bit layer in groups of 128: the dispatcher, or its decode kernel where only that is."""
        return self.pick("w4-g128", ["wna16_gemv"], m, dtype) | self.pick("w4-g128", ["linear"], m, dtype)

    def sixteen(self, m: int) -> Times:
        """The better of the 16-bit libraries: cuBLAS in bf16 or fp16."""
        return fastest(self.us(kind, [peers.LIBRARY], m) for kind in SIXTEEN)


def microseconds(rows: Mapping[Shape, Row]) -> Times:
    """The times of rows by shape."""
    return {shape: row.us for shape, row in rows.items()}


def fastest(times: Iterable[Times]) -> Times:
    """The least time by shape, wherever anybody has one."""
    best: Times = {}
    for some in times:
        for shape, us in some.items():
            best[shape] = min(us, best.get(shape, math.inf))
    return best


def over(theirs: Times, ours: Times) -> Times:
    """How many times as fast ours is, wherever both are measured."""
    return {shape: theirs[shape] / us for shape, us in ours.items() if shape in theirs}


def as_recorded(names: Iterable[str], m: int) -> Times:
    """The fastest recorded time of any of these names, by shape, not carried over."""
    names = set(names)
    rows = [r for r in peers.recorded() if r.peer in names and r.M == m and r.mode == "cold"]
    return fastest({(r.N, r.K): r.us} for r in rows)


# ---- the bars


def bars(rows: Sequence[Row], shapes: Sequence[Shape] = ()) -> list[Bar]:
    """Every bar that was asked of the kernels, from the rows of one device; of all recorded layers unless told."""
    t = Cells(rows)
    every = list(shapes) or peers.shapes()
    large, small = ([s for s in every if (s[0] * s[1] >= LARGE) == big] for big in (True, False))
    names = {(provider, kernel): recorded for provider, kernel, _, recorded in bench.BRIDGED}
    others = {row.provider for row in t.rows} - OURS
    part = "{:.3f}"

    def four(dtype: str) -> list[Bar]:
        who = f"W4A16 g128, {dtype}"
        one = t.w4(1, dtype)
        us, of_floor = microseconds(one), {shape: row.fraction for shape, row in one.items() if row.fraction}
        errors = {shape: row.relerr for shape, row in one.items()}
        limit = 1e-3 if dtype == "fp16" else None  # a bf16 output is rounded by 2e-3 itself
        awq = as_recorded(names["awq_gemv", "w4-g128"], 1)
        found = [
            Bar(f"{who}, M = 1: of the read floor, from 4096 x 4096 on", of_floor, large, 0.86, 0.78, form=part),
            Bar(f"{who}, M = 1: of the read floor, smaller layers", of_floor, small, 0.78, 0.70, form=part),
            Bar(
                f"{who}, M = 1: over AWQ's gemv, carried over",
                over(t.us("w4-g128", ["awq_gemv"], 1), us),
                every,
                1.2,
                1.1,
            ),
            Bar(f"{who}, M = 1: over AWQ's gemv, as recorded", over(awq, us), every, 1.2, 1.1),
            Bar(f"{who}, M = 1: relative error", errors, every, None, limit, most=True, form="{:.1e}"),
        ]
        for m, most in ((4, 1.25), (8, 1.35)):
            many = microseconds(t.w4(m, dtype))
            peer = fastest(t.us(kind, others, m) for kind in ("w4-g128", "fp8", "int8", *SIXTEEN))
            found += [
                Bar(f"{who}, M = {m}: time over that of M = 1", over(many, us), every, None, most, most=True),
                Bar(f"{who}, M = {m}: over the fastest peer", over(peer, many), every, None, 1.0),
            ]
        many = {m: microseconds(t.w4(m, dtype)) for m in (16, 64, 256)}
        other = frozenset(shape for shape, row in t.w4(256, dtype).items() if row.note == "by dequantize")
        bf16 = {m: t.us("bf16", [peers.LIBRARY], m) for m in many}
        cublas, marlin = t.sixteen(16), names["marlin", "w4-g128"]
        better = fastest([cublas, t.us("w4-g128", ["marlin"], 16)])
        then = fastest([cublas, as_recorded(marlin, 16)])
        found += [
            Bar(f"{who}, M = 16: over the better of cuBLAS and MARLIN", over(better, many[16]), every, 1.1),
            Bar(f"{who}, M = 16: over the better of cuBLAS and MARLIN as recorded", over(then, many[16]), every, 1.1),
            Bar(f"{who}, M = 64: over bf16, from 4096 x 4096 on", over(bf16[64], many[64]), large, None, 1.2),
            Bar(f"{who}, M = 256: over bf16", over(bf16[256], many[256]), every, None, 0.8, excused=other),
        ]
        return found

    of_floor = {
        name: {shape: row.fraction for shape, row in t.pick(name, OURS, 1, "fp16").items() if row.fraction}
        for name in ("w8-pc", "w8a8")
    }
    two = t.us("w2-g64", OURS, 1, "fp16")
    gemlite = t.us("w2-g64", ["gemlite", "gemlite-recorded"], 1)
    then = as_recorded(names["gemlite-recorded", "w2-g64"], 1)
    gemm, dense = (t.us("w4-g128", [way], 256, "fp16") for way in ("w4a16_gemm", "dequantize"))
    found = four("fp16") + [
        Bar("W4A16 g128, fp16, M = 256: gemm over dequantizing, then cuBLAS", over(dense, gemm), every),
        Bar("W8A16, M = 1: of the read floor, from 4096 x 4096 on", of_floor["w8-pc"], large, None, 0.88, form=part),
        Bar("W8A8, M = 1: of the read floor, from 4096 x 4096 on", of_floor["w8a8"], large, None, 0.88, form=part),
        Bar("W2A16 g64, M = 1: over the fastest GemLite W2", over(gemlite, two), every, 1.85, 1.25),
        Bar("W2A16 g64, M = 1: over the fastest GemLite W2 as recorded", over(then, two), every, 1.85, 1.25),
    ]
    for m in (256, 512, 1024, 2048):
        ours, theirs = (t.us(kernel, providers, m) for kernel, providers in (("w8a8", OURS), ("int8", others)))
        found.append(Bar(f"W8A8, M = {m}: over cuBLAS int8", over(theirs, ours), every, None, 1.0))
    return found + four("bf16")


def table(rows: Sequence[Row]) -> str:
    """The bars of one device as a Markdown table, and where its numbers come from."""
    head = ["geometric mean / worst layer", "asked", "measured", "holds"]
    lines = [head, ["---"] * len(head), *(bar.cells() for bar in bars(rows))]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return f"{text}\n\n{source(rows)}{check_of_carrying_over(rows)}\n"


def source(rows: Sequence[Row]) -> str:
    """One sentence: device, dates, commits, environments, how many rows, how many of them by code that has changed."""
    measured = [row for row in rows if row.status == "ok"]
    said = {
        name: sorted({getattr(row, name) for row in measured}) for name in ("device", "date", "commit", "environment")
    }
    codes = {label: bench.code(label) for label in {row.label for row in measured if row.code}}
    stale = sum(row.code != codes[row.label] for row in measured if row.code)
    text = f"{len(measured)} times on {', '.join(said['device'])}, {', '.join(said['date'])}, "
    text += f"commit {', '.join(said['commit'])}, {'; '.join(said['environment'])}"
    return text + (f"; {stale} of them are stale: the code that made them has changed." if stale else ".")


def check_of_carrying_over(rows: Sequence[Row]) -> str:
    """A sentence: what carrying over would give for a peer that is measured here too; empty without it."""
    t, found = Cells(rows), []
    for m in (1, 16):
        library, here = t.us("bf16", [peers.LIBRARY], m), t.us("w4-g128", ["tinygemm"], m)
        place = {(n, k, m, "cold"): us for (n, k), us in library.items()}
        moved = {(r.N, r.K): us for r, _, us in peers.bridge(place, peers.recorded(), ["tinygemm_g128"])}
        if ratios := over(moved, here):
            found.append(f"{statistics.geometric_mean(ratios.values()):.2f} of its time at M = {m}")
    return f" Carried over likewise, tinygemm comes out at {' and '.join(found)}." if found else ""


# ---- figures


FAMILIES = {  # of peers at 4 bits: whose bars stand side by side; the better of live and recorded counts
    "AWQ gemv": ("w4-g128", ("awq_gemv",)),
    "MARLIN": ("w4-g128", ("marlin",)),
    "GemLite": ("w4-g128", ("gemlite", "gemlite-recorded")),
    "tinygemm": ("w4-g128", ("tinygemm",)),
}
SERIES = (  # of the roofline: name, format, providers, ours
    ("W4A16", "w4-g128", ("wna16_gemv", "linear"), True),
    ("W2A16", "w2-g64", ("wna16_gemv",), True),
    ("W8A16", "w8-pc", ("wna16_gemv",), True),
    ("W8A8", "w8a8", ("w8a8_gemv", "w8a8_gemm"), True),
    ("cuBLAS bf16", "bf16", ("torch.matmul",), False),
    ("torch.compile bf16", "bf16", ("torch.compile",), False),
    ("cuBLAS fp8", "fp8", ("torch._scaled_mm",), False),
    ("cuBLAS int8", "int8", ("torch._int_mm",), False),
    ("tinygemm W4", "w4-g128", ("tinygemm",), False),
    ("GemLite W4", "w4-g128", ("gemlite",), False),
    ("GemLite W2", "w2-g64", ("gemlite",), False),
)


def speedups(rows: Sequence[Row], m: int) -> tuple[dict[str, dict[str, float]], set[tuple[str, str]]]:
    """Who to shape to how many times as fast as the best 16-bit product it is, at 4 bits in groups of 128.

    Returns:
        The ratios, ours first, and the bars (who, shape) that come from recorded times.
    """
    t = Cells(rows)
    best = fastest([t.sixteen(m), t.us("bf16", ["torch.compile"], m)])
    everyone = {"this project": t.w4(m, "fp16")}
    everyone |= {who: t.pick(kernel, providers, m) for who, (kernel, providers) in FAMILIES.items()}
    found: dict[str, dict[str, float]] = {who: {} for who in everyone}
    recorded = set()
    for who, by_shape in everyone.items():
        for n, k in t.shapes:
            if (row := by_shape.get((n, k))) and (n, k) in best:
                place = f"{n} x {k}"
                found[who][place] = best[n, k] / row.us
                if row.status == "bridged":
                    recorded.add((who, place))
    return found, recorded


def ceilings(rows: Sequence[Row]) -> tuple[float, dict[str, float]]:
    """Bytes a second that this device was measured to read, operations a second by type; else the datasheet's."""
    device = next(row.device for row in rows)
    peaks = kernel_rows.PEAKS.get(device, {})
    read = [row.bytes / row.us * 1e6 for row in rows if row.kernel == "read_floor" and row.us]
    work = {
        row.kernel: 2 * row.N * row.K * row.M / row.us * 1e6
        for row in rows
        if row.label in bench.CEILINGS and row.us and row.M == bench.LARGE
    }
    return max(read, default=peaks.get("memory", 0.0)), work or {"bf16": peaks.get("bf16", 0.0)}


def points(rows: Sequence[Row]) -> dict[str, dict[int, list[tuple[float, float]]]]:
    """The roofline's series, of layers from 4096 x 4096 on.

    Returns:
        Name to activation rows to (operations a byte that must be read, operations a second), a point a layer; the
        fastest of this project's ways, whose names have a colon.
    """
    t = Cells(rows)
    found: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for name, kernel, providers, ours in SERIES:
        for m in sorted({row.M for row in t.rows}):
            for (n, k), row in t.pick(kernel, providers, m).items():
                if n * k >= LARGE and row.status == "ok":
                    work = 2 * n * k * m
                    by_count = found.setdefault(f"this project: {name}" if ours else name, {})
                    by_count.setdefault(m, []).append((work / row.bytes, work / row.us * 1e6))
    return found


def draw(out: Path, results: Path = RESULTS) -> tuple[list[Path], list[str]]:
    """Tables and figures of the accepted times of every device: bars, peers at M = 1, 16 and 64, roofline.

    Returns:
        The files that were written, and the tables' text.

    Raises:
        UserError: nothing is accepted.
    """
    from repro import plot

    rows = kernel_rows.accepted(results)
    if not any(row.us and row.M for row in rows):
        raise UserError(f"{results}: no accepted kernel times; run bench on a GPU, then accept its file")
    drawn, tables = [], []
    for device in sorted({row.device for row in rows}):
        mine = [row for row in rows if row.device == device]
        slug = kernel_rows.slug(device)
        tables.append(table(mine))
        drawn.append(Path(out) / f"{slug}-bars.md")
        write_text(drawn[-1], tables[-1])
        for m in (1, 16, 64):
            ratios, recorded = speedups(mine, m)
            if any(ratios.values()):
                drawn.append(Path(out) / f"{slug}-peers-m{m}.svg")
                label = f"times as fast as the best 16-bit product, M = {m}"
                plot.bars(ratios, label, drawn[-1], line=1.0, marked=recorded, mark="recorded, carried over")
        read, work = ceilings(mine)
        if read and all(work.values()):
            drawn.append(Path(out) / f"{slug}-roofline.svg")
            plot.roofline(points(mine), read, work, drawn[-1])
    return drawn, tables
