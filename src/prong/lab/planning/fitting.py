"""From measured times to the constants of a machine, by least squares of relative errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import nnls

from prong.lab.planning import costs
from prong.lab.planning.machines import Machine, sent_by_all_reduce
from prong.lab.planning.trials import CLOSED, OPEN, SGD

Row = Mapping[str, Any]


def fit(rows: Sequence[Row], name: str, memory: float) -> Machine:
    """The machine that explains what was measured best. Rows are those of `prong.lab.planning.worker`."""
    alone = [row for row in rows if row["workers"] == 1]
    (copied,) = chosen(alone, "memory")
    memory_rate = copied["moved"] / took(copied)
    _, product = _line(chosen(alone, "product"), lambda row: (1.0, row["flops"]), memory_rate)
    _, convolution = _line(chosen(alone, "convolution"), lambda row: (1.0, row["flops"]), memory_rate)
    factor_call, factor = _line(
        chosen(alone, "factorisation"),
        lambda row: (1.0, row["width"] ** 3),
        memory_rate,
        lambda row: 12.0 * costs.PRECISE * row["width"] ** 2,
    )
    messages = [*chosen(rows, "all-reduce"), *chosen(rows, "broadcast")]
    latency, byte = _line(messages, _sending) if messages else (0.0, 1 / memory_rate)
    calls = {row["phase"]: took(row) for row in chosen(alone, "calls")}
    layers = 16
    return Machine(
        name=name,
        source="measured",
        products={"float32": 1 / product},
        convolutions={"float32": 1 / convolution},
        factorisations=1 / factor,
        memory_rate=memory_rate,
        memory=memory,
        network_rate=1 / byte,
        latency=latency,
        call=calls[SGD] / layers,
        whitened_call=max(0.0, calls[CLOSED] - calls[SGD]) / layers,
        statistics_call=max(0.0, calls[OPEN] - calls[CLOSED]) / layers,
        factor_call=factor_call,
        crowding=_crowding(rows),
    )


def took(row: Row) -> float:
    """Seconds, the median of repetitions."""
    return float(median(row["seconds"]))


def chosen(rows: Sequence[Row], part: str) -> list[Row]:
    """The measurements of one part."""
    return [row for row in rows if row["part"] == part]


def _sending(row: Row) -> tuple[float, float]:
    """Messages after each other, and bytes, of which the time of an exchange is made."""
    workers, size = row["workers"], row["bytes"]
    if row["part"] == "all-reduce":
        return 2.0 * (workers - 1), sent_by_all_reduce(size, workers)
    rounds = float((workers - 1).bit_length())
    return rounds, rounds * size


def _line(
    rows: Sequence[Row],
    columns: Callable[[Row], tuple[float, float]],
    memory_rate: float | None = None,
    moved: Callable[[Row], float] = lambda row: float(row["moved"]),
) -> tuple[float, float]:
    """Seconds of each of two columns, none negative, once the time of moving bytes is taken off."""
    times = np.array([took(row) for row in rows])
    rest = times if memory_rate is None else times - np.array([moved(row) / memory_rate for row in rows])
    matrix = np.array([columns(row) for row in rows])
    scale = matrix.max(0)
    solution, _ = nnls(matrix / scale / times[:, None], rest / times)
    first, second = solution / scale
    if second <= 0:
        raise SystemExit(
            f"the times of {rows[0]['part']} do not grow with its size, so no rate can be told from them. "
            "Measure on a machine that does nothing else, with larger --widths and --messages."
        )
    return float(first), float(second)


def _crowding(rows: Sequence[Row]) -> dict[str, float]:
    """How many times as long computing takes beside others, by the number of processes."""
    parts = ("product", "convolution", "factorisation")
    alone = {part: [took(row) for row in chosen(rows, part) if row["workers"] == 1] for part in parts}
    found = {}
    for workers in sorted({row["workers"] for row in rows}):
        beside = {part: [took(row) for row in chosen(rows, part) if row["workers"] == workers] for part in parts}
        ratios = [b / a for part in parts for a, b in zip(alone[part], beside[part], strict=True)]
        found[str(workers)] = max(1.0, median(ratios))
    return found
