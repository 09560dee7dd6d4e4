"""nn.MultiheadAttention: three sites in one layer, and an output projection that is never called."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prong
from prong.layers import Site
from prong.model.whiten import whitened_sites
from tests.cases import (
    ATTENTION,
    FORMS,
    MODELS,
    VIEWS,
    AttentionCase,
    assert_close,
    assert_identical,
    attached,
    curved,
    parameter_gradients,
    plain_copy,
    step_of,
)

forms = pytest.mark.parametrize("form", FORMS)
every_form = pytest.mark.parametrize("form", [*FORMS, *VIEWS])
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
    return prong.refresh_(layer, batches, prong.Absolute(EPS), forward=lambda m, b: attend(m, b, case))


def refreshed(
    case: AttentionCase, form: str, training: bool = True, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A layer, the same every time, that was refreshed once; and its optimizer."""
    torch.manual_seed(0)
    layer = case.build().train(training)
    optimizer = attached(layer, form, **options)
    return refresh(layer, case, case.sample()), optimizer


def sites_of(layer: nn.Module) -> list[Site]:
    """Those of queries, keys and values, and that of the output projection."""
    return [site for _, site in whitened_sites(layer).values()]


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


@every_form
@cases
def test_before_a_refresh_attention_is_torch_s_own_to_the_bit_gradients_included(form, case):
    plain = case.build()
    layer = copy.deepcopy(plain)
    optimizer = attached(layer, form)
    inputs = case.sample()
    assert_identical(attend(layer, inputs, case), attend(plain, inputs, case), "outputs")
    mine = list(parameter_gradients(layer, loss_of(layer, inputs, case)).values())
    theirs = list(parameter_gradients(plain, loss_of(plain, inputs, case)).values())
    assert_identical(mine, theirs, "gradients")
    expected = step_of(plain, torch.optim.SGD(plain.parameters(), lr=1.0), loss_of(plain, inputs, case))
    assert_identical(step_of(layer, optimizer, loss_of(layer, inputs, case)), expected, "step")


@every_form
@cases
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_refreshes_and_folding_preserve_what_attention_computes(form, case, training):
    plain = case.build().train(training)
    layer = copy.deepcopy(plain)
    _optimizer = attached(layer, form)
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


@every_form
@cases
def test_steps_of_attention_equal_the_formula_on_plain_gradients(form, case):
    layer = case.build()
    optimizer = attached(layer, form)
    inputs = case.sample()
    refresh(layer, case, inputs)
    plain = plain_copy(layer)
    gradients = parameter_gradients(plain, loss_of(plain, inputs, case))
    expected = natural_attention(plain, gradients, projection_inputs(plain, inputs, case))
    loss = loss_of(layer, inputs, case)
    if form in VIEWS:
        assert_close(parameter_gradients(layer, loss_of(layer, inputs, case)), gradients, "gradients")
    assert_close(step_of(layer, optimizer, loss), expected, "step", rtol=1e-8, atol=1e-9)


@every_form
@cases
def test_the_inputs_gradients_are_the_plain_layer_s(form, case):
    layer, _optimizer = refreshed(case, form)
    inputs = [x.detach().clone().requires_grad_() for x in case.sample()]
    inputs = inputs if case.cross else [inputs[0]] * 3
    wanted = inputs if case.cross else inputs[:1]
    found = torch.autograd.grad(loss_of(layer, inputs, case), wanted)
    plain = plain_copy(layer)
    assert_close(found, torch.autograd.grad(loss_of(plain, inputs, case), wanted))


def test_ordinary_gradients_reach_attention():
    case = ATTENTION["cross"]
    layer, _optimizer = refreshed(case, "implicit")
    inputs, plain = case.sample(), plain_copy(layer)
    expected = parameter_gradients(plain, loss_of(plain, inputs, case))
    outside = loss_of(layer, inputs, case)
    with prong.ordinary_gradients(layer):
        assert_close(parameter_gradients(layer, loss_of(layer, inputs, case)), expected)
        assert_close(parameter_gradients(layer, outside), expected)


