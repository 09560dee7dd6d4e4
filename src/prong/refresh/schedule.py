"""When refreshes are due, by counting or by drift, and the windows in which statistics are gathered for them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from prong.core.moments import Window
from prong.distributed.workers import Workers
from prong.layers import Kind, Site
from prong.layers.site import Layout
from prong.layers.taps import OnFailure
from prong.model.estimate import agree_
from prong.options import Every, Never, OnDrift, Refresh, told
from prong.refresh.drift import Watch
from prong.refresh.factorise import Reduction

SHARE = 0.1  # of an update, for gathering
DOUBLED = 8  # updates, until which the time between refreshes doubles


def share_of_rows(layout: Layout) -> float:
    """Which share of a batch's rows is looked at, so that it costs at most a tenth of what the layer's update does.

    A row costs some 1.25 in times the size of a block, and 20 times in for what is not products; an update
    6 in out taps.
    """
    return min(1.0, SHARE * 6 * layout.outputs * layout.taps / (1.25 * layout.features + 20))


def new_window(layer: Kind, site: Site) -> Window:
    """A window for a site's inputs, which looks at as many of them as may be."""
    window = site.new_window(layer.pair(site)[0])
    window.share = share_of_rows(site.spread or site.layout)
    return window


class Windows:
    """The windows of a model's sites, and how fast they fill.

    While any is open, failures of whole forwards are noticed and reported to the owner; else the model has no hook.
    Each of several workers has windows of its own, which all open and close at the same updates. Those that are
    `fading` never end: after each update, older samples count less.
    """

    def __init__(
        self, model: nn.Module, sites: Mapping[str, tuple[Kind, Site]], owner: Any, workers: Workers, fading: bool
    ) -> None:
        self._model, self._sites, self._owner, self._workers = model, sites, owner, workers
        self._fading = fading
        self._start = dict.fromkeys(sites, 0)
        self._rates: dict[str, float] = {}  # examples per update of all workers, learnt from the last window
        self._hook: RemovableHandle | None = None

    def updates(self, name: str, samples: int) -> int | None:
        """How many updates it takes to see so many examples; None while that is not known."""
        rate = self._rates.get(name)
        return None if rate is None else math.ceil(samples / rate)

    def first_opening(self, samples: int, coming: int) -> int:
        """The update after which the first window opens, of those that are closed, that ends at the one coming."""
        closed = [name for name, (_, site) in self._sites.items() if site.window is None]
        return coming - max((self.updates(name, samples) or 0 for name in closed), default=0)

    def open(self, name: str, now: int) -> None:
        """Begin to gather, unless that has begun."""
        layer, site = self._sites[name]
        if site.window is None:
            site.window = new_window(layer, site)
            self._start[name] = now

    def _opened(self, names: Iterable[str] | None = None) -> dict[str, Window]:
        """The open ones of these sites, or of all."""
        names = self._sites if names is None else names
        return {name: window for name in names if (window := self._sites[name][1].window) is not None}

    @property
    def gathering(self) -> bool:
        """Whether any is open."""
        return any(site.window is not None for _, site in self._sites.values())

    def full(self, name: str, samples: int, now: int) -> bool:
        """Whether a window has seen so many examples; of several workers, by what it is known to gain per update."""
        window, updates = self._sites[name][1].window, self.updates(name, samples)
        if window is None:
            return False
        if self._fading or not (self._workers.alone or updates is None):
            return updates is not None and now - self._start[name] >= updates
        return self._workers.total({name: window.examples})[name] >= samples

    def reduced(self, names: Iterable[str]) -> Reduction:
        """What the open ones of all workers hold, on its way."""
        if not self._workers.alone:
            agree_((layer for layer, _ in self._sites.values()), self._workers)
        windows = self._opened(names)
        moments = {name: window.moments for name, window in windows.items()}
        return Reduction(moments, self._workers, {name: window.examples for name, window in windows.items()})

    def examples(self) -> dict[str, float]:
        """How many the open ones of all workers hold."""
        return self._workers.total({name: window.examples for name, window in self._opened().items()})

    def measure(self, examples: Mapping[str, float], now: int) -> None:
        """Learn how fast these fill, from how many examples they hold."""
        for name, seen in examples.items():
            length = now - self._start[name]
            if length > 0 and seen > 0:
                self._rates[name] = seen / length

    def begin(self, names: Iterable[str], now: int) -> None:
        """The next ones of these begin now, with whatever they hold."""
        self._start |= dict.fromkeys(names, now)

    def fade(self, examples: Mapping[str, float], samples: int) -> None:
        """Let what is older than `samples` examples count less, given how many all workers have seen of late."""
        seen = {window: examples[name] for name, window in reversed(self._opened(examples).items())}
        for window, new in seen.items():  # sites may share theirs
            window.forget(new / samples)

    def fade_after_update(self, samples: int) -> None:
        """The same for all of them, at every update, which tells how many examples one has."""
        examples = self.examples()
        self._rates |= {name: seen for name, seen in examples.items() if seen > 0}
        self.fade(examples, samples)

    def scale(self, weight: float) -> None:
        """Let everything they hold count so many times, as when it was saved by another number of workers."""
        if weight != 1:
            for window in set(self._opened().values()):
                window.scale(weight)

    def share(self) -> None:
        """Give every worker the same part of what the windows of all hold, so that any of them can be saved for all."""
        reduction = self.reduced(self._sites)
        found = {window: name for name, window in reversed(self._opened(reduction.wait()).items())}
        for window, name in found.items():
            window.restart(reduction.moments[name].snapshot())
            window.examples = reduction.examples[name]
            window.scale(1 / self._workers.size)

    def undo(self) -> None:
        """Take back what was gathered since the last update."""
        for window in self._opened().values():
            window.undo()

    def watch_forwards(self) -> None:
        """Begin or cease to notice failures, as windows are open or not."""
        if self.gathering and self._hook is None:
            self._hook = self._model.register_forward_hook(OnFailure(self._owner), always_call=True)
        elif not self.gathering and self._hook is not None:
            self._hook.remove()
            self._hook = None

    def state_dict(self) -> dict[str, Any]:
        """When they began and how fast they fill; what they hold is the sites' own."""
        return {"start": dict(self._start), "rates": dict(self._rates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        self._start, self._rates = dict(state["start"]), dict(state["rates"])
        self.watch_forwards()


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
        return getattr(self.options, "samples", 0)

    @property
    def lag(self) -> int:
        """How many updates later coordinates change."""
        return getattr(self.options, "lag", 0)

    @property
    def by_drift(self) -> bool:
        """Whether it is drift that decides."""
        return isinstance(self.options, OnDrift)

    @property
    def _growth(self) -> float | None:
        """How much rarer the first refreshes become; None where there are none of these."""
        return 1.0 if self.by_drift else getattr(self.options, "growth", None)

    @property
    def at_once(self) -> bool:
        """Whether there is a refresh before the first update."""
        return self._growth is not None

    def next_refresh(self, now: int, names: Iterable[str]) -> int | None:
        """The update after which the next refresh comes; None if that depends on drift, or there is none."""
        early = None if self._growth is None else _after(now, self._growth)
        if isinstance(self.options, Every):
            coming = (now // self.options.updates + 1) * self.options.updates
            return coming if early is None or now >= self.options.updates else min(early, coming)
        return early if early is not None and any(self._is_early(name, early) for name in names) else None

    def due(self, now: int, names: Iterable[str], scheduled: bool) -> list[str]:
        """The sites to refresh after update `now`, which is one that `next_refresh` named or not."""
        if not self.by_drift:
            return list(names) if scheduled else []
        return [name for name in names if (scheduled if self._is_early(name, now) else self._is_ready(name, now))]

    def _is_ready(self, name: str, now: int) -> bool:
        """Whether a site waits for a refresh (before workers are asked), and there are enough samples for one."""
        return self._watch.wants(name) and (self._windows is None or self._windows.full(name, self.samples, now))

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
        return {name: value for name, value in told(self.options).items() if name != "source"}

    def adopt(self, settings: dict[str, Any]) -> None:
        """Go on with settings that were saved."""
        self.options = replace(self.options, **settings)

    def _is_early(self, name: str, update: int) -> bool:
        """Where drift decides: whether it is still at powers of two, up to the first to fill a window, that is due."""
        if self._windows is None:
            return update <= 0
        window = self._windows.updates(name, self.samples) or 1  # at the first update it is not known how fast it fills
        return update <= 1 << (window - 1).bit_length()


def _after(now: int, growth: float) -> int:
    """The first time after `now`: 1, 2, 4 and 8; then each comes `growth` times the time before it later."""
    time = 1
    while time <= now:
        time += time if time < DOUBLED else max(1, int(growth * time))
    return time
