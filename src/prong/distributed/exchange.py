"""Work shared out among workers, each piece done by one and given to all."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from prong.distributed.workers import Workers

K = TypeVar("K", bound=Hashable)


def owners(costs: Mapping[K, float], size: int) -> dict[K, int]:
    """Who computes what: the most costly first, each to the rank with the least to do. The same on all ranks."""
    loads = [0.0] * size
    owner = {}
    for key in sorted(costs, key=lambda key: -costs[key]):
        owner[key] = min(range(size), key=loads.__getitem__)
        loads[owner[key]] += costs[key]
    return owner


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
