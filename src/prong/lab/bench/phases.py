"""The places of PRONG's period that are timed apart: window closed, window open, refresh.

All that the benchmarks know about the inside of a `Refresher` is in this file.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from prong.model.whiten import whitened_layers
from prong.refresh.refresher import Refresher

HORIZON = 1 << 20  # the period while timing: no refresh comes by itself within a block of updates


def refresher_of(model: nn.Module) -> Refresher | None:
    """Who refreshes the model's whitened layers, whichever optimizer trains it; None without such layers."""
    owners = [layer.owner for _, layer in whitened_layers(model)]
    return owners[0] if owners and isinstance(owners[0], Refresher) else None


def window_is_open(refresher: Refresher) -> bool:
    """Whether training forwards are being added to its statistics."""
    return any(site.window is not None for _, site in refresher.sites.values())


class Phases:
    """Moves a refresher about in its period, by its counter of updates.

    Windows open and close by the library's own rules; `update`, an ordinary update, gives it the occasion.

    Args:
        refresher: made with the period HORIZON.
        update: makes one update of training.
    """

    def __init__(self, refresher: Refresher, update: Callable[[], None]) -> None:
        assert getattr(refresher.timetable.options, "updates", None) == HORIZON
        self.refresher = refresher
        self._update = update

    def close(self) -> None:
        """Go to where no refresh is near and no statistics are gathered."""
        self._go_to(HORIZON)
        for _ in range(3):  # the first refresh after a jump sees a window of absurd length; the next one does not
            if not window_is_open(self.refresher):
                return
            self._update()
            self.refresher.refresh()
        raise RuntimeError("the window of statistics does not close, so updates without it cannot be timed")

    def open(self) -> None:
        """Begin a window of statistics that no refresh ends by itself."""
        self.close()
        self._go_to(2 * HORIZON - 2)
        self._update()  # the next refresh is one update away now: the window opens
        self._go_to(HORIZON)
        if not window_is_open(self.refresher):
            raise RuntimeError("the window of statistics does not open, so updates with it cannot be timed")

    def refresh(self) -> None:
        """End the window as training would, by a refresh."""
        self.refresher.refresh()

    def _go_to(self, update: int) -> None:
        """Let it believe that so many updates were made, and look again what there is to do after the next."""
        self.refresher.updates, self.refresher._next = update, update + 1
