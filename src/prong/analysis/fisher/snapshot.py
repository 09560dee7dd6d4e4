"""A model as a function of a change of its parameters, to be differentiated: the trained model is not even run.

Changes are of the canonical parameters or in whitened coordinates, in which the canonical ones are linear: W = V U and
b = d - W c for every whitened site. U is what the layer or its optimizer computes with; where there is only P, it is
the symmetric root P^(1/2).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from prong.analysis.conditioning import inverse_covariance
from prong.core.moments import full_precision
from prong.core.whitening import Whitening, to_canonical
from prong.gradients.outputs import Distribution
from prong.layers import Explicit, Kind, Site
from prong.layers.base import trained_name
from prong.model.estimate import Forward, as_batches, call_model, inputs_of, undisturbed
from prong.model.whiten import check_model, fold_, whitened_layers
from prong.options import check_choice

Coordinates = Literal["canonical", "whitened"]


class Chart(NamedTuple):
    """The whitened coordinates of one site."""

    names: dict[str, str]  # of weight and bias in the plain model, and in whitened coordinates: 0.weight -> 0.V
    site: Site
    whitening: Whitening | None  # None: U = I and c = 0


def full_name(layer: str, parameter: str) -> str:
    """The name of a layer's parameter in the model."""
    return f"{layer}.{parameter}".removeprefix(".")


def charts(model: nn.Module) -> list[Chart]:
    """The charts of a model's whitened layers, plain ones in the hands of an optimizer included."""
    found = []
    for layer_name, layer in whitened_layers(model):
        for site in layer.sites:
            own = [name for name in (site.weight, site.bias) if name is not None]
            names = {full_name(layer_name, name): full_name(layer_name, trained_name(name)) for name in own}
            found.append(Chart(names, site, _whitening_of(layer, site)))
    return found


