"""The Fisher matrix: of all parameters, of blocks of them, or as a linear map that is never formed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp, vjp, vmap

from prong.analysis.fisher.coordinates import Coordinates
from prong.analysis.fisher.outputs import each_exact_row, sampled_rows, times_output_fisher
from prong.analysis.fisher.snapshot import (
    Snapshot,
    as_ordinary,
    count_examples,
    differentiable,
    ordinary,
    pieces,
    tensors_of,
    with_tensors,
)
from prong.core.moments import accumulation_dtype
from prong.gradients.outputs import Distribution
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
    """Diagonal blocks of the Fisher matrix, by name.

    Labels are integrated exactly, or sampled if `draws` is given. The model is taken in eval mode, whatever mode it is
    in, and is left as it is.

    Args:
        model: any module that `torch.func.vmap` can run, plain or whitened in any form.
        batches: an iterable of batches, or one tensor; examples are the first dimension.
        distribution: "categorical" (logits, classes at dimension 1), "bernoulli" (logits) or "gaussian" (means, unit
            variance). The log-likelihood of an example is summed over its positions.
        names: of layers (their parameters, and those of layers inside them) or of parameters in the given coordinates:
            "0", "0.weight", "0.V". None is one block for every layer that has parameters of its own. Parameters that
            layers share belong to the first.
        coordinates: "canonical" is W, b of every layer; "whitened" is V, d of whitened layers, canonical elsewhere.
        draws: estimate with so many labels per example, drawn from the model; the exact Fisher is the expectation.
        generator: where the draws come from.
        chunk: how many examples are differentiated at once. They take chunk x outputs x (size + outputs) numbers; by
            default these stay within 2^28 bytes.
        max_bytes: refuse matrices that would take more.
        forward: how to run the model on a batch; default `model(batch)`, `model(batch[0])` or `model(**batch)`.

    Raises:
        ValueError: matrices of more than `max_bytes`, or a model without an output per example.
        FloatingPointError: an output that is not finite.
    """
    snapshot = Snapshot(model, distribution, coordinates, names, forward)
    if chunk is not None:
        check_count("chunk", chunk, 1)
    if (draws is None) != (generator is None):
        raise ValueError(
            "a sampled Fisher needs draws and generator, the exact one neither: "
            "e.g. draws=1, generator=torch.Generator().manual_seed(0)"
        )
    if draws is not None:
        check_count("draws", draws, 1)
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
            f"{wanted / 1e9:.3g} GB, more than max_bytes ({max_bytes / 1e9:.3g} GB). Use prong.fisher.Operator for "
            "products with it and extreme_eigenvalues for its spectrum, prong.fisher.blocks for some layers only, or a "
            "larger max_bytes."
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
    training step on `chunk` examples. F is that of the model at the time this is made: later updates are not seen. The
    batches are kept and not copied: what is done to them in place changes later products. Arguments are as in `blocks`,
    and `slices` tells which entries belong to which parameter.
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


def _gradient_rows(
    snapshot: Snapshot, batches: Any, draws: int | None, generator: torch.Generator | None, chunk: int | None
) -> Iterator[Tensor]:
    """S_n^T J_n with S_n S_n^T = H_n, for the examples of one chunk after the other: (examples, rows, size)."""
    for batch in snapshot.batches(batches):
        for piece in pieces(batch, chunk or _affordable(snapshot, batch, draws)):
            output = snapshot.checked_output(piece)
            if draws is None or generator is None:
                rows = torch.stack(list(each_exact_row(output, snapshot.distribution)), dim=1)
            else:
                rows = sampled_rows(output, snapshot.distribution, draws, generator)
            yield _pulled_back(snapshot, piece, rows)


def _pulled_back(snapshot: Snapshot, piece: Any, rows: Tensor) -> Tensor:
    """The gradients (examples, rows, size) of every example's output, weighted by rows (examples, rows, ...)."""

    def of_example(tensors: list[Tensor], own_rows: Tensor) -> Tensor:
        example = with_tensors(piece, (x.unsqueeze(0) for x in tensors))
        _, backward = vjp(lambda change: snapshot.output(change, example).squeeze(0), snapshot.zero)  # type: ignore[misc]
        pulled: Tensor = vmap(lambda row: backward(row)[0])(own_rows)
        return pulled

    with differentiable("example by example "):
        gradients: Tensor = vmap(of_example)(tensors_of(piece), rows)
        return gradients


def _affordable(snapshot: Snapshot, batch: Any, draws: int | None) -> int:
    """How many examples' gradients fit into what a chunk may take; at least one."""
    output = snapshot.checked_output(next(pieces(batch, 1)))
    per_example = (draws or output.numel()) * (snapshot.size + output.numel()) * output.element_size()
    return max(1, min(count_examples(batch), GRADIENT_BYTES // per_example))
