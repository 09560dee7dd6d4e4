"""What several workers do that one cannot: refuse together, and say who is to blame. Run by `distributed_worker`.

Each function raises if something is wrong, on any rank, and returns what its ranks must have in common.
"""

from __future__ import annotations

import io
import re
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import prong
from prong.attachment import attachment_of
from prong.distributed import Workers
from prong.distributed.exchange import owners
from prong.model.whiten import whitened_sites
from prong.refresh.refresher import Refresher
from tests.distributed_scenarios import EMPIRICAL, PLUS, SIZE, Place, updates
from tests.training import batches, canonical, convnet, mlp, run

EVERY = prong.Every(8, samples=64)


def message(kind: type[Exception], what: Callable[[], Any]) -> str:
    """What it says when it refuses, as it must."""
    try:
        what()
    except kind as error:
        return str(error)
    raise AssertionError(f"expected {kind.__name__}")


def whitenings(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": x.clone()
        for name, (_, site) in whitened_sites(model).items()
        if site.whitening is not None
        for key, x in site.whitening.items()
        if isinstance(x, Tensor)
    }


def unchanged(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def ddp(
    kind: Any = prong.PRONG, seed: int = 0, wrapped: Any = DistributedDataParallel, **options: Any
) -> tuple[nn.Module, nn.Module, Any]:
    model = mlp(seed=seed)
    whole = wrapped(model)
    return model, whole, kind(whole, 0.02, **{"refresh": EVERY, **options})


def refresher_of(optimizer: torch.optim.Optimizer) -> Refresher:
    return attachment_of(optimizer).refresher


def made_too_early() -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """Optimizers that are there before the ranks have met; `distributed_worker` calls this."""
    models = [mlp(), mlp()]
    made = [prong.PRONG(models[0], 0.02), prong.attach(models[1], torch.optim.AdamW(models[1].parameters()))]
    return list(zip(models, made, strict=True))


def made_before_the_group(place: Place) -> list[str]:
    """Such an optimizer would whiten by its rank's data alone: its first step says what to do, and changes nothing."""
    said = []
    trained, whole, other = ddp()
    updates(whole, other, batches(trained, 3, SIZE), place)
    place.early[0][1].load_state_dict(other.state_dict())
    for model, optimizer in place.early:
        whole, before = DistributedDataParallel(model), canonical(model)
        data = batches(model, 1, SIZE)
        said.append(message(RuntimeError, lambda: updates(whole, optimizer, data, place)))  # noqa: B023
        assert "call init_process_group first, then make the optimizer" in said[-1], said
        unchanged(before, canonical(model))
    return said


def wrapped_early_or_late(place: Place) -> dict[str, Tensor]:
    """Ranks that begin with other weights, and see other data, have the same bits however they came together."""
    found = {}
    for form in ("auto", "implicit", "explicit", "materialised"):
        for late in (False, True):
            model = mlp(dtype=torch.float32, seed=place.rank)
            whole = model if late else DistributedDataParallel(model)
            optimizer = prong.PRONG(whole, 0.02, form=form, refresh=EVERY)
            whole = DistributedDataParallel(model) if late else whole
            updates(whole, optimizer, batches(model, 20, SIZE), place)
            found |= {f"{form}.{late}.{name}": x for name, x in {**canonical(model), **whitenings(model)}.items()}
    for name in found:
        torch.testing.assert_close(found[name], found[name.replace("True", "False")], rtol=0, atol=0)
    return found


class Wide(nn.Module):
    """Layers so wide that how many rows they see decides how they are whitened; some ranks use another one later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late, self.last = nn.Linear(300, 300), nn.Linear(300, 300), nn.Linear(300, 4)

    def forward(self, x: Tensor, late: bool = False) -> Tensor:
        x = self.first(x).tanh()
        return self.last(self.late(x).tanh() if late else x)


def blocks_are_the_same_for_all(place: Place) -> dict[str, Any]:
    """Of ranks whose first batches differ in size, the smallest block wins; all come to the bits of one choice."""
    found: dict[str, Any] = {}
    for kind in (prong.PRONG, prong.AdamW):
        for before in (False, True):  # whether somebody looks at the inputs before training begins
            torch.manual_seed(0)
            model = Wide()
            whole = DistributedDataParallel(model, find_unused_parameters=True)
            optimizer = kind(whole, 1e-3, form=prong.Auto(memory=100.0), refresh=prong.Every(4, samples=256))
            torch.manual_seed(place.rank)
            size = 200 if place.rank == place.size - 1 else 40
            if before:
                prong.refresh_(whole, iter([torch.randn(size, 300), torch.randn(size, 300)]))
                assert {"first", "last"} == {name for name, (_, s) in whitened_sites(model).items() if s.whitening}
            for update in range(12):
                optimizer.zero_grad()
                late = update >= 6 and place.rank > 0
                whole(torch.randn(size, 300), late).square().mean().backward()
                optimizer.step()
            sizes = {name: (site.layout.block, site.rank) for name, (_, site) in whitened_sites(model).items()}
            assert sizes["first"] == sizes["last"] == ((None, 22) if kind is prong.PRONG else (22, None)), sizes
            assert all(site.whitening for _, site in whitened_sites(model).values())
            found[f"{kind.__name__}.{before}"] = {**sizes, **canonical(model), **whitenings(model)}
    return found


def nan_on_one_rank(place: Place) -> str:
    """All refuse the update in which one rank's data are NaN; the rest of training is as if it had not been there."""
    model, whole, optimizer = ddp()
    data = batches(model, 12, SIZE)
    updates(whole, optimizer, data[:6], place)
    before, white = canonical(model), whitenings(model)
    x, y = data[6][0].clone(), data[6][1]
    x[-1] = torch.nan  # of the last rank
    said = message(FloatingPointError, lambda: updates(whole, optimizer, [(x, y)], place))
    assert re.search(rf"rank {place.size - 1}: layer '0'.*NaN", said), said
    assert not re.search(r"rank 0", said), said
    unchanged(before, canonical(model))
    unchanged(white, whitenings(model))
    assert refresher_of(optimizer).updates == 6
    updates(whole, optimizer, data[7:], place)

    other, other_whole, other_optimizer = ddp()
    updates(other_whole, other_optimizer, data[:6] + data[7:], place)
    unchanged(canonical(other), canonical(model))
    return said


def nan_in_a_loader(place: Place) -> str:
    """A refresh from a loader is refused by all; the last good whitening stays."""
    model, _, optimizer = ddp()
    good = [x for x, _ in batches(model, 3, SIZE)]
    refresher_of(optimizer).refresh(good)
    white = whitenings(model)
    bad = [x * (torch.nan if place.rank == place.size - 1 else 1) for x in good]
    said = message(FloatingPointError, lambda: refresher_of(optimizer).refresh(bad))
    assert said.startswith(f"on rank {place.size - 1}: layer '0'"), said
    also = message(FloatingPointError, lambda: prong.initialize_(model, bad))
    assert also.startswith(f"on rank {place.size - 1}: layer '0'"), also
    unchanged(white, whitenings(model))
    return said


def nan_under_plus(place: Place) -> str:
    """Rescaling after an update is refused by all, too: here no window is open that would have noticed before."""
    model, whole, optimizer = ddp(form=PLUS, refresh=prong.Every(20, samples=16, growth=None))
    data = batches(model, 22, SIZE)
    updates(whole, optimizer, data[:20], place)
    x = data[21][0].clone()
    x[-1] = torch.nan
    said = message(FloatingPointError, lambda: updates(whole, optimizer, [(x, data[21][1])], place))
    assert said.startswith(f"on rank {place.size - 1}: layer '0'"), said
    return said


def trained_again(place: Place) -> list[bool]:
    """Where drift decides, a layer that was frozen is refreshed once all workers together have filled a window."""
    model = mlp()
    model[2].requires_grad_(False)
    optimizer = prong.PRONG(model, 0.0, refresh=prong.OnDrift(samples=4 * SIZE))
    data = batches(model, 16, SIZE)
    updates(model, optimizer, data[:10], place)
    model[2].requires_grad_(True)
    white = []
    for pair in data[10:]:
        updates(model, optimizer, [pair], place)
        white.append(whitened_sites(model)["2"][1].whitening is not None)
    assert white == [False] * 4 + [True] * 2, white
    return white


def broken_loader(place: Place) -> str:
    """What one rank raises while statistics are gathered, all raise: nobody waits for it."""
    model, _, optimizer = ddp()
    good = [x for x, _ in batches(model, 3, SIZE)]

    def batches_of_this_rank() -> Any:
        yield good[0][:4]
        if place.rank == place.size - 1:
            raise OSError("the disk is gone")
        yield good[1]

    for gather in (refresher_of(optimizer).refresh, lambda good: prong.initialize_(model, good)):
        said = message(OSError, lambda: gather(batches_of_this_rank()))  # noqa: B023
        assert f"rank {place.size - 1}: the disk is gone" in said, said
        assert not whitenings(model)
    return said


def too_large_together(place: Place) -> str:
    """Each rank's squares are finite, their sum is not: only the owner of the factorisation sees it, and all refuse."""
    torch.manual_seed(0)
    model = prong.whiten_(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)))
    prong.refresh_(model, torch.randn(8, 3))
    white = whitenings(model)
    huge = 1e19 * torch.tensor([[1.0, 0, 0], [-1.0, 0, 0]])
    said = message(FloatingPointError, lambda: prong.refresh_(model, huge))
    assert "layer '0'" in said and "too large" in said, said
    unchanged(white, whitenings(model))
    return said


