"""Records say what ran, where and with which code."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import optuna
import pytest
import torch

import prong
from prong.lab.record import commit, environment, keep, provenance, resume, write_json


def repository(folder: Path) -> None:
    (folder / "file").write_text("one")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "file"], [*identity, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-C", str(folder), *command], check=True)


def test_the_commit_is_that_of_the_folder_and_tells_of_changes(tmp_path: Path) -> None:
    repository(tmp_path)
    clean = commit(tmp_path)
    assert clean is not None and len(clean) == 40
    (tmp_path / "file").write_text("two")
    assert commit(tmp_path) == f"{clean}-dirty"


def test_outside_of_a_repository_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit(tmp_path) is None


def test_installed_code_is_not_part_of_the_repository_around_it(tmp_path: Path) -> None:
    repository(tmp_path)
    (tmp_path / "site-packages").mkdir()
    assert commit(tmp_path / "site-packages") is None


def test_without_git_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit(tmp_path) is None


def test_a_record_has_versions_and_threads_and_can_be_read_back(tmp_path: Path) -> None:
    write_json(tmp_path / "new" / "record.json", provenance())
    record = json.loads((tmp_path / "new" / "record.json").read_text())
    assert record["prong"] == prong.__version__
    assert record["environment"] == environment()
    assert record["environment"]["threads"] == torch.get_num_threads()
    assert record["environment"]["optuna"] == optuna.__version__
    assert record["environment"]["bfloat16"] in (True, False) and record["environment"]["capability"]


def test_a_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prong.lab.record.PACKAGES", ("no-such-package",))
    assert environment()["no-such-package"] is None


def test_numbers_that_json_does_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        write_json(tmp_path / "record.json", {"error": float("nan")})
    assert not (tmp_path / "record.json").exists()


def test_a_record_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    write_json(file, {"error": 1.0})
    with pytest.raises(ValueError):
        write_json(file, {"error": float("inf")})
    assert json.loads(file.read_text()) == {"error": 1.0}
    assert list(tmp_path.iterdir()) == [file]


def test_a_record_is_continued_with_the_same_configuration_and_knows_its_sessions(tmp_path: Path) -> None:
    file, config = tmp_path / "record.json", {"trials": 3, "seeds": (1, 2)}
    record = resume(file, config) | {"trials": [0.1 + 0.2]}
    write_json(file, record)
    again = resume(file, config)
    assert again["trials"] == [0.1 + 0.2] and again["config"] == {"trials": 3, "seeds": [1, 2]}
    assert again["sessions"] == [provenance(), provenance()]


def test_a_record_of_another_configuration_is_refused_with_the_difference(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    write_json(file, resume(file, {"trials": 3, "cap": 60, "plan": {"batch": 8, "rates": [1]}}))
    told = r"\(plan\.batch 8, now 9; plan\.rates; trials 3, now 4\)"
    with pytest.raises(ValueError, match=rf"record\.json is of another configuration {told}\. Move it away"):
        resume(file, {"trials": 4, "cap": 60, "plan": {"batch": 9, "rates": [2]}})


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"config": {"trials": 3}}', '{"config": 7, "sessions": []}'])
def test_a_file_that_is_no_such_record_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    file = tmp_path / "record.json"
    file.write_text(content)
    with pytest.raises(ValueError, match="Move it away"):
        resume(file, {"trials": 3})
    assert file.read_text() == content


def test_a_record_under_way_leaves_the_whole_one_before_it(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    keep(path, {"points": [1, 2]})
    keep(path, {"points": [3]}, finished=False)
    assert json.loads(path.read_text()) == {"points": [1, 2]}
    assert json.loads((tmp_path / "record.unfinished.json").read_text()) == {"points": [3]}
    keep(path, {"points": [3, 4]})
    assert json.loads(path.read_text()) == {"points": [3, 4]} and list(tmp_path.iterdir()) == [path]
    keep(None, {})
