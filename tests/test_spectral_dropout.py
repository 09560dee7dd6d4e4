"""Spectral dropout: unbiased, the identity in eval mode, and aware of every refresh."""

from __future__ import annotations

import copy
import io
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import prong
from prong.core.factorise import whiten
from prong.core.moments import Moments
from prong.layers import dropping
from prong.layers.dropping import damped_variances, keep_probabilities
from tests.cases import SPECS, LayerSpec, assert_close, assert_identical
from tests.training import batches, convnet, mlp, run

EPS = 1e-2
DAMPING = prong.Absolute(EPS)


def refreshed(spec: LayerSpec, rate: float = 0.4, **options: float) -> tuple[nn.Module, Tensor]:
    layer, h = spec.build(), spec.sample(40)
    prong.whiten_(layer, "explicit")
    prong.refresh_(layer, h, DAMPING)
    return prong.spectral.dropout_(layer, rate, **options), h


def masks(monkeypatch: pytest.MonkeyPatch, keep: Tensor):
    """All masks of directions with their probabilities; while one is yielded, the layer draws it."""
    for kept in itertools.product([True, False], repeat=keep.numel()):
        mask = torch.tensor(kept)
        probability = torch.where(mask, keep.flatten(), 1 - keep.flatten()).prod()

        def rand(*shape: int, mask: Tensor = mask, **_: object) -> Tensor:
            return torch.where(mask, 0.0, 1.0).double().expand(shape)  # below every probability, or below none

        monkeypatch.setattr(dropping.torch, "rand", rand)
        yield probability


@pytest.mark.parametrize("kind", [name for name in SPECS if name != "attention"])
def test_the_mean_over_all_masks_is_the_layer_without_dropout(kind, monkeypatch):
    spec = SPECS[kind]
    layer, h = refreshed(spec)
    (keep,) = prong.spectral.keep_probabilities(layer).values()
    h = h[:2]
    plain = layer.eval()(h, **spec.call)
    layer.train()
    mean, seen = torch.zeros_like(plain), []
    for probability in masks(monkeypatch, keep):
        z = layer(h, **spec.call)
        seen.append(z)
        mean += probability * z
    assert_close(mean, plain, "the mean over masks")
    assert not torch.allclose(seen[0], seen[-1])


@pytest.mark.parametrize("kind", SPECS)
def test_in_eval_mode_it_is_the_identity(kind):
    spec = SPECS[kind]
    layer, h = refreshed(spec)
    without = prong.spectral.dropout_(copy.deepcopy(layer), 0).eval()
    assert_identical(layer.eval()(h, **spec.call), without(h, **spec.call))


def test_dropping_a_direction_removes_it_from_the_inputs(monkeypatch):
    """Against a loop: z = sum_i m_i / p_i V_i (U (h - c))_i + d."""
    layer, h = refreshed(SPECS["linear"])
    (site,) = layer.sites
    (keep,) = prong.spectral.keep_probabilities(layer).values()
    U, c = site.whitening.U[0], site.whitening.c[0]
    for kept, _ in zip(itertools.product([True, False], repeat=4), masks(monkeypatch, keep), strict=True):
        expected = layer.d.expand(len(h), -1).clone()
        for i, m in enumerate(kept):
            if m:
                expected += torch.outer((h - c) @ U[i], layer.V[:, i]) / keep[0, i]
        assert_close(layer(h), expected)


