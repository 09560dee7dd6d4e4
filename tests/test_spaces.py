"""Activation space and gradient space are two orders of one multiplication: everything derived from them agrees."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

import prong
from prong.layers import conv, linear
from tests.cases import PROPERTY, SPECS, LayerSpec, assert_close, curved, layer_specs

specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
SPACES = {"activation": True, "gradient": False}
pytestmark = [  # torch's own
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning"),
]


@contextmanager
def space(name: str) -> Iterator[None]:
    """Every implicit layer uses this space, whatever it costs."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (conv, linear):
            patch.setattr(module, "activation_space_is_cheaper", lambda layout, positions: SPACES[name])
        yield


def whitened(spec: LayerSpec) -> nn.Module:
    torch.manual_seed(0)
    layer = prong.whiten_(spec.build())
    return prong.refresh_(layer, [spec.sample(20)], forward=lambda m, h: m(h, **spec.call))


def agree(compute, rtol: float = 1e-9) -> None:
    """What `compute` gives is the same in both spaces, and something."""
    results = []
    for name in SPACES:
        with space(name):
            results.append(compute())
    assert_close(*results, rtol=rtol)
    first = results[0] if isinstance(results[0], Tensor) else results[0][0]
    assert first.abs().sum() > 0


@PROPERTY
@given(spec=layer_specs())
def test_gradients_agree(spec):
    layer, h = whitened(spec), spec.sample(3).requires_grad_()
    parameters = [h, *layer.parameters()]
    agree(lambda: torch.autograd.grad(curved(layer(h, **spec.call)), parameters))
    agree(lambda: torch.autograd.grad(curved(layer(h[0], **spec.call)), parameters) if h.dim() > 2 else h.detach() + 1)


@specs
@pytest.mark.parametrize("frozen", ["weight", "bias", "input"])
def test_what_needs_no_gradient_gets_none_and_the_rest_agrees(spec, frozen):
    layer, h = whitened(spec), spec.sample(3)
    if frozen == "bias" and layer.bias is None:
        pytest.skip("no bias")
    if frozen != "input":
        h.requires_grad_()
        getattr(layer, frozen).requires_grad_(False)
    wanted = [x for x in (h, *layer.parameters()) if x.requires_grad]
    agree(lambda: torch.autograd.grad(curved(layer(h, **spec.call)), wanted))


@specs
def test_second_derivatives_agree(spec):
    layer, h = whitened(spec), spec.sample(2).requires_grad_()
    parameters = [h, *layer.parameters()]

    def compute():
        first = torch.autograd.grad(curved(layer(h, **spec.call)), parameters, create_graph=True)
        return torch.autograd.grad(sum(curved(g) for g in first), parameters)

    agree(compute, rtol=1e-7)


@specs
def test_per_example_gradients_and_tangents_agree(spec):
    layer, h = whitened(spec), spec.sample(4)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters: dict[str, Tensor], h: Tensor) -> Tensor:
        return curved(functional_call(layer, parameters, (h.unsqueeze(0),), spec.call))

    agree(lambda: vmap(grad(loss), (None, 0))(parameters, h)["weight"])
    tangents = {name: torch.randn_like(p) for name, p in parameters.items()}
    agree(lambda: jvp(loss, (parameters, h[0]), (tangents, torch.ones_like(h[0])))[1])


@specs
def test_ordinary_gradients_agree_with_the_plain_layer(spec):
    layer, h = whitened(spec), spec.sample(3)
    plain = prong.fold_(copy.deepcopy(layer))
    expected = torch.autograd.grad(curved(plain(h, **spec.call)), list(plain.parameters()))
    for name in SPACES:
        with space(name):
            z = layer(h, **spec.call)
        with prong.ordinary_gradients(layer):  # asked when the backward runs
            assert_close(torch.autograd.grad(curved(z), list(layer.parameters())), expected, name)


@specs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_both_are_near_full_precision(spec, dtype):
    layer, h = whitened(spec).float(), spec.sample(8).float()
    exact = torch.autograd.grad(curved(layer(h, **spec.call)), list(layer.parameters()))
    for name in SPACES:
        with space(name), torch.autocast("cpu", dtype):
            z = layer(h, **spec.call)
            assert z.dtype == dtype
            loss = curved(z.float())
        for found, expected in zip(torch.autograd.grad(loss, list(layer.parameters())), exact, strict=True):
            assert found.dtype == torch.float32
            assert (found - expected).norm() < 0.15 * expected.norm(), name


@specs
def test_memory_format_of_weights_is_kept(spec):
    if not spec.spatial or len(spec.spatial) != 2:
        pytest.skip("channels_last is a format of 2d maps")
    layer, h = whitened(spec), spec.sample(3)
    expected = torch.autograd.grad(curved(layer(h, **spec.call)), layer.weight)[0]
    layer, h = layer.to(memory_format=torch.channels_last), h.to(memory_format=torch.channels_last)
    for name in SPACES:
        with space(name):
            z = layer(h, **spec.call)
            assert z.is_contiguous(memory_format=torch.channels_last), name
            curved(z).backward()
        assert_close(layer.weight.grad, expected, name)
        assert layer.weight.grad.is_contiguous(memory_format=torch.channels_last), name
        layer.weight.grad = None


def test_the_cheaper_space_is_chosen_by_positions(monkeypatch):
    chosen = []
    for module in (conv, linear):
        decide = module.activation_space_is_cheaper
        monkeypatch.setattr(
            module,
            "activation_space_is_cheaper",
            lambda layout, n, decide=decide: chosen.append((n, decide(layout, n))) or chosen[-1][1],
        )
    layer = prong.whiten_(nn.Conv2d(2, 4, 3, padding=1))  # 36 outputs times taps; a padded 1 x 1 map has 9 positions
    prong.refresh_(layer, [torch.randn(5, 2, 4, 4)])
    for h in (torch.randn(1, 2, 4, 4), torch.randn(2, 3, 4), torch.randn(1, 2, 1, 1)):
        layer(h)
    assert chosen == [(36, False), (30, False), (9, True)]
    chosen.clear()
    layer = prong.whiten_(nn.Linear(3, 10))
    prong.refresh_(layer, [torch.randn(5, 3)])
    layer(torch.randn(3, 4, 3))
    layer(torch.randn(2, 5, 3))
    assert chosen == [(12, False), (10, True)]
