"""What the documents show, works."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "docs/guide.md",
    "docs/data.md",
    "docs/fisher.md",
    "docs/lab.md",
    "docs/mirror.md",
    "docs/monitor.md",
    "docs/spectral.md",
]


@pytest.mark.parametrize("page", PAGES)
def test_every_python_block_runs_in_order(page):
    torch.manual_seed(0)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in blocks:
            exec(block, names)


@pytest.mark.parametrize(
    "page",
    [
        *PAGES,
        "CONTRIBUTING.md",
        "docs/index.md",
        "docs/derivation.md",
        "docs/distributed.md",
        "docs/log.md",
        "docs/sweep.md",
        "docs/reproduction.md",
        "docs/scaling.md",
    ],
)
def test_links_within_the_project_lead_somewhere(page):
    path = ROOT / page
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text()):
        assert (path.parent / link).exists(), link


def test_the_readme_names_its_two_commands():
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text
