"""Tables and curves show what was measured, and failures as failures."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from matplotlib.image import imread
from rich.console import Console

from prong.lab.report import (
    Outcome,
    describe,
    equal_seconds,
    failures,
    plot_curves,
    plot_race,
    race_table,
    ratio_table,
    summary_table,
    target_error,
)
from prong.lab.training import Row, Run
from tests.lab.test_standings import ABSENT, FIELD

FAST = Outcome("fast", {"lr": 0.1}, Run([Row(0, 1, 90, 91), Row(5, 2, 30, 31), Row(10, 3, 9, 9.5)]))
SLOW = Outcome("slow", {"lr": 1e-3}, Run([Row(0, 0, 90, 91), Row(5, 2.5, 40, 41), Row(10, 5, 20, 21)]))
FAILED = Outcome(
    "bad", {"lr": 10}, Run([Row(0, 0, 90, 91), Row(5, 1, 200, 210)], "diverged at update 7: the loss is nan")
)
STILLBORN = Outcome("worse", {"lr": 99}, Run([Row(0, 0, 90, 91)], "diverged at update 1: the loss is nan"))


def printed(outcomes: list[Outcome]) -> str:
    console = Console(width=110, file=StringIO(), record=True)
    console.print(summary_table(outcomes, [5, 10]))
    return console.export_text()


def test_rows_are_looked_up_not_interpolated() -> None:
    assert FAST.after(5) == FAST.run.rows[1] and FAST.after(6) is None
    assert SLOW.within(4.9) == SLOW.run.rows[1] and FAST.within(0.5) is None


def test_time_per_update_leaves_out_the_initialisation() -> None:
    assert FAST.milliseconds == pytest.approx(200)
    assert STILLBORN.milliseconds is None


def test_comparisons_are_among_runs_that_came_to_their_end() -> None:
    assert equal_seconds([FAST, SLOW, FAILED]) == 3
    assert target_error([FAST, SLOW, FAILED]) == 20
    assert target_error([FAST]) == 9
    assert target_error([FAILED]) == equal_seconds([FAILED]) == 0


def test_the_table_has_errors_costs_and_the_way_to_the_target() -> None:
    text = printed([FAST, SLOW])
    for shown in ("fast", "lr 0.1", "200.0", "500.0", "9.50", "40.00", "3.0 s", "10 updates", "5.0 s"):
        assert shown in text


@pytest.mark.parametrize("outcomes", [[FAST, FAILED], [FAILED], [STILLBORN], []])
def test_a_failure_appears_without_numbers_it_does_not_have(outcomes: list[Outcome]) -> None:
    text = printed(outcomes)
    assert "nan" not in text and all(outcome.method in text for outcome in outcomes)


def test_failures_are_told_by_name() -> None:
    assert failures([FAST, FAILED]) == {"bad": "diverged at update 7: the loss is nan"}


def test_settings_are_written_shortly() -> None:
    assert describe({"lr": 5e-4, "eps": 0.0123456}) == "lr 0.0005, eps 0.0123"


def test_curves_are_a_picture_even_of_failures(tmp_path: Path) -> None:
    plot_curves([FAST, SLOW, FAILED, STILLBORN], "title", tmp_path / "curves.png")
    picture = imread(tmp_path / "curves.png")
    assert picture.shape[1] > picture.shape[0] > 500
    assert picture.std() > 0.01


def test_the_race_in_tables_and_as_a_picture(tmp_path: Path) -> None:
    console = Console(width=150, file=StringIO(), record=True)
    console.print(race_table(FIELD, [10.0, 7.0]))
    console.print(ratio_table(FIELD, [10.0, 7.0]))
    text = console.export_text()
    assert all(standing.contestant.name in text for standing in FIELD)
    for shown in ("4.5 s", "100 300 200", "> 2.00", "Adam, whitened init", "lr 0.1, eps 0.1", "failed"):
        assert shown in text
    assert "inf" not in text and "nan" not in text
    plot_race(FIELD, [10.0, 7.0], "title", tmp_path / "race.png")
    assert imread(tmp_path / "race.png").std() > 0.01


def test_a_race_that_nobody_could_run_is_still_shown(tmp_path: Path) -> None:
    console = Console(width=150, file=StringIO(), record=True)
    console.print(race_table([ABSENT], [7.0]))
    console.print(ratio_table([ABSENT], [7.0]))
    assert "failed" in console.export_text()
    plot_race([ABSENT], [7.0], "title", tmp_path / "race.png")
