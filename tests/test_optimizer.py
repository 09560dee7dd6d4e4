"""PRONG as an optimizer: what it equals, and torch's conventions."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import prong
from tests.training import DOUBLE, batches, canonical, convnet, mlp, run

EXACT = {"rtol": 0.0, "atol": 0.0}
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
MODELS = {"mlp": mlp, "no bias": lambda: mlp(bias=False), "convnet": convnet}


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("form", ["implicit", "explicit"])
def test_before_any_refresh_prong_is_sgd_bit_for_bit(form, nesterov):
    ours, theirs = mlp(), mlp()
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 1e-3}
    optimizer = prong.PRONG(ours, form=form, **options)
    optimizer.refresher.next_refresh = lambda: 10**9
    run(ours, optimizer, batches(ours, 20))
    run(theirs, torch.optim.SGD(theirs.parameters(), **options), batches(theirs, 20))
    torch.testing.assert_close(canonical(ours), canonical(theirs), **EXACT)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
@pytest.mark.parametrize("nesterov", [False, True])
def test_explicit_and_implicit_forms_walk_the_same_path_across_refreshes(make, nesterov, weight_decay):
    """50 updates with momentum; refreshes after 1, 2, 4, 8, 10, 20, 30, 40, 50."""
    models = []
    for form in ("implicit", "explicit"):
        model = make()
        optimizer = prong.PRONG(
            model, 0.02, 0.9, nesterov=nesterov, weight_decay=weight_decay, eps=0.1, period=10, samples=48, form=form
        )
        run(model, optimizer, batches(model, 50))
        assert all(site.whitening is not None for _, site in optimizer.refresher.sites.values())
        models.append(canonical(model))
    torch.testing.assert_close(*models, **CLOSE)


@pytest.mark.parametrize("form", ["implicit", "explicit"])
@pytest.mark.parametrize("basis", ["pca", "zca", "cholesky"])
def test_every_basis_gives_sgd_the_same_path(form, basis):
    paths = []
    for chosen in ("pca", basis):
        model = mlp()
        prong.whiten_(model, form, basis=chosen)
        run(model, prong.PRONG(model, 0.02, eps=0.1, period=5, samples=32), batches(model, 20))
        paths.append(canonical(model))
    torch.testing.assert_close(*paths, **CLOSE)


def test_on_a_linear_gaussian_model_the_step_is_the_natural_gradient():
    """y ~ N(W h + b, I): F = E[(h,1)(h,1)^T] (x) I, and the step is F^-1 g as eps goes to 0."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    h, y = torch.randn(40, 5, dtype=DOUBLE) @ torch.randn(5, 5, dtype=DOUBLE) + 2, torch.randn(40, 3, dtype=DOUBLE)
    before = torch.cat([model.weight, model.bias[:, None]], 1).detach().clone()
    loss = 0.5 * (model(h) - y).square().sum(1).mean()
    g = torch.cat([x.reshape(3, -1) for x in torch.autograd.grad(loss, [model.weight, model.bias])], 1)
    homogeneous = torch.cat([h, torch.ones(40, 1, dtype=DOUBLE)], 1)
    fisher = torch.kron(torch.eye(3, dtype=DOUBLE), homogeneous.T @ homogeneous / 40)
    natural = torch.linalg.solve(fisher, g.flatten()).view(3, 6)

    optimizer = prong.PRONG(model, lr=0.3, momentum=0.0, eps=1e-12)
    prong.refresh_(model, h, eps=1e-12)
    (0.5 * (model(h) - y).square().sum(1).mean()).backward()
    optimizer.step()
    after = torch.cat([model.weight, model.bias[:, None]], 1)
    torch.testing.assert_close(after, before - 0.3 * natural, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("form", ["implicit", "explicit"])
def test_with_eps_very_large_and_lr_scaled_by_it_bias_free_prong_is_sgd(form):
    eps = 1e12
    ours, theirs = mlp(bias=False), mlp(bias=False)
    run(ours, prong.PRONG(ours, 0.1 * eps, 0.9, eps=eps, period=4, samples=32, form=form), batches(ours, 5)[:1])
    run(theirs, torch.optim.SGD(theirs.parameters(), 0.1 * eps, 0.9), batches(theirs, 5)[:1])
    # From here on, with P = I / eps, a step of lr * eps is a step of lr.
    optimizer = prong.PRONG(prong.fold_(ours), 0.1 * eps, 0.0, eps=eps, form=form)
    ours.load_state_dict(mlp(bias=False).state_dict())
    theirs = mlp(bias=False)
    optimizer.refresher.next_refresh = lambda: 10**9
    prong.refresh_(ours, batches(ours, 1)[0][0], eps=eps)
    run(ours, optimizer, batches(ours, 20))
    run(theirs, torch.optim.SGD(theirs.parameters(), 0.1), batches(theirs, 20))
    torch.testing.assert_close(canonical(ours), canonical(theirs), rtol=1e-8, atol=1e-8)


class Centred(nn.Module):
    """z = W (h - c) + d with a fixed c: SGD on it is what PRONG tends to for large eps (bias rate times eps)."""

    def __init__(self, layer: nn.Linear, c: torch.Tensor):
        super().__init__()
        self.W, self.c = nn.Parameter(layer.weight.detach().clone()), c
        self.d = nn.Parameter((layer.bias + layer.weight @ c).detach().clone())

    def forward(self, h):
        return F.linear(h - self.c, self.W, self.d)


def test_with_eps_very_large_prong_with_bias_is_sgd_on_the_centred_layer():
    eps, lr = 1e10, 0.1
    torch.manual_seed(0)
    plain = nn.Linear(6, 4).double()
    data = batches(plain, 20)
    c = torch.cat([x for x, _ in data]).mean(0)
    centred = Centred(plain, c)
    optimizer = torch.optim.SGD([{"params": [centred.W], "lr": lr}, {"params": [centred.d], "lr": lr * eps}])
    ours = prong.PRONG(plain, lr * eps, 0.0, eps=eps)
    ours.refresher.next_refresh = lambda: 10**9
    prong.refresh_(plain, [x for x, _ in data], eps=eps)
    assert torch.allclose(plain.sites[0].whitening.c[0], c)
    for x, y in data[:1]:  # one step: with lr * eps on the bias, more would blow both up alike
        for model, opt in ((plain, ours), (centred, optimizer)):
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
    torch.testing.assert_close(plain.weight, centred.W, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(plain.bias, centred.d - centred.W @ c, rtol=1e-7, atol=1e-7)


def test_parameters_outside_whitened_layers_are_trained_by_plain_sgd():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.norm = nn.Linear(6, 4), nn.LayerNorm(4)
            self.double()

        def forward(self, x):
            return self.norm(self.linear(x))

    model = Mixed()
    x, y = batches(model, 1)[0]
    optimizer = prong.PRONG(model, 0.1, 0.0, eps=1e-3)
    prong.refresh_(model, x)
    with prong.ordinary_gradients(model):
        expected = torch.autograd.grad(F.cross_entropy(model(x), y), [model.norm.weight, model.norm.bias])
    before = [model.norm.weight.detach().clone(), model.norm.bias.detach().clone()]
    run(model, optimizer, [(x, y)])
    for parameter, old, g in zip((model.norm.weight, model.norm.bias), before, expected, strict=True):
        torch.testing.assert_close(parameter, old - 0.1 * g, **CLOSE)


OPTIONS = [{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"maximize": True}]


@pytest.mark.parametrize("form", ["implicit", "explicit"])
@pytest.mark.parametrize("options", OPTIONS)
def test_torchs_options_are_sgds(form, options):
    model = mlp()
    optimizer = prong.PRONG(model, 0.02, eps=0.1, period=4, samples=32, form=form, **options)
    losses = run(model, optimizer, batches(model, 1) * 16)
    assert (losses[-1] > losses[0]) == ("maximize" in options)
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("form", ["implicit", "explicit"])
def test_all_implementations_walk_the_same_path(form):
    paths = []
    for options in OPTIONS[:4]:
        model = mlp()
        run(model, prong.PRONG(model, 0.02, eps=0.1, period=4, samples=32, form=form, **options), batches(model, 16))
        paths.append(canonical(model))
    for path in paths[1:]:
        torch.testing.assert_close(path, paths[0], **CLOSE)


@pytest.mark.parametrize("form", ["implicit", "explicit"])
def test_a_closure_takes_the_same_step(form):
    paths = []
    for with_closure in (False, True):
        model = mlp()
        optimizer = prong.PRONG(model, 0.02, eps=0.1, period=3, samples=32, form=form, balance=True)
        for x, y in batches(model, 8):

            def closure(model=model, optimizer=optimizer, x=x, y=y):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            if with_closure:
                assert torch.isfinite(optimizer.step(closure))
            else:
                closure()
                optimizer.step()
        paths.append(canonical(model))
    torch.testing.assert_close(*paths, **EXACT)


def test_parameter_groups_keep_their_own_options():
    model = mlp()
    first = model[0].weight
    optimizer = prong.PRONG(
        model,
        0.02,
        eps=0.1,
        params=[{"params": [first], "lr": 0.0}, {"params": [p for p in model.parameters() if p is not first]}],
    )
    before = first.detach().clone()
    run(model, optimizer, batches(model, 5))
    torch.testing.assert_close(first.detach(), before, **EXACT)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.02]
    assert optimizer.param_groups[0]["param_names"] == ["0.weight"]


def test_groups_can_be_added_and_outside_parameters_too():
    model, outside = mlp(), nn.Parameter(torch.ones(3, dtype=DOUBLE))
    optimizer = prong.PRONG(model, 0.02, params=list(model[0].parameters()))
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.5})
    optimizer.add_param_group({"params": outside})
    assert [group["param_names"] for group in optimizer.param_groups][1] == ["2.weight", "2.bias"]
    outside.sum().backward()
    with pytest.warns(UserWarning, match="no whitened layer saw"):  # there was no forward at all
        optimizer.step()
    torch.testing.assert_close(outside.detach(), torch.full((3,), 0.98, dtype=DOUBLE))


