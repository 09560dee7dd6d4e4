"""Tables and curves show what was measured, and failures as failures."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from matplotlib.image import imread
from rich.console import Console

from prong.lab.racing.scoreboard import describe, plot_race, race_table, ratio_table
from tests.lab.test_standings import ABSENT, FIELD


def test_settings_are_written_shortly() -> None:
    assert describe({"lr": 5e-4, "eps": 0.0123456}) == "lr 0.0005, eps 0.0123"


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
