"""Second moments of output gradients, against loops over examples and against the exact Fisher of the output."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prong.gradients.outputs import sampled_output_gradient
from prong.gradients.whitening import OutputGradients, _times
from prong.layers.site import Layout
from tests import reference
from tests.closeness import assert_close

# (shape of the output, groups, where its channels are)
OUTPUTS = {
    "linear": ((7, 4), 1, -1),
    "tokens": ((5, 3, 4), 1, -1),
    "width 1": ((6, 1), 1, -1),
    "grid of tokens": ((2, 3, 2, 4), 1, -1),
    "conv1d": ((5, 4, 3), 1, -2),
    "conv2d": ((3, 6, 2, 4), 1, -3),
    "conv2d, groups": ((3, 6, 2, 4), 2, -3),
    "depthwise": ((3, 6, 2, 2), 6, -3),
    "conv3d, groups": ((2, 4, 2, 1, 3), 2, -4),
}
every_output = pytest.mark.parametrize(("shape", "groups", "channels_at"), OUTPUTS.values(), ids=OUTPUTS.keys())


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def gathered(*deltas: Tensor, groups: int = 1, channels_at: int = -1, **options) -> OutputGradients:
    outputs = OutputGradients(**options)
    for delta in deltas:
        outputs.receive(delta, groups, channels_at)
    return outputs


def mean_diagonal(G: Tensor) -> Tensor:
    """Of all groups: they are one layer's."""
    return G.diagonal(dim1=-2, dim2=-1).mean()


# Second moments


@every_output
def test_the_second_moment_is_that_of_a_loop_over_examples_and_positions(shape, groups, channels_at):
    delta = randn(*shape)
    outputs = gathered(delta, groups=groups, channels_at=channels_at)
    assert outputs.count == shape[0]
    assert_close(outputs.total / outputs.count, reference.output_second_moment(delta, groups, channels_at))


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5), seed=st.integers(0, 2**31 - 1))
def test_any_split_of_the_examples_gives_the_same_moment(sizes, seed):
    torch.manual_seed(seed)
    delta = randn(sum(sizes), 6, 2)
    parts = gathered(*delta.split(sizes), groups=2, channels_at=-2)
    whole = gathered(delta, groups=2, channels_at=-2)
    assert parts.count == whole.count == sum(sizes)
    assert_close(parts.total, whole.total)


@pytest.mark.parametrize(("shape", "channels_at"), [((4,), -1), ((4, 3), -2), ((4, 3, 2), -3)])
def test_an_output_without_a_batch_dimension_is_one_example(shape, channels_at):
    delta = randn(*shape)
    outputs = gathered(delta, channels_at=channels_at)
    assert outputs.count == 1
    assert_close(outputs.total, reference.output_second_moment(delta.unsqueeze(0), 1, channels_at))


def test_the_scale_multiplies_each_gradient_and_knows_the_number_of_examples():
    deltas = randn(3, 4), randn(5, 4)
    scaled = gathered(*deltas, scale=lambda examples: 10.0 * examples)
    expected = gathered(30 * deltas[0], 50 * deltas[1])
    assert_close(scaled.total, expected.total)
    assert scaled.count == expected.count


def test_undoing_the_mean_of_the_loss_gives_the_gradients_of_single_examples():
    W, h, y = randn(3, 4), randn(6, 4), torch.randint(3, (6,))
    outputs = OutputGradients(scale=float)
    z = (h @ W.mT).requires_grad_()
    outputs.watch(z, 1, -1)
    F.cross_entropy(z, y).backward()
    G = torch.zeros(3, 3).double()
    for h_n, y_n in zip(h, y, strict=True):
        z_n = (W @ h_n).requires_grad_()
        F.cross_entropy(z_n, y_n).backward()
        G += torch.outer(z_n.grad, z_n.grad) / 6
    assert_close(outputs.total[0] / outputs.count, G)


