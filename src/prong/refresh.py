"""Re-estimate and reproject: lines 6 to 11 of Algorithm 1, once. All or nothing; the function stays."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from prong.estimation import Forward, estimate
from prong.injection import check_count, check_model, whitened_sites
from prong.layers import Explicit, Site, WhitenedLayer, in_backward
from prong.precision import accumulation_dtype
from prong.projection import Transition
from prong.statistics import Moments
from prong.transport import Update, plan_gradients, plan_parameters, plan_state, reset_state, transports_of
from prong.whitening import Basis, Whitening, WhiteningError, check_eps, rounded, whiten, whiten_together

OnRefresh = Literal["transport", "reset"]


def refresh_(
    model: nn.Module,
    batches: Iterable[Any],
    eps: float = 1e-2,
    *,
    samples: int | None = None,
    optimizer: Optimizer | None = None,
    forward: Forward | None = None,
) -> nn.Module:
    """Estimate every whitened layer's inputs from batches, and change coordinates so that they are white.

    The network's function, gradients, random state, train/eval mode and other buffers stay as they are. Refresh between
    `step` and `backward`: gradients that wait for a step would be those of the old coordinates (explicit form).

    Args:
        model: a model with whitened layers (`whiten_`).
        batches: an iterable of batches (a DataLoader will do), or one tensor.
        eps: damping, added to every eigenvalue of the covariance.
        samples: stop after so many examples.
        optimizer: whose state for whitened parameters is carried along (explicit form); not needed where the
            model is trained by `PRONG` or has a `Refresher`.
        forward: how to run the model on a batch; default `model(batch)`, `model(batch[0])` or `model(**batch)`.

    Raises:
        ValueError: nothing whitened, bad eps, batches the model cannot take, fewer than two samples.
        FloatingPointError: NaN or infinite activations; the message names the layer.
    """
    check_model(model)
    check_eps(eps)
    if samples is not None:
        check_count("samples", samples, 2)
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    check_between_updates()
    sites = require_whitened(model)
    moments = estimate(model, batches, samples, forward)
    owner = next((layer.owner for layer, _ in sites.values() if layer.owner is not None), None)
    on_refresh: OnRefresh = "transport" if owner is None else owner.on_refresh
    if optimizer is None and owner is not None:
        optimizer = owner.optimizer
    rewhiten_(sites, moments, eps, optimizer, on_refresh)
    for _, site in sites.values():
        if site.spread is not None:
            site.spread.take()  # measured in the old coordinates
    return model


def require_whitened(model: nn.Module) -> dict[str, tuple[WhitenedLayer, Site]]:
    """The whitened sites of a model that must have some."""
    sites = whitened_sites(model)
    if not sites:
        raise ValueError("this model has no whitened layers; call prong.whiten_(model) first")
    return sites


def check_between_updates() -> None:
    """Refuse to change coordinates while a backward pass runs."""
    if in_backward():
        raise RuntimeError("a refresh during a backward pass would mix two coordinate systems; refresh between updates")


def rewhiten_(
    sites: Mapping[str, tuple[WhitenedLayer, Site]],
    moments: Mapping[str, Moments],
    eps: float,
    optimizer: Optimizer | None = None,
    on_refresh: OnRefresh = "transport",
) -> None:
    """Give sites the whitening of these moments. Sites without samples keep the one they have."""
    new = whitenings_of(sites, moments, eps)
    assign_({name: (*sites[name], whitening) for name, whitening in new.items()}, optimizer, on_refresh)


def whitenings_of(
    sites: Mapping[str, tuple[WhitenedLayer, Site]], moments: Mapping[str, Moments], eps: float
) -> dict[str, Whitening]:
    """The whitenings of these moments, by site; nothing is changed. A site whose factorisation fails is left out."""
    return factorise(requests_of(sites, moments, eps), eps)


Request = tuple[Moments, float, Basis | None, bool, float, int]  # the arguments of `whiten`


def requests_of(
    sites: Mapping[str, tuple[WhitenedLayer, Site]], moments: Mapping[str, Moments], eps: float
) -> dict[str, tuple[Request, torch.dtype | None]]:
    """What is to be factorised, by site, and the dtype to store it in. After this, layers are not asked again."""
    seen = {name: m for name, m in moments.items() if m.count > 0}
    if not seen:
        raise ValueError("no whitened layer saw any input; did the model run on the batches?")
    return {name: (_request(sites[name], m, eps), sites[name][0].storage) for name, m in seen.items()}


@torch.inference_mode(False)
@torch.no_grad()
def factorise(requests: Mapping[str, tuple[Request, torch.dtype | None]], eps: float) -> dict[str, Whitening]:
    """The whitenings that are wanted; where one fails, a warning instead. Another thread may do this."""
    new: dict[str, Whitening] = {}
    known = _whiten_batched(request for request, _ in requests.values())
    for name, (request, storage) in requests.items():
        try:
            if request not in known:
                known[request] = whiten(*request)
            new[name] = known[request]
            if storage is not None:
                new[name] = known[request] = rounded(new[name], request[0], storage)
        except WhiteningError as error:
            warnings.warn(f"layer {name!r} keeps its last whitening: {error}", stacklevel=3)
        except (ValueError, FloatingPointError) as error:
            raise type(error)(f"layer {name!r}: {error}") from None
        else:
            if new[name].eps != eps:
                warnings.warn(f"layer {name!r}: damping was raised from {eps:g} to {new[name].eps:g}", stacklevel=3)
    return new


BATCHED = 128  # inputs, up to which factorisations on the CPU are batched


def _request(place: tuple[WhitenedLayer, Site], moments: Moments, eps: float) -> Request:
    layer, site = place
    basis = layer.basis if isinstance(layer, Explicit) else None
    last = site.whitening
    expected = last.P.shape[-1] if last is not None and last.P is not None and last.tail else 0
    return moments, eps, basis, layer.centred(site), layer.cutoff, expected


def _whiten_batched(requests: Iterable[Request]) -> dict[Request, Whitening]:
    """What can be factorised together. Sites that share their statistics make one request."""
    alike: dict[Any, list[Request]] = {}
    for request in dict.fromkeys(requests):
        mean = request[0].mean
        if mean.device.type == "cpu" and mean.shape[1] > BATCHED:
            continue  # there large ones are factorised one by one anyway, and together take more memory
        alike.setdefault((mean.shape[1], mean.dtype, mean.device, *request[1:5]), []).append(request)
    known: dict[Request, Whitening] = {}
    for group in alike.values():
        together = whiten_together([request[0] for request in group], *group[0][1:5])
        known |= dict(zip(group, together or [], strict=False))
    return known


@torch.inference_mode(False)
@torch.no_grad()
def assign_(
    whitenings: Mapping[str, tuple[WhitenedLayer, Site, Whitening]],
    optimizer: Optimizer | None = None,
    on_refresh: OnRefresh = "transport",
    gradients: bool = False,
) -> None:
    """Change coordinates: compute everything, check that it is finite, then assign.

    With `gradients`, those that wait for a step are carried over too.
    """
    updates: list[Update] = []
    resets: list[tuple[WhitenedLayer, Site]] = []
    for name, (layer, site, new) in whitenings.items():
        reset = on_refresh == "reset" or (optimizer is not None and transports_of(optimizer) is None)
        if reset:
            resets.append((layer, site))
        if not isinstance(layer, Explicit):
            continue
        weight, _ = layer.pair(site)
        like = weight.detach().to(accumulation_dtype(weight.dtype))
        old = None if site.whitening is None else site.whitening.map(lambda x, like=like: x.to(like))  # type: ignore[misc]
        transition = Transition.between(old, new.map(lambda x, like=like: x.to(like)))  # type: ignore[misc]
        planned = plan_parameters(layer, site, transition)
        if optimizer is not None and not reset:
            planned += plan_state(optimizer, layer, site, transition)
        if not all(torch.isfinite(value).all() for _, value in planned):
            raise FloatingPointError(
                f"layer {name!r}: its parameters or optimizer state would not be finite in the new coordinates. "
                "Nothing was changed; a larger eps helps."
            )
        updates += planned
        if gradients:  # these may be anything: a GradScaler skips what is not finite
            updates += plan_gradients(layer, site, transition)
    for target, value in updates:
        target.copy_(value)
    stored: dict[Any, Whitening] = {}
    for layer, site, new in whitenings.values():
        key = (id(new), layer)
        if key not in stored:
            stored[key] = layer.stored(site, new)
        site.whitening = stored[key]
    if optimizer is not None:
        for layer, site in resets:
            reset_state(optimizer, layer, site)
