"""The rules of a race: what is the same for everybody."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from prong.lab.clock import Pace
from prong.lab.contestants import Contestant, Initialisation, Problem
from prong.lab.methods import MOMENTUM
from prong.lab.training import Plan
from prong.lab.tuning import SPACE

TUNING_SEED = 1


@dataclass(frozen=True)
class Rules:
    """What everybody has to keep to; `race` says what each means, and training.Plan the last but one.

    Attributes:
        hurdle: the part of the cap after which a trial that is behind the best one at that point is given up.
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
    hurdle: float = 1 / 3

    def contestants(self) -> dict[str, Contestant]:
        """By name."""
        everybody = [Contestant(method, start) for method in self.methods for start in self.initialisations]
        return {contestant.name: contestant for contestant in everybody}

    def updates(self, pace: Pace) -> int:
        """How many fit under the cap, in whole evaluations."""
        return self.every * max(1, int(1000 * self.cap / pace.milliseconds / self.every))

    def hurdle_at(self, cap: int) -> int:
        """The update of the evaluation that decides whether a trial goes on."""
        return self.every * math.ceil(self.hurdle * cap / self.every)

    def plan(self, updates: int, seed: int, until: float, hurdle: tuple[int, float] | None = None) -> Plan:
        """Warm-up, then a constant rate; an error after every so many updates."""
        evaluations = updates // self.every
        plan = Plan(updates, seed, self.batch, self.warm_up, evaluations, self.evaluated, decay=False, until=until)
        return replace(plan, hurdle=hurdle)

    def config(self, problem: Problem) -> dict[str, Any]:
        """All that a record must agree on to be gone on with."""
        layers = [layer for layer in problem.build().modules() if isinstance(layer, nn.Linear)]
        model = [layers[0].in_features, *(layer.out_features for layer in layers)]
        fixed = {"tuning_seed": TUNING_SEED, "momentum": MOMENTUM, "model": model, "data": problem.digits().source}
        return {**asdict(self), **fixed, **asdict(problem.schedule), **SPACE}
