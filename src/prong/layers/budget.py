"""What whitening may cost, and the blocks that this allows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from prong.layers.layout import Layout

OWN = 200.0  # what else an update takes for every weight, as operations of a product: passes over memory, about
LEAST = 16  # inputs in a block; smaller ones cost as much


@dataclass(frozen=True)
class Budget:
    """A share of the time of an update, and the largest block for which there is memory.

    With blocks of b inputs, every weight of a layer takes part in 2 b operations for a natural gradient, and in 4 b
    where V is held; its own update takes 6 for every row of inputs, and `OWN`.
    """

    time: float
    largest: int

    def block(self, layout: Layout, rows: float, natural: bool) -> int | None:
        """The largest block for this layer; None: it need not be divided."""
        affordable = self.time * (6 * rows + OWN) / (2 if natural else 4)
        block = max(LEAST, min(self.largest, int(affordable)))
        return None if block >= layout.inputs else math.ceil(layout.inputs / math.ceil(layout.inputs / block))


def largest_block(layouts: Iterable[Layout], entries: float) -> int:
    """The largest block with which the matrices of these layers have at most so many entries together."""
    sizes = [(layout.channels, layout.inputs) for layout in layouts]
    block = max((inputs for _, inputs in sizes), default=LEAST)
    while block > LEAST and sum(channels * min(inputs, block) for channels, inputs in sizes) > entries:
        block = max(LEAST, block // 2)
    return block
