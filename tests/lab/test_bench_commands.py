"""The benchmarks run as a user runs them, leave complete records, and the page of results is made from those."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from rich.console import Console

from prong.lab.bench import centring, compiled, document, pace, profile, refresh, scaling, spaces, step_cost, watching
from prong.lab.bench.contest import SETTINGS
from prong.lab.bench.sheets import as_markdown
from prong.lab.page.runs import gather
from prong.lab.record import ForeignRecordError
from prong.lab.terminal import progress
from tests.lab.digits import contents, write_files
from tests.lab.tiny import tiny_autoencoder
from tests.lab.written_runs import errors, write_run

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
COMMANDS = {
    "step-cost": "--tasks autoencoder --batches 16 --methods PRONG Adam --repetitions 2 --samples 64 --block 2",
    "profile": "--batches 8 --methods PRONG --samples 64 --repetitions 2 --block 1",
    "refresh": "--max-width 128 --samples 100 --batch 32 --repetitions 2",
    "spaces": "--width 16 --channels 8 --map-size 4 --repetitions 2",
    "centring": "--batch 4 --repetitions 2",
    "watching": "--batches 8 --repetitions 2 --block 1",
    "scaling": "--depths 1 2 --widths 8 16 --batches 4 8 --samples 16 --repetitions 2 --block 2",
}


class Runs:
    """What the three commands printed and recorded."""

    def __init__(self, folder: Path) -> None:
        self.results = folder / "results"
        write_files(folder / "data", contents(train=160, test=20))
        environment = {**os.environ, "PRONG_DATA": str(folder / "data")}
        self.printed = {}
        for name, given in COMMANDS.items():
            command = [sys.executable, "-W", "error", "-m", "prong.lab.cli", "bench", name, *given.split()]
            command += ["--json", str(self.results / f"{name}.json")]
            if name in ("refresh", "scaling"):
                command += ["--plot", str(folder / f"{name}.png")]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
            assert (done.returncode, done.stderr) == (0, ""), done.stderr
            self.printed[name] = done.stdout

    def record(self, name: str) -> dict[str, Any]:
        return json.loads((self.results / f"{name}.json").read_text())  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_record_tells_configuration_environment_and_commit(runs: Runs, name: str) -> None:
    record = runs.record(name)
    assert record["bench"] == name
    assert record["config"].get("repetitions", 2) == 2
    record = {**record, **record.get("sessions", [{}])[-1]}
    assert record["environment"]["torch"] == torch.__version__ and "commit" in record and "prong" in record
    assert str(runs.results / f"{name}.json") in runs.printed[name], "where it is"
    assert "\x1b" not in runs.printed[name], "no colours where there is no terminal"
    kept = {path.name for path in runs.results.iterdir() if path.suffix != ".lock"}
    assert kept == {f"{name}.json" for name in COMMANDS}, "nothing half-written"


def test_step_cost_prints_and_records_every_part_of_every_method(runs: Runs) -> None:
    record = runs.record("step-cost")
    config = record["config"]
    assert config["methods"] == ["PRONG", "SGD", "Adam"], "the baseline is always there"
    assert (config["period"], config["samples"], config["settings"]) == (1000, 64, SETTINGS)
    (cost,) = record["costs"]
    assert (cost["task"], cost["batch"], cost["data"]) == (
        "autoencoder",
        16,
        "MNIST, 160 training and 20 test digits; weights after 1 updates of PRONG",
    )
    assert cost["parameter_bytes"] == 4 * 2_837_314
    times = {name: {part: len(ms) for part, ms in entry["ms"].items()} for name, entry in cost["methods"].items()}
    assert times == {"PRONG": {"update": 2, "open": 2, "refresh": 2}, "SGD": {"update": 2}, "Adam": {"update": 2}}
    shown = runs.printed["step-cost"]
    assert all(
        word in shown for word in ("autoencoder, batch 16", "PRONG", "Adam", "times SGD", "1.00", "Medians of 2")
    )


def test_profile_prints_and_records_where_the_time_goes(runs: Runs) -> None:
    """And counts operations, mostly of products: forwards, and gradients of weights and of all inputs but the first."""
    record = runs.record("profile")
    assert [(row["method"], row["window"]) for row in record["rows"]] == [
        ("PRONG", "update"),
        ("PRONG", "open"),
        ("SGD", "update"),
    ] * 2
    for row in record["rows"]:
        assert list(row["ms"]) == list(profile.PARTS) and min(row["ms"].values()) > 0
    closed, gathering, sgd = (row["gigaflops"] for row in record["rows"][:3])
    weights = 2_837_314 - sum((1000, 500, 250, 30, 250, 500, 1000, 784))
    assert sgd == pytest.approx(2 * 8 * (3 * weights - 784 * 1000) / 1e9, rel=0.05)
    assert sgd < closed < gathering
    assert "PRONG, gathering" in runs.printed["profile"]
    assert "where the time of an update goes" in runs.printed["profile"]


def test_refresh_prints_and_records_every_part_at_every_width(runs: Runs) -> None:
    record = runs.record("refresh")
    assert record["config"]["widths"] == [64, 128]
    assert [(row["samples"], row["dtype"], row["width"]) for row in record["times"]] == [
        (100, dtype, width) for dtype in ("float32", "float64") for width in (64, 128)
    ]
    for row in record["times"]:
        assert list(row["ms"]) == list(refresh.PARTS)
        assert all(len(values) == 2 and min(values) > 0 for values in row["ms"].values())
    assert all(word in runs.printed["refresh"] for word in ("float64", "128", "plain", "exponent from 512 on"))
    assert imread(runs.results.parent / "refresh.png").ndim == 3


def test_scaling_prints_and_records_every_size(runs: Runs) -> None:
    record = runs.record("scaling")
    sizes = [(point["axis"], point["depth"], point["width"], point["batch"]) for point in record["points"]]
    assert sizes == [
        ("depth", 1, 512, 128),
        ("depth", 2, 512, 128),
        ("width", 4, 8, 128),
        ("width", 4, 16, 128),
        ("batch", 4, 512, 4),
        ("batch", 4, 512, 8),
    ]
    assert all(list(point["methods"]) == ["PRONG", "SGD"] for point in record["points"])
    assert all(word in runs.printed["scaling"] for word in ("depth", "width", "batch", "exponent", "ratio"))
    assert imread(runs.results.parent / "scaling.png").ndim == 3


def test_watching_prints_and_records_every_kind(runs: Runs) -> None:
    (entry,) = runs.record("watching")["times"]
    assert list(entry["ms"]) == list(watching.KINDS) and all(len(times) == 2 for times in entry["ms"].values())
    ms = {kind: [100.0] for kind in watching.KINDS} | {"measured": [350.0]}
    (table,) = watching.sheets({"config": {"repetitions": 1, "data": "digits"}, "times": [{"batch": 8, "ms": ms}]})
    assert list(table.rows[0]) == ["8", "100", "+0.00", "+2.50", "+0.00"]
    assert "what a monitor adds" in runs.printed["watching"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_compiled_prints_and_records_both_ways(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PRONG_DATA", str(runs.results.parent / "data"))
    path = tmp_path / "compiled.json"
    compiled.main(methods=("PRONG",), batch=8, repetitions=2, block=1, json=path)
    record = json.loads(path.read_text())
    assert list(record["ms"]) == ["PRONG", "SGD"]
    assert all(list(ways) == ["eager", "compiled"] for ways in record["ms"].values())
    assert all(len(values) == 2 and min(values) > 0 for ways in record["ms"].values() for values in ways.values())
    assert record["graphs"] == {"PRONG": 1, "SGD": 1} and min(record["compile_seconds"].values()) > 0.1
    assert "autoencoder, batch 8: an update with torch.compile" in capsys.readouterr().out


def test_exponents_are_those_of_wide_layers_only() -> None:
    milliseconds = {width: [width**3 if width >= 512 else 1e9] for width in (64, 256, 512, 1024, 2048)}
    times = [
        {"samples": 9, "dtype": "float32", "width": width, "ms": dict.fromkeys(refresh.PARTS, values)}
        for width, values in milliseconds.items()
    ]
    (table,) = refresh.sheets({"config": {"samples": [9], "repetitions": 1}, "times": times})
    assert list(table.rows[-1]) == ["exponent from 512 on", *["3.00"] * len(refresh.PARTS)]


NAMES = [section.name for section in document.SECTIONS]


def documented(runs: Runs, docs: Path) -> str:
    document.main(results=runs.results, docs=docs)
    return (docs / document.PAGE).read_text()


def test_the_page_is_made_from_records_and_a_second_time_nothing_changes(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / document.PAGE).write_text(PAGE.read_text())
    text = documented(runs, tmp_path)
    assert "| PRONG |" in text and "refresh of a layer" in text and "against its depth" in text
    assert "(refresh.png)" in text and imread(tmp_path / "scaling.png").ndim == 3
    assert runs.record("scaling")["environment"]["torch"] in text
    assert text.count("Not measured yet") == 5, "both races, compiled, bfloat16, refreshes by samples"
    files = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    assert capsys.readouterr().out.count("written") == 3
    assert documented(runs, tmp_path) == text
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()} == files
    assert capsys.readouterr().out.count("unchanged") == 3


@pytest.mark.parametrize("section", document.SECTIONS, ids=lambda section: section.name)
def test_every_record_of_the_project_is_on_its_page(section: document.Section) -> None:
    record, problem = document.load(PAGE.parent.parent / "results" / f"{section.name}.json", section.benchmark)
    assert record is not None, problem
    assert all(as_markdown(sheet) in PAGE.read_text() for sheet in section.sheets(record))


def test_a_record_that_tables_cannot_be_made_of_is_named_and_nothing_is_written(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / document.PAGE).write_text(PAGE.read_text())
    record = runs.record("profile")
    del record["config"]["samples"]
    (tmp_path / "profile.json").write_text(json.dumps(record))
    with pytest.raises(SystemExit, match=r"the record of profile is of another version.*KeyError\('samples'\).*anew"):
        document.main(tmp_path, tmp_path)
    assert (tmp_path / document.PAGE).read_text() == PAGE.read_text()


def test_a_full_disk_is_said_in_one_line_and_leaves_the_record_before(tmp_path: Path) -> None:
    def no_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    record = tmp_path / "centring.json"
    record.write_text("the one before")
    words = [sys.executable, "-m", "prong.lab", "bench", "centring", "--batch", "4", "--repetitions", "1"]
    environment = {**os.environ, "COVERAGE_PROCESS_START": "", "COVERAGE_PROCESS_CONFIG": ""}  # coverage writes, too
    done = subprocess.run(
        [*words, "--json", record], preexec_fn=no_room, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr == f"{record} cannot be written: File too large. Make room first.\n"
    assert [path.name for path in tmp_path.iterdir()] == ["centring.json"] and record.read_text() == "the one before"


def test_prose_around_the_tables_stays(runs: Runs, tmp_path: Path) -> None:
    parts = [f"before {name}\n<!-- begin {name} -->\nold\n<!-- end {name} -->\nafter {name}\n" for name in NAMES]
    (tmp_path / document.PAGE).write_text("".join(parts))
    text = documented(runs, tmp_path)
    assert "old" not in text
    for name in NAMES:
        begin, end = text.index(f"<!-- begin {name} -->"), text.index(f"<!-- end {name} -->")
        assert text[:begin].endswith(f"before {name}\n") and text[end:].startswith(
            f"<!-- end {name} -->\nafter {name}\n"
        )


def test_what_was_not_measured_or_by_another_version_is_said_on_the_page(runs: Runs, tmp_path: Path) -> None:
    page = tmp_path / document.PAGE
    page.write_text(PAGE.read_text())
    results = tmp_path / "results"
    results.mkdir()
    (results / "scaling.json").write_text('{"times": {}}')
    document.main(results=results, docs=tmp_path)
    text = page.read_text()
    assert text.count("Not measured yet. Made by `prong bench") == len(NAMES) - 1
    assert "scaling.json is of another version and is not shown." in text
    (results / "refresh.json").write_text("{")
    with pytest.raises(SystemExit, match=r"refresh\.json is not a record"):
        document.main(results=results, docs=tmp_path)


@pytest.mark.parametrize("page", [None, "no markers", "<!-- end step-cost --><!-- begin step-cost -->"])
def test_a_page_that_cannot_be_filled_is_an_error_and_stays(runs: Runs, tmp_path: Path, page: str | None) -> None:
    if page is not None:
        (tmp_path / document.PAGE).write_text(page)
    with pytest.raises(SystemExit, match="cannot be read" if page is None else "<!-- begin step-cost -->"):
        documented(runs, tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ([] if page is None else [page])


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (step_cost.main, {"repetitions": 0}, "--repetitions is at least 1, got 0"),
        (step_cost.main, {"batches": (8, 0)}, "--batches is at least 1, got 0"),
        (step_cost.main, {"batches": (1,)}, "--batches 1 is too few for batch norm"),
        (step_cost.main, {"json": Path("/proc/record.json")}, "--json /proc/record.json cannot be written"),
        (step_cost.main, {"period": 0}, "--period is at least 1"),
        (step_cost.main, {"samples": 1}, "--samples is at least 2"),
        (step_cost.main, {"block": 0}, "--block is at least 1"),
        (step_cost.main, {"tasks": ("mnist",)}, "--tasks knows no 'mnist'. Choose from: autoencoder; cifar10"),
        (step_cost.main, {"methods": ("Sgd",)}, "--methods knows no 'Sgd'. Choose from: PRONG; PRONG, cutoff"),
        (step_cost.main, {"tasks": ("autoencoder",), "batches": (161,)}, "a batch of 161 is more than the data holds"),
        (scaling.main, {"depths": ()}, "--depths are one or more"),
        (watching.main, {"batches": ()}, "--batches are one or more"),
        (compiled.main, {"block": 0}, "--block is at least 1"),
        (profile.main, {"batches": (8, 0)}, "--batches is at least 1"),
        (profile.main, {"methods": ("Sgd",)}, "--methods knows no 'Sgd'"),
        (profile.main, {"batches": ()}, "--batches are one or more"),
        (profile.main, {"methods": ()}, "--methods are one or more"),
        (document.main, {"results": Path("nowhere")}, "--results nowhere is no folder"),
        (compiled.main, {"methods": ("Sgd",)}, "--methods knows no 'Sgd'"),
        (refresh.main, {"max_width": 63}, "--max-width is at least 64, got 63"),
        (refresh.main, {"samples": ()}, "--samples needs a number"),
        (refresh.main, {"samples": (1,)}, "--samples is at least 2"),
        (scaling.main, {"widths": (0,)}, "--widths is at least 1"),
        (scaling.main, {"samples": 0}, "--samples is at least 2"),
    ],
)
def test_what_cannot_work_is_said_in_one_line_before_anything_is_timed(
    mnist: Path, monkeypatch: pytest.MonkeyPatch, command: Any, options: dict[str, Any], message: str
) -> None:
    for module in (step_cost, refresh, scaling):
        monkeypatch.setattr(module, "measure", lambda *_, **__: pytest.fail("something was timed"))
    with pytest.raises(SystemExit) as caught:
        command(**options)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_files_that_cannot_be_written_are_refused_before_anything_is_timed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "record.json"):
        with pytest.raises(SystemExit, match=r"--json .* cannot be written"):
            scaling.main(json=path)
        with pytest.raises(SystemExit, match=r"--plot .* cannot be written"):
            refresh.main(plot=path)


def test_missing_digits_are_said_before_anything_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRONG_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match="no MNIST in"):
        step_cost.main()


def test_slow_methods_are_left_out_on_request_unless_named() -> None:
    assert step_cost.choose(()) == list(step_cost.TIMED)
    assert step_cost.choose((), slow=False) == [name for name in step_cost.TIMED if name not in step_cost.SLOW]
    assert step_cost.choose(("SOAP", "PRONG"), slow=False) == ["PRONG", "SGD", "SOAP"]
    assert set(step_cost.SLOW) < set(step_cost.TIMED)


def test_a_method_that_needs_a_missing_package_is_left_out_or_refused_by_name(
    mnist: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.opt_einsum, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="'PSGD-Kron' cannot run here: without the package opt_einsum"):
        step_cost.main(methods=("PSGD-Kron",))
    monkeypatch.setattr(torch.backends.opt_einsum, "is_available", lambda: True)
    monkeypatch.setattr(step_cost, "has_bfloat16", lambda: False)
    assert set(step_cost.unavailable()) == set(step_cost.BFLOAT16)
    monkeypatch.setattr(step_cost, "has_bfloat16", lambda: True)
    assert step_cost.unavailable() == {}


def test_a_terminal_gets_a_bar_and_a_file_does_not() -> None:
    for terminal in (True, False):
        console = Console(force_terminal=terminal, width=110, file=StringIO(), record=True)
        with progress(console, "blocks", 3) as on_step:
            on_step()
        assert ("blocks" in console.export_text()) == terminal


def test_the_crossover_is_where_both_spaces_cost_the_same() -> None:
    def point(ratio: float, activation: float) -> dict[str, Any]:
        return {"ratio": ratio, "ms": {spaces.ACTIVATION: [activation], spaces.GRADIENT: [8.0]}}

    assert spaces.crossover([point(0.5, 4.0), point(1.0, 8.0), point(2.0, 16.0)]) == pytest.approx(1.0)
    assert spaces.crossover([point(0.5, 4.0), point(2.0, 16.0)]) == pytest.approx(1.0)
    assert spaces.crossover([point(0.5, 4.0), point(1.0, 6.0)]) is None


def test_ways_of_centring_agree_while_means_are_short_and_only_then(runs: Runs) -> None:
    record = runs.record("centring")
    assert {len(ms) for ms in record["ms"].values()} == {2}
    loss = {mean: [found[i] for found in record["errors"].values()] for i, mean in enumerate(record["means"])}
    assert all(max(loss[mean]) < 1e-5 for mean in (0.0, 1.0, 4.0))
    copied, fused = loss[1000.0]
    assert fused > 100 * copied
    layer = centring._Layer(20, 3, mean=1.0)
    first, *others = (way(layer) for name, way in centring.WAYS.items() if name != centring.NONE)
    for other in others:
        torch.testing.assert_close(other.view_as(first), first, rtol=1e-4, atol=1e-4)


def test_the_spaces_table_has_every_layer_and_ratio(runs: Runs) -> None:
    record = runs.record("spaces")
    assert len(record["points"]) == 4 * len(spaces.RATIOS)
    assert all(len(ms) == 2 for point in record["points"] for ms in point["ms"].values())
    assert all(word in runs.printed["spaces"] for word in ("linear, exact P", "convolution, thin P", "Equal at"))


def test_pace_records_a_clock_that_the_report_takes(
    mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("pace", "tasks"):
        monkeypatch.setattr(f"prong.lab.bench.{module}.autoencoder", tiny_autoencoder)
    path = tmp_path / "clock.json"
    pace.main(methods=("nesterov", "prong"), batch=16, period=8, samples=32, repetitions=2, json=path)
    assert "autoencoder, batch 16: what an update costs" in capsys.readouterr().out
    with pytest.raises(ForeignRecordError, match="of autoencoder there is only what updates cost"):
        gather([path])
    write_run(tmp_path / "runs", "nesterov", errors([3, 2]), plan={"updates": 20, "batch": 16})
    [experiment] = gather([path, tmp_path / "runs"])
    assert experiment.name == "autoencoder" and list(experiment.clock) == ["nesterov", "prong"]
    assert experiment.pace(experiment.runs[0]) is not None
    assert all(len(entry["ms_per_update"]) == 2 for entry in experiment.clock.values())
    assert 0 < experiment.clock["prong"]["refresh_share"] < 1 and "refresh_share" not in experiment.clock["nesterov"]
