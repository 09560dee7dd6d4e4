"""PRONG+: a diagonal rescaling after every update, function preserved."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import prong
from prong.core.whitening import to_canonical
from prong.refresh.plus import DECAY as PLUS_DECAY
from prong.refresh.plus import rescale_
from tests.training import attentive, batches, canonical, convnet, mlp, refresher_of, run, site_of

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def plus(model, **options):
    options = {"damping": prong.Absolute(0.1), "refresh": prong.Every(64, samples=32), "trust": None, **options}
    return prong.PRONG(model, 0.02, form=prong.Explicit(plus=True), **options)


attentions = pytest.mark.parametrize("make", [attentive, partial(attentive, 4)], ids=["packed", "separate"])


def test_its_form_is_explicit():
    model = mlp()
    plus(model)
    assert all(row.whitened == "explicit" for row in prong.summary(model))


@pytest.mark.parametrize("make", [mlp, convnet])
def test_the_function_and_the_canonical_velocity_stay_when_u_is_rescaled(make):
    model = make()
    data = batches(model, 3)
    optimizer = plus(model)
    run(model, optimizer, data[:2])  # refreshes after 1 and 2
    x, y = data[2]
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    before, U = canonical(model), site_of(model).whitening.U.clone()
    velocity = _canonical_velocity(model[0], optimizer)
    rescale_(refresher_of(optimizer).sites, optimizer)
    assert not torch.allclose(site_of(model).whitening.U, U)
    torch.testing.assert_close(canonical(model), before, **CLOSE)
    torch.testing.assert_close(_canonical_velocity(model[0], optimizer), velocity, **CLOSE)


def _canonical_velocity(layer, optimizer):
    (site,) = layer.sites
    return site.layout.pack(optimizer.state[layer.V]["momentum_buffer"]).flatten(1, 2) @ site.whitening.U


def _padded(x):
    """Positions of the padded map: the zeros count too."""
    return F.pad(x, (1, 1, 1, 1)).movedim(1, -1).reshape(-1, 2)


@pytest.mark.parametrize(("make", "samples"), [(mlp, lambda x: x), (convnet, _padded)], ids=["linear", "convolution"])
def test_the_scale_is_the_running_damped_deviation_of_whitened_activations(make, samples):
    model = make()
    data = batches(model, 3)
    optimizer = plus(model)
    run(model, optimizer, data[:2])
    whitening = site_of(model).whitening
    run(model, optimizer, data[2:])
    s = _scale(samples(data[2][0]), whitening)
    torch.testing.assert_close(site_of(model).whitening.U[0], whitening.U[0] / s[:, None], **CLOSE)
    torch.testing.assert_close(site_of(model).whitening.U_inv[0], whitening.U_inv[0] * s, **CLOSE)


def _scale(h, whitening):
    """The square root of DECAY + (1 - DECAY) diag(U (Sigma + eps I) U^T)."""
    U, centred = whitening.U[0], h - whitening.c[0]
    Sigma = centred.T @ centred / len(h)
    variance = (U @ (Sigma + whitening.eps * torch.eye(len(U), dtype=U.dtype)) @ U.T).diagonal()
    return (PLUS_DECAY + (1 - PLUS_DECAY) * variance).sqrt()


def test_directions_that_hardly_vary_stay_damped():
    """However many updates there are between refreshes: no row of U outgrows eps^-1/2."""
    model = mlp()
    optimizer = plus(model)
    narrow = [(x * torch.tensor([1.0] * 2 + [0.0] * (x.shape[1] - 2), dtype=x.dtype), y) for x, y in batches(model, 4)]
    run(model, optimizer, narrow)
    refresher_of(optimizer).timetable.options = prong.Never()
    run(model, optimizer, narrow * 20)
    gains = site_of(model).whitening.U[0].norm(dim=1)
    torch.testing.assert_close(gains[2:], torch.full_like(gains[2:], 0.1**-0.5), **CLOSE)
    assert gains[:2].max() < 0.1**-0.5


@attentions
def test_every_rescaling_of_attention_keeps_its_function_and_the_canonical_velocity(make):
    model = make()
    data = batches(model, 8)
    optimizer = plus(model)
    run(model, optimizer, data[:2])
    sites = refresher_of(optimizer).sites
    assert sites.keys() == {"attention.q", "attention.k", "attention.v", "attention.out_proj", "head"}
    for x, y in data[2:]:
        F.cross_entropy(model(x), y).backward()
        model.eval()  # looking is no sample
        z, before, velocity = model(x), canonical(model), _canonical_velocities(optimizer)
        U = {name: site.whitening.U.clone() for name, (_, site) in sites.items()}
        rescale_(sites, optimizer)
        for name, (_, site) in sites.items():
            scale = U[name].norm(dim=-1) / site.whitening.U.norm(dim=-1)
            assert (scale - 1).abs().min() > 1e-6, f"{name} was not rescaled"
            torch.testing.assert_close(site.whitening.U * scale.unsqueeze(-1), U[name], **CLOSE)
        torch.testing.assert_close(model(x), z, **CLOSE)
        torch.testing.assert_close(canonical(model), before, **CLOSE)
        torch.testing.assert_close(_canonical_velocities(optimizer), velocity, **CLOSE)
        run(model.train(), optimizer, [(x, y)])


def _canonical_velocities(optimizer):
    velocities = {}
    for name, (layer, site) in refresher_of(optimizer).sites.items():
        V, d = (optimizer.state[parameter]["momentum_buffer"] for parameter in layer.pair(site))
        velocities[name] = list(to_canonical(*site.packed(V, d), site.whitening))
    return velocities


@attentions
def test_queries_keys_and_values_are_each_rescaled_by_their_own_deviation(make):
    model = make()
    data = batches(model, 3)
    optimizer = plus(model)
    run(model, optimizer, data[:2])
    whitenings = [site.whitening for site in model.attention.sites]
    run(model, optimizer, data[2:])
    for site, h, old in zip(model.attention.sites, model.inputs(data[2][0]), whitenings, strict=True):
        s = _scale(h.flatten(0, 1), old)
        torch.testing.assert_close(site.whitening.U[0], old.U[0] / s[:, None], **CLOSE)
        torch.testing.assert_close(site.whitening.U_inv[0], old.U_inv[0] * s, **CLOSE)


def test_it_is_a_diagonal_preconditioner_in_the_whitened_basis():
    """The same path as dividing V's gradient by the product of all s^2 so far, columnwise, without momentum."""
    model, other = mlp(), mlp()
    data = batches(model, 6)
    options = {"momentum": 0.0, "trust": None, "refresh": prong.Every(64, samples=32, growth=None)}
    optimizer = prong.PRONG(model, 0.02, form=prong.Explicit(plus=True), **options)
    reference = prong.PRONG(other, 0.02, form="explicit", **options)
    for net in (model, other):
        prong.refresh_(net, data[0][0])
    for pair in data:
        scales = [
            (old.sites[0].whitening.U[0].norm(dim=1) / new.sites[0].whitening.U[0].norm(dim=1))
            for old, new in zip(other[::2], model[::2], strict=True)
        ]
        reference.zero_grad()
        F.cross_entropy(other(pair[0]), pair[1]).backward()
        for layer, s in zip(other[::2], scales, strict=True):
            layer.V.grad.div_(s.square())
        reference.step()
        run(model, optimizer, [pair])
    torch.testing.assert_close(canonical(model), canonical(other), **CLOSE)


