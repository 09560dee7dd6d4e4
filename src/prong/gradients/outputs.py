"""Gradients of labels drawn from the model itself, by the distribution that its output parametrises."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Distribution = Literal["categorical", "bernoulli", "gaussian"]
DISTRIBUTIONS: tuple[str, ...] = get_args(Distribution)


@torch.no_grad()
def sampled_output_gradient(
    output: Tensor, distribution: Distribution, generator: torch.Generator | None = None
) -> Tensor:
    """The gradient of -log p(y) with respect to the model's output, with y drawn from the model itself.

    categorical   softmax(output) - onehot(y), classes where `F.cross_entropy` has them
    bernoulli     sigmoid(output) - y, elementwise
    gaussian      output - y = -noise of unit variance, elementwise

    Where the output is no distribution's parameter, as after an overflow, the gradient is NaN.
    """
    if distribution == "gaussian":
        return torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)
    if distribution == "bernoulli":
        p = output.sigmoid()
        return p - torch.bernoulli(p.nan_to_num(0.5), generator=generator)
    classes_at = 0 if output.dim() == 1 else 1
    p = output.softmax(classes_at)
    rows = p.movedim(classes_at, -1)
    chances = rows.reshape(-1, rows.shape[-1]).float().nan_to_num(1.0)
    y = torch.multinomial(chances, 1, generator=generator).view(rows.shape[:-1])
    return p - F.one_hot(y, rows.shape[-1]).movedim(-1, classes_at)
