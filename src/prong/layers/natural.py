"""Natural gradients inside autograd: the forward is the plain layer's, the backward is preconditioned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prong.layers.layout import Layout
from prong.precision import full_precision
from prong.projection import natural_gradient


@dataclass
class Switch:
    """Whether backward passes through a layer give ordinary gradients; asked when they run."""

    ordinary: bool = False


class _Naturalize(torch.autograd.Function):
    """The identity on (W, b) whose backward maps their gradient to the natural one (gradient space).

    It is linear in the gradient, so sums over calls, examples, accumulation steps and workers are right,
    and what is differentiated twice is the natural gradient of the total derivative.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(W: Tensor, b: Tensor | None, P: Tensor, c: Tensor | None, layout: Layout, switch: Switch) -> Any:
        return W.view_as(W) if b is None else (W.view_as(W), b.view_as(b))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        W, b, P, c, ctx.layout, ctx.switch = inputs
        ctx.outputs = None if b is None else b.shape[0]
        ctx.save_for_backward(P, c)
        ctx.save_for_forward(W, b)
        ctx.set_materialize_grads(False)  # or a gradient that nobody sent would cost a product with zeros

    @staticmethod
    def backward(ctx: Any, gW: Tensor | None, gb: Tensor | None = None) -> Any:
        P, c = ctx.saved_tensors
        layout: Layout = ctx.layout
        if gW is None and gb is not None:
            gW = gb.new_zeros(layout.shape)
        if gb is None and gW is not None and ctx.outputs is not None:
            gb = gW.new_zeros(ctx.outputs)
        if gW is None or not ctx.needs_input_grad[0] or ctx.switch.ordinary:
            # With W frozen, only d moves, and its gradient is b's.
            return gW, gb, None, None, None, None
        bias = layout.pack_bias(gb) if gb is not None and ctx.needs_input_grad[1] else None
        nW, nb = natural_gradient(layout.pack(gW), bias, P, c)
        return layout.unpack(nW), None if nb is None else nb.reshape(-1), None, None, None, None


class _NaturalizeForwardMode(_Naturalize):
    """With forward-mode derivatives, which torch.compile does not trace."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, tW: Tensor | None, tb: Tensor | None, *_: Any) -> Any:
        W, b = ctx.saved_tensors
        tW = torch.zeros_like(W) if tW is None else tW.view_as(tW)
        if b is None:
            return tW
        return tW, torch.zeros_like(b) if tb is None else tb.view_as(tb)


def naturalize(
    W: Tensor, b: Tensor | None, P: Tensor, c: Tensor | None, layout: Layout, switch: Switch
) -> tuple[Tensor, Tensor | None]:
    """(W, b) unchanged, with gradients that become natural on their way back."""
    function = _Naturalize if torch.compiler.is_compiling() else _NaturalizeForwardMode
    if b is None:
        return function.apply(W, None, P, None, layout, switch), None  # type: ignore[no-untyped-call]
    return function.apply(W, b, P, c, layout, switch)  # type: ignore[no-untyped-call, no-any-return]


class _NaturalLinear(torch.autograd.Function):
    """`F.linear` whose backward whitens the activations instead of the gradient (activation space).

        nW = delta^T ((h - c) P)        nb = sum delta - nW c

    costs rows x in^2 where gradient space costs out x in^2; the result is the same.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        h: Tensor, W: Tensor, b: Tensor | None, again: Tensor, P: Tensor, c: Tensor | None, switch: Switch
    ) -> Tensor:
        return F.linear(h, W, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        h, W, _, again, P, c, ctx.switch = inputs
        ctx.save_for_backward(h, again, P, c)
        ctx.save_for_forward(h, W)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Any:
        h, W, P, c = ctx.saved_tensors
        need_h, need_W, need_b = ctx.needs_input_grad[:3]
        gh = nW = nb = None
        if need_h:
            gh = (delta @ W.to(delta.dtype)).to(h.dtype)
        with full_precision(W):
            rows = delta.reshape(-1, delta.shape[-1]).to(W.dtype)  # (rows, out)
            nb = rows.sum(0) if need_b else None
            if need_W:
                inputs = h.reshape(-1, h.shape[-1]).to(W.dtype)  # (rows, in)
                centre = c[0] if c is not None and nb is not None and not ctx.switch.ordinary else None
                if centre is not None:
                    inputs = inputs - centre
                nW = rows.mT @ (inputs if ctx.switch.ordinary else inputs @ P[0])
                if centre is not None and nb is not None:
                    nb = nb - nW @ centre
        return gh, nW, nb, None, None, None, None


class _NaturalLinearForwardMode(_NaturalLinear):
    """With forward-mode derivatives, which torch.compile does not trace."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, th: Tensor | None, tW: Tensor | None, tb: Tensor | None, *_: Any) -> Tensor:
        h, W = ctx.saved_tensors
        tangent = h.new_zeros(()) if th is None else F.linear(th, W)
        if tW is not None:
            tangent = tangent + F.linear(h, tW)
        return tangent if tb is None else tangent + tb


def natural_linear(h: Tensor, W: Tensor, b: Tensor | None, P: Tensor, c: Tensor | None, switch: Switch) -> Tensor:
    """`F.linear(h, W, b)` with natural gradients, by whichever order of multiplication is cheaper."""
    if h.numel() // max(h.shape[-1], 1) < W.shape[0]:
        # Differentiated twice, W receives gradients through the backward too; `again` makes those natural.
        again = naturalize(W, b, P, c, Layout(tuple(W.shape)), switch)[0]
        function = _NaturalLinear if torch.compiler.is_compiling() else _NaturalLinearForwardMode
        return function.apply(h, W, b, again, P, c, switch)  # type: ignore[no-untyped-call, no-any-return]
    return F.linear(h, *naturalize(W, b, P, c, Layout(tuple(W.shape)), switch))
