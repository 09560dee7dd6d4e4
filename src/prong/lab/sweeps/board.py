"""The trials of a sweep, in an Optuna storage that several processes or machines may work on.

A point is tried by whoever first writes a running trial of it: of two, the one with the larger number gives up. What
is needed for that is in one write, so whoever is killed leaves a whole trial or none. Optuna's own queue does not
promise as much on SQLite, nor do its heartbeats see a trial that was killed before the first of them.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic, time
from typing import Any
from uuid import uuid4

import optuna
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from prong.lab.sweeps.grids import Point, Search

LEARNT_FROM = (TrialState.COMPLETE, TrialState.PRUNED)


@dataclass(frozen=True)
class Claim:
    """A point that is one's own to try: its number, that of its trial, and its settings."""

    point: int
    trial: int
    settings: Point


@dataclass(frozen=True)
class Result:
    """What came of a trial.

    Attributes:
        value: the smaller the better; None if it failed.
        failure: how it failed, if it did.
        diverged: whether that was the fault of the settings; a sampler learns from it.
        details: whatever else is worth recording, as JSON has it.
    """

    value: float | None
    failure: str | None
    diverged: bool
    details: Mapping[str, Any]

    @property
    def state(self) -> TrialState:
        """As Optuna has it: no made-up value for what diverged, which its samplers take for worse than all others."""
        if self.failure is None:
            return TrialState.COMPLETE
        return TrialState.PRUNED if self.diverged else TrialState.FAIL


class Board:
    """The trials of one method.

    Args:
        storage: where they are.
        name: of the study.
        search: what they are to be.
        holder: who claims them: a name that no two processes use at the same time.
        grace: seconds after which a holder that says nothing is taken for dead.
        shared: whether others may work on them.
    """

    def __init__(
        self, storage: BaseStorage, name: str, search: Search, holder: str, grace: float, shared: bool
    ) -> None:
        self.name, self.search, self.holder, self.grace, self.shared = name, search, holder, grace, shared
        self._storage = storage
        self._study = optuna.create_study(storage=storage, study_name=name, load_if_exists=True)
        self._heard: dict[str, tuple[Any, float]] = {}

    def claim(self) -> Claim | None:
        """A point that nobody has tried or is trying, as one's own; None if there is none."""
        while points := self.open_points():
            point = random.choice(points) if self.shared else points[0]  # chance keeps processes apart
            settings = self.search.point(point, [t for t in self._trials() if t.state in LEARNT_FROM])
            number = self._begin(point, settings)
            if not any(self._precedes(trial, number) for trial in self._of(point) if trial.number != number):
                return Claim(point, number, settings)
            self._study.tell(number, state=TrialState.FAIL)
        return None

    def settle(self, claim: Claim, result: Result) -> None:
        """Write what came of a claim; nothing if its holder was taken for dead meanwhile, and others have it."""
        study = self._storage.get_study_id_from_name(self.name)
        trial = self._storage.get_trial_id_from_study_id_trial_number(study, claim.trial)
        attributes = {**result.details, **({"failure": result.failure} if result.failure else {})}
        with suppress(UpdateFinishedTrialError):
            for name, value in attributes.items():
                self._storage.set_trial_user_attr(trial, name, value)
            self._study.tell(claim.trial, result.value, result.state, skip_if_finished=True)

    def give_back(self) -> None:
        """Give up the claims of this holder: those that a process before it died with, or those that it leaves."""
        for trial in self._trials():
            if trial.state == TrialState.RUNNING and trial.user_attrs["holder"] == self.holder:
                self._study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    def open_points(self) -> list[int]:
        """The points that nobody has tried or is trying; claims of the dead are given up first."""
        for trial in self._trials():
            if trial.state == TrialState.RUNNING and self._is_silent(trial.user_attrs["holder"]):
                self._study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
        taken = {t.user_attrs["point"] for t in self._trials() if t.state == TrialState.RUNNING or settled(t)}
        return [point for point in range(self.search.budget) if point not in taken]

    def settled(self) -> list[FrozenTrial]:
        """The trials that came to something, be it failure, in the order of their points."""
        return sorted(filter(settled, self._trials()), key=lambda trial: trial.user_attrs["point"])

    def beat(self) -> None:
        """Say that this holder is alive."""
        self._study.set_user_attr(f"beat {self.holder}", time())

    def _begin(self, point: int, settings: Point) -> int:
        mark = uuid4().hex
        attributes = {"point": point, "holder": self.holder, "mark": mark, "settings": settings}
        trial = create_trial(
            state=TrialState.RUNNING, params=settings, distributions=self.search.distributions(), user_attrs=attributes
        )
        self._study.add_trial(trial)
        return next(trial.number for trial in self._trials() if trial.user_attrs["mark"] == mark)

    def _precedes(self, trial: FrozenTrial, number: int) -> bool:
        return settled(trial) or (trial.state == TrialState.RUNNING and trial.number < number)

    def _is_silent(self, holder: str) -> bool:
        """Whether it has said nothing for too long. By the clock here alone: machines need not agree on the time."""
        if holder == self.holder:
            return False
        beat, now = self._study.user_attrs.get(f"beat {holder}"), monotonic()
        last, since = self._heard.setdefault(holder, (beat, now))
        if beat != last:
            self._heard[holder] = (beat, now)
            return False
        return now - since > self.grace

    def _of(self, point: int) -> list[FrozenTrial]:
        return [trial for trial in self._trials() if trial.user_attrs["point"] == point]

    def _trials(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)


def settled(trial: FrozenTrial) -> bool:
    """Whether a trial came to something; one that failed for no reason was given up by its holder."""
    return trial.state in LEARNT_FROM or (trial.state == TrialState.FAIL and "failure" in trial.user_attrs)


@contextmanager
def beating(boards: Sequence[Board], grace: float) -> Iterator[None]:
    """Meanwhile, boards are told often enough that their holder is alive."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(grace / 8):
            for board in boards:
                with suppress(StorageInternalError):  # it may be back at the next beat; if not, others will meet it
                    board.beat()

    for board in boards:
        board.beat()
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
