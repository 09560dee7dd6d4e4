"""The training loop of the lab: one update after another, of any method on any task, to be stopped and gone on with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from prong.distributed.workers import ALONE, Workers
from prong.lab.data import PIXELS
from prong.lab.methods import Trains, optimizers_of, refresher_of
from prong.lab.parallel import distributed
from prong.lab.tasks.base import Divergence, Task, Wanted, batches

# Of a loss or an error; of statistics or factorisations that met NaN first.
DIVERGENCES: tuple[type[Exception], ...] = (ArithmeticError, torch.linalg.LinAlgError)  # type: ignore[attr-defined]
Anneal = Literal["linear", "constant", "waterfall"]
# The paper's: a tenth where the error did not improve by 1 %.
WATERFALL: Mapping[str, Any] = {"factor": 0.1, "threshold": 0.01, "threshold_mode": "rel"}


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
        anneal: the learning rate then falls to zero over the last half of all updates, or stays, or is divided by ten
            where the watched measure does not improve.
        patience: measurements without improvement that are let pass before that.
        until: training ends where the watched measure is no larger than this.
        hurdles: watched measures by update; training ends there if what is measured is larger.
        bf16: forwards under bfloat16 autocast.
    """

    updates: int
    seed: int = 0
    batch: int = 128
    warm_up: int = 50
    evaluations: int = 20
    evaluated: int = 2000
    anneal: Anneal = "linear"
    until: float = 0.0
    hurdles: Mapping[int, float] = field(default_factory=dict)
    bf16: bool = False
    patience: int = 3

    def ends(self, update: int, error: float) -> bool:
        """Whether nothing comes after what was measured."""
        return update >= self.updates or error <= self.until or error > self.hurdles.get(update, math.inf)

    def rate(self, update: int) -> float:
        """The factor on the learning rate, for update 0, 1, ...: warm-up, constant, linear decay if there is one."""
        falling = max(0.0, 2 * (1 - update / self.updates)) if self.anneal == "linear" else 1.0
        return min(1.0, (update + 1) / max(1, self.warm_up), falling)

    def evaluation_points(self) -> list[int]:
        """The updates after which errors are measured; 0 is before the first."""
        return sorted({round(k * self.updates / self.evaluations) for k in range(self.evaluations + 1)})


