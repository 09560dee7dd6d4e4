"""Runs are shown while they are made: by bars on a terminal, by lines elsewhere."""

from __future__ import annotations

from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from prong.lab.experiments import showing
from prong.lab.experiments.showing import News, Shown, told


def job(name: str, updates: int = 100) -> Any:
    return SimpleNamespace(
        name=name, plan=SimpleNamespace(updates=updates), task=SimpleNamespace(watched="train_error")
    )


def training(update: int, seconds: float = 0.0) -> Any:
    return SimpleNamespace(update=update, seconds=seconds, loss=0.5)


def screen(terminal: bool, width: int = 120) -> tuple[Console, StringIO]:
    file = StringIO()
    return Console(file=file, force_terminal=terminal, width=width, no_color=True), file


def test_on_a_terminal_runs_have_bars_that_make_room_for_their_end() -> None:
    console, file = screen(terminal=True)
    with Shown(console, [job("first"), job("second")]) as shown:
        shown.tell(News("first", 40, "loss 0.5"))
        shown._progress.refresh()
        drawn = file.getvalue()
        assert "40/100" in drawn and "loss 0.5" in drawn and "0/2" in drawn and "second" not in drawn
        shown.end("first", "error 1 after 100 updates")
        file.truncate(0)
        shown.tell(News("first", 100, "late"))
        shown._progress.refresh()
    assert "late" not in file.getvalue() and "1/2" in file.getvalue()


def test_elsewhere_they_have_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(showing, "monotonic", lambda: clock[0])
    console, file = screen(terminal=False)
    with Shown(console, [job("first", 1000)]) as shown:
        for second in range(25):
            clock[0] = float(second)
            shown.tell(News("first", second, f"loss {second}"))
        shown.end("first", "error 1 after 1,000 updates")
    assert file.getvalue().splitlines() == [
        "first: update 10 of 1,000, loss 10",
        "first: update 20 of 1,000, loss 20",
        "first: error 1 after 1,000 updates",
    ]


def test_what_is_told_is_the_loss_the_error_and_the_pace_since_a_run_went_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(showing, "monotonic", lambda: clock[0])
    heard: list[News] = []
    watch = told(job("first"), heard.append)
    watch.on_row({"train_error": 7.0}, 0.0)
    for update, seconds in ((50, 9.0), (51, 9.1), (52, 9.2)):
        clock[0] += 0.15
        watch.on_update(training(update, seconds))
    assert [news.update for news in heard] == [50, 52], "not more often than somebody could look"
    assert heard[0].words == "loss 0.5, train error 7"
    assert heard[1].words == "loss 0.5, train error 7, 100.0 ms per update"


def test_on_a_narrow_terminal_words_are_cut_before_names_and_counts() -> None:
    console, file = screen(terminal=True, width=60)
    with Shown(console, [job("prong-default-whitened-seed0", 10_000)]) as shown:
        shown.tell(News("prong-default-whitened-seed0", 40, "loss 0.5, train error 7, 100.0 ms per update"))
        shown._progress.refresh()
    assert "prong-default-whitened-seed0" in file.getvalue() and "40/10000" in file.getvalue()
