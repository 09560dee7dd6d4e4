"""(W, b) and (V, d) are two coordinates of one layer: functions, gradients and velocities agree in both."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prong.core.whitening import (
    Pair,
    Transition,
    Whitening,
    against,
    less_outer,
    natural_gradient,
    times,
    times_inverse,
    to_canonical,
    to_whitened,
    transport_gradient,
    transport_square,
    transport_velocity,
)
from prong.refresh.transport import _POWERS
from tests import reference
from tests.closeness import assert_close


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@dataclass
class Case:
    """A layer's shape, and what its parameters and inputs are drawn from."""

    groups: int
    out: int
    taps: int
    features: int
    bias: bool
    seed: int

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)

    def parameters(self) -> Pair:
        W = randn(self.groups, self.out, self.taps, self.features)
        return W, randn(self.groups, self.out) if self.bias else None

    def inputs(self, rows: int = 6) -> Tensor:
        return randn(rows, self.groups, self.taps, self.features)

    def whitening(self, centred: bool = True) -> Whitening:
        """Any invertible U, and any c where there is a bias; not those of any data."""
        left, _ = torch.linalg.qr(randn(self.groups, self.features, self.features))
        right, _ = torch.linalg.qr(randn(self.groups, self.features, self.features))
        s = (4 * torch.rand(self.groups, 1, self.features, dtype=torch.float64) - 2).exp2()
        U = (left * s) @ right
        c = 2 * randn(self.groups, self.features) if self.bias and centred else None
        return Whitening(c, 1.0, U, (right.mT / s) @ left.mT, U.mT @ U)


cases = st.builds(
    Case,
    groups=st.integers(1, 3),
    out=st.integers(1, 4),
    taps=st.integers(1, 4),
    features=st.integers(1, 5),
    bias=st.booleans(),
    seed=st.integers(0, 2**31 - 1),
)
centrings = st.tuples(st.booleans(), st.booleans())  # of an old and a new whitening


def loss(z: Tensor) -> Tensor:
    """A function of the output whose gradient is different everywhere."""
    return (z.sin() + z.square() * torch.linspace(0.5, 1.5, z.numel(), dtype=z.dtype).view_as(z)).sum()


def gradients(value: Tensor, pair: Pair) -> Pair:
    W, b = pair
    if b is None:
        return torch.autograd.grad(value, [W])[0], None
    gW, gb = torch.autograd.grad(value, [W, b])
    return gW, gb


def leaves(pair: Pair) -> Pair:
    W, b = (None if x is None else x.detach().requires_grad_() for x in pair)
    return W, b


def canonical_gradient(W: Tensor, b: Tensor | None, h: Tensor) -> Pair:
    W, b = leaves((W, b))
    return gradients(loss(reference.layer(W, b, h)), (W, b))


def whitened_gradient(V: Tensor, d: Tensor | None, w: Whitening, h: Tensor) -> Pair:
    V, d = leaves((V, d))
    return gradients(loss(reference.whitened_layer(V, d, w.U, w.c, h)), (V, d))


def step(pair: Pair, direction: Pair, lr: float) -> Pair:
    return tuple(None if x is None else x - lr * g for x, g in zip(pair, direction, strict=True))


def inner(a: Pair, b: Pair) -> Tensor:
    return sum((x * y).sum() for x, y in zip(a, b, strict=True) if x is not None)


# The two coordinates


@given(cases)
def test_the_round_trip_is_the_identity(case):
    W, b = case.parameters()
    w = case.whitening()
    assert_close(to_canonical(*to_whitened(W, b, w), w), (W, b))
    assert_close(to_whitened(*to_canonical(W, b, w), w), (W, b))


@given(cases)
def test_reprojection_preserves_the_function_for_any_invertible_U_and_any_c(case):
    W, b = case.parameters()
    w, h = case.whitening(), case.inputs()
    V, d = to_whitened(W, b, w)
    assert V.shape == W.shape
    assert_close(reference.whitened_layer(V, d, w.U, w.c, h), reference.layer(W, b, h))


@given(cases)
def test_canonical_parameters_compute_the_whitened_layer(case):
    V, d = case.parameters()
    w, h = case.whitening(), case.inputs()
    assert_close(reference.layer(*to_canonical(V, d, w), h), reference.whitened_layer(V, d, w.U, w.c, h))


@given(cases)
def test_without_a_centre_the_bias_is_the_same_in_both_coordinates(case):
    W, b = case.parameters()
    w = case.whitening(centred=False)
    V, d = to_whitened(W, b, w)
    assert_close(d, b)
    assert_close(to_canonical(V, d, w), (W, b))


