"""The figure of compression, and how figures look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

DPI = 150
DECADES = 4  # of a heat map's colours, below the largest entry


def draw_trade_off(methods: Mapping[str, Sequence[tuple[float, float]]], title: str = "") -> Figure:
    """Error against the number of parameters, the latter logarithmic; points of a method in order of size."""
    if not methods:
        raise ValueError("expected at least one method to draw")
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    for name, points in methods.items():
        parameters, errors = zip(*sorted(points), strict=True) if points else ((), ())
        axes.plot(parameters, errors, linewidth=2, marker="o", markersize=4, label=name)
    axes.set(xscale="log", xlabel="parameters", ylabel="error", title=title)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure
