"""The paper's section on duality and mirror descent, sentence by sentence; where it is wrong as printed, corrected."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import prong
from prong import mirror
from prong.core.factorise import whiten
from prong.core.moments import Moments
from prong.core.whitening import Whitening, natural_gradient, to_canonical, to_whitened
from tests.closeness import assert_close
from tests.training import batches, canonical, mlp, run

DOUBLE = torch.float64


def draw(size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A positive definite matrix, and two vectors."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(2 * size, size, generator=generator, dtype=DOUBLE)
    theta, other = torch.randn(2, size, generator=generator, dtype=DOUBLE)
    return X.mT @ X / size + 0.1 * torch.eye(size, dtype=DOUBLE), theta, other


def layer_inputs(eps: float) -> tuple[Tensor, Tensor]:
    """What the second layer of a small net sees, and the damped covariance of that."""
    model = mlp()
    h = torch.cat([model[:2](x).detach() for x, _ in batches(model, 8)])
    centred = h - h.mean(0)
    return h, centred.mT @ centred / len(h) + eps * torch.eye(h.shape[1], dtype=DOUBLE)


def metrics() -> list[Tensor]:
    return [draw(7)[0], layer_inputs(0.01)[1]]


def logistic(theta: Tensor) -> Tensor:
    """A loss that is not quadratic."""
    x = torch.linspace(-1, 2, 40 * theta.numel(), dtype=DOUBLE).sin().reshape(40, -1) * 2
    return F.softplus(-x @ theta).mean() + 0.05 * theta.square().sum()


def gradient(loss, theta: Tensor) -> Tensor:
    theta = theta.clone().requires_grad_()
    return torch.autograd.grad(loss(theta), theta)[0]


# Mirror descent -------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=20)
@given(size=st.integers(1, 12), seed=st.integers(0, 1000))
def test_psi_star_is_the_convex_conjugate_and_the_two_gradients_are_inverse(size, seed):
    """'theta = grad* psi(Omega), psi* the complex conjugate': it is the gradient of psi*, the convex conjugate."""
    A, theta, other = draw(size, seed)
    omega = mirror.to_dual(theta, A)
    assert_close(omega, gradient(lambda t: mirror.potential(t, A), theta))
    assert_close(mirror.to_primal(omega, A), gradient(lambda o: mirror.conjugate(o, A), omega))
    assert_close(mirror.to_primal(omega, A), theta)
    assert_close(mirror.potential(theta, A) + mirror.conjugate(omega, A), omega @ theta)
    assert mirror.conjugate(omega, A) >= omega @ other - mirror.potential(other, A), "a supremum"


def test_the_divergence_is_bregmans():
    A, p, q = draw(5)
    slope = gradient(lambda t: mirror.potential(t, A), p)
    expected = mirror.potential(q, A) - mirror.potential(p, A) - (q - p) @ slope
    assert_close(mirror.divergence(q, p, A), expected)
    assert mirror.divergence(q, p, A) > 0
    assert_close(mirror.divergence(q, p, torch.eye(5, dtype=DOUBLE)), 0.5 * (q - p).square().sum())


@pytest.mark.parametrize("A", metrics(), ids=["random", "layer"])
def test_a_mirror_step_solves_the_proximal_problem_with_the_divergence_for_half_the_squared_distance(A):
    """'Replacing the L2 distance by B_psi' in <theta, g> + |.|^2 / (2 lr): B_psi stands for |.|^2 / 2, not |.|^2."""
    _, theta, g = draw(len(A), 3)
    lr = 0.3
    found = mirror.mirror_step(theta, g, A, lr)
    assert_close(gradient(lambda q: q @ g + mirror.divergence(q, theta, A) / lr, found), torch.zeros_like(g))
    literal = gradient(lambda q: q @ g + mirror.divergence(q, theta, A) / (2 * lr), found)
    assert literal.norm() > 0.1 * g.norm(), "with 1 / (2 lr) it would be a step of 2 lr"
    plain = mirror.mirror_step(theta, g, torch.eye(len(A), dtype=DOUBLE), lr)
    assert_close(plain, theta - lr * g)


@pytest.mark.parametrize("A", metrics(), ids=["random", "layer"])
def test_the_natural_gradient_is_mirror_descent_with_the_fishers_potential(A):
    theta = expected = draw(len(A), 1)[1]
    for _ in range(5):
        theta = mirror.mirror_step(theta, gradient(logistic, theta), A, 0.1)
        expected = expected - 0.1 * torch.linalg.inv(A) @ gradient(logistic, expected)
    assert_close(theta, expected)
    assert_close(mirror.natural_step(theta, expected, A, 0.1), theta - 0.1 * torch.linalg.inv(A) @ expected)


def test_when_the_fisher_changes_the_dual_point_is_made_anew_and_its_derivative_is_left_out():
    """The footnote: psi is indexed by time. It is the potential of a Fisher that is a constant during the step."""

    def fisher(theta: Tensor) -> Tensor:
        return torch.diag(1 + theta.square()) + 0.5

    theta = draw(4)[1]
    for _ in range(4):
        g = gradient(logistic, theta)
        new = mirror.mirror_step(theta, g, fisher(theta), 0.1)
        assert_close(new, mirror.natural_step(theta, g, fisher(theta), 0.1))
        stale = mirror.to_primal(mirror.to_dual(theta, fisher(theta)), fisher(new))
        assert (stale - theta).norm() > 1e-4, "the old dual point means something else in the new geometry"
        whole = gradient(lambda t: 0.5 * t @ fisher(t) @ t, theta)
        assert (whole - mirror.to_dual(theta, fisher(theta))).norm() > 1e-2
        theta = new


# The gradient in the dual space ---------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=15)
@given(size=st.integers(1, 9), seed=st.integers(0, 1000))
def test_the_gradient_in_the_dual_space_is_the_root_times_the_gradient(size, seed):
    """Printed as [dl/dtheta F^-1/2]; with the paper's column vectors, F^-1/2 dl/dtheta."""
    metric, theta, _ = draw(size, seed)
    A = mirror.square_root(metric)
    assert_close(A, A.mT)
    assert_close(A @ A, metric)
    found = mirror.dual_gradient(logistic, mirror.to_dual(theta, A), A)
    assert_close(found, torch.linalg.inv(A) @ gradient(logistic, theta))


