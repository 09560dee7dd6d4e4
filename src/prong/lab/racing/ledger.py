"""The book of a race: what every contestant has done, and what comes next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from prong.lab.contestants import Contestant, Problem
from prong.lab.methods import Settings
from prong.lab.racing.clock import Pace
from prong.lab.racing.rules import TUNING_SEED, Rules
from prong.lab.racing.search import Trial, best, next_trial
from prong.lab.training import Plan, Run


def blank(contestant: Contestant, rules: Rules, clock: Mapping[str, Pace]) -> dict[str, Any]:
    """A contestant's part of the record, with nothing done yet. Who cannot run has no updates."""
    pace = clock[contestant.method_name]
    cap = 0 if pace.failure else rules.updates(pace)
    who = {"method": contestant.method_name, "initialisation": contestant.initialisation}
    return {**who, "cap": cap, "chosen": None, "trials": [], "runs": {}}


@dataclass(frozen=True)
class SeededRun:
    """A run that counts."""

    seed: int
    run: Run


class Ledger:
    """The contestants' part of a record; what is added is added to the record itself."""

    def __init__(self, rules: Rules, problem: Problem, entries: dict[str, dict[str, Any]]) -> None:
        self.rules, self.problem, self.entries = rules, problem, entries
        self.contestants = rules.contestants()

    @property
    def total(self) -> int:
        """Trials and runs of all."""
        return (self.rules.trials + len(self.rules.seeds)) * len(self.entries)

    @property
    def done(self) -> int:
        """Those made, or never to be made."""
        each = self.total // len(self.entries)
        return sum(
            each if self.next_job(name) is None else len(entry["trials"]) + len(entry["runs"])
            for name, entry in self.entries.items()
        )

    def next_job(self, name: str) -> Callable[[], Trial | SeededRun] | None:
        """The next trial; after the last of them the runs, if there are settings to run with."""
        entry, contestant, rules = self.entries[name], self.contestants[name], self.rules
        cap = entry["cap"]
        if cap == 0:
            return None
        history = [Trial(**trial) for trial in entry["trials"]]
        if len(history) < rules.trials:
            objective = partial(time_trial, self.problem, contestant, rules, cap)
            return partial(next_trial, objective, contestant.space, TUNING_SEED, history)
        left = [seed for seed in rules.seeds if str(seed) not in entry["runs"]]
        if not left or entry["chosen"] is None:
            return None
        plan = rules.plan(cap, left[0], rules.thresholds[-1])
        return partial(seeded_run, self.problem, contestant, entry["chosen"], plan)

    def add(self, name: str, result: Trial | SeededRun) -> None:
        """Put down what a job came to."""
        if isinstance(result, Trial):
            add_trial(self.entries[name], result, self.rules.trials)
        else:
            self.entries[name]["runs"][str(result.seed)] = asdict(result.run)


def seeded_run(problem: Problem, contestant: Contestant, settings: Settings, plan: Plan) -> SeededRun:
    """A run that counts."""
    return SeededRun(plan.seed, problem.run(contestant, settings, plan))


def time_trial(
    problem: Problem, contestant: Contestant, rules: Rules, cap: int, settings: Settings, best: Trial | None
) -> Trial:
    """A run to the target, given up early where it is not going to win.

    That is when it has made as many updates as the best so far needed, or when it is behind the best at a hurdle.
    """
    cap = limit = rules.trial_updates(cap)
    places = rules.hurdles_at(cap)
    hurdles: dict[int, float] = {}
    if best is not None:
        if best.details["reached"]:
            limit = max(rules.every, int(best.value))
        hurdles = {at: rules.behind * error for at, error in best.details["hurdles"] if at < limit}
    run = problem.run(contestant, settings, rules.plan(limit, TUNING_SEED, rules.target, hurdles))
    trial = judged(settings, run, rules.target, cap)
    passed = [(row.update, row.train_error) for row in run.rows if row.update in places]
    return replace(trial, details={**trial.details, "hurdles": passed})


def judged(settings: Settings, run: Run, target: float, cap: int) -> Trial:
    """A trial's value: updates to the target, or `cap (1 + error / target)` with the last error where that was missed.

    A run that diverged counts with its first error.
    """
    row = run.reaching(target)
    last = run.rows[-1] if run.rows else None
    details = {
        "reached": row is not None,
        "stopped": row is None and run.failure is None and last is not None and last.update < cap,
        "updates": last and last.update,
        "error": last and last.train_error,
        "seconds": last and last.seconds,
    }
    if run.failure is not None or last is None:
        return Trial(settings, cap * (1 + run.first_error / target), run.failure, details)
    value = cap * (1 + last.train_error / target) if row is None else float(row.update)
    return Trial(settings, value, details=details)


def add_trial(entry: dict[str, Any], trial: Trial, trials: int) -> None:
    """Put a trial into a contestant's part of a record; when it was the last, also the settings of the best."""
    entry["trials"].append(asdict(trial))
    if len(entry["trials"]) == trials:
        chosen = best([Trial(**trial) for trial in entry["trials"]])
        entry["chosen"] = None if chosen is None else dict(chosen.settings)
