"""W = R^T V U: whitening of gradients, and its scalar version."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import prong
from prong.gradients.whitening import GradientWhitening
from prong.model.whiten import whitened_sites
from tests.training import DOUBLE, batches, canonical, convnet, mlp, run

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
SOURCES = [{"balance": True}, {"gradient_whitening": "empirical"}, {"gradient_whitening": "categorical"}]
IDS = ["balance", "empirical", "categorical"]


def gathered_by(model):
    """What the sites' running statistics make of Q, or the matrices that were taken."""
    sites = whitened_sites(model).items()
    running = {name: site.outputs.preconditioner(1e-2) for name, (_, site) in sites if site.outputs is not None}
    return running | next(layer.owner.gradients.Q for _, (layer, _) in sites)


@pytest.mark.parametrize("options", SOURCES, ids=IDS)
@pytest.mark.parametrize("make", [mlp, convnet])
def test_both_forms_walk_the_same_path(make, options):
    paths = []
    for form in ("implicit", "explicit"):
        model = make()
        torch.manual_seed(5)
        optimizer = prong.PRONG(model, 0.005, eps=0.3, period=6, samples=32, form=form, **options)
        run(model, optimizer, batches(model, 20))
        assert gathered_by(model)
        paths.append(canonical(model))
    torch.testing.assert_close(*paths, **CLOSE)


@pytest.mark.parametrize("options", SOURCES, ids=IDS)
def test_it_trains(options):
    model = mlp()
    data = [(x, (x[:, :4] - x[:, 2:]).argmax(1)) for x, _ in batches(model, 80)]
    losses = run(model, prong.PRONG(model, 0.01, eps=0.3, period=8, samples=64, **options), data)
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])


def test_the_step_is_the_kronecker_factored_natural_gradient():
    """Q (gW - gb c^T) P with Q from per-example output gradients of the training loss."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    h, y = torch.randn(30, 5, dtype=DOUBLE) + 1, torch.randint(3, (30,))
    optimizer = prong.PRONG(model, 0.1, 0.0, eps=0.2, gradient_whitening="empirical")
    prong.refresh_(model, h, eps=0.2)

    z = model(h).detach().requires_grad_()
    delta = torch.autograd.grad(F.cross_entropy(z, y, reduction="sum"), z)[0]  # per example: no mean
    G = delta.T @ delta / 30
    Q = torch.linalg.inv(G + 0.2 * G.diagonal().mean() * torch.eye(3, dtype=DOUBLE))
    run(model, optimizer, [(h, y)])  # gathers, and refreshes after it
    torch.testing.assert_close(optimizer.refresher.gradients.Q[""][0], Q, **CLOSE)

    W, b = model.weight.detach().clone(), model.bias.detach().clone()
    optimizer.zero_grad()
    F.cross_entropy(model(h), y).backward()
    nW, nb = model.weight.grad.clone(), model.bias.grad.clone()
    Q = optimizer.refresher.gradients.Q[""][0].clone()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), W - 0.1 * Q @ nW, **CLOSE)
    torch.testing.assert_close(model.bias.detach(), b - 0.1 * Q @ nb, **CLOSE)
    torch.testing.assert_close(model.weight.grad, nW, rtol=0, atol=0)  # what the user sees is untouched


def test_labels_drawn_from_the_model_give_its_own_fisher_factor():
    """Many draws: G tends to diag(p) - p p^T averaged over inputs."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    optimizer = prong.PRONG(model, 0.0, 0.0, eps=1e-3, period=10**6, samples=10**6, gradient_whitening="categorical")
    optimizer.refresher.next_refresh = lambda: 10**9
    h = torch.randn(500, 4, dtype=DOUBLE)
    for _ in range(60):
        model(h)
    p = model(h).softmax(1)
    expected = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]).mean(0)
    outputs = optimizer.refresher.sites[""][1].outputs
    torch.testing.assert_close((outputs.total / outputs.examples)[0], expected.detach(), rtol=0, atol=7e-3)


