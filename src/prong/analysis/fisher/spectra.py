"""What the eigenvalues of a Fisher matrix say: all of them, or the ends of the spectrum from products alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from prong.analysis.fisher.matrices import Operator
from prong.options import check_count

FURTHER = 3  # steps for which an end must stay where it is


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
    floor = _checked_floor(matrix, floor)
    F = matrix.detach().double()
    size = F.abs().max()
    if not torch.isfinite(size):
        raise ValueError("the matrix is not finite")
    if (F - F.mT).abs().max() > 1e-4 * size:
        raise ValueError("the matrix is not symmetric; this summary is for symmetric ones")
    lam = torch.linalg.eigvalsh((F + F.mT) / 2).flip(0)
    largest, trace = lam[0].item(), lam.sum().item()
    _check_lowest(lam[-1].item(), largest, floor, matrix.dtype)
    above = lam[lam > floor * max(largest, 0.0)]
    return Spectrum(
        eigenvalues=lam,
        trace=trace,
        condition=largest / above[-1].item() if len(above) else math.nan,
        floor=floor,
        below=len(lam) - len(above),
        effective_rank=trace**2 / lam.square().sum().item() if len(above) else math.nan,
    )


@dataclass(frozen=True)
class Extremes:
    """The ends of a spectrum, as far as they were found."""

    largest: float
    smallest: float  # the smallest above the floor
    condition: float  # their ratio
    steps: int  # products with the matrix that were made
    converged: tuple[bool, bool]  # whether (largest, smallest) passed the test, which is evidence and no proof


def extreme_eigenvalues(
    matrix: Operator | Tensor, *, steps: int = 100, tolerance: float = 1e-3, floor: float | None = None
) -> Extremes:
    """The largest eigenvalue of a symmetric positive semi-definite matrix, and the smallest above a floor.

    Lanczos with full reorthogonalisation, from F x with a random x: it has no part in the null space. An end theta of
    the spectrum with the residual ||F y - theta y|| = beta |s| has converged when, in each of the last three steps,

        residual <= tolerance * theta    and    |theta - theta of the step before| <= tolerance * theta

    or when the Krylov space is exhausted; docs/fisher.md tells what that proves. The matrix is an `Operator`, a dense
    one, or anything with shape, dtype and device that multiplies like one. `steps` is how many products to make at
    most, and how many vectors to keep. The floor is as for `spectrum`.
    """
    floor = _checked_floor(matrix, floor)
    check_count("steps", steps, 1)
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance is relative, between 0 and 1; got {tolerance}")
    x = torch.randn(matrix.shape[0], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w = _product(matrix, x.to(matrix.device, matrix.dtype))
    if not w.norm() > 0:
        raise ValueError("this matrix is zero: it has no condition")
    steps = min(steps, len(w))
    basis = w.new_empty(steps, len(w))  # orthonormal rows
    T = torch.zeros(steps + 1, steps + 1, dtype=torch.float64)  # the matrix in that basis, tridiagonal
    beta = w.norm().item()
    ends, residuals = torch.empty(2, 0, 2, dtype=torch.float64)  # of every step, largest and smallest
    for k in range(steps):
        basis[k] = w / beta
        w = _product(matrix, basis[k])
        T[k, k] = torch.dot(w, basis[k])
        for _ in range(2):  # once leaves errors of the size of what is subtracted
            w = w - basis[: k + 1].mT @ (basis[: k + 1] @ w)
        beta = w.norm().item()
        T[k, k + 1] = T[k + 1, k] = beta
        theta, S = torch.linalg.eigh(T[: k + 1, : k + 1])
        _check_lowest(theta[0].item(), theta[-1].item(), floor, matrix.dtype)
        where = [k, int((theta > floor * theta[-1]).nonzero()[0])]
        ends = torch.cat([ends, theta[where].unsqueeze(0)])
        residuals = torch.cat([residuals, beta * S[-1, where].abs().unsqueeze(0)])
        exhausted = k + 1 == len(w) or beta <= (k + 1) * torch.finfo(matrix.dtype).eps * theta[-1]
        settled = _settled(ends, residuals, tolerance) | exhausted
        if settled.all():
            break
    top, bottom = ends[-1].tolist()
    return Extremes(top, bottom, top / bottom, len(ends) + 1, (bool(settled[0]), bool(settled[1])))


def _settled(ends: Tensor, residuals: Tensor, tolerance: float) -> Tensor:
    """Whether Ritz values (steps, 2) have had a small residual, and have hardly moved, for `FURTHER` steps."""
    last, moved = ends[-FURTHER:], ends.diff(dim=0)[-FURTHER:].abs()
    if len(moved) < FURTHER:
        return torch.tensor([False, False])
    return (torch.maximum(residuals[-FURTHER:], moved) <= tolerance * last).all(0)


def _product(matrix: Operator | Tensor, v: Tensor) -> Tensor:
    product: Tensor = matrix @ v
    if not torch.isfinite(product).all():
        raise FloatingPointError("a product with this matrix is not finite")
    return product


def _rounding(dtype: torch.dtype) -> float:
    """What rounding can leave of a zero eigenvalue, relative to the largest one."""
    return 1e-12 if dtype == torch.float64 else 1e-5


def _checked_floor(matrix: Operator | Tensor, floor: float | None) -> float:
    """The floor or its default, for a matrix that must be square."""
    if len(matrix.shape) != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape[0] == 0:
        raise ValueError(f"a spectrum is that of a square matrix, got shape {tuple(matrix.shape)}")
    if floor is not None and not 0 <= floor < 1:
        raise ValueError(f"floor is relative to the largest eigenvalue, at least 0 and below 1; got {floor}")
    return _rounding(matrix.dtype) if floor is None else float(floor)


def _check_lowest(lowest: float, largest: float, floor: float, dtype: torch.dtype) -> None:
    """Refuse a negative eigenvalue that rounding does not explain."""
    if lowest < -max(floor, _rounding(dtype)) * max(largest, -lowest):
        rounded = lowest >= -_rounding(torch.float32) * largest
        cure = ". If it was computed in float32 this is rounding: pass floor=1e-5" if rounded else ""
        raise ValueError(f"the matrix has an eigenvalue of {lowest:.3g}, and a Fisher matrix has none below zero{cure}")