@given(cases)
def test_the_identity_whitening_changes_nothing(case):
    W, b = case.parameters()
    identity = reference.eye(case.groups, case.features)
    w = Whitening(torch.zeros(case.groups, case.features).double() if case.bias else None, 1.0, identity, identity)
    assert_close(to_whitened(W, b, w), (W, b), tolerance=0.0)
    assert_close(to_canonical(W, b, w), (W, b), tolerance=0.0)
    assert_close(natural_gradient(W, b, identity, w.c), (W, b), tolerance=0.0)


@given(cases)
def test_the_small_operations_are_what_their_loops_say(case):
    X, M, c = case.parameters()[0], randn(case.groups, case.features, case.features), randn(case.groups, case.features)
    x = randn(case.groups, case.out)
    for g, o in itertools.product(range(case.groups), range(case.out)):
        for t in range(case.taps):
            assert_close(times(X, M)[g, o, t], X[g, o, t] @ M[g])
        assert_close(against(X, c)[g, o], sum(X[g, o, t] @ c[g] for t in range(case.taps)))
        assert_close(less_outer(X, x, c)[g, o], X[g, o] - x[g, o] * c[g])


def test_a_packed_weight_need_not_be_contiguous():
    X, M = randn(2, 3, 5, 4).transpose(2, 3), randn(2, 5, 5)
    assert_close(times(X, M), times(X.contiguous(), M))


# The natural gradient


@given(cases, st.booleans())
def test_the_natural_gradient_is_the_canonical_image_of_a_step_on_V_and_d(case, centred):
    W, b = case.parameters()
    w, h, lr = case.whitening(centred), case.inputs(), 0.1
    V, d = to_whitened(W, b, w)
    explicit = to_canonical(*step((V, d), whitened_gradient(V, d, w, h), lr), w)
    gradient = canonical_gradient(W, b, h)
    assert_close(step((W, b), natural_gradient(*gradient, w.P, w.c), lr), explicit)
    cP = None if w.c is None else times_inverse(w.c.unsqueeze(1), w.P).squeeze(1)
    kept = [None if x is None else x.clone() for x in gradient]
    assert_close(step((W, b), natural_gradient(*gradient, w.P, w.c, cP=cP), lr), explicit)
    assert_close(gradient, tuple(kept), tolerance=0.0)


@given(cases)
def test_the_natural_gradient_does_not_depend_on_the_rotation_of_U(case):
    W, b = case.parameters()
    w, h, lr = case.whitening(), case.inputs(), 0.1
    R, _ = torch.linalg.qr(randn(case.groups, case.features, case.features))
    rotated = replace(w, U=R @ w.U, U_inv=w.U_inv @ R.mT)
    images = []
    for basis in (w, rotated):
        V, d = to_whitened(W, b, basis)
        images.append(to_canonical(*step((V, d), whitened_gradient(V, d, basis, h), lr), basis))
    assert_close(images[0], images[1])


@given(cases)
def test_without_a_centre_the_natural_gradient_is_the_gradient_times_P(case):
    gW, gb = case.parameters()
    P = case.whitening().P
    nW, nb = natural_gradient(gW, gb, P, None)
    assert_close((nW, nb), (torch.einsum("goti,gij->gotj", gW, P), gb))


@given(cases)
def test_the_natural_gradient_is_a_direction_of_descent(case):
    gradient = case.parameters()
    w = case.whitening()
    assert inner(gradient, natural_gradient(*gradient, w.P, w.c)) > 0


# Changes of coordinates


@given(cases, centrings)
def test_transported_parameters_compute_the_same_layer(case, centred):
    old, new = map(case.whitening, centred)
    V, d = case.parameters()
    h = case.inputs()
    V_new, d_new = transport_velocity(V, d, Transition.between(old, new))
    before = reference.whitened_layer(V, d, old.U, old.c, h)
    assert_close(reference.whitened_layer(V_new, d_new, new.U, new.c, h), before)


@given(cases, centrings)
def test_a_transported_velocity_keeps_its_canonical_image(case, centred):
    old, new = map(case.whitening, centred)
    velocity = case.parameters()
    transported = transport_velocity(*velocity, Transition.between(old, new))
    assert_close(to_canonical(*transported, new), to_canonical(*velocity, old))


@given(cases, centrings)
def test_a_transported_gradient_is_the_gradient_in_the_new_coordinates(case, centred):
    old, new = map(case.whitening, centred)
    V, d = case.parameters()
    h = case.inputs()
    transition = Transition.between(old, new)
    moved = transport_gradient(*whitened_gradient(V, d, old, h), transition)
    assert_close(moved, whitened_gradient(*transport_velocity(V, d, transition), new, h))


@given(cases, centrings)
def test_the_rate_at_which_a_velocity_changes_the_loss_is_the_same_in_all_coordinates(case, centred):
    old, new = map(case.whitening, centred)
    transition = Transition.between(old, new)
    gradient, velocity = case.parameters(), case.parameters()
    moved = inner(transport_gradient(*gradient, transition), transport_velocity(*velocity, transition))
    assert_close(moved, inner(gradient, velocity), scale=100.0)


