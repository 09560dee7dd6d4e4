"""A race is the same for everybody, loses nothing when it is killed, and tells what was not reached."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tyro
from matplotlib.image import imread

from prong.lab.bench import document
from prong.lab.contestants import Contestant, Problem
from prong.lab.methods import METHODS
from prong.lab.racing.ledger import Ledger, SeededRun, judged, time_trial
from prong.lab.racing.race import RACERS, race
from prong.lab.racing.search import Trial, propose
from prong.lab.record import ForeignRecordError, alone
from prong.lab.training import Row, Run
from tests.lab.digits import contents, write_files
from tests.lab.tiny import tiny_autoencoder
from tests.lab.tiny_race import RULES, run

ROOT = Path(__file__).parents[2]
SETTINGS = {"lr": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mnist")
    write_files(folder, contents(train=160, test=20))
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """The record of a whole race, made without interruption by one worker."""
    path = tmp_path_factory.mktemp("race") / "race.json"
    run(path, folder)
    return path


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def done(record: dict[str, Any]) -> int:
    """How many trials and runs are in a record."""
    return sum(len(entry["trials"]) + len(entry["runs"]) for entry in record.get("contestants", {}).values())


def untimed(path: Path) -> dict[str, Any]:
    """What a race came to, without what depends on the hour."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strip(item) for key, item in value.items() if key not in ("seconds", "run_seconds")}
        return [strip(item) for item in value] if isinstance(value, list) else value

    record = read(path)
    del record["sessions"]
    record["ratios"] = [ratio for ratio in record["ratios"] if ratio["measure"] == "updates"]
    return strip(record)


