"""prong.OnDrift: layers are refreshed when their inputs have drifted, each on its own; lag: in another thread."""

from __future__ import annotations

import math
import threading
import warnings
from contextlib import ExitStack
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import prong
from prong.core.factorise import whiten
from prong.core.moments import Moments
from prong.core.whitening import Whitening, whitened_rows
from prong.layers.site import Inputs
from prong.model.estimate import estimate
from prong.model.whiten import whitened_sites
from prong.refresh import factorise
from prong.refresh.apply import whitenings_of
from prong.refresh.drift import ENOUGH, EVERY, FIRST, TOLERANCE, Drift
from prong.refresh.plus import spread_of
from tests.training import DOUBLE, FORMS, OPTIMIZERS, attentive, batches, mlp, refresher_of, resume, run, site_of

forms = pytest.mark.parametrize("form", FORMS)
EXACT = {"rtol": 0.0, "atol": 0.0}


def sample(rows: int, size: int = 8, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(0)
    mix = torch.randn(2, size, size, dtype=DOUBLE)
    torch.manual_seed(seed + 1)
    return torch.randn(2, rows, size, dtype=DOUBLE) @ mix + 1


# The measure ----------------------------------------------------------------------------------------------------------


def measured(rows: torch.Tensor, times: int = ENOUGH, basis: str | None = None) -> float:
    """The drift of these rows against the sample's own."""
    m = Moments(2, 8, DOUBLE)
    m.add(sample(4000))
    w = whiten(m, 0.01, basis)
    drift = Drift()
    for part in (*sample(FIRST * 200, seed=1).chunk(FIRST, dim=1), *rows.chunk(times, dim=1)):
        drift.see(Inputs(part, 0.0, part.shape[1]), w)
    return drift.value()


@pytest.mark.parametrize("basis", [None, "pca"])
def test_drift_is_near_zero_on_the_same_distribution_and_grows_with_change(basis):
    same = sample(ENOUGH * 200, seed=2)
    assert measured(same, basis=basis) < 0.1
    assert measured(1.05 * (same - 1) + 1, basis=basis) < measured(1.4 * (same - 1) + 1, basis=basis)
    assert measured(1.4 * (same - 1) + 1, basis=basis) > TOLERANCE, "wider"
    assert measured(same + 1, basis=basis) > TOLERANCE, "shifted"
    assert measured(same @ torch.linalg.qr(torch.randn(8, 8, dtype=DOUBLE)).Q, basis=basis) > TOLERANCE, "turned"
    assert measured(3 * same, times=ENOUGH - 1, basis=basis) == 0, "too little to tell"


def test_whitened_rows_of_a_thin_p_are_those_of_the_matrix_it_stands_for():
    rows = torch.randn(1, 50, 16, dtype=DOUBLE)
    Q = 0.1 * torch.randn(1, 16, 3, dtype=DOUBLE)
    c = torch.randn(1, 16, dtype=DOUBLE)
    dense = 10 * torch.eye(16, dtype=DOUBLE) - Q @ Q.mT
    found = whitened_rows(rows, Whitening(c, 0.1, P=Q, tail=10.0))
    torch.testing.assert_close(found, whitened_rows(rows, Whitening(c, 0.1, P=dense)), rtol=1e-10, atol=1e-10)


def test_dead_inputs_do_not_drift():
    rows = sample(600)
    rows[..., 3] = 0
    m = Moments(2, 8, DOUBLE)
    m.add(rows)
    drift = Drift()
    for _ in range(FIRST + ENOUGH):
        drift.see(Inputs(rows, 0.0, 600), whiten(m, 0.1))
    assert drift.value() < 0.1


# The schedule ---------------------------------------------------------------------------------------------------------


def refreshed_at(model: nn.Module, optimizer, data) -> dict[str, list[int]]:
    """After which updates each site got a new whitening."""
    refresher = refresher_of(optimizer)
    times: dict[str, list[int]] = {name: [] for name in refresher.sites}
    for x, y in data:
        before = {name: site.whitening for name, (_, site) in refresher.sites.items()}
        run(model, optimizer, [(x, y)])
        for name, (_, site) in refresher.sites.items():
            if site.whitening is not before[name]:
                times[name].append(refresher.updates)
    return times


@forms
def test_layers_are_refreshed_when_and_only_when_their_inputs_drift(form):
    model = mlp()
    optimizer = prong.PRONG(model, 0.0, form=form, refresh=prong.OnDrift(samples=64))
    data = batches(model, 1)[0]
    torch.manual_seed(0)
    still = [(torch.randn_like(data[0]), data[1]) for _ in range(12 * EVERY)]
    times = refreshed_at(model, optimizer, still)
    assert all(t == [1, 2, 4] for t in times.values()), "the first ones, until a window was full; nothing moves at lr 0"
    assert refresher_of(optimizer).next_refresh() is None
    moved = [(x * 3, y) for x, y in still]
    times = refreshed_at(model, optimizer, moved)
    assert len(times["0"]) == 1 or len(times["0"]) == 2
    after = refreshed_at(model, optimizer, moved)
    assert after["0"] == [], "white again"
    whitening, variance = site_of(model).whitening, 9 * torch.cat([x for x, _ in still]).var()
    P = whitening.U.mT @ whitening.U if whitening.P is None else whitening.P
    assert 0.5 < P[0].diagonal().mean() * (variance + whitening.eps) < 2


@forms
def test_only_the_layer_that_drifted_is_refreshed(form):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]).double()
    optimizer = prong.PRONG(model, 0.0, form=form, refresh=prong.OnDrift(samples=64))
    times: dict[int, list[int]] = {0: [], 1: []}
    for update in range(30 * EVERY):
        before = [site_of(model, name).whitening for name in "01"]
        first, second = torch.randn(2, 16, 4, dtype=DOUBLE)
        optimizer.zero_grad()
        (model[0](first).square().mean() + model[1](second * (4 if update > 100 else 1)).square().mean()).backward()
        optimizer.step()
        for i in (0, 1):
            if site_of(model, str(i)).whitening is not before[i]:
                times[i].append(update + 1)
    assert times[0] == [1, 2, 4] and times[1][:3] == [1, 2, 4]
    assert 1 <= len(times[1][3:]) <= 3 and all(t > 100 for t in times[1][3:])


