"""Re-estimate and reproject: lines 6 to 11 of Algorithm 1, once. All or nothing; the function stays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from prong.core.moments import Moments, accumulation_dtype
from prong.core.whitening import Transition, Whitening, natural_gradient, transport_gradient, transport_velocity
from prong.distributed.joining import joined
from prong.distributed.sharding import is_sharded, local, rows_of, whole
from prong.distributed.workers import ALONE, Workers, unwrapped
from prong.layers import Implicit, Kind, Plain, Site
from prong.layers.site import in_backward
from prong.model.estimate import Forward, estimate
from prong.model.whiten import check_model, whitened_sites
from prong.options import Damping, check_count, check_damping
from prong.refresh.factorise import Reduction, Sites, collect, compute, requests_of
from prong.refresh.transport import Update, keeps_state, moved, plan_state, reset_state

OnRefresh = Literal["transport", "reset"]


def refresh_(
    model: nn.Module,
    batches: Iterable[Any],
    damping: Damping = 0.1,
    *,
    samples: int | None = None,
    optimizer: Optimizer | None = None,
    forward: Forward | None = None,
    process_group: ProcessGroup | None = None,
) -> nn.Module:
    """Estimate every whitened layer's inputs from batches, and change coordinates so that they are white.

    The network's function, gradients, random state, train/eval mode and other buffers stay as they are. Refresh between
    `step` and `backward`: gradients that wait for a step would be those of the old coordinates (explicit form).

    Where `torch.distributed` is initialised, all ranks call this, each with batches of its own, and end with the same.

    Args:
        model: a model with whitened layers (`whiten_`).
        batches: an iterable of batches (a DataLoader will do), or one tensor.
        damping: added to every eigenvalue of the covariance, in units of the inputs' mean square; or `prong.Absolute`.
        samples: stop after so many examples, of all workers together.
        optimizer: whose state for whitened parameters is carried along (explicit form); not needed where the
            model has an optimizer of ours, or an attached one.
        forward: how to run the model on a batch; default `model(batch)`, `model(batch[0])` or `model(**batch)`.
        process_group: the workers that take part; default: all.

    Raises:
        ValueError: nothing whitened, bad damping, batches the model cannot take, fewer than two samples.
        FloatingPointError: NaN or infinite activations; the message names the layer.
    """
    check_model(model)
    check_damping(damping)
    if samples is not None:
        check_count("samples", samples, 2)
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    check_between_updates()
    sites = whitened_sites(unwrapped(model))
    if not sites:
        raise ValueError("this model has no whitened layers; call prong.whiten_(model) first, or make its optimizer")
    owner = owner_of(sites)
    workers = Workers.of(model, process_group) if owner is None or process_group is not None else owner.workers
    moments = estimate(unwrapped(model), batches, samples, forward, workers)
    renew_(sites, moments, damping, workers, optimizer, "transport" if owner is None else owner.state_on_refresh)
    return model


def owner_of(sites: Sites) -> Any:
    """Who refreshes these sites while an optimizer trains them, or None."""
    return next((layer.owner for layer, _ in sites.values() if layer.owner is not None), None)


def renew_(
    sites: Sites,
    moments: Mapping[str, Moments],
    damping: Damping,
    workers: Workers,
    optimizer: Optimizer | None,
    on_refresh: OnRefresh,
) -> None:
    """Whiten sites by these moments and the other workers', and tell their owner."""
    owner = owner_of(sites)
    if owner is not None and optimizer is None:
        optimizer = owner.optimizer
    new = whitenings_of(sites, moments, damping, workers, None if owner is None else optimizer)
    if owner is not None:
        owner.finish()  # what comes from older statistics is not to come later
    assign_(sites, new, optimizer, on_refresh, workers=workers)
    if owner is not None:
        owner.renewed(sites[name][1] for name in new)


def check_between_updates() -> None:
    """Refuse to change coordinates while a backward pass runs."""
    if in_backward():
        raise RuntimeError("a refresh during a backward pass would mix two coordinate systems; refresh between updates")


def whitenings_of(
    sites: Sites,
    moments: Mapping[str, Moments],
    damping: Damping,
    workers: Workers = ALONE,
    optimizer: Optimizer | None = None,
) -> dict[str, Whitening]:
    """The whitenings of these moments and the other workers', by site; nothing is changed.

    A site whose factorisation fails is left out.
    """
    reduction = Reduction(moments, workers)
    return collect(compute(requests_of(sites, reduction.moments, damping, optimizer), reduction, workers), workers)


