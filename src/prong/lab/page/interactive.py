"""Figures by plotly: pieces of a page, to be looked into with the mouse."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from html import escape
from typing import Any

import plotly.graph_objects as go
from matplotlib import colormaps
from matplotlib.colors import to_hex
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from prong.lab.figures import DECADES
from prong.lab.page.charts import Chart, Curve, Figure, HeatMaps
from prong.lab.page.grids import EMPTY, SCALE, Cell, Grid
from prong.lab.page.ticks import tick_label, ticks

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
CONFIG = {
    "responsive": True,
    "displaylogo": False,
    "showSendToCloud": False,  # plotly would offer to upload the chart, by default
    "plotlyServerURL": "",
    "modeBarButtonsToRemove": ["lasso2d", "select2d"],
    "toImageButtonOptions": {"format": "svg"},
}
GRID, LINE = "#e8eaed", "#9aa0a6"
DOTS = {"dashdotdot": "9px,3px,2px,3px,2px,3px"}  # dashes that plotly has no name for
PLOT = 370  # pixels between the axes of a chart; the page makes room for the legend, however large that is
ENDLESS = 10_000  # pixels that a legend may take: it does not scroll
SPACING = 0.04  # between heat maps, of the width of all
ROW = 36  # pixels of a grid's, at least


def library() -> str:
    """Plotly's javascript, for the page to be complete without a network."""
    return str(get_plotlyjs())


def as_html(figure: Figure, identity: str) -> str:
    """A figure as an element of a page that has the library, under an id of its own."""
    config = CONFIG if isinstance(figure, Chart) else {**CONFIG, "displayModeBar": False}
    text: str = _drawn(figure).to_html(full_html=False, include_plotlyjs=False, div_id=identity, config=config)
    return text


def _drawn(figure: Figure) -> go.Figure:
    if isinstance(figure, Chart):
        return _chart(figure)
    return _heat(figure) if isinstance(figure, HeatMaps) else _grid(figure)


def _chart(chart: Chart) -> go.Figure:
    figure = go.Figure()
    named: set[str] = set()
    for curve in chart.curves:
        for trace in _traces(curve, chart, curve.name not in named):
            figure.add_trace(trace)
        named.add(curve.name)
    figure.update_layout(**_layout(), hovermode="closest", showlegend=True)
    figure.update_layout(meta={"plot": PLOT}, height=PLOT + 110 + 20 * len(named))  # the page corrects it
    legend = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0, "maxheight": ENDLESS}
    figure.update_layout(legend=legend)
    for axis, title, log in ((figure.update_xaxes, chart.x, chart.log_x), (figure.update_yaxes, chart.y, chart.log_y)):
        axis(title=escape(title), type="log" if log else "linear", gridcolor=GRID, linecolor=LINE, zeroline=False)
        axis(automargin=True, exponentformat="none", separatethousands=True)
    if chart.log_x:
        figure.update_xaxes(**_numbers(x for curve in chart.curves for x in curve.x))
    if chart.log_y:
        figure.update_yaxes(**_numbers(y for curve in chart.curves for y in (*curve.y, *curve.low, *curve.high)))
    return figure


def _numbers(values: Iterable[float]) -> dict[str, Any]:
    """What stands along a logarithmic axis."""
    positive = [value for value in values if value > 0]
    marks = ticks(min(positive), max(positive))
    return {"tickvals": marks, "ticktext": [tick_label(tick) for tick in marks]}


def _traces(curve: Curve, chart: Chart, first: bool) -> list[go.Scatter]:
    """The line, the band below it, and a cross where it breaks off; the legend's click hides all of them."""
    name = escape(curve.name)
    traces = []
    if len(curve.low) > 0:
        around = [*curve.high, *reversed(curve.low)]
        traces.append(
            go.Scatter(
                x=[*curve.x, *reversed(curve.x)],
                y=around,
                fill="toself",
                fillcolor=_faint(curve.colour),
                line={"width": 0},
                mode="lines",
                hoverinfo="skip",
                legendgroup=name,
                showlegend=False,
            )
        )
    spread = [f"<br>range {low:.4g} to {high:.4g}" for low, high in zip(curve.low, curve.high, strict=True)]
    traces.append(
        go.Scatter(
            x=list(curve.x),
            y=list(curve.y),
            customdata=spread or None,
            name=name + (" (diverged)" if curve.broken else ""),
            legendgroup=name,
            showlegend=first,
            mode="lines",
            line={"color": curve.colour, "dash": DOTS.get(curve.dash, curve.dash), "width": 2},
            hovertemplate=f"{escape(chart.y)} %{{y:.4g}}{'%{customdata}' if spread else ''}"
            f"<br>{escape(chart.x)} %{{x:,.6~g}}<extra>{name}</extra>",
        )
    )
    if curve.broken and curve.x:
        cross = {"symbol": "x", "size": 9, "color": curve.colour}
        traces.append(
            go.Scatter(
                x=[curve.x[-1]],
                y=[curve.y[-1]],
                mode="markers",
                marker=cross,
                legendgroup=name,
                showlegend=False,
                hovertemplate=f"diverged after this<extra>{name}</extra>",
            )
        )
    return traces


