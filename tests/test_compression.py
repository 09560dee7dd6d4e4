"""Compression: optimal on the layer's own inputs, exact at full rank, within its budget, and without side effects."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import prong
from prong.analysis.spectral.allocation import (
    Option,
    equal_shares,
    keep_share,
    least_error,
    total_error,
    total_parameters,
)
from prong.analysis.spectral.probing import Probe
from prong.analysis.spectral.replacement import Subject, expected_error, factors, rank_inputs, rank_outputs
from tests.cases import LayerSpec, assert_close, assert_identical, conv_specs
from tests.training import attentive, batches, convnet, mlp, run

compress = prong.spectral.compress
sizes = st.integers(1, 6)
seeds = st.integers(0, 1000)


def problem(out: int, features: int, seed: int, rows: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """W, rows of correlated inputs with a mean, and their covariance; singular with few rows."""
    generator = torch.Generator().manual_seed(seed)
    W, mix = (torch.randn(n, features, generator=generator, dtype=torch.float64) for n in (out, features))
    h = torch.randn(rows, features, generator=generator, dtype=torch.float64) @ mix + 1
    centred = h - h.mean(0)
    return W, h, centred.T @ centred / rows


def root(Sigma: Tensor) -> Tensor:
    lam, E = torch.linalg.eigh(Sigma)
    return E * lam.clamp(min=0).sqrt() @ E.T


def loss(D: Tensor, h: Tensor) -> float:
    """The mean of ||D (h - c)||^2, example by example."""
    c = h.mean(0)
    return sum(float((D @ (row - c)).square().sum()) for row in h) / len(h)


# The mathematics of one layer ----------------------------------------------------------------------------------------


@given(sizes, sizes, st.integers(2, 9), seeds)
def test_the_error_of_rank_k_is_the_tail_of_the_singular_values(out, features, rows, seed):
    W, h, Sigma = problem(out, features, seed, rows)
    ranked = rank_outputs(W, Sigma)
    singular = torch.linalg.svdvals(W @ root(Sigma)).square()
    for k in range(min(out, features) + 1):
        first, second = factors(W, ranked.A, k)
        D = W - second @ first
        scale = 1e-10 * (1 + float(singular.sum()))
        assert float(ranked.errors[k]) == pytest.approx(float(singular[k:].sum()), abs=scale)
        assert loss(D, h) == pytest.approx(float(singular[k:].sum()), abs=scale)
        assert expected_error(D, D @ h.mean(0), h.mean(0), Sigma) == pytest.approx(loss(D, h), abs=scale)


@given(sizes, sizes, st.integers(2, 9), seeds)
def test_full_rank_is_exact_even_where_the_inputs_have_no_variance(out, features, rows, seed):
    W, _, Sigma = problem(out, features, seed, rows)
    first, second = factors(W, rank_outputs(W, Sigma).A, min(out, features))
    assert_close(second @ first, W, atol=1e-9)
    first, second = factors(W, rank_outputs(W, torch.zeros_like(Sigma)).A, min(out, features))
    assert_close(second @ first, W, atol=1e-9)


@given(sizes, sizes, seeds)
def test_it_is_never_worse_than_truncating_the_weights_or_projecting_the_inputs(out, features, seed):
    W, h, Sigma = problem(out, features, seed, rows=30)
    ranked = rank_outputs(W, Sigma)
    U, s, Vt = torch.linalg.svd(W, full_matrices=False)
    E = torch.linalg.eigh(Sigma).eigenvectors.flip(-1)
    for k in range(min(out, features) + 1):
        best = float(ranked.errors[k]) * (1 - 1e-10) - 1e-10
        truncated = (U[:, :k] * s[:k]) @ Vt[:k]
        assert best <= loss(W - truncated, h)
        assert best <= loss(W - W @ E[:, :k] @ E[:, :k].T, h)


def test_inputs_in_a_plane_need_rank_two_where_truncated_weights_need_all():
    W, h, _ = problem(5, 6, seed=3, rows=50)
    h = h @ torch.linalg.qr(torch.randn(6, 2).double()).Q @ torch.randn(2, 6).double()
    X = h - h.mean(0)
    ranked = rank_outputs(W, X.T @ X / len(h))
    U, s, Vt = torch.linalg.svd(W, full_matrices=False)
    assert float(ranked.errors[2]) < 1e-12 * float(ranked.errors[0])
    for k in (2, 3, 4):
        assert loss(W - (U[:, :k] * s[:k]) @ Vt[:k], h) > 1e-3 * float(ranked.errors[0])


def test_no_search_finds_a_better_pair():
    """Brute force: alternating least squares from several starts ends at the same error, and never below."""
    W, h, Sigma = problem(4, 5, seed=1, rows=40)
    X = h - h.mean(0)
    for k in (1, 2, 3):
        best = float(rank_outputs(W, Sigma).errors[k])
        found = []
        for start in range(5):
            first = torch.randn(k, 5, generator=torch.Generator().manual_seed(start), dtype=torch.float64)
            for _ in range(300):
                second = torch.linalg.lstsq(X @ first.T, X @ W.T).solution.T
                first = torch.linalg.lstsq(second, W).solution
            found.append(loss(W - second @ first, h))
        assert min(found) == pytest.approx(best, rel=1e-6)


def subject_of(spec: LayerSpec, examples: int = 6) -> tuple[Subject, nn.Module, Tensor]:
    torch.manual_seed(0)
    layer, h = spec.build(), spec.sample(examples)
    probe = Probe("layer", layer, gathers=True, max_positions=None)
    with torch.no_grad():
        probe(layer, (h,), {}, layer(h))
    return Subject(layer, probe.moments, "outputs"), layer, h


def ungrouped(spec: LayerSpec) -> LayerSpec:
    return LayerSpec(spec.kind, {**spec.arguments, "groups": 1}, spec.spatial)


@given(conv_specs().map(ungrouped))
def test_convolutions_of_full_rank_are_the_plain_ones_and_of_low_rank_lose_what_is_expected(spec):
    """For any stride, padding, padding mode and dilation, and by either plan; the loss is taken over the same maps."""
    subject, layer, h = subject_of(spec)
    z = layer(h).detach()
    rows = z.movedim(1, -1).reshape(-1, z.shape[1])
    spread = rows - rows.mean(0) if layer.bias is not None else rows
    assert subject.variance == pytest.approx(float(spread.square().sum(1).mean()), rel=1e-9, abs=1e-12)
    for plan, ranked in subject._ranked.items():
        full = len(ranked.errors) - 1
        for rank in {1, (full + 1) // 2, full}:
            option = Option(plan, rank, 0, 0.0)
            other = subject.replacement(option)(h).detach()
            error = float((other - z).square().sum(1).mean())
            assert error == pytest.approx(float(ranked.errors[rank]), rel=1e-7, abs=1e-9 * (1 + subject.variance))
            if subject.variance > 0:
                assert subject.expected(option) * subject.variance == pytest.approx(error, rel=1e-7, abs=1e-9)
            if rank == full:
                assert_close(other, z, atol=1e-9)


def test_the_plan_over_inputs_is_chosen_where_it_loses_less_for_its_size():
    """Inputs of one direction among many maps: one map is enough, while outputs need several."""
    torch.manual_seed(0)
    layer = nn.Conv2d(8, 10, 3).double()
    h = torch.randn(20, 1, 6, 6).double() * torch.randn(8).double().view(-1, 1, 1)
    small, report = compress(nn.Sequential(layer), h, variance=0.9999)
    assert (report["0"].plan, report["0"].rank) == ("inputs", (1, 8))
    assert_close(small(h), layer(h))
    assert [tuple(m.weight.shape) for m in small[0]] == [(1, 8, 1, 1), (10, 1, 3, 3)]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), seeds)
def test_errors_of_the_plan_over_inputs_follow_from_the_covariance_of_patches(out, features, taps, seed):
    W, h, Sigma = problem(out, taps * features, seed)
    ranked = rank_inputs(W, Sigma, taps)
    for k, error in enumerate(ranked.errors.tolist()):
        first, second = factors(W.reshape(out * taps, features), ranked.A, k)
        D = W - (second @ first).reshape(W.shape)
        assert error == pytest.approx(loss(D, h), abs=1e-9 * (1 + float(ranked.errors[0])))


# Allocation ----------------------------------------------------------------------------------------------------------


@st.composite
def tables(draw: st.DrawFn) -> tuple[dict[str, list[Option]], int]:
    layers = {}
    for i in range(draw(st.integers(1, 4))):
        count = draw(st.integers(1, 6))
        costs = draw(st.lists(st.integers(1, 50), min_size=count, max_size=count))
        errors = draw(st.lists(st.floats(0.01, 1), min_size=count, max_size=count))
        options = [Option("outputs", k, c, e) for k, (c, e) in enumerate(zip(costs, errors, strict=True))]
        layers[str(i)] = [*options, Option("plain", count, 60, 0.0)]
    fewest = sum(min(o.parameters for o in options) for options in layers.values())
    return layers, draw(st.integers(fewest, 60 * len(layers)))


def best_of_all(layers: dict[str, list[Option]], budget: int) -> float:
    choices = itertools.product(*layers.values())
    return min(sum(o.error for o in c) for c in choices if sum(o.parameters for o in c) <= budget)


@given(tables())
def test_budgets_are_respected_and_least_error_is_between_the_optimum_and_equal_shares(table):
    layers, budget = table
    least, equal = least_error(layers, budget), equal_shares(layers, budget)
    assert total_parameters(least) <= budget and total_parameters(equal) <= budget
    assert best_of_all(layers, budget) - 1e-12 <= total_error(least) <= total_error(equal)


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=5), min_size=1, max_size=3), st.data())
def test_least_error_is_optimal_where_every_unit_of_rank_costs_the_same(squares, data):
    """Tails of falling squares are convex, and with equal costs nothing of a budget is left over."""
    layers = {}
    for i, values in enumerate(squares):
        values = sorted(values, reverse=True)
        layers[str(i)] = [Option("outputs", k, k + 1, sum(values[k:])) for k in range(len(values) + 1)]
    budget = data.draw(st.integers(len(layers), sum(map(len, layers.values()))))
    assert total_error(least_error(layers, budget)) == pytest.approx(best_of_all(layers, budget), abs=1e-12)


def test_what_steps_along_the_hull_leave_of_a_budget_is_spent_too():
    a = [Option("outputs", 1, 1, 1.0), Option("outputs", 2, 5, 0.9), Option("plain", 3, 10, 0.0)]
    b = [Option("outputs", k, n, e) for k, (n, e) in enumerate([(1, 1.0), (2, 0.1), (3, 0.0999), (10, 0.0)])]
    assert least_error({"a": a, "b": b}, 7) == {"a": a[1], "b": b[1]}


def test_equal_shares_are_taken_where_the_best_step_would_leave_no_room_for_a_better_one():
    a = [Option("outputs", 1, 1, 1.0), Option("outputs", 2, 4, 0.6), Option("plain", 3, 60, 0.0)]
    b = [Option("outputs", 1, 1, 1.0), Option("outputs", 2, 20, 0.0), Option("plain", 3, 400, 0.0)]
    assert total_error(least_error({"a": a, "b": b}, 21)) == 1.0


@given(tables(), st.floats(0.05, 1))
def test_a_share_of_variance_is_kept_with_the_fewest_parameters(table, share):
    for name, option in keep_share(table[0], share).items():
        enough = [o for o in table[0][name] if o.error <= 1 - share or o.plan == "plain"]
        assert option.parameters == min(o.parameters for o in enough)
        assert option in enough


# Networks ------------------------------------------------------------------------------------------------------------


def wide(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 8)).double()


def inputs(rows: int = 200, features: int = 12) -> Tensor:
    torch.manual_seed(5)
    return torch.randn(rows, features).double() @ torch.randn(features, features).double() * 0.5 + 1


def test_all_the_parameters_and_all_the_variance_leave_the_function_as_it_is():
    model, x = wide(), inputs()
    for options in ({"parameters": 1.0}, {"variance": 1.0}):
        small, report = compress(model, x, **options)
        assert_close(small(x), model(x))
        assert report.output_error < 1e-20 and report.parameters[0] >= report.parameters[1]


@given(st.floats(0.25, 1), st.sampled_from([None, "conv"]))
def test_a_budget_is_respected_and_spent_no_worse_than_in_equal_shares(share, kind):
    model = wide() if kind is None else convnet()
    x = inputs() if kind is None else batches(model, 1)[0][0]
    total = sum(p.numel() for p in model.parameters())
    reports = {}
    for allocation in ("least", "equal"):
        try:
            small, report = compress(model, x, parameters=share, allocation=allocation, max_positions=None)
        except ValueError as error:
            assert "give a larger budget" in str(error)
            return
        reports[allocation] = report
        assert sum(p.numel() for p in small.parameters()) == report.parameters[1] <= share * total
        assert report.parameters[0] == total == sum(layer.parameters[0] for layer in report.layers)
        assert report.parameters[1] == sum(layer.parameters[1] for layer in report.layers)
    assert reports["least"].expected <= reports["equal"].expected + 1e-9
    assert compress(model, x, parameters=int(share * total))[1].parameters[1] <= share * total


def test_every_layer_keeps_the_share_of_variance_asked_for_and_not_much_more():
    x, share = inputs(), 0.9
    _, report = compress(wide(), x, variance=share)
    assert any(layer.plan == "outputs" for layer in report.layers)
    assert all(layer.expected <= 1 - share for layer in report.layers)


@torch.no_grad()
def test_expected_and_measured_errors_are_those_of_a_loop_over_examples():
    model, x = wide(), inputs()
    small, report = compress(model, x, parameters=0.6)
    h = g = x
    for name, (layer, other) in enumerate(zip(model, small, strict=True)):
        z, own, its = layer(h), other(h), other(g)
        if isinstance(layer, nn.Linear):
            line = report[str(name)]
            variance = float((z - z.mean(0)).square().sum(1).mean())
            assert line.expected == pytest.approx(float((own - z).square().sum(1).mean()) / variance, abs=1e-12)
            assert line.measured == pytest.approx(float((its - z).square().sum(1).mean()) / variance, abs=1e-12)
        h, g = z, its
    assert report.output_error == pytest.approx(float((h - g).square().sum() / (h - h.mean(0)).square().sum()))
    assert report.output_error > 1e-6


@torch.no_grad()
@pytest.mark.parametrize("kind", ["maps", "tokens"])
def test_measured_errors_are_means_over_positions_too(kind):
    torch.manual_seed(0)
    if kind == "maps":
        model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3, stride=2)).double()
        x = torch.randn(12, 4, 7, 5).double()
    else:
        model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 10)).double()
        x = inputs(60).view(12, 5, 12)
    batches_of = [x[:5], x[5:]]
    small, report = compress(model, batches_of, parameters=0.6, max_positions=None, allocation="equal")
    h = g = x
    for name, (layer, other) in enumerate(zip(model, small, strict=True)):
        h, g = layer(h), other(g)
        if str(name) in {"0", "2"}:
            at = 1 if kind == "maps" else -1
            z, its = (t.movedim(at, -1).flatten(0, -2) for t in (h, g))
            variance = sum(float((row - z.mean(0)).square().sum()) for row in z) / len(z)
            error = sum(float((a - b).square().sum()) for a, b in zip(z, its, strict=True)) / len(z)
            assert report[str(name)].plan != "plain" and error > 1e-3 * variance
            assert report[str(name)].measured == pytest.approx(error / variance, rel=1e-8)


def test_layers_that_overwrite_their_inputs_change_no_measurement():
    measured = []
    for in_place in (False, True):
        model = wide()
        model[1] = model[3] = nn.ReLU(in_place)
        measured.append([layer.measured for layer in compress(model, inputs(), parameters=0.5)[1].layers])
    assert measured[0] == measured[1]


def test_ours_loses_less_than_truncated_weights_in_every_layer_of_the_same_size():
    x = inputs()
    _, ours = compress(wide(), x, parameters=0.6, allocation="equal")
    _, theirs = compress(wide(), x, parameters=0.6, allocation="equal", criterion="weights")
    assert [a.parameters for a in ours.layers] == [b.parameters for b in theirs.layers]
    assert all(a.expected <= b.expected for a, b in zip(ours.layers, theirs.layers, strict=True))
    assert ours.expected < 0.7 * theirs.expected


def test_operations_are_those_that_torch_counts():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 6, 3),
        nn.Flatten(),
        nn.Linear(54, 30),
    ).double()
    x = torch.randn(40, 1, 10, 10).double() * torch.randn(8, 1, 1).double() + 0.1 * torch.randn(40, 8, 10, 10).double()
    small, report = compress(model, x, parameters=0.5)
    assert {layer.plan for layer in report.layers} >= {"inputs", "outputs"}
    for network, count in zip((model, small), report.flops, strict=True):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            network(x)
        assert counter.get_total_flops() == pytest.approx(count * len(x))
    assert str(report).splitlines()[-1].startswith("total")


@pytest.mark.parametrize("form", ["plain", "auto", "implicit", "explicit", "materialised"])
def test_the_given_model_stays_in_the_middle_of_training_and_the_result_is_plain(form):
    model, data = wide(), [(inputs(16), torch.randint(8, (16,))) for _ in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    if form != "plain":
        optimizer = prong.PRONG(model, lr=1e-2, form=form, refresh=prong.Every(2))
    run(model, optimizer, data[:3])
    twin = prong.fold_(copy.deepcopy(model))
    model[3].eval()
    before = copy.deepcopy(dict(model.state_dict()))
    random_state = torch.get_rng_state()
    small, report = compress(model, (x for x, _ in data), parameters=0.7)
    assert_identical(torch.get_rng_state(), random_state)
    assert_identical(dict(model.state_dict()), before)
    assert [m.training for m in model] == [True, True, True, False, True] == [m.training for m in small]
    assert {type(m) for m in small.modules()} <= {nn.Sequential, nn.Linear, nn.Tanh}
    assert all(p.grad is None and p.requires_grad for p in small.parameters())
    expected, _ = compress(twin, (x for x, _ in data), parameters=0.7)
    assert_close(dict(small.state_dict()), dict(expected.state_dict()))
    run(model, optimizer, data[3:])
    assert report.parameters[1] < report.parameters[0]


def test_the_result_exports_folds_loads_and_trains():
    model, x = wide(), inputs()
    small, _ = compress(model, x, parameters=0.5)
    z = small(x)
    assert_close(torch.export.export(small, (x,)).module()(x), z)
    assert_identical(prong.fold_(small)(x), z)
    other, _ = compress(model, x, parameters=0.5)
    other.load_state_dict(small.state_dict())
    optimizer = prong.PRONG(small, lr=1e-3)
    small(x).square().sum().backward()
    optimizer.step()
    assert not torch.allclose(small(x), z)


def test_a_model_that_is_one_layer_modules_that_occur_twice_frozen_layers_and_none_without_bias():
    x = inputs()
    layer = nn.Linear(12, 12, bias=False).double().requires_grad_(False)
    small, report = compress(layer, x, parameters=0.5)
    assert isinstance(small, nn.Sequential) and report.parameters[1] <= 72
    assert not any(p.requires_grad for p in small.parameters()) and small[1].bias is None
    twice = nn.Sequential(layer, nn.Tanh(), layer)
    small, report = compress(twice, x, parameters=0.5)
    assert small[0] is small[2] and isinstance(small[0], nn.Sequential)
    assert report["0"].flops[0] == 2 * 2 * 144


class Odd(nn.Module):
    """Layers that are left alone, for one reason each."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv1d(6, 6, 3, groups=6)
        self.transposed = nn.ConvTranspose1d(6, 6, 3)
        self.norm = nn.BatchNorm1d(6)
        self.hooked = nn.Linear(6, 6)
        self.hooked.register_forward_hook(copy_hook)
        self.tied = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.tied.weight
        self.unused = nn.Linear(6, 6)
        self.constant = nn.Linear(6, 6)
        self.good = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.transposed(self.depthwise(x))).mean(2)
        return self.good(self.again(self.tied(self.hooked(h)))) + self.constant(torch.ones_like(h))


