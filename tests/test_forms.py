"""Whatever the form, the optimizer walks the same path; rescaled inputs change none of its steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prong
from prong.core.muon import msgn
from prong.model.whiten import whitened_sites
from prong.refresh import factorise
from tests.cases import ATTENTION, SPECS, AttentionCase, LayerSpec, assert_close, curved

# Adam's eps: gradients that are zero but for rounding, as of the bias of attention's keys, are to stay small.
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "nesterov": (prong.PRONG, {"lr": 0.01, "momentum": 0.8, "weight_decay": 0.05, "nesterov": True}),
    "adamw": (prong.AdamW, {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-3}),
    "muon": (prong.Muon, {"lr": 0.05, "weight_decay": 0.1, "others": {"eps": 1e-3}}),
}
OFTEN = prong.Every(3, samples=64)  # before updates 1, 2, 3, 4, 7
WHOLE = prong.Auto(time=1e6, memory=1e6)  # no blocks, which would be another whitening
PATHS = {"nesterov": ("explicit", "materialised", "implicit", WHOLE), "other": ("explicit", "materialised", WHOLE)}


class Pooled(nn.Module):
    """The mean over positions, where there are any."""

    def forward(self, z: Tensor) -> Tensor:
        return z if z.dim() == 2 else z.flatten(2).mean(2)


class Attending(nn.Module):
    """One call of attention, with masks and options as its case has them, and a head."""

    def __init__(self, case: AttentionCase) -> None:
        super().__init__()
        self.attention, self.options = case.build(), case.options
        self.head = nn.Linear(4, 3).double()

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.head(self.attention(*(inputs * 3 if len(inputs) == 1 else inputs), **self.options)[0])


def layered(spec: LayerSpec) -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    """A layer of a kind and a head; and a source of inputs."""
    layer = spec.build()
    channels = layer(spec.sample(2)).shape[1]
    return nn.Sequential(layer, nn.Tanh(), Pooled(), nn.Linear(channels, 3).double()), lambda: (spec.sample(60),)


def attending(case: AttentionCase) -> tuple[nn.Module, Callable[[], tuple[Tensor, ...]]]:
    def sample() -> tuple[Tensor, ...]:
        query, key, value = case.sample()
        return (query,) if query is key else (query, key, value)

    return Attending(case), sample


CASES = {name: (layered, spec) for name, spec in SPECS.items()}
CASES |= {"many_units": (layered, LayerSpec(nn.Linear, {"in_features": 4, "out_features": 50}))}
CASES |= {name: (attending, ATTENTION[name]) for name in ("self", "other_sizes", "no_bias")}
BOUNDED = ("linear", "conv2d", "transposed2d", "many_units", "self", "other_sizes")


def path(
    name: str, model: nn.Module, inputs: list[tuple[Tensor, ...]], form: Any, **options: Any
) -> list[dict[str, Tensor]]:
    """The plain parameters after each update."""
    make, own = OPTIMIZERS[name]
    optimizer = make(model, form=form, **{"refresh": OFTEN, **own, **options})
    states = []
    for given in inputs:
        optimizer.zero_grad()
        curved(model(*given)).mul(0.1).backward()
        optimizer.step()
        states.append({key: value.clone() for key, value in model.state_dict().items()})
    return states


def assert_one_path(name: str, model: nn.Module, inputs: list[tuple[Tensor, ...]], **options: Any) -> None:
    explicit, *others = PATHS.get(name, PATHS["other"])
    expected = path(name, copy.deepcopy(model), inputs, explicit, **options)
    for form in others:
        found = path(name, copy.deepcopy(model), inputs, form, **options)
        for update, (here, there) in enumerate(zip(found, expected, strict=True)):
            assert_close(here, there, f"{form}, update {update + 1}")


@pytest.mark.parametrize(("case", "trust"), [*((c, None) for c in CASES), *((c, 0.01) for c in BOUNDED)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_forms_walk_one_path(name, case, trust):
    build, what = CASES[case]
    model, sample = build(what)
    assert_one_path(name, model, [sample() for _ in range(5)], trust=trust)


REFRESHES = {
    "as in the paper": prong.Every(3, samples=64, growth=None),
    "later": prong.Every(4, samples=64, lag=2),
    "reset": prong.Every(3, samples=64, state="reset"),
    "ema": prong.Every(3, samples=64, source="ema"),
    "never": prong.Never(),
}


@pytest.mark.parametrize("refresh", REFRESHES)
@pytest.mark.parametrize("name", ["nesterov", "adamw"])
def test_all_forms_walk_one_path_whenever_they_refresh(name, refresh):
    model, sample = layered(SPECS["linear"])
    assert_one_path(name, model, [sample() for _ in range(8)], refresh=REFRESHES[refresh])


class Rescaled(nn.Module):
    """Layers whose inputs come in other units; with weights to match, the function is the same."""

    def __init__(self, model: nn.Sequential, at: int, factor: float) -> None:
        super().__init__()
        self.layers, self.at, self.factor = copy.deepcopy(model), at, factor
        with torch.no_grad():
            self.layers[at].weight.div_(factor)

    def forward(self, h: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            h = layer(h * self.factor if i == self.at else h)
        return h


def outputs(name: str, model: nn.Module, inputs: list[tuple[Tensor, ...]], form: Any, **options: Any) -> Tensor:
    """The function after each update, as what it makes of the first inputs."""
    make, own = OPTIMIZERS[name]
    optimizer = make(model, form=form, refresh=OFTEN, **{**own, **options})
    found = []
    for given in inputs:
        optimizer.zero_grad()
        curved(model(*given)).mul(0.1).backward()
        optimizer.step()
        with torch.no_grad():
            found.append(model(*inputs[0]))
    return torch.stack(found)


@pytest.mark.parametrize("kind", ["linear_no_bias", "conv2d"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_units_of_a_layers_inputs_change_no_step_of_the_function(name, kind):
    model, sample = layered(SPECS[kind])
    inputs = [sample() for _ in range(5)]
    for form in PATHS.get(name, PATHS["other"]):
        expected = outputs(name, copy.deepcopy(model), inputs, form)
        for at, factor in ((0, 1e-3), (0, 1e3), (3, 1e3)):
            found = outputs(name, Rescaled(model, at, factor), inputs, form)
            assert_close(found, expected, f"{form}, inputs of layer {at} times {factor}")


@pytest.mark.parametrize("bias", [True, False])
def test_muon_of_natural_gradients_is_newton_muon_written_out(bias):
    model = nn.Sequential(nn.Linear(4, 6, bias=bias), nn.Tanh(), nn.Linear(6, 3, bias=bias)).double()
    seen = torch.randn(50, 4).double() @ torch.randn(4, 4).double() + 1
    optimizer = prong.Muon(model, 0.1, momentum=0.0, space="natural", trust=None, refresh=prong.Never())
    prong.refresh_(model, [seen], damping=0.2)
    c = seen.mean(0) if bias else torch.zeros(4).double()
    Sigma = (seen - c).mT @ (seen - c) / len(seen)
    damped = Sigma + 0.2 * seen.square().mean() * torch.eye(4).double()
    for _ in range(3):
        optimizer.zero_grad()
        curved(model(seen[:8])).backward()
        W, G = model[0].weight.detach().clone(), model[0].weight.grad.clone()
        if bias:
            G -= torch.outer(model[0].bias.grad, c)
        optimizer.step()
        assert_close(model[0].weight, W - 0.1 * (6 / 4) ** 0.5 * msgn(G @ torch.linalg.inv(damped)))


class Projections(nn.Module):
    """Queries, keys and values as three layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.head = (nn.Linear(4, n) for n in (4, 4, 4, 3))

    def forward(self, h: Tensor, *others: Tensor) -> Tensor:
        key, value = others or (h, h)  # None: that layer has nothing to do this time
        scores = self.q(h) if key is None else self.q(h) * self.k(key)
        return self.head(scores.sum(-1, keepdim=True) * (h if value is None else self.v(value)))


