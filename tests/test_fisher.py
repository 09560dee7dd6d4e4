"""Fisher matrices against loops over examples and labels, and against another library."""

from __future__ import annotations

import copy
import warnings
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import prong
from prong import fisher
from prong.attachment import attachment_of
from prong.core.whitening import to_canonical
from prong.model.whiten import whitened_sites
from tests.cases import MODELS
from tests.closeness import assert_close
from tests.fisher_loops import BUILDERS, DISTRIBUTIONS, FORMS, Largest, data_for, looped, whitened
from tests.training import attentive, batches, mlp, train

each_distribution = pytest.mark.parametrize("distribution", DISTRIBUTIONS)
each_model = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
each_form = pytest.mark.parametrize("form", FORMS)


# Exact -----------------------------------------------------------------------------------------------------------


@each_distribution
@each_model
def test_dense_is_the_mean_over_examples_and_labels(build, distribution):
    model = build()
    x = data_for(model)
    assert_close(fisher.dense(model, x, distribution), looped(model, x, distribution), 1e-10, scale=0)


@settings(max_examples=20)
@given(
    widths=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    bias=st.booleans(),
    examples=st.integers(1, 4),
    chunk=st.integers(1, 5),
    distribution=st.sampled_from(DISTRIBUTIONS),
)
def test_any_widths_examples_and_chunks_give_the_same_matrix(widths, bias, examples, chunk, distribution):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(i, o, bias), nn.Tanh()) for i, o in pairwise(widths)]
    model = nn.Sequential(*layers).double()
    x = torch.randn(examples, widths[0], dtype=torch.float64)
    found = fisher.dense(model, x, distribution, chunk=chunk)
    assert_close(found, looped(model, x, distribution), 1e-10)


@each_distribution
@each_model
@each_form
def test_whitening_does_not_change_the_canonical_fisher(build, form, distribution):
    model = build()
    x = data_for(model)
    found = fisher.dense(whitened(model, x, form), x, distribution)
    assert_close(found, looped(model, x, distribution), 1e-10, scale=0)


@each_distribution
@each_model
@pytest.mark.parametrize("basis", ["pca", "cholesky"])
def test_whitened_coordinates_of_the_explicit_form_are_its_own_parameters(build, basis, distribution):
    model = build()
    x = data_for(model)
    model = whitened(model, x, "explicit", basis=basis)
    found = fisher.dense(model, x, distribution, coordinates="whitened")
    assert_close(found, looped(model, x, distribution), 1e-10, scale=0)


@each_distribution
@each_model
@pytest.mark.parametrize(("form", "basis"), [("implicit", "zca"), ("natural", "zca"), ("materialised", "pca")])
def test_whitened_coordinates_of_other_forms_are_those_of_the_explicit_one(build, form, basis, distribution):
    """Of zca, where there is only P; and of plain layers those that their optimizer holds."""
    model = build()
    x = data_for(model)
    twin = whitened(model, x, "explicit", basis=basis)
    found = fisher.dense(whitened(model, x, form, basis), x, distribution, coordinates="whitened")
    assert_close(found, looped(twin, x, distribution), 1e-10, scale=0)


def test_a_thin_inverse_has_the_root_of_the_whole_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x = torch.randn(60, 4).double() @ torch.randn(4, 40).double() + 1  # four directions in forty
    damping = prong.Absolute(1e-2)
    thin = prong.refresh_(prong.whiten_(copy.deepcopy(model), prong.Implicit(cutoff=1.0), layers="0"), x, damping)
    assert thin[0].sites[0].whitening.tail > 0
    whole = prong.refresh_(prong.whiten_(model, layers="0"), x, damping)
    found, expected = (fisher.dense(m, x, "gaussian", coordinates="whitened") for m in (thin, whole))
    assert_close(found, expected, 1e-8)


@each_distribution
@pytest.mark.parametrize("key_size", [None, 3])
@each_form
def test_attention_has_whitened_coordinates_for_each_projection(form, key_size, distribution):
    plain = attentive(key_size)
    x = data_for(plain, 3)
    model = whitened(plain, x, form, basis="zca")
    twin = whitened(plain, x, "explicit", basis="zca")
    found = fisher.dense(model, x, distribution, coordinates="whitened")
    assert_close(found, looped(twin, x, distribution), 1e-10, scale=0)


