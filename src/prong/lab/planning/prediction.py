"""Seconds, bytes held and bytes sent of an update and of a refresh: costs of places on a machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prong.distributed.exchange import owners as shared_out
from prong.lab.bench.amortise import all_in, window_updates
from prong.lab.planning import costs
from prong.lab.planning.costs import Work
from prong.lab.planning.machines import Machine, sent_by_all_reduce
from prong.lab.planning.tracing import Place, Traced

MEETINGS = 4  # small exchanges of a refresh, in which workers agree on what is to be sent


@dataclass(frozen=True)
class Setting:
    """How a model is trained.

    Attributes:
        workers: how many, each with its share of the minibatch.
        period: updates between refreshes.
        samples: examples per refresh, over all workers.
        dtype: of parameters and products. Statistics and factorisations are in float32.
    """

    workers: int
    period: int
    samples: int
    dtype: str


@dataclass(frozen=True)
class Cost:
    """Of some places, or of all: seconds, and bytes.

    Attributes:
        plain: seconds of forward, backward and step of SGD.
        preconditioning: seconds that PRONG adds to an update.
        statistics: seconds that an open window adds to an update.
        factorisation: seconds of a refresh on the busiest worker; for some places, of those that it owns.
        held: bytes of P and c.
        window: bytes of statistics.
        reduced: bytes of statistics that are added up over workers.
        spread: bytes of P and c that owners send.
        parameters: numbers.
    """

    plain: float
    preconditioning: float
    statistics: float
    factorisation: float
    held: int
    window: int
    reduced: int
    spread: int
    parameters: int


@dataclass(frozen=True)
class Prediction:
    """An update and a refresh of SGD under DDP and of PRONG, per worker; seconds and bytes.

    Attributes:
        total: all layers.
        kinds: by kind of layer and size of its blocks; "other" is what is not whitened.
        gradients: seconds of an update in which gradients' exchange is waited for, by SGD and by PRONG.
        reduction: seconds of adding up statistics.
        spreading: seconds of sending P to all.
        sgd_memory: bytes of SGD.
        memory: bytes of PRONG, at their most.
        gradient_bytes: that a worker sends at an update.
        refresh_bytes: that a worker sends at a refresh, on average over workers.
        open_updates: of a period, in which statistics are gathered.
        owners: by place, the rank that factorises it.
        setting: for which this is.
    """

    total: Cost
    kinds: Mapping[str, Cost]
    gradients: tuple[float, float]
    reduction: float
    spreading: float
    sgd_memory: int
    memory: int
    gradient_bytes: float
    refresh_bytes: float
    open_updates: int
    owners: Mapping[str, int]
    setting: Setting

    @property
    def sgd(self) -> float:
        """Seconds of an update of SGD."""
        return self.total.plain + self.gradients[0]

    @property
    def closed(self) -> float:
        """Seconds of an update of PRONG that gathers no statistics."""
        return self.total.plain + self.total.preconditioning + self.gradients[1]

    @property
    def open(self) -> float:
        """Seconds of one that does."""
        return self.closed + self.total.statistics

    @property
    def refresh(self) -> float:
        """Seconds of a refresh."""
        return self.reduction + self.total.factorisation + self.spreading

    @property
    def all_in(self) -> float:
        """Seconds of the average update of a period."""
        window, period = self.open_updates, self.setting.period
        return all_in(self.closed, self.open, self.refresh, period=period, window=window).total

    @property
    def all_in_exchange(self) -> float:
        """Those of it in which workers wait for each other's messages."""
        return self.gradients[1] + (self.reduction + self.spreading) / self.setting.period

    @property
    def times_sgd(self) -> float:
        """How many times as long as an update of SGD."""
        return self.all_in / self.sgd


def predict(traced: Traced, machine: Machine, setting: Setting) -> Prediction:
    """What a model costs, trained so on such a machine; `traced` is of one worker's share of the minibatch."""
    item, workers = traced.itemsize, setting.workers
    own = [place for place in traced.places if place.owner == place.name]
    seconds = {p.name: _seconds(costs.factorisation(p), machine, workers, "float32", factor=True) for p in own}
    owners = shared_out({p.name: float(costs.factorisation(p).flops) for p in own}, workers)
    loads = [
        sum(seconds[name] for name, rank in owners.items() if rank == r) for r in range(min(workers, len(own)) or 1)
    ]
    busiest = loads.index(max(loads))

    kinds: dict[str, list[Place]] = {}
    for place in traced.places:
        kinds.setdefault(_kind(place), []).append(place)
    parts = {kind: _cost(places, machine, setting, item, owners, busiest) for kind, places in kinds.items()}
    parts["other"] = _other(traced, machine, setting)
    total = _sum(parts.values())

    gradient = traced.parameters * item
    exchanged = machine.all_reduce(gradient, workers)
    backward = [2 / 3 * total.plain, 2 / 3 * total.plain + total.preconditioning]
    waited = tuple(max(0.0, exchanged - machine.overlap * t) for t in backward)
    meetings = MEETINGS * machine.all_reduce(0, workers)
    spreading = sum(
        machine.broadcast(sum(costs.sent_inverse(p) for p in own if owners[p.name] == r), workers)
        for r in range(len(loads))
    )
    sgd_memory = 3 * gradient + traced.kept
    examples = max((math.ceil(p.samples * costs.looked_at(p) / p.rows) for p in traced.places), default=1) * workers
    return Prediction(
        total=total,
        kinds=parts,
        gradients=(waited[0], waited[1]),
        reduction=meetings + machine.all_reduce(total.reduced, workers),
        spreading=spreading,
        sgd_memory=sgd_memory,
        memory=_memory(own, traced, sgd_memory, total, workers),
        gradient_bytes=sent_by_all_reduce(gradient, workers),
        refresh_bytes=sent_by_all_reduce(total.reduced, workers) + total.spread * (workers - 1) / workers,
        open_updates=window_updates(setting.period, setting.samples, examples),
        owners=owners,
        setting=setting,
    )


