"""`prong bench untuned`: our optimizers with their defaults, beside torch's, on networks that nobody tuned."""

from __future__ import annotations

import json as jsonlib
import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import prong
from prong.lab.bench.problems import PROBLEMS, Problem
from prong.lab.bench.sheets import NONE, Sheet, number, present
from prong.lab.pool import side_by_side
from prong.lab.record import provenance, strict_json
from prong.lab.terminal import at_least, each_once, known, make_console, progress, writable
from prong.lab.timing import interleaved

Row = dict[str, Any]
OPTIMIZERS: Mapping[str, Callable[[nn.Module, float], Optimizer]] = {
    "adamw": lambda model, lr: torch.optim.AdamW(model.parameters(), lr),
    "sgd": lambda model, lr: torch.optim.SGD(model.parameters(), lr, momentum=0.9),
    "sgd-fused": lambda model, lr: torch.optim.SGD(model.parameters(), lr, momentum=0.9, fused=True),
    "prong": prong.PRONG,
    "prong-fused": lambda model, lr: prong.PRONG(model, lr, fused=True),
    "prong-adamw": prong.AdamW,
    "prong-muon": prong.Muon,
}
MEASURED = 40  # times in a run
BLOCK = 20  # updates timed at once


def main(
    problems: tuple[str, ...] = ("convolutional", "variational", "sigmoid", "table"),
    methods: tuple[str, ...] = ("prong", "prong-adamw", "prong-muon"),
    rates: tuple[float, ...] = (1e-3, 3e-3),
    seeds: int = 5,
    clock: int = 0,
    jobs: int = 1,
    json: Path | None = None,
) -> None:
    """Train small problems with everything at its default but the learning rate, or time that.

    The transformers are measured by their loss on text that is not trained on, the others on examples that are.

    Args:
        problems: which.
        methods: which optimizers, with nothing but a rate given to them.
        rates: learning rates; each method has all of them.
        seeds: runs of each, from other weights and with other minibatches.
        clock: instead of losses, the time of an update with everything counted over a whole run: so many runs of each
            method, which take turns every 20 updates.
        jobs: runs made side by side, each with one thread. (The clock has all threads.)
        json: file of rows, one to a line. Those that are there already are not made again.
    """
    at_least(1, seeds=seeds, jobs=jobs)
    each_once(problems=problems, methods=methods, rates=rates)
    known("problems", problems, PROBLEMS)
    known("methods", methods, OPTIMIZERS)
    writable(json=json)
    rows = _read(json)
    if clock:
        wanted = [{"problem": name, "clock": clock, "methods": list(methods)} for name in problems]
    else:
        wanted = [
            {"problem": name, "method": method, "lr": lr, "seed": seed}
            for name in problems
            for method in methods
            for lr in rates
            for seed in range(seeds)
        ]
    missing = [cell for cell in wanted if not any(cell.items() <= row.items() for row in rows)]
    console = make_console()
    with progress(console, "runs", len(missing)) as on_step:

        def keep(row: Row) -> None:
            rows.append(row)
            if json is not None:
                with json.open("a") as file:
                    file.write(jsonlib.dumps(row, allow_nan=False) + "\n")
            on_step()

        if clock:
            for row in _timed(missing):
                keep(row)
        else:
            _made(missing, jobs, keep)
    found = [row for cell in wanted for row in rows if cell.items() <= row.items()]
    present(console, [times(found)] if clock else [losses(found, methods)], json)


def _read(path: Path | None) -> list[Row]:
    if path is None or not path.exists():
        return []
    whole, _, torn = path.read_text().rpartition("\n")
    if torn:  # by who was killed while it was written
        path.write_text(whole + "\n" if whole else "")
    return [strict_json(line) for line in whole.splitlines()]


def _made(cells: Sequence[Row], jobs: int, keep: Callable[[Row], None]) -> None:
    waiting = {str(number): cell for number, cell in enumerate(cells)}

    def next_job(name: str) -> Callable[[], Row] | None:
        return partial(run, **waiting.pop(name)) if name in waiting else None

    side_by_side(list(waiting), next_job, lambda _, row: keep(row | provenance()), jobs)


def _optimizer(problem: Problem, method: str, lr: float, seed: int) -> tuple[nn.Module, Optimizer, torch.Generator]:
    torch.set_flush_denormal(True)  # sigmoid units make denormal numbers, which are slow
    torch.manual_seed(seed)
    model = problem.model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of embeddings that stay as they are
        return model, OPTIMIZERS[method](model, lr), torch.Generator().manual_seed(1000 + seed)


