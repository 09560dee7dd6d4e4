"""Trainings on which one process and several must agree, run with whole batches or with a rank's part of them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import prong
from prong.attachment import attachment_of
from tests.training import attentive, batches, canonical, convnet, mlp

UPDATES, SIZE = 100, 16
EVERY_ROW = 1 << 40  # rows of a batch that are looked at: those of a part are others than of the whole
THREE = prong.Every(32, samples=64, growth=None)  # refreshes after updates 32, 64 and 96
EARLY = prong.Every(32, samples=64)  # and before the first, and after 1, 2, 4, 8 and 16
EMPIRICAL = prong.WhitenOutputs("empirical")
PLUS = prong.Explicit(plus=True)
ROUGH = partial(prong.AdamW, eps=1e-5)  # biases of keys have no gradient but rounding errors, not to be scaled


@dataclass(frozen=True)
class Place:
    """Which of how many workers this is; one worker trains without torch.distributed.

    `early` is what they have made before they met.
    """

    rank: int = 0
    size: int = 1
    early: Any = None

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
    place: Place,
    build: Callable[[], nn.Module] = mlp,
    ddp: dict[str, Any] | None = None,
    kind: Callable[..., torch.optim.Optimizer] = prong.PRONG,
    lr: float = 0.02,
    **options: Any,
) -> dict[str, Tensor]:
    """Canonical parameters after the updates; every rank's data are its part of the same batches."""
    model = build()
    data = batches(model, UPDATES, SIZE)
    whole = place.wrapped(model, **(ddp or {}))
    optimizer = kind(whole, lr, **{"refresh": THREE, **options})
    updates(whole, optimizer, data, place)
    assert attachment_of(optimizer).refresher.updates == UPDATES
    return canonical(model)


def nadam(model: nn.Module, lr: float, **options: Any) -> torch.optim.Optimizer:
    """Torch's own optimizer, whose parameters have no names."""
    return prong.attach(model, torch.optim.NAdam(model.parameters(), lr), **options)


def with_adam(place: Place, form: str) -> dict[str, Tensor]:
    """An optimizer that exists already."""
    model = mlp()
    whole = place.wrapped(model)
    optimizer = prong.attach(whole, torch.optim.Adam(whole.parameters(), 0.01), form=form, refresh=EARLY)
    updates(whole, optimizer, batches(model, UPDATES, SIZE), place)
    return canonical(model)


def accumulating(place: Place, lr: float = 0.02, **options: Any) -> dict[str, Tensor]:
    """Two passes per update, the first without DDP's reduction."""
    model = mlp()
    whole = place.wrapped(model)
    optimizer = prong.PRONG(whole, lr, refresh=EARLY, **options)
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
    optimizer = prong.PRONG(whole, 0.02, refresh=EARLY, **options)
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
    optimizer = prong.PRONG(whole, 0.02, refresh=EARLY)
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
    optimizer = prong.PRONG(whole, 0.02, refresh=replace(THREE, source=source, **options))
    updates(whole, optimizer, batches(model, UPDATES, SIZE), place)
    return canonical(model)


def refreshed(place: Place) -> dict[str, Tensor]:
    """`refresh_` of an explicit model, whose last rank has no batches of its own."""
    model = prong.whiten_(mlp(), "explicit")
    data = [x for x, _ in batches(model, 6, SIZE)]
    mine = data if place.size == 1 else data[place.rank :: place.size - 1] if place.rank < place.size - 1 else []
    prong.refresh_(place.wrapped(model), mine)
    return {**canonical(model), "U": torch.stack([_gram(site) for site in _sites(model)[:1]])}


def initialized(place: Place) -> dict[str, Tensor]:
    model = mlp(seed=place.rank)  # rank 0 draws for all
    prong.initialize_(model, [place.part(x) for x, _ in batches(model, 4, SIZE)], scheme=_fixed)
    return canonical(model)


