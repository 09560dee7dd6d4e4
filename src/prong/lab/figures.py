"""Figures of curvature and compression: heat maps, spectra, conditioning over training, and trade-offs.

Each figure is drawn by a `draw_` function, and saved as a PNG file by one of the same name without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray

from prong.monitor import Row

DPI = 150
DECADES = 4  # of a heat map's colours, below the largest entry


def heat_map(before: ArrayLike, after: ArrayLike, path: Path, title: str = "") -> None:
    """Save the absolute values of a Fisher block before and after whitening, side by side, as a PNG file."""
    draw_heat_map(before, after, title).savefig(path, dpi=0.7 * DPI)  # noise makes large files


def spectra(curves: Mapping[str, ArrayLike], path: Path, title: str = "") -> None:
    """Save eigenvalues by rank, a curve for each name, as a PNG file."""
    draw_spectra(curves, title).savefig(path, dpi=DPI)


def condition_over_training(rows: Sequence[Row], path: Path, title: str = "") -> None:
    """Save the condition numbers that a monitor measured, against updates, as a PNG file."""
    draw_condition_over_training(rows, title).savefig(path, dpi=DPI)


def trade_off(methods: Mapping[str, Sequence[tuple[float, float]]], path: Path, title: str = "") -> None:
    """Save (parameters, error) of compressed models, a curve for each method, as a PNG file."""
    draw_trade_off(methods, title).savefig(path, dpi=DPI)


def draw_heat_map(before: ArrayLike, after: ArrayLike, title: str = "") -> Figure:
    """Two square matrices of one size on one logarithmic scale, of four decades below the larger largest entry."""
    panels = {"before whitening": np.abs(np.asarray(before)), "after whitening": np.abs(np.asarray(after))}
    shapes = [matrix.shape for matrix in panels.values()]
    if shapes[0] != shapes[1] or len(shapes[0]) != 2 or shapes[0][0] != shapes[0][1]:
        raise ValueError(f"expected two square matrices of one size, got shapes {shapes[0]} and {shapes[1]}")
    largest = float(np.max([matrix.max(initial=0.0) for matrix in panels.values()]))
    if not (np.isfinite(largest) and largest > 0):  # NaN is the largest of all, to numpy
        raise ValueError(f"expected finite matrices that are not all zero; the largest entry is {largest}")
    figure = Figure(figsize=(10, 5), layout="compressed")
    axes = figure.subplots(1, 2)
    norm = LogNorm(largest * 10.0**-DECADES, largest, clip=True)
    for panel, (name, matrix) in zip(axes, panels.items(), strict=True):
        image = panel.imshow(matrix, norm=norm, cmap="magma", interpolation="nearest")
        panel.set(title=name, xlabel="parameter", ylabel="parameter")
    figure.colorbar(image, ax=axes, label="absolute value", extend="min")
    figure.suptitle(title)
    return figure


def draw_spectra(curves: Mapping[str, ArrayLike], title: str = "") -> Figure:
    """Eigenvalues, largest first, against their rank, both logarithmic; those that are not positive are left out."""
    if not curves:
        raise ValueError("expected at least one spectrum to draw")
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    for name, values in curves.items():
        lam: NDArray[np.float64] = np.sort(np.asarray(values, dtype=np.float64).ravel())[::-1]
        lam = lam[lam > 0]
        axes.plot(np.arange(1, len(lam) + 1), lam, linewidth=2, label=name)
    axes.set(xscale="log", yscale="log", xlabel="rank", ylabel="eigenvalue", title=title)
    _style(axes)
    axes.legend(frameon=False)
    return figure


def draw_condition_over_training(rows: Sequence[Row], title: str = "") -> Figure:
    """Condition numbers against updates: of the inputs as they come, and as whitening leaves them where measured."""
    if not rows:
        raise ValueError("expected rows of a monitor, got none; did it measure anything?")
    whitened = any(row.condition_whitened is not None for row in rows)
    names = {"condition": "inputs as they come", "condition_whitened": "as the optimizer sees them"}
    shown = list(names)[: 1 + whitened]
    figure = Figure(figsize=(5.5 * len(shown), 4.6), layout="constrained")
    panels = figure.subplots(1, len(shown), sharex=True, sharey=True, squeeze=False)[0]
    for axes, field in zip(panels, shown, strict=True):
        for number, layer in enumerate(dict.fromkeys(row.layer for row in rows)):
            points = [(row.update, getattr(row, field)) for row in rows if row.layer == layer]
            measured = [(update, value) for update, value in points if value is not None]
            x, y = zip(*measured, strict=True) if measured else ((), ())
            axes.plot(x, y, color=f"C{number % 10}", linewidth=2, marker="o", markersize=3, label=f"layer {layer}")
        axes.set(yscale="log", xlabel="updates", title=names[field])
        _style(axes)
    panels[0].set_ylabel("condition number, damped")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(title)
    return figure


def draw_over_updates(curves: Mapping[str, Sequence[tuple[float, float]]], what: str, title: str = "") -> Figure:
    """(update, value) of several runs, values logarithmic; names that agree up to the last comma share a colour."""
    if not curves:
        raise ValueError("expected at least one run to draw")
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    groups = list(dict.fromkeys(name.rpartition(",")[0] or name for name in curves))
    for name, points in curves.items():
        group = name.rpartition(",")[0] or name
        label = group if group not in axes.get_legend_handles_labels()[1] else None
        updates, values = zip(*points, strict=True) if points else ((), ())
        axes.plot(updates, values, color=f"C{groups.index(group) % 10}", linewidth=1.5, label=label)
    axes.set(yscale="log", xlabel="updates", ylabel=what, title=title)
    _style(axes)
    axes.legend(frameon=False)
    return figure


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
    _style(axes)
    axes.legend(frameon=False)
    return figure


def _style(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