@given(st.integers(1, 6), st.integers(2, 9), st.integers(0, 100))
def test_the_eigenvalues_of_a_whitening_are_those_of_the_covariance(features, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(1, rows, features, generator=generator, dtype=torch.float64) * 3
    moments = Moments(1, features, torch.float64)
    moments.add(h)
    lam = torch.linalg.eigvalsh(moments.covariance()).flip(-1)
    assert_close(
        damped_variances(whiten(moments, EPS, "pca")), lam.clamp(min=0) + EPS, atol=1e-10 * (1 + float(lam.max()))
    )


@given(st.lists(st.floats(-6, 4), min_size=1, max_size=12), st.floats(0.01, 0.9), st.sampled_from([0.1, 0.01]))
def test_the_mean_rate_is_the_one_asked_for_and_small_variances_go_first(exponents, rate, least):
    damped = torch.tensor([10.0**e for e in exponents], dtype=torch.float64)
    keep = keep_probabilities(damped, rate, least)
    assert float((1 - keep).mean()) == pytest.approx(rate, abs=1e-9)
    assert float(keep.min()) >= least
    ordered = keep[damped.argsort()]
    assert (ordered.diff() >= -1e-12).all()
    free = keep > least * (1 + 1e-9)
    if free.sum() > 1:  # one tau for all: (1 - p) / p = tau / (lam + eps)
        tau = ((1 - keep) / keep * damped)[free]
        assert_close(tau, tau[:1].expand_as(tau), rtol=1e-6)


def test_the_noise_has_the_same_variance_in_every_direction_of_the_inputs():
    """Measured over many masks at one input: U^-1 (D - 1) x has variance tau x^2 in direction i."""
    layer, h = refreshed(SPECS["linear"], rate=0.3, least=0.001)
    (site,) = layer.sites
    row = h[:1].expand(200_000, -1)
    x = (row[:1] - site.whitening.c[0]) @ site.whitening.U[0].T
    noise = (layer.whitened(site, row) - x) * damped_variances(site.whitening).sqrt()
    variance = noise.square().mean(0) / x[0].square()
    assert_close(variance, variance.mean().expand_as(variance), rtol=0.05)


def test_rows_have_masks_of_their_own_and_positions_of_a_map_share_one():
    layer, _ = refreshed(SPECS["linear"])
    tokens = torch.randn(1, 4).double().expand(3, 50, 4)
    assert len(torch.unique(layer(tokens).flatten(0, 1), dim=0)) > 3
    spec = LayerSpec(nn.Conv2d, {"in_channels": 3, "out_channels": 2, "kernel_size": 1}, (4, 4))
    layer, _ = refreshed(spec)
    maps = torch.randn(1, 3, 1, 1).double().expand(50, 3, 4, 4)
    z = layer(maps)
    assert_close(z, z[:, :, :1, :1].expand_as(z))
    assert len(torch.unique(z[:, :, 0, 0], dim=0)) > 3


def test_probabilities_follow_every_refresh():
    model, data = prong.whiten_(mlp(), "explicit"), batches(mlp(), 2)
    prong.spectral.dropout_(model, 0.3)
    assert prong.spectral.keep_probabilities(model) == {}
    assert_identical(model(data[0][0]), prong.spectral.dropout_(copy.deepcopy(model), 0)(data[0][0]))
    prong.refresh_(model, data[0][0], DAMPING)
    first = prong.spectral.keep_probabilities(model)["0"]
    prong.refresh_(model, data[1][0] * torch.linspace(0.1, 3, 6), DAMPING)
    second = prong.spectral.keep_probabilities(model)["0"]
    assert not torch.allclose(first, second)
    (site,) = model[0].sites
    assert_close(second, keep_probabilities(damped_variances(site.whitening), 0.3, 0.1), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("plus", [False, True], ids=["prong", "plus"])
def test_training_with_prong_drops_and_keeps_statistics_of_whole_inputs(plus):
    """The first layer's inputs are the data whatever is dropped: its whitening is that of training without dropout."""
    plain, dropped = (prong.whiten_(mlp(), prong.Explicit(plus=plus)) for _ in range(2))
    prong.spectral.dropout_(dropped, 0.5)
    data = batches(plain, 9)
    losses = []
    for model in (plain, dropped):
        optimizer = prong.PRONG(model, lr=1e-2, damping=DAMPING, refresh=prong.Every(4))
        losses.append(torch.stack(run(model, optimizer, data)))
    assert torch.isfinite(losses[1]).all() and not torch.allclose(*losses)
    for name in ("U", "U_inv", "c"):
        assert_close(*(getattr(m[0].sites[0].whitening, name) for m in (dropped, plain)), name)


def test_training_with_adam_works_and_resumes_the_probabilities():
    def trained_by_adam():
        model = prong.spectral.dropout_(prong.whiten_(convnet(), "explicit"), 0.2)
        adam = torch.optim.Adam(model.parameters(), lr=1e-3)
        return model, prong.attach(model, adam, damping=DAMPING, refresh=prong.Every(3))

    model, optimizer = trained_by_adam()
    run(model, optimizer, batches(model, 7))
    keep = prong.spectral.keep_probabilities(model)
    assert set(keep) == {"0", "2", "5"}
    assert keep["2"].shape == (2, 2)
    twin, other = trained_by_adam()
    other.load_state_dict(optimizer.state_dict())
    assert_identical(prong.spectral.keep_probabilities(twin), keep)


def test_state_dict_and_function_stay_and_copies_and_pickles_drop_alike():
    model, data = prong.whiten_(mlp(), "explicit"), batches(mlp(), 1)
    prong.refresh_(model, data[0][0], DAMPING)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    prong.spectral.dropout_(model, 0.3)
    assert_identical(dict(model.state_dict()), before)
    assert all(row.note == "spectral dropout" for row in prong.summary(model))
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    outputs = []
    for twin in (model, copy.deepcopy(model), torch.load(stored, weights_only=False)):
        torch.manual_seed(3)
        outputs.append(twin(data[0][0]))
    assert_identical(outputs[1], outputs[0])
    assert_identical(outputs[2], outputs[0])


def test_it_is_removed_by_a_rate_of_zero_and_by_folding():
    model, x = prong.whiten_(mlp(), "explicit"), batches(mlp(), 1)[0][0]
    prong.refresh_(model, x, DAMPING)
    z = model(x)
    prong.spectral.dropout_(model, 0.3)
    assert not torch.allclose(model(x), z)
    assert_identical(prong.spectral.dropout_(copy.deepcopy(model), 0)(x), z)
    folded = prong.fold_(model)
    assert type(folded[0]) is nn.Linear
    assert_close(folded(x), z)


def test_transforms_of_torch_func_draw_masks_as_their_randomness_says():
    model, x = prong.whiten_(mlp(), "explicit"), batches(mlp(), 1)[0][0]
    prong.refresh_(model, x, DAMPING)
    prong.spectral.dropout_(model, 0.4)
    parameters = dict(model.named_parameters())

    def loss(values: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (row,)).square().sum()

    single = torch.func.grad(loss)(parameters, x)  # before any other forward
    assert all(torch.isfinite(g).all() for g in single.values())
    copy.deepcopy(model)(x).sum().backward()  # nothing of the transforms has stayed behind
    per_example = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0), randomness="different")(parameters, x)
    assert all(torch.isfinite(g).all() and g.shape[0] == len(x) for g in per_example.values())
    alike = x[:1].expand(20, -1)
    for randomness, alone in (("same", True), ("different", False)):
        z = torch.func.vmap(model, randomness=randomness)(alike)
        assert torch.allclose(z, z[:1].expand_as(z)) == alone


