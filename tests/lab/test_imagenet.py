"""`prong run imagenet`, and archives of photographs: the paper's settings, and what is in the way said in one line."""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from prong.lab.cli import main
from prong.lab.experiments import imagenet
from prong.lab.folders import RunFolder, run_folders
from prong.lab.sweeps.grids import Search, paper_space
from prong.lab.sweeps.sweepable import SWEEPABLE
from prong.lab.sweeps.sweeping import attempt
from tests.lab.pictures import make_album, spoil, tiny_net
from tests.lab.test_experiments import refused, wait_for
from tests.lab.test_jobs import assert_same

ROOT = Path(__file__).parents[2]
SMALL = ("--epochs", "2", "--batch", "6", "--size", "32", "--held-out", "2", "--evaluated", "9", "--readers", "0")


@pytest.fixture
def album(tmp_path: Path) -> Path:
    return make_album(tmp_path / "album")


@pytest.fixture
def small_net(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imagenet, "inception", tiny_net)


def test_the_papers_settings_are_those_without_options(album: Path) -> None:
    jobs = imagenet.jobs(imagenet.Options(data=album, batch=6, held_out=2))
    assert imagenet.Options().batch == 256
    assert [job.contestant.method.key for job in jobs] == ["nesterov", "rmsprop", "batchnorm", "prong", "prong+"]
    for job in jobs:
        assert job.settings["momentum"] == 0.9 and job.settings["weight_decay"] == 1e-4
        assert job.settings["lr"] in (1e-1, 1e-2, 1e-3)
        assert job.plan.anneal == "waterfall" and job.plan.patience == 0
        assert job.plan.updates == 30 * 3 and job.plan.evaluation_points() == list(range(0, 91, 3)), "once per epoch"
        assert (job.schedule.period, job.schedule.samples) == (1000, 100 * 6)
        assert job.config()["parameters"] == 10_160_032 + 1024 * 3 + 3 and job.task.size == 224
    assert len({json.dumps(job.config()) for job in pickle.loads(pickle.dumps(jobs))}) == len(jobs)


