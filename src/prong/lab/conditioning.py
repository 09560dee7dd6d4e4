"""The paper's look at conditioning: the exact Fisher of a small MLP, before and after whitening, and over training.

prong conditioning --json results/conditioning.json
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

import prong
from prong.lab.bench.sheets import Sheet, as_rich, number
from prong.lab.contestants import data_folder
from prong.lab.data import Digits, load_mnist
from prong.lab.figures import DPI, draw_over_updates, heat_map
from prong.lab.methods import MOMENTUM, Trains
from prong.lab.pool import one_thread
from prong.lab.record import provenance, write_json
from prong.lab.terminal import announce, at_least, make_console, progress, writable
from prong.lab.training import DIVERGENCES, Divergence

NAME = "conditioning"
SIDE = 10  # pixels, as in the paper
MIDDLE = "2"  # the name of the second of three linear layers
METHODS = ("SGD", "RMSprop", "PRONG")
FAILURES: tuple[type[Exception], ...] = (*DIVERGENCES, ValueError)  # the last is of a Fisher that is not finite
RATES = {"SGD": 0.03, "RMSprop": 1e-3, "PRONG": 0.01}


@dataclass(frozen=True)
class Setting:
    """What is trained and looked at; the names are those of the command's options."""

    width: int
    updates: int
    measurements: int
    eps: float
    period: int
    samples: int
    examples: int
    batch: int = 128

    def points(self) -> list[int]:
        """After which updates the Fisher is looked at: 0, the first ones, and then at equal distances."""
        spread = {round(k * self.updates / self.measurements) for k in range(self.measurements + 1)}
        return sorted({0, 1, 2, *spread} & set(range(self.updates + 1)))


