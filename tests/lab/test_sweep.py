"""A sweep tries every point once, whoever works on it and whoever is killed, and chooses among what did not fail."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from prong.lab.cli import main
from prong.lab.methods import KEYS
from prong.lab.sweeps.board import Board
from prong.lab.sweeps.grids import Range, Search, paper_space
from prong.lab.sweeps.report import in_words
from prong.lab.sweeps.storages import StorageError, open_database, sole_user
from tests.lab.digits import contents, write_files
from tests.lab.tiny_sweep import sweep

ROOT = Path(__file__).parents[2]
GRID = {"sgd": {"lr": [0.1, 0.01], "batch": [16, 32]}, "prong": {"lr": [0.1, 0.01], "eps": [1.0, 0.1]}}
POINTS = 8


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mnist")
    write_files(folder, contents(train=160, test=20))
    return folder


@pytest.fixture(autouse=True)
def found(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands find the data, and so do those in other processes, with this code."""
    monkeypatch.setenv("PRONG_DATA", str(data))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))


def write_grid(folder: Path, grid: Any = GRID) -> str:
    path = folder / "grid.json"
    path.write_text(grid if isinstance(grid, str) else json.dumps(grid))
    return str(path)


def options(folder: Path, grid: Any = GRID, updates: int = 40) -> list[str]:
    return ["--grid", write_grid(folder, grid), "--updates", str(updates), "--out", str(folder / "out")]


