"""Figures as SVG, byte for byte the same for the same numbers."""

from collections.abc import Mapping, Sequence, Set
from pathlib import Path

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
PALETTE = (
    "#0b3c8c",
    "#e07b00",
    "#2a9d4e",
    "#b3261e",
    "#7a7a7a",
    "#8e44ad",
    "#00a3a3",
    "#c2185b",
    "#8d6e00",
    "#5d4037",
    "#4a6fa5",
)
Point = tuple[float, float, float, float]  # x, y, low, high


def save(figure: plt.Figure, path: Path) -> None:
    """Write a figure as SVG without a date, atomically."""
    with atomic(path) as temporary:
        figure.savefig(temporary, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)


def quality_against_bits(panels: Mapping[str, Mapping[str, Sequence[Point]]], title: str, path: Path) -> None:
    """One panel a model: perplexity over full precision against stored bits per block weight, a marker a family.

    Args:
        panels: model to family of recipes to points (bits per weight, ratio, low, high).
        title: stands above all panels.
        path: of the SVG.
    """
    families = sorted({family for panel in panels.values() for family in panel})
    with plt.rc_context(STYLE):
        count = max(1, len(panels))
        figure, axes = plt.subplots(1, count, figsize=(3.1 * count, 2.9), sharey=True, squeeze=False)
        for axis, (model, panel) in zip(axes[0], panels.items()):
            for family, points in sorted(panel.items()):
                i = families.index(family)
                x, y, low, high = np.array(points).T
                style = {"fmt": MARKERS[i % len(MARKERS)], "color": f"C{i}", "capsize": 2, "markersize": 5}
                axis.errorbar(x, y, (y - low, high - y), label=family, **style)
            axis.axhline(1.0, color="0.4", linewidth=0.8, linestyle=":")
            axis.set_title(model)
            axis.set_xlabel("stored bits per block weight")
        axes[0][0].set_ylabel("perplexity / full precision")
        if panels:
            axes[0][-1].legend(frameon=False)
        figure.suptitle(title, fontsize=9)
        save(figure, path)


def shares_back(panels: Mapping[str, Mapping[str, Sequence[Point]]], title: str, path: Path) -> None:
    """A study: the share of the gap that comes back against memory, a panel a model and grid, a line a variant.

    Args:
        panels: to variant to points (memory in % of the 4-bit weights, recovered %, low, high).
        title: stands above all panels.
        path: of the SVG.
    """
    variants = list(dict.fromkeys(variant for panel in panels.values() for variant in panel))
    wide = min(3, max(1, len(panels)))
    high = -(-len(panels) // wide)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(high, wide, figsize=(3.1 * wide, 2.6 * high), squeeze=False)
        for axis, (name, panel) in zip(axes.flat, panels.items()):
            for variant, points in panel.items():
                i = variants.index(variant)
                x, y, low, top = np.array(sorted(points)).T
                style = {"marker": MARKERS[i % len(MARKERS)], "color": f"C{i}", "capsize": 2, "markersize": 4}
                axis.errorbar(x, y, (y - low, top - y), label=variant, linewidth=0.9, **style)
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter("{x:g}")
            axis.axhline(0, color="0.4", linewidth=0.8, linestyle=":")
            axis.set_title(name)
        for axis in axes[-1]:
            axis.set_xlabel("memory, % of the 4-bit block weights")
        for axis in axes[:, 0]:
            axis.set_ylabel("share of the gap back, %")
        if panels:
            figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(variants))
        figure.suptitle(title, fontsize=9)
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
    groups: Mapping[str, Mapping[str, float]],
    label: str,
    path: Path,
    line: float | None = None,
    marked: Set[tuple[str, str]] = frozenset(),
    mark: str = "",
) -> None:
    """Bars of several series side by side, a group of bars for each place, in two rows; a series may lack places.

    Args:
        groups: series to place to value; an empty one keeps its colour and is not shown.
        label: of the y axis.
        path: of the SVG.
        line: a value to draw across all groups.
        marked: (series, place) of hatched bars; `mark` says in the legend what the hatching means.
    """
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
                        if (name, place) in marked:
                            look["hatch"] = "////"
                        axis.bar(j - 0.42 + (i + 0.5) * width, groups[name][place], width, **look)
            if line is not None:
                axis.axhline(line, color="0.2", linewidth=0.8)
            axis.set_xlim(-0.6, each - 0.4)
            axis.set_ylim(0, high)
            axis.set_xticks(range(len(mine)), [place.replace(" x ", " x\n") for place in mine])
            axis.tick_params(axis="x", length=0)
            axis.grid(False, axis="x")
        handles = [Patch(color=color, label=name) for name, color in shown.items()]
        if marked:
            handles.append(Patch(facecolor="0.6", edgecolor="white", hatch="////", linewidth=0, label=mark))
        figure.supylabel(label, fontsize=9)
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, handlelength=1.2)
        save(figure, path)


def roofline(
    series: Mapping[str, Mapping[int, Sequence[tuple[float, float]]]],
    memory: float,
    peaks: Mapping[str, float],
    path: Path,
) -> None:
    """Operations a second against operations a byte, under the memory's slope and the ceilings of the arithmetic.

    Args:
        series: name to activation rows to points (operations per byte, operations per second), one a layer; drawn
            faintly, and their geometric means as a line. A name with a colon stands out.
        memory: bytes per second that were read at best.
        peaks: type to operations per second at best.
        path: of the SVG.
    """
    xs = [x for by_count in series.values() for points in by_count.values() for x, _ in points] or [1.0]
    low, high = min(xs) / 1.4, max([*xs, max(peaks.values()) / memory]) * 2.2
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(8, 5.4))
        for kind, peak in peaks.items():
            edges = np.array([low, peak / memory, high])
            axis.plot(edges, np.minimum(edges * memory, peak) / 1e12, color="0.25", linewidth=1)
            below = any(1 < other / peak < 1.4 for other in peaks.values())  # two labels beside each other would meet
            place = {"xytext": (-2, -3 if below else 3), "va": "top" if below else "bottom", "ha": "right"}
            axis.annotate(f"{kind} {peak / 1e12:.0f}", (high, peak / 1e12), textcoords="offset points", **place)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlim(low, high)
        for i, (name, by_count) in enumerate(series.items()):
            means = np.array([np.exp(np.mean(np.log(points), axis=0)) for _, points in sorted(by_count.items())])
            every = np.array([point for points in by_count.values() for point in points])
            mine, color = ":" in name, PALETTE[i % len(PALETTE)]
            axis.scatter(*every.T * [[1], [1e-12]], s=4, color=color, alpha=0.25, linewidths=0)
            look = {"markersize": 5.5, "linewidth": 1.6} if mine else {"markersize": 4.5, "markerfacecolor": "white"}
            look |= {"marker": MARKERS[i % len(MARKERS)], "color": color, "zorder": 4 if mine else 3}
            axis.plot(means[:, 0], means[:, 1] / 1e12, label=name, **{"linewidth": 0.8, **look})
        bottom, top = axis.get_ylim()
        x = max(low * 1.6, bottom * 1e12 / memory * 1.6)
        slope = {"rotation": 0, "ha": "right", "va": "bottom"}
        axis.annotate(f"reading {memory / 1e12:.2f} TB/s", (x * 4, x * 4 * memory / 1e12), (-6, 2),
                      textcoords="offset points", **slope)  # fmt: skip
        axis.set_xlabel("operations per byte of weights that must be read")
        axis.set_ylabel("10$^{12}$ operations per second")
        figure.legend(frameon=False, loc="outside lower center", ncols=4)
        save(figure, path)
