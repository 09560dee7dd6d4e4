"""Compress a trained network: layers of low rank where their own inputs allow it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from prong.analysis.observation import Listener, fitting
from prong.analysis.spectral.allocation import ALLOCATIONS, Choice, Options, keep_share, worthwhile
from prong.analysis.spectral.probing import Compressible, distances, probe
from prong.analysis.spectral.replacement import Criterion, Subject
from prong.analysis.spectral.report import Layer, Report
from prong.model.estimate import Forward, as_batches
from prong.model.whiten import check_model, fold_, shared_parameters, why_not
from prong.options import check_count

Allocation = Literal["least", "equal"]


def compress(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    parameters: float | int | None = None,
    variance: float | None = None,
    layers: str | Iterable[str] | None = None,
    samples: int | None = None,
    max_positions: int | None = 32,
    allocation: Allocation = "least",
    criterion: Criterion = "outputs",
    forward: Forward | None = None,
) -> tuple[nn.Module, Report]:
    """A smaller network that computes nearly the same on data like `batches`, and a report; the given one stays.

        small, report = prong.spectral.compress(model, loader, parameters=0.5)

    A linear layer becomes two, with `rank` units in between: the best such pair in expected squared error of its
    outputs on its own inputs (`rank_outputs`), the mean of what is lost going into the bias. A convolution becomes one
    to few maps and a 1 x 1 one to all outputs, or a 1 x 1 one to few maps and one from these, whichever loses less for
    its size. Layers for which two would be no smaller stay as they are. The result is made of plain torch layers, in
    training or eval mode as the given ones. Everything is measured in eval mode.

    Args:
        model: any module, whitened or not. What cannot be compressed is left alone, and the report says why.
        batches: an iterable of batches that is iterated over twice, or one tensor; see `refresh_`.
        parameters: a budget for the whole network: a share of its parameters (a float), or how many (an int). It is
            spent on layers so that the sum of their lost shares of variance is small.
        variance: instead, the share of the variance of its outputs that every layer keeps at least; with the criterion
            "weights", of the squared singular values of its weights, which says nothing of its outputs.
        layers: names of layers or patterns such as "encoder.*"; None takes all that can be compressed.
        samples: look at so many examples only.
        max_positions: of a convolution, look at so many positions per example at most; None: at all.
        allocation: with a budget: "least" error, or "equal" shares for all layers.
        criterion: "outputs" as described; "weights" truncates the singular values of the weights, for comparison.
        forward: how to run the model on a batch; default `model(batch)`, `model(batch[0])` or `model(**batch)`.

    Raises:
        ValueError: options out of range, a budget that is too small, layers asked for by name that cannot be
            compressed, a model that uses a layer that was replaced otherwise than by calling it.
        FloatingPointError: NaN or infinite activations; the message names the layer.
    """
    check_model(model)
    _check_options(parameters, variance, samples, max_positions, allocation, criterion)
    batches = as_batches(batches)
    if isinstance(batches, Iterator):
        batches = list(batches)  # they are needed twice
    modes = {name: module.training for name, module in model.named_modules()}
    reference = _unwatched(fold_(copy.deepcopy(model)).eval())
    chosen, notes = _choose(reference, layers)
    countable = {name: m for name, m in reference.named_modules() if isinstance(m, Compressible) and _count(m)}
    moments, rows = probe(reference, countable, chosen, batches, samples, max_positions, forward)
    subjects: dict[str, Subject] = {}
    for name, layer in chosen.items():
        if moments[name].count < 2:
            notes[name] = "it saw fewer than two samples"
            continue
        subject = Subject(layer, moments[name], criterion)
        if subject.varies:
            subjects[name] = subject
        else:
            notes[name] = "its outputs do not vary"
    options = {name: subject.options() for name, subject in subjects.items()}
    whole = {name: notes[name] for name in chosen if name not in subjects}
    choice = _allocate(reference, options, parameters, variance, allocation, whole)
    small = copy.deepcopy(reference)
    for name, option in choice.items():
        if option.plan != "plain":
            small = _replace_(small, name, subjects[name].replacement(option))
        else:
            notes[name] = "no smaller pair is as good"
    widths = {name: len(subject.W) for name, subject in subjects.items()}
    measured, output_error = distances(reference, small, widths, batches, samples, forward)
    lines = []
    for name, module in reference.named_modules():
        if not any(p is not None for p in module._parameters.values()):
            continue
        size, flops = _count(module, recurse=False), None
        if name in countable:
            flops = 2 * rows[name][1] * countable[name].weight.numel()
        line = Layer(
            name,
            type(module).__name__,
            (size, size),
            None if flops is None else (flops, flops),
            note=notes.get(name, ""),
        )
        if name in subjects:
            subject, option = subjects[name], choice[name]
            line = replace(
                line,
                parameters=(size, option.parameters),
                flops=(flops or 0.0, subject.flops(option, rows[name])),
                plan=option.plan,
                rank=(option.rank, subject.full_rank(option.plan)),
                expected=subject.expected(option),
                measured=measured[name] / subject.variance,
            )
        lines.append(line)
    for name, module in small.named_modules():
        module.training = modes[name] if name in modes else modes[name.rpartition(".")[0]]
    return small, Report(tuple(lines), (_count(reference), _count(small)), output_error)


def _check_options(
    parameters: float | int | None,
    variance: float | None,
    samples: int | None,
    max_positions: int | None,
    allocation: str,
    criterion: str,
) -> None:
    if (parameters is None) == (variance is None):
        raise ValueError("give either parameters, a budget such as 0.5, or variance, a share to keep such as 0.99")
    name, value = ("variance", variance) if parameters is None else ("parameters", parameters)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a number, got {type(value).__name__}")
    if value < 1 if isinstance(parameters, int) else not 0 < value <= 1:
        also = "" if parameters is None else ", or an int above 0: how many"
        raise ValueError(f"{name} is a share above 0 and up to 1{also}; got {value}")
    if samples is not None:
        check_count("samples", samples, 2)
    if max_positions is not None:
        check_count("max_positions", max_positions, 1)
    if allocation not in ALLOCATIONS:
        raise ValueError(f"allocation is one of {', '.join(ALLOCATIONS)}, got {allocation!r}")
    if criterion not in ("outputs", "weights"):
        raise ValueError(f"criterion is 'outputs' or 'weights', got {criterion!r}")


def _unwatched(model: nn.Module) -> nn.Module:
    """A copy without the hooks of whoever watched its original."""
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, Listener):
                del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]
    return model


def _choose(model: nn.Module, layers: str | Iterable[str] | None) -> tuple[dict[str, Compressible], dict[str, str]]:
    """The layers to compress, and the reasons of those that are left alone. What was asked for by name has none."""
    modules, shared = dict(model.named_modules()), shared_parameters(model)
    wanted = set(fitting(modules, layers, "layer"))
    exactly = {layers} if isinstance(layers, str) else set(layers or ())
    chosen: dict[str, Compressible] = {}
    reasons: dict[str, str] = {}
    for name, module in modules.items():
        if not any(p is not None for p in module._parameters.values()):
            continue
        reason = _why_not_compressed(name, module, modules, shared)
        if reason is not None:
            if name in exactly:
                raise ValueError(f"layer {name!r} cannot be compressed: {reason}")
            reasons[name] = reason
        elif name in wanted:
            chosen[name] = module
        else:
            reasons[name] = "not asked for"
    if not chosen:
        raise ValueError(
            f"nothing in this {type(model).__name__} can be compressed, only Linear and Conv1d/2d/3d layers: "
            + "; ".join(f"{name or '(model)'}: {reason}" for name, reason in reasons.items())
        )
    return chosen, reasons


def _why_not_compressed(name: str, module: nn.Module, modules: dict[str, nn.Module], shared: set[int]) -> str | None:
    """Why a layer is left alone, or None."""
    reason = why_not(module, shared)
    if reason is not None:
        return reason
    if type(module) not in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return f"its type is {type(module).__name__}"
    if getattr(module, "groups", 1) > 1:
        return f"its {module.groups} groups have no maps in common"
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has forward hooks, which a replacement would lose"
    if isinstance(modules.get(name.rpartition(".")[0]), nn.TransformerEncoderLayer):
        return "TransformerEncoderLayer reads its weight without calling it"
    return None


def _count(model: nn.Module, recurse: bool = True) -> int:
    lazy = nn.parameter.UninitializedParameter
    return sum(p.numel() for p in model.parameters(recurse) if not isinstance(p, lazy))


def _allocate(
    model: nn.Module,
    options: Options,
    parameters: float | int | None,
    variance: float | None,
    allocation: str,
    whole: Mapping[str, str],
) -> Choice:
    """The option of every layer, within the budget or with the share of variance asked for; others stay `whole`."""
    if variance is not None:
        return keep_share(options, variance)
    assert parameters is not None
    total = _count(model)
    wanted = parameters if isinstance(parameters, int) else math.floor(parameters * total)
    fixed = total - sum(max(o.parameters for o in several) for several in options.values())
    least = fixed + sum(worthwhile(several)[0].parameters for several in options.values())
    if wanted < least:
        why = "".join(f"; {name or '(model)'!r} stays whole, as {reason}" for name, reason in whole.items())
        raise ValueError(
            f"{wanted:,} of {total:,} parameters are asked for, but with rank 1 in every layer that can be compressed "
            f"{least:,} remain ({least / total:.1%}); give a larger budget{why}"
        )
    return ALLOCATIONS[allocation](options, wanted - fixed)


def _replace_(model: nn.Module, name: str, new: nn.Module) -> nn.Module:
    """The model with another module wherever the one called `name` is; changed in place."""
    old = model.get_submodule(name)
    if old is model:
        return new
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is old:
                parent._modules[key] = new
    return model
