"""PRONG's state as `torch.distributed.checkpoint` saves and loads it."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from prong.optimizers import PRONG

MOMENTUM = "momentum_buffer"


class Checkpoint:
    """A `Stateful`: give it to `torch.distributed.checkpoint.save` and `load` in the optimizer's place.

        dcp.save({"model": model, "optimizer": prong.distributed.Checkpoint(optimizer)}, checkpoint_id=folder)

    Any number of ranks can load it. Momentum is saved as it is sharded, under the names of its parameters; whitening,
    windows and settings, which are the same for all, in one piece.

    Args:
        optimizer: the optimizer to save or to load into.
    """

    def __init__(self, optimizer: PRONG) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Everything, after the workers have made it the same for all of them; every rank calls this."""
        self.optimizer.refresher.synchronize()
        state = self.optimizer.state_dict()
        buffer = io.BytesIO()
        torch.save({"param_groups": state["param_groups"], "prong": state["prong"]}, buffer)
        # A rank that loads has no momentum yet, and zeros are as good: SGD begins with the first gradient either way.
        momentum = {
            name: self.optimizer.state.get(p, {}).get(MOMENTUM, torch.zeros_like(p)) for name, p in self._parameters()
        }
        return {"momentum": momentum, "rest": buffer.getvalue()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave.

        Raises:
            ValueError: a state of another model or optimizer.
        """
        device = next(p.device for _, p in self._parameters())
        rest = torch.load(io.BytesIO(state_dict["rest"]), map_location=device, weights_only=True)
        names = [name for group in rest["param_groups"] for name in group["param_names"]]
        indices = [index for group in rest["param_groups"] for index in group["params"]]
        momentum = state_dict["momentum"]
        by_index = {i: {MOMENTUM: momentum[name]} for i, name in zip(indices, names, strict=True) if name in momentum}
        self.optimizer.load_state_dict({"state": by_index, **rest})

    def _parameters(self) -> list[tuple[str, Tensor]]:
        groups = self.optimizer.param_groups
        return [pair for group in groups for pair in zip(group["param_names"], group["params"], strict=True)]
