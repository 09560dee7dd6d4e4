"""Predictions side by side: more and more workers, wider and wider layers."""

from __future__ import annotations

from prong.lab.bench.sheets import Sheet, number
from prong.lab.planning.blocking import fitted, in_blocks
from prong.lab.planning.command import look
from prong.lab.planning.machines import machine
from prong.lab.planning.prediction import Setting, predict
from prong.lab.planning.sheets import milliseconds, size
from prong.lab.planning.subjects import subject

WORKERS = (1, 2, 4, 8, 64, 1024)
PERIOD, SAMPLES, BUDGET = 1000, 12_800, 2.0
BLOCKS = (None, 4096, 1024, 256, 64, 1)


def workers_sheet(model: str, examples: int, device: str, dtype: str) -> Sheet:
    """A model on more and more workers, each with as many examples."""
    where, traced = machine(device), look(subject(model), examples, dtype)
    rows = []
    for workers in WORKERS:
        setting = Setting(workers, PERIOD, SAMPLES, dtype)
        chosen = fitted(traced, where, setting, BUDGET)
        p = predict(chosen, where, setting)
        widest = max(place.layout.inputs for place in chosen.places)
        block = max(place.layout.features for place in chosen.places)
        rows.append(
            [
                f"{workers:,}",
                *map(milliseconds, (p.sgd, p.closed, p.refresh, p.total.factorisation, p.reduction + p.spreading)),
                size(p.gradient_bytes),
                size(p.refresh_bytes),
                size(p.sgd_memory),
                size(p.memory),
                "whole" if block == widest else f"{block:,}",
                f"{p.times_sgd:.2f}",
            ]
        )
    headings = (
        "workers",
        "SGD, ms",
        "PRONG, ms",
        "refresh, ms",
        "of it factorisation",
        "and exchange",
        "sent, update",
        "sent, refresh",
        "memory, SGD",
        "PRONG",
        "largest block",
        "all-in, times SGD",
    )
    note = f"{_every()} Per worker. {where.name}: data sheet, not measured."
    return Sheet(f"{model}, {examples} examples per worker, {where.name}, {dtype}", headings, rows, note)


def width_sheet(width: int, device: str, dtype: str, workers: int = 8, examples: int = 1024) -> Sheet:
    """A square layer four times over, whole and in smaller and smaller blocks."""
    where = machine(device)
    traced = look(subject(f"mlp:{width}x4"), examples, dtype)
    setting = Setting(workers, PERIOD, SAMPLES, dtype)
    rows = []
    for block in BLOCKS:
        if block is not None and block >= width:
            continue
        p = predict(in_blocks(traced, block), where, setting)
        rows.append(
            [
                "whole" if block is None else "diagonal" if block == 1 else f"blocks of {block:,}",
                size(p.total.held),
                size(p.total.window),
                size(p.memory),
                *map(milliseconds, (p.total.preconditioning, p.total.statistics, p.total.factorisation)),
                size(p.refresh_bytes),
                f"{p.times_sgd:.2f}",
            ]
        )
    headings = (
        "whitening",
        "P",
        "statistics",
        "memory, at most",
        "preconditioning, ms",
        "statistics, ms",
        "factorisation, ms",
        "sent, refresh",
        "all-in, times SGD",
    )
    sgd = predict(traced, where, setting)
    note = (
        f"SGD: {milliseconds(sgd.sgd)} ms an update, {size(sgd.sgd_memory)}. {_every()} Per worker. "
        f"{where.name}: data sheet, not measured."
    )
    title = f"four layers of width {width:,}, {number(examples)} examples on each of {workers} workers, {where.name}"
    return Sheet(title, headings, rows, note)


def _every() -> str:
    return f"All-in: a refresh from {SAMPLES:,} samples every {PERIOD:,} updates."
