"""What the eigenvalues of a Fisher matrix say."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spectrum:
    """A summary of a symmetric positive semi-definite matrix.

    Attributes:
        eigenvalues: all of them, largest first, in float64.
        trace: their sum.
        condition: the largest eigenvalue over the smallest one above `floor` times the largest; NaN for a zero matrix.
            Of an invertible matrix with a floor below its spectrum this is the condition number.
        floor: relative to the largest eigenvalue: what lies at or below counts as zero.
        below: how many eigenvalues do.
        effective_rank: trace(F)^2 / ||F||_F^2, between 1 and the rank, which it is when all nonzero eigenvalues are
            equal; NaN for a zero matrix.
    """

    eigenvalues: Tensor
    trace: float
    condition: float
    floor: float
    below: int
    effective_rank: float


def default_floor(dtype: torch.dtype) -> float:
    """What rounding can leave of a zero eigenvalue, relative to the largest one."""
    return 1e-12 if dtype == torch.float64 else 1e-5


def spectrum(matrix: Tensor, floor: float | None = None) -> Spectrum:
    """The eigenvalues of a symmetric positive semi-definite matrix (size, size) and what they say; see `Spectrum`.

    Args:
        matrix: from `dense` or `blocks`, or any other.
        floor: default 1e-12 in float64, 1e-5 in float32.

    Raises:
        ValueError: not square, empty, not finite, not symmetric, or with a negative eigenvalue beyond the floor.
    """
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape[0] == 0:
        raise ValueError(f"a spectrum is that of a square matrix, got shape {tuple(matrix.shape)}")
    floor = check_floor(floor, matrix.dtype)
    F = matrix.detach().double()
    size = F.abs().max()
    if not torch.isfinite(size):
        raise ValueError("the matrix is not finite")
    if (F - F.mT).abs().max() > 1e-4 * size:
        raise ValueError("the matrix is not symmetric; this summary is for symmetric ones")
    eigenvalues = torch.linalg.eigvalsh((F + F.mT) / 2).flip(0)
    largest = eigenvalues[0].item()
    lowest = eigenvalues[-1].item()
    if lowest < -max(floor, default_floor(matrix.dtype)) * max(largest, -lowest):
        rounded = lowest >= -default_floor(torch.float32) * largest
        cure = ". If it was computed in float32 this is rounding: pass floor=1e-5" if rounded else ""
        raise ValueError(f"the matrix has an eigenvalue of {lowest:.3g}, and a Fisher matrix has none below zero{cure}")
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


def check_floor(floor: float | None, dtype: torch.dtype) -> float:
    """The floor, or its default; refused outside [0, 1)."""
    if floor is None:
        return default_floor(dtype)
    if not 0 <= floor < 1:
        raise ValueError(f"floor is relative to the largest eigenvalue, at least 0 and below 1; got {floor}")
    return float(floor)
