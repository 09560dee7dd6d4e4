"""The monitor tells what dense eigendecompositions tell, and training does not notice it."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import prong
from prong.analysis.conditioning import condition_number, drift_from_white, input_spectrum, whitened_spectrum
from prong.analysis.monitor import Monitor
from prong.analysis.observation import Seen
from prong.core.factorise import whiten
from prong.core.moments import Moments
from prong.core.whitening import Whitening
from prong.layers.plain import plain_kind
from prong.layers.site import Inputs
from prong.model.whiten import whitened_sites
from tests.closeness import assert_close
from tests.training import attentive, batches, canonical, convnet, mlp, run, train

DOUBLE = torch.float64
EXACT = {"rtol": 0.0, "atol": 0.0}


def sample(rows: int, size: int = 6, groups: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(groups, size, size, generator=generator, dtype=DOUBLE)
    return torch.randn(groups, rows, size, generator=generator, dtype=DOUBLE) @ mix + 1


def moments(rows: Tensor) -> Moments:
    m = Moments(rows.shape[0], rows.shape[2], DOUBLE)
    m.add(rows)
    return m


def dense(w: Whitening) -> Tensor:
    """P written out."""
    if w.U is not None:
        return w.U.mT @ w.U
    return w.P if w.tail == 0 else w.tail * torch.eye(w.P.shape[1], dtype=DOUBLE) - w.P @ w.P.mT


def written_out(rows: Tensor, w: Whitening) -> Tensor:
    """The eigenvalues of U S U^T, group by group, example by example; any U with U^T U = P has the same."""
    found = []
    for group, P in zip(range(len(rows)), dense(w), strict=True):
        c = 0 if w.c is None else w.c[group]
        S = sum(torch.outer(h - c, h - c) for h in rows[group]) / rows.shape[1]
        U = torch.linalg.cholesky(P).mT
        found.append(torch.linalg.eigvalsh(U @ (S + w.eps * torch.eye(len(P), dtype=DOUBLE)) @ U.mT))
    return torch.cat(found).sort(descending=True).values


# The numbers ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(2, 12),
    size=st.integers(1, 8),
    groups=st.integers(1, 3),
    seed=st.integers(0, 99),
    centred=st.booleans(),
)
def test_the_spectrum_is_that_of_the_covariance_with_few_rows_and_with_many(rows, size, groups, seed, centred):
    h = sample(rows, size, groups, seed)
    found = input_spectrum(moments(h), centred)
    expected = []
    for part in h:
        c = part.mean(0) if centred else torch.zeros(size, dtype=DOUBLE)
        expected.append(torch.linalg.eigvalsh(sum(torch.outer(x - c, x - c) for x in part) / rows))
    assert_close(found, torch.cat(expected).clamp(min=0).sort(descending=True).values)


@pytest.mark.parametrize("rows", [4, 50], ids=["few", "many"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", ["pca", "zca", "cholesky", None, "thin"])
@pytest.mark.parametrize("centred", [True, False])
def test_drift_and_condition_are_those_of_the_matrix_written_out(kind, groups, rows, centred):
    basis, cutoff = (None, 1.0) if kind == "thin" else (kind, 0.0)
    size = 16 if kind == "thin" else 6
    old = sample(200, size, groups, 1)
    if kind == "thin":
        old[..., 3:] *= 1e-3
        old[..., 3:] -= old[..., 3:].mean(1, keepdim=True)
    w = whiten(moments(old), 0.05, basis, centred, cutoff)
    assert (w.tail > 0) == (kind == "thin")
    h = sample(rows, size, groups, 2)
    mu = written_out(h, w)
    assert_close(whitened_spectrum(moments(h), w), mu)
    drift, _ = drift_from_white(moments(h), w)
    assert_close(drift, float((mu - 1).square().mean().sqrt()))
    assert_close(condition_number(whitened_spectrum(moments(h), w)), float(mu[0] / mu[-1]))


@pytest.mark.parametrize("rows", [4, 50], ids=["few", "many"])
@pytest.mark.parametrize("basis", ["pca", "zca", "cholesky", None])
def test_inputs_that_the_whitening_came_from_have_not_drifted(basis, rows):
    h = sample(rows)
    w = whiten(moments(h), 0.05, basis)
    assert drift_from_white(moments(h), w)[0] < 1e-10
    assert_close(whitened_spectrum(moments(h), w), torch.ones(6, dtype=DOUBLE))


def test_a_scaled_whitening_is_measured_as_the_formula_has_it():
    w = whiten(moments(sample(200, seed=1)), 0.05, "pca")
    scaled = replace(w, U=w.U / 3, U_inv=w.U_inv * 3, scale=3.0)
    new = moments(sample(50, seed=2))
    assert_close(drift_from_white(new, scaled), drift_from_white(new, w))
    assert_close(whitened_spectrum(new, scaled), whitened_spectrum(new, w))


@pytest.mark.parametrize("basis", ["pca", None])
def test_chance_is_the_drift_of_new_rows_when_nothing_has_changed(basis):
    torch.manual_seed(0)
    mix = torch.randn(8, 8, dtype=DOUBLE)
    w = whiten(moments(torch.randn(1, 200_000, 8, dtype=DOUBLE) @ mix), 0.5, basis)
    found = [drift_from_white(moments(torch.randn(1, 30, 8, dtype=DOUBLE) @ mix), w) for _ in range(200)]
    squares = torch.tensor(found).square().mean(0)
    assert squares[0] / squares[1] == pytest.approx(1, rel=0.1)


def test_a_thin_whitening_drifts_from_its_own_inputs_and_has_no_chance():
    h = sample(200, 16)
    h[..., 3:] *= 0.1
    w = whiten(moments(h - h.mean(1, keepdim=True)), 0.5, None, cutoff=1.0)
    assert w.tail > 0
    drift, chance = drift_from_white(moments(h - h.mean(1, keepdim=True)), w)
    assert drift > 1e-3 and chance is None


def test_rows_of_a_rescaled_whitening_have_drift_but_no_chance():
    for plus in (False, True):
        model = mlp()
        optimizer = prong.PRONG(model, 0.05, form=prong.Explicit(plus=plus), refresh=prong.Every(2))
        monitor = Monitor(model, optimizer, {4})
        run(model, optimizer, batches(model, 4))
        assert all(row.drift is not None and (row.chance is None) == plus for row in monitor.rows)


def test_a_mean_that_has_moved_is_drift():
    h = sample(200)
    w = whiten(moments(h), 0.05)
    assert drift_from_white(moments(h + 1), w)[0] > drift_from_white(moments(h), w)[0] + 0.1


def test_condition_numbers_are_of_the_damped_spectrum_or_have_a_floor():
    lam = torch.tensor([4.0, 1.0, 0.0])
    assert condition_number(lam, eps=0.5) == 4.5 / 0.5
    assert condition_number(lam, floor=1e-3) == pytest.approx(1e3)
    assert condition_number(lam) == math.inf
    assert math.isnan(condition_number(torch.zeros(2)))


def test_where_rounding_spoils_the_factorisation_it_is_done_in_double_precision():
    h = sample(3, 12).float() * 1e3
    m = Moments(1, 12)
    m.add(h)
    w = Whitening(None, 1e-5, P=torch.eye(12)[None])
    assert torch.isfinite(whitened_spectrum(m, w)).all()


# The monitor ----------------------------------------------------------------------------------------------------------


def layer_inputs(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What each layer sees: position by position, zeros of padding included."""
    seen = {}
    for name, module in model.named_children():
        if isinstance(module, nn.Linear):
            seen[name] = x.detach()[None]
        if isinstance(module, nn.Conv2d):
            pad = 0 if module.padding == "valid" else module.padding[0]
            padded = F.pad(x.detach(), (pad,) * 4)
            rows = [
                padded[n, :, i, j]
                for n in range(len(x))
                for i in range(padded.shape[2])
                for j in range(padded.shape[3])
            ]
            seen[name] = torch.stack(rows).unflatten(1, (module.groups, -1)).transpose(0, 1)
        x = module(x)
    return seen


