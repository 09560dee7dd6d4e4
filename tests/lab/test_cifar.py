"""CIFAR-10 is read as published, from either version, and nothing else is."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from prong.lab.cifar import CLASSES, Pictures, load_cifar10
from prong.lab.datasets.published import CIFAR10_BINARY, CIFAR10_PYTHON, Published
from prong.lab.datasets.shelf import find
from tests.lab.mirrors import small

COUNT = 7  # pictures in a file
SETS = (CIFAR10_BINARY, CIFAR10_PYTHON)


def batch(number: int) -> tuple[Tensor, list[int]]:
    generator = torch.Generator().manual_seed(number)
    pictures = torch.randint(0, 256, (COUNT, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return pictures, [(number + 3 * i) % 10 for i in range(COUNT)]


def records(pictures: Tensor, labels: list[int]) -> bytes:
    """The binary version, byte by byte: label, red, green, blue."""
    return b"".join(
        bytes([label]) + b"".join(bytes(plane.flatten().tolist()) for plane in picture)
        for picture, label in zip(pictures, labels, strict=True)
    )


def old_pickle(pictures: Tensor, labels: list[int]) -> bytes:
    """The python version, written as Python 2 with the NumPy of 2009 wrote it."""

    def text(word: str) -> bytes:
        return pickle.SHORT_BINSTRING + bytes([len(word)]) + word.encode()

    def number(value: int) -> bytes:
        return pickle.BININT + struct.pack("<i", value)

    def entity(module: str, name: str) -> bytes:
        return pickle.GLOBAL + f"{module}\n{name}\n".encode()

    pixels = bytes(pictures.flatten().tolist())
    dtype = entity("numpy", "dtype") + text("u1") + number(0) + number(1) + pickle.TUPLE3 + pickle.REDUCE
    order = [number(3), text("|"), pickle.NONE * 3, number(-1), number(-1), number(0)]
    dtype += pickle.MARK + b"".join(order) + pickle.TUPLE + pickle.BUILD
    shape = number(len(pictures)) + number(3072) + pickle.TUPLE2
    data = pickle.BINSTRING + struct.pack("<I", len(pixels)) + pixels
    array = entity("numpy.core.multiarray", "_reconstruct") + entity("numpy", "ndarray")
    array += number(0) + pickle.TUPLE1 + text("b") + pickle.TUPLE3 + pickle.REDUCE
    array += pickle.MARK + number(1) + shape + dtype + pickle.NEWFALSE + data + pickle.TUPLE + pickle.BUILD
    numbers = pickle.EMPTY_LIST + pickle.MARK + b"".join(map(number, labels)) + pickle.APPENDS
    items = text("batch_label") + text("training batch") + text("labels") + numbers + text("data") + array
    return pickle.PROTO + b"\2" + pickle.EMPTY_DICT + pickle.MARK + items + pickle.SETITEMS + pickle.STOP


def files_of(published: Published) -> dict[str, bytes]:
    write = records if published is CIFAR10_BINARY else old_pickle
    return {file.name: write(*batch(number)) for number, file in enumerate(published.files)}


def put(published: Published, folder: Path) -> Published:
    """Small files in a folder, and the version that they are."""
    files = files_of(published)
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return small(published, files)


def assert_all_read(pictures: Pictures) -> None:
    batches = [batch(number) for number in range(6)]
    assert torch.equal(pictures.train, torch.cat([x for x, _ in batches[:5]]))
    assert torch.equal(pictures.train_labels, torch.tensor([label for _, labels in batches[:5] for label in labels]))
    assert torch.equal(pictures.test, batches[5][0])
    assert torch.equal(pictures.test_labels, torch.tensor(batches[5][1]))
    assert pictures.train.dtype == torch.uint8 and pictures.train_labels.dtype == torch.int64
    assert pictures.classes == CLASSES and len(CLASSES) == 10
    assert pictures.source == "CIFAR-10, 35 training and 7 test pictures"


@pytest.mark.parametrize(("version", "place"), [(version, place) for version in SETS for place in version.places])
def test_both_versions_are_read_alike_in_every_usual_folder(tmp_path: Path, version: Published, place: str) -> None:
    assert_all_read(load_cifar10(tmp_path, [put(version, tmp_path / place)]))


def test_an_old_pickle_is_what_numpy_reads() -> None:
    pictures, labels = batch(0)
    content = pickle.loads(old_pickle(pictures, labels), encoding="latin1")
    assert np.array_equal(content["data"], pictures.reshape(COUNT, 3072).numpy()) and content["labels"] == labels


def test_the_environment_names_the_folder_or_else_it_is_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = put(CIFAR10_BINARY, tmp_path / "data" / "cifar-10-batches-bin")
    monkeypatch.setenv("PRONG_DATA", str(tmp_path / "data"))
    assert_all_read(load_cifar10(versions=[version]))
    monkeypatch.delenv("PRONG_DATA")
    monkeypatch.chdir(tmp_path)
    assert_all_read(load_cifar10(versions=[version]))


def test_without_files_the_error_says_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        load_cifar10(tmp_path)
    said = str(caught.value)
    assert all(word in said for word in (str(tmp_path), "cifar-10-batches-bin", "cifar-10-batches-py", "PRONG_DATA"))
    assert f"prong data fetch cifar10 --data {tmp_path}" in said and "\n" not in said


def test_some_of_the_files_are_an_error_that_names_the_others(tmp_path: Path) -> None:
    version = put(CIFAR10_BINARY, tmp_path)
    (tmp_path / "data_batch_4.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds some of it; missing: data_batch_4\.bin\."):
        load_cifar10(tmp_path, [version])


@pytest.mark.parametrize("version", SETS)
@pytest.mark.parametrize("damage", [lambda x: x[:-1], lambda x: x + b"\0", lambda x: x[:9] + b"?" + x[10:]])
def test_a_damaged_file_is_named(tmp_path: Path, version: Published, damage) -> None:
    published = put(version, tmp_path)
    path = tmp_path / version.files[2].name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(
        ValueError, match=f"{path} is damaged.*`prong data fetch cifar10 --version {version.version} --data {tmp_path}`"
    ):
        load_cifar10(tmp_path, [published])


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_nothing_is_unpickled_unless_all_files_are_as_published(tmp_path: Path) -> None:
    published = put(CIFAR10_PYTHON, tmp_path)
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(ValueError, match="data_batch_1 is damaged"):
        load_cifar10(tmp_path, [published])
    assert not (tmp_path / "sprung").exists()


def test_a_pickle_makes_nothing_but_arrays_even_if_its_checksum_says_so(tmp_path: Path) -> None:
    files = files_of(CIFAR10_PYTHON) | {"data_batch_1": pickle.dumps(Trap(tmp_path / "sprung"))}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(pickle.UnpicklingError, match="mkdir does not belong"):
        load_cifar10(tmp_path, [small(CIFAR10_PYTHON, files)])
    assert not (tmp_path / "sprung").exists()


def test_files_that_are_not_the_published_ones_are_refused_by_default(tmp_path: Path) -> None:
    put(CIFAR10_BINARY, tmp_path)
    with pytest.raises(ValueError, match=r"data_batch_1\.bin is damaged"):
        load_cifar10(tmp_path)


@pytest.mark.parametrize("version", SETS)
def test_the_published_files_hold_sixty_thousand_pictures(version: Published) -> None:
    folder = Path(os.environ.get("PRONG_DATA", "data"))
    if not find(version, folder).is_verified:
        pytest.skip(f"no CIFAR-10 here: `{version.command}`")
    pictures = load_cifar10(folder, [version])
    assert pictures.train.shape == (50_000, 3, 32, 32) and pictures.test.shape == (10_000, 3, 32, 32)
    assert pictures.train_labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert pictures.train_labels.bincount().tolist() == [5000] * 10
    assert pictures.test_labels.bincount().tolist() == [1000] * 10
    mean = pictures.train.float().mean(dim=(0, 2, 3)) / 255
    assert mean.tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)
