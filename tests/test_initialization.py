"""Whitened initialisation: V is drawn, layer by layer, in order of execution."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import prong
from prong.model.whiten import whitened_sites
from tests.training import DOUBLE, batches, canonical, convnet, mlp, refresher_of, run, site_of

CLOSE = {"rtol": 1e-8, "atol": 1e-8}
TINY = prong.Absolute(1e-6)
optimizers: list[torch.optim.Optimizer] = []  # which are to live as long as their models


def prepared(model: nn.Module, how: str) -> nn.Module:
    """A model that is plain, whitened, or has an optimizer that has not stepped yet."""
    if how in ("implicit", "explicit"):
        return prong.whiten_(model, how)
    if how != "plain":
        optimizers[:] = [prong.PRONG(model, 0.02) if how == "PRONG" else prong.AdamW(model)]
    return model


states = pytest.mark.parametrize("how", ["plain", "implicit", "explicit", "PRONG", "AdamW"])


def ones_(V):
    """A scheme that gives away what V was: the signs of eigenvectors aside, z depends on V alone."""
    with torch.no_grad():
        return V.copy_(torch.eye(*V.shape[:2]).to(V).reshape(*V.shape[:2], *[1] * (V.dim() - 2)).expand_as(V))


@states
def test_pre_activations_are_white_where_v_is_the_identity(how):
    """With V = I (cut to size) every layer's pre-activations have mean 0 and variance lam / (lam + eps)."""
    model = prepared(mlp(), how)
    x = torch.cat([x for x, _ in batches(model, 8)])
    prong.initialize_(model, [x[:64], x[64:]], TINY, scheme=ones_)
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
    for how in ("plain", "implicit", "explicit", "PRONG", "AdamW"):
        model = prepared(mlp(), how)
        torch.manual_seed(3)
        prong.initialize_(model, x, 0.1)
        functions.append(model(x))
        assert (type(model[0]) is nn.Linear) == (how in ("plain", "PRONG", "AdamW"))
        assert len(whitened_sites(model)) == (0 if how == "plain" else 3)
        assert all(site.whitening is not None for _, site in whitened_sites(model).values())
    for function in functions[1:]:
        torch.testing.assert_close(function, functions[0], **CLOSE)


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


@states
def test_branching_models_are_initialised_in_order_of_execution(how):
    model = prepared(Residual(), how)
    unused, old_head = model.unused.weight.clone(), model.head.weight.clone()
    x = batches(model, 1, size=80)[0][0]
    prong.initialize_(model, x, TINY, scheme=ones_)
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
    prong.initialize_(model, x, 1e-2, scheme=nn.init.kaiming_normal_)
    assert all(not torch.equal(before[name], value) for name, value in canonical(model).items())
    z = model[0](x)
    assert (z.mean((0, 2, 3)) / z.std((0, 2, 3))).abs().max() < 0.35  # 0 but for the padded border
    assert torch.isfinite(model(x)).all()


def test_a_generator_of_batches_is_enough():
    model = mlp()
    prong.initialize_(model, (x for x, _ in batches(model, 4)))
    assert torch.isfinite(model(batches(model, 1)[0][0])).all()


@pytest.mark.parametrize("kind", [prong.PRONG, prong.AdamW], ids=["PRONG", "AdamW"])
@pytest.mark.parametrize("form", ["auto", "explicit", "materialised"])
def test_an_optimizer_begins_with_that_whitening_and_its_first_window_with_these_samples(form, kind):
    model = mlp()
    optimizer = kind(model, 0.02, form=form, refresh=prong.Every(1000, samples=64))
    x = batches(model, 1, size=64)[0][0]
    prong.initialize_(model, x)
    whitening = site_of(model).whitening
    torch.testing.assert_close(whitening.c[0], x.mean(0), **CLOSE)
    assert (whitening.scale == 1) == (kind is prong.PRONG), "as at any other refresh"
    assert site_of(model).window.moments.count == 64
    kept = []
    optimizer.register_step_pre_hook(lambda *_: kept.append(site_of(model).whitening))
    losses = run(model, optimizer, batches(model, 1) * 30)
    assert kept[0] is whitening and refresher_of(optimizer).updates == 30
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", [prong.PRONG, prong.AdamW], ids=["PRONG", "AdamW"])
@pytest.mark.parametrize("form", ["auto", "explicit", "materialised"])
def test_initialising_in_mid_training_forgets_what_the_optimizer_knew(form, kind):
    model = mlp()
    optimizer = kind(model, 0.0, form=form, refresh=prong.Every(4, samples=64), weight_decay=0.0)
    data = batches(model, 8)
    run(model, optimizer, data[:5])
    prong.initialize_(model, data[0][0])
    drawn = canonical(model)
    run(model, optimizer, data[5:])  # at a rate of zero
    torch.testing.assert_close(canonical(model), drawn, **CLOSE)


@states
def test_a_failure_leaves_everything_as_it_was(how):
    model = prepared(mlp(), how)
    if how != "plain":
        prong.refresh_(model, batches(model, 1)[0][0])
    kind, whitenings = type(model[0]), [site.whitening for _, site in whitened_sites(model).values()]
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
        assert type(model[0]) is kind
        assert all(a is b.whitening for a, (_, b) in zip(whitenings, whitened_sites(model).values(), strict=True))


def test_it_has_no_side_effects_besides_the_weights_and_the_draws():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)).double()
    x, y = batches(model, 1)[0]
    F.cross_entropy(model(x), y).backward()
    gradient, running = model[0].weight.grad.clone(), model[1].running_mean.clone()
    prong.initialize_(model, x, 0.1)
    torch.testing.assert_close(model[0].weight.grad, gradient)
    torch.testing.assert_close(model[1].running_mean, running)
    assert model.training and not model[0]._forward_hooks


def test_frozen_layers_keep_their_weights():
    model = mlp()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    prong.initialize_(model, batches(model, 1)[0][0])
    torch.testing.assert_close(model[0].weight, before, rtol=0, atol=0)


@states
@pytest.mark.parametrize("whitened_before", [False, True])
def test_a_frozen_bias_stays_while_its_weight_is_drawn(how, whitened_before):
    model, x = mlp(), batches(mlp(), 1, size=64)[0][0]
    prepared(model, how)
    if how != "plain" and whitened_before:
        prong.refresh_(model, x)  # with a mean that the bias absorbs
    for name, parameter in model[0].named_parameters():
        parameter.requires_grad_(name in ("weight", "V"))
    before = canonical(model)
    prong.initialize_(model, x, TINY, scheme=ones_)
    torch.testing.assert_close(model[0].bias, before["0.bias"], **CLOSE)
    z = (model[0](x) - before["0.bias"])[:, :6]  # white about zero: nothing may absorb the mean
    torch.testing.assert_close(z.T @ z / len(z), torch.eye(6, dtype=DOUBLE), rtol=0, atol=2e-3)


@states
def test_attentions_output_projection_is_drawn_too(how):
    torch.manual_seed(0)
    layer = prepared(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double(), how)
    before = {name: value for name, value in canonical(layer).items() if "norm" not in name}
    prong.initialize_(layer, torch.randn(32, 5, 8, dtype=DOUBLE))
    after = canonical(layer)
    assert all(not torch.equal(before[name], after[name]) for name in before)


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


def test_layers_whose_inputs_are_all_zero_are_drawn_as_they_are():
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 4)).double()
    before = canonical(model)
    prong.initialize_(model, torch.zeros(8, 6, dtype=DOUBLE))
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert not torch.equal(canonical(model)["0.weight"], before["0.weight"])
