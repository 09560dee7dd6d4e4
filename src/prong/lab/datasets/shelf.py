"""The folder of all data, and what of a data set lies there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from prong.lab.datasets.published import File, Published

FOLDER_VARIABLE = "PRONG_DATA"
UNNAMED = Path("data")


def named_folder(folder: Path | None = None) -> Path | None:
    """The folder given, or else the one that the environment names, if it does."""
    named = os.environ.get(FOLDER_VARIABLE)
    return folder or (Path(named) if named else None)


def data_folder(folder: Path | None = None) -> Path:
    """The folder given, or else the one that the environment names, or else ./data."""
    return named_folder(folder) or UNNAMED


@dataclass(frozen=True)
class Copy:
    """What of a data set lies in a folder: the names of its files, by what is known of them.

    Attributes:
        folder: where.
        verified: the published files.
        unzipped: there without their .gz, for which no checksum was published.
        different: there, but not as published.
        missing: not there.
    """

    folder: Path
    verified: tuple[str, ...]
    unzipped: tuple[str, ...]
    different: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def is_verified(self) -> bool:
        """Whether all of it is here, as published."""
        return not (self.unzipped or self.different or self.missing)

    @property
    def state(self) -> str:
        """In words."""
        if self.different:
            return f"not as published: {_few(self.different)}"
        if self.missing:
            found = self.verified + self.unzipped
            return f"incomplete, without {_few(self.missing)}" if found else "not there"
        return "unzipped, not checked" if self.unzipped else "verified"


def _few(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} of its files"


def find(published: Published, folder: Path) -> Copy:
    """The fullest copy of a data set below a folder, every file compared with its checksum."""
    copies = [_copy(published, folder / place) for place in published.places]
    return min(copies, key=lambda copy: (len(copy.missing), len(copy.different)))


def _copy(published: Published, folder: Path) -> Copy:
    kinds: dict[str, list[str]] = {"verified": [], "unzipped": [], "different": [], "missing": []}
    for file in published.files:
        kinds[_kind(file, folder)].append(file.name)
    return Copy(folder, **{kind: tuple(names) for kind, names in kinds.items()})


def _kind(file: File, folder: Path) -> str:
    path = folder / file.name
    if path.is_file():
        return "verified" if file.is_at(path) else "different"
    return "unzipped" if path.suffix == ".gz" and path.with_suffix("").is_file() else "missing"
