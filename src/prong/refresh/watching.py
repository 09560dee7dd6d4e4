"""Which of a model's sites have drifted since their last refresh: what decides with `period="auto"`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from prong.core.moments import MeanSquare
from prong.core.precision import accumulation_dtype
from prong.distributed.reduction import summed
from prong.distributed.workers import Workers
from prong.layers import Kind, Site
from prong.refresh.drift import EVERY, TOLERANCE, Drift


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
        self._listen(name, Drift())
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
            self._drifts[name].share(*squares, 1 / self._workers.size)

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors, numbers and strings."""
        return {
            "drifted": sorted(self.drifted),
            "drift": {name: drift.state_dict() for name, drift in self._drifts.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        self.drifted = set(state["drifted"])
        self.stop()
        for name, drift in state["drift"].items():
            layer, site = self._sites[name]
            self._listen(name, Drift())
            self._drifts[name].load_state_dict(drift, layer.pair(site)[0].device)

    def stop(self) -> None:
        """Watch nothing any more."""
        for name, drift in self._drifts.items():
            self._sites[name][1].taps.remove(drift)
        self._drifts = {}

    def _listen(self, name: str, drift: Drift) -> None:
        taps = self._sites[name][1].taps
        if name in self._drifts:
            taps.remove(self._drifts[name])
        self._drifts[name] = drift
        taps.append(drift)

    def _squares(self, names: Iterable[str]) -> dict[str, tuple[MeanSquare, MeanSquare]]:
        """What all workers have measured of these sites, after their refresh and lately."""
        first: dict[str, tuple[MeanSquare, Tensor]] = {}
        lately: dict[str, tuple[MeanSquare, Tensor]] = {}
        for name in names:
            zeros = zeros_of(*self._sites[name])
            first[f"first {name}"], lately[f"lately {name}"] = (
                (square, zeros) for square in self._drifts[name].squares
            )
        found = summed({**first, **lately}, self._workers)
        return {name: (found[f"first {name}"], found[f"lately {name}"]) for name in names}


def zeros_of(layer: Kind, site: Site) -> Tensor:
    """Zeros, one for each input of a site, in the precision of sums."""
    weight = layer.pair(site)[0]
    dtype = accumulation_dtype(weight.dtype)
    return torch.zeros(site.layout.matrices, site.layout.features, dtype=dtype, device=weight.device)
