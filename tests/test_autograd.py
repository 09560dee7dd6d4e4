"""Whitened layers inside everything that autograd does: twice, functional, compiled, half precision, checkpointed."""

from __future__ import annotations

import copy
import shutil
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import prong
from prong.model.whiten import whitened_layers, whitened_sites
from tests.cases import (
    FORMS,
    MODELS,
    SPECS,
    VIEWS,
    accumulated,
    assert_close,
    attached,
    canonical_step,
    curved,
    moments_of,
    natural_of_plain,
    parameter_gradients,
    plain_copy,
    step_of,
)
from tests.training import refresher_of, site_of

pytestmark = [  # torch's own
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
forms = pytest.mark.parametrize("form", FORMS)
every_form = pytest.mark.parametrize("form", [*FORMS, *VIEWS])
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
spaces = pytest.mark.parametrize("rows", [2, 12], ids=["activation_space", "gradient_space"])


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def small(form: str = "implicit", bias: bool = True) -> nn.Sequential:
    """Two linear layers of 6 and 4 outputs, whitened from data."""
    model = nn.Sequential(nn.Linear(4, 6, bias=bias), nn.Tanh(), nn.Linear(6, 4, bias=bias)).double()
    return prong.refresh_(prong.whiten_(model, form), MODELS["mlp"].sample(40))


def natural_of_total(model: nn.Module, plain: nn.Module, total: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The formula on the plain gradients of any loss at all, with the whitening that an implicit model has."""
    expected = {}
    for name, layer in whitened_layers(model):
        prefix = f"{name}." if name else ""
        gW, gb = total[f"{prefix}weight"], total.get(f"{prefix}bias")
        whitening = layer.sites[0].whitening
        moments = []
        for group, P in enumerate(whitening.P):
            c = torch.zeros_like(P[0]) if whitening.c is None else whitening.c[group]
            moments.append((c, torch.linalg.inv(P)))
        if gb is None and layer.bias is not None:
            gb = torch.zeros_like(layer.bias)
        nW, nb = natural_of_plain(plain.get_submodule(name), gW, gb, moments, 0.0)
        expected[f"{prefix}weight"] = nW
        if nb is not None:
            expected[f"{prefix}bias"] = nb
    return expected


def penalty(model: nn.Module, h: torch.Tensor) -> torch.Tensor:
    """A loss with a gradient penalty: its gradient needs the backward of the backward."""
    h = h.detach().requires_grad_()
    loss = curved(model(h))
    (slope,) = torch.autograd.grad(loss, h, create_graph=True)
    return loss + slope.square().sum()


# Twice ----------------------------------------------------------------------------------------------------------------


@specs
@pytest.mark.parametrize("examples", [2, 9])
def test_a_gradient_penalty_gets_the_natural_gradient_of_its_total_derivative(spec, examples):
    layer = prong.refresh_(prong.whiten_(spec.build()), spec.sample(6), 0.1)
    plain, h = plain_copy(layer), spec.sample(examples)
    expected = natural_of_total(layer, plain, parameter_gradients(plain, penalty(plain, h)))
    assert_close(parameter_gradients(layer, penalty(layer, h)), expected, rtol=1e-9)


@spaces
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_a_gradient_penalty_of_a_network_is_natural_in_both_spaces(rows, bias):
    model = small(bias=bias)
    plain, h = plain_copy(model), MODELS["mlp"].sample(rows)
    expected = natural_of_total(model, plain, parameter_gradients(plain, penalty(plain, h)))
    assert_close(parameter_gradients(model, penalty(model, h)), expected, rtol=1e-9)


@specs
def test_a_gradient_penalty_in_the_explicit_form_is_the_implicit_one(spec):
    implicit = prong.refresh_(prong.whiten_(spec.build()), spec.sample(6), 0.1)
    explicit = copy.deepcopy(implicit)
    torch.manual_seed(0)
    data = spec.sample(6)
    implicit = prong.refresh_(implicit, data, 0.1)
    explicit = prong.refresh_(prong.whiten_(prong.fold_(explicit), "explicit"), data, 0.1)
    h = spec.sample(3)
    found = list(parameter_gradients(explicit, penalty(explicit, h)).values())
    expected = list(parameter_gradients(implicit, penalty(implicit, h)).values())
    pairs = [*found, None][:2], [*expected, None][:2]
    assert_close(canonical_step(explicit, *pairs[0]), tuple(pairs[1]), rtol=1e-8)


@spaces
def test_only_the_last_backward_decides_whether_a_penalty_is_ordinary(rows):
    model = small()
    plain, h = plain_copy(model), MODELS["mlp"].sample(rows).requires_grad_()
    ordinary = parameter_gradients(plain, penalty(plain, h))
    natural = natural_of_total(model, plain, ordinary)
    for first in (True, False):
        for last in (True, False):
            loss = curved(model(h))
            with prong.ordinary_gradients(model if first else nn.Identity()):
                (slope,) = torch.autograd.grad(loss, h, create_graph=True)
            with prong.ordinary_gradients(model if last else nn.Identity()):
                found = parameter_gradients(model, loss + slope.square().sum())
            assert_close(found, ordinary if last else natural, f"first ordinary {first}, last {last}", rtol=1e-9)


@specs
@pytest.mark.parametrize("examples", [2, 7])
def test_gradcheck_and_gradgradcheck_pass_with_ordinary_gradients(spec, examples):
    layer = prong.refresh_(prong.whiten_(spec.build()), spec.sample(6), 0.1)
    names = [name for name, _ in layer.named_parameters()]

    def function(h, *parameters):
        return functional_call(layer, dict(zip(names, parameters, strict=True)), (h,))

    h = spec.sample(examples)
    inputs = (h.requires_grad_(), *(p.detach().requires_grad_() for p in layer.parameters()))
    with prong.ordinary_gradients(layer):
        assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@spaces
def test_gradcheck_passes_where_only_the_backward_is_ordinary(rows):
    """The Functions themselves, in both spaces: the forward must not have seen the switch."""
    from prong.layers.natural import Linear, Switch, natural, naturalize

    layer = small()[0]
    whitening, layout, switch = layer.sites[0].whitening, layer.sites[0].layout, Switch()

    def function(h, W, b):
        switch.ordinary = False
        if rows < len(W):
            z = natural(Linear(layout), h, W, b, whitening, switch)
        else:
            z = F.linear(h, *naturalize(W, b, whitening, layout, switch))
        switch.ordinary = True
        return z

    inputs = tuple(x.detach().requires_grad_() for x in (MODELS["mlp"].sample(rows), layer.weight, layer.bias))
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@forms
@specs
def test_the_derivatives_with_respect_to_inputs_are_true_to_any_order(form, spec):
    layer = prong.refresh_(prong.whiten_(spec.build(), form), spec.sample(6), 0.1)
    h = spec.sample(2)[:1].requires_grad_()
    assert torch.autograd.gradcheck(layer, (h,), fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(layer, (h,), fast_mode=True)


# torch.func -----------------------------------------------------------------------------------------------------------


def functional(model: nn.Module):
    """(parameters, function of parameters and inputs)."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return parameters, lambda p, h: functional_call(model, p, (h,))


@forms
@spaces
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_func_grad_equals_backward(form, rows, bias):
    model, h = small(form, bias), MODELS["mlp"].sample(rows)
    parameters, f = functional(model)
    assert_close(grad(lambda p: curved(f(p, h)))(parameters), parameter_gradients(model, curved(model(h))))


@forms
@spaces
def test_functional_call_uses_the_given_parameters(form, rows):
    model, h = small(form), MODELS["mlp"].sample(rows)
    parameters, f = functional(model)
    other = {name: p + 0.1 for name, p in parameters.items()}
    expected = copy.deepcopy(model)
    with torch.no_grad():
        for p in expected.parameters():
            p.add_(0.1)
    assert_close(f(other, h), expected(h))
    found = grad(lambda p: curved(f(p, h)))(other)
    assert_close(found, parameter_gradients(expected, curved(expected(h))))


@forms
@specs
def test_per_sample_natural_gradients_average_to_the_batch_s(form, spec):
    layer = prong.refresh_(prong.whiten_(spec.build(), form), spec.sample(6), 0.1)
    parameters, f = functional(layer)
    h = spec.sample(7)

    def loss(p, x):
        return f(p, x).sin().sum()

    each = vmap(grad(loss), (None, 0))(parameters, h)
    expected = parameter_gradients(layer, layer(h).sin().sum() / 7)
    assert_close({name: g.mean(0) for name, g in each.items()}, expected)
    one = parameter_gradients(layer, layer(h[2:3]).sin().sum())
    assert_close({name: g[2] for name, g in each.items()}, one)


@forms
@spaces
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_forward_mode_and_jacobians_of_inputs_are_the_plain_model_s(form, rows, bias):
    model, h = small(form, bias), MODELS["mlp"].sample(rows)
    plain = plain_copy(model)
    tangent = torch.randn_like(h)
    assert_close(jvp(model, (h,), (tangent,)), jvp(plain, (h,), (tangent,)), "jvp")
    for transform in (jacrev, jacfwd):
        assert_close(transform(model)(h), transform(plain)(h), transform.__name__)
    assert_close(hessian(lambda x: curved(model(x)))(h), hessian(lambda x: curved(plain(x)))(h), "hessian")


@spaces
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_forward_mode_in_parameters_is_the_plain_model_s(rows, bias):
    model, h = small(bias=bias), MODELS["mlp"].sample(rows)
    parameters, f = functional(model)
    _, g = functional(plain_copy(model))
    tangents = {name: torch.randn_like(p) for name, p in parameters.items()}
    assert_close(
        jvp(lambda p: f(p, h), (parameters,), (tangents,)), jvp(lambda p: g(p, h), (parameters,), (tangents,)), "all"
    )
    for name in parameters:  # one parameter at a time: the others have no tangent

        def one(run, name=name):
            return jvp(lambda p: run({**parameters, name: p}, h), (parameters[name],), (tangents[name],))

        assert_close(one(f), one(g), name)
    assert_close(jacfwd(f)(parameters, h), jacfwd(g)(parameters, h), "jacfwd")


@spaces
def test_jacrev_in_parameters_has_natural_gradients_as_rows(rows):
    model, h = small(), MODELS["mlp"].sample(rows)
    parameters, f = functional(model)
    jacobian = jacrev(f)(parameters, h)
    expected = parameter_gradients(model, model(h)[1, 2])
    assert_close({name: J[1, 2] for name, J in jacobian.items()}, expected)


@forms
@spaces
def test_a_gradient_penalty_through_torch_func_equals_the_one_through_autograd(form, rows):
    model, h = small(form), MODELS["mlp"].sample(rows)
    parameters, f = functional(model)

    def loss(p):
        slope = grad(lambda x: curved(f(p, x)))(h)
        return curved(f(p, h)) + slope.square().sum()

    assert_close(grad(loss)(parameters), parameter_gradients(model, penalty(model, h)))


@forms
@spaces
def test_hessians_in_parameters_can_be_taken(form, rows):
    model, h = small(form), MODELS["mlp"].sample(rows)
    parameters, f = functional(model)
    with prong.ordinary_gradients(model):
        found = hessian(lambda p: curved(f(p, h)))(parameters)
    natural = hessian(lambda p: curved(f(p, h)))(parameters)
    assert found.keys() == natural.keys()
    if form == "implicit":
        parameters, g = functional(plain_copy(model))
        assert_close(found, hessian(lambda p: curved(g(p, h)))(parameters))


@every_form
def test_functional_transforms_leave_open_windows_usable(form):
    model = MODELS["mlp"].build()
    optimizer = prong.PRONG(model, lr=0.01, form=form)
    h = MODELS["mlp"].sample(7)
    parameters, f = functional(model)
    grad(lambda p: curved(f(p, h)))(parameters)
    jvp(model, (h,), (h,))
    jacrev(model)(h)
    for _, site in whitened_sites(model).values():
        assert "TrackingTensor" not in repr(site.window.moments.mean), "a transform's wrapper outlived it"
    curved(model(h)).backward()
    optimizer.step()
    assert all(site.whitening.is_finite() for _, site in whitened_sites(model).values())


@every_form
def test_per_sample_gradients_can_be_taken_while_a_window_is_open(form):
    model = MODELS["mlp"].build()
    _optimizer = prong.PRONG(model, lr=0.01, form=form)
    h = MODELS["mlp"].sample(7)
    parameters, f = functional(model)
    each = vmap(grad(lambda p, x: f(p, x).sin().sum()), (None, 0))(parameters, h)
    expected = parameter_gradients(model, model(h).sin().sum())
    assert_close({name: g.sum(0) for name, g in each.items()}, expected)


# torch.compile --------------------------------------------------------------------------------------------------------


@forms
@specs
def test_a_compiled_layer_is_one_graph_and_gives_the_same_gradients(form, spec):
    layer = prong.refresh_(prong.whiten_(spec.build(), form), spec.sample(6), 0.1)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    h = spec.sample(3)
    assert_close(compiled(h), layer(h), "output")
    found = parameter_gradients(layer, curved(compiled(h)))
    assert_close(found, parameter_gradients(layer, curved(layer(h))), "gradients")


@every_form
def test_a_compiled_transformer_layer_is_one_graph_and_gives_the_same_gradients(form):
    case = MODELS["transformer"]
    model = case.build()
    _optimizer = attached(model, form)
    prong.refresh_(model, case.sample(6))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    h = case.sample(3)
    found = parameter_gradients(model, curved(compiled(h)))
    assert_close(found, parameter_gradients(model, curved(model(h))))


@every_form
def test_neither_steps_nor_refreshes_need_a_recompilation(form):
    from torch._dynamo.testing import CompileCounterWithBackend

    model, h = MODELS["mlp"].build(), MODELS["mlp"].sample(3)
    optimizer = attached(model, form)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    for _ in range(4):
        prong.refresh_(model, MODELS["mlp"].sample(20))
        found = parameter_gradients(model, curved(compiled(h)))
        assert_close(found, parameter_gradients(model, curved(model(h))))
        step_of(model, optimizer, 0.01 * curved(compiled(h)))
    assert counter.frame_count == 1


@every_form
def test_training_a_compiled_model_with_prong_equals_training_the_eager_one(form):
    def train(compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, sample = MODELS["cnn"].build(), MODELS["cnn"].sample
        optimizer = prong.PRONG(model, lr=0.01, form=form, refresh=prong.Every(3, samples=6))
        run = torch.compile(model, backend="aot_eager") if compiled else model
        for step in range(5):  # refreshes before 1 and after 1, 2, 3: windows are open, and then closed
            torch.manual_seed(step)
            optimizer.zero_grad()
            curved(run(sample(8))).backward()
            optimizer.step()
        whitenings = [site.whitening for _, site in whitened_sites(model).values()]
        return [*model.parameters(), *(x for w in whitenings for _, x in w.items())]

    assert_close(train(True), train(False))


def test_ordinary_gradients_hold_in_a_compiled_model_when_forward_and_backward_are_inside():
    model, h = small(), MODELS["mlp"].sample(3)
    compiled, plain = torch.compile(model, backend="aot_eager"), plain_copy(model)
    natural = parameter_gradients(model, curved(compiled(h)))
    with prong.ordinary_gradients(model):
        ordinary = parameter_gradients(model, curved(compiled(h)))
    assert_close(ordinary, parameter_gradients(plain, curved(plain(h))))
    assert_close(parameter_gradients(model, curved(compiled(h))), natural)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_gives_the_same_gradients():
    model, h = small(), MODELS["mlp"].sample(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inductor's own
        compiled = torch.compile(model)
        found = parameter_gradients(model, curved(compiled(h)))
    assert_close(found, parameter_gradients(model, curved(model(h))))


# Half precision -------------------------------------------------------------------------------------------------------


def plain_and_data() -> tuple[nn.Module, torch.Tensor]:
    """A float32 network and inputs for it."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return model, torch.randn(64, 8) @ (torch.eye(8) + 0.2 * torch.randn(8, 8)) + 0.5


def well_scaled(form: str) -> tuple[nn.Module, torch.Tensor]:
    """The same, whitened with a damping that does not blow up the rounding of gradients.

    In gradient space autocast rounds gW before it is centred and multiplied by P; noise grows by up to 1/eps.
    """
    model, data = plain_and_data()
    return prong.refresh_(prong.whiten_(model, form), data, prong.Absolute(1.0)), data


def as_canonical(model: nn.Module, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Steps on whatever a model trains, as steps on the canonical parameters."""
    if model[0].form == "implicit":
        return found
    result = {}
    for name, layer in whitened_layers(model):
        W, b = canonical_step(layer, found[f"{name}.V"], found[f"{name}.d"])
        result |= {f"{name}.weight": W, f"{name}.bias": b}
    return result


@forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [3, 64], ids=["activation_space", "gradient_space"])
@pytest.mark.parametrize("inside", [False, True], ids=["backward_outside", "backward_inside"])
def test_natural_gradients_under_autocast_are_close_to_those_of_full_precision(form, dtype, rows, inside):
    model, data = well_scaled(form)
    expected = as_canonical(model, parameter_gradients(model, curved(model(data[:rows]))))
    with torch.autocast("cpu", dtype):
        loss = curved(model(data[:rows]).float())
        found = parameter_gradients(model, loss) if inside else None
    found = found or parameter_gradients(model, loss)
    assert all(gradient.dtype == torch.float32 for gradient in found.values())
    for name, gradient in as_canonical(model, found).items():
        exact = expected[name]
        assert (gradient - exact).norm() <= 20 * torch.finfo(dtype).eps * exact.norm(), name


@every_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_statistics_under_autocast_are_kept_in_float32(form, dtype):
    model, data = plain_and_data()
    _optimizer = attached(model, form, refresh=prong.Every(8))
    data = data + 100  # of which bfloat16 would keep two digits
    with torch.autocast("cpu", dtype):
        model(data)
        model(data)
    moments = site_of(model).window.moments
    assert moments.mean.dtype == moments.scatter.dtype == torch.float32
    assert_close(moments.mean[0], data.mean(0), rtol=1e-5)
    assert_close(moments.covariance()[0], torch.cov(data.T, correction=0), rtol=1e-3, atol=1e-3)
    assert site_of(model, "2").window.moments.mean.dtype == torch.float32


@every_form
def test_a_refresh_inside_autocast_is_as_exact_as_outside(form):
    plain = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 4))
    data = torch.randn(200, 20) @ torch.randn(20, 20)
    z = plain(data)
    inside, outside = (copy.deepcopy(plain) for _ in range(2))
    _optimizers = [attached(model, form) for model in (inside, outside)]
    with torch.autocast("cpu", torch.bfloat16):
        prong.refresh_(inside, data, prong.Absolute(1e-3))
    prong.refresh_(outside, data, prong.Absolute(1e-3))
    assert_close(inside(data), z, "function", rtol=0, atol=1e-4)
    first = (site_of(model).whitening for model in (inside, outside))  # its inputs are not rounded by autocast
    P, expected = (w.P if w.U is None else w.U.mT @ w.U for w in first)
    assert_close(P, expected, "whitening", rtol=1e-3, atol=1e-3 * expected.abs().max().item())


@pytest.mark.parametrize("basis", ["pca", "zca", "cholesky"])
def test_state_dict_fold_and_few_samples_inside_autocast_are_exact(basis):
    plain = nn.Linear(20, 4)
    layer = prong.whiten_(copy.deepcopy(plain), prong.Explicit(basis))
    prong.refresh_(layer, torch.randn(100, 20), 1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        saved = layer.state_dict()
        prong.refresh_(layer, torch.randn(8, 20), 1e-2)  # fewer samples than inputs
        canonical = layer.weight
        prong.fold_(layer)
    for W in (saved["weight"], canonical, layer.weight):
        assert W.dtype == torch.float32
        assert_close(W, plain.weight, rtol=0, atol=1e-5)


@every_form
def test_scaled_and_unscaled_training_agree_and_an_overflow_skips_the_step(form):
    def train(scaling: bool) -> tuple[nn.Module, prong.PRONG]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer = prong.PRONG(model, lr=0.01, form=form, refresh=prong.Every(4))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=scaling)
        for _ in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(32, 8) + 1).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        if scaling:  # now let a gradient overflow
            before, updates = [p.clone() for p in model.parameters()], refresher_of(optimizer).updates
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.randn(32, 8)).float().square().mean() * 1e38
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
            assert refresher_of(optimizer).updates == updates
            assert scaler.get_scale() < 2.0**8
        return model, optimizer

    (scaled, _), (unscaled, _) = train(True), train(False)
    for mine, theirs in zip(prong.fold_(scaled).parameters(), prong.fold_(unscaled).parameters(), strict=True):
        assert_close(mine, theirs, rtol=0, atol=2e-3)


