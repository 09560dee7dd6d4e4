"""A model as a function of its parameters, to be differentiated: the trained model is not even run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from prong.analysis.fisher.coordinates import Coordinates, charts, check_coordinates
from prong.analysis.fisher.outputs import check_distribution, check_output
from prong.core.precision import full_precision
from prong.gradients.outputs import Distribution
from prong.model.estimate import Forward, as_batches, call_model, inputs_of, undisturbed
from prong.model.whiten import check_model, fold_


class _Caller(nn.Module):
    """A model together with the way to run it on a batch, so that both can be called with other parameters."""

    def __init__(self, model: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.model = model
        self.run = forward

    def forward(self, batch: Any) -> Any:
        """The model's output on a batch."""
        return self.run(self.model, batch)


class Snapshot:
    """A plain copy of a model in eval mode, and the coordinates in which its Fisher is wanted.

    Copies of whitened layers are folded: their gradients are ordinary ones, and nothing that a training run gathers
    sees them. Parameters that are not trained (`requires_grad=False`) are constants.

    Attributes:
        slices: where each parameter is in the vector of all, by its name in the coordinates.
        size: the length of that vector.
    """

    def __init__(
        self,
        model: nn.Module,
        distribution: Distribution,
        coordinates: Coordinates = "canonical",
        names: Iterable[str] | None = None,
        forward: Forward | None = None,
    ) -> None:
        check_model(model)
        check_distribution(distribution)
        check_coordinates(coordinates)
        self.distribution = distribution
        self._takes_pairs = forward is None
        with ordinary():
            self._take(model, coordinates, names, forward)

    def _take(
        self, model: nn.Module, coordinates: Coordinates, names: Iterable[str] | None, forward: Forward | None
    ) -> None:
        self.caller = _Caller(plain_copy(model), forward or call_model)
        parameters = {name: p for name, p in self.caller.model.named_parameters() if p.is_floating_point()}
        maps = charts(model) if coordinates == "whitened" else []
        renamed = {name: chart.whitened_name(name) for chart in maps for name in chart.names}
        trained = {renamed.get(name, name): name for name, p in parameters.items() if p.requires_grad}
        if not trained:
            raise ValueError("no parameter of this model is trained: all have requires_grad=False")
        self.groups = choose(trained, names)
        chosen = {member for members in self.groups.values() for member in members}
        self.plain_names = {new: old for new, old in trained.items() if new in chosen}
        self.charts = [chart for chart in maps if set(chart.names) & set(self.plain_names.values())]
        needed = {name for chart in self.charts for name in chart.names} | set(self.plain_names.values())
        self.parameters = {name: p.detach() for name, p in parameters.items() if name in needed}
        self.slices: dict[str, slice] = {}
        self.size = 0
        for new, old in self.plain_names.items():
            self.slices[new] = slice(self.size, self.size + self.parameters[old].numel())
            self.size = self.slices[new].stop
        self.like = next(iter(self.parameters.values())).new_empty(0)

    def output(self, parameters: Mapping[str, Tensor], batch: Any) -> Tensor:
        """The model's output with these canonical parameters."""
        named = {f"model.{name}": p for name, p in parameters.items()}
        output: Tensor = functional_call(self.caller, named, (batch,))
        return output

    def checked_output(self, batch: Any) -> Tensor:
        """The model's output on a batch of examples, as numbers; what cannot be right is refused."""
        examples = count_examples(batch)
        try:
            output = self.caller(batch)
        except (RuntimeError, IndexError) as error:
            raise ValueError(f"the model does not take this batch: {error}") from error
        output = check_output(output, examples, self.distribution)
        if not torch.isfinite(output).all():
            raise FloatingPointError("the model's output is not finite: look at the data and the parameters")
        return output

    def pull(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """A canonical gradient as a vector (size,) in the coordinates."""
        mapped = dict(gradients)
        for chart in self.charts:
            mapped |= chart.pull(gradients)
        return torch.cat([mapped[name].reshape(-1) for name in self.plain_names.values()])

    def push(self, vector: Tensor) -> dict[str, Tensor]:
        """A direction (size,) in the coordinates as one of the canonical parameters."""
        directions = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        for new, old in self.plain_names.items():
            directions[old] = vector[self.slices[new]].view(self.parameters[old].shape)
        mapped = dict(directions)
        for chart in self.charts:
            mapped |= chart.push(directions)
        return mapped

    def batches(self, batches: Any) -> Iterator[Any]:
        """What the model is called with, batch by batch: targets are left out. Tensors of inference mode are copied."""
        seen = False
        for batch in as_batches(batches):
            seen = True
            yield _mapped(inputs_of(batch) if self._takes_pairs else batch, as_ordinary)
        if not seen:
            raise ValueError("there were no batches to take the Fisher over")

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Without grad mode, autocast, fused kernels (no forward-mode derivatives), or a change of random state."""
        with undisturbed(self.caller), full_precision(self.like), sdpa_kernel(SDPBackend.MATH):
            yield


@contextmanager
def ordinary() -> Iterator[None]:
    """Without inference mode, whose tensors cannot be differentiated, and without grad mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def as_ordinary(x: Tensor) -> Tensor:
    """The tensor itself, or a copy of one that was made in inference mode; under `ordinary`."""
    return x.clone() if x.is_inference() else x


def plain_copy(model: nn.Module) -> nn.Module:
    """A folded copy in eval mode, without backward hooks: torch.func cannot run them, and nothing needs them.

    Raises:
        ValueError: a model whose output on an example depends on other examples, or of which no copy can be made.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise ValueError(
                f"layer {name!r} normalises by the statistics of the batch even in eval mode, so an example has no "
                "output of its own. Give it track_running_stats=True."
            )
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters(recurse=False)):
            raise ValueError(f"layer {name!r} is lazy; run one forward first, so that it knows its size")
    try:
        plain = copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"the Fisher is taken from a copy of the model, and none can be made: {error}") from error
    fold_(plain)
    for module in plain.modules():
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
    return plain.eval()


def choose(trained: Mapping[str, str], names: Iterable[str] | None) -> dict[str, list[str]]:
    """The parameters of each block: those of a layer or of everything below it, or one. None: one block per layer."""
    if names is None:
        groups: dict[str, list[str]] = {}
        for member in trained:
            groups.setdefault(member.rpartition(".")[0], []).append(member)
        return groups
    groups = {}
    for name in [names] if isinstance(names, str) else names:
        groups[name] = [m for m in trained if name in ("", m) or m.startswith(f"{name}.")]
        if not groups[name]:
            raise ValueError(
                f"no trained parameter is {name!r} or in a layer of that name. There are: {', '.join(trained)}"
            )
    return groups


# Batches are tensors in tuples, lists and mappings; what is not a tensor is passed on as it is. ----------------------


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in order."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [x for value in batch.values() for x in tensors_of(value)]
    if isinstance(batch, tuple | list):
        return [x for value in batch for x in tensors_of(value)]
    return []


def with_tensors(batch: Any, tensors: Iterator[Tensor]) -> Any:
    """The batch with other tensors in the places of its own."""
    if isinstance(batch, Tensor):
        return next(tensors)
    if isinstance(batch, Mapping):
        return {key: with_tensors(value, tensors) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [with_tensors(value, tensors) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def count_examples(batch: Any) -> int:
    """The first dimension of the batch's tensors, which must agree."""
    counts = {int(x.shape[0]) if x.dim() else 0 for x in tensors_of(batch)}
    if len(counts) != 1 or 0 in counts:
        found = ", ".join(str(tuple(x.shape)) for x in tensors_of(batch))
        raise ValueError(
            f"examples are the first dimension of every tensor of a batch, at least one; got shapes {found or 'none'}"
        )
    return counts.pop()


def pieces(batch: Any, chunk: int) -> Iterator[Any]:
    """The batch in pieces of at most `chunk` examples."""
    for start in range(0, count_examples(batch), chunk):
        yield _mapped(batch, lambda x, start=start: x[start : start + chunk])  # type: ignore[misc]


def _mapped(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    return with_tensors(batch, iter([function(x) for x in tensors_of(batch)]))
