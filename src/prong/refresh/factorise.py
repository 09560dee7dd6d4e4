"""From moments to whitenings, site by site: what is wanted of each, its factorisation, and who of several does it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from prong.core.factorise import WhiteningError, eps_of, rounded, scaled, storage_for, whiten
from prong.core.moments import Moments
from prong.core.whitening import Whitening
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

    def whitening(self, warn: Callable[[str], None]) -> Whitening | None:
        """What is wanted; None where inputs are all zero, or, with a warning, where no factorisation succeeds."""
        eps = eps_of(self.damping, self.moments, self.channels)  # once the moments are complete
        if eps == 0 and self.moments.count >= 2:
            return None
        try:
            found = whiten(self.moments, eps, self.basis, self.centred, self.cutoff, self.expected, self.most)
        except WhiteningError as error:
            warn(f"keeps its last whitening: {error}")
            return None
        if found.eps != eps:
            warn(f"its damping was raised from {eps:g} to {found.eps:g}")
        if self.scaled:
            found = scaled(found, self.moments, self.channels)
        return found if self.storage is None else rounded(found, self.moments, self.storage)


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


@torch.inference_mode(False)
@torch.no_grad()
def factorise(requests: Requests, warn: Callable[[str], None] = _warn) -> dict[str, Whitening]:
    """The whitenings that are wanted, where there are any. Another thread may do this.

    Sites that share their statistics make one request.
    """
    known: dict[Request, Whitening | None] = {}
    for name, request in requests.items():
        if request not in known:
            try:
                known[request] = request.whitening(lambda note, name=name: warn(f"layer {name!r} {note}"))  # type: ignore[misc]
            except (ValueError, FloatingPointError) as error:
                raise type(error)(f"layer {name!r}: {error}") from None
    return {name: found for name, request in requests.items() if (found := known[request]) is not None}


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
