"""Tables in colours: values by two properties, each written in its cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib import colormaps

from prong.lab.page.ticks import HUGE

SCALE = "YlOrRd"  # of the values, from light to dark
EMPTY = "#e3e6ea"  # of cells that have none


@dataclass(frozen=True)
class Cell:
    """A value of a grid; None where a word stands for it. Another word may stand below a value."""

    value: float | None
    word: str = ""

    @property
    def text(self) -> str:
        """What is written in it; a cross where there is no value."""
        told = "✕" if self.value is None else _short(self.value)
        return f"{told}\n{self.word}" if self.word else told


def _short(value: float) -> str:
    """Three digits that count, or all before the point unless these are very many."""
    return f"{value:,.0f}" if 1e3 <= value < HUGE else f"{value:#.3g}".rstrip(".")


@dataclass(frozen=True)
class Grid:
    """Values by two properties, each written in its cell on a logarithmic scale of colours; what is missing is empty.

    Attributes:
        name: for files.
        title: in words.
        x: what columns differ in.
        y: what rows differ in.
        z: what the values are.
        columns: what each column has.
        rows: what each row has.
        cells: by row and column.
        note: what the words mean.
    """

    name: str
    title: str
    x: str
    y: str
    z: str
    columns: Sequence[str]
    rows: Sequence[str]
    cells: Sequence[Sequence[Cell | None]]
    note: str = ""

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the largest value that has a logarithm, apart; one and ten if there is none."""
        values = [cell.value for row in self.cells for cell in row if cell is not None and cell.value]
        known = [value for value in values if value > 0] or [1.0, 10.0]
        return (min(known), max(known)) if min(known) < max(known) else (known[0] / 2, known[0] * 2)

    def ink(self, cell: Cell) -> str:
        """What can be read on a cell's colour: white or black."""
        low, high = self.limits
        if cell.value is None or cell.value <= low:
            return "black"
        red, green, blue, _ = colormaps[SCALE](math.log(cell.value / low) / math.log(high / low))
        return "white" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.5 else "black"
