"""The experiments that can be swept: the run that a method makes with given settings.

A new one is an entry in `SWEEPABLE`, and a grid in `grids.PAPER`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, cast

from prong.core.moments import has_bfloat16
from prong.lab.contestants import Contestant, Initialisation, data_folder
from prong.lab.experiments.cifar10 import FIT
from prong.lab.jobs import Job
from prong.lab.methods import KEYS, WHITENED, Schedule
from prong.lab.sweeps.grids import COUNTS, Point
from prong.lab.tasks.base import Task
from prong.lab.tasks.photographs import Photographs
from prong.lab.tasks.pictures import Classification
from prong.lab.tasks.reconstruction import Reconstruction
from prong.lab.training import Plan


class Sweepable(Protocol):
    """An experiment, as far as a sweep is concerned."""

    @property
    def methods(self) -> tuple[str, ...]:
        """The keys of those that the paper compares."""

    @property
    def fit(self) -> tuple[str, ...]:
        """The keys of those that its net can be trained with."""

    def job(self, method: str, point: Point, updates: int, seed: int) -> Job:
        """The run of a method at a point, which names some of its settings, or batch, period, samples, initialisation.

        Its value is the measure that its task watches, which is never one of the test set.
        """


@dataclass(frozen=True)
class Swept:
    """A task, at any point.

    Attributes:
        experiment: its name.
        task: what is trained.
        methods: that the paper compares.
        schedule: of the refreshes, where a point does not say otherwise.
        batch: examples per update, likewise.
        evaluations: of every run, the last of which counts.
        samples_per_period: of a refresh, where a point does not say; a share of the examples of a period, or else those
            of the schedule.
        bf16: forwards in bfloat16.
        fit: methods that its net can be trained with.
    """

    experiment: str
    task: Task
    methods: tuple[str, ...] = ("sgd", "rmsprop", "batchnorm", "prong")
    schedule: Schedule = field(default_factory=Schedule)
    batch: int = 128
    evaluations: int = 20
    samples_per_period: float | None = None
    bf16: bool = False
    fit: tuple[str, ...] = tuple(KEYS)

    def job(self, method: str, point: Point, updates: int, seed: int) -> Job:
        """The run of a method at a point."""
        initialisation = cast(Initialisation, point.get("initialisation", "standard"))
        damping = {"eps": WHITENED["eps"]} if initialisation == "whitened" else {}
        unused = set() if initialisation == "whitened" or "eps" in KEYS[method].settings else {"eps"}
        others = {*COUNTS, "initialisation", *unused}
        settings = {name: float(value) for name, value in point.items() if name not in others}
        counts = {name: int(point[name]) for name in COUNTS if name in point}
        batch, period = counts.get("batch", self.batch), counts.get("period", self.schedule.period)
        samples = self.schedule.samples
        if self.samples_per_period is not None:
            samples = max(1, round(self.samples_per_period * period)) * batch
        return Job(
            experiment=self.experiment,
            name=method,
            task=self.task,
            contestant=Contestant(KEYS[method].name, initialisation),
            settings={**damping, **KEYS[method].settings, **settings},
            schedule=Schedule(period, counts.get("samples", samples)),
            plan=Plan(updates, seed, batch, evaluations=self.evaluations, bf16=self.bf16),
            part="sweep",
        )


def autoencoder() -> Swept:
    """The paper's autoencoder of digits, chosen by its training error."""
    return Swept("autoencoder", Reconstruction(folder=data_folder()))


def cifar10() -> Swept:
    """The paper's convolutional net, chosen by the error on pictures that are held out."""
    task = Classification(folder=data_folder())
    return Swept("cifar10", task, schedule=Schedule(100, 1000), evaluations=2, bf16=has_bfloat16(), fit=FIT)


def imagenet() -> Swept:
    """Inception on photographs, chosen by the error on some that are held out."""
    methods = ("nesterov", "rmsprop", "batchnorm", "prong", "prong+")
    task = Photographs(folder=data_folder())
    return Swept("imagenet", task, methods, batch=256, evaluations=4, samples_per_period=0.1, bf16=has_bfloat16())


SWEEPABLE: Mapping[str, Callable[[], Sweepable]] = {
    "autoencoder": autoencoder,
    "cifar10": cifar10,
    "imagenet": imagenet,
}
