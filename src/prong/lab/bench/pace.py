"""`prong bench pace`: what an update of each method costs on the autoencoder, for the time axis of its report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from prong.lab.bench.amortise import AllIn, averages
from prong.lab.bench.contest import measure, steps
from prong.lab.bench.sheets import NONE, Sheet, number, percent, present
from prong.lab.bench.step_cost import unavailable
from prong.lab.bench.tasks import autoencoder_task
from prong.lab.contestants import Problem, data_folder
from prong.lab.methods import KEYS, METHODS, OURS, Schedule
from prong.lab.models import autoencoder
from prong.lab.pool import one_thread
from prong.lab.racing.clock import Pace, paces
from prong.lab.record import keep, provenance
from prong.lab.terminal import at_least, known, make_console, progress, writable

EXPERIMENT = "autoencoder"


def main(
    methods: tuple[str, ...] = tuple(KEYS),
    batch: int = 128,
    period: int = 1000,
    samples: int = 12_800,
    repetitions: int = 3,
    json: Path | None = None,
) -> None:
    """Time updates of the paper's autoencoder, all methods in turn, with one thread.

    Runs that are made side by side, or while something else happens, have clocks of little worth. `prong report` takes
    the record beside them, and puts their rows at the times that it tells. An update of PRONG is the average over a
    period, as in `prong bench step-cost`; what its first period takes beyond that is measured by making it.

    Args:
        methods: their keys.
        batch: examples per update.
        period: updates between PRONG's refreshes.
        samples: examples behind each.
        repetitions: of every block; medians are printed.
        json: file for the record.
    """
    at_least(1, batch=batch, period=period, samples=samples, repetitions=repetitions)
    known("methods", methods, KEYS)
    writable(json=json)
    names = {key: KEYS[key].name for key in methods}
    console, problem = make_console(), Problem(autoencoder, data_folder(), Schedule(period, samples))
    config = {"batch": batch, "period": period, "samples": samples, "repetitions": repetitions, "methods": methods}
    try:
        config["data"] = problem.source
        task = autoencoder_task(batch)
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(str(error)) from error
    timed = [METHODS[name] for name in names.values() if name not in unavailable()]
    total = len(names) * (repetitions + 1) + steps(timed, repetitions)
    with one_thread(), progress(console, "blocks", total) as on_step:
        parts = measure(task, batch, timed, samples=samples, repetitions=repetitions, on_step=on_step)
        costs = averages(parts, config)
        totals = {name: values for name, (_, values) in costs.items()}
        clock = paces(list(names.values()), problem, batch, repetitions, on_block=on_step, known=totals)
        made_with = provenance()
    shares = {name: _shares(cost) for name, (cost, _) in costs.items() if name in OURS}
    entries = {key: {**asdict(clock[name]), **shares.get(name, {})} for key, name in names.items()}
    record = {"experiment": EXPERIMENT, "runs": [], "clock": entries, "config": config, **made_with}
    keep(json, record)
    present(console, [sheet(record)], json)


def _shares(cost: AllIn) -> dict[str, float]:
    """Which parts of the time of a method that refreshes go into statistics and refreshes."""
    return {"statistics_share": cost.statistics / cost.total, "refresh_share": cost.refresh / cost.total}


def sheet(record: dict[str, Any]) -> Sheet:
    """Every method with its costs."""
    fields = ("ms_per_update", "start_up_seconds", "initialisation_seconds", "failure")
    rows = []
    for key, entry in record["clock"].items():
        pace = Pace(**{field: entry[field] for field in fields})
        costs = ["-", "-", "-"]
        if pace.failure is None:
            initialisation = median(pace.initialisation_seconds)
            costs = [number(pace.milliseconds), number(pace.start_up_seconds), number(initialisation)]
        shares = [
            percent(entry[name], 1.0) if name in entry else NONE for name in ("statistics_share", "refresh_share")
        ]
        rows.append([key, *costs, *shares, pace.failure or NONE])
    config = record["config"]
    note = f"Medians of {config['repetitions']}, T {config['period']:,}, {config['samples']:,} samples, one thread."
    headings = ("method", "ms per update", "start-up, s", "whitened init, s", "statistics", "refresh", "failure")
    return Sheet(
        f"autoencoder, batch {config['batch']}: what an update costs", headings, rows, f"{note} {config['data']}."
    )