@each_form
def test_frozen_parameters_are_constants(form):
    model = mlp()
    x = data_for(model)
    model[0].bias.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    model[4].requires_grad_(False)
    model = whitened(model, x, form, basis="zca")
    twin = whitened(prong.fold_(copy.deepcopy(model)), x, "explicit", basis="zca")
    found = fisher.dense(model, x, "categorical", coordinates="whitened")
    assert_close(found, looped(twin, x, "categorical"), 1e-10)
    assert list(fisher.slices(model, "whitened")) == ["0.V", "2.d"]


@each_form
def test_a_bias_frozen_after_the_refresh_is_treated_as_the_layer_treats_it(form):
    model = mlp()
    x = data_for(model)
    model = whitened(model, x, form)
    next(p for name, p in model.named_parameters() if name in ("0.bias", "0.d")).requires_grad_(False)
    found = fisher.dense(model, x, "categorical", coordinates="whitened")
    if form == "explicit":  # b = d - V U c moves with V
        assert_close(found, looped(model, x, "categorical"), 1e-10)
        return
    gradients = fisher.dense(model, x, "categorical")  # b stays: V is W in other units, uncentred
    w = whitened_sites(model)["0"][1].whitening
    lam, E = (None, None) if w.P is None else torch.linalg.eigh(w.P[0])
    root = w.U[0] if w.P is None else E @ lam.sqrt().diag() @ E.T
    whole = torch.kron(torch.eye(9, dtype=torch.float64), root)
    assert_close(found[:54, :54], whole @ gradients[:54, :54] @ whole.T, 1e-10)


def test_tied_weights_are_one_parameter():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    model[2].weight = model[0].weight
    x = torch.randn(4, 3).double()
    assert_close(fisher.dense(model, x, "categorical"), looped(model, x, "categorical"), 1e-10)


def test_a_model_called_with_keywords_or_by_a_function_gives_the_same():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, features, scale):
            return {"logits": scale * self.body(features)}

    model = Named()
    x = data_for(model.body)
    found = fisher.dense(
        model, [{"features": x, "scale": 1.0}], "categorical", forward=lambda m, batch: m(**batch)["logits"]
    )
    expected = fisher.dense(model.body, [(x[:2], None), (x[2:], None)], "categorical")
    assert_close(found, expected, 1e-12)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def test_batches_may_be_nested():
    model = mlp()
    x = data_for(model)
    expected = fisher.dense(model, x, "categorical")
    assert_close(fisher.dense(model, [((x,), None)], "categorical"), expected, 1e-12)
    halves = [Pair(x / 2, x / 2)]
    found = fisher.dense(model, halves, "categorical", forward=lambda m, pair: m(pair.left + pair.right), chunk=4)
    assert_close(found, expected, 1e-12)
    with pytest.raises(TypeError, match="a batch is a tensor"):
        fisher.dense(model, ["x"], "categorical")


@each_form
def test_before_the_first_refresh_whitened_coordinates_are_canonical_ones(form):
    model = mlp()
    x = data_for(model)
    expected = fisher.dense(model, x, "categorical")
    if form in ("implicit", "explicit"):
        prong.whiten_(model, form)
    else:
        optimizer = prong.AdamW(model)
        assert attachment_of(optimizer)
    assert_close(fisher.dense(model, x, "categorical", coordinates="whitened"), expected, 1e-12)


# Blocks ----------------------------------------------------------------------------------------------------------


@each_form
@pytest.mark.parametrize("coordinates", ["canonical", "whitened"])
def test_blocks_are_parts_of_the_whole(form, coordinates):
    model = mlp()
    x = data_for(model)
    model = whitened(model, x, form)
    whole = fisher.dense(model, x, "categorical", coordinates=coordinates)
    where = fisher.slices(model, coordinates)
    weight, bias = ("V", "d") if coordinates == "whitened" else ("weight", "bias")
    found = fisher.blocks(model, x, "categorical", coordinates=coordinates)
    assert list(found) == ["0", "2", "4"]
    for name, block in found.items():
        rows = slice(where[f"{name}.{weight}"].start, where[f"{name}.{bias}"].stop)
        assert_close(block, whole[rows, rows], 1e-12)
    named = fisher.blocks(model, x, "categorical", [f"2.{weight}", "4"], coordinates=coordinates)
    assert_close(named[f"2.{weight}"], whole[where[f"2.{weight}"], where[f"2.{weight}"]], 1e-12)
    assert_close(named["4"], found["4"], 1e-12)


