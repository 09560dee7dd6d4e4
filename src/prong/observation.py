"""Looking at layers' inputs as they pass, whitened or not, without touching anything."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from prong.layers import FORMS, Site, WhitenedLayer
from prong.layers.base import Inputs
from prong.statistics import Moments
from prong.whitening import Whitening


class Observer(Protocol):
    """Who wants to see inputs, while `listening`."""

    listening: bool

    def look(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See what a module is called with."""


class Listener:
    """A layer's forward pre-hook; in a copy of the model it does nothing."""

    def __init__(self, observer: Observer | None = None, name: str = "") -> None:
        self._observer, self._name = observer, name

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Show the observer what the module is called with."""
        if self._observer is not None and self._observer.listening:
            self._look(module, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # statistics are Python objects
    def _look(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self._observer is not None
        self._observer.look(self._name, module, args, kwargs)

    def __reduce__(self) -> tuple[type[Listener], tuple[()]]:
        return Listener, ()


class Seen:
    """Moments of some rows of a site's inputs, and the whitening they met."""

    def __init__(self, layer: WhitenedLayer, site: Site) -> None:
        self.moments: Moments = site.new_window(layer.pair(site)[0]).moments
        self.whitening: Whitening | None = None
        self.centred = True
        self.eps = 0.0
        self.rows = self.updates = 0
        self.finite = True

    def add(self, inputs: Inputs, room: int) -> None:
        """Add at most `room` rows, and padded zeros in proportion."""
        rows, total = inputs.rows, inputs.rows.shape[1]
        if room <= 0 or total == 0:
            return
        stride = -(-total // room)
        while math.gcd(stride, total // max(inputs.examples, 1)) > 1:  # or it would visit the same columns of every map
            stride += 1
        rows = rows[:, ::stride]
        self.rows += rows.shape[1]
        try:
            self.moments.add(rows)
            self.moments.add_zeros(inputs.zeros * rows.shape[1] / total)
        except FloatingPointError:  # a monitor tells of divergence; to stop is for the training
            self.finite = False


def as_whitened(module: nn.Module) -> WhitenedLayer:
    """A plain layer seen as one that could be whitened; the layer itself is not touched."""
    kind = FORMS["implicit"][type(module)]
    view = object.__new__(kind)
    view.__dict__ = {**module.__dict__, "sites": kind.make_sites(module), "max_positions": None, "owner": None}
    return view


def inputs_of(layer: WhitenedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """A tensor for each site of the layer."""
    names = ("query", "key", "value") if len(layer.sites) == 3 else ("input",)
    given = [*args[: len(names)], *(kwargs[name] for name in (*names, "h") if name in kwargs)]
    return [h for h in given if isinstance(h, Tensor)]
