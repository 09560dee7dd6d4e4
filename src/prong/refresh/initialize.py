"""Whitened initialisation: draw V, not W."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from prong.core.factorise import eps_of, whiten
from prong.core.moments import Moments, Window
from prong.core.whitening import Whitening, to_canonical
from prong.distributed.sharding import check_unsharded
from prong.distributed.workers import Workers, unwrapped
from prong.layers import Explicit, Kind, Plain, Site
from prong.layers.site import Layout
from prong.model.estimate import (
    Forward,
    as_batches,
    call_model,
    estimate,
    gathering,
    run_batches,
    settle_blocks,
    undisturbed,
)
from prong.model.whiten import check_model, fold_, whiten_, whitened_sites
from prong.options import Basis, Damping, check_basis, check_damping
from prong.refresh.apply import check_between_updates, renew_
from prong.refresh.factorise import Reduction

Scheme = Callable[[Tensor], Any]


def fan_in_(weight: Tensor) -> Tensor:
    """Normal with variance 1 / fan-in, in place: unit variance out for white unit-variance inputs."""
    return nn.init.normal_(weight, std=1 / math.sqrt(max(1, weight[0].numel())))


class _Reached(Exception):
    """The layer in question has its input; the rest of the forward is not needed."""


def initialize_(
    model: nn.Module,
    batches: Iterable[Any],
    damping: Damping = 0.1,
    *,
    scheme: Scheme = fan_in_,
    basis: Basis = "pca",
    forward: Forward | None = None,
    process_group: ProcessGroup | None = None,
) -> nn.Module:
    """Draw new weights for every layer in whitened coordinates, in place, and whiten what is to be whitened.

    Layer by layer in order of execution: the inputs' c and U are estimated with the layers before it already
    initialised, V is drawn by `scheme`, d is zero, and W = V U, b = -W c. A plain model stays plain, for any optimizer;
    one that is whitened, or has an optimizer that whitens, also gets its first whitening. Not function-preserving: it
    is an initialiser, to be called before or after the optimizer is made, but before its first step.

    Where `torch.distributed` is initialised, all ranks call this, each with batches of its own; rank 0 draws for all.

    Args:
        model: any module; layers that are frozen or could not be whitened keep their weights, and frozen biases stay.
        batches: an iterable of batches, gone through once per layer, or one tensor.
        damping: in units of the inputs' mean square; or `prong.Absolute`.
        scheme: an in-place initialiser of a weight such as `torch.nn.init.kaiming_normal_`.
        basis: the basis in which V is drawn ("pca", "zca", "cholesky").
        forward: how to run the model on a batch.
        process_group: the workers that take part; default: all.

    Raises:
        ValueError: nothing to whiten, bad damping, batches the model cannot take, fewer than two samples.
        FloatingPointError: NaN or infinite activations. In every case the parameters are as they were.
    """
    check_model(model)
    check_damping(damping)
    check_basis(basis)
    check_unsharded(model, "whitened initialisation", "call it before fully_shard")
    check_between_updates()
    workers, given, model = Workers.of(model, process_group), model, unwrapped(model)
    with workers.together():
        batches = as_batches(batches)
        batches = list(batches) if iter(batches) is batches else batches  # a generator would be spent after one pass
    plain = not whitened_sites(model)
    if plain:
        whiten_(model)
    before = [(p, p.detach().clone()) for p in model.parameters()]
    whitenings = [(site, site.whitening) for _, site in whitened_sites(model).values()]
    try:
        settle_blocks(model, batches, forward, workers)
        _initialize_in_order(model, batches, damping, scheme, basis, forward, workers)
        if not plain:
            moments, sites = estimate(model, batches, None, forward, workers), whitened_sites(model)
            renew_(sites, moments, damping, workers, None, "reset")  # whatever an optimizer knows is of other weights
            windows: dict[int, Window] = {}
            for name, (_, site) in sites.items():
                if site.window is not None:  # an open window begins with what was seen here
                    window = Window(moments[name], share=site.window.share)
                    site.window = windows.setdefault(id(moments[name]), window)
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
    return given


def _initialize_in_order(
    model: nn.Module,
    batches: Iterable[Any],
    damping: Damping,
    scheme: Scheme,
    basis: Basis,
    forward: Forward | None,
    workers: Workers,
) -> None:
    done: set[str] = set()
    while (found := _next_inputs(model, batches, done, forward, workers)) is not None:
        names, moments = found
        with workers.together():
            for name in names:
                layer, site = whitened_sites(model)[name]
                try:
                    eps = eps_of(damping, moments[name], site.layout.channels) or 1.0  # where all inputs are zero
                    whitening = whiten(moments[name], eps, basis, layer.centred(site))
                except (ValueError, FloatingPointError) as error:
                    raise type(error)(f"layer {name!r}: {error}") from None
                _draw(layer, site, whitening.map(lambda x: x.to(layer.pair(site)[0].dtype)), scheme)  # noqa: B023
        pairs = [layer.pair(site) for layer, site in map(whitened_sites(model).__getitem__, names)]
        workers.broadcast_([p.detach() for pair in pairs for p in pair if p is not None])()
        done.update(names)
    if not done:
        raise ValueError("no layer that can be whitened saw any input; did the model run on the batches?")


def _next_inputs(
    model: nn.Module, batches: Iterable[Any], done: set[str], forward: Forward | None, workers: Workers
) -> tuple[list[str], dict[str, Moments]] | None:
    """The sites of the first layer, in order of execution, that is not done; with its input moments.

    It is the first layer of the first worker that has any.
    """
    waiting = {
        name: (layer, site)
        for name, (layer, site) in whitened_sites(model).items()
        if name not in done and layer.pair(site)[0].requires_grad
    }
    if not waiting:
        return None
    first: list[Kind] = []

    def stop(layer: Kind) -> None:
        """Its own inputs are recorded when its forward ends; the first layer to end so is the next to draw."""
        if not first:
            first.append(layer)
        if layer is first[0]:
            raise _Reached

    def run(model: nn.Module, batch: Any) -> None:
        with suppress(_Reached):
            (forward or call_model)(model, batch)

    with workers.together(), undisturbed(model), gathering(model, waiting, workers) as moments:
        callers = {id(m.out_proj): m for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
        handles = []
        for layer in {id(x): x for x, _ in waiting.values()}.values():
            module: Any = layer.module if isinstance(layer, Plain) else layer
            caller = callers.get(id(module), module)  # attention computes with its output projection and never calls it
            handles.append(caller.register_forward_hook(lambda *_, layer=layer: stop(layer)))
        try:
            run_batches(model, batches, None, run, workers)
        finally:
            for handle in handles:
                handle.remove()
    mine = [name for name, (layer, _) in waiting.items() if first and layer is first[0]]
    names = next((theirs for theirs in workers.meet(mine) if theirs), [])
    if not names:
        return None
    return names, Reduction({name: moments[name] for name in names}, workers).wait()


@torch.no_grad()
def _draw(layer: Kind, site: Site, whitening: Whitening, scheme: Scheme) -> None:
    """W = V U and b = -W c for a drawn V, written to whichever parameters the layer trains; a frozen b stays."""
    weight, bias = layer.pair(site)
    layout = site.layout
    kernel = layout.shape[2:]
    # Drawn as an ordinary weight (out, in, *kernel), also for transposed layers: schemes reckon fan-in from that.
    V = torch.empty(layout.groups * layout.outputs, layout.inputs, *kernel, dtype=weight.dtype, device=weight.device)
    scheme(V.fill_(torch.nan))
    if not torch.isfinite(V).all():
        raise ValueError("scheme must fill the weight it is given in place, as torch.nn.init.kaiming_normal_ does")
    packed = Layout(tuple(V.shape), layout.groups, block=layout.block).pack(V)
    drawn = bias is not None and bias.requires_grad
    d = torch.zeros(layout.groups, layout.outputs, dtype=V.dtype, device=V.device) if drawn else None
    W, b = site.unpacked(*to_canonical(packed, d, whitening))
    if isinstance(layer, Explicit):
        values = {name: x.detach().clone() for name, x in layer.canonical().items() if x is not None}
        targets = (values[site.weight], None if site.bias is None else values[site.bias])
    else:
        targets = (weight, bias)
    for target, value in zip(targets, (W, b), strict=True):
        if target is not None and value is not None:
            site.write(target, value)
    if isinstance(layer, Explicit):
        layer.set_canonical(values)
