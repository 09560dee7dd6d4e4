"""How far inputs have moved since a layer was whitened: what `period="auto"` watches.

Right after a refresh the whitened inputs x = U (h - c), or (h - c) P, are as white as they will be. Their mean squares
are measured then, on a few rows of every eighth update, and compared with later ones; the mean relative change is the
drift. It costs what whitening those rows costs, and weighs directions by the gain that P gives them. (The squares of
the samples that the whitening came from would be no reference: fresh samples have larger ones.)
"""

from __future__ import annotations

import math
from typing import Any

import torch

from prong.core.coordinates import whitened_rows
from prong.core.moments import MeanSquare
from prong.core.whitening import Whitening
from prong.layers.base import Inputs

EVERY = 8  # updates from one measurement to the next
ROWS = 128  # at most, per measurement
MEMORY = 0.8  # what a measurement still counts at the next
FIRST = 4  # measurements that show how white inputs are after a refresh
ENOUGH = 4  # later ones, before the drift is believed
TOLERANCE = 0.25  # of the mean squares, before a layer is refreshed


class Drift:
    """The mean squares of a site's whitened inputs, right after its refresh and lately."""

    def __init__(self) -> None:
        self.listening = False
        self._first, self._lately = MeanSquare(), MeanSquare()
        self._measurements = 0

    @torch.no_grad()
    def see(self, inputs: Inputs, whitening: Whitening) -> None:
        """Measure, on some of the rows (groups, rows, in)."""
        rows = inputs.rows
        if rows.shape[1] == 0:
            return
        x = whitened_rows(rows[:, :: -(-rows.shape[1] // ROWS)], whitening)
        self._lately.decay(MEMORY)
        for mean in (self._first,) if self._measurements < FIRST else (self._lately,):
            mean.add(x.square().sum(1), x.shape[1])
        self._measurements += 1

    @property
    def squares(self) -> tuple[MeanSquare, MeanSquare]:
        """The mean squares right after the refresh, and lately."""
        return self._first, self._lately

    def share(self, first: MeanSquare, lately: MeanSquare, weight: float) -> None:
        """Hold this part of the mean squares of all workers."""
        self._first, self._lately = first, lately
        for mean in self.squares:
            mean.decay(weight)

    def value(self, squares: tuple[MeanSquare, MeanSquare] | None = None) -> float:
        """The mean relative change, of these mean squares or its own; 0 before there is enough to tell."""
        return 0.0 if self._measurements < FIRST + ENOUGH else _change(*(squares or self.squares))

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors and numbers."""
        return {
            "first": self._first.state_dict(),
            "lately": self._lately.state_dict(),
            "measurements": self._measurements,
            "listening": self.listening,
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Continue from what `state_dict` gave."""
        self._first.load_state_dict(state["first"], device)
        self._lately.load_state_dict(state["lately"], device)
        self._measurements, self.listening = int(state["measurements"]), bool(state["listening"])


def _change(first: MeanSquare, lately: MeanSquare) -> float:
    """The mean relative change, beyond what chance makes of so few rows; 0 where there is nothing to compare.

    What is not finite is not known, and no reason to go on as before.
    """
    before, after = first.mean(), lately.mean()
    if before is None or after is None:
        return 0.0
    change = (after - before).abs() / (before + 1e-3 * before.mean())  # dead inputs have nothing to compare
    change = change.where(after != before, 0).nan_to_num(math.inf)
    chance = math.sqrt(4 / math.pi * (1 / first.count + 1 / lately.count))  # of normal rows
    return max(0.0, float(change.mean()) - chance)
