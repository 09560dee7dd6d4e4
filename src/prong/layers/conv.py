"""Convolutions, whitened across feature maps: every position of the padded map is a sample of its channels."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from prong.layers.base import Explicit, Implicit, WhitenedLayer, canonical_property
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


class ConvLayer(ConvKind, WhitenedLayer):
    """What convolutions of both forms share."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    _conv_forward: Any

    def forward(self, h: Tensor) -> Tensor:  # noqa: D102
        (site,) = self.sites
        self.observe(site, h)
        return self.watch(site, self.convolve(site, h))

    def convolve(self, site: Site, h: Tensor) -> Tensor:
        """Torch's own convolution."""
        z: Tensor = self._conv_forward(h, *self.effective(site))
        return z

    def unpadded(self, site: Site) -> Convolution:
        """The convolution of a map that is padded already."""
        none = (0,) * len(self.kernel_size)
        return Convolution(site.layout, self.stride, self.dilation, none, none)


class ConvTransposeLayer(ConvTransposeKind, WhitenedLayer):
    """What transposed convolutions of both forms share."""

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


class ImplicitConv(ImplicitConvolution, ConvLayer):
    """Convolutions with natural gradients."""

    def convolve(self, site: Site, h: Tensor) -> Tensor:  # noqa: D102
        if not self.whitens_inputs(site, h, self.positions(h)):
            return super().convolve(site, h)
        return self.natural_maps(site, self.unpadded(site), self.pad(h))


class ImplicitConvTranspose(ImplicitConvolution, ConvTransposeLayer):
    """Transposed convolutions with natural gradients."""

    def convolve(self, site: Site, h: Tensor, operation: Convolution) -> Tensor:  # noqa: D102
        if not self.whitens_inputs(site, h, math.prod(h.shape[-len(self.kernel_size) :])):
            return super().convolve(site, h, operation)
        return self.natural_maps(site, operation, h)


class ExplicitConv(Explicit, ConvLayer):
    """Convolutions in whitened coordinates."""

    weight = canonical_property("weight")
    bias = canonical_property("bias")

    def convolve(self, site: Site, h: Tensor) -> Tensor:  # noqa: D102
        if not self.drops(site):
            return super().convolve(site, h)
        return self.unpadded(site)(self.whitened(site, self.pad(h), len(self.kernel_size)), *self.pair(site))


class ExplicitConvTranspose(Explicit, ConvTransposeLayer):
    """Transposed convolutions in whitened coordinates."""

    weight = canonical_property("weight")
    bias = canonical_property("bias")

    def convolve(self, site: Site, h: Tensor, operation: Convolution) -> Tensor:  # noqa: D102
        if not self.drops(site):
            return super().convolve(site, h, operation)
        return operation(self.whitened(site, h, len(self.kernel_size)), *self.pair(site))


for _form, _of in (
    (ImplicitConv, "Conv"),
    (ExplicitConv, "Conv"),
    (ImplicitConvTranspose, "ConvTranspose"),
    (ExplicitConvTranspose, "ConvTranspose"),
):
    for _dims in (1, 2, 3):  # ImplicitConv1d and so on, by whose names they are pickled
        _plain = getattr(nn, f"{_of}{_dims}d")
        _name = f"{_form.__name__}{_dims}d"
        globals()[_name] = type(_name, (_form, _plain), {"plain": _plain, "__module__": __name__})
