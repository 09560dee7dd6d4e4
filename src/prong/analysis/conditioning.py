"""How well conditioned a layer's inputs are, as they come and as its whitening leaves them. Pure functions of moments.

With Sigma the covariance of the inputs now, c, U and eps of a whitening (P = U^T U), and

    S = E[(h - c)(h - c)^T] + eps I          M = U S U^T

M is the identity for the inputs that the whitening came from (unless by a cutoff or PRONG+), and what an optimizer in
whitened coordinates works against later. P S has its eigenvalues, so U is not needed.

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
    """The eigenvalues of M, largest first, shape (groups in,): those of L^T P L with S = L L^T."""
    S, P = _about_centre(moments, whitening), inverse_covariance(whitening, moments.mean.dtype)
    with full_precision(S):
        L, info = torch.linalg.cholesky_ex(S)
        if info.any():  # eps is smaller than the rounding errors of the variance
            lam, E = torch.linalg.eigh(S.double())
            L = E * lam.clamp(min=whitening.eps).sqrt().unsqueeze(-2)
        return _descending(torch.linalg.eigvalsh(L.mT @ P.to(L) @ L))


def drift_from_white(moments: Moments, whitening: Whitening) -> tuple[float, float | None]:
    """||M - I||_F / sqrt(groups in), and what chance alone would make of it.

    With D = P S - I, ||M - I||_F^2 = tr(D D). The second number is the root mean square of the first if the rows were
    as many new, independent, normal ones with the covariance that the whitening came from:

        ((tr B)^2 + tr B^2) / (rows groups in)          B = U Sigma U^T = I - eps U U^T

    summed over groups. A drift that is no larger says nothing. None for a thin P, where B + eps U U^T is not I.
    """
    P, eps, factor = inverse_covariance(whitening, moments.mean.dtype), whitening.eps, moments.factor
    inputs, entries = P.shape[-1], moments.mean.numel()
    with full_precision(P):
        if factor is None:
            D = P @ _about_centre(moments, whitening)
        else:  # S = Y^T Y + eps I of few rows Y
            Y = torch.cat([factor / math.sqrt(moments.count), _shift(moments, whitening).unsqueeze(1)], dim=1)
            D = (P @ Y.mT) @ Y + eps * P
    D.diagonal(dim1=-2, dim2=-1).sub_(1)
    drift = math.sqrt(max(float((D * D.mT).sum()), 0.0) / entries)
    if whitening.tail > 0:
        return drift, None
    trace, square = P.diagonal(dim1=-2, dim2=-1).sum(-1), P.square().sum((-2, -1))  # of U U^T as of P
    first, second = inputs - eps * trace, inputs - 2 * eps * trace + eps**2 * square
    expected = float((first.square() + second).sum()) / (moments.count * entries)
    return drift, math.sqrt(max(expected, 0.0))


def inverse_covariance(whitening: Whitening, dtype: torch.dtype) -> Tensor:
    """P = (Sigma + eps I)^-1 in full, (groups, in, in): from U, whatever its scale, or from a P that may be thin."""
    if whitening.U is not None:
        U = whitening.scale * whitening.U.to(dtype)
        with full_precision(U):
            return U.mT @ U
    assert whitening.P is not None
    groups, inputs, _ = whitening.P.shape
    identity = torch.eye(inputs, dtype=dtype, device=whitening.P.device).expand(groups, -1, -1)
    return times_inverse(identity, whitening.P.to(dtype), whitening.tail)


def _about_centre(moments: Moments, whitening: Whitening) -> Tensor:
    """S, shape (groups, in, in)."""
    shift = _shift(moments, whitening)
    S = moments.covariance() + shift.unsqueeze(2) * shift.unsqueeze(1)
    S.diagonal(dim1=-2, dim2=-1).add_(whitening.eps)
    return S


def _shift(moments: Moments, whitening: Whitening) -> Tensor:
    return moments.mean if whitening.c is None else moments.mean - whitening.c.to(moments.mean)


def _descending(lam: Tensor) -> Tensor:
    return lam.flatten().sort(descending=True).values
