"""Ways to train a model, all made alike: PRONG in its variants, and what people would pick instead.

A new one is an entry in `_ALL`, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import pytorch_optimizer
import torch
from torch import nn
from torch.optim import Optimizer

import prong
from prong.attachment import Composite, attachment_of
from prong.options import Form
from prong.refresh.refresher import Refresher

Settings = Mapping[str, float]
MOMENTUM = 0.9


class Trains(Protocol):
    """What a training loop needs of an optimizer."""

    param_groups: list[dict[str, Any]]

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def step(self) -> Any:
        """Make one update."""

    def state_dict(self) -> dict[str, Any]:
        """What it needs to go on."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""


@dataclass(frozen=True)
class Schedule:
    """When PRONG re-estimates: the paper's T and N_s, and whether it does so more often at first."""

    period: int = 1000
    samples: int = 12_800
    early: bool = True

    @property
    def refresh(self) -> prong.Every:
        """The same for an optimizer."""
        return prong.Every(self.period, samples=self.samples, growth=1.0 if self.early else None)


Make = Callable[[nn.Module, Settings, Schedule], Trains]


@dataclass(frozen=True)
class Method:
    """A way to train.

    Attributes:
        key: for the command line and for folders.
        name: for tables and legends.
        make: the optimizer of a model, from settings; refreshes, if it makes any, by the schedule.
        searched: the settings that tuning chooses: the learning rate, and the damping where there is one.
        batch_norm: whether it trains a model with batch-norm layers.
        settings: all that it knows, `lr` among it, with what they are where nobody says otherwise.
        resumable: whether its state can be saved; who cannot takes part in benchmarks only.
        refreshes: whether it is ours, and trains in whitened coordinates.
        rates: the learning rates among which a race searches: two decades, set after a wider search (docs/log.md).
    """

    key: str
    name: str
    make: Make
    searched: tuple[str, ...] = ("lr",)
    batch_norm: bool = False
    settings: Settings = field(default_factory=lambda: {"lr": 1e-3})
    resumable: bool = True
    refreshes: bool = False
    rates: tuple[float, float] = (1e-4, 1e-2)

    def __post_init__(self) -> None:
        if "lr" not in self.settings:
            raise ValueError(f"method {self.key!r} needs 'lr' among its settings: the schedule of rates sets it")


class Together:
    """Several optimizers, each with its share of the parameters, as one."""

    def __init__(self, *optimizers: Optimizer) -> None:
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

    def state_dict(self) -> dict[str, Any]:
        """Theirs, in order."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give each its own."""
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.param_groups[:] = [group for optimizer in self.optimizers for group in optimizer.param_groups]


def optimizers_of(trains: Trains) -> tuple[Optimizer, ...]:
    """Torch's own optimizers in it, for those who want such."""
    return trains.optimizers if isinstance(trains, Together) else (trains,)  # type: ignore[return-value]


def refresher_of(trains: Trains) -> Refresher | None:
    """What refreshes its whitened coordinates, if it trains in such."""
    return attachment_of(trains).refresher if isinstance(trains, Composite) else None


def prong_of(
    model: nn.Module, settings: Settings, schedule: Schedule, form: Form | None = None, **options: Any
) -> Trains:
    """The paper's PRONG of a model: absolute damping, no bound on steps, and options of its own."""
    return prong.PRONG(
        model,
        settings["lr"],
        momentum=settings.get("momentum", MOMENTUM),
        nesterov=settings.get("momentum", MOMENTUM) > 0,
        weight_decay=settings.get("weight_decay", 0.0),
        damping=prong.Absolute(settings["eps"]),
        form=prong.Implicit() if form is None else form,
        refresh=schedule.refresh,
        trust=None,
        **options,
    )


def _whitened_adam(model: nn.Module, settings: Settings, schedule: Schedule) -> Trains:
    return prong.AdamW(
        model,
        settings["lr"],
        weight_decay=settings.get("weight_decay", 0.0),
        damping=prong.Absolute(settings["eps"]),
        form="explicit",
        refresh=schedule.refresh,
        trust=None,
    )


def _as_it_comes(optimizer: Callable[..., Trains]) -> Make:
    """One of ours with its own defaults, but for the settings that it is given and the schedule."""

    def make(model: nn.Module, settings: Settings, schedule: Schedule) -> Trains:
        known = {name: settings[name] for name in ("momentum", "weight_decay") if name in settings}
        return optimizer(model, settings["lr"], refresh=schedule.refresh, **known)

    return make


def _gone(model: nn.Module, settings: Settings, schedule: Schedule) -> Trains:
    raise ValueError("this method is no more; records of it can be reported")


def _sgd(model: nn.Module, settings: Settings, schedule: Schedule, nesterov: bool = True) -> Trains:
    momentum, decay = settings.get("momentum", MOMENTUM), settings.get("weight_decay", 0.0)
    nesterov = nesterov and momentum > 0
    return torch.optim.SGD(model.parameters(), settings["lr"], momentum, nesterov=nesterov, weight_decay=decay)


def _rmsprop(model: nn.Module, settings: Settings, schedule: Schedule) -> Trains:
    known = {name: settings.get(name, value) for name, value in RMSPROP.items()}
    return torch.optim.RMSprop(
        model.parameters(),
        known["lr"],
        alpha=known["decay"],
        eps=known["regulariser"],
        momentum=known["momentum"],
        weight_decay=known["weight_decay"],
    )


