"""The folder of a run that several workers make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from prong.distributed.workers import Workers
from prong.lab.folders import RunFolder
from prong.lab.parallel import by_first

T = TypeVar("T")


class SharedFolder(RunFolder):
    """Only the first worker reads and writes; the others are told what it found, or raise what it raised.

    They may be on other machines, which need not see the folder.
    """

    def __init__(self, path: Path, workers: Workers) -> None:
        super().__init__(path)
        self._own, self._workers = RunFolder(path), workers

    @contextmanager
    def opened(self, config: Mapping[str, Any]) -> Iterator[None]:
        """As one's own, for all of them."""
        with ExitStack() as stack:
            self._first(lambda: stack.enter_context(self._own.opened(config)))
            yield

    @property
    def outcome(self) -> dict[str, Any] | None:
        """How the run ended; None if it has not."""
        return self._first(lambda: self._own.outcome)

    def keep(self, keepsakes: Mapping[str, Any]) -> None:
        """Write what the task keeps, if anything."""
        self._first(lambda: self._own.keep(keepsakes))

    def add(self, row: Mapping[str, float], seconds: float) -> None:
        """Write a row, so that it outlives the processes."""
        self._first(lambda: self._own.add(row, seconds))

    def save(self, state: Mapping[str, Any]) -> None:
        """Write a checkpoint: all of it or nothing; the one before is kept."""
        self._first(lambda: self._own.save(state))

    def restore(self) -> Mapping[str, Any] | None:
        """The state to go on from; None to begin anew."""
        return self._first(self._own.restore)

    def end(self, outcome: Mapping[str, Any], model: Mapping[str, Any]) -> None:
        """Write the parameters and that the run has ended."""
        self._first(lambda: self._own.end(outcome, model))

    def _first(self, act: Callable[[], T]) -> T:
        return by_first(self._workers, act)
