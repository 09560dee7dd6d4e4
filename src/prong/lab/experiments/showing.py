"""How runs go on, for somebody who watches: told where they are made, shown where there is a screen."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from prong.lab.jobs import Job, Row, Watch
from prong.lab.training import Training

BARS_SECONDS = 0.2  # between two looks at a run
WIDE = 120  # columns of a terminal that has room for bars
QUIET_SECONDS = 10.0  # between lines of a run, where there is no terminal


@dataclass(frozen=True)
class News:
    """How a run goes on: how many updates were made, and in words what they came to."""

    run: str
    update: int
    words: str


def told(job: Job, tell: Callable[[News], None]) -> Watch:
    """Who tells of a run now and then, in the process that makes it."""
    error, said, begun = "", -math.inf, None

    def on_row(row: Row, seconds: float) -> None:
        nonlocal error
        error = f"{in_words(job.task.watched)} {row[job.task.watched]:.4g}"

    def on_update(training: Training) -> None:
        nonlocal said, begun
        begun = begun or (training.update, training.seconds)
        if monotonic() - said < BARS_SECONDS:
            return
        said, made = monotonic(), training.update - begun[0]
        loss = f"loss {training.loss:.4g}" if training.update else ""
        pace = f"{1000 * (training.seconds - begun[1]) / made:.1f} ms per update" if made else ""
        tell(News(job.name, training.update, ", ".join(part for part in (loss, error, pace) if part)))

    return Watch(on_update, on_row)


class Shown:
    """Runs under way: on a terminal a bar for each, elsewhere a line now and then."""

    def __init__(self, console: Console, jobs: Sequence[Job]) -> None:
        self._console = console
        self._updates, self._width = {job.name: job.plan.updates for job in jobs}, max(len(job.name) for job in jobs)
        counts = 2 * max(len(str(job.plan.updates)) for job in jobs) + 1
        columns = (  # on a narrow terminal words are cut first: names and counts keep their room
            TextColumn("{task.description}", table_column=Column(no_wrap=True, min_width=self._width)),
            *([BarColumn()] if console.width >= WIDE else []),
            MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=counts)),
            TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=len("0:00:00"))),
            TextColumn("{task.fields[now]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
        )
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._bars: dict[str, TaskID] = {}
        self._said: dict[str, float] = {}
        self._ended: set[str] = set()
        self._lock = Lock()
        self._runs = self._progress.add_task("runs".ljust(self._width), total=len(jobs), now="", visible=len(jobs) > 1)

    def __enter__(self) -> Shown:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def tell(self, news: News) -> None:
        """Show how a run goes on; in any thread, and nothing that comes late."""
        with self._lock:
            if news.run not in self._ended:
                (self._draw if self._console.is_terminal else self._say)(news)

    def end(self, name: str, ending: str) -> None:
        """Say what a run came to."""
        with self._lock:
            self._ended.add(name)
            if name in self._bars:
                self._progress.remove_task(self._bars.pop(name))
            self._progress.advance(self._runs)
            self._console.print(f"{name}: {ending}", highlight=False, soft_wrap=True)

    def _draw(self, news: News) -> None:
        if news.run not in self._bars:  # it may go on from where it was stopped
            self._bars[news.run] = self._progress.add_task(
                news.run.ljust(self._width), total=self._updates[news.run], completed=news.update, now=""
            )
        self._progress.update(self._bars[news.run], completed=news.update, now=news.words)

    def _say(self, news: News) -> None:
        if monotonic() - self._said.setdefault(news.run, monotonic()) >= QUIET_SECONDS:
            self._said[news.run] = monotonic()
            line = f"{news.run}: update {news.update:,} of {self._updates[news.run]:,}, {news.words}"
            self._console.print(line, highlight=False, soft_wrap=True)


def in_words(name: str) -> str:
    """The name of a measure, as people write."""
    return name.replace("_", " ")