def _heat(maps: HeatMaps) -> go.Figure:
    count = len(maps.panels)
    titles = [escape(title) for title in maps.panels]
    figure = make_subplots(1, count, horizontal_spacing=SPACING, subplot_titles=titles)
    largest = max(max(map(max, matrix)) for matrix in maps.panels.values())
    top = math.log10(largest)
    floor = top - DECADES
    for number, matrix in enumerate(maps.panels.values(), start=1):
        z = [[round(max(floor, math.log10(entry) if entry > 0 else floor), 2) for entry in row] for row in matrix]
        trace = go.Heatmap(z=z, coloraxis="coloraxis", hovertemplate="row %{y}, column %{x}<br>10^%{z}<extra></extra>")
        figure.add_trace(trace, row=1, col=number)
    decades = list(range(math.ceil(floor), math.floor(top) + 1))
    bar = {"tickvals": decades, "ticktext": [f"10<sup>{decade}</sup>" for decade in decades], "thickness": 12}
    bar |= {"orientation": "h", "y": 0, "yanchor": "top", "len": 0.7}
    figure.update_layout(**_layout(), height=360, coloraxis={"colorscale": "Magma", "colorbar": bar})
    figure.update_layout(meta={"aspect": (1 - SPACING * (count - 1)) / count})  # squares side by side, and no gap below
    figure.update_coloraxes(cmin=floor, cmax=top)
    figure.update_xaxes(showticklabels=False, ticks="", constrain="domain", showgrid=False)
    figure.update_yaxes(
        showticklabels=False, ticks="", constrain="domain", showgrid=False, autorange="reversed", constraintoward="top"
    )
    for number in range(1, count + 1):
        figure.update_yaxes(scaleanchor=f"x{number if number > 1 else ''}", row=1, col=number)
    return figure


def _grid(grid: Grid) -> go.Figure:
    low, high = grid.limits

    def level(cell: Cell) -> float | None:
        return None if cell.value is None else math.log10(max(low, cell.value))

    def wordy(cell: Cell) -> float | None:
        return 0.0 if cell.value is None else None

    marks = ticks(low, high)
    bar = {"tickvals": [math.log10(tick) for tick in marks], "ticktext": [tick_label(tick) for tick in marks]}
    bar |= {"thickness": 12, "title": {"text": escape(grid.z), "side": "right"}}
    colours = [[step / 10, to_hex(colormaps[SCALE](step / 10))] for step in range(11)]
    scale = {"zmin": math.log10(low), "zmax": math.log10(high), "colorscale": colours, "colorbar": bar}
    grey = {"colorscale": [[0, EMPTY], [1, EMPTY]], "showscale": False}
    height = max(PLOT, ROW * len(grid.rows))
    figure = go.Figure([_cells(grid, level, **scale), _cells(grid, wordy, **grey)])
    figure.update_layout(**_layout(), meta={"plot": height}, height=height + 90)
    for axis, title in ((figure.update_xaxes, grid.x), (figure.update_yaxes, grid.y)):
        axis(title=escape(title), type="category", showgrid=False, zeroline=False, automargin=True)
    figure.update_yaxes(autorange="reversed")
    return figure


def _cells(grid: Grid, level: Callable[[Cell], float | None], **options: Any) -> go.Heatmap:
    """Some cells of a grid, those that have a level, with their texts."""
    known = [[cell if cell is not None and level(cell) is not None else None for cell in row] for row in grid.cells]
    return go.Heatmap(
        x=[escape(column) for column in grid.columns],
        y=[escape(row) for row in grid.rows],
        z=[[level(cell) if cell is not None else None for cell in row] for row in known],
        text=[[_text(grid, cell) if cell is not None else "" for cell in row] for row in known],
        texttemplate="%{text}",
        textfont={"size": min(12, 90 / len(grid.columns))},  # else it goes by the length of the marks in it
        xgap=2,
        ygap=2,
        hovertemplate=f"{escape(grid.y)} %{{y}}, {escape(grid.x)} %{{x}}<br>%{{text}}<extra></extra>",
        **options,
    )


def _text(grid: Grid, cell: Cell) -> str:
    return f'<span style="color:{grid.ink(cell)}">{escape(cell.text)}</span>'.replace("\n", "<br>")


def _layout() -> dict[str, Any]:
    return {
        "font": {"family": FONT, "size": 12, "color": "#202124"},
        "template": None,
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "margin": {"l": 60, "r": 20, "t": 30, "b": 60},
    }


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"
