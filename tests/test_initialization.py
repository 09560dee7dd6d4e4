"""Whitened initialisation: V is drawn, layer by layer, in order of execution."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import prong
from tests.training import DOUBLE, batches, canonical, convnet, mlp, run

CLOSE = {"rtol": 1e-8, "atol": 1e-8}


def ones_(V):
    """A scheme that gives away what V was: the signs of eigenvectors aside, z depends on V alone."""
    with torch.no_grad():
        return V.copy_(torch.eye(*V.shape[:2]).to(V).reshape(*V.shape[:2], *[1] * (V.dim() - 2)).expand_as(V))


@pytest.mark.parametrize("form", ["plain", "implicit", "explicit"])
def test_pre_activations_are_white_where_v_is_the_identity(form):
    """With V = I (cut to size) every layer's pre-activations have mean 0 and variance lam / (lam + eps)."""
    model = mlp()
    if form != "plain":
        prong.whiten_(model, form)
    x = torch.cat([x for x, _ in batches(model, 8)])
    prong.initialize_(model, [x[:64], x[64:]], eps=1e-6, scheme=ones_)
    h = x
    for i in (0, 2, 4):
        z = model[i](h)
        torch.testing.assert_close(z.mean(0), torch.zeros_like(z[0]), rtol=0, atol=1e-8)
        rank = min(z.shape[1], 6)  # the data has 6 directions, and V = I lets through no more
        torch.testing.assert_close((z.T @ z / len(z))[:rank, :rank], torch.eye(rank, dtype=DOUBLE), rtol=0, atol=2e-3)
        h = torch.tanh(z)


def test_every_form_gets_the_same_function_and_whitened_ones_a_whitening():
    functions = []
    x = batches(mlp(), 1, size=64)[0][0]
    for form in ("plain", "implicit", "explicit"):
        model = mlp()
        if form != "plain":
            prong.whiten_(model, form)
        torch.manual_seed(3)
        prong.initialize_(model, x, eps=0.1)
        functions.append(model(x))
        if form == "plain":
            assert type(model[0]) is nn.Linear
        else:
            assert all(layer.sites[0].whitening is not None for layer in model[::2])
    torch.testing.assert_close(functions[0], functions[1], **CLOSE)
    torch.testing.assert_close(functions[0], functions[2], **CLOSE)


