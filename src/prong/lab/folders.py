"""The folder of a run: its configuration, what was measured, and what it needs to go on.

config.json       what was run; two runs of the same configuration are the same run
environment.json  where and with which code, one entry per sitting
metrics.jsonl     a row per measurement; the same whether or not the run was interrupted
clock.jsonl       for each of these rows the seconds of training until then
keepsakes.json    what a task keeps of the model before its first update
checkpoint.pt     where to go on (and checkpoint-before.pt, should that be damaged), until the run has ended
model.pt          the parameters at the end
outcome.json      that it has ended, and how
lock              held by the process that is at work in it
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch

from prong.lab.record import (
    ForeignRecordError,
    InUseError,
    alone,
    differences,
    flush,
    provenance,
    read_named,
    strict_json,
    write_json,
    write_whole,
)

METRICS, CLOCK = "metrics.jsonl", "clock.jsonl"
CHECKPOINT, BEFORE = "checkpoint.pt", "checkpoint-before.pt"
DIGEST = hashlib.sha256().digest_size
OUTCOME = {"failure": str | None, "updates": int, "seconds": int | float}
Row = dict[str, float]


class RunFolder:
    """What a run has written, and the place for more."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def opened(self, config: Mapping[str, Any]) -> Iterator[None]:
        """The folder as one's own, for the run of this configuration.

        Raises:
            ForeignRecordError: the folder is of another configuration, not of a run at all, or damaged.
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
        """Refuse a folder of something else, or a damaged one, before anything is changed.

        Raises:
            ForeignRecordError: the folder is of another configuration, not of a run at all, or damaged.
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
            named = "; ".join(differences(found, wanted))
            raise ForeignRecordError(
                f"{self.path} is of another configuration ({named}). Move it away, or name another with --out."
            )
        outcome, *_ = self.outcome, self.environments, self.keepsakes  # each as it should be
        if outcome is not None:  # else its rows are looked at where it goes on
            self._check_ended(outcome)

    def _check_ended(self, outcome: Mapping[str, Any]) -> None:
        """Refuse a run that has ended but is not whole. Its parameters may be gone, as sweeps remove them."""
        rows = dict(zip((METRICS, CLOCK), self._measured(), strict=True))
        for name, found in rows.items():
            gap = _gap([row["update"] for row in found], outcome)
            if gap is not None:
                raise self._damaged(f"outcome.json says {outcome['updates']} updates, but {name} {gap}")
        if len(rows[METRICS]) != len(rows[CLOCK]):
            raise self._damaged(f"{METRICS} has {len(rows[METRICS])} rows, but {CLOCK} {len(rows[CLOCK])}")
        model = self.path / "model.pt"
        if model.exists() and not is_zipfile(model):  # as torch writes them; the end of one that was cut is missing
            raise self._damaged("model.pt is not a whole file")

    def _damaged(self, what: str) -> ForeignRecordError:
        ended = (self.path / "outcome.json").exists()
        cure = self._cure if ended else "Its command, given again, goes on from before that."
        return ForeignRecordError(f"{self.path} is damaged: {what}. {cure}")

    @property
    def _cure(self) -> str:
        return f"Move {self.path} away or delete it to make the run again."

    @property
    def config(self) -> dict[str, Any]:
        """What was run."""
        return read_named(self.path / "config.json", {}, self._cure)

    @property
    def environments(self) -> list[dict[str, Any]]:
        """Where it was run, sitting by sitting; nothing, of a run that is only beginning."""
        path = self.path / "environment.json"
        if not path.exists():
            return []
        cure = "Move this file away: only what it tells of the sittings so far is lost."
        sittings: list[dict[str, Any]] = read_named(path, {"sittings": list}, cure)["sittings"]
        if not all(isinstance(sitting, dict) for sitting in sittings):
            raise ForeignRecordError(f"{path} should hold values by name for each sitting. {cure}")
        return sittings

    @property
    def outcome(self) -> dict[str, Any] | None:
        """How the run ended; None if it has not."""
        path = self.path / "outcome.json"
        return read_named(path, OUTCOME, self._cure) if path.exists() else None

    @property
    def keepsakes(self) -> dict[str, Any]:
        """What the task kept."""
        path = self.path / "keepsakes.json"
        return read_named(path, {}, self._cure) if path.exists() else {}

    def keep(self, keepsakes: Mapping[str, Any]) -> None:
        """Write what the task keeps, if anything."""
        if keepsakes:
            write_json(self.path / "keepsakes.json", keepsakes)

    def rows(self) -> list[Row]:
        """What was measured, with its seconds: whole lines only, as a run that is killed may leave half of one.

        Raises:
            ForeignRecordError: a line is damaged.
        """
        return [{**row, "seconds": time["seconds"]} for row, time in zip(*self._measured(), strict=False)]

    def _measured(self) -> tuple[list[Row], list[Row]]:
        """The rows of either file; the one that is written last may have one less."""
        metrics, clock = self._lines(METRICS, "update"), self._lines(CLOCK, "update", "seconds")
        for number, (row, time) in enumerate(zip(metrics, clock, strict=False), start=1):
            if row["update"] != time["update"]:
                raise self._damaged(f"row {number} of {METRICS} and of {CLOCK} are not of the same update")
        return metrics, clock

    def _lines(self, name: str, *needed: str) -> list[Row]:
        whole, _, _ = self._content(name).rpartition(b"\n")
        rows = [_row(line, needed) for line in whole.splitlines()]
        if None in rows:
            raise self._damaged(
                f"{name} has rows that are not numbers by name, the first in line {rows.index(None) + 1}"
            )
        return [row for row in rows if row is not None]

    def add(self, row: Mapping[str, float], seconds: float) -> None:
        """Write a row, so that it outlives the process and, as a checkpoint may count on it, the machine."""
        for name, line in ((METRICS, row), (CLOCK, {"update": row["update"], "seconds": round(seconds, 4)})):
            with (self.path / name).open("a") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
                flush(file)

    def save(self, state: Mapping[str, Any]) -> None:
        """Write a checkpoint: all of it or nothing; the one before is kept."""
        rows = {name: self._content(name) for name in (METRICS, CLOCK)}
        sizes = {name: len(content) for name, content in rows.items()}
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in rows.items()}
        current = self.path / CHECKPOINT
        _write(current.with_name("checkpoint.pt.part"), {"state": state, "sizes": sizes, "digests": digests})
        if current.exists():
            current.replace(self.path / BEFORE)
        current.with_name("checkpoint.pt.part").replace(current)

    def restore(self) -> Mapping[str, Any] | None:
        """The state to go on from, with the rows that were measured after it taken back; None to begin anew.

        A checkpoint that is damaged, or of other rows than there are, is told on standard error and not used.
        """
        found = [path for path in (self.path / CHECKPOINT, self.path / BEFORE) if path.exists()]
        for path in found:
            saved = _read(path)
            trouble = "is damaged" if saved is None else self._misfit(saved)
            if saved is not None and trouble is None:
                self._cut(saved["sizes"])
                return saved["state"]  # type: ignore[no-any-return]
            print(f"{path} {trouble} and is not used", file=sys.stderr)
        if found:
            print(f"{self.path} has no checkpoint that can be used: its run begins anew", file=sys.stderr)
        self._cut({METRICS: 0, CLOCK: 0})
        return None

    def _misfit(self, saved: Mapping[str, Any]) -> str | None:
        """Why a checkpoint does not go with the rows that there are, if so; early ones know only how many they are."""
        for name, size in saved["sizes"].items():
            kept = self._content(name)[:size]
            if len(kept) < size:
                return "is of more rows than there are"
            if "digests" in saved and hashlib.sha256(kept).hexdigest() != saved["digests"][name]:
                return f"is of other rows than {name} has"
        return None

    def end(self, outcome: Mapping[str, Any], model: Mapping[str, Any]) -> None:
        """Write the parameters and that the run has ended, and remove what is not needed any more."""
        buffer = io.BytesIO()
        torch.save(model, buffer)
        write_whole(self.path / "model.pt", buffer.getvalue())
        write_json(self.path / "outcome.json", outcome)
        for name in (CHECKPOINT, BEFORE, "checkpoint.pt.part"):
            (self.path / name).unlink(missing_ok=True)

    def _content(self, name: str) -> bytes:
        path = self.path / name
        return path.read_bytes() if path.exists() else b""

    def _cut(self, sizes: Mapping[str, int]) -> None:
        for name, size in sizes.items():
            if len(self._content(name)) > size:
                os.truncate(self.path / name, size)


def run_folders(path: Path) -> list[RunFolder]:
    """All runs at or below a path, in the order of their names."""
    return [RunFolder(file.parent) for file in sorted(path.rglob("config.json"))]


def _row(line: bytes, needed: Sequence[str]) -> Row | None:
    """The numbers by name of a line, those needed among them; None if it is damaged."""
    try:
        row = strict_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not all(isinstance(value, int | float) for value in row.values()):
        return None
    return row if all(name in row for name in needed) else None


def _gap(updates: Sequence[float], outcome: Mapping[str, Any]) -> str | None:
    """What is wrong with the updates that were measured until a run ended, if anything.

    The first is before training, the last at its end, unless it diverged on the way there.
    """
    last, diverged = outcome["updates"], outcome["failure"] is not None
    if not updates:
        return None if diverged and last == 0 else "has no rows"
    if updates[0] != 0:
        return f"begins at update {updates[0]}"
    return None if updates[-1] == last or (diverged and updates[-1] < last) else f"ends at update {updates[-1]}"


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
    """What `_write` wrote; None if it is damaged."""
    content = path.read_bytes()
    digest, data = content[:DIGEST], content[DIGEST:]
    if hashlib.sha256(data).digest() != digest:
        return None
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
