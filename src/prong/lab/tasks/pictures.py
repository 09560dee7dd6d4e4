"""CIFAR-10 as in the paper: random crops of 24 x 24 pixels, half of them mirrored; 5,000 pictures held out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prong.lab.cifar import Pictures, load_cifar10
from prong.lab.datasets.shelf import data_folder
from prong.lab.models import CROP, cifar10_net
from prong.lab.tasks.base import INITIAL, require_finite, spread

HELD_OUT = 5000
CHUNK = 500  # pictures evaluated at once


@dataclass(frozen=True)
class Classification:
    """CIFAR-10's pictures, to be told apart.

    Attributes:
        make: a new model, from `batch_norm`; its outputs are logits.
        folder: of the data, as `load_cifar10` has it.
        held_out: so many of the training pictures, the last, are for validation.
        channels_last: the layout of pictures and kernels in memory.
    """

    make: Callable[..., nn.Module] = cifar10_net
    folder: Path | None = None
    held_out: int = HELD_OUT
    channels_last: bool = True
    watched: ClassVar[str] = "validation_error"

    @property
    def source(self) -> str:
        """Where the pictures come from, and which are held out."""
        return f"{self._sets().source}; the last {self.held_out:,} training pictures are for validation"

    @property
    def count(self) -> int:
        """How many pictures are trained on."""
        return len(self._sets().train) - self.held_out

    def build(self, batch_norm: bool = False) -> nn.Module:
        """A new model."""
        model = self.make(batch_norm=batch_norm)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model  # type: ignore[call-overload]

    def batch(self, chosen: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random crops of training pictures, mirrored or not, normalised; and their classes."""
        sets = self._sets()
        crops = random_crops(sets.train[chosen], CROP, generator)
        return self._prepared(crops), sets.train_labels[chosen]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(outputs, targets)

    def measure(self, model: nn.Module, evaluated: int) -> Mapping[str, float]:
        """Cross-entropy and the share of wrong answers: on some training pictures, all held-out and all test ones."""
        sets, trained = self._sets(), self.count
        some = spread(trained, evaluated)
        parts = {
            "train": (sets.train[:trained][some], sets.train_labels[:trained][some]),
            "validation": (sets.train[trained:], sets.train_labels[trained:]),
            "test": (sets.test, sets.test_labels),
        }
        measures = {}
        for part, (pictures, labels) in parts.items():
            for name, value in self._errors(model, pictures, labels).items():
                measures[f"{part}_{name}"] = value
        return require_finite(measures)

    def initial_batches(self) -> Sequence[Tensor]:
        """Crops from the middle of the first pictures."""
        chosen = self._sets().train[: min(INITIAL, self.count)]
        return [self._prepared(central_crops(x, CROP)) for x in torch.split(chosen, CHUNK)]

    def keepsakes(self, model: nn.Module) -> Mapping[str, Any]:
        """Nothing."""
        return {}

    @torch.no_grad()
    def _errors(self, model: nn.Module, pictures: Tensor, labels: Tensor) -> dict[str, float]:
        model.eval()
        entropy = wrong = 0.0
        for x, y in zip(torch.split(pictures, CHUNK), torch.split(labels, CHUNK), strict=True):
            logits = model(self._prepared(central_crops(x, CROP))).float()
            entropy += F.cross_entropy(logits, y, reduction="sum").item()
            wrong += (logits.argmax(1) != y).sum().item()
        model.train()
        return {"cross_entropy": entropy / len(labels), "error": wrong / len(labels)}

    def _prepared(self, pictures: Tensor) -> Tensor:
        """Pictures (n, 3, h, w) of bytes, normalised by the training pictures' colours."""
        mean, deviation = _colours(data_folder(self.folder), self.count)
        x = pictures.float().sub_(mean).div_(deviation)
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last else x

    def _sets(self) -> Pictures:
        return _load(data_folder(self.folder))


def random_crops(pictures: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """A crop (n, c, size, size) of each picture (n, c, h, w), anywhere in it, mirrored with probability one half."""
    n, _, height, width = pictures.shape
    rows = _starts(n, height - size, generator) + torch.arange(size)
    columns = _starts(n, width - size, generator) + torch.arange(size)
    mirrored = torch.rand(n, 1, generator=generator) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    examples = torch.arange(n)[:, None, None]
    crops = pictures.movedim(1, -1)[examples, rows[:, :, None], columns[:, None, :]]  # (n, size, size, c)
    return crops.movedim(-1, 1)


def central_crops(pictures: Tensor, size: int) -> Tensor:
    """The middle (n, c, size, size) of pictures (n, c, h, w)."""
    top, left = ((side - size) // 2 for side in pictures.shape[2:])
    return pictures[:, :, top : top + size, left : left + size]


def _starts(n: int, largest: int, generator: torch.Generator) -> Tensor:
    return torch.randint(largest + 1, (n, 1), generator=generator)


@cache
def _load(folder: Path) -> Pictures:
    return load_cifar10(folder)


@cache
def _colours(folder: Path, trained: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (1, 3, 1, 1) of the colours of the pictures that are trained on."""
    pictures = _load(folder).train[:trained]
    histograms = [torch.bincount(pictures[:, c].flatten().int(), minlength=256).double() for c in range(3)]
    values = torch.arange(256, dtype=torch.float64)
    means = [(h @ values / h.sum()) for h in histograms]
    deviations = [(h @ (values - m).square() / h.sum()).sqrt() for h, m in zip(histograms, means, strict=True)]
    mean, deviation = (torch.stack(x).float().view(1, 3, 1, 1) for x in (means, deviations))
    return mean, deviation
