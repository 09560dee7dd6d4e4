"""What has to be saved of a whitened site so that training continues bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from prong.core.whitening import Whitening
from prong.layers import Kind, Plain, Site
from prong.refresh.schedule import new_window


def _likeness(layer: Kind, site: Site) -> dict[str, Any]:
    """What a state of a site must agree on."""
    form = "natural" if layer.coordinates(site) is None else layer.form
    return {"form": form, "shape": list(layer.pair(site)[0].shape), "groups": site.layout.groups}


def site_state(layer: Kind, site: Site) -> dict[str, Any]:
    """Whitening, open window and, where they are held, V and d, which the model's own state has only folded."""
    state: dict[str, Any] = {**_likeness(layer, site), "block": site.layout.block, "rank": site.rank}
    held = layer.coordinates(site)
    if held is not None and isinstance(layer, Plain):
        state["written"] = layer.written()  # V and d may have to follow W and b first
    if isinstance(layer, Plain) and layer.budget is None:
        state["settled"] = layer.settled
    if site.whitening is not None:
        state["whitening"] = {key: x.clone() if isinstance(x, Tensor) else x for key, x in site.whitening.items()}
    if site.window is not None:
        state["window"] = site.window.state_dict()
    if held is not None:
        state["V"], state["d"] = (None if x is None else x.detach().clone() for x in held)
    return state


def check_site_state(name: str, layer: Kind, site: Site, state: dict[str, Any]) -> None:
    """Refuse a state that is not of this site, before anything is changed."""
    mine = _likeness(layer, site)
    saved = {key: state[key] for key in mine}
    if saved != mine:
        raise ValueError(f"this state is of another model or form: layer {name!r} has {mine}, there it has {saved}")


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
    if isinstance(layer, Plain):
        if "settled" in state:
            layer.budget, layer.settled = None, state["settled"]
        layer.believe({name: sample.to(weight.device) for name, sample in state.get("written", {}).items()})
    if "window" in state:
        site.window = new_window(layer, site)
        site.window.load_state_dict(state["window"])
