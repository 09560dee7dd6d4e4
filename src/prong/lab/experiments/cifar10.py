"""`prong run cifar10`: the paper's convolutional net of eight layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prong.lab.experiments.common import Common, Flat, Start, Tuned, given, make_job, source_of
from prong.lab.experiments.perform import perform
from prong.lab.jobs import Job
from prong.lab.methods import KEYS, Schedule
from prong.lab.tasks.pictures import Classification
from prong.lab.terminal import at_least
from prong.lab.training import Anneal, Plan
from prong.precision import has_bfloat16

NAME = "cifar10"
QUICK_METHODS = ("nesterov", "batchnorm", "prong-bn")
FIT = tuple(key for key in KEYS if key != "muon")  # torch's takes matrices, and this net has none
# Guesses, until a sweep is recorded.
TUNED: Mapping[str, Tuned] = {
    "nesterov": Tuned({"lr": 0.03}),
    "rmsprop": Tuned({"lr": 3e-4}),
    "batchnorm": Tuned({"lr": 0.03}),
    "prong": Tuned({"lr": 0.02, "eps": 1.0}),
    "prong+": Tuned({"lr": 0.02, "eps": 1.0}),
    "prong-bn": Tuned({"lr": 0.02, "eps": 0.1}),
}


@dataclass(frozen=True)
class Options(Common):
    """Train the paper's net of eight 3x3 convolutions on random 24x24 crops of CIFAR-10, mirrored or not.

    5,000 of the training pictures are for validation: the waterfall goes by them.

    Attributes:
        epochs: of every run, over 45,000 pictures.
        batch: examples per update.
        lr: learning rate of all methods; by default each has its own.
        momentum: of those that have it.
        eps: damping; by default each method's own.
        weight_decay: of all methods.
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

    epochs: int = 30
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
    task = Classification(folder=options.data, channels_last=options.channels_last)
    source_of(task)
    per_epoch = task.count // options.batch
    updates = 60 if options.quick else options.epochs * per_epoch
    evaluations = 3 if options.quick else max(1, round(updates / options.every))
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
            evaluations,
            500 if options.quick else options.evaluated,
            options.anneal,
            bf16=bf16,
        )
        for key in options.chosen(QUICK_METHODS if options.quick else tuple(TUNED), FIT):
            tuned = TUNED.get(key, Tuned({}))
            made.append(make_job(NAME, task, key, tuned, schedule, plan, changes, options.start))
    return made
