"""Several workers make a run together: as one would, whatever happens to them."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from prong.distributed.workers import Workers
from prong.lab.folders import CHECKPOINT, RunFolder, run_folders
from prong.lab.parallel import with_workers
from tests.lab.hosts import two_hosts
from tests.lab.pictures import make_album, spoil
from tests.lab.test_experiments import refused, wait_for
from tests.lab.test_jobs import assert_same

ROOT = Path(__file__).parents[2]
SMALL = (
    "--bf16",
    "False",  # in which three workers do not add up to one
    "--epochs",
    "8",
    "--batch",
    "6",
    "--warm-up",
    "9",
    "--size",
    "32",
    "--held-out",
    "2",
    "--evaluated",
    "9",
    "--readers",
    "0",
)
FEW = ("--period", "5", "--samples", "12", "--checkpoints", "4")
COMPANY = ("-m", "tests.lab.company")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", *COMPANY)
METHODS = ("batchnorm", "prong+")
THREE = ("--workers", "3")  # sums of three depend on their order
SECONDS = 240  # of one command: less than pytest waits
STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """Whatever a test leaves running ends with it."""
    yield
    for run in STARTED:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.communicate()
    STARTED.clear()


@pytest.fixture(scope="module")
def album(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_album(tmp_path_factory.mktemp("data") / "album", each=14)


def command(album: Path, out: Path, *words: str, how: Sequence[str] = COMPANY) -> list[str]:
    options = ("--data", str(album), "--out", str(out), *SMALL, *FEW, *words)
    return [sys.executable, *how, "run", "imagenet", "--methods", *METHODS, *options]


def begun(words: list[str]) -> subprocess.Popen[str]:
    """In a process group of its own, as a terminal would begin it."""
    run = subprocess.Popen(
        words,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    STARTED.append(run)
    return run


def ended(run: subprocess.Popen[str]) -> tuple[str, str]:
    """What it said; of one that does not end, where its processes are."""
    try:
        return run.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        for process in in_session(run.pid):
            os.kill(process, signal.SIGABRT)  # which prints their stacks
        said, trouble = run.communicate()
        raise AssertionError(f"still at work after {SECONDS} seconds:\n{said}{trouble}") from None


def made(words: list[str]) -> subprocess.Popen[str]:
    run = begun(words)
    said, trouble = ended(run)
    assert run.returncode == 0, said + trouble
    return run


@pytest.fixture(scope="module")
def undisturbed(album: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs of three workers to which nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed") / "runs"
    made(command(album, folder, *THREE))
    return folder


def workers_of(launcher: int) -> list[int]:
    """The processes that a launcher has begun, but for the one that keeps multiprocessing's books."""
    found = []
    for child in _children(launcher):
        words = _file(child, "cmdline").replace("\0", " ")
        if "spawn_main" in words:
            found.append(child)
    return found


def _children(process: int) -> list[int]:
    tasks = (Path("/proc") / str(process) / "task").glob("*")
    return [int(word) for task in tasks for word in _file(process, f"task/{task.name}/children").split()]


def _file(process: int, name: str) -> str:
    try:
        return (Path("/proc") / str(process) / name).read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def in_session(leader: int) -> list[int]:
    """All processes that are left of what was begun in a session of its own."""
    left = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            _, _, after = _file(int(entry.name), "stat").rpartition(") ")
            fields = after.split()
            if fields and fields[0] != "Z" and int(fields[3]) == leader:
                left.append(int(entry.name))
    return left


def assert_nobody_left(leader: int) -> None:
    deadline = time.monotonic() + 20
    while in_session(leader):
        assert time.monotonic() < deadline, [_file(process, "cmdline") for process in in_session(leader)]
        time.sleep(0.1)


def assert_same_runs(one: Path, other: Path) -> None:
    assert len(run_folders(one)) == len(METHODS)
    for folder in run_folders(one):
        assert_same(folder.path, other / folder.path.name)


def test_three_workers_train_as_one_with_the_whole_minibatch(undisturbed: Path, album: Path, tmp_path: Path) -> None:
    """But for batch norm, whose statistics are of a worker's own examples."""
    made(command(album, tmp_path / "runs"))
    alone, together = (RunFolder(folder / "prong+-standard-seed0") for folder in (tmp_path / "runs", undisturbed))
    assert together.config.pop("workers") == 3 and "workers" not in alone.config
    assert [row["update"] for row in together.rows()] == list(range(0, 49, 6))
    assert len({row["lr"] for row in together.rows()[2:]}) > 1, "the waterfall is in it"
    for row, other in zip(alone.rows(), together.rows(), strict=True):
        for name in row.keys() - {"seconds"}:
            assert row[name] == pytest.approx(other[name], rel=1e-4), name
    ours, others = (torch.load(folder.path / "model.pt") for folder in (alone, together))
    for name in ours:
        assert torch.allclose(ours[name], others[name], rtol=1e-4, atol=1e-5), name


