"""What a training loop needs to know of a task, and what tasks share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

INITIAL = 5000  # training examples behind a whitened initialisation


class Divergence(FloatingPointError):
    """A loss or an error that is not finite."""


class Task(Protocol):
    """A training problem, in a form that can be sent to other processes; its data is loaded when it is asked for."""

    @property
    def source(self) -> str:
        """Where the data comes from, for the record."""

    @property
    def count(self) -> int:
        """How many training examples there are."""

    @property
    def watched(self) -> str:
        """The measure that a waterfall and a search go by; the smaller the better."""

    def build(self, batch_norm: bool = False) -> nn.Module:
        """A new model."""

    def batch(self, chosen: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and targets of training examples, by their numbers; whatever is random in them by the generator."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """A mean over examples."""

    def measure(self, model: nn.Module, evaluated: int) -> Mapping[str, float]:
        """How good the model is, by several measures, each on about `evaluated` examples.

        Raises:
            Divergence: one of them is not finite.
        """

    def initial_batches(self) -> Sequence[Tensor]:
        """Inputs for a whitened initialisation."""

    def keepsakes(self, model: nn.Module) -> Mapping[str, Any]:
        """What is worth keeping of a model before its first update, as JSON has it."""


def spread(count: int, wanted: int) -> slice:
    """About `wanted` of `count` examples, at even distances: neighbours are often alike."""
    return slice(None, None, max(1, count // wanted))


def require_finite(measures: Mapping[str, float]) -> Mapping[str, float]:
    """The measures as they are.

    Raises:
        Divergence: one of them is not finite.
    """
    for name, value in measures.items():
        if not math.isfinite(value):
            raise Divergence(f"{name.replace('_', ' ')} is {value}")
    return measures