def started(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.lab.tiny_sweep", *words]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def record(path: Path) -> dict[str, Any]:
    return json.loads((path / "sweep.json" if path.is_dir() else path).read_text())


def settled(path: Path) -> int:
    methods = record(path)["methods"] if (path / "sweep.json").exists() else {}
    return sum(len(found["trials"]) for found in methods.values())


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def values(path: Path) -> dict[str, list[tuple[Any, Any, Any]]]:
    """What came of every trial, without what depends on the hour."""
    methods = record(path)["methods"]
    return {key: [(t["settings"], t["value"], t["failure"]) for t in m["trials"]] for key, m in methods.items()}


def studies(storage: JournalStorage | RDBStorage) -> list[optuna.Study]:
    names = optuna.get_all_study_names(storage)
    return [optuna.load_study(study_name=name, storage=storage) for name in names]


def journal(folder: Path) -> list[optuna.Study]:
    return studies(JournalStorage(JournalFileBackend(str(folder / "journal.log"))))


@contextmanager
def database(url: str) -> Iterator[list[optuna.Study]]:
    storage = RDBStorage(url)
    yield studies(storage)
    storage.engine.dispose()


def every_point_once(found: list[optuna.Study], points: int) -> bool:
    finished = Counter(
        (s.study_name, t.user_attrs["point"]) for s in found for t in s.trials if t.state.is_finished() and t.value
    )
    running = [t for study in found for t in study.trials if t.state == TrialState.RUNNING]
    return len(finished) == points and set(finished.values()) == {1} and not running


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole sweep."""
    folder = tmp_path_factory.mktemp("sweep")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRONG_DATA", str(data))
        sweep(*options(folder))
    return folder / "out"


def test_every_point_of_a_grid_is_tried_once_and_the_best_is_chosen(undisturbed: Path) -> None:
    methods = record(undisturbed)["methods"]
    for key, axes in GRID.items():
        trials = methods[key]["trials"]
        (first, ones), (second, others) = axes.items()
        assert [t["settings"] for t in trials] == [{first: a, second: b} for a in ones for b in others]
        best = min(trials, key=lambda trial: trial["value"])
        assert (methods[key]["chosen"], methods[key]["value"]) == (best["settings"], best["value"])
        assert all(t["failure"] is None and t["seconds"] > 0 and t["environment"]["torch"] for t in trials)
    assert every_point_once(journal(undisturbed), POINTS)
    assert record(undisturbed)["sessions"][0]["environment"]


def test_a_value_is_the_last_row_that_the_run_left(undisturbed: Path) -> None:
    found = {}
    for folder in (undisturbed / "runs" / "sgd").iterdir():
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        config = json.loads((folder / "config.json").read_text())
        found[config["settings"]["lr"], config["plan"]["batch"]] = rows[-1]["train_squared_error"]
        assert rows[-1]["update"] == 40 and not (folder / "model.pt").exists()
    for settings, value, _ in values(undisturbed)["sgd"]:
        assert found[settings["lr"], settings["batch"]] == value


def test_a_finished_sweep_does_nothing_but_tell(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p: p.stat().st_mtime_ns for p in undisturbed.rglob("metrics.jsonl")}
    sweep("--grid", write_grid(tmp_path), "--updates", "40", "--out", str(undisturbed))
    shown = capsys.readouterr().out
    assert (
        "chosen by train squared error" in shown and in_words(record(undisturbed)["methods"]["sgd"]["chosen"]) in shown
    )
    assert {p: p.stat().st_mtime_ns for p in undisturbed.rglob("metrics.jsonl")} == before
    assert every_point_once(journal(undisturbed), POINTS)


def test_a_sweep_that_is_killed_goes_on_as_if_it_had_not_been(undisturbed: Path, tmp_path: Path) -> None:
    moment = random.random()
    process = started(*options(tmp_path))
    try:
        assert within(200, lambda: settled(tmp_path / "out") >= 1 or process.poll() is not None)
        time.sleep(0.3 * moment)
    finally:
        process.kill()
        process.communicate()
    assert settled(tmp_path / "out") < POINTS, f"killed too late, at {moment}"
    sweep(*options(tmp_path))
    assert every_point_once(journal(tmp_path / "out"), POINTS), f"killed at {moment}"
    assert values(tmp_path / "out") == values(undisturbed)


def test_processes_share_a_database_and_outlive_each_other(undisturbed: Path, tmp_path: Path) -> None:
    """Two, of which one is killed: nothing is repeated, nothing lost, and the one that is left knows all of it."""
    url = f"sqlite:///{tmp_path}/sweep.db"
    common = ["--grid", write_grid(tmp_path), "--updates", "40", "--storage", url, "--grace", "2"]
    process = started(*common, "--out", str(tmp_path / "other"))
    try:
        assert within(200, lambda: settled(tmp_path / "other") >= 1)
        threading.Timer(0.3 * random.random(), process.kill).start()
        sweep(*common, "--out", str(tmp_path / "out"))
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    with database(url) as found:
        assert every_point_once(found, POINTS)
        assert len({t.user_attrs["holder"] for study in found for t in study.trials if t.value}) == 2
    assert values(tmp_path / "out") == values(undisturbed)


def test_of_many_who_want_a_point_one_gets_it(tmp_path: Path) -> None:
    url, points = f"sqlite:///{tmp_path}/claims.db", 15
    search = Search({"lr": tuple(float(number) for number in range(points))}, None, 0)
    open_database(url)
    claimed: list[int] = []

    def claim_all(holder: str) -> None:
        storage = open_database(url)
        board = Board(storage, "claims", search, holder, grace=60, shared=True)
        while (claim := board.claim()) is not None:
            claimed.append(claim.point)
            assert claim.settings == {"lr": claim.point}
        storage.engine.dispose()

    threads = [threading.Thread(target=claim_all, args=(holder,)) for holder in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == list(range(points))


def test_ctrl_c_stops_all_processes_and_says_how_to_go_on(
    undisturbed: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also: what two processes do together is what one does alone."""

    def interrupt() -> None:
        within(200, lambda: settled(tmp_path / "out") >= 3)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(SystemExit, match="130"):
        sweep(*options(tmp_path), "--jobs", "2")
    shown, errors = capfd.readouterr()
    assert "The same command goes on from here" in shown and not errors
    assert 3 <= settled(tmp_path / "out") < POINTS and not multiprocessing.active_children()
    assert all(t.state != TrialState.RUNNING for study in journal(tmp_path / "out") for t in study.trials)
    sweep(*options(tmp_path))
    assert values(tmp_path / "out") == values(undisturbed)


def test_ctrl_c_leaves_a_checkpoint_to_go_on_from(tmp_path: Path) -> None:
    words = [*options(tmp_path, {"lr": [0.1]}, updates=20_000), "--methods", "sgd"]
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(SystemExit, match="130"):
        sweep(*words)
    assert len(list((tmp_path / "out").rglob("checkpoint.pt"))) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_diverges_or_fails_is_recorded_and_never_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep(*options(tmp_path, {"lr": [1e38, 0.1], "batch": [16, 1]}), "--methods", "batchnorm")
    found = record(tmp_path / "out")["methods"]["batchnorm"]
    assert (found["failures"], found["chosen"]) == (3, {"lr": 0.1, "batch": 16})
    reasons = [trial["failure"] for trial in found["trials"]]
    assert reasons[0].startswith("diverged at update") and reasons[2] is None
    assert "more than 1 value per channel" in reasons[1] and reasons[1] == reasons[3]
    assert all((trial["value"] is None) == (trial["failure"] is not None) for trial in found["trials"])
    states = [trial.state for trial in journal(tmp_path / "out")[0].trials]
    assert states == [TrialState.PRUNED, TrialState.FAIL, TrialState.COMPLETE, TrialState.FAIL]
    lines = capsys.readouterr().out
    sweep(*options(tmp_path, {"lr": [1e38, 0.1], "batch": [16, 1]}), "--methods", "batchnorm")
    assert len(journal(tmp_path / "out")[0].trials) == 4, "failures are not tried again"
    assert "batchnorm: 4 of 4 trials, 3 failed" in lines


def test_where_all_fail_nothing_is_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="no trial of sgd came to anything; the first: diverged at update"):
        sweep(*options(tmp_path, {"lr": [1e38]}), "--methods", "sgd")
    assert record(tmp_path / "out")["methods"]["sgd"]["chosen"] is None
    assert "none: all failed" in capsys.readouterr().out


