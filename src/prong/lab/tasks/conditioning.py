"""A network small enough for its exact Fisher: digits at 10 x 10 pixels, three layers with tanh units between."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import prong
from prong.lab.data import Digits, load_mnist
from prong.lab.datasets.shelf import named_folder
from prong.lab.tasks.base import Divergence, require_finite
from prong.model.whiten import whitened_sites

SIDE = 10  # pixels, as in the paper
MIDDLE = "2"  # the name of the second of three linear layers
POOLED = 96  # the most entries per side that are kept of a matrix


@dataclass(frozen=True)
class SmallDigits:
    """MNIST's digits at 10 x 10 pixels, to be told apart by 100 - width - width - 10, in float64.

    Attributes:
        width: of both hidden layers.
        samples: digits behind the first reparametrisation, whose Fisher is kept.
        eps: its damping.
        folder: of the data, as `load_mnist` has it.
    """

    width: int = 32
    samples: int = 10_000
    eps: float = 1e-3
    folder: Path | None = None
    watched: ClassVar[str] = "train_cross_entropy"

    @property
    def source(self) -> str:
        """Where the digits come from."""
        return f"{self._digits()[2]}, at {SIDE} x {SIDE} pixels"

    @property
    def count(self) -> int:
        """How many training digits there are."""
        return len(self._digits()[0])

    def build(self, batch_norm: bool = False) -> nn.Module:
        """A new model."""
        if batch_norm:
            raise ValueError("the small MLP of the conditioning experiment has no batch norm; choose another method")
        width = self.width
        first, second, last = nn.Linear(SIDE * SIDE, width), nn.Linear(width, width), nn.Linear(width, 10)
        return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last).double()

    def batch(self, chosen: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Digits and their classes."""
        x, y, _ = self._digits()
        return x[chosen], y[chosen]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(outputs, targets)

    def measure(self, model: nn.Module, evaluated: int) -> Mapping[str, float]:
        """The spectrum of the middle block of the Fisher, in the coordinates that are trained; and the loss."""
        x, y, _ = self._digits()
        found = prong.fisher.spectrum(self.block(model, evaluated))
        if not math.isfinite(found.condition):
            raise Divergence("the Fisher of the middle layer is zero, as where its units are saturated")
        with torch.no_grad():
            model.eval()
            loss = F.cross_entropy(model(x[:evaluated]), y[:evaluated]).item()
            model.train()
        summary = {"condition": found.condition, "effective_rank": found.effective_rank, "below": found.below}
        return require_finite({**summary, "trace": found.trace, "floor": found.floor, "train_cross_entropy": loss})

    def block(self, model: nn.Module, examples: int) -> Tensor:
        """The exact Fisher block of the middle layer: whitened coordinates where it has been whitened."""
        sites = whitened_sites(model)
        refreshed = any(site.whitening is not None for _, site in sites.values())
        coordinates = "whitened" if refreshed else "canonical"
        x, _, _ = self._digits()
        return prong.fisher.blocks(model, [x[:examples]], "categorical", [MIDDLE], coordinates=coordinates)[MIDDLE]  # type: ignore[arg-type]

    def initial_batches(self) -> Sequence[Tensor]:
        """Digits for a whitening."""
        return torch.split(self._digits()[0][: self.samples], 1000)

    def keepsakes(self, model: nn.Module) -> Mapping[str, Any]:
        """The middle block's magnitudes before and after the first reparametrisation, and its condition numbers."""
        if not whitened_sites(model):
            return {}
        twin = self.build()
        twin.load_state_dict(model.state_dict())
        before = self.block(twin, 1000)
        prong.refresh_(prong.whiten_(twin), self.initial_batches(), prong.Absolute(self.eps))
        after = self.block(twin, 1000)
        blocks = {"before": before, "after": after}
        conditions = {f"condition_{name}": prong.fisher.spectrum(block).condition for name, block in blocks.items()}
        return {**conditions, **{name: pooled(block) for name, block in blocks.items()}}

    def _digits(self) -> tuple[Tensor, Tensor, str]:
        return _load(named_folder(self.folder))


def pooled(matrix: Tensor, side: int = POOLED) -> list[list[float]]:
    """The magnitudes of a matrix, the mean of each tile, at no more than `side` by `side`; to three digits."""
    tile = math.ceil(len(matrix) / side)
    small = F.avg_pool2d(matrix.abs()[None, None], tile, ceil_mode=True)[0, 0]
    return [[float(f"{value:.3g}") for value in row] for row in small.tolist()]


@cache
def _load(folder: Path | None) -> tuple[Tensor, Tensor, str]:
    digits: Digits = load_mnist(folder)
    small = F.interpolate(digits.train.double().view(-1, 1, 28, 28), size=(SIDE, SIDE), mode="area")
    return small.flatten(1), digits.train_labels, digits.source
