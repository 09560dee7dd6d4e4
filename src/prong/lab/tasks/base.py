"""What a training loop needs to know of a task, and what tasks share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from prong.distributed.workers import Workers

INITIAL = 5000  # training examples behind a whitened initialisation
Wanted = tuple[Tensor, torch.Generator]  # numbers of examples, and what is random in them


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


@runtime_checkable
class Reading(Protocol):
    """What a task has besides where its data is read while it is trained on."""

    def stream(self, requests: Iterable[Wanted]) -> Iterator[tuple[Tensor, Tensor]]:
        """What `batch` would give for each of these, read ahead; there is no end of them."""

    def within(self, folder: Path, workers: Workers) -> Task:
        """The task of a run in that folder, to which the first worker may add files; each has its part of the data."""


def batches(task: Task, requests: Iterable[Wanted]) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of one update after another, each when it is asked for or, if the task can, read ahead."""
    if isinstance(task, Reading):
        return task.stream(requests)
    return (task.batch(chosen, generator) for chosen, generator in requests)


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
