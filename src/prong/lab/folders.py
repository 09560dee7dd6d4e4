"""The folder of a run: its configuration, what was measured, and what it needs to go on.

config.json       what was run; two runs of the same configuration are the same run
environment.json  where and with which code, one entry per sitting
metrics.jsonl     a row per measurement; the same whether or not the run was interrupted
clock.jsonl       for each of these rows the seconds of training until then
keepsakes.json    what a task keeps of the model before its first update
checkpoint.pt     where to go on (and checkpoint-before.pt, should that be damaged), until the run has ended
model.pt          the parameters at the end
outcome.json      that it has ended, and how
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from prong.lab.record import (
    ForeignRecordError,
    InUseError,
    alone,
    differences,
    flush,
    provenance,
    read_json,
    write_json,
    write_whole,
)

METRICS, CLOCK = "metrics.jsonl", "clock.jsonl"
CHECKPOINT, BEFORE = "checkpoint.pt", "checkpoint-before.pt"
DIGEST = hashlib.sha256().digest_size


class RunFolder:
    """What a run has written, and the place for more."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def opened(self, config: Mapping[str, Any]) -> Iterator[None]:
        """The folder as one's own, for the run of this configuration.

        Raises:
            ForeignRecordError: the folder is of another configuration, or not of a run at all.
            InUseError: another process is at work in it.
        """
        self.check(config)
        refusal = f"another process is at work in {self.path}. Wait until it ends, or name another folder with --out."
        with alone(self.path / "lock", InUseError(refusal)):
            self.check(config)  # it may have been begun a moment ago
            if self.outcome is None:  # who comes later has no part in it
                write_json(self.path / "config.json", config)
                write_json(self.path / "environment.json", {"sittings": [*self.environments, provenance()]})
            yield

    def check(self, config: Mapping[str, Any]) -> None:
        """Refuse a folder of something else, before anything is changed.

        Raises:
            ForeignRecordError: the folder is of another configuration, or not of a run at all.
        """
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise ForeignRecordError(f"{self.path} is not a folder. Move it away, or name another with --out.")
        if not (self.path / "config.json").exists():
            if any(file.name not in ("lock", "config.json.part") for file in self.path.iterdir()):
                raise ForeignRecordError(f"{self.path} is not the folder of a run. Name another with --out.")
            return
        found, wanted = self.config, json.loads(json.dumps(config))
        if found != wanted:
            named = ", ".join(differences(found, wanted))
            raise ForeignRecordError(
                f"{self.path} is of another configuration ({named}). Move it away, or name another with --out."
            )

    @property
    def config(self) -> dict[str, Any]:
        """What was run."""
        return dict(read_json(self.path / "config.json"))

    @property
    def environments(self) -> list[dict[str, Any]]:
        """Where it was run, sitting by sitting; nothing, of a run that is only beginning."""
        path = self.path / "environment.json"
        return list(read_json(path)["sittings"]) if path.exists() else []

    @property
    def outcome(self) -> dict[str, Any] | None:
        """How the run ended; None if it has not."""
        path = self.path / "outcome.json"
        return read_json(path) if path.exists() else None

    @property
    def keepsakes(self) -> dict[str, Any]:
        """What the task kept."""
        path = self.path / "keepsakes.json"
        return read_json(path) if path.exists() else {}

    def keep(self, keepsakes: Mapping[str, Any]) -> None:
        """Write what the task keeps, if anything."""
        if keepsakes:
            write_json(self.path / "keepsakes.json", keepsakes)

    def rows(self) -> list[dict[str, float]]:
        """What was measured, with its seconds: whole lines only, as a run that is killed may leave half of one."""
        metrics, clock = (_lines(self.path / name) for name in (METRICS, CLOCK))
        return [{**row, "seconds": time["seconds"]} for row, time in zip(metrics, clock, strict=False)]

    def add(self, row: Mapping[str, float], seconds: float) -> None:
        """Write a row, so that it outlives the process and, as a checkpoint may count on it, the machine."""
        for name, line in ((METRICS, row), (CLOCK, {"update": row["update"], "seconds": round(seconds, 4)})):
            with (self.path / name).open("a") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
                flush(file)

    def save(self, state: Mapping[str, Any]) -> None:
        """Write a checkpoint: all of it or nothing; the one before is kept."""
        sizes = {name: _size(self.path / name) for name in (METRICS, CLOCK)}
        current = self.path / CHECKPOINT
        _write(current.with_name("checkpoint.pt.part"), {"state": state, "sizes": sizes})
        if current.exists():
            current.replace(self.path / BEFORE)
        current.with_name("checkpoint.pt.part").replace(current)

    def restore(self) -> Mapping[str, Any] | None:
        """The state to go on from, with the rows that were measured after it taken back; None to begin anew."""
        for path in (self.path / CHECKPOINT, self.path / BEFORE):
            saved = _read(path)
            if saved is None:
                continue
            if any(_size(self.path / name) < size for name, size in saved["sizes"].items()):
                warnings.warn(f"{path} is of more rows than there are and is not used", stacklevel=2)
                continue
            self._cut(saved["sizes"])
            return saved["state"]  # type: ignore[no-any-return]
        self._cut({METRICS: 0, CLOCK: 0})
        return None

    def end(self, outcome: Mapping[str, Any], model: Mapping[str, Any]) -> None:
        """Write the parameters and that the run has ended, and remove what is not needed any more."""
        buffer = io.BytesIO()
        torch.save(model, buffer)
        write_whole(self.path / "model.pt", buffer.getvalue())
        write_json(self.path / "outcome.json", outcome)
        for name in (CHECKPOINT, BEFORE, "checkpoint.pt.part"):
            (self.path / name).unlink(missing_ok=True)

    def _cut(self, sizes: Mapping[str, int]) -> None:
        for name, size in sizes.items():
            if _size(self.path / name) > size:
                os.truncate(self.path / name, size)


def run_folders(path: Path) -> list[RunFolder]:
    """All runs at or below a path, in the order of their names."""
    return [RunFolder(file.parent) for file in sorted(path.rglob("config.json"))]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _lines(path: Path) -> list[dict[str, float]]:
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """A file that says whether it is whole: the digest of what follows comes first."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    data = buffer.getvalue()
    with path.open("wb") as file:
        file.write(hashlib.sha256(data).digest())
        file.write(data)
        flush(file)


def _read(path: Path) -> dict[str, Any] | None:
    """What `_write` wrote; None if there is no such file, or it is damaged, of which it warns."""
    if not path.exists():
        return None
    content = path.read_bytes()
    digest, data = content[:DIGEST], content[DIGEST:]
    if hashlib.sha256(data).digest() != digest:
        warnings.warn(f"{path} is damaged and is not used", stacklevel=3)
        return None
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
