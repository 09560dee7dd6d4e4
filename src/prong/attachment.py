"""Ties a model and its optimizer together: steps in whitened coordinates, refreshes, and one state for both."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from prong.distributed.sharding import by_rows, check_unsharded, is_sharded, reshard_, sharded_modules
from prong.distributed.workers import Workers, unwrapped
from prong.gradients.whitening import OutputWhitening
from prong.layers import Explicit, Kind, Plain, Site, WhitenedLayer
from prong.model.whiten import (
    check_model,
    fold_,
    nothing_to_whiten,
    tap_,
    warn_of_rest,
    weights_and_biases,
    whiten_,
    whitened_layers,
    whitened_sites,
)
from prong.options import (
    Auto,
    Damping,
    Every,
    Form,
    Implicit,
    Materialised,
    OnDrift,
    Refresh,
    WhitenOutputs,
    as_form,
    check_damping,
    check_refresh,
    check_trust,
)
from prong.options import Explicit as ExplicitOptions
from prong.refresh.refresher import Refresher
from prong.refresh.transport import is_linear, transports_of
from prong.trust import Trust

Inner = TypeVar("Inner", bound=Optimizer)
Space = Literal["whitened", "natural"]
TRUST = 0.05


def attach(
    model: nn.Module,
    optimizer: Inner,
    *,
    damping: Damping = 0.1,
    form: str | Form | Auto = "auto",
    refresh: Refresh | None = None,
    trust: float | None = TRUST,
    space: Space = "whitened",
    outputs: WhitenOutputs | None = None,
    replace: bool = False,
    process_group: ProcessGroup | None = None,
) -> Inner:
    """Let an optimizer that exists step in whitened coordinates from now on; returns it.

        optimizer = prong.attach(model, SOAP(model.parameters(), lr=3e-3))

    Every parameter of a layer that can be whitened is exchanged, during steps, for the one in whitened coordinates. All
    others are trained as before. Before the first refresh nothing is changed.

    The state of torch's own optimizers is carried over exactly at each refresh. Of others, averages of gradients
    (`exp_avg`, `momentum_buffer`) are carried over, and everything else is kept as it is: coordinates are those of
    `Materialised(basis="zca")` then, which change little from one refresh to the next. (At a layer's first refresh they
    change altogether, and such a state begins anew.)

    Args:
        model: the model it trains, or a DistributedDataParallel or compiled one of it. If some of its layers are
            whitened already (`whiten_`), those are used and no others.
        optimizer: any torch.optim.Optimizer, torch's or somebody else's.
        damping: what is added to the variance of each layer's inputs, in units of their mean square; or
            `prong.Absolute(eps)`.
        form: how: "auto", "implicit", "explicit" or "materialised", or one of `prong.Auto(...)`, `prong.Implicit(...)`,
            `prong.Explicit(...)`, `prong.Materialised(...)`. All walk the same path.
        refresh: when whitening is estimated anew, and from which samples: `prong.Every(...)`, `prong.OnDrift(...)` or
            `prong.Never()`.
        trust: the largest change of a layer's pre-activations that a step may make by prediction, in RMS over data and
            units; None: any.
        space: "natural" gives the optimizer natural gradients instead: another method, unless it is SGD.
        outputs: whiten backpropagated gradients too, with `prong.WhitenOutputs(...)`. For SGD.
        replace: take the model over from an optimizer that trains it in whitened coordinates already. One that nobody
            holds any more is replaced anyway.
        process_group: the workers that train the model together; default: DistributedDataParallel's, or all where
            `torch.distributed` is initialised.

    Raises:
        TypeError: what is no model or optimizer.
        ValueError: options that do not fit, or a model without layers to whiten.
    """
    check_model(model)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    check_damping(damping)
    check_trust(trust)
    refresh = Every() if refresh is None else refresh
    check_refresh(refresh)
    workers, given, model = Workers.of(model, process_group), model, unwrapped(model)
    take_over(model, replace)
    layers = dict(whitened_layers(model))
    wanted = as_form(form)
    _check_combination(model, optimizer, wanted, list(layers.values()), space, outputs)
    if not layers:
        _whiten(model, optimizer, wanted, space, outputs)
    try:
        sites = whitened_sites(model)
        if not sites:
            raise ValueError(nothing_to_whiten(model))
        _check_held(optimizer, sites)
        _check_refresh(sites, refresh, outputs)
        Attachment(model, optimizer, sites, damping, refresh, trust, outputs, workers, given)
    except BaseException:
        if not layers:
            fold_(model)
        raise
    if not layers:
        warn_of_rest(model, sites.values())
    return optimizer


class Attachment:
    """What happens around an optimizer's steps, and what is saved beside its own state.

    Attributes:
        refresher: keeps the whitening up to date.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        sites: dict[str, tuple[Kind, Site]],
        damping: Damping,
        refresh: Refresh,
        trust: float | None,
        outputs: WhitenOutputs | None,
        workers: Workers,
        given: nn.Module,
    ) -> None:
        self.workers, self._given = workers, weakref.ref(given)  # DistributedDataParallel is not ours to keep
        self._views = list({id(layer): layer for layer, _ in sites.values() if isinstance(layer, Plain)}.values())
        self._sharded = sharded_modules(model)
        spread = not workers.alone and any(is_sharded(p) for p in model.parameters())
        self._trust = None if trust is None else Trust(trust, sites, workers if spread else None)
        self._outputs = None if outputs is None else OutputWhitening(model, sites, outputs, workers)
        self.refresher = Refresher(
            model, optimizer, sites, damping, refresh, workers, given, plus=_plus(sites), gradients=self._outputs
        )
        self._loading: dict[str, Any] | None = None
        self._met = False  # whether it is known who trains the model
        optimizer._prong = self  # type: ignore[attr-defined]
        self._handles = [
            optimizer.register_step_pre_hook(self._pre_step),
            optimizer.register_step_post_hook(self._post_step),
            optimizer.register_state_dict_post_hook(self._save),
            optimizer.register_load_state_dict_pre_hook(self._check_load),
            optimizer.register_load_state_dict_post_hook(self._load),
        ]

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
        reshard_(self._sharded)
        self.refresher.before_step()
        try:
            if self._outputs is not None:
                self._outputs.precondition()
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
        """Refuse to train alone what is trained by many, which would drift apart.

        Raises:
            RuntimeError: the process group was made after the optimizer.
        """
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
        """Refuse what does not fit before anything is changed."""
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

    @property
    def given(self) -> nn.Module | None:
        """The model as the user has it, in DistributedDataParallel or not."""
        return self._given()