@pytest.mark.parametrize("source", ["window", "ema"])
def test_inputs_that_go_on_growing_are_followed_whatever_the_source(source):
    model = mlp()
    optimizer = prong.PRONG(model, 0.0, refresh=prong.OnDrift(samples=128, source=source))
    growing = [(x * 1.03 ** max(0, i - 40), y) for i, (x, y) in enumerate(batches(model, 240))]
    times = refreshed_at(model, optimizer, growing)["0"]
    assert times[:4] == [1, 2, 4, 8], "until a window was full"
    longest = (FIRST + ENOUGH) * EVERY + 128 // 16  # to tell, and to fill a window
    assert all(later - earlier <= longest for earlier, later in pairwise([*times[3:], 240]))


@forms
def test_the_output_projection_of_attention_is_refreshed_when_its_inputs_drift(form):
    model = attentive()
    optimizer = prong.PRONG(model, 0.0, form=form, refresh=prong.OnDrift(samples=160))
    data = batches(model, 1) * (12 * EVERY)
    run(model, optimizer, data)
    weights = model.state_dict()
    weights["attention.in_proj_weight"][-6:] *= 3
    model.load_state_dict(weights)
    times = refreshed_at(model, optimizer, data)
    assert len(times["attention.out_proj"]) == 1
    assert times["attention.v"] == [], "what it sees has not moved"


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("updates", [EVERY, (FIRST + 1) * EVERY])
def test_a_batch_that_is_dropped_does_not_blind_a_layer_to_later_drift(value, updates):
    model = mlp()
    optimizer = prong.PRONG(model, 0.0, refresh=prong.OnDrift(samples=16))
    x, y = batches(model, 1)[0]
    run(model, optimizer, [(x, y)] * (updates - 1))
    site = site_of(model)
    assert [tap.listening for tap in site.taps] == [True] and site.window is None
    model(x * value)  # and no step, as when a GradScaler skips it
    times = refreshed_at(model, optimizer, [(x, y)] * (12 * EVERY))
    assert times["0"] == []
    times = refreshed_at(model, optimizer, [(3 * x, y)] * (12 * EVERY))
    assert len(times["0"]) == 1


def test_a_layer_that_saw_nothing_finite_since_its_refresh_asks_for_another():
    rows, drift = sample(400), Drift()
    m = Moments(2, 8, DOUBLE)
    m.add(rows)
    for factor in [math.nan] * FIRST + [1.0] * ENOUGH:
        drift.see(Inputs(rows * factor, 0.0, 400), whiten(m, 0.1))
    assert drift.value() > TOLERANCE


@pytest.mark.parametrize("source", ["window", "ema", "loader"])
def test_a_frozen_layer_waits_for_nobody_and_is_refreshed_once_it_is_trained(source):
    model = mlp()
    data = batches(model, 1) * 20
    model[2].requires_grad_(False)
    chosen = [x for x, _ in data] if source == "loader" else source
    optimizer = prong.PRONG(model, 0.0, refresh=prong.OnDrift(samples=64, source=chosen))
    assert refreshed_at(model, optimizer, data)["2"] == [] and site_of(model, "2").whitening is None
    assert refresher_of(optimizer).next_refresh() is None
    model[2].requires_grad_(True)
    times = refreshed_at(model, optimizer, data)
    assert times["2"] == [{"window": 25, "ema": 25, "loader": 21}[source]], "with a window of its own, of four updates"
    assert times["0"] == times["4"] == []


