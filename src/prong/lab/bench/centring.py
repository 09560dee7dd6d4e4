"""`prong bench centring`: what it costs to take the mean off inputs, and what it loses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from prong.core.factorise import LONG
from prong.core.whitening import times_inverse
from prong.lab.bench.sheets import Sheet, number, present
from prong.lab.models import WIDTHS
from prong.lab.record import keep, provenance
from prong.lab.terminal import at_least, make_console, progress, writable
from prong.lab.timing import interleaved
from prong.layers.natural import Linear
from prong.layers.site import Layout

NAME = "centring"
COPY, FUSED, KEPT, NONE = "(h - c) P", "h P - c P", "h P - c P, in memory that is kept", "h P"
CALLS = 5  # timed at once
MEANS = (0.0, 1.0, LONG, 10.0, 100.0, 1000.0)  # in spreads
SAMPLES, EPS, SPREAD = 4096, 0.1, 0.3


def main(batch: int = 128, repetitions: int = 15, json: Path | None = None) -> None:
    """Time the whitening of the inputs of the paper's autoencoder, all eight layers, centred in several ways.

    And how far each is from the result in double precision, for inputs with a longer and longer mean.

    Args:
        batch: examples per update.
        repetitions: of every block; medians are printed.
        json: file for the record: configuration, environment, commit and every repetition.
    """
    at_least(2, batch=batch)
    at_least(1, repetitions=repetitions)
    writable(json=json)
    config = {"batch": batch, "repetitions": repetitions, "calls": CALLS, "widths": WIDTHS, "eps": EPS}
    console = make_console()
    torch.manual_seed(0)
    layers = [_Layer(width, batch) for width in WIDTHS[:-1]]
    with progress(console, "blocks", 4 * (repetitions + 1) + len(MEANS)) as on_step:
        seconds = interleaved({name: partial(_run, layers, name) for name in WAYS}, repetitions, on_step)
        errors: dict[str, list[float]] = {COPY: [], FUSED: []}
        for mean in MEANS:
            layer = _Layer(max(WIDTHS), batch, mean)
            exact = (layer.h.double() - layer.c.double()) @ layer.P.double()
            for name, found in errors.items():
                found.append(((WAYS[name](layer) - exact).norm() / exact.norm()).item())
            on_step()
    times = {name: [1000 * s / CALLS for s in several] for name, several in seconds.items()}
    record = {"bench": NAME, "config": config, **provenance(), "ms": times, "means": MEANS, "errors": errors}
    keep(json, record)
    present(console, sheets(record), json)


class _Layer:
    """Inputs h (1, batch, width) with a mean of so many spreads, and their P, c and c P."""

    def __init__(self, width: int, batch: int, mean: float = 1.0) -> None:
        mixing = SPREAD * torch.randn(width, width) / width**0.5
        c = mean * SPREAD * torch.randn(1, width)
        self.h = torch.randn(1, batch, width) @ mixing + c
        seen = torch.randn(SAMPLES, width) @ mixing
        self.P = torch.linalg.inv(seen.mT @ seen / SAMPLES + EPS * torch.eye(width)).unsqueeze(0)
        self.c = c
        self.cP = times_inverse(c.unsqueeze(1), self.P).squeeze(1)
        self.operation = Linear(Layout((1, width)))
        self.kept = torch.empty_like(self.h)


def _kept(layer: _Layer) -> Tensor:
    return torch.bmm(layer.h, layer.P, out=layer.kept).sub_(layer.cP)


WAYS: Mapping[str, Callable[[_Layer], Tensor]] = {
    COPY: lambda layer: layer.operation.whitened(layer.h, layer.P, (layer.c, None), 0.0),
    FUSED: lambda layer: layer.operation.whitened(layer.h, layer.P, (None, layer.cP), 0.0),
    KEPT: _kept,
    NONE: lambda layer: layer.operation.whitened(layer.h, layer.P, (None, None), 0.0),
}


def _run(layers: list[_Layer], name: str) -> None:
    for _ in range(CALLS):
        for layer in layers:
            WAYS[name](layer)


def sheets(record: Mapping[str, Any]) -> list[Sheet]:
    """The times, and the errors."""
    config = record["config"]
    least = median(record["ms"][NONE])
    rows = [[name, number(median(ms)), f"{median(ms) / least:.3f}"] for name, ms in record["ms"].items()]
    note = f"Medians of {config['repetitions']}, all ways in turn."
    errors = [
        [f"{mean:g}", *(f"{found[i]:.1e}" for found in record["errors"].values())]
        for i, mean in enumerate(record["means"])
    ]
    loss = f"Relative errors in float32, {max(config['widths']):,} inputs, eps = {config['eps']:g}."
    loss += f" Means of more than {LONG:g} spreads are subtracted before."
    return [
        Sheet(
            f"whitened inputs of the autoencoder, batch {config['batch']}", ("way", "ms", "to h P alone"), rows, note
        ),
        Sheet("what is lost to rounding", ("mean, in spreads", *record["errors"]), errors, loss),
    ]
