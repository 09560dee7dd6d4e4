"""The ends of a spectrum, from products alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from prong.analysis.fisher.spectra import check_floor, default_floor
from prong.model.whiten import check_count

FURTHER = 3  # steps for which an end must stay where it is


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
        converged: whether (largest, smallest) passed the test of `extreme_eigenvalues`, which is evidence and no proof.
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
    ||F y - theta y|| = beta |s| has an eigenvalue within that distance. An end of the spectrum has converged when

        residual <= tolerance * theta    and    |theta - theta of the step before| <= tolerance * theta

    in each of the last three steps, or when the Krylov space is exhausted and all Ritz values are eigenvalues. It ends
    when both ends have. The largest comes within tens of steps. The smallest may need as many as there are distinct
    eigenvalues. `converged` shows that there is an eigenvalue near theta and that more products did not change it, not
    that there is none beyond: one that is much smaller than all others, or one that lies between theta and a floor
    inside a dense part of the spectrum, can be missed. To be more certain use a smaller `tolerance`.

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
    history: list[_Ends] = []
    for k in range(steps):
        w = _product(matrix, basis[k])
        alphas.append(torch.dot(w, basis[k]).item())
        known = basis[: k + 1]
        for _ in range(2):  # once leaves errors of the size of what is subtracted
            w = w - known.mT @ (known @ w)
        beta = w.norm().item()
        ends = _ends(alphas, betas, beta, floor, matrix.dtype)
        exhausted = k + 1 == size or beta <= (k + 1) * torch.finfo(matrix.dtype).eps * ends.values[0]
        history.append(ends)
        converged = (exhausted or _settled(history, 0, tolerance), exhausted or _settled(history, 1, tolerance))
        if all(converged) or k + 1 == steps:
            break
        betas.append(beta)
        basis[k + 1] = w / beta
    largest, smallest = ends.values
    return Extremes(largest, smallest, largest / smallest, floor, steps=len(alphas) + 1, converged=converged)


def _product(matrix: LinearMap, v: Tensor) -> Tensor:
    product = matrix @ v
    if not torch.isfinite(product).all():
        raise FloatingPointError("a product with this matrix is not finite")
    return product


@dataclass(frozen=True)
class _Ends:
    """The (largest, smallest) Ritz values of a step, and their residuals."""

    values: tuple[float, float]
    residuals: tuple[float, float]


def _ends(alphas: list[float], betas: list[float], beta: float, floor: float, dtype: torch.dtype) -> _Ends:
    """The ends of the tridiagonal matrix with `alphas` on and `betas` beside its diagonal; `beta` is the next one."""
    beside = torch.tensor(betas, dtype=torch.float64)
    T = torch.diag(torch.tensor(alphas, dtype=torch.float64)) + torch.diag(beside, 1) + torch.diag(beside, -1)
    theta, S = torch.linalg.eigh(T)
    largest, lowest = theta[-1].item(), theta[0].item()
    if lowest < -max(floor, default_floor(dtype)) * max(largest, -lowest):
        raise ValueError(f"this matrix has an eigenvalue below {lowest:.3g}, and a Fisher matrix has none below zero")
    residuals = beta * S[-1].abs()
    above = int((theta > floor * largest).nonzero()[0])
    return _Ends((largest, theta[above].item()), (residuals[-1].item(), residuals[above].item()))


def _settled(history: list[_Ends], end: int, tolerance: float) -> bool:
    """Whether a Ritz value has had a small residual, and has hardly moved, for `FURTHER` steps."""
    if len(history) <= FURTHER:
        return False
    return all(
        now.residuals[end] <= tolerance * now.values[end]
        and abs(now.values[end] - before.values[end]) <= tolerance * now.values[end]
        for before, now in pairwise(history[-FURTHER - 1 :])
    )
