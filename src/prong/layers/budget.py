"""What whitening may cost, and the blocks and ranks that this allows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from prong.layers.layout import Layout

OWN = 200.0  # what else an update takes for every weight, as operations of a product: passes over memory, about
LEAST = 16  # inputs in a block, or directions told apart; fewer cost as much


@dataclass(frozen=True)
class Budget:
    """A share of the time of an update, and the largest block for which there is memory.

    A layer's own update takes 6 operations of every weight for every row of inputs, and `OWN`. With blocks of b inputs,
    a natural gradient takes 2 b, or 4 k if k directions are told apart; where V is held it is 4 b.
    """

    time: float
    largest: int

    def chosen(self, layout: Layout, rows: float, natural: bool) -> tuple[int | None, int | None]:
        """For a layer, the size of blocks, and the number of directions in each; None: all."""
        affordable = int(self.time * (6 * rows + OWN) / 4)
        if not natural:
            return self._divided(layout, min(self.largest, affordable)), None
        block = self._divided(layout, self.largest)
        rank = max(LEAST, affordable)
        return block, rank if 2 * rank < (block or layout.inputs) else None

    def _divided(self, layout: Layout, largest: int) -> int | None:
        """Blocks of equal size, at most so large."""
        largest = max(LEAST, largest)
        return None if largest >= layout.inputs else math.ceil(layout.inputs / math.ceil(layout.inputs / largest))


def largest_block(layouts: Iterable[Layout], entries: float) -> int:
    """The largest block with which the matrices of these layers have at most so many entries together."""
    sizes = [(layout.channels, layout.inputs) for layout in layouts]
    block = max((inputs for _, inputs in sizes), default=LEAST)
    while block > LEAST and sum(channels * min(inputs, block) for channels, inputs in sizes) > entries:
        block = max(LEAST, block // 2)
    return block
