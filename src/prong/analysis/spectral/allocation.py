"""Which rank for which layer, so that a network fits a budget of parameters. Pure functions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Plan = Literal["plain", "outputs", "inputs"]


@dataclass(frozen=True)
class Option:
    """One way to have a layer.

    Plans are "plain" as it was; "outputs": few outputs, then a linear map to all of them; "inputs": of a convolution,
    a 1 x 1 convolution to few maps, then the kernel.
    """

    plan: Plan
    rank: int  # the number of outputs or maps in between
    parameters: int  # of the layer, then
    error: float  # the expected share of the variance of the layer's outputs that is lost


Options = Mapping[str, Sequence[Option]]
Choice = dict[str, Option]


def worthwhile(options: Sequence[Option]) -> list[Option]:
    """Those than which none is smaller and as good: from the smallest, of falling error."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda o: (o.parameters, o.error)):
        if not kept or option.error < kept[-1].error:
            kept.append(option)
    return kept


def keep_share(options: Options, share: float) -> Choice:
    """For every layer the smallest option that keeps at least this share of its outputs' variance."""
    return {
        name: next(o for o in worthwhile(several) if o.error <= 1 - share or o.error == 0)
        for name, several in options.items()
    }


def total_error(choice: Choice) -> float:
    """The sum of errors over layers."""
    return sum(option.error for option in choice.values())


def total_parameters(choice: Choice) -> int:
    """The sum of parameters over layers."""
    return sum(option.parameters for option in choice.values())


def equal_shares(options: Options, budget: int) -> Choice:
    """Every layer has the same share of its own parameters: its best option within that."""
    several = _within(options, budget)
    sizes = {name: max(o.parameters for o in layer) for name, layer in options.items()}
    shares = sorted({o.parameters / sizes[name] for name, layer in several.items() for o in layer})

    def at(share: float) -> Choice:
        return {
            name: [o for o in layer if o is layer[0] or o.parameters / sizes[name] <= share][-1]
            for name, layer in several.items()
        }

    fitting = bisect_right(shares, budget, key=lambda share: total_parameters(at(share)))  # which it grows with
    return at(shares[max(0, fitting - 1)])


def least_error(options: Options, budget: int) -> Choice:
    """Small error over all layers within a budget: parameters go where they save most error each.

    Steps along the lower convex hulls of (parameters, error) are taken in the order of error saved per parameter. What
    is left of the budget goes to the single change that saves most, again and again. Never worse than `equal_shares`.
    """
    several = _within(options, budget)
    choice = {name: layer[0] for name, layer in several.items()}
    spare = budget - total_parameters(choice)
    steps = [(_slope(a, b), name, b) for name, layer in several.items() for a, b in pairwise(_hull(layer))]
    full: set[str] = set()
    for _, name, option in sorted(steps, key=lambda step: step[0]):
        cost = option.parameters - choice[name].parameters
        if cost > spare:
            full.add(name)
        if name not in full:
            choice[name], spare = option, spare - cost
    while changes := [
        (o.error - choice[name].error, name, o)
        for name, layer in several.items()
        for o in layer
        if o.error < choice[name].error and o.parameters - choice[name].parameters <= spare
    ]:
        _, name, option = min(changes, key=lambda change: change[0])
        choice[name], spare = option, spare - (option.parameters - choice[name].parameters)
    return min(choice, equal_shares(options, budget), key=total_error)


ALLOCATIONS: dict[str, Callable[[Options, int], Choice]] = {"least": least_error, "equal": equal_shares}


def _within(options: Options, budget: int) -> dict[str, list[Option]]:
    """What is worthwhile, if the smallest of it fits."""
    several = {name: worthwhile(layer) for name, layer in options.items()}
    smallest = sum(layer[0].parameters for layer in several.values())
    if smallest > budget:
        raise ValueError(f"{smallest:,} parameters are the fewest that these layers can have, not {budget:,}")
    return several


def _slope(a: Option, b: Option) -> float:
    """Error gained (below zero: saved) per parameter from a to b."""
    return (b.error - a.error) / (b.parameters - a.parameters)


def _hull(options: Sequence[Option]) -> list[Option]:
    """The lower convex hull: slopes rise towards zero along it."""
    hull: list[Option] = []
    for option in options:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull
