"""Figures by matplotlib: PNG and SVG files, the same bytes for the same numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import matplotlib
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure as Canvas
from matplotlib.figure import SubFigure
from matplotlib.ticker import FuncFormatter, LogLocator

from prong.lab.figures import DECADES
from prong.lab.page.charts import Chart, Figure, HeatMaps

DPI = 130
SIZE = 6.4, 4.6  # inches of a figure
CROWDED = 8  # names in a legend, which then stands below the axes
LINES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "prong",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": "medium",
}


def as_file(figures: Sequence[Figure], format: str = "png") -> bytes:
    """Figures in two columns, or one alone, as a PNG or SVG file."""
    columns = min(2, len(figures))
    lines = math.ceil(len(figures) / columns)
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=(SIZE[0] * columns, SIZE[1] * lines), layout="constrained")
        places = canvas.subfigures(lines, columns, squeeze=False).ravel()
        for place, figure in zip(places, figures, strict=False):
            if isinstance(figure, HeatMaps):
                _heat(place, figure)
            else:
                _chart(place, figure)
        buffer = BytesIO()
        nameless = {"Software": None} if format == "png" else {"Date": None, "Creator": None}
        canvas.savefig(buffer, format=format, dpi=DPI, metadata=nameless)
    return buffer.getvalue()


def _chart(place: SubFigure, chart: Chart) -> None:
    axes = place.subplots()
    named: set[str] = set()
    for curve in chart.curves:
        label = None if curve.name in named else plain(curve.name + (" (diverged)" if curve.broken else ""))
        named.add(curve.name)
        axes.plot(curve.x, curve.y, color=curve.colour, linestyle=LINES[curve.dash], linewidth=1.6, label=label)
        if len(curve.low) > 0:
            axes.fill_between(curve.x, curve.low, curve.high, color=curve.colour, alpha=0.15, linewidth=0)
        if curve.broken and curve.x:
            axes.plot(curve.x[-1], curve.y[-1], marker="x", color=curve.colour)
    axes.set(title=plain(chart.title), xlabel=chart.x, ylabel=plain(chart.y))
    axes.set_xscale("log" if chart.log_x else "linear")
    if chart.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
        axes.yaxis.set_minor_formatter("")
    axes.grid(alpha=0.3)
    if len(named) > CROWDED:
        place.legend(loc="outside lower center", frameon=False, fontsize="small", ncols=4)
    elif named:
        axes.legend(frameon=False, fontsize="small")


def _heat(place: SubFigure, maps: HeatMaps) -> None:
    panels = place.subplots(1, len(maps.panels), squeeze=False)[0]
    largest = max(max(map(max, matrix)) for matrix in maps.panels.values())
    norm = LogNorm(largest * 10.0**-DECADES, largest, clip=True)
    for axes, (title, matrix) in zip(panels, maps.panels.items(), strict=True):
        image = axes.imshow(matrix, norm=norm, cmap="magma", interpolation="nearest")
        axes.set(title=plain(title), xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    place.colorbar(image, ax=list(panels), orientation="horizontal", shrink=0.6, extend="min")
    place.suptitle(plain(maps.title), fontsize="medium")


def plain(text: str) -> str:
    """Text as it is: a dollar sign would begin a formula."""
    return text.replace("$", r"\$")
