"""W = R^T V U: whitening of gradients."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import prong
from prong.model.whiten import whitened_sites
from prong.options import WhitenOutputs
from tests.training import DOUBLE, attentive, batches, canonical, convnet, mlp, run, tensors

CLOSE = {"rtol": 1e-9, "atol": 1e-10}
EXACT = {"rtol": 0.0, "atol": 0.0}
FORMS = ("auto", "implicit", "explicit")
LONG = prong.Every(64, samples=1000)
forms = pytest.mark.parametrize("form", FORMS)
sources = pytest.mark.parametrize("source", ["empirical", "categorical"])


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Matrices Q, and what was gathered since they were taken, by the names of sites."""
    return optimizer.state_dict()["prong"]["gradients"]


def gathered_by(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return tensors(state_of(optimizer)["gathered"])


def assert_one_path(paths: list[dict[str, Tensor]]) -> None:
    for path in paths[1:]:
        torch.testing.assert_close(path, paths[0], **CLOSE)


MODELS = {
    "mlp": (mlp, 5e-3),
    "conv": (convnet, 5e-3),
    "packed": (attentive, 5e-4),
    "apart": (lambda: attentive(4), 5e-4),
}


@sources
@pytest.mark.parametrize(("make", "lr"), MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("trust", [None, 0.01])
def test_all_forms_walk_the_same_path(make, lr, source, trust):
    paths = []
    for form in FORMS:
        model = make()
        options = {"form": form, "outputs": WhitenOutputs(source), "trust": trust}
        optimizer = prong.PRONG(model, lr, refresh=prong.Every(6, samples=32), **options)
        run(model, optimizer, batches(model, 14))
        assert state_of(optimizer)["Q"].keys() == optimizer.state_dict()["prong"]["layers"].keys()
        paths.append(canonical(model))
    assert_one_path(paths)


@sources
def test_it_trains(source):
    model = mlp()
    data = [(x, (x[:, :4] - x[:, 2:]).argmax(1)) for x, _ in batches(model, 80)]
    options = {"outputs": WhitenOutputs(source), "refresh": prong.Every(8, samples=64)}
    losses = run(model, prong.PRONG(model, 0.01, **options), data)
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])


@forms
def test_the_step_is_the_kronecker_factored_natural_gradient(form):
    """Q (gW - gb c^T) P with Q from per-example output gradients of the training loss."""
    model, h, y = nn.Linear(5, 3).double(), torch.randn(30, 5, dtype=DOUBLE) + 1, torch.randint(3, (30,))
    optimizer = prong.PRONG(
        model, 0.1, momentum=0.0, form=form, damping=prong.Absolute(0.2), trust=None,
        outputs=WhitenOutputs("empirical", damping=0.3),
    )  # fmt: skip
    c = h.mean(0)
    P = torch.linalg.inv((h - c).T @ (h - c) / 30 + 0.2 * torch.eye(5, dtype=DOUBLE))
    z = model(h).detach().requires_grad_()
    delta = torch.autograd.grad(F.cross_entropy(z, y, reduction="sum"), z)[0]  # per example: no mean
    G = delta.T @ delta / 30
    Q = torch.linalg.inv(G + 0.3 * G.diagonal().mean() * torch.eye(3, dtype=DOUBLE))
    run(model, optimizer, [(h, y)])  # gathers, and refreshes after it
    torch.testing.assert_close(state_of(optimizer)["Q"][""][0], Q, **CLOSE)

    plain = nn.Linear(5, 3).double()
    plain.load_state_dict(model.state_dict())
    F.cross_entropy(plain(h), y).backward()
    nW = (plain.weight.grad - torch.outer(plain.bias.grad, c)) @ P
    nb = plain.bias.grad - nW @ c
    optimizer.zero_grad()
    F.cross_entropy(model(h), y).backward()
    shown = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), plain.weight.detach() - 0.1 * Q @ nW, **CLOSE)
    torch.testing.assert_close(model.bias.detach(), plain.bias.detach() - 0.1 * Q @ nb, **CLOSE)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), shown, strict=True)), "as users know them"


@pytest.mark.parametrize("bound", [{}, {"trust": None}], ids=["bounded", "unbounded"])
@sources
@forms
def test_a_layer_whose_output_gradients_vanish_is_whitened_as_if_they_were_larger(source, form, bound):
    """A layer norm of two features gives plus and minus one: what comes before it has gradients of about zero."""
    model = nn.Sequential(nn.Linear(7, 2), nn.LayerNorm(2), nn.Linear(2, 3))
    start = model[0].weight.detach().clone()
    data = [(torch.randn(32, 7), torch.randint(3, (32,))) for _ in range(4)] * 8
    options = {"form": form, "refresh": prong.Every(4, samples=64), "outputs": WhitenOutputs(source), **bound}
    optimizer = prong.PRONG(model, 0.01, **options)
    losses = run(model, optimizer, data)
    Q = state_of(optimizer)["Q"]
    assert Q["0"].norm() < 1e4 * Q["2"].norm()
    assert all(torch.isfinite(loss) for loss in losses) and sum(losses[-4:]) < sum(losses[:4])
    if "trust" not in bound:  # without, nothing is in the way of a direction that the loss does not depend on
        assert (prong.fold_(model)[0].weight - start).norm() < start.norm()


