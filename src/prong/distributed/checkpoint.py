"""An optimizer's state as `torch.distributed.checkpoint` saves and loads it."""

from __future__ import annotations

import io
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from prong.distributed.sharding import is_sharded, local, spread_like

WHITENED = ("V", "d")


class Checkpoint:
    """A `Stateful`: give it to `torch.distributed.checkpoint.save` and `load` in the optimizer's place.

        dcp.save({"model": model, "optimizer": prong.distributed.Checkpoint(optimizer)}, checkpoint_id=folder)

    Any number of ranks can load it. State is saved as it is sharded, under the names of its parameters, and so are V
    and d of sharded parameters; whitening, windows and settings, which are the same for all, in one piece.

    Args:
        optimizer: the optimizer to save or to load into, of `prong.attach` or one of ours.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._refresher = optimizer._prong.refresher  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        """Everything, after the workers have made it the same for all of them; every rank calls this."""
        self._refresher.synchronize()
        rest = self.optimizer.state_dict()
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, dict[str, Any]] = {}
        for name, p, group in self._parameters():
            for key, value in {**self._blank(p, group), **self.optimizer.state.get(p, {})}.items():
                if isinstance(value, Tensor):
                    tensors[f"{name}/{key}"] = value
                else:
                    numbers.setdefault(name, {})[key] = value
        for site, key, name, p, held in self._spread():
            tensors[f"{name}/{key}"] = spread_like(held.clone(), p)
            rest["prong"]["layers"][site][key] = None
        names = [name for name, _, _ in self._parameters()]
        buffer = io.BytesIO()
        torch.save({**rest, "state": numbers, "names": names}, buffer)
        return {"state": tensors, "rest": buffer.getvalue()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave.

        Raises:
            ValueError: a state of another model or optimizer.
        """
        device = next(p.device for _, p, _ in self._parameters())
        rest = torch.load(io.BytesIO(state_dict["rest"]), map_location=device, weights_only=True)
        names, numbers = rest.pop("names"), rest.pop("state")
        indices = dict(zip(names, [i for group in rest["param_groups"] for i in group["params"]], strict=True))
        by_index = {indices[name]: values for name, values in numbers.items()}
        for path, value in state_dict["state"].items():
            name, _, key = path.rpartition("/")
            if name in indices and key not in WHITENED:
                by_index.setdefault(indices[name], {})[key] = value
        for site, key, name, _, _ in self._spread():
            if site in rest["prong"]["layers"]:
                saved = rest["prong"]["layers"][site]
                saved[key] = local(state_dict["state"][f"{name}/{key}"])
                saved["written"] = self._refresher.sites[site][0].written()  # of the model, which is loaded before
        self.optimizer.load_state_dict({"state": by_index, **rest})

    def _parameters(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        """Names, parameters and their groups, in the optimizer's order."""
        names = {id(p): name for name, p in self._refresher.model.named_parameters()}
        pairs = [(p, group) for group in self.optimizer.param_groups for p in group["params"]]
        for number, (p, group) in enumerate(pairs):
            yield names.get(id(p), f"outside.{number}"), p, group

    def _spread(self) -> Iterator[tuple[str, str, str, Tensor, Tensor]]:
        """Sites, "V" or "d", names and parameters for which they stand, and what this worker has of them."""
        names = {id(p): name for name, p in self._refresher.model.named_parameters()}
        for site_name, (layer, site) in self._refresher.sites.items():
            held = layer.coordinates(site)
            for key, p, value in zip(WHITENED, layer.pair(site), held or (), strict=False):
                if p is not None and value is not None and is_sharded(p):
                    yield site_name, key, names[id(p)], p, value

    def _blank(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """State before the first update, which a rank that loads has none of yet: zeros where a step leaves tensors."""
        if self.optimizer.state.get(parameter):
            return {}
        rule = getattr(self.optimizer, "_parts", {}).get(group.get("rule"), self.optimizer)
        twin = object.__new__(type(rule))
        zeros = torch.zeros_like(parameter).requires_grad_(True)
        zeros.grad = torch.zeros_like(parameter)
        twin.__dict__ |= {**rule.__dict__, "state": defaultdict(dict)}
        twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        twin.param_groups = [{**group, "params": [zeros]}]
        type(rule).step(twin)
        return {key: torch.zeros_like(x) for key, x in twin.state[zeros].items() if isinstance(x, Tensor)}