WIDE = prong.Auto(time=1e9, memory=1e9)  # without blocks


def whitened(model: nn.Module, form: str | None, x: Tensor, eps: float = 0.1, lr: float = 0.05):
    """An optimizer whose model is whitened by this tensor, and by nothing else."""
    if form in ("implicit", "explicit"):
        prong.whiten_(model, form)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    if form not in ("implicit", "explicit", None):
        options = WIDE if form == "auto" else prong.Materialised()
        prong.attach(model, optimizer, form=options, refresh=prong.Never())
    if form is not None:
        prong.refresh_(model, x, prong.Absolute(eps))
    return optimizer


each_form = pytest.mark.parametrize("form", ["implicit", "explicit", "auto", "materialised"])


@pytest.mark.parametrize("form", ["implicit", "explicit", "auto", "materialised", None])
@pytest.mark.parametrize("make", [mlp, convnet])
def test_rows_are_of_the_forward_of_the_chosen_update(make, form):
    model, eps = make(), 0.1
    data = batches(model, 5)
    optimizer = whitened(model, form, data[4][0], eps)
    monitor = Monitor(model, optimizer, {2, 3}, samples=100_000, damping=prong.Absolute(eps))
    expected = []
    for update, pair in enumerate(data[:4], start=1):
        if update in (2, 3):
            plain = make()
            plain.load_state_dict(canonical(model))
            expected += [(update, name, h) for name, h in layer_inputs(plain, pair[0]).items()]
        run(model, optimizer, [pair])
    assert [(row.update, row.layer) for row in monitor.rows] == [(update, name) for update, name, _ in expected]
    for row, (_, name, h) in zip(monitor.rows, expected, strict=True):
        centred = h - h.mean(1, keepdim=True)
        lam = torch.linalg.eigvalsh(centred.mT @ centred / h.shape[1]).flatten().sort(descending=True).values
        assert row.inputs == lam.numel() == len(row.spectrum) and row.eps == eps
        assert_close(torch.tensor(row.spectrum, dtype=DOUBLE), lam)
        assert_close(row.condition, float((lam[0] + eps) / (lam[-1] + eps)), 1e-8)
        assert_close(row.condition_undamped, float(lam[0] / max(lam[-1], 1e-7 * lam[0])), 1e-6)
        if form is None:
            assert row.drift is row.chance is row.condition_whitened is None
            continue
        mu = written_out(h, whitened_sites(model)[name][1].whitening)
        assert_close(row.drift, float((mu - 1).square().mean().sqrt()), 1e-8)
        assert_close(row.condition_whitened, float(mu[0] / mu[-1]), 1e-8)


