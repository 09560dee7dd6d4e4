"""Which optimizers can train which whitened layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim import Optimizer

from prong.layers import Explicit, Implicit, Site, WhitenedLayer
from prong.refresh.transport import transports_of


def check_optimizer(optimizer: Optimizer, sites: Mapping[str, tuple[WhitenedLayer, Site]], plus: bool) -> None:
    """Refuse an optimizer that cannot train these sites, and sites that another one refreshes."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    layers = [layer for layer, _ in sites.values()]
    if any(layer.owner is not None for layer in layers):
        raise ValueError(
            "this model is refreshed by another PRONG or Refresher already. Start afresh with prong.fold_(model), "
            "or keep its whitening and detach that one: optimizer.refresher.detach()."
        )
    if any(isinstance(layer, Implicit) for layer in layers):
        if not isinstance(optimizer, torch.optim.SGD):
            raise ValueError(
                f"{type(optimizer).__name__} is not linear in the gradient, so it cannot use implicit layers; "
                'whiten the model with prong.whiten_(model, form="explicit")'
            )
        if plus:
            raise ValueError('PRONG+ rescales U itself and needs form="explicit"')
    if plus and transports_of(optimizer) is None:
        raise ValueError(f"PRONG+ would reset the state of {type(optimizer).__name__} at every update")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    weights = [layer.pair(site)[0] for layer, site in sites.values() if isinstance(layer, Explicit)]
    if any(weight.requires_grad and id(weight) not in held for weight in weights):
        raise ValueError(
            "the optimizer does not train all explicitly whitened weights, so it could not carry their state "
            "along; give it all of them, or whiten only its own: prong.whiten_(model, layers=...)"
        )
    if plus and any(layer.basis != "pca" for layer in layers):
        raise ValueError('PRONG+ rescales principal directions and needs basis="pca"')