def nobody_saw_anything(place: Place) -> str:
    """The warning of one process is the warning of all, and the refresh after the next update works."""
    model, whole, optimizer = ddp(refresh=prong.Every(2, samples=64, growth=None))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.step()
    (said,) = {str(w.message) for w in caught}
    updates(whole, optimizer, batches(model, 4, SIZE), place)
    assert whitenings(model)
    return said


def states_agree(place: Place) -> dict[str, Any]:
    """Inside a window ranks differ; `synchronize` makes them the same, whatever is being gathered."""
    states = {}
    for name, options in {
        "window": {},
        "materialised": {"kind": prong.AdamW},
        "ema": {"refresh": replace(EVERY, source="ema")},
        "drift": {"refresh": prong.OnDrift(samples=64)},
        "empirical": {"outputs": EMPIRICAL},
        "lag": {"refresh": replace(EVERY, lag=3)},
    }.items():
        model, whole, optimizer = ddp(**options)
        updates(whole, optimizer, batches(model, 18, SIZE), place)
        assert (optimizer.state_dict()["prong"]["pending"] is not None) == (name == "lag")
        refresher_of(optimizer).synchronize()
        states[name] = optimizer.state_dict()
    return states


def rank_zeros_own_state_is_sound(place: Place) -> dict[str, Tensor]:
    """Saved by rank 0 without asking the others, a state is loaded by all, and they stay together."""
    model, whole, optimizer = ddp()
    data = batches(model, 20, SIZE)
    updates(whole, optimizer, data[:13], place)
    saved = [[model.state_dict(), optimizer.state_dict()] if place.rank == 0 else None]
    dist.broadcast_object_list(saved)
    assert saved[0] is not None
    other, other_whole, other_optimizer = ddp()
    other.load_state_dict(saved[0][0])
    other_optimizer.load_state_dict(saved[0][1])
    updates(other_whole, other_optimizer, data[13:], place)
    return {**canonical(other), **whitenings(other)}


