"""The training loop that demo, race and benchmarks share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prong.lab.data import PIXELS, Digits
from prong.lab.methods import Trains

# Of a loss or an error; of statistics or factorisations that met NaN first.
DIVERGENCES: tuple[type[Exception], ...] = (ArithmeticError, torch.linalg.LinAlgError)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Plan:
    """How to train, whatever the method.

    Attributes:
        updates: how many, at most.
        seed: of weights and of the order of the data.
        batch: examples per update.
        warm_up: updates over which the learning rate rises linearly.
        evaluations: how often errors are measured, besides before the first update.
        evaluated: on how many examples of each set, spread evenly over it.
        decay: whether the learning rate falls to zero over the last half of all updates, or stays.
        until: training ends where the training error is measured to be no larger than this.
        hurdles: training errors by update; training ends there if the error measured is larger.
    """

    updates: int
    seed: int = 0
    batch: int = 128
    warm_up: int = 50
    evaluations: int = 20
    evaluated: int = 2000
    decay: bool = True
    until: float = 0.0
    hurdles: Mapping[int, float] = field(default_factory=dict)

    def ends(self, row: Row) -> bool:
        """Whether nothing comes after what was measured."""
        failed = row.train_error > self.hurdles.get(row.update, math.inf)
        return row.update >= self.updates or row.train_error <= self.until or failed

    def rate(self, update: int) -> float:
        """The factor on the learning rate, for update 0, 1, ...: warm-up, constant, linear decay if there is one."""
        falling = max(0.0, 2 * (1 - update / self.updates)) if self.decay else 1.0
        return min(1.0, (update + 1) / self.warm_up, falling)

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

    def reaching(self, error: float) -> Row | None:
        """The first row with a training error no larger than this."""
        return next((row for row in self.rows if row.train_error <= error), None)

    @property
    def first_error(self) -> float:
        """The training error before the first update; where there is not even that, the largest there can be."""
        return self.rows[0].train_error if self.rows else float(PIXELS)


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


def step(model: nn.Module, optimizer: Trains, x: Tensor) -> float:
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
    optimizer: Trains,
    digits: Digits,
    plan: Plan,
    *,
    seconds: float = 0.0,
    on_update: Callable[[int], None] = lambda update: None,
) -> Run:
    """The run of one optimizer on a model. `seconds` are those spent already, on the initialisation."""
    rates = [group["lr"] for group in optimizer.param_groups]
    stream = minibatches(digits.train, plan.batch, plan.seed)
    measure = partial(_measure, model, _spread(digits.train, plan.evaluated), _spread(digits.test, plan.evaluated))
    points = set(plan.evaluation_points())
    rows: list[Row] = []
    update = 0
    try:
        rows.append(measure(update, seconds))
        while not plan.ends(rows[-1]):
            update += 1
            start = perf_counter()
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * plan.rate(update - 1)
            step(model, optimizer, next(stream))
            seconds += perf_counter() - start
            if update in points:
                rows.append(measure(update, seconds))
            on_update(update)
    except DIVERGENCES as error:
        return Run(rows, f"diverged at update {update}: {error}")
    return Run(rows)


def _spread(examples: Tensor, count: int) -> Tensor:
    """About `count` examples at even distances: the first digits of MNIST's test set are easier than the last."""
    return examples[:: max(1, len(examples) // count)]


def _measure(model: nn.Module, train: Tensor, test: Tensor, update: int, seconds: float) -> Row:
    return Row(update, seconds, squared_error(model, train), squared_error(model, test))
