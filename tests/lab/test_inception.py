"""Inception is that of the batch-normalisation paper: every stage of its table, and nothing else."""

from __future__ import annotations

import pytest
import torch

import prong
from prong.lab.inception import inception
from prong.model.whiten import whitened_sites

# The table of Ioffe and Szegedy's appendix: outputs for 224 x 224 pixels. It prints 28 x 28 for (3c) and 14 x 14 for
# (4e), their inputs' size; the modules after them have 14 x 14 and 7 x 7.
STAGES = {
    "1": (64, 112),
    "pool1": (64, 56),
    "2": (192, 56),
    "pool2": (192, 28),
    "3a": (256, 28),
    "3b": (320, 28),
    "3c": (576, 14),
    "4a": (576, 14),
    "4b": (576, 14),
    "4c": (576, 14),
    "4d": (576, 14),
    "4e": (1024, 7),
    "5a": (1024, 7),
    "5b": (1024, 7),
}
# Its convolutions: maps in, maps out, pixels per side.
STEM = [(3, 64, 7), (64, 64, 1), (64, 192, 3)]
MODULES = [
    [(192, 64, 1), (192, 64, 1), (64, 64, 3), (192, 64, 1), (64, 96, 3), (96, 96, 3), (192, 32, 1)],
    [(256, 64, 1), (256, 64, 1), (64, 96, 3), (256, 64, 1), (64, 96, 3), (96, 96, 3), (256, 64, 1)],
    [(320, 128, 1), (128, 160, 3), (320, 64, 1), (64, 96, 3), (96, 96, 3)],
    [(576, 224, 1), (576, 64, 1), (64, 96, 3), (576, 96, 1), (96, 128, 3), (128, 128, 3), (576, 128, 1)],
    [(576, 192, 1), (576, 96, 1), (96, 128, 3), (576, 96, 1), (96, 128, 3), (128, 128, 3), (576, 128, 1)],
    [(576, 160, 1), (576, 128, 1), (128, 160, 3), (576, 128, 1), (128, 160, 3), (160, 160, 3), (576, 96, 1)],
    [(576, 96, 1), (576, 128, 1), (128, 192, 3), (576, 160, 1), (160, 192, 3), (192, 192, 3), (576, 96, 1)],
    [(576, 128, 1), (128, 192, 3), (576, 192, 1), (192, 256, 3), (256, 256, 3)],
    [(1024, 352, 1), (1024, 192, 1), (192, 320, 3), (1024, 160, 1), (160, 224, 3), (224, 224, 3), (1024, 128, 1)],
    [(1024, 352, 1), (1024, 192, 1), (192, 320, 3), (1024, 192, 1), (192, 224, 3), (224, 224, 3), (1024, 128, 1)],
]
CONVOLUTIONS = [*STEM, *(row for module in MODULES for row in module)]


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("batch_norm", [False, True])
def test_every_stage_has_the_published_shape(batch_norm: bool) -> None:
    x, net = torch.randn(1, 3, 224, 224), inception(batch_norm).eval()
    seen = {}
    with torch.no_grad():
        for name, stage in net.named_children():
            x = stage(x)
            seen[name] = tuple(x.shape)
    assert seen.pop("average") == (1, 1024) and seen.pop("logits") == (1, 1000)
    assert seen == {name: (1, maps, side, side) for name, (maps, side) in STAGES.items()}


def test_parameters_are_those_of_the_published_table() -> None:
    kernels = sum(inputs * outputs * side * side for inputs, outputs, side in CONVOLUTIONS)
    units = sum(outputs for _, outputs, _ in CONVOLUTIONS)
    classifier = 1024 * 1000 + 1000
    assert parameters(inception(batch_norm=True)) == kernels + 2 * units + classifier == 11_194_984
    assert parameters(inception()) == kernels + units + classifier == 11_185_032
    assert parameters(inception(classes=20)) == kernels + units + 1024 * 20 + 20


def test_every_convolution_is_in_the_table_and_has_units_after_it() -> None:
    net = inception(batch_norm=True)
    layers = [layer for layer in net.modules() if isinstance(layer, torch.nn.Conv2d)]
    made = sorted((layer.in_channels, layer.out_channels, layer.kernel_size[0]) for layer in layers)
    assert made == sorted(CONVOLUTIONS)
    kinds = [type(layer) for layer in net.modules()]
    assert kinds.count(torch.nn.ReLU) == kinds.count(torch.nn.BatchNorm2d) == len(CONVOLUTIONS)
    assert sum(layer.stride == (2, 2) for layer in layers) == 5  # the first, and two in (3c) and in (4e)


@pytest.mark.parametrize("side", [64, 65, 97])
def test_pictures_of_other_sizes_can_be_told_apart_too(side: int) -> None:
    with torch.no_grad():
        assert inception(classes=20).eval()(torch.randn(2, 3, side, side)).shape == (2, 20)


def test_activations_keep_their_size_through_the_net_at_the_start() -> None:
    x, net = torch.randn(2, 3, 64, 64), inception(classes=20).eval()
    sizes = []
    with torch.no_grad():
        for stage in net:
            x = stage(x)
            sizes.append(x.square().mean().sqrt().item())
    assert all(0.1 < size < 10 for size in sizes), sizes


def test_all_its_layers_can_be_whitened() -> None:
    net = inception(classes=20)
    prong.whiten_(net)
    assert len(whitened_sites(net)) == len(CONVOLUTIONS) + 1
