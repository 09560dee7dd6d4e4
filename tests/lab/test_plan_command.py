"""`prong plan` runs as a user runs it, refuses what makes no sense, and its constants are what was measured."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from prong.lab import models
from prong.lab.bench import blocks
from prong.lab.bench.sheets import as_markdown
from prong.lab.planning import calibration, fitting, page
from prong.lab.planning.command import look, main
from prong.lab.planning.machines import GPUS, Machine, from_record, machine
from prong.lab.planning.prediction import Setting, predict
from prong.lab.planning.subjects import subject
from prong.lab.planning.trials import PARTS, WHOLE
from tests.lab.digits import contents, write_files

A100 = GPUS["a100"]


def test_a_transformer_far_larger_than_this_machine_is_planned(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    main("transformer:16384x1x1024", workers=1024, batch=8192, device="h100", dtype="bfloat16", json=file)
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("1,024 workers", "data sheet, not measured", "all-in", "Split", "Blocked"))
    record = json.loads(file.read_text())
    assert record["setting"]["workers"] == 1024 and record["machine"]["source"] == "data sheet"
    assert record["times_sgd"] == record["all_in"] / record["sgd"] > 1
    assert record["total"]["parameters"] == sum(kind["parameters"] for kind in record["kinds"].values())
    assert record["total"]["parameters"] > 3e9 and "commit" in record and str(file) in shown


def test_what_is_diagonal_blocked_and_whole_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    main("mlp:512x2", device="a100", block="1")
    assert "Whole: 0 of 2 layers. Diagonal: 2 of 512 inputs." in capsys.readouterr().out
    main("mlp:512x2", device="a100", block="100")
    shown = capsys.readouterr().out
    assert "Blocked: 2 of 512 inputs in blocks of 86." in shown and "Linear, blocks of 86" in shown
    main("mlp:512x2", device="a100", block="none")
    assert "Whole: 2 of 2 layers." in capsys.readouterr().out


def test_what_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    main("mlp:65536x4", device="a100", batch=8)
    assert "SGD does not fit" in capsys.readouterr().out


def test_a_model_of_ones_own_is_planned_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n\n\n"
        "def build():\n    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), (3, 9, 9)\n"
    )
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "prong.lab.cli",
        "plan",
        "--model",
        "mine:build",
        "--device",
        "a100",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=240)
    assert (done.returncode, done.stderr) == (0, "") and "Conv2d" in done.stdout


def test_a_model_of_tokens_is_planned_from_an_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "worded.py").write_text(
        "import torch\nfrom torch import nn\n\n\n"
        "def build():\n"
        "    return nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8)), torch.zeros(16, dtype=torch.long)\n\n\n"
        "def broken():\n    raise RuntimeError('oops')\n\n\n"
        "def empty():\n    return nn.ReLU(), (3,)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    main("worded:build", device="a100")
    assert "Linear" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--model worded:broken: oops"):
        main("worded:broken", device="a100")
    with pytest.raises(SystemExit, match="--model worded:empty: the model has no parameters to train"):
        main("worded:empty", device="a100")


def test_the_inception_of_the_lab_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("prong.lab.inception")
    main("inception", workers=8, batch=256, device="a100")
    assert "Conv2d" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "autoencode"}, "knows no 'autoencode'. Choose from: autoencoder; cifar10"),
        ({"model": "mlp:0x2"}, "at least 1"),
        ({"model": "mlp:8x2x3"}, "only transformers have tokens"),
        ({"model": "nowhere.at.all:build"}, "No module named"),
        ({"model": "torch.nn:Linear"}, "a function without arguments"),
        ({"model": "json:dumps"}, "a function without arguments"),
        ({"workers": 0}, "--workers is at least 1"),
        ({"workers": 200}, "every worker needs an example"),
        ({"device": "gtx"}, "knows no 'gtx'"),
        ({"device": "missing.json"}, "there is no such file"),
        ({"device": "cpu"}, "prong bench plan --json"),
        ({"dtype": "int8"}, "knows no 'int8'"),
        ({"block": "0"}, "--block is a number"),
        ({"block": "half"}, "--block is a number"),
        ({"budget": 1.0}, "--budget is more than 1"),
        ({"samples": 1}, "--samples is at least 2"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=message) as caught:
        main(**{"model": "autoencoder", "device": "a100", **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", json.dumps({**asdict(A100), "speed": 1}), json.dumps({**asdict(A100), "memory_rate": 0.0})],
    ids=["no JSON", "a list", "nothing", "unknown", "rate of zero"],
)
def test_a_file_that_describes_no_machine_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(text)
    with pytest.raises(SystemExit, match="does not describe a machine"):
        machine(str(file))


def test_a_machine_survives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(asdict(A100)))
    assert machine(str(file)) == A100
    file.write_text(json.dumps({"bench": "plan", "machine": asdict(A100)}))
    assert machine(str(file)) == A100


# Constants ------------------------------------------------------------------------------------------------------------

CPU = Machine(
    name="made up",
    source="measured",
    products={"float32": 5e10},
    convolutions={"float32": 3e10},
    factorisations=1e10,
    memory_rate=1e10,
    memory=1e10,
    network_rate=2e9,
    latency=1e-4,
    call=1e-4,
    whitened_call=5e-5,
    statistics_call=8e-5,
    factor_call=2e-4,
    crowding={"1": 1.0, "2": 1.5, "4": 3.0},
)


def made_up_rows(workers: tuple[int, ...] = (1, 2, 4)) -> list[dict[str, Any]]:
    """What would be measured on a machine that obeys the model to the letter."""
    rows: list[dict[str, Any]] = []

    def add(part: str, seconds: float, n: int, **about: Any) -> None:
        rows.append({"part": part, "workers": n, **about, "seconds": [seconds, 1.01 * seconds, 0.99 * seconds]})

    for n in workers:
        for flops in (1e6, 1e8, 1e9):
            moved = flops**0.7
            for part, rates in (("product", CPU.products), ("convolution", CPU.convolutions)):
                add(part, CPU.crowded(n) * (flops / rates["float32"] + moved / 1e10), n, flops=flops, moved=moved)
        for width in (64, 256, 1024):
            seconds = 2e-4 + width**3 / 1e10 + 48 * width**2 / 1e10
            add("factorisation", CPU.crowded(n) * seconds, n, width=width)
        add("memory", 1e8 / 1e10, n, moved=1e8)
        for size in (4096, 1 << 20, 1 << 24) if n > 1 else ():
            add("all-reduce", CPU.all_reduce(size, n), n, bytes=size)
            add("broadcast", CPU.broadcast(size, n), n, bytes=size)
        for phase, seconds in zip(PARTS, (1.6e-3, 2.4e-3, 3.68e-3, 0.0), strict=True):
            add("calls", CPU.crowded(n) * seconds, n, phase=phase, model="mlp:8x16", batch=8)
    return rows


def test_constants_are_found_again_from_times_that_they_made() -> None:
    found = fitting.fit(made_up_rows(), "made up", 1e10)
    for name, value in asdict(CPU).items():
        exactly = isinstance(value, str) or value is None
        assert getattr(found, name) == (value if exactly else pytest.approx(value, rel=1e-3)), name


def test_times_that_do_not_grow_give_no_rate() -> None:
    rows = [{**row, "seconds": [1e-3]} if row["part"] == "product" else row for row in made_up_rows()]
    with pytest.raises(SystemExit, match="do not grow with its size"):
        fitting.fit(rows, "made up", 1e10)


def test_crowding_goes_on_in_proportion_beyond_what_was_measured() -> None:
    assert [CPU.crowded(n) for n in (1, 2, 3, 4, 8)] == [1.0, 1.5, 1.5, 3.0, 6.0]
    assert replace(CPU, crowding={}).crowded(100) == 1.0


def test_messages_beyond_a_node_go_at_the_rate_between_nodes() -> None:
    assert A100.exchange_rate(8) == A100.network_rate > A100.exchange_rate(9) == A100.far_rate
    assert A100.all_reduce(1e9, 1024) > A100.all_reduce(1e9, 8) > A100.all_reduce(1e9, 2)
    assert CPU.broadcast(1e6, 4) == pytest.approx(2 * (1e-4 + 1e6 / 2e9))
    assert CPU.all_reduce(1e6, 2) == pytest.approx(2e-4 + 1e6 / 2e9)


def test_the_error_is_that_of_ratios_either_way() -> None:
    assert calibration.error([0.5, 1.0, 1.25]) == "Off by a factor of 1.25 in the median, 2.00 at worst."


def test_several_processes_are_shown_beside_one() -> None:
    """Halves of everything but PRONG's updates: these are not split as well as SGD's."""
    phases = {"SGD": 2.0, "PRONG": 3.0, "PRONG in a window": 3.0, "refresh": 0.0, WHOLE: 30.0}
    rows = [
        {"model": "autoencoder", "batch": 128, "workers": n, "phase": phase, "seconds": [seconds / n]}
        for n in (1, 2)
        for phase, seconds in phases.items()
    ]
    for row in rows:
        if row["workers"] == 2 and row["phase"].startswith("PRONG"):
            row["seconds"] = [1.875]
    (row,) = calibration._gain(rows, 12_800).rows
    assert list(row) == ["2", "0.50", "0.50", "0.62", "0.80"]


def test_measuring_real_processes_gives_a_machine_and_a_comparison_for_each(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    command = [sys.executable, "-m", "prong.lab.cli", "bench", "plan", "--processes", "1", "2", "--widths", "16", "256"]
    command += ["--channels", "4", "32", "--messages", "64", "8388608", "--checks", "mlp:16x2", "--numbers", "100000"]
    command += ["--repetitions", "1", "--json", str(file)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    assert record["bench"] == "plan" and {"environment", "commit", "config", "rows"} <= set(record)
    found = calibration.comparisons(record)
    assert [(n, part) for _, n, part, _, _ in found] == [(n, part) for n in (1, 2) for part in PARTS]
    assert all(predicted > 0 and seen > 0 for *_, predicted, seen in found)
    assert "predicted and measured" in done.stdout and "Off by a factor of" in done.stdout
    assert "mlp:16x2: several processes beside one" in done.stdout
    assert [row["workers"] for row in record["rows"] if row.get("phase") == WHOLE] == [1, 2]
    fitted = from_record(record)
    assert fitted.source == "measured" and set(fitted.crowding) == {"1", "2"}
    main("mlp:16x2", workers=2, device=str(file))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"processes": (2,)}, "has to have 1"),
        ({"widths": (64,)}, "two sizes each"),
        ({"checks": ("nothing",)}, "--checks knows no 'nothing'"),
        ({"batch": 2}, "--batch is at least 4"),
        ({"batch": 0}, "--batch is at least 4, got 0"),
        ({"repetitions": 0}, "--repetitions is at least 1"),
    ],
)
def test_measurements_that_make_no_sense_are_refused_before_they_begin(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        calibration.main(**options)


def test_a_prediction_of_one_worker_is_the_sum_of_its_parts() -> None:
    p = predict(look(subject("autoencoder"), 128, "float32"), CPU, Setting(1, 1000, 12_800, "float32"))
    assert p.sgd == p.total.plain and p.closed == p.sgd + p.total.preconditioning
    assert p.open == p.closed + p.total.statistics and p.refresh == p.total.factorisation
    assert p.open_updates == 100
    assert p.all_in == pytest.approx(p.closed + 0.1 * p.total.statistics + p.refresh / 1000)


# The page -------------------------------------------------------------------------------------------------------------

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_made_from_the_model_and_from_records(tmp_path: Path) -> None:
    (tmp_path / page.PAGE).write_text((DOCS / page.PAGE).read_text())
    page.main(results=tmp_path, docs=tmp_path)
    text = (tmp_path / page.PAGE).read_text()
    assert text.count("Not measured yet.") == 2 and "four layers of width 16,384" in text
    record = {
        "bench": "plan",
        "config": {"repetitions": 3, "samples": 12_800, "whole": []},
        "rows": made_up_rows(),
        "commit": None,
    }
    record |= {"machine": asdict(CPU), "environment": {"torch": "0", "threads": 1, "platform": "none"}}
    check = {"part": "check", "workers": 2, "model": "mlp:16x2", "batch": 8, "phase": "SGD", "seconds": [1.0]}
    record["rows"] = [*made_up_rows(), check]
    (tmp_path / "plan.json").write_text(json.dumps(record))
    page.main(results=tmp_path, docs=tmp_path)
    text = (tmp_path / page.PAGE).read_text()
    assert text.count("Not measured yet.") == 1 and "| mlp:16x2 | 2 | SGD |" in text
    page.main(results=tmp_path, docs=tmp_path)
    assert (tmp_path / page.PAGE).read_text() == text, "without new records nothing changes"


def test_links_of_the_page_lead_somewhere_and_its_predictions_are_those_of_today(tmp_path: Path) -> None:
    text = (DOCS / page.PAGE).read_text()
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (DOCS / link).exists(), link
    for name, sheets in page.PREDICTED.items():
        for sheet in sheets():
            assert as_markdown(sheet) in text, f"{name}: prong bench plan-report"


def test_errors_of_blocks_are_recorded_for_every_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(tmp_path / "data", contents(train=160, test=20))
    monkeypatch.setenv("PRONG_DATA", str(tmp_path / "data"))
    file = tmp_path / "blocks.json"
    blocks.main(sizes=(500,), cutoffs=(), samples=100, json=file)
    record = json.loads(file.read_text())
    assert [layer["inputs"] for layer in record["layers"]] == [784, 1000, 500, 250, 30, 250, 500, 1000]
    errors = [layer["errors"][0] for layer in record["layers"]]
    assert all((error["relative"] < 1e-9) == (n <= 500) for error, n in zip(errors, models.WIDTHS, strict=False))
    assert all(error["largest_gain"] < 2 + 1e-9 for error in errors), "two blocks at most"
    assert "blocks of 500" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="need a number"):
        blocks.main(sizes=(), cutoffs=())
