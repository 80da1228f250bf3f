"""Figures as SVG and PDF, byte for byte the same for the same numbers."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.artist import Artist  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.gridspec import SubplotSpec  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402
from matplotlib.ticker import FixedLocator, MaxNLocator  # noqa: E402

from repro.core.files import atomic  # noqa: E402
from repro.render.small_svg import smaller  # noqa: E402

STYLE = {
    "svg.hashsalt": "lowbit-repro",
    "svg.fonttype": "none",
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "figure.constrained_layout.use": True,
}
MARKERS = "osD^v<>pPX*"
CHARACTERS = 13  # of a title in an inch
TALL = 32  # characters of a label at the side of a panel, in 2.2 inches
PANEL = 44  # characters of a panel's title and of its label below, in 3.4 inches
FEW_TICKS = 8  # places that all get a tick
TICKS = 15  # that stand side by side below a panel
DENSE = 60  # points of a line that are drawn without markers
LABELLED = 18  # bars in a row that have room for their values
SEEN = 0.02  # of the axis: an interval that is no wider cannot be seen
LABEL = {"ha": "center", "va": "bottom", "fontsize": 6.5}  # how a bar's value is written
PALETTE = "#0b3c8c #e07b00 #2a9d4e #b3261e #7a7a7a #8e44ad #00a3a3 #c2185b #8d6e00 #5d4037 #4a6fa5 #222222".split()
COLOURED = [colour for colour in PALETTE if colour not in ("#7a7a7a", "#222222")]  # beside lines in grey
Point = tuple[float, float, float | None, float | None]  # x, y, low, high
Panels = Mapping[str, Mapping[str, Sequence[Point]]]


def save(figure: plt.Figure, path: Path) -> None:
    """Write a figure as SVG or PDF, by the path's ending, without a date, atomically."""
    form = path.suffix[1:]
    omitted = {"svg": ("Date", "Creator", "Format", "Type"), "pdf": ("CreationDate", "Producer", "Creator")}
    with atomic(path) as temporary:
        figure.savefig(temporary, format=form, metadata=dict.fromkeys(omitted[form]))
        if form == "svg":
            temporary.write_text(smaller(temporary.read_text(encoding="utf-8")), encoding="utf-8")
    plt.close(figure)


