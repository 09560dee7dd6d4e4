"""Statistics of backpropagated gradients: the paper's footnote `W = R^T V U`, and its scalar version.

With delta the gradient of one example's loss with respect to a layer's output, `G = E[delta delta^T]` summed over
positions, and `Q = R^T R = (G + damping)^-1`, whitening the gradients as well turns the step (nW, nb) into
(Q nW, Q nb), in either form of the layer. `balance` takes `Q = 1 / mean(diag G)`: a number per layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from prong.core.precision import accumulation_dtype, full_precision

Distribution = Literal["categorical", "bernoulli", "gaussian"]
GradientSource = Literal["empirical", "categorical", "bernoulli", "gaussian"]
DISTRIBUTIONS: tuple[str, ...] = get_args(Distribution)
GRADIENT_SOURCES: tuple[str, ...] = get_args(GradientSource)


@dataclass
class Gain:
    """What backward passes through a layer multiply the steps of each group by; asked when they run.

    Attributes:
        value: (groups, 1, 1), or None while it is not known.
        used: whether a backward pass has asked for it; one that is not known by then is not told to any.
        late: whether more has become known since the value was told.
    """

    value: Tensor | None = None
    used: bool = False
    late: bool = False

    def take(self) -> Tensor | None:
        """The value, to be used."""
        self.used = True
        return self.value

    def reset(self) -> None:
        """Not known, and not used."""
        self.value, self.used, self.late = None, False, False


class OutputGradients:
    """Second moments of per-example output gradients of one site: the matrix G, or only its mean diagonal.

    An example is an entry of the first dimension; positions and tokens of one example are summed. The calls of a module
    that is called several times in a forward count as examples of their own.

    Shapes: total (groups, out, out), or (groups, 1, 1) when `scalar`.

    Attributes:
        scale: what turns a gradient of the training loss into one of an example's own loss, given the number of
            examples: the mean over the batch is undone, and so is any loss scaling.
        gain: told Q when the first gradient of an update arrives, which is before the layer's own backward pass.
        pending: outputs kept for a backward pass of our own (None: the training backward is listened to).
    """

    def __init__(
        self, scalar: bool = False, scale: Callable[[int], float] | None = None, own_backward: bool = False
    ) -> None:
        self.scalar = scalar
        self.scale = scale
        self.total: Tensor | None = None
        self.examples: Tensor | float = 0.0
        self._settled: tuple[Tensor | None, Tensor | float] = (None, 0.0)
        self.gain: Gain | None = None
        self.pending: list[tuple[Tensor, int, int, int]] | None = [] if own_backward else None

    def watch(self, z: Tensor, groups: int, channels_at: int, examples_at: int = 0) -> Tensor:
        """See to it that the gradient of z arrives here; what others are to go on with in its place."""
        if self.pending is not None:
            self.pending.append((z, groups, channels_at, examples_at))
        else:
            z.register_hook(lambda delta: self._arrived(delta, groups, channels_at, examples_at))  # type: ignore[no-untyped-call]
        # Activations may work in place: what is pending would then be their output, and a view would lose its hooks.
        return z.clone() if self.pending is not None or z._is_view() else z

    def _arrived(self, delta: Tensor | None, *where: int) -> None:
        if delta is None:  # some functions send nothing back
            return
        self.add(delta, *where)
        if self.gain is None:
            return
        if self.gain.value is None and not self.gain.used:
            self.gain.value = self.preconditioner()
        else:
            self.gain.late = True

    def settle(self) -> None:
        """Keep what was added."""
        self._settled = self.total, self.examples
        if self.gain is not None:
            self.gain.reset()

    def own(self, zeros: Tensor) -> Tensor:
        """What other workers do not have, flat: the total, whose shape `zeros` have, and the examples.

        The numbers of balance are added up at every update, so of them it is what was added since `settle`.
        """
        total, examples = self._shared(zeros)
        added = zeros if self.total is None else self.total - total
        return torch.cat([added.reshape(-1), zeros.new_zeros(1) + (self.examples - examples)])

    def take_over(self, added_up: Tensor, zeros: Tensor) -> None:
        """Let this stand in the place of `own`."""
        total, examples = self._shared(zeros)
        self.total, self.examples = total + added_up[:-1].view(zeros.shape), examples + added_up[-1]
        if self.scalar:  # even if this step is skipped, it must not be added up again
            self._settled = self.total, self.examples

    def _shared(self, zeros: Tensor) -> tuple[Tensor, Tensor | float]:
        total, examples = self._settled if self.scalar else (None, 0.0)
        return zeros if total is None else total, examples

    def undo(self) -> None:
        """Take back what was added since `settle`."""
        self.total, self.examples = self._settled
        if self.pending is not None:
            self.pending = []

    def add(self, delta: Tensor, groups: int, channels_at: int, examples_at: int = 0) -> None:
        """Add the output gradients of a batch, shaped as the output."""
        examples = delta.shape[examples_at] if delta.dim() >= 1 - channels_at else 1
        second = (_mean_square if self.scalar else _second_moment)(delta.detach(), groups, channels_at)
        if self.scale is not None:
            second = second * self.scale(examples) ** 2
        finite = (second.abs() < math.inf).all()  # or it is an overflow that a GradScaler is about to skip
        if self.scalar:  # at every update: do not wait for the device
            self._count(second.where(finite, 0.0), finite.to(second.dtype) * examples)
        elif finite:
            self._count(second, examples)

    def _count(self, second: Tensor, examples: Tensor | float) -> None:
        self.total = second if self.total is None else self.total + second
        self.examples = self.examples + examples

    def decay(self, weight: float) -> None:
        """Let everything seen so far count `weight` times as much."""
        if self.total is not None:
            self.total = self.total * weight
            self.examples = self.examples * weight

    def preconditioner(self, eps: float = 0.0) -> Tensor | None:
        """Q: the inverse of `G + eps tr(G)/out I`, or of its mean diagonal, 1 where that is zero; None if unknown."""
        if self.total is None:
            return None
        G = self.total / self.examples
        if self.scalar:
            return G.reciprocal().where(G > 0, 1.0)
        size = G.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        if not (size > 0).all():
            return None
        identity = torch.eye(G.shape[-1], dtype=G.dtype, device=G.device)
        L, info = torch.linalg.cholesky_ex((G + eps * size * identity).double())
        return torch.cholesky_inverse(L).to(G.dtype) if not info.any() else None

    def state_dict(self) -> dict[str, Any]:
        """What was gathered so far."""
        return {"total": self.total, "examples": float(self.examples)}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Continue from what `state_dict` gave."""
        self.total = None if state["total"] is None else state["total"].to(device, copy=True)
        self.examples = float(state["examples"])
        self.settle()


