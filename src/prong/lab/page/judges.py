"""From runs to findings: how each claim is judged.

Every number is that of medians over seeds, as in the figures. Judges are given runs that have ended, and never none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from prong.lab.methods import RECORDED
from prong.lab.page.findings import (
    SGD,
    SQUARES,
    Finding,
    arrival,
    as_long,
    best,
    first,
    found,
    is_prong,
    never,
    not_run,
    of,
    seeds,
    unequal,
    untestable,
    whitened,
)
from prong.lab.page.groups import Clock, Group, Point, groups, setting, shared_clock
from prong.lab.page.runs import Experiment
from prong.lab.page.tables import best_row, milliseconds, share
from prong.lab.page.views import relative_condition

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
    spread = f"{min(drops):.1f}-{max(drops):.1f}, {len(drops)} seeds" if len(drops) > 1 else "1 seed"
    return found(median(drops) > least, f"{median(drops):.1f} % ({spread})")


def stays_conditioned(experiment: Experiment) -> Finding:
    """Whether PRONG's relative condition number ends below SGD's and RMSprop's."""
    ours, theirs = of(experiment, "prong"), of(experiment, *SGD, "rmsprop")
    for name, keys in {"PRONG": ("prong",), "SGD": SGD, "RMSprop": ("rmsprop",)}.items():
        if not of(experiment, *keys):
            return not_run(name)
    if (finding := unequal(*ours, *theirs)) is not None:
        return finding
    finals = {group.name: group.final(relative_condition) for group in (*ours, *theirs)}
    if any(point is None for point in finals.values()):
        return untestable("a method diverged, or measured no condition number")
    told = ", ".join(f"{name} {point.median:.3g} %" for name, point in finals.items() if point is not None)
    lowest = best((*ours, *theirs), relative_condition)
    return found(lowest in ours, f"{told} of the first value; {seeds(*ours, *theirs)}")


def fewer_updates(experiment: Experiment, times: float) -> Finding:
    """How many times fewer updates the best PRONG needs to SGD's final error."""
    ours = whitened(experiment)
    aim = _aim(experiment, SQUARES, ours)
    if isinstance(aim, Finding):
        return aim
    sgd, error, base = aim
    ours = as_long(sgd, ours)
    who, updates = first(ours, lambda group: never(arrival(group, SQUARES, error)))
    if math.isinf(updates):
        return found(False, f"none reaches {sgd.name}'s final error of {error:.3g}; {seeds(sgd, *ours)}")
    ratio = base.update / max(1, updates)
    told = f"{who.name} after {updates:,.0f}, {sgd.name} after {base.update:,.0f} updates, to {error:.3g}"
    return found(ratio >= times, f"{ratio:.1f} times fewer: {told}; {seeds(sgd, who)}")


def less_time(experiment: Experiment, keys: Sequence[str] = (), batch_norm: bool = False) -> Finding:
    """Whether the best PRONG is first at SGD's final error by the clock, of these methods or of all.

    Those of different names must all be there for it to win, as long as SGD's, and whoever did not arrive have been
    given as much time.
    """
    ours = whitened(experiment, batch_norm)
    aim = _aim(experiment, SQUARES, ours)
    if isinstance(aim, Finding):
        return aim
    sgd, error, _ = aim
    known = groups(experiment.runs, lengths=False)
    entered = [g for g in known if not is_prong(g) and (not keys or g.method in keys)]
    ours, others = as_long(sgd, ours), as_long(sgd, entered)
    clock, how = shared_clock(experiment, (*ours, *others))

    def seconds(group: Group) -> float:
        return never(arrival(group, SQUARES, error, clock), seconds=True)

    who, fastest = first(ours, seconds)
    if math.isinf(fastest):
        return found(False, f"none reaches {sgd.name}'s final error of {error:.3g}; {seeds(sgd, *ours)}")
    rivals = sorted((seconds(group), group.name) for group in others)
    told = [f"{name} {_times(time / fastest if fastest else math.inf)}" for time, name in rivals]
    ours_told = f"{who.name} {fastest:.3g} s to {error:.3g}; {', '.join(told)}; {how}, {seeds(who, *others)}"
    if fastest < rivals[0][0]:
        missing = [RECORDED[key].name for key in keys if key not in SGD and not of(experiment, key)]
        if missing:
            return not_run(" and ".join(missing))
        if (finding := unequal(*entered)) is not None:
            return finding
        short = [g.name for g in others if math.isinf(seconds(g)) and not g.failed and _last(g, clock) < fastest]
        if short:
            return untestable(f"{' and '.join(short)} had less time than that", ours_told)
    return found(fastest < rivals[0][0], ours_told)


