"""The rules of a race: what is the same for everybody."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from prong.lab.contestants import Contestant, Initialisation, Problem
from prong.lab.methods import MOMENTUM
from prong.lab.racing.clock import Pace
from prong.lab.racing.search import STARTUP
from prong.lab.training import Plan

TUNING_SEED = 1
NONE: Mapping[int, float] = {}


@dataclass(frozen=True)
class Rules:
    """What everybody has to keep to; `race` says what each means, and training.Plan the last but one.

    Attributes:
        trial_cap: the part of the cap that a trial may take.
        hurdles: parts of that, after which a trial is given up if it is behind the best one at that point.
        behind: it is, if its error is more than so many times as large.
    """

    methods: tuple[str, ...]
    initialisations: tuple[Initialisation, ...]
    thresholds: tuple[float, ...]
    trials: int
    seeds: tuple[int, ...]
    cap: float
    target: float
    every: int
    repetitions: int
    batch: int = 128
    evaluated: int = 1000
    warm_up: int = 50
    trial_cap: float = 0.5
    hurdles: tuple[float, ...] = (1 / 8, 1 / 4, 1 / 2)
    behind: float = 1.25

    def contestants(self) -> dict[str, Contestant]:
        """By name."""
        everybody = [Contestant(method, start) for method in self.methods for start in self.initialisations]
        return {contestant.name: contestant for contestant in everybody}

    def updates(self, pace: Pace) -> int:
        """How many fit under the cap, in whole evaluations."""
        return self._whole(1000 * self.cap / pace.milliseconds)

    def trial_updates(self, cap: int) -> int:
        """How many a trial may make, of those under the cap."""
        return self._whole(self.trial_cap * cap)

    def hurdles_at(self, updates: int) -> list[int]:
        """The updates at which it is decided whether a trial goes on."""
        return sorted({self._whole(part * updates) for part in self.hurdles} - {updates})

    def _whole(self, updates: float) -> int:
        return self.every * max(1, int(updates / self.every))

    def plan(self, updates: int, seed: int, until: float, hurdles: Mapping[int, float] = NONE) -> Plan:
        """Warm-up, then a constant rate; an error after every so many updates."""
        evaluations = updates // self.every
        plan = Plan(
            updates, seed, self.batch, self.warm_up, evaluations, self.evaluated, anneal="constant", until=until
        )
        return replace(plan, hurdles=hurdles)

    def config(self, problem: Problem) -> dict[str, Any]:
        """All that a record must agree on to be gone on with."""
        layers = [layer for layer in problem.build().modules() if isinstance(layer, nn.Linear)]
        model = [layers[0].in_features, *(layer.out_features for layer in layers)]
        fixed = {"tuning_seed": TUNING_SEED, "momentum": MOMENTUM, "model": model, "data": problem.digits().source}
        space = {name: contestant.space for name, contestant in self.contestants().items()}
        search = {"ranges": space, "random_trials": STARTUP}
        return {**asdict(self), **fixed, **asdict(problem.schedule), **search}
