"""When refreshes are due, and when the windows before them begin; by counting updates, or by drift."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from prong.options import Every, Never, OnDrift, Refresh, told
from prong.refresh.watching import Watch
from prong.refresh.windows import Windows


class Timetable:
    """Ever more rarely at first, and then after every so many updates; or, from then on, as sites drift.

    `now` is the number of updates that have been made, `names` are those of the sites that are trained.

    Attributes:
        options: what was asked for.
    """

    def __init__(self, options: Refresh, windows: Windows | None, watch: Watch) -> None:
        self.options = options
        self._windows, self._watch = windows, watch

    @property
    def samples(self) -> int:
        """Examples per refresh."""
        return 0 if isinstance(self.options, Never) else self.options.samples

    @property
    def lag(self) -> int:
        """How many updates later coordinates change."""
        return 0 if isinstance(self.options, Never) else self.options.lag

    @property
    def by_drift(self) -> bool:
        """Whether it is drift that decides."""
        return isinstance(self.options, OnDrift)

    @property
    def at_once(self) -> bool:
        """Whether there is a refresh before the first update."""
        return isinstance(self.options, OnDrift) or (isinstance(self.options, Every) and self.options.growth is not None)

    def next_refresh(self, now: int, names: Iterable[str]) -> int | None:
        """The update after which the next refresh comes; None if that depends on drift, or there is none."""
        if isinstance(self.options, Never):
            return None
        growth = 1.0 if isinstance(self.options, OnDrift) else self.options.growth
        early = _after(now, growth) if growth is not None else None
        if isinstance(self.options, OnDrift):
            assert early is not None
            return early if any(early <= self._first_updates(name) for name in names) else None
        coming = (now // self.options.updates + 1) * self.options.updates
        return coming if early is None or now >= self.options.updates else min(early, coming)

    def due(self, now: int, names: Iterable[str], scheduled: bool) -> list[str]:
        """The sites to refresh after update `now`, which is one that `next_refresh` named or not."""
        if not self.by_drift:
            return list(names) if scheduled else []
        return [name for name in names if (scheduled if self._is_early(name, now) else self._is_ready(name, now))]

    def window_is_due(self, name: str, now: int, coming: int | None) -> bool:
        """Whether a window of `samples` examples that ends at the refresh that is coming has begun."""
        if isinstance(self.options, Never):
            return False
        window = None if self._windows is None else self._windows.updates(name, self.samples)
        if window is None:
            return True
        if self.by_drift and not self._is_early(name, now + 1):
            return self._watch.wants(name)
        assert coming is not None
        return window >= coming - now

    def settings(self) -> dict[str, Any]:
        """What `adopt` takes: all but where samples come from."""
        return {"kind": type(self.options).__name__, **{k: v for k, v in told(self.options).items() if k != "source"}}

    def adopt(self, settings: dict[str, Any]) -> None:
        """Go on with settings that were saved."""
        self.options = replace(self.options, **{k: v for k, v in settings.items() if k != "kind"})

    def _is_early(self, name: str, update: int) -> bool:
        """Where drift decides: whether a site is refreshed by counting until this update."""
        return update <= self._first_updates(name)

    def _is_ready(self, name: str, now: int) -> bool:
        """Whether a site waits for a refresh, and there are enough samples for one."""
        if not self._watch.wants(name):  # before workers are asked
            return False
        return self._windows is None or self._windows.full(name, self.samples, now)

    def _first_updates(self, name: str) -> int:
        """Where drift decides: refresh at powers of two up to this update, the first to fill a window."""
        if self._windows is None:
            return 0
        window = self._windows.updates(name, self.samples) or 1  # at the first update it is not known how fast it fills
        return 1 << (window - 1).bit_length()


def _after(now: int, growth: float) -> int:
    """The first time after `now`, where each comes `growth` times the time before it later, at least by one."""
    time = 1
    while time <= now:
        time += max(1, int(growth * time))
    return time
