"""`prong bench refresh`: what a refresh of one layer takes, part by part, against its width."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, get_args

import torch
from torch import Tensor

from prong.core.factorise import whiten
from prong.core.moments import Moments
from prong.core.whitening import Transition, transport_velocity
from prong.lab.bench.growth import exponent
from prong.lab.bench.plots import Panel, draw
from prong.lab.bench.sheets import Sheet, number, power, present
from prong.lab.record import keep, provenance
from prong.lab.terminal import at_least, make_console, progress, writable
from prong.lab.timing import interleaved
from prong.options import Basis

NAME = "refresh"
NARROWEST = 64
FIT_FROM = 512  # exponents are fitted to widths from here on: below, calls cost more than arithmetic
EPS = 1e-2
DTYPES = {"float32": torch.float32, "float64": torch.float64}
BLOCK_SECONDS = 0.02  # parts that take less are called several times in a row
PARTS = {
    "statistics": "adding the samples, batch by batch",
    "P": "P = (Sigma + eps I)^-1, the implicit form's",
    **{basis: f"U and its inverse in the {basis} basis" for basis in get_args(Basis)},
    "projection": "V, d and their momentum from one basis to another, the explicit form's",
    "plain": "torch.linalg.cholesky and torch.cholesky_inverse of the same matrix",
}


def main(
    max_width: int = 4096,
    samples: tuple[int, ...] = (1280, 12_800),
    batch: int = 128,
    repetitions: int = 3,
    json: Path | None = None,
    plot: Path | None = None,
) -> None:
    """What a refresh of one linear layer takes, part by part, against its width; and how fast that grows.

    The layer is square. Statistics, the factorisation for each basis, and the projection take turns, beside torch's
    plain Cholesky inverse of the same matrix; in single and in double precision. With fewer samples than inputs the
    library factorises a smaller matrix where that is faster.

    Args:
        max_width: widths are 64, 128, 256, ... up to this.
        samples: rows that the statistics are gathered from, one table each.
        batch: rows added at once.
        repetitions: of every part; medians are printed.
        json: file for the record: configuration, environment, commit and every repetition.
        plot: PNG file for the curves.
    """
    at_least(NARROWEST, max_width=max_width)
    at_least(1, batch=batch, repetitions=repetitions)
    at_least(2, samples=samples)
    if not samples:
        raise SystemExit("--samples needs a number")
    writable(json=json, plot=plot)
    widths = [NARROWEST << n for n in range((max_width // NARROWEST).bit_length())]
    config = {"widths": widths, "samples": samples, "batch": batch, "repetitions": repetitions, "eps": EPS}
    record: dict[str, Any] = {"bench": NAME, "config": config, **provenance(), "times": []}
    torch.set_flush_denormal(True)
    console = make_console()
    plan = [(count, dtype, width) for count in samples for dtype in DTYPES for width in widths]
    with progress(console, "parts", len(plan) * len(PARTS) * (repetitions + 2)) as on_step:
        for count, dtype, width in plan:
            times = measure(width, count, DTYPES[dtype], batch, repetitions, on_step)
            record["times"].append({"samples": count, "dtype": dtype, "width": width, "ms": times})
            keep(json, record, finished=False)
    keep(json, record)
    present(console, sheets(record), json, plot, lambda: picture(record))


def measure(
    width: int,
    samples: int,
    dtype: torch.dtype,
    batch: int,
    repetitions: int,
    on_step: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Milliseconds of every part, one number per repetition."""
    works = parts(correlated_rows(samples, width, dtype), batch)
    calls = {}
    for name, work in works.items():
        start = perf_counter()
        work()
        calls[name] = math.ceil(BLOCK_SECONDS / max(perf_counter() - start, 1e-6))
        on_step()

    def several(name: str) -> Callable[[], None]:
        def block() -> None:
            for _ in range(calls[name]):
                works[name]()

        return block

    seconds = interleaved({name: several(name) for name in works}, repetitions, on_step)
    return {name: [1000 * t / calls[name] for t in values] for name, values in seconds.items()}


