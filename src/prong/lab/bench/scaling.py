"""`prong bench scaling`: how the cost of an update grows with a network, PRONG beside SGD."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from prong.lab.bench.amortise import averages
from prong.lab.bench.contest import BLOCK, SETTINGS, measure, steps
from prong.lab.bench.growth import exponent
from prong.lab.bench.plots import Panel, draw
from prong.lab.bench.sheets import Sheet, number, power, present
from prong.lab.bench.tasks import mlp_task
from prong.lab.methods import METHODS
from prong.lab.record import keep, provenance
from prong.lab.terminal import at_least, each_once, make_console, progress, writable

NAME = "scaling"
BASE = {"depth": 4, "width": 512, "batch": 128}  # what the other two are while one is varied
COMPARED = ("PRONG", "SGD")


def main(
    depths: tuple[int, ...] = (2, 4, 8, 16),
    widths: tuple[int, ...] = (128, 256, 512, 1024, 2048),
    batches: tuple[int, ...] = (32, 64, 128, 256, 512, 1024),
    period: int = 1000,
    samples: int = 12_800,
    repetitions: int = 5,
    block: int = BLOCK,
    json: Path | None = None,
    plot: Path | None = None,
) -> None:
    """How the cost of an update grows with depth, width and batch of an MLP, PRONG beside SGD.

    One of the three is varied while the others stay at depth 4, width 512, batch 128. PRONG's cost is all-in, as in
    `prong bench step-cost`. Exponents are those of the power law that fits best; the data are random numbers.

    Args:
        depths: numbers of linear layers.
        widths: inputs and outputs of every layer.
        batches: examples per update.
        period: updates between refreshes.
        samples: examples per refresh.
        repetitions: of every block; medians are printed.
        block: updates timed at once; a quarter of it where one takes more than 200 ms.
        json: file for the record: configuration, environment, commit and every repetition.
        plot: PNG file for the curves.
    """
    at_least(1, depths=depths, widths=widths, batches=batches, period=period, repetitions=repetitions, block=block)
    at_least(2, samples=samples)
    each_once(depths=depths, widths=widths, batches=batches)
    writable(json=json, plot=plot)
    varied = {"depth": depths, "width": widths, "batch": batches}
    config = {"varied": varied, "base": BASE, "methods": COMPARED, "settings": SETTINGS, "block": block}
    config |= {"period": period, "samples": samples, "repetitions": repetitions}
    record: dict[str, Any] = {"bench": NAME, "config": config, **provenance(), "points": []}
    torch.set_flush_denormal(True)
    console = make_console()
    methods = [METHODS[name] for name in COMPARED]
    points = [(axis, {**BASE, axis: value}) for axis, values in varied.items() for value in values]
    with progress(console, "blocks", len(points) * steps(methods, repetitions)) as on_step:
        for axis, size in points:
            task = mlp_task(size["width"], size["depth"], size["batch"])
            cost = measure(
                task, size["batch"], methods, samples=samples, repetitions=repetitions, block=block, on_step=on_step
            )
            record["points"].append({"axis": axis, **size, **cost})
            keep(json, record, finished=False)
    keep(json, record)
    present(console, sheets(record), json, plot, lambda: picture(record))


def curves(record: Mapping[str, Any], axis: str) -> tuple[list[int], dict[str, list[float]]]:
    """The sizes along an axis, and all-in milliseconds per update of both methods at each."""
    points = [point for point in record["points"] if point["axis"] == axis]
    costs = [averages(point, record["config"]) for point in points]
    return [point[axis] for point in points], {name: [cost[name][0].total for cost in costs] for name in COMPARED}


def sheets(record: Mapping[str, Any]) -> list[Sheet]:
    """A table for each axis."""
    return [_sheet(record, axis) for axis in BASE if any(point["axis"] == axis for point in record["points"])]


def picture(record: Mapping[str, Any]) -> bytes:
    """The curves as a PNG file, the exponents in their legends."""
    panels = []
    for axis in BASE:
        sizes, times = curves(record, axis)
        lines = {f"{name}, exponent {power(exponent(sizes, values))}": values for name, values in times.items()}
        panels.append(Panel(f"against {axis}", axis, sizes, lines))
    return draw(panels, "ms per update, all-in")


def _sheet(record: Mapping[str, Any], axis: str) -> Sheet:
    sizes, times = curves(record, axis)
    ours, base = (times[name] for name in COMPARED)
    rows = [[f"{size:,}", number(a), number(b), f"{a / b:.2f}"] for size, a, b in zip(sizes, ours, base, strict=True)]
    rows.append(["exponent", power(exponent(sizes, ours)), power(exponent(sizes, base)), ""])
    config = record["config"]
    fixed = ", ".join(f"{name} {value}" for name, value in config["base"].items() if name != axis)
    note = (
        f"All-in: a refresh from {config['samples']:,} samples every {config['period']:,} updates. "
        f"Medians of {config['repetitions']}. Random data."
    )
    headings = (axis, *(f"ms, {name}" for name in COMPARED), "ratio")
    return Sheet(f"cost of an update of an MLP against its {axis} ({fixed})", headings, rows, note)