def each_ranks_own_state_resumes(place: Place) -> dict[str, Any]:
    """Inside a window, under way or not, each rank saves and loads its own state, and nobody calls anything else."""
    found = {}
    for name, stop, options in (
        ("window", 13, {}),
        ("sharded", 13, {"wrapped": fully_shard}),
        ("sharded, AdamW", 13, {"wrapped": fully_shard, "kind": prong.AdamW}),
        ("before the first update", 0, {}),
        ("no window", 9, {"refresh": prong.Every(32, samples=64)}),
        ("lag", 18, {"refresh": replace(EVERY, lag=4)}),
        ("AdamW", 13, {"kind": prong.AdamW}),
        ("AdamW, lag", 18, {"kind": prong.AdamW, "refresh": replace(EVERY, lag=4)}),
        ("explicit, lag", 18, {"form": "explicit", "refresh": replace(EVERY, lag=4)}),
        ("Muon, ema", 13, {"kind": prong.Muon, "refresh": replace(EVERY, source="ema")}),
        ("drift", 21, {"refresh": prong.OnDrift(samples=64)}),
        ("empirical", 13, {"outputs": EMPIRICAL}),
        ("drawn", 13, {"outputs": prong.WhitenOutputs("categorical")}),
    ):
        model, whole, optimizer = ddp(**options)
        data = batches(model, 40, SIZE)
        updates(whole, optimizer, data[:stop], place)
        saved = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], saved)
        updates(whole, optimizer, data[stop:], place)

        saved.seek(0)
        states = torch.load(saved, weights_only=True)
        assert (states[1]["prong"]["pending"] is not None) == ("lag" in name), name
        other, other_whole, other_optimizer = ddp(**options, seed=99)
        other.load_state_dict(states[0])
        other_optimizer.load_state_dict(states[1])
        updates(other_whole, other_optimizer, data[stop:], place)
        unchanged(canonical(model), canonical(other))
        unchanged(whitenings(model), whitenings(other))
        found[name] = {key: x.full_tensor() if hasattr(x, "full_tensor") else x for key, x in canonical(model).items()}
    return found