@pytest.mark.parametrize("metric", metrics(), ids=["random", "layer"])
def test_with_the_root_of_the_fisher_gradients_of_the_dual_space_give_the_natural_step(metric):
    A = mirror.square_root(metric)
    theta, lr = draw(len(A), 2)[1], 0.2
    omega = mirror.to_dual(theta, A) - lr * mirror.dual_gradient(logistic, mirror.to_dual(theta, A), A)
    expected = mirror.natural_step(theta, gradient(logistic, theta), metric, lr)
    assert_close(mirror.to_primal(omega, A), expected)
    assert_close(mirror.dual_descent(logistic, theta, metric, lr), expected)


def test_it_is_the_primal_path_that_agrees_not_the_dual_points_and_not_mirror_descent_with_the_root():
    """'Equivalent to the updates' of mirror descent: as theta moves. Mirror descent with psi~ is another method."""
    metric, theta, _ = draw(6)
    A, g = mirror.square_root(metric), gradient(logistic, theta)
    assert (mirror.to_dual(theta, metric) - mirror.to_dual(theta, A)).norm() > 0.1
    halfway = mirror.mirror_step(theta, g, A, 0.2)
    assert_close(halfway, theta - 0.2 * torch.linalg.inv(A) @ g)
    assert (halfway - mirror.natural_step(theta, g, metric, 0.2)).norm() > 1e-3


@pytest.mark.parametrize("metric", metrics(), ids=["random", "layer"])
def test_projections_are_amortised_over_several_updates(metric):
    """Two maps and any number of steps between them are natural steps with the Fisher of the first."""
    theta = expected = draw(len(metric), 4)[1]
    for _ in range(7):
        expected = mirror.natural_step(expected, gradient(logistic, expected), metric, 0.1)
    assert_close(mirror.dual_descent(logistic, theta, metric, 0.1, steps=7), expected)


# PRONG's projections --------------------------------------------------------------------------------------------------


def layer_case(basis: str, taps: int = 1, bias: bool = True, eps: float = 0.05) -> tuple[Whitening, Tensor, Tensor]:
    """The whitening of a real layer's inputs, and rows (w, b) of parameters of two groups."""
    h, _ = layer_inputs(eps)
    moments = Moments(2, h.shape[1], DOUBLE)
    moments.add(torch.stack([h, h.flip(1) * 2 - 1]))
    torch.manual_seed(0)
    W, b = torch.randn(2, 3, taps, h.shape[1], dtype=DOUBLE), torch.randn(2, 3, dtype=DOUBLE)
    return whiten(moments, eps, basis, centred=bias), W, b


def as_rows(W: Tensor, b: Tensor | None) -> Tensor:
    return W.flatten(2) if b is None else torch.cat([W.flatten(2), b.unsqueeze(-1)], dim=-1)


