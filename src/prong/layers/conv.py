"""Convolutions, whitened across feature maps: every position of the padded map is a sample of its channels."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from prong.layers.base import Explicit, Implicit, canonical_property
from prong.layers.natural import Convolution, activation_space_is_cheaper
from prong.layers.site import Inputs, Kind, Layout, Site


def thin(rows: Tensor, examples: int, max_positions: int | None) -> Tensor:
    """At most `max_positions` evenly spaced rows per example, of rows (groups, rows, in)."""
    if max_positions is None or rows.shape[1] <= max_positions * examples:
        return rows
    stride = math.ceil(rows.shape[1] / (max_positions * examples))
    while math.gcd(stride, rows.shape[1] // examples) > 1:  # or it would visit the same columns of every map
        stride += 1
    return rows[:, ::stride]


class ConvKind(Kind):
    """Any stride, padding, padding mode, dilation and number of groups.

    The raw map is padded first and centred and whitened after; padding the whitened map would change the function
    at the borders. Padded zeros are therefore samples like any others, and are counted without being made.
    """

    padding_mode: Any
    kernel_size: tuple[int, ...]
    _reversed_padding_repeated_twice: list[int]

    @staticmethod
    def make_sites(module: Any) -> tuple[Site, ...]:  # noqa: D102
        layout = Layout(tuple(module.weight.shape), module.groups)
        return (Site("weight", None if module.bias is None else "bias", layout),)

    @property
    def channels_at(self) -> int:  # noqa: D102
        return -1 - len(self.kernel_size)

    def input_rows(self, site: Site, h: Tensor) -> Inputs:  # noqa: D102
        dims = len(self.kernel_size)
        examples = h.shape[0] if h.dim() == dims + 2 else 1
        zeros = 0.0
        if self.padding_mode == "zeros":
            zeros = float(self.positions(h) - math.prod(h.shape[-dims:])) * examples
        else:
            h = self.pad(h)
        rows = site.layout.rows(h, self.channels_at)
        kept = thin(rows, examples, self.max_positions)
        return Inputs(kept, zeros * kept.shape[1] / max(rows.shape[1], 1), examples)

    def positions(self, h: Tensor) -> int:
        """Positions of one padded map."""
        padding = self._reversed_padding_repeated_twice
        spatial = reversed(h.shape[-len(self.kernel_size) :])
        return math.prod([n + padding[2 * i] + padding[2 * i + 1] for i, n in enumerate(spatial)])

    def pad(self, h: Tensor) -> Tensor:
        """The map with its padding around it."""
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        return F.pad(h, self._reversed_padding_repeated_twice, mode=mode)

    def forward(self, h: Tensor) -> Tensor:  # noqa: D102
        (site,) = self.sites
        self.observe(site, h)
        return self.watch(site, self.convolve(site, h))

    def convolve(self, site: Site, h: Tensor) -> Tensor:
        """Torch's own convolution."""
        W, b = self.effective(site)
        z: Tensor = self._conv_forward(h, W, b)  # type: ignore[operator]
        return z


class ConvTransposeKind(Kind):
    """Transposed convolutions: the mean's share of the output depends on the position, so nothing is centred."""

    centres = False
    kernel_size: tuple[int, ...]

    @staticmethod
    def make_sites(module: Any) -> tuple[Site, ...]:  # noqa: D102
        layout = Layout(tuple(module.weight.shape), module.groups, transposed=True)
        return (Site("weight", None if module.bias is None else "bias", layout),)

    @property
    def channels_at(self) -> int:  # noqa: D102
        return -1 - len(self.kernel_size)

    def input_rows(self, site: Site, h: Tensor) -> Inputs:  # noqa: D102
        dims = len(self.kernel_size)
        examples = h.shape[0] if h.dim() == dims + 2 else 1
        rows = thin(site.layout.rows(h, self.channels_at), examples, self.max_positions)
        return Inputs(rows, 0.0, examples)

    def forward(self, h: Tensor, output_size: list[int] | None = None) -> Tensor:  # noqa: D102
        (site,) = self.sites
        self.observe(site, h)
        layer: Any = self
        output_padding = layer._output_padding(
            h, output_size, layer.stride, layer.padding, layer.kernel_size, len(layer.kernel_size), layer.dilation
        )
        operation = Convolution(site.layout, layer.stride, layer.dilation, layer.padding, tuple(output_padding))
        return self.watch(site, self.convolve(site, h, operation))

    def convolve(self, site: Site, h: Tensor, operation: Convolution) -> Tensor:
        """Torch's own transposed convolution."""
        return operation(h, *self.effective(site))


