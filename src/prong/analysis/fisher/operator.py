"""Products with a Fisher matrix that is never formed."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp, vjp

from prong.analysis.fisher.coordinates import Coordinates
from prong.analysis.fisher.outputs import times_output_fisher
from prong.analysis.fisher.snapshot import Snapshot, as_ordinary, count_examples, differentiable, ordinary, pieces
from prong.gradients.outputs import Distribution
from prong.model.estimate import Forward
from prong.options import check_count


class Operator:
    """The Fisher matrix F = 1/N sum_n J_n^T H_n J_n as a linear map: `operator @ v` for v (size,) or (size, k).

    A product is one forward-mode and one reverse-mode derivative for every chunk of examples: memory is that of a
    training step on `chunk` examples. F is that of the model at the time this is made: later updates are not seen. The
    batches are kept and not copied: what is done to them in place changes later products. Arguments are as in `dense`.

    Raises:
        ValueError: of a product, a model that torch.func cannot differentiate.

    Attributes:
        shape: (size, size).
        dtype: of vectors.
        device: of vectors.
        slices: which entries belong to which parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Any,
        distribution: Distribution,
        *,
        coordinates: Coordinates = "canonical",
        chunk: int = 128,
        forward: Forward | None = None,
    ) -> None:
        check_count("chunk", chunk, 1)
        self._snapshot = snapshot = Snapshot(model, distribution, coordinates, [""], forward)
        with ordinary():
            self._pieces = [piece for batch in snapshot.batches(batches) for piece in pieces(batch, chunk)]
        self._examples = sum(count_examples(piece) for piece in self._pieces)
        self.slices = snapshot.slices
        self.shape = (snapshot.size, snapshot.size)
        self.dtype, self.device = snapshot.zero.dtype, snapshot.zero.device
        with snapshot.quiet():
            for piece in self._pieces:
                snapshot.checked_output(piece)

    def __matmul__(self, v: Tensor) -> Tensor:
        """F v, or F V column by column."""
        if v.dim() not in (1, 2) or v.shape[0] != self.shape[1]:
            raise ValueError(f"expected a vector of {self.shape[1]} entries or columns of them, got {tuple(v.shape)}")
        if v.dtype != self.dtype:
            raise TypeError(f"this model is in {self.dtype}, the vector in {v.dtype}; convert it with v.to(...)")
        if v.dim() == 2:
            return torch.stack([self @ column for column in v.unbind(1)], dim=1) if v.shape[1] else torch.zeros_like(v)
        with self._snapshot.quiet(), differentiable():
            v = as_ordinary(v.detach())
            return sum((self._of_piece(piece, v) for piece in self._pieces), torch.zeros_like(v)) / self._examples

    def _of_piece(self, piece: Any, v: Tensor) -> Tensor:
        """The sum of J_n^T H_n J_n v over the examples of a piece."""
        snapshot = self._snapshot

        def output(change: Tensor) -> Tensor:
            return snapshot.output(change, piece)

        with warnings.catch_warnings():  # torch's own forward mode is set up by means that it deprecates
            warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
            z, tz = jvp(output, (snapshot.zero,), (v,))  # type: ignore[misc]
        _, backward = vjp(output, snapshot.zero)  # type: ignore[misc]
        (product,) = backward(times_output_fisher(z, snapshot.distribution, tz))
        return product  # type: ignore[no-any-return]
