"""CIFAR-10, from either version in which it was published; not a byte is used that is not as published."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from prong.lab.datasets.published import CIFAR10_BINARY, CIFAR10_PYTHON, Published
from prong.lab.datasets.shelf import FOLDER_VARIABLE, data_folder

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32  # bytes of a picture in the binary version, with its label


@dataclass(frozen=True)
class Pictures:
    """Photographs with their labels, and where they came from.

    Shapes: train (n, 3, 32, 32), test (m, 3, 32, 32) uint8; train_labels (n,), test_labels (m,) int64.
    """

    train: Tensor
    test: Tensor
    train_labels: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]
    source: str


def load_cifar10(
    folder: Path | None = None, versions: Sequence[Published] = (CIFAR10_BINARY, CIFAR10_PYTHON)
) -> Pictures:
    """CIFAR-10 from the first of its versions that lies below `folder`, or the one PRONG_DATA names, or else ./data.

    The last of a version's files is the test set. What is read is compared with its checksum first.

    Raises:
        FileNotFoundError: no version is there.
        ValueError: a file is not as published; the message names it.
    """
    folder = data_folder(folder)
    version, place = _find(versions, folder)
    decode = _from_pickle if version.version == CIFAR10_PYTHON.version else _from_records
    batches = [decode(content) for content in _verified(version, place, folder)]
    (*train, test), (*train_labels, test_labels) = zip(*batches, strict=True)
    pictures, labels = torch.cat(train), torch.cat(train_labels)
    source = f"CIFAR-10, {len(pictures):,} training and {len(test):,} test pictures"
    return Pictures(pictures, test, labels, test_labels, CLASSES, source)


def _find(versions: Sequence[Published], folder: Path) -> tuple[Published, Path]:
    """A version and the folder that holds all its files."""
    partial = ""
    for version in versions:
        for place in version.places:
            missing = [file.name for file in version.files if not (folder / place / file.name).is_file()]
            if not missing:
                return version, folder / place
            if len(missing) < len(version.files):
                partial += f" {folder / place} holds some of it; missing: {', '.join(missing)}."
    places = ", ".join(place for version in versions for place in version.places if place != ".")
    raise FileNotFoundError(
        f"no CIFAR-10 in {folder}, nor in {places} below it.{partial} "
        f"Run `prong data fetch cifar10 --data {folder}`, or set {FOLDER_VARIABLE} to a folder that holds it."
    )


def _verified(version: Published, place: Path, folder: Path) -> list[bytes]:
    """What is in the files, which are the published ones."""
    contents = [(place / file.name).read_bytes() for file in version.files]
    for file, content in zip(version.files, contents, strict=True):
        if not file.is_content(content):
            raise ValueError(
                f"{place / file.name} is damaged: it is not the published file. "
                f"Fetch it anew with `{version.command} --data {folder}`."
            )
    return contents


def _from_records(content: bytes) -> tuple[Tensor, Tensor]:
    """Pictures and labels: each record is a byte of label, then the planes of red, green and blue, row by row."""
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, RECORD)
    return records[:, 1:].reshape(-1, *SHAPE), records[:, 0].long()


def _from_pickle(content: bytes) -> tuple[Tensor, Tensor]:
    """Pictures and labels from a dictionary of an array and a list."""
    batch = _ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
    return torch.from_numpy(batch["data"]).reshape(-1, *SHAPE), torch.tensor(batch["labels"])


class _ArrayUnpickler(pickle.Unpickler):
    """Makes arrays and plain values of a pickle, and nothing else."""

    known: ClassVar[Mapping[tuple[str, str], Any]] = {
        ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],  # its module has moved since 2009
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.known:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong in a file of pictures")
        return self.known[module, name]
