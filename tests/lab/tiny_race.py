"""A race that takes seconds, also as a command: `python -m tests.lab.tiny_race RECORD FOLDER WORKERS`."""

from __future__ import annotations

import sys
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from prong.lab.contestants import Problem
from prong.lab.methods import Schedule
from prong.lab.racing.race import run_race
from prong.lab.racing.rules import Rules
from tests.lab.tiny import tiny_autoencoder

RULES = Rules(
    methods=("PRONG", "SGD", "Adam"),
    initialisations=("standard", "whitened"),
    thresholds=(69.0, 66.5),
    trials=4,
    seeds=(2, 3),
    cap=0.1,
    target=67.0,
    every=5,
    repetitions=1,
    batch=32,
    warm_up=5,
)


def run(path: Path, folder: Path, workers: int = 1, rules: Rules = RULES) -> dict[str, Any]:
    problem = Problem(tiny_autoencoder, folder, Schedule(period=40, samples=256))
    return run_race(rules, problem, path, workers, Console(file=StringIO()))


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
