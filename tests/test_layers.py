"""Every kind of layer, with every option, in every form, against plain torch layers and the formulas written out."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import prong
from prong.attachment import attachment_of
from prong.core.moments import accumulation_dtype
from prong.core.whitening import Whitening
from prong.layers import Site
from prong.layers.natural import Linear, Switch, natural, naturalize
from prong.model.whiten import whitened_layers, whitened_sites
from tests.cases import (
    FORMS,
    MODELS,
    PROPERTY,
    SPECS,
    VIEWS,
    LayerSpec,
    assert_close,
    assert_identical,
    attached,
    canonical_step,
    curved,
    gradients_of,
    layer_specs,
    moments_of,
    natural_of_plain,
    parameter_gradients,
    plain_copy,
    samples_of,
    step_of,
    trained,
)

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

forms = pytest.mark.parametrize("form", FORMS)
views = pytest.mark.parametrize("form", VIEWS)
every_form = pytest.mark.parametrize("form", [*FORMS, *VIEWS])
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
seeds = st.integers(0, 1000)
dampings = st.sampled_from([1e-3, 1e-2, 1.0])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def refreshed(spec: LayerSpec, form: str, eps: float = 1e-2, examples: int = 6) -> tuple[nn.Module, torch.Tensor]:
    """A whitened layer of this kind and the inputs its whitening was estimated from."""
    layer = prong.whiten_(spec.build(), form)
    h = spec.sample(examples)
    return prong.refresh_(layer, h, prong.Absolute(eps)), h


def site_of(layer: nn.Module) -> Site:
    """The only site of a layer, whichever form it has."""
    ((_, site),) = whitened_sites(layer).values()
    return site


def inverse_of(whitening: Whitening) -> torch.Tensor:
    """(Sigma + eps I)^-1, whatever a form keeps of it."""
    return whitening.P if whitening.U is None else whitening.U.mT @ whitening.U


# The function ---------------------------------------------------------------------------------------------------------


@every_form
@PROPERTY
@given(spec=layer_specs(), seed=seeds)
def test_before_a_refresh_a_layer_is_the_plain_one_to_the_bit_gradients_included(form, spec, seed):
    torch.manual_seed(seed)
    plain = spec.build()
    layer = copy.deepcopy(plain)
    optimizer = attached(layer, form)
    h = spec.sample(3)
    assert_identical(layer(h, **spec.call), plain(h, **spec.call), "output")
    for mine, theirs, what in zip(
        gradients_of(layer, h, call=spec.call),
        gradients_of(plain, h, call=spec.call),
        ("weight", "bias", "input"),
        strict=True,
    ):
        assert_identical(mine, theirs, what)
    expected = step_of(plain, torch.optim.SGD(plain.parameters(), lr=1.0), curved(plain(h, **spec.call)))
    assert_identical(step_of(layer, optimizer, curved(layer(h, **spec.call))), expected, "step")


@every_form
@PROPERTY
@given(spec=layer_specs(), seed=seeds, eps=dampings, basis=st.sampled_from(["pca", "zca", "cholesky"]))
def test_refreshes_and_folding_preserve_the_function_and_the_inputs_gradient(form, spec, seed, eps, basis):
    torch.manual_seed(seed)
    plain = spec.build()
    h = spec.sample(3)
    z, (_, _, gh) = plain(h, **spec.call), gradients_of(plain, h, call=spec.call)
    layer = copy.deepcopy(plain)
    _optimizer = attached(layer, form, basis)
    for examples in (2, 7, 3):
        prong.refresh_(layer, spec.sample(examples), eps)
        assert_close(layer(h, **spec.call), z, "output")
        assert_close(gradients_of(layer, h, call=spec.call)[2], gh, "gradient of the input")
        assert_close(layer.weight, plain.weight, "canonical weight")
        assert_close(layer.bias, plain.bias, "canonical bias")
    prong.fold_(layer)
    assert type(layer) is type(plain)
    assert_close(layer(h, **spec.call), z, "output after folding")


@PROPERTY
@given(spec=layer_specs(), seed=seeds, eps=dampings, examples=st.integers(2, 8))
def test_implicit_gradients_equal_the_formula_on_plain_gradients(spec, seed, eps, examples):
    torch.manual_seed(seed)
    layer, h = refreshed(spec, "implicit", eps, examples)
    plain = plain_copy(layer)
    gW, gb, gh = gradients_of(plain, h, call=spec.call)
    nW, nb = natural_of_plain(plain, gW, gb, moments_of(plain, h), eps)
    weight, bias, inputs = gradients_of(layer, h, call=spec.call)
    assert_close(weight, nW, "weight", rtol=1e-9)
    assert_close(bias, nb, "bias", rtol=1e-9)
    assert_close(inputs, gh, "input")


@views
@PROPERTY
@given(spec=layer_specs(), seed=seeds, eps=dampings, examples=st.integers(2, 8))
def test_steps_of_plain_layers_equal_the_formula_on_their_gradients_which_stay_plain(form, spec, seed, eps, examples):
    torch.manual_seed(seed)
    layer, h = spec.build(), spec.sample(examples)
    optimizer = attached(layer, form)
    prong.refresh_(layer, h, prong.Absolute(eps))
    plain = plain_copy(layer)
    gW, gb, _ = gradients_of(plain, h, call=spec.call)
    nW, nb = natural_of_plain(plain, gW, gb, moments_of(plain, h), eps)
    step = step_of(layer, optimizer, curved(layer(h, **spec.call)))
    assert_close(step["weight"], nW, "weight", rtol=1e-8, atol=1e-9)
    assert_close(step.get("bias"), nb, "bias", rtol=1e-8, atol=1e-9)
    assert_close((layer.weight.grad, None if nb is None else layer.bias.grad), (gW, gb), "gradients after the step")


@PROPERTY
@given(spec=layer_specs(), seed=seeds, eps=dampings, basis=st.sampled_from(["pca", "zca", "cholesky"]))
def test_explicit_gradients_seen_in_canonical_coordinates_equal_implicit_ones(spec, seed, eps, basis):
    torch.manual_seed(seed)
    implicit, h = refreshed(spec, "implicit", eps)
    explicit = prong.whiten_(plain_copy(implicit), prong.Explicit(basis))
    prong.refresh_(explicit, h, prong.Absolute(eps))
    weight, bias, inputs = gradients_of(implicit, h, call=spec.call)
    gV, gd, gh = gradients_of(explicit, h, call=spec.call)
    W, b = canonical_step(explicit, gV, gd)
    assert_close(W, weight, "weight", rtol=1e-9)
    assert_close(b, bias, "bias", rtol=1e-9)
    assert_close(gh, inputs, "input")


@PROPERTY
@given(inputs=st.integers(1, 5), rows=st.integers(1, 6), bias=st.booleans(), fused=st.booleans(), seed=seeds)
def test_activation_space_and_gradient_space_agree(inputs, rows, bias, fused, seed):
    torch.manual_seed(seed)
    spec = LayerSpec(
        nn.Linear, {"in_features": inputs, "out_features": rows + 1, "bias": bias}
    )  # more outputs than rows
    layer, _ = refreshed(spec, "implicit")
    (site,) = layer.sites
    h = spec.sample(rows).requires_grad_()
    W, b = layer.weight, layer.bias
    parameters = [h, W] if b is None else [h, W, b]
    whitening = replace(site.whitening, cP=site.whitening.cP if fused else None)
    in_activation_space = natural(Linear(site.layout), h, W, b, whitening, Switch())
    in_gradient_space = F.linear(h, *naturalize(W, b, whitening, site.layout, Switch()))
    assert_close(in_activation_space, in_gradient_space)
    expected = torch.autograd.grad(curved(in_gradient_space), parameters)
    assert_close(torch.autograd.grad(curved(in_activation_space), parameters), expected, rtol=1e-9)
    many = torch.cat([h, h])  # as many rows as outputs or more: gradient space, twice the above
    twice = torch.autograd.grad(curved(layer(h)) * 2, parameters[1:])
    halves = torch.autograd.grad(sum(curved(z) for z in layer(many).chunk(2)), parameters[1:])
    assert_close(halves, twice, rtol=1e-9)


@pytest.mark.parametrize("length", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("space", [10, 2000], ids=["activation", "gradient"])
def test_steps_of_inputs_with_a_mean_have_the_digits_of_single_precision(length, space):
    torch.manual_seed(0)
    h = torch.randn(2000, 200) @ torch.randn(200, 200) / 200**0.5 + length * torch.randn(200)
    exact = prong.whiten_(nn.Linear(200, 100).double())
    prong.refresh_(exact, [h.double()], prong.Absolute(0.1))
    h, delta, gradients = h[:space], torch.randn(space, 100), []
    for layer in (exact, copy.deepcopy(exact).float()):
        assert layer.sites[0].whitening.cP is not None
        gradients.append(torch.autograd.grad(layer(h.to(layer.weight)), layer.weight, delta.to(layer.weight))[0])
    double, single = gradients
    assert (single - double).norm() < 1e-5 * double.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [16, 256], ids=["activation", "gradient"])
def test_constant_inputs_of_half_precision_do_not_spoil_steps(dtype, rows):
    torch.manual_seed(0)
    h = torch.randn(512, 20)
    h[:, -4:] = 1  # no variance: the gain is 1 / eps
    h = h.to(dtype)
    half = prong.refresh_(prong.whiten_(nn.Linear(20, 64).to(dtype)), [h], prong.Absolute(1e-3))
    exact = copy.deepcopy(half).double()
    delta = torch.randn(rows, 64).to(dtype)
    low, high = (
        torch.autograd.grad(layer(h[:rows].to(layer.weight)), layer.weight, delta.to(layer.weight))[0].double()
        for layer in (half, exact)
    )
    assert (low - high).norm() < 0.02 * high.norm()


# Shapes and reuse -----------------------------------------------------------------------------------------------------


@forms
@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3), (2, 1, 3, 2), (0,), (2, 0)], ids=str)
def test_a_linear_layer_takes_any_leading_shape(form, shape):
    layer, _ = refreshed(SPECS["linear"], form)
    h = torch.randn(*shape, 4).double()
    plain = plain_copy(layer)
    assert_close(layer(h), plain(h), "output")
    weight, bias, inputs = gradients_of(layer, h)
    assert inputs.shape == h.shape
    gW, gb, gh = gradients_of(layer, h.reshape(-1, 4))
    assert_close((weight, bias, inputs), (gW, gb, gh.view(h.shape)))


@forms
@pytest.mark.parametrize("spec", [SPECS["conv2d"], SPECS["transposed2d"]], ids=["conv2d", "transposed2d"])
def test_a_convolution_takes_unbatched_and_empty_inputs(form, spec):
    layer, h = refreshed(spec, form)
    plain = plain_copy(layer)
    assert_close(layer(h[0]), plain(h[0]), "unbatched")
    one, alone = gradients_of(layer, h[:1]), gradients_of(layer, h[0])
    assert_close(alone[:2], one[:2], "gradients of one example")
    assert layer(h[:0]).shape == plain(h[:0]).shape
    assert not any(g.any() for g in gradients_of(layer, h[:0])[:2])


@every_form
def test_statistics_of_unbatched_and_of_empty_batches_are_counted_as_they_should(form):
    for spec in (SPECS["linear"], SPECS["conv2d"]):
        layer, h = refreshed(spec, "implicit")
        again = plain_copy(layer)
        _optimizer = attached(again, form)
        batches = [h[:0], *h, h[:0]]  # one example at a time, without a batch dimension
        prong.refresh_(again, batches, prong.Absolute(1e-2))
        mine, theirs = site_of(again).whitening, site_of(layer).whitening
        assert_close((mine.c, inverse_of(mine)), (theirs.c, theirs.P))


@forms
def test_several_calls_in_one_forward_add_up(form):
    layer, _ = refreshed(SPECS["linear"], form)
    h, k = SPECS["linear"].sample(3), SPECS["linear"].sample(9)  # one below and one above the number of outputs
    first, second = (parameter_gradients(layer, curved(layer(x))) for x in (h, k))
    together = parameter_gradients(layer, curved(layer(h)) + curved(layer(k)))
    assert_close(together, {name: first[name] + second[name] for name in first})


@every_form
def test_a_reused_module_sees_all_its_inputs_and_gets_its_natural_gradient_once(form):
    shared = nn.Linear(4, 4).double()
    model = nn.Sequential(shared, nn.Tanh(), shared)
    optimizer = attached(model, form)
    h = SPECS["linear"].sample(6)
    seen = torch.cat([h, shared(h).tanh().detach()])
    prong.refresh_(model, h, prong.Absolute(0.1))
    plain = plain_copy(model)
    gW, gb = parameter_gradients(plain, curved(plain(h))).values()
    expected = natural_of_plain(plain[0], gW, gb, moments_of(plain[0], seen), 0.1)
    step = step_of(model, optimizer, curved(model(h)))
    assert_close((step["0.weight"], step["0.bias"]), expected, rtol=1e-9)


# Freezing -------------------------------------------------------------------------------------------------------------

few_specs = pytest.mark.parametrize("spec", [SPECS[k] for k in ("linear", "conv1d", "conv2d", "transposed1d")], ids=str)


@every_form
@few_specs
@pytest.mark.parametrize("examples", [3, 8])
def test_with_a_frozen_weight_the_bias_gets_its_ordinary_gradient(form, spec, examples):
    layer = spec.build()
    optimizer = attached(layer, form)
    trained(layer)[0].requires_grad_(False)
    h = spec.sample(examples)
    before = layer.weight.clone()
    prong.refresh_(layer, h)
    plain = plain_copy(layer)
    weight, bias, inputs = gradients_of(layer, h)
    assert weight is None
    assert_close((bias, inputs), gradients_of(plain, h)[1:])
    assert_close(step_of(layer, optimizer, curved(layer(h)))["bias"], bias)
    assert_close(layer.weight, before)


@every_form
@few_specs
@pytest.mark.parametrize("examples", [3, 8])
def test_with_a_frozen_bias_nothing_is_centred(form, spec, examples):
    layer = spec.build()
    optimizer = attached(layer, form)
    trained(layer)[1].requires_grad_(False)
    h = spec.sample(examples)
    prong.refresh_(layer, h, prong.Absolute(1e-2))
    plain = plain_copy(layer)
    gW, gb, gh = gradients_of(plain, h)
    assert gb is None
    expected, _ = natural_of_plain(plain, gW, None, moments_of(plain, h), 1e-2)
    assert_close(gradients_of(layer, h)[2], gh)
    step = step_of(layer, optimizer, curved(layer(h)))
    assert_close(step["weight"], expected, rtol=1e-9)
    assert not step["bias"].any()


@pytest.mark.parametrize("again", [False, True])
@every_form
def test_a_bias_frozen_after_a_refresh_stays_what_it_is_when_the_weight_moves(form, again):
    """In the explicit form it is d that is frozen, until a refresh moves the centre out of it."""
    again = again or form == "explicit"
    layer, h = SPECS["linear"].build(), SPECS["linear"].sample(6)
    optimizer = attached(layer, form)
    prong.refresh_(layer, h)
    bias = trained(layer)[1].requires_grad_(False)
    if again:
        prong.refresh_(layer, h)
    before = layer.bias.clone()
    step_of(layer, optimizer, 0.1 * curved(layer(h)))
    assert_close(layer.bias, before)
    bias.requires_grad_(True)
    plain = plain_copy(layer)
    gb = gradients_of(plain, h)[1]
    assert_close(layer(h), plain(h))
    step = step_of(layer, optimizer, 1e-6 * curved(layer(h)))
    assert step["bias"].norm() < 1e-3 * gb.norm(), "no jump where it is trained again"


@every_form
@specs
def test_a_frozen_layer_is_refreshed_and_passes_gradients_on(form, spec):
    layer = spec.build()
    _optimizer = attached(layer, form)
    layer.requires_grad_(False)
    h = spec.sample(4)
    z = layer(h)
    prong.refresh_(layer, h)
    assert site_of(layer).whitening is not None
    assert_close(layer(h), z)
    assert_close(gradients_of(layer, h)[2], gradients_of(plain_copy(layer), h)[2])


# Statistics -----------------------------------------------------------------------------------------------------------


@PROPERTY
@given(spec=layer_specs(), seed=seeds, eps=dampings)
def test_a_whitening_is_that_of_the_positions_of_the_padded_map(spec, seed, eps):
    torch.manual_seed(seed)
    layer, h = refreshed(spec, "implicit", eps, 4)
    whitening = layer.sites[0].whitening
    for group, (c, Sigma) in enumerate(moments_of(plain_copy(layer), h)):
        damped = Sigma + eps * torch.eye(len(c), dtype=c.dtype)
        assert_close(whitening.P[group] @ damped, torch.eye(len(c), dtype=c.dtype), "P (Sigma + eps I)")
        if whitening.c is not None:
            assert_close(whitening.c[group], c, "c")
        else:
            assert not c.any()


@forms
@pytest.mark.parametrize("most", [1, 3, 7, 1000])
@pytest.mark.parametrize("spec", [SPECS[k] for k in ("conv1d", "conv2d", "transposed2d")], ids=str)
def test_statistics_keep_to_max_positions_per_example(form, spec, most):
    layer = prong.whiten_(spec.build(), form, max_positions=most)
    site, h = layer.sites[0], spec.sample(5)
    site.window = site.new_window(trained(layer)[0])
    layer(h)
    seen = site.window.moments.count
    unpadded = h[0, 0].numel()
    full = len(samples_of(plain_copy(layer), h)[0])
    if most >= unpadded:
        assert seen == full
    else:  # padding is counted in proportion
        assert 0 < seen * unpadded * 5 / full <= most * 5 + 1e-9


def test_thinned_positions_are_not_all_from_one_column_of_the_map():
    layer = prong.whiten_(nn.Conv2d(1, 1, 1).double(), max_positions=8)
    h = torch.arange(8.0).double().expand(16, 1, 8, 8)  # every value tells its column
    prong.refresh_(layer, h)
    assert layer.sites[0].whitening.P.item() < 1, "all columns looked alike"


@pytest.mark.parametrize("form", ["explicit", "materialised"])
@pytest.mark.parametrize("basis", ["pca", "zca", "cholesky"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_whitened_activations_are_white(form, basis, bias):
    layer = nn.Linear(5, 3, bias=bias).double()
    _optimizer = attached(layer, form, basis)
    h = LayerSpec(nn.Linear, {"in_features": 5}).sample(60)
    prong.refresh_(layer, h, 1e-12)
    whitening = site_of(layer).whitening
    x = (h - (0 if whitening.c is None else whitening.c[0])) @ whitening.U[0].T
    assert_close(x.T @ x / 60, torch.eye(5).double(), "second moment", rtol=1e-7, atol=1e-7)
    if bias:
        assert_close(x.mean(0), torch.zeros(5).double(), "mean")


# Ordinary gradients ---------------------------------------------------------------------------------------------------


@specs
@pytest.mark.parametrize("examples", [3, 8])
def test_under_ordinary_gradients_a_backward_gives_plain_gradients_wherever_the_forward_ran(spec, examples):
    layer, _ = refreshed(spec, "implicit")
    plain = plain_copy(layer)
    h = spec.sample(examples)
    expected = parameter_gradients(plain, curved(plain(h)))
    with prong.ordinary_gradients(layer):
        both = parameter_gradients(layer, curved(layer(h)))
    outside = layer(h)
    with prong.ordinary_gradients(layer):
        backward_only = parameter_gradients(layer, curved(outside))
    assert_close(both, expected, "forward and backward inside")
    assert_close(backward_only, expected, "only the backward inside")


@forms
def test_ordinary_gradients_nest_and_end_with_an_exception(form):
    layer, h = refreshed(SPECS["linear"], form)
    natural = parameter_gradients(layer, curved(layer(h)))
    with prong.ordinary_gradients(layer):
        outer = parameter_gradients(layer, curved(layer(h)))
        with prong.ordinary_gradients(layer):
            inner = parameter_gradients(layer, curved(layer(h)))
        after = parameter_gradients(layer, curved(layer(h)))
    assert_close(inner, outer)
    assert_close(after, outer)
    with pytest.raises(KeyError), prong.ordinary_gradients(layer):
        raise KeyError
    assert_close(parameter_gradients(layer, curved(layer(h))), natural)


def test_ordinary_gradients_want_a_module():
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got list"), prong.ordinary_gradients([]):
        pass


# Copies and conversions -----------------------------------------------------------------------------------------------


def copies(model: nn.Module) -> dict[str, nn.Module]:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "torch.save": torch.load(stream, weights_only=False),
    }


@forms
@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)
def test_copies_keep_function_whitening_and_natural_gradients(form, case):
    model = prong.whiten_(case.build(), form)
    x = case.sample(5)
    prong.refresh_(model, case.sample(20))
    torch.manual_seed(1)  # dropout
    expected, loss = model(x), None
    loss = parameter_gradients(model, curved(expected))
    for how, other in copies(model).items():
        torch.manual_seed(1)
        z = other(x)
        assert_identical(z, expected, how)
        assert_identical(parameter_gradients(other, curved(z)), loss, how)


@every_form
def test_copies_do_not_share_open_windows_or_the_optimizer(form):
    model = MODELS["mlp"].build()
    optimizer = prong.PRONG(model, lr=0.1, form=form)
    x = MODELS["mlp"].sample(3)
    model(x)
    for how, other in copies(model).items():
        assert_identical(other(x), model(x), how)
        model.zero_grad()
        assert all(site.window is None for _, site in whitened_sites(other).values()), how
        mine = prong.PRONG(other, lr=0.1, form=form)  # nobody owns the copy
        for y in (x, x + 1):
            mine.zero_grad()
            curved(other(y)).backward()
            mine.step()
        prong.fold_(other)
        assert all(type(m).__module__.startswith("torch.") and not m._forward_pre_hooks for m in other.modules()), how
    ((layer, site), *_) = attachment_of(optimizer).refresher.sites.values()
    assert layer is dict(whitened_layers(model))["0"]
    assert site.window.moments.count == 3 * 4, "of the model itself"


def test_a_copy_made_under_ordinary_gradients_is_natural_again_outside():
    layer, h = refreshed(SPECS["linear"], "implicit")
    with prong.ordinary_gradients(layer):
        other = copy.deepcopy(layer)
    assert_identical(parameter_gradients(other, curved(other(h))), parameter_gradients(layer, curved(layer(h))))


@forms
@specs
def test_changes_of_dtype_keep_the_whitening_in_step(form, spec):
    layer, h = refreshed(spec, form, 0.1)
    z, gradients = layer(h), gradients_of(layer, h)
    for convert, bound in ((layer.float, 1e-4), (layer.bfloat16, 0.02), (layer.half, 0.02), (layer.double, 0.02)):
        convert()
        dtype = trained(layer)[0].dtype
        kept = accumulation_dtype(dtype) if form == "explicit" else dtype
        for _, tensor in layer.sites[0].whitening.items():
            assert not isinstance(tensor, torch.Tensor) or tensor.dtype == kept
        low = h.to(dtype)
        scale = z.abs().max().item()
        assert_close(layer(low).double(), z, str(dtype), rtol=0, atol=bound * scale)
        if dtype in (torch.float32, torch.float64):
            for mine, exact in zip(gradients_of(layer, low), gradients, strict=True):
                if exact is not None:
                    assert_close(mine.double(), exact, str(dtype), rtol=0, atol=3 * bound * exact.abs().max().item())
    prong.refresh_(layer, h)


@views
@specs
def test_plain_layers_may_change_their_dtype_between_steps(form, spec):
    layer, steps = spec.build(), []
    optimizer = attached(layer, form)
    h = spec.sample(6)
    prong.refresh_(layer, h, 0.1)
    start = copy.deepcopy(layer.state_dict())
    for dtype in (torch.float64, torch.float32):
        layer.to(dtype).load_state_dict(start)
        steps.append(step_of(layer, optimizer, curved(layer(h.to(dtype)))))
    for name, exact in steps[0].items():
        assert steps[1][name].dtype == torch.float32
        assert (steps[1][name] - exact).norm() < 1e-3 * exact.norm(), name
    layer.double()
    prong.refresh_(layer, h, 0.1)
    step_of(layer, optimizer, 1e-3 * curved(layer(h)))


@every_form
def test_a_conversion_takes_open_windows_along(form):
    layer = SPECS["linear"].build()
    _optimizer = attached(layer, form, refresh=prong.Every(8))
    h = SPECS["linear"].sample(5)
    layer(h)
    layer.float()
    layer(h.float())
    moments = site_of(layer).window.moments
    assert moments.mean.dtype == torch.float32 and moments.count == 10
    assert_close(moments.mean[0].double(), h.mean(0), rtol=1e-5)


@every_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@specs
def test_layers_of_half_precision_are_refreshed_and_trained(form, dtype, spec):
    layer = spec.build().to(dtype)
    optimizer = attached(layer, form)
    h = spec.sample(4).to(dtype)
    z = layer(h)
    prong.refresh_(layer, h, 0.1)
    assert_close(layer(h), z, rtol=0, atol=2 * torch.finfo(dtype).eps * z.abs().max().item())
    curved(layer(h)).backward()
    for parameter in trained(layer):
        assert parameter is None or (parameter.grad.dtype == dtype and parameter.grad.isfinite().all())
    step = step_of(layer, optimizer, 0.01 * curved(layer(h)))
    assert all(x.dtype == dtype and x.isfinite().all() and x.any() for x in step.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("basis", ["pca", "zca", "cholesky"])
@pytest.mark.parametrize("rows", [8, 400], ids=["whitened inputs", "canonical weight"])
def test_refreshes_in_half_precision_change_the_function_by_the_rounding_of_v_alone(dtype, basis, rows):
    plain = nn.Linear(32, 64).to(dtype)
    layer = prong.whiten_(copy.deepcopy(plain), prong.Explicit(basis))
    mixing = torch.linalg.qr(torch.randn(32, 32)).Q * torch.logspace(1, -2, 32)  # variances from 100 to 1e-4
    batches = [(torch.randn(400, 32) @ mixing.T + 0.5).to(dtype) for _ in range(9)]
    h = batches[0][:rows]
    z = copy.deepcopy(plain).double()(h.double())
    rounding = (plain(h) - z).norm().item()
    for count, batch in enumerate(batches, 1):
        prong.refresh_(layer, batch, 1e-2)
        assert (layer(h) - z).norm() < (1 + 1.5 * count**0.5) * rounding  # errors of their own, which add up as such do


@pytest.mark.parametrize("basis", ["pca", "zca", "cholesky"])
def test_checkpoints_of_half_precision_load_into_an_explicit_layer(basis):
    layer = prong.whiten_(nn.Linear(12, 5).bfloat16(), prong.Explicit(basis))
    h = (torch.randn(100, 12) * torch.logspace(1, -2, 12) + 1).bfloat16()
    prong.refresh_(layer, h, 1e-2)
    other = nn.Linear(12, 5).bfloat16()
    layer.load_state_dict(other.state_dict())
    z = other(h)
    assert {x.dtype for x in layer.state_dict().values()} == {torch.bfloat16}
    assert_close(layer(h), z, rtol=0, atol=2 * torch.finfo(torch.bfloat16).eps * z.abs().max().item())


@forms
@pytest.mark.parametrize("shape", [(6,), (2, 6), (3, 5, 6), (30, 5, 6)], ids=["one", "rows", "few tokens", "tokens"])
def test_activations_may_work_in_place(form, shape):
    model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 4)).double()
    prong.refresh_(prong.whiten_(model, form), torch.randn(50, 6).double())
    h, found = torch.randn(shape).double(), []
    for inplace in (False, True):
        model[1].inplace = inplace
        found.append(parameter_gradients(model, curved(model(h))))
    assert_close(*found)


@pytest.mark.parametrize("form", ["implicit", *VIEWS])
def test_channels_last_gives_the_same_steps_and_stays(form):
    spec, steps = SPECS["conv2d"], []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        layer, h = spec.build().to(memory_format=memory_format), spec.sample(6).to(memory_format=memory_format)
        optimizer = attached(layer, form)
        prong.refresh_(layer, h)
        steps.append(step_of(layer, optimizer, curved(layer(h))))
        assert layer.weight.is_contiguous(memory_format=memory_format)
        assert layer.weight.grad.is_contiguous(memory_format=memory_format)
    assert_close(*steps)
