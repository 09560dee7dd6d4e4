"""Moments gathered batch by batch are those of one pass over all rows."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prong.core.moments import LEAST, MeanSquare, Moments, Window, accumulation_dtype, sampled
from tests import reference
from tests.closeness import assert_close

seeds = st.integers(0, 2**31 - 1)
sizes = st.lists(st.integers(0, 7), min_size=1, max_size=6)
groups = st.integers(1, 3)
features = st.integers(1, 8)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def moments_of(*batches: Tensor, dense: bool = False) -> Moments:
    """The moments of these batches; `dense` skips the thin state."""
    moments = Moments(batches[0].shape[0], batches[0].shape[2], batches[0].dtype)
    if dense:
        nothing = moments.mean.new_zeros(*moments.mean.shape, moments.mean.shape[1])
        moments.load_state_dict({"count": 0.0, "mean": moments.mean, "scatter": nothing})
    for batch in batches:
        moments.add(batch)
    return moments


def assert_moments(moments: Moments, rows: Tensor, weights: list[float] | None = None, **tolerance: float) -> None:
    """These are the moments of all the rows, as two passes of loops compute them."""
    count, mean, scatter = reference.weighted_moments(rows, weights)
    assert_close(moments.count, count)
    assert_close(moments.mean.double(), mean, **tolerance)
    if count > 0:  # per row, so that the scale does not grow with the number of rows
        assert_close(moments.scatter.double() / count, scatter / count, **tolerance)
        assert_close(moments.covariance().double(), scatter / count, **tolerance)
        uncentred = scatter / count + torch.einsum("gi,gj->gij", mean, mean)
        assert_close(moments.covariance(centred=False).double(), uncentred, **tolerance)


def assert_same_state(moments: Moments, state: dict) -> None:
    now = moments.state_dict()
    assert now.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(now[name], value) if isinstance(value, Tensor) else now[name] == value


@pytest.fixture(params=["thin", "dense"])
def gathered(request: pytest.FixtureRequest) -> tuple[Moments, Tensor]:
    """Moments in each of their two states, with the rows they have seen."""
    rows = randn(2, 4 if request.param == "thin" else 30, 6) + 1
    moments = moments_of(rows)
    assert (moments.factor is not None) == (request.param == "thin")
    return moments, rows


# Batches


@given(groups, features, sizes, seeds)
def test_any_split_and_order_of_the_batches_gives_the_moments_of_one_pass(groups, features, sizes, seed):
    torch.manual_seed(seed)
    rows = 3 * randn(groups, sum(sizes), features) + randn(groups, 1, features)
    shuffled = rows[:, torch.randperm(rows.shape[1])]
    assert_moments(moments_of(*shuffled.split(sizes, dim=1)), rows)


@given(groups, features, sizes, seeds, st.booleans())
def test_merging_the_moments_of_parts_equals_adding_their_rows(groups, features, sizes, seed, dense):
    torch.manual_seed(seed)
    rows = 3 * randn(groups, sum(sizes), features) + randn(groups, 1, features)
    total = Moments(groups, features, torch.float64)
    for k, part in enumerate(rows.split(sizes, dim=1)):
        total.merge(moments_of(part, dense=dense and k % 2 == 1))
    assert_moments(total, rows)


@given(groups, features, sizes, seeds)
def test_merging_is_associative(groups, features, sizes, seed):
    torch.manual_seed(seed)
    parts = randn(groups, sum(sizes), features).split(sizes, dim=1)
    left, right = moments_of(parts[0]), moments_of(parts[-1])
    for part in parts[1:]:
        left.merge(moments_of(part))
    for part in reversed(parts[:-1]):
        before = moments_of(part)
        before.merge(right)
        right = before
    assert_close(left.count, right.count)
    assert_close([left.mean, left.scatter], [right.mean, right.scatter])


def test_merged_moments_share_nothing_with_their_parts(gathered):
    part, rows = gathered
    total = Moments(2, 6, torch.float64)
    total.merge(part)
    state = part.state_dict()
    total.add(randn(2, 9, 6))
    total.decay(0.5)
    assert_same_state(part, state)

    total = Moments(2, 6, torch.float64)
    total.merge(part)
    part.add(randn(2, 9, 6))
    part.decay(0.5)
    assert_moments(total, rows)


def test_an_empty_batch_changes_nothing(gathered):
    moments, _ = gathered
    before = moments.state_dict()
    moments.add(randn(2, 0, 6))
    moments.add_zeros(0)
    moments.merge(Moments(2, 6, torch.float64))
    assert_same_state(moments, before)


def test_before_the_first_row_everything_is_zero():
    moments = moments_of(randn(2, 0, 3))
    assert moments.count == 0
    assert_close([moments.mean, moments.scatter], [torch.zeros(2, 3).double(), torch.zeros(2, 3, 3).double()])


def test_groups_are_independent():
    rows = randn(3, 11, 4)
    together = moments_of(rows)
    for g in range(3):
        alone = moments_of(rows[g : g + 1])
        assert_close([together.mean[g], together.scatter[g]], [alone.mean[0], alone.scatter[0]])


def test_one_row_has_no_spread():
    row = randn(2, 1, 5)
    moments = moments_of(row)
    assert_close([moments.mean, moments.scatter], [row[:, 0], torch.zeros(2, 5, 5).double()])


def test_moments_keep_neither_the_batch_nor_its_graph():
    rows = randn(1, 3, 5).requires_grad_()
    moments = moments_of(rows)
    before = moments.state_dict()
    with torch.no_grad():
        rows.zero_()
    assert_same_state(moments, before)
    assert not any(x.requires_grad for x in (moments.mean, moments.scatter, moments.covariance()))


# The thin factor


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 20])
@pytest.mark.parametrize("batch", [1, 3, 20])
def test_thin_and_dense_state_agree_before_at_and_after_the_switch(rows, batch):
    h = randn(2, rows, 6) + 2
    thin, dense = moments_of(*h.split(batch, dim=1)), moments_of(*h.split(batch, dim=1), dense=True)
    assert dense.factor is None
    assert_close([thin.mean, thin.scatter], [dense.mean, dense.scatter])
    assert_moments(thin, h)
    assert_moments(dense, h)


@pytest.mark.parametrize(("rows", "thin"), [(0, True), (5, True), (6, False), (7, False)])
def test_the_scatter_is_held_as_a_thin_factor_while_there_are_fewer_rows_than_inputs(rows, thin):
    moments = moments_of(randn(2, rows, 6))
    assert (moments.factor is not None) == thin
    if moments.factor is not None:
        assert moments.factor.shape == (2, rows, 6)
        assert_close(moments.factor.mT @ moments.factor, moments.scatter)


SIZES = st.one_of(features, st.integers(60, 70), st.sampled_from([128, 255, 300]))


@given(size=SIZES, rows=st.integers(1, 40))
def test_rows_wait_until_they_are_as_many_as_inputs_and_no_more_than_two_matrices_are_held(size, rows):
    moments = Moments(1, size)
    for _ in range(2 * size // rows + 3):
        moments.add(torch.randn(1, rows, size))
        assert sum(x.numel() for x in moments.tensors()) - moments.mean.numel() < 2 * size**2 + 1


@given(features, sizes, seeds)
def test_the_factor_never_has_as_many_rows_as_inputs(features, sizes, seed):
    torch.manual_seed(seed)
    moments = Moments(1, features, torch.float64)
    for size in sizes:
        moments.add(randn(1, size, features))
        assert moments.factor is None or moments.factor.shape[1] < features
        held = moments.state_dict()
        assert "factor" not in held or held["factor"].shape[1] < features


# Rows of zeros


@given(features, sizes, st.lists(st.integers(0, 5), min_size=6, max_size=6), seeds)
def test_adding_a_number_of_zeros_equals_adding_rows_of_zeros(features, sizes, zeros, seed):
    torch.manual_seed(seed)
    moments, rows = Moments(2, features, torch.float64), []
    for size, count in zip(sizes, zeros, strict=False):
        batch = randn(2, size, features) + 1
        moments.add_zeros(count)
        moments.add(batch)
        rows += [torch.zeros(2, count, features).double(), batch]
    assert_moments(moments, torch.cat(rows, dim=1))


def test_a_fractional_number_of_zeros_is_a_weight():
    h = randn(2, 9, 4) + 1
    moments = moments_of(h)
    moments.add_zeros(2.5)
    assert_moments(moments, torch.cat([h, torch.zeros(2, 1, 4)], dim=1), [1.0] * 9 + [2.5])


@pytest.mark.parametrize("channels", [3, 200], ids=["dense", "thin"])
def test_the_positions_of_a_zero_padded_map_are_its_own_positions_and_zeros(channels):
    h = randn(2, channels, 4, 3) + 1
    padded = reference.padded_positions(h, (1, 2)).unsqueeze(0)
    assert padded.shape[1] == 2 * (4 + 2) * (3 + 4)
    moments = moments_of(h.movedim(1, -1).reshape(1, -1, channels))
    moments.add_zeros(padded.shape[1] - 2 * 4 * 3)
    expected = moments_of(padded, dense=True)
    assert moments.count == expected.count
    assert_close([moments.mean, moments.covariance()], [expected.mean, expected.covariance()])


# Precision


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_sums_are_kept_in_float32_at_least(given, kept):
    assert accumulation_dtype(given) == kept
    for rows in (3, 12):
        moments = moments_of(torch.ones(1, rows, 6, dtype=given))
        assert moments.mean.dtype == moments.scatter.dtype == moments.covariance().dtype == kept


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("features", [4, 130], ids=["dense", "thin"])
def test_half_precision_inputs_accumulate_in_float32(dtype, features, autocast):
    # A mean or a product rounded to half precision would be off by 5e-4 at least.
    batches = [(1 + 0.1 * torch.randn(1, 20, features)).to(dtype) for _ in range(5)]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        moments = moments_of(*batches)
    rows = torch.cat(batches, dim=1).double()
    assert (moments.factor is not None) == (features == 130)
    assert_close(moments.mean.double(), rows.mean(1), tolerance=1e-6)
    assert_close(moments.covariance().double(), reference.covariance(rows), tolerance=1e-5, scale=0.01)


@pytest.mark.parametrize("features", [4, 40], ids=["dense", "thin"])
def test_autocast_changes_nothing(features):
    first, second = torch.randn(1, 10, features), torch.randn(1, 10, features)

    def gather() -> list[Tensor]:
        moments = moments_of(first)
        moments.merge(moments_of(second))
        moments.add_zeros(3)
        moments.decay(0.5)
        return [moments.mean, moments.scatter, moments.covariance(), moments.covariance(centred=False)]

    expected = gather()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = gather()
    assert_close(actual, expected, tolerance=0.0)


def test_a_large_offset_costs_nothing_in_float64():
    rows = randn(2, 60, 3) + 1e6
    moments = moments_of(*rows.split(20, dim=1))
    _, mean, scatter = reference.weighted_moments(rows)
    assert_close([moments.mean, moments.scatter / 60], [mean, scatter / 60])


def test_a_large_offset_in_float32_costs_far_less_than_the_naive_formula():
    rows = (torch.randn(1, 1000, 4) + 1e6).float()
    exact = reference.covariance(rows)  # of the rows as float32 has them
    moments = moments_of(*rows.split(100, dim=1))
    error = (moments.covariance().double() - exact).abs().max()
    mean = rows.mean(1)
    naive = rows.mT @ rows / 1000 - torch.einsum("gi,gj->gij", mean, mean)
    naive_error = (naive.double() - exact).abs().max()
    # No mean is known better than 1/16, the spacing of float32 at 1e6; the squares of the naive formula, to 1e5.
    assert error < 1 / 16
    assert error < 1e-4 * naive_error


# Forgetting


@given(
    features,
    st.lists(st.tuples(st.integers(0, 6), st.floats(0, 1, allow_subnormal=False)), min_size=1, max_size=5),
    seeds,
)
def test_decayed_moments_are_weighted_moments(features, batches, seed):
    torch.manual_seed(seed)
    moments = Moments(2, features, torch.float64)
    rows, weights = [], []
    for size, weight in batches:
        moments.decay(weight)
        weights = [weight * w for w in weights] + [1.0] * size
        rows.append(randn(2, size, features) + 1)
        moments.add(rows[-1])
    assert_moments(moments, torch.cat(rows, dim=1), weights)


def test_decay_in_either_state_weighs_old_rows_less(gathered):
    moments, old = gathered
    new = randn(2, 8, 6) - 1
    moments.decay(0.25)
    moments.add(new)
    assert_moments(moments, torch.cat([old, new], dim=1), [0.25] * old.shape[1] + [1.0] * 8)


def test_decay_alone_changes_neither_mean_nor_covariance(gathered):
    moments, rows = gathered
    moments.decay(0.3)
    assert_close(moments.count, 0.3 * rows.shape[1])
    assert_close([moments.mean, moments.covariance()], [rows.mean(1), reference.covariance(rows)])


def test_decay_to_nothing_forgets_everything(gathered):
    moments, _ = gathered
    moments.decay(0.0)
    new = randn(2, 7, 6)
    moments.add(new)
    assert_moments(moments, new)


# State


def test_a_saved_state_continues_as_if_never_interrupted(gathered):
    moments, rows = gathered
    file = io.BytesIO()
    torch.save(moments.state_dict(), file)
    file.seek(0)
    resumed = Moments(2, 6, torch.float64)
    resumed.add(randn(2, 5, 6))  # what was there is replaced
    resumed.load_state_dict(torch.load(file))
    assert_same_state(resumed, moments.state_dict())
    more = randn(2, 7, 6)
    resumed.add(more)
    assert_moments(resumed, torch.cat([rows, more], dim=1))


def test_a_state_is_a_copy(gathered):
    moments, rows = gathered
    state = moments.state_dict()
    resumed = Moments(2, 6, torch.float64)
    resumed.load_state_dict(state)
    for value in state.values():
        if isinstance(value, Tensor):
            value.fill_(99.0)
    assert_moments(moments, rows)
    assert_moments(resumed, rows)


def test_a_loaded_state_takes_the_dtype_of_its_owner(gathered):
    moments, rows = gathered
    loaded = Moments(2, 6, torch.float32)
    loaded.load_state_dict(moments.state_dict())
    assert loaded.mean.dtype == loaded.scatter.dtype == torch.float32
    assert_moments(loaded, rows, tolerance=1e-6)


def test_an_empty_state_can_be_saved():
    resumed = moments_of(randn(2, 9, 6))
    resumed.load_state_dict(Moments(2, 6, torch.float64).state_dict())
    assert resumed.count == 0
    new = randn(2, 4, 6)
    resumed.add(new)
    assert_moments(resumed, new)


# Errors


@pytest.mark.parametrize("shape", [(5, 6), (1, 5, 6), (2, 5, 7), (2, 5, 6, 1)])
def test_rows_of_another_shape_are_refused_and_the_right_one_is_told(gathered, shape):
    moments, _ = gathered
    before = moments.state_dict()
    with pytest.raises(ValueError, match=r"expected rows of shape \(2, any, 6\), got"):
        moments.add(randn(*shape))
    assert_same_state(moments, before)


@pytest.mark.parametrize("values", [[float("nan")], [float("inf")], [-float("inf")], [float("inf"), -float("inf")]])
def test_one_value_that_is_not_finite_leaves_everything_unchanged(gathered, values):
    moments, _ = gathered
    before = moments.state_dict()
    rows = randn(2, 8, 6)
    rows[1, : len(values), 3] = torch.tensor(values, dtype=torch.float64)
    with pytest.raises(FloatingPointError, match="NaN or infinite"):
        moments.add(rows)
    assert_same_state(moments, before)


def test_values_too_large_for_the_accumulator_are_refused():
    moments = Moments(1, 2, torch.float32)
    with pytest.raises(FloatingPointError):
        moments.add(torch.full((1, 3, 2), 1e300, dtype=torch.float64))
    assert moments.count == 0


@pytest.mark.parametrize("shape", [(1, 6), (2, 5)])
def test_moments_of_other_inputs_are_neither_merged_nor_loaded(gathered, shape):
    moments, _ = gathered
    before = moments.state_dict()
    other = moments_of(randn(shape[0], 9, shape[1]))
    with pytest.raises(ValueError, match="do not merge"):
        moments.merge(other)
    with pytest.raises(ValueError, match="statistics are of shape"):
        moments.load_state_dict(other.state_dict())
    assert_same_state(moments, before)


# Mean squares


@given(sizes, seeds)
def test_the_mean_square_of_all_batches_is_taken_once(sizes, seed):
    torch.manual_seed(seed)
    rows = randn(2, sum(sizes), 3)
    squares = MeanSquare()
    for part in rows.split(sizes, dim=1):
        squares.add(part.square().sum(1), part.shape[1])
    assert_close(squares.take(), rows.square().mean(1) if sum(sizes) else None)
    assert squares.take() is None


@given(st.lists(st.sampled_from([1.0, float("nan"), float("inf")]), min_size=1, max_size=5), seeds)
def test_batches_that_are_not_finite_count_only_where_there_is_no_other(factors, seed):
    torch.manual_seed(seed)
    parts = [randn(2, 4, 3) * factor for factor in factors]
    finite = [part for part, factor in zip(parts, factors, strict=True) if factor == 1.0]
    squares = MeanSquare()
    for part in parts:
        squares.add(part.square().sum(1), part.shape[1])
    if finite:
        assert_close(squares.take(), torch.cat(finite, dim=1).square().mean(1))
    else:
        assert not squares.take().isfinite().any()


# Some of the rows


@given(total=st.integers(1, 3000), share=st.floats(0.01, 1))
def test_sampled_rows_are_different_ones(total, share):
    count = max(1, round(share * total))
    found = sampled(torch.arange(total).view(1, -1, 1).expand(2, -1, -1), count)
    assert found.shape == (2, count, 1) and torch.equal(found[0], found[1])
    assert len(found[0].unique()) == count


@given(examples=st.integers(8, 300), positions=st.integers(2, 64), share=st.floats(0.05, 1))
def test_sampled_rows_are_of_all_examples_alike_and_of_all_positions_equally_often(examples, positions, share):
    """Rows lie in memory example by example: with a period they would be a column of a map, or a place in a text."""
    count = max(LEAST, round(share * examples * positions))
    rows = sampled(torch.arange(examples * positions).view(1, -1, 1), min(count, examples * positions)).flatten()
    seen = torch.bincount(rows % positions, minlength=positions)
    assert seen.max() - seen.min() <= 1
    quarters = torch.bincount(rows * 4 // (examples * positions), minlength=4) / (len(rows) / 4)
    assert quarters.min() > 0.7 and quarters.max() < 1.3


# Windows


@pytest.mark.parametrize(("share", "looked_at"), [(1.0, 640), (0.25, 160), (0.01, LEAST)])
def test_a_window_looks_at_its_share_of_the_rows_and_counts_zeros_and_examples_in_proportion(share, looked_at):
    rows = randn(2, 640, 3) + 1
    window = Window(Moments(2, 3, torch.float64), share=share)
    window.add(rows, zeros=128.0, examples=64.0)
    part = looked_at / 640
    assert_close(window.moments.count, 640 * part + 128 * part)
    assert_close(window.examples, 64 * part)
    assert_moments(
        window.moments, torch.cat([sampled(rows, looked_at), torch.zeros(2, 1, 3)], 1), [1.0] * looked_at + [128 * part]
    )


def test_what_was_added_to_a_window_since_it_settled_can_be_taken_back():
    first, second, third = randn(2, 9, 3), randn(2, 5, 3), randn(2, 7, 3)
    window = Window(Moments(2, 3, torch.float64))
    assert window.empty
    window.add(first, 0.0, 9.0)
    window.settle()
    window.add(second, 2.0, 5.0)
    window.undo()
    window.add(third, 0.0, 7.0)
    assert not window.empty
    assert_moments(window.moments, torch.cat([first, third], dim=1))
    assert window.examples == 16


def test_a_window_that_restarts_forgets_rows_and_examples_but_not_its_share():
    window = Window(Moments(1, 6, torch.float64), share=0.1)
    window.add(randn(1, 700, 6), 0.0, 700.0)
    window.settle()
    window.add(randn(1, 700, 6), 0.0, 700.0)
    window.restart(Moments(2, 3, torch.float64))
    assert window.empty and window.examples == 0 and window.moments.count == 0
    rows = randn(2, 700, 3)
    window.add(rows, 0.0, 700.0)
    assert_moments(window.moments, sampled(rows, 70))
    assert_close(window.examples, 70.0)


def test_windows_forget_and_scale_and_are_saved_with_what_has_not_settled():
    first, second = randn(1, 8, 3), randn(1, 4, 3)
    window = Window(Moments(1, 3, torch.float64))
    window.add(first, 0.0, 8.0)
    window.settle()
    window.forget(0.25)
    assert window.examples == 0
    window.add(second, 0.0, 4.0)
    resumed = Window(Moments(1, 3, torch.float64))
    resumed.load_state_dict(window.state_dict())
    resumed.undo()
    assert_moments(resumed.moments, first, [0.75] * 8)
    resumed.load_state_dict(window.state_dict())
    for found in (window, resumed, window.to(randn(1))):
        assert_moments(found.moments, torch.cat([first, second], dim=1), [0.75] * 8 + [1.0] * 4)
        found.scale(0.5)
        assert found.moments.count == 5 and found.examples == 2
