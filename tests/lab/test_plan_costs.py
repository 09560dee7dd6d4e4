"""The cost model counts what torch counts, holds what tensors hold, and grows as it must."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import prong
from prong.core.moments import Moments
from prong.distributed.exchange import owners as shared_out
from prong.lab.models import mlp, transformer_block
from prong.lab.planning import costs
from prong.lab.planning.blocking import block_sizes, fits, fitted, in_blocks
from prong.lab.planning.machines import GPUS, sent_by_all_reduce
from prong.lab.planning.prediction import Prediction, Setting, predict
from prong.lab.planning.subjects import subject
from prong.lab.planning.tracing import Traced, trace
from prong.model.whiten import whitened_sites

A100 = GPUS["a100"]
SETTING = Setting(workers=1, period=1000, samples=12_800, dtype="float32")


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(6, 8, 3, padding=1, groups=2),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3, stride=2),
        nn.ConvTranspose2d(4, 3, 2, stride=2),
        nn.Flatten(),
        nn.Linear(3 * 16 * 16, 5),
    )


MODELS = {
    "mlp, few rows": (lambda: mlp(24, 3), (8, 24)),
    "mlp, many rows": (lambda: mlp(24, 3), (100, 24)),
    "convolutions": (grouped, (3, 6, 18, 18)),
    "one map": (grouped, (1, 6, 18, 18)),
    "transformer": (lambda: transformer_block(32, 4, 64), (4, 16, 32)),
    "transformer, few tokens": (lambda: transformer_block(96, 4, 64), (2, 3, 96)),
}


def flops_of_an_update(model: nn.Module, x: Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        outputs = model(x)
        outputs.backward(torch.ones_like(outputs))
    return int(counter.get_total_flops())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("block", [None, 7], ids=["whole", "blocks"])
def test_preconditioning_costs_what_torch_counts(name: str, block: int | None) -> None:
    """A refreshed model's update has the products of the plain one's and those of the formula."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    traced = in_blocks(trace(make(), torch.empty(shape)), block)
    plain = flops_of_an_update(model, torch.randn(shape))
    prong.refresh_(prong.whiten_(model, prong.Implicit(block=block)), [torch.randn(shape) for _ in range(2)])
    whitened = flops_of_an_update(model, torch.randn(shape))
    added = sum(costs.preconditioning(place, 4).flops for place in traced.places)
    centring = whitened - plain - added  # products with c, a number per row or output
    vectors = sum(
        2 * (p.padded + p.layout.outputs * p.layout.taps) * p.layout.matrices * p.layout.features for p in traced.places
    )
    assert 0 <= centring <= 2 * vectors, (whitened - plain, added)


@pytest.mark.parametrize("name", MODELS)
def test_a_plain_layer_costs_what_torch_counts(name: str) -> None:
    make, shape = MODELS[name]
    traced = trace(make(), torch.empty(shape))
    known = sum(costs.plain_layer(place, 4).flops for place in traced.places)
    if "transformer" in name:  # the rest are products of queries, keys and values
        assert known <= traced.flops
        examples, tokens, width = shape
        with torch.device("meta"):
            on_meta = trace(make(), torch.empty(shape))
        assert on_meta.flops - known == 3 * 2 * 2 * examples * tokens**2 * width
    else:
        assert traced.flops == sum(costs.counted(place) for place in traced.places)
        assert known == traced.flops or any(place.layout.groups > 1 for place in traced.places)


@pytest.mark.parametrize("name", MODELS)
def test_shapes_on_the_meta_device_are_those_of_real_tensors(name: str) -> None:
    make, shape = MODELS[name]
    with torch.device("meta"):
        on_meta = trace(make(), torch.empty(shape))
    real = trace(make(), torch.empty(shape))
    assert on_meta.places == real.places and on_meta.parameters == real.parameters


