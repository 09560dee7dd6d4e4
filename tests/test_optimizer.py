"""PRONG, AdamW and Muon as optimizers: what they equal, and torch's conventions."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import prong
from prong.core.muon import OrthogonalMomentum
from tests.training import (
    DOUBLE,
    FORMS,
    KINDS,
    OPTIMIZERS,
    batches,
    canonical,
    convnet,
    mlp,
    refresher_of,
    run,
    site_of,
    through_a_file,
)

EXACT = {"rtol": 0.0, "atol": 0.0}
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
MODELS = {"mlp": mlp, "no bias": lambda: mlp(bias=False), "convnet": convnet}
EPS = prong.Absolute(0.1)
forms = pytest.mark.parametrize("form", FORMS)
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
optimizers = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def torchs_own(kind: type, model: nn.Module, **options) -> list[torch.optim.Optimizer]:
    """The optimizers of torch, or as simple, that one of ours is made of."""
    if kind is prong.PRONG:
        return [torch.optim.SGD(model.parameters(), **options)]
    if kind is prong.AdamW:
        return [torch.optim.AdamW(model.parameters(), **options)]
    hidden = [p for p in model.parameters() if p.dim() > 1][:-1]
    rest = [p for p in model.parameters() if all(p is not q for q in hidden)]
    decay = options["weight_decay"]
    return [OrthogonalMomentum(hidden, **options), torch.optim.AdamW(rest, 0.1 * options["lr"], weight_decay=decay)]


@pytest.mark.parametrize("options", [{}, {"weight_decay": 1e-3}, {"nesterov": True, "weight_decay": 1e-3}], ids=str)
@optimizers
@pytest.mark.parametrize("model_of", [mlp, convnet])
def test_before_any_refresh_it_is_torchs_own_bit_for_bit(model_of, make, options):
    ours, theirs = model_of(), model_of()
    options = {"lr": 0.1, "weight_decay": 0.0, **options}
    if make.func is prong.PRONG:
        options["momentum"] = 0.9
    elif options.pop("nesterov", False):
        pytest.skip("an option of SGD")
    elif make.func is prong.AdamW:
        options["betas"] = 0.8, 0.9
    optimizer = make(ours, refresh=prong.Never(), **options)
    own = torchs_own(make.func, theirs, **options)
    for x, y in batches(ours, 20):
        run(ours, optimizer, [(x, y)])
        theirs.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        for each in own:
            each.step()
    torch.testing.assert_close(canonical(ours), canonical(theirs), **EXACT)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("trust", [None, 0.01])
@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"weight_decay": 1e-2}], ids=str)
def test_all_forms_walk_the_same_path_across_refreshes(make, options, trust):
    """50 updates with momentum; refreshes before the first, and after 1, 2, 4, 8, 10, 20, 30, 40, 50."""
    paths = []
    for form in FORMS:
        model = make()
        refresh = prong.Every(10, samples=48)
        optimizer = prong.PRONG(model, 0.02, damping=EPS, form=form, refresh=refresh, trust=trust, **options)
        run(model, optimizer, batches(model, 50))
        assert all(site.whitening is not None for _, site in refresher_of(optimizer).sites.values())
        paths.append(canonical(model))
    for path in paths[1:]:
        torch.testing.assert_close(path, paths[0], **CLOSE)


@pytest.mark.parametrize("trust", [None, 0.01])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("kind", [prong.AdamW, prong.Muon], ids=["AdamW", "Muon"])
def test_optimizers_that_hold_v_and_d_walk_the_same_path_in_all_their_forms(kind, make, trust):
    paths = []
    for form in ("auto", "explicit", "materialised"):
        model = make()
        optimizer = kind(model, 1e-2, form=form, refresh=prong.Every(10, samples=200), trust=trust)
        run(model, optimizer, batches(model, 25))
        paths.append(canonical(model))
    for path in paths[1:]:
        torch.testing.assert_close(path, paths[0], rtol=1e-6, atol=1e-6)  # Adam divides by small numbers


@pytest.mark.parametrize("form", [prong.Explicit, prong.Materialised], ids=["explicit", "materialised"])
@pytest.mark.parametrize("basis", ["zca", "cholesky"])
def test_every_basis_gives_sgd_the_same_path(form, basis):
    paths = []
    for chosen in ("pca", basis):
        model = mlp()
        refresh = prong.Every(5, samples=32)
        run(model, prong.PRONG(model, 0.02, damping=EPS, form=form(chosen), refresh=refresh), batches(model, 20))
        paths.append(canonical(model))
    torch.testing.assert_close(*paths, **CLOSE)


@pytest.mark.parametrize("form", FORMS)
def test_on_a_linear_gaussian_model_the_step_is_the_natural_gradient(form):
    """y ~ N(W h + b, I): F = E[(h,1)(h,1)^T] (x) I, and the step is F^-1 g as eps goes to 0."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    h, y = torch.randn(40, 5, dtype=DOUBLE) @ torch.randn(5, 5, dtype=DOUBLE) + 2, torch.randn(40, 3, dtype=DOUBLE)
    before = torch.cat([model.weight, model.bias[:, None]], 1).detach().clone()
    loss = 0.5 * (model(h) - y).square().sum(1).mean()
    g = torch.cat([x.reshape(3, -1) for x in torch.autograd.grad(loss, [model.weight, model.bias])], 1)
    homogeneous = torch.cat([h, torch.ones(40, 1, dtype=DOUBLE)], 1)
    fisher = torch.kron(torch.eye(3, dtype=DOUBLE), homogeneous.T @ homogeneous / 40)
    natural = torch.linalg.solve(fisher, g.flatten()).view(3, 6)

    optimizer = prong.PRONG(model, lr=0.3, momentum=0.0, damping=1e-13, form=form, trust=None)
    (0.5 * (model(h) - y).square().sum(1).mean()).backward()
    optimizer.step()  # refreshes first, from that forward
    after = torch.cat([model.weight, model.bias[:, None]], 1)
    torch.testing.assert_close(after, before - 0.3 * natural, rtol=1e-8, atol=1e-9)


