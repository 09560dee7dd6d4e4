"""Measured runs as a table and as curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only: no window, no display needed

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import ScalarFormatter
from rich.table import Table

from prong.lab.methods import Settings
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

    def reaching(self, error: float) -> Row | None:
        """The first row with a training error no larger than this."""
        return next((row for row in self.run.rows if row.train_error <= error), None)


def describe(settings: Settings) -> str:
    """Settings as text: `lr 0.001, eps 0.01`."""
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())


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
    row = outcome.reaching(target)
    return NONE if row is None else f"{row.update} updates\n{row.seconds:.1f} s"


def plot_curves(outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    """Draw errors against updates and against seconds, side by side, into a PNG file."""
    figure, (by_update, by_second) = plt.subplots(1, 2, figsize=(11, 5.2), sharey=True, layout="constrained")
    for number, outcome in enumerate(outcomes):
        _draw(by_update, outcome, [row.update for row in outcome.run.rows], f"C{number}")
        _draw(by_second, outcome, [row.seconds for row in outcome.run.rows], f"C{number}")
    by_update.set(xlabel="updates", ylabel="squared error per digit")
    by_second.set(xlabel="seconds of training, initialisation included")
    for axes in (by_update, by_second):
        _style(axes)
    handles, labels = by_update.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw(axes: Axes, outcome: Outcome, x: Sequence[float], colour: str) -> None:
    """Training error as a line, test error dotted beneath it, a cross where the run diverged."""
    train, test = ([getattr(row, f"{part}_error") for row in outcome.run.rows] for part in ("train", "test"))
    label = f"{outcome.method} ({describe(outcome.settings)})"
    axes.plot(x, train, color=colour, linewidth=2, label=label if outcome.succeeded else f"{label}, diverged")
    axes.plot(x, test, color=colour, linewidth=1.2, linestyle=":")
    if not outcome.succeeded:
        axes.plot(x[-1:], train[-1:], "X", color=colour, markersize=10)


def _style(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.set_yticks([5, 10, 20, 50, 100, 200])
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter("")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
