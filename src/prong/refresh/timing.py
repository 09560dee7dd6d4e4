"""When refreshes are due, and when the windows before them begin; by counting updates, or by drift."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from prong.model.whiten import check_count
from prong.refresh.watching import Watch
from prong.refresh.windows import Windows

Period = int | Literal["auto"]


class Timetable:
    """After updates 1, 2, 4, ..., `period` and then every `period`-th; or, with an automatic period, as sites drift.

    `now` is the number of updates that have been made, `names` are those of the sites that are trained.

    Attributes:
        period: updates between refreshes, the paper's T; or "auto".
        samples: examples per refresh, the paper's N_s.
        early: whether there are refreshes before the first period is over.
    """

    def __init__(self, period: Period, samples: int, early: bool, windows: Windows | None, watch: Watch) -> None:
        if period != "auto":
            if isinstance(period, str):
                raise ValueError(f"period is a number of updates or 'auto', got {period!r}")
            check_count("period", period, 1)
        if not isinstance(early, bool):
            raise TypeError(f"early is True or False, got {early!r}")
        if period == "auto" and not early:
            raise ValueError("drift is known only after the early refreshes: early=False needs a period in updates")
        check_count("samples", samples, 2)
        self.period, self.samples, self.early = period, samples, early
        self._windows, self._watch = windows, watch

    def next_refresh(self, now: int, names: Iterable[str]) -> int | None:
        """The update after which the next refresh comes; None if that depends on drift."""
        coming = now + 1
        doubling = 1 << (coming - 1).bit_length()
        if self.period == "auto":
            return doubling if any(doubling <= self._first_updates(name) for name in names) else None
        if self.early and coming <= self.period:
            return min(doubling, self.period)
        return -(-coming // self.period) * self.period

    def due(self, now: int, names: Iterable[str], scheduled: bool) -> list[str]:
        """The sites to refresh after update `now`, which is one that `next_refresh` named or not."""
        if self.period != "auto":
            return list(names) if scheduled else []
        return [name for name in names if (scheduled if self._is_early(name, now) else self._is_ready(name, now))]

    def window_is_due(self, name: str, now: int, coming: int | None) -> bool:
        """Whether a window of `samples` examples that ends at the refresh that is coming has begun."""
        window = None if self._windows is None else self._windows.updates(name, self.samples)
        if window is None:
            return True
        if self.period == "auto" and not self._is_early(name, now + 1):
            return self._watch.wants(name)
        assert coming is not None
        return window >= coming - now

    def settings(self) -> dict[str, Any]:
        """What `adopt` takes."""
        return {"period": self.period, "samples": self.samples, "early": self.early}

    def adopt(self, settings: dict[str, Any]) -> None:
        """Go on with settings that were saved."""
        self.period, self.samples, self.early = (settings[name] for name in self.settings())

    def _is_early(self, name: str, update: int) -> bool:
        """With an automatic period: whether a site is refreshed by counting until this update."""
        return update <= self._first_updates(name)

    def _is_ready(self, name: str, now: int) -> bool:
        """Whether a site waits for a refresh, and there are enough samples for one."""
        if not self._watch.wants(name):  # before workers are asked
            return False
        return self._windows is None or self._windows.full(name, self.samples, now)

    def _first_updates(self, name: str) -> int:
        """With an automatic period: refresh at powers of two up to this update, the first to fill a window."""
        if self._windows is None:
            return 0
        window = self._windows.updates(name, self.samples) or 1  # at the first update it is not known how fast it fills
        return 1 << (window - 1).bit_length()
