"""U (Sigma + eps I) U^T = I in every basis, from every kind of input, down to what cannot be factorised."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prong.core.factorise import WhiteningError, eps_of, scaled, whiten
from prong.core.moments import Moments
from prong.core.whitening import Whitening, times_inverse
from prong.options import Absolute
from tests import reference
from tests.closeness import assert_close

EPS = 1e-2
BASES = ("pca", "zca", "cholesky")


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def moments_of(rows: Tensor) -> Moments:
    moments = Moments(rows.shape[0], rows.shape[2], rows.dtype)
    moments.add(rows)
    return moments


def with_covariance(Sigma: Tensor, count: float = 10.0) -> Moments:
    """Moments that claim this covariance, possible or not, and a mean of zero."""
    moments = Moments(Sigma.shape[0], Sigma.shape[1], Sigma.dtype)
    moments.load_state_dict({"count": count, "mean": moments.mean, "scatter": count * Sigma})
    return moments


def dense(moments: Moments) -> Moments:
    """The same moments with the scatter as a full matrix."""
    same = Moments(*moments.mean.shape, moments.mean.dtype)
    same.load_state_dict({"count": moments.count, "mean": moments.mean, "scatter": moments.scatter})
    assert same.factor is None
    return same


def inputs(kind: str) -> Tensor:
    """Rows (groups, rows, in), none of them with mean zero."""
    rows = {
        "wide": lambda: randn(1, 60, 12) @ randn(12, 12) + randn(12),
        "tall": lambda: randn(1, 200, 3) @ randn(3, 3) + randn(3),
        "two groups": lambda: randn(2, 40, 5) @ randn(2, 5, 5) + randn(2, 1, 5),
        "width 1": lambda: randn(1, 10, 1) + 3,
        "width 1, three groups": lambda: randn(3, 10, 1) + 3,
        "rank deficient": lambda: randn(2, 50, 3) @ randn(3, 8) + randn(8),
        "dead unit": lambda: randn(1, 50, 6) * torch.tensor([1, 1, 0, 1, 1e-9, 1]) + 0.5,
        "zero": lambda: torch.zeros(2, 30, 4).double(),
        "constant": lambda: torch.full((1, 30, 4), 3.0).double(),
        "fewer samples than inputs": lambda: randn(2, 5, 12) + 1,
        "far fewer samples than inputs": lambda: randn(2, 5, 24) + 1,
        "far fewer samples than inputs, rank deficient": lambda: randn(1, 5, 2) @ randn(2, 24) + 1,
        "far fewer samples than inputs, zero": lambda: torch.zeros(1, 5, 24).double(),
        "far fewer samples than inputs, constant": lambda: torch.full((1, 5, 24), 3.0).double(),
        "two samples": lambda: randn(1, 2, 12),
        "as many samples as inputs": lambda: randn(1, 6, 6) + 1,
        "one sample fewer than inputs": lambda: randn(2, 5, 6) + 1,
    }
    return rows[kind]()


KINDS = (
    "wide",
    "tall",
    "two groups",
    "width 1",
    "width 1, three groups",
    "rank deficient",
    "dead unit",
    "zero",
    "constant",
    "fewer samples than inputs",
    "far fewer samples than inputs",
    "far fewer samples than inputs, rank deficient",
    "far fewer samples than inputs, zero",
    "far fewer samples than inputs, constant",
    "two samples",
    "as many samples as inputs",
    "one sample fewer than inputs",
)
every_kind = pytest.mark.parametrize("kind", KINDS)
every_basis = pytest.mark.parametrize("basis", BASES)
every_result = pytest.mark.parametrize("basis", [None, *BASES], ids=str)
both_centrings = pytest.mark.parametrize("centred", [True, False], ids=["centred", "uncentred"])


# The laws


@every_kind
@every_basis
@both_centrings
def test_whitening_whitens(kind, basis, centred):
    rows = inputs(kind)
    w = whiten(moments_of(rows), EPS, basis, centred)
    assert w.U is not None and w.U_inv is not None and w.P is None and w.eps == EPS
    damped = reference.damped(reference.covariance(rows, centred), EPS)
    identity = reference.eye(*damped.shape[:2])
    assert_close(w.U @ damped @ w.U.mT, identity)
    assert_close(w.U @ w.U_inv, identity)
    assert_close(w.U_inv @ w.U, identity)


@every_kind
@both_centrings
def test_P_is_the_inverse_of_the_damped_covariance_and_U_transposed_times_U_in_every_basis(kind, centred):
    rows = inputs(kind)
    moments = moments_of(rows)
    w = whiten(moments, EPS, None, centred)
    assert w.U is None and w.U_inv is None and w.P is not None and w.eps == EPS
    inverse = torch.linalg.inv(reference.damped(reference.covariance(rows, centred), EPS))
    assert_close(w.P, inverse)
    for basis in BASES:
        U = whiten(moments, EPS, basis, centred).U
        assert_close(U.mT @ U, inverse)


@every_kind
@every_result
def test_the_centre_is_the_mean_or_none(kind, basis):
    rows = inputs(kind)
    assert_close(whiten(moments_of(rows), EPS, basis).c, rows.mean(1))
    assert whiten(moments_of(rows), EPS, basis, centred=False).c is None


@given(
    st.integers(1, 2),
    st.integers(1, 8),
    st.integers(2, 12),
    st.floats(1e-4, 10),
    st.sampled_from(BASES),
    st.booleans(),
    st.integers(0, 2**31 - 1),
)
def test_whitening_whitens_any_shape_with_any_damping(groups, features, rows, eps, basis, centred, seed):
    torch.manual_seed(seed)
    h = randn(groups, rows, features) + 1
    U = whiten(moments_of(h), eps, basis, centred).U
    damped = reference.damped(reference.covariance(h, centred), eps)
    assert_close(U @ damped @ U.mT, reference.eye(groups, features))
    assert_close(whiten(moments_of(h), eps, None, centred).P, torch.linalg.inv(damped))


@every_basis
def test_whitened_inputs_are_white(basis):
    rows = inputs("wide")
    w = whiten(moments_of(rows), 1e-9, basis)
    x = (rows - w.c.unsqueeze(1)) @ w.U.mT
    assert_close(x.mean(1), torch.zeros(1, 12).double())
    assert_close(reference.covariance(x), reference.eye(1, 12), tolerance=1e-6)  # up to eps / smallest eigenvalue


# The bases


@every_kind
def test_pca_orders_directions_by_decreasing_variance(kind):
    rows = inputs(kind)
    w = whiten(moments_of(rows), EPS, "pca")
    Sigma = reference.covariance(rows)
    directions = torch.nn.functional.normalize(w.U, dim=-1)
    variance = torch.einsum("gki,gij,gkj->gk", directions, Sigma, directions)
    assert (variance.diff(dim=-1) <= 1e-12).all()
    assert_close(variance, torch.linalg.eigvalsh(Sigma).flip(-1))


@every_kind
def test_pca_directions_are_orthogonal_zca_is_symmetric_positive_and_cholesky_is_lower_triangular(kind):
    moments = moments_of(inputs(kind))
    pca, zca, cholesky = (whiten(moments, EPS, basis).U for basis in ("pca", "zca", "cholesky"))
    gram = pca @ pca.mT
    assert_close(gram, torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1)))
    assert_close(zca, zca.mT)
    assert (torch.linalg.eigvalsh(zca) > 0).all()
    assert torch.equal(cholesky, cholesky.tril())
    assert (cholesky.diagonal(dim1=-2, dim2=-1) > 0).all()


# Fewer samples than inputs


@pytest.mark.parametrize("rows", [2, 3, 5, 6, 11, 12, 13, 22, 23, 24, 25, 60])
@every_result
@both_centrings
def test_few_samples_give_what_a_dense_factorisation_gives(rows, basis, centred):
    moments = moments_of(randn(2, rows, 24) * torch.linspace(0.1, 10, 24) + 1)
    thin, full = whiten(moments, EPS, basis, centred), whiten(dense(moments), EPS, basis, centred)
    assert_close(thin.c, full.c)
    if basis == "pca" and rows < 25:  # directions without variance have no order: compare what they share
        assert_close(thin.U.mT @ thin.U, full.U.mT @ full.U)
        assert_close(thin.U_inv @ thin.U_inv.mT, full.U_inv @ full.U_inv.mT)
    elif basis == "pca":
        assert_close(thin.U.abs(), full.U.abs())  # an eigenvector's sign is free
    else:
        assert_close([thin.U, thin.U_inv, thin.P], [full.U, full.U_inv, full.P])


@given(
    st.integers(1, 2),
    st.integers(4, 200),
    st.floats(0, 1),
    st.floats(1e-2, 10),
    st.booleans(),
    st.floats(0, 1),
    st.booleans(),
    st.integers(0, 2**31 - 1),
)
def test_the_triangle_of_few_samples_is_the_dense_one(groups, features, share, eps, centred, dead, together, seed):
    """Over one to four blocks, the last of them ragged; dead inputs are scattered, or all that come first."""
    torch.manual_seed(seed)
    rows = 2 + round(share * (features // 4 - 2)) if features >= 12 else 2
    alive = torch.linspace(0, 1, features) >= dead if together else torch.rand(features) >= dead
    moments = moments_of((randn(groups, rows, features) @ randn(features, features).div(features**0.5) + 1) * alive)
    thin, full = whiten(moments, eps, "cholesky", centred), whiten(dense(moments), eps, "cholesky", centred)
    assert torch.equal(thin.U, thin.U.tril()) and torch.equal(thin.U_inv, thin.U_inv.tril())
    assert_close([thin.U, thin.U_inv], [full.U, full.U_inv])


@pytest.mark.parametrize(("basis", "largest"), [(None, 5), ("zca", 5)], ids=str)
@both_centrings
def test_few_samples_need_no_factorisation_of_the_size_of_the_inputs(basis, largest, centred, monkeypatch):
    sizes = []
    for name in ("eigh", "cholesky"):
        original = getattr(torch.linalg, name)

        def recorded(A, *args, original=original):
            sizes.append(A.shape[-1])
            return original(A, *args)

        monkeypatch.setattr(torch.linalg, name, recorded)
    whiten(moments_of(randn(1, 4, 150)), EPS, basis, centred)
    assert sizes and max(sizes) <= largest


@pytest.mark.parametrize("basis", [None, "zca"], ids=str)
@pytest.mark.parametrize("eps", [1e-6, 1e-2, 1e6])
def test_the_low_rank_path_is_exact_where_variance_is_far_above_the_damping(basis, eps):
    rows = 1e4 * randn(1, 4, 16)
    # Squaring loses what is below 1e-8 of the largest value: the reference takes singular values of the rows.
    _, root, E_t = torch.linalg.svd((rows - rows.mean(1, keepdim=True)) / 2, full_matrices=True)
    lam = torch.zeros(1, 16).double()
    lam[:, :3] = root[:, :3].square()  # centred, four rows have rank three
    f = (lam + eps) ** (-1.0 if basis is None else -0.5)
    w = whiten(moments_of(rows), eps, basis)
    assert_close((w.P if basis is None else w.U) / f.max(), E_t.mT * (f / f.max()).unsqueeze(-2) @ E_t)


@pytest.mark.parametrize(("basis", "tolerance"), [(None, 3e-2), ("zca", 5e-5), ("cholesky", 5e-5)], ids=str)
def test_few_float32_samples_are_whitened_as_well_as_float32_can_store_it(basis, tolerance):
    """With variance 1e5 times the damping; a factorisation in float32 itself is ten times worse, or far more."""
    moments = moments_of(30 * torch.randn(1, 12, 150))
    F = moments.factor.double() / moments.count**0.5
    damped, identity = reference.damped(F.mT @ F, EPS), reference.eye(1, 150)
    w = whiten(moments, EPS, basis).map(Tensor.double)
    if basis is None:
        assert_close(w.P @ damped, identity, tolerance)
    else:
        assert_close(w.U @ damped @ w.U.mT, identity, tolerance)
        assert_close(w.U @ w.U_inv, identity, tolerance)


def test_inputs_that_were_all_padding_are_inputs_without_variance():
    for basis in (None, *BASES):
        moments = Moments(1, 4, torch.float64)
        moments.add_zeros(5)
        w = whiten(moments, EPS, basis)
        assert_close(w.P if basis is None else w.U.mT @ w.U, reference.eye(1, 4) / EPS)


# Precision


@every_result
@pytest.mark.parametrize("rows", [20, 400])
def test_float32_moments_give_a_float32_whitening_of_float32_quality(basis, rows):
    h = torch.randn(1, rows, 100) * torch.logspace(0, -2, 100) + 1
    w = whiten(moments_of(h), EPS, basis)
    assert all(x.dtype == torch.float32 for _, x in w.items() if isinstance(x, Tensor))
    damped = reference.damped(reference.covariance(h), EPS)
    identity = reference.eye(1, 100)
    if basis is None:
        assert_close(w.P.double() @ damped, identity, tolerance=1e-4)
    else:
        U, U_inv = w.U.double(), w.U_inv.double()
        assert_close(U @ damped @ U.mT, identity, tolerance=1e-4)
        assert_close(U @ U_inv, identity, tolerance=1e-4)


@every_result
@pytest.mark.parametrize("rows", [5, 40], ids=["thin", "dense"])
def test_autocast_changes_nothing(basis, rows):
    moments = moments_of(torch.randn(2, rows, 20))
    expected = whiten(moments, EPS, basis)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = whiten(moments, EPS, basis)
    for (_, a), (name, e) in zip(actual.items(), expected.items(), strict=True):
        assert torch.equal(a, e) if isinstance(e, Tensor) else a == e, name


# The ladder


@pytest.mark.parametrize("basis", [None, "cholesky"], ids=str)
def test_where_float32_cannot_factorise_float64_does_with_the_damping_asked_for(basis):
    t = torch.tensor([1e3, -1e3] * 4)
    rows = torch.stack([t, t, t], dim=-1).unsqueeze(0)  # Sigma = 1e6 everywhere: in float32, adding eps is adding zero
    eps = 1e-3
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.cholesky(reference.damped(moments_of(rows).covariance(), eps))
    w = whiten(moments_of(rows), eps, basis)
    assert w.eps == eps
    exact = torch.linalg.inv(reference.damped(reference.covariance(rows), eps))
    P = w.P if basis is None else w.U.mT @ w.U
    assert P.dtype == torch.float32
    assert_close(P.double(), exact, tolerance=1e-4)


@pytest.mark.parametrize("basis", ["pca", "zca"])
@pytest.mark.parametrize("rows", [4, 40], ids=["thin", "dense"])
def test_where_eigh_does_not_converge_in_float32_float64_is_tried(basis, rows, monkeypatch):
    moments = moments_of(torch.randn(1, rows, 16))
    original = torch.linalg.eigh

    def eigh(A):
        if A.dtype == torch.float32:
            raise torch.linalg.LinAlgError("failed to converge")
        return original(A)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    w = whiten(moments, EPS, basis)
    assert w.eps == EPS and w.U.dtype == torch.float32
    damped = reference.damped(moments.covariance().double(), EPS)
    assert_close(w.U.double() @ damped @ w.U.mT.double(), reference.eye(1, 16), tolerance=1e-4)


@pytest.mark.parametrize("basis", [None, "cholesky"], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("negative", "raised"), [(0.5, 1), (5, 10), (50, 100)])
def test_a_covariance_that_rounding_made_indefinite_is_damped_more_and_the_result_says_so(
    basis, dtype, negative, raised
):
    Sigma = torch.diag_embed(torch.tensor([[1.0, 0.5, -negative * EPS]], dtype=dtype))
    w = whiten(with_covariance(Sigma), EPS, basis)
    assert math.isclose(w.eps, raised * EPS)
    P = w.P if basis is None else w.U.mT @ w.U
    assert_close(P, torch.linalg.inv(reference.damped(Sigma, raised * EPS)))


@pytest.mark.parametrize("basis", ["pca", "zca"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_eigenvalue_that_rounding_made_negative_is_taken_as_zero(basis, dtype):
    lam = torch.tensor([[1.0, 0.5, -5 * EPS]], dtype=dtype)
    w = whiten(with_covariance(torch.diag_embed(lam)), EPS, basis)
    assert w.eps == EPS
    assert_close(w.U.mT @ w.U, torch.diag_embed(1 / (lam.clamp(min=0) + EPS)))


@pytest.mark.parametrize("kind", ["zero", "far fewer samples than inputs, zero"])
def test_a_whitening_too_large_for_its_dtype_is_damped_more(kind):
    w = whiten(moments_of(inputs(kind).float()), 1e-40)  # 1 / eps is beyond float32
    assert math.isclose(w.eps, 1e-38)
    assert w.is_finite()


@every_result
@pytest.mark.parametrize("rows", [4, 40], ids=["thin", "dense"])
def test_a_damping_whose_inverse_no_float_holds_fails_by_name(basis, rows):
    with pytest.raises(WhiteningError):
        whiten(moments_of(torch.zeros(1, rows, 16)), 5e-324, basis)


@pytest.mark.parametrize("basis", [None, "cholesky"], ids=str)
def test_a_covariance_that_nothing_can_factorise_is_named(basis):
    Sigma = torch.diag_embed(torch.tensor([[1.0, 7.0, -1000 * EPS]]))
    with pytest.raises(WhiteningError, match=r"3 x 3 .* damping 1; its largest entry is 10, from 25 samples"):
        whiten(with_covariance(Sigma, count=25), EPS, basis)


@every_result
@pytest.mark.parametrize("rows", [4, 40], ids=["thin", "dense"])
def test_when_every_factorisation_fails_the_moments_are_as_they_were(basis, rows, monkeypatch):
    moments = moments_of(randn(1, rows, 16))
    before = moments.state_dict()

    def fail(*_):
        raise torch.linalg.LinAlgError("failed to converge")

    for name in ("eigh", "cholesky"):
        monkeypatch.setattr(torch.linalg, name, fail)
    with pytest.raises(WhiteningError, match="16 x 16"):
        whiten(moments, EPS, basis)
    after = moments.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[k], v) if isinstance(v, Tensor) else after[k] == v for k, v in before.items())


# Errors


@pytest.mark.parametrize("eps", [0, 0.0, -1e-3, math.nan, math.inf, -math.inf])
def test_damping_must_be_positive_and_finite(eps):
    with pytest.raises(ValueError, match=r"eps must be (positive and )?finite"):
        whiten(moments_of(randn(1, 9, 3)), eps)


@pytest.mark.parametrize("eps", ["0.01", None, True, [0.01], torch.tensor(0.01), 1j])
def test_damping_must_be_a_number(eps):
    with pytest.raises(TypeError, match="eps is a number"):
        whiten(moments_of(randn(1, 9, 3)), eps)


def test_a_whole_number_is_a_damping():
    assert whiten(moments_of(randn(1, 9, 3)), 1).eps == 1


def test_an_unknown_basis_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"basis is one of pca, zca, cholesky, got 'qr'"):
        whiten(moments_of(randn(1, 9, 3)), EPS, "qr")


@every_result
@pytest.mark.parametrize("rows", [0, 1])
def test_a_covariance_needs_two_samples(basis, rows):
    with pytest.raises(ValueError, match=f"at least 2 samples, got {rows}"):
        whiten(moments_of(randn(1, rows, 3)), EPS, basis)


@every_result
@both_centrings
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_moments_that_are_not_finite_are_refused(basis, centred, bad):
    Sigma = reference.eye(1, 3)
    Sigma[0, 1, 2] = Sigma[0, 2, 1] = bad
    with pytest.raises(FloatingPointError, match="not finite"):
        whiten(with_covariance(Sigma), EPS, basis, centred)


@every_result
def test_inputs_too_large_to_square_are_refused(basis):
    with pytest.raises(FloatingPointError, match="too large to square"):
        whiten(moments_of(1e25 * torch.randn(1, 20, 3)), EPS, basis)


# The value


def test_a_whitening_shares_nothing_with_its_moments():
    for rows in (4, 40):
        for basis in (None, *BASES):
            moments = moments_of(randn(1, rows, 16))
            w = whiten(moments, EPS, basis)
            copy = w.map(torch.clone)
            moments.mean.fill_(99.0)
            moments.scatter.fill_(99.0)
            moments.add(randn(1, 9, 16))
            for (_, a), (name, e) in zip(w.items(), copy.items(), strict=True):
                assert torch.equal(a, e) if isinstance(e, Tensor) else a == e, name


def test_map_applies_to_every_tensor_and_keeps_the_rest():
    w = whiten(moments_of(randn(1, 9, 3)), EPS, "zca")
    half = w.map(lambda x: x.to(torch.bfloat16))
    assert half.c.dtype == half.U.dtype == half.U_inv.dtype == torch.bfloat16
    assert half.P is None and half.eps == EPS
    assert w.U.dtype == torch.float64


def test_a_whitening_is_finite_only_if_all_of_it_is():
    w = whiten(moments_of(randn(1, 9, 3)), EPS, "zca")
    assert w.is_finite() and Whitening(None, EPS).is_finite()
    for name in ("c", "U", "U_inv"):
        for bad in (math.nan, math.inf):
            values = dict(w.items())
            values[name] = values[name].clone()
            values[name].view(-1)[-1] = bad
            assert not Whitening(**values).is_finite()


def test_a_whitening_does_not_change():
    with pytest.raises(FrozenInstanceError):
        whiten(moments_of(randn(1, 9, 3)), EPS).eps = 1.0


# Several at once ------------------------------------------------------------------------------------------------------


# Relative damping


@every_kind
def test_relative_damping_is_in_units_of_the_mean_of_the_raw_squares_not_of_the_variance(kind):
    rows = inputs(kind)
    groups, _, features = rows.shape
    for moments in (moments_of(rows), dense(moments_of(rows))):
        assert_close(eps_of(0.3, moments, groups * features), 0.3 * rows.square().mean().item())
        assert eps_of(Absolute(0.3), moments, groups * features) == 0.3


def test_inputs_that_fill_up_a_group_do_not_count_in_the_mean():
    rows = torch.cat([randn(1, 20, 3) + 1, torch.cat([randn(1, 20, 2), torch.zeros(1, 20, 1)], dim=-1)])
    eps = eps_of(1.0, moments_of(rows), 5)
    assert_close(eps, rows.square().sum().item() / (20 * 5))


@every_result
def test_with_relative_damping_rescaled_inputs_are_whitened_to_the_same(basis):
    rows, s = inputs("two groups"), 1e4
    small, large = moments_of(rows), moments_of(s * rows)
    w, W = (whiten(m, eps_of(0.1, m, 10), basis) for m in (small, large))
    assert_close(W.c / s, w.c)
    assert_close(W.eps / s**2, w.eps)
    for name, power in (("U", 1), ("U_inv", -1), ("P", 2), ("F", -2)):
        mine, theirs = getattr(w, name), getattr(W, name)
        assert_close(None if theirs is None else theirs * s**power, mine)


# A usual size


@every_basis
@pytest.mark.parametrize("kind", ["wide", "two groups", "dead unit", "far fewer samples than inputs"])
def test_a_scaled_whitening_is_the_whitening_divided_by_one_number_free_of_units(kind, basis):
    rows = inputs(kind)
    channels = rows.shape[0] * rows.shape[2]
    found = []
    for s in (1.0, 1e3):
        moments = moments_of(s * rows)
        plain = whiten(moments, eps_of(0.1, moments, channels), basis)
        w = scaled(plain, moments, channels)
        assert_close(w.scale * w.U, plain.U)
        assert_close(w.U @ w.inverse(), reference.eye(*w.U.shape[:2]))
        assert_close(moments.mean_square(channels) * w.U.square().sum().item() / channels, 1.0)
        assert (w.c is plain.c, w.eps) == (True, plain.eps)
        found.append(w.scale)
    assert_close(*found)


@every_basis
def test_the_scale_is_one_where_white_inputs_are_little_damped(basis):
    rows = torch.linalg.qr(randn(2, 50, 6)).Q * 50**0.5
    moments = moments_of(torch.cat([rows, -rows], dim=1))
    assert_close(scaled(whiten(moments, 1e-11, basis), moments, 12).scale, 1.0)


# The inverse, and what is inverted


@every_kind
@every_basis
def test_the_inverse_of_a_pca_whitening_needs_no_matrix_of_its_own(kind, basis):
    moments = moments_of(inputs(kind))
    w = whiten(moments, EPS, basis)
    assert w.inverse() is w.U_inv
    if basis == "pca":
        assert_close(replace(w, U_inv=None).inverse(), w.U_inv)
        if moments.mean_square(7) > 0:
            assert_close(replace(scaled(w, moments, 7), U_inv=None).inverse(), scaled(w, moments, 7).U_inv)


@every_kind
@both_centrings
def test_damped_multiplies_by_the_damped_covariance(kind, centred):
    rows = inputs(kind)
    w = whiten(moments_of(rows), EPS, None, centred)
    X = randn(rows.shape[0], 5, rows.shape[2])
    assert_close(w.damped(X), X @ reference.damped(reference.covariance(rows, centred), EPS))
    assert w.damped(X.float()).dtype == torch.float32


@pytest.mark.parametrize("cutoff", [1e-3, 0.5, 4.0])
@pytest.mark.parametrize("samples", [20, 400], ids=["thin", "dense"])
def test_damped_of_a_thin_P_multiplies_by_the_covariance_that_P_inverts(samples, cutoff):
    rows = randn(2, samples, 6) @ (10 * randn(2, 6, 40)) + 1e-3 * randn(2, samples, 40)
    w = whiten(moments_of(rows), EPS, cutoff=cutoff)
    assert w.F is None and w.tail > 0
    X = randn(2, 5, 40)
    assert_close(times_inverse(w.damped(X), w.P, w.tail), X, tolerance=1e-6)  # P has the condition of Sigma
    damped = reference.damped(reference.covariance(rows), EPS)
    assert_close(w.damped(X), X @ damped, tolerance=1e-4)


# The product with the mean


@pytest.mark.parametrize("cutoff", [0.0, 1.0])
@pytest.mark.parametrize("rows", [5, 200], ids=["thin", "dense"])
@pytest.mark.parametrize(("length", "short"), [(3.9, True), (4.1, False)])
def test_the_mean_is_multiplied_once_unless_it_is_long(rows, length, short, cutoff):
    torch.manual_seed(0)
    h = torch.randn(1, rows, 24, dtype=torch.float64) * torch.tensor([3.0] * 2 + [0.1] * 22)
    h = h - h.mean(1, keepdim=True)
    direction = torch.nn.functional.normalize(torch.randn(24, dtype=torch.float64), dim=0)
    h = h + length * h.square().sum(-1).mean().sqrt() * direction
    w = whiten(moments_of(h), 0.1, cutoff=cutoff)
    assert w.c is not None and w.P is not None and (w.tail > 0) == (cutoff > 0)
    assert (w.cP is not None) == short
    if w.cP is not None:
        torch.testing.assert_close(
            times_inverse(h, w.P, w.tail) - w.cP.unsqueeze(1), times_inverse(h - w.c.unsqueeze(1), w.P, w.tail)
        )
    assert whiten(moments_of(h), 0.1, centred=False).cP is None
    assert whiten(moments_of(h), 0.1, "pca").cP is None
