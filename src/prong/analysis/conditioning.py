"""How well conditioned a layer's inputs are, as they come and as its whitening leaves them. Pure functions of moments.

With Sigma the covariance of the inputs now, c, U and eps of a whitening (P = U^T U), and

    S = E[(h - c)(h - c)^T] + eps I          M = U S U^T

M is the identity for the inputs that the whitening came from (unless by a cutoff or PRONG+), and what an optimizer in
whitened coordinates works against later. S is taken about the whitening's centre: inputs whose mean has moved are not
white. P S has the eigenvalues of M, so they are known where there is only P.

Groups of a convolution are blocks of one block-diagonal matrix: spectra are over all of them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from prong.core.moments import Moments
from prong.core.precision import full_precision
from prong.core.whitening import Whitening, times_inverse


def input_spectrum(moments: Moments, centred: bool = True) -> Tensor:
    """The eigenvalues of Sigma, or of E[h h^T] when not centred, largest first, shape (groups in,).

    With fewer rows than inputs they are those of the small Gram matrix, and zeros.
    """
    factor = moments.factor
    with full_precision(moments.mean):
        if factor is None:
            lam = torch.linalg.eigvalsh(moments.covariance(centred))
        else:
            if not centred:  # the mean is one more direction
                factor = torch.cat([factor, math.sqrt(moments.count) * moments.mean.unsqueeze(1)], dim=1)
            lam = torch.linalg.eigvalsh(factor @ factor.mT) / moments.count
            lam = torch.nn.functional.pad(lam, (factor.shape[2] - factor.shape[1], 0))
    descending: Tensor = lam.clamp(min=0).flatten().sort(descending=True).values
    return descending


def condition_number(spectrum: Tensor, eps: float = 0.0, floor: float = 0.0) -> float:
    """(lam_max + eps) / (lam_min + eps) of a spectrum, largest first.

    Eigenvalues below `floor * lam_max` count as that much: the result is at most 1 / floor. Infinity where the
    denominator is not positive.
    """
    largest = float(spectrum[0]) + eps
    smallest = max(float(spectrum[-1]) + eps, floor * largest)
    return largest / smallest if smallest > 0 else math.nan if largest == 0 else math.inf


def whitened_spectrum(moments: Moments, whitening: Whitening) -> Tensor:
    """The eigenvalues of M = U S U^T, largest first, shape (groups in,); from P alone, those of L^T P L, S = L L^T."""
    w = _as_in_the_formula(whitening, moments.mean)
    S = _damped(moments, w)
    with full_precision(S):
        if w.U is not None:
            M = w.U @ S @ w.U.mT
        else:
            L, info = torch.linalg.cholesky_ex(S)
            if info.any():  # eps is smaller than the rounding errors of the variance
                lam, E = torch.linalg.eigh(S.double())
                L, w = E * lam.clamp(min=w.eps).sqrt().unsqueeze(-2), w.map(lambda x: x.double())
            assert w.P is not None
            M = times_inverse(L.mT, w.P, w.tail) @ L
        mu = torch.linalg.eigvalsh(M)
    descending: Tensor = mu.flatten().sort(descending=True).values
    return descending


def drift_from_white(moments: Moments, whitening: Whitening) -> tuple[float, float | None]:
    """||M - I||_F / sqrt(groups in), and what chance alone would make of it.

    From P alone, D = P S - I has ||M - I||_F^2 = tr(D D). The second number is the root mean square of the first if the
    rows were as many new, independent, normal ones with the covariance that the whitening came from:

        ((tr B)^2 + tr B^2) / (rows groups in)          B = U Sigma U^T = I - eps U U^T

    summed over groups. A drift that is no larger says nothing. It takes B + eps U U^T = I for granted, which
    a thin P does not give: None there.
    """
    mean, factor, count = moments.mean, moments.factor, moments.count
    w = _as_in_the_formula(whitening, mean)
    size = mean.numel()
    with full_precision(mean):
        gains = _gains(w)  # U U^T, or P: their traces and norms are the same
        if factor is None:
            S = _damped(moments, w)
            D = w.U @ S @ w.U.mT if w.U is not None else _times_gains(S, w)
        else:
            shift = mean if w.c is None else mean - w.c
            Y = torch.cat([factor / math.sqrt(count), shift.unsqueeze(1)], dim=1)  # S = Y^T Y + eps I
            Z = Y @ w.U.mT if w.U is not None else Y
            D = Z.mT @ (Z if w.U is not None else _times_gains(Z, w)) + w.eps * gains
        D.diagonal(dim1=-2, dim2=-1).sub_(1)
        drift = float((D * D.mT).sum().clamp(min=0) / size) ** 0.5
        if w.tail > 0:
            return drift, None
        trace, square = (gains.diagonal(dim1=-2, dim2=-1).sum(-1), gains.square().sum((-1, -2)))
        inputs = mean.shape[1]
        first, second = inputs - w.eps * trace, inputs - 2 * w.eps * trace + w.eps**2 * square
        chance = float((first.square() + second).sum().clamp(min=0) / (count * size)) ** 0.5
    return drift, chance


def _as_in_the_formula(whitening: Whitening, like: Tensor) -> Whitening:
    """The whitening with its U not scaled, in the precision of a tensor."""
    w = whitening.map(lambda x: x.to(like.dtype))
    return replace(w, U=w.U * w.scale, U_inv=None, scale=1.0) if w.U is not None else w


def _damped(moments: Moments, w: Whitening) -> Tensor:
    """S = E[(h - c)(h - c)^T] + eps I, shape (groups, in, in)."""
    S = moments.covariance()
    shift = moments.mean if w.c is None else moments.mean - w.c
    S = S + shift.unsqueeze(2) * shift.unsqueeze(1)
    S.diagonal(dim1=-2, dim2=-1).add_(w.eps)
    return S


def _gains(w: Whitening) -> Tensor:
    """U U^T, or P in full."""
    if w.U is not None:
        return w.U @ w.U.mT
    assert w.P is not None
    if w.tail == 0:
        return w.P
    P = -(w.P @ w.P.mT)
    P.diagonal(dim1=-2, dim2=-1).add_(w.tail)
    return P


def _times_gains(X: Tensor, w: Whitening) -> Tensor:
    assert w.P is not None
    return times_inverse(X, w.P, w.tail)
