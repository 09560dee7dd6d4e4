"""Refreshes of a model's whitening while an optimizer trains it: what is due, from which samples, and its state."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from prong.core.moments import accumulation_dtype
from prong.core.whitening import Whitening
from prong.distributed.joining import joined
from prong.distributed.sharding import reshard_, sharded_modules
from prong.distributed.workers import Workers
from prong.gradients.whitening import OutputWhitening
from prong.layers import Kind, Plain, Site
from prong.model.estimate import estimate
from prong.options import Absolute, Damping, Every, OnDrift, Refresh
from prong.refresh.apply import OnRefresh, assign_, check_between_updates
from prong.refresh.drift import Watch
from prong.refresh.factorise import Reduction, Share, collect, compute, requests_of
from prong.refresh.plus import Spread, forget_, rescale_
from prong.refresh.schedule import Timetable, Windows
from prong.refresh.state import check_site_state, restore_site, site_state


class Refresher:
    """Keeps the whitening of some sites up to date as their optimizer steps.

    Where `torch.distributed` is initialised, all ranks make one, and refresh together.

    Args:
        model: the model.
        optimizer: the optimizer that trains it.
        sites: what is whitened.
        damping: relative, or absolute.
        refresh: when, and from which samples.
        workers: who trains the model together.
        given: the model as the user has it, in DistributedDataParallel or not.
        plus: PRONG+: after each update, rescale by the standard deviation of the whitened activations.
        gradients: whitening of gradients, if wanted.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        sites: dict[str, tuple[Kind, Site]],
        damping: Damping,
        refresh: Refresh,
        workers: Workers,
        given: nn.Module,
        plus: bool = False,
        gradients: OutputWhitening | None = None,
    ) -> None:
        self.model, self.sites, self.workers = model, sites, workers
        self._optimizer = weakref.ref(optimizer)
        self.damping, self.plus, self.gradients = damping, plus, gradients
        self.source = getattr(refresh, "source", None)
        self.updates = 0
        self.windows = Windows(model, sites, self, workers, fading=self.source == "ema")
        self._watch = Watch(sites, workers)
        self.timetable = Timetable(refresh, self.windows if self._gathers else None, self._watch)
        # A refresh with lag is taken when it is due, after a wait if need be, and never earlier: training does not
        # depend on how fast the thread was.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prong")
        self._pending: tuple[int, Future[Share]] | None = None
        self._given = weakref.ref(given)
        # Where layers tell of inputs that cannot be added: one that stopped in its forward would keep others waiting.
        self.errors: list[FloatingPointError] | None = None if workers.alone else []
        self._next = 1  # the update that has anything to do after it
        self.released = False  # whether its layers were given up
        self._sharded = sharded_modules(model)
        self._note_fixed_biases()
        for layer, site in sites.values():
            layer.owner = self
            if plus:
                site.taps.append(Spread())
        if self._gathers:
            self._open_windows()

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, as long as its user keeps it."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError("the optimizer that refreshed this model is gone")
        return optimizer

    @property
    def abandoned(self) -> bool:
        """Whether nobody holds the optimizer any more."""
        return self._optimizer() is None

    @property
    def state_on_refresh(self) -> OnRefresh:
        """What becomes of the optimizer's state."""
        options = self.timetable.options
        return options.state if isinstance(options, Every | OnDrift) else "transport"

    @property
    def _gathers(self) -> bool:
        """Whether samples come from the training forwards."""
        return isinstance(self.source, str)

    def refresh(self, batches: Iterable[Any] | None = None) -> None:
        """Refresh now, from `batches`, the loader, or what the windows hold."""
        check_between_updates()
        self._check_unfolded()
        self._pending = None
        source = self.source if batches is None else batches
        if source is None:
            raise ValueError("with prong.Never() there are no samples to refresh from: give batches")
        self._refresh(self._trained(), source, lag=0)
        if isinstance(source, str):
            self._open_windows()

    def before_step(self) -> None:
        """Ask the other workers; and before the first update, whiten by what its forwards have seen."""
        if self.errors is not None:
            self._ask(self.errors)
        if self.updates > 0 or not self.timetable.at_once or any(s.whitening for _, s in self.sites.values()):
            return
        names = self._trained()
        if not self._gathers:
            self._refresh(names, self.source, self.timetable.lag)
            return
        self._note_fixed_biases()
        reduction = self.windows.reduced(names)
        if ready := [name for name, moments in reduction.moments.items() if moments.count >= 2]:
            self._whiten(reduction, ready, lag=0, gradients=True)

    def _ask(self, errors: list[FloatingPointError]) -> None:
        """Go on if everyone's data could be counted; else all refuse the step.

        Raises:
            FloatingPointError: some data could not be counted; the message names layer and rank.
            RuntimeError: the model alone is joined, so that a worker without data would not be here to answer.
        """
        if joined(self._given()) and not joined(self._optimizer()):
            raise RuntimeError(
                "the optimizer's workers exchange statistics too: instead of model.join() use "
                "torch.distributed.algorithms.Join([model, optimizer]), with an optimizer of prong's own"
            )
        if self.windows.gathering and self.workers.any(bool(errors)):
            first = next(iter(errors), None)
            errors.clear()
            self.undo()
            self.workers.meet(None, first)

    def after_step(self) -> None:
        """Keep what was gathered for this update, and refresh what is due."""
        self.updates += 1
        for _, site in self.sites.values():
            if site.window is not None:
                site.window.settle()
        if self.gradients is not None:
            self.gradients.settle()
        if self.updates < self._next:
            return
        scheduled = self.next_refresh(self.updates - 1) == self.updates
        if self.timetable.by_drift:
            self._watch.note(self.updates)
        if self._pending is not None and self.updates >= self._pending[0]:
            self.finish()
        if due := self.timetable.due(self.updates, self._trained(), scheduled):
            self._refresh(due, self.source, self.timetable.lag)
        if self.plus:
            rescale_(self.sites, self.optimizer, self.workers)  # which does nothing to sites in new coordinates
        if self.source == "window" and self.updates == 1 and not due:
            # Now it is known how fast windows fill: those that are not due yet have begun too early.
            self.windows.measure(self.windows.examples(), self.updates)
            self._close_windows_until_due(self.sites)
        if self._gathers:
            self._open_windows()
        self._next = self._busy_again()

    def _busy_again(self) -> int:
        """The next update after which there is anything to do but to keep what was gathered."""
        if self.plus or self.source == "ema" or self.timetable.by_drift:
            return self.updates + 1
        coming = self.next_refresh()
        events = [coming, None if self._pending is None else self._pending[0]]
        if coming is not None and self._gathers:
            events.append(self.windows.first_opening(self.timetable.samples, coming))
        return max(self.updates + 1, min((event for event in events if event is not None), default=2**62))

    def _note_fixed_biases(self) -> None:
        """A bias that the optimizer does not hold is as good as frozen."""
        if self._sharded:
            reshard_(self._sharded)
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for layer, site in self.sites.values():
            site.fixed_bias = id(layer.pair(site)[1]) not in held

    def next_refresh(self, now: int | None = None) -> int | None:
        """The update after which the next refresh comes; None if that depends on drift."""
        return self.timetable.next_refresh(self.updates if now is None else now, self._trained())

    def detach(self) -> None:
        """Stop refreshing: forget windows and the optimizer. The whitening stays as it is."""
        if self.gradients is not None:
            self.gradients.detach()
        self._watch.stop()
        for layer, site in self.sites.values():
            site.window = site.outputs = None
            site.taps = [tap for tap in site.taps if not isinstance(tap, Spread)]
            site.fixed_bias = False
            layer.owner = None
        self.windows.watch_forwards()
        self._pending = None

    def undo(self) -> None:
        """Take back what was gathered since the last update: a forward has failed."""
        if any(site.aside for _, site in self.sites.values()):
            return  # statistics that somebody else gathers; our windows are put aside
        self.windows.undo()
        for layer, _ in self.sites.values():
            if isinstance(layer, Plain) and self.updates == 0:
                layer.plan_again()
        forget_(site for _, site in self.sites.values())
        if self.gradients is not None:
            self.gradients.undo()

    def release(self) -> None:
        """Detach, with the parameters and the optimizer's state back in canonical coordinates. `fold_` calls it.

        They need not be finite: folding is what there is to do after training has diverged.
        """
        self._unwhiten(self._optimizer())
        self.released = True
        self.detach()

    def _unwhiten(self, optimizer: Optimizer | None) -> None:
        """Bring parameters, gradients and, if the optimizer is given, its state back to canonical coordinates."""
        whitened = {n: (layer, site) for n, (layer, site) in self.sites.items() if site.whitening is not None}
        canonical = {n: _identity(*both) for n, both in whitened.items() if both[0].coordinates(both[1]) is not None}
        if canonical:
            assign_(self.sites, canonical, optimizer, self.state_on_refresh, gradients=True, check=False)
        for layer, site in whitened.values():
            site.whitening = None
            if isinstance(layer, Plain):
                layer.release()

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
        if self._pending is not None:
            due, share = self._pending
            complete = Share(collect(share.result(), self.workers))
            self._pending = due, self._thread.submit(lambda: complete)

    def state_dict(self) -> dict[str, Any]:
        """Whitening, windows and counters, by the names of the layers; tensors, numbers and strings only.

        Of several workers, each has windows of its own, and of a refresh under way what it has computed itself, until
        `synchronize`.
        """
        self._check_unfolded()
        pending = self._pending
        state = {
            "kind": self._kind(),
            "workers": self.workers.size,
            "updates": self.updates,
            "damping": self.damping.eps if isinstance(self.damping, Absolute) else self.damping,
            "absolute": isinstance(self.damping, Absolute),
            "refresh": self.timetable.settings(),
            "layers": {name: site_state(layer, site) for name, (layer, site) in self.sites.items()},
            "windows": self.windows.state_dict(),
            **self._watch.state_dict(),
            "pending": None if pending is None else {"due": pending[0], **pending[1].result().state_dict()},
        }
        return state if self.gradients is None else {**state, "gradients": self.gradients.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as if never stopped, from what `state_dict` gave; damping and the schedule are those saved."""
        for name, (layer, site) in self.sites.items():
            restore_site(layer, site, state["layers"][name])
        forget_(site for _, site in self.sites.values())
        weight = state["workers"] / self.workers.size
        self.windows.scale(weight)
        self.updates, self._next = int(state["updates"]), int(state["updates"]) + 1
        self.damping = Absolute(state["damping"]) if state["absolute"] else state["damping"]
        self.timetable.adopt(state["refresh"])
        self.windows.load_state_dict(state["windows"])
        self._watch.load_state_dict(state)
        self._pending = None
        if (pending := state["pending"]) is not None:
            self._pending = int(pending["due"]), self._thread.submit(Share.of_state, pending)
        if self.gradients is not None:
            self.gradients.load_state_dict(state["gradients"], weight)

    def start_anew(self) -> None:
        """Canonical coordinates, no updates made: as on the first day, whatever the optimizer knows."""
        self._pending = None
        self._unwhiten(None)
        self.updates, self._next = 0, 1
        for name in self.sites:
            self._close_window(name)
        self.windows.load_state_dict({"start": dict.fromkeys(self.sites, 0), "rates": {}})
        self._watch.load_state_dict({"drifted": [], "drift": {}})
        if self.gradients is not None:
            self.gradients.Q = {}
        if self._gathers:
            self._open_windows()

    def _kind(self) -> dict[str, Any]:
        """What a state must agree on."""
        return {
            "refresh": type(self.timetable.options).__name__,
            "source": self.source if self._gathers else "loader",
            "plus": self.plus,
            "gradients": None if self.gradients is None else self.gradients.source,
        }

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse a state that is not of this model and kind of training, or a model that was folded since."""
        self._check_unfolded()
        if any(layer.owner is not self for layer, _ in self.sites.values()):
            raise ValueError("this model was detached; make a new optimizer to load the state into")
        saved, mine = set(state["layers"]), set(self.sites)
        if saved != mine:
            raise ValueError(
                "this state is of a model with other whitened layers: "
                f"missing {sorted(mine - saved)}, unexpected {sorted(saved - mine)}"
            )
        if state["kind"] != self._kind():
            raise ValueError(f"this state is of training with {state['kind']}, not {self._kind()}")
        for name, (layer, site) in self.sites.items():
            check_site_state(name, layer, site, state["layers"][name])

    @property
    def folded(self) -> bool:
        """Whether its layers were made plain again (`fold_`), and perhaps others since."""
        return self.released or any(not hasattr(layer, "sites") for layer, _ in self.sites.values())

    def _check_unfolded(self) -> None:
        if self.folded:
            raise ValueError("this model was folded, so its optimizer has no whitening; make a new optimizer")

    def _trained(self) -> list[str]:
        """The sites of weights that are not frozen; nothing would use the whitening of the others."""
        return [name for name, (layer, site) in self.sites.items() if layer.pair(site)[0].requires_grad]

    def _refresh(self, names: list[str], source: Any, lag: int) -> None:
        """Refresh these sites, by what windows hold or from batches, now or later."""
        self._note_fixed_biases()
        self.finish()  # where refreshes are closer than the lag
        if isinstance(source, str):
            self._refresh_from_windows(names, lag)
        elif names:
            moments = estimate(self.model, source, self.timetable.samples or None, None, self.workers, names)
            self._watch_anew(names)
            reduction = Reduction(moments, self.workers)
            if reached := [name for name, moments in reduction.moments.items() if moments.count > 0]:
                self._whiten(reduction, reached, lag)

    def _refresh_from_windows(self, names: list[str], lag: int) -> None:
        """Refresh those of these sites that saw enough; the windows of the others stay open."""
        reduction = self.windows.reduced(names)
        if self.source == "window":
            self.windows.measure(reduction.examples, self.updates)
        ready = [name for name, moments in reduction.moments.items() if moments.count >= 2]
        if not ready:
            warnings.warn(
                "no whitened layer saw two samples before a refresh was due; whitening stays as it is. "
                "Are forwards run in training mode, on the model that the optimizer was given (and was it compiled "
                "only after that)?",
                stacklevel=3,
            )
            return
        if lag > 0 and self.workers.alone:  # windows may go on with theirs
            reduction.detach()
        self._watch_anew(ready)
        self._whiten(reduction, ready, lag)
        self._close_windows({name: reduction.examples[name] for name in ready})

    def _whiten(self, reduction: Reduction, names: list[str], lag: int, gradients: bool = False) -> None:
        """Give these sites the whitenings of all workers' moments, now or later."""
        moments = {name: reduction.moments[name] for name in names}
        requests = requests_of(self.sites, moments, self.damping, self.optimizer)
        share = partial(compute, requests, reduction, self.workers)
        if lag == 0:
            self._change(collect(share(), self.workers), gradients)
        else:
            self._pending = self.updates + lag, self._thread.submit(share)

    def _change(self, new: dict[str, Whitening], gradients: bool = False) -> None:
        """Go over to new coordinates."""
        assign_(self.sites, new, self.optimizer, self.state_on_refresh, gradients, workers=self.workers)
        self.renewed(self.sites[name][1] for name in new)

    def finish(self) -> None:
        """Make the refresh that is under way in another thread, if there is one, now."""
        if self._pending is not None:
            (_, share), self._pending = self._pending, None
            self._change(collect(share.result(), self.workers))

    def renewed(self, sites: Iterable[Site]) -> None:
        """Forget what was measured of these sites in other coordinates than they have now."""
        changed = set(sites)
        self._watch_anew(name for name, (_, site) in self.sites.items() if site in changed)
        if self.plus:
            forget_(changed)

    def _watch_anew(self, names: Iterable[str]) -> None:
        """Where drift decides: these sites were refreshed, or will be; let drift be measured from now."""
        if self.timetable.by_drift:
            for name in names:
                self._watch.begin(name)

    def _close_windows(self, examples: dict[str, float]) -> None:
        """Begin the next windows: empty, or with what is still recent where the next one overlaps this one."""
        if self.gradients is not None:
            self.gradients.close(examples)
        if self.source != "window":
            return  # they fade after every update
        self.windows.begin(examples, self.updates)
        self._close_windows_until_due(examples)
        self.windows.fade(examples, self.timetable.samples)

    def _close_windows_until_due(self, names: Iterable[str]) -> None:
        """Gather nothing yet for what is far away, and forget what was."""
        coming = self.next_refresh()
        for name in names:
            if not self.timetable.window_is_due(name, self.updates, coming):
                self._close_window(name)

    def _close_window(self, name: str) -> None:
        _, site = self.sites[name]
        site.window = site.outputs = None

    def _open_windows(self) -> None:
        trained, coming = set(self._trained()), self.next_refresh()
        for name, (_, site) in self.sites.items():
            if name not in trained:
                self._close_window(name)
                continue
            if self.source == "ema" or self.timetable.window_is_due(name, self.updates, coming):
                self.windows.open(name, self.updates)
            if site.window is not None and self.gradients is not None:
                self.gradients.open(name)
        if self.source == "ema":
            self.windows.fade_after_update(self.timetable.samples)
        self.windows.watch_forwards()


def _identity(layer: Kind, site: Site) -> Whitening:
    """U = I and no centre: canonical coordinates."""
    weight, layout = layer.pair(site)[0], site.layout
    U = torch.eye(layout.features, dtype=accumulation_dtype(weight.dtype), device=weight.device)
    return Whitening(None, 0.0, U=U.expand(layout.matrices, -1, -1), U_inv=U.expand(layout.matrices, -1, -1))
