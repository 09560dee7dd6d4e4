"""From the moments of all workers to whitenings: their sum, what is wanted of each site, and who of several does it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from prong.core.factorise import WhiteningError, eps_of, rounded, scaled, storage_for, whiten
from prong.core.moments import Moments
from prong.core.whitening import Whitening
from prong.distributed.exchange import exchange, owners
from prong.distributed.workers import Workers
from prong.layers import Kind, Site
from prong.options import Basis, Damping
from prong.refresh.transport import is_linear

Sites = Mapping[str, tuple[Kind, Site]]


class Reduction:
    """Moments of everything that any worker has seen, on their way.

    With n_r, m_r, S_r the count, mean and scatter of rank r,

        n = sum_r n_r        m = 1/n sum_r n_r m_r        S = sum_r S_r + n_r (m_r - m)(m_r - m)^T

    in which nothing cancels. Counts are gathered first and means added up, which is little; the lower triangles of all
    S go in one all-reduce that training need not wait for. What a worker has not seen counts zero times.

    Args:
        moments: those of this worker. The names are the same for all.
        workers: who takes part.
        examples: the number of examples behind each, where that is wanted.

    Attributes:
        moments: by name, of those that anyone has seen; ready after `wait`, counts and means are at once. Sites whose
            statistics are one object for all who have any, share one here.
        examples: over all workers.
    """

    @torch.no_grad()
    def __init__(
        self, moments: Mapping[str, Moments], workers: Workers, examples: Mapping[str, float] | None = None
    ) -> None:
        self.moments, self.examples = dict(moments), dict(examples or {})
        self._finish: Callable[[], None] = lambda: None
        self._triangles: dict[str, Tensor] = {}
        if workers.alone:
            return
        firsts: dict[int, str] = {}
        mine = {
            name: (m.count, self.examples.get(name, 0.0), firsts.setdefault(id(m), name)) for name, m in moments.items()
        }
        told = workers.meet(mine)
        counts = {name: sum(said[name][0] for said in told) for name in moments}
        self.examples = {name: sum(said[name][1] for said in told) for name in self.examples}
        shares = {name: {said[name][2] for said in told if said[name][0] > 0} for name in moments}
        first_of = {name: first.pop() if len(first) == 1 else name for name, first in shares.items()}
        seen = [name for name in moments if counts[name] > 0 and first_of[name] == name]

        means = {name: moments[name].mean * (moments[name].count / counts[name]) for name in seen}
        workers.sum_(list(means.values()))()
        self._triangles = {name: _triangle(moments[name], means[name]) for name in seen}
        self._finish = workers.sum_(list(self._triangles.values()))
        reduced = {}
        for name in seen:
            reduced[name] = moments[name].empty()
            reduced[name].count, reduced[name].mean = counts[name], means[name]
        self.moments = {name: reduced[first_of[name]] for name in moments if counts[name] > 0}

    def detach(self) -> None:
        """Copy moments that go on to be gathered."""
        copies = {id(m): m.to(m.mean) for m in self.moments.values()}
        self.moments = {name: copies[id(m)] for name, m in self.moments.items()}

    @torch.no_grad()
    def wait(self, wanted: Container[Moments] | None = None) -> dict[str, Moments]:
        """The moments, complete, or those that are `wanted`; called once. Another thread may do it."""
        self._finish()
        for name, triangle in self._triangles.items():
            m = self.moments[name]
            if wanted is None or m in wanted:
                m.load_state_dict({"count": m.count, "mean": m.mean, "scatter": _symmetric(triangle, m.mean)})
        self._triangles = {}
        return self.moments


def _triangle(moments: Moments, mean: Tensor) -> Tensor:
    """The scatter about another mean, packed: (groups, in (in + 1) / 2)."""
    delta = moments.mean - mean
    scatter = torch.baddbmm(moments.scatter, delta.unsqueeze(2), delta.unsqueeze(1), alpha=moments.count)
    return torch.cat([scatter[:, i, : i + 1] for i in range(mean.shape[1])], dim=1)


def _symmetric(triangle: Tensor, like: Tensor) -> Tensor:
    """The matrices (groups, in, in) of packed triangles."""
    groups, size = like.shape
    lower = like.new_zeros(groups, size, size)
    for i, row in enumerate(torch.split(triangle, list(range(1, size + 1)), dim=1)):
        lower[:, i, : i + 1] = row
    return lower + lower.tril(-1).mT


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


Requests = Mapping[Request, list[str]]  # and the sites that share its result


def requests_of(
    sites: Sites, moments: Mapping[str, Moments], damping: Damping, optimizer: Optimizer | None = None
) -> dict[Request, list[str]]:
    """What is to be factorised, for this optimizer or for any. After this, layers are not asked again."""
    requests: dict[Request, list[str]] = {}
    for name, seen in moments.items():
        if seen.count > 0:
            requests.setdefault(_request(*sites[name], seen, damping, optimizer), []).append(name)
    if not requests:
        raise ValueError("no whitened layer saw any input; did the model run on the batches?")
    return requests


def _request(layer: Kind, site: Site, moments: Moments, damping: Damping, optimizer: Optimizer | None) -> Request:
    last = site.whitening
    weight, _ = layer.pair(site)
    return Request(
        moments,
        damping,
        layer.basis,
        layer.centred(site),
        cutoff=layer.cutoff if site.rank is None else max(layer.cutoff, 1.0),
        expected=last.P.shape[-1] if last is not None and last.P is not None and last.tail else 0,
        most=site.rank,
        channels=site.layout.channels,
        scaled=layer.basis is not None and optimizer is not None and not is_linear(optimizer, weight),
        storage=storage_for(layer.storage, weight),
    )


@torch.inference_mode(False)
@torch.no_grad()
def factorise(requests: Requests, warn: Callable[[str], None]) -> dict[str, Whitening]:
    """The whitenings that are wanted, where there are any. Another thread may do this."""
    found: dict[str, Whitening] = {}
    for request, names in requests.items():
        try:
            whitening = request.whitening(lambda note, name=names[0]: warn(f"layer {name!r} {note}"))  # type: ignore[misc]
        except (ValueError, FloatingPointError) as error:
            raise type(error)(f"layer {names[0]!r}: {error}") from None
        if whitening is not None:
            found |= dict.fromkeys(names, whitening)
    return found


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
        complete: whether it is all of the refresh.
        notes: what users are to be warned of.
        error: why there is no result.
    """

    whitenings: dict[str, Whitening]
    complete: bool = True
    notes: list[str] = field(default_factory=list)
    error: Exception | None = None

    def state_dict(self) -> dict[str, Any]:
        """What was computed, as tensors and numbers."""
        found = {name: dict(whitening.items()) for name, whitening in self.whitenings.items()}
        return {"whitenings": found, "complete": self.complete}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Share:
        """What `state_dict` has told."""
        return cls({name: Whitening(**w) for name, w in state["whitenings"].items()}, state["complete"])


