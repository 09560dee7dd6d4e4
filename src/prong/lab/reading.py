"""Reading photographs ahead of their use, in processes of their own; what is read does not depend on how many."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from prong.lab.photographs import Listing, UnreadableError, central_view, decode, random_view
from prong.lab.pool import leave_with_parent, without_interrupts

AHEAD = 2  # requests that every process reads before they are needed


class ReaderDiedError(OSError):
    """A process that reads photographs is gone."""


@dataclass(frozen=True)
class Request:
    """Photographs that are wanted together.

    Attributes:
        numbers: which.
        seed: of random views; without, views are central.
    """

    numbers: tuple[int, ...]
    seed: int | None = None


@dataclass(frozen=True)
class Views:
    """What a request came to.

    Attributes:
        pictures: (n, 3, size, size) bytes.
        labels: their classes (n,).
        unreadable: files that were met, with the reason.
    """

    pictures: Tensor
    labels: Tensor
    unreadable: Mapping[str, str]


class Viewer(Dataset[Views]):
    """Views of photographs, on request.

    What is random in a view depends on the seed of the request and on the number of the photograph alone. One that
    cannot be read is left out among central views; among random ones the next in the listing that can takes its place,
    which is mostly of the same class. After more than `allowed` in one request no more are looked for.
    """

    def __init__(self, listing: Listing, size: int, allowed: int) -> None:
        self.listing, self.size, self.allowed = listing, size, allowed

    def __getitem__(self, request: Request) -> Views:
        """The views of a request; fewer where photographs were left out."""
        pictures, labels = list[np.ndarray](), list[int]()
        unreadable: dict[str, str] = {}
        for wanted in request.numbers:
            for number in self._candidates(wanted, request):
                path = self.listing.path(number)
                try:
                    image = decode(path)
                except UnreadableError as error:
                    unreadable[str(path)] = str(error)
                    if len(unreadable) > self.allowed:
                        return self._views(pictures, labels, unreadable)
                    continue
                if request.seed is None:
                    pictures.append(central_view(image, self.size))
                else:
                    random = np.random.default_rng((request.seed, number))
                    pictures.append(random_view(image, self.size, random))
                labels.append(self.listing.labels[number])
                break
        return self._views(pictures, labels, unreadable)

    def _candidates(self, wanted: int, request: Request) -> Iterable[int]:
        if request.seed is None:
            return (wanted,)
        return ((wanted + k) % len(self.listing) for k in range(len(self.listing)))

    def _views(self, pictures: list[np.ndarray], labels: list[int], unreadable: Mapping[str, str]) -> Views:
        pixels = np.stack(pictures) if pictures else np.empty((0, self.size, self.size, 3), np.uint8)
        return Views(torch.from_numpy(pixels).movedim(-1, 1), torch.tensor(labels, dtype=torch.int64), unreadable)


def read(viewer: Viewer, requests: Iterable[Request], readers: int) -> Iterator[Views]:
    """What the requests come to, in their order; read ahead by `readers` processes, or without any when it is needed.

    Raises:
        ReaderDiedError: one of them is gone.
    """
    if readers == 0:
        yield from map(viewer.__getitem__, requests)
        return
    context = multiprocessing.get_context("forkserver")  # a fork of a process with threads, such as torch's, may hang
    context.set_forkserver_preload([__name__])  # torch is imported once for all of them
    loader = DataLoader(
        viewer,
        batch_size=None,
        sampler=requests,
        num_workers=readers,
        prefetch_factor=AHEAD,
        multiprocessing_context=context,
        worker_init_fn=_begin,
        generator=torch.Generator(),  # its own, as it draws a number that nobody uses
    )
    try:
        with without_interrupts():
            views = iter(loader)
        yield from views
    except (RuntimeError, EOFError, OSError) as error:  # the last two if it died while it handed something over
        if isinstance(error, RuntimeError) and "exited unexpectedly" not in str(error):
            raise
        raise ReaderDiedError(
            "a process that reads photographs died, perhaps for want of memory. The same command goes on from here; "
            "fewer --readers need less."
        ) from error


def _begin(reader: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that is read for
    leave_with_parent()  # torch would wait for the fork server, which waits for its processes