def _kind(place: Place) -> str:
    layout = place.layout
    if layout.blocks == 1:
        return place.kind
    return f"{place.kind}, diagonal" if layout.features == 1 else f"{place.kind}, blocks of {layout.features:,}"


def _cost(
    places: Sequence[Place], machine: Machine, setting: Setting, item: int, owners: Mapping[str, int], busiest: int
) -> Cost:
    workers, dtype = setting.workers, setting.dtype
    own = [place for place in places if place.name in owners]
    mine = [place for place in own if owners[place.name] == busiest]

    def convolved(place: Place) -> bool:
        return costs.is_convolution(place)

    return Cost(
        plain=sum(_seconds(costs.plain_layer(p, item), machine, workers, dtype, convolved(p)) for p in places)
        + _step(sum(p.parameters for p in places), machine, workers, item),
        preconditioning=sum(_seconds(costs.preconditioning(p, item), machine, workers, dtype) for p in places)
        + len(places) * machine.whitened_call * machine.crowded(workers),
        statistics=sum(_seconds(costs.statistics(p), machine, workers, "float32") for p in own)
        + len(own) * machine.statistics_call * machine.crowded(workers),
        factorisation=sum(_seconds(costs.factorisation(p), machine, workers, "float32", factor=True) for p in mine),
        held=sum(costs.inverse(p, item) for p in own),
        window=sum(costs.window(p) for p in own),
        reduced=sum(costs.packed(p) for p in own),
        spread=sum(costs.sent_inverse(p) for p in own),
        parameters=sum(p.parameters for p in places),
    )


def _seconds(
    work: Work, machine: Machine, workers: int, dtype: str, convolution: bool = False, factor: bool = False
) -> float:
    """Operations at their rate, bytes at theirs, and calls."""
    rate = machine.factorisations if factor else machine.rate(dtype, convolution)
    call = machine.factor_call * work.calls if factor else 0.0
    return machine.crowded(workers) * (work.flops / rate + work.moved / machine.memory_rate + call)


def _step(parameters: int, machine: Machine, workers: int, item: int) -> float:
    """The optimizer's own: parameters, gradients and momentum are read, parameters and momentum written."""
    return machine.crowded(workers) * 5 * parameters * item / machine.memory_rate


def _other(traced: Traced, machine: Machine, setting: Setting) -> Cost:
    """What is not whitened: other products, other parameters, what lies between layers, and calls."""
    known = sum(costs.counted(place) for place in traced.places)
    flops = max(0.0, traced.flops - known)
    parameters = traced.parameters - sum(place.parameters for place in traced.places)
    work = Work(flops, 4.0 * traced.kept)  # each map is written and read, forward and backward
    plain = _seconds(work, machine, setting.workers, setting.dtype)
    plain += _step(parameters, machine, setting.workers, traced.itemsize)
    plain += traced.layers * machine.call * machine.crowded(setting.workers)
    return Cost(plain, 0.0, 0.0, 0.0, 0, 0, 0, 0, parameters)


def _sum(parts: Iterable[Cost]) -> Cost:
    parts = list(parts)
    return Cost(**{name: sum(getattr(part, name) for part in parts) for name in Cost.__dataclass_fields__})


def _memory(own: Sequence[Place], traced: Traced, sgd: int, total: Cost, workers: int) -> int:
    """The most that PRONG holds: at an update with a full window, or at the refresh, when the backward's maps are gone.

    At a refresh there are the packed triangles of all (where there are several workers), and for the widest layer its
    covariance, the factor and its inverse.
    """
    widest = max((costs.PRECISE * p.layout.matrices * p.layout.features**2 for p in own), default=0)
    refresh = sgd - traced.kept + total.held + total.window + 3 * widest + (total.reduced if workers > 1 else 0)
    return max(sgd + total.held + total.window, refresh + total.spread)
