"""What a worker does for one place: operations, bytes moved and bytes held. Pure functions of shapes.

With m = `layout.matrices` blocks of n = `layout.features` inputs each (one of all inputs, where there are no blocks),
and r rows:

    preconditioning    2 r m n^2 in activation space, 2 out taps m n^2 in gradient space
    statistics         2 s m n^2, with s the rows that are looked at
    factorisation      m n^3, a Cholesky factor (n^3 / 3) and the inverse from it (2 n^3 / 3)
    exchange           m n (n + 1) / 2 numbers of statistics to all, m n^2 of P from its owner
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from prong.core.moments import LEAST
from prong.lab.planning.tracing import Place
from prong.layers.natural import activation_space_is_cheaper
from prong.refresh.schedule import share_of_rows

PRECISE = 4  # bytes of a number in statistics, factorisations and their exchange


@dataclass(frozen=True)
class Work:
    """Operations of products, bytes they move, and calls."""

    flops: float = 0.0
    moved: float = 0.0
    calls: int = 1

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.moved + other.moved, self.calls + other.calls)


def product(rows: float, inner: float, columns: float, itemsize: int, batch: int = 1) -> Work:
    """A product of (rows, inner) and (inner, columns), `batch` times: 2 rows inner columns operations."""
    numbers = rows * inner + inner * columns + rows * columns
    return Work(2.0 * batch * rows * inner * columns, float(batch * numbers * itemsize))


def is_convolution(place: Place) -> bool:
    """Whether torch computes it by other means than a matrix product."""
    return len(place.layout.shape) > 2


def plain_layer(place: Place, itemsize: int) -> Work:
    """The layer's share of SGD: forward, gradient of weights, gradient of inputs; products of one size."""
    layout = place.layout
    positions = place.rows if layout.transposed else place.positions
    flops = 2.0 * positions * layout.groups * layout.outputs * layout.inputs * layout.taps
    weights = layout.groups * layout.outputs * layout.inputs * layout.taps
    maps = place.rows * layout.channels + place.positions * layout.groups * layout.outputs
    products = 2 + place.backward
    return Work(products * flops, float(products * itemsize * (weights + maps)))


def counted(place: Place) -> float:
    """The same in torch's count, which takes the weights' gradient of a grouped convolution for an ungrouped one's."""
    work = plain_layer(place, 1)
    return work.flops * (1 + (place.layout.groups - 1) / (2 + place.backward))


def in_activation_space(place: Place) -> bool:
    """Whether the library whitens inputs there, rather than gradients."""
    if place.kind == "attention's output":  # of which attention reads the weights
        return False
    if place.kind == "attention":  # a detour, for few tokens only
        return 4 * place.rows < place.layout.inputs
    return activation_space_is_cheaper(place.layout, place.padded)


def preconditioning(place: Place, itemsize: int) -> Work:
    """What an update of PRONG adds to the layer's backward."""
    layout = place.layout
    in_activations = in_activation_space(place)
    rows = place.padded if in_activations else layout.outputs * layout.taps
    size = layout.features
    work = product(rows, size, size, itemsize, layout.matrices)
    if size == 1:
        work = Work(0.0, work.moved)  # a multiplication of each number
    centring = 2.0 * rows * layout.matrices * size * itemsize
    if place.kind == "attention" and in_activations:  # torch projects once more, by the identity, and back
        extra = product(place.rows, layout.inputs, layout.outputs, itemsize)
        work = work + Work(2 * extra.flops, 2 * extra.moved, 0)
    return Work(work.flops, work.moved + centring, 1)


def looked_at(place: Place) -> int:
    """How many of a minibatch's rows enter the statistics."""
    return min(place.rows, max(LEAST, math.ceil(share_of_rows(place.layout) * place.rows)))


def statistics(place: Place) -> Work:
    """What an update adds while its window is open."""
    layout, count = place.layout, looked_at(place)
    held = layout.matrices * layout.features**2
    return Work(2.0 * count * held, PRECISE * (4.0 * count * layout.matrices * layout.features + held))


def packed(place: Place) -> int:
    """Bytes of its statistics as they are sent: triangles and means."""
    size = place.layout.features
    return PRECISE * place.layout.matrices * (size * (size + 1) // 2 + size)


def factorisation(place: Place) -> Work:
    """What its owner does at a refresh."""
    layout = place.layout
    numbers = layout.matrices * layout.features**2
    return Work(float(numbers * layout.features), 12.0 * PRECISE * numbers)


def inverse(place: Place, itemsize: int) -> int:
    """Bytes of P and c, held by every worker."""
    layout = place.layout
    return itemsize * layout.matrices * (layout.features**2 + layout.features)


def sent_inverse(place: Place) -> int:
    """Bytes of P and c as their owner sends them."""
    return inverse(place, PRECISE)


def window(place: Place) -> int:
    """Bytes of statistics while a window is open: matrices, as many rows that wait to be added, means."""
    size = place.layout.features
    return PRECISE * place.layout.matrices * (2 * size * size + size)
