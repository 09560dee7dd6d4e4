"""`prong bench spaces`: where whitening activations becomes dearer than preconditioning gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from prong.core.whitening import Whitening, times_inverse
from prong.lab.bench.sheets import NONE, Sheet, number, present
from prong.lab.record import keep, provenance
from prong.lab.terminal import at_least, make_console, progress, writable
from prong.lab.timing import interleaved
from prong.layers.natural import Convolution, Linear, Operation, Switch, natural, naturalize
from prong.layers.site import Layout

NAME = "spaces"
ACTIVATION, GRADIENT = "activation space", "gradient space"
RATIOS = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
CALLS = 5  # timed at once


def main(
    width: int = 512, channels: int = 128, map_size: int = 6, repetitions: int = 9, json: Path | None = None
) -> None:
    """Time the backward of one implicit layer in activation space and in gradient space.

    By the number of products, activation space is the cheaper one while positions are fewer than outputs times taps of
    the kernel. This measures at which ratio of the two it really is, for a linear layer and a 3 x 3 convolution, with
    an exact P and with a thin one of an eighth of the rank.

    Args:
        width: inputs and outputs of the linear layer.
        channels: of the convolution, in and out.
        map_size: height and width of the convolution's maps, before their padding by one.
        repetitions: of every block; medians are printed.
        json: file for the record: configuration, environment, commit and every repetition.
    """
    at_least(8, width=width, channels=channels)
    at_least(4, map_size=map_size)
    at_least(1, repetitions=repetitions)
    writable(json=json)
    config = {"width": width, "channels": channels, "map_size": map_size, "repetitions": repetitions, "calls": CALLS}
    record: dict[str, Any] = {"bench": NAME, "config": config, **provenance(), "points": []}
    console = make_console()
    cases = [(layer, rank, ratio) for layer in ("linear", "convolution") for rank in (1.0, 0.125) for ratio in RATIOS]
    with progress(console, "blocks", len(cases) * 2 * (repetitions + 1)) as on_step:
        for layer, rank, ratio in cases:
            case = _linear(width, ratio) if layer == "linear" else _convolution(channels, map_size, ratio)
            times = interleaved(_blocks(case, rank), repetitions, on_step)
            milliseconds = {space: [1000 * s / CALLS for s in seconds] for space, seconds in times.items()}
            record["points"].append({"layer": layer, "rank": rank, "ratio": ratio, "ms": milliseconds})
            keep(json, record, finished=False)
    keep(json, record)
    present(console, sheets(record), json)


@dataclass(frozen=True)
class Case:
    """A layer's inputs, and its operation in either space: activation space takes maps that are padded beforehand."""

    h: Tensor
    plain: Operation
    unpadded: Operation
    margin: int = 0

    def padded(self) -> Tensor:
        """The inputs with zeros around them."""
        return F.pad(self.h, [self.margin] * 4) if self.margin else self.h


def _linear(width: int, ratio: float) -> Case:
    operation = Linear(Layout((width, width)))
    return Case(torch.randn(max(1, round(width * ratio)), width), operation, operation)


def _convolution(channels: int, size: int, ratio: float) -> Case:
    layout = Layout((channels, channels, 3, 3))
    ones, zeros = (1, 1), (0, 0)
    plain, unpadded = (Convolution(layout, ones, ones, padding, zeros) for padding in (ones, zeros))
    examples = max(1, round(ratio * channels * 9 / (size + 2) ** 2))
    return Case(torch.randn(examples, channels, size, size), plain, unpadded, margin=1)


def _blocks(case: Case, rank: float) -> dict[str, Callable[[], None]]:
    """Forward and backward of the same layer by both ways."""
    layout, h = case.plain.layout, case.h.requires_grad_()
    W = torch.randn(layout.shape).requires_grad_()
    b = torch.zeros(layout.outputs).requires_grad_()
    c = torch.randn(1, layout.features)
    thin = rank < 1
    P, tail = torch.randn(1, layout.features, round(rank * layout.features)), 1.0 if thin else 0.0
    cP = times_inverse(c.unsqueeze(1), P, tail).squeeze(1)
    whitening = Whitening(c, 1.0, P=P, tail=tail, cP=cP)
    delta = torch.randn_like(case.plain(h, W, b).detach())
    switch = Switch()
    ways: dict[str, Callable[[], Tensor]] = {
        ACTIVATION: lambda: natural(case.unpadded, case.padded(), W, b, whitening, switch),
        GRADIENT: lambda: case.plain(h, *naturalize(W, b, whitening, layout, switch)),
    }

    def block(way: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(CALLS):
                torch.autograd.grad(way(), [h, W, b], delta)

        return run

    return {space: block(way) for space, way in ways.items()}


def crossover(points: Sequence[Mapping[str, Any]]) -> float | None:
    """The ratio at which both cost the same, between the measured ones on either side of it; None beyond them."""
    excess = [(p["ratio"], math.log(median(p["ms"][ACTIVATION]) / median(p["ms"][GRADIENT]))) for p in points]
    for (r0, e0), (r1, e1) in pairwise(excess):
        if e0 <= 0 < e1:
            return math.exp(math.log(r0) + (math.log(r1) - math.log(r0)) * -e0 / (e1 - e0))
    return None


def sheets(record: Mapping[str, Any]) -> list[Sheet]:
    """A table for each layer and rank."""
    kinds = dict.fromkeys((point["layer"], point["rank"]) for point in record["points"])
    return [_sheet(record, layer, rank) for layer, rank in kinds]


def _sheet(record: Mapping[str, Any], layer: str, rank: float) -> Sheet:
    points = [point for point in record["points"] if (point["layer"], point["rank"]) == (layer, rank)]
    rows = []
    for point in points:
        a, g = (median(point["ms"][space]) for space in (ACTIVATION, GRADIENT))
        rows.append([f"{point['ratio']:g}", number(a), number(g), f"{a / g:.2f}"])
    where = crossover(points)
    note = f"Equal at {NONE if where is None else f'{where:.2f}'}. Medians of {record['config']['repetitions']}."
    kind = "exact P" if rank == 1 else f"thin P of rank {rank:g} in"
    headings = ("positions / (outputs x taps)", f"ms, {ACTIVATION}", f"ms, {GRADIENT}", "ratio")
    return Sheet(f"{layer}, {kind}: forward and backward", headings, rows, note)
