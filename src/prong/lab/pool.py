"""Work in several processes, each with one thread, whose results do not depend on how many there are."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from multiprocessing.connection import Connection
from multiprocessing.resource_tracker import ensure_running
from typing import Any, TypeVar

import torch

from prong.lab.interrupts import Stop
from prong.lab.terminal import plain_warnings

Result = TypeVar("Result")
Job = Callable[[], Result]
LOOK = 0.2  # seconds between looks for news


def ignored(news: Any) -> None:
    """Nobody listens."""


_listener: ContextVar[Callable[[Any], None]] = ContextVar("listener", default=ignored)


def tell(news: Any) -> None:
    """From within a job: let who waits for its result know how it goes on, in a few hundred bytes when pickled."""
    _listener.get()(news)


def side_by_side(
    names: Iterable[str],
    next_job: Callable[[str], Job[Result] | None],
    on_result: Callable[[str, Result], None],
    workers: int = 1,
    shielded: bool = False,
    on_news: Callable[[Any], None] = ignored,
) -> None:
    """Do the jobs of every name one after another, those of different names side by side.

    A name's next job is asked for when the result of its last one has been handed over, and names take turns. With one
    worker the jobs are done in this process, else in others, to which they must be able to travel. If they are
    `shielded`, Ctrl-C waits until a job is ready for it, as with `interrupts.Stop`: it does not break a process that is
    only beginning, or idle. Should one of them fail, the others are asked to stop as by Ctrl-C. What jobs `tell`
    meanwhile is handed to `on_news`, perhaps in another thread.
    """
    waiting, running = deque(names), dict[Future[Result], str]()
    with _executor(workers, shielded, on_news) as executor:
        while waiting or running:
            while waiting and len(running) < workers:
                name = waiting.popleft()
                job = next_job(name)
                if job is not None:
                    with without_interrupts() if shielded else nullcontext():
                        running[executor.submit(job)] = name
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                name = running.pop(future)
                on_result(name, future.result())
                waiting.append(name)


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Meanwhile SIGINT waits; in processes that are begun here, until they want it."""
    ensure_running()  # multiprocessing's own process, whose beginning would let SIGINT through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch as in every worker: one thread, since sums depend on their number, and no denormals, which are slow."""
    threads = torch.get_num_threads()
    _be_single()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _executor(workers: int, shielded: bool, on_news: Callable[[Any], None]) -> Iterator[Executor]:
    if workers == 1:
        with one_thread(), _heard(on_news):
            yield _Here()
        return
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads, such as torch's, may hang
    with (
        _heard_from_afar(on_news) as writer,
        ProcessPoolExecutor(workers, context, initializer=_prepare, initargs=(writer,)) as executor,
    ):
        try:
            yield executor
        except BaseException:
            if shielded:
                with suppress(ProcessLookupError):  # those of a broken pool are being ended anyway
                    Stop().pass_on()
            executor.shutdown(cancel_futures=True)
            raise


@contextmanager
def _heard(on_news: Callable[[Any], None]) -> Iterator[None]:
    token = _listener.set(on_news)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def _heard_from_afar(on_news: Callable[[Any], None]) -> Iterator[Connection[Any, Any]]:
    """What other processes tell by: small messages, each whole without a lock, which one that is killed would keep."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    over = threading.Event()

    def listen() -> None:
        with reader:  # should listening fail, so does telling
            while reader.poll(LOOK) or not over.is_set():
                if reader.poll():
                    on_news(reader.recv())

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield writer
    finally:
        over.set()
        thread.join()
        writer.close()


class _Here(Executor):
    """Does a job at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _prepare(news: Connection[Any, Any]) -> None:
    """Begin a worker: single-threaded, heard, and not to outlive the process that wants its results."""
    _be_single()
    plain_warnings()
    _listener.set(news.send)
    leave_with_parent()


def _be_single() -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # sigmoid units make them


def leave_with_parent() -> None:
    """End this process when the one that began it ends, which may be killed with no time to say so."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
