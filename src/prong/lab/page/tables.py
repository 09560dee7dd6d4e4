"""The tables of an experiment: results, costs, settings, and the runs that did not come to their end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from prong.lab.bench.sheets import NONE, Sheet, origin
from prong.lab.methods import RECORDED
from prong.lab.page.findings import SGD, SQUARES
from prong.lab.page.groups import Group, groups, quantities, setting
from prong.lab.page.pairs import by_label, paired
from prong.lab.page.runs import Experiment, Run, flat
from prong.lab.page.ticks import HUGE
from prong.lab.page.views import clock_note, words

NUMBERS = "parameters, but for batch norm's"
COMMIT = "; commit "  # as an origin has it
ERRORS = ("train_error", "validation_error", "test_error")
FRACTIONS = (*ERRORS, "train_top5_error", "validation_top5_error", "test_top5_error")  # shown in %


def results(experiment: Experiment, part: str = "") -> Sheet:
    """What every method ended with: median and range over seeds."""
    measures = quantities(experiment.runs)
    rows = []
    for group in groups(experiment.runs):
        ended = group.ended
        shown = ended.runs or group.runs
        seeds = ", ".join(str(run.config["seed"]) for run in shown)
        cells = [_final(ended, measure) for measure in measures]
        rows.append([group.name, seeds, f"{median(run.updates for run in shown):,.0f}", *cells])
    headings = ["method", "seeds", "updates", *(words(measure) + _unit(measure) for measure in measures)]
    note = (
        "Medians over seeds, and in brackets the smallest and the largest, where these differ. "
        "Unfinished runs are not in them."
    )
    return Sheet(_titled("Final measurements", part), headings, rows, note)


def chosen(experiment: Experiment) -> Sheet | None:
    """What every method got where its validation error was smallest; None if there is no validation."""
    rows = []
    for group in groups(experiment.runs):
        best = [row for run in group.ended.runs if (row := best_row(run))]
        if best:
            errors = [_spread([100 * row[key] for row in best]) if key in best[0] else NONE for key in ERRORS]
            rows.append([group.name, str(len(best)), f"{median(row['update'] for row in best):,.0f}", *errors])
    headings = ["method", "seeds", "update", *(f"{words(key)}, %" for key in ERRORS)]
    note = "Each run where its validation error is smallest; failed and unfinished runs are not in it."
    return Sheet("Chosen on the validation set", headings, rows, note) if rows else None


def best_row(run: Run) -> Mapping[str, float] | None:
    """The first row with the smallest validation error, of a run that came to its end."""
    rows = [row for row in run.rows if "validation_error" in row]
    return min(rows, key=lambda row: row["validation_error"]) if rows and run.failure is None else None


def milliseconds(experiment: Experiment, group: Group, apart: bool = True) -> float | None:
    """The time of an update: measured `apart` if it was, else the median of the runs' own, without initialisation."""
    pace = experiment.pace(group.runs[0]) if apart else None
    if pace is not None:
        return pace.milliseconds
    paces = []
    for run in group.ended.runs:
        timed = [row for row in run.rows if "seconds" in row]
        if len(timed) > 1:
            updates = timed[-1]["update"] - timed[0]["update"]
            paces.append(1000 * (timed[-1]["seconds"] - timed[0]["seconds"]) / updates)
    return median(paces) if paces else None


def costs(experiment: Experiment) -> Sheet | None:
    """Time per update and per epoch beside SGD's, of nets of one size timed in the same way; None without SGD."""
    found = [(group, cost) for group in groups(experiment.runs) if (cost := milliseconds(experiment, group))]
    bases = [(g, cost) for key in SGD for g, cost in found if g.method == key]
    if not bases:
        return None
    base = max(bases, key=lambda pair: pair[0].planned)  # the first of the longest
    batch = setting("batch")
    rows = []
    for group, cost in found:
        ratio = cost / base[1]
        kinds = {(experiment.pace(g.runs[0]) is None, g.config["parameters"]) for g in (group, base[0])}
        alike = len(kinds) == 1
        ratios = [ratio, ratio * batch(base[0]) / batch(group)]
        shares = [share(experiment, group, what) for what in ("refresh", "statistics")]
        percents = [NONE if part is None else f"{100 * part:.1f} %" for part in shares]
        rows.append([group.name, f"{cost:,.2f}", *(f"{r:,.2f}" if alike else NONE for r in ratios), *percents])
    headings = ["method", "ms per update", f"times {base[0].name}", "per epoch, times", "refresh", "statistics"]
    return Sheet("Cost", headings, rows, f"{clock_note(experiment)} The initialisation is not counted in these.")


def share(experiment: Experiment, group: Group, what: str) -> float | None:
    """The part of a method's time that goes into refreshes or into statistics, where it was measured as it was run."""
    if experiment.pace(group.runs[0]) is None:
        return None
    found = experiment.clock[group.method].get(f"{what}_share")
    return None if found is None else float(found)


