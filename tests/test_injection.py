"""Putting whitened layers into a model, taking them out again, and refreshing them: reversible, all or nothing."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import prong
from prong.core.whitening import Whitening
from prong.layers import Site, WhitenedLayer
from prong.layers.taps import Tap
from prong.model.whiten import whitened_layers, whitened_sites
from tests.cases import (
    FORMS,
    MODELS,
    SPECS,
    VIEWS,
    accumulated,
    assert_close,
    assert_identical,
    attached,
    curved,
    plain_copy,
    step_of,
)

forms = pytest.mark.parametrize("form", FORMS)
every_form = pytest.mark.parametrize("form", [*FORMS, *VIEWS])
models = pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def inverse_of(whitening: Whitening) -> Tensor:
    """(Sigma + eps I)^-1, whatever a form keeps of it."""
    return whitening.P if whitening.U is None else whitening.U.mT @ whitening.U


def site_of(model: nn.Module) -> Site:
    """The first site of a model."""
    return next(iter(whitened_sites(model).values()))[1]


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in whitened_layers(model)]


def state_of(model: nn.Module) -> dict:
    """Everything a failed or successful refresh must leave alone, or bring back, to compare to the bit."""
    whitenings = {name: site.whitening for name, (_, site) in whitened_sites(model).items()}
    return {
        "parameters": {name: p.detach().clone() for name, p in model.named_parameters()},
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
        "whitening": {name: None if w is None else dict(w.items()) for name, w in whitenings.items()},
    }


class Nested(nn.Module):
    """Names with dots, and one layer of each unsupported sort."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 5))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(self.encoder(self.embed(tokens)))


# Which layers ---------------------------------------------------------------------------------------------------------


@forms
@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (None, ["encoder.0", "encoder.2", "decoder.0", "decoder.2"]),
        ("decoder.2", ["decoder.2"]),
        ("encoder.*", ["encoder.0", "encoder.2"]),
        (["decoder.0", "encoder.*"], ["encoder.0", "encoder.2", "decoder.0"]),
        (("*.0",), ["encoder.0", "decoder.0"]),
        ({"decoder.?"}, ["decoder.0", "decoder.2"]),
        (lambda name, module: name.endswith("2") and module.out_features == 5, ["decoder.2"]),
        (iter(["decoder.0"]), ["decoder.0"]),
    ],
    ids=["all", "name", "pattern", "list", "tuple", "set", "predicate", "iterator"],
)
def test_layers_are_chosen_by_name_pattern_or_predicate(form, layers, expected):
    model = Nested()
    prong.whiten_(model, form, layers=copy.copy(layers) if not hasattr(layers, "__next__") else iter(expected))
    assert names(model) == expected
    assert all(layer.form == form for _, layer in whitened_layers(model))


@pytest.mark.parametrize("pattern", ["encodr.0", "encoder.7", "*.weight"])
def test_a_pattern_that_fits_nothing_is_an_error_that_lists_the_layers(pattern):
    model = Nested()
    with pytest.raises(ValueError, match=r"no layer fits .*encoder\.0, encoder\.1") as error:
        prong.whiten_(model, layers=["encoder.0", pattern])
    assert repr(pattern) in str(error.value)
    assert names(model) == []


class Cosine(nn.Linear):
    """A subclass that computes something else."""

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h / h.norm())


class Doubled(nn.Module):
    def forward(self, W: Tensor) -> Tensor:
        return 2 * W


def tied() -> nn.Module:
    model = nn.ModuleDict({"bad": nn.Linear(4, 5), "other": nn.Embedding(5, 4)})
    model["other"].weight = model["bad"].weight
    return model


def tied_bias() -> nn.Module:
    model = nn.ModuleDict({"bad": nn.Linear(4, 5), "other": nn.Linear(3, 5)})
    model["other"].bias = model["bad"].bias
    return model


