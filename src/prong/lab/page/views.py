"""Which figures an experiment has: the paper's where it has some, else a chart of everything that was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from prong.lab.page.charts import Chart, Curve, Dash, Figure, HeatMaps, curve, far_apart, looks, two_ways, under_way
from prong.lab.page.findings import SQUARES
from prong.lab.page.grids import Cell, Grid
from prong.lab.page.groups import Group, Value, clocked, groups, quantities, setting
from prong.lab.page.pairs import LOST_WORDS, by_label, lost_their_way, paired
from prong.lab.page.runs import Experiment, Run

UPDATES, SECONDS = "updates", "seconds"
WORDS = {
    "squared_error": "squared error per example",
    "mean_squared_error": "squared error per pixel",
    "cross_entropy": "cross-entropy",
    "error": "error",
    "loss": "loss",
}
WHEN = ("before", "after")
SETS = {"train": "training", "validation": "validation", "test": "test"}
CLOCKED = "Seconds are updates at the median cost of one, with what comes before the first, measured side by side"
OWN = "Seconds are the runs' own: whatever else the machine did is in them"


def figures(experiment: Experiment) -> list[Figure]:
    """All figures of an experiment, without those that have nothing to show."""
    drawn = VIEWS.get(experiment.name, generic)(experiment)
    return [figure for figure in drawn if _shows(figure)]


def _shows(figure: Figure) -> bool:
    if isinstance(figure, Chart):
        return any(line.x for line in figure.curves)
    return isinstance(figure, HeatMaps) or any(cell for row in figure.cells for cell in row)


def words(quantity: str) -> str:
    """What a measure is called: `train_error` is the training error."""
    head, _, rest = quantity.partition("_")
    if head in SETS and rest:
        return f"{SETS[head]} {WORDS.get(rest, rest.replace('_', ' '))}"
    return WORDS.get(quantity, quantity.replace("_", " "))


def over(
    experiment: Experiment, quantity: str, seconds: bool = False, percent: bool = False, log: bool | None = None
) -> Chart:
    """A measure of all groups against updates or seconds."""
    shown = [_shown(group) for group in groups(experiment.runs)]
    clock = clocked(experiment) if seconds else None
    value: str | Value = _percent(quantity) if percent else quantity
    curves = [
        curve(group, group.points(value, clock), look, seconds) for group, look in zip(shown, looks(shown), strict=True)
    ]
    far = seconds and far_apart(curves)
    curves = under_way(curves) if far else curves
    y = words(quantity) + (", %" if percent else "")
    note = clock_note(experiment) if seconds else ""
    name = f"{quantity.replace('_', '-')}-{SECONDS if seconds else UPDATES}"
    title = f"{words(quantity).capitalize()} against {SECONDS if seconds else UPDATES}"
    return Chart(name, title, SECONDS if seconds else UPDATES, y, curves, far, _log(curves, log), note)


def clock_note(experiment: Experiment) -> str:
    """Where seconds come from."""
    own = experiment.untimed()
    timed = any(experiment.pace(run) for run in experiment.runs)
    return (
        f"{CLOCKED}; those of {', '.join(own)} are the runs' own." if own and timed else f"{OWN if own else CLOCKED}."
    )


def generic(experiment: Experiment) -> Sequence[Figure]:
    """Every measure against updates."""
    return [over(experiment, quantity) for quantity in quantities(experiment.runs)]


def autoencoder(experiment: Experiment) -> Sequence[Figure]:
    """Training and test error, against updates and against seconds."""
    return [
        over(experiment, quantity, seconds) for quantity in (SQUARES, "test_squared_error") for seconds in (False, True)
    ]


def imagenet(experiment: Experiment) -> Sequence[Figure]:
    """Training error against updates, validation error against seconds."""
    return [
        over(experiment, "train_error", percent=True, log=False),
        over(experiment, "validation_error", seconds=True, percent=True, log=False),
    ]


def cifar10(experiment: Experiment) -> Sequence[Figure]:
    """Training error against updates, test error against seconds."""
    return [over(experiment, "train_error", percent=True), over(experiment, "test_error", seconds=True, percent=True)]


def conditioning(experiment: Experiment) -> Sequence[Figure]:
    """The Fisher before and after, its condition number over training for every run, and the training loss."""
    maps = [run for run in experiment.runs if all(_positive(run.keepsakes.get(when)) for when in WHEN)]
    heat = [_heat(max(maps, key=lambda run: run.planned))] if maps else []  # the first of the longest
    found = groups(experiment.runs)
    curves = [
        line for group, look in zip(found, looks(found), strict=True) for line in _each(group, relative_condition, look)
    ]
    title = "Condition number of the Fisher, relative to its first value"
    relative = Chart(
        "condition",
        title,
        UPDATES,
        "condition number, % of the first",
        curves,
        log_y=_log(curves, None),
        note="One curve per run.",
    )
    learning = [quantity for quantity in quantities(experiment.runs) if quantity.startswith("train_")]
    return [*heat, relative, *(over(experiment, quantity) for quantity in learning)]


def sensitivity(experiment: Experiment) -> Sequence[Figure]:
    """Of every method the training error by damping and learning rate, and by period from both initialisations."""
    drawn: list[Figure] = []
    for part, views in {"eps": (_dampings, _final_errors), "period": (_periods,)}.items():
        methods = by_label(experiment, part)
        for number, (label, runs) in enumerate(methods.items(), start=1):
            name, who = (f"-{number}", f" ({label})") if len(methods) > 1 else ("", "")
            drawn += [view(name, who, runs) for view in views]
    return drawn


VIEWS: Mapping[str, Callable[[Experiment], Sequence[Figure]]] = {
    "conditioning": conditioning,
    "sensitivity": sensitivity,
    "autoencoder": autoencoder,
    "cifar10": cifar10,
    "imagenet": imagenet,
}


def relative_condition(run: Run, row: Mapping[str, float]) -> float | None:
    """The condition number of a row in % of the run's first."""
    first = next((known["condition"] for known in run.rows if "condition" in known), None)
    return 100 * row["condition"] / first if first and "condition" in row else None


