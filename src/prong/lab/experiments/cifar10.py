"""`prong run cifar10`: the paper's convolutional net of eight layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from prong.core.moments import has_bfloat16
from prong.lab.experiments.common import Common, Flat, Start, Tuned, at_most, each_used, given, make_job, source_of
from prong.lab.experiments.perform import perform
from prong.lab.jobs import Job
from prong.lab.methods import KEYS, Schedule
from prong.lab.tasks.pictures import Classification
from prong.lab.terminal import at_least
from prong.lab.training import Anneal, Plan

NAME = "cifar10"
FIT = tuple(key for key in KEYS if key != "muon")  # torch's takes matrices, and this net has none
DECAY = 5e-4
# Chosen by `prong sweep cifar10` (results/cifar10-sweep.json and cifar10-others-sweep.json), six trials each, by the
# validation error after 700 updates whose rate falls to zero; prong as prong-cutoff.
TUNED: Mapping[str, Tuned] = {
    "nesterov": Tuned({"lr": 0.03, "weight_decay": DECAY}),
    "rmsprop": Tuned({"lr": 4e-4, "weight_decay": DECAY}),
    "batchnorm": Tuned({"lr": 0.03, "weight_decay": DECAY}),
    "prong-cutoff": Tuned({"lr": 0.04, "eps": 1.0, "weight_decay": DECAY}),
    "prong": Tuned({"lr": 0.04, "eps": 1.0, "weight_decay": DECAY}),
    "prong+": Tuned({"lr": 0.02, "eps": 0.3, "weight_decay": DECAY}),
    "prong-bn": Tuned({"lr": 0.03, "eps": 0.3, "weight_decay": DECAY}),
}


@dataclass(frozen=True)
class Options(Common):
    """Train the paper's net of eight 3x3 convolutions on random 24x24 crops of CIFAR-10, mirrored or not.

    5,000 of the training pictures are for validation: the waterfall goes by them.

    Attributes:
        epochs: of every run, over 45,000 pictures.
        updates: of every run, at most; by default all of its epochs'.
        batch: examples per update.
        lr: learning rate of all methods; by default each has its own.
        momentum: of those that have it.
        eps: damping; by default each method's own.
        weight_decay: of all methods; by default each method's own.
        period: updates between PRONG's refreshes, the paper's T.
        samples: pictures behind each, the paper's N_s.
        start: from which weights: each method's better one, He's (standard) or whitened.
        anneal: the paper's waterfall (a tenth where the validation error did not improve by 1 % in four measurements),
            or the learning rate stays, or falls to zero over the last half.
        warm_up: updates over which the learning rate rises.
        every: updates from one measurement to the next.
        evaluated: on how many training pictures; the others all.
        bf16: forwards in bfloat16; by default where the processor has units for it.
        channels_last: the layout of pictures in memory.
    """

    QUICK: ClassVar[Mapping[str, Any]] = {
        "methods": ("nesterov", "batchnorm", "prong-bn"),
        "updates": 60,
        "every": 20,
        "evaluated": 500,
    }
    epochs: int = 30
    updates: int | None = None
    batch: int = 128
    lr: float | None = None
    momentum: float | None = None
    eps: float | None = None
    weight_decay: float | None = None
    period: int = 100
    samples: int = 1000
    start: Start = "tuned"
    anneal: Anneal = "waterfall"
    warm_up: int = 100
    every: int = 1000
    evaluated: int = 5000
    bf16: bool | None = None
    channels_last: bool = True


def main(options: Flat[Options]) -> None:
    """Train the paper's CIFAR-10 net with several methods, and record their errors."""
    perform(NAME, jobs(options), options)


def jobs(options: Options) -> list[Job]:
    """The runs."""
    options.check()
    at_least(1, epochs=options.epochs, batch=options.batch, period=options.period, every=options.every)
    at_least(1, updates=1 if options.updates is None else options.updates)
    task = Classification(folder=options.data, channels_last=options.channels_last)
    source_of(task)
    updates = at_most(options.updates, options.epochs * (task.count // options.batch))
    schedule = Schedule(options.period, options.samples)
    changes = given(lr=options.lr, momentum=options.momentum, eps=options.eps, weight_decay=options.weight_decay)
    bf16 = has_bfloat16() if options.bf16 is None else options.bf16
    made = []
    for seed in range(options.seeds):
        plan = Plan(
            updates,
            seed,
            options.batch,
            options.warm_up,
            max(1, round(updates / options.every)),
            options.evaluated,
            options.anneal,
            bf16=bf16,
        )
        for key in options.chosen(tuple(TUNED), FIT):
            tuned = TUNED.get(key, Tuned({}))
            made.append(make_job(NAME, task, key, tuned, schedule, plan, changes, options.start))
    each_used(made, changes)
    return made
