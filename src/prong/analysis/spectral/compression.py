"""Compress a trained network: layers of low rank where their own inputs allow it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from torch import nn

from prong.analysis.spectral.allocation import ALLOCATIONS, Choice, Option, Options, keep_share, worthwhile
from prong.analysis.spectral.candidates import Reasons, choose, forget_observers_
from prong.analysis.spectral.probing import Compressible, distances, probe
from prong.analysis.spectral.replacement import Criterion, Subject, replace_
from prong.analysis.spectral.report import Layer, Report
from prong.model.estimate import Forward, as_batches
from prong.model.whiten import check_count, check_model, fold_

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
    outputs on its own inputs (`prong.spectral.low_rank.rank_outputs` has the proof), the mean of what is lost
    going into the bias. A convolution becomes one to few maps and a 1 x 1 one to all outputs, or a 1 x 1 one to few
    maps and one from these, whichever loses less for its size. Layers for which two would be no smaller than one stay
    as they are. The result is made of plain torch layers, in training or eval mode as the given ones. Everything is
    measured in eval mode.

    Args:
        model: any module, whitened or not. What cannot be compressed (groups, attention, tied weights) is left alone
            and the report says why.
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
        ValueError: not exactly one of `parameters` and `variance`, values out of range, a budget that is too small,
            layers asked for by name that cannot be compressed, batches the model cannot take, a model that uses a
            layer that was replaced otherwise than by calling it.
        FloatingPointError: NaN or infinite activations; the message names the layer.
    """
    check_model(model)
    _check_options(parameters, variance, samples, max_positions, allocation, criterion)
    batches = as_batches(batches)
    if isinstance(batches, Iterator):
        batches = list(batches)  # they are needed twice
    modes = {name: module.training for name, module in model.named_modules()}
    reference = fold_(copy.deepcopy(model)).eval()
    forget_observers_(reference)
    chosen, countable, reasons = choose(reference, layers)
    moments, rows = probe(reference, countable, chosen, batches, samples, max_positions, forward)
    subjects: dict[str, Subject] = {}
    for name, layer in chosen.items():
        if moments[name].count < 2:
            reasons[name] = "it saw fewer than two samples"
            continue
        subject = Subject(layer, moments[name], criterion)
        if subject.varies:
            subjects[name] = subject
        else:
            reasons[name] = "its outputs do not vary"
    whole = {name: reasons[name] for name in chosen if name not in subjects}
    options = {name: subject.options() for name, subject in subjects.items()}
    choice = _allocate(reference, options, parameters, variance, allocation, whole)
    small = copy.deepcopy(reference)
    for name, option in choice.items():
        small = replace_(small, name, subjects[name].replacement(option))
    widths = {name: len(subject.W) for name, subject in subjects.items()}
    measured, output_error = distances(reference, small, widths, batches, samples, forward)
    lines = _lines(reference, countable, rows, subjects, choice, measured, reasons)
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
    for name, value in {"parameters": parameters, "variance": variance}.items():
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name} is a number, got {type(value).__name__}")
        count = name == "parameters" and isinstance(value, int)
        if value < 1 if count else not 0 < value <= 1:
            also = ", or an int above 0: how many" if name == "parameters" else ""
            raise ValueError(f"{name} is a share above 0 and up to 1{also}; got {value}")
    if samples is not None:
        check_count("samples", samples, 2)
    if max_positions is not None:
        check_count("max_positions", max_positions, 1)
    if allocation not in ALLOCATIONS:
        raise ValueError(f"allocation is one of {', '.join(ALLOCATIONS)}, got {allocation!r}")
    if criterion not in ("outputs", "weights"):
        raise ValueError(f"criterion is 'outputs' or 'weights', got {criterion!r}")


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if not isinstance(p, nn.parameter.UninitializedParameter))


def _allocate(
    model: nn.Module,
    options: Options,
    parameters: float | int | None,
    variance: float | None,
    allocation: str,
    whole: Reasons,
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


def _lines(
    model: nn.Module,
    countable: dict[str, Compressible],
    rows: dict[str, tuple[float, float]],
    subjects: dict[str, Subject],
    choice: dict[str, Option],
    measured: dict[str, float],
    reasons: Reasons,
) -> Iterator[Layer]:
    for name, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        if not own:
            continue
        lazy = any(isinstance(p, nn.parameter.UninitializedParameter) for p in own)
        before = 0 if lazy else sum(p.numel() for p in own)
        flops = None
        if name in countable:
            flops = 2 * rows[name][1] * countable[name].weight.numel()
        kind = type(module).__name__
        if name not in subjects:
            same = None if flops is None else (flops, flops)
            yield Layer(name, kind, "plain", None, (before, before), same, 0.0, 0.0, reasons.get(name, ""))
            continue
        subject, option = subjects[name], choice[name]
        assert flops is not None
        yield Layer(
            name,
            kind,
            option.plan,
            (option.rank, subject.full_rank(option.plan)),
            (before, option.parameters),
            (flops, subject.flops(option, rows[name])),
            subject.expected(option),
            measured[name] / subject.variance,
            "no smaller pair is as good" if option.plan == "plain" else "",
        )
