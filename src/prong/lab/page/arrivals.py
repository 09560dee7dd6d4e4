"""How soon every method is where SGD ends."""

from __future__ import annotations

import math
from dataclasses import replace

from prong.lab.bench.sheets import NONE, Sheet
from prong.lab.page.findings import SGD, SQUARES, arrival, as_long, best, comparable, of
from prong.lab.page.groups import Group, Point, groups, shared_clock
from prong.lab.page.runs import Experiment
from prong.lab.page.tables import FRACTIONS
from prong.lab.page.views import words

MEASURES = (SQUARES, "train_error")  # the first that SGD has


def arrivals(experiment: Experiment) -> Sheet | None:
    """Updates and seconds until medians are at the final training error of the best SGD, of runs as long as its own.

    None without SGD or another method, or where SGD's runs failed or ended no better than they began.
    """
    judged = replace(experiment, runs=comparable([run for run in experiment.runs if run.outcome is not None]))
    for measure in MEASURES:
        sgd = best(of(judged, *SGD), measure)
        final = sgd.final(measure) if sgd is not None else None
        if sgd is not None and final is not None:
            return _sheet(judged, measure, sgd, final.median)
    return None


def _sheet(experiment: Experiment, measure: str, sgd: Group, aim: float) -> Sheet | None:
    members = as_long(sgd, groups(experiment.runs, lengths=False))
    clock, how = shared_clock(experiment, members)
    places = {group.name: arrival(group, measure, aim, clock) for group in members}
    base = places[sgd.name]
    if base is None or base.update == 0 or len(members) == 1:
        return None
    rows = [[name, *_cells(place, base)] for name, place in places.items()]
    headings = ["method", "updates", "times fewer", "seconds", "times sooner"]
    told = f"{100 * aim:.3g} %" if measure in FRACTIONS else f"{aim:.3g}"
    end = f"{told}, {sgd.name}'s final {words(measure)}"
    note = f"The first measurement with a median of {end}, or less. Seconds were measured {how}."
    return Sheet("How soon", headings, rows, note)


def _cells(place: Point | None, base: Point) -> list[str]:
    if place is None:
        return ["never", NONE, "never", NONE]
    fewer = f"{base.update / place.update:,.1f}" if place.update else NONE
    if math.isnan(place.seconds):
        return [f"{place.update:,.0f}", fewer, NONE, NONE]
    sooner = f"{base.seconds / place.seconds:,.1f}" if place.seconds else NONE
    return [f"{place.update:,.0f}", fewer, f"{place.seconds:,.1f}", sooner]
