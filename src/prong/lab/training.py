"""The training loop that demo and benchmark share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from prong.lab.data import Digits


@dataclass(frozen=True)
class Plan:
    """How to train, whatever the method.

    Attributes:
        updates: how many.
        seed: of weights and of the order of the data.
        batch: examples per update.
        warm_up: updates over which the learning rate rises linearly; over the last half of all it falls to zero.
        evaluations: how often errors are measured, besides before the first update.
        evaluated: on how many examples of each set, spread evenly over it.
    """

    updates: int
    seed: int = 0
    batch: int = 128
    warm_up: int = 50
    evaluations: int = 20
    evaluated: int = 2000

    def rate(self, update: int) -> float:
        """The factor on the learning rate, for update 0, 1, ...: warm-up, constant, linear decay."""
        return min(1.0, (update + 1) / self.warm_up, max(0.0, 2 * (1 - update / self.updates)))

    def evaluation_points(self) -> list[int]:
        """The updates after which errors are measured; 0 is before the first."""
        return sorted({round(k * self.updates / self.evaluations) for k in range(self.evaluations + 1)})


@dataclass(frozen=True)
class Row:
    """Errors after an update, and the seconds of training until then (evaluation not counted)."""

    update: int
    seconds: float
    train_error: float
    test_error: float


@dataclass(frozen=True)
class Run:
    """Everything measured in one run; `failure` says how it diverged, if it did. Rows end there."""

    rows: list[Row]
    failure: str | None = None


class Divergence(FloatingPointError):
    """A loss or an error that is not finite."""


def minibatches(examples: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    """Shuffled minibatches without end; what is left over in an epoch is dropped."""
    if len(examples) < size:
        raise ValueError(f"a minibatch of {size} needs as many examples, got {len(examples)}")
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(examples), generator=generator)
        for indices in torch.split(order[: len(order) // size * size], size):
            yield examples[indices]


def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> float:
    """The loss before one update: cross-entropy summed over pixels, averaged over examples.

    Raises:
        Divergence: if it is not finite; the update is not made.
    """
    optimizer.zero_grad()
    loss = F.binary_cross_entropy_with_logits(model(x), x, reduction="sum") / len(x)
    value = loss.item()
    if not math.isfinite(value):
        raise Divergence(f"the loss is {value}")
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return value


@torch.no_grad()
def squared_error(model: nn.Module, examples: Tensor) -> float:
    """The squared error of the reconstruction summed over pixels, averaged over examples.

    Raises:
        Divergence: if it is not finite.
    """
    model.eval()  # PRONG leaves such forwards out of its statistics
    total = sum((torch.sigmoid(model(x)) - x).square().sum().item() for x in torch.split(examples, 500))
    model.train()
    if not math.isfinite(total):
        raise Divergence(f"the squared error is {total}")
    return total / len(examples)


def train(
    model: nn.Module,
    optimizer: Optimizer,
    digits: Digits,
    plan: Plan,
    *,
    seconds: float = 0.0,
    on_update: Callable[[int], None] = lambda update: None,
) -> Run:
    """The run of one optimizer on a model. `seconds` are those spent already, on the initialisation."""
    scheduler = LambdaLR(optimizer, plan.rate)
    stream = minibatches(digits.train, plan.batch, plan.seed)
    measure = partial(_measure, model, _spread(digits.train, plan.evaluated), _spread(digits.test, plan.evaluated))
    points = plan.evaluation_points()
    rows: list[Row] = []
    update = 0
    try:
        rows.append(measure(update, seconds))
        for update in range(1, plan.updates + 1):
            start = perf_counter()
            step(model, optimizer, next(stream))
            scheduler.step()
            seconds += perf_counter() - start
            if update in points:
                rows.append(measure(update, seconds))
            on_update(update)
    except FloatingPointError as error:  # ours, or that of a layer whose statistics met NaN first
        return Run(rows, f"diverged at update {update}: {error}")
    return Run(rows)


def _spread(examples: Tensor, count: int) -> Tensor:
    """About `count` examples at even distances: the first digits of MNIST's test set are easier than the last."""
    return examples[:: max(1, len(examples) // count)]


def _measure(model: nn.Module, train: Tensor, test: Tensor, update: int, seconds: float) -> Row:
    return Row(update, seconds, squared_error(model, train), squared_error(model, test))
