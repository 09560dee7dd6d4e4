"""Runs in folders: begun, gone on with, or found to be finished."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from time import monotonic
from typing import Any

from prong.distributed.workers import ALONE, Workers
from prong.lab.contestants import Contestant
from prong.lab.folders import RunFolder
from prong.lab.methods import Schedule, Settings
from prong.lab.shared import SharedFolder
from prong.lab.tasks.base import Reading, Task
from prong.lab.training import DIVERGENCES, Plan, Training, diverged

CHECKPOINT_SECONDS = 60.0
Row = dict[str, float]


@dataclass(frozen=True)
class Job:
    """One run: all that decides what comes of it. It can be sent to other processes.

    Attributes:
        experiment: that it belongs to.
        name: of its folder, within that of the experiment.
        task: what is trained.
        contestant: by which method, from which initialisation.
        settings: of the method.
        schedule: of its refreshes, if it makes any.
        plan: how long, and how.
        part: of the experiment, where it has several.
        model: in words, where it is not the usual one of the experiment.
        workers: that make it together.
        checkpoints: updates between these where there are several workers. Batch norm depends on the number of
            workers, and the last bits of everything on both; so they belong to the configuration.
    """

    experiment: str
    name: str
    task: Task
    contestant: Contestant
    settings: Settings
    schedule: Schedule
    plan: Plan
    part: str = ""
    model: str = ""
    workers: int = 1
    checkpoints: int = 100

    def config(self) -> dict[str, Any]:
        """What the folder says of it."""
        plan = asdict(self.plan)
        unsaid = {"hurdles"} | ({"patience"} if self.plan.patience == Plan.patience else set())  # as it ever was
        return {
            "experiment": self.experiment,
            "part": self.part,
            "method": self.contestant.method.key,
            "label": self.contestant.method.name,
            "initialisation": self.contestant.initialisation,
            "seed": plan.pop("seed"),
            "settings": dict(self.settings),
            "schedule": asdict(self.schedule),
            "plan": {key: value for key, value in plan.items() if key not in unsaid},
            "data": self.task.source,
            "parameters": sum(p.numel() for p in self.task.build().parameters()),
            **({"model": self.model} if self.model else {}),
            **({"workers": self.workers, "checkpoints": self.checkpoints} if self.workers > 1 else {}),
        }

    def begin(self, workers: Workers = ALONE, initialised: bool = True) -> Training:
        """The training, at its start; without its initialisation it waits for a state."""
        return self.contestant.begin(self.task, self.settings, self.schedule, self.plan, workers, initialised)


@dataclass
class Watch:
    """Who is told how a run goes on; nobody, by default.

    Attributes:
        on_update: after every update, with the training.
        on_row: after every row, with its seconds.
        stopped: asked after every update whether to stop there, with a checkpoint.
    """

    on_update: Callable[[Training], None] = field(default=lambda training: None)
    on_row: Callable[[Row, float], None] = field(default=lambda row, seconds: None)
    stopped: Callable[[], bool] = field(default=lambda: False)


def carry_out(
    job: Job,
    folder: RunFolder,
    watch: Watch | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    workers: Workers = ALONE,
) -> Mapping[str, Any]:
    """The outcome of a run, from its folder: of a finished one as it is, of one that was stopped when it has gone on.

    Several workers all call it, each with a watch of its own.

    Raises:
        ForeignRecordError: the folder is of another configuration, or damaged.
        InUseError: another process is at work in it.
        KeyboardInterrupt: the watch said stop.
    """
    watch = watch or Watch()
    if not workers.alone:
        folder = SharedFolder(folder.path, workers)
    with folder.opened(job.config()):
        outcome = folder.outcome
        if outcome is not None:
            return outcome
        if isinstance(job.task, Reading):
            with workers.together():
                job = replace(job, task=job.task.within(folder.path, workers))
        try:
            training = _started(job, folder, workers)
        except DIVERGENCES as error:
            return _end(folder, None, f"diverged at its initialisation: {error}")
        saved = monotonic()
        try:
            while not training.ended:
                row = training.proceed()
                if row is not None:
                    folder.add(row, training.seconds)
                    with workers.together():
                        watch.on_row(row, training.seconds)
                watch.on_update(training)
                stopped = workers.any(watch.stopped()) and not training.ended
                if workers.alone:
                    due = monotonic() - saved >= checkpoint_seconds
                else:
                    due = training.update % job.checkpoints == 0
                if stopped or due:
                    folder.save(training.state_dict())
                    saved = monotonic()
                if stopped:
                    raise KeyboardInterrupt
        except DIVERGENCES as error:
            return _end(folder, training, diverged(training, error))
        return _end(folder, training, None)


def _started(job: Job, folder: RunFolder, workers: Workers) -> Training:
    state = folder.restore()
    training = job.begin(workers, initialised=state is None)
    if state is None:
        folder.keep(job.task.keepsakes(training.model))
    else:
        training.load_state_dict(state)
    return training


def _end(folder: RunFolder, training: Training | None, failure: str | None) -> Mapping[str, Any]:
    outcome = {"failure": failure, "updates": 0, "seconds": 0.0}
    state: Mapping[str, Any] = {}
    if training is not None:
        outcome |= {"updates": training.update, "seconds": round(training.seconds, 4)}
        state = training.model.state_dict()
    folder.end(outcome, state)
    return outcome