EVERY = prong.Every(4, samples=32)
OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.05),
    "plain": lambda m: prong.PRONG(m, 0.05, refresh=EVERY),
    "implicit": lambda m: prong.PRONG(m, 0.05, form="implicit", refresh=EVERY),
    "explicit": lambda m: prong.PRONG(m, 0.05, form="explicit", refresh=EVERY),
    "cutoff": lambda m: prong.PRONG(m, 0.05, form=prong.Implicit(cutoff=1.0), refresh=EVERY),
    "plus": lambda m: prong.PRONG(m, 0.05, form=prong.Explicit(plus=True), refresh=EVERY),
    "adamw": lambda m: prong.AdamW(m, refresh=EVERY),
    "drift": lambda m: prong.PRONG(m, 0.05, refresh=prong.OnDrift(samples=32)),
    "loader": lambda m: prong.PRONG(m, 0.05, refresh=replace(EVERY, source=[batches(m, 1, seed=5)[0][0]])),
}


def noisy(make) -> nn.Module:
    """With dropout, so that random numbers count; and batch norm, whose buffers do."""
    model = make()
    if isinstance(model, nn.Sequential):
        model.insert(1, nn.Dropout(0.3))
        model.insert(0, nn.BatchNorm1d(6) if make is mlp else nn.BatchNorm2d(2))
    return model.double()


def meddle(model: nn.Module) -> dict[str, float]:
    """A callback that does what it should not."""
    model.eval()
    device = next(model.parameters())
    loss = model.train()(torch.randn(4, 6).to(device)).square().sum()
    loss.backward()
    norm = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
    model.zero_grad()
    return {"norm": norm}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("make", [mlp, convnet, attentive])
