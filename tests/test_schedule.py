"""When refreshes come, from which samples, and what becomes of momentum."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import prong
from prong.core.moments import Moments
from prong.model.whiten import whitened_sites
from tests.training import DOUBLE, FORMS, OPTIMIZERS, batches, canonical, mlp, refresher_of, run, site_of

EXACT = {"rtol": 0.0, "atol": 0.0}
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
forms = pytest.mark.parametrize("form", FORMS)


def refresh_times(model, optimizer, data):
    """After which updates the whitening of the first layer was replaced; 0 is before the first step."""
    times, last = [], None

    def look(number):
        nonlocal last
        if site_of(model).whitening is not last:
            times.append(number)
            last = site_of(model).whitening

    handle = optimizer.register_step_pre_hook(lambda *_: look(0))
    for number, pair in enumerate(data, 1):
        run(model, optimizer, [pair])
        handle.remove()
        look(number)
    return times


@pytest.mark.parametrize("form", ["auto", "explicit"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0, 1, 2, 4, 6, 12, 18, 24]),
        ({"growth": 0.5}, [0, 1, 2, 4, 6, 12, 18, 24]),
        ({"growth": 3.0}, [0, 1, 2, 4, 6, 12, 18, 24]),
        ({"growth": None}, [6, 12, 18, 24]),
    ],
    ids=str,
)
@pytest.mark.parametrize("source", ["window", "ema", "loader"])
def test_refreshes_come_at_first_often_and_then_every_period(source, options, expected, form):
    model = mlp()
    data = batches(model, 25)
    chosen = [x for x, _ in data] if source == "loader" else source
    optimizer = prong.PRONG(model, 0.01, form=form, refresh=prong.Every(6, samples=16, source=chosen, **options))
    assert refresh_times(model, optimizer, data) == expected


def test_period_one_refreshes_after_every_update():
    model = mlp()
    optimizer = prong.PRONG(model, 0.01, refresh=prong.Every(1, samples=16))
    assert refresh_times(model, optimizer, batches(model, 5)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_never_is_never_but_by_hand(make):
    model = mlp()
    optimizer = make(model, 0.01, refresh=prong.Never())
    data = batches(model, 8)
    assert refresh_times(model, optimizer, data) == []
    assert not model._forward_hooks and site_of(model).window is None
    with pytest.raises(ValueError, match="give batches"):
        refresher_of(optimizer).refresh()
    refresher_of(optimizer).refresh([data[0][0]])
    assert site_of(model).whitening is not None


def moments_of(*parts, decay=1.0):
    """Of the first layer's inputs, where those of earlier parts count less."""
    moments = Moments(1, 6, DOUBLE)
    for part in parts:
        moments.decay(decay)
        moments.add(part[None])
    return moments


@forms
def test_the_first_refresh_is_made_before_the_first_update_from_its_forwards(form):
    """As line 5 of the paper's algorithm has it, without a loader; and the step is taken in those coordinates."""
    model, data = mlp(), batches(mlp(), 1)
    stepped = []
    optimizer = prong.PRONG(model, 0.0, form=form, refresh=prong.Every(8, samples=32))
    optimizer.register_step_pre_hook(lambda *_: stepped.append(site_of(model).whitening))
    run(model, optimizer, data)
    torch.testing.assert_close(stepped[0].c, moments_of(data[0][0]).mean, **CLOSE)


@forms
def test_a_window_holds_the_forwards_just_before_the_refresh(form):
    """Period 8, 32 samples of batches of 16: the window before update 16 is updates 15 and 16."""
    model = mlp()
    data = batches(model, 16)
    run(
        model, prong.PRONG(model, 0.0, damping=prong.Absolute(0.1), form=form, refresh=prong.Every(8, samples=32)), data
    )
    expected = moments_of(*(x for x, _ in data[14:]))
    whitening = site_of(model).whitening
    torch.testing.assert_close(whitening.c, expected.mean, **CLOSE)
    dense = torch.linalg.inv(expected.covariance() + 0.1 * torch.eye(6, dtype=DOUBLE))
    P = whitening.U.mT @ whitening.U if whitening.P is None else whitening.P
    torch.testing.assert_close(P, dense, **CLOSE)


@forms
def test_windows_are_open_only_when_needed(form):
    model = mlp()
    optimizer = prong.PRONG(model, 0.0, form=form, refresh=prong.Every(8, samples=32))
    is_open = []
    for pair in batches(model, 16):
        is_open.append(site_of(model).window is not None)
        run(model, optimizer, [pair])
    assert is_open == [True] * 4 + [False, False, True, True] + [False] * 6 + [True] * 2
    assert refresher_of(optimizer).windows.updates("0", 160) == 10


