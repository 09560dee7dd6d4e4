"""Dropout of whitened directions: which are kept how often, and inputs with some of them dropped."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from prong.core.moments import accumulation_dtype, full_precision
from prong.core.whitening import Whitening
from prong.layers.site import in_transform

POINTS, ROUNDS = 64, 8  # the bracket of log(tau) is made so many times narrower, so often


def damped_variances(whitening: Whitening) -> Tensor:
    """Variances lam + eps (groups, in) of the directions of a "pca" whitening, largest first as they were estimated.

    U^-1 = E diag(lam + eps)^1/2 has orthogonal columns, so U^-T U^-1 = diag(lam + eps): their squared norms. PRONG+
    multiplies the columns by the deviations it measures, and this by the variances.
    """
    assert whitening.U_inv is not None
    U_inv = whitening.U_inv.to(accumulation_dtype(whitening.U_inv.dtype))
    return U_inv.square().sum(-2)


def keep_probabilities(damped: Tensor, rate: float, least: float) -> Tensor:
    """Probabilities p of keeping directions with the damped variances `lam + eps`, in the shape of these.

        p = max(least, (lam + eps) / (lam + eps + tau)),   with tau such that the mean of 1 - p is `rate`

    Multiplying by m / p with m = 1 in a share p of the cases adds a relative variance (1 - p) / p = tau / (lam + eps):
    in the inputs' own units, noise of the same variance tau in every direction with lam >> eps. A loss that is
    quadratic in the layer's outputs therefore gains the term tau ||W||^2 of those directions.

    tau is bracketed ever more narrowly: the mean rises with it, and is at most (at least) `rate` where tau is
    rate / (1 - rate) times the smallest (largest) of the damped variances.
    """
    if rate == 0:
        return torch.ones_like(damped)
    values = damped.double()
    odds = rate / (1 - rate)
    low, high = (odds * values.min()).log(), (odds * values.max()).log()
    grid = torch.linspace(0, 1, POINTS + 1, dtype=values.dtype, device=values.device)
    for _ in range(ROUNDS):
        points = low + (high - low) * grid
        rates = 1 - _kept(values.flatten(), points.exp().unsqueeze(-1), least).mean(-1)
        after = (rates <= rate).sum().clamp(1, POINTS)  # the first point that drops too much, or the last
        low, high = points.index_select(0, torch.stack([after - 1, after])).unbind()
    return _kept(values, high.exp(), least).to(damped.dtype)


def _kept(damped: Tensor, tau: Tensor, least: float) -> Tensor:
    return (damped / (damped + tau)).clamp(min=least)


@dataclass
class Dropping:
    """How often directions of a site's inputs are dropped."""

    rate: float  # the mean share of directions that are dropped
    least: float  # the smallest probability of keeping one
    _known: tuple[Whitening, Tensor] | None = field(default=None, repr=False, compare=False)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def probabilities(self, whitening: Whitening) -> Tensor:
        """The probabilities of keeping directions, (groups, in); computed once for every whitening."""
        if self._known is not None and self._known[0] is whitening:
            return self._known[1]
        with torch.no_grad():
            keep = keep_probabilities(damped_variances(whitening), self.rate, self.least)
        if not in_transform():  # there, tensors do not outlive the transform
            self._known = (whitening, keep)
        return keep


def with_dropped_directions(
    h: Tensor, whitening: Whitening, dropping: Dropping, channels_at: int, positions: int
) -> Tensor:
    """D U (h - c), D diagonal with entries m / p: directions are kept (m = 1) with probability p, or dropped (m = 0).

    Examples have a mask each, and so have tokens of linear layers; the `positions` trailing dimensions of a map, whose
    neighbours are alike, share one. The mean over masks is U (h - c).
    """
    assert whitening.U is not None
    groups, features = whitening.U.shape[:2]
    with full_precision(h):  # half precision would be spent on means, which are subtracted
        rows = h.to(whitening.U.dtype).movedim(channels_at, -1)
        rows = rows.reshape(*rows.shape[:-1], groups, features)
        if whitening.c is not None:
            rows = rows - whitening.c
        x = torch.einsum("...gi,goi->...go", rows, whitening.U).flatten(-2)
        keep: Tensor = dropping.probabilities(whitening).flatten()
        leading = x.shape[: x.dim() - 1 - positions]
        chance = torch.rand(*leading, *(1,) * positions, groups * features, dtype=keep.dtype, device=x.device)
        x = x * ((chance < keep) / keep).to(x.dtype)
    return x.movedim(-1, channels_at)