def test_torchrun_begins_the_same_run(undisturbed: Path, album: Path, tmp_path: Path) -> None:
    run = begun(command(album, tmp_path / "runs", how=TORCHRUN))
    said, trouble = ended(run)
    assert run.returncode == 0, said + trouble
    assert said.count("A page of them: prong report") == 1, "one of them speaks"
    assert_same_runs(tmp_path / "runs", undisturbed)


def test_torchrun_and_the_command_must_not_contradict_each_other(album: Path, tmp_path: Path) -> None:
    run = begun(command(album, tmp_path / "runs", "--workers", "2", how=TORCHRUN))
    said, trouble = ended(run)
    assert run.returncode != 0 and "--workers 2, but torchrun has begun 3" in trouble, said + trouble
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_two_hosts_make_the_same_run_and_one_of_them_keeps_it(undisturbed: Path, album: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts())
        except PermissionError as error:
            pytest.skip(f"no network namespaces here: {error}")
        meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].address}:29400")
        runs = []
        for host, workers in zip(hosts, ("1", "2"), strict=True):
            own = ("--local-addr", host.address, "--rdzv-conf", f"is_host={int(host is hosts[0])}")
            torchrun = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", workers, *meeting, *own)
            runs.append(host.begin(command(album, tmp_path / host.interface, how=(*torchrun, *COMPANY))))
        for run in runs:
            said, trouble = ended(run)
            assert run.returncode == 0, said + trouble
    kept = [host.interface for host in hosts if (tmp_path / host.interface).exists()]
    assert len(kept) == 1, "only the first worker writes"
    assert_same_runs(tmp_path / kept[0], undisturbed)


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_runs_end_the_same_when_workers_are_killed(kills: int, undisturbed: Path, album: Path, tmp_path: Path) -> None:
    """At random moments, of a random rank: while they begin, train, measure or write; and nobody is left behind."""
    seed = random.randrange(10**6)
    moments, runs, killed = random.Random(seed), 0, 0
    while killed < kills:
        folder, before = tmp_path / f"runs{runs}", killed
        run = begun(command(album, folder, *THREE, "--restarts", str(kills)))
        while run.poll() is None and killed < kills:
            if moments.random() < 0.7:  # while they train, else at any time
                wait_for_a_row(run, folder)
            time.sleep(moments.uniform(0.0, 1.0))
            workers = workers_of(run.pid)
            if len(workers) == 3:
                os.kill(moments.choice(workers), signal.SIGKILL)
                killed += 1
        said, trouble = ended(run)
        assert run.returncode == 0, f"seed {seed}: {said}{trouble}"
        assert killed == before or "All go on from the last checkpoint, restart" in trouble
        assert_nobody_left(run.pid)
        assert_same_runs(folder, undisturbed)
        runs += 1


def wait_for_a_row(run: subprocess.Popen[str], folder: Path) -> None:
    """One more than there are; or the end."""
    before = rows_in(folder)
    while run.poll() is None and rows_in(folder) <= before:
        time.sleep(0.01)


def wait_until(happens: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.01)


def rows_in(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("metrics.jsonl"))


@pytest.mark.slow
def test_a_worker_that_does_not_answer_counts_as_dead(undisturbed: Path, album: Path, tmp_path: Path) -> None:
    run = begun(command(album, tmp_path / "runs", *THREE, "--timeout", "20"))
    wait_for_a_row(run, tmp_path / "runs")
    stopped = workers_of(run.pid)[1]
    os.kill(stopped, signal.SIGSTOP)
    said, trouble = ended(run)
    assert run.returncode == 0, said + trouble
    assert "restart 1" in trouble
    assert_nobody_left(run.pid)
    assert_same_runs(tmp_path / "runs", undisturbed)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_not_used_by_anybody(undisturbed: Path, album: Path, tmp_path: Path) -> None:
    words = command(album, tmp_path / "runs", *THREE)
    run = begun(words)
    folder = RunFolder(tmp_path / "runs" / "prong+-standard-seed0")
    wait_for(folder.path / "metrics.jsonl", '"update": 12,')
    os.kill(run.pid, signal.SIGKILL)  # the launcher itself: its workers leave
    ended(run)
    assert_nobody_left(run.pid)
    newest = folder.path / CHECKPOINT
    newest.write_bytes(newest.read_bytes()[:-100])
    run = begun(words)
    said, trouble = ended(run)
    assert run.returncode == 0, said + trouble
    assert trouble.count(f"{newest} is damaged and is not used") == 1
    assert_same_runs(tmp_path / "runs", undisturbed)