def cost(experiment: Experiment, key: str, times: float) -> Finding:
    """What an epoch costs, in SGD's."""
    methods, base = of(experiment, key), of(experiment, *SGD)
    if not methods or not base:
        return not_run("it" if base else "SGD")
    base = as_long(methods[0], base) or base
    apart = all(experiment.pace(group.runs[0]) is not None for group in (methods[0], base[0]))
    if not apart and (finding := unequal(methods[0], base[0])) is not None:
        return finding
    ms, sgd_ms = (milliseconds(experiment, group, apart) for group in (methods[0], base[0]))
    if ms is None or sgd_ms is None:
        return untestable("no updates were timed")
    batch = setting("batch")
    ratio = ms / sgd_ms * batch(base[0]) / batch(methods[0])
    side = "" if abs(ratio / times - 1) <= NEAR else ", cheaper here" if ratio < times else ", dearer here"
    return found(not side, f"{ratio:.2f} times ({ms:.1f} against {sgd_ms:.1f} ms per update){side}")


def time_share(experiment: Experiment, what: str, least: float = 0.0, most: float = 1.0) -> Finding:
    """Which part of PRONG's time goes into something."""
    known = of(experiment, "prong")
    if not known:
        return not_run("PRONG")
    measured = share(experiment, known[0], what)
    if measured is None:
        return untestable("the runs do not time it apart; prong bench pace does")
    return found(least <= measured <= most, f"{100 * measured:.1f} %")


def similar_speed_ups(experiment: Experiment) -> Finding:
    """Whether PRONG and batch norm need alike fewer updates than SGD, to SGD's final training error."""
    ours, theirs = whitened(experiment), of(experiment, "batchnorm")
    aim = _aim(experiment, "train_error", ours)
    if isinstance(aim, Finding):
        return aim
    sgd, error, base = aim
    if not theirs:
        return not_run("batch norm")
    if (finding := unequal(sgd, *ours, *theirs)) is not None:
        return finding
    sides = [first(side, lambda group: never(arrival(group, "train_error", error))) for side in (ours, theirs)]
    ratios = [base.update / max(1, updates) for _, updates in sides]  # infinity gives none
    told = ", ".join(f"{group.name} {_times(ratio)}" for (group, _), ratio in zip(sides, ratios, strict=True))
    alike = min(ratios) > 1 and max(ratios) / min(ratios) <= SIMILAR
    how = f"fewer updates to {sgd.name}'s {100 * error:.2f} %; {seeds(sgd, *(group for group, _ in sides))}"
    return found(alike, f"{told} {how}")


def generalises_better(experiment: Experiment) -> Finding:
    """PRONG's test error and batch norm's, each chosen by its validation error."""
    chosen = _each_chosen({"PRONG": whitened(experiment), "batch norm": of(experiment, "batchnorm")})
    if isinstance(chosen, Finding):
        return chosen
    ours, theirs = chosen
    told = ", ".join(f"{group.name} {100 * test:.2f} %" for group, _, test in (ours, theirs))
    return found(ours[2] < theirs[2], f"{told}; {seeds(ours[0], theirs[0])}")


def cheaper(experiment: Experiment) -> Finding:
    """Whether an epoch of that PRONG takes less time than batch norm's."""
    chosen = _each_chosen({"PRONG": whitened(experiment), "batch norm": of(experiment, "batchnorm")})
    if isinstance(chosen, Finding):
        return chosen
    (ours, *_), (theirs, *_) = chosen
    times = [milliseconds(experiment, group) for group in (ours, theirs)]
    if times[0] is None or times[1] is None:
        return untestable("no updates were timed")
    batch = setting("batch")
    ratio = times[0] / times[1] * batch(theirs) / batch(ours)
    told = f"{ours.name} {ratio:.3f} times batch norm's ({times[0]:.1f} against {times[1]:.1f} ms per update)"
    return found(ratio < 1, f"{told}; {seeds(ours, theirs)}")