def test_training_is_the_same_to_the_bit_random_state_included(make, name):
    def trained(watched: bool):
        model = noisy(make)
        optimizer = OPTIMIZERS[name](model)
        data = batches(model, 10)
        if watched:
            monitor = Monitor(model, optimizer, 2, samples=20, callback=meddle if make is mlp else None)
        torch.manual_seed(3)
        losses = run(model, optimizer, data)
        if watched:
            assert len(monitor.rows) > 0 and len(monitor.numbers) == (5 if make is mlp else 0)
        gradients = [p.grad for p in model.parameters()]
        return losses, canonical(model), gradients, torch.get_rng_state()

    torch.testing.assert_close(trained(True), trained(False), **EXACT)


@each_form
@pytest.mark.parametrize("make", [mlp, convnet])
def test_after_a_refresh_on_exactly_the_rows_measured_drift_is_nothing_and_then_it_grows(make, form):
    model = make()
    x, y = batches(model, 1, size=64)[0]
    optimizer = whitened(model, form, x, lr=0.02)
    monitor = Monitor(model, optimizer, {1, 5, 40}, samples=100_000)
    run(model, optimizer, [(x, y)] * 40)
    layers = dict.fromkeys(row.layer for row in monitor.rows)
    assert len(layers) == 3
    for i, name in enumerate(layers):
        first, fifth, last = (row for row in monitor.rows if row.layer == name)
        assert first.drift < 1e-8 and first.condition_whitened == pytest.approx(1, abs=1e-8)
        assert first.condition > 1.1
        if i == 0:
            assert last.drift < 1e-8, "the data does not move"
        else:
            assert 1e-6 < fifth.drift < last.drift and 1 < fifth.condition_whitened < last.condition_whitened


def test_attention_has_a_row_for_queries_keys_and_values():
    for form in (None, "implicit", "explicit", "auto", "materialised"):
        model = attentive()
        x = batches(model, 1)[0][0]
        optimizer = whitened(model, form, x)
        monitor = Monitor(model, optimizer, 1, samples=100_000)
        run(model, optimizer, batches(model, 1))
        assert [row.layer for row in monitor.rows] == ["attention.q", "attention.k", "attention.v", "head"]
        for row, h in zip(monitor.rows, model.inputs(x), strict=False):
            rows = h.flatten(0, 1) - h.flatten(0, 1).mean(0)
            assert_close(torch.tensor(row.spectrum, dtype=DOUBLE), torch.linalg.eigvalsh(rows.mT @ rows / 80).flip(0))
            assert (row.drift is None) == (form is None)
            assert form is None or row.drift < 1e-8


def test_at_most_samples_rows_are_looked_at_and_a_window_spreads_them_over_updates():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    few = Monitor(model, optimizer, 4, samples=10)
    wide = Monitor(model, optimizer, 4, samples=12, window=3)
    all_rows = Monitor(model, optimizer, 4, samples=1000, window=4)
    data = batches(model, 8)
    run(model, optimizer, data)
    assert {row.samples for row in few.rows} == {10}
    assert {row.samples for row in wide.rows} == {12}
    assert {row.samples for row in all_rows.rows} == {64}
    x = torch.cat([x for x, _ in data[4:]])
    lam = torch.linalg.eigvalsh((x - x.mean(0)).mT @ (x - x.mean(0)) / 64).flip(0)
    row = next(row for row in all_rows.rows if row.update == 8 and row.layer == "0")
    assert_close(torch.tensor(row.spectrum, dtype=DOUBLE), lam)