def only_the_clock(record: dict[str, Any]) -> dict[str, Any]:
    """A record as it is when its clock has just been read."""
    blank = {"trials": [], "runs": {}, "chosen": None}
    entries = {name: entry | blank for name, entry in record["contestants"].items()}
    return {key: record[key] for key in ("config", "sessions", "clock")} | {"contestants": entries}


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def alive(process: int) -> bool:
    """Whether it runs; a zombie, which waits to be buried by whoever adopted it, does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_everybody_has_as_many_trials_and_all_seeds(finished: Path) -> None:
    record = read(finished)
    assert list(record["contestants"]) == list(RULES.contestants())
    for name, entry in record["contestants"].items():
        assert len(entry["trials"]) == RULES.trials and list(entry["runs"]) == ["2", "3"]
        space = RULES.contestants()[name].space
        history = [Trial(**trial) for trial in entry["trials"]]
        assert [trial.settings for trial in history] == [propose(history[:k], space, 1) for k in range(RULES.trials)]
        succeeded = [trial for trial in history if trial.failure is None]
        assert entry["chosen"] == min(succeeded, key=lambda trial: trial.value).settings


def test_caps_are_the_updates_that_fit_and_runs_end_at_the_last_threshold_or_there(finished: Path) -> None:
    record = read(finished)
    for entry in record["contestants"].values():
        pace = record["clock"][entry["method"]]["ms_per_update"]
        assert entry["cap"] % RULES.every == 0
        assert entry["cap"] == max(RULES.every, 1000 * RULES.cap / pace[0] // RULES.every * RULES.every)
        for rows in (made["rows"] for made in entry["runs"].values() if made["failure"] is None):
            assert [row["update"] for row in rows] == list(range(0, rows[-1]["update"] + 1, RULES.every))
            assert all(row["train_error"] > RULES.thresholds[-1] for row in rows[:-1])
            assert rows[-1]["train_error"] <= RULES.thresholds[-1] or rows[-1]["update"] == entry["cap"]


def test_no_trial_goes_on_when_it_cannot_win(finished: Path, folder: Path, tmp_path: Path) -> None:
    record = only_the_clock(read(finished))
    for entry in record["contestants"].values():
        entry["cap"] = 100  # however slow this machine is
    path = tmp_path / "race.json"
    path.write_text(json.dumps(record))
    run(path, folder)
    stopped = 0
    for entry in read(path)["contestants"].values():
        whole = best = RULES.trial_updates(entry["cap"])
        for trial in entry["trials"]:
            details = trial["details"]
            assert details["updates"] <= max(best, RULES.every)
            if details["stopped"]:
                assert details["updates"] in (max(best, RULES.every), *RULES.hurdles_at(whole))
                stopped += 1
            best = min(best, details["updates"]) if details["reached"] else best
    assert stopped


def test_the_result_is_in_the_record(finished: Path) -> None:
    record = read(finished)
    assert list(record["standings"]) == list(RULES.contestants())
    assert {ratio["group"] for ratio in record["ratios"]} == {
        "best peer, standard init",
        "best peer, whitened init",
        "SGD",
    }
    assert record["sessions"][0]["environment"]["threads"] == 1


def test_the_page_of_performance_shows_it(finished: Path, tmp_path: Path) -> None:
    names = [section.name for section in document.SECTIONS]
    (tmp_path / document.PAGE).write_text("".join(f"<!-- begin {name} -->\n<!-- end {name} -->\n" for name in names))
    results = tmp_path / "results"
    results.mkdir()
    (results / "race.json").write_bytes(finished.read_bytes())
    document.main(results, tmp_path)
    text = (tmp_path / document.PAGE).read_text()
    record = read(finished)
    assert all(f"| {name} |" in text for name in record["contestants"])
    assert "times as much as our best" in text and record["sessions"][-1]["environment"]["torch"] in text
    assert (tmp_path / "race.png").read_bytes().startswith(b"\x89PNG")


def test_a_race_killed_in_the_middle_goes_on_with_nothing_lost(finished: Path, folder: Path, tmp_path: Path) -> None:
    """Killed with two workers, continued with one: the result is that of a race that nobody disturbed."""
    path = tmp_path / "race.json"
    path.write_text(json.dumps(only_the_clock(read(finished))))  # caps come from times, which are never the same
    command = [sys.executable, "-m", "tests.lab.tiny_race", str(path), str(folder), "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    process = subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        assert within(120, lambda: done(read(path)) >= 5 or process.poll() is not None)
        workers = children(process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    kept = read(path)
    assert 5 <= done(kept) < 36 and len(workers) >= 2
    assert within(30, lambda: not any(map(alive, workers))), "workers go with their race"
    run(path, folder)
    assert untimed(path) == untimed(finished)
    for name, entry in read(path)["contestants"].items():
        before = kept["contestants"][name]
        assert entry["trials"][: len(before["trials"])] == before["trials"], "times and all: nothing was done twice"
        assert before["runs"].items() <= entry["runs"].items()


def test_a_finished_race_is_not_run_again(finished: Path, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "race.json"
    path.write_text(finished.read_text())
    run(path, folder)
    before, after = read(finished), read(path)
    assert len(after.pop("sessions")) == len(before.pop("sessions")) + 1
    assert after == before


def test_a_record_of_another_race_is_refused(finished: Path, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "race.json"
    path.write_text(finished.read_text())
    for change in ({"trials": 5}, {"seeds": (2,)}, {"cap": 0.2}, {"methods": ("SGD",)}, {"thresholds": (70.0,)}):
        with pytest.raises(ForeignRecordError, match=rf"another configuration \({next(iter(change))}"):
            run(path, folder, rules=replace(RULES, **change))
    assert path.read_text() == finished.read_text()


def test_two_races_on_one_record_are_one_too_many(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRONG_DATA", str(folder))
    refused = pytest.raises(SystemExit, match=r"another process is at work on .*race.json")
    with alone(tmp_path / "race.json.lock", AssertionError()), refused:
        race(json=tmp_path / "race.json")
    assert not (tmp_path / "race.json").exists()


@pytest.mark.parametrize(
    ("rows", "failure", "value", "reached", "stopped"),
    [
        ([90, 20, 6.5], None, 50, True, False),
        ([6, 5], None, 0, True, False),
        ([90, 20, 14], None, 1000 * (1 + 14 / 7), False, True),
        ([70, 20], "diverged at update 30: nan", 1000 * (1 + 70 / 7), False, False),
        ([], "diverged at its initialisation: nan", 1000 * (1 + 784 / 7), False, False),
    ],
)
def test_the_value_of_a_trial(
    rows: list[float], failure: str | None, value: float, reached: bool, stopped: bool
) -> None:
    trained = Run([Row(25 * n, 0.1 * n, error, error) for n, error in enumerate(rows)], failure)
    trial = judged(SETTINGS, trained, target=7.0, cap=1000)
    assert (trial.settings, trial.value, trial.failure) == (SETTINGS, pytest.approx(value), failure)
    assert trial.details["reached"] == reached and trial.details["stopped"] == stopped
    if rows:
        assert trial.details["error"] == rows[-1] and trial.details["updates"] == 25 * (len(rows) - 1)
    if rows and not reached:
        assert not judged(SETTINGS, trained, target=7.0, cap=25 * (len(rows) - 1)).details["stopped"], "at the cap"


def test_a_trial_behind_the_best_at_the_hurdle_is_given_up(folder: Path) -> None:
    problem, contestant = Problem(tiny_autoencoder, folder), Contestant("SGD", "standard")
    rules = replace(RULES, target=0.001)
    trial = partial(time_trial, problem, contestant, rules, 80, {"lr": 1e-4})
    whole = trial(None)
    assert whole.details["updates"] == 40 and rules.hurdles_at(40) == [5, 10, 20]
    assert [at for at, _ in whole.details["hurdles"]] == [5, 10, 20]

    def after(factor: float) -> Trial:
        hurdles = [(at, error * (factor if at == 10 else 1)) for at, error in whole.details["hurdles"]]
        return trial(replace(whole, details={**whole.details, "hurdles": hurdles}))

    for factor in (1.0, 1.01 / rules.behind):
        assert after(factor).details["updates"] == 40 and after(factor).value == whole.value, "not far behind"
    behind = after(0.99 / rules.behind)
    assert behind.details["updates"] == 10 and behind.details["stopped"] and behind.failure is None
    assert behind.value > whole.value


def test_a_trial_that_diverges_is_recorded_and_not_dropped(folder: Path) -> None:
    problem = Problem(tiny_autoencoder, folder)
    contestant = Contestant("SGD", "standard")
    trial = time_trial(problem, contestant, RULES, 100, {"lr": 1e38}, None)
    untrained = problem.run(contestant, SETTINGS, RULES.plan(5, seed=1, until=1000.0)).first_error
    assert trial.failure is not None and trial.failure.startswith("diverged at update")
    assert trial.value == pytest.approx(50 * (1 + untrained / RULES.target))


def test_who_has_no_settings_or_cannot_run_makes_no_runs(folder: Path) -> None:
    rules = replace(RULES, methods=("SGD",), initialisations=("standard",), trials=1)
    entry: dict[str, Any] = {"cap": 10, "chosen": None, "trials": [], "runs": {}}
    ledger = Ledger(rules, Problem(tiny_autoencoder, folder), {"SGD": entry})
    assert ledger.done == 0 and ledger.total == 3
    ledger.add("SGD", Trial({"lr": 1.0}, 99.0, "diverged at update 1: nan"))
    assert entry["chosen"] is None and ledger.next_job("SGD") is None and ledger.done == 3
    entry["chosen"] = SETTINGS
    assert ledger.next_job("SGD") is not None and ledger.done == 1
    ledger.add("SGD", SeededRun(2, Run([], "diverged")))
    assert list(entry["runs"]) == ["2"] and ledger.done == 2
    entry["cap"] = 0
    assert ledger.next_job("SGD") is None


def test_the_command_shows_a_table_ratios_and_a_plot_and_is_quiet_about_progress(
    tmp_path: Path, mnist: Path, small_autoencoder: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "race.json"
    race(
        methods=("PRONG", "batch norm"),
        initialisations=("whitened",),
        thresholds=(66.5, 69.0),
        trials=1,
        seeds=(2,),
        cap=0.05,
        target=67.0,
        every=5,
        repetitions=1,
        json=path,
    )
    shown = capsys.readouterr()
    assert shown.err == "" and "\x1b" not in shown.out and "trials and runs" not in shown.out
    assert all(text in shown.out for text in ("PRONG, whitened init", "batch norm, whitened init", "best peer", "66.5"))
    assert str(path) in shown.out and imread(path.with_suffix(".png")).ndim == 3
    assert read(path)["config"]["thresholds"] == [69.0, 66.5], "in the order in which they are passed"
    with pytest.raises(SystemExit, match="another configuration"):
        race(methods=("SGD",), json=path)


def test_the_defaults_are_those_agreed_on() -> None:
    defaults = {name: p.default for name, p in inspect.signature(race).parameters.items()}
    assert (
        defaults["methods"] == RACERS
        and set(RACERS) <= set(METHODS)
        and defaults["initialisations"] == ("standard", "whitened")
    )
    assert defaults["thresholds"] == (10.0, 7.0, 5.0, 4.0) and defaults["seeds"] == (2, 3, 4)
    assert defaults["trials"] == 10 and defaults["target"] == 7.0 and defaults["every"] == 25


def test_options_can_be_given_on_a_command_line() -> None:
    with pytest.raises(SystemExit, match="--methods knows no 'Adagrad'"):
        tyro.cli(race, args=["--methods", "SGD", "Adagrad", "--trials", "3", "--seeds", "5", "6"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ()}, "--methods are one or more"),
        ({"seeds": (2, 2)}, "--seeds are one or more, each once"),
        ({"seeds": (1, 2)}, "seed 1 is the one that settings are chosen with"),
        ({"initialisations": ("orthogonal",)}, "--initialisations knows no 'orthogonal'"),
        ({"trials": 0}, "--trials is at least 1"),
        ({"workers": 0}, "--workers is at least 1"),
        ({"every": 0}, "--every is at least 1"),
        ({"cap": float("nan")}, "--cap is positive and finite, got nan"),
        ({"seeds": (2, -1)}, "--seeds is at least 0, got -1"),
        ({"cap": 0.0}, "--cap is positive and finite, got 0.0"),
        ({"thresholds": (5.0, -1.0)}, "--thresholds is positive and finite, got -1.0"),
    ],
)
def test_what_cannot_work_is_said_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        race(**options)


def test_missing_data_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRONG_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match="no MNIST in"):
        race()