def grids(experiment: Experiment) -> list[Sheet]:
    """Final training errors by damping and learning rate, of every method with such runs."""
    found = by_label(experiment, "eps")
    return [_grid(label if len(found) > 1 else "", runs) for label, runs in found.items()]


def _grid(label: str, runs: Sequence[Run]) -> Sheet:
    cells = paired(runs)
    rates = sorted({rate for rate, _ in cells})
    rows = [
        [f"{eps:g}", *(_cell(cells.get((rate, eps))) for rate in rates)]
        for eps in sorted({eps for _, eps in cells}, reverse=True)
    ]
    headings = ["ε", *(f"lr {rate:g}" for rate in rates)]
    title = _titled("Final training error by ε and learning rate", label)
    return Sheet(title, headings, rows, "Squared error per example.")


def settings(experiment: Experiment, part: str = "") -> Sheet:
    """How every method was set."""
    rows = []
    for group in groups(experiment.runs):
        config, plan = group.config, group.config["plan"]
        told = [f"{name} {_short(value)}" for name, value in config["settings"].items()]
        told += ["bfloat16"] if plan.get("bf16") else []
        method = RECORDED.get(group.method)
        refreshing = method is None or method.refreshes
        schedule = [_short(config["schedule"].get(name)) if refreshing else NONE for name in ("period", "samples")]
        numbers = [_short(plan.get("batch")), _short(plan.get("updates")), _short(config["parameters"])]
        started, annealed = config["initialisation"], str(plan.get("anneal", NONE))
        rows.append([group.name, ", ".join(told) or NONE, started, annealed, *schedule, *numbers])
    headings = ["method", "settings", "initialisation", "annealing", "T", "samples", "batch", "updates", NUMBERS]
    return Sheet(_titled("Settings", part), headings, rows, words=4)


def failures(experiment: Experiment) -> Sheet | None:
    """The runs that failed, and how; None if there are none."""
    rows = [[run_name(run), run.failure] for run in experiment.runs if run.failure is not None]
    return Sheet("Failed runs", ["run", "how"], rows, words=2) if rows else None


def unfinished(experiment: Experiment) -> Sheet | None:
    """The runs that have not ended, and how far they are; None if there are none."""
    rows = [
        [run_name(run), f"{run.updates:,} of {_short(flat(run.config).get('updates'))}"]
        for run in experiment.runs
        if run.outcome is None
    ]
    return Sheet("Unfinished runs", ["run", "updates"], rows) if rows else None


def run_name(run: Run) -> str:
    """What was run, in words."""
    told = [f"{name} {_short(value)}" for name, value in run.config["settings"].items()]
    period = f"T {_short(run.config['schedule'].get('period'))}"
    words = [run.config["label"], run.config["part"], *told, period, f"{run.config['initialisation']} init"]
    return ", ".join([word for word in words if word] + [f"seed {run.config['seed']}"])


def origins(experiment: Experiment) -> list[str]:
    """Where and with which code the runs were made; several lines if not all in the same place."""
    found: dict[str, set[str]] = {}
    for run in experiment.runs:
        place, _, commit = _origin(run.environment).partition(COMMIT)
        found.setdefault(place, set()).add(commit)
    return [
        f"{place}{COMMIT}{commits.pop()}" if len(commits) == 1 else f"{place}; commits {', '.join(_brief(commits))}"
        for place, commits in sorted(found.items())
    ]


def _brief(commits: Iterable[str]) -> list[str]:
    """Commits by their first digits, those with other changes marked by a star."""
    return sorted({commit[:7] + "*" * commit.endswith("-dirty") for commit in commits})


def sources(experiment: Experiment) -> list[str]:
    """The data of the runs."""
    return sorted({run.config["data"] for run in experiment.runs})


def _origin(environment: Mapping[str, Any]) -> str:
    try:
        return origin(dict(environment))
    except (KeyError, TypeError):  # of a record that says less than ours
        return "unknown"


def _final(group: Group, measure: str) -> str:
    if not group.runs:
        return "unfinished"
    factor = 100 if measure in FRACTIONS else 1
    point = group.final(measure)
    if point is None:
        return "diverged" if group.failed else NONE
    return _spread([factor * value for value in (point.low, point.median, point.high)], len(group.runs) > 1)


def _spread(values: Sequence[float], several: bool = True) -> str:
    low, middle, high = min(values), median(values), max(values)
    told = [_number(value) for value in (middle, low, high)]
    return f"{told[0]} ({told[1]}-{told[2]})" if several and len(set(told)) > 1 else told[0]


def _number(value: float) -> str:
    """Four digits that count, or all before the point unless these are very many."""
    if abs(value) >= HUGE:
        return f"{value:.3e}"
    return f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:#,.4g}".rstrip(".")


def _cell(group: Group | None) -> str:
    return NONE if group is None else _final(group.ended, SQUARES)


def _titled(title: str, part: str) -> str:
    return f"{title}: {part}" if part else title


def _unit(measure: str) -> str:
    return ", %" if measure in FRACTIONS else ""


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return NONE if value is None else f"{value:,}" if isinstance(value, int) else str(value)
