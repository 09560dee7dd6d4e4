"""Runs to report on, from their folders or from records of them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from prong.lab.folders import METRICS, RunFolder, run_folders
from prong.lab.methods import RECORDED
from prong.lab.racing.clock import Pace
from prong.lab.record import ForeignRecordError, read_json

CONFIG: Mapping[str, type] = {  # what the page asks of a configuration
    **dict.fromkeys(("experiment", "part", "method", "label", "initialisation", "data"), str),
    **dict.fromkeys(("seed", "parameters"), int),
    **dict.fromkeys(("settings", "schedule", "plan"), dict),
}
RECORD = {"experiment", "clock", "runs"}  # all that ours hold
NAME = re.compile(r"\w[\w.+-]*")  # of experiments and measures, which name files
PAPER = ("conditioning", "sensitivity", "autoencoder", "cifar10", "imagenet")
ORDER = list(RECORDED)


@dataclass(frozen=True)
class Run:
    """One run, as far as it came.

    Attributes:
        config: what was run.
        environment: where and with which code, at its last sitting.
        rows: what was measured, with the seconds of training until then.
        outcome: how it ended; None if it has not.
        keepsakes: what the task kept of the model.
    """

    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    rows: Sequence[Mapping[str, float]]
    outcome: Mapping[str, Any] | None = None
    keepsakes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """The method's key."""
        return str(self.config["method"])

    @property
    def failure(self) -> str | None:
        """How it failed, if it did."""
        return self.outcome.get("failure") if self.outcome is not None else None

    @property
    def updates(self) -> int:
        """How many were made, or measured if it has not ended."""
        made = self.outcome.get("updates") if self.outcome is not None else None
        return int(made if made is not None else self.rows[-1]["update"] if self.rows else 0)

    @property
    def planned(self) -> int:
        """How many it was to make: its length, wherever it ended."""
        planned = flat(self.config).get("updates")
        return planned if isinstance(planned, int) else self.updates


@dataclass(frozen=True)
class Experiment:
    """All runs of one experiment, and what updates cost, by method, where that was measured apart."""

    name: str
    runs: Sequence[Run]
    clock: Mapping[str, Any] = field(default_factory=dict)

    def pace(self, run: Run) -> Pace | None:
        """The costs of a run's method, if they were measured apart, and as it was run."""
        found = self.clock.get(run.method)
        if not found or not found.get("ms_per_update"):
            return None
        config = {"bf16": False, **flat(run.config)}
        if any(config.get(name) != value for name, value in found.get("made_for", {}).items()):
            return None
        starts = found.get("initialisation_seconds") or [0.0]
        return Pace(list(found["ms_per_update"]), float(found.get("start_up_seconds", 0.0)), list(starts))

    def untimed(self) -> list[str]:
        """The labels of methods whose costs were not measured apart."""
        return list(dict.fromkeys(run.config["label"] for run in self.runs if self.pace(run) is None))

    def parts(self) -> dict[str, Experiment]:
        """Its parts by their names, in order; the name of an only one is often empty."""
        return {name: self.part(name) for name in dict.fromkeys(run.config["part"] for run in self.runs)}

    def part(self, name: str) -> Experiment:
        """The runs of one part of it."""
        return Experiment(self.name, [run for run in self.runs if run.config["part"] == name], self.clock)

    def record(self) -> dict[str, Any]:
        """All of it, as it is kept in a file."""
        clock = {"clock": dict(self.clock)} if self.clock else {}
        return {"experiment": self.name, **clock, "runs": [asdict(run) for run in self.runs]}


def gather(paths: Iterable[Path]) -> list[Experiment]:
    """The experiments in folders, searched to their bottom, and in records.

    Of two runs of one configuration the one that came further is taken.

    Raises:
        ForeignRecordError: a path that is neither, or holds no runs.
    """
    runs: dict[str, list[Run]] = {}
    clocks: dict[str, dict[str, Any]] = {}
    for path in paths:
        for experiment in [_recorded(path)] if path.is_file() else _in_folders(path):
            runs.setdefault(experiment.name, []).extend(experiment.runs)
            clocks.setdefault(experiment.name, {}).update(experiment.clock)
    bare = [name for name, found in runs.items() if not found]
    if bare:
        raise ForeignRecordError(f"of {' and '.join(bare)} there is only what updates cost. Name its runs, too.")
    return [Experiment(name, _sorted(_furthest(runs[name])), clocks[name]) for name in sorted(runs, key=_turn)]


