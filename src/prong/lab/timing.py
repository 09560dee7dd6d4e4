"""Times that can be compared: all contestants take turns in one process, so that a noisy minute hits them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter


def interleaved(
    blocks: Mapping[str, Callable[[], None]], repetitions: int, on_block: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Seconds of every block, by name: each runs once without being counted, then `repetitions` times in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in blocks}
    for repetition in range(repetitions + 1):
        for name, block in blocks.items():
            start = perf_counter()
            block()
            if repetition > 0:
                seconds[name].append(perf_counter() - start)
            on_block()
    return seconds
