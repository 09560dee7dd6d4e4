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

import torch
from torch import Tensor

from prong.core.moments import Moments, full_precision
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
    return _descending(lam.clamp(min=0))


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
    left, right, c = _factors(whitening, moments.mean)
    S = _about(c, moments)
    S.diagonal(dim1=-2, dim2=-1).add_(whitening.eps)
    with full_precision(S):
        if right is not None:
            return _descending(torch.linalg.eigvalsh(left @ S @ right))
        L, info = torch.linalg.cholesky_ex(S)
        if info.any():  # eps is smaller than the rounding errors of the variance
            lam, E = torch.linalg.eigh(S.double())
            L = E * lam.clamp(min=whitening.eps).sqrt().unsqueeze(-2)
        return _descending(torch.linalg.eigvalsh(L.mT @ left.to(L) @ L))


def drift_from_white(moments: Moments, whitening: Whitening) -> tuple[float, float | None]:
    """||M - I||_F / sqrt(groups in), and what chance alone would make of it.

    From P alone, D = P S - I has ||M - I||_F^2 = tr(D D). The second number is the root mean square of the first if the
    rows were as many new, independent, normal ones with the covariance that the whitening came from:

        ((tr B)^2 + tr B^2) / (rows groups in)          B = U Sigma U^T = I - eps U U^T

    summed over groups. A drift that is no larger says nothing. It takes B + eps U U^T = I for granted, which
    a thin P does not give: None there.
    """
    mean, factor, count, eps = moments.mean, moments.factor, moments.count, whitening.eps
    left, right, c = _factors(whitening, mean)
    groups, inputs = mean.shape
    with full_precision(mean):
        if factor is None:
            D = left @ _about(c, moments)
            D = D if right is None else D @ right
        else:
            Y = torch.cat([factor / math.sqrt(count), (mean - c).unsqueeze(1)], dim=1)  # S = Y^T Y + eps I
            D = (left @ Y.mT) @ (Y if right is None else Y @ right)
        gains = left if right is None else left @ right  # U U^T, or P: their traces and norms are the same
        D = D + eps * gains
        D.diagonal(dim1=-2, dim2=-1).sub_(1)
        drift = float((D * D.mT).sum().clamp(min=0) / (groups * inputs)) ** 0.5
        if whitening.tail > 0:
            return drift, None
        trace, square = (gains.diagonal(dim1=-2, dim2=-1).sum(-1), gains.square().sum((-1, -2)))
        first, second = inputs - eps * trace, inputs - 2 * eps * trace + eps**2 * square
        return drift, float((first.square() + second).sum().clamp(min=0) / (count * groups * inputs)) ** 0.5


def _factors(w: Whitening, like: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """U as in the formula, whatever its scale, and U^T, or P in full and None; and c, or zero. As precise as `like`."""
    c = torch.zeros_like(like) if w.c is None else w.c.to(like)
    if w.U is not None:
        U = w.scale * w.U.to(like)
        return U, U.mT, c
    assert w.P is not None
    identity = torch.eye(w.P.shape[1], dtype=like.dtype, device=like.device).expand(len(w.P), -1, -1)
    return times_inverse(identity, w.P.to(like), w.tail), None, c


def _about(c: Tensor, moments: Moments) -> Tensor:
    """E[(h - c)(h - c)^T], shape (groups, in, in)."""
    shift = moments.mean - c
    return moments.covariance() + shift.unsqueeze(2) * shift.unsqueeze(1)


def _descending(lam: Tensor) -> Tensor:
    return lam.flatten().sort(descending=True).values
