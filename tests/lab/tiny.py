"""A small model in place of the paper's, to be found by other processes too."""

from __future__ import annotations

from torch import nn


def tiny_autoencoder(batch_norm: bool = False) -> nn.Sequential:
    normalised = [nn.BatchNorm1d(5)] if batch_norm else []
    return nn.Sequential(nn.Linear(784, 5), *normalised, nn.Sigmoid(), nn.Linear(5, 784))
