"""Mean and second moment of a layer's input, gathered batch by batch; activations are not kept.

Everything is held per group, as a grouped convolution has one block of inputs per group: a batch is
(groups, rows, in). Ordinary layers have one group.
"""

from __future__ import annotations

import copy
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

CPU = torch.device("cpu")


def is_half(dtype: torch.dtype) -> bool:
    """Whether a dtype is of lower precision than float32."""
    return torch.finfo(dtype).eps > torch.finfo(torch.float32).eps


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over values of `dtype` are kept: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def has_bfloat16(device: torch.device = CPU) -> bool:
    """Whether a device has units that multiply in bfloat16."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return False


def full_precision(like: Tensor) -> AbstractContextManager[object]:
    """Under this, autocast does not round matrix products on the device of `like` to half precision."""
    device = like.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


class Moments:
    """Count, mean and scatter of the rows seen so far.

        mean = 1/n sum_i h_i          scatter = sum_i (h_i - mean)(h_i - mean)^T

    Batches are merged by the exact update of Chan, Golub and LeVeque (1979): any split and order of the
    rows gives the moments of one pass, up to rounding. While there are fewer rows than inputs, the scatter
    is held as a thin `factor` with `scatter = factor^T factor`, which is smaller and which lets the
    whitening be computed through a small Gram matrix. After that it is dense, with a factor of rows yet to be added.

    Shapes: mean (groups, in), scatter (groups, in, in), factor (groups, rows, in).
    """

    def __init__(
        self, groups: int, features: int, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
    ) -> None:
        self.count = 0.0
        self.mean = torch.zeros(groups, features, dtype=accumulation_dtype(dtype), device=device)
        self._dense: Tensor | None = None
        self._factors: list[Tensor] = []

    @torch.no_grad()
    def add(self, rows: Tensor) -> None:
        """Add a batch of rows (groups, rows, in).

        Raises:
            ValueError: if the shape is wrong.
            FloatingPointError: if a value is NaN, infinite or too large to square; nothing has been added then.
        """
        groups, features = self.mean.shape
        if rows.dim() != 3 or rows.shape[0] != groups or rows.shape[2] != features:
            raise ValueError(
                f"expected rows of shape ({groups}, any, {features}), got {tuple(rows.shape)}. "
                "Statistics belong to one layer's own inputs."
            )
        if rows.shape[1] == 0:
            return
        with full_precision(rows):
            rows = rows.to(self.mean.dtype)
            mean = rows.mean(1)
            centred = rows - mean.unsqueeze(1)
            if not math.isfinite(torch.linalg.vector_norm(centred).item()):  # as one NaN or infinity anywhere makes it
                found = "values too large to square" if torch.isfinite(mean).all() else "NaN or infinite values"
                raise FloatingPointError(f"the inputs contain {found}")
            self._merge(rows.shape[1], mean, factor=centred)

    @torch.no_grad()
    def add_zeros(self, count: float) -> None:
        """Add `count` rows of zeros, as zero padding does, without making them."""
        if count > 0:
            with full_precision(self.mean):
                self._merge(count, torch.zeros_like(self.mean))

    @torch.no_grad()
    def merge(self, other: Moments) -> None:
        """Add everything `other` has seen."""
        if other.mean.shape != self.mean.shape:
            raise ValueError(f"moments of shape {tuple(other.mean.shape)} do not merge with {tuple(self.mean.shape)}")
        if other.count > 0:
            with full_precision(self.mean):
                like = self.mean
                rows = other._rows().to(like) if other._factors else None
                self._merge(other.count, other.mean.to(like), rows, other._dense)

    @torch.no_grad()
    def decay(self, weight: float) -> None:
        """Let everything seen so far count `weight` times as much (weight >= 0)."""
        self.count *= weight
        if self._dense is not None:
            self._dense = self._dense * weight
        self._factors = [factor * math.sqrt(weight) for factor in self._factors]

    def snapshot(self) -> Moments:
        """These moments as they are now, to which others may be added; tensors are shared, as none is written to."""
        same = copy.copy(self)
        same._factors = list(self._factors)
        return same

    def empty(self) -> Moments:
        """Moments of the same kind that have seen nothing."""
        return Moments(self.mean.shape[0], self.mean.shape[1], self.mean.dtype, self.mean.device)

    def to(self, like: Tensor) -> Moments:
        """A copy on the device and in the precision for inputs like this tensor."""
        copy = Moments(self.mean.shape[0], self.mean.shape[1], like.dtype, like.device)
        copy.load_state_dict(self.state_dict())
        return copy

    @property
    def factor(self) -> Tensor | None:
        """The thin factor of the scatter, or None once there are as many rows as inputs."""
        return self._rows() if self._dense is None else None

    @property
    def scatter(self) -> Tensor:
        """The sum of outer products of the centred rows."""
        if self._dense is not None:
            self._condense()
            return self._dense
        factor = self._rows()
        with full_precision(factor):
            return factor.mT @ factor

    def tensors(self) -> list[Tensor]:
        """The tensors held."""
        return [self.mean, *self._factors, *([] if self._dense is None else [self._dense])]

    def mean_square(self, channels: int) -> float:
        """E[h^2], averaged over so many channels (groups may be filled up with zeros)."""
        spread = self._rows().square().sum()
        if self._dense is not None:
            spread = spread + self._dense.diagonal(dim1=1, dim2=2).sum()
        return float(spread / max(self.count, 1) + self.mean.square().sum()) / channels

    def covariance(self, centred: bool = True) -> Tensor:
        """Sigma = E[(h-c)(h-c)^T] with c the mean, or E[h h^T] (c = 0) when not centred."""
        Sigma = self.scatter / self.count
        if not centred:
            Sigma = Sigma + self.mean.unsqueeze(2) * self.mean.unsqueeze(1)
        return Sigma

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors and numbers."""
        state: dict[str, Any] = {"count": self.count, "mean": self.mean.clone()}
        if self._dense is not None:
            state["scatter"] = self._dense.clone()
        if self._factors or self._dense is None:
            state["factor"] = self._rows().clone()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        if (shape := state["mean"].shape) != self.mean.shape:
            raise ValueError(f"these statistics are of shape {tuple(shape)}, the layer's are {tuple(self.mean.shape)}")
        self.count = float(state["count"])
        self.mean = state["mean"].to(self.mean, copy=True)
        self._dense = state["scatter"].to(self.mean, copy=True) if "scatter" in state else None
        self._factors = [state["factor"].to(self.mean, copy=True)] if "factor" in state else []

    def _rows(self) -> Tensor:
        """What is held as rows, in one piece."""
        if len(self._factors) == 1:
            return self._factors[0]
        nothing = self.mean.new_zeros(self.mean.shape[0], 0, self.mean.shape[1])
        return torch.cat([nothing, *self._factors], dim=1)

    def _condense(self) -> None:
        """Add what is held as rows to the dense scatter, in one product."""
        if self._factors:
            rows = self._rows()
            with full_precision(rows):
                self._dense = rows.mT @ rows if self._dense is None else torch.baddbmm(self._dense, rows.mT, rows)
            self._factors = []

    def _merge(self, count: float, mean: Tensor, factor: Tensor | None = None, scatter: Tensor | None = None) -> None:
        """Merge a part whose scatter is `scatter` or `factor^T factor` (neither: zero)."""
        total = self.count + count
        delta = mean - self.mean
        parts = [] if factor is None else [factor]
        if self.count > 0:  # the two means differ: one more row, of the weight that the formula gives
            parts.append(math.sqrt(self.count * count / total) * delta.unsqueeze(1))
        self._factors.extend(parts)
        if scatter is not None:
            scatter = scatter.to(self.mean)
            self._dense = scatter.clone() if self._dense is None else self._dense + scatter
        # A pass over the dense scatter costs as much as many rows, so they wait until there are enough.
        if sum(part.shape[1] for part in self._factors) >= self.mean.shape[1]:
            self._condense()
        self.mean = self.mean + delta * (count / total)
        self.count = total