def test_another_configuration_is_another_study(tmp_path: Path) -> None:
    grid = {"lr": [0.1]}
    sweep(*options(tmp_path, grid), "--methods", "sgd")
    elsewhere = tmp_path / "longer.json"
    sweep(*options(tmp_path, grid, updates=41), "--methods", "sgd", "--json", str(elsewhere))
    one, other = record(tmp_path / "out")["methods"]["sgd"], record(elsewhere)["methods"]["sgd"]
    assert one["study"] != other["study"] and [len(s.trials) for s in journal(tmp_path / "out")] == [1, 1]
    assert (one["trials"][0]["updates"], other["trials"][0]["updates"]) == (40, 41)


def test_every_method_gets_as_many_trials_chosen_by_the_seed(tmp_path: Path) -> None:
    chosen = []
    for seed in ("1", "1", "2"):
        folder = tmp_path / str(len(chosen))
        folder.mkdir()
        grid = {"sgd": {"lr": [0.1, 0.01, 0.02, 0.03, 0.04]}, "adam": {"lr": [0.1, 0.01, 0.001], "batch": [16, 32]}}
        sweep(*options(folder, grid, updates=1), "--trials", "3", "--seed", seed)
        chosen.append([[t["settings"] for t in m["trials"]] for m in record(folder / "out")["methods"].values()])
    assert [len(settings) for settings in chosen[0]] == [3, 3]
    assert chosen[0] == chosen[1] != chosen[2]


def test_ranges_are_searched_and_a_search_depends_on_its_seed_alone(tmp_path: Path) -> None:
    grid = {"lr": {"low": 1e-4, "high": 10, "log": True}, "batch": {"low": 8, "high": 32}, "momentum": [0.0, 0.9]}
    found = []
    for name in "ab":
        (tmp_path / name).mkdir()
        sweep(*options(tmp_path / name, grid, updates=3), "--methods", "sgd", "nesterov", "--trials", "6")
        found.append(values(tmp_path / name / "out"))
    assert found[0] == found[1]
    for method in ("sgd", "nesterov"):
        settings = [settings for settings, _, _ in found[0][method]]
        assert len({s["lr"] for s in settings}) == 6 and all(1e-4 <= s["lr"] <= 10 for s in settings)
        assert all(isinstance(s["batch"], int) and 8 <= s["batch"] <= 32 for s in settings)


