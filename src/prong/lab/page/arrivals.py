"""How soon every method is where SGD ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from prong.lab.bench.sheets import NONE, Sheet
from prong.lab.page.findings import SGD, SQUARES, arrival, as_long, best, comparable, of
from prong.lab.page.groups import Clock, Group, Point, clocked, groups, own_seconds
from prong.lab.page.runs import Experiment
from prong.lab.page.views import words

MEASURES = {SQUARES: (1, ""), "train_error": (100, " %")}  # whichever there is, with a factor and a unit for it


def arrivals(experiment: Experiment) -> Sheet | None:
    """Updates and seconds until medians are at the final training error of the best SGD, of runs as long as its own.

    None without SGD or another method, or where SGD's runs failed or ended no better than they began.
    """
    judged = replace(experiment, runs=comparable([run for run in experiment.runs if run.outcome is not None]))
    for measure, (factor, unit) in MEASURES.items():
        sgd = best(of(judged, *SGD), measure)
        final = sgd.final(measure) if sgd is not None else None
        if sgd is None or final is None:
            continue
        members = as_long(sgd, groups(judged.runs, lengths=False))
        clock, how = shared_clock(judged, members)
        places = {group.name: arrival(group, measure, final.median, clock) for group in members}
        base = places[sgd.name]
        if base is None or base.update == 0 or len(members) == 1:
            return None
        rows = [[name, *_cells(place, base)] for name, place in places.items()]
        headings = ["method", "updates", "times fewer", "seconds", "times sooner"]
        aim = f"{factor * final.median:.3g}{unit}, {sgd.name}'s final {words(measure)}"
        note = f"The first measurement with a median of {aim}, or less. Seconds were measured {how}."
        return Sheet("How soon", headings, rows, note)
    return None


def shared_clock(experiment: Experiment, members: Sequence[Group]) -> tuple[Clock, str]:
    """One clock for all of these, and what it shows: costs measured apart if they were for each, else their own."""
    if all(experiment.pace(group.runs[0]) is not None for group in members):
        return clocked(experiment), "side by side"
    return own_seconds, "by the runs' own clocks"


def _cells(place: Point | None, base: Point) -> list[str]:
    if place is None:
        return ["never", NONE, "never", NONE]
    fewer = f"{base.update / place.update:,.1f}" if place.update else NONE
    if math.isnan(place.seconds):
        return [f"{place.update:,.0f}", fewer, NONE, NONE]
    sooner = f"{base.seconds / place.seconds:,.1f}" if place.seconds else NONE
    return [f"{place.update:,.0f}", fewer, f"{place.seconds:,.1f}", sooner]
