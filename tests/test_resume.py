"""Saving and resuming at any update continues bit for bit as if never stopped."""

from __future__ import annotations

import io
from functools import partial

import pytest
import torch

import prong
from tests.training import attentive, batches, canonical, convnet, mlp, run, tensors

EXACT = {"rtol": 0.0, "atol": 0.0}
OPTIONS = {
    "implicit": {},
    "explicit": {"form": "explicit"},
    "ema": {"source": "ema"},
    "plus": {"plus": True},
    "balance": {"balance": True},
    "empirical": {"gradient_whitening": "empirical"},
    "categorical": {"gradient_whitening": "categorical"},
    "nesterov, reset": {"nesterov": True, "on_refresh": "reset"},
}


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def with_prong(options, model):
    torch.manual_seed(0)
    return model, prong.PRONG(model, 0.02, **{"eps": 0.1, "period": 8, "samples": 40, **options})


def with_adam(options, model):
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(prong.whiten_(model, "explicit").parameters(), 0.01, amsgrad=True)
    return model, optimizer, prong.Refresher(model, optimizer, eps=0.1, **options)


def make(model_of, options):
    return with_prong(options, model_of())


def resume(model_of, begin, data, stop, order=list):
    """Train with and without a stop, end alike, and return what was saved.

    `begin(model)` gives the model, its optimizer and whatever else has a state; they are loaded in this order, or
    another.
    """
    model, optimizer, *_ = begin(model_of())
    run(model, optimizer, data)

    first = begin(model_of())
    run(*first[:2], data[:stop])
    prong.summary(first[0])  # looking changes nothing
    saved = [through_a_file(part.state_dict()) for part in first]
    second = begin(model_of(seed=99))
    torch.manual_seed(7)
    for part, state in order(list(zip(second, saved, strict=True))):
        part.load_state_dict(state)
    run(*second[:2], data[stop:])
    torch.testing.assert_close(canonical(second[0]), canonical(model), **EXACT)
    return saved


@pytest.mark.parametrize("stop", [0, 1, 3, 5, 8, 13])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("model_of", "size"), [(mlp, 16), (mlp, 2), (convnet, 8)], ids=["mlp", "thin", "convnet"])
def test_resuming_equals_never_having_stopped(model_of, size, options, stop):
    """Windows are open after some of these updates and closed after others; thin ones hold fewer rows than inputs."""
    resume(model_of, partial(with_prong, options), batches(model_of(), 20, size), stop)


FORMS = ("implicit", "explicit")


@pytest.mark.parametrize("options", [{"form": form} for form in FORMS] + [{"plus": True}], ids=str)
def test_training_in_half_precision_resumes(options):
    half = partial(mlp, dtype=torch.bfloat16)
    resume(half, partial(with_prong, options), batches(half(), 20), stop=5)


ATTENTIONS = {"packed": attentive, "separate": partial(attentive, 4)}
LONG = {"period": 8, "samples": 400}  # five updates of 16 x 5 tokens


@pytest.mark.parametrize("stop", [5, 7, 13])
@pytest.mark.parametrize("options", [{"form": form} for form in FORMS] + [{"plus": True}], ids=str)
@pytest.mark.parametrize("model_of", ATTENTIONS.values(), ids=ATTENTIONS)
def test_attention_resumes_inside_a_window(model_of, options, stop):
    _, saved = resume(model_of, partial(with_prong, options | LONG), batches(model_of(), 20), stop)
    layers = saved["prong"]["layers"]
    assert layers.keys() == {"attention.q", "attention.k", "attention.v", "attention.out_proj", "head"}
    assert all("whitening" in layer and layer["window"]["count"] > 0 for layer in layers.values())


@pytest.mark.parametrize("stop", [0, 1, 3, 5, 8, 13])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model_of", [mlp, convnet, *ATTENTIONS.values()], ids=["mlp", "convnet", *ATTENTIONS])
def test_training_with_a_loader_resumes(model_of, form, stop):
    source = batches(model_of(), 4, seed=5)
    options = {"form": form, "source": source, "samples": 48}
    _, saved = resume(model_of, partial(with_prong, options), batches(model_of(), 20), stop)
    assert all("whitening" in layer and "window" not in layer for layer in saved["prong"]["layers"].values())


@pytest.mark.parametrize("order", [list, reversed])
@pytest.mark.parametrize("stop", [1, 5, 8, 13])
@pytest.mark.parametrize("source", ["window", "loader"])
@pytest.mark.parametrize("model_of", ATTENTIONS.values(), ids=ATTENTIONS)
def test_adam_in_the_whitened_coordinates_of_attention_resumes(model_of, source, stop, order):
    chosen = batches(model_of(), 4, seed=5) if source == "loader" else source
    options = {**LONG, "source": chosen}
    _, _, saved = resume(model_of, partial(with_adam, options), batches(model_of(), 20), stop, order)
    assert all("whitening" in layer for layer in saved["layers"].values())
    if source == "window" and stop in (5, 13):
        assert all(layer["window"]["count"] > 0 for layer in saved["layers"].values())