def run(problem: str, method: str, lr: float, seed: int) -> Row:
    """A run: what was measured, at which updates. It is lost where an error was raised or nothing finite is left."""
    it = PROBLEMS[problem]
    row = {"problem": problem, "method": method, "lr": lr, "seed": seed, "updates": it.updates}
    model, optimizer, generator = _optimizer(it, method, lr, seed)
    every = max(1, it.updates // MEASURED)
    measured, trouble = {0: it.measure(model)}, None
    start = [group["lr"] for group in optimizer.param_groups]
    try:
        for update in range(it.updates):
            for group, rate in zip(optimizer.param_groups, start, strict=True):
                group["lr"] = rate * it.rate(update)
            _update(it, model, optimizer, generator)
            if (update + 1) % every == 0 or update + 1 == it.updates:
                measured[update + 1] = it.measure(model)
                if math.isnan(measured[update + 1]):
                    raise FloatingPointError(f"nothing finite is left after update {update + 1}")
    except (ArithmeticError, RuntimeError) as error:
        trouble = str(error)
    curve = {str(at): float(f"{value:.5g}") for at, value in measured.items() if math.isfinite(value)}
    return {**row, "measured": curve, "lost": trouble}


def _update(problem: Problem, model: nn.Module, optimizer: Optimizer, generator: torch.Generator) -> None:
    optimizer.zero_grad()
    problem.loss(model, problem.batch(generator)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _timed(cells: Sequence[Row]) -> Iterable[Row]:
    for cell in cells:
        it = PROBLEMS[cell["problem"]]
        seconds: dict[str, list[float]] = {method: [] for method in cell["methods"]}
        longest: dict[str, list[float]] = {method: [] for method in cell["methods"]}
        for seed in range(cell["clock"]):
            workers = {method: _Worker(it, method, seed) for method in cell["methods"]}
            blocks = interleaved({m: worker.block for m, worker in workers.items()}, it.updates // BLOCK - 1)
            for method, worker in workers.items():
                seconds[method].append(sum(worker.seconds) / len(worker.seconds))
                longest[method].append(max(worker.seconds[2:]) / statistics.median(worker.seconds))
            assert blocks
        yield {**cell, "updates": it.updates, "seconds": seconds, "longest": longest} | provenance()


class _Worker:
    """A run that is made in blocks of updates, whose rate is so small that nothing changes."""

    def __init__(self, problem: Problem, method: str, seed: int) -> None:
        self._problem = problem
        self._model, self._optimizer, self._generator = _optimizer(problem, method, 1e-5, seed)
        self.seconds: list[float] = []

    def block(self) -> None:
        """Make some updates; the seconds of each are kept."""
        for _ in range(BLOCK):
            start = perf_counter()
            _update(self._problem, self._model, self._optimizer, self._generator)
            self.seconds.append(perf_counter() - start)


def losses(rows: Sequence[Row], methods: Iterable[str]) -> Sheet:
    """Means over seeds at the end; runs lost, or not below where they began."""
    table = []
    for problem in dict.fromkeys(row["problem"] for row in rows):
        for method in methods:
            mine = [row for row in rows if (row["problem"], row["method"]) == (problem, method)]
            for lr in dict.fromkeys(row["lr"] for row in mine):
                runs = [row for row in mine if row["lr"] == lr]
                ends = [last(row) for row in runs if row["lost"] is None]
                worse = sum(last(row) >= row["measured"]["0"] for row in runs if row["lost"] is None)
                spread = f"{statistics.stdev(ends):.2g}" if len(ends) > 1 else NONE
                mean = number(statistics.mean(ends)) if ends else NONE
                cells = [mean, spread, str(len(runs)), str(len(runs) - len(ends)), str(worse)]
                table.append([problem, method, f"{lr:g}", *cells])
    headings = ("problem", "method", "lr", "at the end", "std", "runs", "lost", "worse than at the start")
    return Sheet("defaults but the learning rate", headings, table, "Means over runs that were not lost.", words=2)


def last(row: Row) -> float:
    """What was measured last."""
    return float(list(row["measured"].values())[-1])


def times(rows: Sequence[Row]) -> Sheet:
    """The time of an update, everything counted, and beside that of the first method."""
    table = []
    for row in rows:
        base = row["methods"][0]
        for method, seconds in row["seconds"].items():
            ratios = [mine / its for mine, its in zip(seconds, row["seconds"][base], strict=True)]
            longest = statistics.median(row["longest"][method])
            cells = [number(1000 * statistics.median(seconds)), f"{statistics.median(ratios):.3f}", f"{longest:.1f}"]
            table.append([row["problem"], method, *cells])
    headings = ("problem", "method", "ms per update", "times the first method's", "longest update, in medians")
    note = "Whole runs, all refreshes and statistics counted; medians of several runs that take turns."
    return Sheet("the time of an update, everything counted", headings, table, note, words=2)
