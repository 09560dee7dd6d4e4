"""A bound on what a step may do: the change of a layer's pre-activations that it predicts, in RMS over data and units.

With V the weight in whitened coordinates, a step dV, dd changes the pre-activation of unit k by dV_k x + dd_k, where x
has zero mean and at most unit covariance. So in RMS over the data it is changed by at most

    sqrt(|dV_k|^2 + dd_k^2)

which has the units of the pre-activation and none of the loss, the inputs or the width. Of a gradient it is the root of
gV_k gV_k + gd_k gd_k = nW_k gW_k + nb_k gb_k, the product of the natural and the ordinary one. It is measured on a few
units, spread over the layer, and steps that exceed the bound are shortened. Optimizers that are linear in the gradient
(SGD) are bounded by what one gradient can ever do, lr / (1 - momentum) times it: what is cut off is forgotten. Of
others, each step is bounded after it was made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from prong.core.moments import accumulation_dtype, full_precision
from prong.core.whitening import against
from prong.distributed.sharding import is_sharded, local, rows_of, whole
from prong.distributed.workers import Workers
from prong.layers import Implicit, Kind, Plain, Site
from prong.refresh.transport import is_linear

UNITS = 16  # of a layer, on which a step is measured


@dataclass
class _Start:
    """Where a step begins: some units of a site's weight and bias, and all of them where nothing else tells it."""

    layer: Kind
    site: Site
    units: Tensor
    bias_units: Tensor | None
    bias: Tensor | None
    weight: Tensor | None


class Trust:
    """Bounds the steps of an optimizer.

    Args:
        most: the largest RMS change of pre-activations per step.
        sites: what is whitened.
        spread: those who hold a part of every parameter each, if they are spread.
    """

    def __init__(self, most: float, sites: Mapping[str, tuple[Kind, Site]], spread: Workers | None = None) -> None:
        self.most, self._sites, self._spread = most, sites, spread
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._starts: list[_Start] = []

    @torch.no_grad()
    def before(self, optimizer: Optimizer) -> None:
        """Shorten gradients where steps are linear in them; of others, remember where they start."""
        self._gradients, self._starts = [], []
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        reaches: list[tuple[float, Site, tuple[Tensor, Tensor | None]]] = []
        squares: list[Tensor] = []
        for layer, site in self._sites.values():
            weight, bias = layer.pair(site)
            if site.whitening is None or weight.grad is None or id(weight) not in groups:
                continue
            if is_linear(optimizer, weight):
                reaches.append((_reach(groups[id(weight)]), site, (weight, bias)))
                squares.append(_of_gradient(layer, site, weight, bias))
            else:
                self._starts.append(_start(layer, site, weight, bias))
        shortened: set[Tensor] = set()
        for (reach, site, pair), change in zip(reaches, self._changes(squares), strict=True):
            factor = self._factor(reach * change)
            for parameter in pair if factor < 1 else ():
                if parameter is None or parameter.grad is None:
                    continue
                if parameter not in shortened:  # or another site has made the copy, for rows of its own
                    shortened.add(parameter)
                    self._gradients.append((parameter, parameter.grad))
                    parameter.grad = parameter.grad.clone()
                held(site, parameter.grad).mul_(factor)

    @torch.no_grad()
    def after(self) -> None:
        """Shorten steps that went too far, and put gradients back."""
        starts = self._starts
        self.restore()
        squares = [_made(start) for start in starts]
        for start, change in zip(starts, self._changes(squares), strict=True):
            factor = self._factor(change)
            if factor < 1:
                _shorten(start, factor)

    def restore(self) -> None:
        """Put gradients back, and forget where steps began."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._starts, self._gradients = [], []

    def _changes(self, squares: Sequence[Tensor]) -> list[float]:
        """Root mean squares over units, from sums and numbers of them; the host waits once for all of these."""
        if not squares:
            return []
        sums = torch.stack(list(squares))
        if self._spread is not None:
            self._spread.sum_([sums])()
        return [math.sqrt(total / max(count, 1.0)) if total >= 0 else math.nan for total, count in sums.tolist()]

    def _factor(self, change: float) -> float:
        """By what to multiply a step that makes such a change. What is not finite is left for all to see."""
        return min(1.0, self.most / change) if change > 0 and math.isfinite(change) else 1.0


def _reach(group: dict[str, Any]) -> float:
    """How far a gradient moves parameters that it is added to the momentum of, over all steps to come."""
    return float(group["lr"]) * (1 - float(group.get("dampening", 0.0))) / max(1 - float(group["momentum"]), 1e-3)


def _units(site: Site, tensor: Tensor | None) -> Tensor | None:
    """Some units of a weight or bias, spread over all of them: rows, where each unit is one."""
    if tensor is None:
        return None
    part = held(site, tensor) if site.layout.by_rows else whole(tensor.detach())
    return part[:: _stride(site, part)]


def held(site: Site, tensor: Tensor) -> Tensor:
    """What this worker has of a site's rows of a tensor."""
    own = is_sharded(tensor) and site.spread is None and site.layout.by_rows
    part = (site.restricted(rows_of(tensor)) if own else site).part(local(tensor.detach()))
    assert part is not None
    return part