def test_ranges_need_a_number_of_trials_and_grids_have_no_more_than_their_points() -> None:
    with pytest.raises(ValueError, match="--trials"):
        Search({"lr": Range(0.1, 1.0)}, None, 0)
    with pytest.raises(ValueError, match="more than the 4 points"):
        Search({"lr": (1.0, 2.0), "eps": (1.0, 2.0)}, 5, 0)


def test_the_paper_tries_these() -> None:
    sizes = {key: Search(paper_space("autoencoder", key), None, 0).size for key in KEYS}
    assert sizes["sgd"] == sizes["batchnorm"] == 4 * 3 * 2
    assert sizes["rmsprop"] == 4 * 3 * 2 * 2 * 2
    assert sizes["prong"] == 4 * 3 * 2 * 4
    assert sizes["adam"] == 4 * 3 and sizes["whitened-adam"] == 4 * 3 * 4


REFUSED: dict[str, tuple[Any, list[str], str]] = {
    "a method": (GRID, ["--methods", "sdg"], "--methods knows no 'sdg'"),
    "jobs": (GRID, ["--jobs", "0"], "--jobs is at least 1"),
    "trials": (GRID, ["--trials", "0"], "--trials is at least 1"),
    "too many": (GRID, ["--trials", "5"], "sgd: --trials 5 are more than the 4 points of its grid"),
    "not resumable": ({"lr": [1]}, ["--methods", "shampoo"], "shampoo cannot take part in this experiment"),
    "not resumable either": ({"psgd-kron": {"lr": [1]}}, [], "psgd-kron cannot take part in this experiment"),
    "grace": (GRID, ["--grace", "0"], "--grace is positive and finite, got 0.0"),
    "a setting": ({"lr": [1], "momentun": [0.9]}, [], "sgd knows no 'momentun'. It knows: lr, weight_decay, momentum"),
    "a period": ({"lr": [1], "period": [10]}, ["--methods", "adam"], "adam knows no 'period'"),
    "methods and settings": ({"prong": {"lr": [1]}, "lr": [1]}, [], "'lr' is none"),
    "not in the file": ({"prong": {"lr": [1]}}, ["--methods", "sgd"], "has no grid for sgd; it has: prong"),
    "no grid": ({}, [], "is no grid"),
    "a list": ([1, 2], [], "is no grid"),
    "nothing of a method": ({"prong": {}}, [], "a grid names settings"),
    "no values": ({"lr": []}, [], "lr needs a list of values"),
    "a number": ({"lr": 0.1}, [], "lr needs a list of values"),
    "words": ({"lr": ["fast"]}, [], "takes a number, got 'fast'"),
    "true": ({"lr": [True]}, [], "takes a number, got True"),
    "infinity": ('{"lr": [Infinity]}', [], "grid.json is no grid: Infinity is no number"),
    "half a batch": ({"batch": [0.5]}, [], "takes a positive whole number"),
    "twice": ({"lr": [1, 1.0]}, [], "has a value twice"),
    "a setting twice": ('{"lr": [1], "lr": [2]}', [], "grid.json is no grid: 'lr' stands twice in it"),
    "initialisation": ({"initialisation": ["white"]}, [], "takes standard or whitened"),
    "no range": ({"lr": {"low": 1}}, ["--trials", "2"], "is no range"),
    "no log": ({"lr": {"low": 0.1, "high": 1, "log": "yes"}}, ["--trials", "2"], "is no range"),
    "upside down": ({"lr": {"low": 1, "high": 0.1}}, ["--trials", "2"], "low is below high"),
    "log of nothing": ({"momentum": {"low": 0, "high": 0.5, "log": True}}, ["--trials", "2"], "positive if log"),
    "endless": ({"lr": {"low": 0.1, "high": 1}}, [], "say with --trials how many"),
    "no JSON": ("lr = 1", [], "grid.json is no grid: Expecting value"),
    "no method": ({"prongs": {"lr": [1]}}, [], "names methods, but 'prongs' is none"),
    "negative": ({"lr": [-1]}, [], "lr is positive and finite, got -1"),
    "a seed": (GRID, ["--seed", "-1"], "--seed is at least 0, got -1"),
    "too large a batch": ({"batch": [1_000_000]}, [], "--batch is at most the"),
    "one sample": ({"prong": {"samples": [1]}}, [], "--samples is at least 2, got 1"),
    "NaN": (GRID, ["--grace", "nan"], "--grace is positive and finite, got nan"),
    "no URL": (GRID, ["--storage", "nowhere"], "--storage is no database URL"),
    "no dialect": (GRID, ["--storage", "oracel://x/y"], "--storage oracel://x/y cannot be used"),
    "no folder": (GRID, ["--storage", "sqlite:////no/such/folder/x.db"], "unable to open database file"),
    "no data": (GRID, [], "no MNIST in"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_impossible_is_refused_in_a_line_before_anything_is_made(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, words, line = REFUSED[case]
    if case == "no data":
        monkeypatch.setenv("PRONG_DATA", str(tmp_path / "nothing"))
    with pytest.raises(SystemExit) as caught:
        sweep(*options(tmp_path, grid), *words)
    assert line in str(caught.value) and "\n" not in str(caught.value)
    assert not list((tmp_path / "out").glob("*")) and len(str(caught.value)) < 600


def test_a_grid_that_is_not_there_and_an_unknown_experiment_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"nope.json cannot be read: No such file.* It is `paper` or a JSON file"):
        sweep("--grid", str(tmp_path / "nope.json"))
    with pytest.raises(SystemExit, match=r"no experiment 'autoencoders' to sweep. Choose from: autoencoder"):
        main(["sweep", "autoencoders"])


def test_a_method_that_the_net_cannot_be_trained_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="muon cannot take part in this experiment"):
        main(["sweep", "cifar10", "--methods", "muon", "--out", str(tmp_path / "out")])


def test_passwords_are_not_shown() -> None:
    with pytest.raises(StorageError) as caught:
        open_database("postgresql+nodriver://me:secret@host/x")
    assert "secret" not in str(caught.value) and "me:***@host" in str(caught.value)


def test_nothing_of_others_is_overwritten(undisturbed: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in undisturbed.rglob("*.*") if path.is_file()}
    with pytest.raises(SystemExit, match=r"sweep.json is of another configuration \("):
        sweep("--grid", write_grid(tmp_path), "--updates", "41", "--out", str(undisturbed))
    with sole_user(undisturbed), pytest.raises(SystemExit, match="another process is at work in"):
        sweep("--grid", write_grid(tmp_path), "--updates", "40", "--out", str(undisturbed))
    assert {path: path.read_bytes() for path in undisturbed.rglob("*.*") if path.is_file()} == before
    foreign = tmp_path / "out" / "journal.log"
    foreign.parent.mkdir()
    for content in ("dear diary", "dear\ndiary\n"):
        foreign.write_text(content)
        with pytest.raises(SystemExit, match="is not a journal of trials"):
            sweep(*options(tmp_path))
        assert foreign.read_text() == content


def test_half_a_line_of_a_journal_is_taken_back(undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(undisturbed, out)
    with (out / "journal.log").open("a") as file:
        file.write('{"op_code":4,"worke')
    (out / "journal.log.lock").symlink_to(out / "journal.log")  # who was killed while it wrote leaves both
    sweep(*options(tmp_path))
    assert values(out) == values(undisturbed)


def test_a_whitened_initialisation_can_be_swept_with_any_method(tmp_path: Path) -> None:
    grid = {"lr": [0.1], "initialisation": ["standard", "whitened"]}
    sweep(*options(tmp_path, grid, updates=2), "--methods", "adam", "--keep", "nothing")
    found = record(tmp_path / "out")["methods"]["adam"]
    assert found["failures"] == 0 and found["trials"][0]["value"] != found["trials"][1]["value"]
    assert not list((tmp_path / "out").rglob("metrics.jsonl"))