def test_where_refreshes_are_closer_than_a_window_older_samples_fade():
    model = mlp()
    data = batches(model, 2)
    run(model, prong.PRONG(model, 0.0, refresh=prong.Every(100, samples=32)), data)
    expected = moments_of(*(x for x, _ in data), decay=0.5)  # 16 of 32 samples were replaced
    torch.testing.assert_close(site_of(model).whitening.c, expected.mean, **CLOSE)


@forms
def test_evaluation_between_updates_is_not_counted(form):
    model = mlp()
    optimizer = prong.PRONG(model, 0.0, form=form, refresh=prong.Every(100, samples=1000))
    x, y = batches(model, 1)[0]
    model.eval()
    with torch.no_grad():
        model(x * 100)
    model.train()
    assert site_of(model).window.moments.count == 0
    run(model, optimizer, [(x, y)])
    torch.testing.assert_close(site_of(model).whitening.c[0], x.mean(0), **CLOSE)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_batches_of_one_wait_for_a_second_sample(make):
    model = mlp()
    optimizer = make(model, 0.01, refresh=prong.Every(4, samples=4))
    data = batches(model, 4, size=1)
    with pytest.warns(UserWarning, match="two samples"):
        run(model, optimizer, data[:1])
    run(model, optimizer, data[1:])
    assert site_of(model).whitening is not None


@forms
def test_a_branch_that_was_not_reached_keeps_its_whitening(form):
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.use_b = nn.Linear(6, 4), nn.Linear(6, 4), True
            self.double()

        def forward(self, x):
            return self.b(x) if self.use_b else self.a(x)

    model = Branching()
    optimizer = prong.PRONG(model, 0.01, form=form, refresh=prong.Every(1, samples=16))
    data = batches(model, 3)
    run(model, optimizer, data[:1])
    kept = site_of(model, "b").whitening
    model.use_b = False
    run(model, optimizer, data[1:])
    assert site_of(model, "b").whitening is kept
    assert site_of(model, "a").whitening is not None


@pytest.mark.parametrize("form", ["explicit", "materialised"])
@pytest.mark.parametrize("kind", [prong.PRONG, prong.AdamW], ids=["PRONG", "AdamW"])
def test_reset_forgets_momentum_where_transport_keeps_it(kind, form):
    states = {}
    for policy in ("transport", "reset"):
        model = mlp()
        optimizer = kind(model, 0.01, form=form, refresh=prong.Every(2, samples=16, state=policy))
        first = next(model.parameters())
        run(model, optimizer, batches(model, 2))
        states[policy] = {key: value for key, value in optimizer.state.get(first, {}).items() if key != "step"}
    assert not states["reset"]
    assert states["transport"] and all(value.abs().sum() > 0 for value in states["transport"].values())


TORCHS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.02, 0.9),
    "Adam": lambda p: torch.optim.Adam(p, 0.01),
    "AMSGrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.005, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 1.0),
    "Muon": lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], 0.05),
}


@pytest.mark.parametrize("form", ["auto", "explicit", "materialised"])
@pytest.mark.parametrize("make", TORCHS.values(), ids=TORCHS)
def test_any_torch_optimizer_trains_in_whitened_coordinates(make, form):
    model = mlp()
    optimizer = make(list(model.parameters()))
    assert prong.attach(model, optimizer, form=form, refresh=prong.Every(7, samples=48)) is optimizer
    losses = run(model, optimizer, batches(model, 1) * 60)
    assert losses[-1] < 0.7 * losses[0]
    assert all(site.whitening is not None for _, site in whitened_sites(model).values())


@pytest.mark.parametrize("form", ["explicit", "materialised"])
def test_adams_first_moment_is_the_gradient_average_of_the_new_coordinates(form):
    """With a constant gradient in the canonical parameters, the average is that gradient in any coordinates."""
    model = nn.Linear(5, 3).double()
    h = torch.randn(30, 5, dtype=DOUBLE) @ torch.randn(5, 5, dtype=DOUBLE) + 1
    gW, gb = torch.randn(3, 5, dtype=DOUBLE), torch.randn(3, dtype=DOUBLE)
    weight, bias = model.parameters()
    optimizer = torch.optim.Adam([weight, bias], 0.0)  # nothing moves: the gradient stays
    prong.attach(model, optimizer, form=form, refresh=prong.Never(), trust=None)
    for data in (h, h * 2 + 1, h - 3):
        refresher_of(optimizer).refresh([data])
        whitening = site_of(model, "").whitening
        gV = (gW - torch.outer(gb, whitening.c[0])) @ whitening.U[0].mT
        weight.grad, bias.grad = (gV, gb) if form == "explicit" else (gW, gb)
        optimizer.step()
        correction = 1 - 0.9 ** optimizer.state[weight]["step"].item()
        for parameter, gradient in ((weight, gV), (bias, gb)):
            torch.testing.assert_close(optimizer.state[parameter]["exp_avg"] / correction, gradient, **CLOSE)


