"""MNIST-like files and digits for the tests of the lab."""

from __future__ import annotations

import gzip
import os
import struct
from pathlib import Path

import torch
from torch import Tensor

from prong.lab.data import FILES, Digits
from prong.lab.idx import IMAGES, LABELS


def idx_bytes(array: Tensor, magic: int) -> bytes:
    return struct.pack(f">{1 + array.dim()}I", magic, *array.shape) + array.numpy().tobytes()


def images(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 28, 28), dtype=torch.uint8, generator=generator)


def labels(count: int) -> Tensor:
    return (torch.arange(count) % 10).to(torch.uint8)


def contents(train: int = 30, test: int = 20) -> dict[str, bytes]:
    """What each of the four files holds."""
    arrays = (images(train), labels(train), images(test, seed=1), labels(test))
    return {name: idx_bytes(x, IMAGES if x.dim() == 3 else LABELS) for name, x in zip(FILES, arrays, strict=True)}


def write_files(folder: Path, files: dict[str, bytes], zipped: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / (name + ".gz" * zipped)).write_bytes(gzip.compress(data) if zipped else data)


def real_mnist() -> Path | None:
    """A folder with MNIST itself, if this machine has one."""
    beside = Path(__file__).parents[3] / "shared" / "data"
    named = os.environ.get("PRONG_DATA")
    return Path(named) if named else beside if beside.is_dir() else None


def small_digits(count: int = 40) -> Digits:
    """A few random pictures, for loops that are to be fast."""
    pixels = images(2 * count).reshape(-1, 784).float() / 255
    numbers = labels(count).long()
    return Digits(pixels[:count], pixels[count:], numbers, numbers, "random pixels")
