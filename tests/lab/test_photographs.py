"""Photographs: which are found, what is shown of them, and that neither processes nor bad files change that."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.nn import functional as F

from prong.lab.contestants import Contestant
from prong.lab.folders import RunFolder
from prong.lab.jobs import Job, Watch, carry_out
from prong.lab.methods import KEYS, Schedule
from prong.lab.photographs import (
    Listing,
    UnreadableError,
    central_view,
    decode,
    find_photographs,
    random_view,
    random_window,
)
from prong.lab.reading import ReaderDiedError, Request, Viewer, read
from prong.lab.tasks.photographs import DEVIATION, MEAN, Photographs
from prong.lab.training import Order, Plan
from prong.lab.unreadable import TooManyUnreadableError, Unreadable
from tests.lab.pictures import CLASSES, make_album, photograph, spoil, tiny_net
from tests.lab.test_jobs import assert_same, stop_after

ROOT = Path(__file__).parents[2]


@pytest.fixture
def album(tmp_path: Path) -> Path:
    return make_album(tmp_path / "album")


def small_task(folder: Path, **options: object) -> Photographs:
    defaults = {"make": tiny_net, "size": 16, "held_out": 2, "unreadable": 0.2}
    return Photographs(folder=folder, **{**defaults, **options})  # type: ignore[arg-type]


# Which there are


def test_classes_are_the_folders_in_the_order_of_their_names(album: Path) -> None:
    (album / "classes.txt").write_text("n01\tfish\n")
    (album / "train" / "n02" / "notes.txt").write_text("not a photograph")
    (album / "train" / "n02" / ".n02_00.JPEG").write_text("rubbish of some program")
    found = find_photographs(album)
    assert found.classes == CLASSES and len(found.train) == 24 and len(found.val) == 6
    assert [file.split("/")[0] for file in found.train.files] == [CLASSES[label] for label in found.train.labels]
    assert list(found.train.files) == sorted(found.train.files)


def test_the_last_of_every_class_are_held_out(album: Path) -> None:
    kept, held = find_photographs(album).held_out(2)
    assert set(kept.files) | set(held.files) == set(find_photographs(album).train.files)
    assert held.files == tuple(f"{c}/{c}_{n:02}.JPEG" for c in CLASSES for n in (6, 7))
    assert held.labels == (0, 0, 1, 1, 2, 2)
    with pytest.raises(ValueError, match=r"n01 has 8 photographs, which is too few to hold out 8"):
        find_photographs(album).held_out(8)


def test_what_is_missing_is_named(album: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no photographs in .*nowhere.* --data"):
        find_photographs(tmp_path / "nowhere")
    for file in (album / "train" / "n02").iterdir():
        file.unlink()
    with pytest.raises(FileNotFoundError, match="n02 holds no photographs"):
        find_photographs(album)
    (album / "train" / "n02").rmdir()
    with pytest.raises(ValueError, match=r"val/n02 is a class that .*train has not"):
        find_photographs(album)


def test_photographs_for_validation_are_needed_in_folders_of_classes(album: Path) -> None:
    flat = album / "flat"
    (album / "val").rename(flat)
    with pytest.raises(FileNotFoundError, match="val is missing"):
        find_photographs(album)
    (album / "val").mkdir()
    (flat / "n01" / "n01_00.JPEG").rename(album / "val" / "ILSVRC2012_val_00000001.JPEG")
    with pytest.raises(FileNotFoundError, match="Sort its files into folders of classes"):
        find_photographs(album)


# What is shown of them


@given(width=st.integers(1, 300), height=st.integers(1, 300), seed=st.integers(0, 10**6))
def test_a_random_window_is_inside_and_not_empty(width: int, height: int, seed: int) -> None:
    left, top, right, bottom = random_window(width, height, np.random.default_rng(seed))
    assert 0 <= left < right <= width and 0 <= top < bottom <= height


def test_random_windows_have_areas_and_ratios_of_the_whole_range() -> None:
    random = np.random.default_rng(0)
    windows = np.array([random_window(500, 500, random) for _ in range(3000)])
    wide, high = windows[:, 2] - windows[:, 0], windows[:, 3] - windows[:, 1]
    share, ratio = wide * high / (500 * 500), wide / high
    assert share.min() == pytest.approx(0.08, abs=0.01) and share.max() > 0.95
    assert ratio.min() == pytest.approx(3 / 4, abs=0.02) and ratio.max() == pytest.approx(4 / 3, abs=0.02)
    assert 0.45 < (np.log(ratio) > 0).mean() < 0.55
    centres = (windows[:, 0] + windows[:, 2]) / 2
    assert centres.mean() == pytest.approx(250, abs=10)


def test_a_very_long_picture_is_shown_from_its_middle() -> None:
    assert random_window(1000, 10, np.random.default_rng(0)) == (493, 0, 506, 10)
    assert random_window(10, 1000, np.random.default_rng(0)) == (0, 493, 10, 506)


def test_half_of_the_random_views_are_mirrored() -> None:
    rising = Image.fromarray(np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], 3, 2).repeat(256, 0))
    views = [random_view(rising, 8, np.random.default_rng(seed)).astype(int) for seed in range(400)]
    assert 0.42 < np.mean([view[0, 0, 0] > view[0, -1, 0] for view in views]) < 0.58


@pytest.mark.parametrize("size", [(256, 256), (400, 256), (256, 300)])
def test_the_central_view_is_a_square_of_seven_eighths(size: tuple[int, int]) -> None:
    width, height = size
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    left, top = (width - 224) // 2, (height - 224) // 2
    shown = central_view(Image.fromarray(pixels), 224)
    assert np.array_equal(shown, pixels[top : top + 224, left : left + 224])


@pytest.mark.parametrize("size", [(3, 5), (1, 1), (16, 9)])
def test_pictures_smaller_than_the_view_are_enlarged(size: tuple[int, int]) -> None:
    image = Image.new("RGB", size, (10, 20, 30))
    for view in (central_view(image, 16), random_view(image, 16, np.random.default_rng(0))):
        assert view.shape == (16, 16, 3) and (view == (10, 20, 30)).all()


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGB"])
def test_grey_and_four_coloured_pictures_become_red_green_and_blue(mode: str, tmp_path: Path) -> None:
    photograph(tmp_path / "some.JPEG", 3, mode=mode)
    image = decode(tmp_path / "some.JPEG")
    assert image.mode == "RGB" and image.size == (24, 20)


def test_a_png_by_the_name_of_a_jpeg_is_read(tmp_path: Path) -> None:
    Image.new("RGBA", (4, 3), (255, 0, 0, 9)).save(tmp_path / "some.JPEG", "PNG")
    assert decode(tmp_path / "some.JPEG").getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("how", ["empty", "truncated", "text"])
def test_what_is_no_photograph_is_unreadable_with_a_reason_in_one_line(how: str, album: Path) -> None:
    path = album / "train" / "n01" / "n01_00.JPEG"
    spoil(path, how)
    with pytest.raises(UnreadableError) as caught:
        decode(path)
    assert str(caught.value) and "\n" not in str(caught.value) and str(path) not in str(caught.value)
    with pytest.raises(UnreadableError, match="No such file"):
        decode(path.with_name("gone.JPEG"))


# Reading them


def requests(count: int, listing: Listing) -> list[Request]:
    order = Order(len(listing), 5, seed=3)
    return [
        Request(tuple(chosen.tolist()), generator.initial_seed())
        for chosen, generator in islice(order.onwards(0), count)
    ]


def test_what_is_read_does_not_depend_on_the_number_of_processes(album: Path) -> None:
    spoil(album / "train" / "n01" / "n01_03.JPEG", "truncated")
    listing = find_photographs(album).train
    viewer, wanted = Viewer(listing, 16, allowed=3), requests(9, listing)
    before = torch.get_rng_state()
    alone = list(read(viewer, wanted, 0))
    for readers in (1, 2):
        for here, there in zip(alone, read(viewer, wanted, readers), strict=True):
            assert torch.equal(here.pictures, there.pictures) and torch.equal(here.labels, there.labels)
            assert here.unreadable == there.unreadable
    assert torch.equal(before, torch.get_rng_state())


def test_a_view_depends_on_the_seed_and_the_number_alone(album: Path) -> None:
    viewer = Viewer(find_photographs(album).train, 16, allowed=0)
    together, alone = viewer[Request((4, 9, 4), 7)], viewer[Request((9,), 7)]
    assert torch.equal(together.pictures[1], alone.pictures[0])
    assert torch.equal(together.pictures[0], together.pictures[2])
    assert not torch.equal(viewer[Request((9,), 8)].pictures, alone.pictures)


def test_the_next_readable_photograph_takes_the_place_of_an_unreadable_one(album: Path) -> None:
    for number in (3, 4):
        spoil(album / "train" / "n01" / f"n01_{number:02}.JPEG", "empty")
    viewer = Viewer(find_photographs(album).train, 16, allowed=3)
    views, wanted = viewer[Request((2, 3, 4, 5), 7)], viewer[Request((2, 5, 5, 5), 7)]
    assert torch.equal(views.pictures, wanted.pictures) and len(views.unreadable) == 2
    assert viewer[Request((2, 3, 5))].labels.tolist() == [0, 0], "left out among central views"


def test_nobody_looks_through_all_files_of_a_disk_that_is_gone(album: Path) -> None:
    viewer = Viewer(find_photographs(album).train, 16, allowed=3)
    (album / "train").rename(album / "gone")
    views = viewer[Request((0, 1), 7)]
    assert len(views.unreadable) == 4 and views.pictures.shape == (0, 3, 16, 16)


def test_a_reader_that_is_killed_is_noticed(album: Path) -> None:
    listing = find_photographs(album).train
    reading = read(Viewer(listing, 16, 0), requests(200, listing), 1)
    next(reading)
    for child in multiprocessing.active_children():
        os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(ReaderDiedError, match="died"):
        list(reading)


def test_every_unreadable_file_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "unreadable.txt"
    told = Unreadable(100, 0.02, file)
    told.add({"a.JPEG": "truncated"})
    told.add({"a.JPEG": "truncated", "b.JPEG": "empty"})
    assert capsys.readouterr().err == "unreadable: a.JPEG: truncated\nunreadable: b.JPEG: empty\n"
    assert file.read_text() == "a.JPEG\ttruncated\nb.JPEG\tempty\n"
    again = Unreadable(100, 0.02, file)
    again.add({"b.JPEG": "empty", "c.JPEG": "empty"})
    assert capsys.readouterr().err == "unreadable: c.JPEG: empty\n"
    with pytest.raises(
        TooManyUnreadableError, match=r"3 of 100 .* more than the 2 allowed; .*unreadable.txt names them"
    ):
        again.add({"d.JPEG": "text"})
    Unreadable(100, 0.02, file).add({})  # what a file names may have been mended


# The task


def test_measures_are_those_of_a_loop_over_photographs(album: Path) -> None:
    task = small_task(album)
    model = task.build()
    measured = task.measure(model, 1000)
    names = ("error", "top5_error", "cross_entropy")
    assert set(measured) == {f"{part}_{name}" for part in ("train", "validation", "test") for name in names}
    val = find_photographs(album).val
    wrong, entropy = 0, 0.0
    for number in range(len(val)):
        pixels = torch.from_numpy(central_view(decode(val.path(number)), 16).copy()).movedim(-1, 0)
        x = (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(DEVIATION).view(3, 1, 1)
        logits = model(x[None])
        wrong += int(logits.argmax() != val.labels[number])
        entropy += F.cross_entropy(logits, torch.tensor(val.labels[number : number + 1])).item()
    assert measured["test_error"] == pytest.approx(wrong / 6) and measured["test_top5_error"] == 0
    assert measured["test_cross_entropy"] == pytest.approx(entropy / 6, rel=1e-4)
    assert model.training


def test_the_best_five_are_counted(album: Path) -> None:
    task = small_task(album, make=lambda batch_norm=False, classes=3: Ranked())
    measured = task.measure(task.build(), 1000)
    assert measured["test_error"] == 1.0 and measured["test_top5_error"] == pytest.approx(2 / 3)


class Ranked(torch.nn.Module):
    """Seven classes: the right ones are at places 5, 6 and 7."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([3.0, 2.0, 1.0, 4.0, 5.0, 6.0, 7.0]).expand(len(x), 7)


