"""The experiments that can be swept: the run that a method makes with given settings.

A new one is an entry in `SWEEPABLE`, and a grid in `grids.PAPER`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, cast

from prong.lab.contestants import Contestant, Initialisation, data_folder
from prong.lab.grids import COUNTS, Point
from prong.lab.jobs import Job
from prong.lab.methods import KEYS, WHITENED, Schedule
from prong.lab.tasks.base import Task
from prong.lab.tasks.reconstruction import Reconstruction
from prong.lab.training import Plan


class Sweepable(Protocol):
    """An experiment, as far as a sweep is concerned."""

    @property
    def methods(self) -> tuple[str, ...]:
        """The keys of those that the paper compares."""

    def job(self, method: str, point: Point, updates: int, seed: int) -> Job:
        """The run of a method at a point, which names some of its settings, or batch, period, samples, initialisation.

        Its value is the measure that its task watches, which is never one of the test set.
        """


@dataclass(frozen=True)
class Autoencoder:
    """The paper's autoencoder of digits, chosen by its training error.

    Attributes:
        task: what is trained; by default the paper's model on the digits at hand.
        schedule: of the refreshes, where a point does not say otherwise.
    """

    task: Task = field(default_factory=lambda: Reconstruction(folder=data_folder()))
    schedule: Schedule = field(default_factory=Schedule)
    batch: int = 128
    methods: tuple[str, ...] = ("sgd", "rmsprop", "batchnorm", "prong")

    def job(self, method: str, point: Point, updates: int, seed: int) -> Job:
        """The run of a method at a point."""
        initialisation = cast(Initialisation, point.get("initialisation", "standard"))
        damping = {"eps": WHITENED["eps"]} if initialisation == "whitened" else {}
        settings = {name: float(value) for name, value in point.items() if name not in (*COUNTS, "initialisation")}
        counts = {name: int(point[name]) for name in COUNTS if name in point}
        return Job(
            experiment="autoencoder",
            name=method,
            task=self.task,
            contestant=Contestant(KEYS[method].name, initialisation),
            settings={**damping, **KEYS[method].settings, **settings},
            schedule=Schedule(counts.get("period", self.schedule.period), counts.get("samples", self.schedule.samples)),
            plan=Plan(updates, seed, counts.get("batch", self.batch)),
            part="sweep",
        )


SWEEPABLE: Mapping[str, type[Sweepable]] = {"autoencoder": Autoencoder}
