"""Kronecker factors of Fisher blocks against loops over examples, labels and positions."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from prong import fisher
from tests.cases import MODELS, conv_specs
from tests.closeness import assert_close
from tests.fisher_loops import BUILDERS, DISTRIBUTIONS, FORMS, Largest, data_for, losses, segmenter, whitened
from tests.training import mlp

LINEAR = ["0", "2", "4"]
each_distribution = pytest.mark.parametrize("distribution", DISTRIBUTIONS)
each_form = pytest.mark.parametrize("form", FORMS)


def positions_of(z, layer):
    """Outputs or their gradients of one example as (positions, out)."""
    return z.reshape(-1, z.shape[-1]) if isinstance(layer, nn.Linear) else z[0].flatten(1).T


def unit_filters(layer, h):
    """What each output position of a convolution sees, (examples, positions, channels x taps): by unit filters."""
    seen = copy.deepcopy(layer)
    size = layer.weight[0].numel()
    seen.out_channels = size * layer.groups
    seen.weight = nn.Parameter(
        torch.eye(size)
        .double()
        .view(size, *layer.weight.shape[1:])
        .repeat(layer.groups, *[1] * (layer.weight.dim() - 1))
    )
    seen.bias = None
    return seen(h).detach().flatten(2).transpose(1, 2)


def looped_factors(model, name, x, distribution):
    """A and G of one layer of a plain model, by autograd for every example, label and position."""
    layer = model.get_submodule(name)
    groups = getattr(layer, "groups", 1)
    kept = {}
    handle = layer.register_forward_hook(lambda m, args, z: kept.update(h=args[0].detach(), z=z))
    A, G, positions = 0, 0, 0
    for example in x:
        output = model(example.unsqueeze(0))[0]
        h, z = kept["h"], kept["z"]
        seen = positions_of(h, layer) if isinstance(layer, nn.Linear) else unit_filters(layer, h)[0]
        parts = seen.view(len(seen), groups, -1).transpose(0, 1)
        if layer.bias is not None:
            parts = torch.cat([parts, torch.ones_like(parts[..., :1])], 2)
        A = A + torch.stack([sum(torch.outer(row, row) for row in part) for part in parts])
        positions += len(seen)
        for p, loss in losses(output, distribution):
            (delta,) = torch.autograd.grad(loss, z, retain_graph=True)
            rows = positions_of(delta, layer)
            rows = rows.reshape(len(rows), groups, -1).transpose(0, 1)
            G = G + p * torch.stack([sum(torch.outer(row, row) for row in part) for part in rows])
    handle.remove()
    return A / len(x), G / positions


@each_distribution
@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_factors_are_means_over_examples_labels_and_positions(build, distribution):
    model = build()
    x = data_for(model, 5)
    found = fisher.factors(model, [x[:2], x[2:]], distribution, chunk=2)
    assert len(found) == sum(isinstance(m, nn.Linear | nn.Conv2d) for m in model.modules())
    for name, pair in found.items():
        A, G = looped_factors(model, name, x, distribution)
        assert_close((pair.A, pair.G), (A, G), 1e-10, scale=0)


@each_distribution
def test_batches_may_differ_in_their_number_of_positions(distribution):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    short, long = torch.randn(3, 2, 3).double(), torch.randn(2, 5, 3).double()
    run = lambda m, h: m(h).transpose(1, 2)  # noqa: E731
    found = [fisher.factors(model, list(b), distribution, forward=run) for b in ((short, long), (long, short))]
    for name in ("0", "2"):
        layered = nn.Sequential(*model, Transposed())
        A, G = looped_factors(layered, name, [*short, *long], distribution)
        for pair in (f[name] for f in found):
            assert_close((pair.A[0], pair.G[0]), (A[0], G[0]), 1e-10, scale=0)


class Transposed(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


class Constant(nn.Module):
    """One layer sees a table of so many rows, the same for all examples."""

    def __init__(self, *shape):
        super().__init__()
        self.register_buffer("table", torch.randn(shape))
        self.embed = nn.Linear(shape[-1], 2)
        self.body = nn.Linear(3, 2)

    def forward(self, x):
        return self.body(x) + self.embed(self.table).reshape(-1, 2).sum(0)


@pytest.mark.parametrize("shape", [(2,), (1, 2), (4, 2), (8, 2), (1, 4, 2)])
@pytest.mark.parametrize("chunk", [1, 3, 4, 128])
def test_a_layer_whose_inputs_do_not_scale_with_the_batch_is_refused_by_name(shape, chunk):
    model, x = Constant(*shape), torch.randn(4, 3)
    with pytest.raises(ValueError, match=r"layer 'embed' sees inputs of shape .*blocks"):
        fisher.factors(model, x, "gaussian", chunk=chunk)
    assert list(fisher.factors(model, x, "gaussian", ["body"], chunk=chunk)) == ["body"]


def test_no_more_than_one_row_of_output_gradients_is_made_at_a_time():
    model = nn.Linear(2, 60)
    for distribution in DISTRIBUTIONS:
        with Largest() as largest:
            fisher.factors(model, torch.randn(64, 2), distribution)
        assert largest.entries == 64 * 60


@settings(max_examples=25)
@given(spec=conv_specs())
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
def test_patches_are_what_unit_filters_see(spec):
    torch.manual_seed(0)
    layer, x = spec.build(), spec.sample(2)
    found = fisher.factors(layer, x, "gaussian")[""]
    seen = unit_filters(layer, x).flatten(0, 1)
    parts = seen.view(len(seen), layer.groups, -1).transpose(0, 1)
    if layer.bias is not None:
        parts = torch.cat([parts, torch.ones_like(parts[..., :1])], 2)
    assert_close(found.A, parts.mT @ parts / 2, 1e-10)
    identity = torch.eye(layer.out_channels // layer.groups, dtype=torch.float64)
    assert_close(found.G, identity.expand(layer.groups, -1, -1), 1e-10)


@pytest.mark.parametrize("bias", [True, False])
def test_for_the_last_layer_and_unit_variance_the_approximation_is_exact(bias):
    model = mlp(bias)
    x = data_for(model)
    pair = fisher.factors(model, x, "gaussian", "4")["4"]
    assert pair.relative_error(fisher.blocks(model, x, "gaussian", ["4"])["4"]) < 1e-12


@each_form
@each_distribution
def test_for_one_example_and_one_position_the_approximation_is_exact_in_every_coordinates(form, distribution):
    model = mlp()
    model = whitened(model, data_for(model), form)
    x = data_for(model, 1)
    for coordinates in ("canonical", "whitened"):
        found = fisher.factors(model, x, distribution, coordinates=coordinates)
        exact = fisher.blocks(model, x, distribution, coordinates=coordinates)
        assert all(found[name].relative_error(exact[name]) < 1e-12 for name in LINEAR)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_convolution_of_one_position_is_exact_too(groups):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=groups), nn.Flatten()).double()
    x = torch.randn(1, 4, 3, 3).double()
    pair = fisher.factors(model, x, "gaussian")["0"]
    assert pair.relative_error(fisher.blocks(model, x, "gaussian")["0"]) < 1e-12  # its groups have separate outputs


def test_the_error_is_the_relative_frobenius_norm_of_the_difference():
    model = mlp()
    x = data_for(model)
    pair = fisher.factors(model, x, "categorical")["0"]
    block = fisher.blocks(model, x, "categorical")["0"]
    order = torch.cat([torch.arange(54).view(9, 6), torch.arange(54, 63).view(9, 1)], 1).flatten()  # rows of [W b]
    product = torch.kron(pair.G[0], pair.A[0])
    expected = (block[order][:, order] - product).norm() / block.norm()
    assert pair.relative_error(block) == pytest.approx(expected.item(), rel=1e-12)
    assert 0.01 < pair.relative_error(block) < 1


@each_form
def test_after_a_refresh_on_the_same_data_whitened_inputs_have_the_identity_as_their_factor(form):
    model = mlp()
    x = data_for(model, 40)
    model = whitened(model, x, form, eps=1e-12)
    found = fisher.factors(model, x, "categorical", coordinates="whitened")
    for name in LINEAR:
        A = found[name].A[0]
        assert_close(A, torch.eye(len(A), dtype=torch.float64), 1e-8)


@each_form
def test_whitened_factors_of_convolutions_whiten_every_tap(form):
    plain = segmenter()
    x = data_for(plain, 8)
    model = whitened(plain, x, form, basis="zca")
    found = fisher.factors(model, x, "categorical", coordinates="whitened")
    for name, pair in fisher.factors(model, x, "categorical").items():
        layer = plain.get_submodule(name)
        w = whitened(plain, x, "explicit", basis="zca").get_submodule(name).sites[0].whitening
        taps = layer.kernel_size[0] * layer.kernel_size[1]
        map_ = torch.kron(w.U[0], torch.eye(taps, dtype=torch.float64))
        if layer.bias is not None:
            shift = -map_ @ w.c[0].repeat_interleave(taps)
            map_ = torch.cat([torch.cat([map_, shift.unsqueeze(1)], 1), torch.eye(len(map_) + 1).double()[-1:]])
        assert_close(found[name].A[0], map_ @ pair.A[0] @ map_.T, 1e-10)
        assert_close(found[name].G, pair.G, 1e-12)


def test_in_place_activations_do_not_spoil_the_gradients():
    x = data_for(mlp())
    found = []
    for inplace in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=inplace), nn.Linear(5, 3)).double()
        found.append(fisher.factors(model, x, "bernoulli")["0"].G)
    assert torch.equal(*found)


def test_layers_without_factors_are_left_out_or_refused_by_name():
    model, x = MODELS["net"].build(), MODELS["net"].sample(3)
    with pytest.raises(ValueError, match="'mix' is called more than once"):
        fisher.factors(model, x, "categorical")
    assert list(fisher.factors(model, x, "categorical", ["conv", "head"])) == ["conv", "head"]
    with pytest.raises(ValueError, match=r"'norm' is a BatchNorm2d.*blocks"):
        fisher.factors(model, x, "categorical", ["norm"])
    with pytest.raises(ValueError, match="no layer is called 'tail'"):
        fisher.factors(model, x, "categorical", ["tail"])
    model.head.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="not trained"):
        fisher.factors(model, x, "categorical", ["head"])
    cnn, x = MODELS["cnn"].build(), MODELS["cnn"].sample(3)
    assert list(fisher.factors(cnn, x, "categorical")) == ["0", "4"]  # not the transposed convolution
    unused = nn.ModuleDict({"used": nn.Linear(3, 2), "other": nn.Linear(3, 2)})
    with pytest.raises(ValueError, match="'other' is never called"):
        fisher.factors(unused, torch.randn(4, 3), "gaussian", ["other"], forward=lambda m, h: m["used"](h))
    with pytest.raises(ValueError, match="same layer"):
        fisher.factors(mlp(), data_for(mlp()), "gaussian")["0"].relative_error(torch.eye(3))
    with pytest.raises(ValueError, match=r"sees inputs of shape \(1, 5\)"):
        convolution = nn.Conv1d(1, 1, 2)
        fisher.factors(convolution, torch.randn(1, 5), "gaussian")