def lines(
    panels: Panels, title: str, x: str, y: str, path: Path, joined: bool = True, small: float | None = None,
    wide_range: bool = False, lead: Sequence[str] = (), broken: bool = False,
) -> None:  # fmt: skip
    """One panel a model, one line with markers a series, with intervals where there are any; the legend names all.

    Args:
        panels: model to series to points (x, y, low, high); an interval may be missing.
        title: stands above all panels.
        x: label of the x axes.
        y: label of the y axes.
        path: of the SVG or PDF.
        joined: draw lines between the points of a series.
        small: make both axes logarithmic, y linear below this.
        wide_range: make the x axis logarithmic.
        lead: series that stand out in colour, the first one thick; all others are grey.
        broken: leave out the empty part of a y axis whose few lowest series lie far below all others.
    """
    series = list(dict.fromkeys(chain(*panels.values())))
    measured: set[str] = set()
    for panel in panels.values():
        measured |= {name for name, points in panel.items() if points}
    if not measured:
        return nothing(f"{title}: not measured", path)
    looks = {name: _look(series, name, lead) for name in series}
    wide = min(3, max(1, len(panels)))
    high = -(-max(1, len(panels)) // wide)
    with plt.rc_context(STYLE):
        width = max(5.2, 3.4 * wide)
        labels = [name if name in measured else f"{name}: not measured" for name in series]
        figure = plt.figure(figsize=(width, 2.8 * high))
        grid = figure.add_gridspec(high, wide)
        handles: dict[str, Artist] = {}
        for n, (model, panel) in enumerate(panels.items()):
            every = list(chain(*panel.values()))
            gap = _gap([point[1] for point in every]) if broken else None
            axes = _axes(figure, grid[n // wide, n % wide], gap)
            for axis in axes:
                for name, points in panel.items():
                    handles.setdefault(name, _series(axis, points, joined, looks[name]))
                if small or wide_range:
                    axis.set_xscale("log")
                if small:
                    axis.set_yscale("symlog", linthresh=small)
                    axis.autoscale(axis="y")  # else the room above the highest point is that of a linear axis: none
            if gap:
                axes[0].set_ylim(bottom=gap[1])
                axes[-1].set_ylim(top=gap[0])
            axes[0].set_title(textwrap.fill(model, PANEL, break_on_hyphens=False), fontsize=8)
            axes[-1].set_xlabel(textwrap.fill(x, PANEL, break_on_hyphens=False))
            if not every:
                _not_measured(axes[0])
            elif not (small or wide_range):
                _whole_ticks(axes[-1], [point[0] for point in every])
            if n % wide == 0:
                axes[0].set_ylabel(textwrap.fill(y, TALL, break_on_hyphens=False))
        _legend(figure, [handles[name] for name in series], labels)
        _head(figure, title)
        save(figure, path)


def _look(series: Sequence[str], name: str, lead: Sequence[str]) -> dict[str, Any]:
    """Colour, marker and width of a series; with leading ones the first of them is thick, and all others are grey."""
    position = series.index(name)
    look = {"color": PALETTE[position % len(PALETTE)], "marker": MARKERS[position % len(MARKERS)], "linewidth": 0.9}
    if not lead:
        return look
    if name not in lead:
        return look | {"color": "0.65", "linewidth": 0.7, "zorder": 1}
    rank = list(lead).index(name)
    return look | {
        "color": COLOURED[rank % len(COLOURED)],
        "linewidth": 1.2 if rank else 2.4,
        "zorder": 3 if rank else 4,
    }


def _series(axis: Axes, points: Sequence[Point], joined: bool, look: Mapping[str, Any]) -> Artist:
    """Draw one series with its intervals, where it has any; returns what stands for it in a legend."""
    points = sorted(points, key=lambda point: point[0])
    style = {**look, "markersize": 4, "elinewidth": 0.9, "capsize": 2}
    if not joined:
        style["linewidth"] = 0
    elif len(points) > DENSE:
        style["marker"] = ""
    ends = None
    if any(point[2] is not None for point in points):
        ends = [_distances(points, 2), _distances(points, 3)]
    return axis.errorbar([point[0] for point in points], [point[1] for point in points], ends, **style)


def _distances(points: Sequence[Point], bound: int) -> list[float]:
    """How far an end of each point's interval, its entry `bound`, is from its y; 0 where it has none."""
    distances = []
    for point in points:
        end = point[bound]
        distances.append(0.0 if end is None else abs(point[1] - end))
    return distances


def _axes(figure: plt.Figure, place: SubplotSpec, gap: tuple[float, float] | None) -> list[Axes]:
    """The axes of a panel, from top to bottom: one, or two where its y axis has a gap."""
    if gap is None:
        return [figure.add_subplot(place)]
    inner = place.subgridspec(2, 1, height_ratios=(4, 1), hspace=0.06)
    above = figure.add_subplot(inner[0])
    below = figure.add_subplot(inner[1], sharex=above)
    above.spines["bottom"].set_visible(False)
    above.tick_params(axis="x", length=0, labelbottom=False)
    slash = {"marker": [(-1, -0.5), (1, 0.5)], "markersize": 7, "linestyle": "none", "color": "k", "clip_on": False}
    above.plot([0], [0], transform=above.transAxes, **slash)
    below.plot([0], [1], transform=below.transAxes, **slash)
    below.yaxis.set_major_locator(MaxNLocator(2))
    return [above, below]


def _gap(heights: Sequence[float]) -> tuple[float, float] | None:
    """The ends of the empty part between a few low values and all others, a quarter of the range at least, or none."""
    order = sorted(heights)
    steps = [(high - low, low, high) for low, high in zip(order, order[1:])]
    if not steps:
        return None
    size, low, high = max(steps)
    few = order.index(high) <= len(order) / 4
    margin = 0.04 * (order[-1] - order[0])
    return (low + margin, high - margin) if few and size > 0.25 * (order[-1] - order[0]) else None


def _legend(figure: plt.Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    """A legend below all panels in as many columns as the figure's width holds; the figure grows by its height."""
    for columns in range(len(labels), 0, -1):
        legend = figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
        extent = legend.get_window_extent()
        if extent.width <= figure.bbox.width:
            break
        legend.remove()
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + extent.height / figure.dpi)


def _not_measured(axis: Axes) -> None:
    """An empty panel says so, and has no ticks, which would be of no measurement."""
    axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color="0.4")
    axis.set_xticks([])
    axis.set_yticks([])


def _whole_ticks(axis: Axes, xs: Sequence[float]) -> None:
    """Ticks at whole numbers alone, where every point is at one."""
    values = sorted(set(xs))
    if all(float(value).is_integer() for value in values):
        apart = min((high - low for low, high in zip(values, values[1:])), default=1)
        few = len(values) <= FEW_TICKS and apart * TICKS >= values[-1] - values[0]
        axis.xaxis.set_major_locator(FixedLocator(values) if few else MaxNLocator(integer=True))


def _head(figure: plt.Figure, title: str) -> None:
    """The title above all panels, broken between words so that no side cuts it."""
    columns = int(CHARACTERS * figure.get_size_inches()[0])
    figure.suptitle(textwrap.fill(title, columns, break_on_hyphens=False), fontsize=9)


def scatter(panels: Panels, title: str, x: str, y: str, path: Path, **more: Any) -> None:
    """As `lines`, markers alone."""
    lines(panels, title, x, y, path, joined=False, **more)


def loglog(panels: Panels, title: str, x: str, y: str, path: Path, **more: Any) -> None:
    """As `scatter`, on logarithmic axes; a y below 1e-4, also a negative one, has its place on a linear part."""
    lines(panels, title, x, y, path, joined=False, small=1e-4, **more)


def semilog(panels: Panels, title: str, x: str, y: str, path: Path, **more: Any) -> None:
    """As `lines`, x on a logarithmic axis."""
    lines(panels, title, x, y, path, wide_range=True, **more)


def surface(panels: Panels, title: str, x: str, y: str, path: Path) -> None:
    """Maps of a square grid, a row a panel and a column a series, on one colour scale a panel, over the middle's value.

    Args:
        panels: of series to points, whose second numbers are the grid row by row.
        title, x, y, path: as of `lines`; both axes go from -1 to 1.
    """
    series = list(dict.fromkeys(chain(*panels.values())))
    maps = {}
    for model, panel in panels.items():
        for name, points in panel.items():
            if points:
                maps[model, name] = np.array([point[1] for point in points])
    if not maps:
        return nothing(f"{title}: not measured", path)
    with plt.rc_context(STYLE | {"axes.grid": False}):
        shape = max(1, len(panels)), max(1, len(series))
        figure, axes = plt.subplots(*shape, figsize=(2.1 * shape[1] + 0.8, 2.0 * shape[0] + 0.9), squeeze=False)
        for row, model in zip(axes, panels):
            of_panel = {name: maps[model, name] for name in series if (model, name) in maps}
            above_centre = {name: losses - losses[len(losses) // 2] for name, losses in of_panel.items()}
            low, high = (end(map(end, above_centre.values()), default=0.0) for end in (min, max))
            for axis, name in zip(row, series):
                axis.set_title(name, fontsize=8)
                if name not in above_centre:
                    _not_measured(axis)
                    continue
                points_per_side = round(len(above_centre[name]) ** 0.5)
                coordinates = np.linspace(-1, 1, points_per_side)
                square = above_centre[name].reshape(points_per_side, points_per_side)
                colours = axis.pcolormesh(
                    coordinates, coordinates, square, vmin=low, vmax=high, shading="nearest", cmap="viridis"
                )
                colours.set_clip_on(False)  # its cells end where the axes do
                axis.contour(coordinates, coordinates, square, levels=8, colors="white", linewidths=0.5)
                axis.set_aspect("equal")
                axis.set_xlabel(x)
            row[0].set_ylabel(f"{model}\n{y}", fontsize=7)
            if above_centre:
                figure.colorbar(colours, ax=list(row), shrink=0.9)
        _head(figure, title)
        save(figure, path)


def timeline(panels: Panels, title: str, x: str, y: str, path: Path) -> None:
    """Spans of time, a lane a series, from top to bottom; lanes whose names end alike have one colour.

    Args:
        panels: one, of series to points, whose first number is where a span begins and whose second is its length.
        title, x, y, path: as of `lines`.
    """
    lanes: dict[str, Sequence[Point]] = {}
    for panel in panels.values():
        lanes |= {name: points for name, points in panel.items() if points}
    if not lanes:
        return nothing(f"{title}: not measured", path)
    kinds = list(dict.fromkeys(name.rpartition(": ")[2] for name in lanes))
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(7.2, 0.34 * len(lanes) + 1.2))
        for lane, (name, points) in enumerate(lanes.items()):
            colour = PALETTE[kinds.index(name.rpartition(": ")[2]) % len(PALETTE)]
            spans = [(point[0], point[1]) for point in points]
            axis.broken_barh(spans, (lane - 0.36, 0.72), facecolors=colour, edgecolors="white", linewidth=0.3)
        axis.set_yticks(range(len(lanes)), lanes)
        axis.set_ylim(len(lanes) - 0.5, -0.5)
        axis.set_xlabel(x)
        axis.set_ylabel(y)
        _head(figure, title)
        save(figure, path)


def nothing(text: str, path: Path) -> None:
    """A figure that says why it is empty."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(4.6, 1.2))
        axis.text(0.5, 0.5, textwrap.fill(text, 60, break_on_hyphens=False), ha="center", va="center", color="0.4")
        axis.set_axis_off()
        save(figure, path)


def loss_curves(curves: Mapping[str, Sequence[Sequence[float]]], path: Path) -> None:
    """Training loss against step, a line a model, from `[step, loss]` pairs."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(6, 2.8))
        for i, (name, points) in enumerate(curves.items()):
            steps, losses = zip(*points)
            axis.plot(steps, losses, color=f"C{i}", linewidth=0.9, label=name)
        axis.set_ylim(2.4, 4.6)
        axis.set_xlabel("step")
        axis.set_ylabel("training loss (nats per token)")
        axis.legend(frameon=False)
        save(figure, path)


def bars(
    panels: Panels, title: str, x: str, y: str, path: Path,
    marked: Mapping[tuple[str, str], str] = MappingProxyType({}), ratios: bool = True,
) -> None:  # fmt: skip
    """Values of several series side by side, a group of bars for each place; more than 8 places stand in two rows.

    A series may lack places. An interval has whiskers where it is wide enough to be seen.

    Args:
        panels: one below the other, of series to points (place, value, low, high, …); a series without points keeps
            its colour and is not shown. Where there are several, each has its name above it.
        title, x, y, path: as of `lines`.
        marked: (series, place) of hatched bars to what the hatching means.
        ratios: draw a line at 1, which the values are compared with; else few bars have their values above them.
    """
    names = list(dict.fromkeys(chain(*panels.values())))
    color_of = {}
    for name, color in zip(names, PALETTE):
        if any(panel.get(name) for panel in panels.values()):
            color_of[name] = color
    rows = list(chain.from_iterable(_rows_of_bars(name, panel) for name, panel in panels.items()))
    if not rows:
        return nothing(f"{title}: not measured", path)
    width = 0.84 / len(color_of)
    places_per_row = max(len(row.places) for row in rows)
    high = 1.08 * max(row.high for row in rows)
    labelled = not ratios and places_per_row * len(color_of) <= LABELLED
    with plt.rc_context(STYLE | {"hatch.linewidth": 0.8}):
        figure, axes = plt.subplots(len(rows), 1, figsize=(8, 0.8 + 2.0 * len(rows)), sharey=True, squeeze=False)
        for row, axis in zip(rows, axes[:, 0]):
            for i, (name, color) in enumerate(color_of.items()):
                points = row.groups.get(name, {})
                for j, place in enumerate(row.places):
                    if place not in points:
                        continue
                    middle = j - 0.42 + (i + 0.5) * width
                    look = {"color": color, "edgecolor": "white", "linewidth": 0}
                    look |= {"hatch": "////"} if (name, place) in marked else {}
                    axis.bar(middle, points[place][1], width, **look)
                    _beside_bar(axis, middle, points[place], high, labelled)
            if ratios:
                axis.axhline(1.0, color="0.2", linewidth=0.8)
            if len(panels) > 1:
                axis.set_title(row.panel, fontsize=8)
            axis.set_xlim(-0.6, places_per_row - 0.4)
            axis.set_ylim(0, high)
            axis.set_xticks(range(len(row.places)), [place.replace("x", " x\n") for place in row.places])
            axis.tick_params(axis="x", length=0)
            axis.grid(False, axis="x")
        handles = [Patch(color=color, label=name) for name, color in color_of.items()]
        for note in dict.fromkeys(marked.values()):
            handles.append(Patch(facecolor="0.6", edgecolor="white", hatch="////", linewidth=0, label=note))
        figure.supylabel(y, fontsize=9)
        axes[-1][0].set_xlabel(x)
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, handlelength=1.2)
        _head(figure, title)
        save(figure, path)


def _beside_bar(axis: Axes, middle: float, point: Point, high: float, labelled: bool) -> None:
    """The whiskers of a bar's interval, where it can be seen on an axis up to `high`, and its value above it."""
    _, top, low, upper = point[:4]
    if low is not None and upper is not None and upper - low > SEEN * high:
        axis.vlines(middle, low, upper, color="0.2", linewidth=0.8)
        top = upper
    if labelled:
        value = f"{point[1]:#.3g}".rstrip(".")
        axis.annotate(value, (middle, top), (0, 1), textcoords="offset points", **LABEL)


@dataclass(frozen=True)
class RowOfBars:
    """Places side by side.

    Attributes:
        panel: whose they are.
        places: their names.
        groups: points by series and place.
        high: the largest value of the panel, or upper end of an interval.
    """

    panel: str
    places: Sequence[str]
    groups: Mapping[str, Mapping[str, Point]]
    high: float


def _rows_of_bars(name: str, panel: Mapping[str, Sequence[Point]]) -> list[RowOfBars]:
    """The rows of a panel: one, or two of more than 8 places; none without a point."""
    groups = {}
    for series, points in panel.items():
        groups[series] = {point[0]: point for point in points}
    places = list(dict.fromkeys(chain(*groups.values())))
    if not places:
        return []
    high = max(max(point[1], point[3] or point[1]) for point in chain(*panel.values()))
    rows = 2 if len(places) > 8 else 1
    places_per_row = math.ceil(len(places) / rows)
    starts = range(0, len(places), places_per_row)
    return [RowOfBars(name, places[start : start + places_per_row], groups, high) for start in starts]


def roofline(
    panels: Panels, title: str, x: str, y: str, path: Path, levels: Mapping[str, float] = MappingProxyType({})
) -> None:
    """10^12 operations a second against operations a byte, under the memory's slope and the ceilings of the arithmetic.

    Args:
        panels: one, of series to points (x, y, …, activation rows), a point a layer; drawn faintly, and the geometric
            means by activation rows as a line. A name with a colon stands out.
        title, x, y, path: as of `lines`.
        levels: `memory`, 10^12 bytes a second; every other is a ceiling in 10^12 operations a second by its name.
    """
    peaks = {name: peak for name, peak in levels.items() if name != "memory"}
    if "memory" not in levels or not peaks:
        return nothing(f"{title}: no measured ceilings", path)
    memory = levels["memory"]
    series = {}
    xs = []
    for name, points in next(iter(panels.values()), {}).items():
        for point in points:
            xs.append(point[0])
            series.setdefault(name, {}).setdefault(int(point[4]), []).append(point[:2])
    xs = xs or [1.0]
    low = min(xs) / 1.4
    room_for_names = 4  # of the ceilings, right of the last point
    high = max([*xs, max(peaks.values()) / memory]) * room_for_names
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(8, 5.4))
        for kind, peak in peaks.items():
            edges = np.array([low, peak / memory, high])
            axis.plot(edges, np.minimum(edges * memory, peak), color="0.25", linewidth=1)
            below = any(
                1 < other_peak / peak < 1.4 for other_peak in peaks.values()
            )  # two labels beside each other would meet
            alignment = {"xytext": (-2, -3 if below else 3), "va": "top" if below else "bottom", "ha": "right"}
            axis.annotate(f"{kind} {peak:.0f}", (high, peak), textcoords="offset points", **alignment)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlim(low, high)
        for i, (name, by_count) in enumerate(series.items()):
            means = np.array([np.exp(np.mean(np.log(points), axis=0)) for _, points in sorted(by_count.items())])
            every = np.array(list(chain(*by_count.values())))
            is_ours = ":" in name
            color = PALETTE[i % len(PALETTE)]
            axis.scatter(*every.T, s=4, color=color, alpha=0.25, linewidths=0)
            look = {"markersize": 5.5, "linewidth": 1.6} if is_ours else {"markersize": 4.5, "markerfacecolor": "white"}
            look |= {"marker": MARKERS[i % len(MARKERS)], "color": color, "zorder": 4 if is_ours else 3}
            axis.plot(means[:, 0], means[:, 1], label=name, **{"linewidth": 0.8, **look})
        bottom, top = axis.get_ylim()
        label_at = max(low * 1.6, bottom / memory * 1.6) * 4
        slope = {"rotation": 0, "ha": "right", "va": "bottom"}
        axis.annotate(
            f"reading {memory:.2f} TB/s", (label_at, label_at * memory), (-6, 2), textcoords="offset points", **slope
        )
        axis.set_xlabel(x)
        axis.set_ylabel(y)
        figure.legend(frameon=False, loc="outside lower center", ncols=4)
        _head(figure, title)
        save(figure, path)
