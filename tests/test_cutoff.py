"""A thin P, of the directions with variance above a cutoff, and P in another precision: what they stand for."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import prong
from prong.core.factorise import leading_directions, whiten
from prong.core.moments import Moments
from prong.core.whitening import times_inverse
from tests.cases import PROPERTY, SPECS, assert_close, curved
from tests.training import batches, mlp, run

DOUBLE = torch.float64


def decaying(size: int, rows: int, groups: int = 1, decay: float = 0.8, seed: int = 0) -> Tensor:
    """Rows (groups, rows, in) whose variances fall geometrically, in a random basis."""
    torch.manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(groups, size, size, dtype=DOUBLE)).Q
    return torch.randn(groups, rows, size, dtype=DOUBLE) * decay ** (torch.arange(size) / 2) @ basis.mT + 1


def moments(rows: Tensor) -> Moments:
    result = Moments(rows.shape[0], rows.shape[2], DOUBLE)
    result.add(rows)
    return result


def matrix(P: Tensor, tail: float) -> Tensor:
    """What a whitening's P stands for."""
    return times_inverse(torch.eye(P.shape[1], dtype=P.dtype).expand(P.shape[0], -1, -1), P, tail)


def test_leading_directions_are_found_whatever_the_default_device_is():
    Sigma = moments(decaying(32, 200)).covariance()
    expected = leading_directions(Sigma, 0.1, 16)
    with torch.device("meta"):
        found = leading_directions(Sigma, 0.1, 16)
    torch.testing.assert_close(found, expected)


def truncated_inverse(Sigma: Tensor, eps: float, cutoff: float) -> Tensor:
    """(Sigma_k + eps I)^-1 by a complete eigendecomposition."""
    lam, E = torch.linalg.eigh(Sigma)
    lam = torch.where(lam > cutoff * eps, lam, 0)
    return (E / (lam + eps).unsqueeze(-2)) @ E.mT


@pytest.mark.parametrize("rows", [20, 400], ids=["fewer rows than inputs", "more"])
@pytest.mark.parametrize("centred", [True, False])
def test_p_is_the_inverse_of_the_truncated_covariance(rows, centred):
    m = moments(decaying(64, rows, groups=2))
    eps, cutoff = 0.03, 2.0
    w = whiten(m, eps, None, centred, cutoff)
    assert w.tail == pytest.approx(1 / eps) and w.P.shape[2] <= 16
    expected = truncated_inverse(m.covariance(centred), eps, cutoff)
    # The last directions kept may be mixed with the first left out, where the gain is all but flat.
    assert torch.linalg.matrix_norm(matrix(w.P, w.tail) - expected, 2).max() < 0.35 / eps
    exact = whiten(m, eps, None, centred).P
    gains = torch.linalg.eigvals(torch.linalg.solve(exact, matrix(w.P, w.tail))).real
    assert gains.min() > 1 - 1e-3 and gains.max() < 1 + cutoff * 1.05


@pytest.mark.parametrize("expected", [0, 1, 12, 50])
def test_leading_directions_are_those_of_a_complete_decomposition(expected):
    Sigma = moments(decaying(96, 2000, groups=3, decay=0.7)).covariance()
    lam, E = leading_directions(Sigma, 1e-2, at_most=32, expected=expected)
    exact_lam, exact_E = (x.flip(-1)[..., : lam.shape[1]] for x in torch.linalg.eigh(Sigma))
    kept = lam > 0
    assert (kept.sum(-1) == (exact_lam > 1e-2).sum(-1)).all() and not kept.all(), "groups differ in how many they have"
    assert_close(lam, exact_lam * kept, rtol=1e-4, atol=1e-4)
    strong = exact_lam > 0.05
    assert (((E * exact_E).sum(-2).abs() - 1)[strong].abs() < 1e-4).all()
    assert E.mT.matmul(E).diagonal(dim1=-2, dim2=-1).sub(kept.double()).abs().max() < 1e-10


def test_leading_directions_gives_up_where_there_are_too_many():
    assert leading_directions(torch.eye(40, dtype=DOUBLE)[None], 0.5, at_most=10) is None
    lam, E = leading_directions(torch.zeros(2, 40, 40, dtype=DOUBLE), 0.5, at_most=10)
    assert lam.shape == (2, 0) and E.shape == (2, 40, 0)


def test_where_most_directions_count_p_is_exact():
    m = moments(torch.randn(1, 500, 32, dtype=DOUBLE))
    w = whiten(m, 1e-2, cutoff=1.0)
    assert w.tail == 0
    assert_close(w.P, whiten(m, 1e-2).P)


