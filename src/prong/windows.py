"""The windows in which statistics of inputs are gathered: opened, measured and begun anew, site by site."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from prong.failures import OnFailure
from prong.layers import Site, WhitenedLayer
from prong.layers.base import Owner
from prong.statistics import Moments


class Windows:
    """The windows of a model's sites, and how fast they fill.

    While any is open, failures of whole forwards are noticed and reported to the owner; else the model has no hook.
    """

    def __init__(self, model: nn.Module, sites: Mapping[str, tuple[WhitenedLayer, Site]], owner: Owner) -> None:
        self._model, self._sites, self._owner = model, sites, owner
        self._start = dict.fromkeys(sites, 0)
        self._rates: dict[str, float] = {}  # examples per update, learnt from the last window
        self._hook: RemovableHandle | None = None

    def updates(self, name: str, samples: int) -> int | None:
        """How many updates it takes to see so many examples; None while that is not known."""
        rate = self._rates.get(name)
        return None if rate is None else math.ceil(samples / rate)

    def open(self, name: str, now: int) -> None:
        """Begin to gather, unless that has begun."""
        layer, site = self._sites[name]
        if site.inputs is None:
            site.inputs = site.new_window(layer.pair(site)[0])
            self._start[name] = now

    def full(self, name: str, samples: int) -> bool:
        """Whether a window holds so many examples."""
        inputs = self._sites[name][1].inputs
        return inputs is not None and inputs.examples >= samples

    def moments(self, names: Iterable[str]) -> dict[str, Moments]:
        """What the open ones hold."""
        return {name: inputs.moments for name in names if (inputs := self._sites[name][1].inputs) is not None}

    def measure(self, names: Iterable[str], now: int) -> None:
        """Learn how fast these fill; the next ones begin now."""
        for name in names:
            inputs, length = self._sites[name][1].inputs, now - self._start[name]
            if length > 0 and inputs is not None and inputs.examples > 0:
                self._rates[name] = inputs.examples / length
            self._start[name] = now

    def fade(self, name: str, samples: int) -> None:
        """Let what is older than so many examples count less."""
        inputs = self._sites[name][1].inputs
        if inputs is not None:
            inputs.forget(samples)

    def close(self, name: str) -> None:
        """Forget all of it."""
        self._sites[name][1].inputs = None

    def settle(self) -> None:
        """After an update: keep what was gathered for it."""
        for _, site in self._sites.values():
            if site.inputs is not None:
                site.inputs.settle()

    def undo(self) -> None:
        """Take back what was gathered since the last update."""
        for _, site in self._sites.values():
            if site.inputs is not None:
                site.inputs.undo()

    def watch_forwards(self) -> None:
        """Begin or cease to notice failures, as windows are open or not."""
        gathering = any(site.inputs is not None for _, site in self._sites.values())
        if gathering and self._hook is None:
            self._hook = self._model.register_forward_hook(OnFailure(self._owner), always_call=True)
        elif not gathering and self._hook is not None:
            self._hook.remove()
            self._hook = None

    def state_dict(self) -> dict[str, Any]:
        """When they began and how fast they fill; what they hold is the sites' own."""
        return {"start": dict(self._start), "rates": dict(self._rates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        self._start, self._rates = dict(state["start"]), dict(state["rates"])
        self.watch_forwards()
