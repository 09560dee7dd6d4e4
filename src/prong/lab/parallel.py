"""Runs that several workers make together: begun by torchrun, or from here, and begun again when one of them dies."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from tempfile import TemporaryDirectory
from threading import Thread
from types import FrameType
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel

from prong.distributed.workers import Workers
from prong.lab.interrupts import Stop
from prong.lab.pool import leave_with_parent, without_interrupts

T = TypeVar("T")
INTERRUPTED = 128 + signal.SIGINT  # what Ctrl-C leaves with
AGAIN_SECONDS = 0.5  # after which workers are told of it again
ENVIRONMENT = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # or workers that begin again look for those that died
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # or each is told that no parameters are unused
}
Act = Callable[[Workers], None]


def count(wanted: int) -> int:
    """How many workers there will be: as many as torchrun has begun, or else as many as are wanted."""
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else wanted


def restarts() -> int:
    """How often workers have begun again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def with_workers(wanted: int, most_restarts: int, seconds: float, act: Act) -> None:
    """Do something with so many workers, each in a process of its own; or with those that torchrun began.

    Args:
        wanted: how many.
        most_restarts: how often all begin again because one died.
        seconds: that they wait for each other before they give up.
        act: what every one of them does. It can be sent to other processes.

    Raises:
        SystemExit: what a worker left with, or one line about those that died.
    """
    if dist.is_torchelastic_launched():
        with joined(seconds) as workers:
            act(workers)
    elif wanted == 1:
        act(Workers(device=_device(0)))
    else:
        _launch(wanted, most_restarts, seconds, act)


def distributed(model: nn.Module, workers: Workers) -> nn.Module:
    """The model, whose gradients are means over all workers.

    Sums of three or more depend on their places in the messages. DistributedDataParallel arranges these anew after the
    first update, here and after every restart, unless it has to look for unused parameters.
    """
    return model if workers.alone else DistributedDataParallel(model, find_unused_parameters=True)


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
def joined(seconds: float) -> Iterator[Workers]:
    """The workers that this process is one of, as torchrun began it."""
    device = _device(int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(timeout=timedelta(seconds=seconds))  # gloo, and NCCL where there are GPUs
    try:
        yield Workers(dist.get_rank(), dist.get_world_size(), device)
    except BaseException as error:
        _let_go(error)
        raise
    finally:
        # The last to hold the group must not be DistributedDataParallel, which would wait for gloo's threads while they
        # wait for Python's lock. So a model that nobody uses any more is gone before the group is.
        gc.collect()
        dist.destroy_process_group()  # whoever waits for this process hears of it


def _let_go(error: BaseException | None) -> None:
    """Make frames that an error came through forget what they held."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _device(number: int) -> torch.device:
    return torch.device("cuda", number) if torch.cuda.is_available() else torch.device("cpu")


def _launch(wanted: int, most_restarts: int, seconds: float, act: Act) -> None:
    if torch.cuda.is_available() and wanted > torch.cuda.device_count():
        raise SystemExit(f"--workers is at most the {torch.cuda.device_count()} GPUs of this machine, got {wanted}")
    os.environ |= ENVIRONMENT
    logging.disable(logging.ERROR)  # of torch's loggers in this process, which only waits: it is said below in one line
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, _leave)
    outcome: Future[Mapping[int, Any]] = Future()
    ended: int | None = None
    with TemporaryDirectory() as logs, Stop() as stop:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=wanted,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            run_id=uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=most_restarts,
            start_method="spawn",
        )
        try:
            Thread(target=_begin, args=(config, outcome, wanted, seconds, act), daemon=True).start()
            while not wait([outcome], timeout=AGAIN_SECONDS).done:
                if stop.asked:
                    stop.pass_on()  # to those who have begun since
            left = outcome.result()
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise SystemExit(
                f"worker {rank} died after {most_restarts} restarts: {_cause(failure)}. "
                "The same command goes on from the last checkpoint."
            ) from error
        except KeyboardInterrupt:  # asked twice
            ended = INTERRUPTED
        except _Told as told:
            ended = 128 + told.number
    if ended is not None:
        os._exit(ended)  # and workers with it, wherever they are
    if left[0] is not None:
        raise SystemExit(left[0])


def _begin(config: LaunchConfig, outcome: Future[Mapping[int, Any]], wanted: int, seconds: float, act: Act) -> None:
    """Begin workers, and wait for them, in a thread whose Ctrl-C waits; so theirs does until they are ready for it."""
    try:
        with without_interrupts():
            outcome.set_result(elastic_launch(config, _work)(wanted, seconds, act))
    except BaseException as error:  # for the thread that waits for it
        outcome.set_exception(error)


class _Told(BaseException):
    """Somebody wants this process to end at once."""

    def __init__(self, number: int) -> None:
        self.number = number


def _leave(number: int, frame: FrameType | None) -> None:
    raise _Told(number)


def _cause(failure: ProcessFailure) -> str:
    """Why a worker died, in a line."""
    if failure.exitcode < 0:
        return f"signal {-failure.exitcode}"
    message = failure.message["message"] if isinstance(failure.message, dict) else failure.message
    return message.strip().splitlines()[-1] or f"exit code {failure.exitcode}"


def _work(wanted: int, seconds: float, act: Act) -> Any:
    """What a worker does; what it would have left with, if anything, is for the process that began it."""
    leave_with_parent()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // wanted))
    try:
        with joined(seconds) as workers:
            if restarts() and workers.rank == 0:
                print(f"A worker died. All go on from the last checkpoint, restart {restarts()}.", file=sys.stderr)
            act(workers)
    except SystemExit as error:
        return error.code
    return None
