"""The cost of an update on the paper's autoencoder: `python -m prong.lab.bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import prong
from prong.injection import Form
from prong.lab.data import load_mnist
from prong.lab.models import WIDTHS, autoencoder
from prong.lab.record import provenance, write_json
from prong.lab.training import minibatches, step

BLOCK = 20  # updates timed at once
PERIOD, SAMPLES = 1000, 12_800  # PRONG's defaults: a refresh from so many examples every so many updates
BASELINE = "SGD"


def prong_optimizer(form: Form) -> Callable[[nn.Module, Sequence[Tensor]], Optimizer]:
    """PRONG of one form, whitened; refreshes are timed apart, so it makes none of its own."""

    def make(model: nn.Module, batches: Sequence[Tensor]) -> Optimizer:
        optimizer = prong.PRONG(model, lr=1e-4, nesterov=True, form=form)
        optimizer.initialize(batches)
        optimizer.refresher.detach()
        return optimizer

    return make


METHODS: dict[str, Callable[[nn.Module, Sequence[Tensor]], Optimizer]] = {
    BASELINE: lambda model, batches: SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True),
    "Adam": lambda model, batches: Adam(model.parameters(), lr=1e-4),
    "PRONG, implicit": prong_optimizer("implicit"),
    "PRONG, explicit": prong_optimizer("explicit"),
}


@dataclass
class Contestant:
    """A model, what trains it, and the milliseconds measured so far, one number per repetition."""

    name: str
    model: nn.Module
    optimizer: Optimizer
    stream: Iterator[Tensor]
    updates: list[float] = field(default_factory=list)
    refreshes: list[float] = field(default_factory=list)

    def train(self) -> float:
        """Milliseconds per update, over one block."""
        batches = [next(self.stream) for _ in range(BLOCK)]
        start = perf_counter()
        for x in batches:
            step(self.model, self.optimizer, x)
        return 1000 * (perf_counter() - start) / BLOCK

    def refresh(self, batches: Sequence[Tensor]) -> float:
        """Milliseconds for a refresh with a pass of its own over the batches; 0 where there is nothing to refresh."""
        if not isinstance(self.optimizer, prong.PRONG):
            return 0.0
        start = perf_counter()
        prong.refresh_(self.model, batches)
        return 1000 * (perf_counter() - start)

    def amortised(self) -> float:
        """Milliseconds per update with its share of a refresh, medians over repetitions."""
        return median(self.updates) + median(self.refreshes) / PERIOD


def main(batch: int = 128, repetitions: int = 5, json: Path | None = None) -> None:
    """Time updates of SGD, Adam and PRONG on the paper's autoencoder, taking turns in one process.

    Args:
        batch: examples per update.
        repetitions: of a block of updates, and of a refresh, for every method; medians are printed.
        json: file for every repetition, settings and environment.
    """
    if batch < 1 or repetitions < 1:
        raise SystemExit("--batch and --repetitions are at least 1")
    torch.set_flush_denormal(True)
    console = Console()
    try:
        examples = load_mnist().train
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(str(error)) from error
    contestants = measure(examples, batch, repetitions)
    console.print(table(contestants, batch))
    if json is not None:
        write_json(json, record(contestants, batch, repetitions))
        console.print(f"Record: {json}", highlight=False, soft_wrap=True)


def measure(examples: Tensor, batch: int, repetitions: int) -> list[Contestant]:
    """Every method's times: one block each in turn, after one that is not counted, then the next repetition."""
    contestants = [_enter(name, examples, batch) for name in METHODS]
    size = min(400, len(examples))
    refreshing = list(islice(minibatches(examples, size, seed=1), SAMPLES // size))
    for contestant in contestants:
        contestant.train()
    for _ in range(repetitions):
        for contestant in contestants:
            contestant.updates.append(contestant.train())
        for contestant in contestants:
            contestant.refreshes.append(contestant.refresh(refreshing))
    return contestants


def _enter(name: str, examples: Tensor, batch: int) -> Contestant:
    torch.manual_seed(0)
    model = autoencoder()
    optimizer = METHODS[name](model, torch.split(examples[:2000], 500))
    return Contestant(name, model, optimizer, minibatches(examples, batch, seed=0))


def table(contestants: Sequence[Contestant], batch: int) -> Table:
    """Medians, and ratios to the baseline."""
    base = next(contestant.amortised() for contestant in contestants if contestant.name == BASELINE)
    result = Table(title=f"time per update, batch {batch}, {torch.get_num_threads()} threads")
    for heading in ("method", "ms per update", "ms per refresh", f"ms with a refresh\nevery {PERIOD}", "ratio\nto SGD"):
        result.add_column(heading, justify="left" if heading == "method" else "right")
    for contestant in contestants:
        update, refresh, total = median(contestant.updates), median(contestant.refreshes), contestant.amortised()
        shown = f"{refresh:.0f}" if refresh else "-"
        result.add_row(contestant.name, f"{update:.2f}", shown, f"{total:.2f}", f"{total / base:.2f}")
    return result


def record(contestants: Sequence[Contestant], batch: int, repetitions: int) -> dict[str, Any]:
    """Everything measured, as JSON has it."""
    config = {"model": WIDTHS, "batch": batch, "repetitions": repetitions, "block": BLOCK}
    times = {c.name: {"ms_per_update": c.updates, "ms_per_refresh": c.refreshes} for c in contestants}
    return {"config": config | {"period": PERIOD, "samples": SAMPLES}, "times": times, **provenance()}


if __name__ == "__main__":
    tyro.cli(main)
