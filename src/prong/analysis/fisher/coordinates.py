"""Whitened coordinates of a model's parameters.

For every whitened site the canonical parameters are linear in the whitened ones, W = V U and b = d - W c. U is what the
layer or its optimizer computes with; where there is only P, it is the symmetric root P^(1/2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from prong.core.whitening import Whitening, times_inverse, to_canonical
from prong.layers import Explicit, Kind, Site
from prong.layers.base import trained_name
from prong.model.whiten import whitened_layers

Coordinates = Literal["canonical", "whitened"]
COORDINATES: tuple[str, ...] = get_args(Coordinates)


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
    def names(self) -> dict[str, str]:
        """The plain names of the parameters that are mapped, and those in whitened coordinates: 0.weight -> 0.V."""
        local = [name for site, _ in self.places for name in (site.weight, site.bias) if name is not None]
        return {joined(self.layer, name): joined(self.layer, trained_name(name)) for name in local}

    def to_canonical(self, whitened: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Canonical parameters, or changes of them, from whitened ones."""
        parts: dict[str, list[Tensor]] = {}
        for site, w in self.places:
            bias = None if site.bias is None else whitened[joined(self.layer, site.bias)]
            pair = site.packed(whitened[joined(self.layer, site.weight)], bias)
            mapped = site.unpacked(*(pair if w is None else to_canonical(*pair, w)))
            for name, value in zip((site.weight, site.bias), mapped, strict=True):
                if name is not None and value is not None:
                    parts.setdefault(joined(self.layer, name), []).append(value)
        return {name: values[0] if len(values) == 1 else torch.cat(values) for name, values in parts.items()}


def charts(model: nn.Module) -> list[Chart]:
    """The charts of a model's whitened layers, plain ones in the hands of an optimizer included."""
    return [
        Chart(name, tuple((site, whitening_of(layer, site)) for site in layer.sites))
        for name, layer in whitened_layers(model)
    ]


def whitening_of(layer: Kind, site: Site) -> Whitening | None:
    """U and c of a site, in the precision of its weight; None is the identity."""
    w = site.whitening
    if w is None:
        return None
    weight, bias = layer.pair(site)
    U = symmetric_root(w.P, w.tail, site.label) if w.U is None and w.P is not None else w.U
    # In a plain or implicit layer a bias that is not trained stays, and then nothing absorbs the mean.
    moves = isinstance(layer, Explicit) or (bias is not None and bias.requires_grad)
    return Whitening(w.c if moves else None, w.eps, U=U).map(lambda x: x.to(weight))


def symmetric_root(P: Tensor, tail: float = 0.0, label: str = "") -> Tensor:
    """U = P^(1/2), symmetric, in float64; P is as `times_inverse` takes it. One that rounding spoiled is refused."""
    identity = torch.eye(P.shape[-2], dtype=torch.float64, device=P.device).expand(P.shape[0], -1, -1)
    whole = times_inverse(identity, P.double(), tail)
    lam, E = torch.linalg.eigh((whole + whole.mT) / 2)
    if (lam <= 0).any():
        raise ValueError(
            f"layer {label!r}: its stored inverse covariance has an eigenvalue of {lam.min().item():.3g}, so no root. "
            "Refresh it with a larger damping, or whiten without `storage`."
        )
    root: Tensor = (E * lam.sqrt().unsqueeze(-2)) @ E.mT
    return root
