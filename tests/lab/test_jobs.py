"""A run in a folder: it can be killed at any moment, and ends as if it had not been."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from prong.lab.folders import BEFORE, CHECKPOINT, CLOCK, DIGEST, METRICS, RunFolder, run_folders
from prong.lab.jobs import Job, Watch, carry_out
from prong.lab.methods import KEYS
from prong.lab.pool import side_by_side
from prong.lab.record import ForeignRecordError, InUseError
from tests.lab.killed import small_job

ROOT = Path(__file__).parents[2]

RESUMABLE = [key for key, method in KEYS.items() if method.resumable]


def content(folder: Path) -> tuple[bytes, dict[str, torch.Tensor]]:
    return (folder / "metrics.jsonl").read_bytes(), torch.load(folder / "model.pt")


def assert_same(one: Path, other: Path) -> None:
    (metrics, model), (others_metrics, others_model) = content(one), content(other)
    assert metrics == others_metrics
    assert model.keys() == others_model.keys() and all(torch.equal(model[k], others_model[k]) for k in model)


def stop_after(count: int) -> Watch:
    """A watch that says stop after so many updates."""
    left = iter(range(count - 1))
    return Watch(stopped=lambda: next(left, None) is None)


def stop_twice(job: Job, folder: RunFolder) -> None:
    """A run with two checkpoints: of its first two rows, and of three."""
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            carry_out(job, folder, stop_after(6))
    assert (folder.path / BEFORE).exists() and len(folder.rows()) == 3


def unused(folder: RunFolder, *troubles: str) -> str:
    """What is said of the checkpoints, the newest first, that are not used."""
    named = zip((CHECKPOINT, BEFORE), troubles, strict=False)
    lines = [f"{folder.path / name} {trouble} and is not used\n" for name, trouble in named]
    anew = f"{folder.path} has no checkpoint that can be used: its run begins anew\n"
    return "".join([*lines, anew] if len(troubles) == 2 else lines)


def test_a_run_killed_at_twenty_random_moments_ends_as_if_it_had_not_been(mnist: Path, tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    command = [sys.executable, "-m", "tests.lab.killed", str(tmp_path / "runs"), str(mnist), "prong-adamw"]
    done = subprocess.run(
        [*command, str(seed), "20"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"seed {seed}: {done.stderr}"
    killed, finished = map(int, done.stdout.split())
    assert killed >= 20 and finished >= 1
    for number in range(finished):
        assert_same(tmp_path / "runs" / str(number), tmp_path / "runs" / "whole")
        assert not list((tmp_path / "runs" / str(number)).glob("checkpoint*"))


@pytest.mark.parametrize("key", RESUMABLE)
def test_every_method_goes_on_to_the_bit(key: str, mnist: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    job = small_job(mnist, key, updates=20)
    carry_out(job, RunFolder(tmp_path / "whole"))
    for stop in (3, 13):  # in the warm-up, and after measurements
        with pytest.raises(KeyboardInterrupt):
            carry_out(job, RunFolder(tmp_path / "cut"), stop_after(stop))
    outcome = carry_out(job, RunFolder(tmp_path / "cut"))
    assert outcome["failure"] is None and outcome["updates"] == 20
    assert_same(tmp_path / "cut", tmp_path / "whole")


def test_rows_written_after_the_last_checkpoint_are_taken_back_and_made_again(mnist: Path, tmp_path: Path) -> None:
    job, folder = small_job(mnist, "prong"), RunFolder(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        carry_out(job, folder, stop_after(10))
    rows = folder.rows()
    folder.add({"update": 12, "loss": 1.0}, 3.0)
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"update": 16, "lo')  # killed while writing
    assert folder.rows()[: len(rows)] == rows, "half a line does not harm"
    carry_out(job, folder)
    carry_out(job, RunFolder(tmp_path / "whole"))
    assert_same(folder.path, tmp_path / "whole")


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    damage: bytes | None, mnist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, folder = small_job(mnist, "adam"), RunFolder(tmp_path / "run")
    stop_twice(job, folder)
    newest = folder.path / CHECKPOINT
    whole = newest.read_bytes()
    newest.write_bytes(whole[:-100] + bytes(100) if damage is None else damage)
    carry_out(job, folder)
    assert capsys.readouterr().err == unused(folder, "is damaged")
    carry_out(job, RunFolder(tmp_path / "whole"))
    assert_same(folder.path, tmp_path / "whole")


def test_damaged_checkpoints_are_named_in_one_line_by_other_processes_too(
    mnist: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job, folders = small_job(mnist, "adam"), {name: RunFolder(tmp_path / name) for name in ("one", "two")}
    for folder in folders.values():
        stop_twice(job, folder)
        (folder.path / CHECKPOINT).write_bytes(b"short")
    waiting = dict(folders)

    def next_job(name: str) -> partial[object] | None:
        return partial(carry_out, job, waiting.pop(name)) if name in waiting else None

    side_by_side(folders, next_job, lambda name, outcome: None, workers=2)
    told = capfd.readouterr().err.splitlines(keepends=True)
    assert sorted(told) == sorted(unused(folder, "is damaged") for folder in folders.values())


@pytest.mark.parametrize("lines", [2, 1])
def test_a_checkpoint_of_more_rows_than_a_crash_left_is_not_used(
    lines: int, mnist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, folder = small_job(mnist, "adam"), RunFolder(tmp_path / "run")
    stop_twice(job, folder)
    rows = (folder.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder.path / "metrics.jsonl").write_text("".join(rows[:lines]))
    carry_out(job, folder)
    checkpoints = 1 if lines == 2 else 2  # the one before is used if its rows are there
    assert capsys.readouterr().err == unused(folder, *["is of more rows than there are"] * checkpoints)
    carry_out(job, RunFolder(tmp_path / "whole"))
    assert_same(folder.path, tmp_path / "whole")


@pytest.mark.parametrize("name", [METRICS, CLOCK])
@pytest.mark.parametrize("line", [2, 0])
def test_a_checkpoint_of_rows_that_were_altered_since_is_not_used(
    name: str, line: int, mnist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, folder = small_job(mnist, "adam"), RunFolder(tmp_path / "run")
    stop_twice(job, folder)
    rows = (folder.path / name).read_text().splitlines(keepends=True)
    *most, digit, brace, end = rows[line]
    rows[line] = "".join([*most, "2" if digit == "1" else "1", brace, end])
    (folder.path / name).write_text("".join(rows))
    carry_out(job, folder)
    checkpoints = 1 if line == 2 else 2  # the one before is used if its rows are as they were
    assert capsys.readouterr().err == unused(folder, *[f"is of other rows than {name} has"] * checkpoints)
    carry_out(job, RunFolder(tmp_path / "whole"))
    assert_same(folder.path, tmp_path / "whole")


def test_a_checkpoint_that_knows_only_how_many_rows_there_were_is_used(
    mnist: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As they were written at first."""
    job, folder = small_job(mnist, "adam"), RunFolder(tmp_path / "run")
    stop_twice(job, folder)
    path, buffer = folder.path / CHECKPOINT, io.BytesIO()
    saved = torch.load(io.BytesIO(path.read_bytes()[DIGEST:]))
    torch.save({"state": saved["state"], "sizes": saved["sizes"]}, buffer)
    path.write_bytes(hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue())
    (folder.path / BEFORE).unlink()
    updates: list[int] = []
    carry_out(job, folder, Watch(on_update=lambda training: updates.append(training.update)))
    assert updates[0] == 12 and capsys.readouterr().err == ""


