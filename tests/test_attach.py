"""Optimizers that exist already, several on one model, and everything that is to see a plain model."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from pytorch_optimizer import SOAP
from torch import Tensor, nn

import prong
from prong.attachment import attachment_of
from prong.core.whitening import Transition, transport_gradient
from prong.model.whiten import whitened_layers
from tests.cases import assert_close, assert_identical
from tests.training import attentive, batches, canonical, convnet, mlp, run

OFTEN = prong.Every(5, samples=40)
PAPER = prong.Every(5, samples=40, growth=None)
TORCHS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    "SGD, dampening": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "Adam, amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "AdamW, fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "AdamW, foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "RAdam": partial(torch.optim.RAdam, lr=0.05),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "RMSprop": partial(torch.optim.RMSprop, lr=0.005, momentum=0.5, centered=True),
    "Adamax": partial(torch.optim.Adamax, lr=0.01),
    "Adadelta": partial(torch.optim.Adadelta, lr=5.0),
    "ASGD": partial(torch.optim.ASGD, lr=0.1),
    "Rprop": partial(torch.optim.Rprop, lr=0.001),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.05),
    "SOAP": partial(SOAP, lr=0.01, precondition_frequency=3),
}


def saved(*parts: Any) -> list[Any]:
    """What they have saved, through a file."""
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts], file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize(
    ("kind", "refresh"),
    [*((kind, OFTEN) for kind in TORCHS), ("SGD", PAPER), ("Adam, amsgrad", PAPER), ("SOAP", PAPER)],
)
def test_any_optimizer_trains_and_resumes_bit_for_bit(kind, refresh):
    def made(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp(dtype=torch.float32, seed=seed)  # NAdam rounds its own numbers to the dtype when it is loaded
        return model, prong.attach(model, TORCHS[kind](model.parameters()), refresh=refresh)

    data = batches(mlp(dtype=torch.float32), 3) * 5
    model, optimizer = made()
    losses = run(model, optimizer, data)
    assert losses[-1] < losses[2], "of the same batch"

    first, second = made(), made(seed=1)
    run(*first, data[:8])
    for part, state in zip(second, saved(*first), strict=True):
        part.load_state_dict(state)
    assert_identical(torch.stack(run(*second, data[8:])), torch.stack(losses[8:]))
    assert_identical(canonical(second[0]), canonical(model))


def test_torchs_muon_trains_the_matrices_it_is_given():
    model = mlp(bias=False)
    hidden = [model[0].weight, model[2].weight]
    optimizer = prong.attach(model, torch.optim.Muon(hidden, lr=0.02), refresh=OFTEN)
    head = model[4].weight.clone()
    losses = run(model, optimizer, batches(mlp(), 3) * 5)
    assert losses[-1] < losses[2]
    assert_identical(model[4].weight, head)


class Nobodys(torch.optim.Optimizer):
    """Of whose state nothing is known but what names tell."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            for name in ("exp_avg", "strange"):
                state[name] = torch.lerp(state.get(name, torch.zeros_like(p)), p.grad, 0.1)
            p.sub_(state["exp_avg"], alpha=0.01)


def test_of_an_unknown_state_averages_of_gradients_move_and_all_else_is_kept():
    model, data = mlp(), batches(mlp(), 8)
    optimizer = prong.attach(model, Nobodys(model.parameters()), refresh=prong.Never(), trust=None)
    run(model, optimizer, data[:2])
    prong.refresh_(model, data[0][0])
    assert all(not optimizer.state[p] for p in model.parameters()), "the first refresh changes coordinates altogether"
    run(model, optimizer, data[2:4])
    sites = {name: layer.sites[0] for name, layer in whitened_layers(model)}
    before = {
        name: (site.whitening, copy.deepcopy(optimizer.state[model[int(name)].weight])) for name, site in sites.items()
    }
    prong.refresh_(model, torch.cat([x for x, _ in data[:4]]))
    for name, (old, state) in before.items():
        layer = model[int(name)]
        transition = Transition.between(old, sites[name].whitening)
        moved, _ = transport_gradient(
            state["exp_avg"][None, :, None], optimizer.state[layer.bias]["exp_avg"][None], transition
        )
        assert_close(optimizer.state[layer.weight]["exp_avg"], moved[0, :, 0])
        assert_identical(optimizer.state[layer.weight]["strange"], state["strange"])
        U = sites[name].whitening.U[0]
        assert_close(U, U.mT, "coordinates that change little")


# Several optimizers on one model ----------------------------------------------------------------------------------


def test_a_second_optimizer_asks_whether_it_is_to_replace_the_first():
    model, data = attentive(), batches(attentive(), 6)
    first = prong.AdamW(model, 0.01, refresh=OFTEN)
    run(model, first, data[:3])
    with pytest.raises(ValueError, match="replace=True"):
        prong.AdamW(model, 0.01)
    before = model(data[0][0])
    second = prong.AdamW(model, 0.01, refresh=OFTEN, replace=True)
    assert_close(model(data[0][0]), before)
    run(model, second, data[3:])
    assert "prong" in second.state_dict() and "prong" not in first.state_dict()
    assert attachment_of(first).refresher.released
    run(model, first, data[:1])  # it is torch's own from now on, and does no harm
    run(model, second, data[:1])