def test_drawing_labels_leaves_gradients_and_the_random_state_alone():
    model = mlp()
    prong.PRONG(model, 0.0, eps=0.1, gradient_whitening="categorical")
    x, y = batches(model, 1)[0]
    state = torch.get_rng_state()
    loss = F.cross_entropy(model(x), y)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())
    loss.backward()


def test_balance_divides_by_the_mean_square_of_per_example_output_gradients():
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    h, y = torch.randn(30, 5, dtype=DOUBLE), torch.randn(30, 3, dtype=DOUBLE)
    optimizer = prong.PRONG(model, 0.1, 0.0, balance=True)
    W = model.weight.detach().clone()
    delta = (model(h) - y).detach()
    (0.5 * (model(h) - y).square().sum(1).mean()).backward()
    expected = W - 0.1 * model.weight.grad / delta.square().mean()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), expected, **CLOSE)


@pytest.mark.parametrize("make", [mlp, convnet])
@pytest.mark.parametrize("rows", [2, 64], ids=["activation space", "gradient space"])
def test_in_the_implicit_form_balance_is_in_the_gradients(make, rows):
    model = make()
    optimizer = prong.PRONG(model, 0.01, eps=0.3, samples=32, balance=True)
    run(model, optimizer, batches(model, 3))
    x, y = (t.repeat(rows, *(1,) * (t.dim() - 1))[:rows] for t in batches(model, 1)[0])
    plain = copy.deepcopy(model)  # natural gradients, free of the optimizer
    F.cross_entropy(plain(x), y).backward()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    Q = gathered_by(model)
    for name, (layer, site) in whitened_sites(plain).items():
        balanced = whitened_sites(model)[name][0].pair(site)
        for p, q in zip(layer.pair(site), balanced, strict=True):
            if p is not None:
                expected = p.grad.unflatten(0, (site.layout.groups, -1)) * Q[name].view(-1, *(1,) * p.dim())
                torch.testing.assert_close(q.grad, expected.view_as(p), **CLOSE)
    before = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


def test_a_backward_that_failed_half_way_does_not_change_what_is_balanced():
    paths = []
    for fails in (False, True):
        model = mlp()
        optimizer = prong.PRONG(model, 0.01, eps=0.3, period=4, samples=32, source="ema", balance=True)
        for i, (x, y) in enumerate(batches(model, 6)):
            if fails and i == 4:
                F.cross_entropy(model(x), y).backward()
                with pytest.raises(RuntimeError):
                    model(x[:, :-1])  # a shape that it cannot take
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        paths.append(canonical(model))
    torch.testing.assert_close(*paths, **CLOSE)


@pytest.mark.parametrize("form", ["implicit", "explicit"])
def test_loss_scaling_and_accumulation_are_undone_when_told_of(form):
    paths = []
    for parts, scale in ((1, 1.0), (4, 1.0), (1, 1024.0)):
        model = mlp()
        optimizer = prong.PRONG(model, 0.01, eps=0.3, period=4, samples=32, form=form, balance=True)
        optimizer.loss_scale = lambda parts=parts, scale=scale: scale / parts
        for x, y in batches(model, 10):
            optimizer.zero_grad()
            for px, py in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (scale / parts * F.cross_entropy(model(px), py)).backward()
            for p in model.parameters():
                p.grad /= scale
            optimizer.step()
        paths.append(canonical(model))
    torch.testing.assert_close(paths[0], paths[1], **CLOSE)
    torch.testing.assert_close(paths[0], paths[2], **CLOSE)


def test_attention_is_watched_too():
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.attention, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 4)
            self.double()

        def forward(self, x):
            return self.head(self.attention(x[:, None] * self.steps, x[:, None] * self.steps, x[:, None])[0].mean(1))

        steps = torch.linspace(0.5, 1, 1, dtype=DOUBLE)[:, None]

    paths = []
    for form in ("implicit", "explicit"):
        model = Attending()
        optimizer = prong.PRONG(model, 0.005, eps=0.3, period=6, samples=32, form=form, gradient_whitening="empirical")
        run(model, optimizer, batches(model, 10))
        assert set(optimizer.refresher.gradients.Q) >= {"attention.v", "attention.out_proj", "head"}
        paths.append(canonical(model))
    torch.testing.assert_close(*paths, **CLOSE)