def test_learning_rate_schedulers_drive_it():
    model = mlp()
    optimizer = prong.PRONG(model, 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    for x, y in batches(model, 2):
        run(model, optimizer, [(x, y)])
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


@pytest.mark.parametrize("form", ["implicit", "explicit"])
def test_accumulated_gradients_are_the_gradient_of_the_whole_batch(form):
    paths = []
    for parts in (1, 4):
        model = mlp()
        optimizer = prong.PRONG(model, 0.02, eps=0.1, period=3, samples=32, form=form)
        for x, y in batches(model, 9):
            optimizer.zero_grad()
            for px, py in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (F.cross_entropy(model(px), py) / parts).backward()
            optimizer.step()
        paths.append(canonical(model))
    torch.testing.assert_close(*paths, **CLOSE)


def test_user_hooks_on_the_step_run_once():
    torch.optim.SGD(mlp().parameters(), 0.1)  # patches SGD.step; ours must not inherit its hooks a second time
    model, calls = mlp(), []
    optimizer = prong.PRONG(model, 0.02)
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    run(model, optimizer, batches(model, 1))
    assert calls == ["pre", "post"]


def test_it_cannot_be_copied_or_pickled_and_says_what_to_do():
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(prong.PRONG(mlp(), 0.1))


def test_a_model_with_batch_norm_layers_trains():
    """The paper's other reading of PRONG+."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).double()
    losses = run(model, prong.PRONG(model, 0.02, eps=0.1, period=8, samples=64), batches(model, 1) * 40)
    assert losses[-1] < 0.5 * losses[0]
    assert model[1].num_batches_tracked == 40


def test_a_bias_that_is_not_trained_absorbs_no_mean():
    model = mlp()
    weights = [layer.weight for layer in model if hasattr(layer, "weight")]
    optimizer = prong.PRONG(model, 0.02, eps=0.1, period=4, samples=32, params=weights)
    before = model[0].bias.detach().clone()
    run(model, optimizer, batches(model, 4))
    assert model[0].sites[0].whitening.c is None
    torch.testing.assert_close(model[0].bias.detach(), before, **EXACT)