def test_decayed_moments_are_weighted_moments():
    first, second, third = randn(4, 3), randn(2, 3), randn(5, 3)
    outputs = gathered(first)
    outputs.decay(0.5)
    outputs.receive(second, 1, -1)
    outputs.decay(0.25)
    outputs.receive(third, 1, -1)
    G = 0.0
    for weight, delta in ((0.125, first), (0.25, second), (1.0, third)):
        G = G + weight * torch.einsum("no,np->op", delta, delta).unsqueeze(0)
    assert_close(float(outputs.count), 0.125 * 4 + 0.25 * 2 + 5)
    assert_close(outputs.total, G)


def test_decay_before_the_first_gradient_does_nothing():
    outputs = OutputGradients()
    outputs.decay(0.5)
    assert outputs.total is None and outputs.count == 0


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients_accumulate_in_float32(dtype, autocast):
    delta = torch.randn(300, 4).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        outputs = gathered(delta)
    G = reference.output_second_moment(delta, 1, -1)
    assert outputs.total.dtype == torch.float32
    assert_close((outputs.total / 300).double(), G, tolerance=1e-6)


def test_small_half_precision_gradients_do_not_vanish_when_squared():
    delta = torch.full((2, 3), 1e-5, dtype=torch.float16)  # 1e-10 is zero in float16
    assert (gathered(delta).total > 0).all()


# Watching


def test_a_watched_output_reports_the_gradient_of_the_training_backward():
    outputs = OutputGradients()
    z = randn(5, 4).requires_grad_()
    outputs.watch(z, 2, -1)
    (z.sin() * 3).sum().backward()
    assert_close(outputs.total, gathered(z.grad, groups=2).total)
    assert_close(z.grad, 3 * z.detach().cos())


def test_an_output_kept_for_a_backward_of_our_own_is_not_listened_to():
    outputs = OutputGradients(own_backward=True)
    z = randn(5, 4).requires_grad_()
    outputs.watch(z, 2, -1)
    z.sum().backward()
    assert outputs.total is None
    ((kept, groups, channels_at, _),) = outputs.pending
    assert kept is z and (groups, channels_at) == (2, -1)


@pytest.mark.parametrize("own_backward", [False, True])
@pytest.mark.parametrize("view", [False, True])
def test_the_gradient_is_that_of_the_output_also_if_it_is_changed_in_place_afterwards(own_backward, view):
    outputs = OutputGradients(own_backward=own_backward)
    z = randn(6, 4).requires_grad_() * 2
    after = outputs.watch(z.view(2, 3, 4) if view else z, 1, -1).exp_()
    after.square().sum().backward(retain_graph=True)
    for kept, *where in outputs.pending or []:
        outputs.receive(*torch.autograd.grad(after.square().sum(), kept), *where)
    assert_close(outputs.total, gathered(2 * after.detach().square()).total)


# State


def test_a_saved_state_continues_as_if_never_interrupted():
    first, second = randn(4, 3), randn(5, 3)
    outputs = gathered(first)
    resumed = OutputGradients()
    state = outputs.state_dict()
    resumed.load_state_dict(state, torch.device("cpu"))
    state["total"].fill_(99.0)  # what was loaded is a copy
    resumed.receive(second, 1, -1)
    expected = gathered(first, second)
    assert resumed.count == 9
    assert_close(resumed.total, expected.total)


def test_an_empty_state_can_be_saved():
    outputs = gathered(randn(4, 3))
    outputs.load_state_dict(OutputGradients().state_dict(), torch.device("cpu"))
    assert outputs.total is None and outputs.count == 0


# The preconditioner


@every_output
@pytest.mark.parametrize("eps", [1e-3, 1.0])
def test_Q_is_the_inverse_of_the_second_moment_damped_by_its_mean_diagonal(shape, groups, channels_at, eps):
    delta = randn(*shape)
    Q = gathered(delta, groups=groups, channels_at=channels_at).preconditioner(eps, 0.0)
    G = reference.output_second_moment(delta, groups, channels_at)
    identity = reference.eye(*G.shape[:2])
    assert_close(Q @ (G + eps * mean_diagonal(G) * identity), identity)


