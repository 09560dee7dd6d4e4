"""`prong bench profile`: where the time of an update goes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.autograd.profiler import profile

from prong.lab.bench.amortise import CLOSED, OPEN
from prong.lab.bench.contest import Contestant, Pace
from prong.lab.bench.sheets import Sheet, number, present
from prong.lab.bench.tasks import autoencoder_task
from prong.lab.methods import METHODS, OURS
from prong.lab.record import keep, provenance
from prong.lab.terminal import at_least, each_once, known, make_console, progress, writable

NAME = "profile"
CHOSEN = ("PRONG", "PRONG, cutoff", "PRONG, defaults", "SGD", "Adam")
BASELINE = "SGD"
PRODUCTS, REST, OUTSIDE = PARTS = ("products", "other operators", "outside operators")
OPERATOR = "aten::"
IN_PLACE = "baddbmm_"  # adds to statistics; the profiler does not count its operations
MULTIPLY = ("mm", "addmm", "bmm", "baddbmm", "addmm_", "addmv", "mv", IN_PLACE)


def main(
    methods: tuple[str, ...] = CHOSEN,
    batches: tuple[int, ...] = (64, 128, 1024),
    samples: int = 12_800,
    repetitions: int = 5,
    block: int = 20,
    json: Path | None = None,
) -> None:
    """Profile updates of the paper's autoencoder: products, other operators, and what is in between.

    Methods take turns, PRONG once with its window of statistics closed and once with it open, and torch's profiler
    counts the time of each operator by itself. What is left is Python, autograd and the profiler, which makes updates
    of many small operators look dearer than they are.

    Args:
        methods: names as in the table; SGD, the baseline, is always among them.
        batches: examples per update.
        samples: examples per refresh, which are gathered while a window is open.
        repetitions: of every block; medians are printed.
        block: updates profiled at once, at most as many as a window has.
        json: file for the record: configuration, environment, commit and every repetition.
    """
    each_once(batches=batches, methods=methods)
    at_least(1, batches=batches, samples=samples, repetitions=repetitions, block=block)
    known("methods", methods, METHODS)
    writable(json=json)
    names = [name for name in METHODS if name in (*methods, BASELINE)]
    config: dict[str, Any] = {"methods": names, "batches": batches, "samples": samples, "repetitions": repetitions}
    torch.set_flush_denormal(True)  # sigmoid units make denormal numbers, which are slow
    console, rows = make_console(), list[dict[str, Any]]()
    profiles = sum(2 if name in OURS else 1 for name in names)
    with progress(console, "blocks", len(batches) * (len(names) + profiles * repetitions)) as on_step:
        for batch in batches:
            try:
                task = autoencoder_task(batch)
            except (FileNotFoundError, ValueError) as error:
                raise SystemExit(str(error)) from error
            config["data"] = task.data
            entrants = [Contestant(METHODS[name], task, batch, samples, Pace()) for name in names]
            for entrant in entrants:
                entrant.warm_up(block)
                on_step()
            for _ in range(repetitions):
                for entrant in entrants:
                    for window in (CLOSED, OPEN) if entrant.phases is not None else (CLOSED,):
                        rows.append({"method": entrant.name, "batch": batch, **profiled(entrant, window)})
                        on_step()
    record = {"bench": NAME, "config": config, **provenance(), "rows": rows}
    keep(json, record)
    present(console, sheets(record), json)


def profiled(entrant: Contestant, window: str) -> dict[str, Any]:
    """Milliseconds of an update by part, and the operations that the profiler counts: mostly products."""
    prepare, work = entrant.parts()[window]
    block = entrant.blocks[window]
    prepare()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch tells of every beginning and end
    with profile(with_flops=True, record_shapes=True) as seen:
        start = perf_counter()
        work()
        total = perf_counter() - start
    ms, flops = dict.fromkeys(PARTS, 0.0), 0
    for event in seen.key_averages(group_by_input_shape=True):
        if event.key.startswith(OPERATOR):
            ms[part_of(event.key)] += event.self_cpu_time_total / 1000 / block
            flops += event.flops
            if event.key == OPERATOR + IN_PLACE:
                (groups, rows, columns), (_, _, terms) = event.input_shapes[:2]
                flops += event.count * 2 * groups * rows * terms * columns
    ms[OUTSIDE] = 1000 * total / block - sum(ms.values())
    return {"window": window, "block": block, "ms": ms, "gigaflops": flops / block / 1e9}


def part_of(operator: str) -> str:
    """Where an operator of torch belongs."""
    return PRODUCTS if operator.removeprefix(OPERATOR) in MULTIPLY else REST


def sheets(record: Mapping[str, Any]) -> list[Sheet]:
    """A table for every batch: the parts, and the operations relative to SGD's."""
    config = record["config"]
    headings = (
        "method",
        *(f"{part}, ms" for part in PARTS),
        "together",
        "times SGD",
        "operations, Gflop",
        "times SGD's",
    )
    note = (
        f"Medians of {config['repetitions']}, under torch's profiler; 'gathering': while a window of "
        f"{config['samples']:,} samples is open. Outside operators: Python, autograd and the profiler itself. "
        f"Data: {config['data']}."
    )
    found = []
    for batch in config["batches"]:
        of: dict[str, list[Any]] = {}
        for row in record["rows"]:
            if row["batch"] == batch:
                of.setdefault(row["method"] + (", gathering" if row["window"] == OPEN else ""), []).append(row)
        ms = {name: [median(row["ms"][part] for row in rows) for part in PARTS] for name, rows in of.items()}
        work = {name: rows[0]["gigaflops"] for name, rows in of.items()}
        rows = [
            [
                name,
                *map(number, parts),
                number(sum(parts)),
                f"{sum(parts) / sum(ms[BASELINE]):.2f}",
                f"{work[name]:.3f}",
                f"{work[name] / work[BASELINE]:.2f}",
            ]
            for name, parts in ms.items()
        ]
        found.append(Sheet(f"autoencoder, batch {batch}: where the time of an update goes", headings, rows, note))
    return found
