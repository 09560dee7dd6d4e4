"""The page: one file of HTML with everything in it."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from prong.lab.page.charts import Figure
from prong.lab.page.claims import CLAIMS, claims_sheet, tally
from prong.lab.page.interactive import as_html, library
from prong.lab.page.runs import Experiment
from prong.lab.page.sections import Section


def render(experiments: Sequence[Experiment], sections: Sequence[Section]) -> str:
    """The page of some experiments. The same runs give the same bytes; whatever comes from files is escaped."""
    loader = PackageLoader("prong.lab.page", "templates")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    names = {experiment.name for experiment in experiments}
    missing = [claim for claim in CLAIMS if claim.experiment not in names]
    text: str = environment.get_template("page.html").render(
        sections=sections,
        tally=tally(experiments),
        missing=claims_sheet(missing, {}),
        library=Markup(library()),  # plotly's own, not from a file of runs
        draw=_draw,
    )
    return text


def _draw(figure: Figure, section: int, number: int) -> Markup:
    return Markup(as_html(figure, f"figure-{section}-{number}"))  # its texts are escaped by `as_html`