def test_what_counts_on_a_file_reaches_the_disk_after_it(
    mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(Path(f"/proc/self/fd/{number}").readlink().name))
    job, folder = small_job(mnist, "adam"), RunFolder(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        carry_out(job, folder, stop_after(6))
    last = {name: position for position, name in enumerate(synced)}
    assert max(last["metrics.jsonl"], last["clock.jsonl"]) < last["checkpoint.pt.part"]
    carry_out(job, folder)
    last = {name: position for position, name in enumerate(synced)}
    assert max(last["metrics.jsonl"], last["clock.jsonl"], last["model.pt.part"]) < last["outcome.json.part"]


def test_a_finished_run_is_not_run_again(mnist: Path, tmp_path: Path) -> None:
    job, folder = small_job(mnist, "nesterov", updates=5), RunFolder(tmp_path / "run")
    first = carry_out(job, folder)
    before = {file: file.stat().st_mtime_ns for file in folder.path.glob("*.*")}
    assert carry_out(job, folder) == first
    assert before == {file: file.stat().st_mtime_ns for file in folder.path.glob("*.*")}
    assert len(folder.environments) == 1, "who made it, not who looked at it"


def test_a_folder_of_another_configuration_is_refused_and_left_alone(mnist: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    carry_out(small_job(mnist, "nesterov", updates=5), folder)
    before = {file.name: file.read_bytes() for file in folder.path.iterdir()}
    with pytest.raises(ForeignRecordError, match=r"configuration \(plan\.updates 5, now 6; seed 0, now 1\)"):
        carry_out(small_job(mnist, "nesterov", seed=1, updates=6), folder)
    assert before == {file.name: file.read_bytes() for file in folder.path.iterdir()}


def test_a_folder_of_something_else_is_refused_and_left_alone(mnist: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("...")
    with pytest.raises(ForeignRecordError, match="not the folder of a run"):
        carry_out(small_job(mnist, "nesterov"), RunFolder(tmp_path / "thesis"))
    (tmp_path / "file").write_text("...")
    with pytest.raises(ForeignRecordError, match="is not a folder"):
        carry_out(small_job(mnist, "nesterov"), RunFolder(tmp_path / "file"))
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["chapter.tex"]


def test_two_runs_in_one_folder_are_one_too_many(mnist: Path, tmp_path: Path) -> None:
    job, folder = small_job(mnist, "nesterov"), RunFolder(tmp_path / "run")
    with folder.opened(job.config()), pytest.raises(InUseError, match="another process is at work"):
        carry_out(job, RunFolder(folder.path))


def test_a_run_that_diverges_says_so_and_keeps_its_rows(mnist: Path, tmp_path: Path) -> None:
    job, folder = small_job(mnist, "nesterov"), RunFolder(tmp_path / "run")
    wild = type(job)(**{**vars(job), "settings": {"lr": 1e38, "eps": 0.1}})
    outcome = carry_out(wild, folder)
    assert outcome["failure"].startswith("diverged at update ")
    assert folder.outcome == outcome and folder.rows()[0]["update"] == 0


def test_the_folder_tells_configuration_environment_and_times(mnist: Path, tmp_path: Path) -> None:
    job, folder = small_job(mnist, "prong", updates=10), RunFolder(tmp_path / "a" / "run")
    outcome = carry_out(job, folder)
    assert folder.config == json.loads(json.dumps(job.config()))
    assert folder.config["settings"] == {"lr": 1e-4, "eps": 0.1} and folder.config["seed"] == 0
    assert folder.environments[0]["environment"]["torch"] == torch.__version__
    seconds = [row["seconds"] for row in folder.rows()]
    assert seconds == sorted(seconds) and seconds[-1] == outcome["seconds"] > 0
    assert "seconds" not in (folder.path / "metrics.jsonl").read_text()
    assert [found.path for found in run_folders(tmp_path)] == [folder.path]
