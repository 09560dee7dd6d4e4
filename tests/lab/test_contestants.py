"""A method from either initialisation: what is searched for it, and where it starts."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

import prong
from prong.lab.contestants import SCHEDULE, Contestant, Problem, data_folder
from prong.lab.methods import METHODS, Method, plain
from prong.lab.training import Plan
from tests.lab.tiny import tiny_autoencoder

SETTINGS = {"lr": 1e-4, "eps": 1e-2}


@pytest.fixture
def problem(mnist: Path) -> Problem:
    return Problem(tiny_autoencoder, mnist)


def test_the_schedule_of_refreshes_is_that_of_the_race() -> None:
    assert (SCHEDULE.period, SCHEDULE.samples) == (200, 5000)


def test_a_whitened_initialisation_adds_its_damping_to_what_is_searched() -> None:
    assert list(Contestant("Adam", "standard").space) == ["lr"]
    assert list(Contestant("Adam", "whitened").space) == ["lr", "eps"]
    assert list(Contestant("PRONG", "standard").space) == list(Contestant("PRONG", "whitened").space) == ["lr", "eps"]


def test_every_method_is_searched_over_two_decades() -> None:
    for name in METHODS:
        ends = Contestant(name, "whitened").space.values()
        assert all(high / low == pytest.approx(100) for low, high in ends)


def test_names_tell_the_initialisation() -> None:
    assert [Contestant("SGD", start).name for start in ("standard", "whitened")] == ["SGD", "SGD, whitened init"]


@pytest.mark.parametrize("initialisation", ["standard", "whitened"])
def test_all_start_from_the_same_function(problem: Problem, initialisation) -> None:
    starts = {}
    for name, method in METHODS.items():
        run = problem.run(Contestant(name, initialisation), SETTINGS, Plan(1, seed=3))
        starts.setdefault(method.batch_norm, []).append(run.rows[0].train_error)
    assert all(max(errors) - min(errors) < 1e-4 * min(errors) for errors in starts.values()), starts


@pytest.mark.parametrize("name", ["PRONG", "PRONG, explicit", "Adam, whitened coordinates", "SOAP"])
def test_the_optimizer_trains_the_weights_that_were_drawn_in_whitened_coordinates(problem: Problem, name: str) -> None:
    batches = problem.initial_batches()
    torch.manual_seed(0)
    expected = prong.initialize_(tiny_autoencoder(), batches, prong.Absolute(SETTINGS["eps"]))
    torch.manual_seed(0)
    model = tiny_autoencoder()
    optimizer = Contestant(name, "whitened").start(model, SETTINGS, batches, SCHEDULE)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters()}
    for parameter, value in zip(prong.fold_(model).parameters(), expected.parameters(), strict=True):
        assert torch.allclose(parameter, value, rtol=1e-3, atol=1e-4)


def test_an_initialisation_that_diverges_is_a_failed_run(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise FloatingPointError("layer '0': NaN")

    monkeypatch.setattr(prong, "initialize_", fail)
    run = problem.run(Contestant("SGD", "whitened"), SETTINGS, Plan(1))
    assert run.rows == [] and run.failure == "diverged at its initialisation: layer '0': NaN"


def test_contestants_and_problems_can_be_sent_to_other_processes(problem: Problem) -> None:
    for name in METHODS:
        sent = (Contestant(name, "whitened"), problem)
        assert pickle.loads(pickle.dumps(sent)) == sent


def test_the_environment_names_the_folder(mnist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_folder() == mnist
    monkeypatch.delenv("PRONG_DATA")
    assert data_folder() is None


def test_a_method_without_a_learning_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="method 'mine' needs 'lr' among its settings"):
        Method("mine", "Mine", plain(torch.optim.Adagrad), settings={"learning_rate": 0.1})