def test_a_block_is_everything_inside_a_module_of_that_name():
    model = nn.ModuleDict({"a": mlp(), "b": nn.Linear(4, 2).double()})
    x = data_for(model["a"])
    run = lambda m, h: m["b"](m["a"](h).tanh())  # noqa: E731
    whole = fisher.dense(model, x, "gaussian", forward=run)
    size = fisher.slices(model)["b.weight"].start
    found = fisher.blocks(model, x, "gaussian", ["a"], forward=run)
    assert_close(found["a"], whole[:size, :size], 1e-12)


# Sampled ---------------------------------------------------------------------------------------------------------


@each_distribution
def test_the_sampled_fisher_approaches_the_exact_one(distribution):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 3)).double()
    x = torch.randn(3, 2).double()
    exact = fisher.dense(model, x, distribution)
    errors = []
    for draws in (100, 10_000):
        generator = torch.Generator().manual_seed(1)
        found = fisher.dense(model, x, distribution, draws=draws, generator=generator)
        errors.append(((found - exact).norm() / exact.norm()).item())
    assert errors[1] < 0.03  # about two over the root of 3 x 10,000 draws
    assert errors[1] < errors[0] / 3


def test_a_generator_decides_what_is_drawn():
    model = mlp()
    x = data_for(model)
    a, b, c = (
        fisher.blocks(model, x, "categorical", draws=1, generator=torch.Generator().manual_seed(seed))["0"]
        for seed in (0, 0, 1)
    )
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


# Products --------------------------------------------------------------------------------------------------------


@each_distribution
@each_model
@each_form
@pytest.mark.parametrize("coordinates", ["canonical", "whitened"])
def test_the_operator_multiplies_like_the_matrix(build, form, coordinates, distribution):
    model = build()
    x = data_for(model)
    model = whitened(model, x, form)
    F = fisher.dense(model, x, distribution, coordinates=coordinates)
    operator = fisher.Operator(model, [x[:4], x[4:]], distribution, coordinates=coordinates, chunk=3)
    v = torch.randn(len(F), 2, dtype=torch.float64)
    assert operator.shape == F.shape
    assert operator.slices == fisher.slices(model, coordinates)
    assert_close(operator @ v[:, 0], F @ v[:, 0], 1e-10)
    assert_close(operator @ v, F @ v, 1e-10)


def test_the_operator_works_through_attention_and_norms():
    model, x = MODELS["transformer"].build(), MODELS["transformer"].sample(3)
    operator = fisher.Operator(model, x, "gaussian")
    v = torch.randn(operator.shape[0], dtype=torch.float64)
    assert_close(operator @ v, fisher.dense(model, x, "gaussian") @ v, 1e-10)


def test_the_operator_keeps_the_model_of_its_time():
    model = mlp()
    x = data_for(model)
    operator = fisher.Operator(model, x, "gaussian")
    v = torch.randn(operator.shape[0], dtype=torch.float64)
    before = operator @ v
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.equal(operator @ v, before)


def test_the_operator_says_what_it_cannot_differentiate():
    class Rounded(torch.autograd.Function):
        """Without a forward-mode derivative."""

        @staticmethod
        def forward(x):
            return x.round()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    model = mlp()
    operator = fisher.Operator(model, data_for(model), "gaussian", forward=lambda m, h: Rounded.apply(m(h)))
    with pytest.raises(ValueError, match=r"cannot be differentiated with torch\.func"):
        operator @ torch.zeros(operator.shape[0], dtype=torch.float64)


# Another library -------------------------------------------------------------------------------------------------


