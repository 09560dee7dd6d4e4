"""Who factorises what."""

from __future__ import annotations

from collections.abc import Mapping


def share_out(work: Mapping[str, float], workers: int) -> dict[str, int]:
    """Ranks by place: the most costly first, each to the rank with the least to do, as refreshes are shared out."""
    loads = [0.0] * workers
    owners = {}
    for name in sorted(work, key=lambda name: -work[name]):
        owners[name] = min(range(workers), key=loads.__getitem__)
        loads[owners[name]] += work[name]
    return owners