def with_bad(module: nn.Module) -> nn.Module:
    return nn.ModuleDict({"bad": module, "good": nn.Linear(4, 4)})


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return with_bad(nn.utils.weight_norm(nn.Linear(4, 4)))


def parametrized() -> nn.Module:
    module = nn.Linear(4, 4)
    parametrize.register_parametrization(module, "weight", Doubled())
    return with_bad(module)


UNSUPPORTED = {
    "tied": (tied, "weight is tied to another layer's", True),
    "tied_bias": (tied_bias, "bias is tied to another layer's", True),
    "parametrized": (parametrized, "parametrized; remove the parametrization", True),
    "weight_norm": (lambda: with_bad(parametrizations.weight_norm(nn.Linear(4, 4))), "parametrized", True),
    "spectral_norm": (lambda: with_bad(parametrizations.spectral_norm(nn.Conv1d(4, 4, 3))), "parametrized", True),
    "orthogonal": (lambda: with_bad(parametrizations.orthogonal(nn.Linear(4, 4))), "parametrized", True),
    "old_weight_norm": (old_weight_norm, "computed from other parameters", True),
    "old_spectral_norm": (
        lambda: with_bad(nn.utils.spectral_norm(nn.Linear(4, 4))),
        "computed from other parameters",
        True,
    ),
    "pruned": (lambda: with_bad(prune.identity(nn.Linear(4, 4), "weight")), "computed from other parameters", True),
    "lazy": (lambda: with_bad(nn.LazyLinear(4)), "lazy; run one forward first", True),
    "lazy_conv": (lambda: with_bad(nn.LazyConv2d(4, 3)), "lazy; run one forward first", True),
    "subclass": (lambda: with_bad(Cosine(4, 4)), "Cosine, a subclass of Linear that may compute something", True),
    "complex": (lambda: with_bad(nn.Linear(4, 4, dtype=torch.complex64)), "complex64, not real floating point", True),
    "embedding": (lambda: with_bad(nn.Embedding(4, 4)), "its type is Embedding", False),
    "batch_norm": (lambda: with_bad(nn.BatchNorm1d(4)), "its type is BatchNorm1d", False),
    "recurrent": (lambda: with_bad(nn.LSTM(4, 4)), "its type is LSTM", False),
    "bilinear": (lambda: with_bad(nn.Bilinear(4, 4, 4)), "its type is Bilinear", False),
    "activation": (lambda: with_bad(nn.ReLU()), "its type is ReLU", False),
}
unsupported = pytest.mark.parametrize(("build", "reason", "looks_supported"), UNSUPPORTED.values(), ids=UNSUPPORTED)


@forms
@unsupported
def test_asking_by_name_for_a_layer_that_cannot_be_whitened_is_an_error_with_the_reason(
    form, build, reason, looks_supported
):
    model = build()
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=reason) as error:
        prong.whiten_(model, form, layers=["bad"])
    assert "'bad' cannot be whitened" in str(error.value)
    assert {name: type(module) for name, module in model.named_modules()} == before


@forms
@unsupported
def test_merely_met_it_gives_one_warning_if_it_looked_supported_and_none_if_not(form, build, reason, looks_supported):
    model = build()
    if "good" not in model:
        model["good"] = nn.Linear(4, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prong.whiten_(model, form)
    assert "good" in names(model) and "bad" not in names(model)
    assert len(caught) == looks_supported
    if looks_supported:
        assert "'bad'" in str(caught[0].message) and reason.split(",")[0] in str(caught[0].message)
        assert caught[0].filename == __file__


def test_several_layers_left_as_they_are_share_one_warning():
    model = nn.Sequential(Cosine(4, 4), nn.Linear(4, 4), Cosine(4, 4))
    with pytest.warns(UserWarning, match="'0'.*'2'") as caught:
        prong.whiten_(model)
    assert len(caught) == 1


def test_a_lazy_layer_that_ran_once_can_be_whitened():
    model = nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.Linear(3, 2))
    model(torch.randn(5, 4))
    assert names(prong.whiten_(model)) == ["0", "2"]


