"""Sections of the documentation's page of results, made from runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prong.lab.bench.sheets import as_markdown, plain
from prong.lab.documentation import read_page, replace_section
from prong.lab.page.claims import CLAIMS, glance
from prong.lab.page.printed import as_file
from prong.lab.page.runs import Experiment
from prong.lab.page.sections import Section


def written(page: Path, experiments: Sequence[Experiment], sections: Sequence[Section]) -> dict[Path, bytes]:
    """What the page and the pictures beside it should hold.

    Sections of other experiments stay as they are; so does the list of all claims, unless all experiments are here.
    """
    text, files = read_page(page), dict[Path, bytes]()
    if not lacking(experiments):
        text = replace_section(text, "claims", as_markdown(glance(experiments)), page.name)
    for section in sections:
        picture = page.with_name(f"{page.stem}-{section.name}.png") if section.figures else None
        if picture is not None:
            files[picture] = as_file(section.figures)
        text = replace_section(text, section.name, as_text(section, picture), page.name)
    return {page: text.encode(), **files}


def lacking(experiments: Sequence[Experiment]) -> list[str]:
    """The experiments with claims that are not here."""
    known = {experiment.name for experiment in experiments}
    return [name for name in dict.fromkeys(claim.experiment for claim in CLAIMS) if name not in known]


def as_text(section: Section, picture: Path | None) -> str:
    """Claims, picture, tables, and where all that comes from."""
    claims = [as_markdown(section.claims)] if section.claims is not None else []
    image = [f"![{plain(section.title)}]({picture.name})"] if picture is not None else []
    notes = list(dict.fromkeys(figure.note for figure in section.figures if figure.note))
    tables = [as_markdown(sheet) for sheet in (*section.results, *section.settings, *section.troubles)]
    origin = f"{section.runs}. Data: {'; '.join(section.data)}. Made with {'; '.join(section.origins)}."
    return "\n\n".join([*claims, *image, *map(plain, notes), *tables, plain(origin)])
