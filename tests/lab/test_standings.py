"""Medians, seconds and ratios are what can be reckoned by hand, and what was not reached is not invented."""

from __future__ import annotations

import json
import math

import pytest

from prong.lab.contestants import Contestant
from prong.lab.racing.clock import Pace
from prong.lab.racing.standings import Standing, ratios, standings, summary
from prong.lab.training import Row, Run

PACE = Pace([10.0], 0.5, [2.0])  # of ten milliseconds an update; half a second, and two where whitened, before


def run(*errors: float, failure: str | None = None) -> Run:
    """Errors after 0, 100, 200, ... updates, on a machine that was ten times as slow as the clock says."""
    return Run([Row(100 * n, 10.0 * n, error, error) for n, error in enumerate(errors)], failure)


FAST = Standing(
    Contestant("PRONG", "whitened"),
    PACE,
    400,
    {"lr": 0.1, "eps": 0.1},
    {2: run(90, 7), 3: run(90, 9, 8, 6), 4: run(90, 9, 7)},
)
SLOW = Standing(Contestant("Adam", "whitened"), PACE, 400, {"lr": 0.1, "eps": 0.2}, {2: run(90, 50, 20, 9, 6.5)})
NEVER = Standing(Contestant("Adam", "standard"), PACE, 400, {"lr": 0.1}, {2: run(90, 60, 50, 40, 30)})
LOST = Standing(
    Contestant("SGD", "standard"), PACE, 400, {"lr": 1.0}, {2: run(90, 9, failure="diverged at update 150: nan")}
)
HOPELESS = Standing(Contestant("RMSprop", "standard"), PACE, 400)
ABSENT = Standing(Contestant("Shampoo", "standard"), Pace(failure="cannot be run here: memory"))
FIELD = [FAST, SLOW, NEVER, LOST, HOPELESS, ABSENT]


def test_updates_are_the_median_over_seeds() -> None:
    assert [row.update for row in FAST.reaching(7) if row] == [100, 300, 200]
    assert FAST.updates(7) == 200
    assert FAST.updates(6) == math.inf, "two of three did not get there"
    assert HOPELESS.updates(7) == math.inf


def test_seconds_are_those_of_the_clock() -> None:
    assert FAST.seconds(7) == pytest.approx(2 + 0.5 + 2.0)
    assert LOST.seconds(9) == pytest.approx(0.5 + 1.0)
    assert NEVER.seconds(7) == math.inf


def test_the_median_run_is_drawn_on_the_clock() -> None:
    median = FAST.median_run(7)
    assert [(row.update, row.train_error) for row in median.rows] == [(0, 90), (100, 9), (200, 7)]
    assert [row.seconds for row in median.rows] == pytest.approx([2.5, 3.5, 4.5])
    assert FAST.median_run(1).rows[-1].train_error == 7, "by the last error, where none arrives"


def test_failures_are_told() -> None:
    assert ABSENT.failure == "cannot be run here: memory" and HOPELESS.failure == "every trial failed"
    assert LOST.failure is None and LOST.failures == {"seed 2": "diverged at update 150: nan"}
    assert FAST.failures == {}


def test_ratios_are_of_the_best_peer_to_our_best() -> None:
    found = {(ratio.group, ratio.measure): ratio for ratio in ratios(FIELD, [7.0])}
    assert len(found) == 6
    whitened = found["best peer, whitened init", "updates"]
    assert (whitened.value, whitened.at_least) == (2.0, False)
    assert (whitened.peer, whitened.ours) == ("Adam, whitened init", "PRONG, whitened init")
    assert found["best peer, whitened init", "seconds"].value == pytest.approx(6.5 / 4.5)


def test_who_does_not_arrive_gives_a_bound_unless_it_diverged() -> None:
    found = {(ratio.group, ratio.measure): ratio for ratio in ratios(FIELD, [7.0])}
    standard = found["best peer, standard init", "updates"]
    assert (standard.value, standard.at_least, standard.peer) == (2.0, True, None)
    assert found["best peer, standard init", "seconds"].value == pytest.approx(4.5 / 4.5)
    assert found["SGD", "updates"].value is None


def test_who_was_stopped_before_our_best_arrived_tells_nothing() -> None:
    stopped = Standing(Contestant("Muon", "standard"), PACE, 100, {"lr": 0.1}, {2: run(90, 60)})
    found = {ratio.measure: ratio.value for ratio in ratios([FAST, stopped], [7.0])}
    assert found == {"seconds": None, "updates": None}


def test_without_our_own_arrival_there_is_no_ratio() -> None:
    assert all(ratio.value is None for ratio in ratios(FIELD, [1.0]))
    assert [ratio.value for ratio in ratios([SLOW], [7.0])] == [None, None]
    assert {ratio.group for ratio in ratios([FAST, SLOW], [7.0])} == {"best peer, whitened init"}


def test_a_record_is_read_back_and_summed_up() -> None:
    def entry(standing: Standing) -> dict:
        runs = {str(s): {"rows": [vars(row) for row in r.rows], "failure": r.failure} for s, r in standing.runs.items()}
        who = {"method": standing.contestant.method_name, "initialisation": standing.contestant.initialisation}
        return {**who, "cap": standing.cap, "chosen": standing.settings, "trials": [], "runs": runs}

    record = {
        "clock": {standing.contestant.method_name: vars(standing.pace) for standing in FIELD},
        "contestants": {standing.contestant.name: entry(standing) for standing in FIELD},
    }
    assert standings(json.loads(json.dumps(record))) == FIELD
    told = json.loads(json.dumps(summary(FIELD, [10.0, 7.0]), allow_nan=False))
    assert told["standings"]["Shampoo"] == {"failure": "cannot be run here: memory"}
    assert told["standings"]["PRONG, whitened init"]["thresholds"][1] == {
        "threshold": 7.0,
        "updates": [100, 300, 200],
        "run_seconds": [10.0, 30.0, 20.0],
        "median_updates": 200,
        "seconds": 4.5,
    }
    assert told["standings"]["SGD"]["failures"] == {"seed 2": "diverged at update 150: nan"}
    assert told["standings"]["SGD"]["thresholds"][1]["seconds"] is None
    assert len(told["ratios"]) == 12
