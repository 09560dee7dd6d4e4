"""Saving and resuming at any update continues bit for bit as if never stopped."""

from __future__ import annotations

import io

import pytest
import torch

import prong
from tests.training import batches, canonical, convnet, mlp, run, tensors

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


def make(model_of, options):
    model = model_of()
    torch.manual_seed(0)
    return model, prong.PRONG(model, 0.02, eps=0.1, period=8, samples=40, **options)


@pytest.mark.parametrize("stop", [0, 1, 3, 5, 8, 13])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("model_of", "size"), [(mlp, 16), (mlp, 2), (convnet, 8)], ids=["mlp", "thin", "convnet"])
def test_resuming_equals_never_having_stopped(model_of, size, options, stop):
    """Windows are open after some of these updates and closed after others; thin ones hold fewer rows than inputs."""
    data = batches(model_of(), 20, size)
    model, optimizer = make(model_of, options)
    run(model, optimizer, data)

    first, first_optimizer = make(model_of, options)
    run(first, first_optimizer, data[:stop])
    prong.summary(first)  # looking changes nothing
    saved_model, saved_optimizer = through_a_file(first.state_dict()), through_a_file(first_optimizer.state_dict())
    second, second_optimizer = make(lambda: model_of(seed=99), options)
    torch.manual_seed(7)
    second.load_state_dict(saved_model)
    second_optimizer.load_state_dict(saved_optimizer)
    run(second, second_optimizer, data[stop:])
    torch.testing.assert_close(canonical(second), canonical(model), **EXACT)


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
    assert (other_optimizer.refresher.eps, other_optimizer.refresher.period) == (0.1, 8)
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
