"""Layers that are left as they are, while their optimizer steps in whitened coordinates (the materialised form).

Before each step of the optimizer a layer's gradients are exchanged for those in whitened coordinates,

    gV = (gW - gb c^T) U^T        gd = gb

and its parameters for V and d, which are held here; after it W = V U and b = d - W c are written back. For an optimizer
that is linear in the gradient (SGD), natural gradients of W and b give the same step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from prong.core.whitening import Whitening, less_outer, natural_gradient, times, to_canonical, to_whitened
from prong.distributed.sharding import is_sharded, local, plain_class, rows_of, spread_like
from prong.layers.attention import AttentionKind, TappedMultiheadAttention
from prong.layers.conv import CONVOLUTIONS, ConvKind
from prong.layers.site import Kind, Layout, Site
from prong.layers.taps import Sharing
from prong.options import Implicit, Materialised

OWN = 200.0  # what else an update takes for every weight, as operations of a product: passes over memory, about
LEAST = 16  # inputs in a block, or directions told apart; fewer cost as much


@dataclass(frozen=True)
class Budget:
    """A share of the time of an update, and the largest block for which there is memory.

    A layer's own update takes 6 operations of every weight for every row of inputs, and `OWN`. With blocks of b inputs,
    a natural gradient takes 2 b, or 4 k if k directions are told apart; where V is held it is 4 b.
    """

    time: float
    largest: int

    def chosen(self, layout: Layout, rows: float, natural: bool) -> tuple[int | None, int | None]:
        """For a layer, the size of blocks, and the number of directions in each; None: all."""
        affordable = int(self.time * (6 * rows + OWN) / 4)
        if not natural:
            return self._divided(layout, min(self.largest, affordable)), None
        block = self._divided(layout, self.largest)
        rank = max(LEAST, affordable)
        return block, rank if 2 * rank < (block or layout.inputs) else None

    def _divided(self, layout: Layout, largest: int) -> int | None:
        """Blocks of equal size, at most so large."""
        largest = max(LEAST, largest)
        return None if largest >= layout.inputs else math.ceil(layout.inputs / math.ceil(layout.inputs / largest))


def largest_block(layouts: Iterable[Layout], entries: float) -> int:
    """The largest block with which the matrices of these layers have at most so many entries together."""
    sizes = [(layout.channels, layout.inputs) for layout in layouts]
    block = max((inputs for _, inputs in sizes), default=LEAST)
    while block > LEAST and sum(channels * min(inputs, block) for channels, inputs in sizes) > entries:
        block = max(LEAST, block // 2)
    return block


class Plain(Kind):
    """A torch layer seen as one that could be whitened; the layer itself is not touched.

    With `Implicit`, gradients are made natural instead of parameters exchanged for V and d. With a budget, blocks are
    chosen by it.
    """

    def __init__(self, module: nn.Module, options: Materialised | Implicit, budget: Budget | None = None) -> None:
        self.module, self.options, self.budget = module, options, budget
        self.measured = False  # whether steps are to be measured that natural gradients do not tell
        self.settled = budget is None  # whether blocks are chosen, and by all workers alike
        self._spent: Budget | None = None  # by which the blocks were chosen
        sites = self.make_sites(module)
        weight = self._parameter(sites[0].weight)
        self.sharded = is_sharded(weight)
        self.sites = tuple(site.restricted(rows_of(weight)) for site in sites) if self.sharded else sites
        self.sharing: Sharing | None = None
        self.max_positions = None
        self.owner = None
        self._held: dict[str, Tensor] = {}
        self._kept: dict[Tensor, tuple[Tensor, Tensor | None]] = {}  # data and gradients of parameters, during a step
        # What parameters were when V and d were last written to them: version, if it is known, and a sample of entries.
        self._written: dict[str, tuple[int | None, Tensor]] = {}
        self._place = weight.device, weight.dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def parameter(self, name: str | None) -> Tensor | None:  # noqa: D102
        return None if name is None else self.module._parameters[name]

    @property
    def plain(self) -> type[nn.Module]:  # type: ignore[override]
        """The layer's type."""
        kind = plain_class(self.module)
        return nn.MultiheadAttention if kind is TappedMultiheadAttention else kind

    @property
    def form(self) -> str:  # type: ignore[override]
        """By what name users know it."""
        return self.options.name

    @property
    def natural(self) -> bool:
        """Whether gradients are made natural, and nobody holds V and d."""
        return isinstance(self.options, Implicit)

    def stored(self, site: Site, whitening: Whitening) -> Whitening:
        """As of any layer, but for what is not needed: F, and a U^-1 that is U, scaled."""
        kept = super().stored(site, whitening)
        if not self.measured:
            kept = replace(kept, F=None)
        return replace(kept, U_inv=None) if self.basis == "pca" else kept

    def coordinates(self, site: Site) -> tuple[Tensor, Tensor | None] | None:  # noqa: D102
        if self.natural:
            return None
        for name in filter(None, (site.weight, site.bias)):
            if name not in self._held:
                whole = self._local(self._parameter(name).detach())
                self._held[name] = whole.clone(memory_format=torch.contiguous_format)
                self._mark([name])
            elif site.whitening is None:
                site.write(self._held[name], site.part(self._local(self._parameter(name).detach())))
        return self._held[site.weight], None if site.bias is None else self._held[site.bias]

    def follow(self) -> None:
        """Be where the layer is, and in its precision: `model.to(...)` knows of its parameters alone."""
        weight = self._parameter(self.sites[0].weight)
        if self._place == (weight.device, weight.dtype):
            return
        self._place = weight.device, weight.dtype
        self.move()
        self._held = {name: x.to(*self._place) for name, x in self._held.items()}
        self._written = {name: (version, sample.to(*self._place)) for name, (version, sample) in self._written.items()}

    def observe(self, site: Site, h: Tensor, counted: bool = False) -> None:  # noqa: D102
        if site.listening:
            self.follow()
        super().observe(site, h, counted)

    @torch.no_grad()
    def catch_up(self) -> None:
        """Where somebody has changed W or b since they were written (a checkpoint loaded, say), let V and d follow."""
        names = {name for name, mark in self._written.items() if not _unchanged([(self._parameter(name), mark)])}
        for site in self.sites:
            if site.whitening is None or not {site.weight, site.bias} & names:
                continue
            weight, bias = self.pair(site)
            W, b = site.packed(self._local(weight), None if bias is None else self._local(bias))
            site.write_both(self.coordinates(site) or (), *to_whitened(W, b, site.whitening))
        self._mark(names)

    def written(self) -> dict[str, Tensor]:
        """By what W and b, for which V and d stand, are known again once both are loaded."""
        self.follow()
        self.catch_up()
        return {name: sample.clone() for name, (_, sample) in self._written.items()}

    def believe(self, written: dict[str, Tensor]) -> None:
        """V and d were loaded; they stand for the W and b that `written` was of, whenever those are loaded."""
        self._written |= {name: (None, sample) for name, sample in written.items()}

    def _mark(self, names: Iterable[str]) -> None:
        for name in names:
            parameter = self._parameter(name)
            self._written[name] = parameter._version, _sample(parameter).clone()

    def _parameter(self, name: str) -> Tensor:
        parameter = self.module._parameters[name]
        assert parameter is not None
        return parameter

    def _local(self, tensor: Tensor) -> Tensor:
        """What this worker has of it."""
        return local(tensor) if self.sharded else tensor

    def release(self) -> None:
        """Forget V and d: W and b are what they stand for."""
        self.drop_step()
        self._held, self._written = {}, {}

    def see(self, args: tuple[Any, ...], kwargs: dict[str, Any], sharing: Sharing) -> None:
        """Show the inputs of a call to whoever listens."""
        h = args[0] if args else kwargs.get("input", next(iter(kwargs.values()), None))
        if isinstance(h, Tensor):
            (site,) = self.sites
            self.plan(h)
            self.observe(site, h, counted=sharing.joins(site, h))

    def plan(self, *inputs: Tensor) -> None:
        """At the first batch, which tells what an update costs: choose blocks that the budget allows."""
        watched = any(site.window is not None and not site.window.training_only for site in self.sites)
        if self.budget is not None and (self.training or watched):
            self._spent = self.budget
            layouts, rows = [site.layout for site in self.sites], map(self.rows, inputs)
            self.divide(map(self.budget.chosen, layouts, rows, [self.natural] * len(layouts)))

    def divide(self, sizes: Iterable[tuple[int | None, int | None]]) -> None:
        """Whiten in blocks of these sizes from now on, and tell so many directions apart in each; None: all."""
        self.budget = None
        for site, (block, rank) in zip(self.sites, sizes, strict=True):
            site.rank = rank
            site.divide(block, self.pair(site)[0])

    def plan_again(self) -> None:
        """The forward whose batch told what an update costs has failed: let another one tell."""
        if self._spent is not None:
            self.divide([(None, None)] * len(self.sites))
            self.budget, self._spent, self.settled = self._spent, None, False

    def settle(self, sizes: Iterable[tuple[int | None, int | None]]) -> None:
        """The same, once all workers have agreed on it."""
        self.divide(sizes)
        self.settled = True

    def rows(self, h: Tensor) -> float:
        """At how many positions the weight meets inputs, in a call with this."""
        return h.numel() / max(h.shape[-1], 1)

    @torch.no_grad()
    def enter(self) -> None:
        """Before a step: exchange gradients and, where they are held, parameters for those in whitened coordinates."""
        self.follow()
        new: dict[Tensor, Tensor] = {}
        for site in self.sites:
            weight, bias = self.pair(site)
            if site.whitening is None or weight.grad is None:
                continue
            gb = None if bias is None or bias.grad is None else self._local(bias.grad)
            exchanged = self._exchanged(site, self._local(weight.grad), gb)
            for parameter, gradient in zip((weight, bias), exchanged, strict=True):
                if parameter is None or gradient is None:
                    continue
                gradient = gradient.to(parameter.dtype)
                if site.rows is None:
                    new[parameter] = spread_like(gradient, parameter) if self.sharded else gradient
                else:
                    assert parameter.grad is not None
                    site.write(self._local(new.setdefault(parameter, parameter.grad.clone())), gradient)
        for parameter, gradient in new.items():
            data = local(parameter).clone() if self._written_over else parameter.data
            self._kept[parameter] = data, parameter.grad
            parameter.grad = gradient
        for site in self.sites:
            for parameter, value in zip(self.pair(site), self.coordinates(site) or (), strict=False):
                if parameter in new and value is not None:
                    self._put(parameter, value)

    @torch.no_grad()
    def leave(self) -> None:
        """After a step: write W = V U and b = d - W c, and put gradients back."""
        for name, value in self._held.items() if self._written_over else ():
            if self._parameter(name) in self._kept:
                value.copy_(local(self._parameter(name)))
        kept = self.drop_step()
        if not kept or self.natural:
            return
        for site in self.sites:
            weight, bias = self.pair(site)
            if weight in kept:
                moved = None if bias is None or bias not in kept else self._local(bias)
                self._materialise(site, self._local(weight), moved)
                if moved is None and bias is not None and site.bias is not None and site.whitening is not None:
                    # The weight has moved and the bias has not: let d = b + W c follow.
                    _, d = to_whitened(*site.packed(self._local(weight), self._local(bias)), site.whitening)
                    assert d is not None
                    site.write(self._held[site.bias], d.reshape(-1))
        self._mark(self._held)

    @torch.no_grad()
    def drop_step(self) -> dict[Tensor, Any]:
        """Give parameters and gradients back as they were before the step."""
        kept, self._kept = self._kept, {}
        for parameter, (data, gradient) in kept.items():
            parameter.grad = gradient
            self._put(parameter, data)
        return kept

    @property
    def _written_over(self) -> bool:
        """Whether the data of parameters cannot be exchanged for others, as they are sharded."""
        return self.sharded and not self.natural

    def _put(self, parameter: Tensor, value: Tensor) -> None:
        if self._written_over:
            local(parameter).copy_(value)
        else:
            parameter.data = value

    def ordinary(self, parameter: Tensor) -> Tensor | None:
        """During a step: the gradient as the backward pass has given it."""
        return self._kept[parameter][1] if parameter in self._kept else parameter.grad

    def before_step(self, site: Site) -> Tensor:
        """During a step: V as it was."""
        weight, _ = self.pair(site)
        assert site.whitening is not None
        W = self._local(self._kept[weight][0])
        V, _ = to_whitened(*site.packed(W, None), site.whitening)
        return site.unpacked(V, None)[0]

    def _exchanged(self, site: Site, gW: Tensor, gb: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The gradients of this site's rows in whitened coordinates, or the natural ones."""
        w, matrix = site.whitening, self._is_matrix(site)
        assert w is not None
        if matrix and w.U is not None and w.U.dtype == gW.dtype:
            G = gW if w.c is None or gb is None else torch.addr(gW, gb, w.c[0], alpha=-1)
            return G @ w.U[0].mT, gb
        packed, packed_b = (gW[None, :, None], None if gb is None else gb[None]) if matrix else site.packed(gW, gb)
        if w.U is None:
            assert w.P is not None
            nW, nb = natural_gradient(packed, packed_b, w.P, w.c, w.tail, w.cP)
            nb = None if nb is None else nb.reshape(-1)
            return nW.view(gW.shape) if matrix else site.layout.unpack(nW, like=site.part(gW)), nb
        G = packed if w.c is None or packed_b is None else less_outer(packed, packed_b, w.c)
        return site.unpacked(times(G, w.U.mT), packed_b)

    def _materialise(self, site: Site, W: Tensor, b: Tensor | None) -> None:
        """Write a site's rows of W = V U and b = d - W c."""
        w = site.whitening
        V, d = self._held[site.weight], None if b is None or site.bias is None else self._held[site.bias]
        if w is not None and w.U is not None and w.U.dtype == W.dtype and self._is_matrix(site):
            torch.mm(V, w.U[0], out=W)
            if b is not None and d is not None:
                b.copy_(d if w.c is None else torch.addmv(d, W, w.c[0], alpha=-1))
            return
        values = site.packed(V, d)
        site.write_both((W, b), *(values if w is None else to_canonical(*values, w)))

    @staticmethod
    def _is_matrix(site: Site) -> bool:
        layout = site.layout
        return site.rows is None and len(layout.shape) == 2 and layout.matrices == 1 and not layout.transposed


SAMPLE = 64  # entries of a parameter by which it is known again


def _sample(parameter: Tensor) -> Tensor:
    part = local(parameter.detach())
    where: Any = (slice(None, None, max(1, part.shape[0] // SAMPLE)), *(0,) * (part.dim() - 1))
    return part[where]


@torch.no_grad()
def catch_up(views: Iterable[Plain]) -> None:
    """Let V and d of all views follow their W and b; where nobody has changed any, all are compared at once."""
    views = [view for view in views if view._written]
    for view in views:
        view.follow()
    if not _unchanged([(view._parameter(name), mark) for view in views for name, mark in view._written.items()]):
        for view in views:
            view.catch_up()


def _unchanged(marks: list[tuple[Tensor, tuple[int | None, Tensor]]]) -> bool:
    """Whether versions and samples of parameters are as they were; the host waits once."""
    if any(version not in (None, parameter._version) for parameter, (version, _) in marks):
        return False
    samples = [(_sample(parameter), before) for parameter, (_, before) in marks]
    kinds = {(now.device, now.dtype) for now, _ in samples}
    return all(
        torch.equal(
            *(torch.cat([pair[i] for pair in samples if (pair[i].device, pair[i].dtype) == kind]) for i in (0, 1))
        )
        for kind in kinds
    )


class PlainOutProjection(Plain):
    """Attention's output projection, which attention never calls: it shows its inputs itself."""


class PlainTransposedLinear(Plain):
    """A linear layer whose weight is stored as (in, out): `transformers.pytorch_utils.Conv1D`."""

    @staticmethod
    def make_sites(module: Any) -> tuple[Site, ...]:  # noqa: D102
        return (Site("weight", "bias", Layout(tuple(module.weight.shape), transposed=True)),)


class PlainAttention(Plain, AttentionKind):
    """nn.MultiheadAttention."""

    def see(self, args: tuple[Any, ...], kwargs: dict[str, Any], sharing: Sharing) -> None:  # noqa: D102
        given = [*args[:3], *(kwargs[name] for name in ("query", "key", "value") if name in kwargs)]
        if len(given) == 3 and all(isinstance(h, Tensor) for h in given):
            self.plan(*given)
            self.observe_inputs((given[0], given[1], given[2]))


class PlainConv(Plain, ConvKind):
    """Convolutions, transposed ones too."""

    stride: tuple[int, ...]

    def rows(self, h: Tensor) -> float:  # noqa: D102
        (site,) = self.sites
        per_map = math.prod(h.shape[-len(self.kernel_size) :])
        return self.maps(h) * per_map / (1 if site.layout.transposed else math.prod(self.stride))


PLAIN: dict[type[nn.Module], type[Plain]] = {
    nn.Linear: Plain,
    NonDynamicallyQuantizableLinear: PlainOutProjection,
    nn.MultiheadAttention: PlainAttention,
    TappedMultiheadAttention: PlainAttention,
    **dict.fromkeys(CONVOLUTIONS, PlainConv),
}


def plain_kind(module: nn.Module) -> type[Plain] | None:
    """The view for a layer, or None if it is of no kind that is known."""
    kind = plain_class(module)
    if f"{kind.__module__}.{kind.__name__}" == "transformers.pytorch_utils.Conv1D":
        return PlainTransposedLinear
    return PLAIN.get(kind if kind is not nn.MultiheadAttention else type(module))  # whose class is to be changed
