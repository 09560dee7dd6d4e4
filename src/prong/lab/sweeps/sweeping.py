"""The work of a sweep: claims are tried, in one process or in several, until every point has come to something."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from prong.lab.folders import RunFolder
from prong.lab.interrupts import Stop
from prong.lab.jobs import Job, Watch, carry_out
from prong.lab.pool import side_by_side
from prong.lab.record import ForeignRecordError, InUseError, environment
from prong.lab.sweeps.board import Board, Claim, Result
from prong.lab.sweeps.grids import Point, Search
from prong.lab.sweeps.sweepable import Sweepable

Keep = Literal["rows", "models", "nothing"]
LOOK = 1.0  # seconds between looks at what others do


@dataclass(frozen=True)
class Sweep:
    """What is swept: all that decides what comes of it.

    Attributes:
        experiment: its name.
        sweepable: its runs.
        searches: what is tried of each method.
        updates: of every trial.
        seed: of every trial.
    """

    experiment: str
    sweepable: Sweepable
    searches: Mapping[str, Search]
    updates: int
    seed: int

    def job(self, method: str, point: Point) -> Job:
        """A trial."""
        return self.sweepable.job(method, point, self.updates, self.seed)

    @property
    def measure(self) -> str:
        """What trials are judged by."""
        return self.job(next(iter(self.searches)), {}).task.watched

    def config(self) -> dict[str, Any]:
        """For the record."""
        methods = {method: self._method_config(method) for method in self.searches}
        trial = {"updates": self.updates, "seed": self.seed}
        return {"experiment": self.experiment, "measure": self.measure, **trial, "methods": methods}

    def study_name(self, method: str) -> str:
        """The name of a method's trials in a storage: another where anything is different that decides on them."""
        return f"{self.experiment}/{method}/{digest(self._method_config(method))}"

    def _method_config(self, method: str) -> dict[str, Any]:
        return {**self.searches[method].config(), "otherwise": self.job(method, {}).config()}


def digest(config: Mapping[str, Any]) -> str:
    """A short name for a configuration."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]


def carry_on(
    wanted: Sweep, boards: Mapping[str, Board], out: Path, jobs: int, keep: Keep, on_change: Callable[[], None]
) -> None:
    """Try what is open on the boards, methods in turn, until every point has come to something, here or elsewhere.

    Args:
        wanted: the sweep.
        boards: of each method.
        out: for the folders of runs; a run that is there already goes on, or is taken as it is.
        jobs: processes.
        keep: what is left of a run.
        on_change: called when trials were settled.

    Raises:
        KeyboardInterrupt: somebody asked to stop; runs have checkpoints, and their claims are given back.
    """
    turns, held = deque(boards), dict[str, tuple[str, Claim, RunFolder]]()

    def next_job(worker: str) -> Callable[[], Result] | None:
        if stop.asked:
            raise KeyboardInterrupt
        for _ in boards:
            method = turns[0]
            turns.rotate(-1)
            claim = boards[method].claim()
            if claim is not None:
                job = wanted.job(method, claim.settings)
                folder = RunFolder(out / method / digest(job.config()))
                held[worker] = method, claim, folder
                return partial(attempt, job, folder, keep)
        return None

    def on_result(worker: str, result: Result) -> None:
        method, claim, folder = held.pop(worker)
        boards[method].settle(claim, result)
        if keep == "nothing":
            shutil.rmtree(folder.path)
        on_change()

    for board in boards.values():
        board.give_back()  # what a process before this one died with
    with Stop() as stop:
        try:
            while any(len(board.settled()) < board.search.budget for board in boards.values()):
                if any(board.open_points() for board in boards.values()):
                    side_by_side(map(str, range(jobs)), next_job, on_result, jobs, shielded=True)
                else:
                    time.sleep(LOOK)  # others are at it; should they die, their points are open again
                    if stop.asked:
                        raise KeyboardInterrupt
                on_change()
        finally:
            for board in boards.values():
                board.give_back()


def attempt(job: Job, folder: RunFolder, keep: Keep) -> Result:
    """What comes of a trial. Whatever its settings make it raise is its failure.

    Raises:
        OSError, ForeignRecordError, InUseError: the fault of the machine, or of the folder.
        KeyboardInterrupt: somebody asked to stop.
    """
    with Stop() as stop:
        try:
            outcome = carry_out(job, folder, Watch(stopped=stop.is_asked))
        except (OSError, ForeignRecordError, InUseError):
            raise
        except Exception as error:
            return Result(None, f"{type(error).__name__}: {error}", False, {"environment": environment()})
    if keep != "models":
        (folder.path / "model.pt").unlink(missing_ok=True)
    failure = outcome["failure"]
    value = None if failure else folder.rows()[-1][job.task.watched]
    details = {"seconds": outcome["seconds"], "updates": outcome["updates"], "environment": environment()}
    return Result(value, failure, bool(failure), details)
