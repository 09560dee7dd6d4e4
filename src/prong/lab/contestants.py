"""Who takes part: a method with an initialisation, and what all of them train."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor, nn

import prong
from prong.lab.data import FOLDER_VARIABLE, Digits, load_mnist
from prong.lab.methods import DAMPED, METHODS, Method, Schedule, Settings, Trains
from prong.lab.training import DIVERGENCES, Plan, Run, train

Initialisation = Literal["standard", "whitened"]
SCHEDULE = Schedule(period=200, samples=5000)
SAMPLES = 5000  # training examples behind a whitened initialisation


@dataclass(frozen=True)
class Contestant:
    """A method by its name, from one of the initialisations. Unlike the method, it can be sent to other processes."""

    method_name: str
    initialisation: Initialisation

    @property
    def method(self) -> Method:
        """The method itself."""
        return METHODS[self.method_name]

    @property
    def name(self) -> str:
        """For tables, legends and records."""
        return self.method_name + (", whitened init" if self.initialisation == "whitened" else "")

    @property
    def searched(self) -> tuple[str, ...]:
        """The settings that tuning chooses: a whitened initialisation has a damping, also where its method has none."""
        return DAMPED if self.initialisation == "whitened" else self.method.searched

    def start(self, model: nn.Module, settings: Settings, batches: Sequence[Tensor], schedule: Schedule) -> Trains:
        """The optimizer of a new model, and the model initialised."""
        optimizer = self.method.make(model, settings, schedule)
        if self.initialisation == "whitened":
            prong.initialize_(model, batches, settings["eps"])  # parameters stay the objects that the optimizer holds
        return optimizer


@dataclass(frozen=True)
class Problem:
    """What is trained, by whomever, in a form that can be sent to other processes.

    Attributes:
        build: a new model, from `batch_norm`.
        folder: of the data, as `load_mnist` has it.
        schedule: of those methods that refresh.
    """

    build: Callable[..., nn.Module]
    folder: Path | None
    schedule: Schedule = SCHEDULE

    def digits(self) -> Digits:
        """The data, read once in every process."""
        return _load(self.folder)

    def initial_batches(self) -> Sequence[Tensor]:
        """What a whitened initialisation sees."""
        return torch.split(self.digits().train[:SAMPLES], 500)

    def run(
        self,
        contestant: Contestant,
        settings: Settings,
        plan: Plan,
        on_update: Callable[[int], None] = lambda update: None,
    ) -> Run:
        """One run on a new model; its seconds begin with the initialisation."""
        batches = self.initial_batches()
        torch.manual_seed(plan.seed)
        model = self.build(batch_norm=contestant.method.batch_norm)
        start = perf_counter()
        try:
            optimizer = contestant.start(model, settings, batches, self.schedule)
        except DIVERGENCES as error:
            return Run([], f"diverged at its initialisation: {error}")
        return train(model, optimizer, self.digits(), plan, seconds=perf_counter() - start, on_update=on_update)


def data_folder() -> Path | None:
    """The folder that the environment names, if it does."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else None


@cache
def _load(folder: Path | None) -> Digits:
    return load_mnist(folder)
