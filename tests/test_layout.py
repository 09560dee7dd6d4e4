"""Every weight has one packed form (groups, out, taps, in), and the layer can be computed from it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from prong.layers.site import Layout
from tests import reference
from tests.closeness import assert_close


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Linear layers (no kernel), convolutions of one to three dimensions, and transposed ones."""
    groups = draw(st.integers(1, 3))
    out, features = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    kernel = draw(st.lists(st.integers(1, 3), max_size=3))
    transposed = draw(st.booleans())
    shape = (groups * features, out) if transposed else (groups * out, features)
    layout = Layout((*shape, *kernel), groups, transposed)
    assert (layout.outputs, layout.features) == (out, features)
    return layout


def numbered(*shape: int) -> torch.Tensor:
    """Different entries everywhere, so that any permutation shows."""
    return torch.arange(math.prod(shape), dtype=torch.float64).view(shape)


@given(layouts())
def test_unpack_is_the_inverse_of_pack(layout):
    W = numbered(*layout.shape)
    packed = layout.pack(W)
    taps = math.prod(layout.shape[2:])
    assert packed.shape == (layout.groups, layout.outputs, taps, layout.features)
    assert torch.equal(layout.unpack(packed), W)
    X = numbered(*packed.shape)
    assert torch.equal(layout.pack(layout.unpack(X)), X)


@given(layouts())
def test_a_packed_entry_is_the_weight_from_an_input_of_the_group_to_an_output_of_the_group(layout):
    W = numbered(*layout.shape)
    stored = W.flatten(2) if W.dim() > 2 else W.unsqueeze(-1)
    for (g, o, t, i), packed in zip(_indices(layout.pack(W)), layout.pack(W).flatten(), strict=True):
        if layout.transposed:
            assert packed == stored[g * layout.features + i, o, t]
        else:
            assert packed == stored[g * layout.outputs + o, i, t]


@given(layouts())
def test_a_packed_bias_stands_beside_its_outputs(layout):
    b = numbered(layout.groups * layout.outputs)
    packed = layout.pack_bias(b)
    assert packed.shape == layout.pack(numbered(*layout.shape)).shape[:2]
    assert torch.equal(packed.reshape(-1), b)
    for g in range(layout.groups):
        for o in range(layout.outputs):
            assert packed[g, o] == b[g * layout.outputs + o]


@given(layouts(), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(0, 3))
def test_every_position_of_every_example_is_a_row(layout, sizes, at):
    at = min(at, len(sizes))
    channels = layout.groups * layout.features
    h = numbered(*sizes[:at], channels, *sizes[at:])
    for channels_at in (at, at - h.dim()):
        rows = layout.rows(h, channels_at)
        assert rows.shape == (layout.groups, math.prod(sizes), layout.features)
        for k, position in enumerate(_indices(torch.empty(sizes))):
            for g in range(layout.groups):
                for i in range(layout.features):
                    channel = g * layout.features + i
                    assert rows[g, k, i] == h[(*position[:at], channel, *position[at:])]


def test_a_single_vector_is_one_row():
    h = numbered(6)
    assert torch.equal(Layout((4, 6)).rows(h, -1), h.view(1, 1, 6))


def test_a_linear_layer_is_one_group_and_one_tap():
    W, b, h = (torch.randn(*shape, dtype=torch.float64) for shape in ((4, 3), (4,), (5, 3)))
    layout = Layout((4, 3))
    z = reference.layer(layout.pack(W), layout.pack_bias(b), h.view(5, 1, 1, 3))
    assert_close(z.view(5, 4), F.linear(h, W, b))


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (2, 1)])
def test_a_convolution_is_a_sum_over_the_taps_of_the_packed_weight(groups, stride, padding):
    kernel = (3, 2)
    layout = Layout((6, 6 // groups, *kernel), groups)
    W, h = torch.randn(layout.shape, dtype=torch.float64), torch.randn(2, 6, 7, 6, dtype=torch.float64)
    expected = F.conv2d(h, W, stride=stride, padding=padding, groups=groups)
    assert_close(reference.convolution(layout.pack(W), h, kernel, stride, padding), expected)


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (2, 1)])
def test_a_transposed_convolution_spreads_each_input_by_the_packed_weight(groups, stride, padding):
    kernel = (3, 2)
    layout = Layout((6, 4, *kernel), groups, transposed=True)
    W, h = torch.randn(layout.shape, dtype=torch.float64), torch.randn(2, 6, 4, 5, dtype=torch.float64)
    expected = F.conv_transpose2d(h, W, stride=stride, padding=padding, groups=groups)
    assert_close(reference.transposed_convolution(layout.pack(W), h, kernel, stride, padding), expected)


def _indices(x: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(index) for index in torch.cartesian_prod(*map(torch.arange, x.shape)).view(x.numel(), -1).tolist()]


@given(layouts())
def test_numbers_spread_over_a_weight_multiply_its_inputs(layout):
    W = numbered(*layout.shape)
    s = 1 + numbered(layout.groups, layout.features)
    assert torch.equal(W * layout.spread(s), layout.unpack(layout.pack(W) * s[:, None, None, :]))
