"""What a model computes, seen from outside: its layers' shapes, its products, and what it keeps for its backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils.flop_counter import FlopCounterMode

import prong
from prong.analysis.observation import tensors_given
from prong.layers import Site, WhitenedLayer
from prong.layers.site import Layout
from prong.model.whiten import site_name, whitened_layers

KINDS: Mapping[type[nn.Module], str] = {
    nn.MultiheadAttention: "attention",
    NonDynamicallyQuantizableLinear: "attention's output",
}


@dataclass(frozen=True)
class Place:
    """A site of a layer that would be whitened, and what a worker's minibatch brings there.

    Attributes:
        name: of the site.
        kind: of the layer.
        layout: of its weight, with its block.
        rows: samples that enter its statistics.
        padded: rows, with those that padding adds.
        positions: outputs' positions, over the minibatch.
        samples: what of `rows` counts as examples towards a refresh.
        parameters: of weight and bias.
        backward: whether gradients go on to its inputs; not so for a model's first layer.
        owner: the place whose statistics and matrix it shares; its own name as a rule.
    """

    name: str
    kind: str
    layout: Layout
    rows: int
    padded: int
    positions: int
    samples: int
    parameters: int
    backward: bool
    owner: str

    def blocked(self, block: int | None) -> Place:
        """The same, whitened in blocks."""
        return replace(self, layout=replace(self.layout, block=block))


@dataclass(frozen=True)
class Traced:
    """A model and a minibatch.

    Attributes:
        places: what would be whitened.
        flops: floating-point operations of all products, forward and backward.
        parameters: numbers trained.
        kept: bytes kept for the backward, parameters not counted.
        layers: modules with parameters of their own.
        itemsize: bytes per number.
    """

    places: tuple[Place, ...]
    flops: int
    parameters: int
    kept: int
    layers: int
    itemsize: int


def trace(model: nn.Module, inputs: Tensor) -> Traced:
    """Run a model forward and backward once, on the meta device or any other, and look at it. The model is whitened."""
    model.train()
    flops, kept = _products(model, inputs)
    parameters = [p for p in model.parameters() if p.requires_grad]
    layers = sum(any(p is not None for p in m._parameters.values()) for m in model.modules())
    places = _places(prong.whiten_(model), inputs)
    return Traced(places, flops, sum(p.numel() for p in parameters), kept, layers, inputs.element_size())


def _products(model: nn.Module, inputs: Tensor) -> tuple[int, int]:
    """Operations of one forward and backward, and bytes kept in between."""
    own = {_storage(x) for x in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        if _storage(x) not in own:
            kept[_storage(x)] = x.untyped_storage().nbytes()
        return x

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            outputs = model(inputs)
        outputs = outputs if isinstance(outputs, Tensor) else outputs[0]
        outputs.backward(torch.empty_like(outputs))
    model.zero_grad()
    return int(counter.get_total_flops()), sum(kept.values())


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _places(model: nn.Module, inputs: Tensor) -> tuple[Place, ...]:
    """The sites that the minibatch comes to, in order."""
    found: dict[str, Place] = {}

    def look(name: str) -> Any:
        def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given = tensors_given(layer, args, kwargs)
            outputs = output if isinstance(output, Tensor) else output[0]
            for i, (site, h) in enumerate(zip(layer.sites, given, strict=False)):
                same = next(j for j, other in enumerate(given) if other is h)
                owner = site_name(name, layer.sites[same])
                where = site_name(name, site)
                found[where] = _added(found.get(where), _place(where, owner, layer, site, h, outputs))
                assert same <= i
            if isinstance(layer, nn.MultiheadAttention):
                projection: Any = layer.out_proj  # attention computes with it and never calls it
                if isinstance(projection, WhitenedLayer):
                    where = f"{name}.out_proj" if name else "out_proj"
                    place = _place(where, where, projection, projection.sites[0], outputs, outputs)
                    found[where] = _added(found.get(where), place)

        return hook

    layers: list[tuple[str, Any]] = list(whitened_layers(model))
    handles = [layer.register_forward_hook(look(name), with_kwargs=True) for name, layer in layers]
    model(inputs)
    for handle in handles:
        handle.remove()
    return tuple(found.values())


def _place(name: str, owner: str, layer: Any, site: Site, h: Tensor, outputs: Tensor) -> Place:
    seen = layer.input_rows(site, h)
    weight, bias = layer.pair(site)
    own = [site.part(x) for x in (weight, bias) if x is not None]
    rows = seen.rows.shape[1]
    return Place(
        name=name,
        kind=KINDS.get(type(layer).plain, type(layer).plain.__name__),
        layout=site.layout,
        rows=rows,
        padded=rows + round(seen.zeros),
        positions=outputs.numel() // outputs.shape[layer.channels_at],
        samples=seen.examples,
        parameters=sum(x.numel() for x in own if x is not None),
        backward=h.requires_grad,
        owner=owner,
    )


def _added(before: Place | None, place: Place) -> Place:
    """A layer that is called several times sees the rows of all calls."""
    if before is None:
        return place
    sums: Mapping[str, Any] = {
        name: getattr(before, name) + getattr(place, name) for name in ("rows", "padded", "positions", "samples")
    }
    return replace(place, **sums)