def test_methods_are_compared_on_photographs_in_folders(
    small_net: None, album: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(album / "train" / "n03" / "n03_02.JPEG", "empty")
    words = ("--data", str(album), "--out", str(tmp_path / "runs"), *SMALL, "--unreadable", "0.1")
    main(["run", "imagenet", "--methods", "batchnorm", "prong+", *words])
    shown = capsys.readouterr()
    folders = run_folders(tmp_path / "runs")
    assert [folder.path.name for folder in folders] == ["batchnorm-standard-seed0", "prong+-standard-seed0"]
    for folder in folders:
        assert [row["update"] for row in folder.rows()] == [0, 3, 6] and folder.outcome["failure"] is None
        assert {"train_error", "validation_top5_error", "test_cross_entropy"} <= folder.rows()[0].keys()
        assert "n03_02.JPEG" in (folder.path / "unreadable.txt").read_text()
    assert shown.err.count("unreadable: ") == 2, "once in each run"
    assert "18 for training, 6 for validation, 6 for test; 3 classes, 32 x 32 pixels" in shown.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data", "nowhere"), "--data nowhere is no folder"),
        (("--batch", "19"), "--batch is at most the 18 examples that are trained on, got 19"),
        (("--held-out", "8"), "too few to hold out 8"),
        (("--size", "31"), "--size is at least 32, got 31"),
        (("--readers", "-1"), "--readers is at least 0, got -1"),
        (("--unreadable", "1"), "--unreadable is a share, from 0 to less than 1, got 1"),
        (("--methods", "shampoo"), "shampoo cannot take part in this experiment"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(
    words: tuple[str, ...], message: str, album: Path, tmp_path: Path
) -> None:
    out = tmp_path / "runs"
    assert message in refused("run", "imagenet", "--data", str(album), *SMALL, "--out", str(out), *words)
    assert not out.exists()


def test_folders_without_photographs_are_said_in_one_line(tmp_path: Path) -> None:
    assert "prong data unpack FILE" in refused("run", "imagenet", "--data", str(tmp_path), "--out", str(tmp_path / "x"))


def test_too_many_unreadable_photographs_are_said_in_one_line(small_net: None, album: Path, tmp_path: Path) -> None:
    spoil(album / "train" / "n03" / "n03_02.JPEG", "truncated")
    said = refused(
        "run", "imagenet", "--methods", "nesterov", "--data", str(album), *SMALL, "--out", str(tmp_path / "r")
    )
    assert "1 of 30 photographs cannot be read, more than the 0 allowed" in said and "unreadable.txt names them" in said


def test_a_run_interrupted_while_others_read_for_it_goes_on_to_the_bit(album: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    words = ["run", "imagenet", "--methods", "nesterov", "--data", str(album), *SMALL, "--epochs", "6"]
    process = subprocess.Popen(
        [sys.executable, "-m", "prong.lab.cli", *words, "--out", str(tmp_path / "cut"), "--readers", "2"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    folder = RunFolder(tmp_path / "cut" / "nesterov-standard-seed0")
    wait_for(folder.path / "metrics.jsonl", '"update": 3,')
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the readers hear of it too
    said, trouble = process.communicate(timeout=200)
    assert (process.returncode, trouble) == (130, "") and "The same command goes on from here." in said
    assert folder.outcome is None
    for out in ("cut", "whole"):
        main([*words, "--out", str(tmp_path / out)])  # read by nobody else now
    assert_same(folder.path, tmp_path / "whole" / "nesterov-standard-seed0")


def test_the_papers_grid_is_swept_with_a_tenth_of_the_period(album: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_album(album, each=30)
    monkeypatch.setenv("PRONG_DATA", str(album))
    experiment = SWEEPABLE["imagenet"]()
    sizes = {method: Search(paper_space("imagenet", method), None, 0).size for method in experiment.methods}
    assert sizes == {"nesterov": 3, "rmsprop": 3, "batchnorm": 3, "prong": 48, "prong+": 48}
    job = experiment.job("prong+", {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "eps": 1.0, "period": 100}, 9, 0)
    assert (job.schedule.period, job.schedule.samples, job.plan.batch) == (100, 10 * 256, 256)
    assert job.settings["weight_decay"] == 1e-4 and job.task.watched == "validation_error"
    assert experiment.job("prong", {"period": 10, "samples": 7}, 9, 0).schedule.samples == 7


def test_a_sweep_does_not_take_unreadable_photographs_for_a_fault_of_its_settings(
    small_net: None, album: Path, tmp_path: Path
) -> None:
    spoil(album / "train" / "n03" / "n03_02.JPEG", "truncated")
    job = imagenet.jobs(imagenet.Options(data=album, batch=6, held_out=2, readers=0, size=32, epochs=1))[0]
    with pytest.raises(OSError, match="1 of 30 photographs cannot be read"):
        attempt(job, RunFolder(tmp_path / "run"), "rows")


# Archives


def archive(path: Path, *members: tuple[str, bytes] | tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                entry = tarfile.TarInfo(member[0])
                entry.size = len(member[1])
                tar.addfile(entry, io.BytesIO(member[1]))
    return path


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, target
    return entry


def test_an_archive_is_unpacked_below_the_folder_of_all_data(
    album: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        tar.add(album, "photos")
    main(["data", "unpack", str(tmp_path / "photos.tar"), "--data", str(tmp_path / "data")])
    assert capsys.readouterr().out == f"folder: {tmp_path / 'data' / 'photos'}\n"
    for path in album.rglob("*.JPEG"):
        assert (tmp_path / "data" / "photos" / path.relative_to(album)).read_bytes() == path.read_bytes()
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["photos"]
    again = refused("data", "unpack", str(tmp_path / "photos.tar"), "--data", str(tmp_path / "data"))
    assert "photos is there already" in again


TRAPS = {
    "outside": [("photos/a", b"a"), ("photos/../../evil", b"e")],
    "absolute": [("/evil", b"e")],
    "above": [("../evil", b"e")],
    "symbolic link": [("photos/a", b"a"), special("photos/evil", tarfile.SYMTYPE, "/etc/passwd")],
    "hard link": [("photos/a", b"a"), special("photos/evil", tarfile.LNKTYPE, "photos/a")],
    "device": [("photos/a", b"a"), special("photos/evil", tarfile.CHRTYPE)],
    "pipe": [("photos/a", b"a"), special("photos/evil", tarfile.FIFOTYPE)],
    "two folders": [("photos/a", b"a"), ("evil/a", b"a")],
    "a file": [("photos", b"a")],
    "hidden": [(".photos/a", b"a")],
    "nothing": [],
}


@pytest.mark.parametrize("trap", TRAPS)
def test_an_archive_with_a_trap_in_it_leaves_nothing(trap: str, tmp_path: Path) -> None:
    path = archive(tmp_path / "photos.tar", *TRAPS[trap])  # type: ignore[arg-type]
    data = tmp_path / "deep" / "data"
    assert "is not unpacked: " in refused("data", "unpack", str(path), "--data", str(data))
    assert [found.name for found in tmp_path.rglob("*") if found.is_file()] == ["photos.tar"]


@pytest.mark.parametrize("content", [b"", b"no archive", None])
def test_a_damaged_archive_leaves_nothing(content: bytes | None, tmp_path: Path) -> None:
    path = archive(tmp_path / "photos.tar", ("photos/a", bytes(20_000)))
    path.write_bytes(path.read_bytes()[:9000] if content is None else content)
    assert "is not unpacked: " in refused("data", "unpack", str(path), "--data", str(tmp_path / "data"))
    assert [found.name for found in tmp_path.rglob("*") if found.is_file()] == ["photos.tar"]
    assert "No such file" in refused("data", "unpack", str(tmp_path / "gone.tar"), "--data", str(tmp_path / "data"))
