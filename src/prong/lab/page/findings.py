"""What became of a claim, and what judges have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from prong.lab.bench.sheets import NONE
from prong.lab.methods import KEYS
from prong.lab.page.groups import Group, Point, Value, groups, reaching
from prong.lab.page.runs import Experiment, Run, flat

Verdict = Literal["holds", "does not hold", "cannot be tested here", "not run"]
SGD = ("nesterov", "sgd")
SQUARES = "train_squared_error"
Clock = Callable[..., float]


@dataclass(frozen=True)
class Finding:
    """Our number, as text, and a verdict; of what cannot be tested here, why."""

    ours: str
    verdict: Verdict
    why: str = ""

    @property
    def words(self) -> str:
        """The verdict with its reason."""
        return f"{self.verdict}: {self.why}" if self.why else self.verdict


def found(holds: bool, ours: str) -> Finding:
    """A claim that was tested."""
    return Finding(ours, "holds" if holds else "does not hold")


def untestable(why: str, ours: str = NONE) -> Finding:
    """A claim that these runs say nothing of."""
    return Finding(ours, "cannot be tested here", why)


def not_run(what: str) -> Finding:
    """A claim some of whose runs are missing."""
    return Finding(NONE, "not run", f"no runs of {what}")


def of(experiment: Experiment, *keys: str) -> list[Group]:
    """The groups of methods, by key, in the order of the keys."""
    known = groups(experiment.runs)
    return [group for key in keys for group in known if group.method == key]


def whitened(experiment: Experiment, batch_norm: bool = False) -> list[Group]:
    """PRONG in all its variants, or in all on models without batch norm."""
    known = [group for group in groups(experiment.runs) if is_prong(group)]
    return [group for group in known if batch_norm or not (group.method in KEYS and KEYS[group.method].batch_norm)]


def comparable(runs: Sequence[Run]) -> list[Run]:
    """Of runs that have ended, those that may be judged together: on the same data, and of every method the longest.

    The data is that of the longest run. Trials of sweeps are no results.
    """
    results = [run for run in runs if run.config["part"] != "sweep"]
    if not results:
        return []
    data = max(results, key=_planned).config["data"]
    results = [run for run in results if run.config["data"] == data]
    longest: dict[str, int] = {}
    for run in results:
        longest[run.method] = max(_planned(run), longest.get(run.method, 0))
    return [run for run in results if _planned(run) == longest[run.method]]


def unequal(*members: Group) -> Finding | None:
    """That these cannot be compared at their ends, where they were to be of different lengths."""
    lengths = {group.name: _planned(group.runs[0]) for group in members}
    if len(set(lengths.values())) == 1:
        return None
    return untestable(", ".join(f"{name} was run for {updates:,}" for name, updates in lengths.items()) + " updates")


def _planned(run: Run) -> int:
    return int(flat(run.config).get("updates") or run.updates)


def is_prong(group: Group) -> bool:
    """Whether it is PRONG, in any variant."""
    return group.method.startswith("prong") or group.method == "kfac-like"


def best(candidates: Iterable[Group], value: str | Value) -> Group | None:
    """The group that ended with the smallest median; None if none came to its end."""
    finals = [(final.median, number, group) for number, group in enumerate(candidates) if (final := group.final(value))]
    return min(finals, key=lambda entry: entry[:2])[2] if finals else None


def arrival(group: Group, value: str | Value, aim: float, clock: Clock | None = None) -> Point | None:
    """Where a group's median reaches an aim, if it does; who diverges after that has not arrived."""
    return None if group.failed else reaching(group.points(value, clock), aim)


def first(candidates: Sequence[Group], place: Callable[[Group], float]) -> tuple[Group, float]:
    """Who is first, and where; nobody reaches infinity."""
    return min(((group, place(group)) for group in candidates), key=lambda entry: entry[1])


def never(point: Point | None, seconds: bool = False) -> float:
    """The update or the seconds of a point; infinity without one."""
    return math.inf if point is None else point.seconds if seconds else point.update


def seeds(*members: Group) -> str:
    """How many there were: `3 seeds`, or `1 to 3 seeds` where they differ."""
    counts = sorted({len(group.runs) for group in members})
    told = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{told} seed{'' if counts == [1] else 's'}"
