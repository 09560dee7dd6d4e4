"""Ways to train a model, all made alike: PRONG in its variants, and what people would pick instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import pytorch_optimizer
import torch
from torch import nn

import prong

Settings = Mapping[str, float]
MOMENTUM = 0.9


class Trains(Protocol):
    """What a training loop needs of an optimizer."""

    param_groups: list[dict[str, Any]]

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def step(self) -> Any:
        """Make one update."""


@dataclass(frozen=True)
class Schedule:
    """When PRONG re-estimates: the paper's T and N_s."""

    period: int = 1000
    samples: int = 12_800


Make = Callable[[nn.Module, Settings, Schedule], Trains]


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        name: for tables and legends.
        make: the optimizer of a model, from settings; refreshes, if it makes any, by the schedule.
        searched: the settings that tuning chooses: the learning rate, and the damping where there is one.
        batch_norm: whether it trains a model with batch-norm layers.
    """

    name: str
    make: Make
    searched: tuple[str, ...] = ("lr",)
    batch_norm: bool = False


class Together:
    """Several optimizers, each with its share of the parameters, as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        """Make one update."""
        for optimizer in self.optimizers:
            optimizer.step()


def _prong(model: nn.Module, settings: Settings, schedule: Schedule, **options: Any) -> Trains:
    return prong.PRONG(
        model,
        settings["lr"],
        momentum=MOMENTUM,
        nesterov=True,
        eps=settings["eps"],
        period=schedule.period,
        samples=schedule.samples,
        **options,
    )


def _whitened_adam(model: nn.Module, settings: Settings, schedule: Schedule) -> Trains:
    prong.whiten_(model, form="explicit")
    optimizer = torch.optim.Adam(model.parameters(), settings["lr"])
    prong.Refresher(model, optimizer, eps=settings["eps"], period=schedule.period, samples=schedule.samples)
    return optimizer


def _sgd(model: nn.Module, settings: Settings, schedule: Schedule) -> Trains:
    return torch.optim.SGD(model.parameters(), settings["lr"], momentum=MOMENTUM, nesterov=True)


def _plain(optimizer: Callable[..., Trains], **options: Any) -> Make:
    """An optimizer as it comes, except for options."""
    return lambda model, settings, schedule: optimizer(model.parameters(), lr=settings["lr"], **options)


def _muon(model: nn.Module, settings: Settings, schedule: Schedule) -> Trains:
    """Muon for matrices (kernels are not matrices to torch's), Adam for the rest, as its authors advise."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    muon = torch.optim.Muon(matrices, lr=settings["lr"], weight_decay=0.0)
    return Together(muon, torch.optim.Adam(rest, settings["lr"])) if rest else muon


DAMPED = ("lr", "eps")
_ALL: Sequence[Method] = (
    Method("PRONG", _prong, DAMPED),
    Method("PRONG, cutoff", partial(_prong, cutoff=1.0), DAMPED),
    Method("PRONG, balanced", partial(_prong, balance=True, cutoff=1.0), DAMPED),
    Method("PRONG, explicit", partial(_prong, form="explicit"), DAMPED),
    Method("PRONG+", partial(_prong, plus=True), DAMPED),
    Method("Adam, whitened coordinates", _whitened_adam, DAMPED),
    Method("SGD", _sgd),
    Method("batch norm", _sgd, batch_norm=True),
    Method("Adam", _plain(torch.optim.Adam)),
    Method("RMSprop", _plain(torch.optim.RMSprop)),
    Method("Muon", _muon),
    Method("SOAP", _plain(pytorch_optimizer.SOAP, weight_decay=0.0)),
    Method("Shampoo", _plain(pytorch_optimizer.ScalableShampoo, preconditioning_compute_steps=10)),
    Method("PSGD-Kron", _plain(pytorch_optimizer.Kron)),
)
METHODS: Mapping[str, Method] = {method.name: method for method in _ALL}
OURS = tuple(name for name, method in METHODS.items() if "eps" in method.searched)
