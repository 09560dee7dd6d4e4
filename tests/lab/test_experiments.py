"""The experiments: every run that a figure needs, from commands that can be stopped and say what is in the way."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from prong.lab import models
from prong.lab.cli import main
from prong.lab.experiments import autoencoder, catalogue, cifar10, conditioning, imagenet, listing, sensitivity
from prong.lab.folders import CHECKPOINT, RunFolder, run_folders
from prong.lab.interrupts import Stop
from prong.lab.jobs import Job
from prong.lab.methods import KEYS, refresher_of
from tests.lab.processes import unmeasured
from tests.lab.test_jobs import assert_same

ROOT = Path(__file__).parents[2]
SMALL = ("--updates", "8", "--batch", "16", "--evaluations", "4", "--evaluated", "20", "--samples", "64")


def run_small(out: Path, *words: str) -> None:
    main(["run", "autoencoder", "--methods", "nesterov", "prong", "--out", str(out), *SMALL, *words])


def refused(*words: str) -> str:
    """The one line that a command leaves with."""
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    assert caught.value.code not in (0, None)
    assert "\n" not in str(caught.value.code)
    return str(caught.value.code)


@pytest.fixture(autouse=True)
def _small(small_autoencoder: None) -> None:
    """The paper's autoencoder takes too long here."""