@pytest.mark.parametrize("form", ["implicit", "explicit"])
def test_the_order_of_loading_does_not_matter(form):
    data = batches(convnet(), 12)
    model, optimizer = make(convnet, {"form": form})
    run(model, optimizer, data[:6])
    saved = through_a_file(model.state_dict()), through_a_file(optimizer.state_dict())
    run(model, optimizer, data[6:])
    other, other_optimizer = make(convnet, {"form": form})
    other_optimizer.load_state_dict(saved[1])
    other.load_state_dict(saved[0])
    run(other, other_optimizer, data[6:])
    torch.testing.assert_close(canonical(other), canonical(model), **EXACT)


def test_settings_of_the_schedule_are_restored_as_learning_rates_are():
    _, optimizer = make(mlp, {})
    other_optimizer = prong.PRONG(mlp(), 0.5, eps=1.0, period=3, samples=10)
    other_optimizer.load_state_dict(optimizer.state_dict())
    assert (other_optimizer.refresher.eps, other_optimizer.refresher.timetable.period) == (0.1, 8)
    assert other_optimizer.param_groups[0]["lr"] == 0.02


def test_a_folded_model_says_that_its_optimizer_cannot_load():
    model, optimizer = make(mlp, {})
    state = optimizer.state_dict()
    prong.fold_(model)
    with pytest.raises(ValueError, match="folded"):
        optimizer.load_state_dict(state)


def test_a_state_is_a_copy_that_later_updates_do_not_change():
    data = batches(mlp(), 6)
    model, optimizer = make(mlp, {"form": "explicit"})
    run(model, optimizer, data[:3])
    state = optimizer.state_dict()
    before = through_a_file(state["prong"])
    run(model, optimizer, data[3:])
    torch.testing.assert_close(tensors(state["prong"]), tensors(before), **EXACT)


@pytest.mark.parametrize("form", ["implicit", "explicit"])
def test_a_state_of_another_model_is_refused_and_changes_nothing(form):
    data = batches(mlp(), 3)
    model, optimizer = make(mlp, {"form": form})
    run(model, optimizer, data)
    before, state = canonical(model), through_a_file(optimizer.state_dict())
    wide = torch.nn.Sequential(
        torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 7), torch.nn.Tanh(), torch.nn.Linear(7, 4)
    ).double()
    deep = torch.nn.Sequential(*mlp()[:4], torch.nn.Linear(7, 5).double())
    others = {
        "another last layer, no momentum to betray it": _trained(deep, form, momentum=0.0),
        "gradient whitening": _trained(mlp(), form, balance=True),
        "other parameters": prong.PRONG(convnet(), 0.1, form=form).state_dict(),
        "another model": _trained(wide, form),
        "not a state of PRONG": torch.optim.SGD(mlp().parameters(), 0.1).state_dict(),
        "layers": _trained(mlp(), "explicit" if form == "implicit" else "implicit"),
    }
    for message, other in others.items():
        with pytest.raises(ValueError, match=r"parameters|model|PRONG|layers|gradient whitening"):
            optimizer.load_state_dict(other)
        torch.testing.assert_close(canonical(model), before, **EXACT)
        now = optimizer.state_dict()
        torch.testing.assert_close(now["state"], state["state"], **EXACT, msg=message)
        torch.testing.assert_close(tensors(now["prong"]), tensors(state["prong"]), **EXACT, msg=message)


def _trained(model, form, **options):
    optimizer = prong.PRONG(model, 0.02, eps=0.1, period=8, samples=40, form=form, **options)
    run(model, optimizer, batches(model, 3))
    return optimizer.state_dict()


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ({"plus": True}, {"form": "explicit"}),
        ({"form": "explicit"}, {"plus": True}),
        ({}, {"source": "ema"}),
        ({"source": [torch.randn(8, 6).double()]}, {}),
    ],
)
def test_a_state_of_another_kind_of_training_is_refused(saved, loaded):
    model, optimizer = with_prong(saved, mlp())
    run(model, optimizer, batches(model, 3))
    _, target = with_prong(loaded, mlp())
    before = tensors(target.state_dict()["prong"])
    with pytest.raises(ValueError, match="of training with"):
        target.load_state_dict(optimizer.state_dict())
    torch.testing.assert_close(tensors(target.state_dict()["prong"]), before, **EXACT)
