"""Kronecker factors of the blocks of linear and convolutional layers, and how far the blocks are from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from prong.analysis.fisher.coordinates import Coordinates, joined
from prong.analysis.fisher.outputs import each_exact_row
from prong.analysis.fisher.snapshot import Snapshot, count_examples, ordinary, pieces
from prong.analysis.observation import patches
from prong.core.moments import accumulation_dtype
from prong.gradients.outputs import Distribution
from prong.model.estimate import Forward
from prong.options import check_count

_Sums = tuple[Any, Any, Any]  # of x x^T and of E[delta delta^T], and the number of rows


@dataclass(frozen=True)
class Factors:
    """G (x) A, which stands for the Fisher block of a layer's weight and bias.

    The trained weight sees the inputs x (patches, for a convolution: channels times taps, in the order of the weight),
    with a 1 appended where a bias is trained. With T_n positions to example n (1 for a linear layer on vectors), which
    may differ between batches,

        A = 1/N sum_n sum_t x_t x_t^T            G = 1/(sum_n T_n) sum_n sum_t E_y[delta_t delta_t^T]

    delta being the gradient of the log-likelihood with respect to the layer's output, E_y the exact expectation over
    labels. In the row-by-row order of [W b] the block is approximated by kron(G, A). For one position this is K-FAC's
    approximation, for several that of KFC.

    Shapes: A (groups, in, in), in counting the 1; G (groups, out, out).
    """

    A: Tensor
    G: Tensor
    bias: bool

    def matrix(self) -> Tensor:
        """The approximate block in the order of `blocks`: the weight as torch flattens it, then the bias."""
        groups, outputs, inputs = self.A.shape[0], self.G.shape[-1], self.A.shape[-1] - self.bias
        weights = groups * outputs * inputs
        size = weights + groups * outputs * self.bias
        index = torch.arange(size, device=self.A.device)
        parts = [index[:weights].view(groups, outputs, inputs), index[weights:].view(groups, -1, 1)]
        index = torch.cat(parts, dim=2) if self.bias else parts[0]
        block = self.A.new_zeros(size, size)
        for own, A, G in zip(index.flatten(1), self.A, self.G, strict=True):
            block[own.unsqueeze(1), own] = torch.kron(G, A)
        return block

    def relative_error(self, block: Tensor) -> float:
        """||block - kron(G, A)||_F / ||block||_F for this layer's exact block, from `blocks`; NaN for a zero one."""
        approximation = self.matrix()
        if block.shape != approximation.shape:
            raise ValueError(
                f"this block is {tuple(block.shape)}, the factors' is {tuple(approximation.shape)}. "
                "Take both of the same layer, in the same coordinates."
            )
        return float((block - approximation).norm() / block.norm())


def factors(
    model: nn.Module,
    batches: Any,
    distribution: Distribution,
    layers: Iterable[str] | None = None,
    *,
    coordinates: Coordinates = "canonical",
    chunk: int = 128,
    forward: Forward | None = None,
) -> dict[str, Factors]:
    """The Kronecker factors of linear and convolutional layers, by name; see `Factors`.

    In whitened coordinates x = U (h - c), so after a refresh on the same data A of a linear layer is the identity, up
    to damping. A convolution's is not: its channels are white, its taps are not.

    Arguments are as in `blocks`, but for `layers`: names, None being every `nn.Linear` and `nn.Conv1d/2d/3d` whose
    weight is trained and which is called. Memory is that of a training step on `chunk` examples and of their patches.
    Layers that are called more than once, or whose inputs do not have the examples first, are refused.
    """
    check_count("chunk", chunk, 1)
    with ordinary():
        snapshot = Snapshot(model, distribution, coordinates, [""], forward)
        chosen = _choose(snapshot, layers)
        sums: dict[str, _Sums] = {}
        examples = 0
        for batch in snapshot.batches(batches):
            for few in range(1, min(2, count_examples(batch)) + 1):  # with one and with two this cannot be by chance
                with snapshot.quiet(), _listening(chosen, few):
                    snapshot.checked_output(next(pieces(batch, few)))
            for piece in pieces(batch, chunk):
                examples += count_examples(piece)
                for name, found in _of_piece(snapshot, chosen, piece).items():
                    A, G, rows = (x + y for x, y in zip(found, sums.get(name, (0, 0, 0)), strict=True))
                    sums[name] = (A, G, rows)
        missing = [name for name in chosen if name not in sums]
        if layers is not None and missing:
            raise ValueError(f"layer {missing[0]!r} is never called by the model, so it has no inputs of its own")
        return {name: Factors(A / examples, G / rows, chosen[name].bias) for name, (A, G, rows) in sums.items()}


