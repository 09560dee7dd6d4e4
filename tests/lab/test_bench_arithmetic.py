"""What is printed follows from what was measured, by arithmetic that can be done by hand."""

from __future__ import annotations

from typing import Any

import pytest

from prong.lab.bench.amortise import AllIn, all_in, averages, window_updates
from prong.lab.bench.contest import block_length
from prong.lab.bench.growth import exponent
from prong.lab.bench.sheets import Sheet, as_markdown, number, percent, power
from prong.lab.bench.step_cost import HEADINGS, sheet

CONFIG = {"period": 1000, "samples": 12_800, "repetitions": 3, "methods": ["PRONG", "SGD"], "left_out": {}}
MEMORY = {"update state": 200, "update peak": 130, "open state": 300, "open peak": 140, "refresh peak": 250}
COST: dict[str, Any] = {
    "task": "autoencoder",
    "batch": 128,
    "rows": 1,
    "data": "digits",
    "without": {},
    "parameter_bytes": 100,
    "methods": {
        "PRONG": {
            "ms": {"update": [9.0, 10.0, 90.0], "open": [13.0, 14.0, 94.0], "refresh": [500.0, 600.0, 1000.0]},
            "bytes": MEMORY,
        },
        "SGD": {"ms": {"update": [8.0, 10.0, 90.0]}, "bytes": {"update state": 100, "update peak": 128}},
    },
}


def test_a_period_is_closed_updates_open_ones_and_a_refresh() -> None:
    average = all_in(10, 14, 600, period=1000, window=100)
    assert average.total == pytest.approx(0.9 * 10 + 0.1 * 14 + 0.6)
    assert average == AllIn(10, pytest.approx(0.4), 0.6)  # type: ignore[arg-type]


def test_a_window_as_long_as_the_period_leaves_no_closed_update() -> None:
    assert all_in(10, 14, 600, period=1000, window=1000).total == pytest.approx(14.6)


@pytest.mark.parametrize(
    ("samples", "examples", "updates"), [(12_800, 128, 100), (12_800, 1024, 13), (12_800, 1, 1000), (2, 64, 1)]
)
def test_a_window_has_as_many_updates_as_see_its_samples(samples: int, examples: int, updates: int) -> None:
    assert window_updates(1000, samples, examples) == updates


def test_averages_come_from_medians_and_totals_from_each_repetition() -> None:
    average, totals = averages(COST, CONFIG)["PRONG"]
    assert average.total == pytest.approx(11.0)
    assert totals == pytest.approx([9.9, 11.0, 91.4])
    assert averages(COST, CONFIG)["SGD"] == (AllIn(10.0), [8.0, 10.0, 90.0])


def test_tokens_are_samples() -> None:
    average, _ = averages({**COST, "batch": 16, "rows": 64}, CONFIG)["PRONG"]
    assert average.statistics == pytest.approx(13 / 1000 * 4)


def test_the_table_has_parts_shares_ratios_and_memory() -> None:
    table = sheet(COST, CONFIG)
    ours, base = (dict(zip(range(len(HEADINGS)), row, strict=True)) for row in table.rows)
    assert list(ours.values())[:7] == ["PRONG", "10.0", "14.0", "600", "11.0", "3.6 %", "5.5 %"]
    assert list(ours.values())[7:] == ["1.10", "1.02-1.24", "2.00", "3.00", "5.50"], "the peak is that of the refresh"
    assert list(base.values()) == ["SGD", "10.0", *"--", "10.0", *"--", "1.00", "1.00-1.00", "1.00", "-", "2.28"]
    assert "12,800 samples every 1,000 updates" in table.note and "Data: digits." in table.note


def test_what_was_left_out_is_told_with_its_reason_if_it_was_wanted() -> None:
    config = {**CONFIG, "left_out": {"A": "no can do", "B": "no can do"}}
    note = sheet({**COST, "without": {"SGD": "not here", "Muon": "nobody asked"}}, config).note
    assert "Left out: A and B; no can do." in note and "Left out: SGD; not here." in note and "Muon" not in note


@pytest.mark.parametrize("power_of", [-1.0, 0.0, 1.0, 2.5, 3.0])
def test_the_exponent_of_a_power_law_is_found(power_of: float) -> None:
    sizes = [64, 128, 512, 4096]
    assert exponent(sizes, [7 * size**power_of for size in sizes]) == pytest.approx(power_of)


def test_the_exponent_is_the_least_squares_slope_of_logarithms() -> None:
    assert exponent([1, 10, 100], [1, 100, 100]) == pytest.approx(1.0)


def test_one_size_has_no_exponent() -> None:
    assert exponent([512], [3.0]) is None and exponent([512, 512], [3.0, 4.0]) is None and exponent([], []) is None


def test_blocks_of_slow_updates_are_short_but_hold_all_periodic_work() -> None:
    assert [block_length(0.01), block_length(0.5)] == [20, 5]
    assert [block_length(0.01, every=10), block_length(0.5, every=10), block_length(0.01, every=30)] == [20, 10, 30]
    assert block_length(9.0, block=2) == 1


def test_numbers_have_three_digits_that_count() -> None:
    assert [number(x) for x in (0.01234, 1.234, 12.34, 123.4, 12_345, 0)] == [
        "0.0123",
        "1.23",
        "12.3",
        "123",
        "12,345",
        "0",
    ]
    assert power(None) == "-" and power(2.996) == "3.00" and percent(1, 8) == "12.5 %"


def test_markdown_has_a_line_per_row_and_numbers_to_the_right() -> None:
    text = as_markdown(Sheet("title", ("a", "b"), [["x", "1"], ["y", "2"]], "note"))
    assert text == "**title**\n\n| a | b |\n| --- | ---: |\n| x | 1 |\n| y | 2 |\n\nnote"
