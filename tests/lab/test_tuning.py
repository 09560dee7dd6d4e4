"""Tuning is one search for all: equal trials, failures kept, the same record however it was interrupted or shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prong.lab.contestants import Contestant, Problem
from prong.lab.record import ForeignRecordError
from prong.lab.search import RANGES, STARTUP, Trial
from prong.lab.training import Plan
from prong.lab.tuning import final_error, tune
from tests.lab.tiny import tiny_autoencoder

CONTESTANTS = (Contestant("PRONG", "whitened"), Contestant("SGD", "whitened"), Contestant("Adam", "standard"))
PLAN = Plan(3, seed=1)
TRIALS = STARTUP + 2


@pytest.fixture
def problem(mnist: Path) -> Problem:
    return Problem(tiny_autoencoder, mnist)


def tuned(problem: Problem, path: Path, **options: Any) -> dict[str, Any]:
    return tune(CONTESTANTS, problem, PLAN, TRIALS, path, {"updates": 3}, **options)


def untimed(path: Path) -> dict[str, Any]:
    """The methods in a record, without their times."""
    methods = json.loads(path.read_text())["methods"]
    for entry in methods.values():
        for trial in entry["trials"]:
            trial["details"].pop("seconds", None)
    return methods


def test_everybody_gets_as_many_trials_and_the_best_is_chosen(problem: Problem, tmp_path: Path) -> None:
    record = tuned(problem, tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text()) == json.loads(json.dumps(record))
    assert record["config"]["trials"] == TRIALS and record["config"]["ranges"]["lr"] == list(RANGES["lr"])
    assert list(record["methods"]) == [contestant.name for contestant in CONTESTANTS]
    for contestant in CONTESTANTS:
        entry = record["methods"][contestant.name]
        assert len(entry["trials"]) == TRIALS
        assert all(tuple(trial["settings"]) == contestant.searched for trial in entry["trials"])
        finished = [trial for trial in entry["trials"] if trial["failure"] is None]
        assert min(finished, key=lambda trial: trial["value"])["settings"] == entry["chosen"]


def test_tuning_that_was_stopped_goes_on_and_comes_to_the_same(problem: Problem, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.json", tmp_path / "parts.json"
    tuned(problem, whole)

    def stop(name: str, trial: Trial) -> None:
        kept.append(trial)
        if len(kept) == 8:
            raise KeyboardInterrupt

    kept: list[Trial] = []
    with pytest.raises(KeyboardInterrupt):
        tuned(problem, parts, on_trial=stop)
    assert sum(len(entry["trials"]) for entry in untimed(parts).values()) == 8, "the last one, too, is on disk"
    assert all(entry["chosen"] is None for entry in untimed(parts).values())
    tuned(problem, parts)
    assert untimed(parts) == untimed(whole)
    assert len(json.loads(parts.read_text())["sessions"]) == 2


def test_the_number_of_workers_changes_nothing(problem: Problem, tmp_path: Path) -> None:
    one, two = tmp_path / "1.json", tmp_path / "2.json"
    tuned(problem, one)
    tuned(problem, two, workers=2)
    assert untimed(one) == untimed(two)


def test_a_foreign_record_is_refused(problem: Problem, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('{"config": {"updates": 3}, "methods": {}}')
    with pytest.raises(ForeignRecordError, match="another configuration"):
        tuned(problem, path)


def test_a_run_is_judged_by_its_last_error_and_a_divergence_by_its_first(problem: Problem) -> None:
    contestant = Contestant("SGD", "standard")
    good = final_error(problem, contestant, PLAN, {"lr": 1e-3}, None)
    bad = final_error(problem, contestant, PLAN, {"lr": 1e38}, None)
    run = problem.run(contestant, {"lr": 1e-3}, PLAN)
    assert good.value == run.rows[-1].train_error and good.failure is None
    assert bad.value == run.rows[0].train_error and bad.failure is not None and bad.failure.startswith("diverged")
