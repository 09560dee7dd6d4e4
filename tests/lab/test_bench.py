"""The benchmark runs as a user runs it, times every method in turn, and keeps every repetition."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from prong.lab import bench
from tests.lab.digits import small_digits


def test_the_command_prints_ratios_and_writes_a_record(tmp_path: Path, mnist: Path) -> None:
    file = tmp_path / "bench.json"
    command = [sys.executable, "-W", "error", "-m", "prong.lab.bench", "--batch", "32", "--repetitions", "1"]
    done = subprocess.run([*command, "--json", str(file)], capture_output=True, text=True, env=os.environ, timeout=240)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in (*bench.METHODS, "ratio", "batch 32"))
    record = json.loads(file.read_text())
    assert list(record["times"]) == list(bench.METHODS)
    for name, times in record["times"].items():
        assert len(times["ms_per_update"]) == len(times["ms_per_refresh"]) == 1
        assert min(times["ms_per_update"]) > 0
        assert all((ms > 0) == name.startswith("PRONG") for ms in times["ms_per_refresh"])
    assert record["config"]["batch"] == 32 and record["environment"]["torch"] == torch.__version__


def test_methods_take_turns(small_autoencoder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    monkeypatch.setattr(bench.Contestant, "train", lambda self: turns.append(self.name) or 1.0)
    monkeypatch.setattr(bench, "SAMPLES", 80)
    bench.measure(small_digits(40).train, batch=8, repetitions=2)
    assert turns == [*bench.METHODS] * 3, "a round that is not counted, then two that are"


def test_a_refresh_is_shared_by_the_updates_of_a_period(small_autoencoder: None) -> None:
    contestant = bench._enter("SGD", small_digits(40).train, batch=8)
    contestant.updates, contestant.refreshes = [9.0, 10.0, 99.0], [500.0, 1000.0, 9000.0]
    assert contestant.amortised() == 11.0


def test_every_repetition_is_recorded_and_medians_are_printed(
    tmp_path: Path, mnist: Path, small_autoencoder: None, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.main(batch=16, repetitions=3, json=tmp_path / "b.json")
    shown = capsys.readouterr().out
    assert all(name in shown for name in bench.METHODS) and "1.00" in shown and "Record:" in shown
    times = json.loads((tmp_path / "b.json").read_text())["times"]
    assert {len(values) for method in times.values() for values in method.values()} == {3}


def test_what_cannot_work_is_said_before_timing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="at least 1"):
        bench.main(repetitions=0)
    monkeypatch.setenv("PRONG_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match="no MNIST in"):
        bench.main()