@dataclass(frozen=True)
class _Place:
    """A layer of the copy, whether its bias is trained, and U (groups, in, in) and c of its inputs."""

    module: Any
    bias: bool
    U: Tensor | None = None
    c: Tensor | None = None

    @property
    def groups(self) -> int:
        return 1 if isinstance(self.module, nn.Linear) else int(self.module.groups)

    def inputs(self, h: Tensor) -> Tensor:
        """What the trained weight sees, with a 1 where a bias is trained: (groups, rows, in)."""
        x = h.reshape(1, -1, h.shape[-1], 1) if isinstance(self.module, nn.Linear) else patches(self.module, h)
        if self.c is not None:
            x = x - self.c[:, None, :, None]
        x = (x if self.U is None else self.U.unsqueeze(1) @ x).flatten(2)  # every tap by itself
        return torch.cat([x, torch.ones_like(x[..., :1])], dim=2) if self.bias else x

    def outputs(self, z: Tensor) -> Tensor:
        """Something shaped as the outputs, (groups, rows, out)."""
        rows = z if isinstance(self.module, nn.Linear) else z.movedim(1, -1)
        return rows.reshape(-1, self.groups, rows.shape[-1] // self.groups).transpose(0, 1)


def _choose(snapshot: Snapshot, layers: Iterable[str] | None) -> dict[str, _Place]:
    modules = dict(snapshot.caller.model.named_modules())
    trained = set(snapshot.plain_names.values())
    whitened = {chart.layer: chart.places[0] for chart in snapshot.charts if len(chart.places) == 1}
    chosen = {}
    for name in modules if layers is None else [layers] if isinstance(layers, str) else layers:
        if name not in modules:
            raise ValueError(f"no layer is called {name!r}. Layers: {', '.join(filter(None, modules))}")
        module = modules[name]
        if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            if layers is not None:
                raise ValueError(
                    f"layer {name!r} is a {type(module).__name__}: Kronecker factors are those of Linear and "
                    "Conv1d/2d/3d. Its exact block is in prong.fisher.blocks."
                )
        elif joined(name, "weight") in trained:
            site, w = whitened.get(name, (None, None))
            place = _Place(module, joined(name, "bias") in trained)
            if site is not None and w is not None and w.U is not None:  # and without blocks
                c = None if w.c is None else site.layout.in_a_row(w.c).reshape(place.groups, -1)
                place = replace(place, U=site.layout.assembled(w.U), c=c)
            chosen[name] = place
        elif layers is not None:
            raise ValueError(f"the weight of layer {name!r} is not trained, so it has no block")
    return chosen


def _of_piece(snapshot: Snapshot, chosen: dict[str, _Place], piece: Any) -> dict[str, _Sums]:
    """Sums of x x^T and of E[delta delta^T] over examples and positions, and the number of both, by layer."""
    with snapshot.quiet(), torch.enable_grad(), _listening(chosen, count_examples(piece)) as calls:
        output = snapshot.checked_output(piece)
        outputs = [z for _, z in calls.values()]
        found: dict[str, _Sums] = {}
        for name, (h, z) in calls.items():
            place, dtype = chosen[name], accumulation_dtype(z.dtype)
            x = place.inputs(h).to(dtype)
            G = x.new_zeros(place.groups, *[place.outputs(z).shape[-1]] * 2)
            found[name] = (x.mT @ x, G, x.shape[1])
        for row in each_exact_row(output.detach(), snapshot.distribution) if outputs else ():
            deltas = torch.autograd.grad(output, outputs, row, retain_graph=True, allow_unused=True)
            for name, delta in zip(calls, deltas, strict=True):
                if delta is not None:
                    own = chosen[name].outputs(delta).to(found[name][1].dtype)
                    found[name][1].baddbmm_(own.mT, own)
    return found


@contextmanager
def _listening(chosen: dict[str, _Place], examples: int) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Inputs and outputs of every layer that is called, by name."""
    calls: dict[str, tuple[Tensor, Tensor]] = {}

    def listen(name: str, place: _Place) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, z: Tensor) -> Tensor:
            if name in calls:
                raise ValueError(
                    f"layer {name!r} is called more than once in a forward, and its block then has no single pair of "
                    "factors. Name the layers you want, or take the exact block from prong.fisher.blocks."
                )
            h = args[0] if args else kwargs["input"]
            least = 2 if isinstance(place.module, nn.Linear) else len(place.module.kernel_size) + 2
            if h.dim() < least or h.shape[0] != examples or z.numel() == 0:
                raise ValueError(
                    f"layer {name!r} sees inputs of shape {tuple(h.shape)} for {examples} examples. Kronecker factors "
                    "are means over examples, the first dimension of a layer's inputs, and over positions. Name other "
                    "layers, or take the exact block from prong.fisher.blocks."
                )
            calls[name] = (h.detach(), z)
            return z.clone()  # what is done to it in place is not done to ours

        return hook

    handles = [
        place.module.register_forward_hook(listen(name, place), with_kwargs=True) for name, place in chosen.items()
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
