"""Put whitened layers into a model, find them, take them out again."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from prong.core.whitening import Basis, Storage, check_basis, check_cutoff, check_storage
from prong.distributed.sharding import check_unsharded
from prong.layers import FORMS, Explicit, Site, Switch, WhitenedLayer, trained_name

Form = Literal["implicit", "explicit"]
Layers = str | Iterable[str] | Callable[[str, nn.Module], bool] | None
SUPPORTED = "Linear, Conv1d/2d/3d, ConvTranspose1d/2d/3d and MultiheadAttention"


def check_model(model: nn.Module) -> None:
    """Refuse what is not a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")


def check_count(name: str, value: int, least: int) -> None:
    """Refuse what is not a whole number of at least so many."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a whole number, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} is at least {least}, got {value}")


def whiten_(
    model: nn.Module,
    form: Form = "implicit",
    *,
    layers: Layers = None,
    basis: Basis = "pca",
    cutoff: float = 0.0,
    storage: Storage | None = None,
    max_positions: int | None = None,
    block: int | None = None,
) -> nn.Module:
    """Make the layers of `model` whitened ones, in place; its function and parameter objects stay.

    Every whitening is the identity until the first `refresh_`. Layers that are whitened already are left alone.

    Args:
        model: any module.
        form: "implicit" keeps the parameters and makes gradients natural; "explicit" trains whitened parameters,
            for optimizers other than SGD and for PRONG+.
        layers: which: a name, a pattern such as "encoder.*", several of them, or a predicate of (name, module).
            None takes everything that can be whitened.
        basis: "pca", "zca" or "cholesky". All give SGD the same path; elementwise optimizers differ.
        cutoff: implicit form: treat directions of the inputs whose variance is below `cutoff * eps` as having none.
            Gains grow by at most about `1 + cutoff` times; where few directions remain, updates cost less. 0: exact.
        storage: implicit form: the dtype in which the matrices are kept and multiplied, e.g. torch.bfloat16 where the
            hardware is fast in it. None is the weight's own, and so it is for layers whose steps rounding would spoil.
            "auto" is bfloat16 for float32 weights on devices with units for it, and elsewhere None.
        max_positions: at most so many positions per example enter a convolution's statistics.
        block: implicit form: whiten contiguous blocks of at most so many inputs, each by itself, as if inputs of
            different blocks were uncorrelated; 1 scales each input. For layers too wide for `in^2` numbers: it takes
            `in * block` of them. `prong.accuracy` tells how far off the steps are.

    Raises:
        ValueError: a name or pattern that fits nothing, or a layer asked for by name that cannot be whitened.
    """
    check_model(model)
    if form not in FORMS:
        raise ValueError(f"form is 'implicit' or 'explicit', got {form!r}")
    check_basis(basis)
    check_cutoff(cutoff)
    check_storage(storage)
    if form == "explicit" and (cutoff or storage is not None):
        raise ValueError('cutoff and storage are of the implicit form; form="explicit" whitens exactly')
    if form == "explicit":
        check_unsharded(model, "the explicit form", 'use form="implicit"')
    for option, count in {"max_positions": max_positions, "block": block}.items():
        if count is not None:
            check_count(option, count, 1)
    if form == "explicit" and block is not None:
        raise ValueError('block is of the implicit form; form="explicit" whitens all inputs of a layer together')
    chosen = _choose(model, layers)
    if not chosen and not any(True for _ in whitened_layers(model)):
        raise ValueError(
            f"nothing in this {type(model).__name__} can be whitened: supported are {SUPPORTED}. "
            "prong.summary(model) tells why each layer is not."
        )
    for name, module in chosen.items():
        kind = FORMS[form][type(module)]
        sites = kind.make_sites(module)
        for site in sites:
            site.label = site_name(name, site)
            site.layout = replace(site.layout, block=block)
        if issubclass(kind, Explicit):
            names = {trained: trained_name(trained) for s in sites for trained in (s.weight, s.bias) if trained}
            _rename_parameters(module, names)
        module.__class__ = kind
        assert isinstance(module, WhitenedLayer)
        module.sites, module.switch = sites, Switch()
        module.basis, module.cutoff, module.storage = basis, cutoff, storage
        module.max_positions, module.owner = max_positions, None
    return model


def fold_(model: nn.Module) -> nn.Module:
    """Make every whitened layer a plain torch layer again, in place; function and parameter objects stay.

    An optimizer in the middle of training goes on as plain SGD (or whatever it is), its momentum in canonical terms.
    """
    check_model(model)
    layers = [layer for _, layer in whitened_layers(model)]
    if any(hasattr(layer, "unshard") for layer in layers):
        raise ValueError(
            "whitened layers that were sharded one by one cannot be folded; fold an unsharded copy of the model"
        )
    owners = {id(layer.owner): layer.owner for layer in layers if layer.owner is not None}.values()
    for owner in owners:
        if not {id(layer) for layer, _ in owner.sites.values()} <= {id(layer) for layer in layers}:
            raise ValueError(
                "an optimizer refreshes these layers together with others; fold the whole model it was given"
            )
    for owner in owners:
        owner.release()
    for _, layer in list(whitened_layers(model)):
        if isinstance(layer, Explicit):
            canonical = {name: x.detach().clone() for name, x in layer.canonical().items() if x is not None}
            _rename_parameters(layer, {trained_name(name): name for name in canonical})
            with torch.no_grad():
                for name, value in canonical.items():
                    parameter = layer._parameters[name]
                    assert parameter is not None
                    parameter.copy_(value)
        layer.__class__ = type(layer).plain  # type: ignore[assignment]
        for name in ("sites", "switch", "basis", "cutoff", "storage", "max_positions", "owner"):
            del layer.__dict__[name]
    return model


def whitened_layers(model: nn.Module) -> Iterator[tuple[str, WhitenedLayer]]:
    """Names and whitened layers of a model."""
    return ((name, m) for name, m in model.named_modules() if isinstance(m, WhitenedLayer))


def site_name(layer: str, site: Site) -> str:
    """The layer's name, and the site's where a layer has several."""
    return ".".join(filter(None, (layer, site.name)))


def whitened_sites(model: nn.Module) -> dict[str, tuple[WhitenedLayer, Site]]:
    """Layers and sites by name."""
    return {site_name(name, site): (layer, site) for name, layer in whitened_layers(model) for site in layer.sites}


@contextmanager
def ordinary_gradients(model: nn.Module) -> Iterator[None]:
    """Under this, implicit layers' backward returns the plain gradient: for gradient checks, Fishers, logging.

    It is the backward that counts, wherever the forward ran. In compiled models wrap both.
    """
    check_model(model)
    switches = [layer.switch for _, layer in whitened_layers(model)]
    before = [switch.ordinary for switch in switches]
    for switch in switches:
        switch.ordinary = True
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.ordinary = value


def why_not(module: nn.Module, shared: set[int]) -> str | None:
    """Why a layer cannot be whitened, or None if it can. `shared` holds ids of parameters with several owners."""
    if parametrize.is_parametrized(module):
        return "its parameters are parametrized; remove the parametrization first"
    lazy = [p for p in module.parameters(recurse=False) if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        return "it is lazy; run one forward first, so that it knows its size"
    if type(module) not in FORMS["implicit"]:
        bases = [kind.__name__ for kind in FORMS["implicit"] if isinstance(module, kind)]
        detail = f", a subclass of {bases[0]} that may compute something else" if bases else ""
        return f"its type is {type(module).__name__}{detail}"
    sites = FORMS["implicit"][type(module)].make_sites(module)
    names = {name for site in sites for name in (site.weight, site.bias) if name is not None}
    for name in sorted(names):
        parameter = module._parameters.get(name)
        if parameter is None:
            return f"its {name} is computed from other parameters (weight or spectral norm)"
        if id(parameter) in shared:
            return f"its {name} is tied to another layer's"
        if not parameter.is_floating_point():
            return f"its {name} is of {parameter.dtype}, not real floating point"
    return None


def shared_parameters(model: nn.Module) -> set[int]:
    """Ids of parameters that more than one module (or name) owns."""
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    return {parameter for parameter, count in owners.items() if count > 1}


def _choose(model: nn.Module, layers: Layers) -> dict[str, nn.Module]:
    """The modules to whiten, in the order of the model."""
    modules = dict(model.named_modules())
    shared = shared_parameters(model)
    if layers is None or callable(layers):
        wanted = {n: m for n, m in modules.items() if layers is None or layers(n, m)}
        by_name: set[str] = set()
    else:
        patterns = [layers] if isinstance(layers, str) else list(layers)
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise TypeError(f"layer names and patterns are strings, got {type(pattern).__name__}")
            if not any(fnmatchcase(name, pattern) for name in modules):
                raise ValueError(f"no layer fits {pattern!r}. Layers: {', '.join(filter(None, modules))}")
        wanted = {n: m for n, m in modules.items() if any(fnmatchcase(n, p) for p in patterns)}
        by_name = set(patterns) & set(modules)
    chosen, left = {}, []
    for name, module in wanted.items():
        if isinstance(module, WhitenedLayer):
            continue
        reason = why_not(module, shared)
        if reason is None and isinstance(module, NonDynamicallyQuantizableLinear):
            attention = modules.get(name.rpartition(".")[0])
            if attention not in wanted.values() and not isinstance(attention, WhitenedLayer):
                reason = "attention computes with its weights and never calls it; whiten the attention too"
        if reason is None:
            chosen[name] = module
        elif name in by_name:
            raise ValueError(f"layer {name!r} cannot be whitened: {reason}. Supported are {SUPPORTED}.")
        elif isinstance(module, tuple(FORMS["implicit"])):
            left.append(f"{name!r} ({reason})")
    if left:
        warnings.warn(f"prong leaves as they are: {'; '.join(left)}", stacklevel=3)
    return chosen


def _rename_parameters(module: nn.Module, names: dict[str, str]) -> None:
    module._parameters = {names.get(name, name): p for name, p in module._parameters.items()}
