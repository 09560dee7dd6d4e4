"""`prong bench report`: the tables and pictures of docs/performance.md, made from the records in results/."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prong.lab.bench import centring, compiled, profile, refresh, scaling, spaces, standings, step_cost, watching
from prong.lab.bench.sheets import Sheet, as_markdown, origin
from prong.lab.documentation import read_page, replace_section, write_changed
from prong.lab.terminal import make_console

PAGE = "performance.md"
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Section:
    """A part of the page, between `<!-- begin NAME -->` and `<!-- end NAME -->`, from results/NAME.json.

    Attributes:
        name: of the record and the part.
        sheets: the tables of a record.
        picture: the PNG file of a record, if there is one.
        command: what makes the record.
        bench: the benchmark, where it has another name.
    """

    name: str
    sheets: Callable[[Record], Sequence[Sheet]]
    picture: Callable[[Record], bytes] | None
    command: str
    bench: str = ""

    @property
    def benchmark(self) -> str:
        """The benchmark that makes the record."""
        return self.bench or self.name


SECTIONS = (
    Section("step-cost", step_cost.sheets, None, "prong bench step-cost --json results/step-cost.json"),
    Section(
        "bfloat16",
        step_cost.sheets,
        None,
        'prong bench step-cost --tasks autoencoder --methods PRONG "PRONG, cutoff" "PRONG, explicit" "batch norm" Adam '
        '"PRONG, bfloat16" "PRONG, cutoff, bfloat16" --repetitions 11 --json results/bfloat16.json',
        bench=step_cost.NAME,
    ),
    Section("profile", profile.sheets, None, "prong bench profile --json results/profile.json"),
    Section(
        "refresh", refresh.sheets, refresh.picture, "prong bench refresh --samples 12800 --json results/refresh.json"
    ),
    Section(
        "refresh-samples",
        refresh.sheets,
        None,
        "prong bench refresh --max-width 1024 --samples 128 1280 12800 --json results/refresh-samples.json",
        bench="refresh",
    ),
    Section(
        "scaling", scaling.sheets, scaling.picture, "prong bench scaling --repetitions 3 --json results/scaling.json"
    ),
    Section("spaces", spaces.sheets, None, "prong bench spaces --json results/spaces.json"),
    Section("centring", centring.sheets, None, "prong bench centring --json results/centring.json"),
    Section("compiled", compiled.sheets, None, "prong bench compiled --json results/compiled.json"),
    Section("watching", watching.sheets, None, "prong bench watching --json results/watching.json"),
    Section(
        "race",
        standings.sheets,
        standings.picture,
        "prong bench race --workers 2 --cap 80 --trials 8 --every 50 --repetitions 3 --json results/race.json",
    ),
    Section(
        "race-again",
        standings.sheets,
        standings.picture,
        'prong bench race --methods PRONG+ "PRONG and batch norm" "batch norm" Muon --workers 2 --cap 80 --trials 8 '
        "--every 50 --repetitions 3 --json results/race-again.json",
        bench="race",
    ),
)


def main(results: Path = Path("results"), docs: Path = Path("docs")) -> None:
    """Write the tables and pictures of docs/performance.md anew, from the records in results/.

    What stands between the markers of a section is replaced; the rest of the page is left as it is. Without new
    records nothing changes.

    Args:
        results: folder of step-cost.json, refresh.json, scaling.json; those that are missing are named on the page.
        docs: folder of performance.md and its pictures.
    """
    if not results.is_dir():
        raise SystemExit(f"--results {results} is no folder")
    page = docs / PAGE
    text = read_page(page)
    pictures: dict[Path, bytes] = {}
    for section in SECTIONS:
        record, problem = load(results / f"{section.name}.json", section.benchmark)
        picture = docs / f"{section.name}.png" if record is not None and section.picture is not None else None
        if record is not None and section.picture is not None and picture is not None:
            pictures[picture] = section.picture(record)
        text = replace_section(text, section.name, render(section, record, problem, picture), PAGE)
    write_changed(make_console(), {page: text.encode(), **pictures})


def load(path: Path, name: str) -> tuple[Record | None, str]:
    """The record of a benchmark; or None, and why.

    A record that an older version made is none: its numbers mean something else.
    """
    if not path.exists():
        return None, "Not measured yet."
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise SystemExit(f"{path} is not a record: {error}") from error
    if not isinstance(record, dict) or record.get("bench") != name:
        return None, f"{path.name} is of another version and is not shown."
    if "sessions" in record:  # of several sittings, the last
        record = {**record["sessions"][-1], **record}
    return record, ""


def render(section: Section, record: Record | None, problem: str, picture: Path | None) -> str:
    """The text of a section."""
    made_by = f"Made by `{section.command}`"
    if record is None:
        return f"{problem} {made_by}."
    try:
        tables = [as_markdown(sheet) for sheet in section.sheets(record)]
    except (KeyError, IndexError, TypeError) as error:
        raise SystemExit(
            f"the record of {section.name} is of another version: this one cannot make tables of it ({error!r}). "
            f"Make it anew with `{section.command}`."
        ) from error
    image = [f"![{section.name}]({picture.name})"] if picture is not None else []
    return "\n\n".join([*tables, *image, f"{made_by}: {origin(dict(record))}."])
