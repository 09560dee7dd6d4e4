"""Numbers along logarithmic axes."""

from __future__ import annotations

import math

from matplotlib.ticker import MaxNLocator

MOST = 10  # of an axis
HUGE = 1e7  # from here on numbers are written with powers of ten


def ticks(low: float, high: float) -> list[float]:
    """Round numbers along a logarithmic axis: two or more within its limits, and no more than can be read."""
    if low == high:
        low, high = low / 10, high * 10
    lowest, highest = (math.floor(math.log10(limit)) for limit in (low, high))
    beyond = (high / low) ** 0.04  # axes go on a little
    coarse = [(1, 2, 5)] if highest - lowest < 3 else [(1,)]
    for steps in (*coarse, (1, 2, 3, 5, 7), tuple(range(1, 10))):
        found = [step * 10.0**decade for decade in range(lowest, highest + 1) for step in steps]
        if sum(low <= tick <= high for tick in found) > 1:
            near = [tick for tick in found if low / beyond <= tick <= high * beyond]
            return near[:: math.ceil(len(near) / MOST)]
    even = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10])  # no round numbers within a part of a decade
    return [float(tick) for tick in even.tick_values(low, high) if low <= tick <= high]


def tick_label(tick: float) -> str:
    """A round number as axes have it."""
    return f"{tick:,.10g}" if abs(tick) < HUGE else f"{tick:g}"
