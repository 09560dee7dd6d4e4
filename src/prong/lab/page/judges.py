"""From runs to findings: how each claim is judged.

Every number is that of medians over seeds, as in the figures. Judges are given runs that have ended, and never none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from prong.lab.page.findings import (
    SGD,
    SQUARES,
    Finding,
    arrival,
    best,
    first,
    found,
    is_prong,
    never,
    not_run,
    of,
    seeds,
    untestable,
    whitened,
)
from prong.lab.page.groups import Group, Point, clocked, groups
from prong.lab.page.runs import Experiment
from prong.lab.page.tables import best_row, milliseconds, share
from prong.lab.page.views import relative_condition, setting

NEAR = 0.25  # how far from the paper's number a cost may be
SIMILAR = 1.5  # the largest ratio of two speed-ups that are alike


def reduction(experiment: Experiment, least: float) -> Finding:
    """By how many % the first whitening reduces the condition number."""
    prong = of(experiment, "prong")
    if not prong:
        return not_run("PRONG")
    kept = [run.keepsakes for group in prong for run in group.runs]
    drops = [100 * (1 - k["condition_after"] / k["condition_before"]) for k in kept if "condition_before" in k]
    if not drops:
        return untestable("the runs kept no condition number")
    ours = f"{median(drops):.1f} % ({min(drops):.1f}-{max(drops):.1f}, {len(drops)} seed{'s' * (len(drops) > 1)})"
    return found(median(drops) > least, ours)


def stays_conditioned(experiment: Experiment) -> Finding:
    """Whether PRONG's relative condition number ends below SGD's and RMSprop's."""
    ours, theirs = of(experiment, "prong"), of(experiment, *SGD, "rmsprop")
    if not ours or not theirs:
        return not_run("PRONG" if not ours else "SGD or RMSprop")
    finals = {group.name: group.final(relative_condition) for group in (*ours, *theirs)}
    if any(point is None for point in finals.values()):
        return untestable("a method diverged, or measured no condition number")
    told = ", ".join(f"{name} {point.median:.3g} %" for name, point in finals.items() if point is not None)
    lowest = best((*ours, *theirs), relative_condition)
    return found(lowest in ours, f"{told} of the first value; {seeds(*ours, *theirs)}")


def fewer_updates(experiment: Experiment, times: float) -> Finding:
    """How many times fewer updates the best PRONG needs to SGD's final error."""
    aim = _aim(experiment, SQUARES)
    if isinstance(aim, Finding):
        return aim
    sgd, error, base = aim
    ours = whitened(experiment)
    if not ours:
        return not_run("PRONG")
    who, updates = first(ours, lambda group: never(arrival(group, SQUARES, error)))
    if math.isinf(updates):
        return found(False, f"none reaches {sgd.name}'s final error of {error:.3g}; {seeds(sgd, *ours)}")
    ratio = base.update / max(1, updates)
    told = f"{who.name} after {updates:,.0f}, {sgd.name} after {base.update:,.0f} updates, to {error:.3g}"
    return found(ratio >= times, f"{ratio:.1f} times fewer: {told}; {seeds(sgd, who)}")


def less_time(experiment: Experiment, keys: Sequence[str] | None = None) -> Finding:
    """Whether the best PRONG is first at SGD's final error by the clock, of these methods or of all."""
    aim = _aim(experiment, SQUARES)
    if isinstance(aim, Finding):
        return aim
    sgd, error, _ = aim
    ours = whitened(experiment)
    others = [g for g in groups(experiment.runs) if not is_prong(g) and (keys is None or g.method in keys)]
    if not ours:
        return not_run("PRONG")

    def seconds(group: Group) -> float:
        return never(arrival(group, SQUARES, error, clocked(experiment)), seconds=True)

    who, fastest = first(ours, seconds)
    if math.isinf(fastest):
        return found(False, f"none reaches {sgd.name}'s final error of {error:.3g}; {seeds(sgd, *ours)}")
    rivals = sorted((seconds(group), group.name) for group in others)
    told = [f"{name} {_times(time / fastest if fastest else math.inf)}" for time, name in rivals]
    how = "side by side" if experiment.untimed() == [] else "by the runs' own clocks"
    ours_told = f"{who.name} {fastest:.3g} s to {error:.3g}; {', '.join(told)}; {how}, {seeds(who, *others)}"
    return found(fastest < rivals[0][0], ours_told)


def cost(experiment: Experiment, key: str, times: float) -> Finding:
    """What an epoch costs, in SGD's."""
    methods, base = of(experiment, key), of(experiment, *SGD)
    if not methods or not base:
        return not_run("it" if base else "SGD")
    ms, sgd_ms = milliseconds(experiment, methods[0]), milliseconds(experiment, base[0])
    if ms is None or sgd_ms is None:
        return untestable("no updates were timed")
    batch = setting("batch")
    ratio = ms / sgd_ms * batch(base[0]) / batch(methods[0])
    side = "" if abs(ratio / times - 1) <= NEAR else ", cheaper here" if ratio < times else ", dearer here"
    return found(not side, f"{ratio:.2f} times ({ms:.1f} against {sgd_ms:.1f} ms per update){side}")


