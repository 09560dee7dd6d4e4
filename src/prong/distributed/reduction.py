"""Statistics over all workers, from those that each has gathered of its own data."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

import torch
from torch import Tensor

from prong.core.moments import MeanSquare, Moments
from prong.distributed.workers import Workers


class Reduction:
    """Moments of everything that any worker has seen, on their way.

    With n_r, m_r, S_r the count, mean and scatter of rank r,

        n = sum_r n_r        m = 1/n sum_r n_r m_r        S = sum_r S_r + n_r (m_r - m)(m_r - m)^T

    in which nothing cancels. Counts are gathered first and means added up, which is little; the lower triangles of all
    S go in one all-reduce that training need not wait for. What a worker has not seen counts zero times.

    Args:
        moments: those of this worker. The names are the same for all.
        workers: who takes part.
        examples: the number of examples behind each, where that is wanted.

    Attributes:
        moments: by name, of those that anyone has seen; ready after `wait`, counts and means are at once. Sites whose
            statistics are one object for all who have any, share one here.
        examples: over all workers.
    """

    @torch.no_grad()
    def __init__(
        self, moments: Mapping[str, Moments], workers: Workers, examples: Mapping[str, float] | None = None
    ) -> None:
        self.moments, self.examples = dict(moments), dict(examples or {})
        self._finish: Callable[[], None] = lambda: None
        self._triangles: dict[str, Tensor] = {}
        if workers.alone:
            return
        firsts: dict[int, str] = {}
        mine = {
            name: (m.count, self.examples.get(name, 0.0), firsts.setdefault(id(m), name)) for name, m in moments.items()
        }
        told = workers.meet(mine)
        counts = {name: sum(said[name][0] for said in told) for name in moments}
        self.examples = {name: sum(said[name][1] for said in told) for name in self.examples}
        shares = {name: {said[name][2] for said in told if said[name][0] > 0} for name in moments}
        first_of = {name: first.pop() if len(first) == 1 else name for name, first in shares.items()}
        seen = [name for name in moments if counts[name] > 0 and first_of[name] == name]

        means = {name: moments[name].mean * (moments[name].count / counts[name]) for name in seen}
        workers.sum_(list(means.values()))()
        self._triangles = {name: _triangle(moments[name], means[name]) for name in seen}
        self._finish = workers.sum_(list(self._triangles.values()))
        reduced = {}
        for name in seen:
            reduced[name] = moments[name].empty()
            reduced[name].count, reduced[name].mean = counts[name], means[name]
        self.moments = {name: reduced[first_of[name]] for name in moments if counts[name] > 0}

    def detach(self) -> None:
        """Copy moments that go on to be gathered."""
        copies = {id(m): m.to(m.mean) for m in self.moments.values()}
        self.moments = {name: copies[id(m)] for name, m in self.moments.items()}

    @torch.no_grad()
    def wait(self, wanted: Container[Moments] | None = None) -> dict[str, Moments]:
        """The moments, complete, or those that are `wanted`; called once. Another thread may do it."""
        self._finish()
        for name, triangle in self._triangles.items():
            m = self.moments[name]
            if wanted is None or m in wanted:
                m.load_state_dict({"count": m.count, "mean": m.mean, "scatter": _symmetric(triangle, m.mean)})
        self._triangles = {}
        return self.moments


def _triangle(moments: Moments, mean: Tensor) -> Tensor:
    """The scatter about another mean, packed: (groups, in (in + 1) / 2)."""
    groups, size = mean.shape
    if moments.count == 0:
        return mean.new_zeros(groups, size * (size + 1) // 2)
    delta = moments.mean - mean
    scatter = torch.baddbmm(moments.scatter, delta.unsqueeze(2), delta.unsqueeze(1), alpha=moments.count)
    return torch.cat([scatter[:, i, : i + 1] for i in range(size)], dim=1)


def _symmetric(triangle: Tensor, like: Tensor) -> Tensor:
    """The matrices (groups, in, in) of packed triangles."""
    groups, size = like.shape
    lower = like.new_zeros(groups, size, size)
    for i, row in enumerate(torch.split(triangle, list(range(1, size + 1)), dim=1)):
        lower[:, i, : i + 1] = row
    return lower + lower.tril(-1).mT


def summed(squares: Mapping[str, tuple[MeanSquare, Tensor]], workers: Workers) -> dict[str, MeanSquare]:
    """Mean squares over all workers, each given with zeros of its shape. Those given stay as they are."""
    if workers.alone:
        return {name: square for name, (square, _) in squares.items()}
    parts = {}
    for name, (square, zeros) in squares.items():
        total = zeros if square.total is None else square.total.to(zeros)
        parts[name] = torch.cat([total.reshape(-1), zeros.new_tensor([square.count])])
    workers.sum_(list(parts.values()))()
    result = {}
    for name, (_, zeros) in squares.items():
        result[name] = MeanSquare()
        if (count := float(parts[name][-1])) > 0:
            result[name].add(parts[name][:-1].view(zeros.shape), count)
    return result
