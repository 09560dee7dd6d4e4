"""Run folders with given numbers, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prong.lab.folders import RunFolder
from prong.lab.methods import RECORDED

Rows = Sequence[Mapping[str, float]]


def write_run(
    root: Path,
    method: str = "prong",
    rows: Rows = (),
    *,
    experiment: str = "autoencoder",
    seed: int = 0,
    failure: str | None = None,
    ended: bool = True,
    keepsakes: Mapping[str, Any] | None = None,
    **changes: Any,
) -> RunFolder:
    """A folder as a run leaves it; `changes` are of its configuration."""
    label = RECORDED[method].name if method in RECORDED else method
    config = {
        "experiment": experiment,
        "part": "",
        "method": method,
        "label": label,
        "initialisation": "standard",
        "seed": seed,
        "settings": {"lr": 0.1},
        "schedule": {"period": 1000, "samples": 12_800},
        "plan": plan(),
        "data": "MNIST",
        "parameters": 1000,
        **changes,
    }
    folder = RunFolder(root / f"{experiment}-{len(list(root.glob('*'))) if root.exists() else 0:03}")
    with folder.opened(config):
        folder.keep(keepsakes or {})
        for row in rows:
            folder.add(
                {key: value for key, value in row.items() if key != "seconds"}, row.get("seconds", row["update"])
            )
        if ended:
            folder.end({"failure": failure, "updates": rows[-1]["update"] if rows else 0, "seconds": 1.0}, {})
    return folder


def plan(updates: int = 10_000) -> dict[str, object]:
    """How long a run was to be, however few rows it has; by default long enough for every claim to be judged."""
    return {"updates": updates, "batch": 128, "anneal": "linear"}


def errors(values: Iterable[float], step: int = 10, pace: float = 1.0) -> Rows:
    """Rows of an autoencoder's run: an error every `step` updates, at `pace` seconds per update."""
    return [
        {"update": number * step, "train_squared_error": value, "seconds": number * step * pace}
        for number, value in enumerate(values)
    ]
