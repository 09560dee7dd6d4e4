"""What a sweep says: of every trial as it is settled, and in the end what it chose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from optuna.trial import FrozenTrial
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from prong.lab.methods import RECORDED
from prong.lab.sweeps.board import Board


def method_entry(board: Board) -> dict[str, Any]:
    """What a record says of a method: all trials that came to something, and the best of them."""
    trials = [_trial_entry(trial) for trial in board.settled()]
    good = [trial for trial in trials if trial["failure"] is None]
    best = min(good, key=lambda trial: float(trial["value"]), default=None)
    return {
        "study": board.name,
        "budget": board.search.budget,
        "chosen": None if best is None else best["settings"],
        "value": None if best is None else best["value"],
        "failures": len(trials) - len(good),
        "trials": trials,
    }


def _trial_entry(trial: FrozenTrial) -> dict[str, Any]:
    noted = trial.user_attrs
    value = trial.value if "failure" not in noted else None
    details = {name: noted.get(name) for name in ("seconds", "updates", "environment")}
    return {"settings": noted["settings"], "value": value, "failure": noted.get("failure"), **details}


def in_words(settings: Mapping[str, Any] | None) -> str:
    """Settings in a line."""
    if settings is None:
        return "none: all failed"
    return ", ".join(
        f"{name} {value:.4g}" if name != "initialisation" else str(value) for name, value in settings.items()
    )


def table(methods: Mapping[str, Mapping[str, Any]], measure: str) -> Table:
    """The best settings of every method."""
    shown = Table(title=f"chosen by {measure.replace('_', ' ')}")
    for heading in ("method", "best settings"):
        shown.add_column(heading)
    for heading in ("value", "trials", "failed"):
        shown.add_column(heading, justify="right")
    for key, found in methods.items():
        value = "" if found["value"] is None else f"{found['value']:.4g}"
        done = f"{len(found['trials'])}"
        shown.add_row(RECORDED[key].name, in_words(found["chosen"]), value, done, f"{found['failures']}")
    return shown


@contextmanager
def shown_progress(console: Console, methods: Mapping[str, Any]) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A function to call with all methods' entries whenever some have changed: it moves a bar, or prints lines."""
    total = sum(found["budget"] for found in methods.values())
    columns = (TextColumn("trials"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    told = {key: len(found["trials"]) for key, found in methods.items()}
    with Progress(*columns, TextColumn("{task.description}"), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, completed=sum(told.values()))

        def tell(now: Mapping[str, Any]) -> None:
            for key, found in now.items():
                if len(found["trials"]) == told[key]:
                    continue
                told[key] = len(found["trials"])
                best = "none yet" if found["value"] is None else f"{found['value']:.4g}"
                line = f"{key}: {told[key]} of {found['budget']} trials, {found['failures']} failed, best {best}"
                bar.update(task, completed=sum(told.values()), description=line)
                if not console.is_terminal:
                    console.print(line, highlight=False, soft_wrap=True)

        yield tell
