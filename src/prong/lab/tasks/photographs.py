"""Photographs to be told apart, as in ILSVRC: random views of them are trained on, central ones are judged."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prong.distributed.workers import ALONE, Workers
from prong.lab.datasets.shelf import data_folder
from prong.lab.inception import inception
from prong.lab.parallel import by_first
from prong.lab.photographs import Album, Listing, find_photographs
from prong.lab.reading import Request, Viewer, read
from prong.lab.tasks.base import require_finite, spread
from prong.lab.unreadable import FILE, TooManyUnreadableError, Unreadable

SIZE = 224
INITIAL = 1000  # photographs behind a whitened initialisation; every one is many samples to a convolution
CHUNK = 50  # evaluated at once
# Of the colours of ILSVRC's training photographs, in bytes.
MEAN, DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


@dataclass(frozen=True)
class Photographs:
    """Photographs in folders of classes, to be told apart.

    Attributes:
        make: a new model, from `batch_norm` and the number of `classes`; its outputs are logits.
        folder: with `train` and `val` in it; by default that of all data.
        size: pixels per side that the model is shown.
        held_out: so many training photographs of every class, the last, are for validation, and `val` is the test set.
            With none `val` is for validation, as in much of the literature.
        readers: processes that read; nothing but time depends on them.
        unreadable: the share of all photographs that may be so.
        channels_last: the layout of pictures and kernels in memory.
        told: the unreadable ones that a run has met.
        workers: of which this one has its part of all photographs.
    """

    make: Callable[..., nn.Module] = inception
    folder: Path | None = None
    size: int = SIZE
    held_out: int = 25
    readers: int = 0
    unreadable: float = 0.01
    channels_last: bool = True
    told: Unreadable | None = field(default=None, compare=False)
    workers: Workers = field(default=ALONE, compare=False)
    watched: ClassVar[str] = "validation_error"

    @property
    def source(self) -> str:
        """How many photographs there are, what for, and a digest of their names."""
        album, parts = self._album(), self._parts()
        counts = ", ".join(f"{len(listing):,} for {part}" for part, listing in parts.items())
        shown = f"{len(album.classes)} classes, {self.size} x {self.size} pixels"
        return f"photographs: {counts}; {shown}; names {_digest(self._folder())}"

    @property
    def count(self) -> int:
        """How many photographs are trained on."""
        return len(self._parts()["training"])

    def build(self, batch_norm: bool = False) -> nn.Module:
        """A new model."""
        model = self.make(batch_norm=batch_norm, classes=len(self._album().classes)).to(self.workers.device)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model  # type: ignore[call-overload]

    def batch(self, chosen: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random views of training photographs and their classes, read here and now."""
        return next(replace(self, readers=0).stream([(chosen, generator)]))

    def stream(self, requests: Iterable[tuple[Tensor, torch.Generator]]) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of several updates, read ahead; random in a view is what the generator's seed and its number say.

        Raises:
            TooManyUnreadableError: that.
        """
        wanted = (Request(tuple(self._part(c.tolist())), generator.initial_seed()) for c, generator in requests)
        told = self._told()
        reading = self._read(self._parts()["training"], wanted, told)
        while True:
            error: OSError | None = None
            found: Mapping[str, str] = {}
            try:
                x, y, found = next(reading)
            except StopIteration:
                return
            except OSError as caught:
                error = caught
            self._tell(told, found, error)
            yield x, y

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(outputs, targets)

    def measure(self, model: nn.Module, evaluated: int) -> Mapping[str, float]:
        """Cross-entropy and the shares of wrong answers, the best and the best five; on some training photographs.

        And on all that are held out, and all of the test set.
        """
        measures = {}
        for part, listing in self._parts().items():
            some = spread(len(listing), evaluated) if part == "training" else slice(None)
            for name, value in self._errors(model, listing, range(len(listing))[some]).items():
                measures[f"{part.replace('training', 'train')}_{name}"] = value
        return require_finite(measures)

    def initial_batches(self) -> Sequence[Tensor]:
        """Central views of photographs of all classes, read when they are asked for."""
        training = self._parts()["training"]
        numbers = self._part(range(len(training))[spread(len(training), INITIAL)])
        return Lazy(lambda: self._initial(training, numbers))

    def keepsakes(self, model: nn.Module) -> Mapping[str, Any]:
        """Nothing."""
        return {}

    def within(self, folder: Path, workers: Workers) -> Photographs:
        """The same for one of the workers of a run in that folder, where the first names unreadable files."""
        told = self._none_told(folder / FILE if workers.rank == 0 else None, quiet=workers.rank > 0)
        return replace(self, told=told, workers=workers)

    @torch.no_grad()
    def _errors(self, model: nn.Module, listing: Listing, numbers: Sequence[int]) -> dict[str, float]:
        model.eval()
        sums = {"error": 0.0, "top5_error": 0.0, "cross_entropy": 0.0, "count": 0.0}
        told, met = self._told(), dict[str, str]()
        error: OSError | None = None
        try:
            for x, y, found in self._read(listing, _chunks(self._part(numbers)), told):
                logits = model(x).float()
                guesses = logits.topk(min(5, logits.shape[1])).indices
                right = guesses == y[:, None]
                sums["error"] += len(y) - right[:, 0].sum().item()
                sums["top5_error"] += len(y) - right.any(1).sum().item()
                sums["cross_entropy"] += F.cross_entropy(logits, y, reduction="sum").item()
                sums["count"] += len(y)
                met |= found
        except OSError as caught:
            error = caught
        model.train()
        self._tell(told, {**told.met, **met}, error)
        sums = self.workers.total(sums)
        count = sums.pop("count")
        if not count:
            raise TooManyUnreadableError(f"not one of the photographs in {listing.folder} can be read. Mend them.")
        return {name: value / count for name, value in sums.items()}

    def _initial(self, training: Listing, numbers: Sequence[int]) -> list[Tensor]:
        told, inputs = self._told(), []
        for x, _, found in self._read(training, _chunks(numbers), told):
            told.add(found)
            inputs.append(x)
        return inputs

    def _read(
        self, listing: Listing, requests: Iterable[Request], told: Unreadable
    ) -> Iterator[tuple[Tensor, Tensor, Mapping[str, str]]]:
        """Inputs, classes, and what could not be read."""
        viewer = Viewer(listing, self.size, told.allowed)
        for views in read(viewer, requests, self.readers):
            yield self._prepared(views.pictures), views.labels.to(self.workers.device), views.unreadable

    def _tell(self, told: Unreadable, found: Mapping[str, str], error: OSError | None) -> None:
        """Tell of what any worker could not read; whatever is wrong with one ends all."""
        everything = {path: why for each in self.workers.meet(found, error) for path, why in each.items()}
        if everything:
            by_first(self.workers, lambda: told.add(everything))

    def _told(self) -> Unreadable:
        return self._none_told() if self.told is None else self.told

    def _part(self, numbers: Sequence[int]) -> Sequence[int]:
        """Those of this worker."""
        return numbers[self.workers.rank :: self.workers.size]

    def _none_told(self, file: Path | None = None, quiet: bool = False) -> Unreadable:
        return Unreadable(sum(len(part) for part in self._parts().values()), self.unreadable, file, quiet)

    def _prepared(self, pictures: Tensor) -> Tensor:
        """Pictures (n, 3, h, w) of bytes, normalised."""
        device = self.workers.device
        mean, deviation = (torch.tensor(x, device=device).view(1, 3, 1, 1) for x in (MEAN, DEVIATION))
        x = pictures.to(device).float().sub_(mean).div_(deviation)
        return x.contiguous(memory_format=torch.channels_last if self.channels_last else torch.contiguous_format)

    def _folder(self) -> Path:
        return data_folder(self.folder)

    def _album(self) -> Album:
        return _album(self._folder())

    def _parts(self) -> Mapping[str, Listing]:
        return _parts(self._folder(), self.held_out)


class Lazy(Sequence[Tensor]):
    """Tensors that are made when the first of them is asked for."""

    def __init__(self, make: Callable[[], Sequence[Tensor]]) -> None:
        self._made = cache(make)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        """One of them, or some."""
        return self._made()[index]

    def __len__(self) -> int:
        return len(self._made())


def _chunks(numbers: Sequence[int]) -> Iterator[Request]:
    for start in range(0, len(numbers), CHUNK):
        yield Request(tuple(numbers[start : start + CHUNK]))


@cache
def _album(folder: Path) -> Album:
    return find_photographs(folder)


@cache
def _parts(folder: Path, held_out: int) -> Mapping[str, Listing]:
    album = _album(folder)
    if held_out == 0:
        return {"training": album.train, "validation": album.val}
    training, held = album.held_out(held_out)
    return {"training": training, "validation": held, "test": album.val}


@cache
def _digest(folder: Path) -> str:
    album = _album(folder)
    names = "\n".join(("train", *album.train.files, "val", *album.val.files))
    return hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest()[:12]
