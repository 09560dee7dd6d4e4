"""What figures show, before anybody draws them: curves with bands, and heat maps; grids have a module of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from matplotlib import colormaps
from matplotlib.colors import to_hex

from prong.lab.page.grids import Grid
from prong.lab.page.groups import Group, Point

MOST = 2000  # points of a curve
FAR = 4  # times as far as another that a curve may go on a linear axis
Dash = Literal["solid", "dash", "dot", "dashdot", "dashdotdot"]
DASHES: tuple[Dash, ...] = ("solid", "dash", "dot", "dashdot", "dashdotdot")
# Okabe and Ito's colours, which most eyes can tell apart; relatives share one.
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
PINK, RED, GREY = "#CC79A7", "#D55E00", "#333333"
OTHER = "#8C6D46"
LOOKS: Mapping[str, tuple[str, Dash]] = {
    "prong": (BLUE, "solid"),
    "prong-default": (BLUE, "dash"),
    "prong-balanced": (BLUE, "dashdotdot"),
    "prong-cutoff": (BLUE, "dot"),
    "prong-explicit": (BLUE, "dashdot"),
    "prong+": (SKY, "solid"),
    "prong-bn": (SKY, "dash"),
    "kfac-like": (SKY, "dot"),
    "prong-adamw": (SKY, "dashdot"),
    "prong-muon": (SKY, "dashdotdot"),
    "nesterov": (GREY, "solid"),
    "sgd": (GREY, "dash"),
    "batchnorm": (ORANGE, "solid"),
    "rmsprop": (GREEN, "solid"),
    "adam": (PINK, "solid"),
    "whitened-adam": (PINK, "dash"),
    "muon": (RED, "solid"),
    "soap": (RED, "dash"),
    "shampoo": (RED, "dot"),
    "psgd-kron": (RED, "dashdot"),
}


@dataclass(frozen=True)
class Curve:
    """A line with a band about it.

    Attributes:
        name: for the legend; curves of one name come and go together.
        x: of its points.
        y: of its points.
        low: of the band; empty without one.
        high: of the band.
        colour: of both.
        dash: of the line.
        broken: whether it ends because the run failed there.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    colour: str = GREY
    dash: Dash = "solid"
    broken: bool = False


@dataclass(frozen=True)
class Chart:
    """Curves on common axes."""

    name: str
    title: str
    x: str
    y: str
    curves: Sequence[Curve]
    log_x: bool = False
    log_y: bool = True
    note: str = ""


@dataclass(frozen=True)
class HeatMaps:
    """Matrices of one size side by side, on one logarithmic scale, by their titles."""

    name: str
    title: str
    panels: Mapping[str, Sequence[Sequence[float]]]
    note: str = ""


Figure = Chart | HeatMaps | Grid


def curve(group: Group, points: Sequence[Point], look: tuple[str, Dash], seconds: bool = False) -> Curve:
    """The medians of a group against updates or seconds; where it has several runs, with a band of their range."""
    points = thinned(points)
    band = len(group.runs) > 1
    return Curve(
        group.name,
        [point.seconds if seconds else point.update for point in points],
        [point.median for point in points],
        [point.low for point in points] if band else (),
        [point.high for point in points] if band else (),
        *look,
        broken=group.failed,
    )


def far_apart(curves: Sequence[Curve]) -> bool:
    """Whether some that did not break off go so much further than others that a linear axis would hide these."""
    ends = [line.x[-1] for line in curves if line.x and not line.broken]
    return bool(ends) and min(ends) > 0 and max(ends) > FAR * min(ends)


def under_way(curves: Sequence[Curve]) -> list[Curve]:
    """Curves from where the first of them makes its first step: what is before has no place on a logarithmic axis."""
    begin = min((line.x[1] for line in curves if len(line.x) > 1), default=0.0)
    return [_since(line, begin) for line in curves]


def _since(line: Curve, begin: float) -> Curve:
    left = sum(x < begin for x in line.x)
    x, y, low, high = (values[left:] for values in (line.x, line.y, line.low, line.high))
    return replace(line, x=x, y=y, low=low, high=high)


def thinned(points: Sequence[Point], most: int = MOST) -> Sequence[Point]:
    """At most so many points, at even distances, the first and the last among them."""
    if len(points) <= most:
        return points
    return [points[round(number * (len(points) - 1) / (most - 1))] for number in range(most)]


def looks(groups: Sequence[Group]) -> list[tuple[str, Dash]]:
    """A colour and a dash for each group: its method's, or the next dash where that is taken."""
    taken: list[tuple[str, Dash]] = []
    for group in groups:
        colour, dash = LOOKS.get(group.method, (OTHER, "solid"))
        free = [option for option in DASHES if (colour, option) not in taken]
        taken.append((colour, dash if (colour, dash) not in taken else free[0] if free else dash))
    return taken


def scale(values: Sequence[float]) -> dict[float, str]:
    """A colour for each of some ordered values, from dark to light."""
    steps = max(1, len(values) - 1)
    return {value: to_hex(colormaps["viridis"](0.85 * number / steps)) for number, value in enumerate(values)}


def two_ways(
    groups: Sequence[Group], colour: Callable[[Group], float], dash: Callable[[Group], float | str]
) -> list[tuple[str, Dash]]:
    """A colour for each value of one property of groups, a dash for each of another."""
    colours = scale(sorted({colour(group) for group in groups}))
    dashes = sorted({dash(group) for group in groups}, key=lambda value: (isinstance(value, str), value), reverse=True)
    known = dict(zip(dashes, DASHES * len(dashes), strict=False))
    return [(colours[colour(group)], known[dash(group)]) for group in groups]
