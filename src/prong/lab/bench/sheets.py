"""Tables, once for the terminal and once for the documentation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from prong.lab.record import write_whole
from prong.lab.terminal import announce

NONE = "-"


@dataclass(frozen=True)
class Sheet:
    """A table as text: the first `words` columns hold words, as a rule the row's name alone, the others numbers."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    words: int = 1


def as_rich(sheet: Sheet) -> Table:
    """For the terminal."""
    table = Table(title=sheet.title, caption=sheet.note or None, caption_justify="left")
    for number, heading in enumerate(sheet.headings):
        table.add_column(heading, justify="right" if number >= sheet.words else "left", no_wrap=number == 0)
    for row in sheet.rows:
        table.add_row(*row)
    return table


def present(
    console: Console,
    sheets: Iterable[Sheet],
    json: Path | None,
    plot: Path | None = None,
    picture: Callable[[], bytes] | None = None,
) -> None:
    """Print the tables, write the picture if one is wanted, and tell where the files are."""
    for sheet in sheets:
        console.print(as_rich(sheet))
    if plot is not None and picture is not None:
        write_whole(plot, picture())
    announce(console, Record=json, Plot=plot)


def as_markdown(sheet: Sheet) -> str:
    """For the documentation."""
    rule = [*["---"] * sheet.words, *["---:"] * (len(sheet.headings) - sheet.words)]
    texts = [[plain(cell) for cell in row] for row in (sheet.headings, *sheet.rows)]
    lines = ["| " + " | ".join(cells) + " |" for cells in (texts[0], rule, *texts[1:])]
    note = f"\n\n{plain(sheet.note)}" if sheet.note else ""
    return f"**{plain(sheet.title)}**\n\n" + "\n".join(lines) + note


def plain(text: str) -> str:
    """Text as it is: a bar would end a cell, a bracket begin an element, a line break end the table."""
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;")


def number(value: float) -> str:
    """Three digits that count, without powers of ten."""
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(0, digits)}f}"


def power(value: float | None) -> str:
    """An exponent."""
    return NONE if value is None else f"{value:.2f}"


def percent(part: float, whole: float) -> str:
    """A share."""
    return f"{100 * part / whole:.1f} %"


def origin(record: dict[str, Any]) -> str:
    """Where and with which code a record was made."""
    environment = record["environment"]
    threads = f"{environment['threads']} thread{'s' if environment['threads'] != 1 else ''}"
    commit = record["commit"] or "none"
    return f"torch {environment['torch']}, {threads}, {environment['platform']}; commit {commit}"
