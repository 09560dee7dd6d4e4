"""`prong report`: a page, figures, a record and the documentation, from folders of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from prong.lab.documentation import write_changed
from prong.lab.page.html import render
from prong.lab.page.markdown import lacking, written
from prong.lab.page.printed import as_file
from prong.lab.page.runs import Experiment, gather, kept_in, lost
from prong.lab.page.sections import section
from prong.lab.record import ForeignRecordError, write_json, write_whole
from prong.lab.terminal import announce, make_console, writable

PAGE = "report.html"


def main(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUNS")],
    out: Path = Path("runs/report"),
    record: Path | None = None,
    markdown: Path | None = None,
) -> None:
    """Make a page of what runs came to, beside the paper's claims; it needs no network. Figures lie beside it.

    Args:
        runs: folders of runs, searched to their bottom, or records of runs.
        out: folder of report.html and of the figures, as PNG and SVG files.
        record: JSON file for all runs, which must be of one experiment; the same page is made from it. One
            that is there already is replaced if nothing in it is lost.
        markdown: page of the documentation, in which what stands between the markers of these experiments is replaced;
            the list of all claims too, if all experiments are here.
    """
    if not runs:
        raise SystemExit("name folders of runs, or records of them: prong report runs/autoencoder")
    try:
        kept = kept_in(record) if record is not None else None
        experiments = gather(runs)
    except ForeignRecordError as error:
        raise SystemExit(str(error)) from error
    if record is not None:
        _one(experiments, record, kept)
    sections = [section(experiment) for experiment in experiments]
    documentation = written(markdown, experiments, sections) if markdown is not None else {}
    page = render(experiments, sections)
    figures = {
        f"{part.name}-{figure.name}.{kind}": as_file([figure], kind)
        for part in sections
        for figure in part.figures
        for kind in ("png", "svg")
    }
    writable(out=out / PAGE, record=record, markdown=markdown)
    for name, content in {PAGE: page.encode(), **figures}.items():
        write_whole(out / name, content)
    if record is not None:
        write_json(record, experiments[0].record())
    console = make_console()
    write_changed(console, documentation)
    if markdown is not None and (missing := lacking(experiments)):
        console.print(f"The list of all claims stays as it was: no {', '.join(missing)} here.", highlight=False)
    announce(console, Record=record, Page=out / PAGE)


def _one(experiments: Sequence[Experiment], record: Path, kept: Experiment | None) -> None:
    """Leave with one line unless all runs are of one experiment, and all of the record there already among them."""
    names = [experiment.name for experiment in experiments]
    if len(names) != 1:
        told = ", ".join(names)
        raise SystemExit(f"--record takes runs of one experiment, and these are of {told}. Name fewer folders.")
    if kept is None:
        return
    if kept.name != names[0]:
        raise SystemExit(f"{record} is a record of {kept.name}, and these runs are of {names[0]}. Name another file.")
    if gone := lost(kept, experiments[0]):
        many = f"{gone} of its {len(kept.runs)} runs, which are not among these or came further there"
        raise SystemExit(f"{record} would lose {many}. Name it beside them to keep all, or move it away.")