@pytest.mark.parametrize("name", ["mlp, many rows", "convolutions", "transformer"])
@pytest.mark.parametrize("block", [None, 7], ids=["whole", "blocks"])
def test_bytes_of_whitenings_and_windows_are_those_of_their_tensors(name: str, block: int | None) -> None:
    make, shape = MODELS[name]
    traced = in_blocks(trace(make(), torch.empty(shape)), block)
    model = prong.whiten_(make(), prong.Implicit(block=block))
    optimizer = prong.PRONG(model, 1e-3, refresh=prong.Every(2, samples=10**6))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(shape)).square().mean().backward()
        optimizer.step()
    sites = whitened_sites(model)
    own = {place.name: place for place in traced.places if place.owner == place.name}
    for name, place in own.items():
        _, site = sites[name]
        w = site.whitening
        assert w is not None and w.P is not None
        centre = place.layout.matrices * place.layout.features  # counted though transposed convolutions have none
        assert costs.inverse(place, 4) == 4 * (w.P.numel() + centre)
        assert site.window is not None
        held = 4 * sum(x.numel() for x in site.window.moments.tensors())
        assert held <= costs.window(place)
    shared = {place.name for place in traced.places} - set(own)
    assert shared == ({"self_attn.k", "self_attn.v"} if "self_attn.q" in own else set())


@given(st.integers(1, 300))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_statistics_cost_what_torch_counts(size: int) -> None:
    (place,) = trace(nn.Linear(size, size), torch.empty(size + 70, size)).places
    moments = Moments(1, size)
    with FlopCounterMode(display=False) as counter:
        moments.add(torch.zeros(1, costs.looked_at(place), size))
        held = moments.scatter.numel()
    assert held == size**2
    assert counter.get_total_flops() == costs.statistics(place).flops


def test_a_window_looks_at_as_many_rows_as_the_model_says() -> None:
    layer = nn.Linear(30, 2)
    (place,) = trace(nn.Linear(30, 2), torch.empty(500, 30)).places
    prong.PRONG(layer, 1e-3)
    layer(torch.randn(500, 30))
    (site,) = (site for _, site in whitened_sites(layer).values())
    assert site.window is not None
    assert site.window.moments.count == costs.looked_at(place) < 500


def test_what_is_sent_is_a_triangle_a_mean_and_later_the_inverse() -> None:
    (place,) = trace(nn.Linear(10, 3), torch.empty(4, 10)).places
    assert costs.packed(place) == 4 * (torch.tril_indices(10, 10).shape[1] + 10)
    assert costs.sent_inverse(place) == 4 * (10 * 10 + 10)
    assert costs.sent_inverse(place.blocked(1)) == 4 * (10 + 10)


def test_memory_of_plain_training_is_parameters_gradients_momentum_and_what_the_backward_needs() -> None:
    model, x = nn.Sequential(nn.Linear(5, 7), nn.Sigmoid(), nn.Linear(7, 2)), torch.empty(3, 5)
    traced = trace(model, x)
    parameters = 5 * 7 + 7 + 7 * 2 + 2
    assert traced.parameters == parameters
    assert traced.kept == 4 * (3 * 5 + 3 * 7)  # inputs, and what the sigmoid gave, once for both who need it
    assert plan(traced).sgd_memory == 4 * 3 * parameters + traced.kept


# Laws -----------------------------------------------------------------------------------------------------------------


def plan(traced: Traced, **changed: int) -> Prediction:
    return predict(traced, A100, replace(SETTING, **changed))


def traced(name: str, examples: int) -> Traced:
    what = subject(name)
    return trace(what.on_meta(torch.float32), what.inputs(examples, torch.float32))


def test_with_more_workers_factorisations_take_no_longer_and_no_less_than_their_share() -> None:
    model = traced("autoencoder", 128)
    times = [plan(model, workers=n).total.factorisation for n in (1, 2, 4, 8, 64)]
    assert times == sorted(times, reverse=True)
    assert all(time >= times[0] / n - 1e-12 for time, n in zip(times, (1, 2, 4, 8, 64), strict=True))
    widest = max(costs.factorisation(place).flops for place in model.places) / A100.factorisations
    assert times[-1] >= widest, "a layer is not divided"


def test_one_worker_sends_nothing_and_many_send_twice_what_they_have() -> None:
    model = traced("mlp:64x2", 16)
    alone, many = plan(model), plan(model, workers=1000)
    assert (alone.gradient_bytes, alone.refresh_bytes, alone.reduction, alone.spreading) == (0, 0, 0, 0)
    assert many.gradient_bytes == pytest.approx(2 * 4 * model.parameters, rel=2e-3)
    assert sent_by_all_reduce(100, 2) == 100


