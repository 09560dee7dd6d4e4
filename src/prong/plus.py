"""PRONG+: after each update, a diagonal correction of the whitening; the function stays."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim import Optimizer

from prong.layers import Site, WhitenedLayer
from prong.projection import Transition
from prong.refresh import assign_
from prong.whitening import Whitening

DECAY = 0.9  # of the running variance of whitened activations, per update


def rescale_(sites: Mapping[str, tuple[WhitenedLayer, Site]], optimizer: Optimizer) -> None:
    """U <- diag(1/s) U with s the running deviation of x = U (h - c) since the last call; V's columns take s.

    s^2 = DECAY + (1 - DECAY) E[x^2]: the running variance was one, as all earlier scales are divided out already.
    """
    changed, transitions = {}, {}
    for name, (layer, site) in sites.items():
        mean_square = None if site.spread is None else site.spread.take()
        if mean_square is None or site.whitening is None:
            continue
        if not torch.isfinite(mean_square).all():
            raise FloatingPointError(f"layer {name!r}: its whitened inputs contain NaN or infinite values")
        s = (DECAY + (1 - DECAY) * mean_square).sqrt()
        old = site.whitening
        assert old.U is not None and old.U_inv is not None
        new = Whitening(old.c, old.eps, U=old.U / s.unsqueeze(-1), U_inv=old.U_inv * s.unsqueeze(-2))
        changed[name], transitions[name] = (layer, site, new), Transition.rescaling(s)
    if changed:
        assign_(changed, optimizer, transitions=transitions)
