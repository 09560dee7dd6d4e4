"""What an update costs when everything is counted: arithmetic on measured times."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

CLOSED, OPEN, REFRESH = "update", "open", "refresh"  # the parts that are timed; methods without windows have the first


@dataclass(frozen=True)
class AllIn:
    """Milliseconds per update, averaged over a whole period of PRONG; for other methods the update is all there is.

    Attributes:
        update: of an update that gathers no statistics.
        statistics: what gathering them adds, spread over the period.
        refresh: what the refresh takes, spread over the period.
    """

    update: float
    statistics: float = 0.0
    refresh: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.update + self.statistics + self.refresh


def window_updates(period: int, samples: int, examples: int) -> int:
    """Updates of a period during which the window is open, at so many examples per update."""
    return min(period, math.ceil(samples / examples))


def all_in(closed: float, opened: float, refresh: float, *, period: int, window: int) -> AllIn:
    """The average update of a period: (period - window) closed ones, `window` open ones and one refresh.

    total = (T - w) / T closed + w / T open + refresh / T
    """
    return AllIn(closed, window / period * (opened - closed), refresh / period)


def averages(cost: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, tuple[AllIn, list[float]]]:
    """Every method's average update, from medians; and its total in every repetition."""
    period, samples = config["period"], config["samples"]
    window = window_updates(period, samples, cost["batch"] * cost["rows"])

    def average(closed: float, opened: float | None = None, refresh: float = 0.0) -> AllIn:
        return AllIn(closed) if opened is None else all_in(closed, opened, refresh, period=period, window=window)

    result = {}
    for name, entry in cost["methods"].items():
        parts = [entry["ms"][part] for part in (CLOSED, OPEN, REFRESH) if part in entry["ms"]]
        totals = [average(*repetition).total for repetition in zip(*parts, strict=True)]
        result[name] = average(*map(median, parts)), totals
    return result
