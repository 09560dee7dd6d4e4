"""A model as a function of a change of its parameters, to be differentiated: the trained model is not even run."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map_only

from prong.analysis.fisher.coordinates import COORDINATES, Coordinates, charts
from prong.core.moments import full_precision
from prong.gradients.outputs import DISTRIBUTIONS, Distribution
from prong.model.estimate import Forward, as_batches, call_model, inputs_of, undisturbed
from prong.model.whiten import check_model, fold_


class _Caller(nn.Module):
    """A model together with the way to run it on a batch, so that both can be called with other parameters."""

    def __init__(self, model: nn.Module, run: Forward) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self, batch: Any) -> Any:
        return self.run(self.model, batch)


class Snapshot:
    """A plain copy of a model in eval mode, and the coordinates in which its Fisher is wanted.

    Copies of whitened layers are folded: their gradients are ordinary ones, and nothing that a training run gathers
    sees them. Parameters that are not trained (`requires_grad=False`) are constants.
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
        if distribution not in DISTRIBUTIONS:
            raise ValueError(f"distribution is one of {', '.join(DISTRIBUTIONS)}, got {distribution!r}")
        if coordinates not in COORDINATES:
            raise ValueError(f"coordinates are {' or '.join(map(repr, COORDINATES))}, got {coordinates!r}")
        self.distribution, self._takes_pairs = distribution, forward is None
        with ordinary():
            self.caller = _Caller(plain_copy(model), forward or call_model)
            parameters = {name: p for name, p in self.caller.model.named_parameters() if p.is_floating_point()}
            maps = charts(model) if coordinates == "whitened" else []
            renamed = {plain: new for chart in maps for plain, new in chart.names.items()}
            trained = {renamed.get(name, name): name for name, p in parameters.items() if p.requires_grad}
            if not trained:
                raise ValueError("no parameter of this model is trained: all have requires_grad=False")
            self.groups = choose(trained, names)  # the parameters of each block, by their names in the coordinates
            chosen = {member for members in self.groups.values() for member in members}
            self.plain_names = {new: old for new, old in trained.items() if new in chosen}
            wanted = set(self.plain_names.values())
            self.charts = [chart for chart in maps if wanted & set(chart.names)]
            mapped = {name for chart in self.charts for name in chart.names}
            self._parameters = {name: p.detach() for name, p in parameters.items() if name in wanted | mapped}
            self._sizes = [parameters[old].numel() for old in self.plain_names.values()]
            ends = torch.tensor([0, *self._sizes]).cumsum(0).tolist()
            # Where each parameter is in the vector of all, and that vector of zeros: the change to differentiate at.
            self.slices = {new: slice(*ends[i : i + 2]) for i, new in enumerate(self.plain_names)}
            self.zero = next(iter(self._parameters.values())).new_zeros(ends[-1])

    @property
    def size(self) -> int:
        """How many parameters there are."""
        return len(self.zero)

    def output(self, change: Tensor, batch: Any) -> Tensor:
        """The model's output when the parameters are changed by a vector (size,) in the coordinates."""
        changes = {name: torch.zeros_like(p) for name, p in self._parameters.items()}
        for old, part in zip(self.plain_names.values(), torch.split(change, self._sizes), strict=True):
            changes[old] = part.view(changes[old].shape)
        for chart in self.charts:
            changes |= chart.to_canonical(changes)
        named = {f"model.{name}": p + changes[name].to(p.dtype) for name, p in self._parameters.items()}
        output: Tensor = functional_call(self.caller, named, (batch,))
        return output

    def checked_output(self, batch: Any) -> Tensor:
        """The model's output on a batch of examples; what cannot be the distribution's parameters is refused."""
        examples = count_examples(batch)
        try:
            output = self.caller(batch)
        except (RuntimeError, IndexError) as error:
            raise ValueError(f"the model does not take this batch: {error}") from error
        if not isinstance(output, Tensor):
            raise TypeError(
                f"the model's output is one tensor of the distribution's parameters, got {type(output).__name__}. "
                "Pass forward=lambda model, batch: ... that picks it."
            )
        if output.dim() == 0 or output.shape[0] != examples:
            raise ValueError(
                f"{examples} examples gave an output of shape {tuple(output.shape)}. Examples are the first dimension "
                "of inputs and of the output; the output is not a mean over them."
            )
        if self.distribution == "categorical" and output.dim() < 2:
            raise ValueError("categorical outputs have classes at dimension 1; for one number each use bernoulli")
        if not torch.isfinite(output).all():
            raise FloatingPointError("the model's output is not finite: look at the data and the parameters")
        return output

    def batches(self, batches: Any) -> Iterator[Any]:
        """What the model is called with, batch by batch: targets are left out. Tensors of inference mode are copied."""
        seen = False
        for batch in as_batches(batches):
            seen = True
            given = inputs_of(batch) if self._takes_pairs else batch
            given = dict(given) if isinstance(given, Mapping) else given  # those of tokenizers are no dicts
            yield tree_map_only(Tensor, as_ordinary, given)
        if not seen:
            raise ValueError("there were no batches to take the Fisher over")

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Without grad mode, autocast, fused kernels (no forward-mode derivatives), or a change of random state."""
        with undisturbed(self.caller), full_precision(self.zero), sdpa_kernel(SDPBackend.MATH):
            yield


@contextmanager
def ordinary() -> Iterator[None]:
    """Without inference mode, whose tensors cannot be differentiated, and without grad mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def as_ordinary(x: Tensor) -> Tensor:
    """The tensor itself, or a copy of one that was made in inference mode; under `ordinary`."""
    return x.clone() if x.is_inference() else x


@contextmanager
def differentiable(how: str = "") -> Iterator[None]:
    """Say so where torch.func cannot differentiate a model."""
    try:
        yield
    except RuntimeError as error:
        raise ValueError(f"the model cannot be differentiated {how}with torch.func: {error}") from error


def plain_copy(model: nn.Module) -> nn.Module:
    """A folded copy in eval mode, without backward hooks: torch.func cannot run them, and nothing needs them."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise ValueError(
                f"layer {name!r} normalises by the statistics of the batch even in eval mode, so an example has no "
                "output of its own. Give it track_running_stats=True."
            )
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters(recurse=False)):
            raise ValueError(f"layer {name!r} is lazy; run one forward first, so that it knows its size")
    try:
        plain = fold_(copy.deepcopy(model))
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"the Fisher is taken from a copy of the model, and none can be made: {error}") from error
    for module in plain.modules():
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
    return plain.eval()


def choose(trained: Iterable[str], names: Iterable[str] | None) -> dict[str, list[str]]:
    """The parameters of each block: those of a layer or of everything below it, or one. None: one block per layer."""
    groups: dict[str, list[str]] = {}
    if names is None:
        for member in trained:
            groups.setdefault(member.rpartition(".")[0], []).append(member)
        return groups
    for name in [names] if isinstance(names, str) else names:
        groups[name] = [m for m in trained if name in ("", m) or m.startswith(f"{name}.")]
        if not groups[name]:
            raise ValueError(
                f"no trained parameter is {name!r} or in a layer of that name. There are: {', '.join(trained)}"
            )
    return groups


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in order; what else there is in tuples, lists and dicts is passed on as it is."""
    return [x for x in tree_leaves(batch) if isinstance(x, Tensor)]


def with_tensors(batch: Any, tensors: Iterable[Tensor]) -> Any:
    """The batch with other tensors in the places of its own."""
    new = iter(tensors)
    return tree_map_only(Tensor, lambda _: next(new), batch)


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
        yield with_tensors(batch, [x[start : start + chunk] for x in tensors_of(batch)])