def test_it_works_under_autocast_after_inference_mode_and_with_checkpointing():
    model = prong.whiten_(mlp(dtype=torch.float32), "explicit")
    x = batches(model, 1, size=64)[0][0]
    prong.refresh_(model, x, DAMPING)
    prong.spectral.dropout_(model, 0.3)
    with torch.inference_mode():
        model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.manual_seed(1)
        low = model(x)
    torch.manual_seed(1)
    assert_close(low.float(), model(x), rtol=0.1, atol=0.05)
    torch.manual_seed(1)
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    again = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(1)
    model(x).sum().backward()
    assert_close(again, [p.grad for p in model.parameters()], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [mlp, convnet])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_works_in_half_precision(make, dtype):
    exact = prong.whiten_(make(), "explicit")
    x = batches(exact, 1, size=64)[0][0]
    prong.spectral.dropout_(prong.refresh_(exact, x, DAMPING), 0.3)
    low = copy.deepcopy(exact).to(dtype)
    outputs = []
    for model in (low, exact.float()):  # which draw the same masks
        torch.manual_seed(1)
        outputs.append(model(x.to(next(model.parameters()).dtype)))
    assert outputs[0].dtype == dtype
    assert_close(outputs[0].float(), outputs[1], rtol=0, atol=0.05)


def test_what_cannot_work_is_refused_before_anything_is_changed():
    explicit = prong.whiten_(mlp(), "explicit")
    for rate, least in ((-0.1, 0.1), (0.95, 0.1), (1.0, 0.1), (math.nan, 0.1), (0.2, 0.0), (0.2, 2.0)):
        with pytest.raises(ValueError, match=r"rate|least"):
            prong.spectral.dropout_(explicit, rate, least=least)
    with pytest.raises(TypeError, match="rate is a number"):
        prong.spectral.dropout_(explicit, "0.2")
    with pytest.raises(ValueError, match="no whitened layer fits 'x'"):
        prong.spectral.dropout_(explicit, 0.2, layers="x")
    assert all(layer.sites[0].dropping is None for layer in explicit[::2])
    with pytest.raises(ValueError, match="no whitened layers"):
        prong.spectral.dropout_(mlp(), 0.2)
    with pytest.raises(ValueError, match=r'implicit.*form="explicit"'):
        prong.spectral.dropout_(prong.whiten_(mlp()), 0.2)
    with pytest.raises(ValueError, match=r"basis 'zca'.*pca"):
        prong.spectral.dropout_(prong.whiten_(mlp(), prong.Explicit("zca")), 0.2)
    for make, form in ((prong.PRONG, "implicit"), (prong.AdamW, "materialised")):
        plain = mlp()
        optimizer = make(plain, 0.1)  # layers stay plain, and no forward of theirs computes with U
        with pytest.raises(ValueError, match=rf'{form} form.*form="explicit"\), then make its optimizer'):
            prong.spectral.dropout_(plain, 0.2)
        assert optimizer.param_groups
    block = prong.whiten_(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), "explicit")
    prong.spectral.dropout_(block, 0.2)
    assert block.linear1.sites[0].dropping is not None
    assert block.self_attn.sites[0].dropping is None
    with pytest.raises(ValueError, match="not for attention"):
        prong.spectral.dropout_(block, 0.2, layers="self_attn*")