def _turn(name: str) -> tuple[int, str]:
    """The paper's experiments in its order, then others."""
    return PAPER.index(name) if name in PAPER else len(PAPER), name


def kept_in(path: Path) -> Experiment | None:
    """What `prong report` has left in a file as a record; None if there is no file.

    Raises:
        ForeignRecordError: the file is something else, and nothing to write over.
    """
    if not path.is_file():
        return None
    content = _content(path)
    if not _is_record(content) or not content.keys() <= RECORD:  # `prong bench pace` has more to say
        raise ForeignRecordError(f"{path} is not a record that `prong report` made. Name another file with --record.")
    return _recorded(path)


def _in_folders(path: Path) -> list[Experiment]:
    if not path.is_dir():
        raise ForeignRecordError(f"{path} does not exist. Name folders of runs, or records of them.")
    _check_all_seen(path)
    folders = run_folders(path)
    if not folders:
        raise ForeignRecordError(f"{path} holds no runs: no config.json in it or below. Name another folder.")
    found = [_from_folder(folder) for folder in folders]
    return [Experiment(run.config["experiment"], [run]) for run in found]


def _check_all_seen(path: Path) -> None:
    """Refuse a folder with runs below it that a search for them passes over."""

    def refuse(error: OSError) -> None:
        if isinstance(error, FileNotFoundError):  # it was removed meanwhile
            return
        told = f"{error.filename} cannot be read: {error.strerror}. Make it readable, or name other folders."
        raise ForeignRecordError(told) from error

    for folder, _, files in os.walk(path, onerror=refuse):
        if METRICS in files and "config.json" not in files:
            raise ForeignRecordError(f"{folder} has {METRICS} but no config.json to say of which run. Move it away.")


def _from_folder(folder: RunFolder) -> Run:
    try:
        outcome = folder.outcome  # before its rows: a run may end meanwhile
        config, environments = folder.config, folder.environments
        rows, keepsakes = folder.rows(), folder.keepsakes
    except ForeignRecordError:  # which says what to do
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ForeignRecordError(f"{folder.path} is not the folder of a run: {why}. Move it away.") from error
    return _checked(str(folder.path), config, environments[-1] if environments else {}, rows, outcome, keepsakes)


def _recorded(path: Path) -> Experiment:
    content = _content(path)
    if not _is_record(content):
        raise ForeignRecordError(f"{path} is not a record of runs. `prong report FOLDER --record FILE` makes one.")
    name, runs = content["experiment"], []
    for number, run in enumerate(content["runs"], start=1):
        where = f"run {number} of {path}"
        parts = run if isinstance(run, dict) else {}
        runs.append(_checked(where, *map(parts.get, ("config", "environment", "rows", "outcome", "keepsakes"))))
        if runs[-1].config["experiment"] != name:
            raise ForeignRecordError(f"{where} is not of {name}. Make the record anew.")
    clock = _clock(path, content)
    if not runs and not clock:
        raise ForeignRecordError(f"{path} holds no runs. Name another file.")
    return Experiment(name, runs, clock)


def _content(path: Path) -> Any:
    try:
        return read_json(path)
    except OSError as error:
        raise ForeignRecordError(f"{path} cannot be read: {error.strerror}. Name another file.") from error


def _is_record(content: Any) -> bool:
    kinds = {"experiment": str, "runs": list}
    return isinstance(content, dict) and all(isinstance(content.get(name), kind) for name, kind in kinds.items())


