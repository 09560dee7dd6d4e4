"""Compress a trained network: layers of low rank where their own inputs allow it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from prong.analysis.observation import Listener
from prong.analysis.spectral.allocation import ALLOCATIONS, Options, Plan, keep_share, worthwhile
from prong.analysis.spectral.probing import Compressible, Probe, distances
from prong.analysis.spectral.replacement import Criterion, Subject
from prong.model.estimate import Forward, as_batches, call_model, run_batches, undisturbed
from prong.model.summary import aligned
from prong.model.whiten import check_model, fitting, fold_, shared_parameters, why_not
from prong.options import check_choice, check_count, checked_number

Allocation = Literal["least", "equal"]


@dataclass(frozen=True)
class Layer:
    """One line of a report: sizes before and after, and errors.

    These are mean squared distances of outputs as shares of their variance, of their mean square without a bias.
    """

    name: str
    kind: str  # the type it had
    parameters: tuple[int, int]
    flops: tuple[float, float] | None  # additions and multiplications for one example, of Linear and convolutions
    plan: Plan = "plain"  # see `Option`
    rank: tuple[int, int] | None = None  # and the largest that there can be by its plan
    expected: float = 0.0  # the error on the given network's inputs to this layer, from their statistics
    measured: float = 0.0  # the error within the compressed network, where inputs have changed too
    note: str = ""  # why the layer was left as it is, if it was

    def cells(self) -> tuple[str, ...]:
        """The line as text."""
        sizes, flops = (f"{n:,}" for n in self.parameters), (f"{n:,.0f}" for n in self.flops or ())
        rank, errors = "", ("", "")
        if self.rank is not None:
            rank, errors = "{}/{}".format(*self.rank), (f"{self.expected:.2e}", f"{self.measured:.2e}")
        return self.name, self.kind, self.plan, rank, *sizes, *(flops if self.flops else ("", "")), *errors, self.note


@dataclass(frozen=True)
class Report:
    """A line for each layer with parameters of its own, and totals; prints as a table."""

    layers: tuple[Layer, ...]
    parameters: tuple[int, int]  # of the network, before and after; tied ones count once
    output_error: float  # E||f - g||^2 / E||f - E f||^2, f and g what the given and the compressed network return

    @property
    def flops(self) -> tuple[float, float]:
        """Additions and multiplications for one example in Linear and convolutional layers, before and after."""
        counted = [layer.flops for layer in self.layers if layer.flops is not None]
        return sum(before for before, _ in counted), sum(after for _, after in counted)

    @property
    def expected(self) -> float:
        """The sum of the layers' expected errors."""
        return sum(layer.expected for layer in self.layers)

    def __getitem__(self, name: str) -> Layer:
        """The line of a layer."""
        lines = {layer.name: layer for layer in self.layers}
        if name in lines:
            return lines[name]
        raise KeyError(f"no line for a layer {name!r}: there are {', '.join(map(repr, lines))}")

    def __str__(self) -> str:
        sizes = ("parameters", "after", "flops", "after")
        head = ("layer", "kind", "plan", "rank", *sizes, "expected", "measured", "note")
        lines = [layer.cells() for layer in self.layers]
        totals = (f"{n:,.0f}" for n in (*self.parameters, *self.flops))
        total = ("total", "", "", "", *totals, f"{self.expected:.2e}", f"{self.output_error:.2e}", "measured: outputs")
        return aligned([head, *lines, total], numeric={3, 4, 5, 6, 7, 8, 9})


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

    A linear layer becomes two, with `rank` units in between; a convolution one to few maps and a 1 x 1 one to all
    outputs, or a 1 x 1 one to few maps and one from these. Layers for which two would be no smaller stay as they are;
    layers that cannot be compressed too, and the report says why. The result is made of plain torch layers. Everything
    is measured in eval mode, on batches that are iterated over twice, or on as many `samples` of them.

    Either `parameters` is a budget for the whole network, a share (a float) or how many (an int), which is spent on
    layers by the `allocation`: "least" sum of their lost shares of variance, or "equal" shares for all. Or `variance`
    is the share of the variance of its outputs that every layer keeps at least. `layers` are names or patterns. The
    criterion "weights" truncates the singular values of the weights, for comparison. Of a convolution, at most
    `max_positions` per example are looked at. `forward(model, batch)` runs the model, if not as `refresh_` does.
    """
    check_model(model)
    _check_budget(parameters, variance)
    check_count("samples", samples, 2, optional=True)
    check_count("max_positions", max_positions, 1, optional=True)
    check_choice("allocation", allocation, ALLOCATIONS)
    check_choice("criterion", criterion, get_args(Criterion))
    batches = as_batches(batches)
    if isinstance(batches, Iterator):
        batches = list(batches)  # they are needed twice
    reference = _unwatched(fold_(copy.deepcopy(model)).eval())
    chosen, notes = _choose(reference, layers)
    probes = {
        name: Probe(name, layer, name in chosen, max_positions)
        for name, layer in reference.named_modules()
        if isinstance(layer, Compressible) and _count(layer)
    }
    with ExitStack() as hooks, undisturbed(reference):
        for name, probe in probes.items():
            hooks.enter_context(reference.get_submodule(name).register_forward_hook(probe, with_kwargs=True))
        seen = run_batches(reference, batches, samples, forward)
    subjects: dict[str, Subject] = {}
    for name, layer in chosen.items():
        subject = Subject(layer, probes[name].moments, criterion) if probes[name].moments.count >= 2 else None
        if subject is not None and subject.varies:
            subjects[name] = subject
        else:
            notes[name] = "it saw fewer than two samples" if subject is None else "its outputs do not vary"
    options = {name: subject.options() for name, subject in subjects.items()}
    if variance is None:
        whole = {name: notes[name] for name in chosen if name not in subjects}
        choice = ALLOCATIONS[allocation](options, _budget(_count(reference), parameters, options, whole))
    else:
        choice = keep_share(options, variance)
    small = copy.deepcopy(reference)
    for name, option in choice.items():
        if option.plan == "plain":
            notes[name] = "no smaller pair is as good"
        else:
            small = _replace_(small, name, subjects[name].replacement(option))
    widths = {name: len(subject.W) for name, subject in subjects.items()}
    measured, output_error = distances(reference, small, widths, batches, samples, forward or call_model)
    lines = []
    for name, module in _owners(reference).items():
        size, kind, note = _count(module, recurse=False), type(module).__name__, notes.get(name, "")
        before = 2 * probes[name].outputs / seen * probes[name].weights if name in probes else None
        line = Layer(name, kind, (size, size), None if before is None else (before, before), note=note)
        if name in subjects and before is not None:
            subject, option = subjects[name], choice[name]
            flops = (before, subject.flops(option, probes[name].inputs / seen, probes[name].outputs / seen))
            rank, lost = (option.rank, subject.full_rank(option.plan)), measured[name] / subject.variance
            sizes, expected = (size, option.parameters), subject.expected(option)
            line = Layer(name, kind, sizes, flops, option.plan, rank, expected, lost, note)
        lines.append(line)
    modes = {name: module.training for name, module in model.named_modules()}
    for name, module in small.named_modules():
        module.training = modes[name] if name in modes else modes[name.rpartition(".")[0]]
    return small, Report(tuple(lines), (_count(reference), _count(small)), output_error)


def _check_budget(parameters: float | None, variance: float | None) -> None:
    if (parameters is None) == (variance is None):
        raise ValueError("give either parameters, a budget such as 0.5, or variance, a share to keep such as 0.99")
    name, given = ("variance", variance) if parameters is None else ("parameters", parameters)
    value = checked_number(name, given)
    if value < 1 if isinstance(parameters, int) else not 0 < value <= 1:
        also = "" if parameters is None else ", or an int above 0: how many"
        raise ValueError(f"{name} is a share above 0 and up to 1{also}; got {value}")


def _unwatched(model: nn.Module) -> nn.Module:
    """A copy without the hooks of whoever watched its original."""
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, Listener):
                del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]
    return model


def _owners(model: nn.Module) -> dict[str, nn.Module]:
    """Modules with parameters of their own."""
    return {name: m for name, m in model.named_modules() if any(p is not None for p in m._parameters.values())}


def _choose(model: nn.Module, layers: str | Iterable[str] | None) -> tuple[dict[str, Compressible], dict[str, str]]:
    """The layers to compress, and the reasons of those that are left alone. What was asked for by name has none."""
    modules, shared = dict(model.named_modules()), shared_parameters(model)
    wanted = fitting(modules, layers, "layer")
    exactly = {layers} if isinstance(layers, str) else set(layers or ())
    chosen: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for name, module in _owners(model).items():
        reason = _why_not_compressed(name, module, modules, shared)
        if reason is not None and name in exactly:
            raise ValueError(f"layer {name!r} cannot be compressed: {reason}")
        if reason is None and name in wanted:
            chosen[name] = module
        else:
            reasons[name] = reason or "not asked for"
    if not chosen:
        raise ValueError(
            f"nothing in this {type(model).__name__} can be compressed, only Linear and Conv1d/2d/3d layers: "
            + "; ".join(f"{name or '(model)'}: {reason}" for name, reason in reasons.items())
        )
    return chosen, reasons


def _why_not_compressed(name: str, module: nn.Module, modules: dict[str, nn.Module], shared: set[int]) -> str | None:
    """Why a layer is left alone, or None."""
    if (reason := why_not(module, shared)) is not None:
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


def _budget(total: int, parameters: float | None, options: Options, whole: Mapping[str, str]) -> int:
    """How many of so many parameters the layers with options may have; others stay `whole`, for their reasons."""
    assert parameters is not None
    wanted = parameters if isinstance(parameters, int) else math.floor(parameters * total)
    fixed = total - sum(max(o.parameters for o in several) for several in options.values())
    least = fixed + sum(worthwhile(several)[0].parameters for several in options.values())
    if wanted < least:
        why = "".join(f"; {name or '(model)'!r} stays whole, as {reason}" for name, reason in whole.items())
        raise ValueError(
            f"{wanted:,} of {total:,} parameters are asked for, but with rank 1 in every layer that can be compressed "
            f"{least:,} remain ({least / total:.1%}); give a larger budget{why}"
        )
    return wanted - fixed


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
