"""Whitened initialisation: draw V, not W."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from prong.estimation import Forward, as_batches, call_model, gathering, run_batches, undisturbed
from prong.injection import check_model, fold_, whiten_, whitened_sites
from prong.layers import Explicit, Site, WhitenedLayer
from prong.projection import to_canonical
from prong.refresh import check_between_updates, rewhiten_
from prong.statistics import Moments
from prong.whitening import Basis, check_basis, check_eps, whiten

Scheme = Callable[[Tensor], Any]


def fan_in_(weight: Tensor) -> Tensor:
    """Normal with variance 1 / fan-in, in place: unit variance out for white unit-variance inputs."""
    return nn.init.normal_(weight, std=1 / math.sqrt(max(1, weight[0].numel())))


class _Reached(Exception):
    """The layer in question has its input; the rest of the forward is not needed."""


def initialize_(
    model: nn.Module,
    batches: Iterable[Any],
    eps: float = 1e-2,
    *,
    scheme: Scheme = fan_in_,
    basis: Basis = "pca",
    forward: Forward | None = None,
) -> nn.Module:
    """Draw new weights for every layer in whitened coordinates, in place, and whiten what is whitened.

    Layer by layer in order of execution: the inputs' c and U are estimated with the layers before it already
    initialised, V is drawn by `scheme`, d is zero, and W = V U, b = -W c. A plain model stays plain, for any optimizer;
    a whitened one also gets its first whitening. Not function-preserving: it is an initialiser.

    Args:
        model: any module; layers that could not be whitened keep their weights.
        batches: an iterable of batches, gone through once per layer, or one tensor.
        eps: damping.
        scheme: an in-place initialiser of a weight such as `torch.nn.init.kaiming_normal_`.
        basis: the basis in which V is drawn ("pca", "zca", "cholesky").
        forward: how to run the model on a batch.

    Raises:
        ValueError: nothing to whiten, bad eps, batches the model cannot take, fewer than two samples.
        FloatingPointError: NaN or infinite activations. In every case the parameters are as they were.
    """
    check_model(model)
    check_eps(eps)
    check_basis(basis)
    check_between_updates()
    batches = as_batches(batches)
    batches = list(batches) if iter(batches) is batches else batches  # a generator would be spent after one pass
    plain = not whitened_sites(model)
    if plain:
        whiten_(model)
    before = [(p, p.detach().clone()) for p in model.parameters()]
    whitenings = [(site, site.whitening) for _, site in whitened_sites(model).values()]
    try:
        _initialize_in_order(model, batches, eps, scheme, basis, forward)
        if not plain:
            _refresh(model, batches, eps, forward)
    except BaseException:
        with torch.no_grad():
            for parameter, value in before:
                parameter.copy_(value)
        for site, whitening in whitenings:
            site.whitening = whitening
        raise
    finally:
        if plain:
            fold_(model)
    return model


def _initialize_in_order(
    model: nn.Module,
    batches: Iterable[Any],
    eps: float,
    scheme: Scheme,
    basis: Basis,
    forward: Forward | None,
) -> None:
    done: set[str] = set()
    while (found := _next_inputs(model, batches, done, forward)) is not None:
        names, moments = found
        for name in names:
            layer, site = whitened_sites(model)[name]
            try:
                whitening = whiten(moments[name], eps, basis, layer.centred(site))
            except (ValueError, FloatingPointError) as error:
                raise type(error)(f"layer {name!r}: {error}") from None
            _draw(layer, site, whitening.map(lambda x: x.to(layer.pair(site)[0].dtype)), scheme)  # noqa: B023
        done.update(names)
    if not done:
        raise ValueError("no layer that can be whitened saw any input; did the model run on the batches?")


def _next_inputs(
    model: nn.Module, batches: Iterable[Any], done: set[str], forward: Forward | None
) -> tuple[list[str], dict[str, Moments]] | None:
    """The sites of the first layer, in order of execution, that is not done; with its input moments."""
    waiting = {name: pair for name, pair in whitened_sites(model).items() if name not in done}
    if not waiting:
        return None
    first: list[WhitenedLayer] = []

    def stop(layer: nn.Module, *_: Any) -> None:
        """Its own inputs are recorded when its forward ends; the first layer to end so is the next to draw."""
        assert isinstance(layer, WhitenedLayer)
        if not first:
            first.append(layer)
        if layer is first[0]:
            raise _Reached

    def run(model: nn.Module, batch: Any) -> None:
        with suppress(_Reached):
            (forward or call_model)(model, batch)

    with undisturbed(model), gathering(model, waiting) as moments:
        handles = [layer.register_forward_hook(stop) for layer in {id(x): x for x, _ in waiting.values()}.values()]
        try:
            run_batches(model, batches, None, run)
        finally:
            for handle in handles:
                handle.remove()
    if not first:
        return None
    return [name for name, (layer, _) in waiting.items() if layer is first[0]], moments


@torch.no_grad()
def _draw(layer: WhitenedLayer, site: Site, whitening: Any, scheme: Scheme) -> None:
    """W = V U and b = d - W c for a drawn V and d = 0, written to whichever parameters the layer trains."""
    weight, bias = layer.pair(site)
    V = torch.empty(site.layout.shape, dtype=weight.dtype, device=weight.device)
    scheme(V)
    d = (
        None
        if bias is None
        else torch.zeros(V.shape[0] if not site.layout.transposed else site.layout.groups * site.layout.outputs).to(
            bias
        )
    )
    W, b = site.unpacked(*to_canonical(site.layout.pack(V), None if d is None else site.layout.pack_bias(d), whitening))
    if isinstance(layer, Explicit):
        values = {name: x.detach().clone() for name, x in layer.canonical().items() if x is not None}
        _write(site, values[site.weight], W)
        if site.bias is not None and b is not None:
            _write(site, values[site.bias], b)
        layer.set_canonical(values)
    else:
        _write(site, weight, W)
        if bias is not None and b is not None:
            _write(site, bias, b)


def _write(site: Site, target: Tensor, value: Tensor) -> None:
    part = site.part(target)
    assert part is not None
    part.copy_(value)


def _refresh(model: nn.Module, batches: Iterable[Any], eps: float, forward: Forward | None) -> None:
    sites = whitened_sites(model)
    with undisturbed(model), gathering(model) as moments:
        run_batches(model, batches, None, forward)
    rewhiten_(sites, moments, eps)
    for name, (_, site) in sites.items():
        if site.inputs is not None:  # an open window begins with what was seen here
            site.inputs = moments[name]
