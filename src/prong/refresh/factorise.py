"""From moments to whitenings, site by site: what is wanted of each, and its factorisation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from prong.core.moments import Moments
from prong.core.whitening import Basis, Whitening, WhiteningError, rounded, storage_for, whiten, whiten_together
from prong.layers import Explicit, Site, WhitenedLayer

Request = tuple[Moments, float, Basis | None, bool, float, int]  # the arguments of `whiten`
Requests = Mapping[str, tuple[Request, torch.dtype | None]]  # by site, with the dtype to store the result in


def requests_of(
    sites: Mapping[str, tuple[WhitenedLayer, Site]], moments: Mapping[str, Moments], eps: float
) -> dict[str, tuple[Request, torch.dtype | None]]:
    """What is to be factorised, by site, and the dtype to store it in. After this, layers are not asked again."""
    seen = {name: m for name, m in moments.items() if m.count > 0}
    if not seen:
        raise ValueError("no whitened layer saw any input; did the model run on the batches?")
    return {name: (_request(sites[name], m, eps), _storage(sites[name])) for name, m in seen.items()}


def _warn(note: str) -> None:
    warnings.warn(note, stacklevel=4)


@torch.inference_mode(False)
@torch.no_grad()
def factorise(requests: Requests, eps: float, warn: Callable[[str], None] = _warn) -> dict[str, Whitening]:
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
            warn(f"layer {name!r} keeps its last whitening: {error}")
        except (ValueError, FloatingPointError) as error:
            raise type(error)(f"layer {name!r}: {error}") from None
        else:
            if new[name].eps != eps:
                warn(f"layer {name!r}: damping was raised from {eps:g} to {new[name].eps:g}")
    return new


BATCHED = 128  # inputs, up to which factorisations on the CPU are batched


def _storage(place: tuple[WhitenedLayer, Site]) -> torch.dtype | None:
    layer, site = place
    return storage_for(layer.storage, layer.pair(site)[0])


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