def compute(requests: Requests, reduction: Reduction, workers: Workers) -> Share:
    """This worker's share of what is wanted, once its moments have arrived. Another thread may do this."""
    if workers.alone:
        return Share(factorise(requests, partial(warnings.warn, stacklevel=4)))
    owner = owners({request: cost(request) for request in requests}, workers.size)
    share = Share({}, complete=False)
    try:
        mine = {request: names for request, names in requests.items() if owner[request] == workers.rank}
        reduction.wait({request.moments for request in mine})
        share.whitenings = factorise(mine, share.notes.append)
    except Exception as error:  # the others are waiting to hear of it
        share.error = error
    return share


def collect(share: Share, workers: Workers) -> dict[str, Whitening]:
    """The whitenings of all sites, the same bits for everyone; raises what any worker's share has failed with."""
    if share.complete:
        return share.whitenings
    for notes in workers.meet(share.notes, share.error):
        for note in notes:
            warnings.warn(note, stacklevel=3)
    names: dict[int, list[str]] = {}  # of sites that share a whitening
    for name, whitening in share.whitenings.items():
        names.setdefault(id(whitening), []).append(name)
    found = exchange({tuple(n): dict(share.whitenings[n[0]].items()) for n in names.values()}, workers)
    whitenings = {several: Whitening(**fields) for several, fields in found.items()}
    return {name: whitening for several, whitening in whitenings.items() for name in several}
