"""What torchrun runs: named functions, one after the other; what each returned or raised goes to a file per rank."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from prong.core import moments
from tests.distributed_behaviour import BEHAVIOUR, made_too_early
from tests.distributed_scenarios import EVERY_ROW, SCENARIOS, Place


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    tempfile.tempdir = str(folder)  # checkpoints go where pytest tidies up
    moments.LEAST = EVERY_ROW
    early = made_too_early()
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    place = Place(dist.get_rank(), dist.get_world_size(), early)
    for name in names:
        torch.manual_seed(0)
        start = time.perf_counter()
        try:
            result = {**SCENARIOS, **BEHAVIOUR}[name](place)
        except Exception:
            result = traceback.format_exc()
        print(place.rank, name, f"{time.perf_counter() - start:.2f} s", file=sys.stderr, flush=True)
        torch.save(result, folder / f"{name}.{place.rank}.pt")
    dist.barrier()
    os._exit(0)  # gloo's threads sometimes abort an orderly exit on a busy machine; that is not what is tested


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