def sharded_parameters(place: Place) -> list[str]:
    """A forward before the step leaves whole parameters behind, which changes nothing; what has no rows is left out."""
    found = []
    for looks in (False, True):
        model, _, optimizer = ddp(wrapped=fully_shard, kind=prong.AdamW)
        for x, y in batches(model, 20, SIZE):
            optimizer.zero_grad()
            F.cross_entropy(model(place.part(x)), place.part(y)).backward()
            if looks:
                with torch.no_grad():
                    model.eval()(x)
                    model.train()
            optimizer.step()
        found.append(canonical(model))
    unchanged(*found)

    sharded = fully_shard(convnet())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = prong.AdamW(sharded, 0.01, refresh=EVERY)
    (said,) = {str(w.message) for w in caught}
    assert said.startswith("prong leaves as they are: '2', which are grouped"), said
    updates(sharded, optimizer, batches(sharded, 10, SIZE), place)
    assert {name.partition(".")[0] for name in whitenings(sharded)} == {"0", "5"}
    prong.fold_(sharded)
    assert type(sharded[0]) is nn.Conv2d and not whitened_sites(sharded)
    return [said]


def whitenings_are_the_same_bits(place: Place) -> dict[str, Tensor]:
    """Also of layers that are factorised in threads of another number, and of those that share their statistics."""
    torch.set_num_threads(1 + place.rank % 2)
    found = {}
    for form in ("implicit", "explicit"):
        torch.manual_seed(0)
        model = prong.whiten_(
            nn.ModuleDict({"wide": nn.Linear(150, 3), "attention": nn.MultiheadAttention(12, 2, batch_first=True)}),
            form,
        )
        torch.manual_seed(place.rank)
        wide, tokens = torch.randn(400, 150), torch.randn(30, 5, 12)

        def forward(model: Any, batch: Any, wide: Tensor = wide, tokens: Tensor = tokens) -> None:
            model["wide"](wide)
            model["attention"](tokens, tokens, tokens)

        prong.refresh_(model, [wide], forward=forward)
        sites = model["attention"].sites
        assert all(site.whitening is sites[0].whitening for site in sites)
        found |= {f"{form}.{name}": x for name, x in whitenings(model).items()}
        found |= {f"{form}.{name}": x for name, x in canonical(model).items()}
    torch.set_num_threads(1)
    return found


def what_rounding_has_parted_a_refresh_joins(place: Place) -> dict[str, Tensor]:
    """Ranks that compute steps with other last bits (other devices, other numbers of threads) do not drift apart."""
    found = {}
    for kind in (prong.PRONG, prong.AdamW, prong.Muon):
        model, whole, optimizer = ddp(kind)
        data = batches(model, 17, SIZE)
        updates(whole, optimizer, data[:15], place)
        with torch.no_grad():
            for parameter in (layer.pair(site)[0] for layer, site in whitened_sites(model).values()):
                parameter.mul_(1 + 1e-14 * place.rank)
                for state in optimizer.state[parameter].values():
                    state.mul_(1 + (1e-14 * place.rank if state.dim() else 0))
        updates(whole, optimizer, data[15:], place)  # of which the first ends with a refresh
        found |= {f"{kind.__name__}.{name}": x for name, x in canonical(model).items()}
    return found


