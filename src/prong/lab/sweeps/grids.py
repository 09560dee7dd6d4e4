"""What a sweep tries: the paper's grids, or those of a file; points of a grid, or ranges to be searched."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial

from prong.lab.contestants import Initialisation
from prong.lab.methods import KEYS, trouble
from prong.lab.record import strict_json

Value = float | str
Point = dict[str, Value]
COUNTS = ("batch", "period", "samples")
EPS = (1.0, 1e-1, 1e-2, 1e-3)
RATES = (1e-1, 1e-2, 1e-3)
# For CIFAR-10 the paper names no grid: these are the rates and dampings of its ImageNet experiment.
PAPER: Mapping[str, Mapping[str, Sequence[Value]]] = {
    "autoencoder": {
        "batch": (32, 64, 128, 256),
        "lr": RATES,
        "momentum": (0.0, 0.9),
        "decay": (0.99, 0.999),
        "regulariser": (0.1, 0.01),
        "eps": EPS,
    },
    "cifar10": {"lr": RATES, "eps": EPS},
    # The number of samples goes with the period.
    "imagenet": {
        "lr": RATES,
        "momentum": (0.9,),
        "weight_decay": (1e-4,),
        "eps": EPS,
        "period": (10, 100, 1000, 10_000),
    },
}


@dataclass(frozen=True)
class Range:
    """Numbers between two, both included; with `log` evenly on a logarithmic scale."""

    low: float
    high: float
    log: bool = False


Space = Mapping[str, tuple[Value, ...] | Range]


def paper_space(experiment: str, method: str) -> Space:
    """The paper's grid of a method: those of its settings that the method has."""
    own = KEYS[method].settings
    known = [name for name in names_of(method) if name != "eps" or name in own]
    return {name: tuple(values) for name, values in PAPER[experiment].items() if name in known}


def names_of(method: str) -> list[str]:
    """What can be tried with a method: its settings, and what belongs to every run or to every refresh.

    A damping is among them in any case: a whitened initialisation has one.
    """
    settings = KEYS[method].settings
    others = [*(("period", "samples") if KEYS[method].refreshes else ()), *(() if "eps" in settings else ("eps",))]
    return [*settings, "batch", *others, "initialisation"]


def read_spaces(path: Path, methods: Sequence[str], chosen: bool) -> dict[str, Space]:
    """The spaces in a JSON file, one for all of `methods`, or one of each that it names, unless these were chosen.

    Raises:
        ValueError: it cannot be read, or is no such file; the message says what to do.
    """
    try:
        content = strict_json(path.read_text())
    except OSError as error:
        raise ValueError(f"--grid {path} cannot be read: {error.strerror}. It is `paper` or a JSON file.") from error
    except ValueError as error:
        raise ValueError(f"--grid {path} is no grid: {error}") from error
    if not isinstance(content, dict) or not content:
        raise ValueError(f'{path} is no grid: it should look like {{"lr": [0.1, 0.01], "batch": [64, 128]}}')
    named = [name for name, given in content.items() if name in KEYS or _is_space(given)]
    if not named:
        return {method: parse_space(content, method, f"{path}") for method in methods}
    strange = [name for name in content if name not in KEYS]
    if strange:
        raise ValueError(f"{path} names methods, but {strange[0]!r} is none. There are: {', '.join(KEYS)}")
    methods = methods if chosen else named
    missing = [method for method in methods if method not in content]
    if missing:
        raise ValueError(f"{path} has no grid for {', '.join(missing)}; it has: {', '.join(named)}")
    return {method: parse_space(content[method], method, f"{path}, {method}") for method in methods}


def _is_space(given: Any) -> bool:
    """Whether this is what a method has in a file, and not a setting."""
    return isinstance(given, dict) and not {"low", "high", "log"} & given.keys()


def parse_space(content: Any, method: str, where: str) -> Space:
    """The space that JSON describes.

    Raises:
        ValueError: a name that the method does not know, no values, or values that make no sense.
    """
    if not isinstance(content, dict) or not content:
        raise ValueError(f"{where}: a grid names settings, each with a list of values or a range; got {content!r}")
    known = names_of(method)
    for name in content:
        if name not in known:
            raise ValueError(f"{where}: {method} knows no {name!r}. It knows: {', '.join(known)}")
    return {name: _parse_axis(name, given, f"{where}: {name}") for name, given in content.items()}


