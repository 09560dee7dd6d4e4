"""What a race came to: updates and seconds to each threshold, and who was faster by how much."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from prong.lab.contestants import Contestant
from prong.lab.methods import OURS, Settings
from prong.lab.racing.clock import Pace
from prong.lab.training import Row, Run


@dataclass(frozen=True)
class Standing:
    """A contestant's runs with the settings that tuning chose for it.

    Attributes:
        contestant: who.
        pace: what its updates cost.
        cap: updates that a run may make.
        settings: chosen; None if no trial succeeded.
        runs: by seed.
    """

    contestant: Contestant
    pace: Pace
    cap: int = 0
    settings: Settings | None = None
    runs: Mapping[int, Run] = field(default_factory=dict)

    @property
    def failure(self) -> str | None:
        """Why there are no runs."""
        return self.pace.failure or ("every trial failed" if self.settings is None else None)

    @property
    def failures(self) -> dict[str, str]:
        """How its tuning or its runs failed."""
        if self.failure is not None:
            return {"tuning": self.failure}
        return {f"seed {seed}": run.failure for seed, run in self.runs.items() if run.failure is not None}

    def reaching(self, threshold: float) -> list[Row | None]:
        """Where each run reached an error, if it did."""
        return [run.reaching(threshold) for run in self.runs.values()]

    def updates(self, threshold: float) -> float:
        """The median number of updates to an error; a run that does not reach it takes for ever."""
        return median([math.inf if row is None else row.update for row in self.reaching(threshold)] or [math.inf])

    def seconds(self, threshold: float) -> float:
        """What the median number of updates to an error costs."""
        updates = self.updates(threshold)
        return self.cost(updates) if math.isfinite(updates) else math.inf

    def cost(self, updates: float) -> float:
        """Seconds of so many updates, initialisation and start-up included, on the common clock."""
        return self.pace.seconds(updates, self.contestant.initialisation)

    def median_run(self, threshold: float) -> Run:
        """The run in the middle: by updates to the threshold, among those that do not reach it by their last error."""
        runs = sorted(self.runs.values(), key=lambda run: _rank(run, threshold))
        middle = runs[(len(runs) - 1) // 2]
        return replace(middle, rows=[replace(row, seconds=self.cost(row.update)) for row in middle.rows])


def _rank(run: Run, threshold: float) -> tuple[float, float]:
    row = run.reaching(threshold)
    return math.inf if row is None else row.update, run.rows[-1].train_error if run.rows else math.inf


def standings(record: Mapping[str, Any]) -> list[Standing]:
    """How everybody in the record of a race stands, in its order."""
    result = []
    for entry in record["contestants"].values():
        contestant = Contestant(entry["method"], entry["initialisation"])
        runs = {int(seed): _run(run) for seed, run in sorted(entry["runs"].items(), key=lambda item: int(item[0]))}
        pace = Pace(**record["clock"][contestant.method_name])
        result.append(Standing(contestant, pace, entry["cap"], entry["chosen"], runs))
    return result


def _run(run: Mapping[str, Any]) -> Run:
    return Run([Row(**row) for row in run["rows"]], run["failure"])


@dataclass(frozen=True)
class Ratio:
    """How many times as much somebody needed as our best.

    Attributes:
        group: who was looked at.
        measure: seconds or updates.
        threshold: the error to reach.
        value: None if we did not reach it, or if nothing can be said of the group.
        at_least: whether nobody in the group reached it, and the value is the least that one had when it was stopped.
        peer: the group's best; None where nobody in it arrived.
        ours: our best.
    """

    group: str
    measure: str
    threshold: float
    value: float | None = None
    at_least: bool = False
    peer: str | None = None
    ours: str | None = None


NOT_REACHED = "'>': nobody arrived; the least that one of them had when it was stopped, over what our best needed."
GROUPS: Mapping[str, Callable[[Contestant], bool]] = {
    "best peer, standard init": lambda c: c.method_name not in OURS and c.initialisation == "standard",
    "best peer, whitened init": lambda c: c.method_name not in OURS and c.initialisation == "whitened",
    "SGD": lambda c: c.method_name == "SGD" and c.initialisation == "standard",
}
MEASURES: Mapping[str, tuple[Callable[[Standing, float], float], Callable[[Standing], float]]] = {
    "seconds": (Standing.seconds, lambda standing: standing.cost(standing.cap)),
    "updates": (Standing.updates, lambda standing: standing.cap),
}


def ratios(field: Sequence[Standing], thresholds: Sequence[float]) -> list[Ratio]:
    """Every group that takes part against our best, which may be another at each threshold and in each measure."""
    taking_part = [group for group, belongs in GROUPS.items() if any(belongs(s.contestant) for s in field)]
    return [
        _ratio(field, group, measure, threshold)
        for measure in MEASURES
        for group in taking_part
        for threshold in thresholds
    ]


def _ratio(field: Sequence[Standing], group: str, measure: str, threshold: float) -> Ratio:
    need, at_cap = MEASURES[measure]
    ours = _least(field, lambda s: need(s, threshold) if s.contestant.method_name in OURS else math.inf)
    theirs = [standing for standing in field if GROUPS[group](standing.contestant) and standing.runs]
    peer = _least(theirs, lambda s: need(s, threshold))
    reached = peer is not None
    if not reached:  # those who diverged were not stopped by the cap
        peer = _least(theirs, lambda s: math.inf if s.failures else at_cap(s))
    empty = Ratio(group, measure, threshold)
    if ours is None or peer is None or need(ours, threshold) <= 0:
        return empty
    value = (need(peer, threshold) if reached else at_cap(peer)) / need(ours, threshold)
    if not reached and value < 1:  # stopped before our best was there: that tells nothing
        return empty
    name = peer.contestant.name if reached else None
    return replace(empty, value=value, at_least=not reached, peer=name, ours=ours.contestant.name)


def _least(field: Sequence[Standing], key: Callable[[Standing], float]) -> Standing | None:
    """Who needs least, if that is finite."""
    return min((standing for standing in field if math.isfinite(key(standing))), key=key, default=None)


def summary(field: Sequence[Standing], thresholds: Sequence[float]) -> dict[str, Any]:
    """All of this as JSON has it."""
    return {
        "standings": {standing.contestant.name: _standing(standing, thresholds) for standing in field},
        "ratios": [asdict(ratio) for ratio in ratios(field, thresholds)],
    }


def _standing(standing: Standing, thresholds: Sequence[float]) -> dict[str, Any]:
    if standing.failure is not None:
        return {"failure": standing.failure}
    return {
        "settings": standing.settings,
        "ms_per_update": standing.pace.milliseconds,
        "seconds_before_updates": standing.cost(0),
        "failures": standing.failures,
        "thresholds": [_threshold(standing, threshold) for threshold in thresholds],
    }


def _threshold(standing: Standing, threshold: float) -> dict[str, Any]:
    rows = standing.reaching(threshold)
    updates, seconds = standing.updates(threshold), standing.seconds(threshold)
    return {
        "threshold": threshold,
        "updates": [row and row.update for row in rows],
        "run_seconds": [row and row.seconds for row in rows],
        "median_updates": updates if math.isfinite(updates) else None,
        "seconds": seconds if math.isfinite(seconds) else None,
    }