@pytest.mark.parametrize(
    "model", [nn.Sequential(nn.ReLU()), nn.Embedding(3, 4), nn.Sequential(), nn.LayerNorm(4)], ids=str
)
def test_a_model_with_nothing_to_whiten_is_an_error(model):
    with pytest.raises(ValueError, match="can be whitened: supported are Linear, Conv1d/2d/3d"):
        prong.whiten_(model)


def test_a_predicate_that_takes_nothing_is_an_error():
    with pytest.raises(ValueError, match="can be whitened"):
        prong.whiten_(Nested(), layers=lambda name, module: False)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": torch.zeros(3)}, TypeError, "expected a torch.nn.Module, got Tensor"),
        ({"model": None}, TypeError, "expected a torch.nn.Module, got NoneType"),
        ({"form": "both"}, ValueError, "form is 'auto', 'implicit', .* got 'both'"),
        ({"form": "auto"}, ValueError, "a matter of the optimizer"),
        ({"form": prong.Materialised()}, ValueError, "a matter of the optimizer"),
        ({"max_positions": 0}, ValueError, "max_positions is at least 1, got 0"),
        ({"layers": [0]}, TypeError, "layer names and patterns are strings, got int"),
        ({"layers": 3}, TypeError, "int"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_before_anything_changes(arguments, error, message):
    model = arguments.pop("model", None) if "model" in arguments else (kept := Nested())
    with pytest.raises(error, match=message):
        prong.whiten_(model, **arguments)
    if isinstance(model, nn.Module):
        assert names(kept) == []


@pytest.mark.parametrize("function", [prong.fold_, prong.summary, lambda m: prong.refresh_(m, [])])
def test_only_modules_are_taken(function):
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got dict"):
        function({})


# Reversible -----------------------------------------------------------------------------------------------------------


def anatomy(model: nn.Module) -> dict[str, list]:
    """What folding has to bring back."""
    return {
        "classes": [type(m) for m in model.modules()],
        "attributes": [set(vars(m)) for m in model.modules()],
        "hooks": [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()],
        "parameters": [(name, id(p)) for name, p in model.named_parameters()],
        "keys": list(model.state_dict()),
    }


@every_form
@models
def test_injection_is_reversible(form, case):
    model = case.build().eval()
    plain = copy.deepcopy(model)
    x = case.sample(4)
    before = anatomy(model)
    _optimizer = attached(model, form)
    assert list(model.state_dict()) == before["keys"]
    assert {id(p) for p in model.parameters()} == {i for _, i in before["parameters"]}
    if form in VIEWS:
        assert anatomy(model)["parameters"] == before["parameters"]
    for mine, theirs in zip(model.modules(), plain.modules(), strict=True):
        assert isinstance(mine, type(theirs))
    assert_close(model(x), plain(x))
    prong.refresh_(model.train(), case.sample(9))
    assert list(model.eval().state_dict()) == before["keys"]
    assert prong.fold_(model) is model
    assert anatomy(model) == before
    assert_close(model(x), plain(x))
    assert_close(dict(model.state_dict()), dict(plain.state_dict()))


@pytest.mark.parametrize("form", ["implicit", *VIEWS])
def test_folding_leaves_canonical_parameters_to_the_bit_and_gradients_where_they_are(form):
    model = MODELS["mlp"].build()
    _optimizer = attached(model, form)
    prong.refresh_(model, MODELS["mlp"].sample(9))
    curved(model(MODELS["mlp"].sample(3))).backward()
    before, gradients = {n: p.clone() for n, p in model.state_dict().items()}, [p.grad for p in model.parameters()]
    prong.fold_(model)
    assert_identical(dict(model.state_dict()), before)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))


