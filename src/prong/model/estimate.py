"""Run a model over batches only to look at its layers' inputs: no side effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from prong.core.moments import Moments
from prong.distributed.workers import ALONE, Workers
from prong.layers import Kind, Plain
from prong.layers.site import in_backward
from prong.model.whiten import restored, whitened_layers, whitened_sites

Forward = Callable[[nn.Module, Any], Any]


def call_model(model: nn.Module, batch: Any) -> Any:
    """The model on one batch: a tensor, a mapping of keyword arguments, or (input, target, ...) as loaders give."""
    inputs = inputs_of(batch)
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def inputs_of(batch: Any) -> Tensor | Mapping[str, Any]:
    """The part of a batch that is given to the model."""
    if isinstance(batch, Tensor | Mapping):
        return batch
    if isinstance(batch, Sequence) and batch and isinstance(batch[0], Tensor | Mapping | tuple | list):
        return inputs_of(batch[0])
    raise TypeError(
        f"a batch is a tensor, (input, target) or a mapping of keyword arguments, got {type(batch).__name__}. "
        "For anything else pass forward=lambda model, batch: ..."
    )


def as_batches(batches: Any) -> Iterable[Any]:
    """An iterable of batches; a single tensor is one batch."""
    if isinstance(batches, Tensor):
        return [batches]
    if not isinstance(batches, Iterable) or isinstance(batches, str | Mapping):
        raise TypeError(f"batches is an iterable of batches (a DataLoader) or one tensor; got {type(batches).__name__}")
    return batches


def batch_size(batch: Any) -> int:
    """The first dimension of the first tensor found in a batch."""
    while not isinstance(batch, Tensor):
        values = list(batch.values()) if isinstance(batch, Mapping) else batch
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            return 1
        batch = values[0]
    return int(batch.shape[0]) if batch.dim() else 1


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Leave gradients, random state and other modules' buffers (batch norm's statistics) as they were.

    Buffers are replaced by copies for the time being: the originals are not even written to. Torch's fused attention
    and encoder layers are off, as they read weights without calling the layers that own them.
    """
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    modules = [module for module in model.modules() if module._buffers]
    fused = torch.backends.mha.get_fastpath_enabled()
    random = torch.random.fork_rng([d.index or 0 for d in devices])
    with random, torch.inference_mode(False), torch.no_grad(), restored(modules, "_buffers"):
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            for module in modules:
                module._buffers = {n: None if b is None else b.clone() for n, b in module._buffers.items()}
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)


@contextmanager
def gathering(
    model: nn.Module, names: Iterable[str] | None = None, workers: Workers = ALONE
) -> Iterator[dict[str, Moments]]:
    """Fresh statistics of the (named) sites, there when the context is left; open windows are put aside meanwhile.

    With several workers, what layers refuse to add is raised at the end: the forwards of sharded models need everyone.
    """
    sites = whitened_sites(model)
    chosen = {name: sites[name] for name in (sites if names is None else names)}
    before = [
        (layer, site, site.layout, {key: getattr(site, key) for key in ("window", "taps", "outputs", "aside")})
        for layer, site in sites.values()
    ]
    errors: list[FloatingPointError] | None = None if workers.alone else []
    for _, site in sites.values():
        site.window, site.taps, site.outputs, site.aside = None, [], None, True
    for layer, site in chosen.values():
        site.window = site.new_window(layer.pair(site)[0])
        site.window.training_only, site.window.errors = False, errors
    moments: dict[str, Moments] = {}
    try:
        yield moments
        if errors:
            raise errors[0]
        moments.update({name: site.window.moments for name, (_, site) in chosen.items() if site.window is not None})
    finally:
        for layer, site, layout, values in before:
            vars(site).update(values)
            if site.window is not None and site.layout != layout:  # blocks were chosen meanwhile
                site.window.restart(site.new_window(layer.pair(site)[0]).moments)


@contextmanager
def aside(model: nn.Module) -> Iterator[None]:
    """Whatever is run under this leaves gradients, statistics, buffers, random state and modes as they were."""
    with restored(model.parameters(), "grad"), restored(model.modules(), "training"):
        for p in model.parameters():
            p.grad = None
        with undisturbed(model), gathering(model, ()), torch.enable_grad():
            yield


def run_batches(
    model: nn.Module, batches: Any, samples: int | None = None, forward: Forward | None = None, workers: Workers = ALONE
) -> int:
    """Run the model over batches, until `samples` examples were seen if given; returns how many were.

    With several workers, `samples` is of all of them, and some may have no batches.
    """
    if in_backward():
        raise RuntimeError("statistics cannot be gathered during a backward pass; do it between updates")
    seen = 0
    for number, batch in enumerate(as_batches(batches)):
        try:
            (forward or call_model)(model, batch)
        except (RuntimeError, IndexError) as error:
            raise ValueError(f"the model does not take batch {number}: {error}") from error
        seen += batch_size(batch)
        if samples is not None and seen * workers.size >= samples:
            break
    if seen == 0 and workers.alone:
        raise ValueError("there were no batches to estimate statistics from")
    return seen


def estimate(
    model: nn.Module,
    batches: Any,
    samples: int | None = None,
    forward: Forward | None = None,
    workers: Workers = ALONE,
    names: Iterable[str] | None = None,
) -> dict[str, Moments]:
    """The input moments of every (named) whitened site, from this worker's batches and without side effects."""
    batches = settle_blocks(model, batches, forward, workers)
    with workers.together(), undisturbed(model), gathering(model, names, workers) as moments:
        run_batches(model, batches, samples, forward, workers)
    return moments


def settle_blocks(model: nn.Module, batches: Any, forward: Forward | None, workers: Workers) -> Any:
    """The batches; by the first of each worker, all of them have agreed in which blocks to whiten."""
    layers = [layer for _, layer in whitened_layers(model)]
    if workers.alone or all(layer.settled for layer in layers if isinstance(layer, Plain)):
        return batches
    with workers.together(), undisturbed(model), gathering(model, None, workers):
        rest = iter(as_batches(batches))
        first = list(islice(rest, 1))
        run_batches(model, first, None, forward, workers)
    agree_(layers, workers)
    return chain(first, rest)


def agree_(layers: Iterable[Kind], workers: Workers) -> None:
    """Let all workers take the smallest blocks and ranks that any of them has chosen by its own batch.

    Layers that nobody has met yet are left for the next time; once there are none, nobody is asked.
    """
    views = [layer for layer in dict.fromkeys(layers) if isinstance(layer, Plain) and not layer.settled]
    if not views:
        return
    mine = [None if view.budget is not None else [(s.layout.block, s.rank) for s in view.sites] for view in views]
    for view, *chosen in zip(views, *workers.meet(mine), strict=True):
        known = [sizes for sizes in chosen if sizes is not None]
        if known:
            view.settle([_smallest(site) for site in zip(*known, strict=True)])


def _smallest(sizes: Iterable[tuple[int | None, int | None]]) -> tuple[int | None, int | None]:
    """The smallest block and the smallest rank, where None is no limit."""
    block, rank = (min(each, key=lambda size: inf if size is None else size) for each in zip(*sizes, strict=True))
    return block, rank