def _parse_axis(name: str, given: Any, where: str) -> tuple[Value, ...] | Range:
    if isinstance(given, dict):
        named = {"low", "high"} <= given.keys() <= {"low", "high", "log"}
        log = given.get("log", False)
        if not named or type(log) is not bool or name == "initialisation":
            raise ValueError(f'{where} is no range. One looks like {{"low": 1e-5, "high": 1, "log": true}}')
        _check_values(name, (given["low"], given["high"]), where)
        found = Range(given["low"], given["high"], log)
        if found.low >= found.high or (found.log and found.low <= 0):
            raise ValueError(f"{where}: low is below high, and positive if log; got {given}")
        return found
    if not isinstance(given, list) or not given:
        raise ValueError(f"{where} needs a list of values, or a range; got {given!r}")
    _check_values(name, given, where)
    if len(set(given)) != len(given):
        raise ValueError(f"{where} has a value twice: {given}")
    return tuple(given)


def _check_values(name: str, values: Iterable[Any], where: str) -> None:
    for value in values:
        if name == "initialisation":
            good, wanted = value in get_args(Initialisation), " or ".join(get_args(Initialisation))
        elif name in COUNTS:
            good, wanted = type(value) is int and value > 0, "a positive whole number"
        else:
            good, wanted = type(value) in (int, float), "a number"
        if not good:
            raise ValueError(f"{where} takes {wanted}, got {value!r}")
        if type(value) is not str and name not in COUNTS and (wrong := trouble(name, value)) is not None:
            raise ValueError(f"{where.removesuffix(f': {name}')}: {wrong}")


@dataclass(frozen=True)
class Search:
    """Which trials a method gets: every point of a grid, some of them by chance, or an adaptive search of ranges.

    Attributes:
        space: of all settings that are tried.
        trials: how many; None for all points of a grid.
        seed: of what is random in the choice.
    """

    space: Space
    trials: int | None
    seed: int

    def __post_init__(self) -> None:
        if self.adaptive and self.trials is None:
            raise ValueError("a range has no end of points: say with --trials how many to try")
        if self.trials is not None and not self.adaptive and self.trials > self.size:
            raise ValueError(f"--trials {self.trials} are more than the {self.size} points of its grid")

    @property
    def adaptive(self) -> bool:
        """Whether what is tried depends on what came of the trials before."""
        return any(isinstance(axis, Range) for axis in self.space.values())

    @property
    def size(self) -> int:
        """How many points a grid has."""
        return math.prod(len(axis) for axis in self.space.values() if not isinstance(axis, Range))

    def alone(self) -> Iterator[Point]:
        """Each value that a setting may have by itself; of a range its ends."""
        for name, axis in self.space.items():
            for value in (axis.low, axis.high) if isinstance(axis, Range) else axis:
                yield {name: value}

    @property
    def budget(self) -> int:
        """How many trials there are."""
        return self.size if self.trials is None else self.trials

    def config(self) -> dict[str, Any]:
        """For records, as JSON has it."""
        space = {name: asdict(axis) if isinstance(axis, Range) else list(axis) for name, axis in self.space.items()}
        return {"space": space, "trials": self.trials, "seed": self.seed}

    def distributions(self) -> dict[str, BaseDistribution]:
        """The space as Optuna has it."""
        return {name: _distribution(name, axis) for name, axis in self.space.items()}

    def point(self, number: int, finished: Sequence[FrozenTrial]) -> Point:
        """What to try as number 0, 1, ...; in a grid it does not depend on the trials that are finished."""
        return self._proposed(number, finished) if self.adaptive else self._points()[number]

    def _points(self) -> list[Point]:
        axes = [axis for axis in self.space.values() if not isinstance(axis, Range)]
        points: list[Point] = [dict(zip(self.space, values, strict=True)) for values in product(*axes)]
        return points if self.trials is None else random.Random(self.seed).sample(points, self.trials)

    def _proposed(self, number: int, finished: Sequence[FrozenTrial]) -> Point:
        # A sampler of its own for every trial: one that goes on would be in a state that no record holds.
        seed = int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0])
        study = optuna.create_study(sampler=TPESampler(seed=seed, n_startup_trials=max(2, self.budget // 4)))
        study.add_trials(finished)
        return dict(study.ask(self.distributions()).params)


def _distribution(name: str, axis: tuple[Value, ...] | Range) -> BaseDistribution:
    if not isinstance(axis, Range):
        return CategoricalDistribution(axis)
    if name in COUNTS:
        return IntDistribution(int(axis.low), int(axis.high), log=axis.log)
    return FloatDistribution(axis.low, axis.high, log=axis.log)