class Repeated(nn.Module):
    """One layer, called several times on inputs that move from call to call."""

    def __init__(self, calls: int = 10) -> None:
        super().__init__()
        self.calls, self.layer = calls, nn.Linear(6, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return sum(self.layer(x + k) for k in range(self.calls))


def test_calls_of_one_layer_in_one_update_count_alike():
    model = Repeated()
    x, y = batches(model, 1, size=400)[0]
    optimizer = whitened(model, "implicit", x, lr=0.0)
    few, everything = Monitor(model, optimizer, 1, samples=500), Monitor(model, optimizer, 1, samples=5000)
    run(model, optimizer, [(x, y)])
    assert (few.rows[0].samples, everything.rows[0].samples) == (500, 4000)
    assert everything.rows[0].drift < 1e-8
    assert few.rows[0].drift < 0.2 and few.rows[0].drift < 2 * few.rows[0].chance


def seeing(layer: nn.Module, samples: int) -> Seen:
    view = plain_kind(layer)(layer, prong.Implicit())
    return Seen(view, view.sites[0], samples)


def test_blocks_are_looked_at_by_themselves_whoever_of_monitor_and_optimizer_was_there_first():
    """Seventeen inputs in two blocks are filled up with a zero, which is no input."""
    model = nn.Sequential(nn.Linear(17, 33), nn.Tanh(), nn.Linear(33, 4)).double()
    sgd = torch.optim.SGD(model.parameters(), 0.05)
    early = Monitor(model, sgd, 1)
    prong.attach(model, sgd, form=prong.Auto(memory=1e-3), refresh=prong.Every(1))
    late = Monitor(model, sgd, 1)
    run(model, sgd, [(torch.randn(64, 17, dtype=DOUBLE), torch.randint(4, (64,))) for _ in range(2)])
    assert [row for row in late.rows if row.update == 2] == [row for row in early.rows if row.update == 2]
    sites = {name: site for name, (_, site) in whitened_sites(model).items()}
    assert [site.layout.blocks for site in sites.values()] == [2, 3]
    for row in late.rows:
        assert row.inputs == len(row.spectrum) == sites[row.layer].layout.channels and row.spectrum[-1] > 1e-6
        assert (row.drift is None) == (row.update == 1)


def test_layers_that_wait_for_their_first_refresh_have_their_optimizers_damping():
    for damping in (0.3, prong.Absolute(0.7)):
        model = mlp()
        optimizer = prong.PRONG(model, 0.05, damping=damping, refresh=prong.Never())
        monitor = Monitor(model, optimizer, 1, samples=1000)
        (x, y), *_ = batches(model, 1)
        run(model, optimizer, [(x, y)])
        assert_close(monitor.rows[0].eps, 0.7 if damping != 0.3 else 0.3 * float(x.square().mean()))


@settings(deadline=None, max_examples=40)
@given(sizes=st.lists(st.integers(0, 90), min_size=1, max_size=12).filter(any), samples=st.integers(2, 40))
def test_rows_looked_at_are_spread_evenly_whatever_calls_they_come_in(sizes, samples):
    """No more than asked for, all if that is possible, and the same as in one call."""
    layer = nn.Linear(1, 1).double()
    total = sum(sizes)
    rows = torch.arange(total, dtype=DOUBLE).view(1, -1, 1)

    def kept(parts: list[int]) -> Tensor:
        seen = seeing(layer, samples)
        for part in rows.split(parts, dim=1):
            seen.add(Inputs(part, 0.0, 1))
            assert seen.kept.shape[1] == len(seen) <= samples
        assert len(seen) == min(sum(parts), samples)
        return seen.kept.flatten()

    assert_close(kept(sizes), kept([total]))


@pytest.mark.parametrize("size", [100, 128, 144, 377, 500, 610, 784, 987, 1024])
def test_rows_looked_at_are_spread_over_calls_and_over_places_in_them_whatever_the_size(size):
    """Calls and places (positions of a map, examples of a batch) are met about as evenly as if drawn at random."""
    seen = seeing(nn.Linear(2, 1), 512)
    calls = 40
    for call in range(calls):
        place = torch.arange(float(size))
        seen.add(Inputs(torch.stack([torch.full_like(place, call), place], 1)[None], 0.0, size))
    call, place = seen.kept[0].long().unbind(1)
    by_call = call.div(5, rounding_mode="floor").bincount(minlength=8)
    by_place = (8 * place).div(size, rounding_mode="floor").bincount(minlength=8)
    for counts in (by_call, by_place):
        assert counts.sum() == 512 and (counts - 64).abs().max() < 4 * 8
    alone = size * (1 - (1 - 1 / size) ** 512)  # places met by 512 draws, about
    assert len(place.unique()) > 0.85 * alone


def test_zeros_of_padding_count_in_proportion():
    seen = seeing(nn.Linear(1, 1), 10)
    for _ in range(4):
        seen.add(Inputs(torch.ones(1, 25, 1), 50.0, 1))
    assert seen.moments().count == pytest.approx(30) and float(seen.moments().mean) == pytest.approx(1 / 3)


def test_without_the_whitened_condition_the_rest_is_the_same():
    model = mlp()
    optimizer = prong.PRONG(model, 0.05, refresh=prong.Every(2))
    whole, cheap = Monitor(model, optimizer, 2), Monitor(model, optimizer, 2, whitened_condition=False)
    run(model, optimizer, batches(model, 6))
    for a, b in zip(whole.rows, cheap.rows, strict=True):
        assert (a.drift, a.spectrum) == (b.drift, b.spectrum)
        assert a.condition_whitened is not None and b.condition_whitened is None


def test_collections_may_be_in_any_order_and_long_and_windows_fit_exactly():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for when in (range(0, 10**12, 3), [6, 3], {3, 6}, range(6, 0, -3), range(3, 4), ()):
        with Monitor(model, optimizer, when, samples=1000, window=3) as monitor:
            run(model, optimizer, batches(model, 6))
        found = [(row.update, row.samples) for row in monitor.rows if row.layer == "0"]
        assert found == [(update, 48) for update in (3, 6) if update in when]


def test_spectra_need_not_be_kept():
    model = mlp()
    optimizer = prong.PRONG(model, 0.05, refresh=prong.Every(2))
    whole, short = Monitor(model, optimizer, 2), Monitor(model, optimizer, 2, keep_spectrum=False)
    run(model, optimizer, batches(model, 6))
    for a, b in zip(whole.rows, short.rows, strict=True):
        assert a.spectrum and replace(a, spectrum=()) == b


@pytest.mark.parametrize("reentrant", [False, True])
def test_forwards_that_checkpointing_runs_again_are_not_looked_at_twice(reentrant):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    monitor = Monitor(model, optimizer, 1, samples=1000)
    (x, y), *_ = batches(model, 1)
    z = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
    F.cross_entropy(z, y).backward()
    optimizer.step()
    assert [row.samples for row in monitor.rows] == [16] * 3


def test_evaluation_and_refreshes_between_updates_are_not_looked_at():
    model = mlp()
    data = batches(model, 3)
    optimizer = prong.PRONG(model, 0.05, refresh=prong.Every(1, source=[100 * x for x, _ in data]))
    monitor = Monitor(model, optimizer, 1, samples=1000)
    for pair in data:
        model.eval()(100 * pair[0])
        model.train()
        run(model, optimizer, [pair])
    assert {row.samples for row in monitor.rows} == {16}


def test_inputs_that_are_not_finite_give_a_row_that_says_so():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    monitor = Monitor(model, optimizer, 1)
    x, y = batches(model, 1)[0]
    list(train(model, optimizer, [(x.clone().index_fill_(0, torch.tensor([0]), math.nan), y)]))
    assert [math.isnan(row.condition) for row in monitor.rows] == [True] * 3
    assert all(entry["condition"] is None for entry in monitor.to_dicts())


def test_rows_become_json_and_a_context_detaches():
    model = mlp()
    optimizer = prong.PRONG(model, 0.05, refresh=prong.Every(2))
    hooks = len(optimizer._optimizer_step_post_hooks)
    listeners = [len(module._forward_pre_hooks) for module in model.modules()]
    with Monitor(model, optimizer, range(1, 7, 2), callback=lambda m: {"answer": torch.tensor(42)}) as monitor:
        run(model, optimizer, batches(model, 6))
    count = len(monitor.rows)
    assert count == 9 and monitor.rows[0].drift is None, "nothing was whitened in the first forward"
    assert monitor.numbers == [{"update": update, "answer": 42.0} for update in (1, 3, 5)]
    again = json.loads(json.dumps(monitor.to_dicts(), allow_nan=False))
    assert again[3]["update"] == 3 and again[3]["spectrum"] == list(monitor.rows[3].spectrum)
    run(model, optimizer, batches(model, 6))
    assert len(monitor.rows) == count
    assert len(optimizer._optimizer_step_post_hooks) == hooks
    assert [len(module._forward_pre_hooks) for module in model.modules()] == listeners


@pytest.mark.parametrize("form", ["auto", "implicit"])
def test_folding_and_copying_a_watched_model_go_on_as_without(form):
    model = mlp()
    optimizer = prong.PRONG(model, 0.05, form=form, refresh=prong.Every(1, growth=None))
    monitor = Monitor(model, optimizer, 1)
    run(model, optimizer, batches(model, 2))
    twin = copy.deepcopy(model)
    run(twin, torch.optim.SGD(twin.parameters(), 0.1), batches(model, 2))
    assert len(monitor.rows) == 6
    prong.fold_(model)
    run(model, optimizer, batches(model, 1))
    assert monitor.rows[-1].drift is None and monitor.rows[3].drift is not None


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, where a graph is broken
def test_a_compiled_model_is_seen_and_compiled_whole_for_other_updates():
    from torch._dynamo.testing import CompileCounterWithBackend

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    monitor = Monitor(model, optimizer, {3, 4, 20})
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter)
    data = batches(model, 20)
    run(compiled, optimizer, data[:2])
    assert counter.frame_count == 1
    run(compiled, optimizer, data[2:4])
    pieces = counter.frame_count
    run(compiled, optimizer, data[4:])
    assert counter.frame_count == pieces, "both ways are known by now"
    assert [row.update for row in monitor.rows] == [3, 3, 3, 4, 4, 4, 20, 20, 20]
    torch.compiler.reset()


