"""What a layer gains by being whitened, whatever its kind; and what its forms add."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prong.core.coordinates import Pair, to_canonical, to_whitened
from prong.core.moments import Moments, Window
from prong.core.precision import accumulation_dtype, is_half
from prong.core.whitening import Whitening, storage_for
from prong.layers.dropping import Dropping, with_dropped_directions
from prong.layers.layout import Layout
from prong.layers.natural import Operation, Switch, in_transform, natural, naturalize
from prong.options import Basis, Form, Storage
from prong.options import Explicit as ExplicitOptions
from prong.options import Implicit as ImplicitOptions


def in_backward() -> bool:
    """Whether a backward pass is running (activation checkpointing runs forwards inside it)."""
    return bool(torch._C._current_graph_task_id() != -1)


class Owner(Protocol):
    """Who refreshes a layer while an optimizer trains it."""

    optimizer: Optimizer
    state_on_refresh: Any
    workers: Any
    sites: dict[str, tuple[Kind, Site]]
    errors: list[FloatingPointError] | None

    def release(self) -> None:
        """Give the layer up, with parameters and optimizer state in canonical coordinates."""

    def undo(self) -> None:
        """Take back what layers have gathered since the last update: the forward under way has failed."""

    def finish(self) -> None:
        """Make the refresh that is under way in another thread, if there is one, now."""

    def renewed(self, sites: Iterable[Site]) -> None:
        """Forget what was measured of these sites in other coordinates than they have now."""


class OnFailure:
    """The model's forward hook while statistics are gathered; in a copy of the model it does nothing."""

    def __init__(self, owner: Owner | None = None) -> None:
        self._owner = owner

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        """Tell the owner, if this is called because of an exception."""
        failed = output is None and sys.exc_info()[0] is not None  # torch calls it from its `except`
        if failed and self._owner is not None and not in_backward():  # checkpointing stops forwards by exceptions
            self._owner.undo()

    def __reduce__(self) -> tuple[type[OnFailure], tuple[()]]:
        return OnFailure, ()


class Inputs(NamedTuple):
    """A batch of inputs as samples: rows (matrices, rows, in), rows of zeros that padding adds, examples."""

    rows: Tensor
    zeros: float
    examples: int


class Tap(Protocol):
    """Who listens to the whitened inputs of a site."""

    listening: bool

    def see(self, inputs: Inputs, whitening: Whitening) -> None:
        """Take notice of a batch."""


class OutputTap(Protocol):
    """Who listens to the gradients of a site's outputs."""

    def watch(self, z: Tensor, groups: int, channels_at: int, examples_at: int = 0) -> Tensor:
        """See to it that the gradient of z arrives; what others are to go on with in its place."""


@dataclass(eq=False)
class Site:
    """One place where a weight meets its inputs. Most layers have one; attention's input projection has three.

    Attributes:
        weight: the name of the plain layer's parameter that holds the weight.
        bias: the name of its bias, or None.
        layout: how the weight, or this site's rows of it, is stored.
        rows: the rows of weight and bias that belong to this site (None: all).
        spread: where workers hold rows of the weight each, the layout of all of them; the others are of this worker's.
        name: what to add to the layer's name, where a layer has several sites.
        whitening: the current one; None is the identity.
        rank: how many directions of its inputs are told apart at most, where P is to be thin.
        window: where inputs are gathered, while it is open.
        taps: who else listens to the inputs, once they are whitened.
        outputs: who listens to the gradients of the outputs.
        dropping: how often its directions are dropped in training, with spectral dropout.
        fixed_bias: whether the optimizer does not hold the bias, so that nothing can absorb a mean.
        aside: whether forwards are somebody's own, who only looks at inputs.
        label: the full name, for messages.
    """

    weight: str
    bias: str | None
    layout: Layout
    rows: slice | None = None
    name: str = ""
    whitening: Whitening | None = None
    rank: int | None = None
    window: Window | None = None
    taps: list[Tap] = field(default_factory=list)
    outputs: OutputTap | None = None
    dropping: Dropping | None = None
    fixed_bias: bool = False
    aside: bool = False
    label: str = ""
    spread: Layout | None = None

    @property
    def listening(self) -> bool:
        """Whether anybody wants to see the inputs."""
        return self.window is not None or any(tap.listening for tap in self.taps)

    def new_window(self, like: Tensor) -> Window:
        """Empty statistics of this site's inputs."""
        return Window(Moments(self.layout.matrices, self.layout.features, like.dtype, like.device))

    def divide(self, block: int | None, like: Tensor) -> None:
        """Whiten in blocks from now on, before anything was; a window begins anew."""
        if block != self.layout.block:
            self.layout = replace(self.layout, block=block)
            if self.window is not None:
                self.window.restart(self.new_window(like).moments)

    def restricted(self, held: slice) -> Site:
        """The same where a worker holds these rows of weight and bias, and no others."""
        all_rows = slice(0, self.layout.shape[0]) if self.rows is None else self.rows
        start = max(all_rows.start, held.start)
        stop = max(start, min(all_rows.stop, held.stop))
        rows = None if self.rows is None else slice(start - held.start, stop - held.start)
        layout = replace(self.layout, shape=(stop - start, *self.layout.shape[1:]))
        return replace(self, rows=rows, layout=layout, spread=self.layout)

    def part(self, tensor: Tensor | None) -> Tensor | None:
        """This site's rows of a weight, a bias, or anything of their shape; all of what is its alone."""
        if tensor is None or self.rows is None or tensor.shape[0] == self.layout.shape[0]:
            return tensor
        return tensor[self.rows]

    def write(self, target: Tensor, value: Tensor) -> None:
        """Put a value into this site's rows of a tensor."""
        part = self.part(target)
        assert part is not None
        part.copy_(value)

    def packed(self, weight: Tensor, bias: Tensor | None) -> Pair:
        """Weight-like and bias-like tensors as (matrices, out, taps, in) and (groups, out)."""
        W, b = self.part(weight), self.part(bias)
        assert W is not None
        return self.layout.pack(W), None if b is None else self.layout.pack_bias(b)

    def unpacked(self, W: Tensor, b: Tensor | None) -> Pair:
        """The inverse of `packed`, for this site's rows."""
        return self.layout.unpack(W), None if b is None else b.reshape(-1)