# Checkpointing --------------------------------------------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not_reentrant"])
@spaces
def test_activation_checkpointing_changes_neither_gradients_nor_statistics(form, reentrant, rows):
    runs = {}
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = MODELS["mlp"].build()
        optimizer = attached(model, form, refresh=prong.Every(8, growth=None))
        prong.refresh_(model, MODELS["mlp"].sample(40))
        h = MODELS["mlp"].sample(rows).requires_grad_()
        loss = curved(checkpoint(model, h, use_reentrant=reentrant) if checkpointed else model(h))
        step, sites = step_of(model, optimizer, loss), whitened_sites(model).values()
        assert all(site.window.moments.count == rows for _, site in sites)
        runs[checkpointed] = [step, accumulated(model), h.grad, [site.window.moments.covariance() for _, site in sites]]
    assert_close(runs[True], runs[False])


@every_form
def test_checkpointed_training_with_prong_equals_training_without(form):
    def train(checkpointed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = MODELS["mlp"].build()
        optimizer = prong.PRONG(model, lr=0.01, form=form, refresh=prong.Every(3))
        for _ in range(5):
            h = MODELS["mlp"].sample(8).requires_grad_()
            optimizer.zero_grad()
            z = checkpoint_sequential(model, 2, h, use_reentrant=False) if checkpointed else model(h)
            curved(z).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    assert_close(train(True), train(False))


# Modes ----------------------------------------------------------------------------------------------------------------


@every_form
def test_a_whitening_estimated_in_inference_mode_can_be_trained_with(form):
    model = MODELS["mlp"].build()
    optimizer = attached(model, form)
    with torch.inference_mode():
        prong.refresh_(model, MODELS["mlp"].sample(20))
    for rows in (2, 9):
        step = step_of(model, optimizer, 0.01 * curved(model(MODELS["mlp"].sample(rows))))
        assert all(x.isfinite().all() and x.any() for x in step.values())


@forms
def test_forwards_without_gradients_and_in_inference_mode_give_the_same_outputs(form):
    model, h = small(form), MODELS["mlp"].sample(3)
    z = model(h)
    with torch.no_grad():
        assert_close(model(h), z)
    with torch.inference_mode():
        assert_close(model(h).clone(), z.detach())


@forms
@specs
def test_natural_gradients_accumulate_over_backward_calls(form, spec):
    layer = prong.refresh_(prong.whiten_(spec.build(), form), spec.sample(6), 0.1)
    h = spec.sample(4)
    for part in h.split(2):
        layer(part).sin().sum().backward()
    assert_close(accumulated(layer), parameter_gradients(layer, layer(h).sin().sum()))


@forms
def test_tensor_hooks_of_parameters_see_the_same_gradient_that_accumulates(form):
    model, h = small(form), MODELS["mlp"].sample(3)
    seen = {}
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: seen.__setitem__(name, g.clone()))
    curved(model(h)).backward()
    assert_close(seen, accumulated(model))


def test_moments_of_cases_are_those_of_the_layer():
    """The yardstick itself: the formula with moments from data and with the layer's own whitening agree."""
    spec = SPECS["conv2d"]
    layer, h = prong.whiten_(spec.build()), spec.sample(6)
    prong.refresh_(layer, h, prong.Absolute(0.1))
    plain = plain_copy(layer)
    total = parameter_gradients(plain, curved(plain(h)))
    nW, nb = natural_of_plain(plain, total["weight"], total["bias"], moments_of(plain, h), 0.1)
    assert_close(natural_of_total(layer, plain, total), {"weight": nW, "bias": nb}, rtol=1e-9)