def test_interrupted_workers_stop_together_with_one_line(undisturbed: Path, album: Path, tmp_path: Path) -> None:
    words = command(album, tmp_path / "runs", *THREE)
    run = begun(words)
    folder = RunFolder(tmp_path / "runs" / "batchnorm-standard-seed0")
    wait_for(folder.path / "metrics.jsonl", '"update": 6,')
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does: all hear of it
    said, trouble = ended(run)
    assert (run.returncode, trouble) == (130, ""), said + trouble
    assert said.count("Stopped. The same command goes on from here.") == 1
    assert_nobody_left(run.pid)
    assert folder.outcome is None and (folder.path / CHECKPOINT).exists()
    made(words)
    assert_same_runs(tmp_path / "runs", undisturbed)


@pytest.mark.parametrize(
    "whose",
    [
        pytest.param("multiprocessing.spawn", id="workers", marks=pytest.mark.slow),
        pytest.param("multiprocessing.forkserver", id="readers"),
    ],
)
def test_ctrl_c_waits_until_those_who_begin_are_ready_for_it(whose: str, album: Path, tmp_path: Path) -> None:
    run = begun(command(album, tmp_path / "runs", *THREE, "--readers", "1"))
    wait_until(lambda: any(whose in _file(process, "cmdline") for process in in_session(run.pid)))
    os.killpg(run.pid, signal.SIGINT)
    said, trouble = ended(run)
    assert (run.returncode, trouble) == (130, ""), said + trouble
    assert said.count("Stopped. The same command goes on from here.") == 1
    assert_nobody_left(run.pid)


@pytest.mark.parametrize(("told", "code"), [((signal.SIGINT, signal.SIGINT), 130), ((signal.SIGTERM,), 143)])
def test_a_second_ctrl_c_or_a_request_to_end_does_not_wait(
    told: tuple[signal.Signals, ...], code: int, album: Path, tmp_path: Path
) -> None:
    run = begun(command(album, tmp_path / "runs", *THREE))
    wait_until(lambda: len(workers_of(run.pid)) == 3)
    for number in told:
        os.kill(run.pid, number)
        time.sleep(0.2)
    said, trouble = ended(run)
    assert run.returncode == code, said + trouble
    assert "Traceback" not in trouble
    wait_until(lambda: not in_session(run.pid))


def test_an_error_lets_go_of_the_model_before_the_workers_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or DistributedDataParallel is the last to hold the group, and may wait for ever for gloo's threads."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    elastic = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "one"}
    for name, value in elastic.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    held: list[weakref.ref[torch.nn.Module]] = []

    def act(workers: Workers) -> None:
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        held.append(weakref.ref(model))
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise SystemExit(130) from None

    with pytest.raises(SystemExit) as left:
        with_workers(1, 0, 60.0, act)
    assert left.value.code == 130
    assert held[0]() is None
    assert not torch.distributed.is_initialized()


def test_what_one_worker_cannot_read_ends_all_with_one_line(album: Path, tmp_path: Path) -> None:
    album = make_album(tmp_path / "album", each=14)
    spoil(album / "train" / "n01" / "n01_05.JPEG", "truncated")
    run = begun(command(album, tmp_path / "runs", *THREE, "--restarts", "0", "--readers", "1"))
    said, trouble = ended(run)
    assert run.returncode == 1, said + trouble
    assert trouble.count("1 of 48 photographs cannot be read, more than the 0 allowed") == 1, trouble
    (told,) = (tmp_path / "runs").rglob("unreadable.txt")
    assert "n01_05.JPEG" in told.read_text(), "whoever met it"
    assert "restart" not in trouble and "Traceback" not in trouble
    assert_nobody_left(run.pid)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--workers", "4"), "--batch is split evenly over 4 workers, got 6"),
        (("--workers", "0"), "--workers is at least 1, got 0"),
        (("--workers", "2", "--jobs", "2"), "choose one of them"),
        (("--workers", "2", "--checkpoints", "0"), "--checkpoints is at least 1, got 0"),
        (("--workers", "2", "--timeout", "0"), "--timeout is at least 1, got 0"),
    ],
)
def test_what_workers_cannot_do_is_said_in_one_line(
    words: tuple[str, ...], message: str, album: Path, tmp_path: Path
) -> None:
    out = tmp_path / "runs"
    assert message in refused("run", "imagenet", "--data", str(album), *SMALL, "--out", str(out), *words)
    assert not out.exists()


def test_another_number_of_workers_is_another_run(undisturbed: Path, album: Path) -> None:
    before = json.dumps(RunFolder(undisturbed / "prong+-standard-seed0").config)
    run = begun(command(album, undisturbed))
    said, trouble = ended(run)
    assert run.returncode == 1 and "is of another configuration" in trouble, said + trouble
    assert json.dumps(RunFolder(undisturbed / "prong+-standard-seed0").config) == before
