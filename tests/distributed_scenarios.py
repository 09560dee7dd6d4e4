"""Trainings that one process and several must agree on. Each is run with the whole batch, or with this rank's part of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import prong
from tests.training import attentive, batches, canonical, convnet, mlp

UPDATES, SIZE = 100, 16
THREE = {"eps": 0.1, "period": 32, "samples": 64, "early": False}  # refreshes after updates 32, 64 and 96
EARLY = {"eps": 0.1, "period": 32, "samples": 64}


@dataclass(frozen=True)
class Place:
    """Which of how many workers this is; one worker trains without torch.distributed."""

    rank: int = 0
    size: int = 1

    def part(self, x: Tensor) -> Tensor:
        """This worker's part of a batch, as large as all others'."""
        return x.chunk(self.size)[self.rank]

    def wrapped(self, model: nn.Module, **options: Any) -> nn.Module:
        """The model as its training loop sees it."""
        return model if self.size == 1 else DistributedDataParallel(model, **options)

    def uneven(self, x: Tensor) -> Tensor:
        """This worker's part: rank 0 has much more than the others, the last nothing but one."""
        sizes = [1] * self.size
        sizes[0] += len(x) - self.size
        return x.split(sizes)[self.rank]


def updates(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]], place: Place
) -> None:
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(place.part(x)), place.part(y)).backward()
        optimizer.step()


def trained(
    place: Place, build: Callable[[], nn.Module] = mlp, ddp: dict[str, Any] | None = None, **options: Any
) -> dict[str, Tensor]:
    """Canonical parameters after the updates; every rank's data are its part of the same batches."""
    model = build()
    data = batches(model, UPDATES, SIZE)
    whole = place.wrapped(model, **(ddp or {}))
    optimizer = prong.PRONG(whole, 0.02, **{**THREE, **options})
    updates(whole, optimizer, data, place)
    assert optimizer.refresher.updates == UPDATES
    return canonical(model)


def with_adam(place: Place) -> dict[str, Tensor]:
    model = prong.whiten_(mlp(), "explicit")
    whole = place.wrapped(model)
    optimizer = torch.optim.Adam(whole.parameters(), 0.01)
    prong.Refresher(whole, optimizer, **EARLY)
    updates(whole, optimizer, batches(model, UPDATES, SIZE), place)
    return canonical(model)


