"""`prong sweep autoencoder` of a small model, also as a command: `python -m tests.lab.tiny_sweep OPTION...`."""

from __future__ import annotations

import sys

from prong.lab.cli import main
from prong.lab.contestants import data_folder
from prong.lab.methods import Schedule
from prong.lab.sweeps import sweepable
from prong.lab.sweeps.sweepable import Swept
from prong.lab.tasks.reconstruction import Reconstruction
from tests.lab.tiny import tiny_autoencoder


def tiny() -> Swept:
    task = Reconstruction(tiny_autoencoder, data_folder())
    return Swept("autoencoder", task, schedule=Schedule(period=10, samples=64), batch=16)


def sweep(*options: str) -> None:
    """The command, as it is but for the model."""
    paper = sweepable.SWEEPABLE["autoencoder"]
    sweepable.SWEEPABLE["autoencoder"] = tiny  # type: ignore[index]
    try:
        main(["sweep", "autoencoder", *options])
    finally:
        sweepable.SWEEPABLE["autoencoder"] = paper  # type: ignore[index]


if __name__ == "__main__":
    sweep(*sys.argv[1:])
