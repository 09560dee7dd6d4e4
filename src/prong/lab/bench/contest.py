"""One task, one batch size, many methods: time and memory of their updates, taken in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from prong.lab.bench.amortise import CLOSED, OPEN, REFRESH
from prong.lab.bench.memory import extra_bytes, model_bytes, peak_bytes
from prong.lab.bench.phases import HORIZON, Phases, refresher_of
from prong.lab.bench.tasks import Task
from prong.lab.methods import Method, Schedule
from prong.lab.timing import interleaved

SETTINGS = {"lr": 1e-7, "eps": 3e-2}  # a rate so small that nothing diverges: what is timed is the arithmetic
BLOCK = 20  # updates timed at once
SLOW_UPDATE = 0.2  # seconds; blocks of longer updates have a quarter as many


@dataclass(frozen=True)
class Pace:
    """When a method does its periodic work.

    Attributes:
        every: updates from one time to the next; blocks are multiples of it.
        start: updates before the first time.
    """

    every: int = 1
    start: int = 0


PACES: Mapping[str, Pace] = {"SOAP": Pace(10), "Shampoo": Pace(10, start=25)}


def block_length(seconds: float, block: int = BLOCK, every: int = 1) -> int:
    """Updates to time at once, when one takes so long: a multiple of `every`."""
    wanted = block if seconds <= SLOW_UPDATE else max(1, block // 4)
    return math.ceil(wanted / every) * every


class Contestant:
    """A method at work on its own copy of a task's model."""

    def __init__(self, method: Method, task: Task, batch: int, samples: int, pace: Pace) -> None:
        torch.manual_seed(0)
        self.name, self.task, self.batch, self.samples, self.pace = method.name, task, batch, samples, pace
        self.model = task.make(method.batch_norm)
        self.optimizer = method.make(self.model, SETTINGS, Schedule(HORIZON, samples))
        self.blocks = {CLOSED: BLOCK, OPEN: BLOCK, REFRESH: 1}  # updates, or refreshes, timed at once
        self._stream = task.batches(batch)
        self._drawn: list[tuple[torch.Tensor, torch.Tensor]] = []
        refresher = refresher_of(self.model)
        self.phases = None if refresher is None else Phases(refresher, lambda: self.train(1))

    def warm_up(self, block: int) -> None:
        """Make the first updates, and choose the length of blocks from the time that some take."""
        self.train(self.pace.start + 2)
        if self.phases is not None:
            self.phases.close()
        self.draw(self.pace.every)
        start = perf_counter()
        self.work()
        length = block_length((perf_counter() - start) / self.pace.every, block, self.pace.every)
        self.blocks |= {CLOSED: length, OPEN: min(length, math.ceil(self.samples / self.examples))}

    def train(self, updates: int) -> None:
        """Make some updates."""
        self.draw(updates)
        self.work()

    @property
    def examples(self) -> int:
        """Samples per update, as PRONG counts them."""
        return self.batch * self.task.rows

    def draw(self, count: int) -> None:
        """Choose the minibatches of the next updates."""
        self._drawn = [next(self._stream) for _ in range(count)]

    def work(self) -> None:
        """Make an update with each of the minibatches drawn."""
        for x, y in self._drawn:
            self.optimizer.zero_grad()
            self.task.loss(self.model(x), y).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()

    def parts(self) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
        """What is timed, each with what has to happen before."""
        if self.phases is None:
            return {CLOSED: (lambda: self.draw(self.blocks[CLOSED]), self.work)}
        return {
            CLOSED: (self._closed, self.work),
            OPEN: (self._open, self.work),
            REFRESH: (lambda: None, self.phases.refresh),
        }

    def memory(self) -> dict[str, int]:
        """Bytes that lie there between updates, and those that each part needs besides."""
        result = {}
        for part, (prepare, work) in self.parts().items():
            if part == REFRESH:
                result[f"{part} peak"] = peak_bytes(work, self._filled)
                continue
            (self._filled if part == OPEN else prepare)()
            self.draw(self.pace.every)
            self.optimizer.zero_grad()
            result[f"{part} state"] = extra_bytes(self.model, self.optimizer)
            result[f"{part} peak"] = peak_bytes(work, self.optimizer.zero_grad)
        return result

    def check(self) -> None:
        """Refuse times of a model that is no longer one."""
        if not all(torch.isfinite(p).all() for p in self.model.parameters()):
            raise RuntimeError(f"{self.name} diverged on {self.task.name} while it was timed")

    def _closed(self) -> None:
        assert self.phases is not None
        self.phases.close()
        self.draw(self.blocks[CLOSED])

    def _open(self) -> None:
        """Open a window, and fill it but for what the updates that are to be timed will add."""
        self._fill(self.blocks[OPEN])
        self.draw(self.blocks[OPEN])

    def _filled(self) -> None:
        """Open a window, and fill it."""
        self._fill(0)
        self.optimizer.zero_grad()

    @torch.no_grad()
    def _fill(self, to_come: int) -> None:
        """Show an open window its samples by forwards alone, which is cheaper, but for those of updates to come.

        From as many samples on as the widest layer has inputs, neither an update nor the refresh depends on how many
        more there are: twice that is enough.
        """
        assert self.phases is not None
        with torch.enable_grad():
            self.phases.open()
        widest = max(p.shape[1] for p in self.model.parameters() if p.dim() > 1)
        missing = min(self.samples - to_come * self.examples, 2 * widest)
        for _ in range(math.ceil(missing / self.examples)):
            self.model(next(self._stream)[0])


def measure(
    task: Task,
    batch: int,
    methods: Sequence[Method],
    *,
    samples: int,
    repetitions: int,
    block: int = BLOCK,
    paces: Mapping[str, Pace] = PACES,
    on_step: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Milliseconds per update of every method and part, one number per repetition, and bytes; as JSON has them."""
    contestants = [Contestant(method, task, batch, samples, paces.get(method.name, Pace())) for method in methods]
    for contestant in contestants:
        contestant.warm_up(block)
        on_step()
    blocks, prepare = {}, {}
    for contestant in contestants:
        for part, (before, work) in contestant.parts().items():
            key = f"{contestant.name}: {part}"
            prepare[key], blocks[key] = before, work
    seconds = interleaved(blocks, repetitions, on_step, prepare)
    measured = {}
    for contestant in contestants:
        contestant.check()
        times = {part: seconds[f"{contestant.name}: {part}"] for part in contestant.parts()}
        measured[contestant.name] = _entry(contestant, times)
        on_step()
    parameters = model_bytes(contestants[0].model)
    return {**task.describe(), "batch": batch, "parameter_bytes": parameters, "methods": measured}


def steps(methods: Sequence[Method], repetitions: int) -> int:
    """How often `measure` calls `on_step`."""
    parts = sum(3 if method.refreshes else 1 for method in methods)
    return 2 * len(methods) + parts * (repetitions + 1)


def _entry(contestant: Contestant, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    blocks = {part: contestant.blocks[part] for part in times}
    milliseconds = {part: [1000 * t / blocks[part] for t in values] for part, values in times.items()}
    return {"block": blocks, "ms": milliseconds, "bytes": contestant.memory()}
