"""Ctrl-C as a request to stop at the next good place."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch.distributed import is_torchelastic_launched

INTERRUPT = {signal.SIGINT}


class Stop:
    """Within it, Ctrl-C asks to stop, here and in the processes that were started from here; a second one interrupts.

    Attributes:
        asked: whether somebody did.
    """

    def __init__(self) -> None:
        self.asked = False
        self._handler: Any = None
        self._mask: Iterable[int] = ()

    def __enter__(self) -> Stop:
        self._handler = signal.signal(signal.SIGINT, self._ask)
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPT)  # who was shielded hears of it now
        return self

    def __exit__(self, *exception: object) -> None:
        on_its_way_out = self.asked and _told_twice()
        signal.signal(signal.SIGINT, signal.SIG_IGN if on_its_way_out else self._handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def is_asked(self) -> bool:
        """Whether somebody asked."""
        return self.asked

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if _told_twice():
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.pass_on()

    def pass_on(self) -> None:
        """Ask the processes that were started from here."""
        for child in multiprocessing.active_children():
            if child.pid is not None:
                os.kill(child.pid, signal.SIGINT)


def _told_twice() -> bool:
    """Whether a terminal tells this process, and so does its parent: that is one request."""
    return multiprocessing.parent_process() is not None or is_torchelastic_launched()
