"""The methods that the demo compares, with their settings and those tried for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import prong
from prong.lab.data import Digits
from prong.lab.models import autoencoder
from prong.lab.training import Plan, Run, train

Settings = Mapping[str, float]
Make = Callable[[nn.Module, Settings, Sequence[Tensor]], Optimizer]

SAMPLES = 5000  # training examples behind a whitened initialisation, and behind each refresh
PERIOD = 200  # updates between refreshes


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        name: for tables and legends.
        make: the optimizer of a new model, and the model initialised, from settings and batches of examples.
        settings: the best of `trials` by training error; see results/demo-tuning.json.
        trials: settings tried by `python -m prong.lab.demo --tune`, as many for every method.
    """

    name: str
    make: Make
    settings: Settings
    trials: Sequence[Settings]

    def run(
        self, digits: Digits, plan: Plan, settings: Settings, on_update: Callable[[int], None] = lambda update: None
    ) -> Run:
        """One run on a new model; its seconds begin with the initialisation."""
        torch.manual_seed(plan.seed)
        model = autoencoder()
        start = perf_counter()
        optimizer = self.make(model, settings, torch.split(digits.train[:SAMPLES], 500))
        return train(model, optimizer, digits, plan, seconds=perf_counter() - start, on_update=on_update)


def make_prong(model: nn.Module, settings: Settings, batches: Sequence[Tensor], balance: bool = False) -> Optimizer:
    """PRONG with Nesterov momentum, from the whitened initialisation."""
    optimizer = prong.PRONG(
        model,
        settings["lr"],
        momentum=0.9,
        nesterov=True,
        eps=settings["eps"],
        period=PERIOD,
        samples=SAMPLES,
        balance=balance,
    )
    optimizer.initialize(batches)
    return optimizer


def make_sgd(model: nn.Module, settings: Settings, batches: Sequence[Tensor]) -> Optimizer:
    """SGD with Nesterov momentum."""
    return SGD(model.parameters(), settings["lr"], momentum=0.9, nesterov=True)


def make_adam(model: nn.Module, settings: Settings, batches: Sequence[Tensor]) -> Optimizer:
    """Adam as it comes."""
    return Adam(model.parameters(), settings["lr"])


def whitened(make: Make) -> Make:
    """The same optimizer from the whitened initialisation: what PRONG starts from helps the others too."""

    def make_whitened(model: nn.Module, settings: Settings, batches: Sequence[Tensor]) -> Optimizer:
        prong.initialize_(model, batches, settings["eps"])
        return make(model, settings, batches)

    return make_whitened


def _rates(*rates: float) -> list[Settings]:
    return [{"lr": lr} for lr in rates]


def _grid(rates: Sequence[float], dampings: Sequence[float]) -> list[Settings]:
    """Every learning rate with every damping `eps`, of PRONG or of a whitened initialisation."""
    return [{"lr": lr, "eps": eps} for lr in rates for eps in dampings]


METHODS = (
    Method(
        name="PRONG",
        make=make_prong,
        settings={"lr": 5e-4, "eps": 3e-3},
        trials=_grid((2.5e-4, 5e-4, 1e-3), (1e-3, 3e-3, 1e-2)),
    ),
    Method(
        name="PRONG, balanced",
        make=partial(make_prong, balance=True),
        settings={"lr": 1e-3, "eps": 3e-2},
        trials=_grid((5e-4, 1e-3, 2e-3), (3e-3, 1e-2, 3e-2)),
    ),
    Method(
        name="Adam, whitened init",
        make=whitened(make_adam),
        settings={"lr": 1e-2, "eps": 3e-2},
        trials=_grid((1e-3, 3e-3, 1e-2), (1e-2, 3e-2, 1e-1)),
    ),
    Method(
        name="SGD, whitened init",
        make=whitened(make_sgd),
        settings={"lr": 3e-3, "eps": 3e-2},
        trials=_grid((3e-4, 1e-3, 3e-3), (3e-3, 1e-2, 3e-2)),
    ),
    Method(
        name="Adam",
        make=make_adam,
        settings={"lr": 3e-3},
        trials=_rates(1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1),
    ),
    Method(
        name="SGD",
        make=make_sgd,
        settings={"lr": 1.0},
        trials=_rates(1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0),
    ),
)
