"""Whitening of backpropagated gradients, on top of that of activations: the paper's footnote, `W = R^T V U`.

With delta the gradient of one example's loss with respect to a layer's output, `G = E[delta delta^T]` summed over
positions, and `Q = R^T R = (G + damping * g I)^-1` with g the mean of G's diagonal, the step (nW, nb) becomes
(Q nW, Q nb), in either form of the layer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from prong.core.moments import MeanSquare, accumulation_dtype, full_precision
from prong.distributed.exchange import exchange, owners, summed
from prong.distributed.workers import ALONE, Workers
from prong.gradients.outputs import sampled_output_gradient
from prong.layers import Kind, Site
from prong.options import WhitenOutputs

LEAST = 1e-3  # of the largest mean square of any layer's output gradients: as small ones as that are damped alike


class OutputGradients(MeanSquare):
    """Second moments of per-example output gradients of one site, (groups, out, out).

    An example is an entry of the first dimension; positions and tokens of one example are summed. The calls of a module
    that is called several times in a forward count as examples of their own.

    Attributes:
        scale: what turns a gradient of the training loss into one of an example's own loss, given the number of
            examples: the mean over the batch is undone, and so is any loss scaling.
        pending: outputs kept for a backward pass of our own (None: the training backward is listened to).
    """

    def __init__(self, scale: Callable[[int], float] | None = None, own_backward: bool = False) -> None:
        super().__init__()
        self.scale = scale
        self.pending: list[tuple[Tensor, int, int, int]] | None = [] if own_backward else None
        self.settle()

    def watch(self, z: Tensor, groups: int, channels_at: int, examples_at: int = 0) -> Tensor:
        """See to it that the gradient of z arrives here; what others are to go on with in its place."""
        if self.pending is not None:
            self.pending.append((z, groups, channels_at, examples_at))
        else:
            z.register_hook(lambda delta: self.receive(delta, groups, channels_at, examples_at))  # type: ignore[no-untyped-call]
        # Activations may work in place: what is pending would then be their output, and a view would lose its hooks.
        return z.clone() if self.pending is not None or z._is_view() else z

    def settle(self) -> None:
        """Keep what was added."""
        self._settled = self.total, self.count

    def undo(self) -> None:
        """Take back what was added since `settle`."""
        self.total, self.count = self._settled
        self.forget_pending()

    def forget_pending(self) -> None:
        """Let go of outputs that are kept."""
        if self.pending:
            self.pending = []

    def receive(self, delta: Tensor | None, groups: int, channels_at: int, examples_at: int = 0) -> None:
        """Add the output gradients of a batch, shaped as the output; None where some function sends nothing back."""
        if delta is None:
            return
        examples = delta.shape[examples_at] if delta.dim() >= 1 - channels_at else 1
        second = _second_moment(delta.detach(), groups, channels_at)
        if self.scale is not None:
            second = second * self.scale(examples) ** 2
        if (second.abs() < math.inf).all():  # or it is an overflow that a GradScaler is about to skip
            self.total = second if self.total is None else self.total + second
            self.count = self.count + examples

    @property
    def size(self) -> float:
        """The mean square of an output's gradient."""
        G = self.mean()
        return 0.0 if G is None or self.count == 0 else float(G.diagonal(dim1=-2, dim2=-1).mean())

    def preconditioner(self, damping: float, least: float) -> Tensor | None:
        """Q, with a damping relative to G's size, which counts as at least so large; None if nothing is known."""
        size, G = max(self.size, least), self.mean()
        if G is None or self.count == 0 or size <= 0:
            return None
        damped = G.double()
        damped.diagonal(dim1=-2, dim2=-1).add_(damping * size)
        L, info = torch.linalg.cholesky_ex(damped)
        return torch.cholesky_inverse(L).to(G.dtype) if not info.any() else None

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Continue from a copy of what `state_dict` gave."""
        super().load_state_dict(copy.deepcopy(state), device)
        self.settle()


class OutputWhitening:
    """Multiplies the gradients of whitened layers by Q from the left, at each step of an optimizer.

    Forwards in eval mode do not count: what is trained in no other takes the steps it would take without all this.

    Args:
        model: the model.
        sites: the whitened sites by name.
        options: where labels come from, and the damping.
        workers: those whose gradients count.
    """

    def __init__(
        self, model: nn.Module, sites: Mapping[str, tuple[Kind, Site]], options: WhitenOutputs, workers: Workers = ALONE
    ) -> None:
        self.sites, self.options, self.workers = sites, options, workers
        self.source = options.source
        self._sampled = self.source != "empirical"
        self.Q: dict[str, Tensor] = {}
        self._ordinary: list[tuple[Tensor, Tensor]] = []
        self._seed, self._draws, self._settled = torch.initial_seed(), 0, 0
        self._handle: RemovableHandle | None = None
        if self._sampled:
            self._handle = model.register_forward_hook(_Draw(self))

    def open(self, name: str) -> None:
        """Begin to gather a site's output gradients, unless that has begun."""
        _, site = self.sites[name]
        if site.outputs is None:
            site.outputs = OutputGradients(None if self._sampled else self._per_example, own_backward=self._sampled)

    def close(self, names: Iterable[str]) -> None:
        """Take the matrices of what was gathered; keep the last one where there was nothing."""
        gathered = {name: outputs for name, outputs in self._gathered().items() if name in set(names)}
        self._add_up(gathered)
        least = LEAST * max((outputs.size for outputs in gathered.values()), default=0.0)
        owner = owners({name: float(self.sites[name][1].layout.outputs) ** 3 for name in gathered}, self.workers.size)
        mine = {
            name: {"Q": outputs.preconditioner(self.options.damping, least)}
            for name, outputs in gathered.items()
            if owner[name] == self.workers.rank
        }
        self.Q |= {name: found["Q"] for name, found in exchange(mine, self.workers).items() if found["Q"] is not None}
        for name in gathered:
            self.sites[name][1].outputs = None

    def share(self) -> None:
        """Give every worker the same part of what all have gathered, so that any of them can be saved for all."""
        self._add_up(self._gathered(), 1 / self.workers.size)

    def _gathered(self) -> dict[str, OutputGradients]:
        found = {name: site.outputs for name, (_, site) in self.sites.items()}
        return {name: outputs for name, outputs in found.items() if isinstance(outputs, OutputGradients)}

    def _add_up(self, gathered: Mapping[str, OutputGradients], weight: float = 1.0) -> None:
        """Let this part of what all workers have gathered stand in the place of each one's own."""
        found = summed(gathered, self._zeros, self.workers)
        for name, outputs in gathered.items():
            outputs.total, outputs.count = found[name].total, found[name].count
            outputs.decay(weight)
            outputs.settle()

    def _zeros(self, name: str) -> Tensor:
        layer, site = self.sites[name]
        weight, outputs = layer.pair(site)[0], site.layout.outputs
        return weight.new_zeros(site.layout.groups, outputs, outputs, dtype=accumulation_dtype(weight.dtype))

    def detach(self) -> None:
        """Leave the model alone from now on."""
        if self._handle is not None:
            self._handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """Matrices, what was gathered so far, and how often labels were drawn."""
        return {
            "Q": dict(self.Q),
            "gathered": {name: outputs.state_dict() for name, outputs in self._gathered().items()},
            "seed": self._seed,
            "draws": self._draws,
        }

    def load_state_dict(self, state: dict[str, Any], weight: float = 1.0) -> None:
        """Continue from what `state_dict` gave; what a worker had of its own is to count `weight` times."""
        devices = {name: layer.pair(site)[0].device for name, (layer, site) in self.sites.items()}
        self.Q = {name: Q.to(devices[name]) for name, Q in state["Q"].items()}
        self._seed, self._draws = int(state["seed"]), int(state["draws"])
        for _, site in self.sites.values():
            site.outputs = None
        for name in state["gathered"]:
            self.open(name)
        for name, outputs in self._gathered().items():
            outputs.load_state_dict(state["gathered"][name], devices[name])
            outputs.decay(weight)
        self.settle()

    def settle(self) -> None:
        """After an update: keep what was gathered for it."""
        for outputs in self._gathered().values():
            outputs.settle()
        self._settled = self._draws

    def undo(self) -> None:
        """Take back what was gathered since the last update."""
        for outputs in self._gathered().values():
            outputs.undo()
        self._draws = self._settled

    def _per_example(self, examples: int) -> float:
        scale = self.options.loss_scale() if callable(self.options.loss_scale) else self.options.loss_scale
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"loss_scale is positive and finite, got {scale}")
        return examples / float(scale)

    def _generator(self, device: torch.device) -> torch.Generator:
        """A source of random numbers for the next draw, of this worker's own; the user's are left alone."""
        self._draws += 1
        number = self._draws * self.workers.size + self.workers.rank
        return torch.Generator(device).manual_seed((self._seed + 0x9E3779B97F4A7C15 * number) % 2**63)

    def draw(self, output: Any) -> None:
        """After a forward with open windows: backpropagate labels drawn from the model to every watched output."""
        watched = self._gathered().values()
        pending = [(outputs, *entry) for outputs in watched for entry in outputs.pending or []]
        for outputs in watched:
            outputs.forget_pending()
        if not pending:
            return
        if not isinstance(output, Tensor):
            raise TypeError(
                f"WhitenOutputs(source={self.source!r}) needs a model whose output is one tensor of the distribution's "
                f'parameters, got {type(output).__name__}; use source="empirical"'
            )
        drawn = sampled_output_gradient(output.detach(), self.source, self._generator(output.device))  # type: ignore[arg-type]
        kept = [entry[1] for entry in pending]
        deltas = torch.autograd.grad(output, kept, drawn.to(output.dtype), retain_graph=True, allow_unused=True)
        for (outputs, _, *where), delta in zip(pending, deltas, strict=True):
            outputs.receive(delta, *where)

    @torch.no_grad()
    def precondition(self) -> None:
        """Before a step: put Q times the gradients in their place."""
        for name, Q in self.Q.items():
            layer, site = self.sites[name]
            weight, bias = layer.pair(site)
            whole = site.layout.whole
            for parameter, pack, unpack in (
                (weight, whole.pack, whole.unpack),
                (bias, site.layout.pack_bias, lambda x: x.reshape(-1)),
            ):
                if parameter is None or parameter.grad is None:
                    continue
                part = site.part(parameter.grad)
                assert part is not None
                self._ordinary.append((parameter, parameter.grad))
                parameter.grad = parameter.grad.clone()
                site.write(parameter.grad, unpack(_times(Q, pack(part))))

    def restore(self) -> None:
        """After the step: give users their gradients back, and let go of outputs that were never used."""
        for outputs in self._gathered().values():
            outputs.forget_pending()
        for parameter, gradient in reversed(self._ordinary):  # reversed: a parameter with three sites is met thrice
            parameter.grad = gradient
        self._ordinary = []


class _Draw:
    """The model's forward hook; in a copy of the model it does nothing."""

    def __init__(self, gradients: OutputWhitening | None = None) -> None:
        self._gradients = gradients

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._gradients is not None:
            self._gradients.draw(output)

    def __reduce__(self) -> tuple[type[_Draw], tuple[()]]:
        return _Draw, ()


def _second_moment(delta: Tensor, groups: int, channels_at: int) -> Tensor:
    """delta^T delta of each group, (groups, out, out)."""
    with full_precision(delta):
        rows = torch.movedim(delta, channels_at, -1)
        rows = rows.reshape(-1, groups, rows.shape[-1] // groups).transpose(0, 1).to(accumulation_dtype(delta.dtype))
        return rows.mT @ rows


def _times(Q: Tensor, gradient: Tensor) -> Tensor:
    """Q times a packed gradient (groups, out, ...), for Q (groups, out, out)."""
    flat = gradient.flatten(2) if gradient.dim() > 2 else gradient.unsqueeze(-1)
    return (Q.to(gradient.dtype) @ flat).view(gradient.shape)