@forms
def test_whitening_twice_and_folding_twice_change_nothing_more(form):
    model = prong.whiten_(MODELS["mlp"].build(), form)
    prong.refresh_(model, MODELS["mlp"].sample(9))
    before = state_of(model)
    for again in FORMS:
        prong.whiten_(model, again)
        assert_identical(state_of(model), before)
        assert all(layer.form == form for _, layer in whitened_layers(model))
    prong.fold_(model)
    kept = {n: p.clone() for n, p in model.state_dict().items()}
    prong.fold_(model)
    assert_identical(dict(model.state_dict()), kept)


@forms
def test_more_layers_can_be_whitened_later(form):
    model = prong.whiten_(Nested(), form, layers="encoder.0")
    prong.refresh_(model, torch.randint(5, (8,)))
    whitening = model.encoder[0].sites[0].whitening
    prong.whiten_(model, form, layers="decoder.*")
    assert names(model) == ["encoder.0", "decoder.0", "decoder.2"]
    assert model.encoder[0].sites[0].whitening is whitening


@every_form
def test_a_single_layer_can_be_the_model(form):
    layer = SPECS["linear"].build()
    _optimizer = attached(layer, form)
    prong.refresh_(layer, SPECS["linear"].sample(8))
    assert isinstance(layer, nn.Linear) and isinstance(layer, WhitenedLayer) == (form in FORMS)
    assert names(layer) == [""] and site_of(layer).whitening is not None
    assert type(prong.fold_(layer)) is nn.Linear


@every_form
def test_hooks_of_the_user_stay_and_run_once_per_call(form):
    model = MODELS["mlp"].build()
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append("forward"))
    model[0].register_forward_pre_hook(lambda *_: calls.append("pre"))
    model[0].register_full_backward_hook(lambda *_: calls.append("backward"))

    def hooks() -> list[list]:
        every = (m._forward_hooks | m._forward_pre_hooks | m._backward_hooks for m in model.modules())
        return [[hook for hook in found.values() if not isinstance(hook, Tap)] for found in every]

    kept = hooks()
    for change in (lambda: attached(model, form), lambda: prong.fold_(model)):
        _optimizer = change()
        assert hooks() == kept
        calls.clear()
        curved(model(MODELS["mlp"].sample(3).requires_grad_())).backward()
        assert calls == ["pre", "forward", "backward"]


@forms
def test_weight_and_bias_are_the_canonical_ones(form):
    model = MODELS["mlp"].build()
    plain = copy.deepcopy(model)
    prong.refresh_(prong.whiten_(model, form), MODELS["mlp"].sample(9))
    for i in (0, 2, 4):
        assert_close(model[i].weight, plain[i].weight)
        assert_close(model[i].bias, plain[i].bias)
    if form == "explicit":
        assert [name for name, _ in model[0].named_parameters()] == ["V", "d"]
        with pytest.raises((AttributeError, KeyError)):
            model[0].weight = nn.Parameter(torch.zeros(6, 4).double())


# Refresh: what it takes -----------------------------------------------------------------------------------------------


