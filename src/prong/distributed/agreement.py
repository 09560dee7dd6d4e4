"""How layers are whitened, chosen alike by workers that see other batches."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from prong.distributed.workers import Workers
from prong.layers import Kind, Plain


def agree_(layers: Iterable[Kind], workers: Workers) -> None:
    """Let all workers take the smallest blocks and ranks that any of them has chosen by its own batch.

    Layers that nobody has met yet are left for the next time; once there are none, nobody is asked.
    """
    views = [layer for layer in dict.fromkeys(layers) if isinstance(layer, Plain) and not layer.settled]
    if not views:
        return
    mine = [None if view.budget is not None else [(s.layout.block, s.rank) for s in view.sites] for view in views]
    for view, *chosen in zip(views, *workers.meet(mine), strict=True):
        known = [sizes for sizes in chosen if sizes is not None]
        if known:
            view.settle([_smallest(site) for site in zip(*known, strict=True)])


def _smallest(sizes: Iterable[tuple[int | None, int | None]]) -> tuple[int | None, int | None]:
    """The smallest block and the smallest rank, where None is no limit."""
    block, rank = (min(each, key=lambda size: inf if size is None else size) for each in zip(*sizes, strict=True))
    return block, rank
