"""Getting a data set: downloaded aside, checked, and only then put where it belongs."""

from __future__ import annotations

import logging
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pooch
import requests
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from prong.lab.datasets.published import File, Published
from prong.lab.datasets.shelf import find
from prong.lab.record import alone

PIECE = 1 << 16  # bytes written at once
PATIENCE = 30  # seconds without a byte until a mirror is given up


class FetchError(Exception):
    """A data set could not be had; the message says why, and what to do."""


def fetch(published: Published, folder: Path, console: Console, mirrors: Sequence[str] = ()) -> list[str]:
    """The names of the files that were downloaded, none if the data set was there already.

    Each is what its checksum says before it is unpacked or put in place; after an error there is nothing new in the
    folder but whole files.

    Args:
        published: the data set.
        folder: of all data.
        console: where to draw the progress.
        mirrors: used instead of the published ones, if there are any.

    Raises:
        FetchError: no mirror had a file, the disk is full, or another process is at it.
    """
    if find(published, folder).is_verified:
        return []
    target, downloads = folder / published.places[0], published.downloads
    if published.archive is None:
        downloads = tuple(file for file in published.files if not file.is_at(target / file.name))
    try:
        with aside(folder, published.places[0]) as place, _progress(console) as progress:
            for file in downloads:
                _download(file, mirrors or published.mirrors, place, progress)
                _place(_unpacked(published, place) if file is published.archive else place / file.name, target)
    except OSError as error:
        why = error.strerror or error
        raise FetchError(f"cannot write to {folder}: {why}. Make room, or name another folder with --data.") from error
    return [file.name for file in downloads]


@contextmanager
def aside(folder: Path, name: str) -> Iterator[Path]:
    """An empty folder on the same disk for what is not yet whole, gone in the end."""
    place = folder / f".{name}.part"
    refusal = FetchError(f"another process is at work on {folder / name}. Wait until it ends.")
    with alone(place / "lock", refusal):
        try:
            shutil.rmtree(place / "pieces", ignore_errors=True)  # of a fetch that was killed
            (place / "pieces").mkdir()
            yield place / "pieces"
        finally:
            shutil.rmtree(place)


def _download(file: File, mirrors: Sequence[str], into: Path, progress: Progress) -> None:
    """The file, from the first mirror that has it."""
    pooch.get_logger().setLevel(logging.WARNING)  # progress is drawn here
    troubles = []
    for mirror in mirrors:
        address = f"{mirror.rstrip('/')}/{file.name}"
        bar = _Bar(progress, file)
        downloader = pooch.HTTPDownloader(
            progressbar=bar,
            chunk_size=PIECE,
            timeout=PATIENCE,
            headers={"Accept-Encoding": "identity"},  # a .gz is wanted as it is
        )
        try:
            pooch.retrieve(address, f"sha256:{file.sha256}", file.name, into, downloader=downloader)
            (into / file.name).chmod(0o644)  # pooch makes it for its owner alone
        except (requests.RequestException, ValueError) as error:
            troubles.append(f"{address}: {_reason(error)}")
        else:
            return
        finally:
            bar.remove()
    raise FetchError(
        f"{file.name} could not be fetched. {'; '.join(troubles)}. "
        "Try again later, or name another server with --mirror."
    )


def _reason(error: Exception) -> str:
    """Why a mirror failed, in a few words."""
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"{error.response.status_code} {error.response.reason}"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "the connection broke off"
    if isinstance(error, requests.Timeout):
        return f"no answer in {PATIENCE} s"
    if isinstance(error, requests.ConnectionError):
        return "no connection"
    if isinstance(error, requests.RequestException):
        return f"not an address to fetch from ({type(error).__name__})"
    return "what came is not the published file, its sha256 differs"  # pooch's ValueError


def _unpacked(published: Published, aside: Path) -> Path:
    """The folder that was in the archive, beside it, with all its files.

    Raises:
        FetchError: it holds something else.
    """
    assert published.archive is not None
    name, folder = published.archive.name, published.places[0]
    try:
        with tarfile.open(aside / name) as archive:
            extract(archive, aside)
    except tarfile.TarError as error:
        raise FetchError(f"{name} is not unpacked: {error}") from error
    for file in published.files:
        if not file.is_at(aside / folder / file.name):
            raise FetchError(f"{name} does not hold {folder}/{file.name} as published.")
    return aside / folder


def extract(archive: tarfile.TarFile, folder: Path) -> None:
    """Write the files and folders of an archive below a folder that holds no links.

    `tarfile`'s own filters are not in Python before 3.11.4.

    Raises:
        tarfile.TarError: a member is neither, or would lie outside.
    """
    for member in archive:
        name = Path(member.name)
        content = archive.extractfile(member) if member.isreg() else None
        if content is None and not member.isdir():
            raise tarfile.TarError(f"{member.name!r} is neither a file nor a folder")
        if name.is_absolute() or ".." in name.parts:
            raise tarfile.TarError(f"{member.name!r} would lie outside")
        (folder / name if content is None else folder / name.parent).mkdir(parents=True, exist_ok=True)
        if content is not None:
            with (folder / name).open("wb") as file:
                shutil.copyfileobj(content, file)


def _place(new: Path, target: Path) -> None:
    """Put a file into the target folder, or a folder in place of it; files of other names in it stay."""
    if new.is_dir() and not target.exists():
        new.rename(target)
        return
    target.mkdir(parents=True, exist_ok=True)
    for file in new.iterdir() if new.is_dir() else [new]:
        file.replace(target / file.name)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)


class _Bar:
    """The progress of one file, as pooch wants to tell it."""

    total = 0  # pooch writes here what the server promises; what was published is known better

    def __init__(self, progress: Progress, file: File) -> None:
        self.progress, self.task = progress, progress.add_task(file.name, total=file.size)

    def update(self, count: int) -> None:
        self.progress.advance(self.task, count)

    def reset(self) -> None:
        self.progress.reset(self.task)

    def close(self) -> None:
        self.progress.stop_task(self.task)

    def remove(self) -> None:
        self.progress.remove_task(self.task)