def test_with_nothing_held_out_val_is_for_validation(album: Path) -> None:
    task, other = small_task(album, held_out=0), small_task(album)
    assert task.count == 24 and other.count == 18
    assert "24 for training, 6 for validation; 3 classes, 16 x 16 pixels" in task.source
    assert "18 for training, 6 for validation, 6 for test" in other.source and task.source != other.source
    assert task.measure(task.build(), 9)["validation_error"] >= 0


def test_batches_read_ahead_are_those_read_one_by_one(album: Path) -> None:
    task = small_task(album)
    order = Order(task.count, 4, 0)
    stream = replace(task, readers=1).stream(order.onwards(2))
    for request, (x, y) in zip(islice(order.onwards(2), 6), stream, strict=False):
        there, labels = task.batch(*request)
        assert torch.equal(x, there) and torch.equal(y, labels)
        assert x.shape == (4, 3, 16, 16) and x.is_contiguous(memory_format=torch.channels_last)


def test_photographs_for_an_initialisation_are_read_when_they_are_asked_for(album: Path) -> None:
    batches = small_task(album).initial_batches()
    (album / "train").rename(album / "gone")
    with pytest.raises(TooManyUnreadableError):
        list(batches)
    (album / "gone").rename(album / "train")
    assert [x.shape for x in small_task(album, unreadable=0.5).initial_batches()] == [(18, 3, 16, 16)]


