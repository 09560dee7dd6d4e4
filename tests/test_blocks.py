"""Whitening in blocks is PRONG with a block-diagonal covariance: each block as if it were all there is."""

from __future__ import annotations

import copy
import io
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import prong
from prong.analysis.accuracy import approximate_inverse, step_error
from prong.layers.plain import LEAST, OWN, Budget, largest_block
from prong.layers.site import Layout
from prong.model.whiten import whitened_sites
from tests.cases import (
    PROPERTY,
    SPECS,
    LayerSpec,
    assert_close,
    curved,
    gradients_of,
    layer_specs,
    moments_of,
    natural_of_plain,
)
from tests.training import batches, mlp, run

DOUBLE = torch.float64
EPS = 0.1
DAMPING = prong.Absolute(EPS)


def masked(Sigma: Tensor, size: int) -> Tensor:
    """A covariance without what lies outside its blocks, entry by entry."""
    blocks = -(-len(Sigma) // size)
    width = -(-len(Sigma) // blocks)
    result = torch.zeros_like(Sigma)
    for i in range(len(Sigma)):
        for j in range(len(Sigma)):
            if i // width == j // width:
                result[i, j] = Sigma[i, j]
    return result


@PROPERTY
@given(spec=layer_specs(), block=st.integers(1, 5), examples=st.sampled_from([2, 40]), seed=st.integers(0, 99))
def test_gradients_are_those_of_a_block_diagonal_covariance(
    spec: LayerSpec, block: int, examples: int, seed: int
) -> None:
    torch.manual_seed(seed)
    plain = spec.build()
    layer = prong.whiten_(copy.deepcopy(plain), prong.Implicit(block=block))
    h = spec.sample(examples)
    before = plain(h, **spec.call)
    with pytest.MonkeyPatch.context() as patch:
        # Few and many positions take different ways; with so small layers only the rule decides which.
        patch.setitem(prong.layers.natural.CROSSOVER, "linear", 1e9 if seed % 2 else 0.0)
        patch.setitem(prong.layers.natural.CROSSOVER, "convolution", 1e9 if seed % 2 else 0.0)
        prong.refresh_(layer, [h], DAMPING, forward=lambda m, x: m(x, **spec.call))
        assert_close(layer(h, **spec.call), before, "the function")
        nW, nb, nh = gradients_of(layer, h, spec.call)
    gW, gb, gh = gradients_of(plain, h, spec.call)
    moments = [(c, masked(Sigma, block)) for c, Sigma in moments_of(plain, h)]
    expected = natural_of_plain(plain, gW, gb, moments, EPS)
    assert_close((nW, nh), (expected[0], gh), "weight and input", rtol=1e-8, atol=1e-8)
    if gb is not None:
        assert_close(nb, expected[1], "bias", rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_one_block_is_no_block(spec: LayerSpec) -> None:
    torch.manual_seed(0)
    plain = spec.build()
    h = spec.sample(30)
    found = []
    for block in (None, spec.channels):
        layer = prong.refresh_(prong.whiten_(copy.deepcopy(plain), prong.Implicit(block=block)), [h], DAMPING)
        found.append(gradients_of(layer, h, spec.call))
    assert all(a is None if b is None else torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_blocks_of_one_input_divide_by_its_damped_variance() -> None:
    torch.manual_seed(0)
    layer = prong.whiten_(nn.Linear(5, 3, bias=False).double(), prong.Implicit(block=1))
    h = torch.randn(50, 5, dtype=DOUBLE) * torch.arange(1, 6)
    prong.refresh_(layer, [h], DAMPING)
    natural, _, _ = gradients_of(layer, h)
    with prong.ordinary_gradients(layer):
        ordinary, _, _ = gradients_of(layer, h)
    assert_close(natural, ordinary / (h.square().mean(0) + EPS))


@given(
    groups=st.integers(1, 3),
    out=st.integers(1, 3),
    inputs=st.integers(1, 9),
    taps=st.integers(1, 2),
    block=st.integers(1, 10),
    transposed=st.booleans(),
)
def test_blocks_are_contiguous_at_most_of_the_size_asked_for_and_put_together_again(
    groups: int, out: int, inputs: int, taps: int, block: int, transposed: bool
) -> None:
    shape = (groups * inputs, out, taps) if transposed else (groups * out, inputs, taps)
    layout = Layout(shape, groups, transposed, block)
    assert layout.features <= block and layout.blocks == -(-inputs // block)
    W = torch.arange(float(torch.Size(shape).numel())).view(shape) + 1
    packed = layout.pack(W)
    assert packed.shape == (layout.matrices, out, taps, layout.features)
    assert torch.equal(layout.unpack(packed), W)
    whole = layout.whole.pack(W)
    for g in range(groups):
        parts = packed[g * layout.blocks : (g + 1) * layout.blocks]
        assert torch.equal(torch.cat(list(parts), dim=-1)[..., :inputs], whole[g])
    h = torch.arange(2.0 * layout.channels).view(2, layout.channels)
    assert torch.equal(layout.unrow(layout.rows(h, -1)), h)
    M = torch.randn(layout.matrices, layout.features, layout.features, dtype=DOUBLE)
    x = torch.randn(4, layout.channels, dtype=DOUBLE)
    dense = layout.assembled(M)
    by_group = (layout.whole.rows(x, -1) @ dense).transpose(0, 1).flatten(1)
    rows = layout.rows(x, -1) @ M
    assert_close(layout.unrow(rows), by_group)


def test_statistics_and_matrices_take_in_times_block_numbers() -> None:
    torch.manual_seed(0)
    inputs, block = 512, 64
    layer = nn.Linear(inputs, 8)
    form = prong.Implicit(block=block)
    optimizer = prong.PRONG(layer, 1e-3, form=form, refresh=prong.Every(100, samples=2048), trust=None)
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.randn(1024, inputs)).square().mean().backward()
        optimizer.step()
    (site,) = layer.sites
    assert site.whitening.P.numel() == inputs * block
    (row,) = prong.summary(layer)
    assert row.inputs == "512 in blocks of 64"
    held = [site.whitening.P, site.whitening.F, site.whitening.c, site.whitening.cP]
    if site.window is not None:
        held += site.window.moments.tensors()
    assert row.memory == 4 * sum(x.numel() for x in held) < 4 * 4 * inputs * block


IN_BLOCKS = {
    "implicit": lambda block: (prong.PRONG, prong.Implicit(block=block)),
    "materialised": lambda block: (prong.PRONG, prong.Materialised(block=block)),
    "materialised, AdamW": lambda block: (prong.AdamW, prong.Materialised(block=block)),
}


@pytest.mark.parametrize("block", [1, 3, 4])
@pytest.mark.parametrize("options", IN_BLOCKS.values(), ids=IN_BLOCKS)
def test_training_in_blocks_resumes_bit_for_bit(options, block: int) -> None:
    data = batches(mlp(), 12)
    model, twin = mlp(), mlp()

    def make(m: nn.Module, block: int | None = block) -> torch.optim.Optimizer:
        kind, form = options(block)
        return kind(m, 1e-2, damping=DAMPING, form=form, refresh=prong.Every(4, samples=48))

    optimizer = make(model)
    run(model, optimizer, data[:7])
    assert all(site.layout.features <= block for _, site in whitened_sites(model).values())
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other = make(twin, None)
    twin.load_state_dict(weights)
    other.load_state_dict(state)
    assert all(site.layout.features <= block for _, site in whitened_sites(twin).values()), "as they were saved"
    run(model, optimizer, data[7:])
    run(twin, other, data[7:])
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    prong.fold_(model)
    assert all(type(m) is not nn.Linear or not hasattr(m, "sites") for m in model.modules())


@pytest.mark.parametrize("form", [prong.Implicit, prong.Materialised])
@pytest.mark.parametrize(
    "options",
    [
        {"outputs": prong.WhitenOutputs("empirical")},
        {"refresh": prong.OnDrift(samples=24)},
        {"momentum": 0.0, "trust": 1e-3},
    ],
    ids=["outputs", "drift", "trust"],
)
def test_other_options_of_training_take_blocks(form: type, options: dict[str, object]) -> None:
    """One block of all inputs against blocks: the same code, and with a diagonal covariance the same steps."""
    if form is prong.Materialised and "outputs" in options:
        pytest.skip("outputs are whitened in other forms")
    signs = torch.cat([torch.eye(6), -torch.eye(6)]).double() * torch.arange(1, 7)  # uncorrelated to the bit
    models = []
    for block in (6, 2):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 4)).double()
        own = {"refresh": prong.Every(3, samples=24), "trust": None, **options}
        optimizer = prong.PRONG(model, 1e-2, damping=DAMPING, form=form(block=block), **own)
        run(model, optimizer, [(signs, torch.arange(12) % 4)] * 8)
        models.append(model)
    assert_close(*([p.detach() for p in m.parameters()] for m in models))


def test_whitened_initialisation_takes_blocks() -> None:
    torch.manual_seed(0)
    model = prong.whiten_(
        nn.Sequential(nn.Linear(10, 400), nn.Tanh(), nn.Linear(400, 3)).double(), prong.Implicit(block=4)
    )
    h = LayerSpec(nn.Linear, {"in_features": 10, "out_features": 1}).sample(500)
    prong.initialize_(model, [h], 1e-6)
    z = model[0](h)
    assert z.mean().abs() < 1e-6 and 0.5 < z.var() < 2
    assert model[0].sites[0].whitening is not None


def test_fisher_factors_of_blocks_are_white_within_them() -> None:
    torch.manual_seed(0)
    h = LayerSpec(nn.Linear, {"in_features": 6, "out_features": 1}).sample(200)
    model = prong.refresh_(prong.whiten_(nn.Sequential(nn.Linear(6, 3)).double(), prong.Implicit(block=4)), [h], 1e-9)
    (factors,) = prong.fisher.factors(model, [h], "categorical", coordinates="whitened").values()
    A = factors.A[0, :6, :6]
    for part in (slice(0, 3), slice(3, 6)):
        assert_close(A[part, part], torch.eye(3, dtype=DOUBLE), atol=1e-6)
    assert A[:3, 3:].abs().max() > 1e-2, "and not across"


def test_attention_takes_blocks() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).double()
    layer = prong.whiten_(copy.deepcopy(attention), prong.Implicit(block=3))
    x = torch.randn(40, 5, 8, dtype=DOUBLE)
    prong.refresh_(layer, [x], DAMPING, forward=lambda m, h: m(h, h, h))
    assert_close(layer(x, x, x)[0], attention(x, x, x)[0])
    gW, gb = torch.autograd.grad(curved(attention(x, x, x)[0]), [attention.in_proj_weight, attention.in_proj_bias])
    nW, nb = torch.autograd.grad(curved(layer(x, x, x)[0]), [layer.in_proj_weight, layer.in_proj_bias])
    rows = x.reshape(-1, 8)
    c = rows.mean(0)
    P = torch.linalg.inv(masked((rows - c).mT @ (rows - c) / len(rows), 3) + EPS * torch.eye(8, dtype=DOUBLE))
    expected = (gW - torch.outer(gb, c)) @ P
    assert_close((nW, nb), (expected, gb - expected @ c), rtol=1e-8)


def test_some_layers_can_be_in_blocks_and_others_whole() -> None:
    model = mlp()
    prong.whiten_(model, prong.Implicit(block=2), layers="0")
    prong.PRONG(prong.whiten_(model), 1e-2)
    assert model[0].sites[0].layout.features <= 2 and model[2].sites[0].layout.blocks == 1


@pytest.mark.parametrize("form", [prong.Implicit, prong.Materialised])
@pytest.mark.parametrize(
    ("block", "error", "message"), [(0, ValueError, "block is at least 1"), (2.0, TypeError, "block is a whole number")]
)
def test_what_makes_no_sense_is_refused(form: type, block: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        form(block=block)


# What whitening may cost ----------------------------------------------------------------------------------------------


@given(
    inputs=st.integers(1, 5000),
    rows=st.integers(1, 10_000),
    time=st.floats(1e-3, 10),
    largest=st.integers(LEAST, 5000),
    natural=st.booleans(),
)
def test_blocks_and_ranks_are_as_large_as_time_and_memory_allow(
    inputs: int, rows: int, time: float, largest: int, natural: bool
) -> None:
    layout = Layout((7, inputs))
    block, rank = Budget(time, largest).chosen(layout, rows, natural)
    found, allowed = replace(layout, block=block), time * (6 * rows + OWN)
    assert block is None or found.features == block, "blocks are filled up as little as can be"

    def fits(size: int) -> bool:  # time decides on the size of blocks where V is held, and else on the rank
        return size <= LEAST or (size <= largest and (natural or 4 * size <= allowed))

    assert fits(found.features)
    assert found.blocks == 1 or not fits(-(-inputs // (found.blocks - 1))), "with one block less they are too large"
    if rank is not None:
        assert natural and 2 * rank < found.features and (rank == LEAST or 4 * rank <= allowed < 4 * (rank + 1))
    elif natural:
        assert found.features <= 2 * LEAST or 2 * (allowed // 4) >= found.features, "as thin as that saves nothing"


@given(
    sizes=st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3)), min_size=1, max_size=5), share=st.floats(0.01, 2)
)
def test_the_largest_block_fits_in_memory_and_twice_as_large_ones_do_not(sizes, share: float) -> None:
    layouts = [Layout((groups, inputs), groups) for inputs, groups in sizes]
    entries = share * sum(layout.channels * 64 for layout in layouts)

    def held(size: int) -> int:
        return sum(layout.channels * min(layout.inputs, size) for layout in layouts)

    block = largest_block(layouts, entries)
    assert block <= LEAST or held(block) <= entries
    assert block >= max(layout.inputs for layout in layouts) or held(2 * block + 1) > entries


def test_a_model_of_narrow_layers_is_not_divided_and_one_without_layers_has_no_largest_block() -> None:
    for natural in (True, False):
        assert Budget(1e-9, LEAST).chosen(Layout((3, LEAST)), 1, natural) == (None, None)
    assert largest_block([], 0) == LEAST


@pytest.mark.parametrize("kind", [prong.PRONG, prong.AdamW])
def test_blocks_and_ranks_are_chosen_at_the_first_forward_by_what_an_update_costs(kind: type) -> None:
    """With few rows a layer is divided, or few directions are told apart; with many it pays to whiten it whole."""
    layouts, divided = [Layout((200, 96)), Layout((10, 200))], []
    for rows in (8, 2000):
        model = nn.Sequential(nn.Linear(96, 200), nn.Tanh(), nn.Linear(200, 10))
        optimizer = kind(model, 1e-3, form=prong.Auto(time=0.2, memory=1e9))
        sites = [site for _, site in whitened_sites(model).values()]
        assert all((site.layout.block, site.rank) == (None, None) for site in sites)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(rows, 96)).square().mean().backward()
            optimizer.step()
        budget = Budget(0.2, largest_block(layouts, 1e9))
        for site, layout in zip(sites, layouts, strict=True):
            assert (site.layout.block, site.rank) == budget.chosen(layout, rows, kind is prong.PRONG)
            assert site.whitening.c.shape == (site.layout.matrices, site.layout.features)
            assert site.rank is None or site.whitening.P.shape[-1] <= site.rank
        divided.append([site.layout.blocks > 1 or site.rank is not None for site in sites])
    assert divided[0] == [True, True] and not divided[1][0]


@pytest.mark.parametrize("kind", [prong.PRONG, prong.AdamW])
def test_matrices_take_at_most_the_memory_allowed(kind: type) -> None:
    model = nn.Sequential(nn.Linear(300, 100), nn.Tanh(), nn.Linear(100, 10))
    optimizer = kind(model, 1e-3, form=prong.Auto(time=1e9, memory=0.5))
    model(torch.randn(50, 300)).square().mean().backward()
    optimizer.step()
    parameters = sum(p.numel() for p in model.parameters())
    whitenings = [site.whitening for _, site in whitened_sites(model).values()]
    assert sum((w.P if w.U is None else w.U).numel() for w in whitenings) <= 0.5 * parameters


# How far from exact ---------------------------------------------------------------------------------------------------


def covariance(size: int, seed: int = 0, decay: float = 0.7) -> Tensor:
    torch.manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, size, dtype=DOUBLE)).Q
    return (basis * decay ** torch.arange(size)) @ basis.mT