def parts(rows: Tensor, batch: int) -> dict[str, Callable[[], object]]:
    """The parts of a refresh, each as something to call."""
    moments = gather(rows, batch)
    width = rows.shape[1]
    damped = moments.covariance()[0].clone()
    damped.diagonal().add_(EPS)
    old, new = whiten(moments, EPS, "cholesky"), whiten(moments, 2 * EPS, "cholesky")
    V, velocity = torch.randn(2, 1, width, 1, width, dtype=rows.dtype).unbind()
    d = torch.zeros(1, width, dtype=rows.dtype)

    def projection() -> None:
        transition = Transition.between(old, new)
        transport_velocity(V, d, transition)
        transport_velocity(velocity, d, transition)

    def factorisation(basis: Basis | None) -> Callable[[], object]:
        return lambda: whiten(moments, EPS, basis)

    return {
        "statistics": lambda: gather(rows, batch),
        "P": factorisation(None),
        "pca": factorisation("pca"),
        "zca": factorisation("zca"),
        "cholesky": factorisation("cholesky"),
        "projection": projection,
        "plain": lambda: torch.cholesky_inverse(torch.linalg.cholesky(damped)),
    }


def gather(rows: Tensor, batch: int) -> Moments:
    """The moments of rows (samples, width), added batch by batch."""
    moments = Moments(1, rows.shape[1], rows.dtype)
    for some in torch.split(rows, batch):
        moments.add(some.unsqueeze(0))
    return moments


def correlated_rows(samples: int, width: int, dtype: torch.dtype) -> Tensor:
    """Random walks: every two inputs are correlated, and the k-th eigenvalue falls like 1 / k^2."""
    steps = torch.randn(samples, width, dtype=dtype, generator=torch.Generator().manual_seed(0))
    return steps.cumsum_(1).div_(math.sqrt(width))


def sheets(record: Mapping[str, Any]) -> list[Sheet]:
    """A table for each number of samples and precision."""
    measured = dict.fromkeys((row["samples"], row["dtype"]) for row in record["times"])
    return [_sheet(record, samples, dtype, record["config"]["repetitions"]) for samples, dtype in measured]


def curves(record: Mapping[str, Any], samples: int, dtype: str) -> tuple[list[int], dict[str, list[float]]]:
    """Widths, and the median milliseconds of every part at each."""
    rows = [row for row in record["times"] if row["samples"] == samples and row["dtype"] == dtype]
    return [row["width"] for row in rows], {part: [median(row["ms"][part]) for row in rows] for part in PARTS}


def picture(record: Mapping[str, Any]) -> bytes:
    """The curves for the most samples as a PNG file, a panel for each precision."""
    samples = max(record["config"]["samples"])
    measured = dict.fromkeys(row["dtype"] for row in record["times"] if row["samples"] == samples)
    panels = [Panel(f"{dtype}, {samples:,} samples", "width", *curves(record, samples, dtype)) for dtype in measured]
    return draw(panels, "ms")


def _sheet(record: Mapping[str, Any], samples: int, dtype: str, repetitions: int) -> Sheet:
    widths, times = curves(record, samples, dtype)
    rows = [[f"{width:,}", *(number(times[part][n]) for part in PARTS)] for n, width in enumerate(widths)]
    fitted = [n for n, width in enumerate(widths) if width >= FIT_FROM]
    growth = [exponent([widths[n] for n in fitted], [values[n] for n in fitted]) for values in times.values()]
    rows.append([f"exponent from {FIT_FROM} on", *map(power, growth)])
    note = f"Medians of {repetitions}. " + "; ".join(f"{part}: {meaning}" for part, meaning in PARTS.items()) + "."
    if max(widths) > samples:
        note += f" Layers with more than {samples:,} inputs: from the matrix of the samples, where that is faster."
    return Sheet(f"refresh of a layer, ms: {samples:,} samples, {dtype}", ("width", *PARTS), rows, note)
