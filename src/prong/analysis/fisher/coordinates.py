"""Directions and gradients between the canonical parameters of a model and those in whitened coordinates.

For every whitened site the canonical parameters are linear in the whitened ones, W = V U and b = d - W c, so

    directions   tW = tV U                  tb = td - tW c           (push)
    gradients    gV = (gW - gb c^T) U^T     gd = gb                  (pull, the adjoint)

U is the layer's own in the explicit form; in the implicit form it is the symmetric root P^(1/2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from prong.core.coordinates import Pair, less_outer, times, to_canonical
from prong.core.whitening import Whitening, times_inverse
from prong.layers import Explicit, Site, WhitenedLayer, trained_name
from prong.model.whiten import whitened_layers

Coordinates = Literal["canonical", "whitened"]
COORDINATES: tuple[str, ...] = get_args(Coordinates)
PairMap = Callable[[Tensor, Tensor | None, Whitening], Pair]


def check_coordinates(coordinates: str) -> None:
    """Refuse unknown coordinates."""
    if coordinates not in COORDINATES:
        raise ValueError(f"coordinates are {' or '.join(map(repr, COORDINATES))}, got {coordinates!r}")


def joined(layer: str, name: str) -> str:
    """The full name of a layer's parameter."""
    return f"{layer}.{name}" if layer else name


@dataclass(frozen=True)
class Chart:
    """The whitened coordinates of one layer; a site without a whitening has U = I and c = 0.

    Parameters go by the names of the plain model on both sides.
    """

    layer: str
    places: tuple[tuple[Site, Whitening | None], ...]

    @property
    def names(self) -> list[str]:
        """The plain names of the parameters that are mapped."""
        local = [name for site, _ in self.places for name in (site.weight, site.bias) if name is not None]
        return [joined(self.layer, name) for name in dict.fromkeys(local)]

    def whitened_name(self, name: str) -> str:
        """The name of a mapped parameter in whitened coordinates: 0.weight -> 0.V."""
        prefix, _, local = name.rpartition(".")
        return joined(prefix, trained_name(local))

    def push(self, directions: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Canonical directions, from whitened ones."""
        return self._map(directions, to_canonical)

    def pull(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whitened gradients, from canonical ones."""
        return self._map(gradients, _whitened_gradient)

    def _map(self, tensors: Mapping[str, Tensor], function: PairMap) -> dict[str, Tensor]:
        parts: dict[str, list[Tensor]] = {}
        for site, whitening in self.places:
            bias = None if site.bias is None else tensors[joined(self.layer, site.bias)]
            pair = site.packed(tensors[joined(self.layer, site.weight)], bias)
            mapped = site.unpacked(*(pair if whitening is None else function(*pair, whitening)))
            for name, value in zip((site.weight, site.bias), mapped, strict=True):
                if name is not None and value is not None:
                    parts.setdefault(joined(self.layer, name), []).append(value)
        return {name: values[0] if len(values) == 1 else torch.cat(values) for name, values in parts.items()}


def charts(model: nn.Module) -> list[Chart]:
    """The charts of a model's whitened layers."""
    return [
        Chart(name, tuple((site, whitening_of(layer, site)) for site in layer.sites))
        for name, layer in whitened_layers(model)
    ]


def whitening_of(layer: WhitenedLayer, site: Site) -> Whitening | None:
    """U and c of a site, in the precision of its weight; None is the identity."""
    w = site.whitening
    if w is None:
        return None
    weight, bias = layer.pair(site)
    if isinstance(layer, Explicit):
        return w.map(lambda x: x.to(weight))
    moves = bias is not None and bias.requires_grad  # as in the layer's backward: nothing else can absorb the mean
    assert w.P is not None
    U = symmetric_root(w.P, w.tail, site.label).to(weight)
    return Whitening(w.c.to(weight) if moves and w.c is not None else None, w.eps, U=U)


def symmetric_root(P: Tensor, tail: float = 0.0, label: str = "") -> Tensor:
    """U = P^(1/2), symmetric, in float64; P is as `times_inverse` takes it, (groups, in, in) or thin.

    Raises:
        ValueError: a P that rounding has made indefinite.
    """
    identity = torch.eye(P.shape[-2], dtype=torch.float64, device=P.device).expand(P.shape[0], -1, -1)
    whole = times_inverse(identity, P.double(), tail)
    lam, E = torch.linalg.eigh((whole + whole.mT) / 2)
    if (lam <= 0).any():
        raise ValueError(
            f"layer {label!r}: its stored inverse covariance has an eigenvalue of {lam.min().item():.3g}, so no root. "
            "Refresh it with a larger eps, or whiten without `storage`."
        )
    root: Tensor = (E * lam.sqrt().unsqueeze(-2)) @ E.mT
    return root


def _whitened_gradient(gW: Tensor, gb: Tensor | None, whitening: Whitening) -> Pair:
    """The gradient (gV, gd) of what has the gradient (gW, gb)."""
    assert whitening.U is not None
    if gb is not None and whitening.c is not None:
        gW = less_outer(gW, gb, whitening.c)
    return times(gW, whitening.U.mT), gb
