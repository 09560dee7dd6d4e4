"""Whitened layers: for every supported torch layer, an implicit and an explicit form."""

from __future__ import annotations

from torch import nn

from prong.layers.attention import ExplicitMultiheadAttention, ImplicitMultiheadAttention
from prong.layers.base import Explicit, Implicit, Site, WhitenedLayer, in_backward, trained_name
from prong.layers.conv import (
    ExplicitConv1d,
    ExplicitConv2d,
    ExplicitConv3d,
    ExplicitConvTranspose1d,
    ExplicitConvTranspose2d,
    ExplicitConvTranspose3d,
    ImplicitConv1d,
    ImplicitConv2d,
    ImplicitConv3d,
    ImplicitConvTranspose1d,
    ImplicitConvTranspose2d,
    ImplicitConvTranspose3d,
)
from prong.layers.linear import (
    ExplicitLinear,
    ExplicitOutProjection,
    ImplicitLinear,
    ImplicitOutProjection,
)
from prong.layers.natural import Switch

IMPLICIT: dict[type[nn.Module], type[WhitenedLayer]] = {
    kind.plain: kind
    for kind in (
        ImplicitLinear,
        ImplicitOutProjection,
        ImplicitConv1d,
        ImplicitConv2d,
        ImplicitConv3d,
        ImplicitConvTranspose1d,
        ImplicitConvTranspose2d,
        ImplicitConvTranspose3d,
        ImplicitMultiheadAttention,
    )
}
EXPLICIT: dict[type[nn.Module], type[WhitenedLayer]] = {
    kind.plain: kind
    for kind in (
        ExplicitLinear,
        ExplicitOutProjection,
        ExplicitConv1d,
        ExplicitConv2d,
        ExplicitConv3d,
        ExplicitConvTranspose1d,
        ExplicitConvTranspose2d,
        ExplicitConvTranspose3d,
        ExplicitMultiheadAttention,
    )
}
FORMS = {"implicit": IMPLICIT, "explicit": EXPLICIT}

__all__ = [
    "EXPLICIT",
    "FORMS",
    "IMPLICIT",
    "Explicit",
    "Implicit",
    "Site",
    "Switch",
    "WhitenedLayer",
    "in_backward",
    "trained_name",
]