class ImplicitConvolution(Implicit):
    """Convolutions of few positions whiten their inputs; of many, the gradients of their kernels."""

    kernel_size: tuple[int, ...]

    def whitens_inputs(self, site: Site, h: Tensor, positions: int) -> bool:
        """Whether the backward is to go by way of activation space, with so many positions to a map."""
        examples = h.shape[0] if h.dim() == len(self.kernel_size) + 2 else 1
        return self.naturally(site) and activation_space_is_cheaper(site.layout, positions * examples)

    def natural_maps(self, site: Site, operation: Convolution, h: Tensor) -> Tensor:
        """The operation on a batch of maps, or on a single one."""
        if h.dim() == len(self.kernel_size) + 2:
            return self.natural(site, operation, h)
        return self.natural(site, operation, h.unsqueeze(0)).squeeze(0)


class ImplicitConv(ImplicitConvolution, ConvKind):
    """What the implicit convolutions share."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]

    def convolve(self, site: Site, h: Tensor) -> Tensor:  # noqa: D102
        if not self.whitens_inputs(site, h, self.positions(h)):
            return super().convolve(site, h)
        none = (0,) * len(self.kernel_size)
        return self.natural_maps(site, Convolution(site.layout, self.stride, self.dilation, none, none), self.pad(h))


class ImplicitConvTranspose(ImplicitConvolution, ConvTransposeKind):
    """What the implicit transposed convolutions share."""

    def convolve(self, site: Site, h: Tensor, operation: Convolution) -> Tensor:  # noqa: D102
        if not self.whitens_inputs(site, h, math.prod(h.shape[-len(self.kernel_size) :])):
            return super().convolve(site, h, operation)
        return self.natural_maps(site, operation, h)


class ImplicitConv1d(ImplicitConv, nn.Conv1d):
    """nn.Conv1d with natural gradients."""

    plain = nn.Conv1d


class ImplicitConv2d(ImplicitConv, nn.Conv2d):
    """nn.Conv2d with natural gradients."""

    plain = nn.Conv2d


class ImplicitConv3d(ImplicitConv, nn.Conv3d):
    """nn.Conv3d with natural gradients."""

    plain = nn.Conv3d


class ImplicitConvTranspose1d(ImplicitConvTranspose, nn.ConvTranspose1d):
    """nn.ConvTranspose1d with natural gradients."""

    plain = nn.ConvTranspose1d


class ImplicitConvTranspose2d(ImplicitConvTranspose, nn.ConvTranspose2d):
    """nn.ConvTranspose2d with natural gradients."""

    plain = nn.ConvTranspose2d


class ImplicitConvTranspose3d(ImplicitConvTranspose, nn.ConvTranspose3d):
    """nn.ConvTranspose3d with natural gradients."""

    plain = nn.ConvTranspose3d


class ExplicitConvolution(Explicit):
    """What the explicit convolutions share."""

    weight = canonical_property("weight")
    bias = canonical_property("bias")


class ExplicitConv(ExplicitConvolution, ConvKind):
    """What the explicit convolutions share that are not transposed."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]

    def convolve(self, site: Site, h: Tensor) -> Tensor:  # noqa: D102
        if not self.drops(site):
            return super().convolve(site, h)
        none = (0,) * len(self.kernel_size)
        operation = Convolution(site.layout, self.stride, self.dilation, none, none)
        return operation(self.whitened(site, self.pad(h), len(none)), *self.pair(site))


class ExplicitConvTranspose(ExplicitConvolution, ConvTransposeKind):
    """What the explicit transposed convolutions share."""

    def convolve(self, site: Site, h: Tensor, operation: Convolution) -> Tensor:  # noqa: D102
        if not self.drops(site):
            return super().convolve(site, h, operation)
        return operation(self.whitened(site, h, len(self.kernel_size)), *self.pair(site))


class ExplicitConv1d(ExplicitConv, nn.Conv1d):
    """nn.Conv1d in whitened coordinates."""

    plain = nn.Conv1d


class ExplicitConv2d(ExplicitConv, nn.Conv2d):
    """nn.Conv2d in whitened coordinates."""

    plain = nn.Conv2d


class ExplicitConv3d(ExplicitConv, nn.Conv3d):
    """nn.Conv3d in whitened coordinates."""

    plain = nn.Conv3d


class ExplicitConvTranspose1d(ExplicitConvTranspose, nn.ConvTranspose1d):
    """nn.ConvTranspose1d in whitened coordinates."""

    plain = nn.ConvTranspose1d


class ExplicitConvTranspose2d(ExplicitConvTranspose, nn.ConvTranspose2d):
    """nn.ConvTranspose2d in whitened coordinates."""

    plain = nn.ConvTranspose2d


class ExplicitConvTranspose3d(ExplicitConvTranspose, nn.ConvTranspose3d):
    """nn.ConvTranspose3d in whitened coordinates."""

    plain = nn.ConvTranspose3d
