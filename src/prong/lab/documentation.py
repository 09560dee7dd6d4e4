"""Pages of the documentation whose sections are made from records; what is around them is written by hand."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from prong.lab.record import write_whole


def replace_section(text: str, name: str, content: str, page: str) -> str:
    """The text of a page with what stands between a section's markers replaced."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise SystemExit(f"{page} needs the lines {begin} and {end}, once and in this order")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{content}\n{end}{rest.split(end)[1]}"


def read_page(page: Path) -> str:
    """The text of a page; leaves with one line if there is none."""
    try:
        return page.read_text()
    except OSError as error:
        raise SystemExit(f"{page} cannot be read: {error.strerror}") from error


def write_changed(console: Console, files: dict[Path, bytes]) -> None:
    """Write the files that are not yet as they should be, and tell of all."""
    for path, content in files.items():
        changed = not path.exists() or path.read_bytes() != content
        if changed:
            write_whole(path, content)
        console.print(f"{'written' if changed else 'unchanged'}: {path}", highlight=False, soft_wrap=True)
