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
from prong.layers import Site, WhitenedLayer
from prong.refresh.drift import EVERY, TOLERANCE, Drift


class Watch:
    """Lets sites measure their drift every few updates; of several workers, on what all of them have measured.

    Attributes:
        drifted: the sites that wait for a refresh, the same for all workers.
    """

    def __init__(self, sites: Mapping[str, tuple[WhitenedLayer, Site]], workers: Workers) -> None:
        self._sites, self._workers = sites, workers
        self.drifted: set[str] = set()

    def begin(self, name: str) -> None:
        """Watch a site that was just refreshed."""
        self._sites[name][1].drift = Drift()
        self.drifted.discard(name)

    def wants(self, name: str) -> bool:
        """Whether a site's inputs have drifted, or it is still without its first refresh."""
        return self._sites[name][1].drift is None or name in self.drifted

    def note(self, updates: int) -> None:
        """After so many updates: see which sites have drifted, and let them listen when the next measurement is due."""
        drifts = self._drifts()
        squares = self._squares([name for name, drift in drifts.items() if drift.listening])
        if squares:
            found = {name for name, both in squares.items() if drifts[name].value(both) > TOLERANCE}
            self.drifted.update(*self._workers.meet(found))
        for name, drift in drifts.items():
            drift.listening = (updates + 1) % EVERY == 0 and name not in self.drifted

    def share(self) -> None:
        """Give every worker the same part of what all have measured."""
        drifts = self._drifts()
        for name, squares in self._squares(drifts).items():
            drifts[name].share(*squares, 1 / self._workers.size)

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors, numbers and strings."""
        return {
            "drifted": sorted(self.drifted),
            "drift": {name: drift.state_dict() for name, drift in self._drifts().items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        self.drifted = set(state["drifted"])
        for name, (layer, site) in self._sites.items():
            drift = state["drift"].get(name)
            site.drift = None if drift is None else Drift()
            if site.drift is not None:
                site.drift.load_state_dict(drift, layer.pair(site)[0].device)

    def _drifts(self) -> dict[str, Drift]:
        return {name: site.drift for name, (_, site) in self._sites.items() if site.drift is not None}

    def _squares(self, names: Iterable[str]) -> dict[str, tuple[MeanSquare, MeanSquare]]:
        """What all workers have measured of these sites, after their refresh and lately."""
        first: dict[str, tuple[MeanSquare, Tensor]] = {}
        lately: dict[str, tuple[MeanSquare, Tensor]] = {}
        drifts = self._drifts()
        for name in names:
            zeros = zeros_of(*self._sites[name])
            first[f"first {name}"], lately[f"lately {name}"] = ((square, zeros) for square in drifts[name].squares)
        found = summed({**first, **lately}, self._workers)
        return {name: (found[f"first {name}"], found[f"lately {name}"]) for name in names}


def zeros_of(layer: WhitenedLayer, site: Site) -> Tensor:
    """Zeros, one for each input of a site, in the precision of sums."""
    weight = layer.pair(site)[0]
    dtype = accumulation_dtype(weight.dtype)
    return torch.zeros(site.layout.matrices, site.layout.features, dtype=dtype, device=weight.device)
