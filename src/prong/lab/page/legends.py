"""Where the legend of a printed figure stands, and in how many columns, so that no name leaves the figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

CROWDED = 8  # names that have room within the axes
WITHIN = 0.5  # of the figure's width: what a legend within the axes may take
MOST = 4  # columns
SMALL = 8.33  # points of its letters
MARGIN = 0.1  # inches on either side


@dataclass(frozen=True)
class Placement:
    """A legend below the axes: its columns, the points of its letters, and how many inches high it is."""

    columns: int
    size: float
    height: float


def placed(names: Sequence[str], width: float) -> Placement | None:
    """How a legend of these names stands below axes, in a figure so many inches wide; None if it fits within them."""
    alone, _ = measured(names, 1, SMALL)
    if len(names) <= CROWDED and alone <= WITHIN * width:
        return None
    room = width - 2 * MARGIN
    for columns in range(MOST, 0, -1):
        wide, high = measured(names, columns, SMALL)
        if wide <= room:
            return Placement(columns, SMALL, high)
    size = SMALL * room / alone
    return Placement(1, size, measured(names, 1, size)[1])


def measured(names: Sequence[str], columns: int, size: float) -> tuple[float, float]:
    """The inches that a legend takes, to the right and upwards."""
    canvas = Figure()
    lines = [Line2D([], []) for _ in names]
    box = canvas.legend(lines, names, ncols=columns, fontsize=size, frameon=False).get_window_extent()
    return box.width / canvas.dpi, box.height / canvas.dpi
