"""The Fisher matrix: of all parameters, of blocks of them, or as a linear map that is never formed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from prong.analysis.fisher.snapshot import Coordinates, Snapshot, as_ordinary, count_examples, each_exact_row, pieces
from prong.core.moments import accumulation_dtype
from prong.gradients.outputs import Distribution, sampled_output_gradient
from prong.model.estimate import Forward
from prong.options import check_count

MAX_BYTES = 4 * 10**9
GRADIENT_BYTES = 2**28  # what gradients of the examples of a chunk may take, if the chunk is ours to choose


def dense(model: nn.Module, batches: Any, distribution: Distribution, **options: Any) -> Tensor:
    """The Fisher matrix F = 1/N sum_n J_n^T H_n J_n of all trained parameters, (size, size).

    J_n is the Jacobian of the model's output on example n and H_n the Fisher of the output distribution there. Rows and
    columns are ordered as `slices` tells. Options are those of `blocks`.
    """
    return blocks(model, batches, distribution, [""], **options)[""]


def blocks(
    model: nn.Module,
    batches: Any,
    distribution: Distribution,
    names: Iterable[str] | None = None,
    *,
    coordinates: Coordinates = "canonical",
    draws: int | None = None,
    generator: torch.Generator | None = None,
    chunk: int | None = None,
    max_bytes: float = MAX_BYTES,
    forward: Forward | None = None,
) -> dict[str, Tensor]:
    """Diagonal blocks of the Fisher matrix, by name; the model is taken in eval mode, and left as it is.

    `names` are those of layers, with all inside them, or of parameters in the given coordinates: "0", "0.weight",
    "0.V"; None is one block for every layer that has parameters of its own. Coordinates are "canonical", W and b of
    every layer, or "whitened", V and d of whitened layers. With `draws` and a `generator`, so many labels per example
    are drawn from the model instead of summed over. `chunk` examples are differentiated at once; by default, as many as
    keep their gradients within 2^28 bytes. `forward(model, batch)` runs the model, if it is not as `refresh_` does.
    Matrices of more than `max_bytes` are refused.
    """
    snapshot = Snapshot(model, distribution, coordinates, names, forward)
    if (draws is None) != (generator is None):
        raise ValueError("a sampled Fisher needs draws and generator, as in draws=1, generator=torch.Generator()")
    check_count("chunk", chunk, 1, optional=True)
    check_count("draws", draws, 1, optional=True)
    where = {  # a module's parameters are neighbours in the model's order
        name: slice(snapshot.slices[members[0]].start, snapshot.slices[members[-1]].stop)
        for name, members in snapshot.groups.items()
    }
    sizes = {name: s.stop - s.start for name, s in where.items()}
    dtype = accumulation_dtype(snapshot.zero.dtype)
    wanted = sum(size**2 for size in sizes.values()) * dtype.itemsize
    if wanted > max_bytes:
        raise ValueError(
            f"this Fisher has {' + '.join(f'{n} x {n}' for n in sizes.values())} entries and would take "
            f"{wanted / 1e9:.3g} GB, more than max_bytes ({max_bytes / 1e9:.3g} GB). Use prong.fisher.Operator, which "
            "extreme_eigenvalues takes too, prong.fisher.blocks for some layers only, or a larger max_bytes."
        )
    examples = 0
    with snapshot.quiet():
        found = {name: snapshot.zero.new_zeros(size, size, dtype=dtype) for name, size in sizes.items()}
        for rows in _gradient_rows(snapshot, batches, draws, generator, chunk):
            examples += rows.shape[0]
            flat = rows.flatten(0, 1).to(dtype)
            for name, matrix in found.items():
                part = flat[:, where[name]]
                matrix.addmm_(part.mT, part)
        return {name: matrix.div_(examples) for name, matrix in found.items()}


def slices(model: nn.Module, coordinates: Coordinates = "canonical") -> dict[str, slice]:
    """Which rows and columns of `dense` belong to which parameter; a tensor is flattened in its own order."""
    return Snapshot(model, "gaussian", coordinates).slices


class Operator:
    """The Fisher matrix F = 1/N sum_n J_n^T H_n J_n as a linear map: `operator @ v` for v (size,) or (size, k).

    A product is one forward-mode and one reverse-mode derivative for every chunk of examples: memory is that of a
    training step on them. The model is copied and the batches are not: leave them as they are. Arguments are as in
    `blocks`, and `slices` tells which entries belong to which parameter.
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
        self.slices, self.shape = snapshot.slices, (len(snapshot.zero), len(snapshot.zero))
        self.dtype, self.device = snapshot.zero.dtype, snapshot.zero.device
        with snapshot.quiet():
            self._pieces = [piece for batch in snapshot.batches(batches) for piece in pieces(batch, chunk)]
            self._examples = sum(len(snapshot.checked_output(piece)) for piece in self._pieces)

    def __matmul__(self, v: Tensor) -> Tensor:
        """F v, or F V column by column."""
        if v.dim() not in (1, 2) or v.shape[0] != self.shape[1]:
            raise ValueError(f"expected a vector of {self.shape[1]} entries or columns of them, got {tuple(v.shape)}")
        if v.dtype != self.dtype:
            raise TypeError(f"this model is in {self.dtype}, the vector in {v.dtype}; convert it with v.to(...)")
        if v.dim() == 2:
            return torch.stack([self @ column for column in v.unbind(1)], dim=1) if v.shape[1] else torch.zeros_like(v)
        with self._snapshot.quiet():
            v = as_ordinary(v.detach())
            return sum((self._snapshot.times_fisher(p, v) for p in self._pieces), torch.zeros_like(v)) / self._examples


def _gradient_rows(
    snapshot: Snapshot, batches: Any, draws: int | None, generator: torch.Generator | None, chunk: int | None
) -> Iterator[Tensor]:
    """S_n^T J_n with S_n S_n^T = H_n, or in expectation, for one chunk of examples after the other.

    Shapes: (examples, rows, size).
    """
    for batch in snapshot.batches(batches):
        for piece in pieces(batch, chunk or _affordable(snapshot, batch, draws)):
            output = snapshot.checked_output(piece)
            if draws is None:
                rows = torch.stack(list(each_exact_row(output, snapshot.distribution)), dim=1)
            else:
                scores = [sampled_output_gradient(output, snapshot.distribution, generator) for _ in range(draws)]
                rows = torch.stack(scores, dim=1) / math.sqrt(draws)
            yield snapshot.pulled_back(piece, rows)


def _affordable(snapshot: Snapshot, batch: Any, draws: int | None) -> int:
    """How many examples' gradients fit into what a chunk may take; at least one."""
    output = snapshot.checked_output(next(pieces(batch, 1)))
    per_example = (draws or output.numel()) * (len(snapshot.zero) + output.numel()) * output.element_size()
    return max(1, min(count_examples(batch), GRADIENT_BYTES // per_example))
