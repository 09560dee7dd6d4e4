"""Factorisations shared out among workers, each computed by one and given to all."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from prong.core.whitening import Whitening
from prong.distributed.reduction import Reduction
from prong.distributed.workers import Workers
from prong.refresh.factorise import Request, Requests, factorise

K = TypeVar("K", bound=Hashable)
EIGENBASIS = 15.0  # how many Cholesky factorisations an eigendecomposition costs, about


def cost(request: Request) -> float:
    """What a factorisation costs, in products: in^3 per group, less where few directions are expected to remain."""
    groups, features = request.moments.mean.shape
    rank = request.expected if request.cutoff > 0 and request.expected else features
    return groups * features**2 * rank * (EIGENBASIS if request.basis in ("pca", "zca") else 1.0)


def owners(costs: Mapping[K, float], size: int) -> dict[K, int]:
    """Who computes what: the most costly first, each to the rank with the least to do. The same on all ranks."""
    loads = [0.0] * size
    owner = {}
    for key in sorted(costs, key=lambda key: -costs[key]):
        owner[key] = min(range(size), key=loads.__getitem__)
        loads[owner[key]] += costs[key]
    return owner


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


def exchange(mine: Mapping[K, Mapping[str, Any]], workers: Workers) -> dict[K, dict[str, Any]]:
    """What every worker has, tensors and numbers by name, given to all. Each key is had by one of them."""
    if workers.alone:
        return {key: dict(values) for key, values in mine.items()}
    sizes = {key: {name: _described(value) for name, value in values.items()} for key, values in mine.items()}
    everything: dict[K, dict[str, Any]] = {}
    finish = []
    for rank, described in enumerate(workers.meet(sizes)):
        tensors: list[Tensor] = []
        for key, values in described.items():
            everything[key] = dict(values)
            for name, size in values.items():
                if isinstance(size, _Size):
                    own = mine[key][name] if rank == workers.rank else size.empty()
                    everything[key][name] = own.to(workers.device).contiguous()  # strides decide how products round
                    tensors.append(everything[key][name])
        finish.append(workers.broadcast_(tensors, rank))
    for end in finish:
        end()
    return everything


@dataclass(frozen=True)
class _Size:
    """The shape and dtype of a tensor that is yet to come."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype)


def _described(value: Any) -> Any:
    return _Size(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
