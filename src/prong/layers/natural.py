"""Natural gradients inside autograd: the forward is the plain layer's, the backward is preconditioned.

Two orders of multiplication give the same result; the cheaper is chosen by shape:

    activation space    nW = delta^T (h P - c P)           costs  positions x in^2
    gradient space      nW = (delta^T h - gb c^T) P        costs  out x taps x in^2
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prong.core.moments import full_precision
from prong.core.whitening import Whitening, against, natural_gradient, times_inverse
from prong.layers.site import Layout, in_transform


@dataclass
class Switch:
    """Whether backward passes through a layer give ordinary gradients; asked when they run."""

    ordinary: bool = False


Centre = tuple[Tensor | None, Tensor | None]  # what is taken off inputs before they are multiplied by P, and after


@dataclass(frozen=True)
class Linear:
    """`F.linear` of inputs h, weight W and bias b, and the pieces of its derivative.

    `whitened` inputs (h - c) P are what `weight_gradient` takes; `natural_bias` is gb - nW c.
    """

    layout: Layout

    def __call__(self, h: Tensor, W: Tensor, b: Tensor | None) -> Tensor:  # noqa: D102
        z = F.linear(h, W, b)
        # Of tokens it is a view, and a view that a Function gives away cannot be changed in place, as activations may.
        return z if h.dim() == 2 else torch.ops.aten._unsafe_view(z, z.shape)

    def whitened(self, h: Tensor, P: Tensor, c: Centre, tail: float) -> Tensor:  # noqa: D102
        return self.layout.unrow(_whitened_rows(self.layout, self.layout.rows(h, -1), P, c, tail))

    def input_gradient(self, delta: Tensor, h: Tensor, W: Tensor) -> Tensor:  # noqa: D102
        return delta @ W

    def weight_gradient(self, delta: Tensor, x: Tensor, W: Tensor) -> Tensor:  # noqa: D102
        return delta.reshape(-1, delta.shape[-1]).mT @ x.reshape(-1, x.shape[-1])

    def bias_gradient(self, delta: Tensor) -> Tensor:  # noqa: D102
        return delta.reshape(-1, delta.shape[-1]).sum(0)

    def natural_bias(self, delta: Tensor, x: Tensor, nW: Tensor, c: Tensor) -> Tensor:  # noqa: D102
        # Reads activations, not the larger nW.
        return delta.reshape(-1, delta.shape[-1]).mT @ (1 - x @ self.layout.in_a_row(c))


@dataclass(frozen=True)
class Convolution:
    """The same of a convolution of a batch of maps, or a transposed one.

    In activation space maps are padded beforehand: what is padded is raw, and centred and whitened with the rest.
    """

    layout: Layout
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]

    def __call__(self, h: Tensor, W: Tensor, b: Tensor | None) -> Tensor:  # noqa: D102
        dims, groups = len(self.stride), self.layout.groups
        if not self.layout.transposed:
            convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
            return convolve(h, W, b, self.stride, self.padding, self.dilation, groups)  # type: ignore[no-any-return]
        convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
        return convolve(h, W, b, self.stride, self.padding, self.output_padding, groups, self.dilation)  # type: ignore[no-any-return]

    def whitened(self, h: Tensor, P: Tensor, c: Centre, tail: float) -> Tensor:  # noqa: D102
        x = _whitened_rows(self.layout, self.layout.rows(h, 1), P, c, tail)
        return self.layout.unrow(x).reshape(h.shape[0], *h.shape[2:], h.shape[1]).movedim(-1, 1)

    def input_gradient(self, delta: Tensor, h: Tensor, W: Tensor) -> Tensor:  # noqa: D102
        return self._backward(delta, h, W, 0)

    def weight_gradient(self, delta: Tensor, x: Tensor, W: Tensor) -> Tensor:  # noqa: D102
        return self._backward(delta, x, W, 1)

    def bias_gradient(self, delta: Tensor) -> Tensor:  # noqa: D102
        return delta.transpose(0, 1).flatten(1).sum(1)

    def natural_bias(self, delta: Tensor, x: Tensor, nW: Tensor, c: Tensor) -> Tensor:  # noqa: D102
        return self.bias_gradient(delta) - against(self.layout.pack(nW), c, self.layout.groups).reshape(-1)

    def _backward(self, delta: Tensor, h: Tensor, W: Tensor, which: int) -> Tensor:
        layout, wanted = self.layout, [i == which for i in range(3)]
        where = self.stride, self.padding, self.dilation, layout.transposed, self.output_padding, layout.groups
        gradient: Tensor = torch.ops.aten.convolution_backward(delta, h, W, None, *where, wanted)[which]
        return gradient


Operation = Linear | Convolution


def _whitened_rows(layout: Layout, rows: Tensor, P: Tensor, c: Centre, tail: float) -> Tensor:
    """The product (rows - c) P for rows (matrices, n, in)."""
    before, after = c
    x = times_inverse(rows if before is None else rows - before.unsqueeze(1), P, tail)
    if after is not None:
        x.sub_(after.unsqueeze(1))
    return x


class _Function(torch.autograd.Function):
    """A Function with `setup_context` whose calls are cheap."""

    @classmethod
    def call(cls, *args: Any) -> Any:
        """`apply`, without its look at the signature of `forward`, which takes longer than a small layer."""
        if torch.compiler.is_compiling() or in_transform():  # which need it
            return cls.apply(*args)  # type: ignore[no-untyped-call]
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


class _Naturalize(_Function):
    """The identity on (W, b) whose backward maps their gradient to the natural one (gradient space).

    It is linear in the gradient, so sums over calls, examples, accumulation steps and workers are right,
    and what is differentiated twice is the natural gradient of the total derivative.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(W: Tensor, b: Tensor | None, *constants: Any) -> Any:
        return W.view_as(W) if b is None else (W.view_as(W), b.view_as(b))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        W, b, P, c, cP, ctx.tail, ctx.layout, ctx.switch = inputs
        ctx.save_for_backward(P, c, cP)
        ctx.save_for_forward(W, b)

    @staticmethod
    def backward(ctx: Any, gW: Tensor, gb: Tensor | None = None) -> Any:
        P, c, cP = ctx.saved_tensors
        layout: Layout = ctx.layout
        if ctx.switch.ordinary or not ctx.needs_input_grad[0]:  # where only d moves, its gradient is b's
            return gW, gb, *(None,) * 6
        bias = layout.pack_bias(gb) if gb is not None and ctx.needs_input_grad[1] else None
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or in_transform():  # nothing is overwritten there
            cP = None
        nW, nb = natural_gradient(layout.pack(gW), bias, P, c, ctx.tail, cP)
        return layout.unpack(nW, like=gW), None if nb is None else nb.reshape(-1), *(None,) * 6

    @staticmethod
    def jvp(ctx: Any, tW: Tensor | None, tb: Tensor | None, *_: Any) -> Any:
        W, b = ctx.saved_tensors
        tW = torch.zeros_like(W) if tW is None else tW.view_as(tW)
        if b is None:
            return tW
        return tW, torch.zeros_like(b) if tb is None else tb.view_as(tb)