def test_the_damping_is_relative_so_that_Q_scales_with_the_gradients():
    delta = randn(3, 5)  # of rank three: only damping makes G invertible
    Q = gathered(delta).preconditioner(1e-2, 0.0)
    assert_close(1e12 * gathered(1e6 * delta).preconditioner(1e-2, 0.0), Q)
    assert_close(1e-12 * gathered(1e-6 * delta).preconditioner(1e-2, 0.0), Q)


def test_Q_has_the_dtype_of_the_sums_and_their_precision():
    delta = torch.randn(40, 6)
    Q = gathered(delta).preconditioner(1e-2, 0.0)
    G = reference.output_second_moment(delta, 1, -1)
    assert Q.dtype == torch.float32
    assert_close(Q.double() @ (G + 1e-2 * mean_diagonal(G) * reference.eye(1, 6)), reference.eye(1, 6), tolerance=1e-5)


def test_gradients_far_smaller_than_those_of_other_layers_are_damped_as_if_they_were_larger():
    delta = randn(9, 3)
    outputs = gathered(delta)
    G = reference.output_second_moment(delta, 1, -1)
    assert_close(outputs.size, mean_diagonal(G).item())
    for least in (0.5, 2.0):
        size = outputs.size * max(1.0, least)
        Q = outputs.preconditioner(0.1, least * outputs.size)
        assert_close(Q @ (G + 0.1 * size * reference.eye(1, 3)), reference.eye(1, 3))
    zero = gathered(torch.zeros(4, 3).double()).preconditioner(0.1, 2.0)
    assert_close(zero, reference.eye(1, 3) / 0.2)


def test_there_is_no_Q_of_nothing_of_zero_or_of_what_is_not_finite():
    assert OutputGradients().preconditioner(1e-2, 0.0) is None
    assert gathered(torch.zeros(4, 3)).preconditioner(1e-2, 0.0) is None
    for bad in (math.nan, math.inf):
        delta = randn(4, 3)
        delta[1, 2] = bad
        assert gathered(delta).preconditioner(1e-2, 0.0) is None
    forgotten = gathered(randn(4, 3))
    forgotten.decay(0.0)
    assert forgotten.preconditioner(1e-2, 0.0) is None


def test_a_batch_that_is_not_finite_is_left_out():
    """As one that a GradScaler is about to skip."""
    delta, bad = randn(4, 3), randn(5, 3)
    bad[2, 1] = math.inf
    outputs = gathered(delta, bad)
    assert outputs.count == 4
    assert_close(outputs.total, gathered(delta).total)


# Preconditioning


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4, 5), (2, 3, 1, 1), (6, 1, 9, 1)])
def test_preconditioning_multiplies_the_outputs_of_each_group_by_its_Q(shape):
    gradient, Q = randn(*shape), randn(shape[0], shape[1], shape[1])
    result = _times(Q, gradient)
    for g in range(shape[0]):
        assert_close(result[g], torch.tensordot(Q[g], gradient[g], dims=1))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_packed_gradient_need_not_be_contiguous(transposed):
    layout = Layout((6, 4, 3, 2), groups=2, transposed=transposed)
    packed = layout.pack(randn(*layout.shape))
    Q = randn(2, layout.outputs, layout.outputs)
    assert not packed.is_contiguous()
    assert_close(_times(Q, packed), _times(Q, packed.contiguous()))


def test_preconditioning_keeps_the_dtype_of_the_gradient():
    assert _times(torch.rand(2, 3, 3), torch.randn(2, 3, 4, 5).bfloat16()).dtype == torch.bfloat16


# Labels drawn from the model

DRAWS = 20_000
# Every mean below is of values of variance at most 3 (the squares of a normal variable): seven standard deviations.
CHANCE = 7 * math.sqrt(3 / DRAWS)


def assert_fisher(g: Tensor, Fisher: Tensor) -> None:
    """Gradients g (draws, out) have mean zero and this second moment, as far as so many draws can tell."""
    assert_close(g.mean(0), torch.zeros(g.shape[1], dtype=g.dtype), tolerance=CHANCE)
    assert_close(g.mT @ g / g.shape[0], Fisher, tolerance=CHANCE)