@torch.inference_mode(False)
@torch.no_grad()
def assign_(
    sites: Sites,
    new: Mapping[str, Whitening],
    optimizer: Optimizer | None = None,
    on_refresh: OnRefresh = "transport",
    gradients: bool = False,
    check: bool = True,
    workers: Workers = ALONE,
) -> None:
    """Give sites these whitenings: compute everything, check that it is finite (unless not to `check`), then assign.

    With `gradients`, those that wait for a step are carried over too. All workers take what the first has computed:
    products of the same matrices may differ in their last bits, and nothing would ever bring parameters together again.
    So they do with parameters whose natural gradients each makes by itself. Of what is spread over workers, each
    computes its own part.
    """
    updates: list[Update] = []
    local_only: list[Update] = []  # of what is spread over workers
    checks: list[tuple[str, list[Update]]] = []
    resets: list[tuple[Kind, Site]] = []
    for name, whitening in new.items():
        layer, site = sites[name]
        weight, _ = layer.pair(site)
        mine = updates if workers.alone or not is_sharded(weight) else local_only
        held = layer.coordinates(site)
        reset = on_refresh == "reset"
        if held is None:
            if reset:
                resets.append((layer, site))
            if gradients and isinstance(layer, Implicit) and site.whitening is None:
                mine += _naturalized(layer, site, whitening)
            if isinstance(layer, Plain) and optimizer is not None and not workers.alone and mine is updates:
                mine += [] if joined(optimizer) else _as_they_are(optimizer, layer, site)
            continue
        if reset or (optimizer is not None and not keeps_state(optimizer, layer, site)):
            reset = True
            resets.append((layer, site))
        like = local(weight.detach()).to(accumulation_dtype(weight.dtype))
        old = None if site.whitening is None else site.whitening.map(lambda x, like=like: x.to(like))  # type: ignore[misc]
        transition = Transition.between(old, whitening.map(lambda x, like=like: x.to(like)))  # type: ignore[misc]
        planned = moved(site, *held, transition, transport_velocity)
        if optimizer is not None and not reset:
            planned += plan_state(optimizer, layer, site, transition)
        if check:
            checks.append((name, planned))
        mine += planned
        if gradients and not isinstance(layer, Plain):  # these may be anything: a GradScaler skips what is not finite
            gV, gd = (None if p is None else p.grad for p in layer.pair(site))
            mine += [] if gV is None else moved(site, gV, gd, transition, transport_gradient)
    if not workers.alone:
        workers.broadcast_([value for _, value in updates])()
    with workers.together() if local_only else nullcontext():
        for name, planned in checks:
            if not all(torch.isfinite(value).all() for _, value in planned):
                were_finite = all(torch.isfinite(target).all() for target, _ in planned)
                raise FloatingPointError(
                    f"layer {name!r}: its parameters or optimizer state would not be finite in the new coordinates. "
                    "Nothing was changed; a larger damping helps."
                    if were_finite
                    else f"layer {name!r}: its parameters or optimizer state are not finite any more. Look at the loss "
                    "and the learning rate (a lower lr, a larger damping; a loss that sums over examples wants a lower "
                    "lr, too)."
                )
    for target, value in (*updates, *local_only):
        target.copy_(value)
    stored: dict[Any, Whitening] = {}
    for name, whitening in new.items():
        layer, site = sites[name]
        key = (id(whitening), layer)
        if key not in stored:
            stored[key] = layer.stored(site, whitening)
        site.whitening = stored[key]
    if optimizer is not None:
        for layer, site in resets:
            reset_state(optimizer, layer, site)


def _as_they_are(optimizer: Optimizer, layer: Plain, site: Site) -> list[Update]:
    """A site's parameters and their state with the values that they have."""
    pair = [p.detach() for p in layer.pair(site) if p is not None]
    state = [x for p in layer.pair(site) if p is not None for x in optimizer.state.get(p, {}).values()]
    parts = [site.part(x) for x in (*pair, *state) if isinstance(x, Tensor) and x.dim() > 0]
    return [(part, part.clone()) for part in parts if part is not None]


def _naturalized(layer: Implicit, site: Site, new: Whitening) -> list[Update]:
    """The natural gradients of a layer whose backward pass has given ordinary ones."""
    weight, bias = layer.pair(site)
    if weight.grad is None or new.P is None:
        return []
    gradients = [None if p is None else p.grad for p in (weight, bias)]
    read = local if site.layout.by_rows else whole
    if is_sharded(weight) and site.layout.by_rows:
        site = site.restricted(rows_of(weight))
    gW, gb = (None if g is None else read(g) for g in gradients)
    assert gW is not None
    packed, packed_b = site.packed(gW, gb)
    natural = site.unpacked(*natural_gradient(packed, packed_b, new.P.to(packed), new.c, new.tail))
    updates: list[Update] = []
    for gradient, value in zip(gradients, natural, strict=True):
        target = None if gradient is None else site.part(local(gradient))
        if gradient is not None and target is not None and value is not None:
            updates.append((target, value if value.shape == target.shape else value[rows_of(gradient)]))
    return updates
