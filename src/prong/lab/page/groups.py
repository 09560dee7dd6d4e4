"""Runs that differ in their seed alone, and their medians."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from prong.lab.page.runs import Experiment, Run, flat

Value = Callable[[Run, Mapping[str, float]], float | None]
Clock = Callable[[Run, Mapping[str, float]], float]
COUNTED = ("update", "epoch", "seconds", "lr")  # in rows, but not measures of anything
LENGTHY = ("data", "parameters")  # told only where nothing else tells groups apart


@dataclass(frozen=True)
class Point:
    """What the runs of a group have in common after an update: medians, and the range of values."""

    update: float
    seconds: float
    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Group:
    """A method with one configuration, at several seeds.

    Attributes:
        name: for legends and tables; says what tells it from others of the same method.
        runs: by seed.
    """

    name: str
    runs: Sequence[Run]

    @property
    def config(self) -> Mapping[str, Any]:
        """What its runs share, and the seed of the first."""
        return self.runs[0].config

    @property
    def method(self) -> str:
        """The method's key."""
        return self.runs[0].method

    @property
    def planned(self) -> int:
        """How many updates its runs were to make."""
        return self.runs[0].planned

    @property
    def ended(self) -> Group:
        """The runs that have ended, well or not."""
        return Group(self.name, [run for run in self.runs if run.outcome is not None])

    @property
    def failed(self) -> bool:
        """Whether at least half of its runs did."""
        return 2 * sum(run.failure is not None for run in self.runs) >= len(self.runs) > 0

    def points(self, value: str | Value, seconds: Clock | None = None) -> list[Point]:
        """The median over runs at every update that was measured, in order.

        A run that has failed counts as worse than any other from there on; where the median is such, there is no
        point. One that has just not come so far, or was stopped at its aim, does not count.
        """
        of = value if callable(value) else measured(value)
        clock = seconds or own_seconds
        rows = [{row["update"]: row for row in run.rows} for run in self.runs]
        points = []
        for update in sorted({update for table in rows for update in table}):
            values, times = [], []
            for run, table in zip(self.runs, rows, strict=True):
                found = of(run, table[update]) if update in table else None
                if found is not None:
                    values.append(found)
                    times.append(clock(run, table[update]))
                elif run.failure is not None and update not in table:
                    values.append(math.inf)
            middle = median(values) if values else math.inf
            if math.isfinite(middle) and times:
                finite = [v for v in values if math.isfinite(v)]
                points.append(Point(update, median(times), middle, min(finite), max(finite)))
        return points

    def final(self, value: str | Value) -> Point | None:
        """The last of its points; None without, or where half of its runs failed."""
        points = [] if self.failed else self.points(value)
        return points[-1] if points else None


def measured(name: str) -> Value:
    """What rows hold under a name."""
    return lambda run, row: row.get(name)


def own_seconds(run: Run, row: Mapping[str, float]) -> float:
    """The seconds that the run itself took until then."""
    return row.get("seconds", math.nan)


def clocked(experiment: Experiment) -> Clock:
    """Seconds at the costs that were measured apart, where they were; else the runs' own."""

    def seconds(run: Run, row: Mapping[str, float]) -> float:
        pace = experiment.pace(run)
        return own_seconds(run, row) if pace is None else pace.seconds(row["update"], run.config["initialisation"])

    return seconds


def shared_clock(experiment: Experiment, members: Iterable[Group]) -> tuple[Clock, str]:
    """One clock for all of these, and what it shows: costs measured apart if they were for each, else their own."""
    if all(experiment.pace(group.runs[0]) is not None for group in members):
        return clocked(experiment), "side by side"
    return own_seconds, "by the runs' own clocks"


def reaching(points: Iterable[Point], value: float) -> Point | None:
    """The first point with a median no larger than this."""
    return next((point for point in points if point.median <= value), None)


def groups(runs: Sequence[Run], lengths: bool = True) -> list[Group]:
    """Runs by what they share apart from the seed, in their order, under names that tell them apart.

    Where some are longer than others all say how long they are, unless these lengths are told elsewhere.
    """
    found: dict[str, list[Run]] = {}
    for run in runs:
        shared = {key: value for key, value in flat(run.config).items() if key != "seed"}
        found.setdefault(repr(sorted(shared.items())), []).append(run)
    configs = [flat(members[0].config) for members in found.values()]
    always = ["updates"] if lengths and len({config.get("updates") for config in configs}) > 1 else []
    names = [
        _name(config, [other for other in configs if other["label"] == config["label"]], always) for config in configs
    ]
    return [Group(name, members) for name, members in zip(names, found.values(), strict=True)]


def setting(name: str) -> Callable[[Group], Any]:
    """What a group has under a name; zero where it has nothing."""
    return lambda group: flat(group.config).get(name, 0.0)


def quantities(runs: Sequence[Run]) -> list[str]:
    """The names of what was measured, in the order of the rows."""
    names = dict.fromkeys(name for run in runs for row in run.rows for name in row)
    return [name for name in names if name not in COUNTED]


def _name(config: Mapping[str, Any], alike: Sequence[Mapping[str, Any]], always: Sequence[str]) -> str:
    """The label, what is not the same in all that share it, and what is not the same in all there are."""
    missing = object()
    differing = [key for key in config if key in always or len({repr(other.get(key, missing)) for other in alike}) > 1]
    told = [key for key in differing if key != "seed" and key not in LENGTHY]
    same = [other for other in alike if all(other.get(key, missing) == config[key] for key in told)]
    if len(same) > 1:
        told = [key for key in differing if key != "seed"]
    return ", ".join([config["label"], *(_told(key, config[key]) for key in told)])


def _told(key: str, value: Any) -> str:
    if key == "initialisation":
        return f"{value} init"
    if key == "updates" and isinstance(value, int):
        return f"{value:,} update{'s' if value != 1 else ''}"
    if isinstance(value, str):
        return value
    return f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
