"""Runs that several workers make together: begun by torchrun, or from here, and begun again when one of them dies."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel

from prong.distributed.workers import Workers
from prong.lab.pool import leave_with_parent

T = TypeVar("T")
Act = Callable[[Workers], None]


def begun_by_torchrun() -> bool:
    """Whether this process is a worker already."""
    return dist.is_torchelastic_launched()


def count(wanted: int) -> int:
    """How many workers there will be: as many as torchrun has begun, or else as many as are wanted."""
    return int(os.environ["WORLD_SIZE"]) if begun_by_torchrun() else wanted


def with_workers(wanted: int, restarts: int, seconds: float, act: Act) -> None:
    """Do something with so many workers, each in a process of its own; or with those that torchrun began.

    Args:
        wanted: how many.
        restarts: how often all begin again because one died.
        seconds: that they wait for each other before they give up.
        act: what every one of them does. It can be sent to other processes.

    Raises:
        SystemExit: what a worker left with, or one line about those that died.
    """
    if begun_by_torchrun():
        with _joined(seconds) as workers:
            act(workers)
    elif wanted == 1:
        act(Workers(device=_device(0)))
    else:
        _launch(wanted, restarts, seconds, act)


def distributed(model: nn.Module, workers: Workers) -> nn.Module:
    """The model, whose gradients are means over all workers."""
    return model if workers.alone else DistributedDataParallel(model)


def by_first(workers: Workers, act: Callable[[], T]) -> T:
    """What the first worker's deed comes to, for all of them: all return it, or raise what it raised."""
    if workers.alone:
        return act()
    result: T | None = None
    error: Exception | None = None
    if workers.rank == 0:
        try:
            result = act()
        except Exception as caught:  # for all to raise
            error = caught
    told: list[Any] = [result, error]
    dist.broadcast_object_list(told, src=0, device=workers.device)
    if told[1] is not None:
        raise told[1]
    return told[0]  # type: ignore[no-any-return]


@contextmanager
def _joined(seconds: float) -> Iterator[Workers]:
    """The workers that this process is one of."""
    device = _device(int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(timeout=timedelta(seconds=seconds))  # gloo, and NCCL where there are GPUs
    yield Workers(dist.get_rank(), dist.get_world_size(), device)
    dist.destroy_process_group()


def _device(number: int) -> torch.device:
    return torch.device("cuda", number) if torch.cuda.is_available() else torch.device("cpu")


def _launch(wanted: int, restarts: int, seconds: float, act: Act) -> None:
    logging.disable(logging.ERROR)  # of torch's loggers in this process, which only waits: it is said below in one line
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=wanted,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=restarts,
        start_method="spawn",
    )
    try:
        left = elastic_launch(config, _work)(wanted, seconds, act)
    except ChildFailedError as error:
        first = min(error.failures.items())[1]
        how = f"signal {-first.exitcode}" if first.exitcode < 0 else f"exit code {first.exitcode}"
        raise SystemExit(
            f"worker {error.get_first_failure()[0]} died ({how}), after {restarts} restarts. "
            "The same command goes on from the last checkpoint."
        ) from error
    except SignalException as error:
        raise SystemExit(128 + error.sigval) from None
    codes = [code for code in left.values() if code is not None]
    if codes:
        raise SystemExit(codes[0])


def _work(wanted: int, seconds: float, act: Act) -> Any:
    """What a worker does; what it would have left with, if anything, is for the process that began it."""
    leave_with_parent()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // wanted))
    begun = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    try:
        with _joined(seconds) as workers:
            if begun and workers.rank == 0:
                print(f"A worker died. All go on from the last checkpoint, restart {begun}.", file=sys.stderr)
            act(workers)
    except SystemExit as error:
        return error.code
    return None