class Kind:
    """What is known of a kind of torch layer: where its weights meet inputs, and what those are.

    Whitened layers are of a kind, and so is a `Plain` view of a layer that is left as it is.
    """

    form: ClassVar[str]
    plain: ClassVar[type[nn.Module]]
    centres: ClassVar[bool] = True  # whether a bias can absorb the mean of the inputs

    sites: tuple[Site, ...]
    options: Form
    max_positions: int | None
    owner: Owner | None
    training: bool

    @staticmethod
    def make_sites(module: Any) -> tuple[Site, ...]:
        """The sites of a plain layer of this kind."""
        layout = Layout(tuple(module.weight.shape))
        return (Site("weight", None if module.bias is None else "bias", layout),)

    def parameter(self, name: str | None) -> Tensor | None:
        """The trained tensor that stands where the plain layer has its parameter `name`."""
        return None if name is None else getattr(self, name)

    def pair(self, site: Site) -> tuple[Tensor, Tensor | None]:
        """The parameters of a site's layer: whole, not this site's rows."""
        weight = self.parameter(site.weight)
        assert weight is not None
        return weight, self.parameter(site.bias)

    def coordinates(self, site: Site) -> tuple[Tensor, Tensor | None] | None:
        """V and d of a site's layer, whole, where somebody holds them; else None: only gradients are whitened."""
        return None

    @property
    def basis(self) -> Basis | None:
        """The basis of U; None: no U is needed, but P = U^T U."""
        return None

    @property
    def cutoff(self) -> float:
        """Below which variance, in units of the damping, directions of the inputs are treated as having none."""
        return self.options.cutoff if isinstance(self.options, ImplicitOptions) else 0.0

    @property
    def storage(self) -> Storage | None:
        """The dtype in which matrices are kept."""
        return self.options.storage if isinstance(self.options, ImplicitOptions) else None

    def centred(self, site: Site) -> bool:
        """Whether this site's inputs are centred: only if a bias that may change can absorb the mean."""
        bias = self.parameter(site.bias)
        return self.centres and bias is not None and bias.requires_grad and not site.fixed_bias

    @property
    def channels_at(self) -> int:
        """The dimension of inputs and outputs that holds features, from the end."""
        return -1

    def input_rows(self, site: Site, h: Tensor) -> Inputs:
        """The inputs h as samples."""
        rows = site.layout.rows(h, self.channels_at)
        return Inputs(rows, 0.0, rows.shape[1])

    def observe(self, site: Site, h: Tensor, counted: bool = False) -> None:
        """Show inputs to whoever listens; not to the window where they are `counted` already."""
        if site.listening:
            self._record(site, h, counted)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # statistics are Python objects
    def _record(self, site: Site, h: Tensor, counted: bool) -> None:
        if in_backward() or in_transform():  # checkpointing runs forwards again; under vmap there are no values
            return
        window = site.window
        if not self.training and (window is None or window.training_only):  # evaluation between updates
            return
        if h.dim() < -self.channels_at or h.shape[self.channels_at] != site.layout.channels:
            self._undo()
            return  # the layer itself is about to refuse this, in torch's words
        with torch.inference_mode(False), torch.no_grad():
            inputs = self.input_rows(site, h.detach())
            if window is not None and not counted:
                try:
                    window.add(*inputs)
                except FloatingPointError as error:
                    self._undo()
                    told = FloatingPointError(
                        f"layer {site.label!r}, while its statistics were gathered: {error}. "
                        "Statistics are as they were after the last update; look at the data and the learning rate "
                        "(a lower lr, a larger damping; a loss that sums over examples wants a lower lr, too)."
                    )
                    errors = window.errors if self.owner is None or not window.training_only else self.owner.errors
                    if errors is None:
                        raise told from None
                    errors.append(told)
            if site.whitening is not None:
                for tap in site.taps:
                    if tap.listening:
                        tap.see(inputs, site.whitening)

    def _undo(self) -> None:
        if self.owner is not None:
            self.owner.undo()

    def stored(self, site: Site, whitening: Whitening) -> Whitening:
        """A whitening in the precision of the site's weight; a P that is stored in another stays so."""
        weight, _ = self.pair(site)
        kept = whitening.map(lambda x: x.to(weight.device, weight.dtype))  # the weight may be sharded
        if is_half(weight.dtype):
            kept = replace(kept, cP=None)  # there it has lost the digits that are to cancel
        if whitening.P is None or whitening.P.dtype != storage_for(self.storage, weight):
            return kept
        return replace(kept, P=whitening.P.to(weight.device))


