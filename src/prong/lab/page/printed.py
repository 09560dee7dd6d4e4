"""Figures by matplotlib: PNG and SVG files, the same bytes for the same numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import matplotlib
from matplotlib.axis import Axis
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure as Canvas
from matplotlib.figure import SubFigure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator

from prong.lab.figures import DECADES
from prong.lab.page.charts import Chart, Curve, Dash, Figure, HeatMaps
from prong.lab.page.grids import EMPTY, SCALE, Grid
from prong.lab.page.legends import SMALL, placed
from prong.lab.page.ticks import tick_label, ticks

DPI = 130
SIZE = 6.4, 4.6  # inches of a figure
LEGEND = 0.75  # inches that a legend below the axes may take of them; for a higher one the figure grows
CELLS = 4.6, 3.5  # inches that all cells of a grid take together
LINES: dict[Dash, Any] = {
    "solid": "-",
    "dash": "--",
    "dot": ":",
    "dashdot": "-.",
    "dashdotdot": (0, (3, 1.2, 1, 1.2, 1, 1.2)),
}
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "prong",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": "medium",
}


def as_file(figures: Sequence[Figure], format: str = "png") -> bytes:
    """Figures in two columns, or one alone, as a PNG or SVG file."""
    buffer = BytesIO()
    nameless = {"Software": None} if format == "png" else {"Date": None, "Creator": None}
    with matplotlib.rc_context(STYLE):
        drawn(figures).savefig(buffer, format=format, dpi=DPI, metadata=nameless)
    return buffer.getvalue()


def drawn(figures: Sequence[Figure]) -> Canvas:
    """Figures in two columns, or one alone, each line of them as high as it needs."""
    columns = min(2, len(figures))
    lines = [figures[start : start + columns] for start in range(0, len(figures), columns)]
    heights = [max(map(_height, line)) for line in lines]
    canvas = Canvas(figsize=(SIZE[0] * columns, sum(heights)), layout="constrained")
    places = canvas.subfigures(len(lines), columns, squeeze=False, height_ratios=heights).ravel()
    for place, figure in zip(places, figures, strict=False):
        if isinstance(figure, HeatMaps):
            _heat(place, figure)
        elif isinstance(figure, Grid):
            _grid(place, figure)
        else:
            _chart(place, figure)
    return canvas


def _height(figure: Figure) -> float:
    legend = placed(_names(figure), SIZE[0]) if isinstance(figure, Chart) else None
    return SIZE[1] + (max(0.0, legend.height - LEGEND) if legend is not None else 0.0)


def _names(chart: Chart) -> list[str]:
    """What the legend says, each name once."""
    return list({curve.name: _label(curve) for curve in reversed(chart.curves)}.values())[::-1]


def _label(curve: Curve) -> str:
    return plain(curve.name + (" (diverged)" if curve.broken else ""))


def _chart(place: SubFigure, chart: Chart) -> None:
    axes = place.subplots()
    named: set[str] = set()
    for curve in chart.curves:
        label = None if curve.name in named else _label(curve)
        named.add(curve.name)
        axes.plot(curve.x, curve.y, color=curve.colour, linestyle=LINES[curve.dash], linewidth=1.6, label=label)
        if len(curve.low) > 0:
            axes.fill_between(curve.x, curve.low, curve.high, color=curve.colour, alpha=0.15, linewidth=0)
        if curve.broken and curve.x:
            axes.plot(curve.x[-1], curve.y[-1], marker="x", color=curve.colour)
    axes.set(title=plain(chart.title), xlabel=chart.x, ylabel=plain(chart.y))
    if chart.log_x:
        axes.set_xscale("log")
        _number(axes.xaxis, *axes.get_xlim())
    if chart.log_y:
        axes.set_yscale("log")
        _number(axes.yaxis, *axes.get_ylim())
    axes.grid(alpha=0.3)
    legend = placed(_names(chart), SIZE[0])
    if legend is not None:
        place.legend(loc="outside lower center", frameon=False, fontsize=legend.size, ncols=legend.columns)
    elif named:
        axes.legend(frameon=False, fontsize=SMALL)


def _number(axis: Axis, low: float, high: float) -> None:
    """Numbers along a logarithmic axis, however short it is."""
    locator = LogLocator(subs=(1, 2, 5))
    few = sum(low <= tick <= high for tick in locator.tick_values(low, high)) < 2
    axis.set_major_locator(FixedLocator(ticks(low, high)) if few else locator)
    axis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    axis.set_minor_formatter("")


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


def _grid(place: SubFigure, grid: Grid) -> None:
    axes = place.subplots()
    norm = LogNorm(*grid.limits, clip=True)
    values = [[math.nan if cell is None or cell.value is None else cell.value for cell in row] for row in grid.cells]
    image = axes.imshow(values, norm=norm, cmap=SCALE, interpolation="nearest", aspect="auto")
    width, height = CELLS[0] / len(grid.columns), CELLS[1] / len(grid.rows)
    size = min(SMALL, 72 * width / 7, 72 * height / 3)  # for two lines of a dozen letters
    for y, row in enumerate(grid.cells):
        for x, cell in enumerate(row):
            if cell is None:
                continue
            if cell.value is None:
                axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=EMPTY, linewidth=0))
            axes.text(x, y, cell.text, ha="center", va="center", fontsize=size, color=grid.ink(cell))
    axes.set(title=plain(grid.title), xlabel=plain(grid.x))
    axes.set_ylabel(plain(grid.y), rotation=0)
    axes.set_xticks(range(len(grid.columns)), grid.columns)
    axes.set_yticks(range(len(grid.rows)), grid.rows)
    axes.set_xticks([x - 0.5 for x in range(len(grid.columns))], minor=True)
    axes.set_yticks([y - 0.5 for y in range(len(grid.rows))], minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    bar = place.colorbar(image, ax=axes, label=plain(grid.z))
    marks = ticks(*grid.limits)
    bar.set_ticks(marks, labels=[tick_label(tick) for tick in marks])
    bar.minorticks_off()


def plain(text: str) -> str:
    """Text as it is: a dollar sign would begin a formula."""
    return text.replace("$", r"\$")
