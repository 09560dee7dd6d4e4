"""Wrong input is named at the border, and model, optimizer and statistics are as they were."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import prong
from tests.training import batches, canonical, mlp, run, tensors

EXACT = {"rtol": 0.0, "atol": 0.0}

CONSTRUCTION = {
    "eps zero": ({"eps": 0.0}, ValueError, "eps"),
    "eps negative": ({"eps": -1e-3}, ValueError, "eps"),
    "eps nan": ({"eps": float("nan")}, ValueError, "eps"),
    "eps text": ({"eps": "small"}, TypeError, "eps"),
    "period zero": ({"period": 0}, ValueError, "period"),
    "period text": ({"period": "Auto"}, ValueError, "'auto'"),
    "plus text": ({"plus": "False"}, TypeError, "plus"),
    "balance number": ({"balance": 1}, TypeError, "balance"),
    "period fraction": ({"period": 10.5}, TypeError, "period"),
    "one sample": ({"samples": 1}, ValueError, "samples"),
    "unknown source": ({"source": "loader"}, ValueError, "loader itself"),
    "source number": ({"source": 3}, TypeError, "batches"),
    "unknown form": ({"form": "both"}, ValueError, "form"),
    "unknown policy": ({"on_refresh": "forget"}, ValueError, "on_refresh"),
    "negative lr": ({"lr": -1.0}, ValueError, "learning rate"),
    "nesterov without momentum": ({"nesterov": True, "momentum": 0.0}, ValueError, "Nesterov"),
}


@pytest.mark.parametrize(("options", "error", "message"), CONSTRUCTION.values(), ids=CONSTRUCTION)
def test_a_wrong_option_is_named_and_the_model_stays_plain(options, error, message):
    model = mlp()
    with pytest.raises(error, match=message):
        prong.PRONG(model, **{"lr": 0.1, **options})
    assert type(model[0]) is nn.Linear
    prong.PRONG(model, 0.1)  # and can still be trained


@pytest.mark.parametrize("model", [None, 3, [nn.Linear(2, 2)], nn.Linear])
def test_what_is_not_a_model_is_refused(model):
    with pytest.raises(TypeError, match="Module"):
        prong.PRONG(model, 0.1)


def test_a_model_with_nothing_to_whiten_is_refused():
    with pytest.raises(ValueError, match="nothing in this Sequential can be whitened"):
        prong.PRONG(nn.Sequential(nn.Embedding(5, 3), nn.LayerNorm(3)), 0.1)


@pytest.mark.parametrize("form", ["implicit", "explicit"])
def test_two_optimizers_on_one_model_are_refused(form):
    model = mlp()
    first = prong.PRONG(model, 0.02, eps=0.1, period=2, samples=16, form=form)
    with pytest.raises(ValueError, match="another PRONG"):
        prong.PRONG(model, 0.1)
    run(model, first, batches(model, 4))  # the first goes on
    assert model[0].sites[0].whitening is not None
    prong.PRONG(prong.fold_(model), 0.1)  # the way out that the message names


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("form", ["implicit", "explicit"])
def test_nan_or_infinite_activations_in_a_window_are_named_and_nothing_changes(form, value):
    model = mlp()
    optimizer = prong.PRONG(model, 0.02, eps=0.1, period=8, samples=64, form=form)
    data = batches(model, 4)
    run(model, optimizer, data[:3])
    before, state = canonical(model), optimizer.state_dict()
    bad = data[3][0].clone()
    bad[5, 1] = value
    with pytest.raises(FloatingPointError, match=r"layer '0'.*NaN or inf"):
        model(bad)
    torch.testing.assert_close(canonical(model), before, **EXACT)
    torch.testing.assert_close(tensors(optimizer.state_dict()["prong"]), tensors(state["prong"]), **EXACT)
    run(model, optimizer, data[3:])  # and training can go on


class Poisoned(nn.Module):
    """Makes NaN, or another shape, of what passes through when told to."""

    how = None

    def forward(self, h):
        if self.how == "nan":
            return h / 0 * 0
        return h[:, 1:] if self.how == "shape" else h


@pytest.mark.parametrize(("how", "error"), [("nan", FloatingPointError), ("shape", RuntimeError)])
@pytest.mark.parametrize(("form", "plus"), [("implicit", False), ("explicit", False), ("explicit", True)])
def test_what_goes_wrong_inside_the_network_leaves_no_layer_with_half_a_batch(form, how, error, plus):
    states = {}
    for failing in (False, True):
        layers, poisoned = mlp(), Poisoned()
        model = nn.Sequential(*layers[:2], poisoned, *layers[2:])
        optimizer = prong.PRONG(model, 0.02, eps=0.1, period=64, samples=64, form=form, plus=plus)
        data = batches(model, 6)
        run(model, optimizer, data[:3])
        if failing:
            before = tensors(optimizer.state_dict()["prong"])
            poisoned.how = how
            with pytest.raises(error):
                model(data[3][0])
            poisoned.how = None
            torch.testing.assert_close(tensors(optimizer.state_dict()["prong"]), before, **EXACT)
        run(model, optimizer, data[4:])
        states[failing] = tensors(optimizer.state_dict()["prong"])
    torch.testing.assert_close(states[True], states[False], **EXACT)


def test_what_goes_wrong_outside_whitened_layers_leaves_no_statistics_either():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.LayerNorm([4, 4, 4]), nn.Flatten(), nn.Linear(64, 3))
    optimizer = prong.PRONG(model, 0.01, period=8)
    x, y = torch.randn(8, 2, 4, 4), torch.randint(3, (8,))
    run(model, optimizer, [(x, y)])
    before = tensors(optimizer.state_dict()["prong"])
    with pytest.raises(RuntimeError):
        model(torch.randn(8, 2, 9, 9))
    torch.testing.assert_close(tensors(optimizer.state_dict()["prong"]), before, **EXACT)
    run(model, optimizer, [(x, y)] * 8)
    optimizer.refresher.detach()
    assert not model._forward_hooks


@pytest.mark.parametrize("source", ["balance", "empirical", "categorical"])
def test_gradients_gathered_for_an_update_that_fails_are_taken_back(source):
    options = {"balance": True} if source == "balance" else {"gradient_whitening": source}
    model = mlp()
    optimizer = prong.PRONG(model, 1e-3, eps=0.1, period=64, samples=640, **options)
    data = batches(model, 5)
    run(model, optimizer, data[:3])
    before = optimizer.state_dict()["prong"]["gradients"]
    F.cross_entropy(model(10 * data[3][0]), data[3][1]).backward()  # the first micro-batch of an update
    with pytest.raises(FloatingPointError):
        model(data[3][0] * float("nan"))
    torch.testing.assert_close(tensors(optimizer.state_dict()["prong"]["gradients"]), tensors(before), **EXACT)
    optimizer.zero_grad()
    run(model, optimizer, data[4:])


def test_activations_too_large_to_square_are_named():
    model = mlp(dtype=torch.float32)
    prong.PRONG(model, 0.1, eps=0.1, period=8, samples=64)
    with pytest.raises(FloatingPointError, match=r"layer '0'.*too large"):
        model(batches(model, 1)[0][0] * 1e30)
    assert model[0].sites[0].inputs.moments.count == 0


@pytest.mark.parametrize("form", ["implicit", "explicit"])
def test_a_refresh_during_backward_is_refused(form):
    model = mlp()
    optimizer = prong.PRONG(model, 0.02, form=form)
    x, y = batches(model, 1)[0]
    z = model(x)
    z.register_hook(lambda g: optimizer.refresher.refresh())
    with pytest.raises(RuntimeError, match="backward"):
        F.cross_entropy(z, y).backward()


def test_a_frozen_layer_is_no_trouble():
    for form in ("implicit", "explicit"):
        model = mlp()
        model[2].requires_grad_(False)
        frozen = model[2].weight.detach().clone(), model[2].bias.detach().clone()
        optimizer = prong.PRONG(model, 0.02, eps=0.1, period=4, samples=32, form=form)
        losses = run(model, optimizer, batches(model, 1) * 20)
        assert losses[-1] < losses[0]
        prong.fold_(model)
        torch.testing.assert_close((model[2].weight.detach(), model[2].bias.detach()), frozen, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", ["implicit", "explicit"])
@pytest.mark.parametrize("kind", ["dead", "constant", "few samples", "width 1"])
def test_degenerate_inputs_are_no_trouble(form, kind):
    torch.manual_seed(0)
    inputs = 1 if kind == "width 1" else 20
    model = nn.Sequential(nn.Linear(inputs, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    x = torch.randn(4 if kind == "few samples" else 32, inputs, dtype=torch.float64)
    if kind == "dead":
        x.zero_()
    if kind == "constant":
        x = torch.full_like(x, 3.0)
    y = torch.randint(3, (len(x),))
    optimizer = prong.PRONG(model, 0.01, eps=0.1, period=3, samples=len(x), form=form)
    losses = run(model, optimizer, [(x, y)] * 12)
    assert all(torch.isfinite(loss) for loss in losses)
    assert losses[-1] <= losses[0]
