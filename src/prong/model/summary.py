"""A table of a model's layers: what is whitened, what is not and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from prong.layers import WhitenedLayer
from prong.model.tables import aligned
from prong.model.whiten import check_model, shared_parameters, why_not


@dataclass(frozen=True)
class Row:
    """One line of a summary."""

    name: str
    kind: str
    whitened: str
    inputs: str
    parameters: int
    memory: int
    note: str


class Summary(list[Row]):
    """What is whitened, what is not and why; prints as a table."""

    def __str__(self) -> str:
        head = ("layer", "kind", "whitened", "inputs", "parameters", "whitening bytes", "note")
        lines = [(r.name, r.kind, r.whitened, r.inputs, f"{r.parameters:,}", f"{r.memory:,}", r.note) for r in self]
        total = (
            "total",
            "",
            "",
            "",
            f"{sum(r.parameters for r in self):,}",
            f"{sum(r.memory for r in self):,}",
            "",
        )
        return aligned([head, *lines, total], numeric={3, 4, 5})

    __repr__ = __str__


def summary(model: nn.Module) -> Summary:
    """Per layer with parameters of its own: what is whitened, with how much memory, and what is not and why.

    Memory counts the whitening matrices and, while a window is open, the statistics.
    """
    check_model(model)
    shared = shared_parameters(model)
    rows = Summary()
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        if not own:
            continue
        lazy = any(isinstance(p, nn.parameter.UninitializedParameter) for p in own)
        count = 0 if lazy else sum(p.numel() for p in own)
        if isinstance(module, WhitenedLayer):
            rows.append(_whitened_row(name, module, count))
        else:
            reason = why_not(module, shared) or "it can be; whiten_ did not take it"
            rows.append(Row(name or "(model)", type(module).__name__, "no", "", count, 0, reason))
    return rows


def _whitened_row(name: str, layer: WhitenedLayer, parameters: int) -> Row:
    tensors: dict[int, torch.Tensor] = {}
    open_window = False
    for site in layer.sites:
        held = [] if site.whitening is None else [x for _, x in site.whitening.items()]
        if site.window is not None:
            open_window = True
            held += site.window.tensors()
        tensors |= {id(x): x for x in held if isinstance(x, torch.Tensor)}
    layout, inputs = layer.sites[0].layout, [site.layout.inputs for site in layer.sites]
    size = "/".join(map(str, dict.fromkeys(inputs))) + (f" x {layout.groups} groups" if layout.groups > 1 else "")
    blocks = {site.layout.features for site in layer.sites if site.layout.blocks > 1}
    size += f" in blocks of {'/'.join(map(str, sorted(blocks)))}" if blocks else ""
    note = "" if all(site.whitening is not None for site in layer.sites) else "identity until the first refresh"
    if any(site.dropping is not None for site in layer.sites):
        note = "; ".join(filter(None, (note, "spectral dropout")))
    if open_window:
        note = "; ".join(filter(None, (note, "gathering statistics")))
    if not any(p.requires_grad for p in layer._parameters.values() if p is not None):
        note = "; ".join(filter(None, (note, "frozen")))
    memory = sum(x.numel() * x.element_size() for x in tensors.values())
    return Row(name or "(model)", type(layer).plain.__name__, layer.form, size, parameters, memory, note)
