"""Pairs of learning rate and damping: which were run, and which lost their way."""

from __future__ import annotations

from collections.abc import Sequence

from prong.lab.page.findings import SQUARES, comparable
from prong.lab.page.groups import Group, groups, setting
from prong.lab.page.runs import Experiment, Run

LOST, BEHIND = 1.5, 2  # times the lowest error reached, or that of a smaller rate: who ends above has lost its way
LOST_WORDS = f"above {LOST} times the lowest error it had reached, or {BEHIND} times that of a smaller rate with its ε"
Pairs = dict[tuple[float, float], Group]


def by_label(experiment: Experiment, part: str) -> dict[str, list[Run]]:
    """The runs of a part by the labels of their methods."""
    found: dict[str, list[Run]] = {}
    for run in experiment.part(part).runs:
        found.setdefault(run.config["label"], []).append(run)
    return found


def paired(runs: Sequence[Run]) -> Pairs:
    """The groups of a method's runs by learning rate and ε: of one length where they have ended, else as they are."""
    ended = comparable([run for run in runs if run.outcome is not None])
    going = [run for run in runs if run.outcome is None]
    known: Pairs = {}
    for group in groups([*ended, *going]):
        known.setdefault((setting("lr")(group), setting("eps")(group)), group)
    return known


def lost_their_way(pairs: Pairs) -> set[tuple[float, float]]:
    """The pairs that did not diverge but failed all the same, as LOST_WORDS says, by their medians."""
    medians = {pair: [point.median for point in group.points(SQUARES)] for pair, group in pairs.items()}
    ends = {pair: found[-1] for pair, found in medians.items() if found and not pairs[pair].failed}
    lost = {pair for pair, end in ends.items() if end > LOST * min(medians[pair])}
    for (lr, eps), end in ends.items():
        smaller = [other for (rate, damping), other in ends.items() if damping == eps and rate < lr]
        if smaller and end > BEHIND * min(smaller):
            lost.add((lr, eps))
    return lost
