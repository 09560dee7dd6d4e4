"""Photographs in folders, as ILSVRC has them: which there are, and the views of them that a net is shown."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

LAYOUT = "train/CLASS/*.JPEG and val/CLASS/*.JPEG"
SUFFIXES = (".jpeg", ".jpg", ".png")
AREAS = 0.08, 1.0  # shares of a photograph that a random view shows
RATIOS = 3 / 4, 4 / 3  # of its width to its height
ATTEMPTS = 10
CENTRE = 224 / 256  # of the shorter side, that a central view shows
# What Pillow raises for files that it cannot make sense of, besides OSError.
NONSENSE = (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError)


class UnreadableError(Exception):
    """A file that is no photograph, or not a whole one; the message says why."""


@dataclass(frozen=True)
class Listing:
    """Photographs by their numbers.

    Attributes:
        folder: of all files.
        files: within it.
        labels: the number of each one's class.
    """

    folder: Path
    files: tuple[str, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.files)

    def path(self, number: int) -> Path:
        """Where a photograph lies."""
        return self.folder / self.files[number]

    def only(self, numbers: Sequence[int]) -> Listing:
        """Some of them, numbered anew."""
        return Listing(self.folder, tuple(self.files[n] for n in numbers), tuple(self.labels[n] for n in numbers))


@dataclass(frozen=True)
class Album:
    """The photographs of a data set, and the names of their classes, whose numbers are in the order of the names."""

    classes: tuple[str, ...]
    train: Listing
    val: Listing

    def held_out(self, each: int) -> tuple[Listing, Listing]:
        """The training photographs without the last `each` of every class, and those.

        Raises:
            ValueError: a class has no more than these.
        """
        kept, held = list[int](), list[int]()
        members: list[list[int]] = [[] for _ in self.classes]
        for number, label in enumerate(self.train.labels):
            members[label].append(number)
        for name, own in zip(self.classes, members, strict=True):
            if len(own) <= each:
                raise ValueError(
                    f"{self.train.folder / name} has {len(own)} photographs, which is too few to hold out {each}. "
                    "Name fewer with --held-out; with 0, what val holds is for validation"
                )
            kept += own[: len(own) - each]
            held += own[len(own) - each :]
        return self.train.only(kept), self.train.only(held)


def find_photographs(folder: Path) -> Album:
    """All photographs below a folder: classes are the folders in `train`, in the order of their names.

    Raises:
        FileNotFoundError: there are none, or of some class none to train on.
        ValueError: `val` has classes that `train` has not.
    """
    if not (folder / "train").is_dir():
        raise FileNotFoundError(
            f"no photographs in {folder}: it should hold {LAYOUT}. Name the folder with --data; "
            "an archive of such a folder is unpacked by `prong data unpack FILE`."
        )
    classes = _folders(folder / "train")
    train = _listing(folder / "train", classes, classes)
    empty = sorted(set(range(len(classes))) - set(train.labels))
    if empty or not classes:
        where = folder / "train" / (classes[empty[0]] if empty else "")
        raise FileNotFoundError(f"{where} holds no photographs. Fill it, or take it away.")
    return Album(tuple(classes), train, _val(folder / "val", classes))


def _val(folder: Path, classes: Sequence[str]) -> Listing:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is missing: a folder of photographs holds {LAYOUT}.")
    found = _folders(folder)
    strange = sorted(set(found) - set(classes))
    if strange:
        raise ValueError(f"{folder / strange[0]} is a class that {folder.parent / 'train'} has not. Take it away.")
    val = _listing(folder, found, classes)
    if not len(val):
        advice = "Sort its files into folders of classes." if any(folder.iterdir()) else "Fill it."
        raise FileNotFoundError(f"{folder} holds no photographs in folders of classes. {advice}")
    return val


def _folders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _listing(folder: Path, found: Iterable[str], classes: Sequence[str]) -> Listing:
    numbers = {name: number for number, name in enumerate(classes)}
    files, labels = list[str](), list[int]()
    for name in found:
        with os.scandir(folder / name) as entries:
            own = sorted(e.name for e in entries if e.name.lower().endswith(SUFFIXES) and not e.name.startswith("."))
        files += [f"{name}/{file}" for file in own]
        labels += [numbers[name]] * len(own)
    return Listing(folder, tuple(files), tuple(labels))


def decode(path: Path) -> Image.Image:
    """A photograph in red, green and blue, whatever it is stored in.

    Raises:
        UnreadableError: it cannot be read, or only in part.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd but readable files
            with Image.open(path) as image:
                return image.convert("RGB")
    except NONSENSE as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UnreadableError(reason.replace(f" {str(path)!r}", "").replace("\n", " ")) from error


def random_view(image: Image.Image, size: int, random: np.random.Generator) -> np.ndarray:
    """A part of a photograph, of any size and place in it, mirrored or not: (size, size, 3) bytes."""
    view = image.resize((size, size), Image.Resampling.BILINEAR, box=random_window(*image.size, random))
    pixels = np.asarray(view)
    return pixels[:, ::-1] if random.random() < 0.5 else pixels


def random_window(width: int, height: int, random: np.random.Generator) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a part of a picture: its area and the ratio of its sides are random.

    Where no such part is found, as in very long pictures, it is the largest in the middle with a ratio in bounds.
    """
    for _ in range(ATTEMPTS):
        area = width * height * random.uniform(*AREAS)
        ratio = math.exp(random.uniform(math.log(RATIOS[0]), math.log(RATIOS[1])))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left, top = (int(random.integers(room + 1)) for room in (width - wide, height - high))
            return left, top, left + wide, top + high
    wide, high = min(width, max(1, round(height * RATIOS[1]))), min(height, max(1, round(width / RATIOS[0])))
    left, top = (width - wide) // 2, (height - high) // 2
    return left, top, left + wide, top + high


def central_view(image: Image.Image, size: int) -> np.ndarray:
    """The middle of a photograph, a square of 7/8 of its shorter side: (size, size, 3) bytes."""
    width, height = image.size
    side = CENTRE * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    box = (left, top, left + side, top + side)
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))
