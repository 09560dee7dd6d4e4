"""The Fisher H of the output distribution, with respect to the model's output. Pure functions.

For one example the labels of all positions are independent given the output, so H is a sum over positions:

    categorical   H = diag(p) - p p^T, p = softmax(output)         classes at dimension 1, any positions after it
    bernoulli     H = diag(p (1 - p)), p = sigmoid(output)         elementwise
    gaussian      H = I                                            elementwise, unit variance

Outputs are (examples, ...); the log-likelihood of an example is the sum over its positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from prong.gradients.outputs import Distribution, sampled_output_gradient


def each_exact_row(output: Tensor, distribution: Distribution) -> Iterator[Tensor]:
    """Rows s = R e_i with sum_r s_r s_r^T = H for every example, each shaped as the output; as many as it has outputs.

    Categorical ones are sqrt(p_y) (e_y - p), the scores of labels, weighted by their probabilities.
    """
    for i in range(output[0].numel()):
        e = torch.zeros_like(output).reshape(len(output), -1)
        e[:, i] = 1
        yield _times_root(output, distribution, e.view(output.shape))


def _times_root(output: Tensor, distribution: Distribution, u: Tensor) -> Tensor:
    """R u with R R^T = H; for categorical outputs R = (I - p 1^T) diag(p)^1/2."""
    if distribution == "categorical":
        p = output.softmax(1)
        weighted = p.sqrt() * u
        return weighted - p * weighted.sum(1, keepdim=True)
    return (output.sigmoid() * (-output).sigmoid()).sqrt() * u if distribution == "bernoulli" else u


def sampled_rows(output: Tensor, distribution: Distribution, draws: int, generator: torch.Generator) -> Tensor:
    """Rows with E[sum_r s_r s_r^T] = H, (examples, draws, ...): scores of labels drawn from the model, over a root."""
    scores = [sampled_output_gradient(output, distribution, generator) for _ in range(draws)]
    return torch.stack(scores, dim=1) / math.sqrt(draws)


def times_output_fisher(output: Tensor, distribution: Distribution, u: Tensor) -> Tensor:
    """H u for every example; u is shaped as the output."""
    if distribution == "categorical":
        p = output.softmax(1)
        return p * u - p * (p * u).sum(1, keepdim=True)
    return output.sigmoid() * (-output).sigmoid() * u if distribution == "bernoulli" else u