def copy_hook(module: nn.Module, args: object, z: Tensor) -> Tensor:
    return z.clone()


def test_what_is_left_alone_is_reported_with_its_reason():
    torch.manual_seed(0)
    model = Odd().double()
    x = torch.randn(30, 6, 5).double()
    small, report = compress(model, x, variance=0.5)
    notes = {layer.name: layer.note for layer in report.layers}
    for name, reason in {
        "depthwise": "6 groups",
        "transposed": "ConvTranspose1d",
        "norm": "BatchNorm1d",
        "hooked": "hooks",
        "tied": "tied",
        "again": "tied",
        "unused": "fewer than two samples",
        "constant": "do not vary",
        "good": "",
    }.items():
        assert reason in notes[name], name
        assert (notes[name] == "") == (name == "good")
        assert name == "good" or type(getattr(small, name)) is type(getattr(model, name))
    assert report["good"].plan == "outputs"
    with pytest.raises(ValueError, match="'depthwise' cannot be compressed: its 6 groups"):
        compress(model, x, variance=0.5, layers="depthwise")


@pytest.mark.parametrize("form", [None, "auto", "implicit", "explicit"])
def test_a_model_that_is_watched_is_compressed_and_the_result_has_no_hooks(form):
    model = wide()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if form is not None:
        prong.attach(model, optimizer, form=form)
    with prong.monitor.Monitor(model, optimizer, 1) as monitor:
        small, report = compress(model, inputs(), parameters=0.6)
        twin = copy.deepcopy(model)
        run(model, optimizer, [(inputs(16), torch.randint(8, (16,)))])
        assert len(monitor.rows) == 3, "still watched"
    again, _ = compress(twin, inputs(), layers=["2"], variance=0.5)
    assert report["2"].plan == "outputs"
    for module in (*small.modules(), *again.modules()):
        hooks = (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs, module._forward_hooks)
        assert not any(hooks)