class Residual(nn.Module):
    """Branches, and layers registered in another order than they run."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.right, self.left, self.stem = (nn.Linear(*s) for s in ((5, 4), (5, 5), (5, 5), (6, 5)))
        self.unused = nn.Linear(3, 3)
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)
        self.double()

    def forward(self, x):
        h = torch.tanh(self.stem(x))
        h = h + torch.tanh(self.left(h)) + torch.tanh(self.right(h))
        return self.head(h + self.attention(h[:, None], h[:, None], h[:, None])[0][:, 0])


@pytest.mark.parametrize("form", ["plain", "implicit", "explicit"])
def test_branching_models_are_initialised_in_order_of_execution(form):
    model = Residual()
    if form != "plain":
        prong.whiten_(model, form)
    unused, old_head = model.unused.weight.clone(), model.head.weight.clone()
    x = batches(model, 1, size=80)[0][0]
    prong.initialize_(model, x, eps=1e-6, scheme=ones_)
    seen = {}
    for name in ("stem", "left", "right", "head"):
        getattr(model, name).register_forward_hook(lambda m, a, z, name=name: seen.__setitem__(name, z))
    model(x)
    for z in seen.values():
        torch.testing.assert_close(z.mean(0), torch.zeros_like(z[0]), rtol=0, atol=1e-8)
        torch.testing.assert_close(z.square().mean(0), torch.ones_like(z[0]), rtol=0, atol=5e-2)
    assert not torch.equal(model.head.weight, old_head)
    torch.testing.assert_close(model.unused.weight, unused)


def test_convolutions_are_drawn_across_feature_maps():
    model = convnet()
    x = batches(model, 1, size=64)[0][0]
    before = canonical(model)
    prong.initialize_(model, x, eps=1e-2, scheme=nn.init.kaiming_normal_)
    assert all(not torch.equal(before[name], value) for name, value in canonical(model).items())
    z = model[0](x)
    assert (z.mean((0, 2, 3)) / z.std((0, 2, 3))).abs().max() < 0.35  # 0 but for the padded border
    assert torch.isfinite(model(x)).all()


def test_a_generator_of_batches_is_enough():
    model = mlp()
    prong.initialize_(model, (x for x, _ in batches(model, 4)))
    assert torch.isfinite(model(batches(model, 1)[0][0])).all()


def test_a_refresh_follows_and_the_first_window_begins_with_these_samples():
    model = mlp()
    optimizer = prong.PRONG(model, 0.02, eps=0.1, samples=64)
    x = batches(model, 1, size=64)[0][0]
    optimizer.initialize([x])
    torch.testing.assert_close(model[0].sites[0].whitening.c[0], x.mean(0), **CLOSE)
    assert model[0].sites[0].inputs.moments.count == 64
    losses = run(model, optimizer, batches(model, 1) * 30)
    assert losses[-1] < losses[0]
    with pytest.raises(RuntimeError, match="before the first update"):
        optimizer.initialize([x])


@pytest.mark.parametrize("form", ["plain", "implicit", "explicit"])
def test_a_failure_leaves_everything_as_it_was(form):
    model = mlp()
    if form != "plain":
        prong.whiten_(model, form)
        prong.refresh_(model, batches(model, 1)[0][0])
    before, x = canonical(model), batches(model, 1)[0][0]
    bad = x.clone()
    bad[3, 2] = float("nan")
    for arguments, error in (
        (([x, bad],), FloatingPointError),
        (([x[:1]],), ValueError),
        (([x[:, :4]],), ValueError),
        (([],), ValueError),
        (([x], 0.0), ValueError),
        ((3,), TypeError),
    ):
        with pytest.raises(error):
            prong.initialize_(model, *arguments)
        torch.testing.assert_close(canonical(model), before, rtol=0, atol=0)
        assert (type(model[0]) is nn.Linear) == (form == "plain")


def test_it_has_no_side_effects_besides_the_weights_and_the_draws():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)).double()
    x, y = batches(model, 1)[0]
    F.cross_entropy(model(x), y).backward()
    gradient, running = model[0].weight.grad.clone(), model[1].running_mean.clone()
    prong.initialize_(model, x, eps=0.1)
    torch.testing.assert_close(model[0].weight.grad, gradient)
    torch.testing.assert_close(model[1].running_mean, running)
    assert model.training and not model[0]._forward_hooks


def test_frozen_layers_keep_their_weights():
    model = mlp()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    prong.initialize_(model, batches(model, 1)[0][0])
    torch.testing.assert_close(model[0].weight, before, rtol=0, atol=0)


@pytest.mark.parametrize("form", ["plain", "implicit", "explicit"])
@pytest.mark.parametrize("whitened_before", [False, True])
def test_a_frozen_bias_stays_while_its_weight_is_drawn(form, whitened_before):
    model, x = mlp(), batches(mlp(), 1, size=64)[0][0]
    if form != "plain":
        prong.whiten_(model, form)
    if form != "plain" and whitened_before:
        prong.refresh_(model, x)  # with a mean that the bias absorbs
    for name, parameter in model[0].named_parameters():
        parameter.requires_grad_(name in ("weight", "V"))
    before = canonical(model)
    prong.initialize_(model, x, eps=1e-6, scheme=ones_)
    torch.testing.assert_close(model[0].bias, before["0.bias"], **CLOSE)
    z = (model[0](x) - before["0.bias"])[:, :6]  # white about zero: nothing may absorb the mean
    torch.testing.assert_close(z.T @ z / len(z), torch.eye(6, dtype=DOUBLE), rtol=0, atol=2e-3)


def test_attentions_output_projection_is_drawn_too():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    before = {name: p.detach().clone() for name, p in layer.named_parameters() if "norm" not in name}
    prong.initialize_(layer, torch.randn(32, 5, 8, dtype=DOUBLE))
    assert all(not torch.equal(before[name], p) for name, p in layer.named_parameters() if name in before)


def test_transposed_convolutions_are_scaled_by_their_own_fan_in():
    torch.manual_seed(0)
    spread = []
    for kind in (nn.Conv2d, nn.ConvTranspose2d):
        layer = kind(64, 4, 3).double()
        x = torch.randn(16, 64, 8, 8, dtype=DOUBLE)
        prong.initialize_(layer, x)
        spread.append(layer(x)[..., 2:-2, 2:-2].std())
    assert 0.7 < spread[0] / spread[1] < 1.4


def test_a_scheme_must_work_in_place():
    with pytest.raises(ValueError, match="in place"):
        prong.initialize_(mlp(), batches(mlp(), 1)[0][0], scheme=torch.zeros_like)
