"""A bound on what one step may do: the change of a layer's pre-activations that it predicts, in RMS over data and units.

With V the weight in whitened coordinates, a step dV, dd changes the pre-activation of unit k by dV_k x + dd_k, where x
has zero mean and at most unit covariance. So in RMS over the data it is changed by at most

    sqrt(|dV_k|^2 + dd_k^2)

which has the units of the pre-activation and none of the loss, the inputs or the width. It is measured on a few units,
spread over the layer, and steps that exceed the bound are shortened. Optimizers that are linear in the gradient (SGD)
are bounded by what one gradient can ever do, lr / (1 - momentum) times it: what is cut off is forgotten. Of others, each
step is bounded after it was made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from prong.core.coordinates import against
from prong.layers import Kind, Plain, Site
from prong.refresh.transport import is_linear

UNITS = 16  # of a layer, on which a step is measured


class Trust:
    """Bounds the steps of an optimizer.

    Args:
        most: the largest RMS change of pre-activations per step.
        sites: what is whitened.
        optimizer: the optimizer.
    """

    def __init__(self, most: float, sites: Mapping[str, tuple[Kind, Site]], optimizer: Optimizer) -> None:
        self.most, self._sites = most, sites
        self._before: list[tuple[Kind, Site, Tensor, Tensor | None, list[Tensor]]] = []
        self._gradients: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def before(self, optimizer: Optimizer) -> None:
        """Shorten gradients where steps are linear in them; remember the others' parameters."""
        steps: list[tuple[float, Tensor, tuple[Tensor, Tensor | None]]] = []
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for layer, site in self._sites.values():
            weight, bias = layer.pair(site)
            if site.whitening is None or weight.grad is None or id(weight) not in groups:
                continue
            if is_linear(optimizer, weight):
                group = groups[id(weight)]
                reach = float(group["lr"]) / max(1 - float(group["momentum"]), 1e-3)
                steps.append((reach, predicted(layer, site, weight.grad, None if bias is None else bias.grad), (weight, bias)))
            else:
                whole = [] if isinstance(layer, Plain) and not layer.natural else [weight.detach().clone()]
                before = units(site.part(weight.detach())), None if bias is None else bias.detach().clone()
                self._before.append((layer, site, before[0].clone(), before[1], whole))
        if not steps:
            return
        changes = torch.stack([change for _, change, _ in steps]).tolist()  # the host waits once
        factors: dict[Tensor, float] = {}
        for (reach, _, pair), change in zip(steps, changes, strict=True):
            factor = self._factor(reach * change)
            for parameter in pair:
                if parameter is not None and parameter.grad is not None and factor < 1:
                    factors[parameter] = min(factor, factors.get(parameter, 1.0))
        for parameter, factor in factors.items():
            assert parameter.grad is not None
            self._gradients.append((parameter, parameter.grad))
            parameter.grad = parameter.grad * factor

    @torch.no_grad()
    def after(self) -> None:
        """Shorten steps that went too far, and put gradients back."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        before, self._before, self._gradients = self._before, [], []
        if not before:
            return
        steps = []
        for layer, site, old, old_bias, _ in before:
            weight, bias = layer.pair(site)
            change = None if bias is None or old_bias is None else bias.detach() - old_bias
            steps.append(_predicted_of_units(layer, site, units(site.part(weight.detach())) - old, change))
        for (layer, site, _, old_bias, whole), change in zip(before, torch.stack(steps).tolist(), strict=True):
            factor = self._factor(change)
            if factor < 1:
                weight, bias = layer.pair(site)
                start = whole[0] if whole else _start(layer, site)
                part, start_part = site.part(weight.data), site.part(start)
                assert part is not None and start_part is not None
                part.lerp_(start_part, 1 - factor)
                if bias is not None and old_bias is not None:
                    bias_part, old_part = site.part(bias.data), site.part(old_bias)
                    assert bias_part is not None and old_part is not None
                    bias_part.lerp_(old_part, 1 - factor)

    def _factor(self, change: float) -> float:
        """By what to multiply a step that makes such a change. What is not finite is left for all to see."""
        return min(1.0, self.most / change) if change > 0 and math.isfinite(change) else 1.0


def units(tensor: Tensor | None) -> Tensor:
    """Some rows of a weight or bias, spread over all of them."""
    assert tensor is not None
    return tensor[:: max(1, tensor.shape[0] // UNITS)]