def attachment_of(optimizer: Optimizer) -> Attachment:
    """What ties an optimizer to its model.

    Raises:
        TypeError: an optimizer that is tied to none.
    """
    attachment = getattr(optimizer, "_prong", None)
    if not isinstance(attachment, Attachment):
        raise TypeError(
            f"this {type(optimizer).__name__} does not step in whitened coordinates; make it by prong.attach"
        )
    return attachment


def take_over(model: nn.Module, replace: bool) -> None:
    """Release a model from an optimizer that nobody holds any more, or from any that there is.

    Raises:
        ValueError: another optimizer trains it.
    """
    owners = {id(layer.owner): layer.owner for _, layer in whitened_layers(model) if layer.owner is not None}
    if any(not owner.abandoned for owner in owners.values()) and not replace:
        gc.collect()  # schedulers and their optimizers hold each other
        if any(not owner.abandoned for owner in owners.values()):
            raise ValueError(
                "another optimizer trains this model in whitened coordinates already; give replace=True to take it "
                "over, or prong.fold_(model) first"
            )
    if owners:
        fold_(model)


def check_groups(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Refuse a state of other parameters, by their names where there are any, and by their shapes.

    Raises:
        ValueError: it is of another model.
    """
    mine, theirs = _names(optimizer.param_groups), _names(state_dict["param_groups"])
    if mine and theirs and mine != theirs:
        odd = sorted({name for group in [*mine, *theirs] for name in group} - {n for group in mine for n in group})
        raise ValueError(f"this state is of a model with other parameters or groups: {odd or 'grouped otherwise'}")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    indices = [i for group in state_dict["param_groups"] for i in group["params"]]
    for index, parameter in zip(indices, parameters, strict=False):
        for key, value in state_dict["state"].get(index, {}).items():
            if key in ("momentum_buffer", "exp_avg") and value is not None and value.shape != parameter.shape:
                raise ValueError(
                    f"this state is of another model: {key} of shape {tuple(value.shape)} for a parameter of shape "
                    f"{tuple(parameter.shape)}"
                )


def _names(groups: list[dict[str, Any]]) -> list[list[str]]:
    """The names of parameters, without what torch.compile and DistributedDataParallel put before them."""
    if not all("param_names" in group for group in groups):
        return []
    strip = ("_orig_mod.", "module.")
    return [[_without(name, strip) for name in group["param_names"]] for group in groups]


def _without(name: str, parts: tuple[str, ...]) -> str:
    for part in parts:
        name = name.replace(part, "")
    return name


def _check_combination(
    model: nn.Module,
    optimizer: Optimizer,
    form: Form | Auto,
    layers: list[WhitenedLayer | Plain],
    space: Space,
    outputs: WhitenOutputs | None,
) -> None:
    """Refuse what does not go together."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS makes several steps in one, between which coordinates would have to change back")
    for group in optimizer.param_groups:
        for option in ("capturable", "differentiable"):
            if group.get(option):
                raise ValueError(
                    f"{option}=True does not go with whitened coordinates, which Python exchanges at steps"
                )
    if space not in ("whitened", "natural"):
        raise ValueError(f"space is 'whitened' or 'natural', got {space!r}")
    if layers and not isinstance(form, Auto) and any(layer.form != form.name for layer in layers):
        raise ValueError(f"the model is whitened already, but not in the {form.name} form; prong.fold_(model) first")
    kind = type(optimizer).__name__
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    linear = all(is_linear(optimizer, p) for p in weights_and_biases(model) if id(p) in held)
    explicit = isinstance(form, ExplicitOptions) or any(isinstance(layer, Explicit) for layer in layers)
    natural = isinstance(form, Implicit) or any(layer.form == "implicit" for layer in layers)
    if natural and space != "natural" and not linear:
        raise ValueError(
            f"{kind} is not linear in the gradient, so natural gradients make it another method: say space='natural', "
            "or choose another form"
        )
    if space == "natural" and (explicit or isinstance(form, Materialised)):
        raise ValueError(
            f"space='natural' is natural gradients, which is the implicit form and not the {form.name} one"
        )
    if outputs is not None:
        check_unsharded(model, "whitening of outputs", "leave outputs=None")
    if outputs is not None and not linear:
        raise ValueError(f"outputs are whitened for SGD, not for {kind}")
    if outputs is not None and isinstance(form, Materialised):
        raise ValueError('outputs are whitened in the implicit or explicit form: leave form="auto"')


