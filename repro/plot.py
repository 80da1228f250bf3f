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
            axis.axhline(0, color="0.4", linewidth=0.8, linestyle=":")
            axis.set_title(name)
        for axis in axes[-1]:
            axis.set_xlabel("memory, % of the 4-bit block weights")
        for axis in axes[:, 0]:
            axis.set_ylabel("share of the gap back, %")
        if panels:
            axes[0][0].legend(frameon=False)
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
