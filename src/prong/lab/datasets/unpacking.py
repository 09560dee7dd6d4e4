"""Unpacking an archive that somebody made: whole or not at all, and nothing outside the folder that it is."""

from __future__ import annotations

import lzma
import tarfile
import zlib
from pathlib import Path

from prong.lab.datasets.fetching import FetchError, aside, extract


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
                extract(tar, place)
                (place / name).rename(target)
    except (tarfile.ReadError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise FetchError(f"{archive} is not unpacked: it is no tar archive, or a damaged one.") from error
    except tarfile.TarError as error:
        raise FetchError(f"{archive} is not unpacked: {error}") from error
    except OSError as error:
        where, why = error.filename or folder, error.strerror or error
        raise FetchError(f"{archive} is not unpacked: {where}: {why}") from error
    return target


def _top(tar: tarfile.TarFile, archive: Path) -> str:
    """The name of the one folder that all is in."""
    paths = [(Path(member.name), member.isdir()) for member in tar.getmembers()]
    names = {path.parts[0] for path, _ in paths if path.parts}
    alone = any(len(path.parts) == 1 and not folder for path, folder in paths)
    if len(names) != 1 or alone or (name := names.pop()).startswith((".", "/")):
        raise FetchError(f"{archive} is not unpacked: it should hold one folder, with all files in it.")
    return name
