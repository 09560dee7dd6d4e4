"""What a recorded run says about where and with which code it was made."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import prong


def provenance() -> dict[str, Any]:
    """The code's version and commit, and the environment that ran it."""
    return {"prong": prong.__version__, "commit": commit(Path(__file__).parent), "environment": environment()}


def environment() -> dict[str, Any]:
    """Versions, processors and threads."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def commit(folder: Path) -> str | None:
    """The git commit checked out in a source folder, with "-dirty" if files differ from it; None outside of git."""
    if "site-packages" in folder.parts:  # installed: a repository around it would be somebody else's
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):  # no git, or no repository
        return None


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a record, making its folder; NaN and infinity, which JSON does not have, are an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
