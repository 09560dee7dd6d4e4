"""When refreshes come, from which samples, and what becomes of momentum."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import prong
from prong.core.moments import Moments
from tests.training import DOUBLE, batches, canonical, mlp, run

EXACT = {"rtol": 0.0, "atol": 0.0}
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def refresh_times(optimizer, model, data):
    """After which updates the whitening of the first layer was replaced."""
    times, last = [], model[0].sites[0].whitening
    for number, pair in enumerate(data, 1):
        run(model, optimizer, [pair])
        if model[0].sites[0].whitening is not last:
            times.append(number)
            last = model[0].sites[0].whitening
    return times


@pytest.mark.parametrize("source", ["window", "ema", "loader"])
def test_refreshes_come_after_1_2_4_and_then_every_period(source):
    model = mlp()
    data = batches(model, 25)
    chosen = [x for x, _ in data] if source == "loader" else source
    optimizer = prong.PRONG(model, 0.01, eps=0.1, period=6, samples=16, source=chosen)
    assert (model[0].sites[0].whitening is not None) == (source == "loader")  # the paper's line 5: at t = 0 too
    assert refresh_times(optimizer, model, data) == [1, 2, 4, 6, 12, 18, 24]


def test_period_one_refreshes_after_every_update():
    model = mlp()
    assert refresh_times(prong.PRONG(model, 0.01, eps=0.1, period=1, samples=16), model, batches(model, 5)) == [
        1,
        2,
        3,
        4,
        5,
    ]


def test_a_window_holds_the_forwards_just_before_the_refresh():
    """Period 8, 32 samples of batches of 16: the window before update 16 is updates 15 and 16."""
    model = mlp()
    data = batches(model, 16)
    run(model, prong.PRONG(model, 0.0, 0.0, eps=0.1, period=8, samples=32), data)
    expected = Moments(1, 6, DOUBLE)
    expected.add(torch.cat([x for x, _ in data[14:]])[None])
    whitening = model[0].sites[0].whitening
    torch.testing.assert_close(whitening.c, expected.mean, **CLOSE)
    dense = torch.linalg.inv(expected.covariance() + 0.1 * torch.eye(6, dtype=DOUBLE))
    torch.testing.assert_close(whitening.P, dense, **CLOSE)


def test_windows_are_open_only_when_needed():
    model = mlp()
    optimizer = prong.PRONG(model, 0.0, 0.0, eps=0.1, period=8, samples=32)
    is_open = []
    for pair in batches(model, 16):
        is_open.append(model[0].sites[0].inputs is not None)
        run(model, optimizer, [pair])
    assert is_open == [True] * 4 + [False, False, True, True] + [False] * 6 + [True] * 2
    assert optimizer.refresher.windows.updates("0", 160) == 10


def test_where_refreshes_are_closer_than_a_window_older_samples_fade():
    model = mlp()
    data = batches(model, 2)
    run(model, prong.PRONG(model, 0.0, 0.0, eps=0.1, period=100, samples=32), data)
    (first, _), (second, _) = data
    expected = Moments(1, 6, DOUBLE)
    expected.add(first[None])
    expected.decay(0.5)  # 16 of 32 samples were replaced
    expected.add(second[None])
    torch.testing.assert_close(model[0].sites[0].whitening.c, expected.mean, **CLOSE)


def test_evaluation_between_updates_is_not_counted():
    model = mlp()
    optimizer = prong.PRONG(model, 0.0, eps=0.1, period=100, samples=1000)
    x, y = batches(model, 1)[0]
    model.eval()
    with torch.no_grad():
        model(x * 100)
    model.train()
    assert model[0].sites[0].inputs.moments.count == 0
    run(model, optimizer, [(x, y)])
    torch.testing.assert_close(model[0].sites[0].whitening.c[0], x.mean(0), **CLOSE)


def test_batches_of_one_wait_for_a_second_sample():
    model = mlp()
    optimizer = prong.PRONG(model, 0.01, eps=0.1, period=4, samples=4)
    data = batches(model, 4, size=1)
    with pytest.warns(UserWarning, match="two samples"):
        run(model, optimizer, data[:1])
    run(model, optimizer, data[1:])
    assert model[0].sites[0].whitening is not None


def test_a_branch_that_was_not_reached_keeps_its_whitening():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.use_b = nn.Linear(6, 4), nn.Linear(6, 4), True
            self.double()

        def forward(self, x):
            return self.b(x) if self.use_b else self.a(x)

    model = Branching()
    optimizer = prong.PRONG(model, 0.01, eps=0.1, period=1, samples=16)
    data = batches(model, 3)
    run(model, optimizer, data[:1])
    kept = model.b.sites[0].whitening
    model.use_b = False
    run(model, optimizer, data[1:])
    assert model.b.sites[0].whitening is kept
    assert model.a.sites[0].whitening is not None


def test_reset_forgets_momentum_where_transport_keeps_it():
    buffers = {}
    for policy in ("transport", "reset"):
        model = mlp()
        optimizer = prong.PRONG(model, 0.01, eps=0.1, period=2, samples=16, form="explicit", on_refresh=policy)
        run(model, optimizer, batches(model, 2))
        buffers[policy] = optimizer.state[model[0].V].get("momentum_buffer")
    assert buffers["reset"] is None
    assert buffers["transport"].abs().sum() > 0


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.02, 0.9),
    "Adam": lambda p: torch.optim.Adam(p, 0.01),
    "AMSGrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.005, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
    "Muon": lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], 0.01),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_any_torch_optimizer_trains_in_whitened_coordinates(make):
    model = mlp()
    prong.whiten_(model, "explicit")
    optimizer = make(list(model.parameters()))
    prong.Refresher(model, optimizer, eps=0.1, period=7, samples=48)
    losses = run(model, optimizer, batches(model, 1) * 60)
    assert losses[-1] < 0.7 * losses[0]
    assert all(site.whitening is not None for site in (model[0].sites + model[4].sites))


def test_adams_first_moment_is_the_gradient_average_of_the_new_coordinates():
    """With a constant gradient in the canonical parameters, the average is that gradient in any coordinates."""
    model = nn.Linear(5, 3).double()
    h = torch.randn(30, 5, dtype=DOUBLE) @ torch.randn(5, 5, dtype=DOUBLE) + 1
    target = torch.randn(3, 5, dtype=DOUBLE), torch.randn(3, dtype=DOUBLE)
    prong.whiten_(model, "explicit")
    optimizer = torch.optim.Adam(model.parameters(), 0.0)  # nothing moves: the gradient stays
    refresher = prong.Refresher(model, optimizer, eps=0.1, source=[h])

    def gradients():
        loss = (model.weight * target[0]).sum() + (model.bias * target[1]).sum()
        return torch.autograd.grad(loss, [model.V, model.d])

    for data in (h, h * 2 + 1, h - 3):
        refresher.refresh([data])
        model.V.grad, model.d.grad = gradients()
        optimizer.step()
        correction = 1 - 0.9 ** optimizer.state[model.V]["step"].item()
        for parameter, gradient in zip((model.V, model.d), gradients(), strict=True):
            torch.testing.assert_close(optimizer.state[parameter]["exp_avg"] / correction, gradient, **CLOSE)


def test_the_state_of_an_unknown_optimizer_is_reset_and_that_is_said_once():
    class Strange(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.01})

        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    state["seen"] = state.get("seen", 0) + p.grad.abs()
                    p.data.sub_(group["lr"] * p.grad)

    model = mlp()
    prong.whiten_(model, "explicit")
    optimizer = Strange(model.parameters())
    with pytest.warns(UserWarning, match="Strange.*reset"):
        prong.Refresher(model, optimizer, eps=0.1, period=2, samples=16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, optimizer, batches(model, 2))
    assert "seen" not in optimizer.state.get(model[0].V, {})


def test_an_optimizer_that_is_not_linear_cannot_use_implicit_layers():
    model = prong.whiten_(mlp())
    with pytest.raises(ValueError, match="explicit"):
        prong.Refresher(model, torch.optim.Adam(model.parameters()))


def test_plain_sgd_with_a_refresher_is_prong():
    ours, theirs = mlp(), mlp()
    run(ours, prong.PRONG(ours, 0.02, 0.9, eps=0.1, period=5, samples=32), batches(ours, 12))
    prong.whiten_(theirs)
    optimizer = torch.optim.SGD(theirs.parameters(), 0.02, 0.9)
    prong.Refresher(theirs, optimizer, eps=0.1, period=5, samples=32)
    run(theirs, optimizer, batches(theirs, 12))
    torch.testing.assert_close(canonical(ours), canonical(theirs), **EXACT)


def test_a_detached_refresher_leaves_the_whitening_and_another_can_follow():
    model = mlp()
    optimizer = prong.PRONG(model, 0.02, eps=0.1, period=2, samples=16)
    run(model, optimizer, batches(model, 2))
    optimizer.refresher.detach()
    kept = model[0].sites[0].whitening
    run(model, optimizer, batches(model, 4))
    assert model[0].sites[0].whitening is kept
    prong.PRONG(model, 0.02)


def test_a_window_leaves_the_random_state_and_gradients_alone():
    model = mlp()
    prong.whiten_(model)
    x, y = batches(model, 1)[0]
    plain = mlp()
    F.cross_entropy(plain(x), y).backward()
    optimizer = prong.PRONG(model, 0.0, eps=0.1)
    before = torch.get_rng_state()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], **EXACT)


@pytest.mark.parametrize("options", [{}, {"balance": True}, {"gradient_whitening": "categorical"}])
def test_after_fold_training_goes_on_as_sgd_with_its_velocity_in_either_form(options):
    paths = []
    for form in ("implicit", "explicit"):
        model = mlp()
        optimizer = prong.PRONG(model, 0.01, 0.9, eps=0.3, period=4, samples=32, form=form, **options)
        data = batches(model, 12)
        run(model, optimizer, data[:7])
        prong.fold_(model)
        run(model, optimizer, data[7:])
        assert type(model[0]) is nn.Linear
        paths.append(canonical(model))
    torch.testing.assert_close(*paths, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("form", ["implicit", "explicit"])
def test_after_fold_the_state_is_that_of_sgd_and_there_is_nothing_to_refresh(form, detached):
    model = mlp()
    optimizer = prong.PRONG(model, 0.01, 0.9, eps=0.3, period=4, samples=32, form=form)
    run(model, optimizer, batches(model, 3))
    if detached:
        optimizer.refresher.detach()
    prong.fold_(model)
    plain = torch.optim.SGD(model.named_parameters(), 0.5)
    plain.load_state_dict(optimizer.state_dict())
    assert plain.param_groups[0]["lr"] == 0.01
    velocity = optimizer.state[model[0].weight]["momentum_buffer"]
    torch.testing.assert_close(plain.state[model[0].weight]["momentum_buffer"], velocity, **EXACT)
    for ask in (optimizer.refresher.refresh, optimizer.refresher.state_dict):
        with pytest.raises(ValueError, match="folded"):
            ask()


def test_a_refresher_of_adam_resumes_bit_for_bit():
    data = batches(mlp(), 14)

    def make():
        model = prong.whiten_(mlp(), "explicit")
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        return model, optimizer, prong.Refresher(model, optimizer, eps=0.1, period=6, samples=40)

    model, optimizer, _ = make()
    run(model, optimizer, data)
    first, first_optimizer, first_refresher = make()
    run(first, first_optimizer, data[:5])
    second, second_optimizer, second_refresher = make()
    second.load_state_dict(first.state_dict())
    second_optimizer.load_state_dict(first_optimizer.state_dict())
    second_refresher.load_state_dict(first_refresher.state_dict())
    run(second, second_optimizer, data[5:])
    torch.testing.assert_close(canonical(second), canonical(model), **EXACT)


def test_a_loader_that_fails_leaves_the_model_free_for_another_optimizer():
    model = prong.whiten_(mlp())
    with pytest.raises(ValueError, match="does not take batch 0"):
        prong.PRONG(model, 0.1, source=[torch.randn(8, 5, dtype=DOUBLE)])
    prong.PRONG(model, 0.1)


def test_gradient_matrices_cannot_come_from_a_loader():
    with pytest.raises(ValueError, match="window"):
        prong.PRONG(mlp(), 0.1, source=[torch.randn(8, 6, dtype=DOUBLE)], gradient_whitening="categorical")


@pytest.mark.parametrize("period", [1, 64])
def test_ema_counts_about_as_many_examples_as_asked_for(period):
    model = mlp()
    optimizer = prong.PRONG(model, 0.0, 0.0, eps=0.1, period=period, samples=64, source="ema")
    data = batches(model, 30)
    expected = Moments(1, 6, DOUBLE)
    for x, _ in data:
        expected.add(x[None])
        expected.decay(1 - 16 / 64)
    run(model, optimizer, data)
    window = model[0].sites[0].inputs.moments
    assert window.count == pytest.approx(expected.count)
    torch.testing.assert_close(window.mean, expected.mean, **CLOSE)
    torch.testing.assert_close(window.scatter, expected.scatter, **CLOSE)


def test_one_optimizer_trains_all_explicit_layers():
    model = prong.whiten_(mlp(), "explicit")
    with pytest.raises(ValueError, match="does not train all"):
        prong.Refresher(model, torch.optim.SGD(model[0].parameters(), 0.1))


def test_plus_needs_an_optimizer_whose_state_it_can_carry():
    model = prong.whiten_(mlp(), "explicit")
    with pytest.raises(ValueError, match="Adamax"):
        prong.Refresher(model, torch.optim.Adamax(model.parameters()), plus=True)


def test_an_iterator_is_no_source():
    with pytest.raises(TypeError, match="iterator"):
        prong.PRONG(mlp(), 0.1, source=iter([torch.zeros(4, 6, dtype=DOUBLE)]))


def test_frozen_layers_gather_nothing_and_stay_bit_for_bit():
    model = mlp()
    model[2].requires_grad_(False)
    before = model[2].weight.detach().clone()
    run(model, prong.PRONG(model, 0.01, eps=0.1, period=2, samples=16, form="explicit"), batches(model, 9))
    assert model[2].sites[0].inputs is None and model[2].sites[0].whitening is None
    torch.testing.assert_close(model[2].weight.detach(), before, **EXACT)


@pytest.mark.parametrize("form", ["implicit", "explicit"])
def test_a_loader_does_not_refresh_frozen_layers(form):
    model = mlp()
    model[2].requires_grad_(False)
    data = batches(model, 9)
    optimizer = prong.PRONG(model, 0.01, eps=0.1, period=2, samples=16, form=form, source=[x for x, _ in data])
    optimizer.refresher.refresh()
    run(model, optimizer, data)
    assert [model[i].sites[0].whitening is None for i in (0, 2, 4)] == [False, True, False]


def test_a_layer_that_is_frozen_inside_a_window_gathers_no_more():
    model = mlp()
    optimizer = prong.PRONG(model, 0.01, eps=0.1, period=8, samples=64)
    run(model, optimizer, batches(model, 5))
    kept = model[2].requires_grad_(False).sites[0].whitening
    run(model, optimizer, batches(model, 3))
    assert model[2].sites[0].inputs is None and model[2].sites[0].whitening is kept


@pytest.mark.parametrize("form", ["implicit", "explicit"])
def test_gradients_that_wait_for_a_step_are_folded_too(form):
    paths = []
    for folding in (False, True):
        model = mlp()
        optimizer = prong.PRONG(model, 0.01, 0.9, eps=0.3, period=64, samples=32, form=form)
        data = batches(model, 3)
        run(model, optimizer, data[:2])
        if folding:
            prong.fold_(model)
        x, y = data[2]
        optimizer.zero_grad()
        with prong.ordinary_gradients(model):
            F.cross_entropy(model(x), y).backward()
        prong.fold_(model)
        optimizer.step()
        paths.append(canonical(model))
    torch.testing.assert_close(*paths, rtol=1e-9, atol=1e-10)


def test_a_part_of_an_optimizers_model_cannot_be_folded_alone():
    model = mlp()
    prong.PRONG(model, 0.1)
    with pytest.raises(ValueError, match="whole model"):
        prong.fold_(model[0])
    assert type(model[0]) is not nn.Linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_models_train_and_fold(dtype):
    for form in ("implicit", "explicit"):
        model = mlp(dtype=dtype)
        optimizer = prong.PRONG(model, 0.01, eps=0.3, period=4, samples=32, form=form)
        losses = run(model, optimizer, batches(model, 1) * 12)
        assert losses[-1] < losses[0]
        x = batches(model, 1)[0][0]
        before = model(x)
        torch.testing.assert_close(prong.fold_(model)(x), before, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("options", [{}, {"gradient_whitening": "empirical"}, {"balance": True}], ids=str)
def test_without_early_refreshes_the_first_window_is_as_long_as_the_others(options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    optimizer = prong.PRONG(model, lr=1e-3, eps=0.1, period=20, samples=24, early=False, **options)
    sites = [site for _, site in prong.model.whiten.whitened_sites(model).values()]
    data = [torch.randn(8, 4).double() + k for k in range(40)]
    gathering = []
    for x in data:
        gathering.append([site.inputs is not None for site in sites])
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if len(gathering) % 20 == 0:
            last = torch.cat(data[len(gathering) - 3 : len(gathering)])
            torch.testing.assert_close(sites[0].whitening.c[0], last.mean(0))
    expected = [k == 0 or k % 20 >= 17 for k in range(40)]
    assert gathering == [[due, due] for due in expected]
