"""Real training, to be timed: SGD and PRONG on one model, alone or under DDP."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import prong
from prong.attachment import attachment_of
from prong.lab.bench.phases import HORIZON, Phases
from prong.lab.planning.subjects import subject
from prong.model.whiten import whitened_sites

SGD, CLOSED, OPEN, REFRESH = PARTS = ("SGD", "PRONG", "PRONG in a window", "refresh")
WHOLE = "refresh with its statistics"
LR, EPS = 1e-7, 3e-2  # a rate so small that nothing diverges: what is timed is the arithmetic
SAMPLES = 12_800
UPDATES = 4  # timed at once
Work = Callable[[], object]


class Trial:
    """A model trained by SGD, and a copy of it by PRONG, on random numbers.

    Args:
        name: of the model.
        examples: per update and worker.
    """

    def __init__(self, name: str, examples: int) -> None:
        what = subject(name)
        torch.manual_seed(0)
        self._inputs = torch.randn(examples, *what.example)
        self._examples = examples * dist.get_world_size()
        plain, whitened = what.make(), what.make()
        sgd = torch.optim.SGD(plain.parameters(), LR, momentum=0.9)
        natural = prong.PRONG(
            whitened,
            LR,
            damping=prong.Absolute(EPS),
            form="implicit",
            refresh=prong.Every(HORIZON, samples=SAMPLES),
            trust=None,
        )
        self._sgd = _training(_distributed(plain), sgd, self._inputs)
        self._model = _distributed(whitened)
        self._prong = _training(self._model, natural, self._inputs)
        for _ in range(2):  # DDP arranges its buckets anew after the first
            self._sgd()
            self._prong()
        self._phases = Phases(attachment_of(natural).refresher, self._prong)
        widest = max(site.layout.features for _, site in whitened_sites(whitened).values())
        self._fillings = math.ceil(2 * widest / examples)

    def phase(self, name: str) -> tuple[Work, Work | None, int]:
        """What is timed, what has to happen before, and how many updates or refreshes it is."""
        if name == WHOLE:
            batches = [self._inputs] * math.ceil(SAMPLES / self._examples)
            return partial(self._phases.refresher.refresh, batches), None, 1
        if name == REFRESH:
            return self._phases.refresh, self._fill, 1
        update = self._sgd if name == SGD else self._prong
        prepare = {SGD: None, CLOSED: self._phases.close, OPEN: self._fill}[name]
        return lambda: [update() for _ in range(UPDATES)], prepare or (lambda: None), UPDATES

    def _fill(self) -> None:
        """Open a window, and show it more rows than the widest layer has inputs, by forwards alone."""
        self._phases.open()
        with torch.no_grad():
            for _ in range(self._fillings):
                self._model(self._inputs)


def _distributed(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model) if dist.get_world_size() > 1 else model


def _training(model: nn.Module, optimizer: Optimizer, inputs: Tensor) -> Callable[[], None]:
    def update() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return update