@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("basis", ["pca", "zca", "cholesky"])
def test_the_projections_are_linear_and_inverse_to_each_other(basis, bias, taps):
    """'There exist linear projections P and P^-1': linear bijections, with lines 7 and 10 as corrected."""
    w, W, b = layer_case(basis, taps, bias)
    A = mirror.layer_factor(w, taps)
    V, d = to_whitened(W, b if bias else None, w)
    assert_close(as_rows(V, d), as_rows(W, b if bias else None) @ A)
    assert_close(as_rows(*to_canonical(V, d, w)), as_rows(V, d) @ torch.linalg.inv(A))
    assert_close(to_canonical(V, d, w), (W, b if bias else None))


def test_lines_7_and_10_as_printed_are_not_inverse_to_each_other():
    w, W, b = layer_case("pca")
    V, d = to_whitened(W, b, w)
    printed = d + (to_canonical(V, d, w)[0][:, :, 0] @ w.c.unsqueeze(-1)).squeeze(-1)  # b = d + W c
    assert (printed - b).norm() > 0.1


@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("basis", ["pca", "zca", "cholesky"])
def test_the_square_of_the_map_is_the_second_moment_of_the_inputs_with_a_one_appended(basis, bias, taps):
    eps = 0.05
    w, _, _ = layer_case(basis, taps, bias, eps)
    A = mirror.layer_factor(w, taps)
    h = layer_inputs(eps)[0]
    for group, x in enumerate((h, h.flip(1) * 2 - 1)):
        size = x.shape[1]
        patches = [torch.zeros(size * taps + bias, size * taps + bias, dtype=DOUBLE)]
        for row in x:  # a patch of independent positions: a product of means off the diagonal blocks
            patch = torch.cat([row - x.mean(0) if bias else row] * taps)
            block = torch.block_diag(*[torch.outer(part, part) for part in patch.chunk(taps)])
            patches.append(F.pad(block, (0, int(bias), 0, int(bias))))
        expected = sum(patches) / len(x)
        mean = torch.cat([*[x.mean(0)] * taps, torch.ones(1, dtype=DOUBLE)])
        if bias:
            expected = expected + torch.outer(mean, mean)
        expected.diagonal()[: size * taps].add_(eps)
        assert_close(A[group] @ A[group].mT, expected)