def test_wrong_choices_are_refused():
    with pytest.raises(ValueError, match="choose one"):
        prong.PRONG(mlp(), 0.1, balance=True, gradient_whitening="empirical")
    with pytest.raises(ValueError, match="categorical"):
        prong.PRONG(mlp(), 0.1, gradient_whitening="poisson")


def test_a_model_whose_output_is_not_a_tensor_cannot_draw_labels():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x):
            return self.linear(x), x

    model = Two()
    prong.PRONG(model, 0.1, gradient_whitening="gaussian")
    with pytest.raises(TypeError, match="empirical"):
        model(torch.randn(4, 3))


def test_an_overflow_that_a_grad_scaler_skips_is_left_out_of_balance():
    model = mlp()
    optimizer = prong.PRONG(model, 0.01, eps=0.3, period=4, samples=32, balance=True)
    data = batches(model, 4)
    run(model, optimizer, data[:2])
    before = gathered_by(model)["0"].clone()
    (F.cross_entropy(model(data[2][0]), data[2][1]) * float("inf")).backward()
    run(model, optimizer, data[3:])
    after = gathered_by(model)["0"]
    assert torch.isfinite(after).all() and not torch.equal(after, before)


@pytest.mark.parametrize("options", SOURCES, ids=IDS)
def test_copies_of_the_model_are_free_of_its_optimizer(options):
    model = mlp()
    optimizer = prong.PRONG(model, 0.01, eps=0.3, period=4, samples=32, **options)
    x, y = batches(model, 1)[0]
    run(model, optimizer, [(x, y)])
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        torch.testing.assert_close(other(x), model(x))
        F.cross_entropy(other(x), y).backward()
        assert all(layer.sites[0].outputs is None for layer in other[::2])


@pytest.mark.parametrize("options", SOURCES, ids=IDS)
def test_functional_transforms_and_ordinary_gradients_are_not_counted(options):
    model = mlp()
    optimizer = prong.PRONG(model, 0.01, eps=0.3, period=64, samples=1000, **options)
    data = batches(model, 3)
    run(model, optimizer, data[:1])
    gathered = [site.outputs.examples for _, site in optimizer.refresher.sites.values()]
    x, y = data[1]
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, x, y):
        return F.cross_entropy(torch.func.functional_call(model, parameters, (x[None],)), y[None])

    model.eval()
    torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, y)
    with prong.ordinary_gradients(model):
        F.cross_entropy(model(x), y).backward()
    model.train()
    assert [site.outputs.examples for _, site in optimizer.refresher.sites.values()] == gathered
    run(model, optimizer, data[2:])


def test_an_example_of_attention_is_a_sequence_wherever_the_batch_is():
    torch.manual_seed(0)
    first = nn.MultiheadAttention(6, 2, batch_first=True).double()
    second = copy.deepcopy(first)
    second.batch_first = False
    x = torch.randn(8, 5, 6, dtype=DOUBLE)
    Q = []
    for model, h in ((first, x), (second, x.transpose(0, 1))):
        optimizer = prong.PRONG(model, 0.0, 0.0, balance=True)
        model(h, h, h)[0].square().sum().div(8).backward()
        optimizer.step()
        Q.append(gathered_by(model))
    assert set(Q[0]) == {"q", "k", "v", "out_proj"}
    torch.testing.assert_close(Q[0], Q[1], **CLOSE)


def test_balance_works_with_both_kinds_of_checkpointing():
    paths = []
    for reentrant in (None, True, False):
        model = mlp()
        optimizer = prong.PRONG(model, 0.01, eps=0.3, period=4, samples=32, balance=True)
        for x, y in batches(model, 6):
            optimizer.zero_grad()
            z = model(x) if reentrant is None else checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
            F.cross_entropy(z, y).backward()
            optimizer.step()
        paths.append(canonical(model))
    torch.testing.assert_close(paths[0], paths[1], **CLOSE)
    torch.testing.assert_close(paths[0], paths[2], **CLOSE)


