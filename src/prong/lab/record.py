"""What a recorded run says about where and with which code it was made."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from types import UnionType
from typing import IO, Any

import torch
from filelock import FileLock, Timeout

import prong
from prong.core.moments import has_bfloat16

PACKAGES = ("optuna", "pytorch_optimizer")  # on which searches and peers depend


def provenance() -> dict[str, Any]:
    """The code's version and commit, and the environment that ran it."""
    return {"prong": prong.__version__, "commit": _own_commit(), "environment": environment()}


@cache
def _own_commit() -> str | None:
    """That of the code in this process, however the files have changed since it was begun."""
    return commit(Path(__file__).parent)


def environment() -> dict[str, Any]:
    """Versions, what the processors can do, and threads."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "bfloat16": has_bfloat16(),
        "threads": torch.get_num_threads(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # of the lab, which is an extra
        return None


def commit(folder: Path) -> str | None:
    """The git commit checked out in a source folder, with "-dirty" if files differ from it; None outside of git."""
    if "site-packages" in folder.parts:  # installed: a repository around it would be somebody else's
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):  # no git, or no repository
        return None


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record whole, making its folder. NaN and infinity, which JSON does not have, are an error."""
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text.encode())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file: all of it or nothing, so that who is killed, or has no room, leaves the one before.

    Raises:
        OSError: it could not be written; the error names it.
    """
    unfinished = path.with_name(path.name + ".part")  # beside it: a rename within a file system is atomic
    try:
        with unfinished.open("wb") as file:
            file.write(data)
            flush(file)  # or after a crash of the machine there may be an empty file under the name
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def flush(file: IO[Any]) -> None:
    """Bring to the disk what was written, so that it outlives a crash of the machine."""
    file.flush()
    os.fsync(file.fileno())


def keep(path: Path | None, record: Mapping[str, Any], finished: bool = True) -> None:
    """Write a record, if somebody wants it; beside its file while it is not finished, so that a whole one stays."""
    if path is None:
        return
    so_far = path.with_name(f"{path.stem}.unfinished{path.suffix}")
    write_json(path if finished else so_far, record)
    if finished:
        so_far.unlink(missing_ok=True)


class ForeignRecordError(ValueError):
    """A file that is not the record to go on with."""


class InUseError(RuntimeError):
    """Another process is at work there."""


@contextmanager
def alone(lock: Path, refusal: Exception) -> Iterator[None]:
    """What a lock file stands for as one's own, its folder made; if another process has it, the refusal is raised."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        held = FileLock(lock, blocking=False).acquire()
    except Timeout as error:
        raise refusal from error
    with held:
        yield


def claimed(path: Path) -> AbstractContextManager[None]:
    """A record as one's own to go on with; InUseError is raised if another process has it."""
    refusal = f"another process is at work on {path}. Wait until it ends, or name another file with --json."
    return alone(path.with_name(path.name + ".lock"), InUseError(refusal))


def strict_json(text: str | bytes) -> Any:
    """What JSON says; a ValueError where it says NaN or infinity, which it does not have, or a name twice."""

    def refused(constant: str) -> Any:
        raise ValueError(f"{constant} is no number")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands twice in it")
        return found

    return json.loads(text, parse_constant=refused, object_pairs_hook=once)


def read_json(path: Path, cure: str = "Move it away, or name another file.") -> Any:
    """What a file holds.

    Raises:
        ForeignRecordError: it is not JSON; the cure is what to do then.
    """
    try:
        return strict_json(path.read_text())
    except ValueError as error:
        raise ForeignRecordError(f"{path} is not a record: {error}. {cure}") from error


def read_named(path: Path, kinds: Mapping[str, type | UnionType], cure: str) -> dict[str, Any]:
    """What a file holds: values by name, those of these names of these kinds.

    Raises:
        ForeignRecordError: it holds something else; the cure is what to do then.
    """
    content = read_json(path, cure)
    if not isinstance(content, dict):
        raise ForeignRecordError(f"{path} should hold values by name, got {json.dumps(content)[:40]}. {cure}")
    wrong = [name for name, kind in kinds.items() if name not in content or not isinstance(content[name], kind)]
    if wrong:
        named = ", ".join(wrong)
        raise ForeignRecordError(f"{path} should say {', '.join(kinds)}; missing, or of no use: {named}. {cure}")
    return content


def resume(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The record to go on with: the one at `path`, or a new one. Its `sessions` tell who worked on it, this one last.

    Raises:
        ForeignRecordError: the file is of another configuration, or no record at all.
    """
    wanted = json.loads(json.dumps(config))  # as it will be read back: tuples are lists
    record: Any = {"config": wanted, "sessions": []}
    if path.exists():
        record = read_json(path)
        _check_config(path, record, wanted)
    record["sessions"].append(provenance())
    return dict(record)


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What two configurations differ in, in words: `plan.batch 64, now 128`."""
    told = []
    for name in sorted({**found, **wanted}):
        was, now = found.get(name), wanted.get(name)
        if isinstance(was, dict) and isinstance(now, dict):
            told += [f"{name}.{inner}" for inner in differences(was, now)]
        elif was != now:
            brief = not any(isinstance(value, (dict, list)) for value in (was, now))
            told.append(f"{name} {was}, now {now}" if brief else name)
    return told


def _check_config(path: Path, record: Any, wanted: Mapping[str, Any]) -> None:
    found = record.get("config") if isinstance(record, dict) and "sessions" in record else None
    if found == wanted:
        return
    names = differences(found, wanted) if isinstance(found, dict) else []
    named = f" ({'; '.join(names)})" if names else ""
    raise ForeignRecordError(f"{path} is of another configuration{named}. Move it away, or name another file.")
