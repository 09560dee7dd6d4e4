"""`prong bench compiled`: what torch.compile makes of an update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from prong.lab.bench.contest import Contestant, Pace
from prong.lab.bench.sheets import Sheet, number, present
from prong.lab.bench.tasks import autoencoder_task
from prong.lab.methods import METHODS
from prong.lab.record import keep, provenance
from prong.lab.terminal import at_least, known, make_console, progress, writable
from prong.lab.timing import interleaved

NAME = "compiled"
EAGER, COMPILED = "eager", "compiled"
CHOSEN = ("PRONG", "PRONG, cutoff", "PRONG, defaults", "SGD", "Adam")
BASELINE = "SGD"


def main(
    methods: tuple[str, ...] = CHOSEN, batch: int = 128, repetitions: int = 5, block: int = 20, json: Path | None = None
) -> None:
    """Time an update of the paper's autoencoder with the model compiled by torch.compile, beside the same one eager.

    Updates are timed with windows of statistics closed. Compiling is timed by itself, for each method from nothing:
    methods whose forwards are the same would share what one of them compiled.

    Args:
        methods: names as in the table; SGD, the baseline, is always among them.
        batch: examples per update.
        repetitions: of every block; medians are printed.
        block: updates timed at once.
        json: file for the record: configuration, environment, commit and every repetition.
    """
    at_least(1, batch=batch, repetitions=repetitions, block=block)
    known("methods", methods, METHODS)
    writable(json=json)
    names = [name for name in METHODS if name in (*methods, BASELINE)]
    try:
        task = autoencoder_task(batch)
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(str(error)) from error
    config = {"methods": names, "batch": batch, "repetitions": repetitions, "block": block, "data": task.data}
    torch._dynamo.config.recompile_limit = 1000  # all of these models share code; by default the ninth runs eagerly
    torch.set_flush_denormal(True)  # sigmoid units make denormal numbers, which are slow
    console = make_console()
    ways = [(name, way) for name in names for way in (EAGER, COMPILED)]
    entrants, first, graphs = {}, {}, {}
    with progress(console, "blocks", len(ways) * (repetitions + 2)) as on_step:
        for name, way in ways:
            entrant = Contestant(METHODS[name], task, batch, 2 * batch, Pace())
            entrant.train(2)
            if entrant.phases is not None:
                entrant.phases.close()
            if way == COMPILED:
                entrant.model = cast(nn.Module, torch.compile(entrant.model))
                first[name], graphs[name] = _compiled(entrant)
            entrants[f"{name}: {way}"] = entrant
            on_step()
        prepare = {key: _drawing(entrant, block) for key, entrant in entrants.items()}
        seconds = interleaved({k: entrant.work for k, entrant in entrants.items()}, repetitions, on_step, prepare)
    times = {
        name: {way: [1000 * t / block for t in seconds[f"{name}: {way}"]] for way in (EAGER, COMPILED)}
        for name in names
    }
    record = {"bench": NAME, "config": config, **provenance(), "ms": times, "compile_seconds": first, "graphs": graphs}
    keep(json, record)
    present(console, sheets(record), json)


def _compiled(entrant: Contestant) -> tuple[float, int]:
    """The seconds of the first two updates when nothing is compiled yet, and in how many graphs the forward is."""
    torch.compiler.reset()
    counters.clear()
    with fresh_cache():  # nor kept on disk by somebody before
        start = perf_counter()
        entrant.train(2)
        seconds = perf_counter() - start
    return seconds, counters["stats"]["unique_graphs"]


def _drawing(entrant: Contestant, block: int) -> Callable[[], None]:
    return lambda: entrant.draw(block)


def sheets(record: Mapping[str, Any]) -> list[Sheet]:
    """One table: every method both ways, each beside SGD the same way."""
    ms = {name: {way: median(values) for way, values in ways.items()} for name, ways in record["ms"].items()}
    rows = [
        [
            name,
            *(number(ways[way]) for way in (EAGER, COMPILED)),
            *(f"{ways[way] / ms[BASELINE][way]:.2f}" for way in (EAGER, COMPILED)),
            number(record["compile_seconds"][name]),
            str(record["graphs"][name]),
        ]
        for name, ways in ms.items()
    ]
    config = record["config"]
    headings = (
        "method",
        "eager, ms",
        "compiled, ms",
        "times SGD, eager",
        "times SGD, compiled",
        "to compile, s",
        "graphs",
    )
    note = (
        f"Medians of {config['repetitions']}, windows of statistics closed. To compile: with the first two updates. "
        f"Graphs: in how many pieces the forward is compiled. "
        f"Data: {config['data']}."
    )
    return [Sheet(f"autoencoder, batch {config['batch']}: an update with torch.compile", headings, rows, note)]
