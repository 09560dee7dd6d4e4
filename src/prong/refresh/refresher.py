"""When and from which samples a model's whitening is re-estimated while an optimizer trains it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from prong.core.moments import MeanSquare
from prong.core.precision import accumulation_dtype
from prong.core.whitening import Whitening, check_eps
from prong.distributed.consent import Consent
from prong.distributed.reduction import Reduction
from prong.distributed.sharding import reshard_
from prong.distributed.sharing import Share, collect, compute
from prong.distributed.workers import Workers, unwrapped
from prong.gradients.whitening import GradientWhitening
from prong.layers import Explicit, Site
from prong.model.estimate import as_batches, estimate
from prong.model.whiten import check_count, check_model
from prong.refresh.apply import OnRefresh, adopt_, assign_, check_between_updates, require_whitened
from prong.refresh.background import Background
from prong.refresh.compatibility import check_optimizer
from prong.refresh.factorise import requests_of
from prong.refresh.hooks import before_step
from prong.refresh.plus import rescale_
from prong.refresh.state import check_site_state, restore_site, site_state
from prong.refresh.timing import Period, Timetable
from prong.refresh.transport import transports_of, warn_unknown
from prong.refresh.watching import Watch
from prong.refresh.windows import Windows

Source = Literal["window", "ema"] | Iterable[Any]


class Refresher:
    """Refreshes a whitened model after updates 1, 2, 4, ... and then every `period`-th, as its optimizer steps.

    It listens to `optimizer.step()`: nothing in the training loop changes. With the implicit form the optimizer is
    SGD (or `PRONG`, which brings its own refresher); with the explicit form it can be any, and its state is carried
    into the new coordinates.

    Where `torch.distributed` is initialised, all ranks make one, and refresh together (`prong.distributed`).

    Args:
        model: a model with whitened layers (`whiten_`), or a DistributedDataParallel of one.
        optimizer: the optimizer that trains it.
        eps: damping.
        period: updates between refreshes, the paper's T; or "auto": a layer is refreshed when its inputs have drifted
            (`prong.refresh.drift`), each on its own, once the first refreshes have been made.
        samples: examples per refresh, the paper's N_s. Rows count for linear layers and attention (tokens), images
            for convolutions. Of several workers, those of all together.
        source: "window": the forwards in training mode just before a refresh (where refreshes are closer than a window
            is long, older ones fade); "ema": all forwards, forgotten at a rate that leaves `samples`; or an iterable of
            batches (a loader) to run the model on, as the paper does.
        lag: factorise in another thread, and change coordinates so many updates later; 0 does both at once.
        early: refresh after updates 1, 2, 4, ... too, before the first period is over. Without, call `refresh` to
            whiten at the start.
        on_refresh: "transport" the optimizer's momentum exactly, or "reset" it, as the paper did.
        plus: PRONG+: after each update, rescale by the standard deviation of the whitened activations.
        gradients: whitening of gradients, if wanted.
        process_group: the workers that train the model; default: DistributedDataParallel's, or all.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        eps: float = 1e-2,
        period: Period = 1000,  # T
        samples: int = 12_800,  # N_s
        source: Source = "window",
        lag: int = 0,
        early: bool = True,
        on_refresh: OnRefresh = "transport",
        plus: bool = False,
        gradients: GradientWhitening | None = None,
        process_group: ProcessGroup | None = None,
    ) -> None:
        check_model(model)
        given, self.workers, model = model, Workers.of(model, process_group), unwrapped(model)
        check_eps(eps)
        if period == "auto" and plus:
            raise ValueError("PRONG+ rescales at every update, which hides drift; give it a period in updates")
        check_count("lag", lag, 0)
        if isinstance(source, str) and source not in ("window", "ema"):
            raise ValueError(f"source is 'window', 'ema' or the loader itself, got {source!r}")
        if not isinstance(source, str) and iter(as_batches(source)) is source:
            raise TypeError("source is gone through at every refresh: give a list or a DataLoader, not an iterator")
        if on_refresh not in ("transport", "reset"):
            raise ValueError(f"on_refresh is 'transport' or 'reset', got {on_refresh!r}")
        if gradients is not None and gradients.needs_windows and not isinstance(source, str):
            raise ValueError("gradient_whitening gathers from training passes: use source='window' or 'ema'")
        self.sites = require_whitened(model)
        check_optimizer(optimizer, self.sites, plus)
        self.model, self.optimizer = model, optimizer
        self.eps, self.source, self.lag, self.on_refresh, self.plus = eps, source, lag, on_refresh, plus
        self.gradients = gradients
        self.updates = 0
        self.windows = Windows(model, self.sites, self, self.workers, fading=source == "ema")
        self._watch = Watch(self.sites, self.workers)
        gathered = self.windows if isinstance(source, str) else None
        self.timetable = Timetable(period, samples, early, gathered, self._watch)
        self._pending: Background[Share] = Background()
        self._consent = Consent(self.workers, given, optimizer, lambda: self.windows.gathering, self.undo)
        if transports_of(optimizer) is None and on_refresh == "transport":
            warn_unknown(optimizer)
        if not isinstance(source, str):
            self.refresh()  # the paper's first: before any update
        self._note_fixed_biases()
        for layer, site in self.sites.values():
            layer.owner = self
            site.spread = MeanSquare() if plus else None
            site.errors = self._consent.errors
        self._handles = [optimizer.register_step_post_hook(self._after_step)]
        if not self.workers.alone:
            self._handles.append(before_step(optimizer, self._consent.ask))
        if gradients is not None:
            gradients.attach(model, optimizer)
        if isinstance(source, str):
            self._open_windows()

    def refresh(self, batches: Iterable[Any] | None = None) -> None:
        """Refresh now, from `batches`, the loader, or what the windows hold."""
        check_between_updates()
        self._check_unfolded()
        self._pending.drop()
        self._note_fixed_biases()
        source, names = self.source if batches is None else batches, self._trained()
        if isinstance(source, str):
            self._refresh_from_windows(names, lag=0)
            self._open_windows()
        elif names:
            reduction = self._estimated(source, names)
            self._whiten(reduction, list(reduction.moments), lag=0)

    def _note_fixed_biases(self) -> None:
        """A bias that the optimizer does not hold is as good as frozen."""
        reshard_(self.model)
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for layer, site in self.sites.values():
            site.fixed_bias = id(layer.pair(site)[1]) not in held

    def next_refresh(self) -> int | None:
        """The update after which the next refresh comes; None if that depends on drift."""
        return self.timetable.next_refresh(self.updates, self._trained())

    def detach(self) -> None:
        """Stop refreshing: forget windows and the optimizer. The whitening stays as it is."""
        for handle in self._handles:
            handle.remove()
        if self.gradients is not None:
            self.gradients.detach()
        for layer, site in self.sites.values():
            site.inputs = site.spread = site.outputs = site.drift = site.gain = site.errors = None
            site.fixed_bias = False
            layer.owner = None
        self.windows.watch_forwards()
        self._pending.drop()

    def undo(self) -> None:
        """Take back what was gathered since the last update: a forward has failed."""
        if not all(site.training_only for _, site in self.sites.values()):
            return  # statistics that somebody else gathers; our windows are put aside
        self.windows.undo()
        for _, site in self.sites.values():
            if site.spread is not None:
                site.spread.take()
        if self.gradients is not None:
            self.gradients.undo()

    def release(self) -> None:
        """Detach, with the parameters and the optimizer's state back in canonical coordinates. `fold_` calls it.

        They need not be finite: folding is what there is to do after training has diverged.
        """
        whitened = {n: (layer, site) for n, (layer, site) in self.sites.items() if site.whitening is not None}
        explicit = {
            name: (layer, site, _identity(site.layout.matrices, site.layout.features, layer.pair(site)[0]))
            for name, (layer, site) in whitened.items()
            if isinstance(layer, Explicit)
        }
        assign_(explicit, self.optimizer, self.on_refresh, gradients=True, check=False)
        for _, site in whitened.values():
            site.whitening = None
        self.detach()

    def synchronize(self) -> None:
        """Make the state the same on all workers; all of them call this.

        Then what one worker saves, all can load, and so can any other number of workers. What the next refresh will
        find stays the same: each holds an equal part of the statistics that all have gathered.
        """
        if self.workers.alone:
            return
        self.windows.share()
        if self.gradients is not None:
            self.gradients.share()
        self._watch.share()
        held, due = self._pending.peek(), self._pending.due
        if held is not None and due is not None:
            self._pending.drop()
            self._pending.put(Share(collect(held, self.workers)), due)

    def state_dict(self) -> dict[str, Any]:
        """Whitening, windows and counters, by the names of the layers; tensors, numbers and strings only.

        Of several workers, each has windows of its own, until `synchronize`.
        """
        self._check_unfolded()
        state = {
            "kind": self._kind(),
            "workers": self.workers.size,
            "updates": self.updates,
            "settings": {"eps": self.eps, "lag": self.lag, **self.timetable.settings()},
            "layers": {name: site_state(layer, site) for name, (layer, site) in self.sites.items()},
            "windows": self.windows.state_dict(),
            **self._watch.state_dict(),
            "pending": self._pending_state(),
        }
        return state if self.gradients is None else {**state, "gradients": self.gradients.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as if never stopped, from what `state_dict` gave; eps, period and samples are those saved.

        Raises:
            ValueError: a state of another model or kind of training; nothing has been changed then.
        """
        self.check_state_dict(state)
        for name, (layer, site) in self.sites.items():
            restore_site(layer, site, state["layers"][name])
        weight = state.get("workers", 1) / self.workers.size
        self.windows.scale(weight)
        self.updates = int(state["updates"])
        self.eps, self.lag = state["settings"]["eps"], state["settings"]["lag"]
        self.timetable.adopt(state["settings"])
        self.windows.load_state_dict(state["windows"])
        self._watch.load_state_dict(state)
        self._pending.drop()
        if state["pending"] is not None:
            held = {name: Whitening(**w) for name, w in state["pending"]["whitenings"].items()}
            self._pending.put(Share(held), int(state["pending"]["due"]))
        if self.gradients is not None:
            self.gradients.load_state_dict(state["gradients"], weight)

    def _kind(self) -> dict[str, Any]:
        """What a state must agree on."""
        return {"plus": self.plus, "source": self.source if isinstance(self.source, str) else "loader"}

    def _pending_state(self) -> dict[str, Any] | None:
        held = self._pending.peek()
        if held is None:
            return None
        if not held.complete:
            raise RuntimeError(
                "a refresh with a lag is under way, of which every worker has a part; "
                "call refresher.synchronize() on all of them before state_dict()"
            )
        return {"due": self._pending.due, "whitenings": {name: dict(w.items()) for name, w in held.whitenings.items()}}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse a state that is not of this model and kind of training, or a model that was folded since."""
        self._check_unfolded()
        if any(layer.owner is not self for layer, _ in self.sites.values()):
            raise ValueError("this model was detached; make a new PRONG or Refresher to load the state into")
        saved, mine = set(state["layers"]), set(self.sites)
        if saved != mine:
            raise ValueError(
                "this state is of a model with other whitened layers: "
                f"missing {sorted(mine - saved)}, unexpected {sorted(saved - mine)}"
            )
        source = None if self.gradients is None else self.gradients.source
        other = state["gradients"]["source"] if "gradients" in state else None
        if source != other:
            raise ValueError(f"this state is of training with gradient whitening {other!r}, not {source!r}")
        if state["kind"] != self._kind():
            raise ValueError(f"this state is of training with {state['kind']}, not {self._kind()}")
        for name, (layer, site) in self.sites.items():
            check_site_state(name, layer, site, state["layers"][name])

    @property
    def folded(self) -> bool:
        """Whether its layers were made plain again (`fold_`), and perhaps others since."""
        live = {id(site) for layer, _ in self.sites.values() for site in getattr(layer, "sites", ())}
        return any(id(site) not in live for _, site in self.sites.values())

    def _check_unfolded(self) -> None:
        if self.folded:
            raise ValueError("this model was folded, so its optimizer has no whitening; make a new PRONG or Refresher")

    def shadow(self) -> None:
        """Take part in an update for which this worker has no data; it makes no step of its own."""
        self._consent.ask()
        if self.gradients is not None:
            self.gradients.add_up()
        self._after_step()

    def _after_step(self, *unused: Any) -> None:
        if self.gradients is not None:
            self.gradients.restore()
        found_inf = getattr(self.optimizer, "found_inf", None)
        if found_inf is not None and float(found_inf) > 0:  # a fused step that GradScaler skipped
            return
        self.windows.settle()
        if self.gradients is not None:
            self.gradients.settle()
        scheduled = self.next_refresh() == self.updates + 1
        self.updates += 1
        if self.timetable.period == "auto":
            self._watch.note(self.updates)
        if self._pending.due is not None and self.updates >= self._pending.due:
            self.finish()
        due = self.timetable.due(self.updates, self._trained(), scheduled)
        if due:
            self._refresh(due)
        if self.plus:
            rescale_(self.sites, self.optimizer, self.workers)  # which does nothing to sites in new coordinates
        if self.source == "window" and self.updates == 1 and not due:
            self._close_windows_until_due()
        if isinstance(self.source, str):
            self._open_windows()

    def _trained(self) -> list[str]:
        """The sites of weights that are not frozen; nothing would use the whitening of the others."""
        return [name for name, (layer, site) in self.sites.items() if layer.pair(site)[0].requires_grad]

    def _refresh(self, names: list[str]) -> None:
        """Refresh these sites, at once or with the lag."""
        self._note_fixed_biases()
        self.finish()  # where refreshes are closer than the lag
        if isinstance(self.source, str):
            self._refresh_from_windows(names, self.lag)
            return
        reduction = self._estimated(self.source, names)
        reached = [name for name, moments in reduction.moments.items() if moments.count > 0]
        if reached:
            self._whiten(reduction, reached, self.lag)

    def _estimated(self, batches: Iterable[Any], names: list[str]) -> Reduction:
        """What all workers see of these sites' inputs when they run the model on batches."""
        moments = estimate(self.model, batches, self.timetable.samples, None, self.workers, names)
        self._watch_anew(names)
        return Reduction(moments, self.workers)

    def _refresh_from_windows(self, names: list[str], lag: int) -> None:
        """Refresh those of these sites that saw enough; the windows of the others stay open."""
        reduction = self.windows.reduced(names)
        if self.source == "window":
            self.windows.measure(reduction.examples, self.updates)
        ready = [name for name, moments in reduction.moments.items() if moments.count >= 2]
        if not ready:
            warnings.warn(
                "no whitened layer saw two samples before a refresh was due; whitening stays as it is. "
                "Are forwards run in training mode, on the model that the optimizer was given?",
                stacklevel=3,
            )
            return
        if lag > 0 and self.workers.alone:  # windows may go on with theirs
            reduction.detach()
        self._watch_anew(ready)
        self._whiten(reduction, ready, lag)
        self._close_windows({name: reduction.examples[name] for name in ready})

    def _whiten(self, reduction: Reduction, names: list[str], lag: int) -> None:
        """Give these sites the whitenings of all workers' moments, now or later."""
        requests = requests_of(self.sites, {name: reduction.moments[name] for name in names}, self.eps)
        share = partial(compute, requests, self.eps, reduction, self.workers)
        if lag == 0:
            self._change(collect(share(), self.workers))
        else:
            self._pending.start(share, self.updates + lag)

    def _change(self, new: dict[str, Whitening]) -> None:
        """Go over to new coordinates."""
        adopt_(self.sites, new, self.optimizer, self.on_refresh, self.workers)
        self.renewed(self.sites[name][1] for name in new)

    def finish(self) -> None:
        """Make the refresh that is under way in another thread, if there is one, now."""
        if self._pending.due is not None:
            self._change(collect(self._pending.take(), self.workers))

    def renewed(self, sites: Iterable[Site]) -> None:
        """Forget what was measured of these sites in other coordinates than they have now."""
        changed = {id(site) for site in sites}
        self._watch_anew(name for name, (_, site) in self.sites.items() if id(site) in changed)
        for _, site in self.sites.values():
            if site.spread is not None and id(site) in changed:
                site.spread.take()

    def _watch_anew(self, names: Iterable[str]) -> None:
        """With an automatic period: these sites were refreshed, or will be; let drift be measured from now."""
        if self.timetable.period == "auto":
            for name in names:
                self._watch.begin(name)

    def _close_windows(self, examples: dict[str, float]) -> None:
        """Begin the next windows: empty, or with what is still recent where the next one overlaps this one."""
        if self.gradients is not None:
            self.gradients.close(examples)
        if self.source != "window":
            return  # they fade after every update
        self.windows.begin(examples, self.updates)
        coming = self.next_refresh()
        for name in examples:
            if not self.timetable.window_is_due(name, self.updates, coming):
                self.windows.close(name)
        self.windows.fade(examples, self.timetable.samples)

    def _close_windows_until_due(self) -> None:
        """After the first update it is known how fast windows fill: those that are not due yet have begun too early."""
        self.windows.measure(self.windows.examples(), self.updates)
        coming = self.next_refresh()
        for name, (_, site) in self.sites.items():
            if site.inputs is not None and not self.timetable.window_is_due(name, self.updates, coming):
                self._drop_window(name)

    def _drop_window(self, name: str) -> None:
        """Gather nothing more of a site, and forget what was."""
        self.windows.close(name)
        if self.gradients is not None and self.gradients.needs_windows:
            self.sites[name][1].outputs = None

    def _open_windows(self) -> None:
        trained, coming = set(self._trained()), self.next_refresh()
        for name, (_, site) in self.sites.items():
            if name not in trained:
                self._drop_window(name)
                continue
            if site.inputs is None and (
                self.source == "ema" or self.timetable.window_is_due(name, self.updates, coming)
            ):
                self.windows.open(name, self.updates)
            if site.inputs is not None and self.gradients is not None:
                self.gradients.open(name)
        if self.source == "ema":
            self.windows.fade_after_update(self.timetable.samples)
        self.windows.watch_forwards()


def _identity(groups: int, features: int, like: Tensor) -> Whitening:
    """U = I and no centre: canonical coordinates."""
    U = torch.eye(features, dtype=accumulation_dtype(like.dtype), device=like.device).expand(groups, -1, -1)
    return Whitening(None, 0.0, U=U, U_inv=U)
