"""Kronecker factors of the blocks of linear and convolutional layers, and how far the blocks are from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prong.analysis.fisher.snapshot import Coordinates, Snapshot, count_examples, each_exact_row, full_name, pieces
from prong.analysis.observation import patches
from prong.core.moments import accumulation_dtype
from prong.gradients.outputs import Distribution
from prong.model.estimate import Forward
from prong.options import check_count


@dataclass(frozen=True)
class Factors:
    """G (x) A, which stands for the Fisher block of a layer's weight and bias.

    The trained weight sees the inputs x (patches, for a convolution: channels times taps, in the order of the weight),
    with a 1 appended where a bias is trained. With T_n positions to example n (1 for a linear layer on vectors), which
    may differ between batches,

        A = 1/N sum_n sum_t x_t x_t^T            G = 1/(sum_n T_n) sum_n sum_t E_y[delta_t delta_t^T]

    delta being the gradient of the log-likelihood with respect to the layer's output, E_y the exact expectation over
    labels. In the row-by-row order of [W b] the block is approximated by kron(G, A): K-FAC, or KFC for many positions.

    Shapes: A (groups, in, in), in counting the 1; G (groups, out, out).
    """

    A: Tensor
    G: Tensor
    bias: bool

    def matrix(self) -> Tensor:
        """The approximate block in the order of `blocks`: the weight as torch flattens it, then the bias."""
        groups, outputs, inputs = self.A.shape[0], self.G.shape[-1], self.A.shape[-1] - self.bias
        index = torch.arange(groups * outputs * (inputs + self.bias), device=self.A.device)
        weights, biases = index.tensor_split([groups * outputs * inputs])
        rows = torch.cat([x.view(groups, outputs, -1) for x in (weights, biases)], dim=2).flatten(1)  # of [W b]
        block = self.A.new_zeros(len(index), len(index))
        for own, A, G in zip(rows, self.A, self.G, strict=True):
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

    Arguments are as in `blocks`, but for `layers`: names, None being every `nn.Linear` and `nn.Conv1d/2d/3d` whose
    weight is trained and which is called. In whitened coordinates x = U (h - c). Layers that are called more than once,
    or whose inputs do not have the examples first, are refused.
    """
    check_count("chunk", chunk, 1)
    snapshot = Snapshot(model, distribution, coordinates, [""], forward)
    places = list(_places(snapshot, [layers] if isinstance(layers, str) else layers))
    examples = 0
    with snapshot.quiet():
        for batch in snapshot.batches(batches):
            for few in range(1, min(2, count_examples(batch)) + 1):  # with one and with two, shapes fit by no chance
                _run(snapshot, places, next(pieces(batch, few)))
            for piece in pieces(batch, chunk):
                examples += count_examples(piece)
                with torch.enable_grad():
                    output, called = _run(snapshot, places, piece)
                outputs = [place.add_inputs() for place in called]
                for row in each_exact_row(output.detach(), distribution) if outputs else ():
                    deltas = torch.autograd.grad(output, outputs, row, retain_graph=True, materialize_grads=True)
                    for place, delta in zip(called, deltas, strict=True):
                        place.add_gradients(delta)
    for place in places:
        if layers is not None and place.rows == 0:
            raise ValueError(f"layer {place.name!r} is never called by the model, so it has no inputs of its own")
    return {p.name: Factors(p.A / examples, p.G / p.rows, p.bias) for p in places if p.rows > 0}


class _Place:
    """A layer of the copy: a forward hook that keeps a call, and the sums of x x^T and of E[delta delta^T].

    U (groups, in, in) and c (groups, in) are those of its inputs.
    """

    def __init__(self, name: str, module: Any, bias: bool, U: Tensor | None, c: Tensor | None) -> None:
        self.name, self.module, self.bias, self.U, self.c = name, module, bias, U, c
        self.A: Any = 0
        self.G: Any = 0
        self.rows, self.examples = 0, 0  # seen so far, and in the call to come
        self.call: tuple[Tensor, Tensor] | None = None

    def __call__(self, module: Any, args: Any, kwargs: Any, z: Tensor) -> Tensor:
        if self.call is not None:
            raise ValueError(
                f"layer {self.name!r} is called more than once in a forward, and has no single pair of factors. Name "
                "the layers you want, or take the exact block from prong.fisher.blocks."
            )
        h = args[0] if args else kwargs["input"]
        least = 2 if isinstance(module, nn.Linear) else len(module.kernel_size) + 2
        if h.dim() < least or h.shape[0] != self.examples or z.numel() == 0:
            raise ValueError(
                f"layer {self.name!r} sees inputs of shape {tuple(h.shape)} for {self.examples} examples, not one "
                "or more rows of each. Name other layers, or take the exact block from prong.fisher.blocks."
            )
        self.call = (h.detach(), z)
        return z.clone()  # what is done to it in place is not done to ours

    def add_inputs(self) -> Tensor:
        """Add what the trained weight saw in the call, with a 1 where a bias is trained; returns the output."""
        assert self.call is not None
        h, z = self.call
        x = h.reshape(1, -1, h.shape[-1], 1) if isinstance(self.module, nn.Linear) else patches(self.module, h)
        x = x if self.c is None else x - self.c[:, None, :, None]
        x = (x if self.U is None else self.U.unsqueeze(1) @ x).flatten(2)  # every tap by itself
        x = (torch.cat([x, torch.ones_like(x[..., :1])], dim=2) if self.bias else x).to(accumulation_dtype(z.dtype))
        self.A, self.rows = self.A + x.mT @ x, self.rows + x.shape[1]
        return z

    def add_gradients(self, delta: Tensor) -> None:
        """Add those with respect to the output."""
        linear = isinstance(self.module, nn.Linear)
        rows = (delta if linear else delta.movedim(1, -1)).flatten(0, -2).to(accumulation_dtype(delta.dtype))
        own = rows.reshape(len(rows), 1 if linear else self.module.groups, -1).transpose(0, 1)
        self.G = self.G + own.mT @ own


def _places(snapshot: Snapshot, layers: Iterable[str] | None) -> Iterator[_Place]:
    """The layers asked for; None takes all that have factors."""
    modules = dict(snapshot.caller.model.named_modules())
    whitenings: Any = {next(iter(chart.names)): (chart.whitening, chart.site.layout) for chart in snapshot.charts}
    trained = set(snapshot.plain_names.values())
    for name in modules if layers is None else layers:
        if name not in modules:
            raise ValueError(f"no layer is called {name!r}. Layers: {', '.join(filter(None, modules))}")
        module, weight = modules[name], full_name(name, "weight")
        known = isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)
        if known and weight in trained:
            w, layout = whitenings.get(weight, (None, None))
            U = None if w is None else layout.assembled(w.U)  # of blocks, a single matrix
            c = None if U is None or w.c is None else layout.in_a_row(w.c).view(len(U), -1)
            yield _Place(name, module, full_name(name, "bias") in trained, U, c)
        elif layers is not None:
            kind = f"{type(module).__name__}{', whose weight is not trained' if known else '; see prong.fisher.blocks'}"
            raise ValueError(f"factors are of Linear and Conv1d/2d/3d layers, and layer {name!r} is a {kind}")


def _run(snapshot: Snapshot, places: list[_Place], piece: Any) -> tuple[Tensor, list[_Place]]:
    """The model's output, and the layers that were called."""
    with ExitStack() as hooks:
        for place in places:
            place.call, place.examples = None, count_examples(piece)
            hooks.enter_context(place.module.register_forward_hook(place, with_kwargs=True))
        output = snapshot.checked_output(piece)
    return output, [place for place in places if place.call is not None]