def curvlinops_fisher(model, x, distribution):
    """The generalised Gauss-Newton matrix of the negative log-likelihood, which is the Fisher."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        curvlinops = pytest.importorskip("curvlinops", reason="curvlinops-for-pytorch is not installed")
        loss, factor = {
            "categorical": (nn.CrossEntropyLoss(reduction="sum"), 1.0),
            "bernoulli": (nn.BCEWithLogitsLoss(reduction="sum"), 1.0),
            "gaussian": (nn.MSELoss(reduction="sum"), 0.5),
        }[distribution]
        with torch.no_grad():
            output = model(x)
        y = output.argmax(1) if distribution == "categorical" else torch.zeros_like(output)
        operator = curvlinops.GGNLinearOperator(model, loss, list(model.parameters()), [(x, y)])
        matrix = operator @ torch.eye(operator.shape[1], dtype=x.dtype)
    return matrix * factor / len(x)


@each_distribution
@each_model
def test_curvlinops_finds_the_same_matrix(build, distribution):
    model = build()
    x = data_for(model)
    assert_close(fisher.dense(model, x, distribution), curvlinops_fisher(model, x, distribution), 1e-10, scale=0)


@each_distribution
@each_model
@each_form
def test_curvlinops_finds_the_same_matrix_in_whitened_parameters(build, form, distribution):
    model = build()
    x = data_for(model)
    expected = curvlinops_fisher(whitened(model, x, "explicit", basis="zca"), x, distribution)
    model = whitened(model, x, form, basis="zca")
    assert_close(fisher.dense(model, x, distribution, coordinates="whitened"), expected, 1e-10, scale=0)


# The model is left alone -----------------------------------------------------------------------------------------


def everything(model, x, generator):
    for coordinates in ("canonical", "whitened"):
        fisher.dense(model, x, "categorical", coordinates=coordinates)
        fisher.blocks(model, x, "categorical", draws=2, generator=generator, coordinates=coordinates)
        operator = fisher.Operator(model, x, "categorical", coordinates=coordinates)
        fisher.extreme_eigenvalues(operator, steps=3)
    layers = [name for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d) and name != "mix"]
    fisher.factors(model, x, "categorical", layers)


@each_form
def test_models_come_out_as_they_went_in(form):
    model = whitened(MODELS["net"].build(), MODELS["net"].sample(8), form).train()
    model.drop.eval()
    x = MODELS["net"].sample(4)
    model(x).sum().backward()
    seen = []
    model.head.register_forward_hook(lambda *_: seen.append(1))
    before = (
        {name: (p, p.clone(), p.grad, p.grad.clone()) for name, p in model.named_parameters()},
        {name: (b, b.clone()) for name, b in model.named_buffers()},
        [m.training for m in model.modules()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()],
        torch.get_rng_state(),
    )
    everything(model, x, torch.Generator())
    for name, p in model.named_parameters():
        old, value, grad, grad_value = before[0][name]
        assert p is old and p.grad is grad
        assert torch.equal(p, value) and torch.equal(grad, grad_value)
    for name, b in model.named_buffers():
        assert b is before[1][name][0] and torch.equal(b, before[1][name][1])
    assert [m.training for m in model.modules()] == before[2]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()]
    assert hooks == before[3]
    assert torch.equal(torch.get_rng_state(), before[4])
    assert form in ("natural", "materialised") or not model.head.switch.ordinary


def results(model, x):
    """Something of everything, for either coordinates."""
    for coordinates in ("canonical", "whitened"):
        yield fisher.dense(model, [x[:2], x[2:]], "categorical", coordinates=coordinates)
        yield fisher.blocks(model, x, "categorical", coordinates=coordinates)["0"]
        pairs = fisher.factors(model, [x[:2], x[2:]], "categorical", coordinates=coordinates)
        yield from (pair.relative_error(torch.eye(len(pair.matrix())).double()) for pair in pairs.values())
        operator = fisher.Operator(model, x, "categorical", coordinates=coordinates, chunk=4)
        yield operator @ torch.ones(operator.shape[0], 2, dtype=torch.float64)
        yield fisher.extreme_eigenvalues(operator, steps=10).largest


@each_form
@pytest.mark.parametrize("made_inside", [False, True])
def test_inference_mode_changes_nothing(form, made_inside):
    plain = mlp()
    model, x = whitened(plain, data_for(plain), form), data_for(plain)
    expected = list(results(model, x))
    with torch.inference_mode():
        if made_inside:
            x = x.clone()
        if made_inside and form in ("implicit", "explicit"):  # a copy of a plain model has no optimizer
            model = copy.deepcopy(model)
            assert all(t.is_inference() for t in (x, *model.parameters(), model[0].sites[0].whitening.c))
        found = list(results(model, x))
        operator = fisher.Operator(model, x, "categorical")
        v = torch.ones(operator.shape[0], dtype=torch.float64)
    for a, b in zip(found, expected, strict=True):
        assert_close(torch.as_tensor(a), torch.as_tensor(b), 1e-12)
    assert_close(operator @ v, fisher.dense(model, x, "categorical") @ v, 1e-10)


def test_backward_hooks_of_the_model_stay_and_do_not_run():
    model = mlp()
    x = data_for(model)
    expected = list(results(model, x))
    seen = []
    model[2].register_full_backward_hook(lambda *_: seen.append("hook"))
    model[2].register_full_backward_pre_hook(lambda *_: seen.append("pre-hook"))
    model.register_full_backward_hook(lambda *_: seen.append("model"))
    for a, b in zip(results(model, x), expected, strict=True):
        assert_close(torch.as_tensor(a), torch.as_tensor(b), 1e-12)
    assert not seen
    model(x.requires_grad_()).sum().backward()
    assert sorted(seen) == ["hook", "model", "pre-hook"]


OPTIMIZERS = {
    "implicit": lambda m, refresh: prong.PRONG(m, 1e-2, form="implicit", refresh=refresh),
    "explicit": lambda m, refresh: prong.PRONG(m, 1e-2, form="explicit", refresh=refresh),
    "outputs": lambda m, refresh: prong.PRONG(m, 1e-2, outputs=prong.WhitenOutputs("categorical"), refresh=refresh),
    "plain": lambda m, refresh: prong.PRONG(m, 1e-2, refresh=refresh),
    "adamw": lambda m, refresh: prong.AdamW(m, refresh=refresh),
    "muon": lambda m, refresh: prong.Muon(m, refresh=refresh),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_looking_at_the_fisher_does_not_change_a_training_run(make):
    ends = []
    for look in (False, True):
        model = mlp()
        optimizer = make(model, prong.Every(3))
        for step, _ in enumerate(train(model, optimizer, batches(model, 8))):
            if look and step in (1, 4):
                everything(model, data_for(model, 3), torch.Generator())
        ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(*ends)


def test_the_fisher_in_the_coordinates_of_adamw_is_that_of_what_it_holds():
    """Its U is scaled; and plain layers may be whitened in blocks."""
    model = mlp()
    x = data_for(model)
    optimizer = prong.AdamW(model, form=prong.Materialised(block=4), refresh=prong.Every(1))
    list(train(model, optimizer, batches(model, 3)))
    assert whitened_sites(model)["0"][1].whitening.scale != 1
    held = {name: layer.coordinates(site) for name, (layer, site) in whitened_sites(model).items()}
    values = {f"{name}.{key}": t.detach() for name, pair in held.items() for key, t in zip("Vd", pair, strict=True)}
    sites = {name: site for name, (_, site) in whitened_sites(model).items()}

    def output(parameters):
        canonical = {}
        for name, site in sites.items():
            packed = site.packed(parameters[f"{name}.V"], parameters[f"{name}.d"])
            W, b = site.unpacked(*to_canonical(*packed, site.whitening))
            canonical |= {f"{name}.weight": W, f"{name}.bias": b}
        return torch.func.functional_call(model, canonical, (x,))

    parts = torch.func.jacrev(output)(values).values()
    J = torch.cat([part.flatten(2) for part in parts], dim=2)
    expected = torch.einsum("nka,nkb->ab", J, J) / len(x)
    assert_close(fisher.dense(model, x, "gaussian", coordinates="whitened"), expected, 1e-10, scale=0)


def test_the_fisher_is_that_of_the_model_in_eval_mode():
    model, x = MODELS["net"].build(), MODELS["net"].sample(4)
    model.train()
    model(x)  # batch norm has seen something
    found = fisher.dense(model, x, "categorical")
    assert_close(found, looped(model.eval(), x, "categorical"), 1e-10)


# Sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_memory_is_bounded_by_the_chunk(chunk):
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 30))
    size, outputs = 98, 30
    with Largest() as largest:
        fisher.dense(model, torch.randn(64, 3), "categorical", chunk=chunk)
    assert largest.entries == max(size**2, chunk * outputs * size)


def test_what_would_not_fit_is_refused_before_anything_is_computed():
    model = nn.Linear(1000, 1000)
    with pytest.raises(ValueError, match=r"4.01e\+03 GB.*Operator"):
        fisher.dense(model, None, "gaussian")
    with pytest.raises(ValueError, match="1e-06 GB"):
        fisher.blocks(mlp(), None, "gaussian", max_bytes=1000)


# Errors ----------------------------------------------------------------------------------------------------------


def test_bad_input_is_refused_with_a_cure():
    model = mlp()
    x = data_for(model)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        fisher.dense("model", x, "categorical")
    with pytest.raises(ValueError, match="categorical, bernoulli, gaussian"):
        fisher.dense(model, x, "poisson")
    with pytest.raises(ValueError, match="one of canonical, whitened"):
        fisher.dense(model, x, "categorical", coordinates="polar")
    with pytest.raises(ValueError, match="chunk is at least 1"):
        fisher.dense(model, x, "categorical", chunk=0)
    with pytest.raises(ValueError, match="draws and generator"):
        fisher.dense(model, x, "categorical", draws=3)
    with pytest.raises(ValueError, match="no batches"):
        fisher.dense(model, [], "categorical")
    with pytest.raises(ValueError, match=r"There are: 0.weight"):
        fisher.blocks(model, x, "categorical", ["3"])
    with pytest.raises(ValueError, match="does not take this batch"):
        fisher.dense(model, x[:, :2], "categorical")
    with pytest.raises(ValueError, match="first dimension"):
        fisher.dense(model, x, "categorical", forward=lambda m, h: m(h).mean(0))
    with pytest.raises(ValueError, match="first dimension of every tensor"):
        fisher.dense(model, x[:0], "categorical")
    with pytest.raises(ValueError, match="classes at dimension 1"):
        fisher.dense(model, x, "categorical", forward=lambda m, h: m(h)[:, 0])
    with pytest.raises(TypeError, match="one tensor"):
        fisher.dense(model, x, "categorical", forward=lambda m, h: (m(h),))
    with pytest.raises(FloatingPointError, match="not finite"):
        fisher.dense(model, x * torch.inf, "categorical")
    with pytest.raises(ValueError, match="example by example"):
        fisher.dense(model, x, "categorical", forward=lambda m, h: m(h) * m(h).sum().item())
    with pytest.raises(ValueError, match="requires_grad=False"):
        fisher.dense(copy.deepcopy(model).requires_grad_(False), x, "categorical")
    operator = fisher.Operator(model, x, "categorical")
    with pytest.raises(ValueError, match="165 entries"):
        operator @ torch.zeros(3, dtype=torch.float64)
    with pytest.raises(TypeError, match="float32"):
        operator @ torch.zeros(165)


def test_models_without_an_output_per_example_or_a_copy_are_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False))
    with pytest.raises(ValueError, match=r"'1' normalises.*track_running_stats=True"):
        fisher.dense(model, torch.randn(4, 3), "gaussian")
    model = nn.Linear(3, 3)
    model.last = model.weight * 2  # not a leaf
    with pytest.raises(ValueError, match="copy of the model"):
        fisher.dense(model, torch.randn(4, 3), "gaussian")
    with pytest.raises(ValueError, match="run one forward first"):
        fisher.dense(nn.Sequential(nn.LazyLinear(3)), torch.randn(4, 3), "gaussian")


def test_a_rounded_inverse_without_a_root_is_refused():
    model = mlp()
    model = whitened(model, data_for(model), "implicit")
    model[0].sites[0].whitening.P.neg_()
    with pytest.raises(ValueError, match=r"layer '0'.*larger damping"):
        fisher.dense(model, data_for(model), "gaussian", coordinates="whitened")
