"""`prong run conditioning`: the exact Fisher of a small network, before and after whitening, and over training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from prong.lab.experiments.common import Common, Flat, Tuned, each_used, given, make_job, source_of
from prong.lab.experiments.perform import perform
from prong.lab.jobs import Job
from prong.lab.methods import KEYS, Schedule
from prong.lab.tasks.conditioning import SmallDigits
from prong.lab.terminal import at_least
from prong.lab.training import Plan

NAME = "conditioning"
TUNED: Mapping[str, Tuned] = {
    "sgd": Tuned({"lr": 0.03}),
    "rmsprop": Tuned({"lr": 1e-3}),
    "prong": Tuned({"lr": 0.01, "eps": 1e-3}),
}


@dataclass(frozen=True)
class Options(Common):
    """Measure the condition number of the Fisher's middle block on MNIST at 10 x 10 pixels, with a tanh MLP.

    The block is exact, in the coordinates that are trained: canonical for SGD and RMSprop, whitened for PRONG. Its
    condition number is the largest eigenvalue over the smallest one above 1e-12 of it, in float64.

    Attributes:
        width: of both hidden layers.
        updates: of every run.
        batch: examples per update.
        lr: learning rate of all methods; by default each has its own.
        momentum: of those that have it.
        eps: PRONG's damping.
        period: updates between PRONG's refreshes.
        samples: digits behind each.
        evaluations: how often the Fisher is measured.
        examples: digits over which it is measured.
    """

    QUICK: ClassVar[Mapping[str, Any]] = {"width": 16, "updates": 200}
    width: int = 32
    updates: int = 1000
    batch: int = 128
    lr: float | None = None
    momentum: float | None = None
    eps: float = 1e-3
    period: int = 100
    samples: int = 10_000
    evaluations: int = 20
    examples: int = 1000


def main(options: Flat[Options]) -> None:
    """Measure the condition number of a small network's exact Fisher, before and after whitening and over training."""
    perform(NAME, jobs(options), options)


def jobs(options: Options) -> list[Job]:
    """The runs."""
    options.check()
    counts = {"width": options.width, "updates": options.updates, "evaluations": options.evaluations}
    at_least(1, **counts, examples=options.examples, period=options.period)
    task = SmallDigits(options.width, options.samples, options.eps, options.data)
    source_of(task)
    changes = given(lr=options.lr, momentum=options.momentum, eps=options.eps)
    schedule = Schedule(options.period, options.samples)
    made = []
    for seed in range(options.seeds):
        plan = Plan(options.updates, seed, options.batch, 0, options.evaluations, options.examples, "constant")
        for key in options.chosen(tuple(TUNED), [k for k, method in KEYS.items() if not method.batch_norm]):
            made.append(make_job(NAME, task, key, TUNED.get(key, Tuned({})), schedule, plan, changes))
    each_used(made, given(momentum=options.momentum))
    return made
