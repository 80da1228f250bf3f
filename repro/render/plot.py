"""Figures as SVG and PDF, byte for byte the same for the same numbers."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import matplotlib
import numpy as np

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

from repro.files import atomic  # noqa: E402

STYLE = {
    "svg.hashsalt": "lowbit-repro",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "figure.constrained_layout.use": True,
}
MARKERS = "osD^v<>pPX*"
DENSE = 60  # points of a line that are drawn without markers
PALETTE = "#0b3c8c #e07b00 #2a9d4e #b3261e #7a7a7a #8e44ad #00a3a3 #c2185b #8d6e00 #5d4037 #4a6fa5 #222222".split()
Point = tuple[float, float, float | None, float | None]  # x, y, low, high
Panels = Mapping[str, Mapping[str, Sequence[Point]]]


def save(figure: plt.Figure, path: Path) -> None:
    """Write a figure as SVG or PDF, by the path's ending, without a date, atomically."""
    form = path.suffix[1:]
    dates = {"svg": {"Date": None, "Creator": None}, "pdf": {"CreationDate": None, "Producer": None, "Creator": None}}
    with atomic(path) as temporary:
        figure.savefig(temporary, format=form, metadata=dates[form])
    plt.close(figure)


def lines(
    panels: Panels, title: str, x: str, y: str, path: Path, joined: bool = True, small: float | None = None,
    wide_range: bool = False,
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
    """
    series = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    wide = min(3, max(1, len(panels)))
    high = -(-max(1, len(panels)) // wide)
    with plt.rc_context(STYLE):
        width = max(5.2, 3.4 * wide)
        figure, axes = plt.subplots(high, wide, figsize=(width, 2.8 * high + 0.4), squeeze=False)
        for axis, (model, panel) in zip(axes.flat, panels.items()):
            for name in panel:
                i, points = series.index(name), sorted(panel[name], key=lambda point: point[0])
                marker = "" if joined and len(points) > DENSE else MARKERS[i % len(MARKERS)]
                style = {"color": PALETTE[i % len(PALETTE)], "marker": marker, "markersize": 4, "label": name}
                at, height = [point[0] for point in points], [point[1] for point in points]
                ends = [[abs(p[1] - (p[k] if p[k] is not None else p[1])) for p in points] for k in (2, 3)]
                if all(point[2] is None for point in points):
                    ends = None
                axis.errorbar(at, height, ends, linewidth=0.9 if joined else 0, elinewidth=0.9, capsize=2, **style)
            if not any(panel.values()):
                axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color="0.4")
            if small or wide_range:
                axis.set_xscale("log")
            if small:
                axis.set_yscale("symlog", linthresh=small)
            axis.set_title(model, fontsize=8)
            axis.set_xlabel(x)
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        for axis in axes[:, 0]:
            axis.set_ylabel(y)
        if series:
            found = {label: h for axis in axes.flat for h, label in zip(*axis.get_legend_handles_labels())}
            figure.legend(
                found.values(), found, loc="outside lower center", ncols=max(1, int(width / 1.5)), frameon=False
            )
        figure.suptitle(textwrap.fill(title, int(16 * width)), fontsize=9)
        save(figure, path)


def scatter(panels: Panels, title: str, x: str, y: str, path: Path) -> None:
    """As `lines`, markers alone."""
    lines(panels, title, x, y, path, joined=False)


def loglog(panels: Panels, title: str, x: str, y: str, path: Path) -> None:
    """As `scatter`, on logarithmic axes; a y below 1e-4, also a negative one, has its place on a linear part."""
    lines(panels, title, x, y, path, joined=False, small=1e-4)


def semilog(panels: Panels, title: str, x: str, y: str, path: Path) -> None:
    """As `lines`, x on a logarithmic axis."""
    lines(panels, title, x, y, path, wide_range=True)


def surface(panels: Panels, title: str, x: str, y: str, path: Path) -> None:
    """Maps of a square grid, a row a panel and a column a series, on one colour scale a panel, over the middle's value.

    Args:
        panels: of series to points, whose second numbers are the grid row by row.
        title, x, y, path: as of `lines`; both axes go from -1 to 1.
    """
    series = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    maps = {
        (model, name): np.array([point[1] for point in points])
        for model, panel in panels.items()
        for name, points in panel.items()
        if points
    }
    if not maps:
        return nothing(f"{title}: not measured", path)
    with plt.rc_context(STYLE | {"axes.grid": False}):
        shape = max(1, len(panels)), max(1, len(series))
        figure, axes = plt.subplots(*shape, figsize=(2.1 * shape[1] + 0.8, 2.0 * shape[0] + 0.9), squeeze=False)
        for row, model in zip(axes, panels):
            mine = {name: maps[model, name] for name in series if (model, name) in maps}
            over = {name: losses - losses[len(losses) // 2] for name, losses in mine.items()}
            low, high = (end(map(end, over.values()), default=0.0) for end in (min, max))
            for axis, name in zip(row, series):
                axis.set_title(name, fontsize=8)
                if name not in over:
                    axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color="0.4")
                    continue
                side = round(len(over[name]) ** 0.5)
                places = np.linspace(-1, 1, side)
                square = over[name].reshape(side, side)
                shown = axis.pcolormesh(places, places, square, vmin=low, vmax=high, shading="nearest", cmap="viridis")
                axis.contour(places, places, square, levels=8, colors="white", linewidths=0.5)
                axis.set_aspect("equal")
                axis.set_xlabel(x)
            row[0].set_ylabel(f"{model}\n{y}", fontsize=7)
            if over:
                figure.colorbar(shown, ax=list(row), shrink=0.9)
        figure.suptitle(textwrap.fill(title, int(34 * shape[1])), fontsize=9)
        save(figure, path)


def nothing(text: str, path: Path) -> None:
    """A figure that says why it is empty."""
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(4.6, 1.2))
        axis.text(0.5, 0.5, textwrap.fill(text, 60), ha="center", va="center", color="0.4")
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
    panels: Panels, title: str, x: str, y: str, path: Path, marked: Mapping[tuple[str, str], str] = MappingProxyType({})
) -> None:
    """Ratios of several series side by side, a group of bars for each place, in two rows; a series may lack places.

    Args:
        panels: one, of series to points (place, ratio, …); a series without points keeps its colour and is not shown.
        title, x, y, path: as of `lines`.
        marked: (series, place) of hatched bars to what the hatching means.
    """
    panel = next(iter(panels.values()), {})
    groups = {name: {point[0]: point[1] for point in points} for name, points in panel.items()}
    places = list(dict.fromkeys(place for values in groups.values() for place in values))
    rows = 2 if len(places) > 8 else 1
    each = -(-len(places) // rows)
    shown = {name: PALETTE[i] for i, name in enumerate(groups) if groups[name]}
    width = 0.84 / max(1, len(shown))
    high = 1.08 * max((v for values in groups.values() for v in values.values()), default=1.0)
    with plt.rc_context(STYLE | {"hatch.linewidth": 0.8}):
        figure, axes = plt.subplots(rows, 1, figsize=(8, 0.8 + 2.0 * rows), sharey=True, squeeze=False)
        for row, axis in enumerate(axes[:, 0]):
            mine = places[row * each : (row + 1) * each]
            for i, (name, color) in enumerate(shown.items()):
                for j, place in enumerate(mine):
                    if place in groups[name]:
                        look = {"color": color, "edgecolor": "white", "linewidth": 0}
                        look |= {"hatch": "////"} if (name, place) in marked else {}
                        axis.bar(j - 0.42 + (i + 0.5) * width, groups[name][place], width, **look)
            axis.axhline(1.0, color="0.2", linewidth=0.8)
            axis.set_xlim(-0.6, each - 0.4)
            axis.set_ylim(0, high)
            axis.set_xticks(range(len(mine)), [place.replace("x", " x\n") for place in mine])
            axis.tick_params(axis="x", length=0)
            axis.grid(False, axis="x")
        handles = [Patch(color=color, label=name) for name, color in shown.items()]
        for note in dict.fromkeys(marked.values()):
            handles.append(Patch(facecolor="0.6", edgecolor="white", hatch="////", linewidth=0, label=note))
        figure.supylabel(y, fontsize=9)
        axes[-1][0].set_xlabel(x)
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, handlelength=1.2)
        figure.suptitle(title, fontsize=9)
        save(figure, path)


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
    memory, series = levels["memory"], {}
    for name, points in next(iter(panels.values()), {}).items():
        for point in points:
            series.setdefault(name, {}).setdefault(int(point[4]), []).append(point[:2])
    xs = [x for by_count in series.values() for points in by_count.values() for x, _ in points] or [1.0]
    low, high = min(xs) / 1.4, max([*xs, max(peaks.values()) / memory]) * 2.2
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(8, 5.4))
        for kind, peak in peaks.items():
            edges = np.array([low, peak / memory, high])
            axis.plot(edges, np.minimum(edges * memory, peak), color="0.25", linewidth=1)
            below = any(1 < other / peak < 1.4 for other in peaks.values())  # two labels beside each other would meet
            place = {"xytext": (-2, -3 if below else 3), "va": "top" if below else "bottom", "ha": "right"}
            axis.annotate(f"{kind} {peak:.0f}", (high, peak), textcoords="offset points", **place)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlim(low, high)
        for i, (name, by_count) in enumerate(series.items()):
            means = np.array([np.exp(np.mean(np.log(points), axis=0)) for _, points in sorted(by_count.items())])
            every = np.array([point for points in by_count.values() for point in points])
            mine, color = ":" in name, PALETTE[i % len(PALETTE)]
            axis.scatter(*every.T, s=4, color=color, alpha=0.25, linewidths=0)
            look = {"markersize": 5.5, "linewidth": 1.6} if mine else {"markersize": 4.5, "markerfacecolor": "white"}
            look |= {"marker": MARKERS[i % len(MARKERS)], "color": color, "zorder": 4 if mine else 3}
            axis.plot(means[:, 0], means[:, 1], label=name, **{"linewidth": 0.8, **look})
        bottom, top = axis.get_ylim()
        at = max(low * 1.6, bottom / memory * 1.6) * 4
        slope = {"rotation": 0, "ha": "right", "va": "bottom"}
        axis.annotate(f"reading {memory:.2f} TB/s", (at, at * memory), (-6, 2), textcoords="offset points", **slope)
        axis.set_xlabel(x)
        axis.set_ylabel(y)
        figure.legend(frameon=False, loc="outside lower center", ncols=4)
        figure.suptitle(title, fontsize=9)
        save(figure, path)
