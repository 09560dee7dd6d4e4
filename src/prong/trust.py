"""A bound on what a step may do: the change of a layer's pre-activations that it predicts, in RMS over data and units.

With V the weight in whitened coordinates, a step dV, dd changes the pre-activation of unit k by dV_k x + dd_k, where x
has zero mean and at most unit covariance. So in RMS over the data it is changed by at most

    sqrt(|dV_k|^2 + dd_k^2)

which has the units of the pre-activation and none of the loss, the inputs or the width. Of a gradient it is the root of
gV_k gV_k + gd_k gd_k = nW_k gW_k + nb_k gb_k, the product of the natural and the ordinary one. It is measured on a few
units, spread over the layer, and steps that exceed the bound are shortened. Optimizers that are linear in the gradient
(SGD) are bounded by what the velocity has still to make after many gradients that are alike, lr / (1 - momentum)^2
times one: what is cut off is forgotten. Of others, each step is bounded after it was made.
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
Parts = tuple[Tensor | None, Tensor | None]  # of a site's weight and bias


@dataclass
class _Start:
    """Where a step begins: some units of a site's weight and bias, and all of them where nothing else tells it."""

    layer: Kind
    site: Site
    units: Parts
    whole: Parts


class Trust:
    """Bounds the steps of an optimizer: `most` is the largest RMS change of pre-activations per step.

    `spread` are those who hold a part of every parameter each, if parameters are spread.
    """

    def __init__(
        self, most: float, sites: Mapping[str, tuple[Kind, Site]], optimizer: Optimizer, spread: Workers | None = None
    ) -> None:
        self.most, self._sites, self._spread = most, sites, spread
        self._sharded = any(is_sharded(layer.pair(site)[0]) for layer, site in sites.values())
        self._linear = {site for layer, site in sites.values() if is_linear(optimizer, layer.pair(site)[0])}
        self._gradients: dict[Tensor, Tensor] = {}  # as they were before they were shortened
        self._starts: list[_Start] = []

    @torch.no_grad()
    def before(self, optimizer: Optimizer) -> None:
        """Shorten gradients where steps are linear in them; of others, remember where they start."""
        self._gradients, self._starts = {}, []
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        reaches: list[tuple[float, Site, Parts]] = []
        squares: list[Tensor] = []
        for layer, site in self._sites.values():
            weight, bias = layer.pair(site)
            if site.whitening is None or weight.grad is None or id(weight) not in groups:
                continue
            if site in self._linear:
                reaches.append((_reach(groups[id(weight)]), site, (weight, bias)))
                squares.append(self._of_gradient(layer, site))
            else:
                self._starts.append(self._start(layer, site))
        for (reach, site, pair), change in zip(reaches, self._changes(squares), strict=True):
            factor = self._factor(reach * change)
            for parameter in pair if factor < 1 else ():
                if parameter is None or parameter.grad is None:
                    continue
                if parameter not in self._gradients:  # or another site has made the copy, for rows of its own
                    self._gradients[parameter] = parameter.grad
                    parameter.grad = parameter.grad.clone()
                self._held(site, parameter.grad).mul_(factor)

    @torch.no_grad()
    def after(self) -> None:
        """Shorten steps that went too far, and put gradients back."""
        starts = self._starts
        self.restore()
        for start, change in zip(starts, self._changes([self._made(start) for start in starts]), strict=True):
            factor = self._factor(change)
            if factor < 1:
                self._shorten(start, factor)

    def restore(self) -> None:
        """Put gradients back, and forget where steps began."""
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        self._starts, self._gradients = [], {}

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

    def _held(self, site: Site, tensor: Tensor) -> Tensor:
        """What this worker has of a site's rows of a tensor."""
        tensor = tensor.detach()
        if self._sharded:
            own = is_sharded(tensor) and site.spread is None and site.layout.by_rows
            site, tensor = site.restricted(rows_of(tensor)) if own else site, local(tensor)
        part = site.part(tensor)
        assert part is not None
        return part

    def _units(self, site: Site, tensor: Tensor | None) -> Tensor | None:
        """Some units of a weight or bias, spread over all of them: rows, where each unit is one."""
        if tensor is None:
            return None
        if not site.layout.by_rows:
            return whole(tensor.detach()) if self._sharded else tensor.detach()
        part = self._held(site, tensor)
        return part[:: max(1, part.shape[0] // UNITS)]

    def _of_gradient(self, layer: Kind, site: Site) -> Tensor:
        """The sum over units of the squares of what a gradient changes, and the number of units."""
        weight, bias = layer.pair(site)
        dW, db = (self._units(site, None if p is None else p.grad) for p in (weight, bias))
        assert dW is not None
        if isinstance(layer, Implicit):
            return predicted(layer, site, dW, db)
        total = torch.zeros((), dtype=torch.float64, device=dW.device)
        for p, gradient in ((weight, dW), (bias, db)):
            if p is not None and gradient is not None:
                natural = isinstance(layer, Plain) and layer.natural
                other = self._units(site, layer.ordinary(p)) if isinstance(layer, Plain) and natural else gradient
                assert other is not None
                total = total + (gradient * other).sum(dtype=torch.float64)
        number = dW.shape[0] if site.layout.by_rows else site.layout.outputs * site.layout.groups
        return torch.stack([total, total.new_tensor(float(number))])

    def _start(self, layer: Kind, site: Site) -> _Start:
        pair = layer.pair(site)
        told_by_W = isinstance(layer, Plain) and not layer.natural  # which is not written before the step is over
        units = [self._units(site, p) for p in pair]
        whole = [None if p is None or (told_by_W and p is pair[0]) else self._held(site, p) for p in pair]
        few, all_ = (tuple(None if x is None else x.clone() for x in parts) for parts in (units, whole))
        return _Start(layer, site, few, all_)  # type: ignore[arg-type]

    def _made(self, start: _Start) -> Tensor:
        """What the step that was made from there changes."""
        now = [self._units(start.site, p) for p in start.layer.pair(start.site)]
        dW, db = (
            None if x is None or before is None else _precise(x) - _precise(before)
            for x, before in zip(now, start.units, strict=True)
        )
        assert dW is not None
        return predicted(start.layer, start.site, dW, db)

    def _shorten(self, start: _Start, factor: float) -> None:
        """Let a step be only so long."""
        layer, site = start.layer, start.site
        weight, bias = start.whole
        if weight is None and isinstance(layer, Plain):
            weight = layer.before_step(site)
        for parameter, before in zip(layer.pair(site), (weight, bias), strict=True):
            if parameter is not None and before is not None:
                now = self._held(site, parameter)
                now.lerp_(before.to(now.dtype), 1 - factor)


def _reach(group: dict[str, Any]) -> float:
    """By what a gradient is multiplied in all steps to come of a velocity that is the sum of many alike."""
    undamped = 1 - float(group.get("dampening", 0.0))
    return float(group["lr"]) * undamped / max(1 - float(group["momentum"]), 1e-3) ** 2


def predicted(layer: Kind, site: Site, dW: Tensor, db: Tensor | None) -> Tensor:
    """The sum over some units of the squares of what a step of them changes, and their number.

    In whitened coordinates it is |dV|^2 + dd^2; a step of W and b is dV dV^T = dW (Sigma + eps I) dW^T, dd = db + dW c.
    """
    w, layout = site.whitening, site.layout
    assert w is not None
    if layout.by_rows:
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
