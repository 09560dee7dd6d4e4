"""What happens around an optimizer's steps where it trains a model in whitened coordinates; one state for both."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim import Optimizer

from prong.distributed.joining import Shadow
from prong.distributed.sharding import is_sharded, reshard_, sharded_modules
from prong.distributed.workers import Workers, eager_name, unwrapped
from prong.forms import has_plus
from prong.gradients.whitening import OutputWhitening
from prong.layers import Kind, Plain, Site
from prong.layers.plain import catch_up
from prong.model.whiten import check_model, fold_, whitened_layers
from prong.options import Damping, Refresh, WhitenOutputs
from prong.refresh.refresher import Refresher
from prong.trust import Trust


class Attachment:
    """What happens around an optimizer's steps, and what is saved beside its own state."""

    def __init__(
        self,
        given: nn.Module,
        optimizer: Optimizer,
        sites: dict[str, tuple[Kind, Site]],
        damping: Damping,
        refresh: Refresh,
        trust: float | None,
        outputs: WhitenOutputs | None,
        workers: Workers,
    ) -> None:
        model = unwrapped(given)
        self.workers, self.given = workers, weakref.ref(given)  # DistributedDataParallel is not ours to keep
        self._views = list({id(layer): layer for layer, _ in sites.values() if isinstance(layer, Plain)}.values())
        self._sharded = sharded_modules(model)
        spread = not workers.alone and any(is_sharded(p) for p in model.parameters())
        self._trust = None if trust is None else Trust(trust, sites, optimizer, workers if spread else None)
        self._outputs = None if outputs is None else OutputWhitening(model, sites, outputs, workers)
        self.refresher = Refresher(
            model, optimizer, sites, damping, refresh, workers, given, plus=has_plus(sites), gradients=self._outputs
        )
        self._loading: dict[str, Any] | None = None
        self._met = False  # whether it is known who trains the model
        optimizer._prong = self  # type: ignore[attr-defined]
        optimizer.register_step_pre_hook(self._pre_step)
        optimizer.register_step_post_hook(self._post_step)
        optimizer.register_state_dict_post_hook(self._save)
        optimizer.register_load_state_dict_pre_hook(self._check_load)
        optimizer.register_load_state_dict_post_hook(self._load)

    def _pre_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Before each step, once gradients are there: with a closure, they come to be inside the step."""
        if self.refresher.released:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._enter(optimizer)
            return None

        def wrapped() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._enter(optimizer)
            return loss

        return (args[0], wrapped), {}

    def _enter(self, optimizer: Optimizer) -> None:
        self.abandon()
        if not self._met:
            self._check_company()
            self._met = True
        if self._views and self._views[0].sharing is not None:  # which all have
            self._views[0].sharing.settle()
        if self._sharded:
            reshard_(self._sharded)
        self.refresher.before_step()
        try:
            if self._outputs is not None:
                self._outputs.precondition()
            catch_up(self._views)
            for view in self._views:
                view.enter()
            if self._trust is not None:
                self._trust.before(optimizer)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Put parameters and gradients back as they were before a step that has failed, if there is one."""
        if self._trust is not None:
            self._trust.restore()
        for view in self._views:
            view.drop_step()
        if self._outputs is not None:
            self._outputs.restore()

    def _post_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.refresher.released:
            return
        if self._trust is not None:
            self._trust.after()
        for view in self._views:
            view.leave()
        if self._outputs is not None:
            self._outputs.restore()
        self.refresher.after_step()

    def _check_company(self) -> None:
        """Refuse to train alone what is trained by many, as the process group was made later: it would drift apart."""
        grouped = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if grouped and self.workers.alone and self.workers.group is None:
            raise RuntimeError(
                "this optimizer was made before torch.distributed was initialised, so it would whiten by this rank's "
                "data alone and ranks would drift apart; call init_process_group first, then make the optimizer. "
                "(Ranks that do train models of their own: give process_group=torch.distributed.new_group([rank]).)"
            )

    def _save(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Whitening beside the optimizer's own state, until the model is folded."""
        if not self.refresher.folded:
            state_dict["prong"] = self.refresher.state_dict()

    def _check_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Refuse what does not fit, before anything is changed."""
        self._loading = state_dict.get("prong")
        check_groups(optimizer, state_dict)
        if self._loading is not None:
            self.refresher.check_state_dict(self._loading)

    def _load(self, optimizer: Optimizer) -> None:
        """Continue with the whitening; where there is none, as with torch's own states, start without."""
        state, self._loading = self._loading, None
        if state is None:
            self.refresher.start_anew()
        else:
            self.refresher.load_state_dict(state)


def attachment_of(optimizer: Optimizer) -> Attachment:
    """What ties an optimizer to its model."""
    attachment = getattr(optimizer, "_prong", None)
    if not isinstance(attachment, Attachment):
        raise TypeError(f"this {type(optimizer).__name__} does not step in whitened coordinates; use prong.attach")
    return attachment


class Composite(Optimizer, Joinable):
    """Optimizers of torch, each with groups of its own, as one; in whitened coordinates once it is attached.

    `parts` are optimizers, and what to make each of: parameters with their names, or groups, and options.
    """

    def __init__(self, parts: Mapping[type[Optimizer], tuple[list[Any], dict[str, Any]]]) -> None:
        self._parts = {kind.__name__: kind(params, **options) for kind, (params, options) in parts.items() if params}
        self._rules: dict[int, type[Optimizer]] = {}
        groups = [
            {**group, "rule": rule, "params": list(zip(group["param_names"], group["params"], strict=True))}
            for rule, part in self._parts.items()
            for group in part.param_groups
        ]
        Optimizer.__init__(self, groups, next(iter(self._parts.values())).defaults)
        Joinable.__init__(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one update; returns what `closure` does, if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            for rule, part in self._parts.items():
                part.param_groups = [group for group in self.param_groups if group["rule"] == rule]
                part.state = self.state
                part.step()
        except BaseException:
            attachment_of(self).abandon()
            raise
        return loss

    def rule_of(self, parameter: Tensor) -> type[Optimizer]:
        """Which optimizer trains a parameter."""
        return self._rules.get(id(parameter), Optimizer)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, named as the others are; they are trained by the first of the optimizers."""
        rule = param_group.setdefault("rule", next(iter(self._parts)))
        attachment = self.__dict__.get("_prong")
        if attachment is not None:
            param_group["params"] = named(attachment.refresher.model, param_group["params"])
        super().add_param_group(param_group)
        self._rules |= dict.fromkeys(map(id, self.param_groups[-1]["params"]), type(self._parts[rule]))

    def join_hook(self, **unused: Any) -> JoinHook:
        """For `torch.distributed.algorithms.Join([model, optimizer])`, where some workers run out of data early."""
        return Shadow(self, attachment_of(self).given(), attachment_of(self).refresher)

    @property
    def join_device(self) -> torch.device:
        """Where workers talk."""
        return attachment_of(self).workers.device

    @property
    def join_process_group(self) -> Any:
        """The workers."""
        return attachment_of(self).workers.group or torch.distributed.group.WORLD

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group, own in zip(state["param_groups"], self.param_groups, strict=True):
            group.setdefault("rule", own["rule"])  # of which states of torch's own optimizers know nothing
        super().__setstate__(state)

    def __getstate__(self) -> dict[str, Any]:
        kind = type(self).__name__
        raise TypeError(f"prong.{kind} is bound to its model and cannot be copied or pickled; save its state_dict()")


def named(model: nn.Module, params: Any) -> list[Any]:
    """What torch's optimizers take: parameters or groups of them, with their names in the model."""
    check_model(model)
    names = {id(p): eager_name(name) for name, p in unwrapped(model).named_parameters()}
    params = unwrapped(model).parameters() if params is None else params
    given: list[Any] = [params] if isinstance(params, Tensor) else list(params)
    if given and isinstance(given[0], dict):
        return [{**group, "params": named(model, group["params"])} for group in given]
    return [p if isinstance(p, tuple) else (names.get(id(p), f"outside.{i}"), p) for i, p in enumerate(given)]


def take_over(model: nn.Module, replace: bool) -> None:
    """Release a model from an optimizer that nobody holds any more, or from any that there is."""
    owners = [layer.owner for _, layer in whitened_layers(model) if layer.owner is not None]
    if not replace and not all(owner.abandoned for owner in owners):
        gc.collect()  # schedulers and their optimizers hold each other
        if not all(owner.abandoned for owner in owners):
            raise ValueError(
                "another optimizer trains this model in whitened coordinates already; give replace=True to take it "
                "over, or prong.fold_(model) first"
            )
    if owners:
        fold_(model)


def check_groups(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Refuse a state of other parameters, by their names where there are any, and by their shapes."""
    mine, theirs = _names(optimizer.param_groups), _names(state_dict["param_groups"])
    if mine and theirs and mine != theirs:
        odd = sorted({name for group in [*mine, *theirs] for name in group} - {n for group in mine for n in group})
        raise ValueError(f"this state is of a model with other parameters or groups: {odd or 'grouped otherwise'}")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [i for group in state_dict["param_groups"] for i in group["params"]]
    for index, parameter in zip(indices, parameters, strict=False):
        for key, value in state_dict["state"].get(index, {}).items():
            if key in ("momentum_buffer", "exp_avg") and value is not None and value.shape != parameter.shape:
                shapes = f"{tuple(value.shape)} for a parameter of shape {tuple(parameter.shape)}"
                raise ValueError(f"this state is of another model: {key} of shape {shapes}")


def _names(groups: list[dict[str, Any]]) -> list[list[str]]:
    """The names of parameters, without what torch.compile and DistributedDataParallel put before them."""
    if not all("param_names" in group for group in groups):
        return []
    return [[eager_name(name).replace("module.", "") for name in group["param_names"]] for group in groups]
