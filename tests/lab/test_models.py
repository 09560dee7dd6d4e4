"""The networks are the paper's, and the other two are what they are called."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from prong.lab.models import CROP, WIDTHS, autoencoder, cifar10_net, mlp, transformer_block


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


def test_the_cifar10_net_has_the_papers_layers() -> None:
    """3x3 filters 64, 64, 128, 128, 256, 256, 512, 10; pooling between stacks of two; scores pooled globally."""
    model = cifar10_net()
    kinds = {nn.Conv2d: "c", nn.ReLU: "r", nn.MaxPool2d: "p", nn.AdaptiveMaxPool2d: "g", nn.Flatten: "f"}
    assert "".join(kinds[type(layer)] for layer in model) == "crcrp" * 3 + "crc" + "gf"
    convolutions = [layer for layer in model if isinstance(layer, nn.Conv2d)]
    assert [layer.out_channels for layer in convolutions] == [64, 64, 128, 128, 256, 256, 512, 10]
    assert {layer.kernel_size for layer in convolutions} == {(3, 3)}
    assert sum(p.numel() for p in model.parameters()) == 2_371_658


def test_the_cifar10_net_gives_ten_scores_per_picture_of_24_by_24() -> None:
    model, x = cifar10_net(), torch.rand(2, 3, CROP, CROP)
    assert CROP == 24 and model(x).shape == (2, 10)
    assert model[:-2](x).shape == (2, 10, 3, 3), "three poolings"
    assert torch.equal(model(x), model[:-2](x).amax((2, 3)))


def test_batch_norm_comes_between_convolutions_and_their_units_only() -> None:
    layers = list(cifar10_net(batch_norm=True))
    normalised = [n for n, layer in enumerate(layers) if isinstance(layer, nn.BatchNorm2d)]
    assert [layers[n].num_features for n in normalised] == [64, 64, 128, 128, 256, 256, 512]
    assert all(isinstance(layers[n - 1], nn.Conv2d) and isinstance(layers[n + 1], nn.ReLU) for n in normalised)


def test_the_transformer_block_keeps_the_shape_and_has_the_usual_parameters() -> None:
    model, x = transformer_block(), torch.randn(2, 5, 512)
    assert model(x).shape == x.shape
    attention, feed_forward, norms = 4 * (512 * 512 + 512), 2 * 512 * 2048 + 2048 + 512, 2 * 2 * 512
    assert sum(p.numel() for p in model.parameters()) == attention + feed_forward + norms
    assert torch.equal(model(x), model(x)), "no dropout"


def test_an_mlp_has_as_many_square_layers_as_it_is_deep() -> None:
    model = mlp(width=6, depth=3)
    assert [tuple(layer.weight.shape) for layer in model if isinstance(layer, nn.Linear)] == [(6, 6)] * 3
    assert isinstance(model[-1], nn.Linear) and model(torch.rand(2, 6)).shape == (2, 6)