class _NaturalizeTraced(_Naturalize):
    jvp = torch.autograd.Function.jvp  # type: ignore[assignment]  # torch.compile traces no forward-mode derivatives


def naturalize(
    W: Tensor, b: Tensor | None, whitening: Whitening, layout: Layout, switch: Switch
) -> tuple[Tensor, Tensor | None]:
    """(W, b) unchanged, with gradients that become natural on their way back."""
    w = whitening
    function = _NaturalizeTraced if torch.compiler.is_compiling() else _Naturalize
    if b is None:
        return function.call(W, None, w.P, None, None, w.tail, layout, switch), None
    return function.call(W, b, w.P, w.c, w.cP, w.tail, layout, switch)  # type: ignore[no-any-return]


class _Natural(_Function):
    """An operation whose backward whitens the activations instead of the gradient (activation space)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h: Tensor, W: Tensor, b: Tensor | None, operation: Operation, *constants: Any) -> Tensor:
        return operation(h, W, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        h, W, b, ctx.operation, P, c, cP, ctx.tail, ctx.switch = inputs
        ctx.save_for_backward(h, W, b, P, c, cP)
        ctx.save_for_forward(h, W)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Any:
        h, W, b, P, c, cP = ctx.saved_tensors
        operation: Operation = ctx.operation
        need_h, need_W, need_b = ctx.needs_input_grad[:3]
        gh = nW = nb = None
        if torch.is_grad_enabled():  # differentiated twice, W receives gradients from here, which must be natural too
            whitening = Whitening(c, math.nan, P=P, tail=ctx.tail, cP=cP)
            W, _ = naturalize(W, b, whitening, operation.layout, ctx.switch)
        if need_h:
            gh = operation.input_gradient(delta, h.to(delta.dtype), W.to(delta.dtype)).to(h.dtype)
        ordinary = ctx.switch.ordinary
        with full_precision(W):
            x, precise = h.to(W.dtype), delta.to(W.dtype)
            if need_W and not ordinary:
                centre = (None, None) if not need_b else (c, None) if cP is None else (None, cP)
                x = operation.whitened(x, P, centre, ctx.tail)
            # From inputs whitened precisely, multiplied as a plain layer's: under autocast in half precision.
            if need_W:
                nW = operation.weight_gradient(delta, x.to(delta.dtype), W.to(delta.dtype)).to(W.dtype)
            if need_b and nW is not None and c is not None and not ordinary:
                nb = operation.natural_bias(precise, x, nW, c)
            elif need_b:
                nb = operation.bias_gradient(precise)
        return gh, nW, nb, *(None,) * 6

    @staticmethod
    def jvp(ctx: Any, th: Tensor | None, tW: Tensor | None, tb: Tensor | None, *_: Any) -> Tensor:
        h, W = ctx.saved_tensors
        operation: Operation = ctx.operation
        tangent = operation(h, torch.zeros_like(W) if tW is None else tW, tb)
        return tangent if th is None else tangent + operation(th, W, None)


class _NaturalTraced(_Natural):
    jvp = torch.autograd.Function.jvp  # type: ignore[assignment]


CROSSOVER = {"linear": 1.1, "convolution": 0.4}  # measured by `prong bench spaces`; by counting products it is 1


def activation_space_is_cheaper(layout: Layout, positions: int) -> bool:
    """Whether whitening the inputs at so many positions costs less than preconditioning the weight's gradient."""
    kind = "linear" if len(layout.shape) == 2 else "convolution"
    return positions < CROSSOVER[kind] * layout.outputs * layout.taps


def natural(
    operation: Operation, h: Tensor, W: Tensor, b: Tensor | None, whitening: Whitening, switch: Switch
) -> Tensor:
    """`operation(h, W, b)` with natural gradients, computed in activation space.

    Given `c P`, it is subtracted from h P; else c from h, which takes a copy of h.
    """
    w = whitening
    function = _NaturalTraced if torch.compiler.is_compiling() else _Natural
    return function.call(h, W, b, operation, w.P, w.c, w.cP, w.tail, switch)  # type: ignore[no-any-return]
