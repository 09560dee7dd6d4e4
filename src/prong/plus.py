"""PRONG+: after each update, a diagonal correction of the whitening; the function stays."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from prong.layers import Site, WhitenedLayer
from prong.transport import diagonal_powers
from prong.whitening import Whitening

DECAY = 0.9  # of the running variance of whitened activations, per update


@torch.inference_mode(False)
@torch.no_grad()
def rescale_(sites: Mapping[str, tuple[WhitenedLayer, Site]], optimizer: Optimizer) -> None:
    """U <- diag(1/s) U with s the running deviation of x = U (h - c) since the last call; V's columns take s.

    s^2 = DECAY + (1 - DECAY) E[x^2]: the running variance was one, as all earlier scales are divided out already.
    What was measured is checked before anything is changed, which then happens in place: s is at least DECAY^1/2.
    """
    scales: dict[str, Tensor] = {}
    for name, (_, site) in sites.items():
        mean_square = None if site.spread is None else site.spread.take()
        if mean_square is None or site.whitening is None:
            continue
        if not torch.isfinite(mean_square).all():
            raise FloatingPointError(f"layer {name!r}: its whitened inputs contain NaN or infinite values")
        scales[name] = (DECAY + (1 - DECAY) * mean_square).sqrt()
    for name, s in scales.items():
        layer, site = sites[name]
        for tensor, power in diagonal_powers(optimizer, layer.pair(site)[0]):
            part = site.part(tensor)
            assert part is not None
            part.mul_((site.layout.spread(s) ** power).to(part.dtype))
        old = site.whitening
        assert old is not None and old.U is not None and old.U_inv is not None
        U, U_inv = old.U / s.unsqueeze(-1), old.U_inv * s.unsqueeze(-2)
        site.whitening = Whitening(old.c, old.eps, U=U.to(old.U.dtype), U_inv=U_inv.to(old.U.dtype))
