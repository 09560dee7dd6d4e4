"""What every experiment's command has in common: its options, and how runs are made of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

from prong.lab.contestants import Contestant, Initialisation
from prong.lab.jobs import Job
from prong.lab.methods import DAMPED, KEYS, Schedule, Settings
from prong.lab.tasks.base import Task
from prong.lab.terminal import at_least
from prong.lab.training import Plan


@dataclass(frozen=True)
class Common:
    """Options of every experiment.

    Attributes:
        methods: who takes part; without, those of the experiment.
        seeds: how many: 0, 1, ...
        quick: a small version of it, to look at.
        out: folder of the runs, each in one of its own; by default runs/NAME, or runs/NAME-quick.
        data: folder of the data; by default the one that PRONG_DATA names.
        jobs: processes that make runs side by side, with one thread each; by default one, with all threads.
        resume: go on with runs that are there; with --no-resume their folder is refused.
        tensorboard: write events for TensorBoard too, into each run's folder.
    """

    methods: tuple[str, ...] = ()
    seeds: int = 1
    quick: bool = False
    out: Path | None = None
    data: Path | None = None
    jobs: int | None = None
    resume: bool = True
    tensorboard: bool = False

    def folder(self, experiment: str) -> Path:
        """Where the runs go."""
        return self.out or Path("runs") / (f"{experiment}-quick" if self.quick else experiment)

    def chosen(self, default: Sequence[str], fit: Iterable[str] = KEYS) -> list[str]:
        """The methods that take part.

        Raises:
            SystemExit: one of them is unknown, or does not fit the experiment.
        """
        can_take_part(self.methods, fit)
        return list(dict.fromkeys(self.methods or default))

    def check(self) -> None:
        """Leave with one line if an option is out of range."""
        at_least(1, seeds=self.seeds, jobs=1 if self.jobs is None else self.jobs)
        if self.data is not None and not self.data.is_dir():
            raise SystemExit(f"--data {self.data} is no folder. Fetch data with `prong data fetch NAME --data FOLDER`.")


def can_take_part(methods: Iterable[str], fit: Iterable[str] = KEYS) -> None:
    """Leave with one line if a method is unknown, does not fit, or cannot be stopped and gone on with."""
    fit = [key for key in fit if KEYS[key].resumable]
    for key in methods:
        if key not in KEYS:
            raise SystemExit(f"--methods knows no {key!r}. Choose from: {', '.join(fit)}")
        if key not in fit:
            raise SystemExit(f"{key} cannot take part in this experiment. Choose from: {', '.join(fit)}")


@dataclass(frozen=True)
class Tuned:
    """What a method is run with where nobody says otherwise: where it starts, settings, and those elsewhere."""

    settings: Settings
    initialisation: Initialisation = "standard"
    elsewhere: Settings | None = None

    def at(self, initialisation: Initialisation) -> Settings:
        """Settings for that start; where nobody knows any, those for the other."""
        if self.elsewhere is None or initialisation == self.initialisation:
            return self.settings
        return self.elsewhere


Options = TypeVar("Options")
Flat = Annotated[Options, tyro.conf.arg(name="")]  # on the command line without a prefix
Start = Literal["tuned", "standard", "whitened"]


def make_job(
    experiment: str,
    task: Task,
    key: str,
    tuned: Tuned,
    schedule: Schedule,
    plan: Plan,
    changes: Settings,
    start: Start = "tuned",
    part: str = "",
    name: str = "",
) -> Job:
    """A run of a method with its tuned settings, but for changes; those that it does not know are left out.

    The damping of a whitened initialisation is a setting too, also of methods that have no other use for it.

    Raises:
        SystemExit: it could not begin; one line says why.
    """
    method = KEYS[key]
    initialisation = tuned.initialisation if start == "tuned" else start
    known = set(method.settings) | ({"eps"} if initialisation == "whitened" else set())
    settings = {**method.settings, **tuned.at(initialisation), **changes}
    if initialisation == "whitened":
        settings.setdefault("eps", 1e-2)
    settings = {name: value for name, value in settings.items() if name in known}
    _check(task, settings, schedule, plan)
    contestant = Contestant(method.name, initialisation)
    folder = name or f"{key}-{initialisation}-seed{plan.seed}"
    return Job(experiment, folder, task, contestant, settings, schedule, plan, part)


def _check(task: Task, settings: Settings, schedule: Schedule, plan: Plan) -> None:
    at_least(1, batch=plan.batch, evaluated=plan.evaluated)
    at_least(2, samples=schedule.samples)
    if plan.batch > task.count:
        raise SystemExit(f"--batch is at most the {task.count} examples that are trained on, got {plan.batch}")
    for name, value in settings.items():
        good, wanted = (value > 0, "positive") if name in DAMPED else (value >= 0, "not negative")
        if not (good and math.isfinite(value)):
            raise SystemExit(f"{name} is {wanted} and finite, got {value:g}")


def given(**settings: float | None) -> Settings:
    """The settings that are not None."""
    return {name: value for name, value in settings.items() if value is not None}


def source_of(task: Task) -> str:
    """Where a task's data comes from.

    Raises:
        SystemExit: it is missing or damaged.
    """
    try:
        return task.source
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(f"{error}") from error
