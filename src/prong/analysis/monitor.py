"""Conditioning while a model trains: spectra of layers' inputs, and how white their whitening still leaves them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from numbers import Real
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.optim import Optimizer

from prong.analysis.conditioning import condition_number, drift_from_white, input_spectrum, whitened_spectrum
from prong.analysis.observation import Listener, Seen, tensors_given
from prong.core.factorise import eps_of
from prong.layers import Kind, WhitenedLayer
from prong.layers.plain import plain_kind
from prong.layers.site import in_backward, in_transform
from prong.layers.taps import tap_of
from prong.model.estimate import aside
from prong.model.whiten import SUPPORTED, check_model, fitting, site_name, whitened_sites
from prong.options import Damping, Explicit, Implicit, check_count, check_damping
from prong.refresh.refresher import Refresher

Callback = Callable[[nn.Module], Mapping[str, float]]


@dataclass(frozen=True)
class Row:
    """One layer at one update; `prong.analysis.conditioning` has the formulas. Without finite inputs, NaN or None.

    The drift is 0 for the inputs that the whitening came from, but for a thin P (`cutoff`) and PRONG+: compare it there
    with that of the first row after a refresh.
    """

    update: int  # whose forward was looked at; the first is 1
    layer: str
    inputs: int  # how many, over all groups; where they are whitened in blocks, those alone are looked at
    samples: int  # rows looked at; with fewer than inputs, some eigenvalues are zero for want of samples
    eps: float  # damping: the whitening's, or what its optimizer's or the monitor's own comes to
    spectrum: tuple[float, ...]  # of Sigma (of E[h h^T] where nothing centres), largest first; empty if not kept
    condition: float  # (lam_max + eps) / (lam_min + eps)
    condition_undamped: float  # lam_max / lam_min, at most 1 / floor
    drift: float | None = None  # ||U (Sigma + eps I) U^T - I||_F / sqrt(inputs), Sigma about c; None if not whitened
    chance: float | None = None  # that of so few new normal rows; None with a thin P and with PRONG+
    condition_whitened: float | None = None  # of U (Sigma + eps I) U^T, what the optimizer sees


class Monitor:
    """Measures, at chosen updates, the inputs of a model's layers from the training forwards themselves.

        with prong.monitor.Monitor(model, optimizer, 100) as monitor:
            train()
        json.dumps(monitor.to_dicts())

    Training is not changed by a bit. The model may be whitened in any form, wholly, partly or not at all. Layers are
    seen when they are called in training mode; attention's output projection never is.

    `when` is a number k for every k-th update, or a set or a range of updates. Layers are names or patterns; None takes
    all that can be whitened. A measurement is of at most `samples` rows of a layer's inputs, evenly spread over all
    in a `window` of updates, the chosen one the last. `damping` is for layers that are not whitened; others use
    their own. Eigenvalues below `floor` times the largest count as that, in the undamped condition number. Most of the
    time is spent on `whitened_condition`, and most of the memory on spectra (`keep_spectrum`). The `callback` returns
    more numbers by name; it cannot disturb gradients, buffers, random state or train/eval mode.

    What was measured is in `rows`, and what the callback returned in `numbers`, with the key "update" added. Updates
    are counted in `updates`; set it where a run is resumed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        when: int | Collection[int] = 1000,
        *,
        layers: str | Iterable[str] | None = None,
        samples: int = 512,
        window: int = 1,
        damping: Damping = 0.1,
        floor: float = 1e-7,
        whitened_condition: bool = True,
        keep_spectrum: bool = True,
        callback: Callback | None = None,
    ) -> None:
        check_model(model)
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
        check_count("samples", samples, 2)
        check_count("window", window, 1)
        _check_when(when, window)
        check_damping(damping)
        if not 0 < floor < 1:
            raise ValueError(f"floor is a fraction of the largest eigenvalue between 0 and 1, got {floor}")
        if callback is not None and not callable(callback):
            raise TypeError(f"callback is a function of the model, got {type(callback).__name__}")
        self.model, self.optimizer = model, optimizer
        self.when, self.samples, self.window, self.callback = when, samples, window, callback
        self.damping, self.floor = damping, floor
        self.whitened_condition, self.keep_spectrum = whitened_condition, keep_spectrum
        self.rows: list[Row] = []
        self.numbers: list[dict[str, float]] = []
        self.updates = 0
        self._seen: dict[str, Seen] = {}
        visible = {
            name: module
            for name, module in model.named_modules()
            if (isinstance(module, WhitenedLayer) or plain_kind(module) is not None)
            and not isinstance(module, NonDynamicallyQuantizableLinear)
        }
        self._hooks = ExitStack()
        for name in fitting(visible, layers, f"layer to look at ({SUPPORTED})"):
            hook = visible[name].register_forward_pre_hook(Listener(self, name), with_kwargs=True)
            self._hooks.enter_context(hook)
        self._hooks.enter_context(optimizer.register_step_post_hook(self._after_step))

    def to_dicts(self) -> list[dict[str, Any]]:
        """The rows as dicts of plain values, for JSON, which has no NaN and no infinity: they are None."""
        return [{key: _plain(value) for key, value in asdict(row).items()} for row in self.rows]

    def detach(self) -> None:
        """Let go of model and optimizer; rows stay."""
        self._hooks.close()
        self._seen.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.detach()

    @property
    def updates(self) -> int:
        """How many updates were counted."""
        return self._updates

    @updates.setter
    def updates(self, count: int) -> None:
        self._updates = count
        # Whether the update under way is looked at; compiled models are guarded by it.
        self.listening = any(self._is_chosen(count + ahead) for ahead in range(1, 1 + self.window))

    def _is_chosen(self, update: int) -> bool:
        return update % self.when == 0 if isinstance(self.when, int) else update in self.when

    def look(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of a layer's inputs."""
        if not module.training or in_backward() or in_transform():
            return  # evaluation; checkpointing runs forwards again; under vmap there are no values
        if any(site.aside for _, site in whitened_sites(self.model).values()):
            return  # a forward that only gathers statistics for a refresh
        layer = _seen_as(module)
        for site, h in zip(layer.sites, tensors_given(layer, args, kwargs), strict=False):
            if h.dim() < -layer.channels_at or h.shape[layer.channels_at] != site.layout.channels:
                return  # the layer is about to refuse this, in torch's words
            seen = self._seen.get(site_name(name, site))
            if seen is None or seen.layout != site.layout:  # an optimizer may choose blocks at the first forward
                seen = self._seen[site_name(name, site)] = Seen(layer, site, self.samples)
            seen.layer, seen.whitening, seen.centred = layer, site.whitening, layer.centred(site)
            with torch.inference_mode(False), torch.no_grad():
                seen.add(layer.input_rows(site, h.detach()))

    def _after_step(self, *_: Any) -> None:
        found_inf = getattr(self.optimizer, "found_inf", None)
        if found_inf is not None and float(found_inf) > 0:  # a fused step that GradScaler skipped
            return
        self.updates += 1
        if self._is_chosen(self.updates):
            with torch.inference_mode(False), torch.no_grad():
                self.rows.extend(self._measure(name, seen) for name, seen in self._seen.items() if len(seen))
            if self.callback is not None:
                self.numbers.append({"update": self.updates, **_numbers(self.callback, self.model)})
        if self._is_chosen(self.updates) or not self.listening:
            self._seen.clear()

    def _measure(self, name: str, seen: Seen) -> Row:
        w, moments, channels = seen.whitening, seen.moments(), seen.layout.channels
        eps = math.nan if w is None else w.eps
        if moments is None:
            return Row(self.updates, name, channels, len(seen), eps, (), math.nan, math.nan)
        if w is None:
            owner = seen.layer.owner
            eps = eps_of(owner.damping if isinstance(owner, Refresher) else self.damping, moments, channels)
        spectrum = input_spectrum(moments, seen.centred)[:channels]  # blocks may be filled up with zeros
        kept = tuple(spectrum.tolist()) if self.keep_spectrum else ()
        conditions = condition_number(spectrum, eps), condition_number(spectrum, floor=self.floor)
        row = Row(self.updates, name, channels, len(seen), eps, kept, *conditions)
        if w is None:
            return row
        drift, chance = drift_from_white(moments, w)
        rescaled = isinstance(seen.layer.options, Explicit) and seen.layer.options.plus
        white = condition_number(whitened_spectrum(moments, w)) if self.whitened_condition else None
        return replace(row, drift=drift, chance=None if rescaled else chance, condition_whitened=white)


def _seen_as(module: nn.Module) -> Kind:
    """A layer as one that can be whitened: itself, the view that its optimizer has of it, or a new one."""
    if isinstance(module, WhitenedLayer):
        return module
    tap, kind = tap_of(module), plain_kind(module)
    assert kind is not None
    return kind(module, Implicit()) if tap is None or tap.layer is None else tap.layer


def _check_when(when: object, window: int) -> None:
    """Refuse what are no updates, and windows that overlap."""
    if isinstance(when, int):
        check_count("when", when, 1)
        when = [when, 2 * when]
    if not isinstance(when, Collection) or isinstance(when, str | bytes | Tensor):
        raise TypeError(f"when is a number of updates, or a set or range of them; got {type(when).__name__}")
    few = [*when[:2], *when[-1:]] if isinstance(when, range) else list(when)  # of a range, enough to know all
    for update in few:
        check_count("when", update, 0)
    for one, other in pairwise(sorted(set(few))):
        if other - one < window:
            raise ValueError(f"a window of {window} updates does not fit between measurements at {one} and {other}")


def _numbers(callback: Callback, model: nn.Module) -> dict[str, float]:
    with aside(model):
        found = callback(model)
    if not isinstance(found, Mapping):
        raise TypeError(f"the monitor's callback returns a dict of numbers, got {type(found).__name__}")
    for name, value in found.items():
        if not isinstance(value, Real) and not (isinstance(value, Tensor) and value.numel() == 1):
            raise TypeError(f"the monitor's callback returns numbers by name, but {name!r} is a {type(value).__name__}")
    return {str(name): float(x.detach() if isinstance(x, Tensor) else x) for name, x in found.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