@pytest.mark.parametrize(("attribute", "power"), [("factorisation", 3), ("held", 2), ("window", 2), ("spread", 2)])
def test_costs_of_a_wide_layer_grow_with_their_power(attribute: str, power: int) -> None:
    narrow, wide = (getattr(plan(traced(f"mlp:{width}x1", 64)).total, attribute) for width in (8192, 16_384))
    assert math.log2(wide / narrow) == pytest.approx(power, abs=0.15)


def test_blocks_divide_memory_by_their_number_and_factorisations_by_its_square() -> None:
    whole = traced("mlp:16384x1", 64)
    blocks = in_blocks(whole, 2048)
    a, b = plan(whole).total, plan(blocks).total
    assert a.held / b.held == pytest.approx(8, rel=0.01)
    assert a.window / b.window == pytest.approx(8, rel=0.15)
    flops = [costs.factorisation(model.places[0]).flops for model in (whole, blocks)]
    assert flops[0] / flops[1] == 64
    assert b.factorisation < a.factorisation / 8 and b.preconditioning < a.preconditioning


def test_longer_periods_cost_less_and_never_less_than_updates_alone() -> None:
    model = traced("autoencoder", 128)
    costs_all_in = [plan(model, period=period).all_in for period in (1, 10, 100, 1000, 10**6)]
    assert costs_all_in == sorted(costs_all_in, reverse=True)
    assert costs_all_in[-1] >= plan(model).closed > plan(model).sgd


def test_gradients_are_waited_for_as_far_as_the_backward_does_not_hide_them() -> None:
    model = traced("mlp:256x4", 64)
    setting = replace(SETTING, workers=2)
    slow = replace(A100, network_rate=1e6)
    p = predict(model, slow, setting)
    assert p.gradients[0] - p.gradients[1] == pytest.approx(p.total.preconditioning) and p.sgd == pytest.approx(
        p.closed
    )
    never = predict(model, replace(slow, overlap=0.0), setting)
    assert never.gradients == (slow.all_reduce(4 * model.parameters, 2),) * 2
    assert predict(model, A100, setting).gradients == (0.0, 0.0)


def test_a_larger_share_of_the_batch_takes_longer() -> None:
    times = [plan(traced("cifar10", examples)).sgd for examples in (1, 8, 64)]
    assert times == sorted(times)


@given(st.dictionaries(st.text(max_size=3), st.floats(0, 1e6), max_size=8), st.integers(1, 5))
def test_shares_are_at_most_a_third_longer_than_the_best_possible(work: dict[str, float], workers: int) -> None:
    """Graham's bound for longest-first schedules, against lower bounds of the best one."""
    owners = shared_out(work, workers)
    assert set(owners) == set(work)
    loads = [sum(work[name] for name in work if owners[name] == rank) for rank in range(workers)]
    ordered = sorted(work.values(), reverse=True)
    pair = ordered[workers - 1] + ordered[workers] if len(ordered) > workers else 0.0
    least = max([sum(ordered) / workers, *ordered[:1], pair, 0.0])
    assert max(loads) <= (4 / 3) * least * (1 + 1e-9) or max(loads) <= sum(ordered) / workers + ordered[-1]


# Blocks ---------------------------------------------------------------------------------------------------------------


def test_what_fits_is_left_whole_and_what_does_not_is_blocked_from_the_widest_on() -> None:
    model = traced("transformer:16384x1", 16)
    setting = replace(SETTING, workers=8)
    assert fitted(traced("autoencoder", 128), A100, setting, 5.0) == traced("autoencoder", 128)
    chosen = fitted(model, A100, setting, 10.0)
    widths = {place.layout.inputs: place.layout.features for place in chosen.places}
    assert widths[65_536] < 65_536 and widths[65_536] >= widths[16_384] // 2
    assert fits(predict(chosen, A100, setting), A100, 10.0)
    assert not fits(predict(model, A100, setting), A100, 10.0)


def test_where_blocks_do_not_help_the_model_is_left_whole() -> None:
    model = traced("mlp:64x2", 16)
    tiny = replace(A100, memory=1.0)
    assert fitted(model, tiny, SETTING, 2.0) == model


def test_sizes_are_halved_down_to_single_inputs() -> None:
    assert block_sizes(512) == [512, 256, 128, 64, 1]
    assert block_sizes(1) == [1, 1] and block_sizes(10) == [10, 1]
