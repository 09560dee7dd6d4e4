"""`prong report` as a user runs it: a page, figures, a record and the documentation, or one line that says why not."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread
from matplotlib.text import Text

from prong.lab import cli
from prong.lab.contestants import Contestant
from prong.lab.folders import RunFolder
from prong.lab.jobs import Job, carry_out
from prong.lab.methods import METHODS, RECORDED, Schedule
from prong.lab.page.charts import LOOKS, MOST, Chart, Curve, thinned
from prong.lab.page.claims import CLAIMS
from prong.lab.page.command import main
from prong.lab.page.grids import Cell, Grid
from prong.lab.page.groups import Point, groups
from prong.lab.page.printed import drawn
from prong.lab.page.runs import gather
from prong.lab.page.tables import costs as costs_of
from prong.lab.page.tables import origins, results
from prong.lab.page.ticks import tick_label, ticks
from prong.lab.page.views import figures
from prong.lab.pool import one_thread
from prong.lab.tasks.reconstruction import Reconstruction
from prong.lab.training import Plan
from tests.lab.tiny import tiny_autoencoder
from tests.lab.written_runs import errors, plan, write_run

FRAME = Path(__file__).parents[2] / "docs" / "reproduction.md"
ADVICE = ("Move ", "Name ", "Make ", "`prong report FOLDER --record FILE` makes one")
EVIL = "<script>alert(1)</script>&$x_1$|`"


def write_some(root: Path) -> Path:
    """An experiment with a band, a failure, and a run that is still going on."""
    for seed, shift in enumerate((0, 1, 2)):
        write_run(root, "nesterov", errors([90 + shift, 50 + shift, 20 + shift]), seed=seed)
        write_run(root, "prong", errors([90 + shift, 20 + shift, 5 + shift]), seed=seed)
    write_run(root, "rmsprop", errors([90]), failure="diverged at update 7: the loss is nan")
    write_run(root, "adam", errors([90, 40]), ended=False)
    return root


def run(*arguments: object, room: int | None = None) -> subprocess.CompletedProcess[str]:
    """The command, in a place where files have so much room."""

    def limited() -> None:
        if room is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    command = [sys.executable, "-W", "error", "-m", "prong.lab.cli", "report", *map(str, arguments)]
    environment = {**os.environ, **({"COVERAGE_PROCESS_START": "", "COVERAGE_PROCESS_CONFIG": ""} if room else {})}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, preexec_fn=limited if room else None
    )


def test_the_command_writes_a_page_and_figures_and_says_where(tmp_path: Path) -> None:
    done = run(write_some(tmp_path / "runs"), "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Page: {tmp_path / 'out' / 'report.html'}" in done.stdout
    names = {path.name for path in (tmp_path / "out").iterdir()}
    stems = {f"autoencoder-train-squared-error-{axis}" for axis in ("updates", "seconds")}
    assert names == {"report.html"} | {f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")}
    for stem in stems:
        assert imread(tmp_path / "out" / f"{stem}.png").std() > 0.01, "something is drawn"
        assert "<svg" in (tmp_path / "out" / f"{stem}.svg").read_text()


def test_where_there_is_no_room_the_page_and_the_figures_before_stay(tmp_path: Path) -> None:
    runs, out = write_some(tmp_path / "runs"), tmp_path / "out"
    main((runs,), out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    write_run(runs, "muon", errors([90, 10]))
    done = run(runs, "--out", out, room=100_000)
    assert done.stderr == f"{out / 'report.html'} cannot be written: File too large. Make room first.\n"
    assert done.returncode == 1 and {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_record_is_written_over_a_record_of_the_same_experiment_and_nothing_else(tmp_path: Path) -> None:
    runs, record = write_some(tmp_path / "runs"), tmp_path / "record.json"
    config = next(runs.rglob("config.json"))
    clock = tmp_path / "clock.json"
    clock.write_text(json.dumps({"experiment": "autoencoder", "runs": [], "clock": {}, "config": {}}))
    page = tmp_path / "page.md"
    page.write_text("words")
    for other, said in ((config, "not a record that"), (clock, "not a record that"), (page, "is not a record")):
        before = other.read_bytes()
        with pytest.raises(SystemExit, match=said) as left:
            main((runs,), tmp_path / "out", record=other)
        assert str(other) in str(left.value) and "\n" not in str(left.value)
        assert other.read_bytes() == before and not (tmp_path / "out").exists()
    main((runs,), tmp_path / "out", record=record)
    write_run(runs, "muon", errors([90, 10]))
    main((runs,), tmp_path / "out", record=record)
    assert len(json.loads(record.read_text())["runs"]) == 9
    fewer = tmp_path / "fewer"
    write_run(fewer, "muon", errors([90, 10]))
    before = record.read_bytes()
    with pytest.raises(SystemExit, match="would lose 8 of its 9 runs") as left:
        main((fewer,), tmp_path / "out", record=record)
    one_line(str(left.value))
    assert record.read_bytes() == before
    write_run(fewer, "sgd", errors([90, 30]))
    main((record, fewer), tmp_path / "out", record=record)
    assert len(json.loads(record.read_text())["runs"]) == 10, "named beside them, it keeps all"
    write_run(tmp_path / "letters", "prong", errors([3, 2]), experiment="letters")
    with pytest.raises(SystemExit, match="is a record of autoencoder, and these runs are of letters"):
        main((tmp_path / "letters",), tmp_path / "out", record=record)


def test_real_runs_make_a_page(tmp_path: Path, mnist: Path) -> None:
    for method in ("SGD", "PRONG"):
        job = Job(
            "autoencoder",
            method,
            Reconstruction(make=tiny_autoencoder),
            Contestant(method, "standard"),
            METHODS[method].settings,
            Schedule(period=4, samples=32),
            Plan(updates=8, batch=16, evaluations=4, evaluated=20),
        )
        with one_thread():
            carry_out(job, RunFolder(tmp_path / "runs" / method))
    main((tmp_path / "runs",), tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "MNIST, 160 training and 20 test digits" in page and "2 runs, 0 failed, 0 unfinished; seeds 0" in page
    assert len(list((tmp_path / "out").glob("*.png"))) == 4, "training and test error, against updates and seconds"


def test_failed_and_unfinished_runs_are_listed(tmp_path: Path) -> None:
    main((write_some(tmp_path / "runs"),), tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "8 runs, 1 failed, 1 unfinished; seeds 0, 1, 2" in page
    assert "diverged at update 7: the loss is nan" in page
    assert "10 of 10,000" in page.partition("Unfinished runs")[2]


def test_the_table_holds_median_smallest_and_largest_over_seeds(tmp_path: Path) -> None:
    for seed, final in enumerate((7.0, 1.0, 2.0)):
        write_run(tmp_path, "prong", errors([90, final]), seed=seed)
    write_run(tmp_path, "adam", errors([90]), failure="diverged")
    (experiment,) = gather([tmp_path])
    assert [row[-1] for row in results(experiment).rows] == ["2.000 (1.000-7.000)", "diverged"]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ((5.447e33,), "5.447e+33"),
        ((1e7,), "1.000e+07"),
        ((9_999_999.0,), "9,999,999"),
        ((483_834.2,), "483,834"),
        ((8897.3,), "8,897"),
        ((999.96,), "1,000"),
        ((4.0,), "4.000"),
        ((0.0, 0.0), "0.000"),
        ((8897.3, 9100.0), "8,999 (8,897-9,100)"),
    ],
)
def test_numbers_have_four_digits_that_count_and_no_range_where_there_is_none(
    tmp_path: Path, values: tuple[float, ...], told: str
) -> None:
    for seed, value in enumerate(values):
        write_run(tmp_path, "prong", errors([90, value]), seed=seed)
    (experiment,) = gather([tmp_path])
    assert results(experiment).rows[0][-1] == told


def test_runs_that_are_only_beginning_do_not_count_among_the_others(tmp_path: Path) -> None:
    write_run(tmp_path, "prong", errors([90, 5]), seed=0)
    begun = write_run(tmp_path, "prong", seed=1, ended=False)
    (begun.path / "environment.json").unlink()
    (experiment,) = gather([tmp_path])
    assert results(experiment).rows[0][:3] == ["PRONG", "0", "10"]


def test_beside_long_runs_short_ones_of_a_smaller_net_are_neither_pictured_nor_a_measure_of_cost(
    tmp_path: Path,
) -> None:
    def kept(condition: float) -> dict[str, object]:
        whitened = {"after": [[1.0]], "condition_after": 1.0}
        return {"before": [[1.0]], "condition_before": condition, **whitened}

    for updates, pace, parameters, condition in ((100, 0.1, 10, 7.0), (10_000, 1.0, 1000, 9.0)):
        changes = {"experiment": "conditioning", "plan": plan(updates), "parameters": parameters}
        write_run(tmp_path, "prong", errors([3, 2], pace=2 * pace), keepsakes=kept(condition), **changes)
        write_run(tmp_path, "sgd", errors([3, 2], pace=pace), **changes)
    (experiment,) = gather([tmp_path])
    assert figures(experiment)[0].note == "Condition number 9 before, 1 after whitening."
    sheet = costs_of(experiment)
    assert sheet is not None
    assert {row[0]: row[2] for row in sheet.rows} == {
        "PRONG, 100 updates": "-",
        "PRONG, 10,000 updates": "2.00",
        "SGD, heavy ball, 100 updates": "-",
        "SGD, heavy ball, 10,000 updates": "1.00",
    }


def test_commits_of_runs_in_one_place_are_one_line(tmp_path: Path) -> None:
    environment = {"torch": "2.13.0", "threads": 1, "platform": "Linux"}
    for seed, commit in enumerate(("a" * 40, "b" * 40 + "-dirty", "a" * 40)):
        folder = write_run(tmp_path, "prong", errors([90, 5]), seed=seed)
        sitting = {"prong": "0", "commit": commit, "environment": environment}
        (folder.path / "environment.json").write_text(json.dumps({"sittings": [sitting]}))
    (experiment,) = gather([tmp_path])
    assert origins(experiment) == ["torch 2.13.0, 1 thread, Linux; commits aaaaaaa, bbbbbbb*"]
    one = replace(experiment, runs=experiment.runs[:1])
    assert origins(one) == ["torch 2.13.0, 1 thread, Linux; commit " + "a" * 40]


def test_whatever_comes_from_files_is_escaped(tmp_path: Path) -> None:
    pathological = {"label": EVIL, "data": EVIL, "settings": {EVIL: 1.0}, "initialisation": EVIL, "part": EVIL}
    write_run(tmp_path / "runs", "odd", errors([3, 2]), experiment="other", failure=EVIL, **pathological)
    write_run(tmp_path / "runs", "odd", errors([3, 2]), experiment="other", ended=False, seed=1, **pathological)
    frame = tmp_path / "page.md"
    frame.write_text("<!-- begin other -->\n<!-- end other -->\n")
    main((tmp_path / "runs",), tmp_path / "out", markdown=frame)
    for text in ((tmp_path / "out" / "report.html").read_text(), frame.read_text()):
        assert "alert(1)" in text and "<script>alert" not in text
    lines = frame.read_text().splitlines()
    rows = [number for number, line in enumerate(lines) if line.startswith("|") and "alert" in line]
    assert rows
    for number in rows:
        rule = next(line for line in reversed(lines[:number]) if line.startswith("| ---"))
        assert lines[number].count("|") - lines[number].count(r"\|") == rule.count("|"), "as many cells as columns"


def test_an_unknown_experiment_gets_a_chart_of_everything_measured(tmp_path: Path) -> None:
    rows = [{"update": 0, "depth": 1.0, "height": -2.0}, {"update": 5, "depth": 0.5, "height": 3.0}]
    write_run(tmp_path / "runs", "mystery", rows, experiment="letters")
    main((tmp_path / "runs",), tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").glob("*.png")}
    assert names == {"letters-depth-updates.png", "letters-height-updates.png"}


def test_a_record_gives_the_same_page_as_the_folders(tmp_path: Path) -> None:
    runs, record = write_some(tmp_path / "runs"), tmp_path / "results" / "autoencoder.json"
    main((runs,), tmp_path / "from-folders", record=record)
    main((record,), tmp_path / "from-record", record=tmp_path / "again.json")
    for path in (tmp_path / "from-folders").iterdir():
        assert path.read_bytes() == (tmp_path / "from-record" / path.name).read_bytes(), path.name
    assert gather([record, runs]) == gather([runs]), "nothing counts twice"
    assert (tmp_path / "again.json").read_bytes() == record.read_bytes()
    kept = json.loads(record.read_text())
    assert kept["experiment"] == "autoencoder" and len(kept["runs"]) == 8
    assert kept["runs"][0].keys() == {"config", "environment", "rows", "outcome", "keepsakes"}


def test_of_two_records_of_a_run_the_one_that_came_further_counts(tmp_path: Path) -> None:
    write_run(tmp_path / "early", "prong", errors([90]), ended=False)
    write_run(tmp_path / "late", "prong", errors([90, 5]))
    for order in (("early", "late"), ("late", "early")):
        (experiment,) = gather([tmp_path / name for name in order])
        assert [len(run.rows) for run in experiment.runs] == [2]


def test_the_documentation_is_made_between_its_markers_and_again_the_same(tmp_path: Path) -> None:
    page = tmp_path / "reproduction.md"
    page.write_text(
        FRAME.read_text().partition("<!-- begin autoencoder -->")[0]
        + "<!-- begin autoencoder -->\nwhat was there\n<!-- end autoencoder -->\nafter\n"
    )
    before = page.read_text()
    runs = write_some(tmp_path / "runs")
    main((runs,), tmp_path / "out", record=tmp_path / "record.json", markdown=page)
    once, picture = page.read_bytes(), (tmp_path / "reproduction-autoencoder.png").read_bytes()
    main((tmp_path / "record.json",), tmp_path / "out", markdown=page)
    assert (once, picture) == (page.read_bytes(), (tmp_path / "reproduction-autoencoder.png").read_bytes())
    text = page.read_text()
    assert text.startswith(before.partition("what was")[0]) and text.endswith("<!-- end autoencoder -->\nafter\n")
    assert "what was there" not in text
    assert "| PRONG needs fewer updates than the baselines |" in text
    assert "![Autoencoder of digits](reproduction-autoencoder.png)" in text and "diverged at update 7" in text


def test_the_frame_of_the_documentation_has_a_place_for_every_experiment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "reproduction.md"
    page.write_text(FRAME.read_text())
    for name in ("conditioning", "sensitivity", "autoencoder", "cifar10", "imagenet"):
        write_run(tmp_path / "runs", "prong", errors([3, 2]), experiment=name)
    main((tmp_path / "runs",), tmp_path / "out", markdown=page)
    assert "Not run yet" not in page.read_text()
    listed = page.read_text().partition("<!-- begin claims -->")[2].partition("<!-- end claims -->")[0]
    assert all(f"| {claim.experiment} | {claim.text} | {claim.number} |" in listed for claim in CLAIMS)
    told = listed.partition("Of the paper's own, ")[2]
    assert sum(map(int, re.findall(r": (\d+)", told))) == sum(claim.of_paper for claim in CLAIMS)
    page.write_text(page.read_text().replace("| not run |", "| as it was |"))
    (tmp_path / "alone").mkdir()
    write_run(tmp_path / "alone", "prong", errors([3, 1]))
    main((tmp_path / "alone",), tmp_path / "out", markdown=page)
    assert "| as it was |" in page.read_text(), "not all experiments were given"
    told = "The list of all claims stays as it was: no conditioning, sensitivity, cifar10, imagenet here.\n"
    assert told in capsys.readouterr().out


def not_a_record(folder: Path) -> Path:
    (folder / "other.json").write_text('{"bench": "refresh"}')
    return folder / "other.json"


def not_json(folder: Path) -> Path:
    (folder / "other.json").write_text("{")
    return folder / "other.json"


def empty(folder: Path) -> Path:
    (folder / "empty").mkdir()
    return folder / "empty"


def damaged(folder: Path) -> Path:
    run = write_run(folder / "damaged", "prong", errors([3, 2]))
    (run.path / "environment.json").write_text("no record\n")
    return folder / "damaged"


def nameless(folder: Path) -> Path:
    run = write_run(folder / "nameless", "prong", errors([3, 2]))
    (run.path / "config.json").unlink()
    return folder / "nameless"


def closed(folder: Path) -> Path:
    run = write_run(folder / "closed", "prong", errors([3, 2]))
    (run.path / "metrics.jsonl").unlink()
    (run.path / "metrics.jsonl").mkdir()
    return folder / "closed"


def older(folder: Path) -> Path:
    write_run(folder / "older", "prong", errors([3, 2]), schedule=None, settings=None)
    return folder / "older"


def elsewhere(folder: Path) -> Path:
    write_run(folder / "x", "prong", errors([3, 2]), experiment="evil")
    record = {"experiment": "../evil", "runs": []}
    (run,) = gather([folder / "x"])[0].record()["runs"]
    record["runs"] = [{**run, "config": {**run["config"], "experiment": "../evil"}}]
    (folder / "elsewhere.json").write_text(json.dumps(record))
    return folder / "elsewhere.json"


def row(line: str, folder: Path) -> Path:
    run = write_run(folder / "row", "prong", errors([3, 2]))
    (run.path / "metrics.jsonl").write_text(f"{line}\n")
    return folder / "row"


def strange(folder: Path) -> Path:
    (folder / "strange.json").write_text('{"experiment": "letters", "runs": [7]}')
    return folder / "strange.json"


def cut(folder: Path) -> Path:
    run = write_run(folder / "cut", "prong", errors([3, 2]))
    first, _ = (run.path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run.path / "metrics.jsonl").write_text(first)
    return folder / "cut"


def odd(folder: Path, **parts: object) -> Path:
    write_run(folder / "odd", "prong", errors([3, 2]))
    (experiment,) = gather([folder / "odd"])
    record = experiment.record()
    (folder / "odd.json").write_text(json.dumps({**record, "runs": [{**record["runs"][0], **parts}]}))
    return folder / "odd.json"


def costs(folder: Path, **parts: object) -> Path:
    write_run(folder / "x", "prong", errors([3, 2]))
    (experiment,) = gather([folder / "x"])
    (folder / "costs.json").write_text(json.dumps({**experiment.record(), **parts}))
    return folder / "costs.json"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder / "nowhere", "nowhere does not exist"),
        (empty, "holds no runs"),
        (not_a_record, "is not a record of runs"),
        (not_json, "is not a record"),
        (damaged, "environment.json is not a record: Expecting value"),
        (nameless, "autoencoder-000 has metrics.jsonl but no config.json"),
        (closed, "autoencoder-000 is not the folder of a run: Is a directory"),
        (older, "its configuration lacks settings, schedule"),
        (elsewhere, "is no name for files"),
        (partial(row, '{"update": 0, "loss": "large"}'), "rows that are not numbers"),
        (partial(row, '{"update": 0, "loss": NaN}'), "rows that are not numbers"),
        (partial(odd, rows=[{"update": 0, "loss": float("nan")}]), "is not a record: NaN is no number"),
        (partial(odd, keepsakes={"before": [[1.0, 2.0], [3.0]]}), "else than a table of numbers as 'before'"),
        (strange, "run 1 of .* has no configuration"),
        (cut, "is damaged: it has ended after 10 updates, but its rows after 0"),
        (partial(odd, outcome="x"), "has something else for its outcome"),
        (partial(odd, outcome={"updates": "x"}), "has something else for its outcome"),
        (partial(odd, environment=[1]), "has something else for its environment"),
        (partial(odd, keepsakes="x"), "has something else for its keepsakes"),
        (partial(costs, clock="x"), "costs that are not numbers by method"),
        (partial(costs, clock={"prong": [1]}), "costs that are not numbers by method"),
        (partial(costs, clock={"prong": {"ms_per_update": ["x"]}}), "costs that are not numbers by method"),
        (partial(costs, clock={"prong": {}}, config="x"), "costs that are not numbers by method"),
        (partial(costs, clock={"prong": {"ms_per_update": [1.0]}}, runs=[]), "there is only what updates cost"),
        (partial(costs, runs=[]), "holds no runs"),
    ],
)
def test_what_is_not_a_run_is_refused_in_one_line_and_nothing_is_written(tmp_path: Path, make, said: str) -> None:
    with pytest.raises(SystemExit, match=said) as left:
        main((make(tmp_path),), tmp_path / "out")
    one_line(str(left.value))
    assert not (tmp_path / "out").exists()


def one_line(told: str) -> None:
    """That it ends with a dot, and says what to do once."""
    assert "\n" not in told and told.endswith(".") and not told.endswith("..")
    assert sum(told.count(advice) for advice in ADVICE) == 1, told


def test_a_folder_that_cannot_be_read_is_named_though_others_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, "prong", errors([3, 2]))
    hidden = write_run(tmp_path, "nesterov", errors([3, 2])).path
    scandir = os.scandir

    def refuse(path: str | Path) -> object:
        if Path(path) == hidden:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(SystemExit, match=f"{hidden} cannot be read: Permission denied") as left:
        main((tmp_path,), tmp_path / "out")
    one_line(str(left.value))


def test_a_refused_command_exits_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="does not exist") as left:
        cli.main(["report", str(tmp_path / "nowhere"), "--out", str(tmp_path / "out")])
    assert isinstance(left.value.code, str), "which Python prints, and leaves with 1"


def test_a_record_is_of_one_experiment_and_a_page_needs_its_markers(tmp_path: Path) -> None:
    for name in ("conditioning", "letters"):
        write_run(tmp_path / "runs", "prong", errors([3, 2]), experiment=name)
    with pytest.raises(SystemExit, match="these are of conditioning, letters"):
        main((tmp_path / "runs",), tmp_path / "out", record=tmp_path / "record.json")
    frame = tmp_path / "page.md"
    frame.write_text("<!-- begin conditioning -->\n<!-- end conditioning -->\n")
    with pytest.raises(SystemExit, match="needs the lines <!-- begin letters -->"):
        main((tmp_path / "runs",), tmp_path / "out", markdown=frame)
    with pytest.raises(SystemExit, match="name folders of runs"):
        main((), tmp_path / "out")
    assert not (tmp_path / "record.json").exists() and not (tmp_path / "out" / "report.html").exists()
    assert frame.read_text() == "<!-- begin conditioning -->\n<!-- end conditioning -->\n"


def test_long_curves_keep_their_ends_and_at_most_so_many_points() -> None:
    points = [Point(number, 0.0, 1.0, 1.0, 1.0) for number in range(10 * MOST + 3)]
    kept = thinned(points)
    assert len(kept) == MOST and (kept[0], kept[-1]) == (points[0], points[-1])
    assert [point.update for point in kept] == sorted({point.update for point in kept})
    assert thinned(points[:MOST]) == points[:MOST]


def test_every_method_has_a_look_of_its_own() -> None:
    assert LOOKS.keys() == RECORDED.keys() and len(set(LOOKS.values())) == len(LOOKS)


def test_groups_that_differ_in_their_data_alone_are_told_apart_by_it(tmp_path: Path) -> None:
    for data in ("all digits", "some digits"):
        write_run(tmp_path, "prong", errors([90, 5]), data=data)
    (experiment,) = gather([tmp_path])
    assert [group.name for group in groups(experiment.runs)] == ["PRONG, all digits", "PRONG, some digits"]


def test_groups_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    for lr in (0.1, 0.01):
        write_run(tmp_path, "prong", errors([3]), settings={"lr": lr, "eps": 1.0})
    write_run(tmp_path, "adam", errors([3]), seed=0)
    write_run(tmp_path, "adam", errors([3]), seed=1)
    (experiment,) = gather([tmp_path])
    assert [(group.name, len(group.runs)) for group in groups(experiment.runs)] == [
        ("PRONG, lr 0.01", 1),
        ("PRONG, lr 0.1", 1),
        ("Adam", 2),
    ]


def test_where_lengths_differ_every_name_says_its_own(tmp_path: Path) -> None:
    write_run(tmp_path, "prong", errors([3]), plan=plan(20))
    for lr in (0.1, 0.01):
        write_run(tmp_path, "adam", errors([3]), settings={"lr": lr}, plan=plan(2000))
    (experiment,) = gather([tmp_path])
    assert [group.name for group in groups(experiment.runs)] == [
        "PRONG, 20 updates",
        "Adam, lr 0.01, 2,000 updates",
        "Adam, lr 0.1, 2,000 updates",
    ]


def test_no_two_groups_have_one_name(tmp_path: Path) -> None:
    for lr, data in ((0.1, "all digits"), (0.1, "some digits"), (0.01, "some digits")):
        write_run(tmp_path, "prong", errors([3]), settings={"lr": lr}, data=data)
    (experiment,) = gather([tmp_path])
    assert {group.name for group in groups(experiment.runs)} == {
        "PRONG, all digits, lr 0.1",
        "PRONG, some digits, lr 0.1",
        "PRONG, lr 0.01",
    }


@pytest.mark.parametrize(("count", "length"), [(1, 140), (8, 5), (8, 50), (9, 5), (13, 40), (20, 20), (20, 60)])
def test_printed_names_are_within_the_figure(count: int, length: int) -> None:
    curves = [Curve(f"{number:03} ".ljust(length, "m"), [0, 1], [1, 2], broken=True) for number in range(count)]
    chart = Chart("name", "Title", "updates", "error", curves)
    for shown in ([chart], [chart, chart]):
        canvas = drawn(shown)
        canvas.draw_without_rendering()
        texts = [text for text in canvas.findobj(Text) if text.get_text().endswith(("(diverged)", "Title", "error"))]
        assert len(texts) == (count + 2) * len(shown)
        for text in texts:
            box = text.get_window_extent()
            assert canvas.bbox.x0 <= box.x0 and box.x1 <= canvas.bbox.x1, text
            assert canvas.bbox.y0 <= box.y0 and box.y1 <= canvas.bbox.y1, text
        for axes in canvas.findobj(Axes):
            assert axes.get_window_extent().height > 2 * canvas.dpi, "two inches for the curves, however many names"


@pytest.mark.parametrize(
    ("low", "high"),
    [(24, 27), (52.1, 52.3), (9.9, 10.1), (1.0, 1.0), (24, 190), (2, 200), (1e-3, 100), (1e-8, 1e-7), (1, 5e33)],
)
def test_a_logarithmic_axis_has_numbers_along_it_however_short_it_is(low: float, high: float) -> None:
    marks = ticks(low, high)
    inside = [tick for tick in marks if low <= tick <= high] if low < high else marks
    assert len(inside) >= 2 and len(marks) <= 12 and marks == sorted(set(marks))
    assert len({tick_label(tick) for tick in marks}) == len(marks)
    canvas = drawn([Chart("name", "Title", "updates", "error", [Curve("PRONG", [0, 1], [low, high])])])
    canvas.draw_without_rendering()
    (axes,) = canvas.findobj(Axes)
    bottom, top = axes.get_ylim()
    shown = [
        label for tick, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True) if bottom <= tick <= top
    ]
    assert len({label.get_text() for label in shown}) >= 2


def write_grid(root: Path) -> Path:
    """Four dampings and learning rates: one was not run, one is going on, one diverged, and one lost its way."""
    finals = {(1.0, 0.1): [90, 50], (0.1, 0.1): [90, 20], (0.1, 0.01): [90, 10, 40], (0.01, 0.1): [90]}
    for (eps, lr), values in finals.items():
        failure = "diverged at update 3: the loss is nan" if len(values) == 1 else None
        pair = {"part": "eps", "settings": {"lr": lr, "eps": eps}}
        write_run(root, rows=errors(values), experiment="sensitivity", failure=failure, **pair)
    pair = {"part": "eps", "settings": {"lr": 0.01, "eps": 0.01}}
    write_run(root, rows=errors([90, 80]), experiment="sensitivity", ended=False, **pair)
    return root


def test_final_errors_by_damping_and_learning_rate_are_a_table_in_colours(tmp_path: Path) -> None:
    (experiment,) = gather([write_grid(tmp_path / "runs")])
    curves, grid = figures(experiment)
    assert isinstance(curves, Chart) and isinstance(grid, Grid), "curves are kept"
    assert (grid.rows, grid.columns) == (["1", "0.1", "0.01"], ["0.01", "0.1"])
    texts = [[cell.text if cell is not None else None for cell in row] for row in grid.cells]
    assert texts == [[None, "50.0"], ["40.0\nlost its way", "20.0"], [None, "✕\ndiverged"]]
    assert "1.5 times the lowest" in grid.note and "cross" in grid.note
    main((tmp_path / "runs",), tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {
        "sensitivity-eps.png",
        "sensitivity-eps-final.png",
    }


def test_errors_in_cells_are_as_short_as_they_can_be() -> None:
    values = (4.764, 53.0, 124.2, 8897.3, 5.447e33)
    assert [Cell(value).text for value in values] == ["4.76", "53.0", "124", "8,897", "5.45e+33"]


def test_every_method_has_its_own_table_in_colours(tmp_path: Path) -> None:
    for method, final in (("prong", 20), ("prong-balanced", 10)):
        settings = {"lr": 0.1, "eps": 0.1}
        write_run(tmp_path, method, errors([90, final]), experiment="sensitivity", part="eps", settings=settings)
    (experiment,) = gather([tmp_path])
    assert [(figure.name, figure.title.partition(" (")[2]) for figure in figures(experiment)] == [
        ("eps-1", "PRONG)"),
        ("eps-final-1", "PRONG)"),
        ("eps-2", "PRONG, balanced)"),
        ("eps-final-2", "PRONG, balanced)"),
    ]


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (4, 5), (12, 14)])
def test_what_is_printed_in_a_cell_stays_in_it(rows: int, columns: int) -> None:
    cells = [
        [Cell(5.45e33, "lost its way") if x else Cell(None, "diverged") for x in range(columns)] for _ in range(rows)
    ]
    grid = Grid("name", "Title", "learning rate", "ε", "error", [f"{x}" for x in range(columns)], ["1"] * rows, cells)
    canvas = drawn([grid])
    canvas.draw_without_rendering()
    axes = canvas.findobj(Axes)[0]
    area = axes.get_window_extent()
    for text in axes.texts:
        box = text.get_window_extent()
        assert box.width < area.width / columns and box.height < area.height / rows
    assert len(axes.texts) == rows * columns


def test_five_learning_rates_have_five_kinds_of_line(tmp_path: Path) -> None:
    for lr in (1e-2, 3e-3, 1e-3, 3e-4, 1e-4):
        settings = {"lr": lr, "eps": 0.1}
        write_run(tmp_path, rows=errors([90, 5]), experiment="sensitivity", part="eps", settings=settings)
    (experiment,) = gather([tmp_path])
    curves = figures(experiment)[0]
    assert isinstance(curves, Chart) and len({line.dash for line in curves.curves}) == 5


@pytest.mark.parametrize(("slow", "log"), [(4.0, False), (9.0, True)])
def test_where_some_take_much_longer_seconds_are_logarithmic_from_the_first_step_on(
    slow: float, log: bool, tmp_path: Path
) -> None:
    write_run(tmp_path, "sgd", errors([90, 50, 20], pace=1.0))
    write_run(tmp_path, "soap", errors([90, 10, 5], pace=slow))
    write_run(tmp_path, "adam", errors([90, 80], pace=0.01), failure="diverged at update 15: the loss is nan")
    (experiment,) = gather([tmp_path])
    by_updates, by_seconds = figures(experiment)[:2]
    assert not by_updates.log_x and by_seconds.log_x == log
    seconds = {curve.name: list(curve.x) for curve in by_seconds.curves}
    assert seconds["SOAP"] == ([10 * slow, 20 * slow] if log else [0, 10 * slow, 20 * slow])
    assert seconds["Adam"] == ([0.1] if log else [0, 0.1])
    (axes,) = drawn([by_seconds]).subfigs[0].axes
    assert axes.get_xscale() == ("log" if log else "linear")
    if log:
        low, high = axes.get_xlim()
        assert sum(low <= tick <= high for tick in axes.get_xticks()) > 1
