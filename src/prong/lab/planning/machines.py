"""What machines can do: constants measured here, or taken from data sheets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from prong.lab.record import ForeignRecordError, read_json

MEASURED = Path("results") / "plan.json"  # by `prong bench plan`, of the machine that this is
SHEETS = "data sheet"
EFFICIENCY = {
    "products": 0.5,
    "factorisations": 0.2,
    "memory": 0.8,
    "network": 0.7,
}  # of a data sheet's numbers: assumed


@dataclass(frozen=True)
class Machine:
    """What one worker can do. Rates are per second.

    Attributes:
        name: of the machine.
        source: "measured", or where else the constants come from.
        products: floating-point operations of matrix products, by dtype.
        convolutions: those of convolutions, by dtype.
        factorisations: those of a Cholesky inverse, `in^3`, in float32.
        memory_rate: bytes read or written.
        memory: bytes there are.
        network_rate: bytes that a worker sends while it receives as many.
        latency: seconds until the first byte is there.
        call: seconds that an update spends on a layer, whatever its size.
        whitened_call: seconds more if it is whitened.
        statistics_call: seconds more while its statistics are gathered.
        factor_call: seconds of a factorisation, whatever its size.
        node: workers that are connected at `network_rate`; those beyond at `far_rate`.
        far_rate: bytes that a worker sends to another node; None where there is one only.
        overlap: the share of the backward behind which exchanges of gradients can hide.
        pipelined: whether a broadcast passes on what it has received of a message before its end.
        crowding: how many times as long computing takes when so many workers share the machine.
    """

    name: str
    source: str
    products: Mapping[str, float]
    convolutions: Mapping[str, float]
    factorisations: float
    memory_rate: float
    memory: float
    network_rate: float
    latency: float
    call: float
    whitened_call: float
    statistics_call: float
    factor_call: float
    node: int = 1 << 20
    far_rate: float | None = None
    overlap: float = 0.0
    pipelined: bool = False
    crowding: Mapping[str, float] = field(default_factory=dict)

    def rate(self, dtype: str, convolution: bool = False) -> float:
        """Operations per second of products; leaves with one line if nobody knows them."""
        rates = self.convolutions if convolution else self.products
        if dtype not in rates:
            raise SystemExit(f"--dtype {dtype}: {self.name} has rates for {', '.join(rates)}")
        return rates[dtype]

    def crowded(self, workers: int) -> float:
        """How many times as long computing takes with so many workers; beyond what was measured, in proportion."""
        measured = {int(n): times for n, times in self.crowding.items() if int(n) <= workers}
        if not measured:
            return 1.0
        most = max(measured)
        return measured[most] * (workers / most if most == max(map(int, self.crowding)) else 1.0)

    def exchange_rate(self, workers: int) -> float:
        """Bytes per second of the slowest link among so many."""
        far = self.network_rate if self.far_rate is None else self.far_rate
        return self.network_rate if workers <= self.node else min(self.network_rate, far)

    def all_reduce(self, size: float, workers: int) -> float:
        """Seconds of a ring: 2 (N - 1) messages of size / N each way."""
        if workers == 1:
            return 0.0
        hops = 2 * (workers - 1)
        # Beyond a node, rings are hierarchical: a message crosses each node's border once for each of its steps.
        steps = hops if workers <= self.node else 2 * (self.node - 1 + math.ceil(workers / self.node) - 1)
        return steps * self.latency + hops / workers * size / self.exchange_rate(workers)

    def broadcast(self, size: float, workers: int) -> float:
        """Seconds until all have what one has: a tree of log2 N rounds, each of the whole size unless pipelined."""
        rounds = math.ceil(math.log2(workers)) if workers > 1 else 0
        sendings = min(rounds, 1) if self.pipelined else rounds
        return rounds * self.latency + sendings * size / self.exchange_rate(workers)


def sent_by_all_reduce(size: float, workers: int) -> float:
    """Bytes that each worker sends in a ring."""
    return 2 * (workers - 1) / workers * size


def _gpu(
    name: str, bf16: float, fp32: float, fp64: float, memory: float, hbm: float, link: float, net: float
) -> Machine:
    """A data sheet: teraflops (dense, without sparsity), gigabytes, and gigabytes per second."""
    part = EFFICIENCY
    peaks = {"bfloat16": bf16, "float16": bf16, "float32": fp32, "float64": fp64}
    products = {dtype: part["products"] * peak * 1e12 for dtype, peak in peaks.items()}
    return Machine(
        name=name,
        source=SHEETS,
        products=products,
        convolutions=products,
        factorisations=part["factorisations"] * fp32 * 1e12,
        memory_rate=part["memory"] * hbm * 1e9,
        memory=memory * 1e9,
        network_rate=part["network"] * link * 1e9,
        latency=1e-5,
        call=6e-5,  # some ten kernels, started at 6 us each
        whitened_call=3e-5,
        statistics_call=5e-5,
        factor_call=2e-4,
        node=8,
        far_rate=part["network"] * net * 1e9,
        overlap=1.0,
        pipelined=True,
    )


# Per GPU: NVLink in one direction within a node of eight, one InfiniBand port (200 and 400 Gb/s) between nodes.
GPUS = {
    "a100": _gpu("A100 SXM 80 GB", 312, 19.5, 19.5, 80, 2039, 300, 25),
    "h100": _gpu("H100 SXM 80 GB", 989, 67, 67, 80, 3350, 450, 50),
}


def machine(device: str) -> Machine:
    """The machine of that name, or of a file; or one line that says what to do."""
    if device in GPUS:
        return GPUS[device]
    path = MEASURED if device == "cpu" else Path(device)
    if device != "cpu" and path.suffix != ".json":
        raise SystemExit(f"--device knows no {device!r}. Choose from: cpu; {'; '.join(GPUS)}; or a .json file")
    if not path.exists():
        hint = (
            f"no {path} here. Measure this machine first: prong bench plan --json {path}; or name such a record, or "
            f"one of {', '.join(GPUS)}, whose constants are those of data sheets"
            if device == "cpu"
            else "there is no such file"
        )
        raise SystemExit(f"--device {device}: {hint}")
    try:
        return from_record(read_json(path))
    except (ForeignRecordError, TypeError, ValueError, AttributeError) as error:
        raise SystemExit(
            f"--device {path} does not describe a machine: {error}. Make one with: prong bench plan --json {path}"
        ) from error


def from_record(record: Any) -> Machine:
    """A machine from what `prong bench plan` recorded, or from its constants alone."""
    constants = record.get("machine", record)
    names = {one.name for one in fields(Machine)}
    if unknown := set(constants) - names:
        raise ValueError(f"unknown constants: {', '.join(sorted(unknown))}")
    found = Machine(**constants)
    numbers = [value for value in asdict(found).values() if isinstance(value, int | float)]
    rates = [*found.products.values(), *found.convolutions.values(), found.factorisations, found.memory_rate]
    if min(numbers) < 0 or min([*rates, found.network_rate]) <= 0:
        raise ValueError("rates are positive, and no constant is negative")
    return found
