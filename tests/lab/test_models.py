"""The autoencoder is the paper's."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from prong.lab.models import WIDTHS, autoencoder


def test_the_autoencoder_has_the_papers_layers() -> None:
    model = autoencoder()
    shapes = [(layer.in_features, layer.out_features) for layer in model if isinstance(layer, nn.Linear)]
    assert shapes == [(784, 1000), (1000, 500), (500, 250), (250, 30), (30, 250), (250, 500), (500, 1000), (1000, 784)]
    assert sum(p.numel() for p in model.parameters()) == 2_837_314
    assert model(torch.rand(3, 784)).shape == (3, 784)


@pytest.mark.parametrize(("code_activation", "sigmoids"), [(False, 6), (True, 7)])
def test_hidden_units_are_sigmoid_and_outputs_are_logits(code_activation: bool, sigmoids: int) -> None:
    layers = list(autoencoder(code_activation))
    assert sum(isinstance(layer, nn.Sigmoid) for layer in layers) == sigmoids
    code = next(n for n, layer in enumerate(layers) if isinstance(layer, nn.Linear) and layer.out_features == 30)
    assert isinstance(layers[code + 1], nn.Sigmoid) == code_activation
    assert isinstance(layers[-1], nn.Linear)


def test_weights_have_variance_one_over_fan_in_and_biases_are_zero() -> None:
    linear = [layer for layer in autoencoder() if isinstance(layer, nn.Linear)]
    for layer, (inputs, _) in zip(linear, pairwise(WIDTHS), strict=True):
        assert layer.weight.std().item() * inputs**0.5 == pytest.approx(1, abs=0.03)
        assert not layer.bias.any()


def test_batch_norm_comes_between_hidden_layers_and_their_sigmoids_only() -> None:
    layers = list(autoencoder(batch_norm=True))
    normalised = [n for n, layer in enumerate(layers) if isinstance(layer, nn.BatchNorm1d)]
    assert [layers[n].num_features for n in normalised] == [1000, 500, 250, 250, 500, 1000]
    assert all(isinstance(layers[n - 1], nn.Linear) and isinstance(layers[n + 1], nn.Sigmoid) for n in normalised)
