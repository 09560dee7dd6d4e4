"""`prong report` as a user runs it: a page, figures, a record and the documentation, or one line that says why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread

from prong.lab import cli
from prong.lab.contestants import Contestant
from prong.lab.folders import RunFolder
from prong.lab.jobs import Job, carry_out
from prong.lab.methods import METHODS, Schedule
from prong.lab.page.charts import LOOKS, MOST, thinned
from prong.lab.page.command import main
from prong.lab.page.groups import Point, groups
from prong.lab.page.runs import gather
from prong.lab.page.tables import origins, results
from prong.lab.pool import one_thread
from prong.lab.tasks.reconstruction import Reconstruction
from prong.lab.training import Plan
from tests.lab.tiny import tiny_autoencoder
from tests.lab.written_runs import errors, write_run

FRAME = Path(__file__).parents[2] / "docs" / "reproduction.md"
EVIL = "<script>alert(1)</script>&$x_1$|`"


def write_some(root: Path) -> Path:
    """An experiment with a band, a failure, and a run that is still going on."""
    for seed, shift in enumerate((0, 1, 2)):
        write_run(root, "nesterov", errors([90 + shift, 50 + shift, 20 + shift]), seed=seed)
        write_run(root, "prong", errors([90 + shift, 20 + shift, 5 + shift]), seed=seed)
    write_run(root, "rmsprop", errors([90]), failure="diverged at update 7: the loss is nan")
    write_run(root, "adam", errors([90, 40]), ended=False)
    return root


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "prong.lab.cli", "report", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)


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
    assert "10 of 100" in page.partition("Unfinished runs")[2]


def test_the_table_holds_median_smallest_and_largest_over_seeds(tmp_path: Path) -> None:
    for seed, final in enumerate((7.0, 1.0, 2.0)):
        write_run(tmp_path, "prong", errors([90, final]), seed=seed)
    write_run(tmp_path, "adam", errors([90]), failure="diverged")
    (experiment,) = gather([tmp_path])
    assert [row[-1] for row in results(experiment).rows] == ["2.000 (1.000-7.000)", "diverged"]


def test_runs_that_are_only_beginning_do_not_count_among_the_others(tmp_path: Path) -> None:
    write_run(tmp_path, "prong", errors([90, 5]), seed=0)
    begun = write_run(tmp_path, "prong", seed=1, ended=False)
    (begun.path / "environment.json").unlink()
    (experiment,) = gather([tmp_path])
    assert results(experiment).rows[0][:3] == ["PRONG", "0", "10"]


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


def test_the_frame_of_the_documentation_has_a_place_for_every_experiment(tmp_path: Path) -> None:
    page = tmp_path / "reproduction.md"
    page.write_text(FRAME.read_text())
    for name in ("conditioning", "sensitivity", "autoencoder", "cifar10", "imagenet"):
        write_run(tmp_path / "runs", "prong", errors([3, 2]), experiment=name)
    main((tmp_path / "runs",), tmp_path / "out", markdown=page)
    assert "Not run yet" not in page.read_text()


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
    (run.path / "metrics.jsonl").write_text("no row\n")
    return folder / "damaged"


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


def wordy(folder: Path) -> Path:
    run = write_run(folder / "wordy", "prong", errors([3, 2]))
    (run.path / "metrics.jsonl").write_text('{"update": 0, "loss": "large"}\n')
    return folder / "wordy"


def strange(folder: Path) -> Path:
    (folder / "strange.json").write_text('{"experiment": "letters", "runs": [7]}')
    return folder / "strange.json"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder / "nowhere", "nowhere does not exist"),
        (empty, "holds no runs"),
        (not_a_record, "is not a record of runs"),
        (not_json, "is not a record"),
        (damaged, "is not the folder of a run"),
        (older, "its configuration lacks settings, schedule"),
        (elsewhere, "is no name for files"),
        (wordy, "rows that are not numbers"),
        (strange, "run 1 of .* has no configuration"),
    ],
)
def test_what_is_not_a_run_is_refused_in_one_line_and_nothing_is_written(tmp_path: Path, make, said: str) -> None:
    with pytest.raises(SystemExit, match=said) as left:
        main((make(tmp_path),), tmp_path / "out")
    assert "\n" not in str(left.value)
    assert not (tmp_path / "out").exists()


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
    keys = {method.key for method in METHODS.values()}
    assert LOOKS.keys() == keys and len(set(LOOKS.values())) == len(keys)


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