def test_attention_and_transformer_blocks_work_with_what_can_be_compressed():
    model = attentive()
    (x, _), *_ = batches(model, 1)
    small, report = compress(model, x, layers=["head", "attention*"], variance=0.5)
    assert "MultiheadAttention" in report["attention"].note and report["head"].plan == "outputs"
    assert small(x).shape == model(x).shape
    block = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), nn.Linear(8, 8)).double()
    tokens = torch.randn(20, 4, 8).double()
    small, report = compress(block.eval(), tokens, variance=0.5)
    assert "without calling" in report["0.linear1"].note
    assert small(tokens).shape == block(tokens).shape


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ValueError, "either parameters"),
        ({"parameters": 0.5, "variance": 0.9}, ValueError, "either parameters"),
        ({"parameters": 1.5}, ValueError, "share above 0 and up to 1, or an int"),
        ({"parameters": 0}, ValueError, "above 0"),
        ({"parameters": True}, TypeError, "parameters is a number"),
        ({"variance": 0.0}, ValueError, "variance is a share"),
        ({"variance": 2}, ValueError, "variance is a share"),
        ({"parameters": 0.01}, ValueError, "give a larger budget"),
        ({"parameters": 0.5, "layers": "nothing*"}, ValueError, "no layer fits"),
        ({"parameters": 0.5, "samples": 1}, ValueError, "samples is at least 2"),
        ({"parameters": 0.5, "max_positions": 0}, ValueError, "max_positions is at least 1"),
        ({"parameters": 0.5, "allocation": "fair"}, ValueError, "allocation is one of"),
        ({"parameters": 0.5, "criterion": "x"}, ValueError, "criterion is"),
    ],
)
def test_bad_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        compress(wide(), inputs(), **options)


