"""The best low-rank replacements of a layer on its own inputs. Pure functions, in float64.

A layer computes `z = W h + b` on inputs of mean c and covariance Sigma. Of a convolution, h is a patch: W is
(out, taps * in), taps first, and c and Sigma are those of patches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE = 1e-12  # relative to the mean variance: which directions come first where none has variance


@dataclass(frozen=True)
class Ranked:
    """Output directions, and what a layer loses by having only the first k of them.

    Shapes: A (rows, r) with orthonormal columns; errors (r + 1,), where errors[k] = E||(W - A_k A_k^T W)(h - c)||^2.
    """

    A: Tensor
    errors: Tensor


def rank_outputs(W: Tensor, Sigma: Tensor) -> Ranked:
    """The output directions whose first k give the best replacement of W of rank k, for every k at once.

    For any W_k of rank k, with ||.|| the Frobenius norm,

        E||W (h - c) - W_k (h - c)||^2 = tr (W - W_k) Sigma (W - W_k)^T = ||W Sigma^1/2 - W_k Sigma^1/2||^2

    and W_k Sigma^1/2 has rank k at most. By Eckart and Young the right side is at least the sum of the squares of all
    but the k largest singular values of W Sigma^1/2 = A S B^T. It is exactly that for W_k = A_k A_k^T W, since
    A_k A_k^T W Sigma^1/2 = A_k S_k B_k^T. So no inverse of Sigma is needed, which may be singular.

    A has the eigenvectors of W Sigma W^T, the covariance of z: the best replacement projects the outputs on their own
    leading principal directions. Where all of W's rank is kept, A A^T W = W, whatever Sigma is.

    Shapes: W (out, in), Sigma (in, in); r = min(out, in).
    """
    W, Sigma = W.double(), Sigma.double()
    if W.shape[0] <= W.shape[1]:
        A = torch.linalg.eigh(W @ Sigma @ W.mT).eigenvectors.flip(-1)
    else:
        lam, E = torch.linalg.eigh(Sigma)
        ridge = RIDGE * float(lam.mean()) or RIDGE  # A then spans all that W reaches
        A = torch.linalg.svd(W @ (E * (lam.clamp(min=0) + ridge).sqrt()), full_matrices=False).U
    projected = A.mT @ W
    squares = ((projected @ Sigma) * projected).sum(-1).clamp(min=0)
    return Ranked(A, torch.cat([squares.flip(0).cumsum(0).flip(0), squares.new_zeros(1)]))


def rank_inputs(W: Tensor, Sigma: Tensor, taps: int) -> Ranked:
    """Directions for a replacement of a convolution by one over k maps, after a 1 x 1 convolution to these.

    With M the taps of W on top of each other, (out * taps, in), the replacement is M_k = A_k A_k^T M: the 1 x 1
    convolution has the weight A_k^T M and the taps of the other are those of A_k. A is that of `rank_outputs` for M and
    the covariance of feature maps, the mean of Sigma's diagonal blocks, which would be best if inputs at different taps
    were uncorrelated. They are not, so the errors are computed from all of Sigma:

        errors[k] = sum_{i, j >= k} G_ij        G_ij = sum_{t, s} (A_t^T A_s)_ij (Q Sigma_ts Q^T)_ij        Q = A^T M

    Shapes: W (out, taps * in), Sigma (taps * in, taps * in); A (out * taps, r) with outputs first.
    """
    W, Sigma = W.double(), Sigma.double()
    out, features = W.shape[0], W.shape[1] // taps
    blocks = Sigma.reshape(taps, features, taps, features)
    M = W.reshape(out * taps, features)
    A = rank_outputs(M, torch.einsum("tatb->ab", blocks) / taps).A
    Q = A.mT @ M
    per_tap = A.reshape(out, taps, -1)
    G = A.new_zeros(A.shape[1], A.shape[1])
    for t in range(taps):
        for s in range(taps):
            G += (per_tap[:, t].mT @ per_tap[:, s]) * (Q @ blocks[t, :, s] @ Q.mT)
    sums = G.flip(0, 1).cumsum(0).cumsum(1).diagonal().clamp(min=0).flip(0)
    return Ranked(A, torch.cat([sums, sums.new_zeros(1)]))


def factors(W: Tensor, A: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(first, second), shapes (k, in) and (out, k), whose product second @ first is A_k A_k^T W."""
    A_k = A[:, :k]
    return A_k.mT @ W.double(), A_k


def expected_error(D: Tensor, shift: Tensor | None, c: Tensor, Sigma: Tensor) -> float:
    """E||D h - shift||^2 = tr D Sigma D^T + ||D c - shift||^2: what a change of W by -D and of b by shift does to z.

    Shapes: D (out, in), shift (out,), c (in,), Sigma (in, in).
    """
    D, c, Sigma = D.double(), c.double(), Sigma.double()
    mean = D @ c if shift is None else D @ c - shift.double()
    return float(((D @ Sigma) * D).sum().clamp(min=0) + mean.square().sum())
