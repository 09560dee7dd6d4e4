"""How commands speak: a console, a bar while they work, and one line when they are asked the impossible."""

from __future__ import annotations

import errno
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space, no more of one's share, a limit on files


def make_console(quiet: bool = False) -> Console:
    """Standard output, wide enough for tables where it is no terminal; or nothing at all."""
    console = Console(quiet=quiet)
    return console if console.is_terminal else Console(width=160, quiet=quiet)


def plain_warnings() -> None:
    """From now on warnings are sentences, without the place in the code that nobody who runs a command asked for."""
    warnings.formatwarning = lambda message, *where: f"{message}\n"


@contextmanager
def progress(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    """A function to call at each of `total` steps, which moves a bar if there is a terminal to draw it on."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    clocks = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *clocks, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def announce(console: Console, **files: Path | None) -> None:
    """Tell where files were written, those that were."""
    for what, path in files.items():
        if path is not None:
            console.print(f"{what}: {path}", highlight=False, soft_wrap=True)


def trouble_with(error: OSError, place: Path) -> str:
    """One line of what could not be read or written, below that place if the error does not say, and what to do."""
    if error.errno is None:  # our own, which says it all
        return str(error)
    cure = "Make room, and the same command goes on" if error.errno in NO_ROOM else "Mend that, or name another --out"
    return f"{error.filename or place} cannot be read or written: {error.strerror}. {cure}."


def at_least(least: int, **options: float | Iterable[int]) -> None:
    """Leave with one line if an option, or one of its values, is smaller."""
    for name, given in options.items():
        for value in [given] if isinstance(given, int | float) else given:
            if not value >= least:  # nor is NaN
                raise SystemExit(f"--{name.replace('_', '-')} is at least {least}, got {value}")


def positive(**options: float) -> None:
    """Leave with one line if an option is not a positive finite number."""
    for name, value in options.items():
        if not (value > 0 and math.isfinite(value)):
            raise SystemExit(f"--{name} is positive and finite, got {value}")


def known(option: str, given: Iterable[str], names: Iterable[str]) -> None:
    """Leave with one line if an option names something unknown."""
    names = list(names)
    for name in given:
        if name not in names:
            raise SystemExit(f"--{option} knows no {name!r}. Choose from: {'; '.join(names)}")


def each_once(**options: Sequence[object]) -> None:
    """Leave with one line if an option has no values, or one of them twice."""
    for name, given in options.items():
        if not given or len(set(given)) < len(given):
            raise SystemExit(f"--{name} are one or more, each once; got {', '.join(map(str, given)) or 'none'}")


def writable(**options: Path | None) -> None:
    """Leave with one line if a file could not be written, rather than after hours of work."""
    for name, path in options.items():
        if path is None:
            continue
        if path.is_dir():
            raise SystemExit(f"--{name} {path} cannot be written: it is a folder")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=path.parent):  # who may write there by the rules may still not be able to
                pass
        except OSError as error:
            raise SystemExit(f"--{name} {path} cannot be written: {error.strerror}") from error
