"""Whitening of backpropagated gradients, on top of that of activations: optional, off by default."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from prong.core.precision import accumulation_dtype
from prong.distributed.sharing import exchange, owners
from prong.distributed.workers import ALONE, Workers
from prong.gradients.outputs import GRADIENT_SOURCES, Gain, OutputGradients, precondition, sampled_output_gradient
from prong.layers import Implicit, Site, WhitenedLayer
from prong.refresh.hooks import before_step

BALANCE = "balance"
BALANCE_DECAY = 0.99  # of the running mean square, per update
LossScale = float | Callable[[], float]


class GradientWhitening:
    """Multiplies the gradients of whitened layers by Q from the left, at each step of an optimizer.

    Args:
        sites: the whitened sites by name.
        source: "balance" (a running number per layer, from the training gradients), "empirical" (a matrix per
            layer, from the training gradients, hence of the labels in the data), or the distribution that the
            model's output parametrises, "categorical", "bernoulli" or "gaussian" (a matrix per layer, from labels
            drawn from the model: the Fisher's own). Forwards in eval mode do not count: what is trained in no other
            takes the steps it would take without all this.
        eps: damping of the matrices, relative to their mean diagonal. It does not stop them from growing without
            bound as a network fits its data perfectly and its gradients vanish; the paper, too, found this version less
            stable. Balance, which follows every update, is not so easily upset.
        workers: those whose gradients count.

    Attributes:
        loss_scale: what the mean loss over a batch was multiplied by before `backward` (a GradScaler's scale, one
            over the number of accumulation steps), as a number or a function that tells. Balance and the empirical
            source are not linear in the gradient and must know.
    """

    def __init__(
        self, sites: Mapping[str, tuple[WhitenedLayer, Site]], source: str, eps: float, workers: Workers = ALONE
    ) -> None:
        if source not in (BALANCE, *GRADIENT_SOURCES):
            raise ValueError(f"gradient_whitening is one of {', '.join(GRADIENT_SOURCES)}, got {source!r}")
        self.sites = sites
        self.source = source
        self.eps = eps
        self.workers = workers
        self.loss_scale: LossScale = 1.0
        self.Q: dict[str, Tensor] = {}
        self._ordinary: list[tuple[Tensor, Tensor]] = []
        self._seed = torch.initial_seed()
        self._random: torch.Generator | None = None
        self._random_before: Tensor | None = None
        self._handles: list[RemovableHandle] = []

    @property
    def _sampled(self) -> bool:
        return self.source not in (BALANCE, "empirical")

    @property
    def needs_windows(self) -> bool:
        """Whether matrices are gathered in the windows before a refresh."""
        return self.source != BALANCE

    def open(self, name: str) -> None:
        """Begin to gather a site's output gradients, unless that has begun."""
        layer, site = self.sites[name]
        if site.outputs is None:
            scale = None if self._sampled else self._per_example
            site.outputs = OutputGradients(self.source == BALANCE, scale, own_backward=self._sampled)
            # Of several workers, none can know the mean square of all in its own backward pass.
            if self.source == BALANCE and isinstance(layer, Implicit) and self.workers.alone:
                site.outputs.gain = site.gain = Gain()

    def close(self, names: Iterable[str]) -> None:
        """Take the matrices of what was gathered; keep the last one where there was nothing."""
        if self.source == BALANCE:
            return
        gathered = {name: outputs for name in names if (outputs := self.sites[name][1].outputs) is not None}
        self._add_up(gathered)
        sizes = {name: float(self.sites[name][1].layout.outputs) ** 3 for name in gathered}
        owner = owners(sizes, self.workers.size)
        mine = {
            name: {"Q": x.preconditioner(self.eps)} for name, x in gathered.items() if owner[name] == self.workers.rank
        }
        for name, found in exchange(mine, self.workers).items():
            if found["Q"] is not None:
                self.Q[name] = found["Q"]
        for name in gathered:
            self.sites[name][1].outputs = None

    def share(self) -> None:
        """Give every worker the same part of what all have gathered, so that any of them can be saved for all."""
        if self.source != BALANCE:  # whose numbers are the same for all
            gathered = self._gathered()
            self._add_up(gathered, 1 / self.workers.size)
            for outputs in gathered.values():
                outputs.settle()

    def add_up(self) -> None:
        """Before each step: let the numbers of balance be those of all workers."""
        if self.source == BALANCE:
            self._add_up(self._gathered())

    def _gathered(self) -> dict[str, OutputGradients]:
        return {name: outputs for name, (_, site) in self.sites.items() if (outputs := site.outputs) is not None}

    def _add_up(self, gathered: Mapping[str, OutputGradients], weight: float = 1.0) -> None:
        """Let this part of what all workers have gathered stand in the place of each one's own."""
        if self.workers.alone:
            return
        zeros = {name: self._zeros(name) for name in gathered}
        own = {name: outputs.own(zeros[name]) for name, outputs in gathered.items()}
        self.workers.sum_(list(own.values()))()
        for name, outputs in gathered.items():
            outputs.take_over(own[name] * weight, zeros[name])

    def _zeros(self, name: str) -> Tensor:
        layer, site = self.sites[name]
        weight, outputs = layer.pair(site)[0], site.layout.outputs
        shape = (site.layout.groups, *((1, 1) if self.source == BALANCE else (outputs, outputs)))
        return weight.new_zeros(shape, dtype=accumulation_dtype(weight.dtype))

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """From now on, steps of this optimizer see preconditioned gradients; `.grad` is theirs only meanwhile."""
        self._handles.append(before_step(optimizer, self._precondition))
        if self._sampled:
            self._handles.append(model.register_forward_hook(_Draw(self)))
        if self.source == BALANCE:
            for name in self.sites:
                self.open(name)

    def detach(self) -> None:
        """Leave the model and the optimizer alone from now on."""
        for handle in self._handles:
            handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """Matrices, what was gathered so far, and where the random numbers are."""
        gathered = {name: outputs.state_dict() for name, outputs in self._gathered().items()}
        random = self._random_before if self._random is None else self._random.get_state()
        return {
            "source": self.source,
            "eps": self.eps,
            "Q": dict(self.Q),
            "gathered": gathered,
            "seed": self._seed,
            "random": random,
        }

    def load_state_dict(self, state: dict[str, Any], weight: float = 1.0) -> None:
        """Continue from what `state_dict` gave; what a worker had of its own is to count `weight` times."""
        self.eps = float(state.get("eps", self.eps))
        devices = {name: layer.pair(site)[0].device for name, (layer, site) in self.sites.items()}
        self.Q = {name: Q.to(devices[name]) for name, Q in state["Q"].items()}
        self._seed, self._random = int(state["seed"]), None
        self._random_before = None if state["random"] is None else state["random"].cpu()
        for _, site in self.sites.values():
            site.outputs = None
        for name, gathered in state["gathered"].items():
            self.open(name)
            outputs = self.sites[name][1].outputs
            assert outputs is not None
            outputs.load_state_dict(gathered, devices[name])
            if self.source != BALANCE:
                outputs.decay(weight)
                outputs.settle()

    def settle(self) -> None:
        """After an update: keep what was gathered for it."""
        for _, site in self.sites.values():
            if site.outputs is not None:
                if self.source == BALANCE:
                    site.outputs.decay(BALANCE_DECAY)
                site.outputs.settle()
        if self._random is not None:
            self._random_before = self._random.get_state()

    def undo(self) -> None:
        """Take back what was gathered since the last update."""
        for _, site in self.sites.values():
            if site.outputs is not None:
                site.outputs.undo()
        self._random = None

    def _per_example(self, examples: int) -> float:
        scale = self.loss_scale() if callable(self.loss_scale) else self.loss_scale
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"loss_scale is positive and finite, got {scale}")
        return examples / scale

    def _generator(self, device: torch.device) -> torch.Generator:
        """A source of random numbers of our own, as the last update left it: the user's are left alone."""
        if self._random is None or self._random.device != device:
            self._random = torch.Generator(device).manual_seed(self._seed + self.workers.rank)
            before = self._random_before
            if before is not None and before.shape == self._random.get_state().shape:  # not of another kind of device
                self._random.set_state(before)
        return self._random

    def draw(self, output: Any) -> None:
        """After a forward with open windows: backpropagate labels drawn from the model to every watched output."""
        watched = [site.outputs for _, site in self.sites.values() if site.outputs is not None and site.outputs.pending]
        pending = [(outputs, *entry) for outputs in watched for entry in outputs.pending or []]
        for outputs in watched:
            outputs.pending = []
        if not pending:
            return
        if not isinstance(output, Tensor):
            raise TypeError(
                f"gradient_whitening={self.source!r} needs a model whose output is one tensor of the distribution's "
                f"parameters, got {type(output).__name__}; use gradient_whitening='empirical'"
            )
        drawn = sampled_output_gradient(output.detach(), self.source, self._generator(output.device))  # type: ignore[arg-type]
        deltas = torch.autograd.grad(
            output,
            [entry[1] for entry in pending],
            drawn.to(output.dtype),
            retain_graph=True,
            allow_unused=True,
        )
        for (outputs, _, *where), delta in zip(pending, deltas, strict=True):
            if delta is not None:
                outputs.add(delta, *where)

    @torch.no_grad()
    def _precondition(self) -> None:
        self.add_up()
        for name, (layer, site) in self.sites.items():
            Q = self._due(name, site)
            if Q is None:
                continue
            for parameter, pack, unpack in _packings(layer, site):
                if parameter.grad is not None:
                    self._ordinary.append((parameter, parameter.grad))
                    part = site.part(parameter.grad)
                    assert part is not None
                    changed = unpack(precondition(pack(part), Q))
                    if site.rows is not None and part is not parameter.grad:
                        whole = parameter.grad.clone()
                        site.write(whole, changed)
                        changed = whole
                    parameter.grad = changed

    def _due(self, name: str, site: Site) -> Tensor | None:
        """The Q of a site that its gradients are still to be multiplied by."""
        if self.source != BALANCE or site.outputs is None:
            return self.Q.get(name)
        gain, outputs = site.gain, site.outputs
        if gain is None or not gain.used or gain.value is None:
            return outputs.preconditioner()
        if not gain.late:
            return None  # backward has done it
        Q = outputs.preconditioner()  # of several passes, of which the first has told
        return None if Q is None else Q / gain.value

    def restore(self) -> None:
        """After the step: give users their gradients back, and let go of outputs that were never used."""
        for _, site in self.sites.values():
            if site.outputs is not None and site.outputs.pending:
                site.outputs.pending = []
        for parameter, gradient in reversed(self._ordinary):  # reversed: a parameter with three sites is met thrice
            parameter.grad = gradient
        self._ordinary = []


class _Draw:
    """The model's forward hook; in a copy of the model it does nothing."""

    def __init__(self, gradients: GradientWhitening | None = None) -> None:
        self._gradients = gradients

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._gradients is not None:
            self._gradients.draw(output)

    def __reduce__(self) -> tuple[type[_Draw], tuple[()]]:
        return _Draw, ()


def _packings(layer: WhitenedLayer, site: Site) -> list[tuple[Tensor, Any, Any]]:
    weight, bias = layer.pair(site)
    packings: list[tuple[Tensor, Any, Any]] = [(weight, site.layout.whole.pack, site.layout.whole.unpack)]
    if bias is not None:
        packings.append((bias, site.layout.pack_bias, lambda x: x.reshape(-1)))
    return packings
