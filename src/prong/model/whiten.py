"""Put whitened layers into a model, find them, take them out again."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from prong.distributed.sharding import check_unsharded
from prong.distributed.workers import eager_name, unwrapped
from prong.layers import FORMS, Explicit, Kind, Plain, Site, WhitenedLayer
from prong.layers.attention import TappedMultiheadAttention
from prong.layers.base import trained_name
from prong.layers.natural import Switch
from prong.layers.plain import PLAIN, Budget, PlainAttention, PlainOutProjection, largest_block, plain_kind
from prong.layers.taps import Sharing, Tap, remove_taps_, tap_of
from prong.options import Auto, Form, Implicit, Materialised, as_form, check_count
from prong.options import Explicit as ExplicitOptions

Layers = str | Iterable[str] | Callable[[str, nn.Module], bool] | None
SUPPORTED = "Linear, Conv1d/2d/3d, ConvTranspose1d/2d/3d, MultiheadAttention and the Conv1D of transformers"


def check_model(model: nn.Module) -> None:
    """Refuse what is not a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")


def whiten_(
    model: nn.Module, form: str | Form | Auto = "implicit", *, layers: Layers = None, max_positions: int | None = None
) -> nn.Module:
    """Make the layers of `model` whitened ones, in place; its function and parameter objects stay.

    Every whitening is the identity until the first `refresh_`. Layers that are whitened already are left alone.

    Args:
        model: any module.
        form: "implicit" keeps the parameters and makes gradients natural; "explicit" trains whitened parameters, for
            optimizers other than SGD and for PRONG+; `prong.Implicit(...)` and `prong.Explicit(...)` have options.
        layers: which: a name, a pattern such as "encoder.*", several of them, or a predicate of (name, module).
            None takes everything that can be whitened.
        max_positions: at most so many positions per example enter a convolution's statistics.
    """
    check_model(model)
    options = as_form(form)
    if isinstance(options, Auto | Materialised):
        raise ValueError(
            "this form leaves layers as they are, and is a matter of the optimizer: "
            'prong.AdamW(model, form="materialised") or prong.attach(model, optimizer)'
        )
    if isinstance(options, ExplicitOptions):
        check_unsharded(model, "the explicit form", 'use form="implicit"')
    check_count("max_positions", max_positions, 1, optional=True)
    before = list(whitened_layers(model))
    if not before:
        remove_taps_(model.modules())  # of the model that this one is a copy of
    chosen = choose(model, layers)
    if not chosen and not before:
        raise ValueError(nothing_to_whiten(model))
    for name, module in chosen.items():
        kind, torch_layer = FORMS[options.name].get(type(module)), type(module).__name__
        if kind is None:
            warnings.warn(f"prong leaves as it is: {name!r} ({torch_layer} has no {options.name} form)", stacklevel=2)
            continue
        sites = kind.make_sites(module)
        label(name, sites, options.block if isinstance(options, Implicit) else None)
        if issubclass(kind, Explicit):
            _rename_parameters(module, _trained_names(sites))
        module.__class__ = kind
        assert isinstance(module, WhitenedLayer)
        module.sites, module.switch, module.options = sites, Switch(), options
        module.max_positions, module.owner = max_positions, None
    return model


def nothing_to_whiten(model: nn.Module) -> str:
    """What to say of a model without layers to whiten."""
    return (
        f"nothing in this {type(model).__name__} can be whitened: supported are {SUPPORTED}. "
        "prong.summary(model) tells why each layer is not."
    )


def label(name: str, sites: Iterable[Site], block: int | None) -> None:
    """Give sites their full names, and the size of their blocks."""
    for site in sites:
        site.label = site_name(name, site)
        site.layout = replace(site.layout, block=block)


def tap_(
    model: nn.Module, choose_form: Callable[[type[Plain], nn.Module], Form | None], auto: Auto | None
) -> dict[str, Plain]:
    """Views of everything in a model that can be whitened, by name; the layers show them their inputs from now on.

    `choose_form` tells for a layer what its view is to do, None to leave it alone. With `auto`, blocks are chosen by
    its budget.
    """
    remove_taps_(model.modules())  # of the model that this one is a copy of
    chosen: dict[str, tuple[nn.Module, type[Plain], Implicit | Materialised]] = {}
    for name, module in choose(model, None).items():
        kind = plain_kind(module)
        assert kind is not None
        options = choose_form(kind, module)
        if options is not None:
            assert isinstance(options, Implicit | Materialised)
            chosen[name] = module, kind, options
    layouts = [site.layout for module, kind, _ in chosen.values() for site in kind.make_sites(module)]
    entries = sum(map(_entries, model.parameters()))
    budget = None if auto is None else Budget(auto.time, largest_block(layouts, auto.memory * entries))
    views = {name: kind(module, options, budget) for name, (module, kind, options) in chosen.items()}
    sharing = Sharing()
    for name, view in views.items():
        label(name, view.sites, chosen[name][2].block)
        view.sharing = sharing
        if not isinstance(view, PlainOutProjection):
            view.module.register_forward_pre_hook(Tap(view, sharing), with_kwargs=True)
        if isinstance(view, PlainAttention):
            view.module.__class__ = TappedMultiheadAttention
            view.module.tap = views.get(f"{name}.out_proj" if name else "out_proj")  # type: ignore[assignment]
    return views


