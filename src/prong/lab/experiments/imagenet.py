"""`prong run imagenet`: Inception on photographs in folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from prong.core.moments import has_bfloat16
from prong.lab.experiments.common import Common, Flat, Start, Tuned, at_most, each_used, given, make_job, source_of
from prong.lab.experiments.perform import perform
from prong.lab.inception import inception
from prong.lab.jobs import Job
from prong.lab.methods import Schedule
from prong.lab.parallel import count, with_workers
from prong.lab.tasks.photographs import SIZE, Photographs
from prong.lab.terminal import at_least
from prong.lab.training import Anneal, Plan

NAME = "imagenet"
SMALLEST = 32  # pixels, which five halvings make one
# Rates and dampings of the paper's grid; which of them it chose it does not say.
TUNED: Mapping[str, Tuned] = {
    "nesterov": Tuned({"lr": 0.01}),
    "rmsprop": Tuned({"lr": 0.001}),
    "batchnorm": Tuned({"lr": 0.1}),
    "prong": Tuned({"lr": 0.01, "eps": 1.0}),
    "prong+": Tuned({"lr": 0.001, "eps": 1.0}),  # 0.01 diverged on 20 classes of 64 x 64 pixels
}


@dataclass(frozen=True)
class Options(Common):
    """Train the Inception of the batch-normalisation paper on photographs in folders, as ILSVRC has them.

    --data is a folder that holds train/CLASS/*.JPEG and val/CLASS/*.JPEG. Some of the training photographs are held
    out, and the waterfall goes by them; what `val` holds is for testing only, unless nothing is held out.

    Attributes:
        epochs: of every run, over all training photographs.
        updates: of every run, at most; by default all of its epochs'.
        batch: photographs per update.
        size: pixels per side that the net is shown.
        held_out: training photographs of every class that are for validation; 0 to use those in val.
        lr: learning rate of all methods; by default each has its own; the paper tries 0.1, 0.01 and 0.001.
        momentum: of all methods.
        weight_decay: of all methods.
        eps: damping; by default each method's own; the paper tries 1, 0.1, 0.01 and 0.001.
        period: updates between PRONG's refreshes, the paper's T; it tries 10, 100, 1,000 and 10,000.
        samples: photographs behind each, the paper's N_s; by default those of a tenth of the period.
        start: from which weights: each method's better one, He's (standard) or whitened.
        anneal: the paper's waterfall (a tenth where an epoch did not improve the validation error by 1 %), or the
            learning rate stays, or falls to zero over the last half.
        patience: epochs without improvement that the waterfall lets pass.
        warm_up: updates over which the learning rate rises.
        evaluated: on how many training photographs; the others all.
        readers: processes that read photographs; what is read does not depend on them.
        unreadable: the share of all photographs that may be unreadable before a run stops.
        bf16: forwards in bfloat16; by default where the processor has units for it.
        channels_last: the layout of pictures in memory.
        workers: processes that make every run together, each with its part of every minibatch; on several machines
            `torchrun ... -m prong.lab run imagenet` begins them instead.
        checkpoints: updates between these where there are several workers; with one there is one every minute.
        restarts: how often all workers begin again from the last checkpoint because one has died.
        timeout: seconds that workers wait for each other before they give up and count as dead.
    """

    QUICK: ClassVar[Mapping[str, Any]] = {
        "methods": ("nesterov", "batchnorm", "prong+"),
        "updates": 20,
        "batch": 32,
        "size": 64,
        "evaluated": 100,
    }
    epochs: int = 30
    updates: int | None = None
    batch: int = 256
    size: int = SIZE
    held_out: int = 25
    lr: float | None = None
    momentum: float = 0.9
    weight_decay: float = 1e-4
    eps: float | None = None
    period: int = 1000
    samples: int | None = None
    start: Start = "tuned"
    anneal: Anneal = "waterfall"
    patience: int = 0
    warm_up: int = 100
    evaluated: int = 5000
    readers: int = 2
    unreadable: float = 0.01
    bf16: bool | None = None
    channels_last: bool = True
    workers: int = 1
    checkpoints: int = 100
    restarts: int = 3
    timeout: float = 600.0


def main(options: Flat[Options]) -> None:
    """Train Inception on photographs in folders with several methods, and record their errors."""
    begun = count(options.workers)
    if options.workers not in (1, begun):
        raise SystemExit(f"--workers {options.workers}, but torchrun has begun {begun}. Leave --workers out.")
    made = jobs(options)
    with_workers(options.workers, options.restarts, options.timeout, partial(perform, NAME, made, options))


def jobs(options: Options) -> list[Job]:
    """The runs."""
    options.check()
    at_least(1, epochs=options.epochs, batch=options.batch, period=options.period)
    at_least(1, updates=1 if options.updates is None else options.updates)
    at_least(1, workers=options.workers, checkpoints=options.checkpoints, timeout=options.timeout)
    at_least(0, held_out=options.held_out, readers=options.readers, patience=options.patience)
    at_least(0, restarts=options.restarts)
    at_least(SMALLEST, size=options.size)
    if not 0 <= options.unreadable < 1:
        raise SystemExit(f"--unreadable is a share, from 0 to less than 1, got {options.unreadable}")
    task = Photographs(
        inception,
        options.data,
        options.size,
        options.held_out,
        options.readers,
        options.unreadable,
        options.channels_last,
    )
    source_of(task)
    workers, per_epoch = count(options.workers), task.count // options.batch
    if options.batch % workers:
        raise SystemExit(f"--batch is split evenly over {workers} workers, got {options.batch}")
    if workers > 1 and options.jobs is not None:
        raise SystemExit("--jobs makes runs side by side, several workers make each together: choose one of them")
    samples = options.samples or max(1, round(0.1 * options.period)) * options.batch
    updates = at_most(options.updates, options.epochs * per_epoch)
    changes = given(lr=options.lr, momentum=options.momentum, eps=options.eps, weight_decay=options.weight_decay)
    made = []
    for seed in range(options.seeds):
        plan = Plan(
            updates,
            seed,
            options.batch,
            options.warm_up,
            max(2, updates // max(1, per_epoch)),
            options.evaluated,
            options.anneal,
            bf16=has_bfloat16() if options.bf16 is None else options.bf16,
            patience=options.patience,
        )
        for key in options.chosen(tuple(TUNED)):
            tuned = TUNED.get(key, Tuned({}))
            schedule = Schedule(options.period, samples)
            job = make_job(NAME, task, key, tuned, schedule, plan, changes, options.start)
            made.append(replace(job, workers=workers, checkpoints=options.checkpoints))
    each_used(made, changes)
    return made
