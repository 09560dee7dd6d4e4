"""What an update and an initialisation cost, all methods in turn in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from types import MappingProxyType

import torch

import prong
from prong.lab.contestants import Initialisation, Problem
from prong.lab.methods import METHODS, OURS, Settings
from prong.lab.timing import interleaved
from prong.lab.training import Plan, Training

BLOCK = 20  # updates timed at once, of methods that do the same in all of them
NOTHING: Mapping[str, Sequence[float]] = MappingProxyType({})
SETTINGS: Settings = {"lr": 1e-5, "eps": 0.1}  # nobody gets far with these, nor astray


@dataclass(frozen=True)
class Pace:
    """A method's costs, as measured.

    Attributes:
        ms_per_update: one number per repetition, refreshes and all.
        start_up_seconds: what the first updates took beyond that: PRONG's first refreshes are close together, others
            make their state.
        initialisation_seconds: of a whitened initialisation, one number per repetition.
        failure: why the method cannot be run here, if it cannot; then there are no costs.
    """

    ms_per_update: list[float] = field(default_factory=list)
    start_up_seconds: float = 0.0
    initialisation_seconds: list[float] = field(default_factory=list)
    failure: str | None = None

    @property
    def milliseconds(self) -> float:
        """The median cost of an update."""
        return median(self.ms_per_update)

    def seconds(self, updates: float, initialisation: Initialisation) -> float:
        """What so many updates cost, with all that comes before them."""
        first = median(self.initialisation_seconds) if initialisation == "whitened" else 0.0
        return first + self.start_up_seconds + updates * self.milliseconds / 1000


def paces(
    methods: Iterable[str],
    problem: Problem,
    batch: int,
    repetitions: int,
    whitened: bool = True,
    on_block: Callable[[], None] = lambda: None,
    known: Mapping[str, Sequence[float]] = NOTHING,
) -> dict[str, Pace]:
    """Every method's costs, by name; those of a whitened initialisation if they are wanted.

    A method that cannot make its first block is not timed further; its pace says why. Those whose milliseconds per
    update are `known` only make that one.
    """
    laps = {name: _Lap(name, problem, batch) for name in methods}
    starts: dict[str, list[float]] = {name: [] for name in laps}
    if whitened:
        starts = interleaved({name: lap.initialise for name, lap in laps.items()}, repetitions, on_block)
    firsts = {name: lap.first() for name, lap in laps.items()}
    timed = [name for name in laps if isinstance(firsts[name], float) and name not in known]
    times = interleaved({name: laps[name].train for name in timed}, repetitions, on_block)
    times |= {name: [ms * laps[name].length / 1000 for ms in known[name]] for name in laps if name in known}
    return {name: _pace(firsts[name], times.get(name, []), laps[name].length, starts[name]) for name in laps}


def _pace(first: float | str, times: list[float], length: int, starts: list[float]) -> Pace:
    if isinstance(first, str):
        return Pace(failure=first)
    return Pace([1000 * seconds / length for seconds in times], max(0.0, first - median(times)), starts)


class _Lap:
    """A model of its own for a method, and how many of its updates make a block.

    Where there are refreshes, a block is a whole period. The first ends the time in which they are more frequent;
    every later one contains exactly one.
    """

    def __init__(self, name: str, problem: Problem, batch: int) -> None:
        torch.manual_seed(0)
        self.model = problem.build(batch_norm=METHODS[name].batch_norm)
        optimizer = METHODS[name].make(self.model, SETTINGS, problem.schedule)
        self.training = Training(problem, self.model, optimizer, Plan(1, batch=batch, warm_up=0, anneal="constant"))
        self.batches = problem.initial_batches()
        self.length = problem.schedule.period if name in OURS else BLOCK

    def initialise(self) -> None:
        """The whitened initialisation."""
        prong.initialize_(self.model, self.batches, prong.Absolute(SETTINGS["eps"]))

    def train(self) -> None:
        """One block of updates."""
        for _ in range(self.length):
            self.training.advance()

    def first(self) -> float | str:
        """The seconds of the first block, or why it cannot be made here."""
        start = perf_counter()
        try:
            self.train()
        except (RuntimeError, MemoryError) as error:  # peers have wishes about memory
            return f"cannot be run here: {error}"
        return perf_counter() - start