def test_labels_drawn_from_the_model_give_its_own_fisher_factor():
    """Many draws: G tends to diag(p) - p p^T averaged over inputs."""
    model, h = nn.Linear(4, 3).double(), torch.randn(500, 4, dtype=DOUBLE)
    optimizer = prong.PRONG(model, 0.0, outputs=WhitenOutputs("categorical"))
    for _ in range(60):
        model(h)
    p = model(h).softmax(1)
    expected = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]).mean(0)
    outputs = gathered_by(optimizer)[""]
    assert outputs["count"] == 61 * 500
    torch.testing.assert_close((outputs["total"] / outputs["count"])[0], expected.detach(), rtol=0, atol=7e-3)


@forms
@pytest.mark.parametrize("source", ["empirical", "categorical", "bernoulli", "gaussian"])
def test_gathering_leaves_gradients_and_the_random_state_alone(source, form):
    gradients = []
    for outputs in (None, WhitenOutputs(source)):
        model = mlp()
        optimizer = prong.PRONG(model, 0.0, form=form, outputs=outputs)
        x, y = batches(model, 1)[0]
        state = torch.get_rng_state()
        loss = F.cross_entropy(model(x), y)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(p.grad is None for p in model.parameters())
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert {part["count"] for part in gathered_by(optimizer).values()} == {16}
    torch.testing.assert_close(*gradients, **EXACT)


@pytest.mark.parametrize("refresh", [prong.Every(4, samples=32), prong.Every(4, samples=32, source="ema")], ids=str)
@sources
def test_an_update_that_failed_half_way_does_not_change_what_is_gathered(source, refresh):
    """Nor which labels are drawn after it."""
    paths = []
    for fails in (False, True):
        model = mlp()
        optimizer = prong.PRONG(model, 0.01, refresh=refresh, outputs=WhitenOutputs(source))
        for i, (x, y) in enumerate(batches(model, 8)):
            if fails and i in (3, 4):
                F.cross_entropy(model(x), y).backward()
                with pytest.raises(RuntimeError):
                    model(x[:, :-1])  # a shape that it cannot take
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        paths.append(canonical(model))
    assert_one_path(paths)


@forms
def test_loss_scaling_and_accumulation_are_undone_when_told_of(form):
    paths = []
    for parts, scale in ((1, 1.0), (4, 1.0), (1, 1024.0)):
        model = mlp()
        outputs = WhitenOutputs("empirical", loss_scale=lambda parts=parts, scale=scale: scale / parts)
        optimizer = prong.PRONG(model, 0.01, form=form, refresh=prong.Every(4, samples=32), outputs=outputs)
        for x, y in batches(model, 10):
            optimizer.zero_grad()
            for px, py in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (scale / parts * F.cross_entropy(model(px), py)).backward()
            for p in model.parameters():
                p.grad /= scale
            optimizer.step()
        paths.append(canonical(model))
    assert_one_path(paths)


def test_drawn_labels_know_no_scale_of_the_loss():
    found = []
    for scale in (1.0, 1024.0):
        model = mlp()
        optimizer = prong.PRONG(model, 0.0, outputs=WhitenOutputs("categorical"))
        run(model, optimizer, batches(model, 3))
        model(batches(model, 1)[0][0]).sum().mul(scale).backward()
        found.append(tensors(state_of(optimizer)))
    torch.testing.assert_close(*found, **EXACT)


@sources
def test_a_model_whose_output_is_not_a_tensor_cannot_draw_labels(source):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x):
            return self.linear(x), x

    model = Two()
    optimizer = prong.PRONG(model, 0.1, outputs=WhitenOutputs(source))
    if source == "categorical":
        with pytest.raises(TypeError, match="empirical"):
            model(torch.randn(4, 3))
    else:
        model(torch.randn(4, 3))[0].sum().backward()
        optimizer.step()
        assert state_of(optimizer)["Q"]


def test_an_overflow_that_a_grad_scaler_skips_is_left_out():
    model = mlp()
    optimizer = prong.PRONG(model, 0.01, refresh=LONG, outputs=WhitenOutputs("empirical"))
    data = batches(model, 6)
    run(model, optimizer, data[:5])
    before = gathered_by(optimizer)
    (F.cross_entropy(model(data[2][0]), data[2][1]) * float("inf")).backward()
    torch.testing.assert_close(gathered_by(optimizer), before, **EXACT)
    run(model, optimizer, data[5:])
    assert all(part["count"] == before[name]["count"] + 16 for name, part in gathered_by(optimizer).items())


