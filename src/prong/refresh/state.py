"""What has to be saved of a whitened site so that training continues bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prong.core.whitening import Whitening
from prong.layers import Explicit, Site, WhitenedLayer


def site_state(layer: WhitenedLayer, site: Site) -> dict[str, Any]:
    """Whitening, open window and, in the explicit form, V and d, which the model's own state has only folded."""
    weight, bias = layer.pair(site)
    state: dict[str, Any] = {"form": layer.form, "shape": list(weight.shape)}
    if site.whitening is not None:
        state["whitening"] = {key: x.clone() if isinstance(x, Tensor) else x for key, x in site.whitening.items()}
    if site.inputs is not None:
        state["window"] = site.inputs.state_dict()
    if isinstance(layer, Explicit):
        state["V"] = weight.detach().clone()
        state["d"] = None if bias is None else bias.detach().clone()
    return state


def check_site_state(name: str, layer: WhitenedLayer, site: Site, state: dict[str, Any]) -> None:
    """Refuse a state that is not of this site, before anything is changed."""
    weight, _ = layer.pair(site)
    if state["form"] != layer.form:
        raise ValueError(f"this state is of {state['form']} layers, but layer {name!r} is {layer.form}")
    if list(state["shape"]) != list(weight.shape):
        raise ValueError(
            f"this state is of another model: layer {name!r} has a weight of shape {tuple(weight.shape)}, "
            f"there it is {tuple(state['shape'])}"
        )
    size = (site.layout.matrices, site.layout.features)
    matrices = {key: x for key, x in state.get("whitening", {}).items() if isinstance(x, Tensor) and key != "c"}
    if any(x.shape[:2] != size for x in matrices.values()):
        raise ValueError(f"this state is of another model: the whitening of layer {name!r} has another size")
    if "window" in state and state["window"]["mean"].shape != size:
        raise ValueError(f"this state is of another model: the statistics of layer {name!r} have another size")


@torch.no_grad()
def restore_site(layer: WhitenedLayer, site: Site, state: dict[str, Any]) -> None:
    """Put a checked state back."""
    weight, bias = layer.pair(site)
    site.whitening = site.inputs = None
    if "whitening" in state:
        site.whitening = layer.stored(site, Whitening(**state["whitening"]).map(torch.clone))
    for target, key in ((weight, "V"), (bias, "d")):
        if target is not None and key in state:
            target.copy_(state[key])
    if "window" in state:
        site.inputs = site.new_window(weight)
        site.inputs.load_state_dict(state["window"])
    if site.spread is not None:
        site.spread.take()  # of what came before the load
