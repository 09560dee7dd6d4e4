"""nn.MultiheadAttention: three sites in one layer, and an output projection that is never called."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import prong
from tests.cases import (
    ATTENTION,
    FORMS,
    MODELS,
    AttentionCase,
    assert_close,
    assert_identical,
    curved,
    parameter_gradients,
    plain_copy,
)

forms = pytest.mark.parametrize("form", FORMS)
cases = pytest.mark.parametrize("case", ATTENTION.values(), ids=ATTENTION)
EPS = 0.1


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def attend(layer: nn.MultiheadAttention, inputs: tuple[Tensor, ...], case: AttentionCase) -> tuple[Tensor, ...]:
    torch.manual_seed(7)  # the same dropout every time
    return layer(*inputs, **case.options)


def loss_of(layer: nn.MultiheadAttention, inputs: tuple[Tensor, ...], case: AttentionCase) -> Tensor:
    z, weights = attend(layer, inputs, case)
    return curved(z) + (0 if weights is None else curved(weights))


def refresh(layer: nn.Module, case: AttentionCase, *batches: tuple[Tensor, ...]) -> nn.Module:
    """Refresh from these batches, with the options of the case."""
    return prong.refresh_(layer, batches, EPS, forward=lambda m, b: attend(m, b, case))


def projection_inputs(plain: nn.MultiheadAttention, inputs: tuple[Tensor, ...], case: AttentionCase) -> list[Tensor]:
    """What the four projections are given: query, key, value, and the heads' outputs side by side."""
    bare = copy.deepcopy(plain)
    with torch.no_grad():
        bare.out_proj.weight.copy_(torch.eye(bare.embed_dim))
        if bare.out_proj.bias is not None:
            bare.out_proj.bias.zero_()
        heads, _ = attend(bare, inputs, case)
    return [x.reshape(-1, x.shape[-1]) for x in (*inputs, heads)]


