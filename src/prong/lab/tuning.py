"""The demo's tuning: one search for every contestant, by the training error at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from prong.lab.contestants import Contestant, Problem
from prong.lab.methods import Settings
from prong.lab.pool import one_thread, side_by_side
from prong.lab.record import resume, write_json
from prong.lab.search import RANGES, STARTUP, Trial, best, next_trial
from prong.lab.training import Plan

SPACE: Mapping[str, Any] = {"ranges": RANGES, "random_trials": STARTUP}  # what a record says about the search


def tune(
    contestants: Sequence[Contestant],
    problem: Problem,
    plan: Plan,
    trials: int,
    path: Path,
    config: Mapping[str, Any],
    workers: int = 1,
    on_trial: Callable[[str, Trial], None] = lambda name, trial: None,
) -> dict[str, Any]:
    """The record of all trials and of what each contestant had best, also at `path`, where it grows trial by trial.

    Raises:
        ForeignRecordError: the file is of another configuration.
    """
    with one_thread():
        record = resume(path, {**config, **SPACE, "trials": trials})
    methods = record.setdefault("methods", {c.name: {"chosen": None, "trials": []} for c in contestants})
    by_name = {contestant.name: contestant for contestant in contestants}

    def next_job(name: str) -> Callable[[], Trial] | None:
        history = [Trial(**trial) for trial in methods[name]["trials"]]
        if len(history) == trials:
            return None
        objective = partial(final_error, problem, by_name[name], plan)
        return partial(next_trial, objective, by_name[name].searched, plan.seed, history)

    def keep(name: str, trial: Trial) -> None:
        add_trial(methods[name], trial, trials)
        write_json(path, record)
        on_trial(name, trial)

    side_by_side(by_name, next_job, keep, workers)
    return record


def add_trial(entry: dict[str, Any], trial: Trial, trials: int) -> None:
    """Put a trial into a contestant's part of a record; when it was the last, also the settings of the best."""
    entry["trials"].append(asdict(trial))
    if len(entry["trials"]) == trials:
        chosen = best([Trial(**trial) for trial in entry["trials"]])
        entry["chosen"] = None if chosen is None else dict(chosen.settings)


def final_error(problem: Problem, contestant: Contestant, plan: Plan, settings: Settings, _: Trial | None) -> Trial:
    """A whole run, judged by its last training error; by the first if it diverged."""
    run = problem.run(contestant, settings, plan)
    if run.failure is not None:
        return Trial(settings, run.first_error, run.failure)
    last = run.rows[-1]
    return Trial(settings, last.train_error, details={"test_error": last.test_error, "seconds": last.seconds})
