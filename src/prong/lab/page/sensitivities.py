"""How the claims about damping, learning rates, periods and initialisations are judged, from final training errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from prong.lab.page.findings import SQUARES, Finding, found, not_run, seeds, untestable
from prong.lab.page.groups import Group, groups, setting
from prong.lab.page.pairs import Pairs, lost_their_way, paired
from prong.lab.page.runs import Experiment, Run


def lower_eps_helps(experiment: Experiment) -> Finding:
    """Whether the smallest damping ends lower than the largest, at the smallest learning rate."""
    pairs = _pairs(experiment)
    rates, dampings = sorted({lr for lr, _ in pairs}), sorted({eps for _, eps in pairs})
    if len(dampings) < 2:
        return not_run("several ε")
    low, high = pairs.get((rates[0], dampings[0])), pairs.get((rates[0], dampings[-1]))
    if low is None or high is None:
        return not_run(f"ε {dampings[0]:g} or {dampings[-1]:g} at lr {rates[0]:g}")
    told = f"at lr {rates[0]:g}: {_end(low)} with ε {dampings[0]:g}, {_end(high)} with ε {dampings[-1]:g}"
    return found(_error(low) < _error(high), f"{told}; {seeds(low, high)}")


def eps_beats_rate(experiment: Experiment) -> Finding:
    """Whether the smallest learning rate with some lower damping ends below every larger one with the largest."""
    pairs = _pairs(experiment)
    rates, dampings = sorted({lr for lr, _ in pairs}), sorted({eps for _, eps in pairs})
    low = [group for (lr, eps), group in pairs.items() if lr == rates[0] and eps < dampings[-1]] if rates else []
    high = [group for (lr, eps), group in pairs.items() if lr > rates[0] and eps == dampings[-1]] if rates else []
    if not low or not high:
        return not_run("such pairs of ε and learning rate")
    small, large = min(low, key=_error), min(high, key=_error)
    told = [f"{_end(g)} with ε {setting('eps')(g):g} and lr {setting('lr')(g):g}" for g in (small, large)]
    return found(_error(small) < _error(large), f"{', '.join(told)}; {seeds(small, large)}")


def high_rates_diverge(experiment: Experiment) -> Finding:
    """Whether the largest learning rate is unstable with the smallest damping, and the smallest learning rate is not.

    Unstable is what diverges or loses its way: an error that grows and stays large is no less a failure than a NaN.
    """
    pairs = _pairs(experiment)
    rates, dampings = sorted({lr for lr, _ in pairs}), sorted({eps for _, eps in pairs})
    if len(rates) < 2:
        return not_run("several learning rates")
    if not {(rates[0], dampings[0]), (rates[-1], dampings[0])} <= pairs.keys():
        return not_run(f"ε {dampings[0]:g} at lr {rates[0]:g} or {rates[-1]:g}")
    failed = sorted(pair for pair, group in pairs.items() if group.failed)
    lost = sorted(lost_their_way(pairs))
    told = f"{len(failed)} of {len(pairs)} pairs diverged{_named(failed)}"
    told += f", {len(lost)} lost {'its' if len(lost) == 1 else 'their'} way{_named(lost)}"
    unstable = {*failed, *lost}
    holds = (rates[-1], dampings[0]) in unstable and (rates[0], dampings[0]) not in unstable
    return found(holds, f"{told}; {seeds(*pairs.values())}")


def whitened_start_wins(experiment: Experiment) -> Finding:
    """For how many periods the whitened initialisation ends below fan-in."""
    by_period = _periods(experiment)
    both = {period: starts for period, starts in by_period.items() if len(starts) == 2}
    if not both:
        return not_run("both initialisations")
    won = [period for period, starts in both.items() if _error(starts["whitened"]) < _error(starts["standard"])]
    ends = [f"T {p:,}: {_end(s['whitened'])} against {_end(s['standard'])}" for p, s in both.items()]
    members = [group for starts in both.values() for group in starts.values()]
    return found(len(won) == len(both), f"{len(won)} of {len(both)} T ({'; '.join(ends)}); {seeds(*members)}")


def long_period_degrades(experiment: Experiment, period: float) -> Finding:
    """Whether a very long period ends above the best of the others; where it does not, longer runs than it might."""
    ends = {p: starts["whitened"] for p, starts in _periods(experiment).items() if "whitened" in starts}
    if period not in ends or len(ends) < 2:
        return not_run(f"T {period:,.0f}, or of others")
    other = min((p for p in ends if p != period), key=lambda p: _error(ends[p]))
    told = f"{_end(ends[period])} at T {period:,.0f}, {_end(ends[other])} at T {other:,}; {seeds(*ends.values())}"
    updates, degrades = median(run.updates for run in ends[period].runs), _error(ends[period]) > _error(ends[other])
    if updates >= period:
        return found(degrades, told)
    short = f"runs of {updates:,.0f} updates, shorter than T"
    return found(True, f"{told}; {short}") if degrades else untestable(short, told)


def _named(known: Sequence[tuple[float, float]]) -> str:
    told = [f"lr {lr:g} with ε {eps:g}" for lr, eps in known]
    return f" ({', '.join(told)})" if told else ""


def _pairs(experiment: Experiment) -> Pairs:
    return paired(_of_prong(experiment, "eps"))


def _periods(experiment: Experiment) -> dict[float, dict[str, Group]]:
    known: dict[float, dict[str, Group]] = {}
    for group in groups(_of_prong(experiment, "period")):
        known.setdefault(setting("period")(group), {})[group.config["initialisation"]] = group
    return dict(sorted(known.items()))


def _of_prong(experiment: Experiment, part: str) -> list[Run]:
    """The runs of a part: the paper's method alone, where variants were run too."""
    return [run for run in experiment.part(part).runs if run.method == "prong"]


def _error(group: Group) -> float:
    final = group.final(SQUARES)
    return math.inf if final is None else final.median


def _end(group: Group) -> str:
    error = _error(group)
    return "diverged" if math.isinf(error) else f"{error:.3g}"
