"""A race as tables and as curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import matplotlib

matplotlib.use("Agg")  # files only: no window, no display needed

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import ScalarFormatter
from rich.table import Table

from prong.lab.methods import Settings
from prong.lab.racing.standings import NOT_REACHED, Ratio, Standing, ratios
from prong.lab.training import Run

NONE = "-"


def describe(settings: Settings) -> str:
    """Settings as text: `lr 0.001, eps 0.01`."""
    return ", ".join(f"{name} {value:.3g}" for name, value in settings.items())


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
    table = Table(title="times as much as our best", caption=NOT_REACHED)
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
    return f"{'> ' * ratio.at_least}{ratio.value:.2f}\n[dim]{ratio.peer or 'nobody'}\n: {ratio.ours}[/dim]"


def plot_race(field: Sequence[Standing], thresholds: Sequence[float], title: str, path: Path | BinaryIO) -> None:
    """Draw training errors of median runs against updates and against seconds, side by side, into a PNG file.

    A colour per method; dashed from the standard initialisation; a cross where a run diverged.
    """
    running = [standing for standing in field if standing.runs]
    methods = list(dict.fromkeys(standing.contestant.method_name for standing in running))
    height = 4.4 + 0.2 * len(running) / 2
    figure, (by_update, by_second) = plt.subplots(1, 2, figsize=(11, height), sharey=True, layout="constrained")
    for standing in running:
        run = standing.median_run(thresholds[-1])
        colour = plt.get_cmap("tab20")(methods.index(standing.contestant.method_name) % 20)
        _draw(by_update, standing, run, [row.update for row in run.rows], colour)
        _draw(by_second, standing, run, [row.seconds for row in run.rows], colour)
    by_update.set(xlabel="updates", ylabel="squared error per digit")
    by_second.set(xlabel="seconds of training, initialisation included")
    for axes in (by_update, by_second):
        _style(axes, (*thresholds, 20, 50, 100, 200))
    handles, labels = by_update.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw(axes: Axes, standing: Standing, run: Run, x: Sequence[float], colour: Any) -> None:
    errors, who = [row.train_error for row in run.rows], standing.contestant
    line = "-" if who.initialisation == "whitened" else "--"
    ending = ", diverged" if run.failure else ""
    label = f"{who.name} ({describe(standing.settings or {})}){ending}"
    axes.plot(x, errors, color=colour, linewidth=2, linestyle=line, label=label)
    if run.failure:
        axes.plot(x[-1:], errors[-1:], "X", color=colour, markersize=10)


def _style(axes: Axes, ticks: Sequence[float]) -> None:
    axes.set_yscale("log")
    axes.set_yticks(ticks)
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter("")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
