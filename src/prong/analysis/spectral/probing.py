"""What layers see while a model runs: moments of their inputs, and how far their outputs are from another model's."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from prong.analysis.observation import patches
from prong.core.moments import Moments
from prong.layers.conv import thin
from prong.model.estimate import Forward, call_model, run_batches, undisturbed

Compressible = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


def taps_of(layer: Compressible) -> int:
    """Positions of the kernel."""
    return math.prod(layer.weight.shape[2:])


class Probe:
    """A forward hook that gathers the moments of a layer's inputs and counts positions of inputs and outputs.

    Of a convolution, an input is a patch, taps first.
    """

    def __init__(self, name: str, layer: Compressible, gathers: bool, max_positions: int | None) -> None:
        self.name, self.max_positions, self.inputs, self.outputs = name, max_positions, 0, 0
        moments = Moments(1, layer.weight[0].numel(), torch.float64, layer.weight.device)
        self.moments = moments if gathers else None

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], z: Tensor) -> None:
        """Add the inputs of one call."""
        h: Tensor = args[0] if args else kwargs["input"]
        linear = isinstance(layer, nn.Linear)
        self.inputs += h.numel() // (layer.in_features if linear else layer.in_channels)
        self.outputs += z.numel() // layer.weight.shape[0]
        if self.moments is None:
            return
        rows = h.reshape(1, -1, h.shape[-1])
        if not linear:
            examples = h.shape[0] if h.dim() == len(layer.kernel_size) + 2 else 1
            rows = thin(patches(layer, h).transpose(2, 3), examples, self.max_positions).flatten(2)
        try:
            self.moments.add(rows)
        except FloatingPointError as error:
            raise FloatingPointError(f"layer {self.name!r}: {error}. Look at the data and the weights.") from None


def probe(
    model: nn.Module,
    layers: Mapping[str, Compressible],
    gather: Collection[str],
    batches: Any,
    samples: int | None,
    max_positions: int | None,
    forward: Forward | None,
) -> tuple[dict[str, Moments], dict[str, tuple[float, float]]]:
    """Moments of the inputs of layers to `gather`, and positions of inputs and outputs per example; no side effects."""
    probes = {name: Probe(name, layer, name in gather, max_positions) for name, layer in layers.items()}
    hooks = [layer.register_forward_hook(probes[name], with_kwargs=True) for name, layer in layers.items()]
    try:
        with undisturbed(model):
            seen = run_batches(model, batches, samples, forward)
    finally:
        for hook in hooks:
            hook.remove()
    moments = {name: p.moments for name, p in probes.items() if p.moments is not None}
    return moments, {name: (p.inputs / seen, p.outputs / seen) for name, p in probes.items()}


def distances(
    reference: nn.Module,
    model: nn.Module,
    outputs: Mapping[str, int],
    batches: Any,
    samples: int | None,
    forward: Forward | None,
) -> tuple[dict[str, float], float]:
    """Mean squared distances between the outputs of layers of equal names in two models, and between what these return.

    The former are E||z - z'||^2 over examples and positions, for layers of so many `outputs`; the latter is
    E||f - g||^2 / E||f - E f||^2. A model that reads attributes that a replaced layer has not, or does not call it as
    the reference does, is refused.
    """
    pairs: dict[str, tuple[list[Tensor], list[Tensor]]] = {name: ([], []) for name in outputs}
    hooks = [
        side.get_submodule(name).register_forward_hook(_keeping(kept))
        for name, both in pairs.items()
        for side, kept in zip((reference, model), both, strict=True)
    ]
    replaced = [repr(n) for n in outputs if type(model.get_submodule(n)) is not type(reference.get_submodule(n))]
    sums, rows = dict.fromkeys(pairs, 0.0), dict.fromkeys(pairs, 0)
    difference, spread = 0.0, _Spread()

    def both(_: nn.Module, batch: Any) -> None:
        nonlocal difference
        run = forward or call_model
        expected = run(reference, batch)
        try:
            found = run(model, batch)
        except AttributeError as error:
            if not replaced:
                raise
            raise ValueError(
                f"the model reads an attribute that a replaced layer has not ({error}). Replaced were "
                f"{', '.join(replaced)}: name the layers to compress without it, by layers="
            ) from error
        for i, (f, g) in enumerate(zip(tree_leaves(expected), tree_leaves(found), strict=True)):
            if isinstance(f, Tensor) and f.is_floating_point() and f.numel():
                difference += _square(f - g)
                spread.add(i, f)
        for name, (mine, its) in pairs.items():
            if len(mine) != len(its):
                raise ValueError(
                    f"layer {name or '(model)'!r} is called {len(mine)} times, but what replaces it {len(its)} "
                    "times: the model holds it elsewhere too, as in a list. Leave it out by layers="
                )
            for z, other in zip(mine, its, strict=True):
                sums[name] += _square(z - other)
                rows[name] += z.numel() // outputs[name]
            mine.clear()
            its.clear()

    try:
        with undisturbed(reference):
            run_batches(reference, batches, samples, both)
    finally:
        for hook in hooks:
            hook.remove()
    total = spread.total()
    return {n: sums[n] / max(rows[n], 1) for n in pairs}, difference / total if total > 0 else 0.0


def _keeping(kept: list[Tensor]) -> Any:
    """A forward hook that keeps copies of outputs, which later layers may overwrite."""
    return lambda layer, args, z: kept.append(z.detach().clone())


class _Spread:
    """The summed squared distance of outputs from their mean over examples; those of other shapes have other means."""

    def __init__(self) -> None:
        self._sums: dict[Any, tuple[int, Any, float]] = {}

    def add(self, which: int, f: Tensor) -> None:
        rows = f.double().reshape(f.shape[0] if f.dim() else 1, -1)
        count, total, squares = self._sums.get((which, f.shape[1:]), (0, 0.0, 0.0))
        self._sums[which, f.shape[1:]] = (count + len(rows), total + rows.sum(0), squares + _square(rows))

    def total(self) -> float:
        return sum(squares - _square(total) / count for count, total, squares in self._sums.values())


def _square(x: Tensor) -> float:
    return float(x.double().square().sum())
