"""The paper's networks, and two that it has not: a transformer block and a plain MLP."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from prong import fan_in_

WIDTHS = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
FILTERS = (64, 64, 128, 128, 256, 256, 512, 10)
CROP = 24  # pixels per side of the pictures that the paper's CIFAR-10 net is trained on


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


def cifar10_net(batch_norm: bool = False) -> nn.Sequential:
    """The paper's CIFAR-10 net: eight 3x3 convolutions, pooled after every second, the last by its global maximum.

    Its outputs are the logits of ten classes. The paper leaves open what VGG, its model, decides here: ReLU units
    and padding that keeps the size. With `batch_norm`, the inputs of hidden units are normalised. Weights are
    He's, biases zero.
    """
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(pairwise((3, *FILTERS)), start=1):
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
        nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
        layers.append(convolution)
        if number == len(FILTERS):
            break
        if batch_norm:
            layers.append(nn.BatchNorm2d(outputs))
        layers.append(nn.ReLU())
        if number % 2 == 0:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten())


def transformer_block(width: int = 512, heads: int = 8, hidden: int = 2048) -> nn.TransformerEncoderLayer:
    """One pre-norm encoder block with GELU units and no dropout, on inputs (batch, tokens, width)."""
    return nn.TransformerEncoderLayer(
        width, heads, hidden, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )


def mlp(width: int, depth: int) -> nn.Sequential:
    """`depth` square linear layers with ReLU units between them."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
