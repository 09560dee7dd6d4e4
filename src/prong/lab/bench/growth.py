"""How fast a cost grows: the exponent of a power law."""

from __future__ import annotations

import math
from collections.abc import Sequence


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float | None:
    """The a of `cost = k size^a` that fits best, by least squares of logarithms; None from fewer than two sizes."""
    if len(set(sizes)) < 2:
        return None
    x, y = ([math.log(value) for value in values] for values in (sizes, costs))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)