def test_runs_are_made_and_a_second_time_found(mnist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_small(tmp_path / "runs", "--seeds", "2")
    first = capsys.readouterr().out
    names = {folder.path.name for folder in run_folders(tmp_path / "runs")}
    assert names == {f"{m}-seed{s}" for m in ("nesterov-standard", "prong-whitened") for s in (0, 1)}
    assert all(folder.outcome["updates"] == 8 for folder in run_folders(tmp_path / "runs"))
    assert "160 training" in first and f"prong report {tmp_path / 'runs'}" in first
    stamps = [file.stat().st_mtime_ns for file in sorted(tmp_path.rglob("metrics.jsonl"))]
    run_small(tmp_path / "runs", "--seeds", "2")
    assert stamps == [file.stat().st_mtime_ns for file in sorted(tmp_path.rglob("metrics.jsonl"))]


def test_processes_side_by_side_give_the_same_rows(mnist: Path, tmp_path: Path) -> None:
    run_small(tmp_path / "one", "--jobs", "1")
    run_small(tmp_path / "two", "--jobs", "2")
    for folder in run_folders(tmp_path / "one"):
        assert_same(folder.path, tmp_path / "two" / folder.path.name)


def test_processes_side_by_side_are_shown(
    mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("prong.lab.experiments.showing.QUIET_SECONDS", 0.0)
    words = ("--updates", "500", "--methods", "nesterov", "adam", "--jobs", "2", "--out", str(tmp_path / "runs"))
    main(["run", "autoencoder", *words])
    shown = capsys.readouterr().out
    for name in ("nesterov-standard-seed0", "adam-standard-seed0"):
        assert re.search(rf"{name}: update \d+ of 500, .*train squared error \d", shown)


def test_options_reach_every_method_that_knows_them(mnist: Path) -> None:
    options = autoencoder.Options(methods=("rmsprop", "prong", "adam"), lr=0.5, eps=0.25, decay=0.9, start="whitened")
    rmsprop, whitened, adam = autoencoder.jobs(options)
    assert rmsprop.settings["decay"] == 0.9 and rmsprop.settings["eps"] == 0.25, "the initialisation's damping"
    assert whitened.settings["eps"] == 0.25 and "decay" not in whitened.settings
    assert {job.settings["lr"] for job in (rmsprop, whitened, adam)} == {0.5}
    options = autoencoder.Options(methods=("adam", "prong"), start="standard", eps=0.25)
    assert ["eps" in job.settings for job in autoencoder.jobs(options)] == [False, True]


def test_sigmoid_code_units_are_another_configuration(mnist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoencoder, "autoencoder", models.autoencoder)
    choices = [autoencoder.Options(methods=("sgd",), code_activation=chosen) for chosen in (False, True)]
    linear, sigmoid = (autoencoder.jobs(options)[0].config() for options in choices)
    assert sigmoid == {**linear, "model": "sigmoid code"}


def test_forwards_in_bfloat16_are_another_configuration(mnist: Path) -> None:
    single, half = (autoencoder.jobs(autoencoder.Options(methods=("sgd",), bf16=bf16))[0] for bf16 in (False, True))
    assert not single.plan.bf16 and half.plan == replace(single.plan, bf16=True)
    assert half.config() != single.config()


def everything(mnist: Path) -> dict[str, list[Job]]:
    return {
        "autoencoder": autoencoder.jobs(autoencoder.Options(seeds=2)),
        "conditioning": conditioning.jobs(conditioning.Options(seeds=2)),
        "sensitivity": sensitivity.jobs(sensitivity.Options()),
    }


def test_no_two_runs_share_a_folder_and_all_can_travel(mnist: Path) -> None:
    for experiment, jobs in everything(mnist).items():
        assert len({job.name for job in jobs}) == len(jobs)
        assert len({json.dumps(job.config()) for job in jobs}) == len(jobs)
        assert all(job.experiment == experiment for job in pickle.loads(pickle.dumps(jobs)))


def test_the_sensitivity_grids_are_complete(mnist: Path) -> None:
    jobs = sensitivity.jobs(sensitivity.Options())
    grid = {(job.settings["eps"], job.settings["lr"]) for job in jobs if job.part == "eps"}
    assert {eps for eps, _ in grid} == {1.0, 1e-1, 1e-2, 1e-3}
    assert len(grid) == 4 * len({lr for _, lr in grid}) >= 16
    periods = {(job.schedule.period, job.contestant.initialisation) for job in jobs if job.part == "period"}
    assert periods == {(10**k, start) for k in range(1, 6) for start in ("whitened", "standard")}
    assert not any(job.schedule.early for job in jobs if job.part == "period")


def test_periods_are_compared_from_the_initialisations_that_are_asked_for(mnist: Path) -> None:
    jobs = sensitivity.jobs(sensitivity.Options(parts=("period",), starts=("whitened",)))
    assert {job.contestant.initialisation for job in jobs} == {"whitened"}
    assert len(jobs) == 5


@pytest.mark.parametrize(
    ("words", "updates", "measured"),
    [((), 10_000, 100), (("--quick",), 300, 20), (("--quick", "--updates", "10000"), 10_000, 20)],
)
def test_a_quick_run_is_small_but_for_what_is_given(
    words: tuple[str, ...], updates: int, measured: int, mnist: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Job] = []
    monkeypatch.setattr(autoencoder, "perform", lambda name, jobs, options: made.extend(jobs))
    main(["run", "autoencoder", *words])
    assert {(job.plan.updates, job.plan.evaluations) for job in made} == {(updates, measured)}


def test_a_quick_look_at_sensitivity_keeps_the_values_that_are_given(mnist: Path) -> None:
    def tried(**given: Any) -> list[set[float]]:
        jobs = sensitivity.jobs(sensitivity.Options.small(**given))
        grid = [job.settings for job in jobs if job.part == "eps"]
        periods = {job.schedule.period for job in jobs if job.part == "period"}
        return [{settings["eps"] for settings in grid}, {settings["lr"] for settings in grid}, periods]

    assert tried() == [{1.0, 0.1}, {1e-3, 3e-4}, {100, 1000}]
    assert tried(lrs=(0.5,), periods=(10,)) == [{1.0, 0.1}, {0.5}, {10}]
    assert tried(eps=sensitivity.Options().eps)[0] == {1.0, 1e-1, 1e-2, 1e-3}, "as many as usual, if somebody says so"
    assert tried(eps=(1.0, 2.0, 3.0)) == [{1.0, 2.0, 3.0}, {1e-3, 3e-4}, {100, 1000}]


def test_with_a_fixed_period_the_first_reparametrisation_is_before_the_first_update(mnist: Path) -> None:
    options = sensitivity.Options(parts=("period",), periods=(100,), batch=16, samples=64)
    for job in sensitivity.jobs(options):
        training = job.begin()
        whitenings = [site.whitening for layer in training.model if hasattr(layer, "sites") for site in layer.sites]
        assert whitenings and all(whitening is not None for whitening in whitenings)
        assert refresher_of(training.optimizer).next_refresh() == 100


def test_the_fisher_of_a_small_network_is_kept_before_and_after(mnist: Path, tmp_path: Path) -> None:
    words = ("--methods", "sgd", "prong", "--out", str(tmp_path), "--width", "8", "--samples", "100", "--batch", "16")
    main(["run", "conditioning", *words, "--updates", "20", "--evaluations", "2", "--examples", "40", "--period", "10"])
    assert RunFolder(tmp_path / "sgd-standard-seed0").keepsakes == {}
    folder = RunFolder(tmp_path / "prong-standard-seed0")
    kept, rows = folder.keepsakes, folder.rows()
    assert kept["condition_before"] > kept["condition_after"] > 1
    assert len(kept["before"]) == len(kept["after"]) == 72  # (8 + 1) * 8 entries: weights and biases
    assert [row["update"] for row in rows] == [0, 10, 20] and all(row["condition"] > 1 for row in rows)


def test_rows_go_to_tensorboard_too(mnist: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_small(tmp_path / "runs", "--tensorboard")
    folder = RunFolder(tmp_path / "runs" / "prong-whitened-seed0")
    events = EventAccumulator(str(folder.path / "tensorboard")).Reload()
    seen = [(event.step, event.value) for event in events.Scalars("train_squared_error")]
    assert seen == [(row["update"], pytest.approx(row["train_squared_error"])) for row in folder.rows()]


@pytest.mark.parametrize("stopped", [False, True])
def test_who_wants_tensorboard_late_gets_all_rows_once(
    stopped: bool, mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = RunFolder(tmp_path / "runs" / "prong-whitened-seed0")
    if stopped:
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(Stop, "is_asked", lambda self: len(folder.rows()) == 3)
            run_small(tmp_path / "runs")
        assert folder.outcome is None and len(folder.rows()) == 3
    else:
        run_small(tmp_path / "runs")
    for _ in range(2):
        run_small(tmp_path / "runs", "--tensorboard")
        events = EventAccumulator(str(folder.path / "tensorboard")).Reload()
        seen = [(event.step, event.value) for event in events.Scalars("train_squared_error")]
        assert seen == [(row["update"], pytest.approx(row["train_squared_error"])) for row in folder.rows()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("autoencoder", "--methods", "adagrad"), "--methods knows no 'adagrad'. Choose from: prong"),
        (("autoencoder", "--methods", "shampoo"), "shampoo cannot take part in this experiment"),
        (("conditioning", "--methods", "batchnorm"), "batchnorm cannot take part in this experiment"),
        (("autoencoder", "--updates", "0"), "--updates is at least 1, got 0"),
        (("autoencoder", "--seeds", "0"), "--seeds is at least 1, got 0"),
        (("autoencoder", "--data", "nowhere"), "--data nowhere is no folder"),
        (("autoencoder", "--batch", "161"), "--batch is at most the 160 examples that are trained on, got 161"),
        (("conditioning", "--batch", "161"), "--batch is at most the 160 examples that are trained on, got 161"),
        (("sensitivity", "--batch", "161"), "--batch is at most the 160 examples that are trained on, got 161"),
        (("conditioning", "--batch", "0"), "--batch is at least 1, got 0"),
        (("autoencoder", "--samples", "1"), "--samples is at least 2, got 1"),
        (("autoencoder", "--evaluated", "0"), "--evaluated is at least 1, got 0"),
        (("autoencoder", "--lr", "-1"), "lr is positive and finite, got -1"),
        (("autoencoder", "--momentum", "-1"), "momentum is at least 0 and less than 1, got -1"),
        (("conditioning", "--eps", "0"), "eps is positive and finite, got 0"),
        (("sensitivity", "--lrs", "0.1", "nan"), "lr is positive and finite, got nan"),
        (("autoencoder", "--momentum", "1"), "momentum is at least 0 and less than 1, got 1"),
        (("autoencoder", "--decay", "1.5"), "decay is at least 0 and less than 1, got 1.5"),
        (("autoencoder", "--regulariser", "0"), "regulariser is positive and finite, got 0"),
        (("autoencoder", "--warm-up", "-1"), "--warm-up is at least 0, got -1"),
        (
            ("autoencoder", "--methods", "adam", "--decay", "0.9", "--eps", "0.1"),
            "no method that takes part has anything to do with --eps, --decay. Leave it out.",
        ),
        (("conditioning", "--methods", "adam", "--momentum", "0.5"), "anything to do with --momentum"),
        (("sensitivity", "--parts"), "--parts are one or more, each once; got none"),
        (("sensitivity", "--starts"), "--starts are one or more, each once; got none"),
        (("sensitivity", "--lrs", "0.1", "0.1"), "--lrs are one or more, each once; got 0.1, 0.1"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(
    words: tuple[str, ...], message: str, mnist: Path, tmp_path: Path
) -> None:
    assert message in refused("run", *words, "--out", str(tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


def test_where_every_run_fails_the_command_does_too(
    mnist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--methods", "nesterov", "--out", str(tmp_path / "runs"), *SMALL, "--lr", "1e38")
    for _ in range(2):  # found, it has still failed
        assert "no run came to its end" in refused("run", "autoencoder", *words)
        assert "diverged at update" in capsys.readouterr().out


def test_missing_data_is_said_in_one_line(tmp_path: Path) -> None:
    assert "no MNIST in" in refused("run", "autoencoder", "--data", str(tmp_path), "--out", str(tmp_path / "runs"))


def test_a_folder_of_another_configuration_stops_everything_before_the_first_run(mnist: Path, tmp_path: Path) -> None:
    run_small(tmp_path / "runs")
    words = ("run", "autoencoder", "--methods", "adam", "prong", "--out", str(tmp_path / "runs"), *SMALL, "--lr", "1")
    assert "is of another configuration (settings.lr 0.000403, now 1.0)" in refused(*words)
    assert len(run_folders(tmp_path / "runs")) == 2, "Adam, which comes first, was not begun"
    assert "exists. Name another with --out" in refused(*words[:-2], "--no-resume")


def test_two_commands_in_one_folder_are_one_too_many(mnist: Path, tmp_path: Path) -> None:
    run_small(tmp_path / "runs")
    folder = RunFolder(tmp_path / "runs" / "prong-whitened-seed0")
    words = ("run", "autoencoder", "--methods", "prong", "--out", str(tmp_path / "runs"), *SMALL)
    with folder.opened(folder.config):
        assert "another process is at work" in refused(*words)


ENDLESS = ("--updates", "5000", "--batch", "16", "--evaluations", "2", "--evaluated", "20", "--samples", "64")


def test_a_run_that_cannot_be_made_stops_those_beside_it_with_a_checkpoint(mnist: Path, tmp_path: Path) -> None:
    sizes = {name[2:]: int(value) for name, value in zip(ENDLESS[::2], ENDLESS[1::2], strict=True)}
    (held,) = autoencoder.jobs(autoencoder.Options(methods=("nesterov",), **sizes))
    words = ("--methods", "prong", "nesterov", "--out", str(tmp_path / "runs"), *ENDLESS, "--jobs", "2")
    with RunFolder(tmp_path / "runs" / held.name).opened(held.config()):
        assert "another process is at work" in refused("run", "autoencoder", *words)
    other = RunFolder(tmp_path / "runs" / "prong-whitened-seed0")
    assert other.outcome is None and (other.path / CHECKPOINT).exists()


def test_a_process_that_dies_is_said_in_one_line(mnist: Path, tmp_path: Path) -> None:
    def kill() -> None:
        wait_for(tmp_path / "runs" / "prong-whitened-seed0" / "metrics.jsonl", '"update": 0,')
        os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)

    threading.Thread(target=kill).start()
    words = ("--methods", "prong", "nesterov", "--out", str(tmp_path / "runs"), *ENDLESS, "--jobs", "2")
    assert "a process died, perhaps for want of memory" in refused("run", "autoencoder", *words)


def command(mnist: Path, out: Path, *words: str, before: Callable[[], None] | None = None) -> subprocess.Popen[str]:
    """The command in a process of its own, on the paper's model."""
    return subprocess.Popen(
        [sys.executable, "-m", "prong.lab.cli", "run", "autoencoder", "--methods", "prong", "--out", str(out), *words],
        env={**unmeasured(), "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PRONG_DATA": str(mnist)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
    )


def wait_for(path: Path, content: str) -> None:
    deadline = time.monotonic() + 100
    while not (path.exists() and content in path.read_text()):
        assert time.monotonic() < deadline, f"{content} never came in {path}"
        time.sleep(0.01)


LARGE = ("--updates", "100", "--batch", "16", "--evaluations", "100", "--evaluated", "20", "--samples", "64")


def test_ctrl_c_stops_with_one_line_and_the_same_command_goes_on(mnist: Path, tmp_path: Path) -> None:
    process = command(mnist, tmp_path / "cut", *LARGE)
    rows = tmp_path / "cut" / "prong-whitened-seed0" / "metrics.jsonl"
    wait_for(rows, '"update": 5,')
    process.send_signal(signal.SIGINT)
    said, trouble = process.communicate(timeout=100)
    assert process.returncode == 130 and "The same command goes on from here." in said and trouble == ""
    stopped = len(rows.read_text().splitlines())
    assert 5 <= stopped < 101
    for out in ("cut", "whole"):
        again = command(mnist, tmp_path / out, *LARGE)
        assert again.communicate(timeout=200)[1] == "" and again.returncode == 0
    assert_same(rows.parent, tmp_path / "whole" / "prong-whitened-seed0")


def test_a_full_disk_is_said_in_one_line_and_nothing_is_lost(mnist: Path, tmp_path: Path) -> None:
    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))  # the parameters alone are eleven million bytes

    words = ("--updates", "2", "--batch", "16", "--evaluations", "2", "--evaluated", "20", "--samples", "64")
    process = command(mnist, tmp_path / "runs", *words, before=little_room)
    _, trouble = process.communicate(timeout=200)
    assert process.returncode == 1 and trouble.count("\n") == 1
    assert "cannot be read or written: File too large. Make room, and the same command goes on." in trouble
    folder = RunFolder(tmp_path / "runs" / "prong-whitened-seed0")
    assert folder.outcome is None and len(folder.rows()) == 3
    again = command(mnist, tmp_path / "runs", *words)
    assert again.communicate(timeout=200)[1] == "" and again.returncode == 0
    assert folder.outcome["failure"] is None and len(folder.rows()) == 3


def test_every_experiment_is_listed_with_figure_claim_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    listing.main()
    shown = capsys.readouterr().out
    assert all(entry.name in shown for entry in catalogue.CATALOGUE) and "about" in shown
    assert listing.duration(30) == "about a minute" and listing.duration(7200) == "about 2.0 h"
    assert listing.duration(300 * 86400) == "about 300 days"


def test_the_guess_of_the_time_is_from_the_operations_of_the_default_runs() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    from prong.lab.inception import inception
    from prong.lab.models import CROP, cifar10_net
    from prong.lab.models import autoencoder as paper

    def operations(model: torch.nn.Module, x: torch.Tensor, updates: int, runs: int) -> float:
        with FlopCounterMode(display=False) as counter:
            model(x).sum().backward()
        return counter.get_total_flops() * updates * runs / 1e12

    guessed = {entry.name: entry.teraflops for entry in catalogue.CATALOGUE}
    options, grid = autoencoder.Options(), sensitivity.Options()
    digits, pictures = torch.zeros(options.batch, 784), torch.zeros(128, 3, CROP, CROP)
    photographs = imagenet.Options()
    updates = photographs.epochs * ((1_281_167 - 1000 * photographs.held_out) // photographs.batch)  # of ILSVRC
    runs = len(grid.eps) * len(grid.lrs) + 2 * len(grid.periods)
    counted = {
        "autoencoder": operations(paper(), digits, options.updates, len(autoencoder.TUNED)),
        "sensitivity": operations(paper(), digits, grid.updates, runs),
        "cifar10": operations(cifar10_net(), pictures, 30 * 351, len(cifar10.TUNED)),
        "imagenet": photographs.batch
        * operations(inception(), torch.zeros(1, 3, 224, 224), updates, len(imagenet.TUNED)),
    }
    for name, count in counted.items():
        assert guessed[name] == pytest.approx(count, rel=0.2), name


def test_every_tuned_setting_is_one_that_the_method_knows() -> None:
    tables: list[dict[str, Any]] = [autoencoder.TUNED, cifar10.TUNED, conditioning.TUNED, imagenet.TUNED]
    for key, tuned in [item for table in tables for item in table.items()]:
        known = set(KEYS[key].settings) | ({"eps"} if tuned.initialisation == "whitened" else set())
        assert set(tuned.settings) <= known
