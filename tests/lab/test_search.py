"""One search for all: same ranges, same number of trials; the same seed and history give the same proposal."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest

from prong.lab.methods import Settings
from prong.lab.racing.search import STARTUP, Space, Trial, best, next_trial, propose, search

RATES = {"lr": (1e-5, 1.0)}
BOTH = {**RATES, "eps": (1e-3, 1.0)}


def valley(settings: Settings, _: Trial | None) -> Trial:
    """Best at lr 0.003 and eps 0.03; above lr 0.03 it diverges, from an error of 50."""
    if settings["lr"] > 0.03:
        return Trial(settings, 50.0, "diverged at update 3: the loss is nan")
    distance = abs(math.log10(settings["lr"] / 0.003)) + abs(math.log10(settings.get("eps", 0.03) / 0.03))
    return Trial(settings, 1 + distance)


def through_json(trials: list[Trial]) -> list[Trial]:
    return [Trial(**trial) for trial in json.loads(json.dumps([asdict(trial) for trial in trials]))]


@pytest.mark.parametrize("space", [RATES, BOTH])
def test_every_trial_is_within_its_range_and_has_three_digits(space: Space) -> None:
    trials = search(valley, space, 30, seed=0)
    assert len(trials) == 30, "however many settings there are"
    for trial in trials:
        assert list(trial.settings) == list(space)
        assert all(space[name][0] <= value <= space[name][1] for name, value in trial.settings.items())
        assert all(value == float(f"{value:.3g}") for value in trial.settings.values())


def test_the_first_trials_spread_over_the_decades() -> None:
    first = [math.log10(propose([], RATES, seed)["lr"]) for seed in range(400)]
    assert [sum(k <= x < k + 1 for x in first) for k in range(-5, 0)] == pytest.approx([80] * 5, abs=30)


def test_the_same_seed_gives_the_same_search_and_another_another() -> None:
    assert search(valley, BOTH, 12, seed=1) == search(valley, BOTH, 12, seed=1)
    assert search(valley, BOTH, 1, seed=1) != search(valley, BOTH, 1, seed=2)


@pytest.mark.parametrize("stopped_after", [1, STARTUP, 9])
def test_a_search_goes_on_from_its_record_as_if_it_had_not_been_stopped(stopped_after: int) -> None:
    whole = search(valley, BOTH, 12, seed=1)
    rest: list[Trial] = []
    continued = search(valley, BOTH, 12, seed=1, history=through_json(whole[:stopped_after]), on_trial=rest.append)
    assert continued == whole and rest == whole[stopped_after:]


def test_a_search_made_step_by_step_is_the_same_search() -> None:
    steps: list[Trial] = []
    for _ in range(8):
        steps.append(next_trial(valley, BOTH, 1, through_json(steps)))
    assert steps == search(valley, BOTH, 8, seed=1)


def test_what_is_proposed_depends_on_what_came_of_the_trials() -> None:
    trials = search(valley, BOTH, 10, seed=1)
    otherwise = [Trial(trial.settings, -trial.value) for trial in trials]
    assert propose(trials, BOTH, 1) != propose(otherwise, BOTH, 1)


def test_the_sampler_learns() -> None:
    """After its random trials it looks where it was good, and not where it diverged."""
    searches = [search(valley, RATES, 15, seed) for seed in range(8)]
    later = [trial for trials in searches for trial in trials[STARTUP:]]
    assert sum(trial.failure is not None for trial in later) / len(later) < 0.2  # at random: 0.3
    assert all(best(trials).value < 1.4 for trials in searches)


def test_every_trial_is_handed_over_before_the_next_begins() -> None:
    events: list[str] = []

    def objective(settings: Settings, leader: Trial | None) -> Trial:
        events.append("begun")
        return valley(settings, leader)

    search(objective, BOTH, 3, seed=0, on_trial=lambda trial: events.append("kept"))
    assert events == ["begun", "kept"] * 3


def test_failures_are_kept_with_their_reason_and_are_never_the_best() -> None:
    trials = search(valley, RATES, 20, seed=0)
    failed = [trial for trial in trials if trial.failure]
    assert failed and all(trial.value == 50 and trial.failure.startswith("diverged") for trial in failed)
    assert best([Trial({"lr": 1.0}, 1.0, "diverged"), Trial({"lr": 0.1}, 2.0)]) == Trial({"lr": 0.1}, 2.0)
    assert best(failed) is None and best([]) is None


def test_of_equals_the_first_is_the_best() -> None:
    assert best([Trial({"lr": 0.1}, 2.0), Trial({"lr": 0.2}, 2.0)]) == Trial({"lr": 0.1}, 2.0)


def test_the_objective_is_told_the_best_so_far() -> None:
    told: list[Trial | None] = []

    def objective(settings: Settings, leader: Trial | None) -> Trial:
        told.append(leader)
        return valley(settings, leader)

    trials = search(objective, BOTH, 6, seed=0)
    assert told == [best(trials[:k]) for k in range(6)]


def test_a_value_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a finite value"):
        search(lambda settings, leader: Trial(settings, math.nan, "diverged"), BOTH, 1, seed=0)
