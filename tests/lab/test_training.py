"""The loop trains what it says, repeats itself for a seed, and says when it diverged."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from itertools import islice

import pytest
import torch
from torch import nn
from torch.optim import SGD

import prong
from prong.lab.data import Digits
from prong.lab.methods import METHODS, Schedule, Together, Trains
from prong.lab.tasks.base import Divergence
from prong.lab.tasks.reconstruction import Reconstruction, reconstruction_errors
from prong.lab.training import Order, Plan, Row, Run, Training, minibatches, train
from prong.model.whiten import whitened_sites
from tests.lab.digits import small_digits

DIGITS = small_digits()
PLAN = Plan(updates=8, batch=16, warm_up=2, evaluations=4)


@dataclass(frozen=True)
class InMemory(Reconstruction):
    """The task on digits that are in no file."""

    held: Digits = DIGITS

    def digits(self) -> Digits:
        return self.held


TASK = InMemory()


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(784, 6), nn.Sigmoid(), nn.Linear(6, 784))


def trained(model: nn.Module, optimizer: Trains, plan: Plan = PLAN, seconds: float = 0.0) -> Run:
    return train(Training(TASK, model, optimizer, plan, seconds))


def run_sgd(lr: float = 1e-3, plan: Plan = PLAN, seconds: float = 0.0) -> Run:
    model = small_model()
    return trained(model, SGD(model.parameters(), lr, momentum=0.9), plan, seconds)


def squared_error(model: nn.Module, examples: torch.Tensor) -> float:
    return reconstruction_errors(model, examples)["squared_error"]


def errors(run: Run) -> list[tuple[int, float, float]]:
    return [(row.update, row.train_error, row.test_error) for row in run.rows]


@pytest.mark.parametrize("optimizer", ["sgd", "prong"])
def test_the_same_seed_gives_the_same_run(optimizer: str) -> None:
    def once() -> Run:
        model = small_model()
        if optimizer == "sgd":
            return trained(model, SGD(model.parameters(), 1e-3))
        return trained(model, prong.PRONG(model, 1e-5, refresh=prong.Every(4, samples=32)))

    assert errors(once()) == errors(once())


def test_another_seed_gives_another_order() -> None:
    assert errors(run_sgd()) != errors(run_sgd(plan=Plan(updates=8, seed=1, batch=16, warm_up=2, evaluations=4)))


def test_errors_fall_and_are_measured_before_during_and_after() -> None:
    run = run_sgd()
    assert run.failure is None
    assert [row.update for row in run.rows] == [0, 2, 4, 6, 8]
    assert run.rows[-1].train_error < run.rows[0].train_error
    assert all(a.seconds < b.seconds for a, b in zip(run.rows, run.rows[1:], strict=False))


@dataclass(frozen=True)
class SlowToBegin(InMemory):
    """The first minibatch that is read here, whichever it is, takes its time."""

    begun: list[bool] = field(default_factory=list)

    def batch(self, chosen: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.begun:
            self.begun.append(True)
            time.sleep(1.0)
        return super().batch(chosen, generator)


def test_beginning_to_read_is_no_time_of_training_wherever_a_run_goes_on() -> None:
    model = small_model()
    training = Training(SlowToBegin(), model, SGD(model.parameters(), 1e-3), PLAN)
    training.advance()
    saved = training.state_dict()
    assert training.seconds < 1.0
    again = Training(SlowToBegin(), model, SGD(model.parameters(), 1e-3), PLAN)
    again.load_state_dict(saved)
    again.advance()
    assert again.update == 2 and again.seconds < 1.0


def test_seconds_begin_with_those_spent_and_leave_out_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(model: nn.Module, examples: torch.Tensor) -> dict[str, float]:
        time.sleep(0.2)
        return {"squared_error": 1.0}

    monkeypatch.setattr("prong.lab.tasks.reconstruction.reconstruction_errors", slow)
    run = run_sgd(seconds=100.0)
    assert run.rows[0] == Row(0, 100.0, 1.0, 1.0)
    assert 100 < run.rows[-1].seconds < 101.5  # ten evaluations would be two seconds


def test_every_update_is_announced() -> None:
    seen: list[int] = []
    model = small_model()
    train(Training(TASK, model, SGD(model.parameters(), 1e-3), PLAN), seen.append)
    assert seen == list(range(1, 9))


def test_the_loss_is_cross_entropy_and_the_error_is_squared_each_per_example() -> None:
    model, x = small_model(), DIGITS.train[:5]
    p = torch.sigmoid(model(x)).double()
    cross_entropy = -(x * p.log() + (1 - x) * (1 - p).log()).sum() / 5
    assert squared_error(model, x) == pytest.approx(((p - x) ** 2).sum().item() / 5, rel=1e-5)
    assert reconstruction_errors(model, x)["cross_entropy"] == pytest.approx(cross_entropy.item(), rel=1e-5)
    assert TASK.loss(model(x), x).item() == pytest.approx(cross_entropy.item(), rel=1e-5)


def test_evaluation_does_not_enter_the_statistics_of_prong() -> None:
    model = small_model()
    prong.PRONG(model, 1e-5)
    squared_error(model, DIGITS.test)
    assert model.training
    assert all(site.window.moments.count == 0 for _, site in whitened_sites(model).values())


def test_the_rate_warms_up_stays_and_decays() -> None:
    plan = Plan(updates=200, warm_up=50)
    assert [plan.rate(u) for u in (0, 24, 49, 80, 100, 150, 200)] == [0.02, 0.5, 1, 1, 1, 0.5, 0]


def test_a_run_shorter_than_the_warm_up_has_rates_above_zero() -> None:
    plan = Plan(updates=6)
    assert all(0 < plan.rate(u) < 1 for u in range(6))
    assert plan.evaluation_points() == [0, 1, 2, 3, 4, 5, 6]


def test_without_decay_the_rate_stays() -> None:
    plan = Plan(updates=200, warm_up=50, anneal="constant")
    assert [plan.rate(u) for u in (0, 24, 49, 150, 5000)] == [0.02, 0.5, 1, 1, 1]


def test_every_group_gets_its_own_rate_times_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    halves = (SGD(model[0].parameters(), 1e-3), SGD(model[2].parameters(), 1e-2))
    seen: list[list[float]] = []
    watched = Together(*halves)
    halves[1].register_step_post_hook(lambda *_: seen.append([group["lr"] for group in watched.param_groups]))
    trained(model, watched)
    assert seen == [[1e-3 * PLAN.rate(u), 1e-2 * PLAN.rate(u)] for u in range(PLAN.updates)]


@pytest.mark.parametrize("method", ["Muon", "SOAP", "Adam, whitened coordinates"])
def test_whatever_trains_is_trained(method: str) -> None:
    model = small_model()
    run = trained(model, METHODS[method].make(model, {"lr": 1e-3, "eps": 0.1}, Schedule()))
    assert run.failure is None and run.rows[-1].train_error < run.rows[0].train_error


def test_training_ends_where_the_error_is_reached() -> None:
    whole = run_sgd()
    until = whole.rows[2].train_error
    assert errors(run_sgd(plan=replace(PLAN, until=until))) == errors(whole)[:3]
    assert len(run_sgd(plan=replace(PLAN, until=1000.0)).rows) == 1, "already there: not one update"
    assert whole.reaching(until) == whole.rows[2] and whole.reaching(until / 100) is None


def test_the_first_error_is_the_largest_possible_where_none_was_measured() -> None:
    assert Run([Row(0, 0.0, 5.0, 6.0), Row(1, 0.1, 4.0, 5.0)]).first_error == 5
    assert Run([], "diverged").first_error == 784


def test_errors_are_those_of_evaluation_mode() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 6), nn.BatchNorm1d(6), nn.Sigmoid(), nn.Linear(6, 784))
    assert squared_error(model, DIGITS.test) == pytest.approx(squared_error(model, DIGITS.test.flip(0)), rel=1e-5)
    assert squared_error(model, DIGITS.test[:1]) > 0, "no statistics of the batch are needed"
    assert model[1].num_batches_tracked == 0 and model.training


def test_an_epoch_shows_every_example_once_and_the_next_another_order() -> None:
    examples = torch.arange(10)
    stream = minibatches(examples, 5, seed=3)
    first, second = (torch.cat(list(islice(stream, 2))) for _ in range(2))
    assert first.sort().values.equal(examples) and second.sort().values.equal(examples)
    assert not first.equal(second)


def test_what_does_not_fill_a_minibatch_is_dropped() -> None:
    assert {len(x) for x in islice(minibatches(torch.arange(10), 4, seed=0), 10)} == {4}
    with pytest.raises(ValueError, match="11"):
        next(minibatches(torch.arange(10), 11, seed=0))


def test_divergence_of_sgd_is_reported_with_its_update() -> None:
    run = run_sgd(lr=1e38)
    assert run.failure is not None and run.failure.startswith("diverged at update ")
    assert all(torch.tensor([row.train_error, row.test_error]).isfinite().all() for row in run.rows)
    assert run.rows[-1].update < PLAN.updates


def test_divergence_met_first_by_the_statistics_of_prong_is_reported_too() -> None:
    model = nn.Sequential(nn.Linear(784, 6), nn.Linear(6, 784))
    run = trained(model, prong.PRONG(model, 1e30, trust=None))
    assert run.failure is not None and run.failure.startswith("diverged at update ")


def test_a_factorisation_that_fails_is_a_divergence() -> None:
    model = small_model()
    optimizer = SGD(model.parameters(), 1e-3)

    def fail(*_: object) -> None:
        torch.linalg.cholesky(torch.full((2, 2), torch.nan))

    optimizer.register_step_pre_hook(fail)
    run = trained(model, optimizer)
    assert run.failure is not None and run.failure.startswith("diverged at update 1: linalg.cholesky")


def test_a_loss_that_is_not_finite_makes_no_update() -> None:
    model = small_model()
    before = [p.clone() for p in model.parameters()]
    broken = replace(DIGITS, train=torch.full_like(DIGITS.train, torch.nan))
    with pytest.raises(Divergence, match="nan"):
        Training(InMemory(held=broken), model, SGD(model.parameters(), 1e-3), PLAN).advance()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_the_order_of_an_update_needs_no_memory_of_those_before() -> None:
    whole = Order(10, 3, seed=4)
    taken = [whole(update) for update in range(9)]
    assert all(torch.equal(Order(10, 3, seed=4)(update), taken[update]) for update in (8, 2, 5))
    assert not torch.equal(Order(10, 3, seed=5)(0), taken[0])


def test_the_waterfall_divides_the_rate_by_ten_after_four_measurements_without_improvement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = iter([9.0, 8.0, 8.0, 7.99, 7.98, 7.97, 7.0, 6.0, 5.0])
    monkeypatch.setattr(InMemory, "measure", lambda *_: {"train_squared_error": next(errors)})
    model = small_model()
    plan = replace(PLAN, evaluations=8, warm_up=0, anneal="waterfall")
    training, rates = Training(TASK, model, SGD(model.parameters(), 1e-3), plan), []
    while not training.ended:
        row = training.proceed()
        rates.append(row["lr"])
    # measured after updates 2, 3, 4 and 5 there is less than 1 % of improvement on update 1
    assert rates == pytest.approx([1e-3] * 6 + [1e-4] * 3)


def test_a_row_tells_where_training_stands_and_the_mean_loss_since_the_row_before() -> None:
    model = small_model()
    training = Training(TASK, model, SGD(model.parameters(), 1e-3), replace(PLAN, anneal="constant"))
    losses, rows = [], []
    while not training.ended:
        row = training.proceed()
        losses.append(training.loss)
        rows += [row] if row is not None else []
    assert "loss" not in rows[0] and rows[1]["loss"] == pytest.approx(sum(losses[1:3]) / 2)
    assert [row["update"] for row in rows] == [0, 2, 4, 6, 8]
    assert rows[-1]["epoch"] == 8 / (len(DIGITS.train) // 16) and rows[-1]["lr"] == 1e-3
