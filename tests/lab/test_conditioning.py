"""The experiment on conditioning: what it measures, records and draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread

import prong
from prong.lab import conditioning
from prong.lab.bench.sheets import as_markdown
from prong.lab.conditioning import Setting, block, build, main, picture, reductions, reparametrised, sheet, shrunk
from tests.lab.digits import contents, write_files

SMALL: dict[str, Any] = {"width": 4, "updates": 6, "measurements": 2, "period": 3, "samples": 80, "examples": 60}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_files(tmp_path / "data", contents(train=160, test=20))
    monkeypatch.setenv("PRONG_DATA", str(tmp_path / "data"))
    return tmp_path


def test_digits_shrink_to_means_of_their_pixels() -> None:
    image = torch.rand(2, 784)
    small = shrunk(image)
    assert small.shape == (2, 100) and small.dtype == torch.float64
    assert small[1].mean().item() == pytest.approx(image[1].double().mean().item(), rel=0.1)
    assert torch.equal(shrunk(torch.ones(1, 784)), torch.ones(1, 100, dtype=torch.float64))


def test_the_first_measurements_are_those_of_the_reparametrisation_itself(folder: Path) -> None:
    path, heat, plot = folder / "c.json", folder / "h.png", folder / "c.png"
    main(seeds=(0, 5), **SMALL, json=path, heat=heat, plot=plot)
    record = json.loads(path.read_text())
    assert list(record["runs"]) == ["SGD", "RMSprop", "PRONG"] and "commit" in record
    for name, runs in record["runs"].items():
        assert list(runs) == ["0", "5"] and all(made["failure"] is None for made in runs.values())
        updates = [row["update"] for row in runs["0"]["rows"]]
        assert updates == ([0, 0, 1, 2, 3, 6] if name == "PRONG" else [0, 1, 2, 3, 6])
        assert runs["0"]["rows"][0] == record["runs"]["SGD"]["0"]["rows"][0], "the same network"
    x = shrunk(prong.lab.data.load_mnist(folder / "data").train)
    before, after = reparametrised(x, Setting(eps=1e-3, **SMALL), 0)
    expected = [prong.fisher.spectrum(F).condition for F in (before, after)]
    found = [row["condition"] for row in record["runs"]["PRONG"]["0"]["rows"][:2]]
    assert found == pytest.approx(expected, rel=1e-6)
    assert reductions(record)[0] == pytest.approx(1 - expected[1] / expected[0])
    assert imread(heat).ndim == imread(plot).ndim == 3


def test_coordinates_are_the_trained_ones() -> None:
    x = torch.rand(50, 100, dtype=torch.float64)
    model = build(4, 0)
    canonical = block(model, x, whitened=False)
    prong.refresh_(prong.whiten_(model), [x], 1e-3)
    torch.testing.assert_close(block(model, x, whitened=False), canonical)
    assert not torch.allclose(block(model, x, whitened=True), canonical)


def test_the_table_tells_the_reduction_and_who_failed() -> None:
    def made(*conditions: float, failure: str | None = None) -> dict[str, Any]:
        rows = [{"update": i, "condition": c, "below": round(100 / c)} for i, c in enumerate(conditions)]
        return {"rows": rows, "failure": failure}

    runs = {
        "SGD": {"0": made(100.0, 90.0, 50.0)},
        "RMSprop": {"0": made(100.0, failure="diverged at update 1: the matrix is not finite")},
        "PRONG": {"0": made(100.0, 2.0, 1.0)},
    }
    config = {"seeds": [0], "updates": 2, "data": "digits"}
    table = sheet({"runs": runs, "config": config})
    assert [row[0] for row in table.rows] == ["SGD", "RMSprop", "PRONG"]
    assert list(table.rows[0][1:5]) == ["1e+02", "-", "50", "50.0 %"] and table.rows[2][2] == "2"
    assert table.headings[5] == "below the floor" and [row[5] for row in table.rows] == ["2", "1", "100"]
    assert "diverged at update 1" in table.rows[1][-1] and "falls by 98.0 %" in table.note
    (axes,) = picture({"runs": runs, "config": config}).axes
    assert axes.get_xlabel() == "updates" and len(axes.lines) == 3


def test_a_run_that_diverges_says_when(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(conditioning.RATES, "SGD", 1e300)
    digits = prong.lab.data.load_mnist(folder / "data")
    found = conditioning.run("SGD", shrunk(digits.train), digits.train_labels, Setting(eps=1e-3, **SMALL), 0)
    assert found["failure"].startswith("diverged at update") and len(found["rows"]) >= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": ()}, "--seeds are one or more"),
        ({"eps": 0.0}, "--eps is positive"),
        ({"width": 1}, "--width is at least 2"),
        ({"updates": 0}, "--updates is at least 1"),
    ],
)
def test_what_cannot_work_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        main(**options)


def test_the_page_shows_what_was_recorded() -> None:
    root = Path(__file__).parents[2]
    record = json.loads((root / "results" / "conditioning.json").read_text())
    assert as_markdown(sheet(record)) in (root / "docs" / "fisher.md").read_text()
    assert min(reductions(record)) > 0.95, "the paper's claim"


def test_the_numbers_in_the_text_of_the_page_are_those_of_the_record() -> None:
    root = Path(__file__).parents[2]
    runs = json.loads((root / "results" / "conditioning.json").read_text())["runs"]
    rows = {name: [made["rows"] for made in seeds.values()] for name, seeds in runs.items()}

    def late(name: str) -> list[float]:
        return [r["condition"] for seed in rows[name] for r in seed if r["update"] >= 100]

    def said(values: list[float]) -> str:
        return " to ".join(f"{v:.1f}" if v < 10 else f"{v:,.0f}" for v in (min(values), max(values)))

    fell = {name: [r[name == "PRONG"]["condition"] / r[-1]["condition"] for r in rows[name]] for name in rows}
    better = {name: [a / b for a, b in zip(late(name), late("PRONG"), strict=True)] for name in ("SGD", "RMSprop")}
    page = " ".join((root / "docs" / "fisher.md").read_text().split())
    assert f"falls {said(fell['SGD'])} times with SGD and {said(fell['RMSprop'])} times with RMSprop" in page
    assert f"it falls {said(fell['PRONG'])} times from the reparametrised start" in page
    assert (
        f"trains in by {said(better['SGD'])} times" in page and f"RMSprop's by {said(better['RMSprop'])} times" in page
    )