def warn_of_rest(model: nn.Module, sites: Iterable[tuple[Kind, Site]]) -> None:
    """Say so where less than half of a model's parameters are whitened, and which are not."""
    whitened = {id(p) for layer, site in sites for p in layer.pair(site) if p is not None}
    sizes = {id(p): _entries(p) for p in model.parameters()}
    share = sum(size for p, size in sizes.items() if p in whitened) / max(1, sum(sizes.values()))
    if share >= 0.5:
        return
    left = {
        f"{name or 'the model itself'} ({type(module).__name__})": sum(
            sizes[id(p)] for p in module.parameters(recurse=False) if id(p) not in whitened
        )
        for name, module in model.named_modules()
    }
    largest = sorted(filter(left.get, left), key=lambda name: -left[name])[:6]
    warnings.warn(
        f"only {share:.0%} of this model's parameters are whitened; the largest that are not: {', '.join(largest)}. "
        "They are trained as without whitening; prong.summary(model) tells why.",
        stacklevel=5,
    )


def fold_(model: nn.Module) -> nn.Module:
    """Make every whitened layer a plain torch layer again, in place; function and parameter objects stay.

    An optimizer in the middle of training goes on as plain SGD (or whatever it is), its momentum in canonical terms.
    """
    check_model(model)
    layers = dict(whitened_layers(model))
    if any(hasattr(layer, "unshard") for layer in layers.values() if isinstance(layer, WhitenedLayer)):
        raise ValueError("whitened layers that were sharded one by one cannot be folded; fold an unsharded copy")
    owners = {id(layer.owner): layer.owner for layer in layers.values() if layer.owner is not None}.values()
    if {id(layer) for owner in owners for layer, _ in owner.sites.values()} - set(map(id, layers.values())):
        raise ValueError("an optimizer refreshes these layers together with others; fold the whole model it was given")
    for owner in owners:
        owner.release()
    for layer in layers.values():
        if isinstance(layer, WhitenedLayer):
            plain_(layer)
    remove_taps_(model.modules())
    for module in model.modules():  # and of a copy, what its original's optimizer has registered at the model
        for key, hook in list(module._forward_hooks.items()):
            if type(hook).__module__.startswith("prong."):
                del module._forward_hooks[key]
                module._forward_hooks_always_called.pop(key, None)
    return model


def plain_(layer: WhitenedLayer) -> None:
    """Make a whitened layer the torch layer that it was."""
    if isinstance(layer, Explicit):
        canonical = {name: x.detach().clone() for name, x in layer.canonical().items() if x is not None}
        _rename_parameters(layer, {trained: name for name, trained in _trained_names(layer.sites).items()})
        with torch.no_grad():
            for name, value in canonical.items():
                layer.get_parameter(name).copy_(value)
    layer.__class__ = type(layer).plain  # type: ignore[assignment]
    for name in ("sites", "switch", "options", "max_positions", "owner"):
        del layer.__dict__[name]


def whitened_layers(model: nn.Module) -> Iterator[tuple[str, Kind]]:
    """Names and whitened layers of a model: whitened ones, and views of plain ones whose optimizer whitens."""
    for name, module in model.named_modules():
        tap = tap_of(module)
        if isinstance(module, WhitenedLayer):
            yield eager_name(name), module
        elif tap is not None and tap.layer is not None:
            yield eager_name(name), tap.layer
        elif isinstance(module, NonDynamicallyQuantizableLinear):
            attention = model.get_submodule(name.rpartition(".")[0])
            view = attention.__dict__.get("tap") if type(attention) is TappedMultiheadAttention else None
            if isinstance(view, Plain):
                yield eager_name(name), view


def site_name(layer: str, site: Site) -> str:
    """The layer's name, and the site's where a layer has several."""
    return ".".join(filter(None, (layer, site.name)))


def whitened_sites(model: nn.Module) -> dict[str, tuple[Kind, Site]]:
    """Layers and sites by name."""
    return {site_name(name, site): (layer, site) for name, layer in whitened_layers(model) for site in layer.sites}


