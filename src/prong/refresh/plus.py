"""PRONG+: after each update, a diagonal correction of the whitening; the function stays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from prong.core.moments import MeanSquare, full_precision
from prong.core.whitening import Whitening, whitened_rows
from prong.distributed.exchange import summed
from prong.distributed.workers import ALONE, Workers
from prong.layers import Site
from prong.layers.site import Inputs
from prong.refresh.drift import zeros_of
from prong.refresh.factorise import Sites
from prong.refresh.transport import diagonal_powers

DECAY = 0.9  # of the running average, per update


class Spread(MeanSquare):
    """The tap that measures the mean squares of a site's whitened inputs."""

    listening = True

    def see(self, inputs: Inputs, whitening: Whitening) -> None:
        """Add the squares of U (h - c), over rows and padded zeros."""
        assert whitening.U is not None
        with full_precision(inputs.rows):
            squares = whitened_rows(inputs.rows, whitening).square().sum(1)
            if inputs.zeros and whitening.c is not None:
                squares = squares + inputs.zeros * (whitening.U @ whitening.c.unsqueeze(-1)).squeeze(-1).square()
        self.add(squares, inputs.rows.shape[1] + inputs.zeros)


def spread_of(site: Site) -> Spread | None:
    """The site's tap of this kind, if it has one."""
    return next((tap for tap in site.taps if isinstance(tap, Spread)), None)


def forget_(sites: Iterable[Site]) -> None:
    """Let go of what was measured in coordinates, or by forwards, that count no more."""
    for site in sites:
        if (spread := spread_of(site)) is not None:
            spread.take()


@torch.inference_mode(False)
@torch.no_grad()
def rescale_(sites: Sites, optimizer: Optimizer, workers: Workers = ALONE) -> None:
    """U <- diag(1/s) U with s the running damped deviation of x = U (h - c) since the last call; V's columns take s.

        s^2 = DECAY + (1 - DECAY) diag(U (Sigma + eps I) U^T) = DECAY + (1 - DECAY) (E[x^2] + eps |u|^2)

    with u the rows of U. Its average so far was one, as it is after a refresh, since all earlier scales are divided out
    already. Without the damping, rows of directions that hardly vary would grow at every update, without bound.

    What was measured by all workers is checked before anything is changed, which then happens in place: s is at least
    DECAY^1/2.
    """
    spreads = {n: tap for n, (_, site) in sites.items() if site.whitening is not None and (tap := spread_of(site))}
    squares = summed(spreads, lambda name: zeros_of(*sites[name]), workers)
    mean_squares = {name: mean for name, square in squares.items() if (mean := square.mean()) is not None}
    own = {name: spread.take() for name, spread in spreads.items()}
    if not _all_finite(mean_squares.values()):
        name = next(name for name, each in mean_squares.items() if not _all_finite([each]))
        mine = own[name]
        error = FloatingPointError(f"layer {name!r}: its whitened inputs contain NaN or infinite values")
        workers.meet(None, None if mine is None or _all_finite([mine]) else error)
        raise error
    for name, mean_square in mean_squares.items():
        layer, site = sites[name]
        old = site.whitening
        assert old is not None and old.U is not None and old.U_inv is not None
        damped = old.scale**2 * mean_square + old.scale**2 * old.eps * torch.linalg.vector_norm(old.U, dim=-1).square()
        s = (DECAY + (1 - DECAY) * damped).sqrt()
        for tensor, power in diagonal_powers(optimizer, layer.pair(site)[0]):
            part = site.part(tensor)
            assert part is not None
            part.mul_((site.layout.spread(s) ** power).to(part.dtype))
        U, U_inv = old.U / s.unsqueeze(-1), old.U_inv * s.unsqueeze(-2)
        site.whitening = replace(old, U=U.to(old.U.dtype), U_inv=U_inv.to(old.U.dtype))


def _all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all numbers are; the host waits once for all of these."""
    found = [torch.isfinite(tensor).all() for tensor in tensors]
    return not found or bool(torch.stack([each.to(found[0].device) for each in found]).all())