def test_bad_models_and_batches_are_refused():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        compress(3, inputs(), variance=0.9)
    with pytest.raises(ValueError, match="nothing in this Tanh can be compressed"):
        compress(nn.Tanh(), inputs(), variance=0.9)
    with pytest.raises(ValueError, match="no batches"):
        compress(wide(), [], variance=0.9)
    with pytest.raises(ValueError, match="does not take batch 0"):
        compress(wide(), inputs(features=3), variance=0.9)
    with pytest.raises(FloatingPointError, match=r"layer '0'.*NaN"):
        compress(wide(), inputs() * torch.nan, variance=0.9)


@pytest.mark.parametrize(
    ("x", "message"), [(inputs(1), "'0' stays whole.*fewer than two samples"), (inputs(1).repeat(9, 1), "do not vary")]
)
def test_a_budget_that_cannot_be_met_says_why_layers_stay_whole(x, message):
    with pytest.raises(ValueError, match=message):
        compress(wide(), x, parameters=0.5)


def test_a_report_without_such_a_layer_names_those_there_are():
    _, report = compress(wide(), inputs(), variance=0.9)
    with pytest.raises(KeyError, match=r"'nope'.*'0', '2', '4'"):
        report["nope"]


class Reaching(nn.Module):
    """Uses layers otherwise than by calling its children."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.last = nn.Linear(12, 12).double(), nn.Linear(12, 4).double()
        self.plain = [self.first] if how == "list" else []

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "weight":
            x = x + self.first.weight.mean()
        if self.how == "size":
            x = x / self.first.out_features
        return self.last((self.plain[0] if self.plain else self.first)(x).tanh())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("list", "'first' is called 1 times, but what replaces it 0 times.*layers="),
        ("weight", "'weight'.*Replaced were 'first'.*layers="),
        ("size", "'out_features'.*Replaced were 'first'.*layers="),
    ],
)
def test_models_that_use_a_replaced_layer_otherwise_than_by_calling_it_are_told(how, message):
    torch.manual_seed(0)
    model = Reaching(how)
    with pytest.raises(ValueError, match=message):
        compress(model, inputs(), variance=0.5)
    small, _ = compress(model, inputs(), variance=0.5, layers="last")
    assert isinstance(small.last, nn.Sequential)


def test_an_expected_error_is_never_below_zero():
    Sigma = torch.tensor([[1, 1 + 1e-12], [1 + 1e-12, 1]], dtype=torch.float64)  # not quite a covariance, by rounding
    D = torch.tensor([[1.0, -1.0]]).double()
    assert expected_error(D, None, torch.zeros(2), Sigma) == 0


def test_half_precision_models_and_few_samples_work():
    model = mlp(dtype=torch.bfloat16)
    (x, _), *_ = batches(model, 1)
    small, report = compress(model, x, parameters=0.8, samples=8)
    assert {p.dtype for p in small.parameters()} == {torch.bfloat16}
    assert torch.isfinite(small(x)).all() and report.output_error < 0.5