def test_categorical_gradients_have_the_fisher_of_the_softmax():
    logits = torch.tensor([1.0, -0.5, 0.0, 2.0], dtype=torch.float64)
    p = logits.softmax(0)
    assert_fisher(sampled_output_gradient(logits.expand(DRAWS, 4), "categorical"), torch.diag(p) - torch.outer(p, p))


def test_bernoulli_gradients_have_the_fisher_of_independent_coins():
    logits = torch.tensor([1.0, -0.5, 0.0, 3.0], dtype=torch.float64)
    p = logits.sigmoid()
    assert_fisher(sampled_output_gradient(logits.expand(DRAWS, 4), "bernoulli"), torch.diag(p * (1 - p)))


def test_gaussian_gradients_have_the_identity_as_fisher():
    output = torch.tensor([5.0, -3.0, 0.0], dtype=torch.float64)
    assert_fisher(sampled_output_gradient(output.expand(DRAWS, 3), "gaussian"), torch.eye(3, dtype=torch.float64))


def test_classes_stand_where_cross_entropy_has_them():
    logits = randn(1, 3, 2, 2)  # (batch, classes, d1, d2)
    g = sampled_output_gradient(logits.expand(DRAWS, 3, 2, 2), "categorical")
    for y in range(2):
        for x in range(2):
            p = logits[0, :, y, x].softmax(0)
            assert_fisher(g[:, :, y, x], torch.diag(p) - torch.outer(p, p))


def test_positions_are_drawn_independently():
    g = sampled_output_gradient(torch.zeros(DRAWS, 3, 2).double(), "categorical")
    across = torch.einsum("nc,nk->ck", g[:, :, 0], g[:, :, 1]) / DRAWS
    assert_close(across, torch.zeros(3, 3).double(), tolerance=CHANCE)


@pytest.mark.parametrize("shape", [(4,), (5, 4), (5, 4, 3), (5, 4, 2, 3), (1, 1), (5, 1, 3)])
def test_a_categorical_draw_is_the_gradient_of_cross_entropy_at_some_label(shape):
    output = randn(*shape).requires_grad_()
    g = sampled_output_gradient(output, "categorical")
    assert g.shape == output.shape and not g.requires_grad
    classes_at = 0 if len(shape) == 1 else 1
    y = (output.softmax(classes_at) - g).argmax(classes_at)
    F.cross_entropy(output, y, reduction="sum").backward()
    assert_close(g, output.grad)


@pytest.mark.parametrize("shape", [(4,), (5, 4), (5, 4, 3)])
def test_a_bernoulli_draw_is_the_gradient_of_binary_cross_entropy_at_some_label(shape):
    output = randn(*shape).requires_grad_()
    g = sampled_output_gradient(output, "bernoulli")
    assert g.shape == output.shape and not g.requires_grad
    y = (output.sigmoid() - g).detach().round()
    F.binary_cross_entropy_with_logits(output, y, reduction="sum").backward()
    assert_close(g, output.grad)


@pytest.mark.parametrize("distribution", ["categorical", "bernoulli", "gaussian"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_draw_has_the_dtype_and_shape_of_the_output(distribution, dtype):
    output = torch.randn(6, 5, 2).to(dtype)
    g = sampled_output_gradient(output, distribution)
    assert g.dtype == dtype and g.shape == output.shape
    assert torch.isfinite(g).all()


@pytest.mark.parametrize("distribution", ["categorical", "bernoulli"])
def test_nothing_is_drawn_from_what_is_no_distribution(distribution):
    output = randn(3, 4)
    output[1, 2] = math.nan
    g = sampled_output_gradient(output, distribution)
    assert g[1, 2].isnan() and torch.isfinite(g[[0, 2]]).all()


@pytest.mark.parametrize("distribution", ["categorical", "bernoulli", "gaussian"])
def test_every_draw_is_another(distribution):
    output = torch.zeros(50, 4)
    draws = [sampled_output_gradient(output, distribution) for _ in range(2)]
    assert not torch.equal(*draws)
