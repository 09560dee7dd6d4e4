"""How far inputs have moved since a layer was whitened: what `prong.OnDrift` watches.

Right after a refresh the whitened inputs x = U (h - c), or (h - c) P, are as white as they will be. Their mean squares
are measured then, on a few rows of every eighth update, and compared with later ones; the mean relative change is the
drift. It costs what whitening those rows costs, and weighs directions by the gain that P gives them. (The squares of
the samples that the whitening came from would be no reference: fresh samples have larger ones.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from prong.core.moments import MeanSquare, accumulation_dtype
from prong.core.whitening import Whitening, whitened_rows
from prong.distributed.exchange import summed
from prong.distributed.workers import Workers
from prong.layers import Kind, Site
from prong.layers.site import Inputs

EVERY = 8  # updates from one measurement to the next
ROWS = 128  # at most, per measurement
MEMORY = 0.8  # what a measurement still counts at the next
FIRST = 4  # measurements that show how white inputs are after a refresh
ENOUGH = 4  # later ones, before the drift is believed
TOLERANCE = 0.25  # of the mean squares, before a layer is refreshed


class Drift:
    """The mean squares of a site's whitened inputs, right after its refresh and lately."""

    def __init__(self) -> None:
        self.listening = False
        self.squares = MeanSquare(), MeanSquare()  # right after the refresh, and lately
        self._measurements = 0

    @torch.no_grad()
    def see(self, inputs: Inputs, whitening: Whitening) -> None:
        """Measure, on some of the rows (groups, rows, in)."""
        rows = inputs.rows
        if rows.shape[1] == 0:
            return
        x = whitened_rows(rows[:, :: -(-rows.shape[1] // ROWS)], whitening)
        first, lately = self.squares
        lately.decay(MEMORY)
        (first if self._measurements < FIRST else lately).add(x.square().sum(1), x.shape[1])
        self._measurements += 1

    def value(self, squares: tuple[MeanSquare, MeanSquare] | None = None) -> float:
        """The mean relative change of these mean squares, or its own, beyond what chance makes of so few rows.

        It is 0 before there is enough to tell. What is not finite is not known, and no reason to go on as before.
        """
        first, lately = squares or self.squares
        before, after = first.mean(), lately.mean()
        if self._measurements < FIRST + ENOUGH or before is None or after is None:
            return 0.0
        change = (after - before).abs() / (before + 1e-3 * before.mean())  # dead inputs have nothing to compare
        change = change.where(after != before, 0).nan_to_num(math.inf)
        chance = math.sqrt(4 / math.pi * (1 / first.count + 1 / lately.count))  # of normal rows
        return max(0.0, float(change.mean()) - chance)

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors and numbers."""
        return {
            "first": self.squares[0].state_dict(),
            "lately": self.squares[1].state_dict(),
            "measurements": self._measurements,
            "listening": self.listening,
        }

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Continue from what `state_dict` gave."""
        for square, key in zip(self.squares, ("first", "lately"), strict=True):
            square.load_state_dict(state[key], device)
        self._measurements, self.listening = int(state["measurements"]), bool(state["listening"])


class Watch:
    """Lets sites measure their drift every few updates; of several workers, on what all of them have measured.

    Attributes:
        drifted: the sites that wait for a refresh, the same for all workers.
    """

    def __init__(self, sites: Mapping[str, tuple[Kind, Site]], workers: Workers) -> None:
        self._sites, self._workers = sites, workers
        self.drifted: set[str] = set()
        self._drifts: dict[str, Drift] = {}

    def begin(self, name: str) -> None:
        """Watch a site that was just refreshed."""
        taps = self._sites[name][1].taps
        if name in self._drifts:
            taps.remove(self._drifts[name])
        self._drifts[name] = Drift()
        taps.append(self._drifts[name])
        self.drifted.discard(name)

    def wants(self, name: str) -> bool:
        """Whether a site's inputs have drifted, or it is still without its first refresh."""
        return name not in self._drifts or name in self.drifted

    def note(self, updates: int) -> None:
        """After so many updates: see which sites have drifted, and let them listen when the next measurement is due."""
        squares = self._squares([name for name, drift in self._drifts.items() if drift.listening])
        if squares:
            found = {name for name, both in squares.items() if self._drifts[name].value(both) > TOLERANCE}
            self.drifted.update(*self._workers.meet(found))
        for name, drift in self._drifts.items():
            drift.listening = (updates + 1) % EVERY == 0 and name not in self.drifted

    def share(self) -> None:
        """Give every worker the same part of what all have measured."""
        for name, squares in self._squares(self._drifts).items():
            self._drifts[name].squares = squares
            for square in squares:
                square.decay(1 / self._workers.size)

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors, numbers and strings."""
        return {
            "drifted": sorted(self.drifted),
            "drift": {name: drift.state_dict() for name, drift in self._drifts.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        self.stop()
        for name, drift in state["drift"].items():
            layer, site = self._sites[name]
            self.begin(name)
            self._drifts[name].load_state_dict(drift, layer.pair(site)[0].device)
        self.drifted = set(state["drifted"])

    def stop(self) -> None:
        """Watch nothing any more."""
        for name, drift in self._drifts.items():
            self._sites[name][1].taps.remove(drift)
        self._drifts = {}

    def _squares(self, names: Iterable[str]) -> dict[str, tuple[MeanSquare, MeanSquare]]:
        """What all workers have measured of these sites, after their refresh and lately."""
        own = {(name, i): square for name in names for i, square in enumerate(self._drifts[name].squares)}
        found = summed(own, lambda key: zeros_of(*self._sites[key[0]]), self._workers)
        return {name: (found[name, 0], found[name, 1]) for name, _ in own}


def zeros_of(layer: Kind, site: Site) -> Tensor:
    """Zeros, one for each input of a site, in the precision of sums."""
    weight = layer.pair(site)[0]
    dtype = accumulation_dtype(weight.dtype)
    return torch.zeros(site.layout.matrices, site.layout.features, dtype=dtype, device=weight.device)
