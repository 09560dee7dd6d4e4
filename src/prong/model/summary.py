"""A table of a model's layers: what is whitened, what is not and why."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from prong.distributed.workers import eager_name
from prong.layers import Kind, Plain, Site
from prong.model.whiten import check_model, shared_parameters, whitened_layers, why_not


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
        totals = (sum(r.parameters for r in self), sum(r.memory for r in self))
        return aligned([head, *lines, ("total", "", "", "", *(f"{n:,}" for n in totals), "")], numeric={3, 4, 5})

    __repr__ = __str__


def summary(model: nn.Module) -> Summary:
    """Per layer with parameters of its own: what is whitened, how, with how much memory, and what is not and why.

    Memory is that of whitening matrices, V and d where an optimizer holds them, and statistics in open windows.
    """
    check_model(model)
    shared = shared_parameters(model)
    layers = dict(whitened_layers(model))
    counted: set[int] = set()  # matrices that layers share
    rows = Summary()
    for name, module in ((eager_name(name), module) for name, module in model.named_modules()):
        own = [p for p in module._parameters.values() if p is not None]
        if not own:
            continue
        lazy = any(isinstance(p, nn.parameter.UninitializedParameter) for p in own)
        count = 0 if lazy else sum(p.numel() for p in own)
        if name in layers:
            rows.append(_whitened_row(name, layers[name], count, counted))
        else:
            reason = why_not(module, shared) or "it can be, but was not asked for"
            rows.append(Row(name or "(model)", type(module).__name__, "no", "", count, 0, reason))
    return rows


def _whitened_row(name: str, layer: Kind, parameters: int, counted: set[int]) -> Row:
    held = [x for site in layer.sites for x in _tensors(layer, site)]
    new = {id(x): x for x in held if id(x) not in counted}
    counted |= set(new)
    layout, inputs = layer.sites[0].layout, [site.layout.inputs for site in layer.sites]
    size = "/".join(map(str, dict.fromkeys(inputs))) + (f" x {layout.groups} groups" if layout.groups > 1 else "")
    blocks = {site.layout.features for site in layer.sites if site.layout.blocks > 1}
    size += f" in blocks of {'/'.join(map(str, sorted(blocks)))}" if blocks else ""
    ranks = {site.rank for site in layer.sites if site.rank is not None}
    size += f", {'/'.join(map(str, sorted(ranks)))} directions" if ranks else ""
    memory = sum(x.numel() * x.element_size() for x in new.values())
    return Row(name or "(model)", layer.plain.__name__, layer.form, size, parameters, memory, _note(layer))


def _tensors(layer: Kind, site: Site) -> list[torch.Tensor]:
    held = [] if site.whitening is None else [x for _, x in site.whitening.items() if isinstance(x, torch.Tensor)]
    if isinstance(layer, Plain):
        held += [x for x in layer.coordinates(site) or () if x is not None]
    return held + ([] if site.window is None else site.window.tensors())


def _note(layer: Kind) -> str:
    sites = layer.sites
    divided = isinstance(layer, Plain) and getattr(layer.options, "block", None) is None
    frozen = not any(p.requires_grad for site in sites for p in layer.pair(site) if p is not None)
    notes = {
        "blocks are chosen at the first batch": isinstance(layer, Plain) and layer.budget is not None,
        "all at once would cost more than the budget": divided
        and any(site.layout.blocks > 1 or site.rank is not None for site in sites),
        "identity until the first refresh": any(site.whitening is None for site in sites),
        "spectral dropout": any(site.dropping is not None for site in sites),
        "gathering statistics": any(site.window is not None for site in sites),
        "frozen": frozen,
    }
    return "; ".join(note for note, holds in notes.items() if holds)


def aligned(lines: Sequence[Sequence[str]], numeric: Collection[int]) -> str:
    """Lines of cells as a table; the first is its head, the last its total. Columns in `numeric` end flush."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def text(line: Sequence[str]) -> str:
        cells = zip(line, widths, strict=True)
        return "  ".join(c.rjust(w) if i in numeric else c.ljust(w) for i, (c, w) in enumerate(cells)).rstrip()

    rule = "  ".join("-" * w for w in widths)
    head, *rows, total = map(text, lines)
    return "\n".join([head, rule, *rows, rule, total])
