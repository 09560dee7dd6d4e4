"""Saving and resuming at any update continues bit for bit as if never stopped."""

from __future__ import annotations

import io

import pytest
import torch
from tests.training import batches, canonical, convnet, mlp, run

import prong

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
def test_resuming_equals_never_having_stopped(options, stop):
    """Windows are open after some of these updates and closed after others."""
    data = batches(mlp(), 20)
    model, optimizer = make(mlp, options)
    run(model, optimizer, data)

    first, first_optimizer = make(mlp, options)
    run(first, first_optimizer, data[:stop])
    saved_model, saved_optimizer = through_a_file(first.state_dict()), through_a_file(first_optimizer.state_dict())
    second, second_optimizer = make(lambda: mlp(seed=99), options)
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


def test_a_state_is_a_copy_that_later_updates_do_not_change():
    data = batches(mlp(), 6)
    model, optimizer = make(mlp, {"form": "explicit"})
    run(model, optimizer, data[:3])
    state = optimizer.state_dict()
    before = through_a_file(state["prong"])
    run(model, optimizer, data[3:])
    torch.testing.assert_close(state["prong"]["layers"], before["layers"], **EXACT)


@pytest.mark.parametrize("form", ["implicit", "explicit"])
def test_a_state_of_another_model_is_refused_and_changes_nothing(form):
    data = batches(mlp(), 3)
    model, optimizer = make(mlp, {"form": form})
    run(model, optimizer, data)
    before, state = canonical(model), through_a_file(optimizer.state_dict())
    wide = torch.nn.Sequential(
        torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 7), torch.nn.Tanh(), torch.nn.Linear(7, 4)
    ).double()
    others = {
        "other parameters": prong.PRONG(convnet(), 0.1, form=form).state_dict(),
        "another model": _trained(wide, form),
        "not a state of PRONG": torch.optim.SGD(mlp().parameters(), 0.1).state_dict(),
        "layers": _trained(mlp(), "explicit" if form == "implicit" else "implicit"),
    }
    for message, other in others.items():
        with pytest.raises(ValueError, match=r"parameters|model|PRONG|layers"):
            optimizer.load_state_dict(other)
        torch.testing.assert_close(canonical(model), before, **EXACT)
        now = optimizer.state_dict()
        torch.testing.assert_close(now["state"], state["state"], **EXACT, msg=message)
        torch.testing.assert_close(now["prong"], state["prong"], **EXACT, msg=message)


def _trained(model, form):
    optimizer = prong.PRONG(model, 0.02, eps=0.1, period=8, samples=40, form=form)
    run(model, optimizer, batches(model, 3))
    return optimizer.state_dict()