class Order:
    """Which examples make the minibatch of an update: every epoch in an order of its own, what is left over dropped.

    It depends on the seed and on the update alone, so there is nothing to save.
    """

    def __init__(self, count: int, size: int, seed: int) -> None:
        if count < size:
            raise ValueError(f"a minibatch of {size} needs as many examples, got {count}")
        self.count, self.size, self.seed = count, size, seed
        self.per_epoch = count // size
        self._epoch, self._order = -1, torch.empty(0)

    def __call__(self, update: int) -> Tensor:
        """The numbers of the examples for update 0, 1, ..."""
        epoch, position = divmod(update, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, torch.randperm(self.count, generator=seeded(self.seed, epoch, 0))
        return self._order[position * self.size : (position + 1) * self.size]

    def onwards(self, first: int) -> Iterator[Wanted]:
        """Those for update `first`, first + 1, ..., each with a generator for what is random in them."""
        for update in count(first):
            yield self(update), seeded(self.seed, update, 1)


def seeded(*numbers: int) -> torch.Generator:
    """A generator of its own for these numbers: torch's takes 32 bits, in which they are mixed."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


def minibatches(examples: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    """Shuffled minibatches without end."""
    order, update = Order(len(examples), size, seed), 0
    while True:
        yield examples[order(update)]
        update += 1


class Training:
    """A model on its way, with one worker or several: each sees its part of every minibatch.

    Attributes:
        update: how many have been made.
        seconds: spent on them, evaluation not counted.
        loss: that of the last update, before it; NaN before the first.
        ended: whether nothing comes any more.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: Trains,
        plan: Plan,
        seconds: float = 0.0,
        workers: Workers = ALONE,
    ) -> None:
        self.task, self.model, self.optimizer, self.plan = task, model, optimizer, plan
        self._workers, self._forward = workers, distributed(model, workers)
        self.update, self.seconds, self.loss, self.ended = 0, seconds, math.nan, False
        self._points = set(plan.evaluation_points())
        self._begun = False
        self._order = Order(task.count, plan.batch, plan.seed)
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self._losses: list[float] = []  # since they were last measured
        self._batches: Iterator[tuple[Tensor, Tensor]] | None = None  # from the next update on, once begun
        whole = optimizers_of(optimizer) if plan.anneal == "waterfall" else ()
        self._waterfalls = [ReduceLROnPlateau(part, patience=plan.patience, **WATERFALL) for part in whole]

    def proceed(self) -> dict[str, float] | None:
        """One more update, and a row where the plan wants one; at first a row without an update.

        Raises:
            Divergence and the rest of DIVERGENCES: training failed.
        """
        if self._begun:
            self.advance()
        self._begun = True
        if self.update not in self._points:
            return None
        row = self.measure()
        self.ended = self.plan.ends(self.update, row[self.task.watched])
        return row

    def advance(self) -> None:
        """Make one update.

        Raises:
            Divergence: if it is not finite; the update is not made.
        """
        ready = self._begin_reading() if self._batches is None else None
        start = perf_counter()
        if self.update < self.plan.warm_up or self.plan.anneal == "linear":
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * self.plan.rate(self.update)
        assert self._batches is not None
        x, y = ready or next(self._batches)
        self.update += 1
        self.optimizer.zero_grad()
        with self._autocast():
            outputs = self._forward(x)
        loss = self.task.loss(outputs.float() if self.plan.bf16 else outputs, y)
        value = self._workers.total({"loss": loss.item()})["loss"] / self._workers.size
        if not math.isfinite(value):
            raise Divergence(f"the loss is {value}")
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.loss = value
        self._losses.append(value)
        self.seconds += perf_counter() - start

    def _begin_reading(self) -> tuple[Tensor, Tensor]:
        """The next minibatch, and all that has to begin first, also where a run goes on: not counted as training."""
        self._batches = batches(self.task, self._order.onwards(self.update))
        return next(self._batches)

    def measure(self) -> dict[str, float]:
        """A row: where training stands, the mean loss since the last row, and the task's measures.

        Raises:
            Divergence: one of them is not finite.
        """
        self._workers.broadcast_(list(self.model.buffers()))()  # batch norm's are each worker's own
        with self._autocast():
            measures = self.task.measure(self.model, self.plan.evaluated)
        row = {"update": self.update, "epoch": self.update / self._order.per_epoch}
        row["lr"] = self.optimizer.param_groups[0]["lr"]
        if self._losses:
            row["loss"] = math.fsum(self._losses) / len(self._losses)
            self._losses.clear()
        if self.update > self.plan.warm_up:
            for waterfall in self._waterfalls:
                waterfall.step(measures[self.task.watched])
        return {**row, **measures}

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on as if nothing had happened, the same for all workers."""
        refresher = refresher_of(self.optimizer)
        if refresher is not None:
            refresher.synchronize()
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "update": self.update,
            "seconds": self.seconds,
            "begun": self._begun,
            "ended": self.ended,
            "loss": self.loss,
            "losses": list(self._losses),
            "waterfalls": [waterfall.state_dict() for waterfall in self._waterfalls],
            "random": torch.get_rng_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.update, self.seconds, self.loss = state["update"], state["seconds"], state["loss"]
        self._begun, self.ended, self._losses = state["begun"], state["ended"], list(state["losses"])
        for waterfall, saved in zip(self._waterfalls, state["waterfalls"], strict=True):
            waterfall.load_state_dict(saved)
        torch.set_rng_state(state["random"])
        self._batches = None

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._workers.device.type, torch.bfloat16, enabled=self.plan.bf16)


@dataclass(frozen=True)
class Row:
    """Squared errors after an update, and the seconds of training until then (evaluation not counted)."""

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


def train(training: Training, on_update: Callable[[int], None] = lambda update: None) -> Run:
    """A run in memory, of the reconstruction task."""
    rows: list[Row] = []
    try:
        while not training.ended:
            row = training.proceed()
            if row is not None:
                errors = row["train_squared_error"], row["test_squared_error"]
                rows.append(Row(training.update, training.seconds, *errors))
            if training.update > 0:
                on_update(training.update)
    except DIVERGENCES as error:
        return Run(rows, diverged(training, error))
    return Run(rows)


def diverged(training: Training, error: Exception) -> str:
    """How a training failed, for records."""
    return f"diverged at update {training.update}: {error}"