@pytest.mark.parametrize("source", ["window", "ema", "loader"])
def test_a_layer_that_is_never_called_keeps_nobody_waiting(source):
    model = mlp()
    model[4].unused = nn.Linear(6, 4).double()
    data = batches(model, 1) * 20
    chosen = [x for x, _ in data] if source == "loader" else source
    optimizer = prong.PRONG(model, 0.0, refresh=prong.OnDrift(samples=64, source=chosen))
    times = refreshed_at(model, optimizer, data)
    assert times["0"] == ([1] if source == "loader" else [1, 2, 4]) and times["4.unused"] == []
    assert refresher_of(optimizer).next_refresh() is None


def test_a_refresh_by_hand_is_what_later_inputs_are_compared_with():
    model = mlp()
    optimizer = prong.PRONG(model, 0.0, refresh=prong.OnDrift(samples=64))
    x, y = batches(model, 1)[0]
    run(model, optimizer, [(x, y)] * (12 * EVERY))
    prong.refresh_(model, 3 * x)
    assert refreshed_at(model, optimizer, [(3 * x, y)] * (12 * EVERY))["0"] == []


REFRESHES = {
    "drift": prong.OnDrift(samples=48),
    "lag": prong.Every(8, samples=48, lag=3),
    "drift, lag": prong.OnDrift(samples=48, lag=2),
}


def test_a_loader_is_asked_when_something_drifts():
    model = mlp()
    data = batches(model, 4)
    loader = [x for x, _ in data]
    optimizer = prong.PRONG(model, 0.0, refresh=prong.OnDrift(samples=64, source=loader))
    same = [(x, y) for x, y in data] * 30
    assert all(t == [1] for t in refreshed_at(model, optimizer, same[: 10 * EVERY]).values())
    loader[:] = [3 * x for x in loader]
    times = refreshed_at(model, optimizer, [(3 * x, y) for x, y in same[: 10 * EVERY]])
    assert len(times["0"]) >= 1


@pytest.mark.parametrize("refresh", REFRESHES.values(), ids=REFRESHES)
@pytest.mark.parametrize("name", ["PRONG-auto", "PRONG-explicit", "AdamW-auto"])
def test_stopping_at_any_update_and_resuming_changes_nothing(name, refresh):
    data = [(x * (1 + i / 10), y) for i, (x, y) in enumerate(batches(mlp(), 36))]
    begin = lambda model: (model, OPTIMIZERS[name](model, 0.01, refresh=refresh))  # noqa: E731
    resume(mlp, begin, data, [3, 17, 18, 26])


# In another thread ----------------------------------------------------------------------------------------------------


@forms
def test_a_refresh_with_a_lag_is_the_same_refresh_later(form, monkeypatch):
    threads = []
    original = factorise.factorise
    monkeypatch.setattr(
        factorise, "factorise", lambda *a: threads.append(threading.current_thread().name) or original(*a)
    )
    model = mlp()
    optimizer = prong.PRONG(model, 0.0, form=form, refresh=prong.Every(16, samples=64, lag=3, growth=1.0))
    times = refreshed_at(model, optimizer, batches(model, 1) * 40)
    # Where refreshes are closer than the lag, a waiting one is applied when the next is due.
    assert times["0"] == [1, 2, 4, 7, 11, 19, 35], "the first is made at once, before the first step"
    assert len(threads) == 7 and all(name.startswith("prong") for name in threads[1:])
    now = mlp()
    immediate = prong.PRONG(now, 0.0, form=form, refresh=prong.Every(16, samples=64, growth=1.0))
    run(now, immediate, batches(now, 1) * 32)
    kept = "P" if form in ("auto", "implicit") else "U"
    torch.testing.assert_close(getattr(site_of(model).whitening, kept), getattr(site_of(now).whitening, kept), **EXACT)


@pytest.mark.parametrize("part", [False, True], ids=["all", "part"])
def test_a_refresh_by_hand_is_not_overwritten_by_an_older_one_under_way(part):
    model = mlp()
    optimizer = prong.PRONG(model, 0.0, refresh=prong.Every(16, samples=64, lag=5, growth=1.0))
    times = refreshed_at(model, optimizer, batches(model, 1) * 18)
    assert times["4"][-1] == 13, "that of update 16 is under way"
    before, x = site_of(model, "4").whitening, 3 * batches(model, 1)[0][0]
    prong.refresh_(model[:3] if part else model, x)
    by_hand = site_of(model).whitening
    run(model, optimizer, batches(model, 1) * 8)
    assert site_of(model).whitening is by_hand
    assert site_of(model, "4").whitening is not before, "also where only the older one tells of it"