@forms
def test_with_a_very_large_eps_and_lr_scaled_by_it_bias_free_prong_is_sgd(form):
    eps = 1e12
    ours, theirs = mlp(bias=False), mlp(bias=False)
    damping = prong.Absolute(eps)
    optimizer = prong.PRONG(ours, 0.1 * eps, damping=damping, form=form, refresh=prong.Never(), trust=None)
    refresher_of(optimizer).refresh([batches(ours, 1)[0][0]])
    run(ours, optimizer, batches(ours, 20))  # with P = I / eps, a step of lr * eps is a step of lr
    run(theirs, torch.optim.SGD(theirs.parameters(), 0.1, 0.9), batches(theirs, 20))
    torch.testing.assert_close(canonical(ours), canonical(theirs), rtol=1e-8, atol=1e-8)


class Centred(nn.Module):
    """z = W (h - c) + d with a fixed c: SGD on it is what PRONG tends to for large eps (bias rate times eps)."""

    def __init__(self, layer: nn.Linear, c: torch.Tensor):
        super().__init__()
        self.W, self.c = nn.Parameter(layer.weight.detach().clone()), c
        self.d = nn.Parameter((layer.bias + layer.weight @ c).detach().clone())

    def forward(self, h):
        return F.linear(h - self.c, self.W, self.d)