class WhitenedLayer(Kind, nn.Module):
    """A torch layer, changed in place by swapping its class, that knows the whitening of its inputs.

    Whitening tensors are plain attributes that follow the layer across devices and dtypes. They are not buffers:
    `state_dict` stays that of the plain layer, and DDP does not broadcast them at every forward.
    """

    switch: Switch

    def effective(self, site: Site) -> tuple[Tensor, Tensor | None]:
        """(W, b) of a site in the plain layer's shapes, to compute with."""
        raise NotImplementedError

    def watch(self, site: Site, z: Tensor, examples_at: int = 0) -> Tensor:
        """The output z; its gradient is shown to who asked for it and, like inputs, it counts."""
        if self.training and site.outputs is not None and z.requires_grad and not self.switch.ordinary:
            z = self._watch(site.outputs, z, site.layout.groups, self.channels_at, examples_at)
        return z

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _watch(self, outputs: Any, z: Tensor, *where: int) -> Tensor:
        if in_transform() or (in_backward() and outputs.pending is not None):
            return z  # under vmap there are no values, and labels were drawn in the first forward
        watched: Tensor = outputs.watch(z, *where)
        return watched

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        moved: dict[int, Any] = {}  # what sites share, they go on sharing
        for site in self.sites:
            if site.whitening is not None:
                site.whitening = moved.setdefault(id(site.whitening), self.stored(site, site.whitening))
            if site.window is not None:
                site.window = moved.setdefault(id(site.window), site.window.to(self.pair(site)[0]))
        return self

    def __getstate__(self) -> dict[str, Any]:
        # A copy trains on its own: open windows and the optimizer stay with the original.
        sites = tuple(replace(site, window=None, taps=[], outputs=None) for site in self.sites)
        return {**self.__dict__, "sites": sites, "switch": Switch(), "owner": None}


class Implicit(WhitenedLayer):
    """Canonical parameters, the plain forward, natural gradients in the backward."""

    form = "implicit"

    def effective(self, site: Site) -> tuple[Tensor, Tensor | None]:  # noqa: D102
        weight, bias = self.pair(site)
        W, b = site.part(weight), site.part(bias)
        assert W is not None
        if not self.naturally(site):
            return W, b
        w = site.whitening
        assert w is not None and w.P is not None
        return naturalize(W, b, w.P, w.c, w.cP, w.tail, site.layout, self.switch)

    def naturally(self, site: Site) -> bool:
        """Whether gradients are asked for, and are to be natural."""
        return site.whitening is not None and not self.switch.ordinary and torch.is_grad_enabled()

    def natural(self, site: Site, operation: Operation, h: Tensor) -> Tensor:
        """The operation with the site's weight and bias, and natural gradients by way of activation space."""
        weight, bias = self.pair(site)
        W, w = site.part(weight), site.whitening
        assert W is not None and w is not None and w.P is not None
        return natural(operation, h, W, site.part(bias), w.P, w.c, w.cP, w.tail, self.switch)


TRAINED_NAME = {"weight": "V", "bias": "d"}


def trained_name(name: str) -> str:
    """The explicit form's name of a parameter: weight -> V, in_proj_bias -> in_proj_d."""
    *prefix, last = name.split("_")
    return "_".join([*prefix, TRAINED_NAME[last]])


