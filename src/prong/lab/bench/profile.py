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

from prong.lab.bench.contest import Contestant, Pace
from prong.lab.bench.sheets import Sheet, number, present
from prong.lab.bench.tasks import autoencoder_task
from prong.lab.methods import METHODS
from prong.lab.record import keep, provenance
from prong.lab.terminal import at_least, known, make_console, progress, writable

NAME = "profile"
CHOSEN = ("PRONG", "PRONG, cutoff", "PRONG, balanced", "SGD", "Adam")
BASELINE = "SGD"
PRODUCTS, REST, OUTSIDE = PARTS = ("products", "other operators", "outside operators")
OPERATOR = "aten::"
MULTIPLY = ("mm", "addmm", "bmm", "baddbmm", "addmm_", "addmv", "mv")


def main(
    methods: tuple[str, ...] = CHOSEN,
    batches: tuple[int, ...] = (64, 128, 1024),
    repetitions: int = 5,
    block: int = 20,
    json: Path | None = None,
) -> None:
    """Profile updates of the paper's autoencoder: products, other operators, and what is in between.

    Updates are made with windows of statistics closed, methods take turns, and torch's profiler counts the time of each
    operator by itself. What is left is Python, autograd and the profiler, which makes updates of many small operators
    look dearer than they are.

    Args:
        methods: names as in the table; SGD, the baseline, is always among them.
        batches: examples per update.
        repetitions: of every block; medians are printed.
        block: updates profiled at once.
        json: file for the record: configuration, environment, commit and every repetition.
    """
    if not batches:
        raise SystemExit("--batches are one or more")
    at_least(1, batches=batches, repetitions=repetitions, block=block)
    known("methods", methods, METHODS)
    writable(json=json)
    names = [name for name in METHODS if name in (*methods, BASELINE)]
    config: dict[str, Any] = {"methods": names, "batches": batches, "repetitions": repetitions, "block": block}
    torch.set_flush_denormal(True)  # sigmoid units make denormal numbers, which are slow
    console, rows = make_console(), list[dict[str, Any]]()
    with progress(console, "blocks", len(batches) * len(names) * (repetitions + 1)) as on_step:
        for batch in batches:
            try:
                task = autoencoder_task(batch)
            except (FileNotFoundError, ValueError) as error:
                raise SystemExit(str(error)) from error
            config["data"] = task.data
            entrants = {name: Contestant(METHODS[name], task, batch, 2 * batch, Pace()) for name in names}
            for entrant in entrants.values():
                entrant.train(2)
                if entrant.phases is not None:
                    entrant.phases.close()
                on_step()
            for _ in range(repetitions):
                for name, entrant in entrants.items():
                    rows.append({"method": name, "batch": batch, **profiled(entrant, block)})
                    on_step()
    record = {"bench": NAME, "config": config, **provenance(), "rows": rows}
    keep(json, record)
    present(console, sheets(record), json)


def profiled(entrant: Contestant, block: int) -> dict[str, Any]:
    """Milliseconds of an update by part, and the operations that the profiler counts: mostly products."""
    entrant.draw(block)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch tells of every beginning and end
    with profile(with_flops=True) as seen:
        start = perf_counter()
        entrant.work()
        total = perf_counter() - start
    ms, flops = dict.fromkeys(PARTS, 0.0), 0
    for event in seen.key_averages():
        if event.key.startswith(OPERATOR):
            ms[part_of(event.key)] += event.self_cpu_time_total / 1000 / block
            flops += event.flops
    ms[OUTSIDE] = 1000 * total / block - sum(ms.values())
    return {"ms": ms, "gigaflops": flops / block / 1e9}


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
        f"Medians of {config['repetitions']}, windows of statistics closed, under torch's profiler. Outside operators: "
        f"Python, autograd and the profiler itself. Data: {config['data']}."
    )
    found = []
    for batch in config["batches"]:
        of = {
            name: [r for r in record["rows"] if (r["method"], r["batch"]) == (name, batch)]
            for name in config["methods"]
        }
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