@pytest.mark.parametrize("taps", [1, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("basis", ["pca", "zca", "cholesky"])
def test_the_natural_gradient_of_a_layer_is_that_of_the_map_squared(basis, bias, taps):
    """(nW, nb) = (gW, gb) (A A^T)^-1: what implicit layers return is the natural gradient of weights and bias."""
    w, gW, gb = layer_case(basis, taps, bias)
    A = mirror.layer_factor(w, taps)
    P = w.U.mT @ w.U
    found = natural_gradient(gW, gb if bias else None, P, w.c)
    assert_close(as_rows(*found), as_rows(gW, gb if bias else None) @ torch.linalg.inv(A @ A.mT))


def test_only_without_a_centre_and_in_the_zca_basis_are_the_projections_gradients_of_a_potential():
    """'grad psi~ and grad psi~* correspond to the projections': exactly then; otherwise up to a factor of A A^T = F."""
    w, W, _ = layer_case("zca", bias=False)
    A = mirror.layer_factor(w)[0]
    metric = torch.linalg.inv((w.U.mT @ w.U)[0])
    assert_close(A, mirror.square_root(metric))
    V, _ = to_whitened(W, None, w)
    for v, row in zip(V[0, :, 0], W[0, :, 0], strict=True):
        assert_close(v, mirror.to_dual(row, mirror.square_root(metric)))
        assert_close(row, mirror.to_primal(v, mirror.square_root(metric)))
    pca = mirror.layer_factor(layer_case("pca", bias=False)[0])[0]
    assert (pca - pca.mT).norm() > 0.1, "a gradient's derivative is symmetric: the paper's formula gives none"
    rotation = torch.linalg.inv(A) @ pca
    assert_close(rotation @ rotation.mT, torch.eye(len(A), dtype=DOUBLE))


@pytest.mark.parametrize("basis", ["pca", "zca", "cholesky"])
@pytest.mark.parametrize("bias", [True, False])
def test_training_a_whitened_layer_is_dual_descent_in_every_row(basis, bias):
    """Several SGD steps on (V, d) of a real layer, in each basis, against `dual_descent` with F = I (x) A A^T."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3, bias=bias)).double()
    x, y = torch.randn(64, 5, dtype=DOUBLE) @ torch.randn(5, 5, dtype=DOUBLE) + 1, torch.randint(3, (64,))
    prong.whiten_(model, prong.Explicit(basis))
    prong.refresh_(model, x, prong.Absolute(0.1))
    h = torch.cat([x, torch.ones(64, 1, dtype=DOUBLE)], dim=1) if bias else x
    start = as_rows(model[0].weight[None, :, None], model[0].bias[None] if bias else None)[0].detach()
    A = mirror.layer_factor(model[0].sites[0].whitening)[0]
    metric = torch.kron(torch.eye(3, dtype=DOUBLE), A @ A.mT)

    def loss(theta: Tensor) -> Tensor:
        return F.cross_entropy(h @ theta.view(3, -1).mT, y)

    expected = mirror.dual_descent(loss, start.flatten(), metric, 0.1, steps=6)
    run(model, torch.optim.SGD(model.parameters(), lr=0.1), [(x, y)] * 6)
    found = as_rows(model[0].weight[None, :, None], model[0].bias[None] if bias else None)
    assert_close(found.flatten(), expected)


@pytest.mark.parametrize("form", ["implicit", "explicit", "auto", "materialised"])
def test_all_forms_of_a_net_walk_the_natural_path_of_their_blocks(form):
    """A net of three layers: F is block-diagonal, and every block is that of its layer."""
    model = mlp()
    data = batches(model, 1)[0]
    prong.whiten_(model, form="explicit")
    prong.refresh_(model, data[0], prong.Absolute(0.1))
    factors = {name: mirror.layer_factor(model[int(name)].sites[0].whitening)[0] for name in ("0", "2", "4")}
    reference = prong.fold_(model)
    theta = {k: v.clone() for k, v in canonical(reference).items()}
    plain = mlp()
    for _ in range(4):
        plain.load_state_dict(theta)
        plain.zero_grad()
        F.cross_entropy(plain(data[0]), data[1]).backward()
        for name, A in factors.items():
            layer = plain[int(name)]
            g = as_rows(layer.weight.grad[None, :, None], layer.bias.grad[None])[0]
            step = torch.stack([mirror.natural_step(torch.zeros_like(row), row, A @ A.mT, 0.05) for row in g])
            theta[f"{name}.weight"] = theta[f"{name}.weight"] + step[:, :-1]
            theta[f"{name}.bias"] = theta[f"{name}.bias"] + step[:, -1]
    whitened = mlp()
    sgd = torch.optim.SGD(whitened.parameters(), lr=0.05)
    prong.attach(whitened, sgd, form=form, refresh=prong.Never(), trust=None)
    prong.refresh_(whitened, data[0], prong.Absolute(0.1))
    run(whitened, sgd, [data] * 4)
    for name, expected in theta.items():
        assert_close(canonical(whitened)[name], expected)


# What makes no sense --------------------------------------------------------------------------------------------------


def test_what_is_no_potential_is_refused():
    A, theta, _ = draw(4)
    with pytest.raises(ValueError, match="square"):
        mirror.to_dual(theta, A[:3])
    with pytest.raises(ValueError, match="not symmetric"):
        mirror.to_dual(theta, A.triu())
    with pytest.raises(ValueError, match="add damping"):
        mirror.to_primal(theta, A - 100 * torch.eye(4, dtype=DOUBLE))
    with pytest.raises(ValueError, match="add damping"):
        mirror.square_root(torch.zeros(4, 4, dtype=DOUBLE))
    with pytest.raises(ValueError, match="4 entries"):
        mirror.to_dual(theta[:2], A)
    for bad in (math.nan, math.inf):
        broken = A.clone()
        broken[1, 1] = bad
        for function in (mirror.to_dual, mirror.to_primal, mirror.potential):
            with pytest.raises(ValueError, match="NaN or infinite"):
                function(theta, broken)
        with pytest.raises(ValueError, match="NaN or infinite"):
            mirror.square_root(broken)
    for shape in ((1,), (), (4, 1)):
        with pytest.raises(ValueError, match="4 entries"):
            mirror.mirror_step(theta, torch.ones(shape, dtype=DOUBLE), A, 0.1)
        with pytest.raises(ValueError, match="4 entries"):
            mirror.natural_step(torch.ones(shape, dtype=DOUBLE), theta, A, 0.1)
        with pytest.raises(ValueError, match="4 entries"):
            mirror.divergence(theta, torch.ones(shape, dtype=DOUBLE), A)
    for steps, error in ((-1, ValueError), (1.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match="steps"):
            mirror.dual_descent(logistic, theta, A, 0.1, steps)
    with pytest.raises(TypeError, match="first refresh"):
        mirror.layer_factor(None)
    with pytest.raises(ValueError, match="P alone"):
        mirror.layer_factor(Whitening(None, 0.1, P=A[None]))
    with pytest.raises(ValueError, match="taps is at least 1"):
        mirror.layer_factor(Whitening(None, 0.1, U=A[None], U_inv=A[None]), taps=0)
