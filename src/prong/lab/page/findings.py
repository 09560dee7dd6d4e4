"""What became of a claim, and what judges have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from prong.lab.bench.sheets import NONE
from prong.lab.methods import RECORDED
from prong.lab.page.groups import Clock, Group, Point, Value, groups, reaching
from prong.lab.page.runs import Experiment, Run

Verdict = Literal["holds", "does not hold", "cannot be tested here", "not run"]
SGD = ("nesterov", "sgd")
SQUARES = "train_squared_error"


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
    known = groups(experiment.runs, lengths=False)  # `unequal` tells them
    return [group for key in keys for group in known if group.method == key]


def whitened(experiment: Experiment, batch_norm: bool = False) -> list[Group]:
    """PRONG in all its variants, or in all on models without batch norm."""
    known = [group for group in groups(experiment.runs, lengths=False) if is_prong(group)]
    return [
        group for group in known if batch_norm or not (group.method in RECORDED and RECORDED[group.method].batch_norm)
    ]


def comparable(runs: Sequence[Run]) -> list[Run]:
    """Of runs, those that may be judged together, part by part: on the same data, and of every method of one length.

    The data is that of the longest run. The length is the longest that PRONG and another method were both run for; of
    a method that was not, those of its longest runs are here, for `unequal` to tell.
    """
    parts: dict[str, list[Run]] = {}
    for run in runs:
        parts.setdefault(run.config["part"], []).append(run)
    return [run for members in parts.values() for run in _comparable(members)]


def _comparable(runs: Sequence[Run]) -> list[Run]:
    data = max(runs, key=lambda run: run.planned).config["data"]
    runs = [run for run in runs if run.config["data"] == data]
    lengths: dict[str, set[int]] = {}
    for run in runs:
        lengths.setdefault(run.method, set()).add(run.planned)
    ours, theirs = (
        {length for method, known in lengths.items() if _is_prong(method) is side for length in known}
        for side in (True, False)
    )
    common = max(ours & theirs, default=None)
    wanted = {method: common if common in known else max(known) for method, known in lengths.items()}
    return [run for run in runs if run.planned == wanted[run.method]]


def too_short(runs: Sequence[Run], least: int) -> Finding:
    """That runs have too few updates for a claim to be judged from them."""
    lengths = sorted({run.planned for run in runs})
    told = f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}"
    updates = "update" if lengths == [1] else "updates"
    return untestable(f"runs of {told} {updates}, too short to judge ({least:,} or more)")


def as_long(group: Group, candidates: Iterable[Group]) -> list[Group]:
    """Those that were to make as many updates as a group."""
    return [candidate for candidate in candidates if candidate.planned == group.planned]


def unequal(*members: Group) -> Finding | None:
    """That these cannot be compared, where they were to be of different lengths."""
    lengths: dict[int, list[str]] = {}
    for group in members:
        lengths.setdefault(group.planned, []).append(group.config["label"])
    if len(lengths) == 1:
        return None
    told = [f"{length:,} updates ({'; '.join(dict.fromkeys(lengths[length]))})" for length in sorted(lengths)]
    return untestable(f"runs of different lengths, {', '.join(told)}")


def is_prong(group: Group) -> bool:
    """Whether it is PRONG, in any variant."""
    return _is_prong(group.method)


def _is_prong(method: str) -> bool:
    return method.startswith("prong") or method == "kfac-like"


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
