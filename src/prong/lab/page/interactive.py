"""Figures by plotly: pieces of a page, to be looked into with the mouse."""

from __future__ import annotations

import math
from html import escape
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from prong.lab.figures import DECADES
from prong.lab.page.charts import Chart, Curve, Figure, HeatMaps

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


def library() -> str:
    """Plotly's javascript, for the page to be complete without a network."""
    return str(get_plotlyjs())


def as_html(figure: Figure, identity: str) -> str:
    """A figure as an element of a page that has the library, under an id of its own."""
    drawn = _heat(figure) if isinstance(figure, HeatMaps) else _chart(figure)
    config = {**CONFIG, "displayModeBar": False} if isinstance(figure, HeatMaps) else CONFIG
    text: str = drawn.to_html(full_html=False, include_plotlyjs=False, div_id=identity, config=config)
    return text


def _chart(chart: Chart) -> go.Figure:
    figure = go.Figure()
    named: set[str] = set()
    for curve in chart.curves:
        for trace in _traces(curve, chart, curve.name not in named):
            figure.add_trace(trace)
        named.add(curve.name)
    figure.update_layout(**_layout(), hovermode="closest", showlegend=True)
    figure.update_layout(height=380 + 14 * len(chart.curves))  # the legend takes its part of it
    figure.update_layout(legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0})
    for axis, title, log in ((figure.update_xaxes, chart.x, chart.log_x), (figure.update_yaxes, chart.y, chart.log_y)):
        axis(title=escape(title), type="log" if log else "linear", gridcolor=GRID, linecolor=LINE, zeroline=False)
        axis(automargin=True, exponentformat="none", separatethousands=True)
    if chart.log_y:
        ticks = _ticks(chart)
        figure.update_yaxes(tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])
    return figure


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
            line={"color": curve.colour, "dash": curve.dash, "width": 2},
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
    figure = make_subplots(
        1, len(maps.panels), horizontal_spacing=0.04, subplot_titles=[escape(title) for title in maps.panels]
    )
    largest = max(max(map(max, matrix)) for matrix in maps.panels.values())
    top = math.log10(largest)
    floor = top - DECADES
    for number, matrix in enumerate(maps.panels.values(), start=1):
        z = [[round(max(floor, math.log10(entry) if entry > 0 else floor), 2) for entry in row] for row in matrix]
        trace = go.Heatmap(z=z, coloraxis="coloraxis", hovertemplate="row %{y}, column %{x}<br>10^%{z}<extra></extra>")
        figure.add_trace(trace, row=1, col=number)
    ticks = list(range(math.ceil(floor), math.floor(top) + 1))
    bar = {"tickvals": ticks, "ticktext": [f"10<sup>{tick}</sup>" for tick in ticks], "thickness": 12}
    bar |= {"orientation": "h", "y": 0, "yanchor": "top", "len": 0.7}
    figure.update_layout(**_layout(), height=430, coloraxis={"colorscale": "Magma", "colorbar": bar})
    figure.update_coloraxes(cmin=floor, cmax=top)
    figure.update_xaxes(showticklabels=False, ticks="", constrain="domain", showgrid=False)
    figure.update_yaxes(
        showticklabels=False, ticks="", constrain="domain", showgrid=False, autorange="reversed", constraintoward="top"
    )
    for number in range(1, len(maps.panels) + 1):
        figure.update_yaxes(scaleanchor=f"x{number if number > 1 else ''}", row=1, col=number)
    return figure


def _layout() -> dict[str, Any]:
    return {
        "font": {"family": FONT, "size": 12, "color": "#202124"},
        "template": None,
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "margin": {"l": 60, "r": 20, "t": 30, "b": 60},
    }


def _ticks(chart: Chart) -> list[float]:
    """Round numbers along a logarithmic axis: fewer, the more decades there are."""
    values = [y for curve in chart.curves for y in (*curve.y, *curve.low, *curve.high) if y > 0]
    lowest, highest = (math.floor(math.log10(y)) for y in (min(values), max(values)))
    steps = (1, 2, 5) if highest - lowest < 3 else (1,)
    return [step * 10.0**decade for decade in range(lowest, highest + 1) for step in steps]


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"
