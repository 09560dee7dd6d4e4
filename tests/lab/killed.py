"""Kills a run again and again at random moments: `python -m tests.lab.killed FOLDER DATA METHOD SEED KILLS`.

Every attempt is a process of its own, forked here so that torch is loaded once. Runs that come to their end are left as
FOLDER/0, FOLDER/1, ...; another is begun until so many processes have been killed. FOLDER/whole is never disturbed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from prong.lab.contestants import Contestant
from prong.lab.folders import RunFolder
from prong.lab.jobs import Job, carry_out
from prong.lab.methods import KEYS, Schedule
from prong.lab.tasks.reconstruction import Reconstruction
from prong.lab.training import Plan
from tests.lab.tiny import tiny_autoencoder


def small_job(data: Path, key: str, seed: int = 0, updates: int = 40) -> Job:
    contestant = Contestant(KEYS[key].name, "whitened")
    plan = Plan(updates, seed, batch=16, warm_up=5, evaluations=10, evaluated=20, anneal="waterfall")
    settings = {"lr": 1e-4, "eps": 0.1}
    return Job("autoencoder", key, Reconstruction(tiny_autoencoder, data), contestant, settings, Schedule(8, 64), plan)


def attempt(job: Job, folder: Path) -> int:
    """A process that makes the run, or goes on with it."""
    child = os.fork()
    if child:
        return child
    carry_out(job, RunFolder(folder), checkpoint_seconds=0.0)
    os._exit(0)


def main(folder: Path, data: Path, key: str, seed: int, kills: int) -> None:
    torch.set_num_threads(1)
    job, moments = small_job(data, key), random.Random(seed)
    start = time.monotonic()
    assert os.waitpid(attempt(job, folder / "whole"), 0)[1] == 0
    whole = time.monotonic() - start
    killed = finished = 0
    while killed < kills or not finished:
        child = attempt(job, folder / str(finished))
        if killed < kills:
            time.sleep(moments.uniform(0.0, whole / 2))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            killed += 1
        else:
            assert os.WEXITSTATUS(status) == 0, "an attempt failed"
            finished += 1
    print(killed, finished)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
