"""Small photographs in folders, made for tests, and ways to spoil them."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from PIL import Image
from torch import nn

CLASSES = ("n01", "n02", "n03")


def photograph(path: Path, seed: int, size: tuple[int, int] = (24, 20), mode: str = "RGB") -> None:
    """Coarse noise in the colours of the seed, which JPEG keeps well."""
    noise = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise).resize(size, Image.Resampling.BILINEAR).convert(mode).save(path, "JPEG", quality=95)


def make_album(folder: Path, each: int = 8, val: int = 2) -> Path:
    """Classes of `each` photographs to train on and `val` more."""
    for k, name in enumerate(CLASSES):
        for n in range(each):
            photograph(folder / "train" / name / f"{name}_{n:02}.JPEG", 1000 * k + n)
        for n in range(val):
            photograph(folder / "val" / name / f"{name}_{n:02}.JPEG", 1000 * k + 500 + n)
    return folder


def spoil(path: Path, how: str) -> None:
    """Make a file of that name one that cannot be read."""
    content = path.read_bytes()
    kinds = {"empty": b"", "truncated": content[: len(content) // 2], "text": b"no picture at all"}
    path.write_bytes(kinds[how])


def tiny_net(batch_norm: bool = False, classes: int = 3) -> nn.Sequential:
    norm = [nn.BatchNorm2d(4)] if batch_norm else []
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), *norm, nn.ReLU(), pool, nn.Linear(4, classes))


def slow_net(batch_norm: bool = False, classes: int = 3) -> nn.Sequential:
    """The same, which takes its time."""
    net = tiny_net(batch_norm, classes)
    net.register_forward_pre_hook(_wait)
    return net


def _wait(*_: object) -> None:
    time.sleep(0.04)