def canonical_changes(charts: Iterable[Chart], changes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Changes of the canonical parameters, from those of whitened ones; both by the names of the plain model."""
    parts: dict[str, list[Tensor]] = {}
    for chart in charts:
        weight, *bias = chart.names
        pair = chart.site.packed(changes[weight], changes[bias[0]] if bias else None)
        mapped = chart.site.unpacked(*(pair if chart.whitening is None else to_canonical(*pair, chart.whitening)))
        for name, value in zip(chart.names, mapped, strict=False):
            assert value is not None
            parts.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in parts.items()}  # attention's are of three sites


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

    Attributes:
        groups: the names of the parameters of each block, in the coordinates.
        plain_names: the names of the chosen parameters in the coordinates, and in the plain model.
        slices: where they are in the vector of all.
        zero: that vector at no change, where derivatives are taken.
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
        check_choice("distribution", distribution, get_args(Distribution))
        check_choice("coordinates", coordinates, get_args(Coordinates))
        self.distribution, self._takes_pairs = distribution, forward is None
        with torch.inference_mode(False), torch.no_grad():
            self.caller = _Caller(_plain_copy(model), forward or call_model)
            self.charts = charts(model) if coordinates == "whitened" else []
            renamed = {old: new for chart in self.charts for old, new in chart.names.items()}
            parameters = {name: p for name, p in self.caller.model.named_parameters() if p.is_floating_point()}
            trained = {renamed.get(name, name): name for name, p in parameters.items() if p.requires_grad}
            if not trained:
                raise ValueError("no parameter of this model is trained: all have requires_grad=False")
            self.groups = _choose(trained, names)
            chosen = {member for members in self.groups.values() for member in members}
            self.plain_names = {new: old for new, old in trained.items() if new in chosen}
            self._parameters = {name: p.detach() for name, p in parameters.items()}
            own = [self._parameters[old] for old in self.plain_names.values()]
            self._sizes = [p.numel() for p in own]
            ends = pairwise([0, *accumulate(self._sizes)])
            self.slices = {name: slice(*pair) for name, pair in zip(self.plain_names, ends, strict=True)}
            self.zero = own[0].new_zeros(sum(self._sizes))

    def output(self, change: Tensor, batch: Any) -> Tensor:
        """The model's output when the parameters are changed by a vector (size,) in the coordinates."""
        changes = {name: torch.zeros_like(p) for name, p in self._parameters.items()}
        for name, part in zip(self.plain_names.values(), torch.split(change, self._sizes), strict=True):
            changes[name] = part.view(changes[name].shape)
        changes |= canonical_changes(self.charts, changes)
        named = {f"model.{name}": p + changes[name].to(p.dtype) for name, p in self._parameters.items()}
        output: Tensor = functional_call(self.caller, named, (batch,))
        return output

    def pulled_back(self, batch: Any, rows: Tensor) -> Tensor:
        """The gradients (examples, rows, size) of every example's output, weighted by rows (examples, rows, ...)."""

        def of_example(example: Any, own_rows: Tensor) -> Tensor:
            alone = tree_map_only(Tensor, lambda x: x.unsqueeze(0), example)
            _, backward = vjp(lambda change: self.output(change, alone).squeeze(0), self.zero)  # type: ignore[misc]
            pulled: Tensor = vmap(lambda row: backward(row)[0])(own_rows)
            return pulled

        examples_at = tree_map(lambda x: 0 if isinstance(x, Tensor) else None, batch)
        with _differentiable("example by example "):
            gradients: Tensor = vmap(of_example, in_dims=(examples_at, 0))(batch, rows)
            return gradients

    def times_fisher(self, batch: Any, v: Tensor) -> Tensor:
        """The sum of J_n^T H_n J_n v over the examples of a batch; H_n J_n v is how the mean labels move along v."""

        def output(change: Tensor) -> Tensor:
            return self.output(change, batch)

        with _differentiable(), warnings.catch_warnings():  # torch's forward mode is set up by means that it deprecates
            warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
            _, moved = jvp(lambda change: mean_label(output(change), self.distribution), (self.zero,), (v,))  # type: ignore[misc]
            product: Tensor = vjp(output, self.zero)[1](moved)[0]
            return product

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
            shape = tuple(output.shape)
            raise ValueError(f"{examples} examples, but they are not the first dimension of an output of shape {shape}")
        if self.distribution == "categorical" and output.dim() < 2:
            raise ValueError("categorical outputs have classes at dimension 1; for one number each use bernoulli")
        if not torch.isfinite(output).all():
            raise FloatingPointError("the model's output is not finite: look at the data and the parameters")
        return output

    def batches(self, batches: Any) -> Iterator[Any]:
        """What the model is called with, batch by batch: targets are left out."""
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
        """Without grad or inference mode, autocast, fused kernels (no forward-mode derivatives), or random effects."""
        with undisturbed(self.caller), full_precision(self.zero), sdpa_kernel(SDPBackend.MATH):
            yield


def mean_label(output: Tensor, distribution: Distribution) -> Tensor:
    """The mean of the label (its probabilities), whose derivative is H, the Fisher of the output distribution.

    Labels are an exponential family with the output as its natural parameters. Those of all positions of an example are
    independent, and H is a sum over them; docs/fisher.md has the table.
    """
    if distribution == "categorical":
        return output.softmax(1)
    return output.sigmoid() if distribution == "bernoulli" else output


def each_exact_row(output: Tensor, distribution: Distribution) -> Iterator[Tensor]:
    """Rows s with sum_r s_r s_r^T = H for every example, each shaped as the output; as many as it has outputs.

    Categorical ones are sqrt(p_y) (e_y - p), the scores of labels, weighted by their probabilities.
    """
    p = mean_label(output, distribution)
    for i in range(output[0].numel()):
        e = torch.zeros_like(output).reshape(len(output), -1)
        e[:, i] = 1
        e = e.view(output.shape)
        if distribution == "categorical":
            yield p.sqrt() * e - p * (p.sqrt() * e).sum(1, keepdim=True)
        else:
            yield (p * (-output).sigmoid()).sqrt() * e if distribution == "bernoulli" else e


def as_ordinary(x: Tensor) -> Tensor:
    """The tensor itself, or a copy of one made in inference mode, which cannot be differentiated."""
    return x.clone() if x.is_inference() else x


@contextmanager
def _differentiable(how: str = "") -> Iterator[None]:
    """Say so where torch.func cannot differentiate a model."""
    try:
        yield
    except RuntimeError as error:
        raise ValueError(f"the model cannot be differentiated {how}with torch.func: {error}") from error


def count_examples(batch: Any) -> int:
    """The first dimension of the batch's tensors, which must agree."""
    shapes = [tuple(x.shape) for x in tree_leaves(batch) if isinstance(x, Tensor)]
    counts = {shape[0] if shape else 0 for shape in shapes}
    if len(counts) != 1 or 0 in counts:
        found = ", ".join(map(str, shapes)) or "none"
        raise ValueError(f"examples are the first dimension of every tensor of a batch; got shapes {found}")
    return counts.pop()


def pieces(batch: Any, chunk: int) -> Iterator[Any]:
    """The batch in pieces of at most `chunk` examples."""
    for start in range(0, count_examples(batch), chunk):
        yield tree_map_only(Tensor, itemgetter(slice(start, start + chunk)), batch)


def _plain_copy(model: nn.Module) -> nn.Module:
    """A folded copy in eval mode, without backward hooks: torch.func cannot run them, and nothing needs them."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise ValueError(f"layer {name!r} normalises by the batch in eval mode; give it track_running_stats=True")
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


def _choose(trained: Iterable[str], names: Iterable[str] | None) -> dict[str, list[str]]:
    """The parameters of each block: those of a layer or of everything below it, or one. None: one block per layer."""
    groups: dict[str, list[str]] = {}
    if names is None:
        for member in trained:
            groups.setdefault(member.rpartition(".")[0], []).append(member)
        return groups
    for name in [names] if isinstance(names, str) else names:
        groups[name] = [m for m in trained if name in ("", m) or m.startswith(f"{name}.")]
        if not groups[name]:
            raise ValueError(f"no trained parameter is {name!r} or in such a layer. There are: {', '.join(trained)}")
    return groups


def _whitening_of(layer: Kind, site: Site) -> Whitening | None:
    """U and c of a site, in the precision of its weight; None is the identity."""
    w = site.whitening
    if w is None:
        return None
    weight, bias = layer.pair(site)
    U = _symmetric_root(inverse_covariance(w, torch.float64), site.label) if w.U is None else w.U
    # In a plain or implicit layer a bias that is not trained stays, and then nothing absorbs the mean.
    moves = isinstance(layer, Explicit) or (bias is not None and bias.requires_grad)
    return Whitening(w.c if moves else None, w.eps, U=U).map(lambda x: x.to(weight))


def _symmetric_root(P: Tensor, label: str) -> Tensor:
    """U = P^(1/2), symmetric; of a P that rounding spoiled there is none."""
    lam, E = torch.linalg.eigh((P + P.mT) / 2)
    if (lam <= 0).any():
        raise ValueError(
            f"layer {label!r}: its stored inverse covariance has an eigenvalue of {lam.min().item():.3g}, so no root. "
            "Refresh it with a larger damping, or whiten without `storage`."
        )
    root: Tensor = (E * lam.sqrt().unsqueeze(-2)) @ E.mT
    return root