@pytest.mark.parametrize("make", [prong.PRONG, prong.AdamW])
def test_layers_fed_by_one_tensor_share_one_whitening(make, monkeypatch):
    factorised = []
    plain = factorise.whiten

    def counted(moments: Any, *args: Any) -> Any:
        factorised.append(moments)
        return plain(moments, *args)

    monkeypatch.setattr(factorise, "whiten", counted)
    model = Projections().double()
    optimizer = make(model, refresh=prong.Every(2, samples=32, growth=None))
    for refreshes in (1, 2):
        for _ in range(2):
            optimizer.zero_grad()
            curved(model(torch.randn(16, 5, 4).double())).backward()
            optimizer.step()
        assert len(factorised) == 2 * refreshes, "for the three, and for the head"
        q, k, v, head = (site.whitening for _, site in whitened_sites(model).values())
        for (key, one), (_, two), (_, three) in zip(q.items(), k.items(), v.items(), strict=True):
            assert one is two is three or not isinstance(one, Tensor), f"{key} is held once"
        assert head.eps != q.eps


@pytest.mark.parametrize("calls", ["sssss", "sdsds", "ddsss", "sbsbs", "dsdds", "s-ss-", "+s+ss"], ids=str)
def test_layers_that_share_inputs_at_times_walk_the_path_of_those_that_never_do(calls):
    def inputs(call: str) -> tuple[Tensor, ...]:
        h = torch.randn(16, 4).double() @ torch.randn(4, 4).double()
        return {"s": (h,), "d": (h, h.sin(), h + 1), "b": (h, h + 1, h), "-": (h, None, h), "+": (h, h, None)}[call]

    assert_one_path("nesterov", Projections().double(), [inputs(call) for call in calls], trust=0.01)
