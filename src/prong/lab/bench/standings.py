"""The race on the page of performance: its standings as tables and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from prong.lab.bench.sheets import NONE, Sheet
from prong.lab.racing.scoreboard import describe, plot_race
from prong.lab.racing.standings import NOT_REACHED, Ratio, Standing, ratios, standings


def sheets(record: Mapping[str, Any]) -> list[Sheet]:
    """What everybody needed, and how many times as much as our best."""
    thresholds = record["config"]["thresholds"]
    field = [standing for standing in standings(record) if standing.runs or standing.failure]
    return [_needed(field, thresholds, record["config"]), _ratios(field, thresholds)]


def picture(record: Mapping[str, Any]) -> bytes:
    """Median runs as a PNG file."""
    file = BytesIO()
    plot_race(standings(record), record["config"]["thresholds"], f"Autoencoder, {record['config']['data']}", file)
    return file.getvalue()


def _needed(field: Sequence[Standing], thresholds: Sequence[float], config: Mapping[str, Any]) -> Sheet:
    rows = []
    for standing in field:
        if standing.failure is not None:
            rows.append([standing.contestant.name, "failed", NONE, *[NONE] * len(thresholds)])
            continue
        cells = [_cell(standing, threshold) for threshold in thresholds]
        settings = describe(standing.settings or {})
        rows.append([standing.contestant.name, settings, f"{standing.pace.milliseconds:.1f}", *cells])
    seeds = ", ".join(map(str, config["seeds"]))
    note = (
        f"Medians of seeds {seeds}; settings are the best of {config['trials']} trials with another seed. A run was "
        f"given {config['cap']:g} s. Seconds are updates at the measured cost of one, with what comes before the first."
    )
    headings = ("method", "settings", "ms per update", *(f"to {threshold:g}" for threshold in thresholds))
    return Sheet("squared error per training digit, seconds (updates) to reach it", headings, rows, note)


def _cell(standing: Standing, threshold: float) -> str:
    updates = standing.updates(threshold)
    return f"{standing.seconds(threshold):.1f} ({updates:g})" if math.isfinite(updates) else NONE


def _ratios(field: Sequence[Standing], thresholds: Sequence[float]) -> Sheet:
    found = ratios(field, thresholds)
    rows = []
    for start in range(0, len(found), len(thresholds)):
        row = found[start : start + len(thresholds)]
        rows.append([f"{row[0].group}, in {row[0].measure}", *map(_ratio, row)])
    return Sheet("times as much as our best", ("against", *(f"to {t:g}" for t in thresholds)), rows, NOT_REACHED)


def _ratio(ratio: Ratio) -> str:
    if ratio.value is None:
        return NONE
    return f"{'> ' * ratio.at_least}{ratio.value:.1f} ({ratio.peer or 'nobody'} : {ratio.ours})"
