"""What every experiment's command has in common: its options, and how runs are made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import tyro

from prong.lab.contestants import Contestant, Initialisation
from prong.lab.jobs import Job
from prong.lab.methods import KEYS, Schedule, Settings, trouble
from prong.lab.tasks.base import Task
from prong.lab.terminal import at_least
from prong.lab.training import Plan


@dataclass(frozen=True)
class Common:
    """Options of every experiment.

    QUICK has what `--quick` makes of some of them; whoever gives one of these gets what was given.

    Attributes:
        methods: who takes part; without, those of the experiment.
        seeds: how many: 0, 1, ...
        quick: a small version of it, to look at; other options then have other defaults.
        out: folder of the runs, each in one of its own; by default runs/NAME, or runs/NAME-quick.
        data: folder of the data; by default the one that PRONG_DATA names.
        jobs: processes that make runs side by side, with one thread each; by default one, with all threads.
        resume: go on with runs that are there; with --no-resume their folder is refused.
        tensorboard: write events for TensorBoard too, into each run's folder.
    """

    QUICK: ClassVar[Mapping[str, Any]] = {}
    methods: tuple[str, ...] = ()
    seeds: int = 1
    quick: bool = False
    out: Path | None = None
    data: Path | None = None
    jobs: int | None = None
    resume: bool = True
    tensorboard: bool = False

    @classmethod
    def small(cls, **given: Any) -> Self:
        """Those of `--quick`, but for what is given."""
        return cls(**{"quick": True, **cls.QUICK, **given})

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
            ways = "`prong data fetch NAME --data FOLDER` fetches data, `prong data unpack` unpacks photographs"
            raise SystemExit(f"--data {self.data} is no folder; {ways}.")


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
    folder = name or f"{key}-{initialisation}-seed{plan.seed}"
    job = Job(experiment, folder, task, Contestant(method.name, initialisation), settings, schedule, plan, part)
    check_job(job)
    return job


def check_job(job: Job) -> None:
    """Leave with one line if a run could not begin."""
    plan = job.plan
    at_least(1, batch=plan.batch, evaluated=plan.evaluated)
    at_least(0, seed=plan.seed, warm_up=plan.warm_up)
    at_least(2, samples=job.schedule.samples)
    if plan.batch > job.task.count:
        raise SystemExit(f"--batch is at most the {job.task.count} examples that are trained on, got {plan.batch}")
    for name, value in job.settings.items():
        if (wrong := trouble(name, value)) is not None:
            raise SystemExit(wrong)


def each_used(jobs: Iterable[Job], changes: Settings) -> None:
    """Leave with one line if a setting was given that no run knows."""
    known = {name for job in jobs for name in job.settings}
    if unknown := [f"--{name.replace('_', '-')}" for name in changes if name not in known]:
        raise SystemExit(f"no method that takes part has anything to do with {', '.join(unknown)}. Leave it out.")


def at_most(bound: int | None, number: int) -> int:
    """The number, or the bound if there is one and it is smaller."""
    return number if bound is None else min(bound, number)


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
