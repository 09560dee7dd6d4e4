"""What can be run: a new experiment is a module with `main` and an entry here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """An experiment, for lists and help.

    Attributes:
        name: the command's, and the module's in this package.
        figure: of the paper.
        claim: of the paper, that it tests.
        teraflops: floating-point operations of the command without options, in 10^12, from which its time is guessed.
        examples: how it is called.
    """

    name: str
    figure: str
    claim: str
    teraflops: float
    examples: tuple[str, ...]

    @property
    def target(self) -> str:
        """Where its function is."""
        return f"prong.lab.experiments.{self.name}:main"


CATALOGUE: Sequence[Entry] = (
    Entry(
        "conditioning",
        "Fisher matrix of a small MLP before and after the first reparametrisation; condition number over training",
        "whitening activations reduces the Fisher's condition number by more than 95 %",
        2.0,
        ("prong run conditioning --seeds 3", "prong run conditioning --quick"),
    ),
    Entry(
        "sensitivity",
        "Deep autoencoder: impact of eps and of the period T",
        "a smaller eps learns faster while the step is small; whitened initialisation matters more than a short period",
        300.0,
        ("prong run sensitivity --jobs 2", "prong run sensitivity --parts eps --eps 0.1 0.01 --lrs 0.001"),
    ),
    Entry(
        "autoencoder",
        "Deep autoencoder: training error against updates and against time",
        "PRONG needs up to ten times fewer updates than SGD, and less time",
        300.0,
        (
            "prong run autoencoder --quick",
            "prong run autoencoder --seeds 3 --jobs 2",
            "prong run autoencoder --methods prong-adamw adam --updates 2000 --lr 0.001",
        ),
    ),
    Entry(
        "cifar10",
        "CIFAR-10: training error against updates, test error against time",
        "PRONG learns as fast as batch norm and generalises better: 7.32 % against 8.22 % test error",
        4700.0,
        ("prong run cifar10 --methods nesterov batchnorm prong", "prong run cifar10 --quick"),
    ),
    Entry(
        "imagenet",
        "ImageNet with Inception: training error against updates, validation error against time",
        "PRONG+ learns faster than batch norm at first: 36 % against 46 % error after 100,000 updates",
        2_300_000.0,
        (
            "prong run imagenet --data ilsvrc2012 --readers 8",
            "prong run imagenet --data data/tiny-imagenet-20 --size 64 --batch 64 --epochs 10 --workers 2",
            "prong run imagenet --data data/tiny-imagenet-20 --quick",
        ),
    ),
)
