"""A plan as tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence

from prong.lab.bench.sheets import NONE, Sheet, number
from prong.lab.planning.machines import EFFICIENCY, SHEETS, Machine
from prong.lab.planning.prediction import Cost, Prediction
from prong.lab.planning.tracing import Place, Traced


def milliseconds(seconds: float) -> str:
    """As numbers of tables are written."""
    return number(1000 * seconds)


def size(numbers: float) -> str:
    """Bytes, in the unit that leaves few digits."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if numbers >= scale:
            return f"{number(numbers / scale)} {unit}"
    return f"{number(numbers)} B"


def total_sheet(title: str, prediction: Prediction, machine: Machine) -> Sheet:
    """What a worker does at an update and at a refresh."""
    p = prediction

    def row(name: str, computing: float, exchange: float, held: str, sent: float) -> list[str]:
        both = computing + exchange
        times = map(milliseconds, (computing, exchange, both))
        return [name, *times, held, size(sent), f"{both / p.sgd:.2f}"]

    update = p.closed - p.gradients[1]
    average = p.gradient_bytes + p.refresh_bytes / p.setting.period
    rows = [
        row("SGD, update", p.total.plain, p.gradients[0], size(p.sgd_memory), p.gradient_bytes),
        row("PRONG, update", update, p.gradients[1], NONE, p.gradient_bytes),
        row("  in a window", update + p.total.statistics, p.gradients[1], NONE, p.gradient_bytes),
        row("  refresh", p.total.factorisation, p.reduction + p.spreading, NONE, p.refresh_bytes),
        row("  all-in", p.all_in - p.all_in_exchange, p.all_in_exchange, size(p.memory), average),
    ]
    headings = ("per worker", "computing, ms", "exchange, ms", "together, ms", "memory, at most", "sent", "times SGD")
    return Sheet(title, headings, rows, f"{_all_in(p)} {_source(machine)}")


def kind_sheet(prediction: Prediction) -> Sheet:
    """The same by kind of layer."""
    rows = [[name, *_row(cost)] for name, cost in prediction.kinds.items()]
    rows.append(["total", *_row(prediction.total)])
    headings = (
        "layers",
        "parameters",
        "SGD, ms",
        "preconditioning, ms",
        "statistics, ms",
        "factorisation, ms",
        "P",
        "statistics",
        "added up",
        "sent by owners",
    )
    note = "Per worker. Factorisation: on the worker that has most to do. Other: what is not whitened, and calls."
    return Sheet("by kind of layer", headings, rows, note)


def sentences(traced: Traced, prediction: Prediction, machine: Machine) -> list[str]:
    """What is split over workers, what is blocked, what is diagonal, and what does not fit."""
    workers = prediction.setting.workers
    own = [place for place in traced.places if place.owner == place.name]
    busy = len(set(prediction.owners.values()))
    said = []
    if workers > 1:
        said.append(
            f"Split: examples and their statistics over {workers:,} workers; factorisations of {len(own):,} layers "
            f"over {busy:,}; parameters, momentum and P are on all."
        )
    blocked = [p for p in own if p.layout.blocks > 1 and p.layout.features > 1]
    diagonal = [p for p in own if p.layout.blocks > 1 and p.layout.features == 1]
    whole = len(own) - len(blocked) - len(diagonal)
    said.append(f"Whole: {whole:,} of {len(own):,} layers.{_named('Blocked', blocked)}{_named('Diagonal', diagonal)}")
    for what, needed in {"SGD": prediction.sgd_memory, "PRONG": prediction.memory}.items():
        if needed > machine.memory:
            said.append(
                f"{what} does not fit: {size(needed)} per worker, where {machine.name} has {size(machine.memory)}. "
                "Give each worker fewer examples, or shard parameters."
            )
    return said


def _named(what: str, places: Sequence[Place]) -> str:
    if not places:
        return ""
    widths: dict[str, int] = {}
    for place in places:
        layout = place.layout
        inside = "" if layout.features == 1 else f" in blocks of {layout.features:,}"
        widths[f"{layout.inputs:,} inputs{inside}"] = widths.get(f"{layout.inputs:,} inputs{inside}", 0) + 1
    return f" {what}: {'; '.join(f'{count} of {width}' for width, count in widths.items())}."


def _row(cost: Cost) -> list[str]:
    times = (cost.plain, cost.preconditioning, cost.statistics, cost.factorisation)
    sizes = (cost.held, cost.window, cost.reduced, cost.spread)
    return [f"{cost.parameters:,}", *map(milliseconds, times), *map(size, sizes)]


def _all_in(p: Prediction) -> str:
    setting = p.setting
    return (
        f"All-in: a refresh from {setting.samples:,} samples every {setting.period:,} updates, "
        f"of which {p.open_updates:,} gather statistics."
    )


def _source(machine: Machine) -> str:
    if machine.source != SHEETS:
        return f"Constants of {machine.name}: {machine.source}."
    shares = ", ".join(f"{share:g} of it for {what}" for what, share in EFFICIENCY.items())
    return f"Constants of {machine.name}: data sheet, not measured; assumed to be reached: {shares}."