def ahead_at_first(experiment: Experiment, part: float) -> Finding:
    """Whether PRONG+ has a lower validation error than batch norm when this part of all updates has been made."""
    chosen = _each_chosen({"PRONG+": of(experiment, "prong+"), "batch norm": of(experiment, "batchnorm")})
    if isinstance(chosen, Finding):
        return chosen
    ours, theirs = (group for group, _, _ in chosen)
    least = part * setting("updates")(ours)
    early = [next((p for p in g.points("validation_error") if p.update >= least), None) for g in (ours, theirs)]
    if early[0] is None or early[1] is None:
        return untestable("one of them did not come so far")
    told = ", ".join(f"{g.name} {100 * p.median:.1f} %" for g, p in zip((ours, theirs), early, strict=True) if p)
    how = f"after {early[0].update:,.0f} updates; {seeds(ours, theirs)}"
    return found(early[0].median < early[1].median, f"{told} {how}")


def top_1(experiment: Experiment) -> Finding:
    """Whether PRONG+ is within a point of batch norm's validation error, and both below SGD's."""
    wanted = {"batch norm": ("batchnorm",), "PRONG+": ("prong+",), "SGD": SGD}
    chosen = _each_chosen({name: of(experiment, *keys) for name, keys in wanted.items()})
    if isinstance(chosen, Finding):
        return chosen
    bn, plus, sgd = (100 * validation for _, validation, _ in chosen)
    told = f"{bn:.1f}, {plus:.1f}, {sgd:.1f} %; {seeds(*(group for group, _, _ in chosen))}"
    return found(abs(bn - plus) <= 1 and max(bn, plus) < sgd, told)


def _aim(experiment: Experiment, value: str, ours: Sequence[Group]) -> tuple[Group, float, Point] | Finding:
    """SGD, the error it ended with, and where it first had it; or why that says nothing of ours.

    It is run for as long as some of ours.
    """
    known = of(experiment, *SGD)
    if not known or not ours:
        return not_run("PRONG" if known else "SGD")
    alike = [group for group in known if as_long(group, ours)]
    if not alike and (finding := unequal(*ours, *known)) is not None:
        return finding
    sgd = best(alike, value)
    final = sgd.final(value) if sgd is not None else None
    if sgd is None or final is None:
        return untestable("SGD diverged")
    where = arrival(sgd, value, final.median)
    if where is None or where.update == 0:
        return untestable("SGD ended no better than it began")
    return sgd, final.median, where


def _each_chosen(sides: Mapping[str, Sequence[Group]]) -> list[tuple[Group, float, float]] | Finding:
    """Of every side the group with the smallest median validation error, that error, and the median test error there.

    Or why they cannot be compared: one is missing, has failed, or was run for another number of updates.
    """
    best: list[tuple[Group, float, float]] = []
    for name, candidates in sides.items():
        if not candidates:
            return not_run(name)
        entries = [(group, *_where_validated(group)) for group in candidates]
        best.append(min(entries, key=lambda entry: entry[1]))
        if math.isinf(best[-1][1]):
            return untestable(f"{name} diverged")
    return unequal(*(group for group, _, _ in best)) or best


def _where_validated(group: Group) -> tuple[float, float]:
    """Medians of the smallest validation error and of the test error there; a failed run is worse than any other."""
    rows = [best_row(run) or {} for run in group.runs]
    worst = math.inf
    validation = median(row.get("validation_error", worst) for row in rows)
    return validation, median(row.get("test_error", math.nan) if row else worst for row in rows)


def _last(group: Group, clock: Clock) -> float:
    """The seconds at which a group was last measured."""
    points = group.points(SQUARES, clock)
    return points[-1].seconds if points else 0.0


def _times(ratio: float) -> str:
    return "not at all" if ratio in (0, math.inf) else f"{ratio:.2f} times"
