"""Whitened layers: for every supported torch layer an implicit and an explicit form, and a view of the plain one."""

from __future__ import annotations

from torch import nn

from prong.layers import attention, conv, linear
from prong.layers.base import Explicit, Implicit, WhitenedLayer
from prong.layers.plain import Plain
from prong.layers.site import Kind, Site

_LAYERS = [x for room in (attention, conv, linear) for x in vars(room).values() if hasattr(x, "plain")]
FORMS: dict[str, dict[type[nn.Module], type[WhitenedLayer]]] = {
    form: {layer.plain: layer for layer in _LAYERS if issubclass(layer, WhitenedLayer) and layer.form == form}
    for form in ("implicit", "explicit")
}

__all__ = ["FORMS", "Explicit", "Implicit", "Kind", "Plain", "Site", "WhitenedLayer"]