LEAST = 64  # rows of a batch that are looked at in any case


def sampled(rows: Tensor, count: int) -> Tensor:
    """So many of the rows (groups, rows, in), spread over all of them without a period."""
    total = rows.shape[1]
    step = round(total * 0.6180339887)
    while math.gcd(step, total) > 1:  # or some rows would be met twice
        step += 1
    chosen = torch.arange(count, device=rows.device) * step % total
    return rows.index_select(1, chosen)


class Window:
    """Moments of a layer's inputs, of which those of the update under way can be taken back."""

    def __init__(self, settled: Moments, examples: float = 0.0, share: float = 1.0) -> None:
        self.examples = examples  # that were seen since the window opened, or since `forget`
        self.share = share  # of the rows of a batch that are looked at, but at least `LEAST` rows
        self.training_only = True  # whether forwards in eval mode are left out
        # Where inputs that cannot be added are told, if not at once: a worker that stops in the middle of a forward
        # keeps the others waiting. (For windows that are not those of an optimizer.)
        self.errors: list[FloatingPointError] | None = None
        self._settled = settled
        self._fresh = settled.empty()
        self._fresh_examples = 0.0
        self.marks = 0  # how often it was marked
        self._marked: tuple[Moments, float] | None = None

    def mark(self) -> None:
        """Remember what is there, before something is added that others may miss."""
        self.marks += 1
        self._marked = self._fresh.snapshot(), self._fresh_examples

    def parted(self, since_mark: bool = True) -> Window:
        """A window that holds the same, but for what was added since the last mark, if it is not to."""
        own = copy.copy(self)
        own._settled, own._fresh = self._settled.snapshot(), self._fresh.snapshot()
        if not since_mark and self._marked is not None:
            own._fresh, own._fresh_examples = self._marked[0].snapshot(), self._marked[1]
        own._marked = None
        return own

    def add(self, rows: Tensor, zeros: float, examples: float) -> None:
        """Add a batch of rows (groups, rows, in) and rows of zeros; raises as `Moments.add` does."""
        count = max(LEAST, math.ceil(self.share * rows.shape[1]))
        if count < rows.shape[1]:
            share = count / rows.shape[1]
            rows, zeros, examples = sampled(rows, count), zeros * share, examples * share
        self._fresh.add(rows)
        self._fresh.add_zeros(zeros)
        self._fresh_examples += examples

    def restart(self, moments: Moments) -> None:
        """Go on with these moments instead, with no examples yet."""
        self._settled, self.examples = moments, 0.0
        self.undo()

    def undo(self) -> None:
        """Take back what was added since `settle`."""
        self._fresh, self._fresh_examples, self._marked = self._settled.empty(), 0.0, None

    def settle(self) -> None:
        """Keep what was added."""
        if self._fresh.count > 0:
            self._settled.merge(self._fresh)
        self.examples += self._fresh_examples
        self.undo()

    def forget(self, fraction: float) -> None:
        """Let older samples fade as new ones come, which make up this fraction of those that are to count."""
        self._settled.decay(max(0.0, 1 - fraction))
        self.examples = 0.0

    def scale(self, weight: float) -> None:
        """Let everything seen count `weight` times as much, the number of examples too."""
        self.settle()
        self._settled.decay(weight)
        self.examples *= weight

    @property
    def moments(self) -> Moments:
        """The moments of everything added."""
        self.settle()
        return self._settled

    @property
    def empty(self) -> bool:
        """Whether nothing was added yet."""
        return self._settled.count == self._fresh.count == 0

    def tensors(self) -> list[Tensor]:
        """The tensors that hold what was added."""
        return [x for part in (self._settled, self._fresh) if part.count > 0 for x in part.tensors()]

    def to(self, like: Tensor) -> Window:
        """A copy on the device and in the precision for inputs like this tensor."""
        copy = Window(self._settled.to(like), self.examples, self.share)
        copy._fresh, copy._fresh_examples = self._fresh.to(like), self._fresh_examples
        return copy

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors and numbers; apart what was added since `settle`, and can be taken back."""
        state = {**self._settled.state_dict(), "examples": self.examples}
        if self._fresh.count > 0:
            state["fresh"] = {**self._fresh.state_dict(), "examples": self._fresh_examples}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        self.undo()
        self._settled.load_state_dict(state)
        self.examples = float(state["examples"])
        if "fresh" in state:
            self._fresh.load_state_dict(state["fresh"])
            self._fresh_examples = float(state["fresh"]["examples"])


class MeanSquare:
    """A mean of squares, from sums over batches.

    A batch that is not finite, as when a GradScaler is about to skip it, counts only as long as there is no other. The
    host does not wait to know.
    """

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.count: Tensor | float = 0.0

    def add(self, squares: Tensor, count: float) -> None:
        """Add sums of squares over `count` rows."""
        if count == 0:
            return
        if self.total is None:
            self.total, self.count = squares, float(count)
            return
        known, finite = torch.isfinite(self.total).all(), torch.isfinite(squares).all()
        both, total, rows = known & finite, self.total, self.count
        self.total = torch.where(both, total + squares, torch.where(finite, squares, total))
        self.count = torch.where(both, rows + count, torch.where(finite, count, rows))

    def mean(self) -> Tensor | None:
        """The mean square, or None if there was nothing."""
        return None if self.total is None else self.total / self.count

    def take(self) -> Tensor | None:
        """The mean square since the last call, or None if there was nothing."""
        mean = self.mean()
        self.total, self.count = None, 0.0
        return mean

    def decay(self, weight: float) -> None:
        """Let everything seen so far count `weight` times as much."""
        if self.total is not None:
            self.total = self.total * weight
        self.count = self.count * weight

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors and numbers."""
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Continue from what `state_dict` gave."""
        self.total = None if state["total"] is None else state["total"].to(device)
        count = state["count"]
        self.count = count.to(device) if isinstance(count, Tensor) else float(count)
