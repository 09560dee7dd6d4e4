"""Costs are measured in turn, refreshes included, and a method that cannot run says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from prong.lab.contestants import Problem
from prong.lab.methods import Schedule
from prong.lab.racing import clock
from prong.lab.racing.clock import BLOCK, Pace, paces
from prong.refresh.factorise import factorise
from tests.lab.tiny import tiny_autoencoder


@pytest.fixture
def problem(mnist: Path) -> Problem:
    return Problem(tiny_autoencoder, mnist, Schedule(period=30, samples=256))


def test_seconds_are_updates_and_what_comes_before_them() -> None:
    pace = Pace([10.0, 12.0, 99.0], 0.5, [2.0, 9.0, 3.0])
    assert pace.milliseconds == 12
    assert pace.seconds(1000, "standard") == pytest.approx(12.5)
    assert pace.seconds(1000, "whitened") == pytest.approx(15.5)


def test_every_method_has_a_time_per_repetition(problem: Problem) -> None:
    names = ["PRONG", "batch norm", "Muon"]
    measured = paces(names, problem, batch=16, repetitions=2)
    assert list(measured) == names
    for pace in measured.values():
        assert pace.failure is None
        assert len(pace.ms_per_update) == len(pace.initialisation_seconds) == 2 and min(pace.ms_per_update) > 0
        assert pace.start_up_seconds >= 0


def test_initialisations_are_measured_only_if_wanted(problem: Problem) -> None:
    assert paces(["SGD"], problem, batch=16, repetitions=1, whitened=False)["SGD"].initialisation_seconds == []


def test_methods_take_turns_and_a_counted_block_holds_one_refresh(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks: list[tuple[str, int]] = []
    refreshes = 0

    def count_refresh(*arguments: object) -> object:
        nonlocal refreshes
        refreshes += 1
        return factorise(*arguments)

    def watched(train: Callable[[clock._Lap], None]) -> Callable[[clock._Lap], None]:
        def block(lap: clock._Lap) -> None:
            nonlocal refreshes
            refreshes = 0
            train(lap)
            blocks.append((type(lap.training.optimizer).__name__, refreshes))

        return block

    monkeypatch.setattr("prong.refresh.factorise.factorise", count_refresh)
    monkeypatch.setattr(clock._Lap, "train", watched(clock._Lap.train))
    paces(["PRONG", "SGD"], problem, batch=16, repetitions=2)
    first, *counted = blocks[::2]
    assert first == ("PRONG", 6), "after updates 1, 2, 4, 8, 16 and 30"
    assert counted == [("PRONG", 1)] * 3
    assert blocks[1::2] == [("SGD", 0)] * 4


def test_blocks_are_as_long_as_they_should_be(problem: Problem) -> None:
    lengths = {name: clock._Lap(name, problem, 16).length for name in ("PRONG+", "Adam", "SOAP")}
    assert lengths == {"PRONG+": 30, "Adam": BLOCK, "SOAP": BLOCK}


def test_a_method_that_cannot_run_here_says_why_and_stops_nobody(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(lap: clock._Lap) -> None:
        if type(lap.training.optimizer).__name__ == "Adam":
            raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(clock._Lap, "train", train)
    measured = paces(["Adam", "SGD"], problem, batch=16, repetitions=1)
    assert measured["Adam"] == Pace(failure="cannot be run here: can't allocate memory")
    assert measured["SGD"].failure is None and len(measured["SGD"].ms_per_update) == 1
