"""Ctrl-C as a request to stop at the next good place."""

from __future__ import annotations

import multiprocessing
import os
import signal
from types import FrameType, TracebackType
from typing import Any


class Stop:
    """Within it, Ctrl-C asks to stop, here and in processes that were started from here; the second one interrupts."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Stop:
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def is_asked(self) -> bool:
        """Whether somebody asked."""
        return self.asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for child in multiprocessing.active_children():  # a terminal tells them too, `kill` does not
            if child.pid is not None:
                os.kill(child.pid, signal.SIGINT)
