"""`prong bench watching`: what a measurement of `prong.monitor` costs, in updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch

from prong.analysis.monitor import Monitor
from prong.lab.bench.contest import Contestant, Pace
from prong.lab.bench.sheets import Sheet, number, present
from prong.lab.bench.tasks import autoencoder_task
from prong.lab.methods import METHODS
from prong.lab.record import keep, provenance
from prong.lab.terminal import at_least, each_once, make_console, progress, writable
from prong.lab.timing import interleaved

NAME = "watching"
PLAIN = "no monitor"
KINDS: Mapping[str, dict[str, Any] | None] = {
    PLAIN: None,
    "monitor at rest": {"when": {1 << 40}},
    "measured": {"when": 1},
    "measured, whitened_condition=False": {"when": 1, "whitened_condition": False},
}


def main(
    batches: tuple[int, ...] = (64, 128, 256), repetitions: int = 5, block: int = 5, json: Path | None = None
) -> None:
    """Time updates of PRONG on the paper's autoencoder with and without `prong.monitor.Monitor` measuring each of them.

    Args:
        batches: examples per update.
        repetitions: of every block; medians are printed.
        block: updates timed at once.
        json: file for the record: configuration, environment, commit and every repetition.
    """
    at_least(1, batches=batches, repetitions=repetitions, block=block)
    each_once(batches=batches)
    writable(json=json)
    try:
        task = autoencoder_task(max(batches))
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(str(error)) from error
    config = {"batches": batches, "repetitions": repetitions, "block": block, "data": task.data}
    record: dict[str, Any] = {"bench": NAME, "config": config, **provenance(), "times": []}
    torch.set_flush_denormal(True)  # sigmoid units make denormal numbers, which are slow
    console = make_console()
    with progress(console, "blocks", len(batches) * len(KINDS) * (repetitions + 1)) as on_step:
        for batch in batches:
            entrants = {kind: _entrant(task, batch, options) for kind, options in KINDS.items()}
            work = {kind: entrant.work for kind, entrant in entrants.items()}
            prepare = {kind: _drawing(entrant, block) for kind, entrant in entrants.items()}
            seconds = interleaved(work, repetitions, on_step, prepare)
            ms = {kind: [1000 * t / block for t in times] for kind, times in seconds.items()}
            record["times"].append({"batch": batch, "ms": ms})
            keep(json, record, finished=False)
    keep(json, record)
    present(console, sheets(record), json)


def _entrant(task: Any, batch: int, options: dict[str, Any] | None) -> Contestant:
    entrant = Contestant(METHODS["PRONG"], task, batch, 2 * batch, Pace())
    entrant.train(2)
    assert entrant.phases is not None
    entrant.phases.close()
    if options is not None:
        Monitor(entrant.model, entrant.optimizer, **options)  # type: ignore[arg-type]
    return entrant


def _drawing(entrant: Contestant, block: int) -> Callable[[], None]:
    return lambda: entrant.draw(block)


def sheets(record: Mapping[str, Any]) -> list[Sheet]:
    """One table: milliseconds of an update, and what measuring it adds, in updates."""
    rows = []
    for entry in record["times"]:
        ms = {kind: median(times) for kind, times in entry["ms"].items()}
        extra = [f"{(ms[kind] - ms[PLAIN]) / ms[PLAIN]:+.2f}" for kind in KINDS if kind != PLAIN]
        rows.append([str(entry["batch"]), number(ms[PLAIN]), *extra])
    headings = ("batch", "update, ms", *(f"{kind}, updates" for kind in KINDS if kind != PLAIN))
    note = f"Medians of {record['config']['repetitions']}. Data: {record['config']['data']}."
    return [Sheet("autoencoder: what a monitor adds to an update", headings, rows, note)]
