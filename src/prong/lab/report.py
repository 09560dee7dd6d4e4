"""Measured runs as a table and as curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import matplotlib

matplotlib.use("Agg")  # files only: no window, no display needed

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import ScalarFormatter
from rich.table import Table

from prong.lab.methods import Settings
from prong.lab.standings import Ratio, Standing, ratios
from prong.lab.training import Row, Run

NONE = "-"


@dataclass(frozen=True)
class Outcome:
    """A method, its settings, and what came of it."""

    method: str
    settings: Settings
    run: Run

    @property
    def milliseconds(self) -> float | None:
        """Time per update, the initialisation not counted; None without a measured update."""
        if len(self.run.rows) < 2:
            return None
        first, last = self.run.rows[0], self.run.rows[-1]
        return 1000 * (last.seconds - first.seconds) / (last.update - first.update)

    @property
    def succeeded(self) -> bool:
        """Whether the run came to its end."""
        return self.run.failure is None

    def after(self, updates: int) -> Row | None:
        """The row measured after so many updates."""
        return next((row for row in self.run.rows if row.update == updates), None)

    def within(self, seconds: float) -> Row | None:
        """The last row measured within so many seconds of training."""
        return next((row for row in reversed(self.run.rows) if row.seconds <= seconds), None)


def describe(settings: Settings) -> str:
    """Settings as text: `lr 0.001, eps 0.01`."""
    return ", ".join(f"{name} {value:.3g}" for name, value in settings.items())


def equal_seconds(outcomes: Sequence[Outcome]) -> float:
    """The seconds that every run that came to its end had."""
    return min((outcome.run.rows[-1].seconds for outcome in outcomes if outcome.succeeded), default=0.0)


def target_error(outcomes: Sequence[Outcome]) -> float:
    """The second best final training error, which two methods reach."""
    finals = sorted(outcome.run.rows[-1].train_error for outcome in outcomes if outcome.succeeded)
    return finals[min(1, len(finals) - 1)] if finals else 0.0


def summary_table(outcomes: Sequence[Outcome], counts: Sequence[int]) -> Table:
    """One line per method: cost, errors after some numbers of updates and in equal time, and time to a given error."""
    seconds, target = equal_seconds(outcomes), target_error(outcomes)
    table = Table(
        title="squared error per digit, training set above test set",
        caption="SGD and PRONG with Nesterov momentum 0.9. Seconds are of training, with the initialisation.",
    )
    table.add_column("method and settings", no_wrap=True)
    table.add_column("ms per\nupdate", justify="right")
    for count in counts:
        table.add_column(f"after\n{count}", justify="right")
    table.add_column(f"within\n{seconds:.1f} s", justify="right")
    table.add_column(f"reaches\n{target:.2f} after", justify="right")
    for outcome in outcomes:
        cells = [_errors(outcome.after(count)) for count in counts]
        table.add_row(_name(outcome), _cost(outcome), *cells, _errors(outcome.within(seconds)), _reach(outcome, target))
        table.add_section()
    return table


def failures(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """How methods failed, by name."""
    return {outcome.method: outcome.run.failure for outcome in outcomes if outcome.run.failure is not None}


def _name(outcome: Outcome) -> str:
    return f"[bold]{outcome.method}[/bold]\n{describe(outcome.settings)}"


def _cost(outcome: Outcome) -> str:
    return NONE if outcome.milliseconds is None else f"{outcome.milliseconds:.1f}"


def _errors(row: Row | None) -> str:
    return f"{NONE}\n{NONE}" if row is None else f"{row.train_error:.2f}\n{row.test_error:.2f}"


def _reach(outcome: Outcome, target: float) -> str:
    row = outcome.run.reaching(target)
    return NONE if row is None else f"{row.update} updates\n{row.seconds:.1f} s"


def race_table(field: Sequence[Standing], thresholds: Sequence[float]) -> Table:
    """One line per contestant: cost, and seconds and updates to every threshold, median and each seed."""
    table = Table(
        title="to a squared error per digit of at most ..., on the training set",
        caption="Seconds are median updates at the measured cost of one, with what comes before the first. "
        "Below: median updates, and those of each seed.",
    )
    table.add_column("method and settings", no_wrap=True)
    table.add_column("ms per\nupdate", justify="right")
    table.add_column("seconds\nbefore", justify="right")
    for threshold in thresholds:
        table.add_column(f"{threshold:g}", justify="right")
    for standing in field:
        name = f"[bold]{standing.contestant.name}[/bold]"
        if standing.failure is not None:
            table.add_row(f"{name}\nfailed", *[NONE] * (2 + len(thresholds)))
        else:
            costs = f"{standing.pace.milliseconds:.1f}", f"{standing.cost(0):.1f}"
            cells = [_threshold(standing, threshold) for threshold in thresholds]
            table.add_row(f"{name}\n{describe(standing.settings or {})}", *costs, *cells)
        table.add_section()
    return table


def _threshold(standing: Standing, threshold: float) -> str:
    updates = standing.updates(threshold)
    median = f"{standing.seconds(threshold):.1f} s\n{updates:g}" if math.isfinite(updates) else f"{NONE}\n{NONE}"
    each = " ".join(NONE if row is None else str(row.update) for row in standing.reaching(threshold))
    return f"{median}\n[dim]{each}[/dim]"


def ratio_table(field: Sequence[Standing], thresholds: Sequence[float]) -> Table:
    """How many times as much others needed as our best, who is named too."""
    table = Table(
        title="times as much as our best",
        caption="'>': not reached; what they had when they were stopped, over what our best needed.",
    )
    table.add_column("against", no_wrap=True)
    for threshold in thresholds:
        table.add_column(f"{threshold:g}", justify="right")
    found = ratios(field, thresholds)
    for start in range(0, len(found), len(thresholds)):
        row = found[start : start + len(thresholds)]
        table.add_row(f"{row[0].group}, in {row[0].measure}", *map(_ratio, row))
        table.add_section()
    return table


def _ratio(ratio: Ratio) -> str:
    if ratio.value is None:
        return NONE
    return f"{'> ' * ratio.at_least}{ratio.value:.2f}\n[dim]{ratio.peer}\n: {ratio.ours}[/dim]"


@dataclass(frozen=True)
class Look:
    """How a curve is drawn."""

    colour: Any
    line: str = "-"


def plot_curves(outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    """Draw errors against updates and against seconds, side by side, into a PNG file; test errors are dotted."""
    looks = [Look(f"C{number}") for number in range(len(outcomes))]
    _plot(outcomes, looks, title, path, ticks=(5, 10, 20, 50, 100, 200), test=True)


def plot_race(field: Sequence[Standing], thresholds: Sequence[float], title: str, path: Path | BinaryIO) -> None:
    """Draw median runs likewise, the training errors: a colour per method, dashed from the standard initialisation."""
    running = [standing for standing in field if standing.runs]
    methods = list(dict.fromkeys(standing.contestant.method_name for standing in running))
    outcomes, looks = [], []
    for standing in running:
        who = standing.contestant
        outcomes.append(Outcome(who.name, standing.settings or {}, standing.median_run(thresholds[-1])))
        colour = plt.get_cmap("tab20")(methods.index(who.method_name) % 20)
        looks.append(Look(colour, "-" if who.initialisation == "whitened" else "--"))
    _plot(outcomes, looks, title, path, ticks=(*thresholds, 20, 50, 100, 200), test=False)


def _plot(
    outcomes: Sequence[Outcome],
    looks: Sequence[Look],
    title: str,
    path: Path | BinaryIO,
    ticks: Sequence[float],
    test: bool,
) -> None:
    height = 4.4 + 0.2 * len(outcomes) / 2
    figure, (by_update, by_second) = plt.subplots(1, 2, figsize=(11, height), sharey=True, layout="constrained")
    for outcome, look in zip(outcomes, looks, strict=True):
        _draw(by_update, outcome, [row.update for row in outcome.run.rows], look, test)
        _draw(by_second, outcome, [row.seconds for row in outcome.run.rows], look, test)
    by_update.set(xlabel="updates", ylabel="squared error per digit")
    by_second.set(xlabel="seconds of training, initialisation included")
    for axes in (by_update, by_second):
        _style(axes, ticks)
    handles, labels = by_update.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw(axes: Axes, outcome: Outcome, x: Sequence[float], look: Look, test: bool) -> None:
    """Training error as a line, test error dotted beneath it, a cross where the run diverged."""
    train = [row.train_error for row in outcome.run.rows]
    label = f"{outcome.method} ({describe(outcome.settings)})" + ("" if outcome.succeeded else ", diverged")
    axes.plot(x, train, color=look.colour, linewidth=2, linestyle=look.line, label=label)
    if test:
        axes.plot(x, [row.test_error for row in outcome.run.rows], color=look.colour, linewidth=1.2, linestyle=":")
    if not outcome.succeeded:
        axes.plot(x[-1:], train[-1:], "X", color=look.colour, markersize=10)


def _style(axes: Axes, ticks: Sequence[float]) -> None:
    axes.set_yscale("log")
    axes.set_yticks(ticks)
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter("")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
