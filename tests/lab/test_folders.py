"""The folder of a run, damaged: one line says where and what to do, and nothing is changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prong.lab.cli import main
from prong.lab.folders import CLOCK, METRICS, RunFolder
from prong.lab.record import ForeignRecordError
from tests.lab.written_runs import errors, write_run

ROWS = errors([9, 5, 3])  # at updates 0, 10 and 20
DAMAGES = {
    "a line that is not JSON": (METRICS, b"garbage\n", "metrics.jsonl has rows that are not numbers by name"),
    "a row without names": (METRICS, b'{"update": 0}\n[1, 2]\n', "the first in line 2"),
    "a row of words": (METRICS, b'{"update": 0, "loss": "large"}\n', "not numbers by name, the first in line 1"),
    "a row of no update": (METRICS, b'{"loss": 1}\n', "not numbers by name, the first in line 1"),
    "bytes that are no text": (CLOCK, bytes(range(128, 256)) + b"\n", "clock.jsonl has rows that are not numbers"),
    "times without seconds": (CLOCK, b'{"update": 0}\n', "clock.jsonl has rows that are not numbers by name"),
    "times of other updates": (CLOCK, b'{"update": 5, "seconds": 1}\n', "row 1 of metrics.jsonl and of clock.jsonl"),
    "an empty outcome": ("outcome.json", b"{}", "missing, or of no use: failure, updates, seconds"),
    "half an outcome": ("outcome.json", b'{"failure": null}', "missing, or of no use: updates, seconds"),
    "an outcome in words": (
        "outcome.json",
        b'{"failure": null, "updates": "many", "seconds": 1}',
        "should say failure, updates, seconds; missing, or of no use: updates",
    ),
    "no configuration": ("config.json", b"", "config.json is not a record"),
    "a void configuration": ("config.json", b"null", "config.json should hold values by name, got null"),
    "a wordy configuration": ("config.json", b'"abc"', 'config.json should hold values by name, got "abc"'),
    "no sittings": ("environment.json", b"{}", "environment.json should say sittings"),
    "strange sittings": ("environment.json", b'{"sittings": [7]}', "values by name for each sitting"),
    "keepsakes without names": ("keepsakes.json", b"[1]", "keepsakes.json should hold values by name, got [1]"),
}


def read_all(folder: RunFolder) -> None:
    """What a page is made from."""
    for read in ("outcome", "config", "environments", "keepsakes"):
        getattr(folder, read)
    folder.rows()


def files(folder: RunFolder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.path.iterdir()}


def refused(folder: RunFolder, config: dict[str, Any]) -> str:
    """What is said of a folder in which the run of this configuration is to be made, or is found."""
    before = files(folder)
    with pytest.raises(ForeignRecordError) as caught, folder.opened(config):
        pass
    assert files(folder) == before
    return str(caught.value)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_said_in_one_line_with_one_cure(damage: str, tmp_path: Path) -> None:
    name, content, said = DAMAGES[damage]
    folder = write_run(tmp_path, rows=ROWS, keepsakes={"condition": 3.0})
    config = folder.config
    (folder.path / name).write_bytes(content)
    with pytest.raises(ForeignRecordError) as caught:
        read_all(folder)
    for message in (str(caught.value), refused(folder, config)):
        assert said in message and str(folder.path) in message and name in message
        assert message.count("Move ") == 1 and message.endswith(".") and ".." not in message and "\n" not in message


@pytest.mark.parametrize("damage", ["no sittings", "an empty outcome", "a void configuration"])
def test_a_damaged_file_of_a_run_that_has_not_ended_is_refused_too(damage: str, tmp_path: Path) -> None:
    name, content, said = DAMAGES[damage]
    folder = write_run(tmp_path, rows=ROWS, ended=False)
    config = folder.config
    (folder.path / name).write_bytes(content)
    assert said in refused(folder, config)


def test_without_the_file_of_its_sittings_a_run_goes_on_as_is_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path, rows=ROWS, ended=False)
    (folder.path / "environment.json").write_text("{}")
    assert refused(folder, folder.config).endswith(
        "Move this file away: only what it tells of the sittings so far is lost."
    )
    (folder.path / "environment.json").unlink()
    with folder.opened(folder.config):
        assert len(folder.environments) == 1 and len(folder.rows()) == 3


def test_damaged_rows_of_a_run_that_has_not_ended_are_no_reason_to_delete_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path, rows=ROWS, ended=False)
    (folder.path / METRICS).write_text("garbage\n")
    with pytest.raises(ForeignRecordError, match=r"line 1\. Its command, given again, goes on from before that\.$"):
        folder.rows()
    with folder.opened(folder.config):
        assert folder.restore() is None and folder.rows() == []


def cut(path: Path, lines: slice) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[lines]))


INCOMPLETE = {
    "no rows": (lambda path: (path / METRICS).unlink(), "20 updates, but metrics.jsonl has no rows"),
    "no times": (lambda path: (path / CLOCK).unlink(), "20 updates, but clock.jsonl has no rows"),
    "last row": (lambda path: cut(path / METRICS, slice(2)), "20 updates, but metrics.jsonl ends at update 10"),
    "last time": (lambda path: cut(path / CLOCK, slice(2)), "20 updates, but clock.jsonl ends at update 10"),
    "half a row": (
        lambda path: (path / METRICS).write_bytes((path / METRICS).read_bytes()[:-5]),
        "metrics.jsonl ends at update 10",
    ),
    "first rows": (
        lambda path: [cut(path / name, slice(1, None)) for name in (METRICS, CLOCK)],
        "metrics.jsonl begins at update 10",
    ),
    "half the model": (
        lambda path: (path / "model.pt").write_bytes((path / "model.pt").read_bytes()[:-100]),
        "model.pt is not a whole file",
    ),
}


@pytest.mark.parametrize("missing", INCOMPLETE)
def test_a_run_that_has_ended_is_refused_if_it_is_not_whole(missing: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path, rows=ROWS)
    damage, said = INCOMPLETE[missing]
    damage(folder.path)
    message = refused(folder, folder.config)
    assert message.startswith(f"{folder.path} is damaged: ") and said in message
    assert message.endswith(f". Move {folder.path} away or delete it to make the run again.")


@pytest.mark.parametrize("name", [METRICS, CLOCK])
def test_of_a_run_that_diverged_rows_and_times_are_as_many(name: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path, rows=ROWS, failure="diverged at update 20: the loss is nan")
    cut(folder.path / name, slice(2))
    assert " rows, but clock.jsonl " in refused(folder, folder.config)


def test_a_run_that_has_ended_needs_no_parameters_and_if_it_diverged_no_last_row(tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole", rows=ROWS)
    (whole.path / "model.pt").unlink()  # as sweeps do
    early = write_run(tmp_path / "early", failure="diverged at its initialisation: the loss is nan")
    late = write_run(tmp_path / "late", rows=ROWS, failure="diverged at update 27: the loss is nan")
    (late.path / "outcome.json").write_text(json.dumps({"failure": "diverged", "updates": 27, "seconds": 1.0}))
    for folder in (whole, early, late):
        with folder.opened(folder.config):
            assert folder.outcome is not None


@pytest.mark.usefixtures("small_autoencoder")
def test_the_command_refuses_what_is_not_whole_before_its_first_run(mnist: Path, tmp_path: Path) -> None:
    words = (
        "--updates",
        "4",
        "--batch",
        "16",
        "--evaluations",
        "2",
        "--evaluated",
        "20",
        "--out",
        str(tmp_path / "runs"),
    )
    main(["run", "autoencoder", "--methods", "nesterov", *words])
    (run,) = (tmp_path / "runs").iterdir()
    (run / METRICS).unlink()
    with pytest.raises(SystemExit) as left:
        main(["run", "autoencoder", "--methods", "adam", "nesterov", *words])
    assert str(left.value.code).startswith(f"{run} is damaged: outcome.json says 4 updates, but metrics.jsonl has no")
    assert list((tmp_path / "runs").iterdir()) == [run], "Adam, which comes first, was not begun"
