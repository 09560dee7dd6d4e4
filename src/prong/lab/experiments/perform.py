"""An experiment's runs, one after another or side by side, with somebody watching."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from prong.distributed.workers import ALONE, Workers
from prong.lab.events import Events
from prong.lab.experiments.common import Common
from prong.lab.experiments.showing import Shown, in_words, told
from prong.lab.folders import RunFolder
from prong.lab.interrupts import Stop
from prong.lab.jobs import Job, Row, Watch, carry_out
from prong.lab.parallel import by_first, restarts
from prong.lab.pool import side_by_side, tell
from prong.lab.record import ForeignRecordError, InUseError
from prong.lab.terminal import make_console, trouble_with


def perform(experiment: str, jobs: Sequence[Job], options: Common, workers: Workers = ALONE) -> None:
    """Make all runs of an experiment that are not made yet, and say where they are. Of several workers one speaks.

    Raises:
        SystemExit: something is in the way; one line says what. Runs that were made so far are kept.
    """
    root, console = options.folder(experiment), make_console(quiet=workers.rank > 0)
    if options.tensorboard:
        Events.require()
    try:
        _agree([job.config() for job in jobs], workers)
        by_first(workers, lambda: _check(jobs, root, options))
        runs = f"{len(jobs)} run{'s' * (len(jobs) > 1)}"
        console.print(f"{jobs[0].task.source}; {runs} in {root}", highlight=False, soft_wrap=True)
        outcomes = _outcomes(jobs, root, options, console, workers)
    except (ForeignRecordError, InUseError) as error:
        raise SystemExit(str(error)) from error
    except OSError as error:
        raise SystemExit(trouble_with(error, root)) from error
    except BrokenProcessPool as error:
        raise SystemExit("stopped: a process died, perhaps for want of memory. The same command goes on.") from error
    except KeyboardInterrupt:
        console.print("Stopped. The same command goes on from here.", highlight=False)
        raise SystemExit(130) from None
    if workers.rank > 0:
        return
    console.print(_table(jobs, outcomes, root))
    for job in jobs:
        if outcomes[job.name]["failure"]:
            console.print(f"{job.name} {outcomes[job.name]['failure']}", highlight=False, soft_wrap=True)
    console.print(f"Runs: {root}\nA page of them: prong report {root}", highlight=False, soft_wrap=True)
    if all(outcome["failure"] for outcome in outcomes.values()):
        raise SystemExit("no run came to its end: a smaller --lr may help")


def _agree(configs: Any, workers: Workers) -> None:
    """Refuse workers with other options or data than the first."""
    for rank, others in enumerate(workers.meet(configs)):
        if others != configs:
            named = ", ".join(
                name for name in configs[0] if [c[name] for c in configs] != [c.get(name) for c in others]
            )
            raise SystemExit(f"workers do not agree: that of rank {rank} has another configuration ({named})")


def _check(jobs: Sequence[Job], root: Path, options: Common) -> None:
    """Refuse folders of other configurations before the first run begins."""
    for job in jobs:
        folder = RunFolder(root / job.name)
        if not options.resume and folder.path.exists() and not restarts():
            raise ForeignRecordError(f"{folder.path} exists. Name another with --out, or leave out --no-resume.")
        folder.check(job.config())


def _outcomes(
    jobs: Sequence[Job], root: Path, options: Common, console: Console, workers: Workers
) -> dict[str, Mapping[str, Any]]:
    by_name = {job.name: job for job in jobs}
    outcomes: dict[str, Mapping[str, Any]] = {}
    with Stop() as stop, Shown(console, jobs) as shown:

        def keep(name: str, outcome: Mapping[str, Any]) -> None:
            outcomes[name] = outcome
            if workers.rank == 0:  # the others may be where they cannot see the folder
                shown.end(name, _ending(by_name[name], outcome, root))

        if options.jobs is None:
            torch.set_flush_denormal(True)  # sigmoid units make denormal numbers, which are slow
            written = options.tensorboard and workers.rank == 0
            for name, job in by_name.items():
                keep(name, _run(job, root, written, stop.is_asked, told(job, shown.tell), workers))
            return outcomes

        def next_job(name: str) -> Callable[[], Mapping[str, Any]] | None:
            return None if name in outcomes else partial(_run_aside, by_name[name], root, options.tensorboard)

        side_by_side(by_name, next_job, keep, options.jobs, shielded=True, on_news=shown.tell)
    return outcomes


def _run_aside(job: Job, root: Path, tensorboard: bool) -> Mapping[str, Any]:
    with Stop() as stop:
        return _run(job, root, tensorboard, stop.is_asked, told(job, tell))


def _run(
    job: Job, root: Path, tensorboard: bool, stopped: Callable[[], bool], watch: Watch, workers: Workers = ALONE
) -> Mapping[str, Any]:
    folder = RunFolder(root / job.name)
    with ExitStack() as stack:
        events = stack.enter_context(Events(folder)) if tensorboard else None

        def on_row(row: Row, seconds: float) -> None:
            watch.on_row(row, seconds)
            if events is not None:
                events.add(row, seconds)

        outcome = carry_out(job, folder, Watch(watch.on_update, on_row, stopped), workers=workers)
        if events is not None:
            events.complete()
        return outcome


def _table(jobs: Sequence[Job], outcomes: Mapping[str, Mapping[str, Any]], root: Path) -> Table:
    table = Table(title=f"{jobs[0].experiment}: {in_words(jobs[0].task.watched)}")
    for heading in ("run", "at the start", "at the end", "updates", "seconds", "ms per update"):
        table.add_column(heading, justify="left" if heading == "run" else "right", overflow="fold")
    for job in jobs:
        rows, outcome = RunFolder(root / job.name).rows(), outcomes[job.name]
        errors = [f"{row[job.task.watched]:.4g}" for row in (rows[:1] + rows[-1:])] or ["-", "-"]
        errors[-1] = "failed" if outcome["failure"] else errors[-1]
        pace = "-"
        if len(rows) > 1:  # before the first update comes the initialisation
            first, last = rows[0], rows[-1]
            pace = f"{1000 * (last['seconds'] - first['seconds']) / (last['update'] - first['update']):.1f}"
        table.add_row(job.name, *errors, f"{outcome['updates']:,}", f"{outcome['seconds']:.1f}", pace)
    return table


def _ending(job: Job, outcome: Mapping[str, Any], root: Path) -> str:
    if outcome["failure"]:
        return str(outcome["failure"])
    last = RunFolder(root / job.name).rows()[-1]
    return f"{in_words(job.task.watched)} {last[job.task.watched]:.4g} after {outcome['updates']:,} updates"
