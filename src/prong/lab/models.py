"""The paper's autoencoder."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from prong import fan_in_

WIDTHS = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)


def autoencoder(code_activation: bool = False) -> nn.Sequential:
    """The 784-1000-500-250-30-250-500-1000-784 autoencoder with sigmoid units; its outputs are logits.

    The code of 30 units is linear, or sigmoid with `code_activation`. Weights are normal with variance 1 / fan-in,
    biases zero.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(WIDTHS):
        linear = nn.Linear(inputs, outputs)
        fan_in_(linear.weight)
        nn.init.zeros_(linear.bias)
        layers.append(linear)
        if outputs != min(WIDTHS) or code_activation:
            layers.append(nn.Sigmoid())
    return nn.Sequential(*layers[:-1])