def time_share(experiment: Experiment, what: str, part: float) -> Finding:
    """Which part of PRONG's time goes into something."""
    if not of(experiment, "prong"):
        return not_run("PRONG")
    measured = share(experiment, "prong", what)
    if measured is None:
        return untestable("the runs do not time it apart; prong bench step-cost does")
    return found(abs(measured / part - 1) <= NEAR, f"{100 * measured:.1f} %")


def similar_speed_ups(experiment: Experiment) -> Finding:
    """Whether PRONG and batch norm need alike fewer updates than SGD, to SGD's final training error."""
    aim = _aim(experiment, "train_error")
    if isinstance(aim, Finding):
        return aim
    sgd, error, base = aim
    ours, theirs = whitened(experiment), of(experiment, "batchnorm")
    if not ours or not theirs:
        return not_run("batch norm" if ours else "PRONG")
    sides = [first(side, lambda group: never(arrival(group, "train_error", error))) for side in (ours, theirs)]
    ratios = [base.update / max(1, updates) for _, updates in sides]  # infinity gives none
    told = ", ".join(f"{group.name} {_times(ratio)}" for (group, _), ratio in zip(sides, ratios, strict=True))
    alike = min(ratios) > 1 and max(ratios) / min(ratios) <= SIMILAR
    how = f"fewer updates to {sgd.name}'s {100 * error:.2f} %; {seeds(sgd, *(group for group, _ in sides))}"
    return found(alike, f"{told} {how}")


def generalises_better(experiment: Experiment) -> Finding:
    """PRONG's test error and batch norm's, each chosen by its validation error."""
    ours, theirs = _chosen(whitened(experiment)), _chosen(of(experiment, "batchnorm"))
    if ours is None or theirs is None:
        return not_run("PRONG" if ours is None else "batch norm")
    told = ", ".join(f"{group.name} {100 * test:.2f} %" for group, _, test in (ours, theirs))
    return found(ours[2] < theirs[2], f"{told}; {seeds(ours[0], theirs[0])}")


def ahead_at_first(experiment: Experiment, part: float) -> Finding:
    """Whether PRONG+ has a lower validation error than batch norm when this part of all updates has been made."""
    chosen = [_chosen(of(experiment, key)) for key in ("prong+", "batchnorm")]
    if chosen[0] is None or chosen[1] is None:
        return not_run("batch norm or PRONG+")
    ours, theirs = chosen[0][0], chosen[1][0]
    least = part * min(setting("updates")(group) for group in (ours, theirs))
    early = [next((p for p in g.points("validation_error") if p.update >= least), None) for g in (ours, theirs)]
    if early[0] is None or early[1] is None:
        return untestable("one of them did not come so far")
    told = ", ".join(f"{g.name} {100 * p.median:.1f} %" for g, p in zip((ours, theirs), early, strict=True) if p)
    how = f"after {early[0].update:,.0f} updates; {seeds(ours, theirs)}"
    return found(early[0].median < early[1].median, f"{told} {how}")


def top_1(experiment: Experiment) -> Finding:
    """Whether PRONG+ is within a point of batch norm's validation error, and both below SGD's."""
    chosen = [_chosen(of(experiment, *keys)) for keys in (("batchnorm",), ("prong+",), SGD)]
    if any(one is None for one in chosen):
        return not_run("batch norm, PRONG+ or SGD")
    bn, plus, sgd = (100 * one[1] for one in chosen if one is not None)
    told = f"{bn:.1f}, {plus:.1f}, {sgd:.1f} %; {seeds(*(one[0] for one in chosen if one is not None))}"
    return found(abs(bn - plus) <= 1 and max(bn, plus) < sgd, told)


def _aim(experiment: Experiment, value: str) -> tuple[Group, float, Point] | Finding:
    """SGD, the error it ended with, and where it first had it; or why that says nothing."""
    known = of(experiment, *SGD)
    if not known:
        return not_run("SGD")
    sgd = best(known, value)
    final = sgd.final(value) if sgd is not None else None
    if sgd is None or final is None:
        return untestable("SGD diverged")
    where = arrival(sgd, value, final.median)
    if where is None or where.update == 0:
        return untestable("SGD ended no better than it began")
    return sgd, final.median, where


def _chosen(candidates: Sequence[Group]) -> tuple[Group, float, float] | None:
    """The group with the smallest median validation error, that error, and the median test error there."""
    entries: list[tuple[Group, float, float]] = []
    for group in candidates:
        rows = [row for run in group.runs if (row := best_row(run))]
        if rows and not group.failed:
            validation, test = (
                median(row.get(f"{name}_error", math.nan) for row in rows) for name in ("validation", "test")
            )
            entries.append((group, validation, test))
    return min(entries, key=lambda entry: entry[1], default=None)


def _times(ratio: float) -> str:
    return "not at all" if ratio in (0, math.inf) else f"{ratio:.2f} times"