@sources
@forms
def test_copies_of_the_model_are_free_of_its_optimizer(source, form):
    model = mlp()
    optimizer = prong.PRONG(model, 0.01, form=form, refresh=LONG, outputs=WhitenOutputs(source))
    x, y = batches(model, 1)[0]
    run(model, optimizer, [(x, y)])
    expected = model.eval()(x)
    model.train()
    before = tensors(state_of(optimizer))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        torch.testing.assert_close(other(x), expected)
        F.cross_entropy(other(x), y).backward()
        torch.testing.assert_close(tensors(state_of(optimizer)), before, **EXACT)
        assert all(site.outputs is None for _, site in whitened_sites(other).values())


@sources
@forms
def test_only_backward_passes_of_training_are_counted(source, form):
    """Not those in eval mode, of functional transforms, or for ordinary gradients."""
    model = mlp()
    optimizer = prong.PRONG(model, 0.01, form=form, refresh=LONG, outputs=WhitenOutputs(source))
    data = batches(model, 3)
    run(model, optimizer, data[:1])
    gathered = gathered_by(optimizer)
    x, y = data[1]
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, x, y):
        return F.cross_entropy(torch.func.functional_call(model, parameters, (x[None],)), y[None])

    F.cross_entropy(model.eval()(x), y).backward()
    model.train()
    torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, y)
    with prong.ordinary_gradients(model):
        F.cross_entropy(model(x), y).backward()
    torch.testing.assert_close(gathered_by(optimizer), gathered, **EXACT)
    run(model, optimizer, data[2:])


def test_an_example_of_attention_is_a_sequence_wherever_the_batch_is():
    first = nn.MultiheadAttention(6, 2, batch_first=True).double()
    second = copy.deepcopy(first)
    second.batch_first = False
    x = torch.randn(8, 5, 6, dtype=DOUBLE)
    found = []
    for model, h in ((first, x), (second, x.transpose(0, 1))):
        optimizer = prong.PRONG(model, 0.0, outputs=WhitenOutputs("empirical"))
        model(h, h, h)[0].square().sum().div(8).backward()
        found.append(gathered_by(optimizer))
    assert {name: part["count"] for name, part in found[0].items()} == dict.fromkeys(("q", "k", "v", "out_proj"), 8)
    torch.testing.assert_close(*found, **CLOSE)


@forms
def test_it_works_with_both_kinds_of_checkpointing(form):
    paths = []
    for reentrant in (None, True, False):
        model = mlp()
        options = {"form": form, "refresh": prong.Every(4, samples=32), "outputs": WhitenOutputs("empirical")}
        optimizer = prong.PRONG(model, 0.01, **options)
        for x, y in batches(model, 6):
            optimizer.zero_grad()
            z = model(x) if reentrant is None else checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
            F.cross_entropy(z, y).backward()
            optimizer.step()
        paths.append(canonical(model))
    assert_one_path(paths)


@pytest.mark.parametrize("scale", [0.0, float("nan"), lambda: 0.0], ids=["zero", "NaN", "a function"])
def test_a_loss_scale_that_is_none_is_refused(scale):
    model = mlp()
    with pytest.raises(ValueError, match="loss_scale"):
        run(model, prong.PRONG(model, 0.1, outputs=WhitenOutputs("empirical", loss_scale=scale)), batches(model, 1))


class _Nothing(torch.autograd.Function):
    """Adds, and sends no gradient back to the first."""

    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, g):
        return None, g


@sources
def test_an_output_that_gets_no_gradient_is_no_trouble(source):
    class Adding(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return _Nothing.apply(self.linear(x), self.linear(x))

    model = Adding()
    optimizer = prong.PRONG(model, 0.1, outputs=WhitenOutputs(source))
    model(torch.randn(5, 4)).sum().backward()
    assert gathered_by(optimizer)["linear"]["count"] == 5
    optimizer.step()


@pytest.mark.parametrize("source", ["empirical", "gaussian", "categorical"])
@pytest.mark.parametrize("shape", [(16, 6), (16, 5, 6)], ids=["rows", "tokens"])
@forms
def test_an_activation_in_place_does_not_change_what_is_gathered(source, shape, form):
    x, found, gradients = torch.randn(shape, dtype=DOUBLE), [], []
    for inplace in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace), nn.Linear(8, 4), nn.Flatten(1)).double()
        optimizer = prong.PRONG(model, 0.01, form=form, outputs=WhitenOutputs(source))
        model(x).square().mean().backward()
        found.append(gathered_by(optimizer))
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found, **CLOSE)
    torch.testing.assert_close(*gradients, **CLOSE)


