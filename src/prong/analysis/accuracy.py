"""How far the steps of an approximate whitening (blocks, a cutoff) are from those of the exact one.

With Sigma the covariance of a layer's inputs and F = Sigma + eps I, the exact step is g P, P = F^-1, and an
approximation takes g Q. What it makes of the right step are its gains, the eigenvalues of Q F: all of them 1 if it is
exact. In blocks their mean is 1 and none exceeds the number of blocks, since Q^-1 is F without its other blocks; with a
cutoff they lie between 1 and 1 + cutoff, up to the mixing of directions near it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from prong.analysis.conditioning import inverse_covariance
from prong.core.factorise import whiten
from prong.core.moments import Moments
from prong.layers.site import Layout
from prong.options import Implicit, check_positive


@dataclass(frozen=True)
class StepError:
    """What an approximation does to steps g P, for gradients g = delta (h - c)^T whose delta is independent of h."""

    relative: float  # (E||g Q - g P||^2 / E||g P||^2)^1/2, both in the metric F
    least_gain: float  # what the step is multiplied by where it comes out smallest
    largest_gain: float  # and largest: a learning rate may have to be so many times smaller


@torch.no_grad()
def step_error(Sigma: Tensor, eps: float, *, block: int | None = None, cutoff: float = 0.0) -> StepError:
    """How far steps with blocks of so many inputs, or with a cutoff, or both, are from those with all of Sigma.

        relative^2 = tr(Sigma (Q - P) F (Q - P)) / tr(Sigma P)

    For a covariance (in, in) of a layer's inputs, and options as of `prong.Implicit`. Everything is in float64.
    """
    check_positive("eps", eps)
    Implicit(cutoff=cutoff, block=block)  # which refuses what makes no sense
    if Sigma.dim() != 2 or Sigma.shape[0] != Sigma.shape[1] or not torch.isfinite(Sigma).all():
        raise ValueError(f"a covariance is a finite matrix (in, in), got one of shape {tuple(Sigma.shape)}")
    lam, E = torch.linalg.eigh(Sigma.double())
    lam = lam.clamp(min=0)  # rounding leaves some of a singular one below
    root = E * (lam + eps).sqrt()  # F = root root^T: in this basis the exact step is the identity
    gains = root.mT @ approximate_inverse(Sigma.double(), eps, block, cutoff) @ root
    off = gains - torch.eye(len(lam)).to(gains)
    weights = lam / (lam + eps)
    relative = math.sqrt(float((weights @ off.square()).sum() / weights.sum())) if lam.any() else 0.0
    spectrum = torch.linalg.eigvalsh(gains)
    return StepError(relative, float(spectrum[0]), float(spectrum[-1]))


def approximate_inverse(Sigma: Tensor, eps: float, block: int | None = None, cutoff: float = 0.0) -> Tensor:
    """The matrix (in, in) that a layer with these options takes for (Sigma + eps I)^-1."""
    layout = Layout((1, len(Sigma)), block=block)
    lam, E = torch.linalg.eigh(Sigma)
    root = (E * (len(Sigma) * lam.clamp(min=0)).sqrt()).mT
    moments = Moments(layout.matrices, layout.features, Sigma.dtype, Sigma.device)
    moments.add(layout.rows(torch.cat([root, -root]), -1))  # any rows that have this covariance
    return layout.assembled(inverse_covariance(whiten(moments, eps, cutoff=cutoff), Sigma.dtype))[0]
