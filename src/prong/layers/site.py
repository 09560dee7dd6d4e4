"""Where a weight meets its inputs: how it is stored, what is known of its inputs, and who listens to them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prong.core.factorise import storage_for
from prong.core.moments import Moments, Window, accumulation_dtype, is_half
from prong.core.whitening import Pair, Whitening
from prong.options import Basis, Form, Storage
from prong.options import Implicit as ImplicitOptions

Some = TypeVar("Some", Tensor, Tensor | None)


def in_backward() -> bool:
    """Whether a backward pass is running (activation checkpointing runs forwards inside it)."""
    return bool(torch._C._current_graph_task_id() != -1)


def in_transform() -> bool:
    """Whether a transform of `torch.func` (vmap, grad, jvp) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@dataclass(frozen=True)
class Layout:
    """How a weight is stored: (out, in / groups, *kernel), or transposed (in, out / groups, *kernel).

    `taps` is the number of kernel positions, `inputs` the inputs per group; a linear layer is the case of
    one group and one tap. With a `block`, the inputs of a group are whitened in contiguous blocks of at most so many,
    as if each were a group of its own: `matrices` blocks of `features` inputs, the last of a group filled up with
    zeros, which have no variance and no weight.
    """

    shape: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    block: int | None = None

    @property
    def inputs(self) -> int:
        """Inputs per group."""
        return self.shape[0] // self.groups if self.transposed else self.shape[1]

    @property
    def blocks(self) -> int:
        """Blocks per group."""
        return 1 if self.block is None else max(1, -(-self.inputs // self.block))

    @property
    def features(self) -> int:
        """Inputs per block: the size of a whitening matrix."""
        return -(-self.inputs // self.blocks)

    @property
    def matrices(self) -> int:
        """Blocks of all groups: the number of whitening matrices."""
        return self.groups * self.blocks

    @property
    def channels(self) -> int:
        """Inputs of all groups."""
        return self.groups * self.inputs

    @property
    def outputs(self) -> int:
        """Outputs per group."""
        return self.shape[1] if self.transposed else self.shape[0] // self.groups

    @property
    def taps(self) -> int:
        """Positions of the kernel."""
        return math.prod(self.shape[2:])

    @property
    def by_rows(self) -> bool:
        """Whether each row of the weight is that of one output, whatever the others are."""
        return self.groups == 1 and not self.transposed

    @property
    def whole(self) -> Layout:
        """The same without blocks."""
        return self if self.block is None else replace(self, block=None)

    def pack(self, W: Tensor) -> Tensor:
        """The stored weight as (matrices, out, taps, in)."""
        if self.transposed:
            packed = W.reshape(self.groups, self.inputs, self.outputs, self.taps).permute(0, 2, 3, 1)
        else:
            packed = W.reshape(self.groups, self.outputs, self.inputs, self.taps).transpose(2, 3)
        return self._split(packed)

    def unpack(self, X: Tensor, like: Tensor | None = None) -> Tensor:
        """The inverse of `pack`, contiguous as torch's own weights are; or laid out in memory as `like` is."""
        X = self._join(X)
        W = (X.permute(0, 3, 1, 2) if self.transposed else X.transpose(2, 3)).reshape(self.shape)
        return W if like is not None and W.stride() == like.stride() else W.contiguous()

    def spread(self, s: Tensor) -> Tensor:
        """A number for each input, s (groups, in), shaped so that it multiplies a stored weight."""
        ones = (1,) * len(self.shape[2:])
        if self.transposed:
            return s.reshape(-1, 1, *ones)
        if self.groups == 1:
            return s.reshape(1, -1, *ones)
        return s.repeat_interleave(self.outputs, dim=0).reshape(*self.shape[:2], *ones)

    def pack_bias(self, b: Tensor) -> Tensor:
        """The stored bias as (groups, out): blocks of one group share it."""
        return b.reshape(self.groups, self.outputs)

    def rows(self, h: Tensor, channels_at: int) -> Tensor:
        """Inputs as (matrices, rows, in): every position of every example is a row."""
        h = torch.movedim(h, channels_at, -1).reshape(-1, self.groups, self.inputs)
        return self._split(h.transpose(0, 1))

    def unrow(self, rows: Tensor) -> Tensor:
        """The inverse of `rows`, with positions and examples still one dimension: (rows, channels)."""
        whole = self._join(rows)
        return whole[0] if self.groups == 1 else whole.transpose(0, 1).flatten(1)

    def in_a_row(self, c: Tensor) -> Tensor:
        """A number for each input, c (matrices, in), as (channels,)."""
        return self._join(c).reshape(-1)

    def assembled(self, M: Tensor) -> Tensor:
        """The block-diagonal matrices (groups, in, in) of blocks M (matrices, in, in)."""
        if self.blocks == 1:
            return M
        whole = [torch.block_diag(*part) for part in M.reshape(self.groups, self.blocks, *M.shape[1:])]  # type: ignore[no-untyped-call]
        return torch.stack(whole)[:, : self.inputs, : self.inputs]

    def _split(self, X: Tensor) -> Tensor:
        """(groups, ..., all inputs) as (matrices, ..., those of a block)."""
        if self.blocks == 1:
            return X
        missing = self.blocks * self.features - self.inputs
        X = F.pad(X, (0, missing)) if missing else X
        return X.reshape(*X.shape[:-1], self.blocks, self.features).movedim(-2, 1).flatten(0, 1)

    def _join(self, X: Tensor) -> Tensor:
        """The inverse of `_split`."""
        if self.blocks == 1:
            return X
        return X.reshape(self.groups, self.blocks, *X.shape[1:]).movedim(1, -2).flatten(-2)[..., : self.inputs]


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
    """One place where a weight meets its inputs. Most layers have one; attention's input projection has three."""

    weight: str  # the name of the plain layer's parameter that holds the weight
    bias: str | None  # of its bias
    layout: Layout  # how the weight, or this site's rows of it, is stored
    rows: slice | None = None  # those of weight and bias that belong to this site; None: all
    name: str = ""  # what to add to the layer's name, where a layer has several sites
    whitening: Whitening | None = None  # the current one; None is the identity
    rank: int | None = None  # how many directions of the inputs are told apart at most, where P is to be thin
    window: Window | None = None  # where inputs are gathered, while it is open
    taps: list[Tap] = field(default_factory=list)  # who else listens to the inputs, once they are whitened
    outputs: OutputTap | None = None  # who listens to the gradients of the outputs
    dropping: Any = None  # how often directions are dropped in training, with spectral dropout
    fixed_bias: bool = False  # whether the optimizer does not hold the bias, so that nothing can absorb a mean
    aside: bool = False  # whether forwards are somebody's own, who only looks at inputs
    label: str = ""  # the full name, for messages
    spread: Layout | None = None  # where workers hold rows of the weight each: the layout of all of them

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

    def part(self, tensor: Some) -> Some:
        """This site's rows of a weight, a bias, or anything of their shape; all of what is its alone."""
        if tensor is None or self.rows is None or tensor.shape[0] == self.layout.shape[0]:
            return tensor
        return tensor[self.rows]

    def write(self, target: Tensor, value: Tensor) -> None:
        """Put a value into this site's rows of a tensor."""
        self.part(target).copy_(value)

    def packed(self, weight: Tensor, bias: Tensor | None) -> Pair:
        """Weight-like and bias-like tensors as (matrices, out, taps, in) and (groups, out)."""
        b = self.part(bias)
        return self.layout.pack(self.part(weight)), None if b is None else self.layout.pack_bias(b)

    def unpacked(self, W: Tensor, b: Tensor | None) -> Pair:
        """The inverse of `packed`, for this site's rows."""
        return self.layout.unpack(W), None if b is None else b.reshape(-1)

    def write_both(self, targets: Iterable[Tensor | None], W: Tensor, b: Tensor | None) -> None:
        """Put packed values into this site's rows of a weight and a bias."""
        for target, value in zip(targets, self.unpacked(W, b), strict=True):
            if target is not None and value is not None:
                self.write(target, value)


class Kind:
    """A kind of torch layer, whitened or seen by a `Plain` view: where its weights meet inputs, and what those are."""

    form: ClassVar[str]
    plain: ClassVar[type[nn.Module]]

    sites: tuple[Site, ...]
    options: Form
    max_positions: int | None
    owner: Any  # who refreshes it while an optimizer trains it, or None
    training: bool

    @staticmethod
    def make_sites(module: Any) -> tuple[Site, ...]:
        """The sites of a plain layer of this kind."""
        layout = Layout(tuple(module.weight.shape), getattr(module, "groups", 1), getattr(module, "transposed", False))
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
        return None if isinstance(self.options, ImplicitOptions) else self.options.basis

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
        return bias is not None and bias.requires_grad and not site.fixed_bias

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
        """A whitening in the precision of the site's weight; a P that is stored in another stays so.

        U is kept in float32 at least: rounding it would change the function.
        """
        weight, _ = self.pair(site)
        if self.basis is not None:
            return whitening.map(lambda x: x.to(weight.device, accumulation_dtype(weight.dtype)))
        kept = whitening.map(lambda x: x.to(weight.device, weight.dtype))  # the weight may be sharded
        if is_half(weight.dtype):
            kept = replace(kept, cP=None)  # there it has lost the digits that are to cancel
        if whitening.P is None or whitening.P.dtype != storage_for(self.storage, weight):
            return kept
        return replace(kept, P=whitening.P.to(weight.device))

    def move(self) -> None:
        """Let whitenings and windows follow the weight to its device and dtype; sites go on sharing what they share."""
        moved: dict[int, Any] = {}
        for site in self.sites:
            if site.whitening is not None:
                site.whitening = moved.setdefault(id(site.whitening), self.stored(site, site.whitening))
            if site.window is not None:
                site.window = moved.setdefault(id(site.window), site.window.to(self.pair(site)[0]))