def in_groups(place: Place) -> dict[str, Tensor]:
    """Half of the ranks train one model, the other half another."""
    if place.size == 1:
        return trained(place)
    half = max(1, place.size // 2)
    groups = [dist.new_group(list(range(start, start + half))) for start in (0, half)]
    model, group = mlp(), groups[place.rank // half]
    whole = DistributedDataParallel(model, process_group=group)
    optimizer = prong.PRONG(model, 0.02, refresh=THREE, process_group=group)
    updates(whole, optimizer, batches(model, UPDATES, SIZE), Place(place.rank % half, half))
    return canonical(model)


def joined(place: Place, early: int = 1, **options: Any) -> dict[str, Tensor]:
    """Who has this half of every batch, the first or the second, runs out early; in the end all go on together."""
    model = mlp()
    data = batches(model, UPDATES, SIZE)
    whole = place.wrapped(model)
    optimizer = prong.PRONG(whole, 0.02, refresh=replace(EARLY, **options))
    if place.size == 1:
        updates(whole, optimizer, data[:50], place)
        for x, y in data[50:90]:
            optimizer.zero_grad()
            half = slice(0, SIZE // 2) if early == 1 else slice(SIZE // 2, SIZE)
            (F.cross_entropy(model(x[half]), y[half]) / 2).backward()
            optimizer.step()
    else:
        mine = data[:50] if 2 * place.rank // place.size == early else data[:90]
        with Join([whole, optimizer]):
            updates(whole, optimizer, mine, place)
    updates(whole, optimizer, data[90:], place)
    return canonical(model)


def resumed(
    place: Place, stop: int = 61, through: str = "rank 0", kind: Any = prong.PRONG, **options: Any
) -> dict[str, Tensor]:
    """Training that stops inside a window and goes on elsewhere, from what rank 0 has saved or from a checkpoint."""
    model = mlp()
    data = batches(model, UPDATES, SIZE)
    options = {"refresh": THREE, **options}
    whole = place.wrapped(model)
    optimizer = kind(whole, 0.02, **options)
    if place.size == 1:
        updates(whole, optimizer, data, place)
        return canonical(model)
    updates(whole, optimizer, data[:stop], place)
    other, group = mlp(seed=99), None
    if through == "rank 0":
        attachment_of(optimizer).refresher.synchronize()
        saved = shared([model.state_dict(), optimizer.state_dict()] if place.rank == 0 else None)
    elif through == "checkpoint":
        folder = shared(tempfile.mkdtemp() if place.rank == 0 else None)
        dcp.save({"model": model, "optimizer": prong.distributed.Checkpoint(optimizer)}, checkpoint_id=folder)
        group = dist.new_group(list(range(max(1, place.size // 2))))  # fewer ranks go on
        if place.rank >= place.size // 2:
            return shared_result(None)
        place = Place(place.rank, place.size // 2)
    other_whole = DistributedDataParallel(other, process_group=group)
    other_optimizer = kind(other_whole, 0.1, **options)
    if through == "rank 0":
        other.load_state_dict(saved[0])
        other_optimizer.load_state_dict(saved[1])
    else:
        restored = {"model": other, "optimizer": prong.distributed.Checkpoint(other_optimizer)}
        dcp.load(restored, checkpoint_id=folder, process_group=group)
    updates(other_whole, other_optimizer, data[stop:], place)
    return canonical(other) if through == "rank 0" else shared_result(canonical(other))


def shared(value: Any) -> Any:
    """What rank 0 has."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def shared_result(mine: dict[str, Tensor] | None) -> dict[str, Tensor]:
    return shared(mine)


def sharded(
    place: Place,
    through: str = "",
    build: Callable[[], nn.Module] = mlp,
    kind: Callable[..., torch.optim.Optimizer] = prong.PRONG,
    **options: Any,
) -> dict[str, Tensor]:
    """FSDP2: parameters, gradients and the optimizer's state are spread over the ranks."""
    model = build()
    data = batches(model, UPDATES, SIZE)
    options = {"refresh": THREE, **options}
    if place.size == 1:
        optimizer = kind(model, 0.02, **options)
        updates(model, optimizer, data, place)
        return canonical(model)
    if through == "layers":
        if options.get("form") == "implicit":
            prong.whiten_(model)
        fully_shard(model[0])
        fully_shard(model[2])
    fully_shard(model)
    optimizer = kind(model, 0.02, **options)
    if through == "checkpoint":
        updates(model, optimizer, data[:61], place)
        folder = shared(tempfile.mkdtemp() if place.rank == 0 else None)
        dcp.save({"model": model, "optimizer": prong.distributed.Checkpoint(optimizer)}, checkpoint_id=folder)
        group = dist.new_group(list(range(max(1, place.size // 2))))  # fewer ranks go on
        if place.rank >= place.size // 2:
            return shared_result(None)
        place, data = Place(place.rank, place.size // 2), data[61:]
        model = fully_shard(build(seed=99), mesh=DeviceMesh.from_group(group, "cpu"))  # type: ignore[call-arg]
        optimizer = kind(model, 0.1, **options, process_group=group)
        restored = {"model": model, "optimizer": prong.distributed.Checkpoint(optimizer)}
        dcp.load(restored, checkpoint_id=folder, process_group=group)
    updates(model, optimizer, data, place)
    assert attachment_of(optimizer).refresher.updates == UPDATES
    found = {name: x.full_tensor() for name, x in canonical(model).items()}
    return shared_result(found) if through == "checkpoint" else found


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
    "PRONG": trained,
    "PRONG, early": lambda place: trained(place, refresh=EARLY),
    "PRONG, nesterov, weight decay": lambda place: trained(place, nesterov=True, weight_decay=1e-3),
    "PRONG, float32": lambda place: trained(place, single(mlp)),
    "PRONG, convnet": lambda place: trained(place, convnet),
    "PRONG, convnet, float32": lambda place: trained(place, single(convnet)),
    "PRONG, attention": lambda place: trained(place, attentive, refresh=replace(THREE, samples=320)),
    "PRONG, no bound": lambda place: trained(place, trust=None, damping=prong.Absolute(0.1)),
    "AdamW": lambda place: trained(place, kind=prong.AdamW, refresh=EARLY),
    "AdamW, convnet": lambda place: trained(place, convnet, kind=prong.AdamW),
    "AdamW, attention": lambda place: trained(place, attentive, kind=ROUGH, refresh=EARLY),
    "Muon": lambda place: trained(place, kind=prong.Muon, refresh=EARLY),
    "Muon, convnet": lambda place: trained(place, convnet, kind=prong.Muon),
    "Muon, natural": lambda place: trained(place, kind=prong.Muon, space="natural"),
    "implicit": lambda place: trained(place, form="implicit", refresh=EARLY),
    "implicit, convnet": lambda place: trained(place, convnet, form="implicit"),
    "implicit, attention": lambda place: trained(place, attentive, form="implicit"),
    "empirical": lambda place: trained(place, outputs=EMPIRICAL),
    "explicit": lambda place: trained(place, form="explicit"),
    "explicit, convnet": lambda place: trained(place, convnet, form="explicit"),
    "explicit, reset": lambda place: trained(place, form="explicit", refresh=replace(THREE, state="reset")),
    "materialised": lambda place: trained(place, form="materialised"),
    "plus": lambda place: trained(place, form=PLUS),
    "plus, convnet": lambda place: trained(place, convnet, form=PLUS),
    "plus, float32": lambda place: trained(place, single(mlp), form=PLUS),
    "ema": lambda place: trained(place, refresh=replace(THREE, source="ema")),
    "overlapping windows": lambda place: trained(place, refresh=replace(THREE, samples=1024)),
    "drift": lambda place: trained(place, refresh=prong.OnDrift(samples=64)),
    "lag": lambda place: trained(place, refresh=replace(THREE, lag=5)),
    "lag, explicit": lambda place: trained(place, form="explicit", refresh=replace(EARLY, lag=5)),
    "lag, AdamW": lambda place: trained(place, kind=prong.AdamW, refresh=replace(EARLY, lag=5)),
    "cutoff": lambda place: trained(place, form=prong.Implicit(cutoff=1.0)),
    "static graph": lambda place: trained(place, ddp={"static_graph": True}),
    "Adam, attached": lambda place: with_adam(place, "auto"),
    "Adam, explicit": lambda place: with_adam(place, "explicit"),
    "accumulation": accumulating,
    "accumulation, empirical": lambda place: accumulating(place, outputs=replace(EMPIRICAL, loss_scale=0.5)),
    "uneven batches": with_uneven_batches,
    "uneven batches, plus": lambda place: with_uneven_batches(place, form=PLUS),
    "unused layers": with_layers_that_some_ranks_do_not_use,
    "loader": from_a_loader,
    "loader, lag": lambda place: from_a_loader(place, lag=3),
    "refresh_": refreshed,
    "initialize_": initialized,
    "sub-groups": in_groups,
    "joined": joined,
    "joined, rank 0 runs out": lambda place: joined(place, early=0),
    "joined, ema": lambda place: joined(place, source="ema"),
    "joined, lag": lambda place: joined(place, lag=5),
    "resumed": resumed,
    "resumed, explicit": lambda place: resumed(place, form="explicit"),
    "resumed, AdamW": lambda place: resumed(place, kind=prong.AdamW),
    "resumed, plus": lambda place: resumed(place, form=PLUS),
    "resumed, empirical": lambda place: resumed(place, outputs=EMPIRICAL),
    "resumed, lag": lambda place: resumed(place, stop=66, refresh=replace(THREE, lag=5)),
    "resumed, ema": lambda place: resumed(place, refresh=replace(THREE, source="ema")),
    "resumed, drift": lambda place: resumed(place, refresh=prong.OnDrift(samples=64)),
    "resumed by half of the ranks": lambda place: resumed(place, through="checkpoint"),
    "resumed by half of the ranks, AdamW": lambda place: resumed(place, through="checkpoint", kind=prong.AdamW),
    "resumed by half of the ranks, Muon": lambda place: resumed(place, through="checkpoint", kind=prong.Muon),
    "resumed by half of the ranks, NAdam": lambda place: resumed(place, through="checkpoint", kind=nadam),
    "resumed by half of the ranks, empirical": lambda place: resumed(place, through="checkpoint", outputs=EMPIRICAL),
    "resumed by half of the ranks, plus": lambda place: resumed(place, through="checkpoint", form=PLUS),
    "sharded": sharded,
    "sharded, layer by layer": lambda place: sharded(place, "layers"),
    "sharded, lag": lambda place: sharded(place, refresh=replace(EARLY, lag=5)),
    "sharded, convnet": lambda place: sharded(place, build=convnet, refresh=EARLY),
    "sharded, resumed by half of the ranks": lambda place: sharded(place, "checkpoint"),
    "sharded, attention": lambda place: sharded(place, build=attentive),
    "sharded, implicit": lambda place: sharded(place, form="implicit", refresh=EARLY),
    "sharded, implicit, convnet": lambda place: sharded(place, build=convnet, form="implicit", refresh=EARLY),
    "sharded, implicit, layer by layer": lambda place: sharded(place, "layers", form="implicit"),
    "sharded, AdamW": lambda place: sharded(place, kind=prong.AdamW, refresh=EARLY),
    "sharded, AdamW, attention": lambda place: sharded(place, build=attentive, kind=ROUGH),
    "sharded, AdamW, resumed by half of the ranks": lambda place: sharded(place, "checkpoint", kind=prong.AdamW),
    "sharded, Muon": lambda place: sharded(place, kind=prong.Muon),
}

# Those that every run of the tests tries, with two workers; all of them are tried with four.
CORE = (
    "PRONG, early",
    "PRONG, float32",
    "PRONG, convnet",
    "AdamW",
    "Muon",
    "implicit",
    "explicit",
    "plus, convnet",
    "ema",
    "drift",
    "lag, explicit",
    "lag, AdamW",
    "Adam, attached",
    "accumulation, empirical",
    "uneven batches",
    "unused layers",
    "refresh_",
    "initialize_",
    "sub-groups",
    "joined, rank 0 runs out",
    "resumed",
    "resumed by half of the ranks, NAdam",
    "sharded, convnet",
    "sharded, AdamW, attention",
    "sharded, AdamW, resumed by half of the ranks",
)
