"""Rows for TensorBoard, which is optional."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from prong.lab.folders import RunFolder


class Events:
    """Writes the rows of a run as TensorBoard's events into its folder: all of them, or from where others end."""

    def __init__(self, run: RunFolder) -> None:
        self.run, self.folder = run, run.path / "tensorboard"
        self._writer: Any = None

    @staticmethod
    def require() -> None:
        """Leave with one line if TensorBoard is not installed."""
        if find_spec("tensorboard") is None:
            raise SystemExit("--tensorboard needs the tensorboard package: pip install tensorboard")

    def add(self, row: Mapping[str, float], seconds: float) -> None:
        """Write a row, which the run has already; the first with those before it, if none are written yet."""
        if self._writer is None and not self.folder.exists():
            self.complete()
        else:
            self._write({**row, "seconds": seconds})

    def complete(self) -> None:
        """Write all rows, unless there are events: of a run that had ended, or went on, before anybody wanted them."""
        if not self.folder.exists():
            for row in self.run.rows():
                self._write(row)

    def _write(self, row: Mapping[str, float]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        update = int(row["update"])
        if self._writer is None:  # later events than the first of these are void
            self._writer = SummaryWriter(str(self.folder), purge_step=update)
        for name, value in row.items():
            if name != "update":
                self._writer.add_scalar(name, value, update)

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()