def accumulating(place: Place, **options: Any) -> dict[str, Tensor]:
    """Two passes per update, the first without DDP's reduction."""
    model = mlp()
    whole = place.wrapped(model)
    optimizer = prong.PRONG(whole, 0.02, **EARLY, **options)
    optimizer.loss_scale = 0.5
    for x, y in batches(model, UPDATES, SIZE):
        optimizer.zero_grad()
        for half in (slice(0, SIZE // 2), slice(SIZE // 2, SIZE)):
            first = half.start == 0 and isinstance(whole, DistributedDataParallel)
            with whole.no_sync() if first else contextlib.nullcontext():  # type: ignore[operator]
                loss = F.cross_entropy(whole(place.part(x[half])), place.part(y[half]))
                (loss / 2).backward()
        optimizer.step()
    return canonical(model)


def with_uneven_batches(place: Place, **options: Any) -> dict[str, Tensor]:
    """Each example counts the same, whichever rank has it."""
    model = mlp()
    whole = place.wrapped(model)
    optimizer = prong.PRONG(whole, 0.02, **EARLY, **options)
    for x, y in batches(model, UPDATES, SIZE):
        optimizer.zero_grad()
        loss = F.cross_entropy(whole(place.uneven(x)), place.uneven(y), reduction="sum")
        (loss * place.size / SIZE).backward()
        optimizer.step()
    return canonical(model)


class TwoHeads(nn.Module):
    """A body and two heads, of which each example passes one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](self.body(x).tanh())


def with_layers_that_some_ranks_do_not_use(place: Place) -> dict[str, Tensor]:
    """The first half of every batch goes to one head, the second to the other: of two ranks, each uses one."""
    torch.manual_seed(0)
    model = TwoHeads().double()
    whole = place.wrapped(model, find_unused_parameters=True)
    optimizer = prong.PRONG(whole, 0.02, **EARLY)
    half = SIZE // 2
    heads = (0, 1) if place.size == 1 else (0,) if 2 * place.rank < place.size else (1,)
    for x, y in batches(model, UPDATES, SIZE):
        optimizer.zero_grad()
        for head in heads:
            chosen = slice(head * half, (head + 1) * half) if place.size == 1 else slice(None)
            part, target = (x, y) if place.size == 1 else (place.part(x), place.part(y))
            (F.cross_entropy(whole(part[chosen], head), target[chosen]) / (2 if place.size == 1 else 1)).backward()
        optimizer.step()
    return canonical(model)


def from_a_loader(place: Place, **options: Any) -> dict[str, Tensor]:
    model = mlp()
    source = [place.part(x) for x, _ in batches(model, 5, SIZE, seed=5)]
    whole = place.wrapped(model)
    optimizer = prong.PRONG(whole, 0.02, **{**THREE, "source": source, **options})
    updates(whole, optimizer, batches(model, UPDATES, SIZE), place)
    return canonical(model)


def refreshed(place: Place) -> dict[str, Tensor]:
    """`refresh_` of an explicit model, whose last rank has no batches of its own."""
    model = prong.whiten_(mlp(), "explicit")
    data = [x for x, _ in batches(model, 6, SIZE)]
    mine = data if place.size == 1 else data[place.rank :: place.size - 1] if place.rank < place.size - 1 else []
    prong.refresh_(place.wrapped(model), mine, eps=0.1)
    return {**canonical(model), "U": torch.stack([_gram(site) for site in _sites(model)[:1]])}


def initialized(place: Place) -> dict[str, Tensor]:
    model = mlp(seed=place.rank)  # rank 0 draws for all
    prong.initialize_(model, [place.part(x) for x, _ in batches(model, 4, SIZE)], eps=0.1, scheme=_fixed)
    return canonical(model)


def _fixed(weight: Tensor) -> None:
    generator = torch.Generator().manual_seed(weight.numel())
    rank = dist.get_rank() if dist.is_initialized() else 0
    weight.copy_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype) * (1 + rank))


def _sites(model: nn.Module) -> list[Any]:
    return [site for module in model.modules() if hasattr(module, "sites") for site in module.sites]


def _gram(site: Any) -> Tensor:
    return site.whitening.U.mT @ site.whitening.U


def single(build: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
    return lambda: build(dtype=torch.float32)


# What several processes must agree on with one, by name.
SCENARIOS: dict[str, Callable[[Place], dict[str, Tensor]]] = {
    "plain": trained,
    "plain, early": lambda place: trained(place, early=True),
    "plain, nesterov, weight decay": lambda place: trained(place, nesterov=True, weight_decay=1e-3),
    "plain, float32": lambda place: trained(place, single(mlp)),
    "convnet": lambda place: trained(place, convnet),
    "convnet, float32": lambda place: trained(place, single(convnet)),
    "attention": lambda place: trained(place, attentive, samples=320),
    "balance": lambda place: trained(place, balance=True),
    "balance, convnet": lambda place: trained(place, convnet, balance=True),
    "balance, explicit": lambda place: trained(place, balance=True, form="explicit"),
    "empirical": lambda place: trained(place, gradient_whitening="empirical"),
    "explicit": lambda place: trained(place, form="explicit"),
    "explicit, convnet": lambda place: trained(place, convnet, form="explicit"),
    "explicit, reset": lambda place: trained(place, form="explicit", on_refresh="reset"),
    "plus": lambda place: trained(place, plus=True),
    "plus, convnet": lambda place: trained(place, convnet, plus=True),
    "plus, float32": lambda place: trained(place, single(mlp), plus=True),
    "ema": lambda place: trained(place, source="ema"),
    "overlapping windows": lambda place: trained(place, samples=1024),
    "automatic period": lambda place: trained(place, period="auto", early=True),
    "lag": lambda place: trained(place, lag=5),
    "lag, explicit": lambda place: trained(place, lag=5, form="explicit", early=True),
    "cutoff": lambda place: trained(place, cutoff=1.0),
    "static graph": lambda place: trained(place, ddp={"static_graph": True}),
    "Adam": with_adam,
    "accumulation": accumulating,
    "accumulation, balance": lambda place: accumulating(place, balance=True),
    "uneven batches": with_uneven_batches,
    "uneven batches, plus": lambda place: with_uneven_batches(place, plus=True),
    "unused layers": with_layers_that_some_ranks_do_not_use,
    "loader": from_a_loader,
    "loader, lag": lambda place: from_a_loader(place, lag=3),
    "refresh_": refreshed,
    "initialize_": initialized,
}