def main(
    seeds: tuple[int, ...] = (0, 1, 2),
    width: int = 32,
    updates: int = 1000,
    measurements: int = 10,
    eps: float = 1e-3,
    period: int = 100,
    samples: int = 10_000,
    examples: int = 1000,
    json: Path | None = None,
    heat: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Measure the condition number of the Fisher's middle block on MNIST at 10 x 10 pixels, with a tanh MLP.

    The block is exact, in the coordinates that are trained: canonical for SGD and RMSprop, whitened for PRONG. Its
    condition number is the largest eigenvalue over the smallest one above 1e-12 of it, in float64.

    Args:
        seeds: of weights and of the order of the data.
        width: of both hidden layers.
        updates: of every method.
        measurements: over those updates, besides the first few.
        eps: PRONG's damping.
        period: PRONG's T.
        samples: PRONG's N_s.
        examples: behind every Fisher.
        json: file for the record: configuration, environment, commit and every measurement.
        heat: picture of the block before and after the first reparametrisation.
        plot: picture of the condition numbers over training.
    """
    at_least(2, width=width, samples=samples, examples=examples)
    at_least(1, updates=updates, measurements=measurements, period=period)
    if not seeds or eps <= 0:
        raise SystemExit("--seeds are one or more, and --eps is positive")
    writable(json=json, heat=heat, plot=plot)
    try:
        digits = load_mnist(data_folder())
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(str(error)) from error
    setting = Setting(width, updates, measurements, eps, period, samples, examples)
    config = {"seeds": seeds, **vars(setting), "rates": RATES, "data": digits.source, "side": SIDE}
    console = make_console()
    with one_thread(), progress(console, "runs", len(seeds) * len(METHODS)) as on_step:
        record: dict[str, Any] = {"experiment": NAME, "config": config, **provenance(), "runs": {}}
        x, y = shrunk(digits.train), digits.train_labels
        for name in METHODS:
            record["runs"][name] = {}
            for seed in seeds:
                record["runs"][name][str(seed)] = run(name, x, y, setting, seed)
                on_step()
                if json is not None:
                    write_json(json, record)
        if heat is not None:
            before, after = reparametrised(x, setting, seeds[0])
            heat_map(before, after, heat, f"Fisher block of the middle layer, {_title(digits)}, seed {seeds[0]}")
    console.print(as_rich(sheet(record)))
    if plot is not None:
        picture(record).savefig(plot, dpi=DPI)
    announce(console, Record=json, Heat=heat, Plot=plot)


def shrunk(images: Tensor) -> Tensor:
    """Digits (n, 784) at 10 x 10 pixels, (n, 100), in float64."""
    small = F.interpolate(images.double().view(-1, 1, 28, 28), size=(SIDE, SIDE), mode="area")
    return small.flatten(1)


def build(width: int, seed: int) -> nn.Sequential:
    """100 - width - width - 10, tanh units between."""
    torch.manual_seed(seed)
    first, second, last = nn.Linear(SIDE * SIDE, width), nn.Linear(width, width), nn.Linear(width, 10)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last).double()


def block(model: nn.Module, x: Tensor, whitened: bool) -> Tensor:
    """The exact Fisher block of the middle layer."""
    coordinates = "whitened" if whitened else "canonical"
    return prong.fisher.blocks(model, [x], "categorical", [MIDDLE], coordinates=coordinates)[MIDDLE]  # type: ignore[arg-type]


def reparametrised(x: Tensor, setting: Setting, seed: int) -> tuple[Tensor, Tensor]:
    """The block of a new network, in canonical coordinates and in those of its first whitening."""
    model = build(setting.width, seed)
    before = block(model, x[: setting.examples], whitened=False)
    prong.refresh_(prong.whiten_(model), [x[: setting.samples]], setting.eps)
    return before, block(model, x[: setting.examples], whitened=True)


def run(name: str, x: Tensor, y: Tensor, setting: Setting, seed: int) -> dict[str, Any]:
    """What was measured while one method trained, as JSON has it; `failure` says how it diverged, if it did."""
    model = build(setting.width, seed)
    rows = [measure(model, x, setting, 0, whitened=False)]
    optimizer = _optimizer(name, model, x, setting)
    if name == "PRONG":  # the coordinates change before the first update
        rows.append({**measure(model, x, setting, 0, whitened=True), "reparametrised": True})
    generator, points = torch.Generator().manual_seed(seed), setting.points()[1:]
    failure = None
    try:
        for update in range(1, setting.updates + 1):
            chosen = torch.randint(len(x), (setting.batch,), generator=generator)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[chosen]), y[chosen])
            if not torch.isfinite(loss):
                raise Divergence(f"the loss is {loss.item()}")
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if update in points:
                rows.append(measure(model, x, setting, update, whitened=name == "PRONG"))
    except FAILURES as error:
        failure = f"diverged at update {update}: {error}"
    return {"rows": rows, "failure": failure}


def measure(model: nn.Module, x: Tensor, setting: Setting, update: int, whitened: bool) -> dict[str, Any]:
    """The spectrum of the middle block after an update."""
    found = prong.fisher.spectrum(block(model, x[: setting.examples], whitened))
    if not math.isfinite(found.condition):
        raise Divergence("the Fisher block is zero")
    summary = {"condition": found.condition, "effective_rank": found.effective_rank, "below": found.below}
    return {"update": update, **summary, "trace": found.trace, "floor": found.floor}


def _optimizer(name: str, model: nn.Module, x: Tensor, setting: Setting) -> Trains:
    lr = RATES[name]
    if name == "RMSprop":
        return torch.optim.RMSprop(model.parameters(), lr)
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr, momentum=MOMENTUM)
    batches = list(torch.split(x[: setting.samples], 1000))
    options = {"eps": setting.eps, "period": setting.period, "samples": setting.samples, "source": batches}
    return prong.PRONG(model, lr, MOMENTUM, **options)  # type: ignore[arg-type]


def reductions(record: Mapping[str, Any]) -> list[float]:
    """By which part of it the condition number fell at PRONG's first reparametrisation, seed by seed."""
    firsts = [made["rows"][:2] for made in record["runs"]["PRONG"].values()]
    return [1 - after["condition"] / before["condition"] for before, after in firsts]


def sheet(record: Mapping[str, Any]) -> Sheet:
    """Every method: its condition number at the start, after the first reparametrisation, and at the end.

    And how many eigenvalues the condition number leaves out: the most that were below the floor at any measurement.
    """
    rows = []
    for name, runs in record["runs"].items():
        whole = [made["rows"] for made in runs.values() if made["failure"] is None]
        failed = [f"seed {seed}: {made['failure']}" for seed, made in runs.items() if made["failure"]]
        second = [f"{median(r[1]['condition'] for r in whole):.2g}"] if name == "PRONG" and whole else ["-"]
        ends = [f"{median(r[k]['condition'] for r in whole):.2g}" if whole else "-" for k in (0, -1)]
        part = number(median(100 * r[-1]["condition"] / r[0]["condition"] for r in whole)) + " %" if whole else "-"
        below = [row["below"] for made in runs.values() for row in made["rows"]]
        rows.append([name, ends[0], *second, ends[1], part, str(max(below, default="-")), "; ".join(failed) or "-"])
    fell = ", ".join(f"{100 * r:.1f} %" for r in reductions(record))
    config = record["config"]
    note = (
        f"Medians over seeds {', '.join(map(str, config['seeds']))}. At the first reparametrisation the condition "
        f"number falls by {fell}; the paper says by more than 95 %. Below the floor: how many eigenvalues the "
        f"condition number leaves out, the most in any measurement. Data: {config['data']}, 10 x 10 pixels."
    )
    end = f"after {config['updates']:,}"
    headings = ("method", "at the start", "reparametrised", end, "of the start", "below the floor", "failures")
    return Sheet("Condition number of the Fisher's middle block", headings, rows, note)


def picture(record: Mapping[str, Any]) -> Figure:
    """The condition numbers over training, relative to their first, as in the paper's figure."""
    curves: dict[str, Sequence[tuple[float, float]]] = {}
    for name, runs in record["runs"].items():
        for seed, made in runs.items():
            first = made["rows"][0]["condition"]
            curves[f"{name}, seed {seed}"] = [(row["update"], 100 * row["condition"] / first) for row in made["rows"]]
    return draw_over_updates(curves, "condition number, % of the first", "Fisher block of the middle layer")


def _title(digits: Digits) -> str:
    return digits.source.split(",")[0] + f" at {SIDE} x {SIDE}"
