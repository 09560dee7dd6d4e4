"""Which form every layer takes, and what does not go together."""

from __future__ import annotations

import warnings
from typing import Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from prong.distributed.sharding import by_rows, check_unsharded, is_sharded
from prong.layers import Explicit, Kind, Plain, Site
from prong.model.whiten import tap_, weights_and_biases, whiten_
from prong.options import Auto, Form, Implicit, Materialised, OnDrift, Refresh, WhitenOutputs, check_choice
from prong.options import Explicit as ExplicitOptions
from prong.refresh.transport import is_linear, transports_of

Space = Literal["whitened", "natural"]


def check_combination(
    model: nn.Module,
    optimizer: Optimizer,
    form: Form | Auto,
    layers: list[Kind],
    space: Space,
    outputs: WhitenOutputs | None,
) -> None:
    """Refuse what does not go together."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS makes several steps in one, between which coordinates would have to change back")
    for option in ("capturable", "differentiable"):
        if any(group.get(option) for group in optimizer.param_groups):
            raise ValueError(f"{option}=True does not go with whitened coordinates, which Python exchanges at steps")
    check_choice("space", space, get_args(Space))
    if layers and not isinstance(form, Auto) and any(layer.form != form.name for layer in layers):
        raise ValueError(f"the model is whitened already, but not in the {form.name} form; prong.fold_(model) first")
    kind = type(optimizer).__name__
    held = held_by(optimizer)
    linear = all(is_linear(optimizer, p) for p in weights_and_biases(model) if id(p) in held)
    explicit = isinstance(form, ExplicitOptions) or any(isinstance(layer, Explicit) for layer in layers)
    natural = isinstance(form, Implicit) or any(layer.form == "implicit" for layer in layers)
    if natural and space != "natural" and not linear:
        raise ValueError(
            f"{kind} is not linear in the gradient, so natural gradients make it another method: say space='natural', "
            "or choose another form"
        )
    if space == "natural" and (explicit or isinstance(form, Materialised)):
        raise ValueError(f"space='natural' is natural gradients: the implicit form, and not the {form.name} one")
    if outputs is not None:
        check_unsharded(model, "whitening of outputs", "leave outputs=None")
        if not linear:
            raise ValueError(f"outputs are whitened for SGD, not for {kind}")
        if isinstance(form, Materialised):
            raise ValueError('outputs are whitened in the implicit or explicit form: leave form="auto"')


def take_form_(
    model: nn.Module, optimizer: Optimizer, form: Form | Auto, space: Space, outputs: WhitenOutputs | None
) -> None:
    """Bring a plain model into a form."""
    held = held_by(optimizer)

    def trains(module: nn.Module) -> bool:
        return any(id(p) in held for p in module.parameters(recurse=False))

    if outputs is not None and isinstance(form, Auto):
        form = Implicit()
    if isinstance(form, ExplicitOptions) or (isinstance(form, Implicit) and space == "whitened"):
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


def check_sites(
    optimizer: Optimizer, sites: dict[str, tuple[Kind, Site]], refresh: Refresh, outputs: WhitenOutputs | None
) -> None:
    """Refuse explicit layers whose coordinates would change under an optimizer, and refreshes that never come."""
    held = held_by(optimizer)
    weights = [layer.pair(site)[0] for layer, site in sites.values() if isinstance(layer, Explicit)]
    if any(weight.requires_grad and id(weight) not in held for weight in weights):
        raise ValueError(
            "the optimizer does not train all explicitly whitened weights, so it could not carry their state "
            "along; give it all of them, or whiten only its own: prong.whiten_(model, layers=...)"
        )
    if has_plus(sites) and any(transports_of(optimizer, weight) is None for weight in weights):
        raise ValueError(f"PRONG+ would reset the state of {type(optimizer).__name__} at every update")
    if has_plus(sites) and isinstance(refresh, OnDrift):
        raise ValueError("PRONG+ hides drift, as it evens it out after each update; take refresh=prong.Every(...)")
    if outputs is not None and not isinstance(getattr(refresh, "source", None), str):
        raise ValueError("outputs are gathered in training forwards: give refresh=prong.Every(...) without a loader")


def held_by(optimizer: Optimizer) -> set[int]:
    """Ids of the parameters that an optimizer trains."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def has_plus(sites: dict[str, tuple[Kind, Site]]) -> bool:
    """Whether it is PRONG+."""
    return any(isinstance(layer.options, ExplicitOptions) and layer.options.plus for layer, _ in sites.values())
