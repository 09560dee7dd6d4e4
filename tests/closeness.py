"""One tolerance per dtype, one way to compare."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Relative to the largest entry: algebra is tested in float64, the rest only where precision is the subject.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}

Comparable = Tensor | float | None


def assert_close(
    actual: Comparable | Sequence[Comparable],
    expected: Comparable | Sequence[Comparable],
    tolerance: float | None = None,
    scale: float = 1.0,
) -> None:
    """Values equal up to `tolerance` (default: that of the dtype) times the larger of `scale` and the largest entry.

    Sequences, such as the pairs (W, b), are compared entry by entry; None equals only None. Dtype and shape must agree.
    A mismatch prints where and by how much.
    """
    if isinstance(expected, Sequence):
        assert isinstance(actual, Sequence) and len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            assert_close(a, e, tolerance, scale)
        return
    if expected is None or actual is None:
        assert actual is None and expected is None, f"expected {expected}, got {actual}"
        return
    a, e = (x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64) for x in (actual, expected))
    if e.numel():
        scale = max(scale, e.abs().max().item())
    bound = scale * (TOLERANCE[e.dtype] if tolerance is None else tolerance)
    torch.testing.assert_close(a.detach(), e.detach(), rtol=0, atol=bound)