@sources
@forms
def test_training_in_eval_mode_takes_the_steps_that_it_takes_without(source, form):
    paths = []
    for outputs in (None, WhitenOutputs(source)):
        model = mlp()
        optimizer = prong.PRONG(model, 0.01, form=form, outputs=outputs)
        prong.refresh_(model, batches(model, 1)[0][0])
        with pytest.warns(UserWarning, match="training mode"):
            run(model.eval(), optimizer, batches(model, 6))
        paths.append(canonical(model))
    torch.testing.assert_close(*paths, **CLOSE)


@pytest.mark.filterwarnings("ignore:no whitened layer saw two samples")
@pytest.mark.parametrize("order", ["eval first", "eval last", "eval instead"])
@sources
def test_gradients_of_forwards_in_eval_mode_are_whitened_with_the_others(order, source):
    paths = []
    for form in FORMS:
        model = mlp()
        options = {"form": form, "refresh": prong.Every(4, samples=32), "outputs": WhitenOutputs(source)}
        optimizer = prong.PRONG(model, 0.01, **options)
        for i, (x, y) in enumerate(batches(model, 10)):
            optimizer.zero_grad()
            for training in {"eval first": (False, True), "eval last": (True, False)}.get(order, (i < 5,)):
                F.cross_entropy(model.train(training)(x + training), y).backward()
            optimizer.step()
        paths.append(canonical(model))
    assert_one_path(paths)


@pytest.mark.parametrize(
    ("source", "logit"), [("categorical", float("inf")), ("categorical", float("nan")), ("bernoulli", float("nan"))]
)
def test_an_output_that_no_label_can_be_drawn_from_is_left_out(source, logit):
    """As of an overflow in half precision, whose update a GradScaler is about to skip."""
    model = nn.Sequential(nn.Linear(6, 4)).double()
    optimizer = prong.PRONG(model, 0.01, outputs=WhitenOutputs(source))
    x = batches(model, 1)[0][0]
    with torch.no_grad():
        model[0].bias[0] = logit
    model(x)
    assert gathered_by(optimizer)["0"] == {"count": 0}
    with torch.no_grad():
        model[0].bias[0] = 0.0
    model(x)
    assert gathered_by(optimizer)["0"]["count"] == 16
    assert torch.isfinite(gathered_by(optimizer)["0"]["total"]).all()


def test_classes_that_are_masked_are_no_obstacle_to_drawing_others():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 4).double()

        def forward(self, x):
            return self.linear(x).masked_fill(torch.tensor([True, False, False, False]), -torch.inf)

    model = Masked()
    optimizer = prong.PRONG(model, 0.01, outputs=WhitenOutputs("categorical"))
    model(batches(model, 1)[0][0])
    outputs = gathered_by(optimizer)["linear"]
    assert outputs["count"] == 16 and (outputs["total"][0].diagonal() > 0).tolist() == [False, True, True, True]


# State


def drawing(model: nn.Module) -> torch.optim.Optimizer:
    return prong.PRONG(model, 0.0, refresh=prong.Every(64, growth=None), outputs=WhitenOutputs("gaussian"))


def drawn_by(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """What the next forward adds to what is gathered, which the labels that are drawn decide."""
    before = gathered_by(optimizer)
    model(batches(model, 1)[0][0])
    after = gathered_by(optimizer)
    return {name: part["total"] - before[name].get("total", 0) for name, part in after.items()}


def test_a_state_is_loaded_to_where_each_layer_is():
    model = mlp()
    saved = prong.PRONG(model, 0.01, momentum=0.0, outputs=WhitenOutputs("categorical"))
    run(model, saved, batches(model, 3))
    model(batches(model, 1)[0][0])
    other = mlp()
    other[2].to("meta")
    loaded = prong.PRONG(other, 0.01, momentum=0.0, outputs=WhitenOutputs("categorical"))
    loaded.load_state_dict(saved.state_dict())
    state = state_of(loaded)
    places = {"0": "cpu", "2": "meta", "4": "cpu"}
    assert {name: Q.device.type for name, Q in state["Q"].items()} == places
    assert {name: part["total"].device.type for name, part in state["gathered"].items()} == places


def test_labels_are_drawn_after_a_load_as_they_would_have_been_without():
    model, other = mlp(), mlp()
    saved = drawing(model)
    first = drawn_by(saved, model)
    run(model, saved, batches(model, 1))
    loaded = drawing(other)
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    drawn = drawn_by(loaded, other)
    torch.testing.assert_close(drawn, drawn_by(saved, model), **CLOSE)
    assert not any(torch.equal(drawn[name], before) for name, before in first.items())