class Strange(torch.optim.Optimizer):
    """Nobody knows what it remembers."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["seen"] = state.get("seen", 0) + p.grad.abs()
                p.data.sub_(group["lr"] * p.grad)


@pytest.mark.parametrize(("form", "kept"), [("auto", True), ("explicit", False), (prong.Explicit("zca"), True)])
def test_the_state_of_an_unknown_optimizer_is_kept_where_coordinates_change_little(form, kept):
    model = mlp()
    weight = model[0].weight
    optimizer = prong.attach(model, Strange(model.parameters()), form=form, refresh=prong.Every(2, samples=16))
    run(model, optimizer, batches(model, 2))
    assert ("seen" in optimizer.state.get(weight, {})) == kept


def test_an_optimizer_that_is_not_linear_cannot_use_implicit_layers_but_for_natural_gradients():
    model = prong.whiten_(mlp())
    with pytest.raises(ValueError, match="space='natural'"):
        prong.attach(model, torch.optim.Adam(model.parameters()))
    prong.attach(model, torch.optim.Adam(model.parameters()), space="natural")


@forms
def test_plain_sgd_that_is_attached_is_prong(form):
    ours, theirs = mlp(), mlp()
    options = {"form": form, "refresh": prong.Every(5, samples=32)}
    run(ours, prong.PRONG(ours, 0.02, **options), batches(ours, 12))
    run(theirs, prong.attach(theirs, torch.optim.SGD(theirs.parameters(), 0.02, 0.9), **options), batches(theirs, 12))
    torch.testing.assert_close(canonical(ours), canonical(theirs), **EXACT)


@forms
def test_a_window_leaves_the_random_state_and_gradients_alone(form):
    model, plain = mlp(), mlp()
    x, y = batches(model, 1)[0]
    F.cross_entropy(plain(x), y).backward()
    prong.PRONG(model, 0.0, form=form)
    before = torch.get_rng_state()
    F.cross_entropy(model(x), y).backward()
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], **EXACT)


@pytest.mark.parametrize("outputs", [None, prong.WhitenOutputs("categorical")], ids=str)
def test_after_fold_training_goes_on_as_sgd_with_its_velocity_in_every_form(outputs):
    paths = []
    for form in ("implicit", "explicit") if outputs else FORMS:
        model = mlp()
        options = {"form": form, "outputs": outputs, "refresh": prong.Every(4, samples=32)}
        optimizer = prong.PRONG(model, 0.01, **options)
        data = batches(model, 12)
        run(model, optimizer, data[:7])
        prong.fold_(model)
        run(model, optimizer, data[7:])
        assert type(model[0]) is nn.Linear and not model[0]._forward_pre_hooks and not model._forward_hooks
        paths.append(canonical(model))
    for path in paths[1:]:
        torch.testing.assert_close(path, paths[0], rtol=1e-9, atol=1e-10)


@forms
def test_after_fold_the_state_is_that_of_sgd_and_there_is_nothing_to_refresh(form):
    model = mlp()
    optimizer = prong.PRONG(model, 0.01, form=form, refresh=prong.Every(4, samples=32))
    run(model, optimizer, batches(model, 3))
    refresher = refresher_of(optimizer)
    prong.fold_(model)
    plain = torch.optim.SGD(model.named_parameters(), 0.5)
    state = optimizer.state_dict()
    assert "prong" not in state
    plain.load_state_dict(state)
    assert plain.param_groups[0]["lr"] == 0.01
    velocity = optimizer.state[model[0].weight]["momentum_buffer"]
    torch.testing.assert_close(plain.state[model[0].weight]["momentum_buffer"], velocity, **EXACT)
    for ask in (refresher.refresh, refresher.state_dict):
        with pytest.raises(ValueError, match="folded"):
            ask()


@forms
def test_a_loader_that_fails_is_named_before_the_first_step_and_changes_nothing(form):
    model = mlp()
    source = [torch.randn(8, 5, dtype=DOUBLE)]
    optimizer = prong.PRONG(model, 0.1, form=form, refresh=prong.Every(source=source))
    before = canonical(model)
    with pytest.raises(ValueError, match="does not take batch 0"):
        run(model, optimizer, batches(model, 1))
    torch.testing.assert_close(canonical(model), before, **EXACT)
    prong.PRONG(prong.fold_(model), 0.1)


@pytest.mark.parametrize("form", ["auto", "explicit"])
@pytest.mark.parametrize("period", [1, 64])
def test_ema_counts_about_as_many_examples_as_asked_for(period, form):
    model = mlp()
    run_with = prong.PRONG(model, 0.0, form=form, refresh=prong.Every(period, samples=64, source="ema"))
    data = batches(model, 30)
    expected = Moments(1, 6, DOUBLE)
    for x, _ in data:
        expected.add(x[None])
        expected.decay(1 - 16 / 64)
    run(model, run_with, data)
    window = site_of(model).window.moments
    assert window.count == pytest.approx(expected.count)
    torch.testing.assert_close(window.mean, expected.mean, **CLOSE)
    torch.testing.assert_close(window.scatter, expected.scatter, **CLOSE)


def test_one_optimizer_trains_all_explicit_layers():
    model = prong.whiten_(mlp(), "explicit")
    with pytest.raises(ValueError, match="does not train all"):
        prong.attach(model, torch.optim.SGD(model[0].parameters(), 0.1))


def test_plus_needs_an_optimizer_whose_state_it_can_carry():
    model = mlp()
    with pytest.raises(ValueError, match="Adamax"):
        prong.attach(model, torch.optim.Adamax(model.parameters()), form=prong.Explicit(plus=True))
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_frozen_layers_gather_nothing_and_stay_bit_for_bit(make):
    model = mlp()
    model[2].requires_grad_(False)
    before = model[2].weight.detach().clone()
    run(model, make(model, 0.01, refresh=prong.Every(2, samples=16)), batches(model, 9))
    assert site_of(model, "2").window is None and site_of(model, "2").whitening is None
    torch.testing.assert_close(model[2].weight.detach(), before, **EXACT)


@forms
def test_a_loader_does_not_refresh_frozen_layers(form):
    model = mlp()
    model[2].requires_grad_(False)
    data = batches(model, 9)
    optimizer = prong.PRONG(model, 0.01, form=form, refresh=prong.Every(2, samples=16, source=[x for x, _ in data]))
    refresher_of(optimizer).refresh()
    run(model, optimizer, data)
    assert [site_of(model, name).whitening is None for name in ("0", "2", "4")] == [False, True, False]


@forms
def test_a_layer_that_is_frozen_inside_a_window_gathers_no_more(form):
    model = mlp()
    optimizer = prong.PRONG(model, 0.01, form=form, refresh=prong.Every(8, samples=64))
    run(model, optimizer, batches(model, 5))
    kept = site_of(model, "2").whitening
    model[2].requires_grad_(False)
    run(model, optimizer, batches(model, 3))
    assert site_of(model, "2").window is None and site_of(model, "2").whitening is kept


@forms
def test_gradients_that_wait_for_a_step_are_folded_too(form):
    paths = []
    for folding in (False, True):
        model = mlp()
        optimizer = prong.PRONG(model, 0.01, form=form, refresh=prong.Every(64, samples=32))
        data = batches(model, 3)
        run(model, optimizer, data[:2])
        if folding:
            prong.fold_(model)
        x, y = data[2]
        optimizer.zero_grad()
        with prong.ordinary_gradients(model):
            F.cross_entropy(model(x), y).backward()
        prong.fold_(model)
        optimizer.step()
        paths.append(canonical(model))
    torch.testing.assert_close(*paths, rtol=1e-9, atol=1e-10)


@forms
def test_a_part_of_an_optimizers_model_cannot_be_folded_alone(form):
    model = mlp()
    prong.PRONG(model, 0.1, form=form)
    with pytest.raises(ValueError, match="whole model"):
        prong.fold_(model[0])
    assert "0" in whitened_sites(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_half_models_train_and_fold(make, dtype):
    if dtype == torch.float16 and make.func is not prong.PRONG:
        pytest.skip("Adam's eps is zero there, in torch too")
    model = mlp(dtype=dtype)
    losses = run(model, make(model, 0.01, refresh=prong.Every(4, samples=32)), batches(model, 1) * 12)
    assert losses[-1] < losses[0]
    x = batches(model, 1)[0][0]
    before = model(x)
    torch.testing.assert_close(prong.fold_(model)(x), before, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("options", [{}, {"outputs": prong.WhitenOutputs("empirical")}, {"form": "explicit"}], ids=str)
def test_without_early_refreshes_the_first_window_is_as_long_as_the_others(options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    optimizer = prong.PRONG(model, lr=1e-3, refresh=prong.Every(20, samples=24, growth=None), **options)
    sites = [site for _, site in whitened_sites(model).values()]
    data = [torch.randn(8, 4).double() + k for k in range(40)]
    gathering = []
    for x in data:
        gathering.append([site.window is not None for site in sites])
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if len(gathering) % 20 == 0:
            last = torch.cat(data[len(gathering) - 3 : len(gathering)])
            torch.testing.assert_close(sites[0].whitening.c[0], last.mean(0))
    expected = [k == 0 or k % 20 >= 17 for k in range(40)]
    assert gathering == [[due, due] for due in expected]