def _whiten(
    model: nn.Module, optimizer: Optimizer, form: Form | Auto, space: Space, outputs: WhitenOutputs | None
) -> None:
    """Bring a plain model into a form."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}

    def trains(module: nn.Module) -> bool:
        return any(id(p) in held for p in module.parameters(recurse=False))

    if outputs is not None and isinstance(form, Auto):
        form = Implicit()
    if isinstance(form, Implicit | ExplicitOptions) and (space == "whitened" or isinstance(form, ExplicitOptions)):
        whiten_(model, form, layers=lambda name, module: trains(module))
        return

    whole: list[nn.Module] = []  # modules that are spread over workers in parts that cannot be whitened by themselves

    def choose_form(kind: type[Plain], module: nn.Module) -> Form | None:
        if not trains(module):
            return None
        site = kind.make_sites(module)[0]
        weight = getattr(module, site.weight)
        if is_sharded(weight) and not (by_rows(weight) and site.layout.by_rows):
            whole.append(module)
            return None
        if not isinstance(form, Auto):
            return form
        if space == "natural" or is_linear(optimizer, weight):
            return Implicit()
        return Materialised("zca" if transports_of(optimizer, weight) is None else "pca")

    views = tap_(model, choose_form, form if isinstance(form, Auto) else None)
    for view in views.values():
        view.measured = view.natural and not is_linear(optimizer, view.pair(view.sites[0])[0])
    if whole and all(space == "natural" or is_linear(optimizer, p) for module in whole for p in module.parameters()):
        whiten_(model, Implicit(), layers=lambda name, module: module in whole)
    elif whole:
        names = {id(module): name for name, module in model.named_modules()}
        warnings.warn(
            f"prong leaves as they are: {', '.join(repr(names[id(module)]) for module in whole)}, which are grouped, "
            "transposed or sharded otherwise than by rows",
            stacklevel=4,
        )


def _check_held(optimizer: Optimizer, sites: dict[str, tuple[Kind, Site]]) -> None:
    """Refuse explicit layers whose weights the optimizer does not train: their coordinates would change under it."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    weights = [layer.pair(site)[0] for layer, site in sites.values() if isinstance(layer, Explicit)]
    if any(weight.requires_grad and id(weight) not in held for weight in weights):
        raise ValueError(
            "the optimizer does not train all explicitly whitened weights, so it could not carry their state "
            "along; give it all of them, or whiten only its own: prong.whiten_(model, layers=...)"
        )
    if _plus(sites) and any(transports_of(optimizer, weight) is None for weight in weights):
        raise ValueError(f"PRONG+ would reset the state of {type(optimizer).__name__} at every update")


def _check_refresh(sites: dict[str, tuple[Kind, Site]], refresh: Refresh, outputs: WhitenOutputs | None) -> None:
    """Refuse refreshes that would never come, or never tell what is wanted."""
    if _plus(sites) and isinstance(refresh, OnDrift):
        raise ValueError("PRONG+ hides drift, as it evens it out after each update; take refresh=prong.Every(...)")
    if outputs is not None and not isinstance(getattr(refresh, "source", None), str):
        raise ValueError("outputs are gathered in training forwards: give refresh=prong.Every(...) without a loader")


def _plus(sites: dict[str, tuple[Kind, Site]]) -> bool:
    return any(isinstance(layer.options, ExplicitOptions) and layer.options.plus for layer, _ in sites.values())