class Explicit(WhitenedLayer):
    """Whitened parameters V, d, trained by any optimizer; U and c are constants of the layer.

    `weight` and `bias` are the canonical W and b, computed and read-only, and so is what `state_dict` holds:
    checkpoints of plain and whitened models are the same, and `load_state_dict` is the way to write them. V and d are
    the plain layer's own Parameter objects with other values.
    """

    form = "explicit"

    def parameter(self, name: str | None) -> Tensor | None:  # noqa: D102
        return None if name is None else getattr(self, trained_name(name))

    def coordinates(self, site: Site) -> tuple[Tensor, Tensor | None]:  # noqa: D102
        return self.pair(site)

    @property
    def basis(self) -> Basis:  # noqa: D102
        assert isinstance(self.options, ExplicitOptions)
        return self.options.basis

    def effective(self, site: Site) -> tuple[Tensor, Tensor | None]:  # noqa: D102
        V, d = self.pair(site)
        if site.whitening is None:
            W = site.part(V)
            assert W is not None
            return W, site.part(d)
        W, b = site.unpacked(*to_canonical(*site.packed(V, d), site.whitening))
        return W.to(V.dtype), None if b is None else b.to(V.dtype)

    def stored(self, site: Site, whitening: Whitening) -> Whitening:
        """A whitening in float32 at least, whatever the weight's precision: rounding U would change the function."""
        weight, _ = self.pair(site)
        return whitening.map(lambda x: x.to(weight.device, accumulation_dtype(weight.dtype)))

    def drops(self, site: Site) -> bool:
        """Whether this forward drops directions."""
        return self.training and site.dropping is not None and site.whitening is not None

    def whitened(self, site: Site, h: Tensor, positions: int = 0) -> Tensor:
        """The inputs U (h - c) with some of their directions dropped, for V and d to compute with."""
        assert site.dropping is not None and site.whitening is not None
        x = with_dropped_directions(h, site.whitening, site.dropping, self.channels_at, positions)
        return x.to(self.pair(site)[0].dtype)

    def canonical(self) -> dict[str, Tensor | None]:
        """The plain layer's parameters by name."""
        parts: dict[str, list[Tensor]] = {}
        for site in self.sites:
            W, b = self.effective(site)
            parts.setdefault(site.weight, []).append(W)
            if site.bias is not None and b is not None:
                parts.setdefault(site.bias, []).append(b)
        return {name: tensors[0] if len(tensors) == 1 else torch.cat(tensors) for name, tensors in parts.items()}

    @torch.no_grad()
    def set_canonical(self, values: dict[str, Tensor]) -> None:
        """Take new canonical parameters, projected with the current whitening.

        Values that the layer already has are left alone, so that loading a checkpoint is exact to the bit after
        V and d were loaded by the optimizer.
        """
        current = self.canonical()
        if all(torch.equal(current[name].to(x), x) for name, x in values.items() if current[name] is not None):  # type: ignore[union-attr]
            return
        for site in self.sites:
            trained = self.pair(site)
            W, b = site.packed(values[site.weight], None if site.bias is None else values[site.bias])
            if site.whitening is not None:
                W, b = to_whitened(W, b, site.whitening)
            for tensor, value in zip(trained, site.unpacked(W, b), strict=True):
                if tensor is not None and value is not None:
                    site.write(tensor, value)

    @contextmanager
    def _as_plain(self) -> Iterator[dict[str, nn.Parameter | None]]:
        """For a while, hold canonical copies under the plain names, so torch's own code saves and loads them."""
        trained = self._parameters
        with torch.no_grad():
            canonical = {
                name: nn.Parameter(x.detach().clone()) for name, x in self.canonical().items() if x is not None
            }
        names = {trained_name(name): name for site in self.sites for name in (site.weight, site.bias) if name}
        plain = {names.get(name, name): canonical.get(names.get(name, name), x) for name, x in trained.items()}
        self._parameters = plain
        try:
            yield plain
        finally:
            self._parameters = trained

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        with self._as_plain():
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if local_metadata.get("assign_to_params_buffers", False):
            raise RuntimeError(
                "load_state_dict(assign=True) cannot replace the parameters of an explicitly whitened layer; "
                "load with assign=False, or call prong.fold_(model) first"
            )
        errors: list[str] = args[-1]
        before = len(errors)
        with self._as_plain() as plain:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        if len(errors) == before:
            names = {name for site in self.sites for name in (site.weight, site.bias) if name}
            self.set_canonical({name: x.detach() for name, x in plain.items() if name in names and x is not None})


def canonical_property(name: str) -> property:
    """A read-only attribute that gives the canonical tensor under its plain name."""

    def get(self: Explicit) -> Tensor | None:
        if trained_name(name) in self._parameters:
            return self.canonical().get(name)
        return self._parameters.get(name)

    return property(get, doc=f"The canonical `{name}`, computed from the whitened parameters.")