class Pair(nn.Module):
    """Takes two named inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2).double(), nn.Linear(4, 2).double()

    def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        return self.left(a) if b is None else self.left(a) + self.right(b)


@every_form
def test_batches_come_as_a_tensor_a_list_a_generator_pairs_mappings_or_a_loader(form):
    x = MODELS["mlp"].sample(12)
    y = torch.arange(12)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)
    ways = {
        "tensor": x,
        "list": list(x.split(4)),
        "generator": (part for part in x.split(5)),
        "pairs": list(zip(x.split(4), y.split(4), strict=True)),
        "lists": [[part, None] for part in x.split(6)],
        "loader": loader,
        "mappings": [{"input": part} for part in x.split(6)],
    }
    expected = None
    for way, batches in ways.items():
        torch.manual_seed(1)
        model = MODELS["mlp"].build()
        _optimizer = attached(model, form)
        prong.refresh_(model, batches)
        whitening = site_of(model).whitening
        found = whitening.c, inverse_of(whitening)
        expected = expected or found
        assert_close(found, expected, way)


@forms
def test_a_forward_of_the_users_own_and_keyword_batches(form):
    model = prong.whiten_(Pair(), form)
    a, b = torch.randn(6, 3).double(), torch.randn(6, 4).double()
    prong.refresh_(model, [{"a": a, "b": b}])
    first = model.right.sites[0].whitening
    prong.refresh_(model, [(a, b)], forward=lambda m, batch: m(batch[0], b=batch[1]))
    assert_identical(dict(model.right.sites[0].whitening.items()), dict(first.items()))


@every_form
def test_samples_bounds_how_many_examples_are_looked_at(form):
    model = MODELS["mlp"].build()
    _optimizer = attached(model, form)
    x, taken = MODELS["mlp"].sample(40), []

    def batches():
        for part in x.split(10):
            taken.append(part)
            yield part

    prong.refresh_(model, batches(), samples=15)
    assert len(taken) == 2
    assert_close(site_of(model).whitening.c[0], x[:20].mean(0))


@every_form
def test_a_branch_that_is_not_reached_keeps_its_whitening(form):
    model = Pair()
    _optimizer = attached(model, form)
    left, right = (site for _, site in whitened_sites(model).values())
    a, b = torch.randn(6, 3).double(), torch.randn(6, 4).double()
    prong.refresh_(model, [{"a": a}])
    assert right.whitening is None and left.whitening is not None
    prong.refresh_(model, [{"a": a, "b": b}])
    kept, old = right.whitening, left.whitening
    prong.refresh_(model, [{"a": 2 * a}])
    assert right.whitening is kept and left.whitening is not old


# Refresh: what it leaves alone ----------------------------------------------------------------------------------------


@every_form
@models
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_refresh_has_no_side_effects(form, case, training):
    model = case.build()
    _optimizer = attached(model, form)
    curved(model(case.sample(4))).backward()  # .grad is there, batch norm has seen something
    model.train(training)
    next(iter(model.children())).train(not training)  # modes need not be uniform
    before = {
        "gradients": accumulated(model),
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
        "random": torch.get_rng_state(),
    }
    grads = [id(p.grad) for p in model.parameters()]
    buffers = [id(b) for b in model.buffers()]
    modes = [m.training for m in model.modules()]
    requires = [p.requires_grad for p in model.parameters()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    batches = list(case.sample(9).split(3))
    before["random"] = torch.get_rng_state()
    prong.refresh_(model, batches)
    after = {
        "gradients": accumulated(model),
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
        "random": torch.get_rng_state(),
    }
    assert_identical(after, before)
    assert [id(p.grad) for p in model.parameters()] == grads
    assert [id(b) for b in model.buffers()] == buffers
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == requires
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert all(site.window is None for _, site in whitened_sites(model).values())


@every_form
def test_a_refresh_puts_open_windows_aside(form):
    model = MODELS["mlp"].build()
    _optimizer = prong.PRONG(model, lr=0.1, form=form)
    model(MODELS["mlp"].sample(5))
    windows = [site.window for _, site in whitened_sites(model).values()]
    counts = [(window.moments.count, window.examples) for window in windows]
    prong.refresh_(model, MODELS["mlp"].sample(9))
    for (_, site), window, count in zip(whitened_sites(model).values(), windows, counts, strict=True):
        assert site.window is window and (window.moments.count, window.examples) == count


# Refresh: all or nothing ----------------------------------------------------------------------------------------------


def poisoned(n: int) -> Tensor:
    x = MODELS["mlp"].sample(n)
    x[1, 2] = float("nan")
    return x


BAD_BATCHES = {
    "nan": (lambda: [MODELS["mlp"].sample(5), poisoned(5)], FloatingPointError, "'0'.*NaN or infinite"),
    "infinite": (lambda: MODELS["mlp"].sample(5) / 0, FloatingPointError, "'0'.*NaN or infinite"),
    "overflow": (lambda: MODELS["mlp"].sample(5) * 1e200, FloatingPointError, "'0'"),
    "shape": (lambda: [MODELS["mlp"].sample(5), torch.randn(5, 3).double()], ValueError, "does not take batch 1"),
    "one": (lambda: MODELS["mlp"].sample(1), ValueError, "'0'.*at least 2 samples, got 1"),
    "none": (lambda: [], ValueError, "no batches"),
    "empty": (lambda: MODELS["mlp"].sample(5)[:0], ValueError, "no"),
    "number": (lambda: 3, TypeError, "iterable of batches"),
    "mapping": (lambda: {"input": MODELS["mlp"].sample(5)}, TypeError, "iterable of batches"),
    "text": (lambda: "batches", TypeError, "iterable of batches"),
    "numbers": (lambda: [1, 2], TypeError, "a batch is a tensor"),
    "missing": (lambda: [None], TypeError, "a batch is a tensor"),
}


@every_form
@pytest.mark.parametrize(("batches", "error", "message"), BAD_BATCHES.values(), ids=BAD_BATCHES)
@pytest.mark.parametrize("refreshed", [False, True], ids=["first", "later"])
def test_a_refresh_that_fails_changes_nothing(form, batches, error, message, refreshed):
    model = MODELS["mlp"].build()
    _optimizer = attached(model, form)
    if refreshed:
        prong.refresh_(model, MODELS["mlp"].sample(9))
    before, random = state_of(model), None
    bad = batches()
    random = torch.get_rng_state()
    with pytest.raises(error, match=message):
        prong.refresh_(model, bad)
    assert_identical(state_of(model), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(site.window is None and not site.aside for _, site in whitened_sites(model).values())
    prong.refresh_(model, MODELS["mlp"].sample(9))


@forms
def test_a_model_that_fails_in_its_own_way_is_left_as_it_was(form):
    model = prong.whiten_(MODELS["net"].build(), form)
    before = state_of(model)

    def failing():
        yield MODELS["net"].sample(5)
        raise KeyError("the data ran out")

    with pytest.raises(KeyError, match="ran out"):
        prong.refresh_(model, failing())
    assert_identical(state_of(model), before)
    assert model.training


@pytest.mark.parametrize("damping", [0, 0.0, -1e-3, float("nan"), float("inf")])
def test_damping_is_positive_and_finite(damping):
    model = prong.whiten_(MODELS["mlp"].build())
    with pytest.raises(ValueError, match=r"damping must be (positive and )?finite"):
        prong.refresh_(model, MODELS["mlp"].sample(9), damping)
    with pytest.raises(ValueError, match=r"eps must be (positive and )?finite"):
        prong.Absolute(damping)
    assert model[0].sites[0].whitening is None


@pytest.mark.parametrize("damping", ["0.1", None, True])
def test_damping_is_a_number(damping):
    with pytest.raises(TypeError, match="damping is a number"):
        prong.refresh_(prong.whiten_(MODELS["mlp"].build()), MODELS["mlp"].sample(9), damping)
    with pytest.raises(TypeError, match="eps is a number"):
        prong.Absolute(damping)


@every_form
def test_a_refresh_during_a_backward_pass_is_refused(form):
    model = MODELS["mlp"].build()
    _optimizer = attached(model, form)
    x = MODELS["mlp"].sample(9)
    before = state_of(model)
    z = model(x)
    z.register_hook(lambda g: prong.refresh_(model, x) and None)
    with pytest.raises(RuntimeError, match="during a backward pass"):
        z.sum().backward()
    assert_identical(state_of(model), before)
    prong.refresh_(model, x)


def test_a_model_without_whitened_layers_is_not_refreshed():
    with pytest.raises(ValueError, match=r"no whitened layers; call prong.whiten_\(model\) first"):
        prong.refresh_(MODELS["mlp"].build(), MODELS["mlp"].sample(9))


def test_a_model_none_of_whose_whitened_layers_ran_is_not_refreshed():
    with pytest.raises(ValueError, match="no whitened layer saw any input"):
        prong.refresh_(prong.whiten_(Pair()), torch.randn(4, 3), forward=lambda m, b: b)


# Refresh: what is no error --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "basis"),
    [
        ("implicit", "pca"),
        ("auto", "pca"),
        *((form, basis) for form in ("explicit", "materialised") for basis in ("pca", "zca", "cholesky")),
    ],
)
@pytest.mark.parametrize("damping", [0.1, prong.Absolute(1e-2)], ids=["relative", "absolute"])
@pytest.mark.parametrize(
    "make",
    [
        lambda spec: torch.zeros_like(spec.sample(6)),
        lambda spec: torch.ones_like(spec.sample(6)) * 3,
        lambda spec: spec.sample(2),
        lambda spec: spec.sample(1).expand(6, *spec.sample(1).shape[1:]),
        lambda spec: spec.sample(6) * 1e6,
        lambda spec: spec.sample(6) * 1e-9,
    ],
    ids=["zeros", "constant", "few", "all_the_same", "huge", "tiny"],
)
@pytest.mark.parametrize("spec", [SPECS[k] for k in ("linear", "linear_no_bias", "conv2d", "transposed2d")], ids=str)
def test_degenerate_inputs_are_no_trouble(form, basis, make, spec, damping):
    layer = spec.build()
    optimizer = attached(layer, form, basis)
    x, data = spec.sample(3), make(spec)
    z = layer(x)
    prong.refresh_(layer, data, damping)
    whitening = site_of(layer).whitening
    if data.any() or damping != 0.1:
        assert whitening.is_finite()
    else:
        assert whitening is None, "of zeros there is no size"
    assert_close(layer(x), z, rtol=1e-8, atol=1e-8)
    step = step_of(layer, optimizer, curved(layer(x)))
    assert all(change.isfinite().all() and change.any() for change in step.values())
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@every_form
def test_layers_of_width_one_are_whitened(form):
    model = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 3)).double()
    plain = copy.deepcopy(model)
    _optimizer = attached(model, form)
    x = torch.randn(9, 1).double() * 3 + 1
    prong.refresh_(model, x, 1e-6)
    assert_close(model(x), plain(x))
    assert_close(inverse_of(site_of(model).whitening).squeeze(), 1 / (x.var(correction=0) + 1e-6 * x.square().mean()))


@every_form
def test_dead_units_and_repeated_ones_are_no_trouble(form):
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        model[0].bias[0] = -1e6  # dead
        model[0].weight[2], model[0].bias[2] = model[0].weight[1], model[0].bias[1]  # twins
    x = torch.randn(50, 4).double()
    z = model(x)
    optimizer = attached(model, form)
    prong.refresh_(model, x, 1e-4)
    assert_close(model(x), z)
    assert all(step.isfinite().all() for step in step_of(model, optimizer, curved(model(x))).values())


@every_form
def test_folding_while_a_window_is_open_is_fine(form):
    model = MODELS["mlp"].build()
    _optimizer = prong.PRONG(model, lr=0.1, form=form)
    x = MODELS["mlp"].sample(5)
    z = model(x)
    assert_close(prong.fold_(model)(x), z)
    prong.PRONG(model, lr=0.1, form=form)  # and one can start afresh


@every_form
def test_a_diverged_model_is_folded_and_can_be_trained_anew(form):
    model = MODELS["mlp"].build()
    optimizer = prong.PRONG(model, lr=0.1, form=form)
    model(MODELS["mlp"].sample(8)).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        next(model.parameters())[0, 0] = float("nan")
    prong.fold_(model)
    assert all(type(m).__module__.startswith("torch.") for m in model.modules())
    prong.PRONG(model, lr=0.1, form=form)


def test_plain_copy_is_plain():
    """The yardstick itself."""
    model = prong.whiten_(MODELS["cnn"].build(), "explicit")
    assert names(plain_copy(model)) == [] and len(names(model)) == 3
