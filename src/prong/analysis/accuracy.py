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
import torch.nn.functional as F
from torch import Tensor

from prong.core.factorise import whiten
from prong.core.moments import Moments
from prong.core.whitening import times_inverse
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

    For a covariance (in, in) of a layer's inputs, and options as of `prong.Implicit`. Everything is in float64, and
    costs a few decompositions of Sigma.
    """
    check_positive("eps", eps)
    Implicit(cutoff=cutoff, block=block)
    if Sigma.dim() != 2 or Sigma.shape[0] != Sigma.shape[1] or not torch.isfinite(Sigma).all():
        raise ValueError(f"a covariance is a finite matrix (in, in), got one of shape {tuple(Sigma.shape)}")
    lam, E = torch.linalg.eigh(Sigma.double())
    lam = lam.clamp(min=0)  # rounding leaves some of a singular one below
    root = E * (lam + eps).sqrt()  # F = root root^T: in this basis the exact step is the identity
    gains = root.mT @ approximate_inverse(Sigma.double(), eps, block, cutoff) @ root
    off = gains - torch.eye(len(lam), dtype=gains.dtype, device=gains.device)
    weights = lam / (lam + eps)
    total = float(weights.sum())
    relative = math.sqrt(float((weights @ off.square()).sum()) / total) if total > 0 else 0.0
    spectrum = torch.linalg.eigvalsh(gains)
    return StepError(relative, float(spectrum[0]), float(spectrum[-1]))


def approximate_inverse(Sigma: Tensor, eps: float, block: int | None = None, cutoff: float = 0.0) -> Tensor:
    """The matrix (in, in) that a layer with these options takes for (Sigma + eps I)^-1."""
    layout = Layout((1, len(Sigma)), block=block)
    blocks, size = layout.blocks, layout.features
    missing = blocks * size - len(Sigma)
    padded = F.pad(Sigma, (0, missing, 0, missing)).view(blocks, size, blocks, size)
    moments = Moments(blocks, size, Sigma.dtype, Sigma.device)  # any that have this covariance
    scatter = 2.0 * padded.diagonal(dim1=0, dim2=2).movedim(-1, 0)
    moments.load_state_dict({"count": 2.0, "mean": moments.mean, "scatter": scatter})
    whitening = whiten(moments, eps, cutoff=cutoff)
    assert whitening.P is not None
    identity = torch.eye(size, dtype=Sigma.dtype, device=Sigma.device).expand(blocks, -1, -1)
    return layout.assembled(times_inverse(identity, whitening.P, whitening.tail))[0]