def gradients_are_whitened_to_the_same_bits(place: Place) -> dict[str, Tensor]:
    """Also where a matrix is laid out otherwise by the rank that computed it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 3))
    whole = DistributedDataParallel(model)
    optimizer = prong.PRONG(whole, 1e-2, refresh=prong.Every(10, samples=128), outputs=EMPIRICAL)
    updates(whole, optimizer, [(torch.randn(32, 20), torch.randint(3, (32,))) for _ in range(30)], place)
    return canonical(model)


def nobody_keeps_the_wrapper(place: Place) -> bool:
    """Nor the group: whoever is the last to hold it waits for its threads, perhaps for ever, or they outlive Python."""
    model, whole, optimizer = ddp()
    updates(whole, optimizer, batches(model, 3, SIZE), place)
    kept = weakref.ref(whole)
    del whole
    assert kept() is None
    assert refresher_of(optimizer).workers.group is None
    return True


def factorisations_are_shared_out(place: Place) -> list[int]:
    """With as many equal layers as there are ranks, each factorises one."""
    assert sorted(owners(dict.fromkeys(range(place.size), 1.0), place.size).values()) == list(range(place.size))
    return list(owners({"a": 8.0, "b": 5.0, "c": 4.0, "d": 3.0}, 2).values())


def one_large_exchange_per_refresh(place: Place) -> list[int]:
    """Triangles, packed, go in one all-reduce; all else that is added up is as small as the means are."""
    model = prong.whiten_(nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 2)))
    sizes: list[int] = []
    original = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        prong.refresh_(model, torch.randn(64, 40))
    finally:
        dist.all_reduce = original
    assert sizes == [40 + 30 + 20, (40 * 41 + 30 * 31 + 20 * 21) // 2], sizes
    return sizes


def refusals(place: Place) -> list[str]:
    """What cannot work says so before training, and changes nothing."""
    said = []
    model = fully_shard(mlp())
    for options in ({"form": "explicit"}, {"form": PLUS}, {"outputs": EMPIRICAL}):
        said.append(message(ValueError, lambda options=options: prong.PRONG(model, 0.1, **options)))
        assert "sharded" in said[-1] and type(model[0]) is nn.Linear, said
    said.append(message(ValueError, lambda: prong.initialize_(model, torch.randn(4, 6).double())))
    outside = dist.new_group([0])
    if place.rank > 0:
        assert "not in the process group" in message(ValueError, lambda: prong.PRONG(mlp(), process_group=outside))
    for held in ({"form": "explicit"}, {"kind": prong.AdamW}):
        _, whole, optimizer = ddp(**held)
        said.append(message(ValueError, lambda: Join([whole, optimizer])))  # noqa: B023
    inner = mlp()
    whole = DistributedDataParallel(inner)
    said.append(message(ValueError, lambda: Join([whole, prong.PRONG(inner)])))
    prong.fold_(inner)
    optimizer = prong.PRONG(whole, 0.1, refresh=EVERY)
    data = batches(inner, 1, SIZE)

    def join_of_the_model_alone() -> None:
        with whole.join():
            updates(whole, optimizer, data, place)

    said.append(message(RuntimeError, join_of_the_model_alone))
    assert "Join([model, optimizer])" in said[-1]
    return said


def alone_in_a_group(place: Place) -> dict[str, Tensor]:
    """A group of one is one process: nobody else is waited for."""
    groups = [dist.new_group([rank]) for rank in range(place.size)]
    model = mlp()
    if place.rank == 0:
        run(model, prong.PRONG(model, 0.02, refresh=EVERY, process_group=groups[0]), batches(model, 10, SIZE))
    assert Workers.of(model, groups[place.rank]).alone
    values = [canonical(model)]
    dist.broadcast_object_list(values)
    return values[0]


BEHAVIOUR: dict[str, Callable[[Place], Any]] = {
    behaviour.__name__: behaviour
    for behaviour in (
        made_before_the_group,
        wrapped_early_or_late,
        blocks_are_the_same_for_all,
        each_ranks_own_state_resumes,
        sharded_parameters,
        nan_on_one_rank,
        nan_in_a_loader,
        nan_under_plus,
        trained_again,
        broken_loader,
        too_large_together,
        nobody_saw_anything,
        states_agree,
        rank_zeros_own_state_is_sound,
        whitenings_are_the_same_bits,
        what_rounding_has_parted_a_refresh_joins,
        gradients_are_whitened_to_the_same_bits,
        nobody_keeps_the_wrapper,
        factorisations_are_shared_out,
        one_large_exchange_per_refresh,
        refusals,
        alone_in_a_group,
    )
}