@pytest.mark.parametrize("rows", [20, 400], ids=["fewer rows than inputs", "more"])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("most", [3, 10, 64])
def test_of_too_many_directions_the_largest_are_told_apart_and_others_damped_like_the_first_left_out(
    rows, centred, most
):
    m, eps = moments(decaying(64, rows, groups=2)), 1e-3
    w = whiten(m, eps, None, centred, 1.0, most=most)
    assert w.eps == eps and w.P.shape[2] <= most
    lam, E = (x.flip(-1) for x in torch.linalg.eigh(m.covariance(centred)))
    lam = lam.where(lam > eps, 0)
    rest = lam[:, most:].amax() if most < 64 else torch.tensor(0.0, dtype=DOUBLE)
    damped = eps + lam.where(torch.arange(64) < most, rest).clamp(min=rest)
    expected = (E / damped.unsqueeze(-2)) @ E.mT
    gains = torch.linalg.eigvals(torch.linalg.solve(expected, matrix(w.P, w.tail))).real
    assert gains.min() > 0.8 and gains.max() < 1.25, "neighbours of the last may be mixed with it"
    X = torch.randn(2, 5, 64, dtype=DOUBLE)
    assert_close(times_inverse(w.damped(X), w.P, w.tail), X, rtol=1e-6, atol=1e-6)


def test_the_same_moments_give_the_same_directions_and_leave_the_random_state():
    m = moments(decaying(64, 300))
    state = torch.get_rng_state()
    first, second = whiten(m, 0.03, cutoff=1.0), whiten(m, 0.03, cutoff=1.0)
    assert torch.equal(first.P, second.P) and torch.equal(torch.get_rng_state(), state)


@PROPERTY
@given(size=st.integers(1, 6), rank=st.integers(0, 4), rows=st.integers(0, 5), tail=st.floats(0.1, 100))
def test_times_a_thin_inverse_is_times_the_matrix_it_stands_for(size, rank, rows, tail):
    torch.manual_seed(0)
    X, Q = torch.randn(2, rows, size, dtype=DOUBLE), torch.randn(2, size, rank, dtype=DOUBLE)
    dense = tail * torch.eye(size, dtype=DOUBLE) - Q @ Q.mT
    assert_close(times_inverse(X, Q, tail), X @ dense, rtol=1e-9)


def thin(layer: nn.Module, like: nn.Module) -> None:
    """Give a layer a thin P, and another the matrix it stands for."""
    for site, other in zip(layer.sites, like.sites, strict=True):
        groups, features = site.layout.groups, site.layout.features
        P = torch.randn(groups, features, 2, dtype=DOUBLE)
        c = torch.randn(groups, features, dtype=DOUBLE) if layer.centred(site) else None
        site.whitening = prong.core.whitening.Whitening(c, 1.0, P=P, tail=30.0)
        other.whitening = prong.core.whitening.Whitening(c, 1.0, P=matrix(P, 30.0))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("examples", [1, 40])
def test_every_layer_uses_a_thin_p_as_the_matrix_it_stands_for(spec, examples):
    torch.manual_seed(0)
    layer = prong.whiten_(spec.build(), prong.Implicit(cutoff=1.0))
    dense = copy.deepcopy(layer)
    thin(layer, dense)
    h = spec.sample(examples).requires_grad_()
    found = torch.autograd.grad(curved(layer(h, **spec.call)), [h, *layer.parameters()])
    expected = torch.autograd.grad(curved(dense(h, **spec.call)), [h, *dense.parameters()])
    assert_close(found, expected, rtol=1e-9)


def wide() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 4)).double()


def test_training_with_a_cutoff_keeps_the_function_saves_memory_and_resumes_bit_for_bit():
    data = [(decaying(64, 16, seed=i)[0], torch.randint(4, (16,))) for i in range(12)]
    model, twin = wide(), wide()

    def make(m: nn.Module, **options: float) -> prong.PRONG:
        form, refresh = prong.Implicit(**options), prong.Every(4, samples=160)
        return prong.PRONG(m, 1e-3, damping=prong.Absolute(0.1), form=form, refresh=refresh, trust=None)

    optimizer = make(model, cutoff=1.0)
    run(model, optimizer, data[:7])
    w = model[0].sites[0].whitening
    assert w.tail > 0 and w.P.shape[2] < 32
    before = model(data[0][0])
    prong.refresh_(model, [data[0][0]], prong.Absolute(0.1))
    assert_close(model(data[0][0]), before)
    exact = wide()
    run(exact, make(exact), data[:7])
    assert prong.summary(model)[0].memory < prong.summary(exact)[0].memory
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other = make(twin, cutoff=1.0)
    twin.load_state_dict(weights)
    other.load_state_dict(state)
    run(model, optimizer, data[7:])
    run(twin, other, data[7:])
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def storing(model: nn.Module, storage: torch.dtype | str | None) -> prong.PRONG:
    form, refresh = prong.Implicit(storage=storage), prong.Every(4, samples=64)
    return prong.PRONG(model, 1e-2, damping=prong.Absolute(0.1), form=form, refresh=refresh, trust=None)