def _stride(site: Site, part: Tensor) -> int:
    return 1 if site.layout.groups > 1 or site.layout.transposed else max(1, part.shape[0] // UNITS)


def _number(site: Site, few: Tensor) -> int:
    """How many units these are."""
    layout = site.layout
    return layout.outputs * layout.groups if layout.transposed else few.shape[0]


def _of_gradient(layer: Kind, site: Site, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The sum over units of the squares of what a gradient changes, and the number of units."""
    pairs = [p for p in (weight, bias) if p is not None and p.grad is not None]
    if isinstance(layer, Implicit):
        return predicted(layer, site, *(_units(site, None if p is None else p.grad) for p in (weight, bias)))
    total: Tensor | float = 0.0
    for p in pairs:
        gradient, ordinary = (
            _units(site, p.grad),
            _units(site, layer.ordinary(p) if isinstance(layer, Plain) else p.grad),
        )
        assert gradient is not None and ordinary is not None
        natural = isinstance(layer, Plain) and layer.natural
        total = total + (gradient * (ordinary if natural else gradient)).sum(dtype=torch.float64)
    few = _units(site, weight)
    assert few is not None and isinstance(total, Tensor)
    return torch.stack([total, total.new_tensor(float(_number(site, few)))])


def predicted(layer: Kind, site: Site, dW: Tensor | None, db: Tensor | None) -> Tensor:
    """The same of a step of some units.

    In whitened coordinates it is |dV|^2 + dd^2; a step of W and b is dV dV^T = dW (Sigma + eps I) dW^T, dd = db + dW c.
    """
    w, layout = site.whitening, site.layout
    assert w is not None and dW is not None
    if layout.groups == 1 and not layout.transposed:
        layout = replace(layout, shape=(dW.shape[0], *layout.shape[1:]))
    X = layout.pack(_precise(dW))
    with full_precision(X):
        if layer.coordinates(site) is not None:
            squares, dd = X.square().sum((2, 3)) / w.scale**2, db
        else:
            squares = (X * w.damped(X.flatten(1, 2)).view(X.shape)).sum((2, 3))
            dd = db if db is None or w.c is None else layout.pack_bias(db) + against(X, w.c, layout.groups)
        squares = squares.view(layout.groups, layout.blocks, -1).sum(1)
        if dd is not None:
            squares = squares + layout.pack_bias(_precise(dd).reshape(-1)).square()
    number = squares.new_tensor(float(squares.numel()), dtype=torch.float64)
    return torch.stack([squares.sum().double(), number])


def _precise(tensor: Tensor) -> Tensor:
    return tensor.to(accumulation_dtype(tensor.dtype))


def _start(layer: Kind, site: Site, weight: Tensor, bias: Tensor | None) -> _Start:
    told_by_W = isinstance(layer, Plain) and not layer.natural  # which is not written before the step is over
    few = _units(site, weight)
    assert few is not None
    kept = (
        _units(site, bias),
        None if bias is None else held(site, bias),
        None if told_by_W else held(site, weight),
    )
    return _Start(layer, site, few.clone(), *(None if x is None else x.clone() for x in kept))


def _made(start: _Start) -> Tensor:
    """What the step that was made from there changes."""
    site = start.site
    weight, bias = start.layer.pair(site)
    few = _units(site, weight)
    assert few is not None
    now, before = _units(site, bias), start.bias_units
    step = None if now is None or before is None else _precise(now) - _precise(before)
    return predicted(start.layer, site, _precise(few) - _precise(start.units), step)


def _shorten(start: _Start, factor: float) -> None:
    """Let a step be only so long."""
    layer, site = start.layer, start.site
    weight, bias = layer.pair(site)
    old = layer.before_step(site) if start.weight is None and isinstance(layer, Plain) else start.weight
    for parameter, before in ((weight, old), (bias, start.bias)):
        if parameter is not None and before is not None:
            now = held(site, parameter)
            now.lerp_(before.to(now.dtype), 1 - factor)
