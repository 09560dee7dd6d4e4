"""Figures show what they are given, with labels, in PNG files of a sensible size."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from prong.lab import figures
from prong.monitor import Row

DIRTY = torch.randn(12, 12, generator=torch.Generator().manual_seed(0)) * 10
CLEAN = torch.eye(12)


def row(update: int, layer: str, condition: float, whitened: float | None) -> Row:
    return Row(update, layer, 3, 9, 0.1, (1.0,), condition, condition, None, None, whitened)


ROWS = [row(u, layer, 50.0 + u, 1.0 + u / 10 if u > 1 else None) for u in (1, 10, 20) for layer in ("0", "2")]
CURVES = {"inputs": [4.0, 1.0, 9.0, 0.0], "whitened": np.ones(4)}
METHODS = {"spectral": [(300, 0.1), (100, 0.3)], "magnitude": [(300, 0.2), (100, 0.9)], "nothing yet": []}
EVERY = {"heat_map": (DIRTY, CLEAN), "spectra": (CURVES,), "condition_over_training": (ROWS,), "trade_off": (METHODS,)}


@pytest.mark.parametrize("name", EVERY)
def test_every_figure_is_a_picture_with_labels(name, tmp_path):
    getattr(figures, name)(*EVERY[name], tmp_path / "it.png", title="a title")
    height, width, _ = imread(tmp_path / "it.png").shape
    assert 500 < height < 1000 and 800 < width < 2000
    figure = getattr(figures, f"draw_{name}")(*EVERY[name], "a title")
    first = figure.axes[0]
    assert first.get_xlabel() and first.get_ylabel()
    assert "a title" in (figure.get_suptitle(), first.get_title())
    assert all(axes.get_xlabel() or axes.get_ylabel() for axes in figure.axes)


def test_a_heat_map_has_one_scale_for_both_and_shows_absolute_values():
    figure = figures.draw_heat_map(DIRTY, CLEAN)
    before, after = (axes.images[0] for axes in figure.axes[:2])
    assert before.norm is after.norm and before.norm.vmax == pytest.approx(DIRTY.abs().max().item())
    np.testing.assert_allclose(before.get_array(), DIRTY.abs().numpy())


def test_spectra_are_drawn_from_the_largest_on_logarithmic_axes():
    axes = figures.draw_spectra(CURVES).axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    line = axes.lines[0]
    assert list(line.get_xdata()) == [1, 2, 3] and list(line.get_ydata()) == [9.0, 4.0, 1.0], "zero has no logarithm"


def test_condition_numbers_are_drawn_for_each_layer_before_and_after():
    come, seen = figures.draw_condition_over_training(ROWS).axes
    assert [line.get_label() for line in come.lines] == ["layer 0", "layer 2"]
    assert list(come.lines[0].get_xdata()) == [1, 10, 20] and list(come.lines[0].get_ydata()) == [51, 60, 70]
    assert list(seen.lines[1].get_xdata()) == [10, 20] and list(seen.lines[1].get_ydata()) == [2.0, 3.0]
    plain = figures.draw_condition_over_training([row(1, "0", 5.0, None), row(2, "0", math.nan, None)])
    assert len(plain.axes) == 1, "nothing is whitened"


def test_trade_offs_are_in_order_of_size():
    axes = figures.draw_trade_off(METHODS).axes[0]
    assert list(axes.lines[0].get_xdata()) == [100, 300] and list(axes.lines[0].get_ydata()) == [0.3, 0.1]


@pytest.mark.parametrize(
    ("draw", "arguments"),
    [
        (figures.draw_heat_map, (DIRTY, CLEAN[:3, :3])),
        (figures.draw_heat_map, (DIRTY[:3], CLEAN[:3])),
        (figures.draw_heat_map, (0 * CLEAN, 0 * CLEAN)),
        (figures.draw_heat_map, (CLEAN * math.nan, CLEAN)),
        (figures.draw_heat_map, (CLEAN, CLEAN * math.nan)),
        (figures.draw_spectra, ({},)),
        (figures.draw_condition_over_training, ([],)),
        (figures.draw_trade_off, ({},)),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw, arguments):
    with pytest.raises(ValueError, match="expected"):
        draw(*arguments)