@forms
def test_the_function_is_kept_when_a_refresh_is_applied_in_mid_training(form):
    model = mlp()
    optimizer = prong.PRONG(model, 0.05, form=form, refresh=prong.Every(8, samples=32, lag=2))
    probe = batches(model, 1)[0][0]
    held = []
    refresher = refresher_of(optimizer)
    original = refresher._change
    refresher._change = lambda *new: (held.append(model.eval()(probe)), original(*new), held.append(model(probe)))
    for pair in batches(model, 20):
        model.train()
        run(model, optimizer, [pair])
    assert len(held) >= 6
    for before, after in zip(held[::2], held[1::2], strict=True):
        torch.testing.assert_close(after, before, rtol=1e-10, atol=1e-10)


def test_what_goes_wrong_in_the_thread_is_raised_when_the_refresh_is_due(monkeypatch):
    model = mlp()
    optimizer = prong.PRONG(model, 0.0, refresh=prong.Every(8, samples=32, lag=2))

    def broken(*_):
        raise FloatingPointError("layer '0': broken")

    pair = batches(model, 1)[0]
    run(model, optimizer, [pair])
    monkeypatch.setattr(factorise, "factorise", broken)
    run(model, optimizer, [pair] * 2)
    with pytest.raises(FloatingPointError, match="broken"):  # of the refresh of update 2
        run(model, optimizer, [pair])


def test_with_plus_every_update_rescales_also_while_a_refresh_is_under_way():
    model = mlp()
    refresh = prong.Every(8, samples=64, lag=3)
    optimizer = prong.PRONG(model, 0.01, form=prong.Explicit(plus=True), refresh=refresh)
    for pair in batches(model, 30):
        before = site_of(model).whitening
        run(model, optimizer, [pair])
        assert site_of(model).whitening is not before
        assert spread_of(site_of(model)).total is None


@forms
def test_a_refresh_under_way_follows_the_model_to_another_precision(form):
    model = mlp().float()
    optimizer = prong.PRONG(model, 0.01, form=form, refresh=prong.Every(4, samples=32, lag=3))
    data = batches(mlp(), 12)
    run(model, optimizer, [(x.float(), y) for x, y in data[:4]])
    model.double()
    run(model, optimizer, data[4:])
    assert next(iter(model.parameters())).dtype == DOUBLE
    assert site_of(model).whitening.c.dtype == DOUBLE


def test_folding_forgets_a_refresh_under_way():
    model = mlp()
    optimizer = prong.PRONG(model, 0.0, refresh=prong.Every(64, samples=32, lag=20))
    run(model, optimizer, batches(model, 1) * 3)
    prong.fold_(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x, y = batches(model, 1)[0]
        F.cross_entropy(model(x), y).backward()
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (lambda: {"refresh": "sometimes"}, TypeError, "prong.OnDrift"),
        (lambda: {"refresh": prong.OnDrift(lag=-1)}, ValueError, "lag"),
        (lambda: {"refresh": prong.Every(lag=1.5)}, TypeError, "lag"),
        (lambda: {"refresh": prong.OnDrift(), "form": prong.Explicit(plus=True)}, ValueError, "hides drift"),
        (lambda: {"refresh": prong.Never(), "outputs": prong.WhitenOutputs()}, ValueError, "training forwards"),
        (lambda: {"refresh": prong.Every(source=[]), "outputs": prong.WhitenOutputs()}, ValueError, "forwards"),
    ],
)
def test_what_makes_no_sense_is_refused(options, error, message):
    model = mlp()
    with pytest.raises(error, match=message):
        prong.PRONG(model, 0.1, **options())
    assert type(model[0]) is nn.Linear


def test_another_thread_asks_nothing_of_layers_that_are_being_saved():
    """While an explicit layer's state_dict is made, its parameters have other names."""
    model = prong.whiten_(mlp(), "explicit")
    sites = whitened_sites(model)
    moments = estimate(model, [x for x, _ in batches(model, 3)], None)
    expected = whitenings_of(sites, moments, 0.1)
    requests = factorise.requests_of(sites, moments, 0.1)
    with ExitStack() as stack:
        for layer, _ in sites.values():
            stack.enter_context(layer._as_plain())
        found = factorise.factorise(requests, warnings.warn)
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name].U, expected[name].U, **EXACT)
