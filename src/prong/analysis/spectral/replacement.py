"""A layer with the statistics of its inputs: what its low-rank replacements would be."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from prong.analysis.spectral.allocation import Option, Plan
from prong.analysis.spectral.low_rank import Ranked, expected_error, factors, rank_inputs, rank_outputs
from prong.analysis.spectral.probing import Compressible, taps_of
from prong.core.moments import Moments
from prong.layers.layout import Layout

Criterion = Literal["outputs", "weights"]
ROUNDING = 1e-14  # relative, in float64


class Subject:
    """A layer that may be replaced.

    Attributes:
        variance: E||W (h - c)||^2, the variance of its outputs; without a bias their mean square.
        varies: whether that is more than rounding errors.
    """

    def __init__(self, layer: Compressible, moments: Moments, criterion: Criterion) -> None:
        self.layer = layer
        self.taps = taps_of(layer)
        layout = Layout(tuple(layer.weight.shape))
        self.W = layout.pack(layer.weight.detach())[0].flatten(1).double()  # (out, taps * in)
        centred = layer.bias is not None
        self.c = moments.mean[0] if centred else torch.zeros_like(moments.mean[0])
        self.Sigma = moments.covariance(centred)[0]
        self.variance = expected_error(self.W, self.W @ self.c, self.c, self.Sigma)
        rounding = (ROUNDING * self.W.norm() * self.c.norm()).square()  # of the mean, in constant inputs
        self.varies = self.variance > float(rounding)
        self._corrects_bias = centred and criterion == "outputs"
        metric = self.Sigma if criterion == "outputs" else torch.eye(len(self.Sigma)).to(self.Sigma)
        self._ranked: dict[Plan, Ranked] = {"outputs": rank_outputs(self.W, metric)}
        if self.taps > 1:
            self._ranked["inputs"] = rank_inputs(self.W, metric, self.taps)

    def options(self) -> list[Option]:
        """The layer as it is, and every replacement with fewer parameters."""
        plain = sum(p.numel() for p in self.layer.parameters())
        found = [Option("plain", self.full_rank("plain"), plain, 0.0)]
        for plan, ranked in self._ranked.items():
            scale = float(ranked.errors[0]) or 1.0
            for rank, error in enumerate(ranked.errors.tolist()):
                count = rank * self._per_rank(plan) + self._bias_size
                if rank > 0 and count < plain:
                    found.append(Option(plan, rank, count, error / scale))
        return found

    def full_rank(self, plan: Plan) -> int:
        """The largest rank by a plan; of the plain layer, that of its weight as a matrix (out, taps * in)."""
        return len(self._ranked["outputs" if plan == "plain" else plan].errors) - 1

    @property
    def _bias_size(self) -> int:
        return 0 if self.layer.bias is None else self.layer.bias.numel()

    def _per_rank(self, plan: Plan) -> int:
        """Parameters per unit of rank."""
        out, patch = self.W.shape
        return patch + out if plan == "outputs" else patch // self.taps + out * self.taps

    def flops(self, option: Option, rows: tuple[float, float]) -> float:
        """Additions and multiplications at so many input and output positions."""
        out, patch = self.W.shape
        at_inputs, at_outputs = rows
        if option.plan == "plain":
            return 2 * at_outputs * out * patch
        if option.plan == "outputs":
            return 2 * at_outputs * option.rank * (patch + out)
        return 2 * option.rank * (at_inputs * (patch // self.taps) + at_outputs * out * self.taps)

    def expected(self, option: Option) -> float:
        """The share of the variance of the outputs that an option loses, from the statistics."""
        if option.plan == "plain":
            return 0.0
        D, shift = self._difference(option)
        return expected_error(D, shift, self.c, self.Sigma) / self.variance

    def _factors(self, option: Option) -> tuple[Tensor, Tensor]:
        """(first, second) as matrices: of `W`, or of its taps on top of each other."""
        assert option.plan != "plain"
        stacked = self.W if option.plan == "outputs" else self.W.reshape(-1, self.W.shape[1] // self.taps)
        return factors(stacked, self._ranked[option.plan].A, option.rank)

    def _difference(self, option: Option) -> tuple[Tensor, Tensor | None]:
        """W - W_k, and what goes into the bias: (W - W_k) c."""
        first, second = self._factors(option)
        D = self.W - (second @ first).reshape(self.W.shape)
        return D, D @ self.c if self._corrects_bias else None

    def replacement(self, option: Option) -> nn.Module | None:
        """The layer of an option, two in a Sequential; None for the plain one."""
        if option.plan == "plain":
            return None
        layer: Any = self.layer
        first, second = self._factors(option)
        _, shift = self._difference(option)
        rank, out = option.rank, self.W.shape[0]
        common = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        bias = layer.bias is not None
        kind: Any = type(layer)
        skip_init: Any = nn.utils.skip_init  # draws no random weights
        if isinstance(layer, nn.Linear):
            pair = (
                skip_init(nn.Linear, layer.in_features, rank, bias=False, **common),
                skip_init(nn.Linear, rank, out, bias=bias, **common),
            )
        else:
            kernel = {
                "kernel_size": layer.kernel_size,
                "stride": layer.stride,
                "padding": layer.padding,
                "dilation": layer.dilation,
                "padding_mode": layer.padding_mode,
            }
            one = {"kernel_size": 1}
            before, after = (kernel, one) if option.plan == "outputs" else (one, kernel)
            pair = (
                skip_init(kind, layer.in_channels, rank, bias=False, **before, **common),
                skip_init(kind, rank, out, bias=bias, **after, **common),
            )
        with torch.no_grad():
            for module, value in zip(pair, (first, second), strict=True):
                module.weight.copy_(_as_weight(value, module.weight))
                module.weight.requires_grad_(layer.weight.requires_grad)
            if bias:
                pair[1].bias.copy_(layer.bias if shift is None else layer.bias + shift)
                pair[1].bias.requires_grad_(layer.bias.requires_grad)
        return nn.Sequential(*pair)


def _as_weight(value: Tensor, like: Tensor) -> Tensor:
    """A matrix (out, taps * in) or, with outputs first, (out * taps, in), in the shape of a stored weight."""
    taps = math.prod(like.shape[2:])
    return value.reshape(like.shape[0], taps, like.shape[1]).transpose(1, 2).reshape(like.shape)


def replace_(model: nn.Module, name: str, new: nn.Module | None) -> nn.Module:
    """The model with another module wherever the one called `name` is (None: as it is); changed in place."""
    if new is None:
        return model
    old = model.get_submodule(name)
    if old is model:
        return new
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child is old:
                parent._modules[key] = new
    return model
