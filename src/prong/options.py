"""Options as small objects: how layers are whitened, and when."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import torch

Basis = Literal["pca", "zca", "cholesky"]
Storage = torch.dtype | Literal["auto"]
Source = Literal["window", "ema"] | Iterable[Any]
STORAGES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Absolute:
    """The paper's damping: `U (Sigma + eps I) U^T = I`, in the units of the inputs."""

    eps: float

    def __post_init__(self) -> None:
        check_positive("eps", self.eps)


Damping = float | Absolute


def check_damping(damping: Damping) -> None:
    """Refuse a damping that is neither a positive finite number nor `Absolute`."""
    if not isinstance(damping, Absolute):
        check_positive("damping", damping)


@dataclass(frozen=True)
class Implicit:
    """Natural gradients from the backward pass; parameters stay canonical. For SGD.

    Args:
        cutoff: treat directions of the inputs whose variance is below `cutoff` times the damping as having none.
            Gains grow by at most about `1 + cutoff` times; where few directions remain, updates cost less. 0: exact.
        storage: the dtype in which matrices are kept and multiplied, e.g. torch.bfloat16 where the hardware is fast in
            it. None is the weight's own, and so it is for layers whose steps rounding would spoil. "auto" is bfloat16
            for float32 weights on devices with units for it, and elsewhere None.
        block: whiten contiguous blocks of at most so many inputs, each by itself; 1 scales each input.
    """

    cutoff: float = 0.0
    storage: Storage | None = None
    block: int | None = None

    name = "implicit"

    def __post_init__(self) -> None:
        if checked_number("cutoff", self.cutoff) < 0:
            raise ValueError(f"cutoff is zero (exact) or more, in units of the damping, got {self.cutoff}")
        if self.storage not in (None, "auto", *STORAGES):
            raise TypeError(f"storage is 'auto', one of {', '.join(map(str, STORAGES))}, or None; got {self.storage!r}")
        check_count("block", self.block, 1, optional=True)


@dataclass(frozen=True)
class Explicit:
    """The paper's own: the layers train V and d, and their forward passes multiply by U. For any optimizer.

    Args:
        basis: "pca", "zca" or "cholesky". All give SGD the same path; elementwise optimizers differ.
        plus: PRONG+: after each update, rescale by the deviation of the whitened activations. Needs "pca".
    """

    basis: Basis = "pca"
    plus: bool = False

    name = "explicit"

    def __post_init__(self) -> None:
        check_basis(self.basis)
        if not isinstance(self.plus, bool):
            raise TypeError(f"plus is True or False, got {self.plus!r}")
        if self.plus and self.basis != "pca":
            raise ValueError('PRONG+ rescales principal directions and needs basis="pca"')


@dataclass(frozen=True)
class Materialised:
    """Plain layers: the optimizer holds V and d, and writes W = V U after each step. For any optimizer.

    Args:
        basis: as of `Explicit`.
        block: as of `Implicit`.
    """

    basis: Basis = "pca"
    block: int | None = None

    name = "materialised"

    def __post_init__(self) -> None:
        check_basis(self.basis)
        check_count("block", self.block, 1, optional=True)


@dataclass(frozen=True)
class Auto:
    """The cheapest form for every layer: natural gradients at the step for SGD, and the materialised one for others.

    Layers stay plain, and gradients mean what they mean without whitening. Layers that are too wide are whitened in
    blocks, as large as the budget allows once the first batch has told what an update costs.

    Args:
        time: what whitening may cost, as a share of a layer's own update.
        memory: the size that whitening matrices may have, as a share of the model's.
    """

    time: float = 0.2
    memory: float = 1.0

    name = "auto"

    def __post_init__(self) -> None:
        check_positive("time", self.time)
        check_positive("memory", self.memory)


Form = Implicit | Explicit | Materialised
FORMS: dict[str, type[Form | Auto]] = {form.name: form for form in (Auto, Implicit, Explicit, Materialised)}


def as_form(form: str | Form | Auto) -> Form | Auto:
    """A form by its name, with its defaults; or as it is."""
    if isinstance(form, Auto | Implicit | Explicit | Materialised):
        return form
    if not isinstance(form, str) or form not in FORMS:
        raise ValueError(
            f"form is {', '.join(map(repr, FORMS))}, or one of prong.Auto(...), prong.Implicit(...), "
            f"prong.Explicit(...) and prong.Materialised(...); got {form!r}"
        )
    return FORMS[form]()


@dataclass(frozen=True)
class Never:
    """No refreshes but those that are asked for: before the first, an optimizer is torch's own, bit for bit."""


