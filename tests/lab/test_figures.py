"""Figures show what they are given, with labels."""

from __future__ import annotations

import pytest

from prong.lab.figures import draw_trade_off

METHODS = {"spectral": [(300, 0.1), (100, 0.3)], "magnitude": [(300, 0.2), (100, 0.9)], "nothing yet": []}


def test_trade_offs_have_labels_and_are_in_order_of_size():
    axes = draw_trade_off(METHODS, "a title").axes[0]
    assert axes.get_xlabel() and axes.get_ylabel() and axes.get_title() == "a title"
    assert list(axes.lines[0].get_xdata()) == [100, 300] and list(axes.lines[0].get_ydata()) == [0.3, 0.1]


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="expected"):
        draw_trade_off({})
