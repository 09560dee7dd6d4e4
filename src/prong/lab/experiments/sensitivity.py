"""`prong run sensitivity`: what eps, the learning rate and T do to PRONG, on the autoencoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from prong.lab.contestants import Initialisation
from prong.lab.experiments.autoencoder import TUNED
from prong.lab.experiments.common import Common, Flat, Tuned, make_job, source_of
from prong.lab.experiments.perform import perform
from prong.lab.jobs import Job
from prong.lab.methods import KEYS, Schedule
from prong.lab.models import autoencoder
from prong.lab.tasks.reconstruction import Reconstruction
from prong.lab.terminal import at_least, each_once
from prong.lab.training import Plan

NAME = "sensitivity"
Part = Literal["eps", "period"]


@dataclass(frozen=True)
class Options(Common):
    """Train the paper's autoencoder with PRONG over a grid of eps and learning rates, and over periods T.

    Periods are compared as the paper does it: a reparametrisation before the first update, then one every T updates
    (our own default refreshes more often at first).

    Attributes:
        parts: which of the two grids.
        updates: of every run.
        batch: examples per update.
        eps: dampings of the first grid.
        lrs: learning rates of the first grid.
        periods: of the second grid.
        starts: its initialisations, each with every period; standard is fan-in.
        samples: examples behind a refresh; a period shorter than that takes what it has.
        lr: learning rate of the second grid; by default the autoencoder's own.
        damping: of the second grid; by default the autoencoder's own.
        evaluations: how often errors are measured.
        evaluated: on how many digits of each set.
    """

    QUICK: ClassVar[Mapping[str, Any]] = {
        "updates": 60,
        "evaluations": 6,
        "eps": (1.0, 1e-1),
        "lrs": (1e-3, 3e-4),
        "periods": (100, 1000),
    }
    parts: tuple[Part, ...] = get_args(Part)
    updates: int = 5000
    batch: int = 128
    eps: tuple[float, ...] = (1.0, 1e-1, 1e-2, 1e-3)
    lrs: tuple[float, ...] = (1e-2, 3e-3, 1e-3, 3e-4, 1e-4)
    periods: tuple[int, ...] = (10, 100, 1000, 10_000, 100_000)
    starts: tuple[Initialisation, ...] = ("whitened", "standard")
    samples: int = 12_800
    lr: float | None = None
    damping: float | None = None
    evaluations: int = 50
    evaluated: int = 1000


DAMPED = [key for key, method in KEYS.items() if key.startswith("prong") and "eps" in method.settings]


def main(options: Flat[Options]) -> None:
    """Train the autoencoder with PRONG over grids of eps, learning rate and T, and record what comes of it."""
    perform(NAME, jobs(options), options)


def jobs(options: Options) -> list[Job]:
    """The runs."""
    options.check()
    at_least(1, updates=options.updates, batch=options.batch, evaluations=options.evaluations, periods=options.periods)
    each_once(parts=options.parts, eps=options.eps, lrs=options.lrs, periods=options.periods, starts=options.starts)
    task = Reconstruction(autoencoder, options.data)
    source_of(task)
    made = []
    for seed in range(options.seeds):
        plan = Plan(options.updates, seed, options.batch, 50, options.evaluations, options.evaluated, "constant")
        for key in options.chosen(("prong",), [key for key in TUNED if key in DAMPED]):
            tuned = TUNED[key]
            if "eps" in options.parts:
                for eps in options.eps:
                    for lr in options.lrs:
                        name = f"{key}-eps{eps:g}-lr{lr:g}-seed{seed}"
                        own = Tuned({"lr": lr, "eps": eps}, "whitened")
                        made.append(make_job(NAME, task, key, own, Schedule(), plan, {}, part="eps", name=name))
            if "period" in options.parts:
                lr, damping = options.lr or tuned.settings["lr"], options.damping or tuned.settings["eps"]
                for start in options.starts:
                    for period in options.periods:
                        samples = min(options.samples, period * options.batch)
                        schedule = Schedule(period, samples, early=False)
                        name = f"{key}-T{period}-{start}-seed{seed}"
                        own = Tuned({"lr": lr, "eps": damping}, start)
                        made.append(make_job(NAME, task, key, own, schedule, plan, {}, part="period", name=name))
    return made
