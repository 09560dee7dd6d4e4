"""The ends of a spectrum, from products alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from prong.fisher.spectra import check_floor, default_floor
from prong.injection import check_count


class LinearMap(Protocol):
    """A symmetric matrix, or something that multiplies like one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(size, size)."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its vectors."""

    @property
    def device(self) -> torch.device:
        """Of its vectors."""

    def __matmul__(self, v: Tensor, /) -> Tensor:
        """The product with a vector."""


@dataclass(frozen=True)
class Extremes:
    """The ends of a spectrum, as far as they were found.

    Attributes:
        largest: the largest eigenvalue.
        smallest: the smallest one above `floor` times the largest.
        condition: their ratio.
        floor: relative to the largest eigenvalue.
        steps: products with the matrix that were made.
        converged: whether (largest, smallest) passed the test of `extreme_eigenvalues`.
    """

    largest: float
    smallest: float
    condition: float
    floor: float
    steps: int
    converged: tuple[bool, bool]


def extreme_eigenvalues(
    matrix: LinearMap,
    *,
    steps: int = 100,
    tolerance: float = 1e-3,
    floor: float | None = None,
    generator: torch.Generator | None = None,
) -> Extremes:
    """The largest eigenvalue of a symmetric positive semi-definite matrix, and the smallest above a floor.

    Lanczos with full reorthogonalisation. It starts from F x with a random x, which has no part in the null space, so
    that the smallest nonzero eigenvalue is an end of the spectrum it sees. A Ritz value theta with the residual
    ||F y - theta y|| = beta |s| has an eigenvalue within that distance; it has converged when

        residual <= tolerance * theta

    and it ends when both ends have, or when the Krylov space is exhausted and all of them are exact. The largest comes
    within tens of steps. The smallest may need as many as there are distinct eigenvalues, and a Ritz value that has
    converged shows that there is an eigenvalue, not that there is none below it: `converged` then is no proof.

    Memory: `steps` vectors. Arithmetic on the small tridiagonal matrix is in float64.

    Args:
        matrix: an `Operator`, or a dense matrix.
        steps: how many products at most, and no more than there are rows.
        tolerance: relative, as above.
        floor: default 1e-12 in float64, 1e-5 in float32; what lies at or below it counts as zero.
        generator: where x comes from; by default always the same numbers.

    Raises:
        ValueError: not square, zero, or with a negative eigenvalue.
        FloatingPointError: a product that is not finite.
    """
    size = matrix.shape[0]
    if len(matrix.shape) != 2 or matrix.shape[1] != size or size == 0:
        raise ValueError(f"eigenvalues are those of a square matrix, got shape {tuple(matrix.shape)}")
    check_count("steps", steps, 1)
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance is relative, between 0 and 1; got {tolerance}")
    floor = check_floor(floor, matrix.dtype)
    generator = generator or torch.Generator().manual_seed(0)
    x = torch.randn(size, generator=generator, dtype=torch.float64, device=generator.device)
    start = _product(matrix, x.to(matrix.device, matrix.dtype))
    if not start.norm() > 0:
        raise ValueError("this matrix is zero: it has no condition")
    steps = min(steps, size)
    basis = start.new_empty(steps, size)  # orthonormal rows
    basis[0] = start / start.norm()
    alphas: list[float] = []
    betas: list[float] = []
    for k in range(steps):
        w = _product(matrix, basis[k])
        alphas.append(torch.dot(w, basis[k]).item())
        known = basis[: k + 1]
        for _ in range(2):  # once leaves errors of the size of what is subtracted
            w = w - known.mT @ (known @ w)
        beta = w.norm().item()
        extremes = _extremes(alphas, betas, beta, floor, tolerance, matrix.dtype)
        if all(extremes.converged) or k + 1 == steps:
            break
        betas.append(beta)
        basis[k + 1] = w / beta
    return extremes


def _product(matrix: LinearMap, v: Tensor) -> Tensor:
    product = matrix @ v
    if not torch.isfinite(product).all():
        raise FloatingPointError("a product with this matrix is not finite")
    return product


def _extremes(
    alphas: list[float], betas: list[float], beta: float, floor: float, tolerance: float, dtype: torch.dtype
) -> Extremes:
    """The ends of the tridiagonal matrix with `alphas` on and `betas` beside its diagonal; `beta` is the next one."""
    beside = torch.tensor(betas, dtype=torch.float64)
    T = torch.diag(torch.tensor(alphas, dtype=torch.float64)) + torch.diag(beside, 1) + torch.diag(beside, -1)
    theta, S = torch.linalg.eigh(T)
    largest, lowest = theta[-1].item(), theta[0].item()
    if lowest < -max(floor, default_floor(dtype)) * max(largest, -lowest):
        raise ValueError(f"this matrix has an eigenvalue below {lowest:.3g}, and a Fisher matrix has none below zero")
    exhausted = beta <= len(alphas) * torch.finfo(dtype).eps * largest
    residuals = beta * S[-1].abs()
    above = int((theta > floor * largest).nonzero()[0])
    smallest = theta[above].item()
    return Extremes(
        largest=largest,
        smallest=smallest,
        condition=largest / smallest,
        floor=floor,
        steps=len(alphas) + 1,
        converged=(
            bool(exhausted or residuals[-1] <= tolerance * largest),
            bool(exhausted or residuals[above] <= tolerance * smallest),
        ),
    )
