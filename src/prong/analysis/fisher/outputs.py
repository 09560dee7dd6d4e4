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

from prong.gradients.outputs import DISTRIBUTIONS, Distribution, sampled_output_gradient


def check_distribution(distribution: str) -> None:
    """Refuse an unknown distribution."""
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"distribution is one of {', '.join(DISTRIBUTIONS)}, got {distribution!r}")


def check_output(output: object, examples: int, distribution: Distribution) -> Tensor:
    """The model's output, if it can be the parameters of the distribution for so many examples."""
    if not isinstance(output, Tensor):
        raise TypeError(
            f"the model's output is one tensor of the distribution's parameters, got {type(output).__name__}. "
            "Pass forward=lambda model, batch: ... that picks it."
        )
    if output.dim() == 0 or output.shape[0] != examples:
        raise ValueError(
            f"{examples} examples gave an output of shape {tuple(output.shape)}. Examples are the first dimension of "
            "inputs and of the output; the output is not a mean over them."
        )
    if distribution == "categorical" and output.dim() < 2:
        raise ValueError("categorical outputs have classes at dimension 1; for one number per example use bernoulli")
    return output


def each_exact_row(output: Tensor, distribution: Distribution) -> Iterator[Tensor]:
    """The rows of `exact_rows` one after the other, each shaped as the output."""
    if distribution == "categorical":
        p = output.softmax(1).flatten(2) if output.dim() > 2 else output.softmax(1).unsqueeze(2)
        for y in range(p.shape[1]):
            root = p[:, y].sqrt()
            for t in range(p.shape[2]):
                row = torch.zeros_like(p)
                row[:, :, t] = -root[:, t : t + 1] * p[:, :, t]
                row[:, y, t] = root[:, t] * (1 - p[:, y, t])
                yield row.reshape(output.shape)
        return
    roots = (output.sigmoid() * (-output).sigmoid()).sqrt() if distribution == "bernoulli" else torch.ones_like(output)
    roots = roots.flatten(1) if output.dim() > 1 else roots.unsqueeze(1)
    for i in range(roots.shape[1]):
        row = torch.zeros_like(roots)
        row[:, i] = roots[:, i]
        yield row.reshape(output.shape)


def exact_rows(output: Tensor, distribution: Distribution) -> Tensor:
    """Rows s with sum_r s_r s_r^T = H for every example: (examples, rows, ...) for outputs (examples, ...).

    categorical   sqrt(p_y) (e_y - p) for every label y and position: the score of y, weighted by its probability
    bernoulli     sqrt(p (1 - p)) e_i for every entry
    gaussian      e_i for every entry

    There are as many rows as an example has outputs.
    """
    examples, size = output.shape[0], output[0].numel()
    rows = output.new_empty(examples, size, *output.shape[1:])
    for i, row in enumerate(each_exact_row(output, distribution)):
        rows[:, i] = row
    return rows


def sampled_rows(output: Tensor, distribution: Distribution, draws: int, generator: torch.Generator) -> Tensor:
    """Rows with E[sum_r s_r s_r^T] = H: scores of `draws` labels drawn from the model, over sqrt(draws)."""
    scores = [sampled_output_gradient(output, distribution, generator) for _ in range(draws)]
    return torch.stack(scores, dim=1) / math.sqrt(draws)


def times_output_fisher(output: Tensor, distribution: Distribution, u: Tensor) -> Tensor:
    """H u for every example; u is shaped as the output."""
    if distribution == "categorical":
        p = output.softmax(1)
        return p * u - p * (p * u).sum(1, keepdim=True)
    if distribution == "bernoulli":
        return output.sigmoid() * (-output).sigmoid() * u
    return u
