"""The demo's tuning: every method's trials, the best by training error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from prong.lab.data import Digits
from prong.lab.methods import Method
from prong.lab.report import Outcome, describe
from prong.lab.training import Plan


def tune(methods: Sequence[Method], digits: Digits, plan: Plan, console: Console) -> dict[str, Any]:
    """The trials and the chosen settings of every method, by name."""
    return {method.name: _tune_one(method, digits, plan, console) for method in methods}


def _tune_one(method: Method, digits: Digits, plan: Plan, console: Console) -> dict[str, Any]:
    outcomes = []
    for settings in method.trials:
        outcomes.append(Outcome(method.name, settings, method.run(digits, plan, settings)))
        console.print(f"{method.name}, {describe(settings)}: {_ending(outcomes[-1])}", highlight=False)
    best = min((outcome for outcome in outcomes if outcome.succeeded), key=_final_error, default=None)
    return {"chosen": None if best is None else best.settings, "trials": [_trial(outcome) for outcome in outcomes]}


def _final_error(outcome: Outcome) -> float:
    return outcome.run.rows[-1].train_error


def _ending(outcome: Outcome) -> str:
    return (
        outcome.run.failure or f"training error {_final_error(outcome):.2f} after {outcome.run.rows[-1].update} updates"
    )


def _trial(outcome: Outcome) -> dict[str, Any]:
    last = outcome.run.rows[-1] if outcome.succeeded else None
    return {
        "settings": dict(outcome.settings),
        "train_error": last and last.train_error,
        "test_error": last and last.test_error,
        "failure": outcome.run.failure,
    }
