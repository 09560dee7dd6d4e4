"""What layers see while a model runs: moments of their inputs, and how far their outputs are from another model's."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from prong.analysis.observation import patches
from prong.core.moments import Moments
from prong.layers.conv import thin
from prong.model.estimate import Forward, run_batches, undisturbed

Compressible = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


class Probe:
    """A forward hook that gathers the moments of a layer's inputs and counts positions of inputs and outputs.

    Of a convolution, an input is a patch, taps first.
    """

    def __init__(self, name: str, layer: Compressible, gathers: bool, max_positions: int | None) -> None:
        self.name, self.gathers, self.max_positions, self.inputs, self.outputs = name, gathers, max_positions, 0, 0
        self.weights = layer.weight.numel()
        self.moments = Moments(1, layer.weight[0].numel(), torch.float64, layer.weight.device)

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], z: Tensor) -> None:
        """Add the inputs of one call."""
        h: Tensor = args[0] if args else kwargs["input"]
        self.inputs += h.numel() // (layer.weight.shape[1] * getattr(layer, "groups", 1))
        self.outputs += z.numel() // layer.weight.shape[0]
        if not self.gathers:
            return
        rows = h.reshape(1, -1, h.shape[-1])
        if not isinstance(layer, nn.Linear):
            examples = h.shape[0] if h.dim() == len(layer.kernel_size) + 2 else 1
            rows = thin(patches(layer, h).transpose(2, 3), examples, self.max_positions).flatten(2)
        try:
            self.moments.add(rows)
        except FloatingPointError as error:
            raise FloatingPointError(f"layer {self.name!r}: {error}. Look at the data and the weights.") from None


def distances(
    reference: nn.Module, model: nn.Module, outputs: Mapping[str, int], batches: Any, samples: int | None, run: Forward
) -> tuple[dict[str, float], float]:
    """Mean squared distances between the outputs of layers of equal names in two models, and between what these return.

    The former are E||z - z'||^2 over examples and positions, for layers of so many `outputs`; the latter is
    E||f - g||^2 / E||f - E f||^2, where outputs of other shapes have other means. A model that reads attributes that a
    replaced layer has not, or does not call it as the reference does, is refused.
    """
    calls: dict[str, tuple[list[Tensor], list[Tensor]]] = {name: ([], []) for name in outputs}
    squares, rows, difference = dict.fromkeys(calls, 0.0), dict.fromkeys(calls, 0), 0.0
    returned: dict[Any, tuple[int, Tensor | float, float]] = {}  # how many examples, their sum, their sum of squares

    def compare(_: nn.Module, batch: Any) -> None:
        nonlocal difference
        expected = run(reference, batch)
        try:
            found = run(model, batch)
        except AttributeError as error:
            replaced = [n for n in outputs if type(model.get_submodule(n)) is not type(reference.get_submodule(n))]
            raise ValueError(
                f"the model reads an attribute that a replaced layer has not ({error}). Replaced were "
                f"{', '.join(map(repr, replaced))}: name the layers to compress without it, by layers="
            ) from error
        for i, (f, g) in enumerate(zip(tree_leaves(expected), tree_leaves(found), strict=True)):
            if isinstance(f, Tensor) and f.is_floating_point() and f.numel():
                difference += _square(f - g)
                flat = f.double().reshape(f.shape[0] if f.dim() else 1, -1)
                count, total, square = returned.get((i, f.shape[1:]), (0, 0.0, 0.0))
                returned[i, f.shape[1:]] = (count + len(flat), total + flat.sum(0), square + _square(flat))
        for name, (mine, its) in calls.items():
            if len(mine) != len(its):
                raise ValueError(
                    f"layer {name or '(model)'!r} is called {len(mine)} times, but what replaces it {len(its)} "
                    "times: the model holds it elsewhere too, as in a list. Leave it out by layers="
                )
            squares[name] += sum(_square(z - other) for z, other in zip(mine, its, strict=True))
            rows[name] += sum(z.numel() for z in mine) // outputs[name]
            mine.clear()
            its.clear()

    with ExitStack() as hooks, undisturbed(reference):
        for name, both in calls.items():
            for side, kept in zip((reference, model), both, strict=True):
                hooks.enter_context(side.get_submodule(name).register_forward_hook(_keeping(kept)))
        run_batches(reference, batches, samples, compare)
    spread = sum(square - _square(torch.as_tensor(total)) / count for count, total, square in returned.values())
    return {n: squares[n] / max(rows[n], 1) for n in calls}, difference / spread if spread > 0 else 0.0


def _keeping(kept: list[Tensor]) -> Any:
    """A forward hook that keeps copies of outputs, which later layers may overwrite."""
    return lambda layer, args, z: kept.append(z.detach().clone())


def _square(x: Tensor) -> float:
    return float(x.double().square().sum())
