"""An optimizer's state as `torch.distributed.checkpoint` saves and loads it."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Checkpoint:
    """A `Stateful`: give it to `torch.distributed.checkpoint.save` and `load` in the optimizer's place.

        dcp.save({"model": model, "optimizer": prong.distributed.Checkpoint(optimizer)}, checkpoint_id=folder)

    Any number of ranks can load it. State is saved as it is sharded, under the names of its parameters; whitening,
    windows and settings, which are the same for all, in one piece.

    Args:
        optimizer: the optimizer to save or to load into, of `prong.attach` or one of ours.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Everything, after the workers have made it the same for all of them; every rank calls this."""
        self.optimizer._prong.refresher.synchronize()  # type: ignore[attr-defined]
        state = self.optimizer.state_dict()
        buffer = io.BytesIO()
        torch.save({key: value for key, value in state.items() if key != "state"}, buffer)
        tensors = {
            f"{name}/{key}": value
            for name, p in self._parameters()
            for key, value in {**self._blank(p), **self.optimizer.state.get(p, {})}.items()
            if isinstance(value, Tensor)
        }
        return {"state": tensors, "rest": buffer.getvalue()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave.

        Raises:
            ValueError: a state of another model or optimizer.
        """
        device = next(p.device for _, p in self._parameters())
        rest = torch.load(io.BytesIO(state_dict["rest"]), map_location=device, weights_only=True)
        names = [name for group in rest["param_groups"] for name in group["param_names"]]
        indices = [index for group in rest["param_groups"] for index in group["params"]]
        by_index: dict[int, dict[str, Tensor]] = {}
        for path, value in state_dict["state"].items():
            name, _, key = path.rpartition("/")
            if name in names:
                by_index.setdefault(indices[names.index(name)], {})[key] = value
        self.optimizer.load_state_dict({"state": by_index, **rest})

    def _parameters(self) -> list[tuple[str, Tensor]]:
        groups = self.optimizer.param_groups
        return [pair for group in groups for pair in zip(group["param_names"], group["params"], strict=True)]

    def _blank(self, parameter: Tensor) -> dict[str, Tensor]:
        """State before the first update: a rank that loads has none yet, and zeros are what optimizers begin with."""
        rule = getattr(self.optimizer, "rule_of", lambda p: type(self.optimizer))(parameter)
        if issubclass(rule, torch.optim.Adam):
            zeros = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            return {"step": torch.tensor(0.0), **zeros}
        return {"momentum_buffer": torch.zeros_like(parameter)}