@given(cases, st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_transitions_compose(case, centred):
    first, second, third = map(case.whitening, centred)
    pair = case.parameters()
    steps = Transition.between(first, second), Transition.between(second, third)
    direct = Transition.between(first, third)
    assert_close(steps[0].M @ steps[1].M, direct.M)
    assert_close(steps[1].M_inv @ steps[0].M_inv, direct.M_inv)
    for transport in (transport_velocity, transport_gradient):
        assert_close(transport(*transport(*pair, steps[0]), steps[1]), transport(*pair, direct))


@given(cases, centrings)
def test_there_and_back_is_the_identity(case, centred):
    old, new = map(case.whitening, centred)
    there, back = Transition.between(old, new), Transition.between(new, old)
    assert_close(there.M @ there.M_inv, reference.eye(case.groups, case.features))
    pair = case.parameters()
    for transport in (transport_velocity, transport_gradient):
        assert_close(transport(*transport(*pair, there), back), pair)


@given(cases)
def test_to_the_same_whitening_nothing_moves(case):
    w, pair = case.whitening(), case.parameters()
    here = Transition.between(w, w)
    for transport in (transport_velocity, transport_gradient, transport_square):
        assert_close(transport(*pair, here), pair)


@given(cases, st.booleans())
def test_from_no_whitening_the_transport_is_the_projection(case, centred):
    W, b = case.parameters()
    new, h = case.whitening(centred), case.inputs()
    transition = Transition.between(None, new)
    assert_close(transport_velocity(W, b, transition), to_whitened(W, b, new))
    moved = transport_gradient(*canonical_gradient(W, b, h), transition)
    assert_close(moved, whitened_gradient(*to_whitened(W, b, new), new, h))
    identity = reference.eye(case.groups, case.features)
    same = Transition.between(Whitening(None, 1.0, identity, identity), new)
    assert_close([transition.M, transition.M_inv, transition.shift], [same.M, same.M_inv, same.shift])


# Rescaling


@given(cases)
def test_rescaling_is_the_transition_to_the_rows_of_U_divided_by_s(case):
    old, pair = case.whitening(), case.parameters()
    s = torch.rand(case.groups, case.features, dtype=torch.float64) + 0.5
    new = replace(old, U=old.U / s.unsqueeze(-1), U_inv=old.U_inv * s.unsqueeze(-2))
    transition = Transition.between(old, new)
    for transport, power in _POWERS.items():  # what PRONG+ multiplies by in place
        V, d = transport(*pair, transition)
        assert_close(V, pair[0] * s[:, None, None, :] ** power)
        assert_close(d, pair[1])
    h = case.inputs()
    before = reference.whitened_layer(*pair, old.U, old.c, h)
    assert_close(reference.whitened_layer(*transport_velocity(*pair, transition), new.U, new.c, h), before)


# Mean squares


@given(cases)
def test_mean_squares_are_transported_exactly_when_the_transition_is_diagonal(case):
    s = torch.rand(case.groups, case.features, dtype=torch.float64) + 0.5
    transition = Transition(torch.diag_embed(s), torch.diag_embed(1 / s))
    samples = [case.parameters() for _ in range(7)]
    moved = [transport_gradient(*sample, transition) for sample in samples]
    assert_close(transport_square(*mean_square(samples), transition), mean_square(moved))


@pytest.mark.parametrize("bias", [True, False])
def test_mean_squares_are_transported_exactly_when_entries_are_uncorrelated_and_the_centre_stays(bias):
    case = Case(groups=2, out=1, taps=1, features=3, bias=bias, seed=0)
    old, new = case.whitening(), case.whitening()
    transition = Transition.between(old, replace(new, c=old.c))
    V, d = case.parameters()
    # Over all combinations of signs, the entries of a gradient are exactly uncorrelated.
    signs = itertools.product([-1.0, 1.0], repeat=4)
    samples = [(V * torch.tensor(s[:3]), None if d is None else d * s[3]) for s in signs]
    moved = [transport_gradient(*sample, transition) for sample in samples]
    assert_close(transport_square(V.square(), None if d is None else d.square(), transition), mean_square(moved))


@given(cases)
def test_mean_squares_leave_the_shift_of_the_centre_out(case):
    old, new = case.whitening(), case.whitening()
    squares = mean_square([case.parameters() for _ in range(3)])
    moved = transport_square(*squares, Transition.between(old, new))
    assert_close(moved, transport_square(*squares, Transition.between(old, replace(new, c=old.c))))
    assert_close(moved[1], squares[1], tolerance=0.0)


def mean_square(pairs: list[Pair]) -> Pair:
    columns = zip(*pairs, strict=True)
    sV, sd = (None if column[0] is None else torch.stack(column).square().mean(0) for column in columns)
    return sV, sd
