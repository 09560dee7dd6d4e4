"""Who takes part: a method with an initialisation, and what all of them train."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor, nn

import prong
from prong.distributed.workers import ALONE, Workers
from prong.lab.data import FOLDER_VARIABLE
from prong.lab.methods import DAMPED, METHODS, Method, Schedule, Settings, Trains, refresher_of
from prong.lab.tasks.base import Task
from prong.lab.tasks.reconstruction import Reconstruction
from prong.lab.training import DIVERGENCES, Plan, Run, Training, train

Initialisation = Literal["standard", "whitened"]
SCHEDULE = Schedule(period=200, samples=5000)
DAMPINGS = (3e-3, 3e-1)  # among which a race searches


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
    def space(self) -> dict[str, tuple[float, float]]:
        """What tuning chooses, with ranges: a whitened initialisation has a damping, also where its method has none."""
        searched = DAMPED if self.initialisation == "whitened" else self.method.searched
        return {name: self.method.rates if name == "lr" else DAMPINGS for name in searched}

    def start(self, model: nn.Module, settings: Settings, batches: Sequence[Tensor], schedule: Schedule) -> Trains:
        """The optimizer of a new model, and the model initialised: all from the same weights."""
        whitened = self.initialisation == "whitened"
        if whitened:
            prong.initialize_(model, batches, prong.Absolute(settings["eps"]))
        optimizer = self.method.make(model, settings, schedule)
        refresher = refresher_of(optimizer)
        if refresher is not None and (whitened or not schedule.early):
            refresher.refresh(batches)  # the paper's first, before the first update
        return optimizer

    def begin(
        self,
        task: Task,
        settings: Settings,
        schedule: Schedule,
        plan: Plan,
        workers: Workers = ALONE,
        initialised: bool = True,
    ) -> Training:
        """A new model of the task, on its way; its seconds begin with the initialisation.

        If it is not `initialised`, it waits for a state to be loaded.
        """
        batches = task.initial_batches() if initialised else ()
        torch.manual_seed(plan.seed)
        model = task.build(batch_norm=self.method.batch_norm)
        start = perf_counter()
        if initialised:
            optimizer = self.start(model, settings, batches, schedule)
        else:
            optimizer = self.method.make(model, settings, schedule)
        return Training(task, model, optimizer, plan, perf_counter() - start, workers)


@dataclass(frozen=True)
class Problem(Reconstruction):
    """What is trained in races, by whomever.

    Attributes:
        schedule: of those methods that refresh.
    """

    schedule: Schedule = SCHEDULE

    def run(
        self,
        contestant: Contestant,
        settings: Settings,
        plan: Plan,
        on_update: Callable[[int], None] = lambda update: None,
    ) -> Run:
        """One run on a new model."""
        try:
            training = contestant.begin(self, settings, self.schedule, plan)
        except DIVERGENCES as error:
            return Run([], f"diverged at its initialisation: {error}")
        return train(training, on_update)


def data_folder() -> Path | None:
    """The folder that the environment names, if it does."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else None