@every_form
@pytest.mark.parametrize("name", ["cross", "other_sizes", "key_padding", "dropout", "unbatched", "bias_kv"])
def test_an_open_window_changes_neither_outputs_nor_gradients_of_attention(form, name):
    case = ATTENTION[name]
    closed, _optimizer = refreshed(case, form)
    layer, _optimizer = refreshed(case, form, refresh=prong.Every(1000))
    inputs = case.sample()
    assert_close(attend(layer, inputs, case), attend(closed, inputs, case))
    rows = projection_inputs(plain_copy(layer), inputs, case)
    for site, x in zip(sites_of(layer), rows, strict=True):
        assert site.window.moments.count == len(x)
        assert_close(site.window.moments.mean[0], x.mean(0), site.label)
        assert_close(site.window.moments.covariance()[0], torch.cov(x.T, correction=0), site.label)
    found, expected = (parameter_gradients(model, loss_of(model, inputs, case)) for model in (layer, closed))
    assert_close(found, expected)


@forms
@pytest.mark.parametrize("name", ["cross", "other_sizes", "no_bias", "key_padding", "bias_kv", "unbatched", "dropout"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_watched_outputs_change_neither_outputs_nor_gradients_of_attention(form, name, training):
    case = ATTENTION[name]
    alone, _optimizer = refreshed(case, form, training)
    watching = {"refresh": prong.Every(1000), "outputs": prong.WhitenOutputs("empirical")}
    layer, _optimizer = refreshed(case, form, training, **watching)
    inputs = case.sample()
    assert_close(attend(layer, inputs, case), attend(alone, inputs, case))
    found, expected = (parameter_gradients(model, loss_of(model, inputs, case)) for model in (layer, alone))
    assert_close(found, expected)
    assert all((site.outputs.count > 0) == training for site in sites_of(layer)), "and they are watched"


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
    assert ("attention.out_proj" in whitened_sites(model)) == isinstance(chosen, list)


@forms
def test_an_output_projection_whose_attention_is_plain_cannot_be_whitened(form):
    """Plain attention computes with its weights and never calls it: nothing could be seen or made natural."""
    model = nn.ModuleDict({"attention": ATTENTION["self"].build()})
    with pytest.raises(ValueError, match=r"'attention.out_proj' cannot be whitened"):
        prong.whiten_(model, form, layers="attention.out_proj")


@every_form
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_transformer_layer_is_refreshed_in_train_and_eval_mode(form, norm_first, training):
    plain = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=norm_first).double()
    plain.train(training)
    model = copy.deepcopy(plain)
    _optimizer = attached(model, form)
    h = MODELS["transformer"].sample(6)
    prong.refresh_(model, h, EPS)
    assert model.training == training
    for name, (_, site) in whitened_sites(model).items():
        assert site.whitening is not None, f"{name} saw nothing"
    assert_close(model(h), plain(h))
    with torch.no_grad():
        assert_close(model(h), plain(h))


@every_form
def test_a_transformer_with_padding_is_refreshed_in_eval_mode(form):
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    plain = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double().eval()
    model = copy.deepcopy(plain)
    _optimizer = attached(model, form)
    h, mask = MODELS["transformer"].sample(6), torch.tensor([[False, False, False, True]] * 6)
    prong.refresh_(model, [{"src": h, "src_key_padding_mask": mask}], EPS)
    assert len(sites_of(model)) == 12 and all(site.whitening is not None for site in sites_of(model))
    assert_close(model(h, src_key_padding_mask=mask), plain(h, src_key_padding_mask=mask))


@every_form
def test_a_decoder_layer_with_self_and_cross_attention_trains(form):
    model = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.1, batch_first=True).double()
    optimizer = prong.PRONG(model, lr=0.01, form=form, refresh=prong.Every(2))
    for _ in range(4):
        target, memory = MODELS["transformer"].sample(3), MODELS["transformer"].sample(3)
        optimizer.zero_grad()
        loss = model(target, memory, tgt_is_causal=False).square().mean()
        loss.backward()
        optimizer.step()
    assert len(sites_of(model)) == 10 and all(site.whitening.is_finite() for site in sites_of(model))
    assert loss.isfinite()


