"""Rows for TensorBoard, which is optional."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class Events:
    """Writes rows as TensorBoard's events into a folder, from the first of them on: later ones there are void."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: Any = None

    @staticmethod
    def require() -> None:
        """Leave with one line if TensorBoard is not installed."""
        if find_spec("tensorboard") is None:
            raise SystemExit("--tensorboard needs the tensorboard package: pip install tensorboard")

    def add(self, row: Mapping[str, float], seconds: float) -> None:
        """Write a row."""
        from torch.utils.tensorboard import SummaryWriter

        update = int(row["update"])
        if self._writer is None:
            self._writer = SummaryWriter(str(self.folder), purge_step=update)
        for name, value in {**row, "seconds": seconds}.items():
            if name != "update":
                self._writer.add_scalar(name, value, update)

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()