@contextmanager
def ordinary_gradients(model: nn.Module) -> Iterator[None]:
    """Under this, implicit layers' backward returns the plain gradient: for gradient checks, Fishers, logging.

    It is the backward that counts, wherever the forward ran. In compiled models wrap both.
    """
    check_model(model)
    switches = [layer.switch for _, layer in whitened_layers(model) if isinstance(layer, WhitenedLayer)]
    with restored(switches, "ordinary"):
        for switch in switches:
            switch.ordinary = True
        yield


@contextmanager
def restored(objects: Iterable[object], name: str) -> Iterator[None]:
    """An attribute of these objects is afterwards what it was."""
    before = [(each, getattr(each, name)) for each in objects]
    try:
        yield
    finally:
        for each, value in before:
            setattr(each, name, value)


def why_not(module: nn.Module, shared: set[int]) -> str | None:
    """Why a layer cannot be whitened, or None if it can. `shared` holds ids of parameters with several owners."""
    if parametrize.is_parametrized(module):
        return "its parameters are parametrized; remove the parametrization first"
    lazy = [p for p in module.parameters(recurse=False) if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        return "it is lazy; run one forward first, so that it knows its size"
    kind = plain_kind(module)
    if kind is None:
        bases = [base.__name__ for base in PLAIN if isinstance(module, base)]
        detail = f", a subclass of {bases[0]} that may compute something else" if bases else ""
        return f"its type is {type(module).__name__}{detail}"
    sites = kind.make_sites(module)
    names = {name for site in sites for name in (site.weight, site.bias) if name is not None}
    for name in sorted(names):
        parameter = module._parameters.get(name)
        if parameter is None:
            return f"its {name} is computed from other parameters (weight or spectral norm)"
        if id(parameter) in shared:
            return f"its {name} is tied to another layer's"
        if not parameter.is_floating_point():
            return f"its {name} is of {parameter.dtype}, not real floating point"
    if any(min(site.layout.inputs, site.layout.outputs) < 1 for site in sites):
        return "it has no inputs or no outputs"
    return None


def weights_and_biases(model: nn.Module) -> list[Tensor]:
    """The parameters of all layers that are whitened or can be, in order."""
    model = unwrapped(model)
    shared = shared_parameters(model)
    layers = [m for m in model.modules() if isinstance(m, WhitenedLayer) or (plain_kind(m) and not why_not(m, shared))]
    return [p for layer in layers for p in layer.parameters(recurse=False)]


def shared_parameters(model: nn.Module) -> set[int]:
    """Ids of parameters that more than one module (or name) owns."""
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    return {parameter for parameter, count in owners.items() if count > 1}


def choose(model: nn.Module, layers: Layers) -> dict[str, nn.Module]:
    """The modules to whiten, in the order of the model."""
    modules = {eager_name(name): module for name, module in model.named_modules()}
    shared = shared_parameters(model)
    if callable(layers):
        wanted, named = {n: m for n, m in modules.items() if layers(n, m)}, []
    else:
        named = patterns(layers)
        wanted = {name: modules[name] for name in fitting(modules, named, "layer")}
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
        elif name in named:
            raise ValueError(f"layer {name!r} cannot be whitened: {reason}. Supported are {SUPPORTED}.")
        elif any(isinstance(module, kind) for kind in PLAIN) and any(map(_entries, module.parameters(recurse=False))):
            left.append(f"{name!r} ({reason})")
    if left:
        warnings.warn(f"prong leaves as they are: {'; '.join(left)}", stacklevel=3)
    return chosen


def patterns(layers: str | Iterable[str] | None) -> list[str]:
    """Names and patterns as a list; None takes all."""
    found = ["*"] if layers is None else [layers] if isinstance(layers, str) else list(layers)
    for pattern in found:
        if not isinstance(pattern, str):
            raise TypeError(f"layer names and patterns are strings, got {type(pattern).__name__}")
    return found


def fitting(names: Iterable[str], layers: str | Iterable[str] | None, what: str) -> list[str]:
    """Those of the names that patterns fit."""
    names, wanted = list(names), patterns(layers)
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"no {what} fits {pattern!r}. There are: {', '.join(filter(None, names)) or 'none'}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in wanted)]


def _entries(parameter: nn.Parameter) -> int:
    """How many numbers a parameter holds; of a lazy one that is not known yet, and it counts as one."""
    return 1 if isinstance(parameter, nn.parameter.UninitializedParameter) else parameter.numel()


def _trained_names(sites: Iterable[Site]) -> dict[str, str]:
    """What parameters are called in the explicit form: weight becomes V."""
    return {name: trained_name(name) for site in sites for name in (site.weight, site.bias) if name}


def _rename_parameters(module: nn.Module, names: dict[str, str]) -> None:
    module._parameters = {names.get(name, name): p for name, p in module._parameters.items()}