@pytest.mark.parametrize("make", [mlp, attentive, partial(attentive, 4)], ids=["mlp", "packed", "separate"])
def test_it_trains(make):
    model = make()
    losses = run(model, plus(model), batches(model, 1) * 60)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_an_overflow_that_a_grad_scaler_skips_leaves_no_trace(fused, accumulated):
    paths = []
    for overflows in (False, True):
        model = mlp()
        optimizer, scaler = plus(model, fused=fused), torch.amp.GradScaler("cpu", init_scale=4.0)
        for number, (x, y) in enumerate(batches(model, 8)):
            for factor in [float("inf")] * (overflows and number == 5) + [1.0]:
                optimizer.zero_grad()
                for part, labels in zip(x.chunk(accumulated), y.chunk(accumulated), strict=True):
                    scaler.scale(F.cross_entropy(model(part * factor), labels) / accumulated).backward()
                scaler.step(optimizer)
                scaler.update()
        paths.append(canonical(model))
    torch.testing.assert_close(*paths, **CLOSE)


def test_a_step_on_nothing_but_nan_is_named():
    model = mlp()
    optimizer = plus(model)
    data = batches(model, 4)
    run(model, optimizer, data[:3])
    with pytest.raises(FloatingPointError, match="layer '0'"):
        run(model, optimizer, [(data[3][0] * float("nan"), data[3][1])])


def test_it_needs_the_principal_basis():
    with pytest.raises(ValueError, match="pca"):
        prong.Explicit("zca", plus=True)


def test_layers_that_are_whitened_for_it_already_get_it_too():
    model = prong.whiten_(mlp(), prong.Explicit(plus=True))
    optimizer = prong.PRONG(model, 0.02, refresh=prong.Every(64, samples=32))
    run(model, optimizer, batches(model, 3))
    before = site_of(model).whitening
    run(model, optimizer, batches(model, 1))
    assert site_of(model).whitening is not before


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop])
def test_other_optimizers_train_with_it(kind):
    model = mlp()
    optimizer = prong.attach(model, kind(model.parameters(), 0.01), form=prong.Explicit(plus=True))
    losses = run(model, optimizer, batches(model, 1) * 60)
    assert losses[-1] < 0.5 * losses[0]
