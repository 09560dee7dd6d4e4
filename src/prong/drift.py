"""How far inputs have moved since a layer was whitened: what `period="auto"` watches.

A whitened layer's inputs x = (h - c) P, or U (h - c), have known mean squares when it is refreshed. They are measured
again on a few rows of every eighth update; their mean relative change is the drift. It costs what whitening those
rows costs, and weighs directions by the gain that P gives them: growth where the gain is large counts most.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from prong.precision import full_precision
from prong.projection import times_inverse
from prong.statistics import Moments
from prong.whitening import Whitening

EVERY = 8  # updates from one measurement to the next
ROWS = 128  # at most, per measurement
MEMORY = 0.8  # what a measurement still counts at the next
ENOUGH = 4  # measurements before the drift is believed
TOLERANCE = 0.25  # of the mean squares, before a layer is refreshed


def whitened_rows(rows: Tensor, whitening: Whitening) -> Tensor:
    """Whitened inputs U (h - c), or (h - c) P where there is no U, for rows h (groups, rows, in)."""
    U, P, c = whitening.U, whitening.P, whitening.c
    kept = U if U is not None else P
    assert kept is not None
    rows = rows.to(kept.dtype if U is not None or c is None else c.dtype)
    with full_precision(rows):
        centred = rows if c is None else rows - c.unsqueeze(1)
        if U is not None:
            return centred @ U.mT
        assert P is not None
        return times_inverse(centred, P, whitening.tail)


def expected_squares(whitening: Whitening, moments: Moments) -> Tensor:
    """The mean squares of `whitened_rows` over inputs with these moments, from which the whitening came: (groups, in).

    They are the diagonal of U Sigma U^T = I - eps U U^T, or of P Sigma P = P - eps P P.
    """
    with full_precision(moments.mean):
        if whitening.U is not None:
            return 1 - whitening.eps * whitening.U.square().sum(-1)
        assert whitening.P is not None
        if whitening.tail == 0:
            P = whitening.P.to(moments.mean.dtype)
            return P.diagonal(dim1=-2, dim2=-1) - whitening.eps * P.square().sum(-1)
        Sigma = moments.covariance(whitening.c is not None)
        once = times_inverse(Sigma, whitening.P, whitening.tail)
        return times_inverse(once.mT, whitening.P, whitening.tail).diagonal(dim1=-2, dim2=-1)


class Drift:
    """The mean squares that a site's whitened inputs should have, and those that they have had lately."""

    def __init__(self, expected: Tensor) -> None:
        self.listening = False
        self._expected = expected
        self._total = torch.zeros_like(expected)
        self._count = 0.0
        self._measurements = 0

    @torch.no_grad()
    def add(self, rows: Tensor, whitening: Whitening) -> None:
        """Measure, on some of these rows (groups, rows, in)."""
        if rows.shape[1] == 0:
            return
        x = whitened_rows(rows[:, :: -(-rows.shape[1] // ROWS)], whitening)
        self._total = self._total * MEMORY + x.square().sum(1)
        self._count = self._count * MEMORY + x.shape[1]
        self._measurements += 1

    def value(self) -> float:
        """The mean relative change, beyond what chance makes of so few rows; 0 before there is enough to tell."""
        if self._measurements < ENOUGH:
            return 0.0
        floor = self._expected.mean() * 1e-3  # dead inputs have no square to compare with
        change = (self._total / self._count - self._expected).abs() / (self._expected + floor)
        chance = math.sqrt(4 / (math.pi * self._count))  # E|chi^2/n - 1| of n normal rows
        return max(0.0, float(change.mean()) - chance)

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors and numbers."""
        return {
            "expected": self._expected,
            "total": self._total,
            "count": self._count,
            "measurements": self._measurements,
            "listening": self.listening,
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], device: torch.device) -> Drift:
        """What `state_dict` described."""
        drift = cls(state["expected"].to(device))
        drift._total = state["total"].to(device)
        drift._count, drift._measurements = float(state["count"]), int(state["measurements"])
        drift.listening = bool(state["listening"])
        return drift
