"""Whitened layers: for every supported torch layer an implicit and an explicit form, and a view of the plain one."""

from __future__ import annotations

from torch import nn

from prong.layers.attention import ExplicitMultiheadAttention, ImplicitMultiheadAttention
from prong.layers.base import Explicit, Implicit, Kind, OnFailure, Site, WhitenedLayer, in_backward, trained_name
from prong.layers.budget import Budget, largest_block
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
from prong.layers.plain import PLAIN, Plain, Sharing, Tap, plain_kind, remove_taps_, tap_of

LAYERS: tuple[type[WhitenedLayer], ...] = (
    ImplicitLinear,
    ExplicitLinear,
    ImplicitOutProjection,
    ExplicitOutProjection,
    ImplicitConv1d,
    ExplicitConv1d,
    ImplicitConv2d,
    ExplicitConv2d,
    ImplicitConv3d,
    ExplicitConv3d,
    ImplicitConvTranspose1d,
    ExplicitConvTranspose1d,
    ImplicitConvTranspose2d,
    ExplicitConvTranspose2d,
    ImplicitConvTranspose3d,
    ExplicitConvTranspose3d,
    ImplicitMultiheadAttention,
    ExplicitMultiheadAttention,
)
FORMS: dict[str, dict[type[nn.Module], type[WhitenedLayer]]] = {
    form: {layer.plain: layer for layer in LAYERS if layer.form == form} for form in ("implicit", "explicit")
}

__all__ = [
    "FORMS",
    "PLAIN",
    "Budget",
    "Explicit",
    "Implicit",
    "Kind",
    "OnFailure",
    "Plain",
    "Sharing",
    "Site",
    "Switch",
    "Tap",
    "WhitenedLayer",
    "in_backward",
    "largest_block",
    "plain_kind",
    "remove_taps_",
    "tap_of",
    "trained_name",
]