@forms
def test_with_a_very_large_eps_prong_with_bias_is_sgd_on_the_centred_layer(form):
    eps, lr = 1e10, 0.1
    torch.manual_seed(0)
    plain = nn.Linear(6, 4).double()
    data = batches(plain, 20)
    c = torch.cat([x for x, _ in data]).mean(0)
    centred = Centred(plain, c)
    optimizer = torch.optim.SGD([{"params": [centred.W], "lr": lr}, {"params": [centred.d], "lr": lr * eps}])
    never = {"refresh": prong.Never(), "trust": None}
    ours = prong.PRONG(plain, lr * eps, momentum=0.0, damping=prong.Absolute(eps), form=form, **never)
    prong.refresh_(plain, [x for x, _ in data], prong.Absolute(eps))
    assert torch.allclose(site_of(plain, "").whitening.c[0], c)
    x, y = data[0]  # one step: with lr * eps on the bias, more would blow both up alike
    for model, opt in ((plain, ours), (centred, optimizer)):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
    torch.testing.assert_close(plain.weight, centred.W, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(plain.bias, centred.d - centred.W @ c, rtol=1e-7, atol=1e-7)


class Mixed(nn.Module):
    """A layer to whiten, and one that cannot be."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(6, 4), nn.LayerNorm(4)
        self.double()

    def forward(self, x):
        return self.norm(self.linear(x))


@pytest.mark.parametrize("others", [None, {"lr": 3e-3}], ids=["SGD", "AdamW"])
@forms
def test_parameters_outside_whitened_layers_are_trained_by_the_plain_optimizer(form, others):
    model = Mixed()
    data = batches(model, 1)
    optimizer = prong.PRONG(model, 0.1, momentum=0.0, others=others, form=form)
    reference = copy.deepcopy(model.norm)
    theirs = (
        torch.optim.SGD(reference.parameters(), 0.1)
        if others is None
        else torch.optim.AdamW(reference.parameters(), 3e-3)
    )
    for x, y in data:
        with torch.no_grad():
            h = model.linear(x)
        theirs.zero_grad()
        F.cross_entropy(reference(h), y).backward()
        run(model, optimizer, [(x, y)])
        theirs.step()
        torch.testing.assert_close(canonical(model.norm), canonical(reference), **CLOSE)


OPTIONS = [{}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"maximize": True}]


@forms
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_torchs_options_are_sgds(form, options):
    model = mlp()
    optimizer = prong.PRONG(model, 0.02, form=form, refresh=prong.Every(4, samples=32), **options)
    losses = run(model, optimizer, batches(model, 1) * 16)
    assert (losses[-1] > losses[0]) == ("maximize" in options)
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("kind", [prong.PRONG, prong.AdamW], ids=["SGD", "AdamW"])
@pytest.mark.parametrize("form", ["auto", "explicit", "materialised"])
def test_all_implementations_walk_the_same_path(kind, form):
    paths = []
    for options in OPTIONS[:4]:
        model = mlp()
        run(model, kind(model, 0.02, form=form, refresh=prong.Every(4, samples=200), **options), batches(model, 16))
        paths.append(canonical(model))
    for path in paths[1:]:
        torch.testing.assert_close(path, paths[0], rtol=1e-7, atol=1e-7)


@optimizers
def test_a_closure_takes_the_same_step(make):
    paths = []
    for with_closure in (False, True):
        model = mlp()
        optimizer = make(model, 0.02, refresh=prong.Every(3, samples=32))
        for x, y in batches(model, 8):

            def closure(model=model, optimizer=optimizer, x=x, y=y):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            if with_closure:
                assert torch.isfinite(optimizer.step(closure))
            else:
                closure()
                optimizer.step()
        paths.append(canonical(model))
    torch.testing.assert_close(*paths, **EXACT)


@kinds
def test_parameter_groups_keep_their_own_options(make):
    if make is prong.Muon:
        pytest.skip("makes groups of its own")
    model = mlp()
    first = model[0].weight
    rest = [p for p in model.parameters() if p is not first]
    optimizer = make(model, 0.02, params=[{"params": [first], "lr": 0.0}, {"params": rest}])
    before = first.detach().clone()
    run(model, optimizer, batches(model, 5))
    torch.testing.assert_close(first.detach(), before, **CLOSE)  # written as V U
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.02]
    assert optimizer.param_groups[0]["param_names"] == ["0.weight"]


def test_groups_can_be_added_and_outside_parameters_too():
    model, outside = mlp(), nn.Parameter(torch.ones(3, dtype=DOUBLE))
    with pytest.warns(UserWarning, match="38% of this model's parameters are whitened"):
        optimizer = prong.PRONG(model, 0.02, params=list(model[0].parameters()))
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.5})
    optimizer.add_param_group({"params": outside})
    assert [group["param_names"] for group in optimizer.param_groups][1] == ["2.weight", "2.bias"]
    outside.sum().backward()
    with pytest.warns(UserWarning, match="no whitened layer saw"):  # there was no forward at all
        optimizer.step()
    torch.testing.assert_close(outside.detach(), torch.full((3,), 0.98, dtype=DOUBLE))


@optimizers
def test_schedulers_drive_all_groups_and_cycle_momentum(make):
    model = mlp()
    optimizer = make(model, 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    before = [group["lr"] for group in optimizer.param_groups]
    for pair in batches(model, 2):
        run(model, optimizer, [pair])
        scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([1e-2 * lr for lr in before])
    model = mlp()
    optimizer = make(model, 0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    seen = []
    for pair in batches(model, 9):
        run(model, optimizer, [pair])
        scheduler.step()
        group = optimizer.param_groups[0]
        seen.append(group["betas"][0] if "betas" in group else group["momentum"])
    assert min(seen) == pytest.approx(0.85) and max(seen) > 0.94


@optimizers
def test_a_one_cycle_schedule_resumes_bit_for_bit(make):
    data = batches(mlp(), 9)

    def begin():
        model = mlp()
        optimizer = make(model, 0.02, refresh=prong.Every(4, samples=32))
        return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, 10)

    def go_on(model, optimizer, scheduler, data):
        for pair in data:
            run(model, optimizer, [pair])
            scheduler.step()

    whole, first, second = begin(), begin(), begin()
    go_on(*whole, data)
    go_on(*first, data[:5])
    for mine, theirs in zip(second, first, strict=True):
        mine.load_state_dict(through_a_file(theirs.state_dict()))
    go_on(*second, data[5:])
    torch.testing.assert_close(canonical(second[0]), canonical(whole[0]), **EXACT)


@optimizers
def test_accumulated_gradients_are_the_gradient_of_the_whole_batch(make):
    paths = []
    for parts in (1, 4):
        model = mlp()
        optimizer = make(model, 0.02, refresh=prong.Every(3, samples=200))
        for x, y in batches(model, 9):
            optimizer.zero_grad()
            for px, py in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (F.cross_entropy(model(px), py) / parts).backward()
            optimizer.step()
        paths.append(canonical(model))
    torch.testing.assert_close(*paths, rtol=1e-7, atol=1e-7)


@optimizers
def test_an_update_that_a_grad_scaler_skips_leaves_no_trace(make):
    paths = []
    for overflows in (False, True):
        model = mlp()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        optimizer = make(model, 0.02, refresh=prong.Every(4, samples=16))
        for number, (x, y) in enumerate(batches(model, 9)):  # 0: seeing a batch twice is as good as once; 5: no window
            for factor in [float("inf")] * (overflows and number in (0, 5)) + [1.0]:
                optimizer.zero_grad()
                (scaler.scale(F.cross_entropy(model(x), y)) * factor).backward()
                before = canonical(model)
                scaler.step(optimizer)
                scaler.update(4.0)
                if factor > 1:
                    torch.testing.assert_close(canonical(model), before, **EXACT)
        paths.append(canonical(model))
    torch.testing.assert_close(*paths, rtol=1e-7, atol=1e-7)


@optimizers
def test_gradients_after_a_step_are_those_of_the_backward_pass(make):
    model = mlp()
    optimizer = make(model, 0.02)
    for x, y in batches(model, 4):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        before = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
        optimizer.step()
        for name, p in model.named_parameters():
            changed = refresher_of(optimizer).updates == 1 and make.keywords["form"] in ("implicit", "explicit")
            if not changed:  # the first refresh, just before the step, carries the gradients of such layers over
                assert p.grad is before[name][0]
                torch.testing.assert_close(p.grad, before[name][1], **EXACT)


@kinds
def test_user_hooks_on_the_step_run_once_and_hooks_on_the_state_see_all_of_it(make):
    torch.optim.SGD(mlp().parameters(), 0.1)  # patches SGD.step; ours must not inherit its hooks a second time
    model, calls = mlp(), []
    optimizer = make(model, 0.02)
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_state_dict_post_hook(lambda _, state: calls.append("prong" in state))
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append("prong" in state))
    run(model, optimizer, batches(model, 1))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["pre", "post", True, True]


@kinds
def test_it_cannot_be_copied_or_pickled_and_says_what_to_do(make):
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(make(mlp(), 0.1))


@kinds
def test_a_model_with_batch_norm_layers_trains(make):
    """The paper's other reading of PRONG+."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).double()
    lr = 0.1 if make is prong.Muon else 0.02
    losses = run(model, make(model, lr, refresh=prong.Every(8, samples=64)), batches(model, 1) * 60)
    assert losses[-1] < 0.5 * losses[0]
    assert model[1].num_batches_tracked == 60


def test_inputs_that_were_silent_at_first_do_not_make_steps_of_units_that_are_silent_now_explode():
    """Then a mean of gradients is carried over to where squares of them are zero: a step of 1,300 was seen here."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 4).to(DOUBLE)
    optimizer = prong.AdamW(layer, 1e-3, form=prong.Materialised(block=2), trust=None)
    for update in range(12):
        x = torch.randn(32, 6, dtype=DOUBLE) + 1
        x[:, 4:] *= update >= 3
        units = slice(4 if update < 3 else 3)
        before = canonical(layer)["weight"]
        optimizer.zero_grad()
        layer(x)[:, units].square().mean().backward()
        optimizer.step()
        assert (canonical(layer)["weight"] - before).abs().max() < 0.01


@forms
def test_a_bias_that_is_not_trained_absorbs_no_mean(form):
    model = mlp()
    weights = [layer.weight for layer in model if hasattr(layer, "weight")]
    optimizer = prong.PRONG(model, 0.02, form=form, refresh=prong.Every(4, samples=32), params=weights)
    before = model[0].bias.detach().clone()
    run(model, optimizer, batches(model, 4))
    assert site_of(model).whitening.c is None
    torch.testing.assert_close(model[0].bias.detach(), before, **EXACT)


@optimizers
def test_a_step_that_raises_leaves_parameters_and_gradients_as_they_were(make):
    """Inside a step, plain layers hold V and d; whatever happens there, W and b come back."""
    model = mlp()
    optimizer = make(model, 0.02, refresh=prong.Every(4, samples=32))
    data = batches(model, 6)
    run(model, optimizer, data[:3])
    x, y = data[3]
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    before, gradients = canonical(model), [p.grad.clone() for p in model.parameters()]
    part = next(iter(optimizer._parts.values()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    z = model(x)  # which puts things right if the step could not
    torch.testing.assert_close(canonical(model), before, **EXACT)
    torch.testing.assert_close([p.grad for p in model.parameters()], gradients, **EXACT)
    F.cross_entropy(z, y).backward()
    run(model, optimizer, data[4:])
    assert all(torch.isfinite(p).all() for p in model.parameters())
