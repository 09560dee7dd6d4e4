"""The leading part of a covariance's spectrum, without the cost of all of it."""

from __future__ import annotations

import torch
from torch import Tensor

OVERSAMPLING = 8  # more directions than asked for, which the last of those asked for need to be accurate
ITERATIONS = 3


def leading_directions(Sigma: Tensor, above: float, at_most: int, expected: int = 0) -> tuple[Tensor, Tensor] | None:
    """Eigenvalues larger than `above` and their eigenvectors, largest first; None if there are more than `at_most`.

    Subspace iteration with a Rayleigh-Ritz step (Halko, Martinsson and Tropp 2011) on blocks that double until they
    hold what is asked for: in^2 k operations and the eigenproblem of k x k, where all of it costs ten times in^3. The
    first block has room for the number `expected`, if one is. Directions whose eigenvalue is close to `above` may be
    mixed with their neighbours. The start is random, but always the same.

    Shapes: Sigma (groups, in, in); eigenvalues (groups, k), eigenvectors (groups, in, k). Where groups have different
    numbers of them, the missing ones are zero.
    """
    size = Sigma.shape[-1]
    wanted = min(at_most, expected + expected // 8 if expected else max(16, size // 16))
    while True:
        lam, E = leading_subspace(Sigma, min(size, wanted + OVERSAMPLING))
        count = int((lam > above).sum(-1).max())
        if count <= wanted:
            real = lam[:, :count] > above
            return lam[:, :count] * real, E[..., :count] * real.unsqueeze(-2)
        if wanted == at_most:
            return None
        wanted = min(at_most, 2 * wanted)


def leading_subspace(Sigma: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Approximate leading eigenvalues (groups, size), largest first, and their eigenvectors (groups, in, size)."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(Sigma.shape[-1], size, generator=generator, dtype=torch.float64, device=generator.device)
    E = start.to(Sigma).expand(Sigma.shape[0], -1, -1)
    for _ in range(ITERATIONS):
        E = torch.linalg.qr(Sigma @ E).Q
    lam, rotation = torch.linalg.eigh(E.mT @ (Sigma @ E))
    return lam.flip(-1), E @ rotation.flip(-1)
