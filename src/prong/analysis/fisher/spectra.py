"""What the eigenvalues of a Fisher matrix say: all of them, or the ends of the spectrum from products alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from prong.analysis.fisher.matrices import Operator
from prong.options import check_count

FURTHER = 3  # steps for which an end must stay where it is
_End = tuple[float, float]  # a Ritz value and its residual


@dataclass(frozen=True)
class Spectrum:
    """A summary of a symmetric positive semi-definite matrix; of a zero matrix, ratios are NaN."""

    eigenvalues: Tensor  # all of them, largest first, in float64
    trace: float  # their sum
    condition: float  # the largest over the smallest one above `floor` times the largest
    floor: float  # relative to the largest eigenvalue: what lies at or below counts as zero
    below: int  # how many eigenvalues do
    effective_rank: float  # trace(F)^2 / ||F||_F^2: the rank when all nonzero eigenvalues are equal


def spectrum(matrix: Tensor, floor: float | None = None) -> Spectrum:
    """The eigenvalues of a symmetric positive semi-definite matrix (size, size) and what they say; see `Spectrum`.

    The floor is 1e-12 in float64 and 1e-5 in float32 if not given. Matrices that are not square, empty, not finite, not
    symmetric, or with a negative eigenvalue beyond the floor are refused.
    """
    _check_square(matrix)
    floor = _floor(floor, matrix.dtype)
    F = matrix.detach().double()
    size = F.abs().max()
    if not torch.isfinite(size):
        raise ValueError("the matrix is not finite")
    if (F - F.mT).abs().max() > 1e-4 * size:
        raise ValueError("the matrix is not symmetric; this summary is for symmetric ones")
    eigenvalues = torch.linalg.eigvalsh((F + F.mT) / 2).flip(0)
    largest = eigenvalues[0].item()
    _check_lowest(eigenvalues[-1].item(), largest, floor, matrix.dtype)
    above = eigenvalues[eigenvalues > floor * largest] if largest > 0 else eigenvalues[:0]
    trace = eigenvalues.sum().item()
    return Spectrum(
        eigenvalues=eigenvalues,
        trace=trace,
        condition=largest / above[-1].item() if len(above) else math.nan,
        floor=floor,
        below=len(eigenvalues) - len(above),
        effective_rank=trace**2 / eigenvalues.square().sum().item() if len(above) else math.nan,
    )


@dataclass(frozen=True)
class Extremes:
    """The ends of a spectrum, as far as they were found."""

    largest: float
    smallest: float  # the smallest above `floor` times the largest
    condition: float  # their ratio
    floor: float
    steps: int  # products with the matrix that were made
    converged: tuple[bool, bool]  # whether (largest, smallest) passed the test, which is evidence and no proof


def extreme_eigenvalues(
    matrix: Operator | Tensor,
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

    in each of the last three steps, or when the Krylov space is exhausted. It ends when both ends have. That there is
    none beyond is not proved: an eigenvalue much smaller than all others, or inside a dense part of the spectrum near
    the floor, can be missed.

    Args:
        matrix: an `Operator`, a dense matrix, or anything with shape, dtype and device that multiplies like one.
        steps: how many products at most, and as many vectors in memory.
        tolerance: relative, as above.
        floor: default 1e-12 in float64, 1e-5 in float32; what lies at or below it counts as zero.
        generator: where x comes from; by default always the same numbers.

    Raises:
        ValueError: not square, zero, or with a negative eigenvalue.
        FloatingPointError: a product that is not finite.
    """
    _check_square(matrix)
    check_count("steps", steps, 1)
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance is relative, between 0 and 1; got {tolerance}")
    floor, size = _floor(floor, matrix.dtype), matrix.shape[0]
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
    history: list[list[_End]] = []
    for k in range(steps):
        w = _product(matrix, basis[k])
        alphas.append(torch.dot(w, basis[k]).item())
        for _ in range(2):  # once leaves errors of the size of what is subtracted
            w = w - basis[: k + 1].mT @ (basis[: k + 1] @ w)
        betas.append(w.norm().item())
        history.append(_ends(alphas, betas, floor, matrix.dtype))
        exhausted = k + 1 == size or betas[-1] <= (k + 1) * torch.finfo(matrix.dtype).eps * history[-1][0][0]
        largest, smallest = (exhausted or _settled(several, tolerance) for several in zip(*history, strict=True))
        if (largest and smallest) or k + 1 == steps:
            break
        basis[k + 1] = w / betas[-1]
    (top, _), (bottom, _) = history[-1]
    return Extremes(top, bottom, top / bottom, floor, len(alphas) + 1, (largest, smallest))


def _ends(alphas: list[float], betas: list[float], floor: float, dtype: torch.dtype) -> list[_End]:
    """The largest and the smallest of the tridiagonal matrix with `alphas` on and `betas` beside its diagonal."""
    beside = torch.tensor(betas[:-1], dtype=torch.float64)
    T = torch.diag(torch.tensor(alphas, dtype=torch.float64)) + torch.diag(beside, 1) + torch.diag(beside, -1)
    theta, S = torch.linalg.eigh(T)
    largest = theta[-1].item()
    _check_lowest(theta[0].item(), largest, floor, dtype)
    residuals = betas[-1] * S[-1].abs()
    above = int((theta > floor * largest).nonzero()[0])
    return [(theta[i].item(), residuals[i].item()) for i in (-1, above)]


def _settled(ends: tuple[_End, ...], tolerance: float) -> bool:
    """Whether a Ritz value has had a small residual, and has hardly moved, for `FURTHER` steps."""
    return len(ends) > FURTHER and all(
        max(residual, abs(now - before)) <= tolerance * now
        for (before, _), (now, residual) in pairwise(ends[-FURTHER - 1 :])
    )


def _product(matrix: Operator | Tensor, v: Tensor) -> Tensor:
    product: Tensor = matrix @ v
    if not torch.isfinite(product).all():
        raise FloatingPointError("a product with this matrix is not finite")
    return product


def _check_square(matrix: Operator | Tensor) -> None:
    if len(matrix.shape) != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape[0] == 0:
        raise ValueError(f"a spectrum is that of a square matrix, got shape {tuple(matrix.shape)}")


def _rounding(dtype: torch.dtype) -> float:
    """What rounding can leave of a zero eigenvalue, relative to the largest one."""
    return 1e-12 if dtype == torch.float64 else 1e-5


def _floor(floor: float | None, dtype: torch.dtype) -> float:
    """The floor, or its default."""
    if floor is not None and not 0 <= floor < 1:
        raise ValueError(f"floor is relative to the largest eigenvalue, at least 0 and below 1; got {floor}")
    return _rounding(dtype) if floor is None else float(floor)


def _check_lowest(lowest: float, largest: float, floor: float, dtype: torch.dtype) -> None:
    """Refuse a negative eigenvalue that rounding does not explain."""
    if lowest < -max(floor, _rounding(dtype)) * max(largest, -lowest):
        rounded = lowest >= -_rounding(torch.float32) * largest
        cure = ". If it was computed in float32 this is rounding: pass floor=1e-5" if rounded else ""
        raise ValueError(f"the matrix has an eigenvalue of {lowest:.3g}, and a Fisher matrix has none below zero{cure}")
