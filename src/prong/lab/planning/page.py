"""`prong bench plan-report`: the tables of docs/scaling.md, from the cost model and the records in results/."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prong.lab.bench import blocks
from prong.lab.bench.document import Section, load, render
from prong.lab.bench.sheets import Sheet, as_markdown
from prong.lab.documentation import read_page, replace_section, write_changed
from prong.lab.planning import calibration
from prong.lab.planning.outlook import width_sheet, workers_sheet
from prong.lab.terminal import make_console

PAGE = "scaling.md"
RECORDED = (
    Section("plan", calibration.sheets, None, "prong bench plan --json results/plan.json"),
    Section("blocks", blocks.sheets, None, "prong bench blocks --json results/blocks.json"),
)
PREDICTED: dict[str, Callable[[], list[Sheet]]] = {
    "workers": lambda: [
        workers_sheet("cifar10", 32, "a100", "float32"),
        workers_sheet("transformer:4096x4x512", 8, "a100", "float32"),
        workers_sheet("transformer:4096x4x512", 8, "h100", "bfloat16"),
    ],
    "width": lambda: [width_sheet(1024, "a100", "float32"), width_sheet(16_384, "a100", "float32")],
}


def main(results: Path = Path("results"), docs: Path = Path("docs")) -> None:
    """Write the tables of docs/scaling.md anew: predictions, and the measurements they rest on.

    What stands between the markers of a section is replaced; the rest of the page is left as it is.

    Args:
        results: folder of plan.json and blocks.json; those that are missing are named on the page.
        docs: folder of scaling.md.
    """
    page = docs / PAGE
    text = read_page(page)
    for section in RECORDED:
        record, problem = load(results / f"{section.name}.json", section.name)
        text = replace_section(text, section.name, render(section, record, problem, None), PAGE)
    for name, sheets in PREDICTED.items():
        text = replace_section(text, name, "\n\n".join(map(as_markdown, sheets())), PAGE)
    write_changed(make_console(), {page: text.encode()})
