"""Dropout of whitened directions, the more likely the less their inputs vary along them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from prong.layers import Explicit, Kind
from prong.layers.attention import AttentionKind
from prong.layers.dropping import Dropping
from prong.layers.linear import ExplicitOutProjection
from prong.model.whiten import check_model, fitting, site_name, whitened_layers
from prong.options import checked_number

NOT_ALIKE = "attention and its output projection"


def dropout_(
    model: nn.Module, rate: float, *, layers: str | Iterable[str] | None = None, least: float = 0.1
) -> nn.Module:
    """Drop whitened directions of layers' inputs while they train, those of small variance more often; in place.

    A layer then computes `z = V D U (h - c) + d`, D diagonal with entries 1/p with probability p and otherwise 0,
    where a direction of variance lam is kept with probability

        p = max(least, (lam + eps) / (lam + eps + tau))

    and tau is such that on average over the directions of the layer's inputs the share `rate` is dropped. Probabilities
    follow the whitening: nothing is dropped before the first refresh. `fold_` removes the dropout.

    Layers are in the explicit form with basis "pca": those that names or patterns fit, or all but attention. `rate` is
    in [0, 1 - least], and 0 removes the dropout; what is kept is scaled by at most 1 / `least`.
    """
    check_model(model)
    if not 0 < checked_number("least", least) <= 1:
        raise ValueError(f"least is a probability above 0, got {least}; without one, what is kept may grow unboundedly")
    if not 0 <= checked_number("rate", rate) <= 1 - least:
        raise ValueError(f"rate is a share of the directions, from 0 to 1 - least = {1 - least:g}, got {rate}")
    whitened = dict(whitened_layers(model))
    if not whitened:
        raise ValueError('this model has no whitened layers; call prong.whiten_(model, form="explicit") first')
    reasons = {name: _why_not(whitened[name]) for name in fitting(whitened, layers, "whitened layer")}
    for name, reason in reasons.items():
        if reason is not None and (layers is not None or reason != NOT_ALIKE or set(reasons.values()) == {NOT_ALIKE}):
            raise ValueError(f"layer {name!r}: spectral dropout is not for {reason}")
    for name, reason in reasons.items():
        for site in whitened[name].sites if reason is None else ():
            site.dropping = Dropping(float(rate), float(least)) if rate else None
    return model


def keep_probabilities(model: nn.Module) -> dict[str, Tensor]:
    """The probability of keeping each direction, by layer: of those that have dropout and were refreshed.

    Shapes: (groups, in), in the order of the rows of U.
    """
    check_model(model)
    return {
        site_name(name, site): site.dropping.probabilities(site.whitening).clone()
        for name, layer in whitened_layers(model)
        for site in layer.sites
        if site.dropping is not None and site.whitening is not None
    }


def _why_not(layer: Kind) -> str | None:
    """What a layer is that has no directions to drop, or None."""
    if not isinstance(layer, Explicit):
        return (
            f"the {layer.form} form, which computes with W alone and has no whitened directions to drop. Fold the "
            'model and whiten it with prong.whiten_(prong.fold_(model), form="explicit"), then make its optimizer'
        )
    if isinstance(layer, AttentionKind | ExplicitOutProjection):
        return NOT_ALIKE
    if layer.basis != "pca":
        return f'the basis {layer.basis!r}, which has no variance for each direction; use prong.Explicit(basis="pca")'
    return None