def test_a_construction_that_fails_leaves_no_hook_behind():
    model = mlp()
    for options in ({"period": 0, "gradient_whitening": "categorical"}, {"eps": 0.0, "balance": True}):
        with pytest.raises(ValueError):
            prong.PRONG(model, 0.1, **options)
        assert not model._forward_hooks
    prong.PRONG(model, 0.1)
    with pytest.raises(ValueError, match="another PRONG"):
        prong.PRONG(model, 0.1, balance=True)
    assert model[0].sites[0].outputs is None


def test_a_loss_scale_that_is_none_is_refused():
    model = mlp()
    optimizer = prong.PRONG(model, 0.1, balance=True)
    optimizer.loss_scale = 0.0
    with pytest.raises(ValueError, match="loss_scale"):
        run(model, optimizer, batches(model, 1))


class _Nothing(torch.autograd.Function):
    """Adds, and sends no gradient back to the first."""

    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, g):
        return None, g


def test_an_output_that_gets_no_gradient_is_no_trouble():
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = prong.PRONG(model, 0.1, balance=True)
    x = torch.randn(5, 4)
    _Nothing.apply(model(x), model(x)).sum().backward()
    assert model[0].sites[0].outputs.examples == 5
    optimizer.step()


@pytest.mark.parametrize("source", ["balance", "empirical", "gaussian", "categorical"])
@pytest.mark.parametrize("shape", [(16, 6), (16, 5, 6)], ids=["rows", "tokens"])
@pytest.mark.parametrize("form", ["implicit", "explicit"])
def test_an_activation_in_place_does_not_change_what_is_gathered(source, shape, form):
    options = {"balance": True} if source == "balance" else {"gradient_whitening": source}
    x, totals, gradients = torch.randn(shape, dtype=DOUBLE), [], []
    for inplace in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace), nn.Linear(8, 4), nn.Flatten(1)).double()
        prong.PRONG(model, 0.01, eps=0.3, form=form, **options)
        model(x).square().mean().backward()
        totals.append({name: site.outputs.total for name, (_, site) in whitened_sites(model).items()})
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*totals, **CLOSE)
    torch.testing.assert_close(*gradients, **CLOSE)


@pytest.mark.parametrize("options", SOURCES, ids=IDS)
def test_forwards_in_eval_mode_do_not_count(options):
    model = mlp()
    optimizer = prong.PRONG(model, 0.01, eps=0.3, period=64, samples=1000, **options)
    data = batches(model, 2)
    run(model, optimizer, data[:1])
    gathered = [site.outputs.examples for _, site in optimizer.refresher.sites.values()]
    F.cross_entropy(model.eval()(data[1][0]), data[1][1]).backward()
    assert [site.outputs.examples for _, site in optimizer.refresher.sites.values()] == gathered
    run(model.train(), optimizer, data[1:])


@pytest.mark.parametrize("form", ["implicit", "explicit"])
def test_training_in_eval_mode_is_not_balanced(form):
    paths = []
    for balance in (False, True):
        model = mlp()
        optimizer = prong.PRONG(model, 0.01, eps=0.3, form=form, balance=balance)
        prong.refresh_(model, batches(model, 1)[0][0], eps=0.3)
        with pytest.warns(UserWarning, match="training mode"):
            run(model.eval(), optimizer, batches(model, 6))
        paths.append(canonical(model))
    torch.testing.assert_close(*paths, **CLOSE)


@pytest.mark.filterwarnings("ignore:no whitened layer saw two samples")
@pytest.mark.parametrize("order", ["eval first", "eval last", "eval instead"])
def test_gradients_of_forwards_in_eval_mode_are_balanced_with_the_others(order):
    """In the explicit form, balance multiplies the sum of all gradients; in the implicit form, each as it arises."""
    paths = []
    for form in ("implicit", "explicit"):
        model = mlp()
        optimizer = prong.PRONG(model, 0.01, eps=0.3, period=4, samples=32, form=form, balance=True)
        for i, (x, y) in enumerate(batches(model, 10)):
            optimizer.zero_grad()
            for training in {"eval first": (False, True), "eval last": (True, False)}.get(order, (i < 5,)):
                F.cross_entropy(model.train(training)(x + training), y).backward()
            optimizer.step()
        paths.append(canonical(model))
    torch.testing.assert_close(*paths, **CLOSE)


