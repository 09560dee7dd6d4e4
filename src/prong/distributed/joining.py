"""What a worker that has run out of data does while the others go on (`torch.distributed.algorithms.Join`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


def joined(x: object) -> bool:
    """Whether workers may run out of data before others, who then go on without them."""
    return isinstance(x, Joinable) and bool(x._join_config.enable)


class Shadow(JoinHook):
    """Takes part in every exchange of the others' updates with nothing of its own, and ends with their state.

    Args:
        optimizer: the optimizer, whose parameters are all alike.
        model: what it was given as its model.
        refresher: who keeps the model's whitening.

    Raises:
        ValueError: an optimizer whose updates cannot be followed from afar.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module | None, refresher: Any) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise ValueError("to join, PRONG must know its DistributedDataParallel: give it that, not the model inside")
        if any(layer.coordinates(site) is not None for layer, site in refresher.sites.values()):
            raise ValueError(
                "uneven inputs need natural gradients, which SGD takes: where V and d are held, reprojections read "
                "weights that have stopped changing"
            )
        self._optimizer, self._model, self._refresher = optimizer, model, refresher

    def main_hook(self) -> None:
        """An update of the others."""
        if self._model.require_forward_param_sync:  # else they accumulate gradients, and no step follows
            self._refresher.before_step()
            self._refresher.after_step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Everyone is done: take momentum from one that was there until the end, as the model takes its parameters."""
        workers = self._refresher.workers
        source = max(rank for rank, last in enumerate(workers.meet(is_last_joiner)) if last)
        momenta = []
        for group in self._optimizer.param_groups:
            for p in group["params"] if group.get("momentum") else []:
                state = self._optimizer.state[p]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(p)
                momenta.append(state["momentum_buffer"])
        workers.broadcast_(momenta, source)()
