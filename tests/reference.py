"""Slow and obvious versions of what the library does fast: too simple to be wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def weighted_moments(rows: Tensor, weights: Sequence[float] | None = None) -> tuple[float, Tensor, Tensor]:
    """Total weight, mean (groups, in) and scatter (groups, in, in) of rows (groups, rows, in), in two passes."""
    groups, n, features = rows.shape
    weights = [1.0] * n if weights is None else list(weights)
    total = math.fsum(weights)
    mean = torch.zeros(groups, features, dtype=torch.float64)
    scatter = torch.zeros(groups, features, features, dtype=torch.float64)
    if total == 0:
        return total, mean, scatter
    for g, values in enumerate(rows.double().tolist()):
        m = [math.fsum(w * row[i] for w, row in zip(weights, values, strict=True)) / total for i in range(features)]
        mean[g] = torch.tensor(m, dtype=torch.float64)
        centred = [[row[i] - m[i] for i in range(features)] for row in values]
        for i in range(features):
            for j in range(features):
                scatter[g, i, j] = math.fsum(w * x[i] * x[j] for w, x in zip(weights, centred, strict=True))
    return total, mean, scatter


def covariance(rows: Tensor, centred: bool = True) -> Tensor:
    """E[(h - c)(h - c)^T], or E[h h^T], of rows (groups, rows, in), in float64."""
    rows = rows.double()
    if centred:
        rows = rows - rows.mean(1, keepdim=True)
    return sum(torch.einsum("gi,gj->gij", h, h) for h in rows.unbind(1)) / rows.shape[1]  # type: ignore[return-value]


def eye(groups: int, features: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """An identity per group."""
    return torch.eye(features, dtype=dtype).repeat(groups, 1, 1)


def damped(Sigma: Tensor, eps: float) -> Tensor:
    """Sigma + eps I."""
    return Sigma + eps * eye(*Sigma.shape[:2], dtype=Sigma.dtype)


def padded_positions(h: Tensor, padding: tuple[int, int]) -> Tensor:
    """Every position of the zero-padded map h (batch, channels, height, width) as a row: (rows, channels)."""
    vertical, horizontal = padding
    batch, channels, height, width = h.shape
    rows = []
    for n in range(batch):
        for y in range(-vertical, height + vertical):
            for x in range(-horizontal, width + horizontal):
                inside = 0 <= y < height and 0 <= x < width
                rows.append(h[n, :, y, x] if inside else h.new_zeros(channels))
    return torch.stack(rows)


def layer(W: Tensor, b: Tensor | None, h: Tensor) -> Tensor:
    """sum_taps W h + b for packed W (groups, out, taps, in) and inputs h (rows, groups, taps, in)."""
    z = torch.einsum("goti,ngti->ngo", W, h)
    return z if b is None else z + b


def whitened_layer(V: Tensor, d: Tensor | None, U: Tensor, c: Tensor | None, h: Tensor) -> Tensor:
    """sum_taps V U (h - c) + d: the definition of a whitened layer."""
    x = h if c is None else h - c[:, None, :]
    return layer(V, d, torch.einsum("gij,ngtj->ngti", U, x))


def convolution(W: Tensor, h: Tensor, kernel: tuple[int, int], stride: int, padding: int) -> Tensor:
    """The convolution of h (batch, channels, height, width) with packed weights W, by im2col."""
    groups, out, taps, features = W.shape
    columns = F.unfold(h, kernel, stride=stride, padding=padding)
    columns = columns.view(h.shape[0], groups, features, taps, -1)
    z = torch.einsum("goti,ngitl->ngol", W, columns).flatten(1, 2)
    height = (h.shape[2] + 2 * padding - kernel[0]) // stride + 1
    return z.view(h.shape[0], groups * out, height, -1)


def transposed_convolution(W: Tensor, h: Tensor, kernel: tuple[int, int], stride: int, padding: int) -> Tensor:
    """The transposed convolution of h with packed weights W: every input adds its kernel to the output."""
    groups, _, _, features = W.shape
    height, width = ((n - 1) * stride + k - 2 * padding for n, k in zip(h.shape[2:], kernel, strict=True))
    columns = torch.einsum("goti,ngil->ngotl", W, h.reshape(h.shape[0], groups, features, -1))
    return F.fold(columns.flatten(1, 3), (height, width), kernel, stride=stride, padding=padding)


def output_second_moment(delta: Tensor, groups: int, channels_at: int) -> Tensor:
    """Mean over examples of the sum over positions of delta delta^T, per group, for delta shaped as an output."""
    out = delta.shape[channels_at] // groups
    total = torch.zeros(groups, out, out, dtype=torch.float64)
    for example in delta.double():
        positions = example.movedim(channels_at, -1).reshape(-1, groups, out)
        for position in positions:
            for g in range(groups):
                total[g] += torch.outer(position[g], position[g])
    return total / delta.shape[0]
