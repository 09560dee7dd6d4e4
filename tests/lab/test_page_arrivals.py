"""How soon methods are where SGD ends: first measurements at its final median, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prong.lab.bench.sheets import Sheet
from prong.lab.page.arrivals import arrivals
from prong.lab.page.runs import gather
from tests.lab.written_runs import errors, plan, write_run

FAILED = "diverged at update 3: the loss is nan"


def shown(*paths: Path) -> Sheet | None:
    (experiment,) = gather(paths)
    return arrivals(experiment)


def rows(*paths: Path) -> dict[str, list[str]]:
    sheet = shown(*paths)
    assert sheet is not None
    return {name: list(cells) for name, *cells in sheet.rows}


def test_updates_and_seconds_to_the_final_median_of_the_best_sgd(tmp_path: Path) -> None:
    for seed, last in enumerate((19, 20, 30)):
        write_run(tmp_path, "sgd", errors([90, 50, 40, 30, last], pace=2.0), seed=seed)
    write_run(tmp_path, "nesterov", errors([90, 50, 40, 30, 25]))
    for seed, value in enumerate((20, 5, 40)):
        write_run(tmp_path, "prong", errors([90, value, 1], pace=3.0), seed=seed)
    write_run(tmp_path, "adam", errors([90, 21]))
    assert rows(tmp_path) == {
        "SGD, heavy ball": ["40", "1.0", "80.0", "1.0"],
        "SGD": ["never", "-", "never", "-"],
        "PRONG": ["10", "4.0", "30.0", "2.7"],
        "Adam": ["never", "-", "never", "-"],
    }
    sheet = shown(tmp_path)
    assert sheet is not None
    assert "a median of 20, SGD, heavy ball's final training squared error per example, or less" in sheet.note


def test_runs_of_another_length_or_that_failed_or_go_on_do_not_arrive(tmp_path: Path) -> None:
    write_run(tmp_path, "nesterov", errors([90, 50, 20]))
    write_run(tmp_path, "prong", errors([90, 20, 10]))
    write_run(tmp_path, "nesterov", errors([90, 1]), plan=plan(100))
    write_run(tmp_path, "adam", errors([90, 10]), plan=plan(100))
    write_run(tmp_path, "prong+", errors([90, 10]), failure=FAILED)
    write_run(tmp_path, "muon", errors([90, 10]), ended=False)
    found = rows(tmp_path)
    assert set(found) == {"SGD", "PRONG", "PRONG+"}
    assert found["PRONG+"][0] == "never"


def test_costs_measured_apart_are_the_clock_where_all_have_them(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "nesterov", errors([90, 50, 20]))
    write_run(tmp_path / "runs", "prong", errors([90, 20, 10]))
    clock = {"nesterov": {"ms_per_update": [1000.0]}, "prong": {"ms_per_update": [1500.0], "start_up_seconds": 5.0}}
    record = {"experiment": "autoencoder", "runs": [], "clock": clock}
    apart = tmp_path / "clock.json"
    apart.write_text(json.dumps(record))
    assert rows(tmp_path / "runs", apart)["PRONG"] == ["10", "2.0", "20.0", "1.0"]
    del clock["nesterov"]
    apart.write_text(json.dumps(record))
    assert rows(tmp_path / "runs", apart)["PRONG"] == ["10", "2.0", "10.0", "2.0"]


def test_errors_of_classifiers_are_in_percent(tmp_path: Path) -> None:
    for method, last in (("nesterov", 0.03), ("prong", 0.02)):
        measured = [{"update": update, "train_error": value} for update, value in ((0, 0.9), (10, last))]
        write_run(tmp_path, method, measured, experiment="cifar10")
    sheet = shown(tmp_path)
    assert sheet is not None
    assert "a median of 3 %, SGD's final training error, or less" in sheet.note


@pytest.mark.parametrize(
    "methods",
    [
        {"prong": [90, 20]},
        {"nesterov": [90, 20]},
        {"nesterov": [90, 95], "prong": [90, 20]},
        {"nesterov": [90], "prong": [90, 20]},
    ],
    ids=["no SGD", "SGD alone", "no better", "no update"],
)
def test_without_an_end_to_come_to_there_is_no_table(tmp_path: Path, methods: dict[str, list[float]]) -> None:
    for method, values in methods.items():
        write_run(tmp_path, method, errors(values))
    assert shown(tmp_path) is None


def test_an_sgd_that_failed_is_no_measure(tmp_path: Path) -> None:
    write_run(tmp_path, "nesterov", errors([90, 20]), failure=FAILED)
    write_run(tmp_path, "prong", errors([90, 20]))
    assert shown(tmp_path) is None