def _clock(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """The costs in a record by method, each with the settings that it was measured for, as far as they bear on it.

    They are of single precision, as `prong bench pace` has no other.

    Raises:
        ForeignRecordError: what should be costs is something else.
    """
    costs, config = content.get("clock", {}), content.get("config", {})
    if not isinstance(costs, dict) or not isinstance(config, dict) or not all(map(_is_cost, costs.values())):
        raise ForeignRecordError(f"{path} has costs that are not numbers by method. Make it anew: `prong bench pace`.")
    clock = {}
    for key, entry in costs.items():
        refreshes = key in RECORDED and RECORDED[key].refreshes
        settings = ("batch", "period", "samples") if refreshes else ("batch",)
        made_for = {"bf16": False, **{name: config[name] for name in settings if name in config}}
        clock[key] = {"made_for": made_for, **entry}
    return clock


def _is_cost(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("made_for", {}), dict):
        return False
    lists = [entry.get(name, []) for name in ("ms_per_update", "initialisation_seconds")]
    numbers = [entry.get(name, 0.0) for name in ("start_up_seconds", "refresh_share", "statistics_share")]
    return all(isinstance(values, list) for values in lists) and all(
        isinstance(value, (int, float)) for value in (*numbers, *(value for values in lists for value in values))
    )


def _checked(where: str, config: Any, environment: Any, rows: Any, outcome: Any, keepsakes: Any) -> Run:
    """The run, if it has all that a page is made from."""
    if not isinstance(config, dict):
        raise ForeignRecordError(f"{where} has no configuration. Move it away, or name another.")
    wrong = [name for name, kind in CONFIG.items() if not isinstance(config.get(name), kind)]
    if wrong:
        lacking = f"its configuration lacks {', '.join(wrong)}"
        raise ForeignRecordError(f"{where} is of another version: {lacking}. Move it away, or name another.")
    if not isinstance(rows, list) or not all(_is_row(row) for row in rows):
        raise ForeignRecordError(f"{where} has rows that are not numbers by name. Move it away, or name another.")
    parts = {"environment": environment, "outcome": outcome, "keepsakes": keepsakes}
    odd = [name for name, part in parts.items() if not isinstance(part, (dict, NoneType))]
    if odd or (outcome is not None and not isinstance(outcome.get("updates"), int)):
        told = ", ".join(odd) or "outcome"
        raise ForeignRecordError(f"{where} has something else for its {told}. Move it away, or name another.")
    ragged = [name for name, kept in (keepsakes or {}).items() if isinstance(kept, list) and not _is_matrix(kept)]
    if ragged:
        told = f"{where} keeps something else than a table of numbers as {ragged[0]!r}"
        raise ForeignRecordError(f"{told}. Move it away, or name another.")
    for name in (config["experiment"], *dict.fromkeys(name for row in rows for name in row)):
        if NAME.fullmatch(name) is None:
            raise ForeignRecordError(f"{where} says {name!r}, which is no name for files. Move it away.")
    run = Run(config, environment or {}, rows, outcome, keepsakes or {})
    last = rows[-1]["update"] if rows else 0
    if outcome is not None and run.failure is None and last != run.updates:
        told = f"it has ended after {run.updates:,} updates, but its rows after {last:,}"
        raise ForeignRecordError(f"{where} is damaged: {told}. Move it away, or name another.")
    return run


def _is_row(row: Any) -> bool:
    return isinstance(row, dict) and "update" in row and all(isinstance(value, (int, float)) for value in row.values())


def _is_matrix(kept: Sequence[Any]) -> bool:
    if not all(isinstance(row, list) and row and len(row) == len(kept[0]) for row in kept):
        return False
    return all(isinstance(value, (int, float)) for row in kept for value in row)


def lost(kept: Experiment, experiment: Experiment) -> int:
    """How many runs would be gone, or not be as far, if a record was replaced by one of this experiment."""
    found = {_key(run): run for run in experiment.runs}
    return sum(_key(run) not in found or _reach(found[_key(run)]) < _reach(run) for run in kept.runs)


def _furthest(runs: Iterable[Run]) -> list[Run]:
    found: dict[str, Run] = {}
    for run in runs:
        known = found.setdefault(_key(run), run)
        if _reach(run) > _reach(known):
            found[_key(run)] = run
    return list(found.values())


def _key(run: Run) -> str:
    """The same for two runs of one configuration."""
    return json.dumps(run.config, sort_keys=True)


def _reach(run: Run) -> tuple[bool, int]:
    """How far a run came."""
    return run.outcome is not None, run.updates


def _sorted(runs: Iterable[Run]) -> list[Run]:
    def place(run: Run) -> tuple[Any, ...]:
        known = ORDER.index(run.method) if run.method in ORDER else len(ORDER)
        rest = [(key, _rank(value)) for key, value in sorted(flat(run.config).items()) if key != "seed"]
        return run.config["part"], known, run.method, rest, run.config["seed"]

    return sorted(runs, key=place)


def _rank(value: Any) -> tuple[float, str]:
    """Numbers by size, the rest by its text."""
    return (float(value), "") if isinstance(value, (int, float)) else (0.0, str(value))


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without its levels: `schedule.period` becomes `period`."""
    plain = {name: value for name, value in config.items() if not isinstance(value, dict)}
    return plain | {
        name: value for inner in config.values() if isinstance(inner, dict) for name, value in inner.items()
    }
