"""The autoencoder of digits: trained by cross-entropy, judged by squared error too, as in the literature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prong.lab.data import PIXELS, Digits, load_mnist
from prong.lab.datasets.shelf import named_folder
from prong.lab.models import autoencoder
from prong.lab.tasks.base import INITIAL, require_finite, spread

CHUNK = 500  # examples evaluated at once


@dataclass(frozen=True)
class Reconstruction:
    """MNIST's digits, to be reconstructed.

    Attributes:
        make: a new model, from `batch_norm`; its outputs are logits.
        folder: of the data, as `load_mnist` has it.
    """

    make: Callable[..., nn.Module] = autoencoder
    folder: Path | None = None
    watched: ClassVar[str] = "train_squared_error"

    def digits(self) -> Digits:
        """The data, read once in every process for each folder."""
        return _load(named_folder(self.folder))

    @property
    def source(self) -> str:
        """Where the digits come from."""
        return self.digits().source

    @property
    def count(self) -> int:
        """How many training digits there are."""
        return len(self.digits().train)

    def build(self, batch_norm: bool = False) -> nn.Module:
        """A new model."""
        return self.make(batch_norm=batch_norm)

    def batch(self, chosen: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Digits, twice."""
        x = self.digits().train[chosen]
        return x, x

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy summed over pixels, averaged over examples."""
        return F.binary_cross_entropy_with_logits(outputs, targets, reduction="sum") / len(targets)

    def measure(self, model: nn.Module, evaluated: int) -> Mapping[str, float]:
        """Errors on both sets: squared, summed over pixels or averaged, and cross-entropy."""
        digits = self.digits()
        train, test = (x[spread(len(x), evaluated)] for x in (digits.train, digits.test))
        errors = {f"train_{name}": value for name, value in reconstruction_errors(model, train).items()}
        errors |= {f"test_{name}": value for name, value in reconstruction_errors(model, test).items()}
        return require_finite(errors)

    def initial_batches(self) -> Sequence[Tensor]:
        """The first digits."""
        return torch.split(self.digits().train[:INITIAL], CHUNK)

    def keepsakes(self, model: nn.Module) -> Mapping[str, Any]:
        """Nothing."""
        return {}


@torch.no_grad()
def reconstruction_errors(model: nn.Module, examples: Tensor) -> dict[str, float]:
    """Errors of logits against pixels, averaged over examples; `mean_squared_error` over pixels too."""
    model.eval()  # PRONG leaves such forwards out of its statistics
    squares = entropy = 0.0
    for x in torch.split(examples, CHUNK):
        logits = model(x).float()
        squares += (torch.sigmoid(logits) - x).square().sum().item()
        entropy += F.binary_cross_entropy_with_logits(logits, x, reduction="sum").item()
    model.train()
    squares, entropy = squares / len(examples), entropy / len(examples)
    return {"squared_error": squares, "mean_squared_error": squares / PIXELS, "cross_entropy": entropy}


@cache
def _load(folder: Path | None) -> Digits:
    return load_mnist(folder)
