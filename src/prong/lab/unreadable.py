"""Photographs that cannot be read: each is told once, and too many end a run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

FILE = "unreadable.txt"
ERRORS = "surrogateescape"  # a file's name is any bytes


class TooManyUnreadableError(OSError):
    """So many photographs cannot be read that a run makes no sense."""


class Unreadable:
    """Those that were met, of `total`; in a file too, if one is given, so that a run that goes on tells nothing twice.

    Attributes:
        allowed: how many there may be.
        quiet: another worker tells.
        met: in this sitting, with reasons: those of the file may have been mended since.
    """

    def __init__(self, total: int, share: float, file: Path | None = None, quiet: bool = False) -> None:
        self.total, self.allowed, self.file, self.quiet = total, int(total * share), file, quiet
        lines = file.read_text(errors=ERRORS).splitlines() if file is not None and file.exists() else []
        self._told = {line.partition("\t")[0] for line in lines}
        self.met: dict[str, str] = {}

    def add(self, found: Mapping[str, str]) -> None:
        """Tell of files that were met, each with the reason, unless that was done before.

        Raises:
            TooManyUnreadableError: there are more than allowed.
        """
        for path, reason in found.items():
            self.met[path] = reason
            if path not in self._told and not self.quiet:
                self._told.add(path)
                print(f"unreadable: {path}: {reason}", file=sys.stderr)
                if self.file is not None:
                    with self.file.open("a", errors=ERRORS) as file:
                        file.write(f"{path}\t{reason}\n")
        if len(self.met) > self.allowed:
            where = "" if self.file is None else f"; {self.file} names them"
            raise TooManyUnreadableError(
                f"{len(self.met)} of {self.total} photographs cannot be read, more than the {self.allowed} allowed"
                f"{where}. Mend them and the same command goes on, or allow a larger share with --unreadable."
            )