@pytest.mark.parametrize(
    ("source", "logit"), [("categorical", float("inf")), ("categorical", float("nan")), ("bernoulli", float("nan"))]
)
def test_an_output_that_no_label_can_be_drawn_from_is_left_out(source, logit):
    """As of an overflow in half precision, whose update a GradScaler is about to skip."""
    model = nn.Sequential(nn.Linear(6, 4)).double()
    optimizer = prong.PRONG(model, 0.01, eps=0.3, gradient_whitening=source)
    x = batches(model, 1)[0][0]
    with torch.no_grad():
        model[0].bias[0] = logit
    model(x)
    outputs = optimizer.refresher.sites["0"][1].outputs
    assert outputs.total is None and not outputs.pending
    with torch.no_grad():
        model[0].bias[0] = 0.0
    model(x)
    assert torch.isfinite(outputs.total).all()


def test_classes_that_are_masked_are_no_obstacle_to_drawing_others():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 4).double()

        def forward(self, x):
            return self.linear(x).masked_fill(torch.tensor([True, False, False, False]), -torch.inf)

    model = Masked()
    optimizer = prong.PRONG(model, 0.01, eps=0.3, gradient_whitening="categorical")
    model(batches(model, 1)[0][0])
    outputs = optimizer.refresher.sites["linear"][1].outputs
    assert outputs.examples == 16 and (outputs.total[0].diagonal() > 0).tolist() == [False, True, True, True]


def test_a_state_is_loaded_to_where_each_layer_is():
    model = prong.whiten_(mlp())
    saved = GradientWhitening(whitened_sites(model), "categorical", 0.1)
    for name, (_, site) in whitened_sites(model).items():
        saved.open(name)
        site.outputs.add(torch.randn(3, site.layout.outputs), 1, -1)
        saved.Q[name] = torch.eye(site.layout.outputs)[None]
    state = saved.state_dict()
    model[2].to("meta")
    loaded = GradientWhitening(whitened_sites(model), "categorical", 0.1)
    loaded.load_state_dict(state)
    places = {name: layer.pair(site)[0].device for name, (layer, site) in loaded.sites.items()}
    assert {name: Q.device for name, Q in loaded.Q.items()} == places
    assert {name: site.outputs.total.device for name, (_, site) in loaded.sites.items()} == places


def drawn(gradients):
    """Numbers from the generator that labels are drawn with."""
    return torch.rand(3, generator=gradients._generator(torch.device("cpu")))


def test_random_numbers_continue_wherever_their_state_was_loaded_to():
    saved, loaded = (GradientWhitening(whitened_sites(prong.whiten_(mlp())), "gaussian", 0.1) for _ in range(2))
    drawn(saved)
    state = saved.state_dict()
    on_cpu = state["random"]
    loaded.load_state_dict(state | {"random": SimpleNamespace(cpu=lambda: on_cpu)})  # as map_location would have it
    loaded.settle()
    assert torch.equal(loaded.state_dict()["random"], on_cpu)
    expected = drawn(saved)
    assert torch.equal(drawn(loaded), expected)
    loaded.undo()
    loaded.load_state_dict(state)
    drawn(loaded)
    loaded.undo()
    assert torch.equal(drawn(loaded), expected)


def test_random_numbers_of_another_kind_of_device_begin_anew():
    saved, loaded = (GradientWhitening(whitened_sites(prong.whiten_(mlp())), "gaussian", 0.1) for _ in range(2))
    first = drawn(saved)
    state = saved.state_dict()
    loaded.load_state_dict(state | {"random": state["random"][:16]})  # the size of a GPU's
    assert torch.equal(drawn(loaded), first)
