"""A checkpoint of a whitened model is that of the plain one: same keys, same values, both ways."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import prong
from prong.model.whiten import whitened_sites
from tests.cases import ATTENTION, MODELS, SPECS, assert_close, assert_identical, curved, parameter_gradients
from tests.training import FORMS

forms = pytest.mark.parametrize("form", FORMS)
models = pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def through_torch(state: dict, path) -> dict:
    torch.save(state, path / "model.pt")
    return torch.load(path / "model.pt", weights_only=True)


def through_safetensors(state: dict, path) -> dict:
    save_file(state, path / "model.safetensors")
    return load_file(path / "model.safetensors")


def directly(state: dict, path) -> dict:
    return state


roads = pytest.mark.parametrize("road", [directly, through_torch, through_safetensors])


OPTIMIZERS: list[torch.optim.Optimizer] = []  # the last two, each of which lives as long as its model is tested


def with_form(model: nn.Module, form: str) -> nn.Module:
    """Whitened layers, or plain ones whose optimizer whitens."""
    if form in ("implicit", "explicit"):
        return prong.whiten_(model, form)
    OPTIMIZERS[:] = [*OPTIMIZERS[-1:], prong.PRONG(model, 0.1, form=form, refresh=prong.Never())]
    return model


def whitened(case, form: str) -> nn.Module:
    return prong.refresh_(with_form(case.build(), form), case.sample(9))


@forms
@models
@roads
def test_a_plain_checkpoint_loads_into_a_whitened_model(form, case, road, tmp_path):
    plain, model = case.build(), whitened(case, form)
    whitenings = [dict(site.whitening.items()) for _, site in whitened_sites(model).values()]
    result = model.load_state_dict(road(plain.state_dict(), tmp_path))
    assert not result.missing_keys and not result.unexpected_keys
    x = case.sample(4)
    assert_close(model.eval()(x), plain.eval()(x), "outputs")
    assert_close(dict(model.state_dict()), dict(plain.state_dict()), "state")
    after = [dict(site.whitening.items()) for _, site in whitened_sites(model).values()]
    assert_identical(after, whitenings, "the whitening stays")


@forms
@models
@roads
def test_a_checkpoint_of_a_whitened_model_loads_into_a_plain_one(form, case, road, tmp_path):
    plain, model = case.build(), whitened(case, form)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    assert all(type(value) is torch.Tensor and not value.requires_grad for value in state.values())
    plain.load_state_dict(road(state, tmp_path))
    x = case.sample(4)
    assert_close(plain.eval()(x), model.eval()(x))


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
@models
def test_checkpoints_go_from_one_form_to_the_other(first, second, case):
    source, target = whitened(case, first), whitened(case, second)
    target.load_state_dict(source.state_dict())
    x = case.sample(4)
    assert_close(target.eval()(x), source.eval()(x))


@forms
@pytest.mark.parametrize("case", ATTENTION.values(), ids=ATTENTION)
def test_attention_s_checkpoints_are_torch_s_own(form, case):
    plain, layer = case.build(), with_form(case.build(), form)
    prong.refresh_(layer, [case.sample()], forward=lambda m, b: m(*b, **case.options))
    assert list(layer.state_dict()) == list(plain.state_dict())
    layer.load_state_dict(plain.state_dict())
    assert_close(dict(layer.state_dict()), dict(plain.state_dict()))
    inputs = case.sample()
    assert_close(layer.eval()(*inputs, **case.options), plain.eval()(*inputs, **case.options))


@forms
@models
def test_loading_a_model_s_own_checkpoint_changes_no_bit(form, case):
    model = whitened(case, form)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.load_state_dict(model.state_dict())
    assert_identical({name: p.detach() for name, p in model.named_parameters()}, before)


@forms
def test_a_checkpoint_is_a_snapshot_and_parameters_stay_the_same_objects(form):
    case = MODELS["mlp"]
    model = whitened(case, form)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    snapshot, objects = copy.deepcopy(model.state_dict()), [id(p) for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    assert_close(dict(snapshot), state)
    model.load_state_dict(snapshot)
    assert_close(dict(model.state_dict()), state)
    assert [id(p) for p in model.parameters()] == objects


@forms
def test_an_optimizer_keeps_training_after_a_checkpoint_was_loaded(form):
    case = MODELS["mlp"]
    model, other = whitened(case, form), case.build()
    views = form in ("auto", "materialised")
    optimizer = OPTIMIZERS[-1] if views else torch.optim.SGD(model.parameters(), 1e-3)
    model.load_state_dict(other.state_dict())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    curved(model(case.sample(4))).backward()
    optimizer.step()
    changes = [(value - before[name]).abs().max() for name, value in model.state_dict().items()]
    assert min(changes) > 0 and max(changes) < 1


@forms
@pytest.mark.parametrize("prefix", ["", "model."])
def test_keep_vars_and_prefixes_work_as_in_torch(form, prefix):
    model, plain = whitened(MODELS["mlp"], form), MODELS["mlp"].build()
    assert list(model.state_dict(prefix=prefix)) == list(plain.state_dict(prefix=prefix))
    kept = model.state_dict(keep_vars=True)
    assert all(isinstance(value, nn.Parameter) for value in kept.values())


@forms
def test_checkpoints_of_another_dtype_are_converted(form):
    case = MODELS["mlp"]
    model, plain = whitened(case, form), case.build().float()
    model.load_state_dict(plain.state_dict())
    assert all(p.dtype == torch.float64 for p in model.parameters())
    assert_close(dict(model.state_dict()), {n: p.double() for n, p in plain.state_dict().items()})


# Errors ---------------------------------------------------------------------------------------------------------------


def without(key: str):
    return lambda state: {name: value for name, value in state.items() if name != key}


def with_extra(key: str):
    return lambda state: {**state, key: torch.zeros(2)}


def reshaped(key: str):
    return lambda state: {**state, key: torch.zeros(7, 7)}


FAULTS = {
    "missing_weight": (without("2.weight"), "Missing key"),
    "missing_bias": (without("2.bias"), "Missing key"),
    "unexpected": (with_extra("2.V"), "Unexpected key"),
    "mismatched_weight": (reshaped("2.weight"), "size mismatch for 2.weight"),
    "mismatched_bias": (reshaped("2.bias"), "size mismatch for 2.bias"),
    "not_a_tensor": (lambda state: {**state, "2.weight": 3.0}, "2.weight"),
}
faults = pytest.mark.parametrize(("fault", "message"), FAULTS.values(), ids=FAULTS)


@forms
@faults
def test_faulty_checkpoints_give_torch_s_own_errors(form, fault, message):
    """Torch loads what fits and then raises, and so do we; a layer of which a part does not fit may stay as it was."""
    case = MODELS["mlp"]
    model, state = whitened(case, form), fault(case.build().state_dict())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain = prong.fold_(copy.deepcopy(model))
    with pytest.raises(RuntimeError, match=message) as theirs:
        plain.load_state_dict(state)
    with pytest.raises(RuntimeError, match=message) as mine:
        model.load_state_dict(state)
    assert str(mine.value) == str(theirs.value)
    after = dict(model.state_dict())
    unfit = [name for name in after if name.startswith("2.")]
    fit = [name for name in after if name not in unfit]
    assert_close({name: after[name] for name in fit}, {name: plain.state_dict()[name] for name in fit})
    as_torch = all(torch.allclose(after[name], plain.state_dict()[name]) for name in unfit)
    as_before = all(torch.equal(after[name], before[name]) for name in unfit)
    assert as_torch or as_before


@forms
def test_without_strict_missing_and_unexpected_keys_are_reported_and_the_rest_is_loaded(form):
    case = MODELS["mlp"]
    model, plain = whitened(case, form), case.build()
    old = {name: value.clone() for name, value in model.state_dict().items()}
    state = {**without("2.bias")(plain.state_dict()), "extra": torch.zeros(1)}
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["2.bias"] and result.unexpected_keys == ["extra"]
    expected = {**plain.state_dict(), "2.bias": old["2.bias"]}
    assert_close(dict(model.state_dict()), expected)


@pytest.mark.parametrize("refreshed", [False, True])
def test_assigning_a_checkpoint_to_an_explicit_model_is_refused_and_changes_nothing(refreshed):
    case = MODELS["mlp"]
    model = whitened(case, "explicit") if refreshed else prong.whiten_(case.build(), "explicit")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match=r"assign=True.*prong.fold_"):
        model.load_state_dict(case.build().state_dict(), assign=True)
    assert_identical({name: p.detach() for name, p in model.named_parameters()}, before)


@pytest.mark.parametrize("form", ["implicit", "auto"])
def test_assigning_a_checkpoint_to_a_model_with_canonical_parameters_works(form):
    case = MODELS["mlp"]
    model, plain = whitened(case, form), case.build()
    state = plain.state_dict()
    model.load_state_dict(state, assign=True)
    assert model[0].weight.data_ptr() == state["0.weight"].data_ptr()
    x = case.sample(3)
    assert_close(model(x), plain(x))
    natural, ordinary = parameter_gradients(model, curved(model(x))), parameter_gradients(plain, curved(plain(x)))
    assert torch.allclose(natural["0.weight"], ordinary["0.weight"]) == (form == "auto")


@forms
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_kind_of_layer_loads_a_plain_checkpoint(form, spec):
    plain, layer = spec.build(), with_form(spec.build(), form)
    prong.refresh_(layer, spec.sample(5))
    layer.load_state_dict(plain.state_dict())
    assert_close(dict(layer.state_dict()), dict(plain.state_dict()))
    h = spec.sample(3)
    assert_close(layer(h), plain(h))


@forms
def test_whole_model_snapshots_and_state_dict_hooks_of_the_user_work(form):
    model = whitened(MODELS["mlp"], form)
    seen = []
    model[0].register_state_dict_post_hook(lambda module, state, prefix, meta: seen.append(prefix))
    model[0].register_load_state_dict_pre_hook(lambda module, state, prefix, *_: seen.append(f"load {prefix}"))
    model.load_state_dict(model.state_dict())
    assert seen == ["0.", "load 0."]