def _dampings(name: str, who: str, runs: Sequence[Run]) -> Figure:
    """A method's training error for every pair of damping and learning rate."""
    eps = [_shown(group) for group in groups(runs)]
    eps.sort(key=lambda group: (-setting("eps")(group), -setting("lr")(group)))
    styles = two_ways(eps, setting("eps"), setting("lr"))
    title = f"Training error by damping ε and learning rate{who}"
    return _errors(f"eps{name}", title, eps, styles, _pair, "A cross marks where a pair diverged.")


def _periods(name: str, who: str, runs: Sequence[Run]) -> Figure:
    """A method's training error for every period, from both initialisations."""
    period = [_shown(group) for group in groups(runs)]
    period.sort(key=lambda group: (group.config["initialisation"] != "whitened", setting("period")(group)))
    styles = two_ways(period, setting("period"), lambda group: str(group.config["initialisation"]))
    title = f"Training error by period T and initialisation{who}"
    note = "Solid: whitened initialisation. Dashed: fan-in initialisation."
    return _errors(f"period{name}", title, period, styles, _start, note)


def _final_errors(name: str, who: str, runs: Sequence[Run]) -> Figure:
    """Where a method's pairs of damping and learning rate ended."""
    known = paired(runs)
    rates, dampings = sorted({lr for lr, _ in known}), sorted({eps for _, eps in known}, reverse=True)
    lost = lost_their_way({pair: group.ended for pair, group in known.items()})
    cells = [[_end(known.get((lr, eps)), (lr, eps) in lost) for lr in rates] for eps in dampings]
    note = f"A cross: diverged. Lost its way: ended {LOST_WORDS}. Empty: not run, or not ended."
    columns, rows = ([f"{value:g}" for value in values] for values in (rates, dampings))
    title = f"Final training error by damping ε and learning rate{who}"
    return Grid(f"eps-final{name}", title, "learning rate", "ε", words(SQUARES), columns, rows, cells, note)


def _end(group: Group | None, lost: bool) -> Cell | None:
    if group is None or not group.ended.runs:
        return None
    final = group.ended.final(SQUARES)
    if final is None:
        return Cell(None, "diverged") if group.ended.failed else None
    return Cell(final.median, "lost its way" if lost else "")


def _errors(
    name: str,
    title: str,
    found: Sequence[Group],
    styles: Sequence[tuple[str, Dash]],
    label: Callable[[Group], str],
    note: str,
) -> Chart:
    lengths = len({group.planned for group in found}) > 1
    named = [Group(label(group) + (f", {group.planned:,} updates" if lengths else ""), group.runs) for group in found]
    curves = [curve(group, group.points(SQUARES), style) for group, style in zip(named, styles, strict=True)]
    return Chart(name, title, UPDATES, words(SQUARES), curves, log_y=_log(curves, None), note=note)


def _pair(group: Group) -> str:
    return f"ε {setting('eps')(group):g}, lr {setting('lr')(group):g}"


def _start(group: Group) -> str:
    fan_in = "" if group.config["initialisation"] == "whitened" else ", fan-in"
    return f"T {setting('period')(group):,}{fan_in}"


def _shown(group: Group) -> Group:
    """What has ended of it, or all of it where nothing has."""
    return group.ended if group.ended.runs else group


def _each(group: Group, value: Value, look: tuple[str, Dash]) -> list[Curve]:
    """A curve for every run of a group, under the group's name."""
    alone = [Group(group.name, [run]) for run in group.runs]
    return [curve(run, run.points(value), look) for run in alone]


def _percent(quantity: str) -> Value:
    return lambda run, row: 100 * row[quantity] if quantity in row else None


def _log(curves: Sequence[Curve], wanted: bool | None) -> bool:
    positive = all(y > 0 for line in curves for y in (*line.y, *line.low))
    return positive if wanted is None else wanted and positive


def _positive(matrix: Sequence[Sequence[float]] | None) -> bool:
    """Whether there is something to show on a logarithmic scale."""
    return bool(matrix) and max(max(row, default=0.0) for row in matrix or ()) > 0


def _heat(run: Run) -> HeatMaps:
    kept = run.keepsakes
    who = f"{run.config['label']}, seed {run.config['seed']}"
    title = f"Fisher of the middle layer, relative to its largest entry ({who})"
    known = [f"{kept[f'condition_{when}']:.3g} {when}" for when in WHEN if f"condition_{when}" in kept]
    note = f"Condition number {', '.join(known)} whitening." if known else ""
    return HeatMaps("fisher", title, {f"{when} whitening": _relative(kept[when]) for when in WHEN}, note)


def _relative(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """The entries beside the largest of them."""
    largest = max(map(max, matrix))
    return [[value / largest for value in row] for row in matrix]
