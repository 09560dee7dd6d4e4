"""A layer with the statistics of its inputs: what its low-rank replacements would be."""

from __future__ import annotations

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
        self.layer, self.taps = layer, taps_of(layer)
        self.W = Layout(tuple(layer.weight.shape)).pack(layer.weight.detach())[0].flatten(1).double()  # taps first
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
        out, patch = self.W.shape
        plain = sum(p.numel() for p in self.layer.parameters())
        per_rank = {"outputs": patch + out, "inputs": patch // self.taps + out * self.taps}
        found = [Option("plain", self.full_rank("plain"), plain, 0.0)]
        for plan, ranked in self._ranked.items():
            scale = float(ranked.errors[0]) or 1.0
            for rank, error in enumerate(ranked.errors.tolist()):
                count = rank * per_rank[plan] + (0 if self.layer.bias is None else out)
                if rank > 0 and count < plain:
                    found.append(Option(plan, rank, count, error / scale))
        return found

    def full_rank(self, plan: Plan) -> int:
        """The largest rank by a plan; of the plain layer, that of its weight as a matrix (out, taps * in)."""
        return len(self._ranked["outputs" if plan == "plain" else plan].errors) - 1

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
        _, _, D, shift = self._factors(option)
        return expected_error(D, shift, self.c, self.Sigma) / self.variance

    def _factors(self, option: Option) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """First and second matrix of `W` or of its taps on top of each other, W - W_k, and (W - W_k) c for the bias."""
        stacked = self.W if option.plan == "outputs" else self.W.reshape(-1, self.W.shape[1] // self.taps)
        first, second = factors(stacked, self._ranked[option.plan].A, option.rank)
        D = self.W - (second @ first).reshape(self.W.shape)
        return first, second, D, D @ self.c if self._corrects_bias else None

    @torch.no_grad()
    def replacement(self, option: Option) -> nn.Module:
        """The layers of an option, one or two in a Sequential."""
        layer: Any = self.layer
        if option.plan == "plain":
            return self.layer
        first, second, _, shift = self._factors(option)
        before, after = {}, {}
        if not isinstance(layer, nn.Linear):
            names = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
            before, after = {name: getattr(layer, name) for name in names}, {"kernel_size": 1}
            before, after = (before, after) if option.plan == "outputs" else (after, before)
        common = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        make: Any = nn.utils.skip_init  # draws no random weights
        pair = (
            make(type(layer), layer.weight.shape[1], option.rank, bias=False, **before, **common),
            make(type(layer), option.rank, len(self.W), bias=layer.bias is not None, **after, **common),
        )
        for module, value in zip(pair, (first, second), strict=True):
            shape = (
                module.weight.shape
            )  # the value's rows are (out, taps * in) or, with outputs first, (out * taps, in)
            module.weight.copy_(value.reshape(shape[0], taps_of(module), shape[1]).transpose(1, 2).reshape(shape))
            module.weight.requires_grad_(layer.weight.requires_grad)
        if layer.bias is not None:
            pair[1].bias.copy_(layer.bias if shift is None else layer.bias + shift)
            pair[1].bias.requires_grad_(layer.bias.requires_grad)
        return nn.Sequential(*pair)
