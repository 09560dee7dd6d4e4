"""A whitening of a layer's inputs, and parameters in its coordinates: what multiplies, and what moves. Pure functions.

Every kind of layer is brought to one layout first (`prong.layers.site`):

    W, V  (groups, out, taps, in)      b, d  (groups, out)      U, U^-1, P  (groups, in, in)      c  (groups, in)

with one group and one tap for a linear layer, and the taps of the kernel for a convolution. A layer computes
`z = sum_taps W h + b = sum_taps V U (h - c) + d`. `b`, `d` and `c` are None together: without a bias nothing can
absorb `W c`, so nothing is centred. Where inputs are whitened in blocks, each block is a group of W, V, U and c; those
of one group share its bias, and its part of `z` is the sum over them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from prong.core.moments import full_precision

Pair = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Whitening:
    """A centre c and a matrix U with `U (Sigma + eps I) U^T = I`, or only `P = U^T U`; what is not needed is None.

    Shapes: c, cP (groups, in); U, U_inv, P, F (groups, in, in), or P (groups, in, rank) with a `tail`.
    """

    c: Tensor | None  # None where inputs are not centred
    eps: float  # the damping that was really used
    U: Tensor | None = None  # that of the formula divided by `scale` (`scaled`)
    U_inv: Tensor | None = None
    P: Tensor | None = None  # (Sigma + eps I)^-1; with a tail, of leading directions, and it stands for tail I - P P^T
    tail: float = 0.0
    # c P where that serves: (h - c) P = h P - c P without a centred copy of h. Rounding errors of h P grow with the
    # mean, so it is None where means are long (`LONG`), and in half precision.
    cP: Tensor | None = None
    F: Tensor | None = None  # Sigma + eps I, kept beside a dense P, so that steps can be measured
    scale: float = 1.0

    def damped(self, X: Tensor) -> Tensor:
        """X (Sigma + eps I) for X (groups, rows, in): from F, or from a thin P."""
        if self.F is not None:
            return torch.bmm(X.to(self.F.dtype), self.F).to(X.dtype)
        assert self.P is not None and self.tail > 0
        Q, eps = self.P.to(X.dtype), 1 / self.tail
        # Columns of Q are q = lam / (eps (lam + eps)) long, squared; Sigma + eps I = eps I + Q diag(lam / q) Q^T.
        ratio = eps**2 / (1 - eps * Q.square().sum(-2, keepdim=True)).clamp(min=torch.finfo(Q.dtype).eps)
        return eps * X + torch.bmm(torch.bmm(X, Q) * ratio, Q.mT)

    def inverse(self) -> Tensor:
        """U^-1: what is kept, or, of a "pca" whitening, whose rows are orthogonal, U^T over their squared lengths."""
        if self.U_inv is not None:
            return self.U_inv
        assert self.U is not None
        return self.U.mT / self.U.square().sum(-1).unsqueeze(-2)

    def map(self, function: Callable[[Tensor], Tensor]) -> Whitening:
        """The same whitening with `function` applied to every tensor."""
        mapped = {name: function(x) for name, x in self.items() if isinstance(x, Tensor)}
        return replace(self, **mapped)  # type: ignore[arg-type]

    def items(self) -> list[tuple[str, Tensor | float | None]]:
        """Names and values."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]

    def is_finite(self) -> bool:
        """Whether no tensor holds NaN or infinity."""
        return all(bool(torch.isfinite(x).all()) for _, x in self.items() if isinstance(x, Tensor))


def times_inverse(X: Tensor, P: Tensor, tail: float = 0.0) -> Tensor:
    """X (Sigma + eps I)^-1 for X (groups, rows, in), in the precision P is stored in.

    P is that inverse (groups, in, in); or thin (groups, in, rank) where it is `tail I - P P^T`.
    """
    with full_precision(X):
        low = X.to(P.dtype)
        if tail == 0:
            return (low * P if P.shape[-1] == 1 else torch.bmm(low, P)).to(X.dtype)
        if P.dtype == X.dtype:
            return torch.baddbmm(X, torch.bmm(X, P), P.mT, beta=tail, alpha=-1)
        return tail * X - torch.bmm(torch.bmm(low, P), P.mT).to(X.dtype)


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
