"""Work shared out among workers, each piece done by one and given to all."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from prong.core.moments import MeanSquare
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
    meta = {key: {name: _described(value) for name, value in values.items()} for key, values in mine.items()}
    everything: dict[K, dict[str, Any]] = {}
    finish = []
    for rank, described in enumerate(workers.meet(meta)):
        tensors: list[Tensor] = []
        for key, values in described.items():
            everything[key] = dict(values)
            for name, value in values.items():
                if isinstance(value, Tensor):
                    own = mine[key][name] if rank == workers.rank else torch.empty(value.shape, dtype=value.dtype)
                    everything[key][name] = own.to(workers.device).contiguous()  # strides decide how products round
                    tensors.append(everything[key][name])
        finish.append(workers.broadcast_(tensors, rank))
    for end in finish:
        end()
    return everything


def summed(squares: Mapping[K, MeanSquare], zeros: Callable[[K], Tensor], workers: Workers) -> dict[K, MeanSquare]:
    """Mean squares over all workers, given what zeros of each are. Those given stay as they are."""
    if workers.alone:
        return dict(squares)
    parts, shapes = {}, {}
    for key, square in squares.items():
        nothing = zeros(key)
        total = nothing if square.total is None else square.total.to(nothing)
        parts[key] = torch.cat([total.reshape(-1), nothing.new_tensor([square.count])])
        shapes[key] = nothing.shape
    workers.sum_(list(parts.values()))()
    result = {key: MeanSquare() for key in squares}
    for key, part in parts.items():
        result[key].add(part[:-1].view(shapes[key]), float(part[-1]))
    return result


def _described(value: Any) -> Any:
    """A tensor's shape and dtype alone, as one without data; anything else as it is."""
    return value.detach().to("meta") if isinstance(value, Tensor) else value