# Runs


def small_job(folder: Path, key: str = "prong+", **options: object) -> Job:
    plan = Plan(8, 0, batch=4, warm_up=2, evaluations=4, evaluated=9, anneal="waterfall", patience=0)
    contestant = Contestant(KEYS[key].name, "whitened" if "prong" in key else "standard")
    return Job(
        "imagenet", key, small_task(folder, **options), contestant, {"lr": 1e-3, "eps": 0.1}, Schedule(3, 12), plan
    )


@pytest.mark.parametrize("readers", [0, 2])
def test_a_run_that_was_stopped_goes_on_to_the_bit(readers: int, album: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    spoil(album / "train" / "n02" / "n02_01.JPEG", "truncated")
    carry_out(small_job(album), RunFolder(tmp_path / "whole"))
    for stop in (3, 3):
        with pytest.raises(KeyboardInterrupt):
            carry_out(small_job(album, readers=readers), RunFolder(tmp_path / "cut"), stop_after(stop))
    assert carry_out(small_job(album, readers=readers), RunFolder(tmp_path / "cut"))["failure"] is None
    assert_same(tmp_path / "cut", tmp_path / "whole")
    told = (tmp_path / "cut" / "unreadable.txt").read_text().splitlines()
    assert len(told) == 1 and told[0].startswith(str(album / "train" / "n02" / "n02_01.JPEG\t"))


def test_a_run_with_too_many_unreadable_photographs_stops_and_goes_on_when_they_are_mended(
    album: Path, tmp_path: Path
) -> None:
    good = {path: path.read_bytes() for path in (album / "train" / "n02").iterdir()}
    for path in good:
        spoil(path, "text")
    job, folder = small_job(album, "nesterov"), RunFolder(tmp_path / "run")
    with pytest.raises(TooManyUnreadableError, match=r"of 30 photographs cannot be read, more than the 6 allowed"):
        carry_out(job, folder)
    assert folder.outcome is None and len((folder.path / "unreadable.txt").read_text().splitlines()) >= 7
    for path, content in good.items():
        path.write_bytes(content)
    assert carry_out(job, folder)["failure"] is None


def test_the_waterfall_falls_after_one_measurement_without_improvement(album: Path, tmp_path: Path) -> None:
    rates = {}
    for patience in (0, 1):
        job = small_job(album, "nesterov")
        still = replace(job, settings={"lr": 1e-5}, plan=replace(job.plan, warm_up=0, patience=patience))
        rows: list[dict[str, float]] = []
        carry_out(still, RunFolder(tmp_path / str(patience)), Watch(on_row=lambda row, _, rows=rows: rows.append(row)))
        rates[patience] = [round(np.log10(row["lr"])) for row in rows]
        assert (still.config()["plan"]).get("patience") == patience
    assert rates == {0: [-5, -5, -5, -6, -7], 1: [-5, -5, -5, -5, -6]}
    assert "patience" not in replace(job, plan=Plan(8)).config()["plan"], "folders of before are still known"


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_no_reader_outlives_a_run_that_is_killed(album: Path) -> None:
    script = (
        "import sys, multiprocessing, time; from pathlib import Path\n"
        "from prong.lab.photographs import find_photographs; from prong.lab.reading import *\n"
        "if __name__ == '__main__':\n"
        "    listing = find_photographs(Path(sys.argv[1])).train\n"
        "    reading = read(Viewer(listing, 16, 0), [Request((0,), 1)] * 1000, 2)\n"
        "    next(reading); print(*(c.pid for c in multiprocessing.active_children()), flush=True); time.sleep(600)\n"
    )
    (album / "reads.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, str(album / "reads.py"), str(album)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    children = [int(pid) for pid in process.stdout.readline().split()]
    process.kill()
    process.wait()
    process.stdout.close()
    assert len(children) == 2
    deadline = time.monotonic() + 100
    while any(is_alive(pid) for pid in children):
        assert time.monotonic() < deadline, "readers are left"
        time.sleep(0.1)