def _mean_square(delta: Tensor, groups: int, channels_at: int) -> Tensor:
    """The sum of squares of the outputs of each group over their number, (groups, 1, 1)."""
    dtype = accumulation_dtype(delta.dtype)
    if groups == 1:  # one pass over memory, however it is laid out
        norms = torch.linalg.vector_norm(delta, dtype=dtype).view(1, 1, 1)
    else:
        norms = torch.linalg.vector_norm(_rows(delta, groups, channels_at), dim=(1, 2), keepdim=True, dtype=dtype)
    squares: Tensor = norms.square()
    return squares * (groups / delta.shape[channels_at])


def _second_moment(delta: Tensor, groups: int, channels_at: int) -> Tensor:
    """delta^T delta of each group, (groups, out, out)."""
    with full_precision(delta):
        rows = _rows(delta, groups, channels_at).to(accumulation_dtype(delta.dtype))
        return rows.mT @ rows


def _rows(delta: Tensor, groups: int, channels_at: int) -> Tensor:
    """Gradients as (groups, rows, out)."""
    rows = torch.movedim(delta, channels_at, -1)
    return rows.reshape(-1, groups, rows.shape[-1] // groups).transpose(0, 1)


def precondition(gradient: Tensor, Q: Tensor) -> Tensor:
    """Q times a packed gradient (groups, out, ...), for Q (groups, out, out) or (groups, 1, 1)."""
    flat = gradient.flatten(2) if gradient.dim() > 2 else gradient.unsqueeze(-1)
    Q = Q.to(gradient.dtype)
    return (flat * Q if Q.shape[-1] == 1 else Q @ flat).view(gradient.shape)


@torch.no_grad()
def sampled_output_gradient(
    output: Tensor, distribution: Distribution, generator: torch.Generator | None = None
) -> Tensor:
    """The gradient of -log p(y) with respect to the model's output, with y drawn from the model itself.

    categorical   softmax(output) - onehot(y), classes where `F.cross_entropy` has them
    bernoulli     sigmoid(output) - y, elementwise
    gaussian      output - y = -noise of unit variance, elementwise

    Where the output is no distribution's parameter, as after an overflow, the gradient is NaN.
    """
    if distribution == "gaussian":
        return torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)
    if distribution == "bernoulli":
        p = output.sigmoid()
        return p - torch.bernoulli(p.nan_to_num(0.5), generator=generator)
    classes_at = 0 if output.dim() == 1 else 1
    p = output.softmax(classes_at)
    rows = p.movedim(classes_at, -1)
    chances = rows.reshape(-1, rows.shape[-1]).float().nan_to_num(1.0)
    y = torch.multinomial(chances, 1, generator=generator).view(rows.shape[:-1])
    onehot = torch.zeros_like(rows).scatter_(-1, y.unsqueeze(-1), 1)
    return p - onehot.movedim(-1, classes_at)