@dataclass(frozen=True, kw_only=True)
class _Refreshes:
    """What all that refreshes by itself has in common."""

    samples: int = 12_800
    source: Source = "window"
    lag: int = 0
    state: Literal["transport", "reset"] = "transport"

    def __post_init__(self) -> None:
        check_count("samples", self.samples, 2)
        check_count("lag", self.lag, 0)
        check_choice("state", self.state, ("transport", "reset"))
        if isinstance(self.source, str):
            check_choice("source", self.source, ("window", "ema", "the loader itself"))
        elif not isinstance(self.source, Iterable):
            raise TypeError(f"source is 'window', 'ema' or an iterable of batches, got {type(self.source).__name__}")
        elif iter(self.source) is self.source:
            raise TypeError("source is gone through at every refresh: give a list or a DataLoader, not an iterator")


@dataclass(frozen=True)
class Every(_Refreshes):
    """Refresh before the first update, ever more rarely after it, and then after every so many updates.

    Args:
        updates: updates between refreshes, the paper's T.
        samples: examples per refresh, the paper's N_s. Rows count for linear layers and attention (tokens), images for
            convolutions. Of several workers, those of all together.
        source: "window": the forwards in training mode just before a refresh (where refreshes are closer than a window
            is long, older ones fade); "ema": all forwards, forgotten at a rate that leaves `samples`; or an iterable of
            batches (a loader) to run the model on, as the paper does.
        lag: factorise in another thread, and change coordinates so many updates later; 0 does both at once.
        growth: before the first period is over, refreshes come after updates 1, 2, 4 and 8, and then each interval is
            so many times the whole time before it: 1 goes on doubling. None: no such refreshes, as in the paper.
        state: "transport" the optimizer's state exactly, or "reset" it, as the paper did.
    """

    updates: int = 1000
    growth: float | None = field(default=0.25, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("updates", self.updates, 1)
        check_positive("growth", self.growth, optional=True)


@dataclass(frozen=True)
class OnDrift(_Refreshes):
    """Refresh each layer when its inputs have drifted, once the first refreshes (after 1, 2, 4, ... updates) are made.

    Its options are `samples`, `source`, `lag` and `state`, as of `Every`.
    """


Refresh = Every | OnDrift | Never


def check_refresh(refresh: Refresh) -> None:
    """Refuse what says not when to refresh."""
    if not isinstance(refresh, Every | OnDrift | Never):
        raise TypeError(
            f"refresh is prong.Every(...), prong.OnDrift(...) or prong.Never(), got {type(refresh).__name__}"
        )


@dataclass(frozen=True)
class WhitenOutputs:
    """Whiten backpropagated gradients too: the paper's footnote, `W = R^T V U`.

    Args:
        source: "empirical" (from the training gradients, hence of the labels in the data), or the distribution that the
            model's output parametrises, "categorical", "bernoulli" or "gaussian" (labels drawn from the model).
        damping: relative to the mean of the squares of a layer's output gradients.
        loss_scale: for "empirical": what the mean loss was multiplied by before `backward`, if anything; a number or a
            function that tells, such as `lambda: scaler.get_scale() / accumulation_steps`.
    """

    source: Literal["empirical", "categorical", "bernoulli", "gaussian"] = "categorical"
    damping: float = 0.1
    loss_scale: Any = 1.0

    def __post_init__(self) -> None:
        check_choice("source", self.source, ("empirical", "categorical", "bernoulli", "gaussian"))
        check_positive("damping", self.damping)


def told(options: Any) -> dict[str, Any]:
    """An options object as names and plain values, for what is saved."""
    return {each.name: getattr(options, each.name) for each in fields(options)}


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Refuse what is none of the choices."""
    if value not in (choices := list(choices)):
        raise ValueError(f"{name} is one of {', '.join(choices)}, got {value!r}")


def check_basis(basis: str) -> None:
    """Refuse an unknown basis."""
    check_choice("basis", basis, get_args(Basis))


def check_count(name: str, value: int | None, least: int, optional: bool = False) -> None:
    """Refuse what is not a whole number of at least so many; None passes where it is `optional`."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a whole number, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} is at least {least}, got {value}")


def check_positive(name: str, value: float | None, optional: bool = False) -> None:
    """Refuse what is not a positive finite number; None passes where it is `optional`."""
    if value is None and optional:
        return
    if checked_number(name, value) <= 0:
        raise ValueError(f"{name} must be positive and finite, got {value}")


def checked_number(name: str, value: object) -> float:
    """The value, if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a number, got {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    return value