def plain(optimizer: Callable[..., Trains], **options: Any) -> Make:
    """An optimizer as it comes, except for options."""

    def make(model: nn.Module, settings: Settings, schedule: Schedule) -> Trains:
        decay = settings.get("weight_decay", 0.0)
        return optimizer(model.parameters(), lr=settings["lr"], weight_decay=decay, **options)

    return make


def _muon(model: nn.Module, settings: Settings, schedule: Schedule) -> Trains:
    """Muon for matrices (kernels are not matrices to torch's), Adam for the rest, as its authors advise."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    if not matrices:
        raise ValueError("torch's Muon takes matrices, and this model has none; choose another method")
    decay = settings.get("weight_decay", 0.0)
    muon = torch.optim.Muon(matrices, lr=settings["lr"], weight_decay=decay)
    return Together(muon, torch.optim.Adam(rest, settings["lr"], weight_decay=decay)) if rest else muon


def trouble(name: str, value: float) -> str | None:
    """What is wrong with a setting, in a sentence; None if nothing is."""
    if name in ("lr", "eps", "regulariser"):
        good, wanted = 0 < value < math.inf, "positive and finite"
    elif name in ("momentum", "decay"):
        good, wanted = 0 <= value < 1, "at least 0 and less than 1"
    else:
        good, wanted = 0 <= value < math.inf, "not negative and finite"
    return None if good else f"{name} is {wanted}, got {value:g}"


DAMPED = ("lr", "eps")
_Ours = partial(Method, searched=DAMPED, refreshes=True)  # tuned by rate and damping
LEAST: Settings = {"lr": 1e-3, "weight_decay": 0.0}
HEAVY: Settings = {**LEAST, "momentum": MOMENTUM}
WHITENED: Settings = {**HEAVY, "eps": 1e-2}
RMSPROP: Settings = {**LEAST, "momentum": 0.0, "decay": 0.99, "regulariser": 1e-8}
_ALL: Sequence[Method] = (
    _Ours("prong", "PRONG", prong_of, settings=WHITENED),
    _Ours("prong-cutoff", "PRONG, cutoff", partial(prong_of, form=prong.Implicit(cutoff=1.0)), settings=WHITENED),
    _Ours("prong-explicit", "PRONG, explicit", partial(prong_of, form=prong.Explicit()), settings=WHITENED),
    _Ours("prong+", "PRONG+", partial(prong_of, form=prong.Explicit(plus=True)), settings=WHITENED),
    _Ours(
        "prong-bn",
        "PRONG and batch norm",
        partial(prong_of, form=prong.Implicit(cutoff=1.0)),
        batch_norm=True,
        settings=WHITENED,
        rates=(1e-3, 1e-1),
    ),
    _Ours(
        "kfac-like",
        "PRONG, gradients whitened",
        partial(prong_of, outputs=prong.WhitenOutputs("empirical")),
        settings=WHITENED,
        rates=(1e-5, 1e-3),
    ),
    _Ours("whitened-adam", "Adam, whitened coordinates", _whitened_adam, settings={**LEAST, "eps": 1e-2}),
    _Ours(
        "prong-default", "PRONG, defaults", _as_it_comes(prong.PRONG), searched=("lr",), settings={**HEAVY, "lr": 1e-2}
    ),
    _Ours(
        "prong-adamw",
        "AdamW, whitened",
        _as_it_comes(prong.AdamW),
        searched=("lr",),
        settings={"lr": 1e-3, "weight_decay": 1e-2},
    ),
    _Ours("prong-muon", "Muon, whitened", _as_it_comes(prong.Muon), searched=("lr",), settings={**LEAST, "lr": 2e-2}),
    Method("nesterov", "SGD", _sgd, settings=HEAVY, rates=(1e-3, 1e-1)),
    Method("sgd", "SGD, heavy ball", partial(_sgd, nesterov=False), settings=HEAVY, rates=(1e-3, 1e-1)),
    Method("batchnorm", "batch norm", _sgd, batch_norm=True, settings=HEAVY, rates=(1e-2, 1.0)),
    Method("adam", "Adam", plain(torch.optim.Adam), settings=LEAST),
    Method("rmsprop", "RMSprop", _rmsprop, settings=RMSPROP),
    Method("muon", "Muon", _muon, settings=LEAST, rates=(3e-3, 3e-1)),
    Method("soap", "SOAP", plain(pytorch_optimizer.SOAP), settings=LEAST, rates=(1e-3, 1e-1)),
    Method(
        "shampoo",
        "Shampoo",
        plain(pytorch_optimizer.ScalableShampoo, preconditioning_compute_steps=10),
        settings=LEAST,
        resumable=False,
    ),
    Method(
        "psgd-kron", "PSGD-Kron", plain(pytorch_optimizer.Kron), settings=LEAST, resumable=False, rates=(1e-3, 1e-1)
    ),
)
METHODS: Mapping[str, Method] = {method.name: method for method in _ALL}
KEYS: Mapping[str, Method] = {method.key: method for method in _ALL}
# Those that cannot be run any more are known to reports of what was recorded.
_PAST = (_Ours("prong-balanced", "PRONG, balanced", _gone, settings=WHITENED),)
_ORDER = (*_ALL[:1], *_PAST, *_ALL[1:])  # as they stand in tables
RECORDED: Mapping[str, Method] = {method.key: method for method in _ORDER}
OURS = tuple(method.name for method in RECORDED.values() if method.refreshes)