def natural_linear(gW: Tensor, gb: Tensor | None, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """The formula for one projection."""
    c = rows.mean(0) if gb is not None else torch.zeros_like(rows[0])
    P = torch.linalg.inv((rows - c).T @ (rows - c) / len(rows) + EPS * torch.eye(len(c), dtype=c.dtype))
    nW = (gW if gb is None else gW - torch.outer(gb, c)) @ P
    return nW, None if gb is None else gb - nW @ c


def natural_attention(plain: nn.MultiheadAttention, gradients: dict[str, Tensor], rows: list[Tensor]) -> dict:
    """The formula for all four projections; everything else has its ordinary gradient."""
    size, expected = plain.embed_dim, dict(gradients)
    biases = gradients["in_proj_bias"].split(size) if "in_proj_bias" in gradients else [None] * 3
    names = ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    packed = "in_proj_weight" in gradients
    weights = gradients["in_proj_weight"].split(size) if packed else [gradients[name] for name in names]
    pairs = [natural_linear(W, b, x) for W, b, x in zip(weights, biases, rows, strict=False)]
    if packed:
        expected["in_proj_weight"] = torch.cat([W for W, _ in pairs])
    else:
        expected |= {name: W for name, (W, _) in zip(names, pairs, strict=True)}
    if biases[0] is not None:
        expected["in_proj_bias"] = torch.cat([b for _, b in pairs])
    W, b = natural_linear(gradients["out_proj.weight"], gradients.get("out_proj.bias"), rows[3])
    expected["out_proj.weight"] = W
    if b is not None:
        expected["out_proj.bias"] = b
    return expected


@forms
@cases
def test_before_a_refresh_attention_is_torch_s_own_to_the_bit_gradients_included(form, case):
    plain = case.build()
    layer = prong.whiten_(copy.deepcopy(plain), form)
    inputs = case.sample()
    assert_identical(attend(layer, inputs, case), attend(plain, inputs, case), "outputs")
    mine = list(parameter_gradients(layer, loss_of(layer, inputs, case)).values())
    theirs = list(parameter_gradients(plain, loss_of(plain, inputs, case)).values())
    assert_identical(mine, theirs, "gradients")


@forms
@cases
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_refreshes_and_folding_preserve_what_attention_computes(form, case, training):
    plain = case.build().train(training)
    layer = prong.whiten_(copy.deepcopy(plain), form)
    inputs = case.sample()
    z = attend(plain, inputs, case)
    for _ in range(3):
        refresh(layer, case, case.sample(), case.sample())
        assert_close(attend(layer, inputs, case), z, "outputs")
        with torch.no_grad():  # torch's fused path, where it takes it
            assert_close(attend(layer, inputs, case), z, "outputs without gradients")
    assert_close(dict(layer.state_dict()), dict(plain.state_dict()), "state_dict")
    names = dict(plain.named_parameters()).keys()
    prong.fold_(layer)
    assert type(layer) is nn.MultiheadAttention
    assert dict(layer.named_parameters()).keys() == names
    assert_close(attend(layer, inputs, case), z, "outputs after folding")


@cases
def test_implicit_gradients_of_attention_equal_the_formula_on_plain_ones(case):
    layer = prong.whiten_(case.build())
    inputs = case.sample()
    refresh(layer, case, inputs)
    plain = plain_copy(layer)
    rows = projection_inputs(plain, inputs, case)
    expected = natural_attention(plain, parameter_gradients(plain, loss_of(plain, inputs, case)), rows)
    found = parameter_gradients(layer, loss_of(layer, inputs, case))
    assert_close(found, expected, rtol=1e-9)


@cases
def test_explicit_gradients_of_attention_equal_implicit_ones_in_canonical_coordinates(case):
    implicit = prong.whiten_(case.build())
    explicit = prong.whiten_(plain_copy(implicit), "explicit")
    inputs = case.sample()
    refresh(implicit, case, inputs)
    refresh(explicit, case, inputs)
    expected = parameter_gradients(implicit, loss_of(implicit, inputs, case))
    before = {name: x.clone() for name, x in explicit.state_dict().items()}
    loss_of(explicit, inputs, case).backward()
    with torch.no_grad():  # the map of steps is affine: a step of one shows it
        for p in explicit.parameters():
            p.add_(p.grad)
    found = {name: x - before[name] for name, x in explicit.state_dict().items()}
    assert_close(found, expected, rtol=1e-8, atol=1e-9)


@forms
@cases
def test_the_inputs_gradients_are_the_plain_layer_s(form, case):
    layer = prong.whiten_(case.build(), form)
    refresh(layer, case, case.sample())
    inputs = [x.detach().clone().requires_grad_() for x in case.sample()]
    inputs = inputs if case.cross else [inputs[0]] * 3
    wanted = inputs if case.cross else inputs[:1]
    found = torch.autograd.grad(loss_of(layer, inputs, case), wanted)
    plain = plain_copy(layer)
    assert_close(found, torch.autograd.grad(loss_of(plain, inputs, case), wanted))


@forms
def test_ordinary_gradients_reach_attention(form):
    case = ATTENTION["cross"]
    layer = prong.whiten_(case.build())
    refresh(layer, case, case.sample())
    inputs, plain = case.sample(), plain_copy(layer)
    expected = parameter_gradients(plain, loss_of(plain, inputs, case))
    outside = loss_of(layer, inputs, case)
    with prong.ordinary_gradients(layer):
        assert_close(parameter_gradients(layer, loss_of(layer, inputs, case)), expected)
        assert_close(parameter_gradients(layer, outside), expected)


@forms
@pytest.mark.parametrize("name", ["cross", "other_sizes", "key_padding", "dropout", "unbatched", "bias_kv"])
def test_an_open_window_changes_neither_outputs_nor_gradients_of_attention(form, name):
    case = ATTENTION[name]
    layer = prong.whiten_(case.build(), form)
    refresh(layer, case, case.sample())
    inputs = case.sample()
    z, gradients = attend(layer, inputs, case), parameter_gradients(layer, loss_of(layer, inputs, case))
    prong.Refresher(layer, torch.optim.SGD(layer.parameters(), 0.1))
    assert_close(attend(layer, inputs, case), z)
    rows = projection_inputs(plain_copy(layer), inputs, case)
    sites = [site for _, site in prong.model.whiten.whitened_sites(layer).values()]
    for site, x in zip(sites, rows, strict=True):
        assert site.inputs.moments.count == len(x)
        assert_close(site.inputs.moments.mean[0], x.mean(0), site.label)
        assert_close(site.inputs.moments.covariance()[0], torch.cov(x.T, correction=0), site.label)
    assert_close(parameter_gradients(layer, loss_of(layer, inputs, case)), gradients)


@forms
@pytest.mark.parametrize("name", ["cross", "other_sizes", "no_bias", "key_padding", "bias_kv", "unbatched", "dropout"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_watched_outputs_change_neither_outputs_nor_gradients_of_attention(form, name, training):
    case = ATTENTION[name]
    layer = prong.whiten_(case.build(), form).train(training)
    refresh(layer, case, case.sample())
    inputs = case.sample()
    z, gradients = attend(layer, inputs, case), parameter_gradients(layer, loss_of(layer, inputs, case))
    prong.PRONG(layer, lr=0.1, gradient_whitening="empirical")
    assert_close(attend(layer, inputs, case), z)
    assert_close(parameter_gradients(layer, loss_of(layer, inputs, case)), gradients)


@forms
@pytest.mark.parametrize("chosen", ["attention", ["attention", "attention.out_proj"]], ids=str)
def test_attention_can_be_whitened_with_or_without_its_output_projection(form, chosen):
    case = ATTENTION["self"]
    model = nn.ModuleDict({"attention": case.build()})
    plain = copy.deepcopy(model["attention"])
    prong.whiten_(model, form, layers=chosen)
    inputs = case.sample()
    prong.refresh_(model, [inputs], EPS, forward=lambda m, b: m["attention"](*b))
    assert_close(model["attention"](*inputs), plain(*inputs))
    assert isinstance(model["attention"].out_proj, prong.layers.WhitenedLayer) == isinstance(chosen, list)


@forms
def test_an_output_projection_whose_attention_is_plain_cannot_be_whitened(form):
    """Plain attention computes with its weights and never calls it: nothing could be seen or made natural."""
    model = nn.ModuleDict({"attention": ATTENTION["self"].build()})
    with pytest.raises(ValueError, match=r"'attention.out_proj' cannot be whitened"):
        prong.whiten_(model, form, layers="attention.out_proj")


@forms
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_transformer_layer_is_refreshed_in_train_and_eval_mode(form, norm_first, training):
    plain = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=norm_first).double()
    plain.train(training)
    model = prong.whiten_(copy.deepcopy(plain), form)
    h = MODELS["transformer"].sample(6)
    prong.refresh_(model, h, EPS)
    assert model.training == training
    for name, (_, site) in prong.model.whiten.whitened_sites(model).items():
        assert site.whitening is not None, f"{name} saw nothing"
    assert_close(model(h), plain(h))
    with torch.no_grad():
        assert_close(model(h), plain(h))


@forms
def test_a_transformer_with_padding_is_refreshed_in_eval_mode(form):
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    plain = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()
    model = prong.whiten_(copy.deepcopy(plain), form)
    h, mask = MODELS["transformer"].sample(6), torch.tensor([[False, False, False, True]] * 6)
    prong.refresh_(model, [{"src": h, "src_key_padding_mask": mask}], EPS)
    assert all(site.whitening is not None for _, site in prong.model.whiten.whitened_sites(model).values())
    assert_close(model(h, src_key_padding_mask=mask), plain(h, src_key_padding_mask=mask))


@forms
def test_a_decoder_layer_with_self_and_cross_attention_trains(form):
    model = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.1, batch_first=True).double()
    optimizer = prong.PRONG(model, lr=0.01, form=form, period=2, eps=EPS)
    for _ in range(4):
        target, memory = MODELS["transformer"].sample(3), MODELS["transformer"].sample(3)
        optimizer.zero_grad()
        loss = model(target, memory, tgt_is_causal=False).square().mean()
        loss.backward()
        optimizer.step()
    assert all(site.whitening.is_finite() for _, site in prong.model.whiten.whitened_sites(model).values())
    assert loss.isfinite()


@forms
def test_frozen_projections_of_attention_are_refreshed_and_get_no_gradient(form):
    case = ATTENTION["other_sizes"]
    layer = prong.whiten_(case.build(), form)
    name = {"implicit": "k_proj_weight", "explicit": "k_proj_V"}[form]
    layer.get_parameter(name).requires_grad_(False)
    inputs = case.sample()
    z = attend(layer, inputs, case)
    refresh(layer, case, inputs)
    assert_close(attend(layer, inputs, case), z)
    loss_of(layer, inputs, case).backward()
    assert layer.get_parameter(name).grad is None
    others = [p for n, p in layer.named_parameters() if n != name]
    assert all(p.grad is not None for p in others)


@pytest.mark.parametrize("name", ["self", "other_sizes", "bias_kv"])
def test_both_forms_of_attention_walk_the_same_path_with_momentum_through_refreshes(name):
    case, paths = ATTENTION[name], {}
    for form in FORMS:
        torch.manual_seed(0)
        layer = case.build()
        optimizer = prong.PRONG(layer, lr=0.01, momentum=0.9, form=form, period=3, eps=EPS)
        for _ in range(7):
            optimizer.zero_grad()
            loss_of(layer, case.sample(), case).backward()
            optimizer.step()
        paths[form] = dict(layer.state_dict())
    assert_close(paths["explicit"], paths["implicit"], rtol=1e-8)


# One tensor, one window -----------------------------------------------------------------------------------------------


def window_of(layer: nn.MultiheadAttention) -> list:
    return [site.inputs for site in layer.sites]


@forms
def test_self_attention_gathers_factorises_and_holds_one_whitening(form):
    layer = prong.whiten_(nn.MultiheadAttention(6, 2, batch_first=True).double(), form)
    optimizer = prong.PRONG(layer, 0.1, eps=EPS, period=64, samples=640)
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    layer(x, x, x)[0].square().mean().backward()
    q, k, v = layer.sites
    assert q.inputs is k.inputs is v.inputs and q.inputs.moments.count == 20
    optimizer.step()
    assert q.inputs is k.inputs is v.inputs
    assert q.whitening is k.whitening is v.whitening
    held = 36 + 2 * 6 if form == "implicit" else 2 * 36 + 6
    rows = {row.name: row for row in prong.summary(layer)}
    assert rows["(model)"].memory == (held + 36 + 6) * 8, "P, c and c P, or U, its inverse and c; and one window"
    layer.double().to("cpu").float()
    assert q.inputs is k.inputs and q.whitening is k.whitening


@forms
def test_sites_that_stop_seeing_the_same_tensor_part_with_their_own_statistics(form):
    layer = prong.whiten_(nn.MultiheadAttention(6, 2, batch_first=True).double(), form)
    optimizer = prong.PRONG(layer, 0.1, eps=EPS, period=64, samples=640)
    x, y = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    layer(x, x, x)
    layer(x, y, y)
    layer(x, y, x)
    for site, seen in zip(layer.sites, ([x, x, x], [x, y, y], [x, y, x]), strict=True):
        rows = torch.cat(seen).reshape(-1, 6)
        assert site.inputs.moments.count == len(rows)
        assert_close(site.inputs.moments.mean[0], rows.mean(0))
        assert_close(site.inputs.moments.covariance()[0], torch.cov(rows.T, correction=0))
        assert site.inputs.examples == len(rows)
    assert len({id(window) for window in window_of(layer)}) == 3
    optimizer.refresher.refresh()
    assert len({id(site.whitening) for site in layer.sites}) == 3


def test_whitening_from_shared_statistics_is_that_from_separate_ones():
    layer = nn.MultiheadAttention(6, 2, batch_first=True).double()
    shared, separate = prong.whiten_(copy.deepcopy(layer)), prong.whiten_(copy.deepcopy(layer))
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    prong.refresh_(shared, [x], forward=lambda m, b: m(b, b, b))
    prong.refresh_(separate, [x], forward=lambda m, b: m(b, b.clone(), b.clone()))
    for one, other in zip(shared.sites, separate.sites, strict=True):
        assert_identical(one.whitening.P, other.whitening.P)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_few_tokens_give_the_gradients_that_many_give_by_another_way(monkeypatch, separate, bias, training):
    sizes = {"kdim": 6, "vdim": 7} if separate else {}
    layer = nn.MultiheadAttention(32, 2, batch_first=True, bias=bias, **sizes).double()
    layer = prong.whiten_(layer).train(training)
    query, key, value = (
        torch.randn(2, 3, n, dtype=torch.float64) for n in (32, sizes.get("kdim", 32), sizes.get("vdim", 32))
    )
    many = [torch.randn(40, 3, x.shape[-1], dtype=torch.float64) for x in (query, key, value)]
    prong.refresh_(layer, [many], EPS, forward=lambda m, b: m(*b))
    assert layer.few_tokens((query, key, value)) and not layer.few_tokens(tuple(many))
    parameters = list(layer.parameters())
    z, weights = layer(query, key, value)
    found = torch.autograd.grad(curved(z) + curved(weights), parameters)
    monkeypatch.setattr(type(layer), "few_tokens", lambda self, inputs: False)
    plain_z, plain_weights = layer(query, key, value)
    assert_close((z, weights), (plain_z, plain_weights))
    expected = torch.autograd.grad(curved(plain_z) + curved(plain_weights), parameters)
    assert_close(found, expected, rtol=1e-9)