@pytest.mark.parametrize("form", ["auto", "implicit", "explicit"])
def test_an_optimizer_that_nobody_holds_is_replaced(form):
    """A cell that was run twice; schedulers and their optimizers hold each other."""
    model, data = mlp(), batches(mlp(), 4)
    for _ in range(3):
        optimizer = prong.PRONG(model, 0.01, form=form, refresh=OFTEN)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=10)
        run(model, optimizer, data)
        scheduler.step()
        before = model(data[0][0])
        del optimizer, scheduler
    optimizer = prong.AdamW(model, 0.01)
    assert_close(model(data[0][0]), before)
    run(model, optimizer, data)


def test_an_optimizer_holds_its_model_no_longer_than_it_is_held():
    gc.collect()
    gc.disable()
    try:
        model = mlp()
        optimizer = prong.AdamW(model, 0.01, refresh=OFTEN)
        run(model, optimizer, batches(model, 3))
        layer = next(iter(dict(whitened_layers(model)).values()))
        assert layer.owner is not None and not layer.owner.abandoned
        del optimizer
        gc.collect()
        assert layer.owner.abandoned
        prong.fold_(model)
    finally:
        gc.enable()


# What others see ------------------------------------------------------------------------------------------------------

MODELS = {"mlp": mlp, "convnet": convnet, "attention": attentive}


def traces(model: nn.Module) -> list[str]:
    """What has been left of whitening in a model."""
    found = [type(m).__name__ for m in model.modules() if type(m).__module__.startswith("prong")]
    hooks = [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    return found + [type(hook).__name__ for hook in hooks]


@pytest.mark.parametrize(
    ("model_of", "make"),
    [(mlp, prong.PRONG), (attentive, prong.PRONG), (attentive, prong.AdamW), (convnet, prong.Muon)],
)
def test_a_copy_is_a_model_of_its_own(model_of, make):
    model, data = model_of(), batches(model_of(), 10)
    reference = model_of()
    optimizers = [make(m, 0.01, refresh=OFTEN) for m in (model, reference)]
    for m, optimizer in zip((model, reference), optimizers, strict=True):
        run(m, optimizer, data[:4])
    twin = copy.deepcopy(model)
    assert_identical(canonical(twin), canonical(reference))
    run(twin, torch.optim.SGD(twin.parameters(), 0.1), data[:2])  # as a plain one
    run(twin, make(twin, 0.01), data[:2])  # and on its own again
    run(model, optimizers[0], data[4:])
    run(reference, optimizers[1], data[4:])
    assert_identical(canonical(model), canonical(reference), "the copy's life is its own")


@pytest.mark.parametrize(
    ("model_of", "form"),
    [*((model_of, "auto") for model_of in MODELS.values()), (attentive, "explicit"), (mlp, "implicit")],
)
def test_a_folded_copy_is_a_plain_model_for_files_and_for_export(model_of, form):
    model, data = model_of(), batches(model_of(), 4)
    optimizer = prong.PRONG(model, 0.01, form=form, refresh=prong.Every(4, samples=200))
    for x, y in data:
        run(model, optimizer, [(x, y)])
        folded = prong.fold_(copy.deepcopy(model))
        assert not traces(folded)
    file = io.BytesIO()
    torch.save(folded, file)
    assert b"prong" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert_close(loaded(x), model(x))
    exported = torch.export.export(folded.eval(), (x,))
    assert_close(exported.module()(x), folded(x))
    run(model, optimizer, data)


@pytest.mark.parametrize("model_of", MODELS.values(), ids=MODELS)
def test_averages_of_weights_and_states_are_those_of_a_plain_model(model_of):
    model, data = model_of(), batches(model_of(), 8)
    names = list(model.state_dict())
    optimizer = prong.AdamW(model, 0.01, refresh=OFTEN)
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.7))
    expected: dict[str, Tensor] = {}
    for x, y in data:
        run(model, optimizer, [(x, y)])
        averaged.update_parameters(model)
        now = canonical(model)
        assert list(now) == names and all(p.requires_grad for p in model.parameters())
        expected = now if not expected else {k: 0.7 * v + 0.3 * now[k] for k, v in expected.items()}
    assert_close(dict(averaged.module.state_dict()), expected)
    plain = model_of(seed=5)
    plain.load_state_dict(model.state_dict())
    assert_close(plain(x), model(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, where a graph is broken
@pytest.mark.parametrize(
    ("saver", "loader"), [("eager", "before"), ("before", "eager"), ("after", "before"), ("eager", "after")]
)
def test_states_of_compiled_and_eager_models_load_both_ways(saver, loader):
    """Compiled before the optimizer was made, after it, or not."""

    def made(how: str, seed: int = 0) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
        model = mlp(seed=seed)
        given = torch.compile(model, backend="eager") if how == "before" else model
        optimizer = prong.AdamW(given, 0.01, refresh=OFTEN)
        return model, torch.compile(model, backend="eager") if how == "after" else given, optimizer

    data = batches(mlp(), 9)
    plain, called, optimizer = made("eager")
    run(called, optimizer, data)
    one = made(saver)
    run(*one[1:], data[:6])
    two = made(loader, seed=1)
    for part, state in zip(two[::2], saved(*one[::2]), strict=True):
        part.load_state_dict(state)
    run(*two[1:], data[6:])
    assert_close(canonical(two[0]), canonical(plain))