def test_the_count_of_updates_can_be_set_where_a_run_is_resumed():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    monitor = Monitor(model, optimizer, 10)
    monitor.updates = 8
    run(model, optimizer, batches(model, 4))
    assert {row.update for row in monitor.rows} == {10}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"when": 0}, ValueError, "when"),
        ({"when": "always"}, TypeError, "when"),
        ({"when": torch.tensor(3)}, TypeError, "when"),
        ({"when": torch.tensor([3, 6])}, TypeError, "when"),
        ({"when": {1, 2.5}}, TypeError, "when"),
        ({"when": {True}}, TypeError, "when"),
        ({"when": {-1, 5}}, ValueError, "when"),
        ({"when": {1, 2, 3}, "window": 40}, ValueError, "window of 40 .* 1 and 2"),
        ({"when": [100, 1, 60], "window": 41}, ValueError, "window of 41 .* 60 and 100"),
        ({"when": range(1, 10_000, 50), "window": 51}, ValueError, "window of 51 .* 1 and 51"),
        ({"layers": "nothing"}, ValueError, "no layer"),
        ({"samples": 1}, ValueError, "samples"),
        ({"window": 0}, ValueError, "window"),
        ({"when": 2, "window": 3}, ValueError, "does not fit"),
        ({"damping": 0.0}, ValueError, "damping"),
        ({"floor": 0.0}, ValueError, "floor"),
        ({"callback": 3}, TypeError, "callback"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, error, message):
    model = mlp()
    with pytest.raises(error, match=message):
        Monitor(model, torch.optim.SGD(model.parameters(), 0.1), **arguments)
    assert not model[0]._forward_pre_hooks


def test_a_callback_that_returns_no_numbers_is_told():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for answer, message in ((3, "dict of numbers"), ({"a": "b"}, "'a' is a str"), ({"a": torch.ones(2)}, "Tensor")):
        monitor = Monitor(model, optimizer, 1, callback=lambda m, answer=answer: answer)
        with monitor, pytest.raises(TypeError, match=message):
            run(model, optimizer, batches(model, 1))
    with pytest.raises(TypeError, match="Optimizer"):
        Monitor(model, model)
    with pytest.raises(ValueError, match="no layer"):
        Monitor(nn.Tanh(), optimizer)
