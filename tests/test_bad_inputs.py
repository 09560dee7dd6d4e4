"""Wrong input is named at the border, and model, optimizer and statistics are as they were."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import prong
from tests.training import FORMS, OPTIMIZERS, batches, canonical, mlp, refresher_of, run, tensors

EXACT = {"rtol": 0.0, "atol": 0.0}
EVERY_8 = prong.Every(8, samples=64)
forms = pytest.mark.parametrize("form", FORMS)
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)

CONSTRUCTION = {
    "damping zero": (lambda: {"damping": 0.0}, ValueError, "damping"),
    "damping negative": (lambda: {"damping": -1e-3}, ValueError, "damping"),
    "damping nan": (lambda: {"damping": float("nan")}, ValueError, "damping"),
    "damping text": (lambda: {"damping": "small"}, TypeError, "damping"),
    "eps zero": (lambda: {"damping": prong.Absolute(0.0)}, ValueError, "eps"),
    "updates zero": (lambda: {"refresh": prong.Every(0)}, ValueError, "updates"),
    "updates text": (lambda: {"refresh": prong.Every("auto")}, TypeError, "updates"),
    "updates fraction": (lambda: {"refresh": prong.Every(10.5)}, TypeError, "updates"),
    "one sample": (lambda: {"refresh": prong.Every(samples=1)}, ValueError, "samples"),
    "unknown source": (lambda: {"refresh": prong.Every(source="loader")}, ValueError, "loader itself"),
    "source number": (lambda: {"refresh": prong.OnDrift(source=3)}, TypeError, "batches"),
    "source iterator": (lambda: {"refresh": prong.Every(source=iter([1]))}, TypeError, "list or a DataLoader"),
    "growth zero": (lambda: {"refresh": prong.Every(growth=0)}, ValueError, "growth"),
    "unknown policy": (lambda: {"refresh": prong.Every(state="forget")}, ValueError, "transport.*reset"),
    "refresh number": (lambda: {"refresh": 1000}, TypeError, "prong.Every"),
    "unknown form": (lambda: {"form": "both"}, ValueError, "form"),
    "form class": (lambda: {"form": prong.Explicit}, ValueError, "form"),
    "unknown basis": (lambda: {"form": prong.Materialised("svd")}, ValueError, "basis"),
    "plus text": (lambda: {"form": prong.Explicit(plus="False")}, TypeError, "plus"),
    "plus in another basis": (lambda: {"form": prong.Explicit("zca", plus=True)}, ValueError, "pca"),
    "cutoff negative": (lambda: {"form": prong.Implicit(cutoff=-1)}, ValueError, "cutoff"),
    "storage of integers": (lambda: {"form": prong.Implicit(storage=torch.int8)}, TypeError, "storage"),
    "block zero": (lambda: {"form": prong.Materialised(block=0)}, ValueError, "block"),
    "no time": (lambda: {"form": prong.Auto(time=0)}, ValueError, "time"),
    "trust zero": (lambda: {"trust": 0.0}, ValueError, "trust"),
    "trust text": (lambda: {"trust": "all"}, TypeError, "trust"),
    "unknown space": (lambda: {"space": "dual"}, ValueError, "space"),
    "natural and explicit": (lambda: {"space": "natural", "form": "explicit"}, ValueError, "natural gradients"),
    "unknown labels": (lambda: {"outputs": prong.WhitenOutputs("poisson")}, ValueError, "categorical"),
    "outputs damped by nothing": (lambda: {"outputs": prong.WhitenOutputs(damping=0)}, ValueError, "damping"),
    "outputs of V": (lambda: {"outputs": prong.WhitenOutputs(), "form": "materialised"}, ValueError, "outputs"),
    "outputs never": (lambda: {"outputs": prong.WhitenOutputs(), "refresh": prong.Never()}, ValueError, "forwards"),
    "negative lr": (lambda: {"lr": -1.0}, ValueError, "learning rate"),
    "nesterov without momentum": (lambda: {"nesterov": True, "momentum": 0.0}, ValueError, "Nesterov"),
    "unknown option": (lambda: {"balance": True}, TypeError, "balance"),
}


@pytest.mark.parametrize(("options", "error", "message"), CONSTRUCTION.values(), ids=CONSTRUCTION)
def test_a_wrong_option_is_named_and_the_model_stays_plain(options, error, message):
    model = mlp()
    with pytest.raises(error, match=message):
        prong.PRONG(model, **{"lr": 0.1, **options()})
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert type(model[0]) is nn.Linear
    prong.PRONG(model, 0.1)  # and can still be trained


@pytest.mark.parametrize("make", [prong.AdamW, prong.Muon])
@pytest.mark.parametrize(
    ("options", "message"),
    [({"outputs": prong.WhitenOutputs()}, "for SGD"), ({"form": "implicit"}, "not linear.*space='natural'")],
)
def test_what_is_for_sgd_alone_is_refused_to_others_and_the_model_stays_plain(make, options, message):
    model = mlp()
    with pytest.raises(ValueError, match=message):
        make(model, 0.1, **options)
    assert type(model[0]) is nn.Linear and not model._forward_hooks
    make(model, 0.1)


@pytest.mark.parametrize("model", [None, 3, [nn.Linear(2, 2)], nn.Linear])
@pytest.mark.parametrize("make", [prong.PRONG, prong.AdamW, prong.Muon])
def test_what_is_not_a_model_is_refused(make, model):
    with pytest.raises(TypeError, match="Module"):
        make(model, 0.1)


@pytest.mark.parametrize("make", [prong.PRONG, prong.AdamW])
def test_a_model_with_nothing_to_whiten_is_refused(make):
    with pytest.raises(ValueError, match="nothing in this Sequential can be whitened"):
        make(nn.Sequential(nn.Embedding(5, 3), nn.LayerNorm(3)), 0.1)


@optimizers
def test_two_optimizers_on_one_model_are_refused(make):
    model = mlp()
    first = make(model, 0.02, refresh=prong.Every(2, samples=16))
    with pytest.raises(ValueError, match=r"another optimizer.*fold_"):
        prong.PRONG(model, 0.1)
    before = first.state_dict()["prong"]["updates"]
    run(model, first, batches(model, 4))  # the first goes on
    state = first.state_dict()["prong"]
    assert state["updates"] == before + 4 and tensors(state["layers"]["0"])
    prong.PRONG(prong.fold_(model), 0.1)  # the way out that the message names


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@optimizers
def test_nan_or_infinite_activations_in_a_window_are_named_and_nothing_changes(make, value):
    model = mlp()
    optimizer = make(model, 0.02, refresh=EVERY_8)
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
@pytest.mark.parametrize("form", [*FORMS, prong.Explicit(plus=True)], ids=str)
def test_what_goes_wrong_inside_the_network_leaves_no_layer_with_half_a_batch(form, how, error):
    states = {}
    for failing in (False, True):
        layers, poisoned = mlp(), Poisoned()
        model = nn.Sequential(*layers[:2], poisoned, *layers[2:])
        optimizer = prong.PRONG(model, 0.02, form=form, refresh=prong.Every(64, samples=64))
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


@forms
def test_what_goes_wrong_outside_whitened_layers_leaves_no_statistics_either(form):
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.LayerNorm([4, 4, 4]), nn.Flatten(), nn.Linear(64, 3))
    optimizer = prong.PRONG(model, 0.01, form=form, refresh=prong.Every(8))
    x, y = torch.randn(8, 2, 4, 4), torch.randint(3, (8,))
    run(model, optimizer, [(x, y)])
    before = tensors(optimizer.state_dict()["prong"])
    with pytest.raises(RuntimeError):
        model(torch.randn(8, 2, 9, 9))
    torch.testing.assert_close(tensors(optimizer.state_dict()["prong"]), before, **EXACT)
    run(model, optimizer, [(x, y)] * 8)
    prong.fold_(model)
    assert not model._forward_hooks


@pytest.mark.parametrize("form", ["auto", "explicit"])
@pytest.mark.parametrize("source", ["empirical", "categorical"])
def test_gradients_gathered_for_an_update_that_fails_are_taken_back(source, form):
    model = mlp()
    outputs, refresh = prong.WhitenOutputs(source), prong.Every(64, samples=640)
    optimizer = prong.PRONG(model, 1e-3, form=form, refresh=refresh, outputs=outputs)

    def gathered():
        return tensors(optimizer.state_dict()["prong"]["gradients"]["gathered"])

    data = batches(model, 5)
    run(model, optimizer, data[:3])
    before = gathered()
    F.cross_entropy(model(10 * data[3][0]), data[3][1]).backward()  # the first micro-batch of an update
    assert {name: part["count"] - before[name]["count"] for name, part in gathered().items()} == dict.fromkeys(
        ("0", "2", "4"), 16
    )
    with pytest.raises(FloatingPointError):
        model(data[3][0] * float("nan"))
    torch.testing.assert_close(gathered(), before, **EXACT)
    optimizer.zero_grad()
    run(model, optimizer, data[4:])


@optimizers
def test_activations_too_large_to_square_are_named(make):
    model = mlp(dtype=torch.float32)
    optimizer = make(model, 0.1, refresh=EVERY_8)
    (x, y), *_ = batches(model, 1)
    run(model, optimizer, [(x, y)])
    before = tensors(optimizer.state_dict()["prong"])
    with pytest.raises(FloatingPointError, match=r"layer '0'.*too large"):
        model(x * 1e30)
    torch.testing.assert_close(tensors(optimizer.state_dict()["prong"]), before, **EXACT)


@pytest.mark.parametrize("how", ["evaluated", "failed"])
@optimizers
def test_a_forward_that_is_no_training_leaves_no_trace_even_if_it_is_the_first(make, how):
    """It is of few examples, for which large blocks would not be worth their cost."""
    paths = []
    for first in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 4)).double()
        optimizer = make(model, 0.01, refresh=EVERY_8)
        data = [(torch.randn(256, 32).double() + 1, torch.randint(4, (256,))) for _ in range(3)]
        if first and how == "evaluated":
            model.eval()(data[0][0][:1])
            model.train()
        elif first:
            with pytest.raises(FloatingPointError):
                model(data[0][0][:2] / 0)
        run(model, optimizer, data)
        paths.append(canonical(model))
    torch.testing.assert_close(*paths, **EXACT)


@optimizers
def test_a_refresh_during_backward_is_refused(make):
    model = mlp()
    optimizer = make(model, 0.02)
    x, y = batches(model, 1)[0]
    z = model(x)
    z.register_hook(lambda g: refresher_of(optimizer).refresh())
    with pytest.raises(RuntimeError, match="backward"):
        F.cross_entropy(z, y).backward()


@optimizers
def test_a_frozen_layer_is_no_trouble(make):
    model = mlp()
    model[2].requires_grad_(False)
    frozen = model[2].weight.detach().clone(), model[2].bias.detach().clone()
    losses = run(model, make(model, 0.02, refresh=prong.Every(4, samples=32)), batches(model, 1) * 20)
    assert losses[-1] < losses[0]
    prong.fold_(model)
    torch.testing.assert_close((model[2].weight.detach(), model[2].bias.detach()), frozen, **EXACT)


@optimizers
@pytest.mark.parametrize("kind", ["dead", "constant", "few samples", "width 1"])
def test_degenerate_inputs_are_no_trouble(make, kind):
    inputs = 1 if kind == "width 1" else 20
    model = nn.Sequential(nn.Linear(inputs, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    x = torch.randn(4 if kind == "few samples" else 32, inputs, dtype=torch.float64)
    if kind == "dead":
        x.zero_()
    if kind == "constant":
        x = torch.full_like(x, 3.0)
    y = torch.randint(3, (len(x),))
    losses = run(model, make(model, 0.01, refresh=prong.Every(3, samples=len(x))), [(x, y)] * 12)
    assert all(torch.isfinite(loss) for loss in losses)
    assert losses[-1] <= losses[0]
