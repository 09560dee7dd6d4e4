"""From moments to whitenings, site by site: what is wanted of each, its factorisation, and who of several does it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from prong.core.moments import Moments
from prong.core.whitening import (
    Whitening,
    WhiteningError,
    eps_of,
    rounded,
    scaled,
    storage_for,
    whiten,
    whiten_together,
)
from prong.distributed.exchange import exchange, owners
from prong.distributed.reduction import Reduction
from prong.distributed.workers import Workers
from prong.layers import Kind, Site
from prong.options import Basis, Damping

Sites = Mapping[str, tuple[Kind, Site]]


@dataclass(frozen=True)
class Request:
    """What is to be factorised: the arguments of `whiten`, and what is done to the result.

    Attributes:
        most: how many directions may be told apart.
        channels: the number of inputs of all groups.
        scaled: whether U is for an optimizer that is not linear in the gradient.
        storage: the dtype to store P in, if not its own.
    """

    moments: Moments
    damping: Damping
    basis: Basis | None
    centred: bool
    cutoff: float
    expected: int
    most: int | None
    channels: int
    scaled: bool
    storage: torch.dtype | None

    @property
    def eps(self) -> float:
        """The damping in the units of the inputs, once the moments are complete."""
        return eps_of(self.damping, self.moments, self.channels)

    def whiten(self, eps: float) -> Whitening:
        """The whitening that is wanted."""
        return self.finish(whiten(self.moments, eps, self.basis, self.centred, self.cutoff, self.expected, self.most))

    def finish(self, whitening: Whitening) -> Whitening:
        """A whitening of these moments as it is wanted."""
        if self.scaled and whitening.U is not None:
            whitening = scaled(whitening, self.moments, self.channels)
        return whitening if self.storage is None else rounded(whitening, self.moments, self.storage)


Requests = Mapping[str, Request]


def requests_of(
    sites: Sites, moments: Mapping[str, Moments], damping: Damping, linear: Callable[[torch.Tensor], bool]
) -> dict[str, Request]:
    """What is to be factorised, by site. After this, layers are not asked again.

    `linear` tells whether a parameter's optimizer is linear in the gradient.
    """
    seen = {name: m for name, m in moments.items() if m.count > 0}
    if not seen:
        raise ValueError("no whitened layer saw any input; did the model run on the batches?")
    return {name: _request(*sites[name], m, damping, linear) for name, m in seen.items()}


def _request(
    layer: Kind, site: Site, moments: Moments, damping: Damping, linear: Callable[[torch.Tensor], bool]
) -> Request:
    last = site.whitening
    expected = last.P.shape[-1] if last is not None and last.P is not None and last.tail else 0
    weight, _ = layer.pair(site)
    return Request(
        moments,
        damping,
        layer.basis,
        layer.centred(site),
        layer.cutoff if site.rank is None else max(layer.cutoff, 1.0),
        expected,
        site.rank,
        site.layout.channels,
        layer.basis is not None and not linear(weight),
        storage_for(layer.storage, weight),
    )


def _warn(note: str) -> None:
    warnings.warn(note, stacklevel=4)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Errors say of which layer they are."""
    try:
        yield
    except (ValueError, FloatingPointError) as error:
        raise type(error)(f"layer {name!r}: {error}") from None


@torch.inference_mode(False)
@torch.no_grad()
def factorise(requests: Requests, warn: Callable[[str], None] = _warn) -> dict[str, Whitening]:
    """The whitenings that are wanted; where one fails, a warning instead. Another thread may do this.

    Inputs that are all zero have none.
    """
    new: dict[str, Whitening] = {}
    eps: dict[Request, float] = {}
    for name, request in requests.items():
        with _named(name):
            eps[request] = eps[request] if request in eps else request.eps
    live = {name: request for name, request in requests.items() if eps[request] > 0 or request.moments.count < 2}
    known = _whiten_batched({request: eps[request] for request in live.values()})
    for name, request in live.items():
        try:
            with _named(name):
                if request not in known:
                    known[request] = request.whiten(eps[request])
            new[name] = known[request]
        except WhiteningError as error:
            warn(f"layer {name!r} keeps its last whitening: {error}")
        else:
            if new[name].eps != eps[request]:
                warn(f"layer {name!r}: damping was raised from {eps[request]:g} to {new[name].eps:g}")
    return new


BATCHED = 128  # inputs, up to which factorisations on the CPU are batched


def _whiten_batched(requests: Mapping[Request, float]) -> dict[Request, Whitening]:
    """What can be factorised together. Sites that share their statistics make one request."""
    alike: dict[Any, list[Request]] = {}
    for request in requests:
        mean = request.moments.mean
        if mean.device.type == "cpu" and mean.shape[1] > BATCHED:
            continue  # there large ones are factorised one by one anyway, and together take more memory
        key = (mean.shape[1], mean.dtype, mean.device, request.basis, request.centred, request.cutoff, request.most)
        alike.setdefault(key, []).append(request)
    known: dict[Request, Whitening] = {}
    for group in alike.values():
        first = group[0]
        together = whiten_together(
            [r.moments for r in group], [requests[r] for r in group], first.basis, first.centred, first.cutoff
        )
        known |= {r: r.finish(w) for r, w in zip(group, together or [], strict=False)}
    return known


EIGENBASIS = 15.0  # how many Cholesky factorisations an eigendecomposition costs, about


def cost(request: Request) -> float:
    """What a factorisation costs, in products: in^3 per group, less where few directions are expected to remain."""
    groups, features = request.moments.mean.shape
    rank = request.expected if request.cutoff > 0 and request.expected else features
    return groups * features**2 * rank * (EIGENBASIS if request.basis in ("pca", "zca") else 1.0)


@dataclass
class Share:
    """What one worker has computed of a refresh, which `collect` completes.

    Attributes:
        whitenings: by site.
        notes: what users are to be warned of.
        error: why there is no result.
        complete: whether it is all of the refresh.
    """

    whitenings: dict[str, Whitening]
    notes: list[str] = field(default_factory=list)
    error: Exception | None = None
    complete: bool = True


def compute(requests: Requests, reduction: Reduction, workers: Workers) -> Share:
    """This worker's share of what is wanted, once its moments have arrived. Another thread may do this."""
    if workers.alone:
        return Share(factorise(requests))
    owner = owners({request: cost(request) for request in requests.values()}, workers.size)
    share = Share({}, complete=False)
    try:
        mine = {name: wanted for name, wanted in requests.items() if owner[wanted] == workers.rank}
        reduction.wait({request.moments for request in mine.values()})
        share.whitenings = factorise(mine, share.notes.append)
    except Exception as error:  # the others are waiting to hear of it
        share.error = error
    return share


def collect(share: Share, workers: Workers) -> dict[str, Whitening]:
    """The whitenings of all sites, the same bits for everyone.

    Raises:
        Exception: what any worker's share has failed with, on all of them.
    """
    if share.complete:
        return share.whitenings
    names: dict[int, list[str]] = {}  # of sites that share a whitening
    for name, whitening in share.whitenings.items():
        names.setdefault(id(whitening), []).append(name)
    mine = {tuple(several): dict(share.whitenings[several[0]].items()) for several in names.values()}
    for notes in workers.meet(share.notes, share.error):
        for note in notes:
            warnings.warn(note, stacklevel=3)
    found = exchange(mine, workers)
    whitenings = {several: Whitening(**fields) for several, fields in found.items()}
    return {name: whitening for several, whitening in whitenings.items() for name in several}
