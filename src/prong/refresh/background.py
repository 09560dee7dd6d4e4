"""A computation in another thread while training goes on, whose result is due after a known number of updates."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """At most one computation at a time.

    The result is taken when it is due, after a wait if need be, never earlier: training does not depend on how fast
    the thread was.
    """

    def __init__(self) -> None:
        self.due: int | None = None
        self._future: Future[T] | None = None
        self._executor: ThreadPoolExecutor | None = None

    def start(self, compute: Callable[[], T], due: int) -> None:
        """Compute something that is due at this update."""
        assert self._future is None
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="prong")
        self.due, self._future = due, self._executor.submit(compute)

    def put(self, result: T, due: int) -> None:
        """Hold a result that is there already."""
        self.due, self._future = due, Future()
        self._future.set_result(result)

    def peek(self) -> T | None:
        """The result, waited for; None if nothing is under way."""
        return None if self._future is None else self._future.result()

    def take(self) -> T:
        """The result, waited for; then nothing is under way. Raises what the computation raised."""
        assert self._future is not None
        future, self._future, self.due = self._future, None, None
        return future.result()

    def drop(self) -> None:
        """Forget what is under way."""
        if self._future is not None:
            self._future.cancel()
        self._future = self.due = None
