"""The paper's autoencoder."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from prong import fan_in_

WIDTHS = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)


def autoencoder(code_activation: bool = False, batch_norm: bool = False) -> nn.Sequential:
    """The 784-1000-500-250-30-250-500-1000-784 autoencoder with sigmoid units; its outputs are logits.

    The code of 30 units is linear, or sigmoid with `code_activation`. With `batch_norm`, the inputs of hidden units
    are normalised: not the code, not the outputs. Weights are normal with variance 1 / fan-in, biases zero.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(WIDTHS):
        linear = nn.Linear(inputs, outputs)
        fan_in_(linear.weight)
        nn.init.zeros_(linear.bias)
        layers.append(linear)
        code, output = outputs == min(WIDTHS), outputs == WIDTHS[-1]
        if batch_norm and not (code or output):
            layers.append(nn.BatchNorm1d(outputs))
        if not output and (code_activation or not code):
            layers.append(nn.Sigmoid())
    return nn.Sequential(*layers)
