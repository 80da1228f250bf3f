"""Figures as SVG, byte for byte the same for the same numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

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


def bars(groups: Mapping[str, Mapping[str, float]], label: str, path: Path, line: float | None = None) -> None:
    """Bars of several series side by side, a group of bars for each place; a series may lack places.

    Args:
        groups: series to place to value.
        label: of the y axis.
        path: of the SVG.
        line: a value to draw across all groups.
    """
    places = list(dict.fromkeys(place for values in groups.values() for place in values))
    width = 0.8 / max(1, len(groups))
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(max(6.0, 0.75 * len(places)), 3.2))
        for i, (name, values) in enumerate(groups.items()):
            x = [places.index(place) - 0.4 + (i + 0.5) * width for place in values]
            axis.bar(x, list(values.values()), width, color=f"C{i}", label=name)
        if line is not None:
            axis.axhline(line, color="0.4", linewidth=0.8, linestyle=":")
        axis.set_xticks(range(len(places)), places, rotation=30, ha="right")
        axis.grid(False, axis="x")
        axis.set_ylabel(label)
        axis.legend(frameon=False, ncols=min(4, max(1, len(groups))), loc="lower left", bbox_to_anchor=(0, 1))
        save(figure, path)


def roofline(series: Mapping[str, Sequence[tuple[float, float]]], memory: float, peak: float, path: Path) -> None:
    """Operations a second against operations a byte, under the memory's slope and the arithmetic's ceiling.

    Args:
        series: name to points (operations per byte, operations per second).
        memory: bytes per second; peak: operations per second.
        path: of the SVG.
    """
    points = [x for values in series.values() for x, _ in values]
    edges = np.array([min([*points, 1.0]) / 1.5, peak / memory, max([*points, peak / memory]) * 2])
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(6, 3.4))
        axis.plot(edges, np.minimum(edges * memory, peak) / 1e12, color="0.3", linewidth=1)
        for i, (name, values) in enumerate(series.items()):
            x, y = np.array(values).T
            style = {"marker": MARKERS[i % len(MARKERS)], "linestyle": "", "markersize": 3.5}
            axis.plot(x, y / 1e12, color=f"C{i}", label=name, alpha=0.8, **style)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("operations per byte that must be read")
        axis.set_ylabel("10$^{12}$ operations per second")
        axis.legend(frameon=False)
        save(figure, path)
