"""Memory of training: what lies there between updates, and how much an update needs meanwhile."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

ATOMS = (str, bytes, int, float, complex, bool, type(None), type, ModuleType)


def model_bytes(model: nn.Module) -> int:
    """Of its parameters."""
    return _total(_storages(list(model.parameters())))


def extra_bytes(model: nn.Module, *others: object) -> int:
    """Of all tensors within reach of a model and of others (its optimizer), but not its parameters and buffers.

    Gradients do not count. A piece of memory that several tensors share counts once.
    """
    own = _storages([*model.parameters(), *model.buffers()])
    return _total({key: size for key, size in _storages([model, *others]).items() if key not in own})


def peak_bytes(work: Callable[[], None], prepare: Callable[[], None] = lambda: None) -> int:
    """The most that `work` holds at once beyond what was there before, by torch's own allocator on the CPU.

    It is run twice, each time after `prepare`: of memory that was allocated unobserved the profiler does not see
    the release, and the first run replaces it. What libraries allocate by themselves (LAPACK's scratch space) is
    not seen.
    """
    peaks = []
    for _ in range(2):
        prepare()
        peaks.append(_peak(work))
    return peaks[-1]


def _peak(work: Callable[[], None]) -> int:
    with _silent_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    recorded = profiler.profiler
    assert recorded is not None
    events: Any = recorded.kineto_results.events()
    held = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """The profiler's C++ code reports its own starting and stopping there, and memory that it does not know."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _total(storages: Mapping[int, int]) -> int:
    return sum(storages.values())


def _storages(roots: list[Any]) -> dict[int, int]:
    """Sizes of the pieces of memory behind all tensors within reach, by address."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, ATOMS) or id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        else:
            waiting.extend(_within(thing))
    return found


def _within(thing: Any) -> Iterable[Any]:
    """What a container, an object or a bound method (a hook) holds."""
    if isinstance(thing, Mapping):
        return [*thing.keys(), *thing.values()]
    if isinstance(thing, list | tuple | set | frozenset | deque):
        return thing
    if isinstance(thing, MethodType):
        return [thing.__self__]
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(thing, "__dict__", {}).values(), *(getattr(thing, name, None) for name in slots)]