def test_matrices_are_stored_in_the_dtype_asked_for_and_steps_are_near():
    data, models = batches(mlp(), 10), {}
    for storage in (None, torch.bfloat16):
        model = mlp().float()
        optimizer = storing(model, storage)
        run(model, optimizer, [(x.float(), y) for x, y in data])
        assert model[0].sites[0].whitening.P.dtype == (storage or torch.float32)
        assert model[0].sites[0].whitening.c.dtype == torch.float32
        models[storage] = torch.cat([p.detach().flatten() for p in model.parameters()])
    start = torch.cat([p.detach().flatten() for p in mlp().float().parameters()])
    exact, stored = (models[s] - start for s in (None, torch.bfloat16))
    assert 0 < (exact - stored).norm() < 0.03 * exact.norm()
    model.double()
    assert model[0].sites[0].whitening.P.dtype == torch.bfloat16, "what was asked for stays"


@pytest.mark.parametrize("units", [True, False])
def test_storage_by_itself_is_bfloat16_where_the_processor_has_units_for_it(units, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: units)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    for dtype in (torch.float32, torch.float64):
        model = mlp().to(dtype)
        optimizer = storing(model, "auto")
        run(model, optimizer, [(x.to(dtype), y) for x, y in batches(model, 6)])
        low = units and dtype == torch.float32
        assert model[0].sites[0].whitening.P.dtype == (torch.bfloat16 if low else dtype)
        twin = copy.deepcopy(model)
        assert twin.double()[0].sites[0].whitening.P.dtype == torch.float64, "where units are not asked for"


@pytest.mark.parametrize("cutoff", [0.0, 1.0])
@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16])
def test_storage_does_not_turn_steps_around(storage, cutoff):
    """Rounding errors of 1/eps exceed the gain of a direction with a thousand times that variance."""
    torch.manual_seed(0)
    Q = torch.linalg.qr(torch.randn(64, 64))[0]
    scale = torch.full((64,), 0.03)
    scale[:8] = 3.3
    layer = prong.whiten_(nn.Linear(64, 8), prong.Implicit(cutoff, storage))
    x = (torch.randn(2000, 64) * scale) @ Q
    prong.refresh_(layer, [x], prong.Absolute(0.01))
    w = layer.sites[0].whitening
    gains = torch.linalg.eigvalsh(matrix(w.P.double(), w.tail))
    assert gains.min() > 0
    prong.refresh_(layer, [x], prong.Absolute(1.0))
    assert layer.sites[0].whitening.P.dtype == storage, "no trouble there"


def test_what_does_not_fit_the_storage_is_kept_as_it_is():
    layer = prong.whiten_(nn.Linear(4, 4), prong.Implicit(storage=torch.float16))
    x = torch.randn(50, 4)
    x[:, 3] = 0
    prong.refresh_(layer, [x], prong.Absolute(1e-6))
    assert torch.isfinite(layer.sites[0].whitening.P).all()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"storage": torch.float8_e4m3fn}, TypeError, "storage"),
        ({"cutoff": -1.0}, ValueError, "cutoff"),
        ({"cutoff": float("nan")}, ValueError, "cutoff"),
        ({"cutoff": "small"}, TypeError, "cutoff"),
        ({"storage": "bfloat16"}, TypeError, "storage"),
        ({"storage": torch.int8}, TypeError, "storage"),
    ],
)
def test_what_makes_no_sense_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        prong.Implicit(**options)


@pytest.mark.parametrize("form", ["implicit", "auto"])
def test_a_model_whitened_already_keeps_its_own_cutoff(form):
    model = prong.whiten_(mlp(), prong.Implicit(cutoff=1.0))
    prong.PRONG(model, 0.1, form=form)
    assert model[0].cutoff == 1.0
