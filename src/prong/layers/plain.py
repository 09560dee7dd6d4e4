"""Layers that are left as they are, while their optimizer steps in whitened coordinates (the materialised form).

The model keeps its modules, parameters and forward passes. Before each step of the optimizer a layer's gradients are
exchanged for those in whitened coordinates, and its parameters for V and d, which are held here; after it W = V U and
b = d - W c are written back:

    gV = (gW - gb c^T) U^T        gd = gb

An optimizer that is linear in the gradient (SGD) needs less: its step on V and d is the step on W and b with

    nW = (gW - gb c^T) P          nb = gb - nW c          P = U^T U
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from prong.core.coordinates import less_outer, natural_gradient, times, to_canonical
from prong.core.whitening import Whitening
from prong.layers.attention import AttentionKind, TappedMultiheadAttention
from prong.layers.base import Kind, Site
from prong.layers.conv import ConvKind, ConvTransposeKind
from prong.layers.layout import Layout
from prong.options import Basis, Materialised


class Plain(Kind):
    """A torch layer seen as one that could be whitened; the layer itself is not touched.

    Args:
        module: the layer.
        options: how its coordinates are chosen.
        natural: whether gradients are made natural instead of parameters exchanged for V and d.
        thin: with natural gradients, whether directions with less variance than the damping count as without.
    """

    form = "materialised"

    def __init__(
        self, module: nn.Module, options: Materialised | None = None, natural: bool = False, thin: bool = False
    ) -> None:
        self.module = module
        self.options = options or Materialised()
        self.natural, self.thin = natural, thin
        self.sites = self.make_sites(module)
        self.max_positions = None
        self.owner = None
        self._held: dict[str, Tensor] = {}
        self._kept: dict[Tensor, tuple[Tensor, Tensor | None]] = {}  # data and gradients of parameters, during a step

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    @property
    def basis(self) -> Basis | None:  # noqa: D102
        assert isinstance(self.options, Materialised)
        return None if self.natural else self.options.basis

    @property
    def cutoff(self) -> float:  # noqa: D102
        return 1.0 if self.thin and self.natural else 0.0

    def stored(self, site: Site, whitening: Whitening) -> Whitening:
        """As of any layer; U^-1 is not kept where it is U, scaled."""
        kept = super().stored(site, whitening)
        return replace(kept, U_inv=None) if self.basis == "pca" else kept

    def coordinates(self, site: Site) -> tuple[Tensor, Tensor | None] | None:  # noqa: D102
        if self.natural:
            return None
        for name in (site.weight, site.bias):
            if name is not None and name not in self._held:
                parameter = self.parameter(name)
                assert parameter is not None
                self._held[name] = parameter.detach().clone(memory_format=torch.contiguous_format)
        return self._held[site.weight], None if site.bias is None else self._held[site.bias]

    def release(self) -> None:
        """Forget V and d: W and b are what they stand for."""
        self._held = {}

    def see(self, args: tuple[Any, ...], kwargs: dict[str, Any], sharing: Sharing) -> None:
        """Show the inputs of a call to whoever listens."""
        h = args[0] if args else kwargs.get("input", next(iter(kwargs.values()), None))
        if isinstance(h, Tensor):
            (site,) = self.sites
            self.observe(site, h, counted=sharing.joins(site, h))

    @torch.no_grad()
    def enter(self) -> None:
        """Before a step: exchange gradients and, where they are held, parameters for those in whitened coordinates."""
        new: dict[Tensor, Tensor] = {}
        for site in self.sites:
            weight, bias = self.pair(site)
            if site.whitening is None or weight.grad is None:
                continue
            exchanged = self._exchanged(site, weight.grad, None if bias is None else bias.grad)
            for parameter, gradient in zip((weight, bias), exchanged, strict=True):
                if parameter is None or gradient is None:
                    continue
                if site.rows is None:
                    new[parameter] = gradient
                else:
                    assert parameter.grad is not None
                    site.write(new.setdefault(parameter, parameter.grad.clone()), gradient)
        for parameter, gradient in new.items():
            self._kept[parameter] = parameter.data, parameter.grad
            parameter.grad = gradient
        for parameter, value in self._values():
            if parameter in new:
                parameter.data = value

    @torch.no_grad()
    def leave(self) -> None:
        """After a step: write W = V U and b = d - W c, and put gradients back."""
        kept, self._kept = self._kept, {}
        for parameter, (data, gradient) in kept.items():
            parameter.data, parameter.grad = data, gradient
        for site in [] if self.natural else self.sites:
            weight, bias = self.pair(site)
            if weight in kept:
                self._materialise(site, weight.data, None if bias is None or bias not in kept else bias.data)

    def _values(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters with the V or d that stands for each."""
        pairs = [(self.pair(site), self.coordinates(site)) for site in self.sites]
        both = [zip(mine, held, strict=True) for mine, held in pairs if held is not None]
        return [(p, value) for pair in both for p, value in pair if p is not None and value is not None]

    def _exchanged(self, site: Site, gW: Tensor, gb: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The gradients of this site's rows in whitened coordinates, or the natural ones."""
        w = site.whitening
        assert w is not None
        if self._is_matrix(site) and not self.natural:
            assert w.U is not None
            G = gW if w.c is None or gb is None else torch.addr(gW, gb, w.c[0], alpha=-1)
            return G @ w.U[0].mT, gb
        packed, packed_b = site.packed(gW, gb)
        if self.natural:
            assert w.P is not None
            nW, nb = natural_gradient(packed, packed_b, w.P, w.c, w.tail, w.cP)
            return site.layout.unpack(nW, like=site.part(gW)), None if nb is None else nb.reshape(-1)
        assert w.U is not None
        G = packed if w.c is None or packed_b is None else less_outer(packed, packed_b, w.c)
        return site.unpacked(times(G, w.U.mT), packed_b)

    def _materialise(self, site: Site, W: Tensor, b: Tensor | None) -> None:
        """Write a site's rows of W = V U and b = d - W c."""
        held, w = self.coordinates(site), site.whitening
        assert held is not None
        V, d = held[0], None if b is None else held[1]
        if w is not None and self._is_matrix(site):
            assert w.U is not None
            torch.mm(V, w.U[0], out=W)
            if b is not None and d is not None:
                b.copy_(d if w.c is None else torch.addmv(d, W, w.c[0], alpha=-1))
            return
        values = site.packed(V, d)
        if w is not None:
            values = to_canonical(*values, w)
        for target, value in zip((W, b), site.unpacked(*values), strict=True):
            if target is not None and value is not None:
                site.write(target, value)

    @staticmethod
    def _is_matrix(site: Site) -> bool:
        layout = site.layout
        return site.rows is None and len(layout.shape) == 2 and layout.matrices == 1 and not layout.transposed


class PlainLinear(Plain):
    """nn.Linear."""

    plain = nn.Linear


class PlainOutProjection(PlainLinear):
    """Attention's output projection, which attention never calls: it shows its inputs itself."""

    plain = NonDynamicallyQuantizableLinear


class PlainTransposedLinear(Plain):
    """A linear layer whose weight is stored as (in, out): `transformers.pytorch_utils.Conv1D`."""

    @staticmethod
    def make_sites(module: Any) -> tuple[Site, ...]:  # noqa: D102
        return (Site("weight", "bias", Layout(tuple(module.weight.shape), transposed=True)),)


class PlainAttention(Plain, AttentionKind):
    """nn.MultiheadAttention."""

    plain = nn.MultiheadAttention

    def see(self, args: tuple[Any, ...], kwargs: dict[str, Any], sharing: Sharing) -> None:  # noqa: D102
        given = [*args[:3], *(kwargs[name] for name in ("query", "key", "value") if name in kwargs)]
        if len(given) == 3 and all(isinstance(h, Tensor) for h in given):
            self.observe_inputs((given[0], given[1], given[2]))


def _plain_kind(kind: type[Kind], torch_layer: type[nn.Module]) -> type[Plain]:
    return type(f"Plain{torch_layer.__name__}", (Plain, kind), {"plain": torch_layer, "__doc__": f"{torch_layer}."})


PLAIN: dict[type[nn.Module], type[Plain]] = {
    nn.Linear: PlainLinear,
    NonDynamicallyQuantizableLinear: PlainOutProjection,
    nn.MultiheadAttention: PlainAttention,
    TappedMultiheadAttention: PlainAttention,
    **{layer: _plain_kind(ConvKind, layer) for layer in (nn.Conv1d, nn.Conv2d, nn.Conv3d)},
    **{
        layer: _plain_kind(ConvTransposeKind, layer)
        for layer in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    },
}


def plain_kind(module: nn.Module) -> type[Plain] | None:
    """The view for a layer, or None if it is of no kind that is known."""
    name = f"{type(module).__module__}.{type(module).__name__}"
    return PlainTransposedLinear if name == "transformers.pytorch_utils.Conv1D" else PLAIN.get(type(module))


class Sharing:
    """Which sites are fed by one tensor (queries, keys and values as three layers): they share a window."""

    def __init__(self) -> None:
        self._last: weakref.ref[Tensor] | None = None
        self._leader: Site | None = None
        self._followers: set[Site] = set()

    def joins(self, site: Site, h: Tensor) -> bool:
        """Whether the site's window is one that has counted this tensor already."""
        leader = self._leader if self._last is not None and self._last() is h else None
        if leader is None or leader is site:
            self._last, self._leader = weakref.ref(h), site
            leader = None
        if site.window is None:
            return False
        if leader is not None and site.window is not leader.window and leader.window is not None:
            if site.window.empty and leader.layout.features == site.layout.features:
                site.window = leader.window
                self._followers.add(site)
        if leader is not None and site.window is leader.window:
            return True
        if site in self._followers:  # it has followed another, but no longer
            self._followers.discard(site)
            site.window = copy.deepcopy(site.window)
        return False


class Tap:
    """A plain layer's forward pre-hook; in a copy of the model it does nothing."""

    def __init__(self, layer: Plain | None = None, sharing: Sharing | None = None) -> None:
        self.layer, self._sharing = layer, sharing

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Show what the layer is called with to whoever listens."""
        if self.layer is not None and any(site.listening for site in self.layer.sites):
            self._look(args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # statistics are Python objects
    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self.layer is not None and self._sharing is not None
        self.layer.see(args, kwargs, self._sharing)

    def __reduce__(self) -> tuple[type[Tap], tuple[()]]:
        return Tap, ()


def tap_of(module: nn.Module) -> Tap | None:
    """The tap at a module, if it has one."""
    return next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Tap)), None)


def remove_taps_(modules: Iterable[nn.Module]) -> None:
    """Leave these modules as torch made them."""
    for module in modules:
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, Tap):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
        if type(module) is TappedMultiheadAttention:
            module.__class__ = nn.MultiheadAttention
            del module.__dict__["tap"]
