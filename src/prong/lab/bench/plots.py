"""Curves on logarithmic axes, where a power law is a straight line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO

import matplotlib

matplotlib.use("Agg")  # files only: no window, no display needed

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import ScalarFormatter


@dataclass(frozen=True)
class Panel:
    """Curves that share their x."""

    title: str
    xlabel: str
    x: Sequence[float]
    curves: Mapping[str, Sequence[float]]


def draw(panels: Sequence[Panel], ylabel: str) -> bytes:
    """Panels side by side, as a PNG file; the same bytes for the same numbers."""
    figure, grid = plt.subplots(
        1, len(panels), figsize=(4.6 * len(panels), 4.4), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, panel in zip(grid[0], panels, strict=True):
        _fill(axes, panel)
    grid[0][0].set_ylabel(ylabel)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    plt.close(figure)
    return buffer.getvalue()


def _fill(axes: Axes, panel: Panel) -> None:
    for label, values in panel.curves.items():
        axes.plot(panel.x, values, marker="o", markersize=4, label=label)
    axes.set(title=panel.title, xlabel=panel.xlabel, xscale="log", yscale="log")
    axes.set_xticks(panel.x, minor=False)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter("")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
