"""An experiment with all that is said of it, for the page and for the documentation alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prong.lab.bench.sheets import Sheet
from prong.lab.page import tables
from prong.lab.page.arrivals import arrivals
from prong.lab.page.charts import Figure
from prong.lab.page.claims import claims_of, claims_sheet
from prong.lab.page.runs import Experiment
from prong.lab.page.views import figures

TITLES = {
    "conditioning": "Conditioning",
    "sensitivity": "Sensitivity to ε and T",
    "autoencoder": "Autoencoder of digits",
    "cifar10": "CIFAR-10",
    "imagenet": "ImageNet",
}


@dataclass(frozen=True)
class Section:
    """One experiment.

    Attributes:
        name: of the experiment.
        title: in words.
        runs: how many, in words.
        data: that was trained on.
        origins: where and with which code.
        claims: what became of the paper's; None where it has none.
        figures: in the paper's order.
        results: tables of what came out.
        settings: how methods were set.
        troubles: tables of runs that failed, or have not ended.
    """

    name: str
    title: str
    runs: str
    data: Sequence[str]
    origins: Sequence[str]
    claims: Sheet | None
    figures: Sequence[Figure]
    results: Sequence[Sheet]
    settings: Sequence[Sheet]
    troubles: Sequence[Sheet]

    @property
    def judged(self) -> bool:
        """Whether any claim could be tested."""
        verdicts = {row[3] for row in self.claims.rows} if self.claims is not None else set()
        return bool(verdicts & {"holds", "does not hold"})


def section(experiment: Experiment) -> Section:
    """All that is said of an experiment."""
    known: Mapping[str, Experiment] = {experiment.name: experiment}
    parts = experiment.parts()
    finals = [tables.results(part, name) for name, part in parts.items()]
    cells = tables.grids(experiment)
    results = (*finals, tables.chosen(experiment), *cells, arrivals(experiment), tables.costs(experiment))
    troubles = (tables.failures(experiment), tables.unfinished(experiment))
    return Section(
        experiment.name,
        TITLES.get(experiment.name, experiment.name),
        _count(experiment),
        tables.sources(experiment),
        tables.origins(experiment),
        claims_sheet(claims_of(experiment.name), known),
        figures(experiment),
        [sheet for sheet in results if sheet is not None],
        [tables.settings(part, name) for name, part in parts.items()],
        [sheet for sheet in troubles if sheet is not None],
    )


def _count(experiment: Experiment) -> str:
    failed = sum(run.failure is not None for run in experiment.runs)
    going = sum(run.outcome is None for run in experiment.runs)
    seeds = sorted({run.config["seed"] for run in experiment.runs})
    count, several = len(experiment.runs), "s" if len(experiment.runs) != 1 else ""
    return f"{count} run{several}, {failed} failed, {going} unfinished; seeds {', '.join(map(str, seeds))}"
