"""What has to be saved of a whitened site so that training continues bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from prong.core.whitening import Whitening
from prong.layers import Kind, Plain, Site
from prong.refresh.schedule import share_of_rows


def site_state(layer: Kind, site: Site) -> dict[str, Any]:
    """Whitening, open window and, where they are held, V and d, which the model's own state has only folded."""
    weight, _ = layer.pair(site)
    held = layer.coordinates(site)
    state: dict[str, Any] = {"form": "natural" if held is None else layer.form, "shape": list(weight.shape)}
    if held is not None and isinstance(layer, Plain):
        state["written"] = layer.written()  # V and d may have to follow W and b first
    if isinstance(layer, Plain) and layer.budget is None:
        state["settled"] = layer.settled
    state["block"], state["rank"] = site.layout.block, site.rank
    if site.whitening is not None:
        state["whitening"] = {key: x.clone() if isinstance(x, Tensor) else x for key, x in site.whitening.items()}
    if site.window is not None:
        state["window"] = site.window.state_dict()
    if held is not None:
        state["V"], state["d"] = (None if x is None else x.detach().clone() for x in held)
    return state


def check_site_state(name: str, layer: Kind, site: Site, state: dict[str, Any]) -> None:
    """Refuse a state that is not of this site, before anything is changed."""
    weight, _ = layer.pair(site)
    form = "natural" if layer.coordinates(site) is None else layer.form
    if state["form"] != form:
        raise ValueError(f"this state is of the {state['form']} form, but layer {name!r} is of the {form} one")
    if list(state["shape"]) != list(weight.shape):
        raise ValueError(
            f"this state is of another model: layer {name!r} has a weight of shape {tuple(weight.shape)}, "
            f"there it is {tuple(state['shape'])}"
        )
    layout = replace(site.layout, block=state["block"])
    size = (layout.matrices, layout.features)
    matrices = {key: x for key, x in state.get("whitening", {}).items() if isinstance(x, Tensor) and key != "c"}
    if any(x.shape[:2] != size for x in matrices.values()):
        raise ValueError(f"this state is of another model: the whitening of layer {name!r} has another size")
    if "window" in state and state["window"]["mean"].shape != size:
        raise ValueError(f"this state is of another model: the statistics of layer {name!r} have another size")


@torch.no_grad()
def restore_site(layer: Kind, site: Site, state: dict[str, Any]) -> None:
    """Put a checked state back."""
    weight, _ = layer.pair(site)
    site.whitening = site.window = None
    site.layout, site.rank = replace(site.layout, block=state["block"]), state["rank"]
    if "whitening" in state:
        site.whitening = layer.stored(site, Whitening(**state["whitening"]).map(torch.clone))
    for target, key in zip(layer.coordinates(site) or (), ("V", "d"), strict=False):
        if target is not None and key in state:
            target.copy_(state[key])
    if isinstance(layer, Plain) and "settled" in state:
        layer.budget, layer.settled = None, state["settled"]
    if isinstance(layer, Plain):
        layer.believe({name: sample.to(weight.device) for name, sample in state.get("written", {}).items()})
    if "window" in state:
        site.window = site.new_window(weight)
        site.window.share = share_of_rows(site.spread or site.layout)
        site.window.load_state_dict(state["window"])
