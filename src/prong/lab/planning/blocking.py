"""Which layers are whitened whole, which in blocks, and which only scaled."""

from __future__ import annotations

import math
from dataclasses import replace

from prong.lab.planning.machines import Machine
from prong.lab.planning.prediction import Prediction, Setting, predict
from prong.lab.planning.tracing import Traced

SMALLEST = 64  # a block of fewer inputs is hardly cheaper than this one; then single inputs


def in_blocks(traced: Traced, block: int | None) -> Traced:
    """The model with all layers in blocks of at most so many inputs."""
    return replace(traced, places=tuple(place.blocked(block) for place in traced.places))


def block_sizes(size: int) -> list[int]:
    """Sizes to try: all of a layer's inputs, halves of that again and again, single ones."""
    halves = [math.ceil(size / 2**k) for k in range(size.bit_length())]
    return [half for half in halves if half >= min(size, SMALLEST)] + [1]


def fits(prediction: Prediction, machine: Machine, budget: float) -> bool:
    """Whether there is the memory, and the time."""
    return prediction.memory <= machine.memory and prediction.times_sgd <= budget


def fitted(traced: Traced, machine: Machine, setting: Setting, budget: float) -> Traced:
    """The model with its widest layers in blocks, as large as fit into memory and into `budget` times SGD's time.

    Where the smallest blocks do not do it either, blocks are not what is missing, and the model is left whole.
    """
    chosen = traced
    while not fits(predict(chosen, machine, setting), machine, budget):
        widest = max((place.layout.features for place in chosen.places), default=1)
        if widest == 1:
            return traced
        smaller = next(size for size in block_sizes(widest) if size < widest)
        places = tuple(p.blocked(smaller) if p.layout.features == widest else p for p in chosen.places)
        chosen = replace(chosen, places=places)
    return chosen
