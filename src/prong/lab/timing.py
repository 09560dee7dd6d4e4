"""Times that can be compared: all contestants take turns in one process, so that a noisy minute hits them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from types import MappingProxyType

NOTHING: Mapping[str, Callable[[], None]] = MappingProxyType({})


def interleaved(
    blocks: Mapping[str, Callable[[], None]],
    repetitions: int,
    on_block: Callable[[], None] = lambda: None,
    prepare: Mapping[str, Callable[[], None]] = NOTHING,
) -> dict[str, list[float]]:
    """Seconds of every block, by name: each runs once without being counted, then `repetitions` times in turn.

    What `prepare` has under a block's name runs before it each time, and is not counted.
    """
    seconds: dict[str, list[float]] = {name: [] for name in blocks}
    for repetition in range(repetitions + 1):
        for name, block in blocks.items():
            if name in prepare:
                prepare[name]()
            start = perf_counter()
            block()
            elapsed = perf_counter() - start
            if repetition > 0:
                seconds[name].append(elapsed)
            on_block()
    return seconds
