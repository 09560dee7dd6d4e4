"""Canonical (W, b) and whitened (V, d) parameters of one layer, and what moves between them. Pure functions.

Every kind of layer is brought to one layout first (`prong.layers.layout`):

    W, V  (groups, out, taps, in)      b, d  (groups, out)      U, U^-1, P  (groups, in, in)      c  (groups, in)

with one group and one tap for a linear layer, and the taps of the kernel for a convolution. A layer computes
`z = sum_taps W h + b = sum_taps V U (h - c) + d`. `b`, `d` and `c` are None together: without a bias nothing can
absorb `W c`, so nothing is centred. Where inputs are whitened in blocks, each block is a group of W, V, U and c; those
of one group share its bias, and its part of `z` is the sum over them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prong.core.precision import full_precision
from prong.core.whitening import Whitening, times_inverse

Pair = tuple[Tensor, Tensor | None]


def times(X: Tensor, M: Tensor) -> Tensor:
    """X M over the last dimension of X (groups, out, taps, in), in the precision of M."""
    with full_precision(X):
        return torch.bmm(X.flatten(1, 2).to(M.dtype), M).view(*X.shape[:-1], M.shape[-1])


def against(X: Tensor, c: Tensor, groups: int | None = None) -> Tensor:
    """sum_taps X c, shape (groups, out): what a constant input c contributes. Blocks are summed into so many groups."""
    X = X.to(c.dtype)
    with full_precision(X):
        summed = X.squeeze(2) if X.shape[2] == 1 else X.sum(2)  # a sum of one would be a copy
        x = (summed @ c.unsqueeze(-1)).squeeze(-1)
    return x if groups is None or groups == x.shape[0] else x.reshape(groups, -1, x.shape[1]).sum(1)


def less_outer(X: Tensor, x: Tensor, c: Tensor, out: Tensor | None = None) -> Tensor:
    """X - x c^T for every tap of X at once, in one pass: the outer product is nowhere written down."""
    if x.shape[0] != c.shape[0]:
        x = x.repeat_interleave(c.shape[0] // x.shape[0], dim=0)
    return torch.addcmul(X, x[:, :, None, None], c[:, None, None, :], value=-1, out=out)


def to_whitened(W: Tensor, b: Tensor | None, whitening: Whitening) -> Pair:
    """Parameters (V, d) that compute the same layer as (W, b) on whitened inputs.

    V = W U^-1 and d = b + W c (Desjardins et al. 2015, Algorithm 1, line 10, corrected).
    """
    d = b if b is None or whitening.c is None else b + against(W, whitening.c, b.shape[0])
    return times(W, whitening.inverse()), d


def to_canonical(V: Tensor, d: Tensor | None, whitening: Whitening) -> Pair:
    """Parameters (W, b) that compute the same layer as (V, d) on raw inputs.

    W = V U and b = d - W c (Algorithm 1, line 7, corrected).
    """
    assert whitening.U is not None
    W = times(V, whitening.U)
    b = d if d is None or whitening.c is None else d - against(W, whitening.c, d.shape[0])
    return W, b


def natural_gradient(
    gW: Tensor, gb: Tensor | None, P: Tensor, c: Tensor | None, tail: float = 0.0, cP: Tensor | None = None
) -> Pair:
    """The canonical image (nW, nb) of the gradient in whitened coordinates.

    A step -(gV, gd) on (V, d) is the step -(nW, nb) on (W, b), with P = U^T U and

        nW = (gW - gb c^T) P        nb = gb - nW c

    P is as `times_inverse` takes it. With `cP`, the product c P, nW = gW P - gb (c P)^T takes no copy of gW.
    """
    if gb is None or c is None:
        return times_inverse(gW.flatten(1, 2), P, tail).view(gW.shape), gb
    centred = less_outer(gW, gb, c) if cP is None else gW
    nW = times_inverse(centred.flatten(1, 2), P, tail).view(gW.shape)
    if cP is not None:
        less_outer(nW, gb, cP, out=nW)
    return nW, gb - against(nW, c, gb.shape[0])


def whitened_rows(rows: Tensor, whitening: Whitening) -> Tensor:
    """Whitened inputs U (h - c), or (h - c) P where there is no U, for rows h (groups, rows, in)."""
    U, P, c = whitening.U, whitening.P, whitening.c
    kept = U if U is not None else P
    assert kept is not None
    rows = rows.to(kept.dtype if U is not None or c is None else c.dtype)
    with full_precision(rows):
        centred = rows if c is None else rows - c.unsqueeze(1)
        if U is not None:
            return centred @ U.mT
        assert P is not None
        return times_inverse(centred, P, whitening.tail)


@dataclass(frozen=True)
class Transition:
    """The change of whitened coordinates from an old whitening to a new one.

    M = U_old U_new^-1, M_inv = U_new U_old^-1 and shift = U_old (c_new - c_old): the new origin in old coordinates.

    Shapes: M, M_inv (groups, in, in); shift (groups, in) or None.
    """

    M: Tensor
    M_inv: Tensor
    shift: Tensor | None = None

    @classmethod
    def between(cls, old: Whitening | None, new: Whitening) -> Transition:
        """From `old` (None: the identity, U = I and c = 0) to `new`."""
        assert new.U is not None
        old_c = None if old is None else old.c
        moved = new.c if old_c is None else -old_c if new.c is None else new.c - old_c
        if old is None:
            return cls(new.inverse(), new.U, moved)
        assert old.U is not None
        with full_precision(old.U):
            shift = None if moved is None else (old.U @ moved.unsqueeze(-1)).squeeze(-1)
            return cls(old.U @ new.inverse(), new.U @ old.inverse(), shift)


def transport_velocity(V: Tensor, d: Tensor | None, transition: Transition) -> Pair:
    """Parameters, or a velocity of parameters, in the new coordinates.

    V_new = V M and d_new = d + V shift, so that V_new U_new = V U_old: the canonical image stays.
    """
    if d is not None and transition.shift is not None:
        d = d + against(V, transition.shift, d.shape[0])
    return times(V, transition.M), d


def transport_gradient(gV: Tensor, gd: Tensor | None, transition: Transition) -> Pair:
    """The gradient of the same function in the new coordinates.

    gV_new = (gV - gd shift^T) M^-T and gd_new = gd: the adjoint of the inverse of `transport_velocity`.
    """
    if gd is not None and transition.shift is not None:
        gV = less_outer(gV, gd, transition.shift)
    return times(gV, transition.M_inv.mT), gd


def transport_square(sV: Tensor, sd: Tensor | None, transition: Transition) -> Pair:
    """Mean squares of gradients in the new coordinates, entries taken as uncorrelated.

    `transport_gradient` with the entries of M^-T squared; exact when M is diagonal and the centre stays. The shift
    is left out: gV and gd are anything but uncorrelated (docs/log.md has what was tried).
    """
    return times(sV, transition.M_inv.square().mT), sd
