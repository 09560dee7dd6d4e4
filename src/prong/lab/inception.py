"""The Inception of the batch-normalisation paper (Ioffe and Szegedy 2015, the table of its appendix).

The table contradicts itself in two rows: with the printed projections of 128 maps, (4c) and (4d) would have 608 outputs
and (4e) 1,056, where 576 and 1,024 are printed. The outputs are followed here, with projections of 96 maps, as in the
code that Google released later. The first convolution is an ordinary one, not separable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

COLOURS = 3
STEM = 192  # maps that the first module is given


@dataclass(frozen=True)
class Widths:
    """A row of the table: the maps of every convolution of a module; one without `single` halves the picture.

    Attributes:
        single: of the 1x1 convolution; 0 for none.
        reduced: of the 1x1 before the 3x3.
        triple: of the 3x3.
        double_reduced: of the 1x1 before the two 3x3.
        double: of these two.
        pool: which pooling.
        projected: of the 1x1 after it; 0 to pass it through.
    """

    single: int
    reduced: int
    triple: int
    double_reduced: int
    double: int
    pool: Literal["average", "max"]
    projected: int

    @property
    def stride(self) -> int:
        """2 for the last module of a stage."""
        return 1 if self.single else 2

    def outputs(self, inputs: int) -> int:
        """How many maps the module has, side by side."""
        return self.single + self.triple + self.double + (self.projected or inputs)


TABLE: Mapping[str, Widths] = {
    "3a": Widths(64, 64, 64, 64, 96, "average", 32),
    "3b": Widths(64, 64, 96, 64, 96, "average", 64),
    "3c": Widths(0, 128, 160, 64, 96, "max", 0),
    "4a": Widths(224, 64, 96, 96, 128, "average", 128),
    "4b": Widths(192, 96, 128, 96, 128, "average", 128),
    "4c": Widths(160, 128, 160, 128, 160, "average", 96),
    "4d": Widths(96, 128, 192, 160, 192, "average", 96),
    "4e": Widths(0, 128, 192, 192, 256, "max", 0),
    "5a": Widths(352, 192, 320, 160, 224, "average", 128),
    "5b": Widths(352, 192, 320, 192, 224, "max", 128),
}


class Branches(nn.ModuleList):
    """A row of the table on `inputs` maps: its branches, which see the same and whose maps are put side by side."""

    def __init__(self, inputs: int, widths: Widths, batch_norm: bool) -> None:
        stride = widths.stride
        branches = [
            nn.Sequential(
                *convolution(inputs, widths.reduced, 1, batch_norm),
                *convolution(widths.reduced, widths.triple, 3, batch_norm, stride),
            ),
            nn.Sequential(
                *convolution(inputs, widths.double_reduced, 1, batch_norm),
                *convolution(widths.double_reduced, widths.double, 3, batch_norm),
                *convolution(widths.double, widths.double, 3, batch_norm, stride),
            ),
            nn.Sequential(
                nn.MaxPool2d(3, stride, padding=1)
                if widths.pool == "max"
                else nn.AvgPool2d(3, stride, padding=1, count_include_pad=False),
                *(convolution(inputs, widths.projected, 1, batch_norm) if widths.projected else ()),
            ),
        ]
        if widths.single:
            branches.insert(0, nn.Sequential(*convolution(inputs, widths.single, 1, batch_norm)))
        super().__init__(branches)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (n, outputs, h, w) from (n, inputs, h, w); half as high and wide where the stride is 2."""
        return torch.cat([branch(x) for branch in self], 1)


def inception(batch_norm: bool = False, classes: int = 1000) -> nn.Sequential:
    """The net, from pictures (n, 3, h, w) to the logits of classes; its stages are named as in the paper's table.

    Pictures are halved five times, then averaged over what is left: 7 x 7 positions of 224 x 224, 2 x 2 of 64 x 64.
    With `batch_norm`, the inputs of all units are normalised, and convolutions have no biases, which that would undo.
    Weights are He's, biases zero.
    """
    net = nn.Sequential()
    net.add_module("1", nn.Sequential(*convolution(COLOURS, 64, 7, batch_norm, stride=2)))
    net.add_module("pool1", nn.MaxPool2d(3, 2, padding=1))
    net.add_module("2", nn.Sequential(*convolution(64, 64, 1, batch_norm), *convolution(64, STEM, 3, batch_norm)))
    net.add_module("pool2", nn.MaxPool2d(3, 2, padding=1))
    maps = STEM
    for name, widths in TABLE.items():
        net.add_module(name, Branches(maps, widths, batch_norm))
        maps = widths.outputs(maps)
    net.add_module("average", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    logits = nn.Linear(maps, classes)
    nn.init.kaiming_normal_(logits.weight, nonlinearity="linear")
    nn.init.zeros_(logits.bias)
    net.add_module("logits", logits)
    return net


def convolution(inputs: int, outputs: int, side: int, batch_norm: bool, stride: int = 1) -> list[nn.Module]:
    """A convolution that keeps the size but for its stride, and its ReLU units."""
    layer = nn.Conv2d(inputs, outputs, side, stride, padding=side // 2, bias=not batch_norm)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return [layer, *([nn.BatchNorm2d(outputs)] if batch_norm else []), nn.ReLU()]