@PROPERTY
@given(size=st.integers(1, 9), block=st.integers(1, 9), seed=st.integers(0, 99))
def test_gains_of_blocks_average_one_and_never_exceed_their_number(size: int, block: int, seed: int) -> None:
    Sigma = covariance(size, seed)
    error = step_error(Sigma, EPS, block=block)
    blocks = -(-size // block)
    assert 0 < error.least_gain <= 1 + 1e-9 and 1 - 1e-9 <= error.largest_gain <= blocks + 1e-9
    Q, F = approximate_inverse(Sigma, EPS, block), Sigma + EPS * torch.eye(size, dtype=DOUBLE)
    assert_close(Q, torch.linalg.inv(masked(Sigma, block) + EPS * torch.eye(size, dtype=DOUBLE)), rtol=1e-8)
    assert_close(torch.trace(Q @ F), torch.tensor(float(size), dtype=DOUBLE))


def test_the_error_is_zero_for_the_whole_and_for_uncorrelated_blocks() -> None:
    Sigma = covariance(12)
    assert step_error(Sigma, EPS).relative < 1e-12
    assert step_error(Sigma, EPS, block=12).relative < 1e-12
    assert step_error(masked(Sigma, 4), EPS, block=4).relative < 1e-12
    assert step_error(Sigma, EPS, block=4).relative > 0.05
    assert step_error(torch.zeros(3, 3, dtype=DOUBLE), EPS, block=1).relative == 0


def test_the_relative_error_is_what_random_gradients_show() -> None:
    Sigma = covariance(8)
    F, P = Sigma + EPS * torch.eye(8, dtype=DOUBLE), approximate_inverse(Sigma, EPS)
    Q = approximate_inverse(Sigma, EPS, block=3)
    torch.manual_seed(1)
    h = torch.randn(200_000, 8, dtype=DOUBLE) @ torch.linalg.cholesky(Sigma + 1e-12 * torch.eye(8, dtype=DOUBLE)).mT

    def length(M: Tensor) -> Tensor:
        step = h @ M
        return ((step @ F) * step).sum(-1).mean()

    shown = float((length(Q - P) / length(P)).sqrt())
    assert step_error(Sigma, EPS, block=3).relative == pytest.approx(shown, rel=0.02)


def test_gains_of_a_cutoff_lie_between_one_and_one_more_than_it() -> None:
    error = step_error(covariance(64, decay=0.8), 0.03, cutoff=1.0)
    assert error.least_gain > 1 - 1e-3 and 1.5 < error.largest_gain < 2.1
    assert 0 < error.relative < 0.3


def test_larger_blocks_are_better_on_a_random_walk() -> None:
    steps = torch.randn(4000, 64, dtype=DOUBLE, generator=torch.Generator().manual_seed(0)).cumsum(1)
    errors = [step_error(torch.cov(steps.mT), EPS, block=block).relative for block in (1, 4, 16, 64)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"Sigma": torch.zeros(2, 3)}, "a covariance is"),
        ({"Sigma": torch.full((2, 2), torch.nan)}, "a covariance is"),
        ({"eps": 0.0}, "eps must be positive"),
        ({"block": 0}, "block is at least 1"),
        ({"cutoff": -1.0}, "cutoff is zero"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step_error(**{"Sigma": torch.eye(2), "eps": EPS, **arguments})
