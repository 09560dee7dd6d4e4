"""When and from which samples a model's whitening is re-estimated while an optimizer trains it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from prong.estimation import as_batches, gathering, run_batches, undisturbed
from prong.gradient_whitening import GradientWhitening
from prong.injection import check_model
from prong.layers import Explicit, Implicit
from prong.projection import Transition
from prong.refresh import OnRefresh, assign_, check_between_updates, require_whitened, rewhiten_
from prong.statistics import MeanSquare
from prong.transport import transports_of, warn_unknown
from prong.whitening import Whitening, check_eps, identity_whitening

Source = Literal["window", "ema"] | Iterable[Any]
PLUS_DECAY = 0.9  # of the running variance of whitened activations, per update


class Refresher:
    """Refreshes a whitened model after updates 1, 2, 4, ... and then every `period`-th, as its optimizer steps.

    It listens to `optimizer.step()`: nothing in the training loop changes. With the implicit form the optimizer is
    SGD (or `PRONG`, which brings its own refresher); with the explicit form it can be any, and its state is carried
    into the new coordinates.

    Args:
        model: a model with whitened layers (`whiten_`).
        optimizer: the optimizer that trains it.
        eps: damping.
        period: updates between refreshes, the paper's T.
        samples: examples per refresh, the paper's N_s. Rows count for linear layers and attention (tokens), images
            for convolutions.
        source: "window": the training forwards just before a refresh (where refreshes are closer than a window is
            long, older ones fade); "ema": all forwards, forgotten at a rate that leaves `samples`; or an iterable of
            batches (a loader) to run the model on, as the paper does.
        on_refresh: "transport" the optimizer's momentum exactly, or "reset" it, as the paper did.
        plus: PRONG+: after each update, rescale by the standard deviation of the whitened activations.
        gradients: whitening of gradients, if wanted.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        eps: float = 1e-2,
        period: int = 1000,  # T
        samples: int = 12_800,  # N_s
        source: Source = "window",
        on_refresh: OnRefresh = "transport",
        plus: bool = False,
        gradients: GradientWhitening | None = None,
    ) -> None:
        check_model(model)
        check_eps(eps)
        _check_count("period", period, 1)
        _check_count("samples", samples, 2)
        if isinstance(source, str) and source not in ("window", "ema"):
            raise ValueError(f"source is 'window', 'ema' or the loader itself, got {source!r}")
        if not isinstance(source, str):
            as_batches(source)
        if on_refresh not in ("transport", "reset"):
            raise ValueError(f"on_refresh is 'transport' or 'reset', got {on_refresh!r}")
        if gradients is not None and gradients.needs_windows and not isinstance(source, str):
            raise ValueError("gradient_whitening gathers from training passes: use source='window' or 'ema'")
        self.sites = require_whitened(model)
        self._check_optimizer(optimizer, plus)
        self.model, self.optimizer = model, optimizer
        self.eps, self.period, self.samples = eps, period, samples
        self.source, self.on_refresh, self.plus = source, on_refresh, plus
        self.gradients = gradients
        self.updates = 0
        self._window_start = dict.fromkeys(self.sites, 0)
        self._rates: dict[str, float] = {}  # examples per update, learnt from the last window
        if transports_of(optimizer) is None and on_refresh == "transport":
            warn_unknown(optimizer)
        if not isinstance(source, str):
            self.refresh()  # the paper's first: before any update
        for layer, site in self.sites.values():
            layer.owner = self
            site.spread = MeanSquare() if plus else None
        if isinstance(source, str):
            self._open_windows()
        self._handle = optimizer.register_step_post_hook(self._after_step)

    def refresh(self, batches: Iterable[Any] | None = None) -> None:
        """Refresh now, from `batches`, the loader, or what the windows hold."""
        check_between_updates()
        batches = self.source if batches is None else batches
        if isinstance(batches, str):
            self._refresh_from_windows()
            self._open_windows()
        else:
            with undisturbed(self.model), gathering(self.model) as moments:
                run_batches(self.model, batches, self.samples)
            rewhiten_(self.sites, moments, self.eps, self.optimizer, self.on_refresh)
        for _, site in self.sites.values():
            if site.spread is not None:
                site.spread.take()  # measured in the old coordinates

    def next_refresh(self) -> int:
        """The update after which the next refresh comes."""
        now = self.updates + 1
        doubling = 1 << (now - 1).bit_length()
        return min(doubling, self.period) if now <= self.period else -(-now // self.period) * self.period

    def detach(self) -> None:
        """Stop refreshing: forget windows and the optimizer. The whitening stays as it is."""
        self._handle.remove()
        if self.gradients is not None:
            self.gradients.detach()
        for layer, site in self.sites.values():
            site.inputs = site.spread = site.outputs = None
            layer.owner = None

    def release(self) -> None:
        """Detach, with the parameters and the optimizer's state back in canonical coordinates. `fold_` calls it."""
        whitened = {n: (layer, site) for n, (layer, site) in self.sites.items() if site.whitening is not None}
        explicit = {
            name: (layer, site, identity_whitening(site.layout.groups, site.layout.features, layer.pair(site)[0]))
            for name, (layer, site) in whitened.items()
            if isinstance(layer, Explicit)
        }
        assign_(explicit, self.optimizer, self.on_refresh)
        for _, site in whitened.values():
            site.whitening = None
        self.detach()

    def state_dict(self) -> dict[str, Any]:
        """Whitening, windows and counters, by the names of the layers; tensors, numbers and strings only."""
        layers: dict[str, Any] = {}
        for name, (layer, site) in self.sites.items():
            entry: dict[str, Any] = {"window_start": self._window_start[name], "examples": site.examples}
            if name in self._rates:
                entry["rate"] = self._rates[name]
            if site.whitening is not None:
                entry["whitening"] = {key: x for key, x in site.whitening.items() if x is not None}
            if site.inputs is not None:
                entry["window"] = site.inputs.state_dict()
            if isinstance(layer, Explicit):
                V, d = layer.pair(site)
                entry["V"] = V.detach().clone()
                if d is not None:
                    entry["d"] = d.detach().clone()
            layers[name] = entry
        state = {"updates": self.updates, "layers": layers}
        if self.gradients is not None:
            state["gradients"] = self.gradients.state_dict()
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as if never stopped, from what `state_dict` gave.

        Raises:
            ValueError: a state of another model; nothing has been changed then.
        """
        self.check_state_dict(state)
        self.updates = int(state["updates"])
        for name, entry in state["layers"].items():
            layer, site = self.sites[name]
            weight, bias = layer.pair(site)
            saved = entry.get("whitening")
            site.whitening = None
            if saved is not None:
                site.whitening = Whitening(**{"c": None, **saved}).map(lambda x, like=weight: x.to(like, copy=True))  # type: ignore[misc]
            for target, key in ((weight, "V"), (bias, "d")):
                if target is not None and key in entry:
                    target.copy_(entry[key])
            site.inputs = None
            if "window" in entry:
                site.inputs = site.new_moments(weight)
                site.inputs.load_state_dict(entry["window"])
            site.examples = float(entry["examples"])
            self._window_start[name] = int(entry["window_start"])
        self._rates = {name: float(e["rate"]) for name, e in state["layers"].items() if "rate" in e}
        if self.gradients is not None and "gradients" in state:
            self.gradients.load_state_dict(state["gradients"])

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse a state that is not of this model."""
        saved, mine = set(state["layers"]), set(self.sites)
        if saved != mine:
            raise ValueError(
                "this state is of a model with other whitened layers: "
                f"missing {sorted(mine - saved)}, unexpected {sorted(saved - mine)}"
            )
        for name, entry in state["layers"].items():
            layer, site = self.sites[name]
            expected = (site.layout.groups, site.layout.features)
            whitening = entry.get("whitening", {})
            for key in ("P", "U"):
                if key in whitening and tuple(whitening[key].shape) != (*expected, expected[1]):
                    raise ValueError(
                        f"this state has a whitening of shape {tuple(whitening[key].shape)} for layer {name!r}, "
                        f"which needs {(*expected, expected[1])}"
                    )
            form = "implicit" if "P" in whitening else "explicit" if "U" in whitening else layer.form
            if form != layer.form:
                raise ValueError(f"this state is of {form} layers, but layer {name!r} is {layer.form}")

    def _check_optimizer(self, optimizer: Optimizer, plus: bool) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
        layers = [layer for layer, _ in self.sites.values()]
        if any(layer.owner is not None for layer in layers):
            raise ValueError(
                "this model is refreshed by another PRONG or Refresher already. Detach that one "
                "(refresher.detach()), or start afresh with prong.fold_(model)."
            )
        if any(isinstance(layer, Implicit) for layer in layers):
            if not isinstance(optimizer, torch.optim.SGD):
                raise ValueError(
                    f"{type(optimizer).__name__} is not linear in the gradient, so it cannot use implicit layers; "
                    'whiten the model with prong.whiten_(model, form="explicit")'
                )
            if plus:
                raise ValueError('PRONG+ rescales U itself and needs form="explicit"')
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        if several and torch.distributed.get_world_size() > 1 and any(isinstance(layer, Explicit) for layer in layers):
            raise NotImplementedError(
                "whitened coordinates are not shared among workers yet, so explicit layers would drift apart; "
                'use form="implicit", whose averaged natural gradients keep workers together'
            )
        if plus and any(layer.basis != "pca" for layer in layers):
            raise ValueError('PRONG+ rescales principal directions and needs basis="pca"')

    def _after_step(self, *_: Any) -> None:
        found_inf = getattr(self.optimizer, "found_inf", None)
        if found_inf is not None and float(found_inf) > 0:  # a fused step that GradScaler skipped
            return
        due = self.next_refresh() == self.updates + 1
        self.updates += 1
        if due:
            self.refresh()
            return
        if self.plus:
            self._rescale()
        if isinstance(self.source, str):
            self._open_windows()

    def _refresh_from_windows(self) -> None:
        """Refresh the sites that saw enough; the windows of the others stay open."""
        windows = {name: site.inputs for name, (_, site) in self.sites.items() if site.inputs is not None}
        ready = {name: moments for name, moments in windows.items() if moments.count >= 2}
        if not ready:
            warnings.warn(
                "no whitened layer saw two samples before a refresh was due; whitening stays as it is. "
                "Are the forwards run on the model that PRONG was given?",
                stacklevel=3,
            )
            return
        rewhiten_(self.sites, ready, self.eps, self.optimizer, self.on_refresh)
        for name in ready:
            self._close_window(name)

    def _close_window(self, name: str) -> None:
        """Begin the next window: empty, or with what is still recent where the next one overlaps this one."""
        _, site = self.sites[name]
        if self.gradients is not None:
            self.gradients.close(name)
        length = self.updates - self._window_start[name]
        if length > 0 and site.examples > 0:
            self._rates[name] = site.examples / length
        if self.source == "window" and not self._window_is_due(name):
            site.inputs = None
        elif self.source == "window":
            self._forget(name)
        site.examples = 0.0
        self._window_start[name] = self.updates

    def _window_is_due(self, name: str) -> bool:
        """Whether a window of `samples` examples that ends at the next refresh has begun."""
        rate = self._rates.get(name)
        return rate is None or math.ceil(self.samples / rate) >= self.next_refresh() - self.updates

    def _open_windows(self) -> None:
        for name, (layer, site) in self.sites.items():
            if site.inputs is None and (self.source == "ema" or self._window_is_due(name)):
                site.inputs = site.new_moments(layer.pair(site)[0])
                self._window_start[name] = self.updates
            if site.inputs is not None and self.gradients is not None:
                self.gradients.open(name)
            if self.source == "ema" and site.examples > 0:
                self._forget(name)
                site.examples = 0.0

    def _forget(self, name: str) -> None:
        """Let older samples fade as new ones come, so that about `samples` of them count."""
        _, site = self.sites[name]
        if site.inputs is not None:
            site.inputs.decay(max(0.0, 1 - site.examples / self.samples))

    def _rescale(self) -> None:
        """PRONG+: U <- diag(1/s) U with s the running standard deviation of U (h - c); V's columns take s."""
        changed, transitions = {}, {}
        for name, (layer, site) in self.sites.items():
            mean_square = None if site.spread is None else site.spread.take()
            if mean_square is None or site.whitening is None:
                continue
            if not torch.isfinite(mean_square).all():
                raise FloatingPointError(f"layer {name!r}: its whitened inputs contain NaN or infinite values")
            s = (PLUS_DECAY + (1 - PLUS_DECAY) * mean_square).sqrt()
            old = site.whitening
            assert old.U is not None and old.U_inv is not None
            new = Whitening(old.c, old.eps, U=old.U / s.unsqueeze(-1), U_inv=old.U_inv * s.unsqueeze(-2))
            changed[name] = (layer, site, new)
            transitions[name] = Transition.rescaling(s)
        if changed:
            assign_(changed, self.optimizer, "transport", transitions)


def _check_count(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a whole number, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} is at least {least}, got {value}")
