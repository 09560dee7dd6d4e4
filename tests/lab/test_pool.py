"""Jobs of a name come one after another, those of different names side by side."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from prong.lab.pool import one_thread, side_by_side, tell


def describe_process(number: int) -> tuple[int, int, int]:
    if number == 3:
        raise ArithmeticError("three")
    return number, os.getpid(), torch.get_num_threads()


def work(workers: int, last: int) -> tuple[list[tuple[str, int]], set[int], set[int]]:
    """Some jobs of each of three names: what was done in which order, by which processes, with how many threads."""
    done: dict[str, int] = dict.fromkeys("abc", 0)
    order: list[tuple[str, int]] = []
    processes: set[int] = set()
    threads: set[int] = set()

    def next_job(name: str) -> partial[tuple[int, int, int]] | None:
        return partial(describe_process, done[name]) if done[name] <= last else None

    def keep(name: str, result: tuple[int, int, int]) -> None:
        done[name] += 1
        order.append((name, result[0]))
        processes.add(result[1])
        threads.add(result[2])

    with pytest.raises(ArithmeticError, match="three") if last >= 3 else nullcontext():
        side_by_side("abc", next_job, keep, workers)
    return order, processes, threads


def test_one_worker_is_this_process_and_takes_turns() -> None:
    order, processes, threads = work(1, last=2)
    assert order == [(name, number) for number in range(3) for name in "abc"]
    assert processes == {os.getpid()} and threads == {1}


def test_several_workers_are_other_processes_whose_failures_are_raised_here() -> None:
    order, processes, threads = work(2, last=3)
    by_name = {name: [number for other, number in order if other == name] for name in "abc"}
    assert all(numbers == list(range(len(numbers))) for numbers in by_name.values())
    assert max(map(len, by_name.values())) == 3
    assert len(processes) <= 2 and os.getpid() not in processes and threads == {1}


def test_a_failure_in_this_process_is_raised_too() -> None:
    order, *_ = work(1, last=3)
    assert len(order) == 9


def test_the_number_of_threads_comes_back() -> None:
    before = torch.get_num_threads()
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def tell_of(number: int) -> int:
    for step in range(number):
        tell((number, step))
    return number


def tell_all(workers: int, on_news: Any) -> list[int]:
    """The results of jobs that tell as often as their number says."""
    numbers, results = {"a": 3, "b": 2000, "c": 0}, {}

    def next_job(name: str) -> partial[int] | None:
        return None if name in results else partial(tell_of, numbers[name])

    side_by_side(numbers, next_job, lambda name, result: results.update({name: result}), workers, on_news=on_news)
    return sorted(results.values())


@pytest.mark.parametrize("workers", [1, 2])
def test_all_that_jobs_tell_is_heard_in_order(workers: int) -> None:
    heard: list[tuple[int, int]] = []
    assert tell_all(workers, heard.append) == [0, 3, 2000]
    for number in (3, 2000):
        assert [step for teller, step in heard if teller == number] == list(range(number))


def test_nobody_needs_to_listen() -> None:
    tell("nothing")
    assert len(work(1, last=0)[0]) == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_who_tells_somebody_that_has_left_fails_instead_of_waiting() -> None:
    def leave(news: Any) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        tell_all(2, leave)
