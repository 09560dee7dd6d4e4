"""Whitened coordinates of a model's parameters.

For every whitened site the canonical parameters are linear in the whitened ones, W = V U and b = d - W c. U is what the
layer or its optimizer computes with; where there is only P, it is the symmetric root P^(1/2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from prong.analysis.conditioning import inverse_covariance
from prong.core.whitening import Whitening, to_canonical
from prong.layers import Explicit, Kind, Site
from prong.layers.base import trained_name
from prong.model.whiten import whitened_layers

Coordinates = Literal["canonical", "whitened"]


class Chart(NamedTuple):
    """The whitened coordinates of one site."""

    names: dict[str, str]  # of weight and bias in the plain model, and in whitened coordinates: 0.weight -> 0.V
    site: Site
    whitening: Whitening | None  # None: U = I and c = 0


def full_name(layer: str, parameter: str) -> str:
    """The name of a layer's parameter in the model."""
    return f"{layer}.{parameter}".removeprefix(".")


def charts(model: nn.Module) -> list[Chart]:
    """The charts of a model's whitened layers, plain ones in the hands of an optimizer included."""
    found = []
    for layer_name, layer in whitened_layers(model):
        for site in layer.sites:
            own = [name for name in (site.weight, site.bias) if name is not None]
            names = {full_name(layer_name, name): full_name(layer_name, trained_name(name)) for name in own}
            found.append(Chart(names, site, _whitening_of(layer, site)))
    return found


def canonical_changes(charts: Iterable[Chart], changes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Changes of the canonical parameters, from those of whitened ones; both by the names of the plain model."""
    parts: dict[str, list[Tensor]] = {}
    for chart in charts:
        weight, *bias = chart.names
        pair = chart.site.packed(changes[weight], changes[bias[0]] if bias else None)
        mapped = chart.site.unpacked(*(pair if chart.whitening is None else to_canonical(*pair, chart.whitening)))
        for name, value in zip(chart.names, mapped, strict=False):
            assert value is not None
            parts.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in parts.items()}  # attention's are of three sites


def _whitening_of(layer: Kind, site: Site) -> Whitening | None:
    """U and c of a site, in the precision of its weight; None is the identity."""
    w = site.whitening
    if w is None:
        return None
    weight, bias = layer.pair(site)
    U = _symmetric_root(inverse_covariance(w, torch.float64), site.label) if w.U is None else w.U
    # In a plain or implicit layer a bias that is not trained stays, and then nothing absorbs the mean.
    moves = isinstance(layer, Explicit) or (bias is not None and bias.requires_grad)
    return Whitening(w.c if moves else None, w.eps, U=U).map(lambda x: x.to(weight))


def _symmetric_root(P: Tensor, label: str) -> Tensor:
    """U = P^(1/2), symmetric; of a P that rounding spoiled there is none."""
    lam, E = torch.linalg.eigh((P + P.mT) / 2)
    if (lam <= 0).any():
        raise ValueError(
            f"layer {label!r}: its stored inverse covariance has an eigenvalue of {lam.min().item():.3g}, so no root. "
            "Refresh it with a larger damping, or whiten without `storage`."
        )
    root: Tensor = (E * lam.sqrt().unsqueeze(-2)) @ E.mT
    return root