@every_form
def test_frozen_projections_of_attention_are_refreshed_and_get_no_gradient(form):
    case = ATTENTION["other_sizes"]
    layer = case.build()
    optimizer = attached(layer, form)
    name = "k_proj_V" if form == "explicit" else "k_proj_weight"
    layer.get_parameter(name).requires_grad_(False)
    inputs = case.sample()
    z = attend(layer, inputs, case)
    refresh(layer, case, inputs)
    assert_close(attend(layer, inputs, case), z)
    step = step_of(layer, optimizer, loss_of(layer, inputs, case))
    assert not step["k_proj_weight"].any()
    assert layer.get_parameter(name).grad is None
    others = [p for n, p in layer.named_parameters() if n != name]
    assert all(p.grad is not None for p in others)


@pytest.mark.parametrize("name", ["bias_kv", "dropout"])
def test_all_forms_of_attention_walk_the_same_path_with_momentum_through_refreshes(name):
    case, paths = ATTENTION[name], {}
    for form in (*FORMS, *VIEWS):
        torch.manual_seed(0)
        layer = case.build()
        optimizer = prong.PRONG(layer, lr=0.01, momentum=0.9, form=form, refresh=prong.Every(3))
        for _ in range(7):
            optimizer.zero_grad()
            loss_of(layer, case.sample(), case).backward()
            optimizer.step()
        paths[form] = dict(layer.state_dict())
    for form, path in paths.items():
        assert_close(path, paths["implicit"], form, rtol=1e-8)


# One tensor, one window -----------------------------------------------------------------------------------------------


def three_of(layer: nn.Module) -> list[Site]:
    """Those of queries, keys and values."""
    return sites_of(layer)[:3]


@every_form
def test_self_attention_gathers_factorises_and_holds_one_whitening(form):
    layer = nn.MultiheadAttention(6, 2, batch_first=True).double()
    optimizer = attached(layer, form, refresh=prong.Every(64, samples=640))
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    layer(x, x, x)[0].square().mean().backward()
    q, k, v = three_of(layer)
    assert q.window is k.window is v.window and q.window.moments.count == 20
    optimizer.step()
    assert q.window is k.window is v.window
    assert q.whitening is k.whitening is v.whitening is not None
    matrices, vectors, parameters = {  # of whitenings; and V and d
        "implicit": (2, 2, 0),
        "explicit": (2, 1, 0),
        "auto": (1, 2, 0),
        "materialised": (1, 1, 3 * (36 + 6)),
    }[form]
    rows = {row.name: row for row in prong.summary(layer)}
    window = 36 + 6
    assert rows["(model)"].memory == (matrices * 36 + vectors * 6 + parameters + window) * 8
    layer.double().to("cpu").float()
    layer(*[x.float()] * 3)
    assert q.window is k.window is v.window and q.whitening is k.whitening is v.whitening
    assert q.window.moments.count == 20 * (1 - 20 / 640) + 20, "of which those from before the refresh have faded"


@every_form
def test_sites_that_stop_seeing_the_same_tensor_part_with_their_own_statistics(form):
    layer = nn.MultiheadAttention(6, 2, batch_first=True).double()
    optimizer = attached(layer, form, refresh=prong.Every(64, samples=640))
    x, y = torch.randn(2, 4, 5, 6, dtype=torch.float64)
    z = layer(x, x, x)[0] + layer(x, y, y)[0] + layer(x, y, x)[0]
    for site, seen in zip(three_of(layer), ([x, x, x], [x, y, y], [x, y, x]), strict=True):
        rows = torch.cat(seen).reshape(-1, 6)
        assert site.window.moments.count == len(rows)
        assert_close(site.window.moments.mean[0], rows.mean(0))
        assert_close(site.window.moments.covariance()[0], torch.cov(rows.T, correction=0))
        assert site.window.examples == len(rows)
    assert len({id(site.window) for site in three_of(layer)}) == 3
    z.square().mean().backward()
    optimizer.step()
    assert len({id(site.whitening) for site in three_of(layer)}) == 3


@every_form
def test_whitening_from_shared_statistics_is_that_from_separate_ones(form):
    shared = nn.MultiheadAttention(6, 2, batch_first=True).double()
    separate = copy.deepcopy(shared)
    _optimizers = [attached(layer, form) for layer in (shared, separate)]
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    prong.refresh_(shared, [x], forward=lambda m, b: m(b, b, b))
    prong.refresh_(separate, [x], forward=lambda m, b: m(b, b.clone(), b.clone()))
    for one, other in zip(three_of(shared), three_of(separate), strict=True):
        assert_identical(dict(one.whitening.items()), dict(other.whitening.items()))


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
