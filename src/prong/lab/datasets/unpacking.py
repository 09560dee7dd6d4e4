"""Unpacking an archive that somebody made: whole or not at all, and nothing outside the folder that it is."""

from __future__ import annotations

import tarfile
from pathlib import Path

from prong.lab.datasets.fetching import FetchError, aside, plain


def unpack(archive: Path, folder: Path) -> Path:
    """The folder that was in a tar archive, now below `folder`.

    It is unpacked aside first: after an error, or if the process is killed, it is not there.

    Raises:
        FetchError: the archive is none, is damaged, holds more than one folder of plain files, or that folder is there.
    """
    try:
        with tarfile.open(archive) as tar:
            name = _top(tar, archive)
            target = folder / name
            if target.exists():
                raise FetchError(f"{target} is there already. Take it away to unpack {archive} anew.")
            with aside(folder, name) as place:
                tar.extractall(place, filter=plain)
                (place / name).rename(target)
    except tarfile.TarError as error:
        raise FetchError(f"{archive} is not unpacked: {error}") from error
    except EOFError as error:
        raise FetchError(f"{archive} is not unpacked: it ends too early") from error
    except OSError as error:
        where, why = error.filename or folder, error.strerror or error
        raise FetchError(f"{archive} is not unpacked: {where}: {why}") from error
    return target


def _top(tar: tarfile.TarFile, archive: Path) -> str:
    """The name of the one folder that all is in."""
    names = {Path(member.name).parts[:1] for member in tar.getmembers()} - {()}
    if len(names) != 1 or (name := names.pop()[0]) in ("/", "..") or name.startswith("."):
        raise FetchError(f"{archive} is not unpacked: it should hold one folder, with all files in it.")
    return name
